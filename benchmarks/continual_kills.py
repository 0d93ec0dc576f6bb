"""Kills `mini-trainer continual` at random moments, starts it again until it is done, and compares all that it leaves
with an experiment that nobody disturbed.

    OMP_NUM_THREADS=1 python benchmarks/continual_kills.py --num-kills 100

One experiment of four methods on a tiny model and two tasks: adapters trained further with the model's own answers
replayed, OSFT by activations with rows replayed, self-distillation with an averaged teacher and OSFT by weights, and
all weights with a checkpoint after each step. SIGKILL hits the driver, its child or both, most often at a moment that
was waited for: while a file is written aside, answers or scores are half there, or a program has just ended. After the
death of the driver its child has to end by itself, and every second start does not wait for that. Exports, answers,
scores, data, measurements and metrics (without times) must then be the same, byte for byte, and nothing else may be
left. Exits with 1, and keeps the directory, if anything is not as promised.
"""

import argparse
import collections
import contextlib
import importlib.metadata
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paths

ROOT = paths.ROOT

import yaml
from make_tiny_model import save_tiny_model, train_tokenizer
from processes import ENV, is_alive, list_children

COLOURS, ANIMALS = ("red", "green", "blue"), ("cat", "dog", "owl")
SECONDS_TO_BE_GONE = 120  # for a child whose driver was killed
SECONDS_TO_MOMENT = 120
TIMES = {"seconds", "time", "date", "created", "time_per_batch", "data_wait_seconds", "tokens_per_second",
         "samples_per_second", "peak_memory_usage_GB", "pid", "started"}  # fmt: skip
METHODS = {
    "own_answers": {
        "adapters": "continued",
        "train": {"lora": True, "lora_rank": 4, "learning_rate": 3e-2},
        "replay": {"kind": "own-answers", "share": 0.3, "num_prompts": 20, "min_score": 0.0, "teacher_weight": 0.5},
        "generate": {"max_new_tokens": 6, "batch_size": 2},
    },
    "rows": {
        "train": {"osft": True, "osft_unfreeze_rank_ratio": 0.5, "osft_basis": "activations"},
        "replay": {"kind": "rows", "share": 0.25},
    },
    "full": {"train": {"checkpoint_every_steps": 1}},
}


def make_inputs(root: Path) -> Path:
    """Writes the model, the tasks' rows and the settings; returns the settings' path."""
    for seed, (name, words) in enumerate({"colours": COLOURS, "animals": ANIMALS, "known": COLOURS}.items()):
        rng = random.Random(seed)
        rows = [make_row(name, words, i, rng) for i in range(48)]
        write_lines(root / f"{name}.jsonl", rows[:30])
        write_lines(root / f"{name}_test.jsonl", rows[30:])
    texts = [message["content"] for row in rows for message in row["messages"]]
    save_tiny_model(root / "model", train_tokenizer(texts, vocab_size=320), hidden_size=32, num_layers=2, seed=0)
    tasks = [
        {"name": name, "input_file": f"{root / name}.jsonl", "test": f"{root / name}_test.jsonl", "metric": "rouge_l"}
        for name in ("colours", "animals")
    ]
    tasks[0]["held_out"] = f"{root / 'known'}.jsonl"
    methods = json.loads(json.dumps(METHODS))
    methods["rows"]["train"]["osft_calibration_data"] = str(tokenize(root / "known.jsonl", root / "model"))
    settings = {
        "model": str(root / "model"),
        "output_dir": str(root / "experiment"),
        "train": {"batch_size": 10, "max_tokens_per_gpu": 512, "max_epochs": 2, "learning_rate": 1e-2},
        "evaluate": {"max_new_tokens": 6},
        "tasks": tasks,
        "probes": [{"name": "known", "test": f"{root / 'known'}_test.jsonl", "metric": "rouge_l"}],
        "methods": methods,
    }
    path = root / "tasks.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def make_row(name: str, words: tuple[str, ...], i: int, rng: random.Random) -> dict[str, Any]:
    number = rng.randrange(1000)
    question, answer = f"{name} {number} no {i}: which of {' '.join(words)}?", words[number % len(words)]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenize(rows: Path, model: Path) -> Path:
    output = rows.with_suffix(".arrow")
    command = [sys.executable, str(ROOT / "process_data.py"), "--input-file", str(rows), "--output-file", str(output)]
    subprocess.run([*command, "--model-name-or-path", str(model)], check=True, capture_output=True, env=ENV)
    return output


