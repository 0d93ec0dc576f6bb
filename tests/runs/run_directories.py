"""Directories as runs leave them, without any training: metrics by formula, options, starts."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

from tiny_data import write_jsonl

VERSIONS = {"python": "3.11.7", "torch": "2.13.0"}


def make_step(step: int, *, noise: random.Random, num_steps: int, lr: float = 1e-3, **changes: Any) -> dict[str, Any]:
    """A line of the metrics file, as train.py writes it."""
    falling = 1.2 + 3 * math.exp(-6 * step / num_steps) + 0.5 / math.sqrt(step)
    return {
        "step": step,
        "epoch": step / 100,
        "lr": lr * min(1, step / (0.05 * num_steps + 1)) * (0.5 + 0.5 * math.cos(math.pi * step / num_steps)),
        "loss": falling + noise.gauss(0, 0.12),
        "grad_norm": math.exp(noise.gauss(-1, 0.4)) + 4 / step,
        **dict(num_samples=32, num_loss_counted_tokens=4000, num_total_tokens=8192, grad_accum=1, time_per_batch=0.5),
        "tokens_per_second": 16000 + noise.gauss(0, 400) - (6000 if step % 97 == 0 else 0),
        "samples_per_second": 64.0,
        "total_samples_accumulated": 32 * step,
        "total_tokens_accumulated": 8192 * step,
        "peak_memory_usage_GB": 21.4 if step > 3 else 18.0,
        **dict(packing_efficiency=0.97, rank_balance=0.99, data_wait_seconds=0.01, mfu=None),
    } | changes


def make_validation(step: int, num_steps: int, *, sets: tuple[str, ...] = ("held_out",)):
    """A line of the validation file; the loss rises again in the last third."""
    at = step / num_steps
    loss = 1.35 + 3 * math.exp(-6 * at) + max(0.0, at - 0.66) * 0.8
    scores = {"perplexity": math.exp(loss), "token_accuracy": 0.75 - 0.1 * loss, "num_loss_counted_tokens": 9000}
    return {
        **dict(step=step, epoch=step / 100, total_samples_accumulated=32 * step, loss=loss, **scores),
        **dict(seconds=3.0, is_best=False),
        "sets": {name: {"loss": loss + 0.2 * i, **scores} for i, name in enumerate(sets)},
    }


def make_sources(step: int, names: tuple[str, ...], loss: float, noise: random.Random) -> dict[str, Any]:
    """Losses by source; every tenth step has nothing of the last one."""
    return {
        name: {
            "loss": None if i == len(names) - 1 and step % 10 == 0 else loss + 0.3 * i + noise.gauss(0, 0.1),
            **dict(num_loss_counted_tokens=1000, num_samples=8, epoch=step / 100),
        }
        for i, name in enumerate(names)
    }


def make_start(first_step: int = 0, resumed_from: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "started": f"2026-11-{1 + first_step % 28:02}T10:00:00+0000",
        **dict(first_step=first_step, resumed_from=resumed_from, changed_options=[], auto_settings=None),
        **dict(world_size=8, device="NVIDIA H100", versions=VERSIONS, command=["train.py"]),
        "git_commit": "c052d55" * 5 + "00000",
    } | changes


def write_run(
    path: Path,
    *,
    num_steps: int = 100,
    seed: int = 0,
    sources: tuple[str, ...] = (),
    sets: tuple[str, ...] = (),
    resumes: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    finished: bool = True,
) -> Path:
    """A run's directory, and its path."""
    path.mkdir(parents=True)
    noise = random.Random(seed)
    options = {"output_dir": str(path), "learning_rate": 1e-3, "batch_size": 32} | (options or {})
    rows = []
    for step in range(1, num_steps + 1):
        row = make_step(step, noise=noise, num_steps=num_steps, lr=options["learning_rate"])
        if sources:
            row["sources"] = make_sources(step, sources, row["loss"], noise)
        rows.append(row)
    write_jsonl(path / "training_metrics_0.jsonl", rows)
    if sets:
        at = range(0, num_steps + 1, max(1, num_steps // 12))
        validations = [make_validation(step, num_steps, sets=sets) for step in at]
        best = math.inf
        for row in validations[1:]:
            row["is_best"], best = row["loss"] < best, min(best, row["loss"])
        write_jsonl(path / "validation_metrics_0.jsonl", validations)
    starts = [make_start(), *(make_start(step, f"{path}/checkpoints/step_{step}") for step in resumes)]
    params = {"options": options, "identity": {"data": "a" * 64}, **starts[-1], "starts": starts}
    params["finished"] = "2026-11-20T12:00:00+0000" if finished else None
    (path / "training_params.json").write_text(json.dumps(params))
    return path


def read_page(page: str) -> dict[str, Any]:
    """What the script of a page draws."""
    return json.loads(re.search(r"<script id=data type=application/json>(.*?)</script>", page, flags=re.DOTALL)[1])
