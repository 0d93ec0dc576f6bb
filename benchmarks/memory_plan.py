"""The memory that --dry-run predicts against what the run then shows, on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/memory_plan.py

Qwen3-shaped models with random weights, three steps each, on sequences whose lengths are log-normal as those of chats.

`run`: peak_memory_usage_GB of training_metrics_0.jsonl, the high-water mark of the process's resident memory.
`base`: the same of a run whose model is next to nothing, that is the interpreter, the libraries and what they set up.
`plan`: the tensors that the plan counts. The error is that of base + plan; of tensors alone, of plan to run - base.
Runs have MALLOC_MMAP_THRESHOLD_=65536: by default glibc keeps freed memory, as seen in `default`, the run without it.
To give it back and have it anew takes time: `slower` is the time of a step against that of `default`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, Qwen3Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart")]
from harness import write_random_data
from make_tiny_model import train_tokenizer

SIZES = {
    "base": dict(hidden_size=64, num_layers=1, vocab_size=288),
    "3M": dict(hidden_size=192, num_layers=4, vocab_size=8_000),
    "26M": dict(hidden_size=512, num_layers=6, vocab_size=16_000),
}
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def write_model(path: Path, *, hidden_size: int, num_layers: int, vocab_size: int) -> None:
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    train_tokenizer([], vocab_size=288).save_pretrained(path)


def write_data(path: Path) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.6, 400), 8, 800).astype(int)
    write_random_data(path, lengths, shares=(0.5, 0.5))


def call(*command: object, **env: str) -> str:
    result = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=ENV | env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=3072)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="memory_plan_"))
    write_data(root / "data.arrow")
    for size, shape in SIZES.items():
        write_model(root / size, **shape)

    def flags(size: str, checkpointing: str, ranks: int, output_dir: Path) -> list[object]:
        cap = 800 if size == "base" else options.max_tokens_per_gpu
        return [
            "train.py", "--model-name-or-path", root / size, "--data-path", root / "data.arrow", "--output-dir",
            output_dir, "--batch-size", 32 * ranks, "--max-tokens-per-gpu", cap, "--max-steps", 3, "--export-dtype",
            "float32", "--activation-checkpointing", checkpointing,
        ]  # fmt: skip

    def show(size: str, checkpointing: str, ranks: int, **env: str) -> tuple[float, float]:
        """Peak in GB, and seconds of the fastest step."""
        output_dir = Path(tempfile.mkdtemp(dir=root))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        call(*torchrun, *flags(size, checkpointing, ranks, output_dir), **env)
        rows = [json.loads(row) for row in (output_dir / "training_metrics_0.jsonl").read_text().splitlines()]
        return rows[-1]["peak_memory_usage_GB"], min(row["time_per_batch"] for row in rows)

    print(
        "model  checkpointing  ranks  base GB  plan GB   run GB    error  of tensors alone  default GB  slower",
        flush=True,
    )
    for ranks in options.ranks:
        base, _ = show("base", "full", ranks, MALLOC_MMAP_THRESHOLD_="65536")
        for size in list(SIZES)[1:]:
            for checkpointing in ("none", "full"):
                dry = ["--dry-run", "--plan-world-size", ranks]
                text = call(sys.executable, *flags(size, checkpointing, ranks, root / "unused"), *dry)
                together, libraries = (
                    float(re.search(rf"{name} +([\d.]+) GiB", text)[1]) for name in ("together", "libraries")
                )
                plan = (together - libraries) * 2**30 / 1e9
                shown, seconds = show(size, checkpointing, ranks, MALLOC_MMAP_THRESHOLD_="65536")
                default, default_seconds = show(size, checkpointing, ranks)
                print(
                    f"{size:>5}  {checkpointing:<13}  {ranks:>5}  {base:7.3f}  {plan:7.3f}  {shown:7.3f}"
                    f"  {(base + plan) / shown - 1:+7.1%}  {plan / (shown - base) - 1:+16.1%}  {default:10.3f}"
                    f"  {seconds / default_seconds:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
