"""Losses and gradients by TRL's own trainers, on the tokens of our data sets."""

import torch
from datasets import Dataset
from preference_cases import NUM_ROWS, Answer, Case, Inputs, Measured
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Trainer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS = {
    "DPO": (DPOConfig, DPOTrainer),
    "KTO": (KTOConfig, KTOTrainer),
    "Reward": (RewardConfig, RewardTrainer),
    "CPO": (CPOConfig, CPOTrainer),
    "ORPO": (ORPOConfig, ORPOTrainer),
}


def measure_trl(case: Case, inputs: Inputs) -> Measured:
    trainer = make_trainer(case, inputs)
    model = trainer.model.train()
    batch = make_batch(case, inputs, model.config.pad_token_id)
    loss = sum_orpo(trainer, model, batch) if "put in" in case.note else trainer.compute_loss(model, batch)
    loss.backward()
    return Measured(float(loss.detach()), {name: param.grad for name, param in model.named_parameters()})


def make_trainer(case: Case, inputs: Inputs) -> Trainer:
    make_config, make = TRAINERS[case.trainer]
    policy, reference = inputs.find_models(case)
    auto_class = AutoModelForSequenceClassification if case.trainer == "Reward" else AutoModelForCausalLM
    models = {"model": auto_class.from_pretrained(policy, dtype=torch.float32)}
    if case.trainer in ("DPO", "KTO"):
        models["ref_model"] = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    args = make_config(
        output_dir=str(inputs.folder / "trl"), per_device_train_batch_size=NUM_ROWS, max_length=None, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to=[], **case.theirs,
    )  # fmt: skip
    return make(
        **models,
        args=args,
        train_dataset=Dataset.from_list(inputs.rows[case.data]),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )


def make_batch(case: Case, inputs: Inputs, pad_id: int) -> dict[str, Tensor]:
    """The rows as the trainer's collator pads them, on the right."""
    pairs = inputs.read_answers(case)
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    rows = inputs.rows[case.data]
    match case.trainer:
        case "DPO":
            return pad([*first, *second], pad_id)
        case "KTO":
            unrelated = {f"KL_{name}": value for name, value in pad(second, pad_id).items()}
            return pad(first, pad_id) | unrelated | {"label": torch.tensor([row["label"] for row in rows])}
        case "Reward":
            batch = pad([*first, *second], pad_id)
            del batch["completion_mask"]
            return batch | ({"margin": torch.tensor([row["margin"] for row in rows])} if case.data == "margins" else {})
        case "CPO" | "ORPO":
            return pad_sides(first, second, pad_id)
    raise ValueError(case.trainer)


def pad(answers: list[Answer], pad_id: int) -> dict[str, Tensor]:  # (answers, longest) each
    ids = pad_sequence([answer.ids for answer in answers], batch_first=True, padding_value=pad_id)
    masks = pad_sequence([answer.is_trained.long() for answer in answers], batch_first=True)
    ones = pad_sequence([torch.ones_like(answer.ids) for answer in answers], batch_first=True)
    return {"input_ids": ids, "attention_mask": ones, "completion_mask": masks}


def pad_sides(chosen: list[Answer], rejected: list[Answer], pad_id: int) -> dict[str, Tensor]:
    """Both sides as long as the longest sequence."""
    padded, batch = pad([*chosen, *rejected], pad_id), {}
    labels = torch.where(padded["completion_mask"] == 1, padded["input_ids"], -100)
    columns = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"], "labels": labels}
    for name, column in columns.items():
        batch[f"chosen_{name}"], batch[f"rejected_{name}"] = column.split(len(chosen))
    return batch


def sum_orpo(trainer: ORPOTrainer, model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """TRL's odds ratio, and the negative log-likelihood of the chosen answers' tokens alone."""
    chosen, rejected, chosen_logits, *_ = trainer.concatenated_forward(model, batch)
    losses = trainer.odds_ratio_loss(chosen, rejected)[0]
    nll = cross_entropy(chosen_logits.flatten(0, 1), batch["chosen_labels"][:, 1:].flatten())
    return nll - losses.mean()
