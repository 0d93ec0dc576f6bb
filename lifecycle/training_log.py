"""What a step was: one reduction over ranks, one JSON line, one line on the console."""

import functools
import json
import math
import operator
import os
import platform
import re
import resource
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from batch_packer import cost_samples
from options import flatten_options, iterate_fields
from ranks.ending import log

SECONDS_BETWEEN_LINES = 2.0

# Dense bf16 matrix products, FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "A6000": 155e12, "A10G": 70e12, "L4": 121e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}  # fmt: skip


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of forward and backward, counted as 6 per matrix weight and token (4 if frozen), without recomputation.

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
    matrices = 0.0  # FLOPs per token
    for param in model.parameters():
        if param.ndim >= 2 and id(param) not in outside:
            share = active if param.ndim == 3 else 1  # experts are stored as one 3-D tensor
            matrices += param.numel() * share * (6 if param.requires_grad else 4)
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return FlopCount(
        per_token=matrices,
        per_loss_token=(6 if head.weight.requires_grad else 4) * head.weight.numel(),
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
    osft_leak: float | None  # largest share of a layer's change in kept directions; null where nothing is exported


@dataclass(frozen=True)
class StepSums:
    """What the ranks know only together, after one all-gather."""

    loss_sum: float
    grad_norm: float
    peak_memory_bytes: float
    data_wait_seconds: float
    bad_micro_batches: list[tuple[int, int]]  # (k, rank) whose loss is not finite
    flags: int  # of every rank, OR-ed: ranks.monitor.Flag

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


def reduce_step(
    losses: list[Tensor],
    gradients: list[Tensor],
    *,
    device: torch.device,
    num_shards: int,
    data_wait_seconds: float,
    flags: int = 0,
) -> StepSums:
    """The step's one collective and one host sync: each rank's losses, gradient norm, memory, wait and flags.

    The first `num_shards` ranks hold the whole gradient; what others hold are copies.
    """
    squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square()  # fp32 sums lose 1e-5 on CPU
    own = [
        squares.sum().to(device, non_blocking=True),  # from the CPU with --cpu-offload
        torch.full((), peak_memory(device), dtype=torch.float64, device=device),  # filled on the device: no sync
        torch.full((), data_wait_seconds, dtype=torch.float64, device=device),
        torch.full((), flags, dtype=torch.float64, device=device),
    ]
    row = torch.stack(own + [loss.double() for loss in losses])
    rows = row.new_empty(dist.get_world_size(), len(row))
    dist.all_gather(list(rows.unbind()), row)
    rows = rows.cpu()
    losses_by_rank = rows[:, len(own) :]
    return StepSums(
        loss_sum=losses_by_rank.sum().item(),
        grad_norm=rows[:num_shards, 0].sum().sqrt().item(),
        peak_memory_bytes=rows[:, 1].max().item(),
        data_wait_seconds=rows[:, 2].max().item(),
        flags=functools.reduce(operator.or_, map(int, rows[:, 3].tolist())),
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
    osft_leak: float | None,
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
        osft_leak=osft_leak,
    )


def peak_memory(device: torch.device) -> int:
    """Bytes: most ever allocated on a CUDA device, most ever resident of a process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class TrainingLog:
    """Rank 0's metrics file and console; on the other ranks it does nothing.

    A run that goes on after `first_step` steps keeps their lines, and takes the later ones again.
    """

    def __init__(self, output_dir: Path, *, is_rank0: bool, first_step: int, num_steps: int | None):
        self.file = None
        if is_rank0:
            path = output_dir / "training_metrics_0.jsonl"
            keep_steps(path, first_step)
            self.file = path.open("a", encoding="utf-8")
        self.first_step, self.num_steps = first_step, num_steps
        self.first_step_end = self.last_shown = time.monotonic()

    def write(self, metrics: StepMetrics) -> None:
        """Appends the JSON line; shows the first and last step, and between them one every `SECONDS_BETWEEN_LINES`.

        OSError naming the file if it cannot be written.
        """
        if self.file is None:
            return
        try:
            print(json.dumps(asdict(metrics)), file=self.file, flush=True)
        except OSError as error:
            raise OSError(f"cannot write {self.file.name}: {error}") from None
        now = time.monotonic()
        is_first = metrics.step == self.first_step + 1
        if is_first:
            self.first_step_end = now
        if is_first or metrics.step == self.num_steps or now - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = now
            seconds_per_step = (now - self.first_step_end) / max(1, metrics.step - self.first_step - 1)
            log.info(describe_step(metrics, num_steps=self.num_steps, seconds_per_step=seconds_per_step))

    def flush_to_disk(self) -> None:
        """For a checkpoint: the lines of its steps have to be there when it is."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def keep_steps(path: Path, num_steps: int) -> None:
    """Cuts a metrics file after the line of step `num_steps`: what follows was trained after the checkpoint, or torn.

    Warns of lines that are missing before it.
    """
    end, next_step = 0, 1
    if path.exists():
        with path.open("rb+") as file:
            for line in file:
                try:
                    step = json.loads(line)["step"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    step = None
                if step != next_step or step > num_steps:
                    break
                end, next_step = end + len(line), step + 1
            file.truncate(end)
    if next_step <= num_steps:
        log.warning(f"warning: {path}: no lines of steps {next_step} to {num_steps}, which the run took before")


def describe_step(m: StepMetrics, *, num_steps: int | None, seconds_per_step: float) -> str:
    """The console's line for a step, with the time left where there is an end.

    `seconds_per_step` is 0 after the first step, which compiles, so it neither counts for the time left nor names one.
    """
    line = (
        f"step {m.step}{'' if num_steps is None else f'/{num_steps}'}  epoch {m.epoch:.2f}  loss {m.loss:.4f}"
        f"  lr {m.lr:.2e}  grad_norm {m.grad_norm:.3f}  {m.tokens_per_second:,.0f} tokens/s"
    )
    if m.mfu is not None:
        line += f"  mfu {m.mfu:.1%}"
    if num_steps is not None and seconds_per_step > 0:
        seconds = round(seconds_per_step * (num_steps - m.step))
        line += f"  left {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return line


def describe_micro_batch(batch: Any, k: int) -> str:
    """Where the run is, for what has to be said when it stops moving or runs out of memory."""
    lengths = batch.micro_batches[k].seq_lengths
    return (
        f"step {batch.step + 1}, micro-batch {k + 1} of {len(batch.micro_batches)} ({sum(lengths):,} tokens in"
        f" {len(lengths)} samples, the longest {max(lengths):,})"
    )


def describe_bad_step(batch: Any, sums: StepSums, data_path: str) -> str:
    """Where a loss or gradient stopped being finite: step, ranks and rows of the data set."""
    bad = sums.bad_micro_batches or [(k, rank) for k, ranks in enumerate(batch.table) for rank in range(len(ranks))]
    rows = sorted(int(batch.sample_ids[i]) + 1 for k, rank in bad for i in batch.table[k][rank])
    shown = ", ".join(map(str, rows[:20])) + (f" and {len(rows) - 20} more" if len(rows) > 20 else "")
    return (
        f"step {batch.step + 1}: the {'loss' if sums.bad_micro_batches else 'gradient'} is not finite (loss"
        f" {sums.loss_sum}, grad_norm {sums.grad_norm}); stopped before the update. Rows of {data_path}: {shown}"
        f" (rank {', '.join(str(rank) for rank in sorted({rank for _, rank in bad}))})"
    )


def describe_run(options: Any, world: Any) -> str:
    """The console's first lines: versions, devices, and the options that are not at their defaults."""
    values = flatten_options(options)
    changed = [
        f"{option.name}={value}"
        for option, _ in iterate_fields(type(options))
        if (value := values[option.name]) != option.default
    ]
    versions = ", ".join(f"{name} {number}" for name, number in read_versions().items())
    return f"{world.world_size} x {describe_device(world.device)}; {versions}\noptions: {', '.join(changed)}"


def read_versions() -> dict[str, str]:
    names = ("torch", "transformers", "datasets", "numba", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
