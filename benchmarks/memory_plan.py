"""The memory that --dry-run predicts against what the run then shows, on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/memory_plan.py
    OMP_NUM_THREADS=1 python benchmarks/memory_plan.py --runs dpo dpo-lora kto reward --sizes 3M --ranks 1 2

Qwen3-shaped models with random weights, three steps each, on samples whose lengths are log-normal as those of chats.

`run`: peak_memory_usage_GB of training_metrics_0.jsonl, the high-water mark of the process's resident memory.
`base`: the same of a run whose model is next to nothing, that is the interpreter, the libraries and what they set up.
`plan`: the tensors that the plan counts. The error is that of base + plan; of tensors alone, of plan to run - base.
Runs have MALLOC_MMAP_THRESHOLD_=65536: by default glibc keeps freed memory, as seen in `default`, the run without it.
To give it back and have it anew takes time: `slower` is the time of a step against that of `default`. Both are of
texts alone.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import paths
import pyarrow as pa
from harness import make_random_answers, write_random_data
from make_tiny_model import train_tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from mini_trainer.data.columns.base import COLUMNS
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer

SIZES = {
    "base": dict(hidden_size=64, num_layers=1, vocab_size=288),
    "3M": dict(hidden_size=192, num_layers=4, vocab_size=8_000),
    "26M": dict(hidden_size=512, num_layers=6, vocab_size=16_000),
}
RUNS = {  # the kind of data, and flags
    "text": ("causal-lm", []),
    "muon": ("causal-lm", ["--optimizer", "muon"]),
    "dpo": ("preference", ["--objective", "preference"]),
    "dpo-lora": ("preference", ["--objective", "preference", "--lora"]),
    "kto": ("feedback", ["--objective", "kto"]),
    "reward": ("preference", ["--objective", "reward"]),
}
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(paths.ROOT), "HF_HUB_OFFLINE": "1"}


def write_model(path: Path, *, hidden_size: int, num_layers: int, vocab_size: int) -> None:
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    train_tokenizer([], vocab_size=288).save_pretrained(path)


def draw_lengths(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(5, 0.6, count), 8, 800).astype(int)


def write_data(path: Path, kind: str, tokenizer_dir: Path) -> None:
    """400 texts, or 120 samples of two sequences, which a reference scores before the first step."""
    if kind == "causal-lm":
        write_random_data(path, draw_lengths(400), shares=(0.5, 0.5))
        return
    random = np.random.default_rng(0)
    samples = [make_random_answers(random, kind, length, vocab_size=280) for length in draw_lengths(120)]
    table = pa.Table.from_batches([COLUMNS[kind].encode(samples)])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    made_by = {"tokenizer_fingerprint": fingerprint_tokenizer(load_tokenizer(str(tokenizer_dir))), "max_token_id": 279}
    Path(f"{path}.meta.json").write_text(json.dumps({"objective": kind} | made_by))


def call(*command: object, **env: str) -> str:
    result = subprocess.run(
        list(map(str, command)), cwd=paths.ROOT, env=ENV | env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=3072)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["text"])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES)[1:], default=list(SIZES)[1:])
    parser.add_argument("--checkpointing", nargs="+", default=["none", "full"])
    parser.add_argument("--reshard-after-forward", default="auto")
    parser.add_argument("--reshard-after-backward", default="auto")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="memory_plan_"))
    for size, shape in SIZES.items():
        write_model(root / size, **shape)
    for kind in {RUNS[name][0] for name in options.runs}:
        write_data(root / f"{kind}.arrow", kind, root / "base")

    def flags(run: str, size: str, checkpointing: str, ranks: int, output_dir: Path) -> list[object]:
        kind, own = RUNS[run]
        cap = 800 if size == "base" else options.max_tokens_per_gpu
        return [
            "train.py", "--model-name-or-path", root / size, "--data-path", root / f"{kind}.arrow", "--output-dir",
            output_dir, "--batch-size", 32 * ranks, "--max-tokens-per-gpu", cap, "--max-steps", 3, "--export-dtype",
            "float32", "--activation-checkpointing", checkpointing, "--reshard-after-forward",
            options.reshard_after_forward, "--reshard-after-backward", options.reshard_after_backward, *own,
        ]  # fmt: skip

    def show(*case: object, **env: str) -> tuple[float, float]:
        """Peak in GB, and seconds of the fastest step, of a run, a size, a checkpointing and ranks."""
        output_dir = Path(tempfile.mkdtemp(dir=root))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case[-1]}"]
        call(*torchrun, *flags(*case, output_dir), **env)
        rows = [json.loads(row) for row in (output_dir / "training_metrics_0.jsonl").read_text().splitlines()]
        return rows[-1]["peak_memory_usage_GB"], min(row["time_per_batch"] for row in rows)

    def plan(*case: object) -> float:
        """GB of tensors."""
        text = call(sys.executable, *flags(*case, root / "unused"), "--dry-run", "--plan-for", case[-1])
        found = [re.search(rf"{name} +([\d.]+) GiB", text)[1] for name in ("together", "libraries")]
        together, libraries = map(float, found)
        return (together - libraries) * 2**30 / 1e9

    print(
        "      run  model  checkpointing  ranks  base GB  plan GB   run GB    error  of tensors alone  default GB"
        "  slower",
        flush=True,
    )
    for ranks, run in itertools.product(options.ranks, options.runs):
        base, _ = show(run, "base", "full", ranks, MALLOC_MMAP_THRESHOLD_="65536")
        for size, checkpointing in itertools.product(options.sizes, options.checkpointing):
            case = (run, size, checkpointing, ranks)
            planned, (shown, seconds) = plan(*case), show(*case, MALLOC_MMAP_THRESHOLD_="65536")
            kept = ""
            if run == "text":
                default, default_seconds = show(*case)
                kept = f"  {default:10.3f}  {seconds / default_seconds:6.2f}"
            print(
                f"{run:>9}  {size:>5}  {checkpointing:<13}  {ranks:>5}  {base:7.3f}  {planned:7.3f}  {shown:7.3f}"
                f"  {(base + planned) / shown - 1:+7.1%}  {planned / (shown - base) - 1:+16.1%}{kept}",
                flush=True,
            )


if __name__ == "__main__":
    main()
