"""The runs that benchmarks/gpu.py measures, their models and data, and what was expected of them before any GPU ran.

    python benchmarks/gpu_settings.py    # writes gpu_expected.json anew, on a CPU: losses of tests/test_gpu.py, plans

A plan is that of train.py --dry-run for an H100 of 80 GB, from the model's config alone.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paths

ROOT = paths.ROOT

EXPECTED = ROOT / "benchmarks" / "gpu_expected.json"
SMALL, LARGE = "qwen2.5-1.5b", "llama-3.1-8b"  # shapes of train_step.py
IN_TINY = {SMALL: "nano", LARGE: "tiny"}
MAX_TINY_TOKENS = 512
MEMORY_GIB = 79.1  # of an H100
FSDP = dict(reshard_after_forward="always")  # on one rank, too
LIGHT = dict(optimizer="adamw8bit", master_weights="bfloat16")
SELECTIVE = dict(max_tokens_per_gpu=4096, activation_checkpointing="selective")
LORA = dict(lora=True, lora_rank=16, learning_rate=1e-4)

DEFAULT = dict(max_tokens_per_gpu=None, activation_checkpointing=None, kernels=None)  # what a run finds by itself
BEST = dict(max_tokens_per_gpu=16384, kernels="fused")

# Options of train.py by the run's name; the shape is SMALL with chats as short as GSM8K's, or LARGE with rows of 4,096.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "1.5B, default": (SMALL, DEFAULT),
    "1.5B, fused": (SMALL, BEST),
    "1.5B, fused, bf16 masters": (SMALL, BEST | dict(master_weights="bfloat16")),
    "1.5B, fused, FlashAttention 3": (SMALL, BEST | dict(attention="varlen_fa3")),
    "1.5B, eager": (SMALL, BEST | dict(kernels="eager")),
    "1.5B, fused, FSDP2": (SMALL, BEST | FSDP),
    "1.5B, compiled": (SMALL, dict(max_tokens_per_gpu=16384, compile=True)),
    "1.5B, fused, 8k tokens": (SMALL, BEST | dict(max_tokens_per_gpu=8192)),
    "1.5B, fused, 4k tokens": (SMALL, BEST | dict(max_tokens_per_gpu=4096)),
    "1.5B, OSFT": (SMALL, BEST | dict(osft=True, osft_unfreeze_rank_ratio=0.5)),
    "8B, default": (LARGE, DEFAULT | LIGHT),
    "8B, fused, selective recomputation": (LARGE, SELECTIVE | LIGHT | dict(kernels="fused")),
    "8B, compiled": (LARGE, SELECTIVE | LIGHT | dict(compile=True)),
    "8B, compiled, float8": (LARGE, SELECTIVE | LIGHT | dict(compile=True, float8=True)),
    "8B, LoRA, default": (LARGE, DEFAULT | LORA),
    "8B, LoRA, fused": (LARGE, dict(max_tokens_per_gpu=8192, kernels="fused") | LORA),
}
# What should be reached on an H100, by counted bytes (step_bytes.py); before, the best ones were 0.455, 0.361, 0.446.
GOALS_MFU = {"1.5B, fused": 0.51, "8B, fused, selective recomputation": 0.48, "8B, LoRA, fused": 0.50}


@dataclass(frozen=True)
class Setup:
    """Where stages find and leave things, and whether they run in small."""

    work_dir: Path  # models and data, kept from stage to stage
    results: Path
    tiny: bool

    def shape(self, name: str) -> str:
        return IN_TINY[name] if self.tiny else name

    def tokens(self, number: int) -> int:
        return min(number, MAX_TINY_TOKENS) if self.tiny else number


def prepare(setup: Setup, shape: str, *, has_weights: bool = True) -> tuple[Path, Path]:
    """A random model with its tokenizer, made on the GPU if there is one, and a data set; made once."""
    from make_tiny_model import train_tokenizer
    from train_step import make_config, save_random_model

    model, data = setup.work_dir / setup.shape(shape), setup.work_dir / f"{shape}.arrow"
    if not (model / "tokenizer_config.json").exists():
        make_config(setup.shape(shape)).save_pretrained(model)
        if has_weights:
            save_random_model(setup.shape(shape), model)
        train_tokenizer([], vocab_size=288).save_pretrained(model)
    if not data.exists():
        write_data(setup, shape, data)
    return model, data


def write_data(setup: Setup, shape: str, path: Path) -> None:
    """Samples as short as GSM8K's for the small model; for the large one full rows, as others measure theirs."""
    from harness import write_random_data
    from packing import draw_lengths

    if shape == SMALL:
        write_random_data(path, draw_lengths("gsm8k", 2000)[0])
    else:
        write_random_data(path, np.full(200, setup.tokens(4096)), shares=(0.99, 1.0))


def make_run(setup: Setup, name: str, *, has_weights: bool = True, **changes: object) -> dict[str, Any]:
    """Options of train.py for a run of `SETTINGS`, without checkpoints and exports."""
    shape, options = SETTINGS[name]
    model, data = prepare(setup, shape, has_weights=has_weights)
    run = dict(
        model_name_or_path=str(model), data_path=str(data), output_dir=str(setup.work_dir / "runs" / "run"),
        batch_size=8 if setup.tiny or shape == LARGE else 256, learning_rate=1e-5, activation_checkpointing="none",
        kernels=None if options.get("compile") else "eager",
        max_steps=2 if setup.tiny else 3 if shape == LARGE else 6, save_final_checkpoint=False,
        checkpoint_every_minutes=None, compute_dtype="bfloat16",
    ) | options | changes  # fmt: skip
    if run["max_tokens_per_gpu"] is not None:
        run["max_tokens_per_gpu"] = setup.tokens(run["max_tokens_per_gpu"])
    return {key: value for key, value in run.items() if value is not None or key == "checkpoint_every_minutes"}


def plan(setup: Setup, name: str) -> float:
    """The memory in GB that a dry run for an H100 expects."""
    from processes import flags

    options = make_run(setup, name, has_weights=False, plan_for="1xH100", memory_budget_gb=MEMORY_GIB)
    command = [sys.executable, "train.py", *flags(**options), "--dry-run"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = re.search(r"together +([\d.]+) GiB", text)
    assert found, text
    return round(float(found[1]) * 2**30 / 1e9, 2)


def read_expected() -> dict[str, Any]:
    return json.loads(EXPECTED.read_text())


def main() -> None:
    from gpu_cases import DECIDING, train_on_cpu

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        losses = {name: train_on_cpu(options, root / "losses") for name, options in DECIDING.items()}
        setup = Setup(root, root, tiny=False)
        plans = {}
        for name in SETTINGS:
            plans[name] = plan(setup, name)
            print(f"{name}: {plans[name]} GB", flush=True)
            shutil.rmtree(root / "runs", ignore_errors=True)
    EXPECTED.write_text(json.dumps({"losses": losses, "plans": plans}, indent=1) + "\n")


if __name__ == "__main__":
    main()
