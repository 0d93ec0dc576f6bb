"""Kills a training run at random instants, starts it again, and checks that nothing was lost and nothing changed.

    python benchmarks/soak.py --minutes 60 --seed 1

Every run is the real program on a tiny model: a fresh directory, kills of all ranks, one rank or torchrun (SIGKILL),
about half of them aimed at the moment in which a checkpoint or an export is being written, until the run comes to its
end. Then its metrics and its last checkpoint are compared, bit for bit, with a run of the same layout that nobody
disturbed. Prints a line for each run and a summary; exits with 1 if anything was not as promised.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart"), str(ROOT / "tests")]

from processes import ENV, flags, is_alive, list_children, torchrun
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

NUM_STEPS = 60
SECONDS_TO_BE_GONE = 10
LAYOUTS = [  # ranks, and whether checkpoints are written in the background
    (1, False),
    (1, True),
    (2, False),
    (2, True),
    (4, True),
]
TIMES = ("time_per_batch", "data_wait_seconds", "tokens_per_second", "samples_per_second", "peak_memory_usage_GB")


def command(inputs: dict[str, Path], output_dir: Path, num_ranks: int, is_async: bool) -> list[str]:
    """One run: a checkpoint every 5 steps, an export about every 16."""
    argv = flags(
        **inputs, output_dir=output_dir, batch_size=8, max_tokens_per_gpu=64, max_steps=NUM_STEPS, learning_rate=1e-3,
        checkpoint_every_steps=5, min_samples_per_checkpoint=128, async_checkpoint=is_async,
        activation_checkpointing="none",
    )  # fmt: skip
    script = str(ROOT / "train.py")
    return [sys.executable, script, *argv] if num_ranks == 1 else torchrun(num_ranks, script, *argv)


def read_steps(output_dir: Path) -> list[dict]:
    """The metrics' rows without times; a torn last line is left out."""
    rows = []
    path = output_dir / "training_metrics_0.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            rows.append({key: value for key, value in json.loads(line).items() if key not in TIMES})
    return rows


