"""What a step was: one reduction over ranks, one JSON line, one line on the console."""

import json
import logging
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from batch_packer import cost_samples

log = logging.getLogger("mini_trainer")

SECONDS_BETWEEN_LINES = 2.0

# Dense bf16 matrix products, FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "A6000": 155e12, "A10G": 70e12, "L4": 121e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}  # fmt: skip


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of forward and backward, counted as 6 per matrix weight and token, without recomputation.

    The head counts for trained tokens only, since only they reach it; the embedding table not at all. Attention counts
    scores and values of the pairs that a causal (and windowed) layer sees in each real sequence. (Kaplan et al. 2020,
    arXiv 2001.08361, 2.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B.)
    """

    per_token: float
    per_loss_token: float
    per_pair: float  # a query and a key that it sees, in one layer
    windows: tuple[int | None, ...]  # of each layer's attention; None: no window

    def of_batch(self, lengths: np.ndarray, num_loss_tokens: int) -> float:
        """FLOPs of one global batch; `lengths` (samples,) in tokens."""
        lengths = lengths.astype(float)
        flops = self.per_token * lengths.sum() + self.per_loss_token * num_loss_tokens
        for window in set(self.windows):
            seen = lengths if window is None else np.minimum(lengths, window)
            num_pairs = (seen * (lengths - seen / 2)).sum()
            flops += self.windows.count(window) * self.per_pair * num_pairs
        return flops

    @property
    def attention_cost(self) -> float:
        """c in a sequence's cost L + c·L², for the packer; layers with a window grow with L alone."""
        return self.windows.count(None) * self.per_pair / 2 / self.per_token


