"""Damages each thing that is stored, in eight ways, and reports who notices, and how.

    OMP_NUM_THREADS=1 python benchmarks/stored_damage.py

On a tiny model: data sets and what is cached of them, parts, scores, exports, adapter, checkpoint, the files of a run,
OSFT's bases, statistics and cache, a reference's log-probabilities. Each is truncated, has one bit flipped, is deleted,
is replaced by that of an older or another run, by a FIFO, a directory or a link to somebody else's file; then the
program that reads it is started. A line says the exit code and what was printed of it. Exits with 1 if a program
printed nothing and had other results than with the whole file, changed somebody else's file, had a traceback, or did
not end.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import paths
import pyarrow as pa
from make_tiny_model import save_tiny_model, train_tokenizer
from tiny_data import write_jsonl, write_rows

SECONDS = 120
SAID = ("error", "warning", "DAMAGED", "part ")
# What programs compute: losses, answers, results, scores, data sets.
RESULTS = ("*/training_metrics_0.jsonl", "a.jsonl", "seen/results.json", "*.other.scores", "joined.arrow")
TIMES = re.compile(rb'"(?:time|timestamp|[a-z_]*seconds?|[a-z_]*per_second|mfu|[a-z_]*(?:gib|time))": [^,}]+')


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
    env = os.environ | {"PYTHONPATH": str(paths.ROOT), "HOME": str(root / "home"), "HF_HUB_OFFLINE": "1"}
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
    "train on lines": (*TRAIN, "2", *MODEL, "--data-path", "lines.jsonl", "--output-dir", "new"),
    "train on Parquet": (*TRAIN, "2", *MODEL, "--data-path", "table.parquet", "--output-dir", "new"),
    "train on rows": (*TRAIN, "2", *MODEL, "--input-file", "rows.jsonl", "--data-cache-dir", "rows",
                      "--output-dir", "new"),
    "join": ("process-data", "--input-file", "rows.jsonl", "--output-file", "joined.arrow", "--model-name-or-path",
             "model", "--shard", "2/2"),
}  # fmt: skip
PART, COPIES = ".arrow.parts/part_1_of_2", "home/.cache/mini_trainer/data/converted/*"
STORED = [
    *(Stored("data set", "data.arrow", reader, "old.arrow")
      for reader in ("train", "evaluate", "score-data", "verify")),
    Stored("its sidecar", "data.arrow.meta.json", "train", "old.arrow.meta.json"),
    Stored("scores", "data.arrow.teacher.scores", "distill", "old.arrow.teacher.scores"),
    Stored("their sidecar", "data.arrow.teacher.scores.json", "distill", "old.arrow.teacher.scores.json"),
    Stored("reference's log-probabilities", "pairs.arrow.reference-*", "dpo", "others.arrow.reference-*"),
    Stored("copy of JSON lines", f"{COPIES}/lines.arrow", "train on lines", f"{COPIES}/table.arrow"),
    Stored("copy of Parquet", f"{COPIES}/table.arrow", "train on Parquet", f"{COPIES}/lines.arrow"),
    *(Stored("a copy's record", f"{COPIES}/made.json", reader) for reader in ("train on lines", "train on Parquet")),
    *(Stored(f"tokenized rows: {name}", f"rows/*/{name}", "train on rows", older)
      for name, older in (("rows.arrow", "old.arrow"), ("rows.arrow.meta.json", "old.arrow.meta.json"),
                          ("made.json", None))),
    *(Stored(f"a part's {name}", f"joined{PART}.{name}", "join", f"other{PART}.{name}")
      for name in ("rows", "meta.json")),
    *(Stored(f"a run's {name}", f"run/{name}", "resume", f"older/{name}" if name != ".lock" else None)
      for name in ("training_params.json", "training_metrics_0.jsonl", "exit.json", ".lock")),
    *(Stored("export's weights", f"{EXPORT}/model.safetensors", reader, "older/hf_format/samples_8/model.safetensors")
      for reader in ("train", "generate", "evaluate", "score-data", "verify")),
    Stored("export's config", f"{EXPORT}/config.json", "generate", "model/config.json"),
    Stored("export's manifest", f"{EXPORT}/manifest.json", "generate", "older/hf_format/samples_8/manifest.json"),
    Stored("adapter's weights", "lora/hf_format/samples_8/adapter_model.safetensors", "generate by adapter"),
    Stored("OSFT's bases", BASES, "osft"),
    Stored("OSFT's cache", "cache/*.safetensors", "cache", "cache/*.safetensors"),
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


def be_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_link(path: Path) -> None:
    """A link to somebody else's file, as in an archive from somewhere."""
    (path.parent.parent / THEIRS).write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(path.parent.parent / THEIRS)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one bit": flip_bit,
    "deleted": Path.unlink,
    "FIFO": be_fifo,
    "directory": be_directory,
    "link": be_link,
}
THEIRS = "theirs"


