"""What benchmarks/preferences_against_trl.py compares: cases, models and rows, and the sequences of a data set.

One batch of NUM_ROWS random rows; models are random Llamas in fp32, and the reference is another one than the policy.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from forked import run_forked
from processes import flags
from tiny_models import FAMILIES, save_model, save_tokenizer
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mini_trainer.data.columns.base import list_sequences
from mini_trainer.data.tokenized.reader import TokenizedData

NUM_ROWS = 8
WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon"]
FORMATS = {"pairs": "preference", "margins": "preference", "texts": "preference", "feedback": "feedback"}  # of the data


@dataclass(frozen=True)
class Case:
    """A loss as train.py and a trainer of TRL have it."""

    name: str  # of the loss, also to the plain loop
    trainer: str  # of TRL
    ours: dict  # options of train.py
    theirs: dict  # options of the trainer's config
    data: str = "pairs"
    swaps_models: bool = False  # trains the other model against this one
    note: str = ""

    @property
    def beta(self) -> float:
        return self.ours.get("preference_beta", 0.1)

    @property
    def command(self) -> str:
        """The options, as train.py takes them, and what is special about data and models."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self.ours.items()]
        words += {"margins": ["with margins"], "texts": ["of texts"]}.get(self.data, [])
        return " ".join(words + ["models swapped"] * self.swaps_models)

    @property
    def nll_weight(self) -> float:
        return self.ours.get("preference_nll_weight", 1.0 if self.name == "orpo" else 0.0)


def make_dpo(name: str, *losses: str, ours: dict | None = None, **theirs: object) -> Case:
    theirs = {"loss_type": list(losses), "beta": 0.1} | theirs
    return Case(name, "DPO", {"preference_loss": name} | (ours or {}), theirs)


WEIGHTS = dict(desirable_weight=3.0, undesirable_weight=1.0)
SIMPO = dict(preference_loss="simpo", preference_beta=2.0, preference_gamma=0.5)
THEIR_SIMPO = dict(loss_type="simpo", beta=2.0, simpo_gamma=0.5)
CASES = [
    make_dpo("dpo", "sigmoid"),
    make_dpo("ipo", "ipo"),
    make_dpo("apo-zero", "apo_zero"),
    make_dpo("dpo", "sigmoid", "sft", ours=dict(preference_nll_weight=0.5), loss_weights=[1.0, 0.5]),
    Case("kto", "KTO", dict(objective="kto"), dict(beta=0.1), "feedback"),
    Case(
        "kto",
        "KTO",
        dict(objective="kto", kto_weight_ratio=3.0),
        dict(beta=0.1) | WEIGHTS,
        "feedback",
        swaps_models=True,
    ),
    Case("reward", "Reward", dict(objective="reward"), {}),
    Case("reward", "Reward", dict(objective="reward"), {}, "margins"),
    Case("reward", "Reward", dict(objective="reward", reward_centering=0.1), dict(center_rewards_coefficient=0.1)),
    Case("reward", "Reward", dict(objective="reward"), {}, "texts", note="padding's token ends the texts, too"),
    Case("simpo", "CPO", SIMPO, THEIR_SIMPO | dict(cpo_alpha=0.0)),
    Case("simpo", "CPO", SIMPO | dict(preference_nll_weight=0.5), THEIR_SIMPO | dict(cpo_alpha=0.5)),
    Case("orpo", "ORPO", dict(preference_loss="orpo"), dict(beta=0.1), note="NLL of the answers put in TRL's place"),
    Case("orpo", "ORPO", dict(preference_loss="orpo"), dict(beta=0.1), note="TRL's own: its NLL counts the prompt"),
]


