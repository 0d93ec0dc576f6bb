"""Kills `mini-trainer sweep` while its trials run, starts it again until it is done, and compares what it finds with a
sweep that nobody disturbed.

    OMP_NUM_THREADS=1 python benchmarks/sweep_kills.py

A random search of 12 runs over learning rate, batch size and schedule, on the quickstart's chats and a tiny model, two
at a time. SIGKILL hits the sweep, a trial, or the sweep and all its trials, in turn, at random moments while trials
train; trials whose sweep is gone have to end by themselves. Then the table of trials, the winner,
and the metrics and validations of every run (without times) must be the same, to the bit; sweeps are run until there
were enough kills. Exits with 1, and keeps the directory, if not.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import paths
import yaml
from harness import describe_versions
from processes import ENV, is_alive, list_children
from tiny_data import read_lines

TIMES = ("seconds", "time_per_batch", "data_wait_seconds", "tokens_per_second", "samples_per_second",
         "peak_memory_usage_GB")  # fmt: skip
TARGETS = ("sweep", "trial", "both")
SECONDS_TO_BE_GONE = 120  # for trials whose sweep was killed
SECONDS_TO_TRAIN = 600


def run_program(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, env=ENV, cwd=paths.ROOT)


def make_settings(root: Path, *, num_steps: int) -> Path:
    """Writes model, data and the sweep's settings; returns the settings' path."""
    run_program("examples/quickstart/make_data.py", "--output-dir", root)
    rows = ("--messages-file", root / "train.jsonl")
    size = ("--vocab-size", 512, "--hidden-size", 64, "--num-layers", 2)
    run_program("examples/quickstart/make_tiny_model.py", *rows, "--output-dir", root / "model", *size)
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
            "validate_every_steps": num_steps // 9,
            "num_warmup_steps": 0.1,
            "checkpoint_every_steps": 5,
            "activation_checkpointing": "none",
        },
        "parameters": {
            "learning_rate": {"low": 1e-4, "high": 3e-2, "log": True},
            "batch_size": [8, 16],
            "lr_scheduler": ["linear", "cosine"],
        },
        "search": "random",
        "num_trials": 12,
        "num_parallel": 2,
    }
    path = root / "sweep.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def start(settings: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "mini_trainer", "sweep", str(settings)]
    with (settings.parent / "sweep.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=ENV, stdin=subprocess.DEVNULL)


def count_steps(root: Path) -> int:
    """Steps of all trials so far."""
    return sum(len(path.read_text().splitlines()) for path in root.glob("sweep/trial_*/run/training_metrics_0.jsonl"))


def kill(sweep: subprocess.Popen, root: Path, target: str, rng: random.Random, most_steps: int) -> str | None:
    """Waits until trials have trained for some steps more, and kills; returns what was hit, None if it had ended."""
    goal, deadline = count_steps(root) + rng.randint(1, most_steps), time.monotonic() + SECONDS_TO_TRAIN
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


def run(root: Path, kills: range, rng: random.Random, options: argparse.Namespace) -> int:
    """Runs the sweep to its end through at most so many kills; returns the number of the last one."""
    sweep, number = start(root / "sweep.yaml"), kills.start
    while number < kills.stop:
        target = TARGETS[number % len(TARGETS)]
        said = kill(sweep, root, target, rng, options.most_steps)
        if said is None:
            break
        if sweep.poll() is not None:
            sweep = start(root / "sweep.yaml")
        number += 1
        say(f"kill {number}: {said}")
    if sweep.wait() != 0:
        sys.exit(f"the sweep failed: {(root / 'sweep.log').read_text()[-2000:]}")
    return number


def read(root: Path) -> dict[str, object]:
    """The table of trials, best first, and every run's metrics and validations without times."""
    found: dict[str, object] = {"trials": json.loads((root / "results.json").read_text())["trials"]}
    paths = sorted(root.glob("trial_*/run/*_metrics_0.jsonl"))
    return found | {str(path.relative_to(root)): read_metrics(path) for path in paths}


def read_metrics(path: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in read_lines(path)]


def train_again(sweep: Path) -> list[str]:
    """Trains the best trial again, whole; returns which of its files differ from those of the sweep."""
    run_program("train.py", "--config", sweep / "best.yaml", "--output-dir", sweep / "best")
    number = json.loads((sweep / "results.json").read_text())["trials"][0]["number"]
    paths = list((sweep / f"trial_{number}" / "run").glob("*_metrics_0.jsonl"))
    return [path.name for path in paths if read_metrics(path) != read_metrics(sweep / "best" / path.name)]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-kills", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=90, help="of a whole run")
    parser.add_argument("--most-steps", type=int, default=40, help="of all trials between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="sweep_kills_"))
    say(f"in {root}")
    make_settings(root, num_steps=options.num_steps)
    rng = random.Random(options.seed)
    run(root, range(0), rng, options)
    (root / "sweep").rename(root / "undisturbed")
    whole = read(root / "undisturbed")
    say(f"undisturbed: {len(whole['trials'])} trials; best: {describe_best(whole)}")
    num_kills, differing = 0, []
    while num_kills < options.num_kills and not differing:
        shutil.rmtree(root / "sweep", ignore_errors=True)
        num_kills = run(root, range(num_kills, options.num_kills), rng, options)
        killed = read(root / "sweep")
        say(f"killed {num_kills} times; best: {describe_best(killed)}")
        differing = [name for name in sorted(whole.keys() | killed.keys()) if whole.get(name) != killed.get(name)]
        say(f"files compared: {len(whole)}; differing: {len(differing)} {' '.join(differing)}".rstrip())
    differing += train_again(root / "sweep")
    say(f"the best one trained again by hand: differing: {len(differing)}")
    print((root / "sweep.log").read_text().rpartition("\ntrial_")[2].partition("\n")[2].rpartition("\ncurves: ")[0])
    packages = describe_versions("torch", "transformers", "optuna")
    say(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {packages}")
    if differing:
        sys.exit(f"not the same; {root} is kept")


def describe_best(found: dict) -> str:
    best = found["trials"][0]
    return f"trial {best['number']}, loss {best['result']!r}, {best['values']}"


if __name__ == "__main__":
    main()