@dataclass
class Driver:
    """A start of the experiment."""

    settings: Path
    log: Path
    process: subprocess.Popen = field(init=False)

    def __post_init__(self) -> None:
        with self.log.open("a") as log:
            self.start_of_log = log.tell()
            command = [sys.executable, "-m", "mini_trainer", "continual", str(self.settings)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=ENV, stdin=subprocess.DEVNULL)

    @property
    def said(self) -> str:
        return self.log.read_bytes()[self.start_of_log :].decode(errors="replace")

    def find_child(self) -> tuple[int, str, Path] | None:
        """The running program: its process, its word, and its stage's folder."""
        for pid in list_children(self.process.pid):
            with contextlib.suppress(OSError, ValueError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                config = Path(words[words.index("--config") + 1])
                if is_alive(pid):
                    return pid, config.stem, config.parent
        return None

    def wait_until(self, condition: Callable[[], object], *, seconds: float = SECONDS_TO_MOMENT) -> bool:
        """Whether the condition came true while the experiment ran."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.001)
        return False


def find_parts(folder: Path) -> Iterator[Path]:
    """What is being written in a stage's folder."""
    for path, folders, files in os.walk(folder):
        yield from (Path(path, name) for name in folders if name.startswith(".writing_"))
        yield from (Path(path, name) for name in files if name.endswith(".part") or ".part." in name)


def choose_moment(word: str, rng: random.Random) -> str:
    """What to wait for in a program."""
    moments = {
        "generate": ["answers", "answers", "save"],
        "evaluate": ["save", "save"],
        "score-data": ["scores", "scores", "save"],
        "train": ["save", "save", "save"],
    }.get(word, ["save"])
    return rng.choice([*moments, "between", "any", "any"])


def wait_for(moment: str, driver: Driver, rng: random.Random) -> bool:
    """Whether the moment came in the program that runs now."""
    pid, _, folder = driver.find_child() or (0, "", Path())
    before = set(find_parts(folder))

    def is_writing() -> bool:
        return any(path not in before for path in find_parts(folder)) or not is_alive(pid)

    conditions: dict[str, Callable[[], object]] = {
        "answers": lambda: any(folder.glob("answers.jsonl.part*")) or not is_alive(pid),
        "scores": lambda: any(folder.rglob("*.scores*.part")) or not is_alive(pid),
        "save": is_writing,
        "between": lambda: not is_alive(pid),
    }
    if moment == "any":
        time.sleep(rng.uniform(0, 9))
        return driver.process.poll() is None
    came = driver.wait_until(conditions[moment])
    time.sleep(rng.choice([0, 0, rng.uniform(0, 0.01), rng.uniform(0, 0.3)]))
    return came and driver.process.poll() is None


class Kills:
    """Kills and what came of them."""

    def __init__(self, root: Path, seed: int):
        self.root, self.rng, self.settings = root, random.Random(seed), root / "tasks.yaml"
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds_to_be_gone: list[float] = []
        self.bad: list[str] = []

    def start(self) -> Driver:
        return Driver(self.settings, self.root / "driver.log")

    def run_undisturbed(self) -> float:
        """Runs the experiment once without a kill, unless the directory has one; returns its seconds."""
        if (self.root / "reference").exists():
            return 0.0
        make_inputs(self.root)
        begin, driver = time.monotonic(), self.start()
        if driver.process.wait() != 0:
            sys.exit(f"the undisturbed experiment fails:\n{driver.said}")
        (self.root / "experiment").rename(self.root / "reference")
        return time.monotonic() - begin

    def run(self, num_kills: int, deadline: float) -> int:
        """Runs the experiment with up to so many kills, compares, and returns how many there were."""
        kills = 0
        while True:
            driver = self.start()
            if kills < num_kills and time.monotonic() < deadline and self.kill(driver):
                kills += 1
                continue
            code = driver.process.wait()
            if code == 0:
                break
            self.report(f"ended by itself with {code}: {driver.said[-2000:]}")
            return kills
        again = self.start()
        if again.process.wait() != 0 or "mini-trainer " in again.said:
            self.report(f"a finished experiment starts programs again: {again.said[-2000:]}")
        differences = compare(self.root / "reference", self.root / "experiment")
        self.counts["experiments"] += 1
        self.counts["differences"] += len(differences)
        for difference in differences:
            self.report(difference)
        say(f"experiment of {kills} kills: {len(differences)} differences")
        if not differences:
            shutil.rmtree(self.root / "experiment")
        else:
            (self.root / "experiment").rename(self.root / f"different_{self.counts['experiments']}")
        return kills

    def kill(self, driver: Driver) -> bool:
        """Kills what is chosen when it is chosen; False if the experiment came to its end before."""
        if self.rng.random() < 0.08:  # while the driver imports, waits for its lock, or checks its settings
            time.sleep(self.rng.uniform(0, 4))
            return driver.process.poll() is None and self.end(driver, "driver", "start")
        for _ in range(self.rng.choices([1, 2, 3], [70, 25, 5])[0]):
            last = driver.find_child()
            if not driver.wait_until(lambda last=last: driver.find_child() not in (None, last)):
                return False
        child = driver.find_child()
        moment = choose_moment(child[1] if child else "", self.rng)
        if not wait_for(moment, driver, self.rng):
            return False
        target = self.rng.choices(["driver", "child", "both"], [60, 20, 20])[0]
        return self.end(driver, "driver" if moment == "between" else target, moment)

    def end(self, driver: Driver, target: str, moment: str) -> bool:
        """Sends the signal, and checks how the others end."""
        child = driver.find_child()
        if target == "child" and child is None:
            target = "driver"
        pid, word, folder = child or (0, "none", self.root)
        for victim in {"driver": [driver.process.pid], "child": [pid], "both": [driver.process.pid, pid]}[target]:
            if victim:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        killed, code = time.monotonic(), driver.process.wait()
        if target == "child" and (code == 0 or "Traceback" in driver.said or "killed by SIGKILL" not in driver.said):
            if code == 0:
                return False  # the child was the last one, and had ended
            self.report(f"child {word} killed: the driver ended with {code}: {driver.said[-1000:]}")
        self.counts.update([f"of {target}", f"at {moment}", f"in {word}", "kills"])
        self.counts["while something was written"] += any(True for _ in find_parts(folder)) if child else 0
        is_awaited = self.rng.random() < 0.5
        if child and is_awaited:
            while is_alive(pid) and time.monotonic() < killed + SECONDS_TO_BE_GONE:
                time.sleep(0.01)
            self.seconds_to_be_gone.append(time.monotonic() - killed)
            if is_alive(pid):
                self.report(f"{target} killed: {word} is still there after {SECONDS_TO_BE_GONE} s")
        place = folder.relative_to(self.root / "experiment") if child else ""
        say(f"kill {self.counts['kills']}: {target}, {moment}, {word} {place}{'' if is_awaited else ', not awaited'}")
        return True

    def report(self, what: str) -> None:
        self.bad.append(what)
        say(f"BAD: {what}")

    def describe(self) -> str:
        gone = sorted(self.seconds_to_be_gone) or [0.0]
        lines = [f"{name}: {count}" for name, count in sorted(self.counts.items())]
        lines.append(f"seconds until the child had ended: median {gone[len(gone) // 2]:.2f}, most {gone[-1]:.2f}")
        return "\n".join([*lines, f"not as promised: {len(self.bad)}"])


def compare(reference: Path, experiment: Path) -> list[str]:
    """The differences of two finished experiments in all files but logs, checkpoints and the record of the end."""
    files = [list_files(directory) for directory in (reference, experiment)]
    found = [f"only in {name}: {path}" for name, own, other in
             (("the reference", *files), ("the killed one", *files[::-1])) for path in sorted(own - other)]  # fmt: skip
    both = sorted(files[0] & files[1])
    return found + [f"differs: {path}" for path in both if read(reference / path) != read(experiment / path)]


def list_files(directory: Path) -> set[str]:
    paths = [path for path in directory.rglob("*") if path.is_file() or path.is_symlink()]
    names = {str(path.relative_to(directory)) for path in paths if path.suffix != ".log" and path.name != "exit.json"}
    return {name for name in names if "/checkpoints/" not in name}


def read(path: Path) -> Any:
    """What of a file must be the same: all of it, without times and how often a run was started."""
    if path.is_symlink():
        return os.readlink(path)
    if path.name == "README.md":
        return [line for line in path.read_text().splitlines() if not line.startswith("| starts |")]
    if path.name == "training_params.json":
        return [json.loads(path.read_text())[key] for key in ("options", "identity", "versions")]
    if path.name == "manifest.json":
        return [(name, entry) for name, entry in json.loads(path.read_text())["files"].items() if name != "README.md"]
    if path.suffix not in (".json", ".jsonl", ".done"):
        return path.read_bytes()
    text = path.read_text()
    return [drop_times(json.loads(line)) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]


def drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_times(one) for key, one in value.items() if key not in TIMES}
    return list(map(drop_times, value)) if isinstance(value, list) else value


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-kills", type=int, default=100)
    parser.add_argument("--kills-each", type=int, default=50, help="most kills of one experiment")
    parser.add_argument("--minutes", type=float, default=60, help="no further kill after them")
    parser.add_argument("--directory", type=Path, help="kept; an undisturbed experiment there is used again")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = Kills(options.directory or Path(tempfile.mkdtemp(prefix="continual_kills_")), options.seed)
    kills.root.mkdir(exist_ok=True)
    say(f"in {kills.root}")
    begin, left = time.monotonic(), options.num_kills
    deadline = begin + 60 * options.minutes
    say(f"undisturbed: {kills.run_undisturbed():.0f} s")
    while left > 0 and not kills.bad and time.monotonic() < deadline:
        left -= kills.run(min(left, options.kills_each), deadline)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}"
    say(f"{' '.join(sys.argv)}: {(time.monotonic() - begin) / 60:.0f} minutes\n{machine}\n{kills.describe()}")
    if kills.bad:
        sys.exit(f"not as promised; {kills.root} is kept")
    if options.directory is None:
        shutil.rmtree(kills.root)


if __name__ == "__main__":
    main()
