"""Damages each thing that is stored, in five ways, and reports who notices, and how.

    OMP_NUM_THREADS=1 python benchmarks/stored_damage.py

On a tiny model: data set, sidecar, scores, export, adapter, checkpoint, OSFT's bases, statistics and cache, a
reference's log-probabilities. Each is truncated, has one bit flipped, is replaced by that of an older run, is deleted,
or is a FIFO; then the program that reads it is started. A line says the exit code and the last line of its output.
Exits with 1 if a program that read damaged bytes said nothing, had a traceback, or did not end.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import paths

ROOT = paths.ROOT

from make_tiny_model import save_tiny_model, train_tokenizer
from tiny_data import write_jsonl

SECONDS = 120
NOTICED = ("SHA-256", "damaged", "DAMAGED", "differs", "missing", "not a", "no such", "does not", "bytes", "cannot",
           "another", "scored again", "not listed", "unverified", "there are no", "edited")  # fmt: skip
SAID, MADE_AGAIN = ("error", "warning"), (" scored before, ", "matrices to decompose")


@dataclass(frozen=True)
class Stored:
    """A stored file, and the program that reads it."""

    name: str
    path: str  # under the work directory
    reader: str  # a key of READERS
    older: str | None = None  # path of the file of an older run


def run(root: Path, *words: str) -> tuple[int | None, str]:
    """Exit code, None if it does not end, and output."""
    command = [sys.executable, "-m", "mini_trainer", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(root / "home"), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


TRAIN = ("train", "--nproc-per-node", "1", "--batch-size", "4", "--max-tokens-per-gpu", "512",
         "--checkpoint-every-steps", "1", "--max-steps")  # fmt: skip
DATA = ("--data-path", "data.arrow")
EXPORT, BASES = "run/hf_format/samples_8", "osft/hf_format/samples_8/osft/bases.safetensors"
OSFT = ("--osft", "--osft-unfreeze-rank-ratio", "0.5", "--osft-cache-dir", "cache")
MODEL = ("--model-name-or-path", EXPORT)
READERS: dict[str, tuple[str, ...]] = {
    "train": (*TRAIN, "2", *MODEL, *DATA, "--output-dir", "new"),
    "resume": (*TRAIN, "3", "--model-name-or-path", "model", *DATA, "--output-dir", "run"),
    "distill": (*TRAIN, "2", *MODEL, *DATA, "--output-dir", "new", "--teacher-weight", "0.5"),
    "dpo": (*TRAIN, "2", *MODEL, "--data-path", "pairs.arrow", "--objective", "preference", "--output-dir", "new"),
    "osft": (*TRAIN, "2", *MODEL, *DATA, "--output-dir", "new", *OSFT, "--osft-bases", BASES),
    "cache": (*TRAIN, "2", "--model-name-or-path", "model", *DATA, "--output-dir", "new", *OSFT),
    "statistics": (*TRAIN, "2", "--model-name-or-path", "model", *DATA, "--output-dir", "new", *OSFT,
                   "--osft-basis", "activations", "--osft-statistics", "statistics.safetensors"),
    "generate": ("generate", "--model", EXPORT, "--prompts", "prompts.txt", "--output", "a.jsonl",
                 "--max-new-tokens", "2"),
    "generate by adapter": ("generate", "--model", "lora/hf_format/samples_8", "--prompts", "prompts.txt",
                            "--output", "a.jsonl", "--max-new-tokens", "2"),
    "evaluate": ("evaluate", "--model", EXPORT, "--data", "data.arrow", "--output-dir", "seen"),
    "score-data": ("score-data", *MODEL, *DATA, "--name", "other", "--top-k", "4"),
    "verify": ("verify", "."),
}  # fmt: skip
STORED = [
    *(Stored("data set", "data.arrow", reader, "old.arrow")
      for reader in ("train", "evaluate", "score-data", "verify")),
    Stored("its sidecar", "data.arrow.meta.json", "train", "old.arrow.meta.json"),
    Stored("scores", "data.arrow.teacher.scores", "distill", "old.arrow.teacher.scores"),
    Stored("their sidecar", "data.arrow.teacher.scores.json", "distill", "old.arrow.teacher.scores.json"),
    Stored("reference's log-probabilities", "pairs.arrow.reference-*.npz", "dpo"),
    *(Stored("export's weights", f"{EXPORT}/model.safetensors", reader, "older/hf_format/samples_8/model.safetensors")
      for reader in ("train", "generate", "evaluate", "score-data", "verify")),
    Stored("export's config", f"{EXPORT}/config.json", "generate", "model/config.json"),
    Stored("export's manifest", f"{EXPORT}/manifest.json", "generate", "older/hf_format/samples_8/manifest.json"),
    Stored("adapter's weights", "lora/hf_format/samples_8/adapter_model.safetensors", "generate by adapter"),
    Stored("OSFT's bases", BASES, "osft"),
    Stored("OSFT's cache", "cache/*.safetensors", "cache"),
    Stored("OSFT's statistics", "statistics.safetensors", "statistics"),
    Stored("checkpoint's weights", "run/checkpoints/step_2/rank_00000.safetensors", "resume"),
    Stored("checkpoint's state", "run/checkpoints/step_2/state.json", "resume"),
    Stored("checkpoint's manifest", "run/checkpoints/step_2/manifest.json", "resume"),
]  # fmt: skip


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def be_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one bit": flip_bit,
    "deleted": Path.unlink,
    "FIFO": be_fifo,
}


def make_all(root: Path) -> None:
    """One of each stored thing, by the programs themselves."""
    chats = [(f"Which is {i}?", f"It is {i}.") for i in range(40)]
    rows = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in chats]  # fmt: skip
    pairs = [{"prompt": f"Which is {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(12)]
    write_jsonl(root / "rows.jsonl", rows), write_jsonl(root / "old.jsonl", rows[::-1])
    write_jsonl(root / "pairs.jsonl", pairs), (root / "prompts.txt").write_text("Which is 3?\n")
    texts = [message["content"] for row in rows for message in row["messages"]]
    save_tiny_model(root / "model", train_tokenizer(texts, vocab_size=300), hidden_size=32, num_layers=2, seed=0)
    on = ("--model-name-or-path", "model")
    for name in ("rows", "old", "pairs"):
        output = {"rows": "data"}.get(name, name)
        words = ("process-data", "--input-file", f"{name}.jsonl", "--output-file", f"{output}.arrow", *on)
        expect(root, *words, *(("--format", "preference") if name == "pairs" else ()))
    common = (*TRAIN, "2", *on, *DATA)
    expect(root, *common, "--output-dir", "run")
    expect(root, *common, "--output-dir", "older", "--seed", "7")
    expect(root, *common, "--output-dir", "lora", "--lora")
    expect(root, *common, "--output-dir", "osft", *OSFT, "--osft-bases", "new")
    expect(root, *READERS["statistics"], "--osft-calibration-data", "data.arrow")
    shutil.rmtree(root / "new")
    expect(root, *READERS["dpo"])
    for name in ("data", "old"):
        expect(root, "score-data", *MODEL, "--data-path", f"{name}.arrow", "--top-k", "4")
    shutil.rmtree(root / "new")


def expect(root: Path, *words: str) -> None:
    code, output = run(root, *words)
    if code != 0:
        sys.exit(f"mini-trainer {' '.join(words)}: exit code {code}\n{output[-3000:]}")


def damage(made: Path, stored: Stored, how: str, work: Path) -> tuple[str, bool]:
    """One row of the table, and whether all was as promised."""
    shutil.copytree(made, work, symlinks=True)
    path = next(work.glob(stored.path))
    if how == "older":
        shutil.copyfile(work / stored.older, path)
    else:
        DAMAGES[how](path)
    code, output = run(work, *READERS[stored.reader])
    lines = [
        line for line in output.splitlines() if any(word in line for word in NOTICED) and str(path.name)[:8] in line
    ]
    lines = lines or [
        line for line in output.splitlines() if line.startswith(SAID) or any(word in line for word in MADE_AGAIN)
    ]
    is_sound = code is not None and bool(lines) and "Traceback" not in output
    said = lines[0].replace(str(work), "").replace("|", "/") if lines else "NOTHING"
    shutil.rmtree(work, ignore_errors=True)
    ending = "does not end" if code is None else code
    return f"| {stored.name} | {how} | {stored.reader} | {ending} | {said[:160]} |", is_sound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a stored thing's name")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        made.mkdir()
        make_all(made)
        cases = [(stored, how) for stored in STORED if args.only in stored.name
                 for how in (*DAMAGES, *(["older"] if stored.older else []))]  # fmt: skip
        print("| stored | damage | read by | exit code | message |\n| --- | --- | --- | --- | --- |", flush=True)
        failures = 0
        with ThreadPoolExecutor(args.jobs) as pool:
            works = (Path(folder) / f"work_{i}" for i in range(len(cases)))
            for row, is_sound in pool.map(lambda case, work: damage(made, *case, work), cases, works):
                print(row if is_sound else f"{row} WRONG", flush=True)
                failures += not is_sound
    print(f"{len(cases)} cases, {failures} not as promised")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
