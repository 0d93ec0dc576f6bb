"""Kills `mini-trainer sweep` while its trials run, starts it again until it is done, and compares what it finds with a
sweep that nobody disturbed.

    OMP_NUM_THREADS=1 python benchmarks/sweep_kills.py

A halving search of 12 runs over learning rate, batch size and schedule, on the quickstart's chats and a tiny model, two
at a time. SIGKILL hits the sweep, a trial, or the sweep and all its trials, in turn, at random moments while trials
train; trials whose sweep is gone have to end by themselves. Then the table of trials, the winner, and the metrics and
validations of every run (without times) must be the same, to the bit. Exits with 1, and keeps the directory, if not.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart"), str(ROOT / "tests")]

import yaml
from processes import ENV, is_alive, list_children

TIMES = ("seconds", "time_per_batch", "data_wait_seconds", "tokens_per_second", "samples_per_second",
         "peak_memory_usage_GB")  # fmt: skip
TARGETS = ("sweep", "trial", "both")
SECONDS_TO_BE_GONE = 120  # for trials whose sweep was killed
SECONDS_TO_TRAIN = 600


def run_program(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, env=ENV, cwd=ROOT)


def make_settings(root: Path, *, num_steps: int) -> Path:
    """Writes model, data and the sweep's settings; returns the settings' path."""
    run_program("quickstart/make_data.py", "--output-dir", root)
    rows = ("--messages-file", root / "train.jsonl")
    size = ("--vocab-size", 512, "--hidden-size", 64, "--num-layers", 2)
    run_program("quickstart/make_tiny_model.py", *rows, "--output-dir", root / "model", *size)
    for name in ("train", "held_out"):
        files = ("--input-file", root / f"{name}.jsonl", "--output-file", root / f"{name}.arrow")
        run_program("process_data.py", *files, "--model-name-or-path", root / "model", "--preview", 0)
    settings = {
        "output_dir": str(root / "sweep"),
        "train": {
            "model_name_or_path": str(root / "model"),
            "data_path": str(root / "train.arrow"),
            "validation_data_path": str(root / "held_out.arrow"),
            "max_tokens_per_gpu": 1024,
            "max_steps": num_steps,
            "warmup_ratio": 0.1,
            "checkpoint_every_steps": 5,
            "activation_checkpointing": "none",
        },
        "parameters": {
            "learning_rate": {"low": 1e-4, "high": 3e-2, "log": True},
            "batch_size": [8, 16],
            "lr_scheduler": ["linear", "cosine"],
        },
        "search": "halving",
        "num_trials": 12,
        "min_steps": num_steps // 9,
        "num_parallel": 2,
    }
    path = root / "sweep.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def start(settings: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "__main__.py"), "sweep", str(settings)]
    with (settings.parent / "sweep.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=ENV, stdin=subprocess.DEVNULL)


def count_steps(root: Path) -> int:
    """Steps of all trials so far."""
    return sum(len(path.read_text().splitlines()) for path in root.glob("sweep/trial_*/run/training_metrics_0.jsonl"))


def kill(sweep: subprocess.Popen, root: Path, target: str, rng: random.Random) -> str | None:
    """Waits until trials have trained for some steps more, and kills; returns what was hit, None if it had ended."""
    goal, deadline = count_steps(root) + rng.randint(3, 40), time.monotonic() + SECONDS_TO_TRAIN
    while count_steps(root) < goal or not list_children(sweep.pid):
        if sweep.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    trials = list_children(sweep.pid)
    victims = {"sweep": [sweep.pid], "trial": trials[:1], "both": [sweep.pid, *trials]}[target]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    if target != "trial":
        sweep.wait()
        begin = time.monotonic()
        while any(map(is_alive, trials)):
            if time.monotonic() - begin > SECONDS_TO_BE_GONE:
                sys.exit(f"trials are left {SECONDS_TO_BE_GONE} s after their sweep was killed; {root} is kept")
            time.sleep(0.01)
    return f"{target} killed with {len(trials)} trials running, after {count_steps(root)} steps in all"


def run(root: Path, num_kills: int, rng: random.Random) -> None:
    """Runs the sweep to its end through so many kills."""
    sweep, num_done = start(root / "sweep.yaml"), 0
    while num_done < num_kills:
        said = kill(sweep, root, TARGETS[num_done % len(TARGETS)], rng)
        if said is None:
            sys.exit(f"the sweep ended after {num_done} kills, before the next one; {root} is kept")
        num_done += 1
        say(f"kill {num_done}: {said}")
        if sweep.poll() is not None:
            sweep = start(root / "sweep.yaml")
    if sweep.wait() != 0:
        sys.exit(f"the sweep failed: {(root / 'sweep.log').read_text()[-2000:]}")


def read(root: Path) -> dict[str, object]:
    """The table of trials, best first, and every run's metrics and validations without times."""
    found: dict[str, object] = {"trials": json.loads((root / "results.json").read_text())["trials"]}
    paths = sorted(root.glob("trial_*/run/*_metrics_0.jsonl"))
    return found | {str(path.relative_to(root)): read_lines(path) for path in paths}


def read_lines(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def train_again(sweep: Path) -> list[str]:
    """Trains the best trial again, whole; returns which of its files differ from those of the sweep."""
    run_program("train.py", "--config", sweep / "best.yaml", "--output-dir", sweep / "best", "--export-name", "last")
    number = json.loads((sweep / "results.json").read_text())["trials"][0]["number"]
    paths = list((sweep / f"trial_{number}" / "run").glob("*_metrics_0.jsonl"))
    return [path.name for path in paths if read_lines(path) != read_lines(sweep / "best" / path.name)]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-kills", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=90, help="of a whole run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="sweep_kills_"))
    say(f"in {root}")
    make_settings(root, num_steps=options.num_steps)
    rng = random.Random(options.seed)
    run(root, 0, rng)
    (root / "sweep").rename(root / "undisturbed")
    whole = read(root / "undisturbed")
    say(f"undisturbed: {len(whole['trials'])} trials; best: {describe_best(whole)}")
    run(root, options.num_kills, rng)
    killed = read(root / "sweep")
    say(f"killed {options.num_kills} times; best: {describe_best(killed)}")
    differing = [name for name in sorted(whole.keys() | killed.keys()) if whole.get(name) != killed.get(name)]
    say(f"files compared: {len(whole)}; differing: {len(differing)} {' '.join(differing)}".rstrip())
    differing += train_again(root / "sweep")
    say(f"the best one trained again without rungs: differing: {len(differing)}")
    print((root / "sweep.log").read_text().rpartition("\ntrial_")[2].partition("\n")[2].rpartition("\ncurves: ")[0])
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "optuna"))
    say(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {packages}")
    if differing:
        sys.exit(f"not the same; {root} is kept")


def describe_best(found: dict) -> str:
    best = found["trials"][0]
    return f"trial {best['number']}, loss {best['result']!r}, {best['values']}"


if __name__ == "__main__":
    main()