def hashes(output_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of weights and optimizer state in the last checkpoint, and of the last export's."""
    (checkpoint,) = output_dir.glob(f"checkpoints/step_{NUM_STEPS}")
    (export,) = output_dir.glob(f"hf_format/samples_{NUM_STEPS * 8}")
    found = {}
    for directory in (checkpoint, export):
        files = json.loads((directory / "manifest.json").read_text())["files"]
        found |= {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}
    return found


def newest_checkpoint(output_dir: Path) -> int:
    steps = [int(path.name.removeprefix("step_")) for path in output_dir.glob("checkpoints/step_*")]
    return max(steps, default=0)


def is_saving(output_dir: Path) -> bool:
    return any(itertools.chain(output_dir.glob("checkpoints/.writing_*"), output_dir.glob("hf_format/.writing_*")))


class Soak:
    def __init__(self, root: Path, seed: int):
        self.root, self.random = root, random.Random(seed)
        model = save_tokenizer(save_model(FAMILIES["qwen3"], root / "model"))
        data = write_samples(root / "data.arrow", make_samples(37, vocab_size=VOCAB_SIZE))
        self.steps_before = 0  # in the metrics when the last kill came
        self.inputs = dict(model_name_or_path=model, data_path=data)
        self.references: dict[int, tuple[list[dict], dict[str, str]]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.lost_steps: list[int] = []
        self.seconds_to_be_gone: list[float] = []

    def reference(self, num_ranks: int) -> tuple[list[dict], dict[str, str]]:
        """What the undisturbed run leaves; written synchronously, which must make no difference."""
        if num_ranks not in self.references:
            output_dir = self.root / f"reference_{num_ranks}"
            subprocess.run(
                command(self.inputs, output_dir, num_ranks, False), env=ENV, check=True, stderr=subprocess.DEVNULL
            )
            self.references[num_ranks] = read_steps(output_dir), hashes(output_dir)
        return self.references[num_ranks]

    def run_once(self, number: int, deadline: float) -> None:
        """One run from zero to its end, killed again and again."""
        num_ranks, is_async = LAYOUTS[number % len(LAYOUTS)]
        output_dir = self.root / f"run_{number}"
        kills, expected, log_path = 0, 0, self.root / f"run_{number}.log"
        self.steps_before = 0
        while True:
            with open(log_path, "ab") as log:
                begin = log.tell()
                process = subprocess.Popen(
                    command(self.inputs, output_dir, num_ranks, is_async), env=ENV, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            is_killed = time.monotonic() < deadline and self.kill(process, output_dir, num_ranks)
            process.wait()
            text = log_path.read_bytes()[begin:].decode(errors="replace")
            self.check_start(text, expected, begun=self.steps_before)
            if not is_killed:
                break
            kills += 1
            expected, self.steps_before = newest_checkpoint(output_dir), len(read_steps(output_dir))
        if process.returncode != 0:
            self.bad(f"run {number}: ended with {process.returncode}; see {log_path}")
        rows, files = self.reference(num_ranks)
        is_same = read_steps(output_dir) == rows and hashes(output_dir) == files
        self.counts["runs"] += 1
        if not is_same:
            self.bad(f"run {number}: not the undisturbed run")
            self.counts["mismatches"] += 1
        print(f"run {number}: {num_ranks} ranks{', async' if is_async else ''}, {kills} kills, "
              f"{'the same bit for bit' if is_same else 'DIFFERENT'}; {self.summary()}", flush=True)  # fmt: skip

    def kill(self, process: subprocess.Popen, output_dir: Path, num_ranks: int) -> bool:
        """Kills what is chosen at the instant that is chosen; False if the run was over before."""
        aim = self.random.choice(["save", "save", "save", "any"])
        metrics = output_dir / "training_metrics_0.jsonl"
        until_loop = self.random.random() < 0.9  # else the start is what is hit
        delay = self.random.uniform(0, 6)
        begin = time.monotonic()
        size = metrics.stat().st_size if metrics.exists() else 0
        if until_loop:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size != size):
                time.sleep(0.005)
            delay = self.random.uniform(0, 0.6)
            begin = time.monotonic()
        while process.poll() is None and time.monotonic() < begin + delay:
            time.sleep(0.001)
        if aim == "save" and until_loop:
            while process.poll() is None and not is_saving(output_dir):
                time.sleep(0.001)
            time.sleep(self.random.choice([0, 0, self.random.uniform(0, 0.02)]))
        if process.poll() is not None:
            return False
        pids = [process.pid, *list_children(process.pid)]
        ranks = pids[1:] if num_ranks > 1 else pids
        target = self.random.choice(["all", "one", "torchrun"]) if num_ranks > 1 and len(ranks) == num_ranks else "all"
        victims = {"all": pids, "one": [self.random.choice(ranks or pids)], "torchrun": [process.pid]}[target]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        while any(is_alive(pid) for pid in ranks) and time.monotonic() < killed + SECONDS_TO_BE_GONE:
            time.sleep(0.01)
        survivors = [pid for pid in ranks if is_alive(pid)]
        if survivors:
            self.bad(f"{target} killed: {len(survivors)} ranks still there after {SECONDS_TO_BE_GONE} s")
            for pid in survivors:
                os.kill(pid, signal.SIGKILL)
        self.seconds_to_be_gone.append(time.monotonic() - killed)
        self.counts["kills"] += 1
        self.counts[f"kills of {target}"] += 1
        self.counts["kills inside a save"] += is_saving(output_dir)
        self.counts["kills during start-up"] += not until_loop
        return True

    def check_start(self, text: str, expected: int, *, begun: int) -> None:
        """The start must have gone on from the newest checkpoint there was, unless it was killed before it said so."""
        found = re.search(r"^resuming from .*step_(\d+):", text, re.MULTILINE)
        fresh = re.search(r"^starting from step 0", text, re.MULTILINE)
        if found:
            self.counts["resumes"] += 1
            self.lost_steps.append(max(0, begun - int(found[1])))
        if (found and int(found[1]) != expected) or (fresh and expected > 0) or "cannot be trusted" in text:
            self.bad(f"step {expected} was there, and the start said: {(found or fresh)[0]}")

    def bad(self, what: str) -> None:
        self.counts["bad"] += 1
        print(f"BAD: {what}", flush=True)

    def summary(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak_") as root:
        soak = Soak(Path(root), options.seed)
        deadline = time.monotonic() + 60 * options.minutes
        number = options.seed  # so that the layout to begin with differs
        while time.monotonic() < deadline:
            soak.run_once(number, deadline)
            number += 1
    lost = sorted(soak.lost_steps) or [0]
    gone = sorted(soak.seconds_to_be_gone) or [0.0]
    print(f"seed {options.seed}: {soak.summary()}")
    print(f"steps lost by a kill: median {lost[len(lost) // 2]}, most {lost[-1]}")
    print(f"seconds until every rank was gone: median {gone[len(gone) // 2]:.2f}, most {gone[-1]:.2f}")
    sys.exit(1 if soak.counts["bad"] else 0)


if __name__ == "__main__":
    main()