def count_flops(model: nn.Module, config: PreTrainedConfig) -> FlopCount:
    """`FlopCount` of a causal language model; a mixture of experts counts its active experts."""
    head = model.get_output_embeddings()
    outside = {id(head.weight)} | {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    active = (getattr(config, "num_experts_per_tok", None) or 1) / num_experts
    matrices = 0.0
    for param in model.parameters():
        if param.ndim >= 2 and id(param) not in outside:
            matrices += param.numel() * (active if param.ndim == 3 else 1)  # experts are stored as one 3-D tensor
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return FlopCount(
        per_token=6 * matrices,
        per_loss_token=6 * head.weight.numel(),
        per_pair=12 * num_heads * head_dim,
        windows=tuple(window if kind == "sliding_attention" else None for kind in layer_types),
    )


def peak_flops(device: torch.device, compute_dtype: torch.dtype) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None where it is unknown or bf16 is not what is computed in."""
    if device.type != "cuda" or compute_dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)


@dataclass(frozen=True)
class StepMetrics:
    """One line of training_metrics_0.jsonl. Token and sample counts are over all ranks."""

    step: int  # 1 after the first optimizer step
    epoch: float  # samples drawn so far / samples in the data set
    lr: float
    loss: float  # mean over the batch's trained tokens
    grad_norm: float  # before clipping
    num_samples: int
    num_loss_counted_tokens: int  # trained
    num_total_tokens: int  # trained and masked
    grad_accum: int  # micro-batches on each rank
    time_per_batch: float  # seconds, from having the batch to having updated the weights
    tokens_per_second: float  # num_total_tokens over time_per_batch and data_wait_seconds
    samples_per_second: float
    total_samples_accumulated: int
    total_tokens_accumulated: int
    peak_memory_usage_GB: float  # largest of any rank: allocated on CUDA, resident on CPU
    packing_efficiency: float  # num_total_tokens / (micro-batches x ranks x max_tokens_per_gpu)
    rank_balance: float  # mean / max of the ranks' cost, over the micro-batches: 1 is perfect
    data_wait_seconds: float  # longest that a rank waited for its batch
    mfu: float | None  # model FLOP utilisation; null where the device's peak is unknown


@dataclass(frozen=True)
class StepSums:
    """What the ranks know only together, after one all-gather."""

    loss_sum: float
    grad_norm: float
    peak_memory_bytes: float
    data_wait_seconds: float
    bad_micro_batches: list[tuple[int, int]]  # (k, rank) whose loss is not finite

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


def reduce_step(
    losses: list[Tensor], gradients: list[Tensor], *, device: torch.device, data_wait_seconds: float
) -> StepSums:
    """The step's one collective and one host sync: every rank's micro-batch losses, gradient norm, memory and wait."""
    own = [
        torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum(),  # fp32 sums lose 1e-5 on CPU
        torch.full((), peak_memory(device), dtype=torch.float64, device=device),  # filled on the device: no sync
        torch.full((), data_wait_seconds, dtype=torch.float64, device=device),
    ]
    row = torch.stack(own + [loss.double() for loss in losses])
    rows = row.new_empty(dist.get_world_size(), len(row))
    dist.all_gather(list(rows.unbind()), row)
    rows = rows.cpu()
    losses_by_rank = rows[:, len(own) :]
    return StepSums(
        loss_sum=losses_by_rank.sum().item(),
        grad_norm=rows[:, 0].sum().sqrt().item(),
        peak_memory_bytes=rows[:, 1].max().item(),
        data_wait_seconds=rows[:, 2].max().item(),
        bad_micro_batches=[(k, rank) for rank, k in (~losses_by_rank.isfinite()).nonzero().tolist()],
    )


def measure_step(
    batch: Any,
    sums: StepSums,
    *,
    lr: float,
    seconds: float,
    num_samples: int,
    num_tokens: int,
    epoch_length: int,
    max_tokens_per_gpu: int,
    flops: FlopCount,
    peak_flops: float | None,
) -> StepMetrics:
    """The metrics of one step that took `seconds`, after which `num_samples` and `num_tokens` had been trained."""
    batch_tokens = int(batch.lengths.sum())
    num_micro_batches, world_size = len(batch.table), len(batch.table[0])
    sample_costs = cost_samples(batch.lengths, flops.attention_cost)
    costs = np.array([[sample_costs[indices].sum() for indices in row] for row in batch.table])  # (K, world_size)
    total_seconds = seconds + sums.data_wait_seconds
    batch_flops = flops.of_batch(batch.lengths, batch.num_loss_tokens)
    return StepMetrics(
        step=batch.step + 1,
        epoch=num_samples / epoch_length,
        lr=lr,
        loss=sums.loss_sum / max(1, batch.num_loss_tokens),
        grad_norm=sums.grad_norm,
        num_samples=len(batch.lengths),
        num_loss_counted_tokens=batch.num_loss_tokens,
        num_total_tokens=batch_tokens,
        grad_accum=num_micro_batches,
        time_per_batch=seconds,
        tokens_per_second=batch_tokens / total_seconds,
        samples_per_second=len(batch.lengths) / total_seconds,
        total_samples_accumulated=num_samples,
        total_tokens_accumulated=num_tokens,
        peak_memory_usage_GB=sums.peak_memory_bytes / 1e9,
        packing_efficiency=batch_tokens / (num_micro_batches * world_size * max_tokens_per_gpu),
        rank_balance=float(costs.mean(axis=1).sum() / costs.max(axis=1).sum()),
        data_wait_seconds=sums.data_wait_seconds,
        mfu=None if peak_flops is None else batch_flops / total_seconds / (peak_flops * world_size),
    )


def peak_memory(device: torch.device) -> int:
    """Bytes: most ever allocated on a CUDA device, most ever resident of a process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class TrainingLog:
    """Rank 0's metrics file and console; on the other ranks it does nothing."""

    def __init__(self, output_dir: Path, *, is_rank0: bool, num_steps: int | None):
        path = output_dir / "training_metrics_0.jsonl"
        self.file = path.open("x", encoding="utf-8") if is_rank0 else None
        self.num_steps = num_steps
        self.first_step_end = self.last_shown = time.monotonic()

    def write(self, metrics: StepMetrics) -> None:
        """Appends the JSON line; shows the first and last step, and between them one every `SECONDS_BETWEEN_LINES`."""
        if self.file is None:
            return
        print(json.dumps(asdict(metrics)), file=self.file, flush=True)
        now = time.monotonic()
        if metrics.step == 1:
            self.first_step_end = now
        if metrics.step in (1, self.num_steps) or now - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = now
            log.info(describe_step(metrics, num_steps=self.num_steps, seconds_since_first=now - self.first_step_end))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def describe_step(m: StepMetrics, *, num_steps: int | None, seconds_since_first: float) -> str:
    """The console's line for a step, with the time left where there is an end.

    The first step compiles, so it neither counts for the time left nor names one.
    """
    line = (
        f"step {m.step}{'' if num_steps is None else f'/{num_steps}'}  epoch {m.epoch:.2f}  loss {m.loss:.4f}"
        f"  lr {m.lr:.2e}  grad_norm {m.grad_norm:.3f}  {m.tokens_per_second:,.0f} tokens/s"
    )
    if m.mfu is not None:
        line += f"  mfu {m.mfu:.1%}"
    if num_steps is not None and m.step > 1:
        seconds = round(seconds_since_first / (m.step - 1) * (num_steps - m.step))
        line += f"  left {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return line


def describe_run(options: Any, world: Any) -> str:
    """The console's first lines: versions, devices, and the options that are not at their defaults."""
    changed = [
        f"{field.name}={value}" for field in fields(options) if (value := getattr(options, field.name)) != field.default
    ]
    versions = ", ".join(f"{name} {number}" for name, number in read_versions().items())
    return f"{world.world_size} x {describe_device(world.device)}; {versions}\noptions: {', '.join(changed)}"


def check_output_dir(output_dir: Path) -> None:
    """ValueError if the run's directory holds anything, which could be another run."""
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(f"--output-dir {output_dir} is not an empty directory: name a new one, or remove that run")
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"--output-dir {output_dir}: no permission to write in {existing}")


def create_output_dir(output_dir: Path, options: Any, world: Any) -> None:
    """Makes the run's directory and writes training_params.json."""
    output_dir.mkdir(parents=True, exist_ok=True)
    params = {
        "options": asdict(options),
        "world_size": world.world_size,
        "device": describe_device(world.device),
        "versions": read_versions(),
        "git_commit": read_git_commit(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    (output_dir / "training_params.json").write_text(json.dumps(params, indent=2) + "\n")


def read_versions() -> dict[str, str]:
    names = ("torch", "transformers", "datasets", "numba", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def read_git_commit() -> str | None:
    """The commit of the checkout that this file is in; None where it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
