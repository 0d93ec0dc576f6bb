"""Base, full fine-tuning, LoRA and OSFT on GSM8K, side by side: a tiny random model, trained for some CPU minutes.

    OMP_NUM_THREADS=1 python benchmarks/compare_methods.py --chats gsm8k_messages.jsonl --output-dir runs/gsm8k

The base learns from one half of the chats, then each method goes on from it with the other half, the same batches for
all. What comes of it is a page (OUTPUT_DIR/compared/results.html) with the losses on chats held out and the answers to
their questions. All of it by the program's own commands, which are printed. What is there already is kept.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = {
    "full": ["--learning-rate", "1e-3"],
    "lora": ["--learning-rate", "3e-3", "--lora", "--lora-rank", "16"],
    "osft": ["--learning-rate", "3e-3", "--osft", "--osft-unfreeze-rank-ratio", "0.5"],
}


def run(*words: object, makes: Path) -> None:
    """One of the program's commands, unless what it makes is there already."""
    if makes.exists():
        return
    command = [str(word) for word in words]
    print("$ python", shlex.join(command), flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


def split_chats(chats: str, work: Path, *, num_held_out: int) -> None:
    """The chats that are held out, and the two halves of the others."""
    with open(chats, encoding="utf-8") as file:
        lines = file.readlines()
    held_out, others = lines[:num_held_out], lines[num_held_out:]
    for name, part in (("held_out", held_out), ("first", others[::2]), ("second", others[1::2])):
        (work / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")


def train(work: Path, name: str, model: Path, half: str, steps: int, own: list[str]) -> Path:
    """Trains, and returns the export under the method's name."""
    output_dir = work / "runs" / name
    run("train.py", "--model-name-or-path", model, "--data-path", work / f"{half}.arrow", "--output-dir", output_dir,
        "--batch-size", 32, "--max-tokens-per-gpu", 4096, "--max-steps", steps, "--num-warmup-steps", 5,
        "--lr-scheduler", "cosine", "--activation-checkpointing", "none", *own, makes=work / name)  # fmt: skip
    if (work / name).exists():
        return work / name
    (export,) = (output_dir / "hf_format").iterdir()
    (work / name).symlink_to(export)
    return work / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", required=True, help="GSM8K as messages JSONL")
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--num-held-out", type=int, default=150, help="chats that nothing trains on")
    parser.add_argument("--base-steps", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25, help="of each method")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    options = parser.parse_args()
    work = Path(options.output_dir).absolute()
    work.mkdir(parents=True, exist_ok=True)
    split_chats(options.chats, work, num_held_out=options.num_held_out)
    run("quickstart/make_tiny_model.py", "--messages-file", options.chats, "--output-dir", work / "model",
        "--vocab-size", 2048, makes=work / "model")  # fmt: skip
    for name in ("held_out", "first", "second"):
        run("process_data.py", "--input-file", work / f"{name}.jsonl", "--output-file", work / f"{name}.arrow",
            "--model-name-or-path", work / "model", "--preview", 0, "--num-proc", 1,
            makes=work / f"{name}.arrow")  # fmt: skip
    base = train(work, "base", work / "model", "first", options.base_steps, ["--learning-rate", "5e-3"])
    tuned = [train(work, name, base, "second", options.steps, own) for name, own in METHODS.items()]
    run("evaluate_model.py", "--model", base, *tuned, "--data", work / "held_out.arrow",
        "--task", work / "held_out.jsonl", "--metrics", "number", "token_f1",
        "--max-new-tokens", options.max_new_tokens, "--output-dir", work / "compared",
        makes=work / "compared" / "results.html")  # fmt: skip


if __name__ == "__main__":
    main()