def make_all(root: Path) -> None:
    """One of each stored thing, by the programs themselves."""
    chats = [(f"Which is {i}?", f"It is {i}.") for i in range(40)]
    rows = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in chats]  # fmt: skip
    pairs = [{"prompt": f"Which is {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(12)]
    write_jsonl(root / "rows.jsonl", rows), write_jsonl(root / "old.jsonl", rows[::-1])
    write_jsonl(root / "pairs.jsonl", pairs), write_jsonl(root / "others.jsonl", pairs[::-1])
    (root / "prompts.txt").write_text("Which is 3?\n")
    texts = [message["content"] for row in rows for message in row["messages"]]
    save_tiny_model(root / "model", train_tokenizer(texts, vocab_size=300), hidden_size=32, num_layers=2, seed=0)
    on = ("--model-name-or-path", "model")
    for name in ("rows", "old", "pairs", "others"):
        output = {"rows": "data"}.get(name, name)
        words = ("process-data", "--input-file", f"{name}.jsonl", "--output-file", f"{output}.arrow", *on)
        expect(root, *words, *(("--format", "preference") if name in ("pairs", "others") else ()))
    common = (*TRAIN, "2", *on, *DATA)
    expect(root, *common, "--output-dir", "run")
    (root / "run" / ".lock").write_text("{}\n")  # as a killed run leaves one
    expect(root, *common, "--output-dir", "older", "--seed", "7")
    expect(root, *common, "--output-dir", "lora", "--lora")
    expect(root, *common, "--output-dir", "osft", *OSFT, "--osft-bases", "new")
    expect(root, *READERS["statistics"], "--osft-calibration-data", "data.arrow")
    shutil.rmtree(root / "new")
    expect(root, *READERS["dpo"])
    shutil.rmtree(root / "new")
    expect(root, *(word.replace("pairs", "others") for word in READERS["dpo"]))
    for name, source in (("lines.jsonl", "data"), ("table.parquet", "old")):
        rows = pa.ipc.open_file(root / f"{source}.arrow").read_all()
        write_rows(root / name, rows.select([name for name in rows.column_names if name != "loss_weights"]).to_pylist())
    for reader in ("train on lines", "train on Parquet", "train on rows"):
        shutil.rmtree(root / "new")
        expect(root, *READERS[reader])
    for name, output in (("rows", "joined"), ("old", "other")):
        words = ("process-data", "--input-file", f"{name}.jsonl", "--output-file", f"{output}.arrow", "--shard", "1/2")
        expect(root, *words, *on)
    for name in ("data", "old"):
        expect(root, "score-data", *MODEL, "--data-path", f"{name}.arrow", "--top-k", "4")
    shutil.rmtree(root / "new")


def expect(root: Path, *words: str) -> None:
    code, output = run(root, *words)
    if code != 0:
        sys.exit(f"mini-trainer {' '.join(words)}: exit code {code}\n{output[-3000:]}")


def read_results(work: Path) -> dict[str, bytes]:
    """What programs have computed, without times and places."""
    paths = (path for pattern in RESULTS for path in work.glob(pattern))
    return {path.name: TIMES.sub(b"", path.read_bytes()).replace(bytes(work), b"") for path in paths}


def damage(made: Path, stored: Stored, how: str, work: Path, expected: dict[str, bytes]) -> tuple[str, bool]:
    """One row of the table, and whether all was as promised."""
    shutil.copytree(made, work, symlinks=True)
    path = min(work.glob(stored.path))
    whole = path.read_bytes()
    if how == "older":
        path.write_bytes(max(work.glob(stored.older)).read_bytes())
    elif how != "nothing":
        DAMAGES[how](path)
    code, output = run(work, *READERS[stored.reader])
    lines = [line for line in output.splitlines() if line.startswith(SAID)]
    lines.sort(key=lambda line: path.name[:8] not in line)
    is_same = code == 0 and read_results(work) == expected
    is_sound = code is not None and bool(lines or is_same) and "Traceback" not in output
    if how == "link":
        is_sound &= (path.parent.parent / THEIRS).read_bytes() == whole
    said = lines[0].replace(str(work), "").replace("|", "/") if lines else "the same results" if is_same else "NOTHING"
    shutil.rmtree(work, ignore_errors=True)
    ending = "does not end" if code is None else code
    return f"| {stored.name} | {how} | {stored.reader} | {ending} | {said[:160]} |", is_sound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=[""], nargs="*", help="parts of stored things' names")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        made.mkdir()
        make_all(made)
        chosen = [stored for stored in STORED if any(part in stored.name for part in args.only)]
        results = {}
        for reader in {stored.reader for stored in chosen}:
            shutil.copytree(made, work := Path(folder) / "whole", symlinks=True)
            code, output = run(work, *READERS[reader])
            assert code == 0, output
            results[reader] = read_results(work)
            shutil.rmtree(work)
        cases = [(stored, how) for stored in chosen for how in (*DAMAGES, *(["older"] if stored.older else []))]
        print("| stored | damage | read by | exit code | message |\n| --- | --- | --- | --- | --- |", flush=True)
        failures = 0
        with ThreadPoolExecutor(args.jobs) as pool:
            works = (Path(folder) / f"work_{i}" for i in range(len(cases)))
            expected = [results[stored.reader] for stored, _ in cases]
            for row, is_sound in pool.map(lambda case, *more: damage(made, *case, *more), cases, works, expected):
                print(row if is_sound else f"{row} WRONG", flush=True)
                failures += not is_sound
    print(f"{len(cases)} cases, {failures} not as promised")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
