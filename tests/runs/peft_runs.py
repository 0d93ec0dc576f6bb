"""Runs of LoRA, and the same by a plain loop of transformers and peft."""

import json
from dataclasses import dataclass
from pathlib import Path

import small_runs
import torch
from hand_made import read_triple
from in_process import train_on
from peft import PeftModel, get_peft_model_state_dict
from plain_loop import train_plainly
from safetensors.torch import load_file
from small_runs import NUM_SAMPLES, OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig

from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import World

BATCH_SIZE, STEPS, SEED = OPTIONS["batch_size"], 4, 42
CONFIGS = FAMILIES | {
    "llama_64": LlamaConfig(**SHAPE | dict(hidden_size=64, intermediate_size=128)),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
LORA = dict(lora=True, lora_rank=4, lora_alpha=16.0, seed=SEED, max_steps=STEPS, lora_export="both",
            checkpoint_every_steps=2)  # fmt: skip


def make_inputs(root: Path, family: str) -> dict[str, str]:
    return small_runs.make_inputs(root, CONFIGS[family])


def train(world, inputs: dict[str, str], output_dir: Path, **options: object) -> Path:
    """The run's last export."""
    options = OPTIONS | LORA | options
    train_on(options.pop("num_ranks", 1), world, **inputs, output_dir=output_dir, **options)
    return output_dir / "hf_format" / f"samples_{options['max_steps'] * BATCH_SIZE}"


def load_with_adapter(inputs: dict[str, str], adapter: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


def train_with_peft(inputs: dict[str, str], start: Path) -> tuple[list[float], PeftModel]:
    """What the run computes, from the adapter `start`: transformers, peft and AdamW, a sample at a time."""
    data, model = Mixture([TokenizedData(inputs["data_path"])]), load_with_adapter(inputs, start).train()
    data.vocab_size = VOCAB_SIZE

    def backward(rows: list[int], start: int) -> float:
        batch, total = [read_triple(data, row) for row in rows], 0.0
        num_targets = sum((labels[1:] != -100).sum() for _, labels, _ in batch)
        for ids, labels, _ in batch:
            logits = model(input_ids=torch.tensor(ids)[None].long(), use_cache=False).logits[0, :-1]
            targets = torch.tensor(labels[1:]).long()
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
        return total

    sizes = dict(num_steps=STEPS, batch_size=BATCH_SIZE, seed=SEED)
    return train_plainly(model, data, backward, **sizes, learning_rate=OPTIONS["learning_rate"], eps=1e-8)[0], model


def adapter_of(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}


@torch.no_grad()
def add_tokens(root: Path, model: Path | str, count: int) -> dict[str, str]:
    """A data set whose tokenizer has `count` tokens more than the model has embeddings, as options."""
    root.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(model)
    num_added = VOCAB_SIZE + count - len(tokenizer)
    tokenizer.add_tokens([f"<|added_{i}|>" for i in range(num_added)], special_tokens=True)
    tokenizer.save_pretrained(root / "data.arrow.tokenizer")
    data = write_samples(root / "data.arrow", make_samples(NUM_SAMPLES, vocab_size=len(tokenizer)))
    made_by = dict(tokenizer_fingerprint=fingerprint_tokenizer(tokenizer), max_token_id=len(tokenizer) - 1)
    (root / "data.arrow.meta.json").write_text(json.dumps(made_by | dict(tokenizer_dir="data.arrow.tokenizer")))
    return dict(model_name_or_path=str(model), data_path=str(data))


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(3, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(0))
    return model.eval()(input_ids=ids, use_cache=False).logits


TABLE = [
    ("llama", {}),
    ("llama", dict(lora_use_dora=True)),
    ("llama_tied_bias", dict(lora_target_modules=("q_proj", "layers.1.mlp.*"))),
    ("qwen3", dict(lora_modules_to_save=("embed_tokens",))),  # tied
    ("qwen3_moe", {}),
    ("gemma3", {}),
    ("phi3", {}),
    ("gpt2", {}),
    ("gpt2", dict(lora_use_dora=True)),
    ("gpt_oss_sinks", {}),
    ("mixtral", {}),
]


@dataclass(frozen=True)
class Comparison:
    """How far a run is from peft's: the largest differences."""

    loss: float  # relative, of any step
    adapter: float  # of any tensor, relative to how far training moved it
    loads_bit_for_bit: bool  # the adapter that was exported, in peft
    effect: float  # of the adapter on a logit
    merged: float  # a logit of the model merged by us from that with the adapter beside
    merged_by_peft: float  # and from that merged by peft
    exports: tuple[Path, Path]  # the merged model, the adapter


def run_beside_peft(family: str, options: dict[str, object], directory: Path, *, world: World) -> Comparison:
    """Trains `family` with `train.py`'s run and with peft from the same adapter, and loads what the run exported."""
    inputs = make_inputs(directory, family)
    at_once = dict(learning_rate=0.0, max_steps=1, lora_export="adapter")
    start = train(world, inputs, directory / "start", **options | at_once)
    export = train(world, inputs, directory / "run", **options)
    losses, expected = train_with_peft(inputs, start)
    rows = read_rows(directory / "run")
    assert len(rows) == len(losses)

    before = load_file(start / "adapter_model.safetensors")
    after = load_file(export / "adapter/adapter_model.safetensors")
    reference = adapter_of(expected)
    assert after.keys() == before.keys() == reference.keys()
    moved = {name: (tensor - before[name]).norm() for name, tensor in reference.items()}
    assert all(norm > 0 for norm in moved.values())

    base = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32)
    loaded = load_with_adapter(inputs, export / "adapter")
    loads_bit_for_bit = all(torch.equal(tensor, after[name]) for name, tensor in adapter_of(loaded).items())
    unmerged = logits_of(loaded)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32))
    return Comparison(
        loss=max(abs(row["loss"] / loss - 1) for row, loss in zip(rows, losses, strict=True)),
        adapter=max(float((after[name] - reference[name]).norm() / norm) for name, norm in moved.items()),
        loads_bit_for_bit=loads_bit_for_bit,
        effect=float((unmerged - logits_of(base)).abs().max()),
        merged=float((merged - unmerged).abs().max()),
        merged_by_peft=float((logits_of(loaded.merge_and_unload()) - merged).abs().max()),
        exports=(export, export / "adapter"),
    )