@dataclass(frozen=True)
class Measured:
    """A loss and its gradient by the parameter's name."""

    loss: float
    gradients: dict[str, Tensor] = field(repr=False)

    @property
    def norm(self) -> float:
        return float(torch.stack([gradient.double().norm() for gradient in self.gradients.values()]).norm())

    def find_largest_error(self, exact: "Measured") -> float:
        """The largest error of a parameter's gradient, each in terms of the largest number of that gradient."""
        assert self.gradients.keys() == exact.gradients.keys()
        pairs = [(self.gradients[name].double(), gradient) for name, gradient in exact.gradients.items()]
        return max(float((own - other).abs().max() / other.abs().max()) for own, other in pairs)


@dataclass(frozen=True)
class Answer:
    """A sequence, and which of its tokens are trained."""

    ids: Tensor  # (T,) int64
    is_trained: Tensor  # (T,) bool

    @property
    def labels(self) -> Tensor:
        return torch.where(self.is_trained, self.ids, -100)


@dataclass(frozen=True)
class Inputs:
    """Models, rows and tokenized data sets in a directory."""

    folder: Path
    rows: dict[str, list[dict]]  # by the name of the data set, as TRL takes them

    def find_models(self, case: Case) -> tuple[Path, Path]:
        """The model that trains, and the reference."""
        if case.trainer == "Reward":
            return self.folder / f"reward_{case.data}", self.folder / "reference"
        names = ("reference", "policy") if case.swaps_models else ("policy", "reference")
        return tuple(self.folder / name for name in names)

    def locate_data(self, case: Case) -> Path:
        return self.folder / f"{case.data}.arrow"

    def read_answers(self, case: Case) -> list[tuple[Answer, Answer]]:
        """The two sequences of each row: chosen and rejected, or an answer and the unrelated one to its prompt."""
        data, pairs = TokenizedData(self.locate_data(case)), []
        for row in range(NUM_ROWS):
            sample = data.read(row)
            labels = np.split(sample["labels"], sample["sequence_lengths"][:1])
            pairs.append(tuple(Answer(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(own != -100))
                               for ids, own in zip(list_sequences(sample), labels, strict=True)))  # fmt: skip
        return pairs


def make_inputs(folder: Path) -> Inputs:
    for seed, name in enumerate(("policy", "reference")):
        save_tokenizer(save_model(FAMILIES["llama"], folder / name, seed=seed))
    inputs = Inputs(folder, make_rows())
    for name, form in FORMATS.items():
        save_reward_model(folder, name)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in inputs.rows[name]))
        options = dict(format=form, input_file=folder / f"{name}.jsonl", output_file=folder / f"{name}.arrow",
                       model_name_or_path=folder / ("reward_texts" if name == "texts" else "policy"))  # fmt: skip
        run_script("process_data.py", **options)
    return inputs


def save_reward_model(folder: Path, data: str) -> None:
    """The policy with a random head; for texts with a tokenizer that pads with the token that ends them."""
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_()
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    if data == "texts":
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / f"reward_{data}")
    tokenizer.save_pretrained(folder / f"reward_{data}")


def make_rows() -> dict[str, list[dict]]:
    random = np.random.default_rng(0)

    def say() -> str:
        return " ".join(random.choice(WORDS, random.integers(1, 9)))

    pairs = []
    for i in range(NUM_ROWS):
        prompt = [{"role": "user", "content": f"{i} {say()}"}]
        chosen, rejected = ([{"role": "assistant", "content": say()}] for _ in range(2))
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    margins = [pair | {"margin": float(random.random())} for pair in pairs]
    labels = random.permutation(NUM_ROWS) < NUM_ROWS // 2 + 1
    feedback = [{"prompt": pair["prompt"], "completion": pair["chosen"], "label": bool(label)}
                for pair, label in zip(pairs, labels, strict=True)]  # fmt: skip
    texts = [{"prompt": f"{i} {say()} ", "chosen": say(), "rejected": f"{say()} {i}"} for i in range(NUM_ROWS)]
    return {"pairs": pairs, "margins": margins, "texts": texts, "feedback": feedback}


def run_script(script: str, **options: object) -> None:
    done = run_forked(0, script, *flags(**options))
    assert done.returncode == 0, done.stderr
