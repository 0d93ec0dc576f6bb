"""Runs of a tiny model on a tiny data set, and what they leave to compare."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made import make_sample
from safetensors.torch import load_file
from tiny_data import make_samples, read_lines, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from transformers import PreTrainedConfig

from mini_trainer.data.columns.base import Sample
from mini_trainer.distributed.world import World
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.run.checkpoint_files import TensorReader, read_manifest

NUM_SAMPLES, BATCH_SIZE = 20, 8  # a batch may straddle two epochs
OPTIONS = dict(batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0,
               checkpoint_every_steps=1, keep_checkpoints=9, export_dtype="float32")  # fmt: skip
TIMES = ("time_per_batch", "data_wait_seconds", "tokens_per_second", "samples_per_second", "peak_memory_usage_GB")

# Lengths of micro-batches' sequences: an idle rank, rows of single tokens, one sequence, many, round and odd numbers.
LENGTHS = ((), (1,), (1, 1, 1), (30,), (5, 9), (64,), (2, 2, 2), (17, 31, 4, 4, 1, 1), (128, 64), (3,) * 20, (33,))


def make_inputs(root: Path, family: str | PreTrainedConfig, *, num_samples: int = NUM_SAMPLES) -> dict[str, str]:
    """A model, of a family or by its config, with its tokenizer and a data set in `root`, as options."""
    model = save_tokenizer(save_model(FAMILIES[family] if isinstance(family, str) else family, root / "model"))
    data = write_samples(root / "data.arrow", make_samples(num_samples, vocab_size=VOCAB_SIZE))
    return dict(model_name_or_path=str(model), data_path=str(data))


def make_micro_batch(lengths: tuple[int, ...], *, seed: int) -> MicroBatch:
    """Random sequences of these lengths; a rank's that has nothing to do, without any."""
    return CausalLM().pack(make_samples_of(lengths, seed=seed))


def make_samples_of(lengths: tuple[int, ...], *, seed: int) -> list[Sample]:
    """The samples of `make_micro_batch`."""
    random = np.random.default_rng(seed)
    samples = [make_sample(ids, ids) for ids in (random.integers(3, VOCAB_SIZE, n) for n in lengths)]
    return samples or [CausalLM().make_idle_sample()]


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that there are, by parameter."""
    return {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None}


def save_and_end(results: object, output: str, world: World) -> None:
    """Ends a worker under torchrun as train.py does: gloo's threads and the interpreter's own end do not always go
    together. Rank 0 saves the results."""
    if world.rank == 0:
        torch.save(results, output)
    torch.distributed.destroy_process_group()
    os._exit(0)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's files."""
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """All tensors, whole."""
    manifest = read_manifest(path)
    reader, tensors = TensorReader(path, manifest), {}
    for name, layout in manifest["tensors"].items():
        tensors[name] = torch.full(layout["shape"], float("nan"))
        reader.read(tensors[name], name, [0] * len(layout["shape"]))
    return tensors


def read_rows(output_dir: Path, first: int = 1) -> list[dict]:
    """The metrics of all steps from the `first` on, which must be there once each, but for what differs by run."""
    rows = read_lines(output_dir / "training_metrics_0.jsonl")
    assert [row["step"] for row in rows] == list(range(first, first + len(rows)))
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def check_step(metrics: dict, model: torch.nn.Module, loss: torch.Tensor, *, tolerance: float = 1e-5) -> None:
    """A step's loss and gradient norm are those of `loss`, of which this takes the gradients in `model`."""
    loss.backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    found = metrics["loss"], metrics["grad_norm"]
    assert found == pytest.approx((loss.item(), norm.item()), rel=tolerance)


def forget_since(output_dir: Path, step: int) -> None:
    """Takes away what a run that had been killed after this checkpoint would not have left."""
    for path in (output_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    params = output_dir / "training_params.json"
    params.write_text(json.dumps(json.loads(params.read_text()) | {"finished": None}))


def copy_until(finished: Path, step: int, output_dir: Path) -> Path:
    """The run as it would lie there had it ended after `step`, while it was writing the next line of its metrics."""
    shutil.copytree(finished, output_dir, symlinks=True)
    forget_since(output_dir, step)
    shutil.rmtree(output_dir / "hf_format")
    metrics = output_dir / "training_metrics_0.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[: step + 1]) + lines[-1][:20])
    return output_dir


def check_same(one: Path, other: Path, *, step: int, has_exports: bool = True) -> None:
    """The checkpoints of `step`, all metrics and the export are the same, to the last bit."""
    assert read_rows(one) == read_rows(other)
    tensors = [load_checkpoint(path / "checkpoints" / f"step_{step}") for path in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in tensors[0])
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    for path in (one / "hf_format").iterdir() if has_exports else ():
        weights = [load_file(root / "hf_format" / path.name / "model.safetensors") for root in (one, other)]
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
