"""Kills a training run at random instants, starts it again, and checks that nothing was lost and nothing changed.

    python benchmarks/soak.py --minutes 60 --seed 1
    python benchmarks/soak.py --starts forked --kills 1000 --minutes 120
    python benchmarks/soak.py --starts forked --kills 200 --minutes 120 --ranks 4
    python benchmarks/soak.py --starts mini-trainer --kills 40 --minutes 60 --ranks 2 3 --stops

Every run is the real program on a tiny model: a fresh directory, kills of all ranks, one rank or torchrun (SIGKILL),
most of them aimed at the moment in which a checkpoint or an export is being written, until the run comes to its end.
After each kill the metrics so far, and at its end these, the last checkpoint and the last export are compared, bit for
bit, with a run on as many ranks that nobody disturbed. Every layout of `LAYOUTS`, or those of `--ranks` and `--kinds`,
gets as many kills: a text model with all its weights, one with DoRA adapters, one that sees, preferences (DPO), binary
feedback (KTO) and a reward model. DPO and KTO begin every run with scoring the data by the reference, and most of their
kills are aimed at that until it is done; before half of the later starts the scores are removed. Prints a line for each
run and a table; exits with 1 if anything was not as promised, and keeps the directory then.

With `--stops` a rank is stopped (SIGSTOP) once the ranks know each other; nothing wakes it: another one has to end it.
With `--starts torchrun` and `mini-trainer` a start is what a user starts, mostly imports. With `--starts forked` its
ranks are forked from a process that has imported everything (tests/runs/forked.py), and there is no torchrun: when a
rank is killed, the others have to end by themselves. Only before the ranks are tied together nothing but torchrun could
end them, and a SIGTERM is sent in its place.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paths
from forked import ForkedJob
from processes import ENV, Job, flags, is_alive, list_children, torchrun
from safetensors.numpy import load_file
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from tiny_pairs import write_pairs
from tiny_vision import make_rows, save_vision_model, tokenize

from mini_trainer.run.references import PART_SIZE

NUM_STEPS, BATCH_SIZE, KILLS_PER_RUN = 100, 8, 25
SECONDS_TO_BE_GONE, HANG_TIMEOUT = 10, 10
SECONDS_TO_MOMENT = 180  # for a start to come to the moment at which it is to be killed, on a busy machine


class Layout(NamedTuple):
    num_ranks: int
    is_async: bool  # whether checkpoints are written in the background
    kind: str = "text"  # of KINDS

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {self.kind}{', async' * self.is_async}"


LAYOUTS = [
    *(Layout(num_ranks, is_async) for num_ranks in (1, 2, 3) for is_async in (False, True)),
    Layout(4, True),
    *(Layout(4, is_async, kind) for kind in ("dora", "vision") for is_async in (True, False)),
    Layout(1, True, "dpo"),
    Layout(2, False, "dpo"),
    Layout(1, False, "kto"),
    Layout(2, True, "kto"),
    Layout(1, True, "reward"),
    Layout(2, False, "reward"),
]
KINDS = {  # what a kind of run has beside the options of all
    "text": {"max_tokens_per_gpu": 128},
    "dora": {"max_tokens_per_gpu": 128, "lora": True, "lora_rank": 4, "lora_use_dora": True, "lora_export": "both"},
    "vision": {"max_tokens_per_gpu": 256},
    "dpo": {"max_tokens_per_gpu": 256, "objective": "preference"},
    "kto": {"max_tokens_per_gpu": 256, "objective": "kto"},
    "reward": {"max_tokens_per_gpu": 256, "objective": "reward"},
}
PREFERENCE_KINDS = ("dpo", "kto", "reward")
SCORING_KINDS = ("dpo", "kto")  # which begin with the reference's scores
TIMES = ("time_per_batch", "data_wait_seconds", "tokens_per_second", "samples_per_second", "peak_memory_usage_GB")
TO_SCORE = r"^reference: .* scored before, [1-9][\d,]* to score"
SCORED = r"^model: "  # the line after the scoring
TIED = r"^(resuming from .*step_(\d+):|starting from step 0)"  # what a start says once every rank knows the others
HEAD = (
    "ranks, kind", "kills", "of all", "of one rank", "of torchrun", "in a save", "in start-up", "in scoring", "resumes",
    "steps lost: median, most", "s until all were gone: median, most", "runs", "mismatches", "bad",
)  # fmt: skip


def make_arguments(inputs: dict[str, Path], output_dir: Path, layout: Layout) -> list[str]:
    """One run, of two data sets: a checkpoint every 5 steps, a validation every 8, an export about every 16."""
    argv = flags(
        **inputs, **KINDS[layout.kind], output_dir=output_dir, batch_size=BATCH_SIZE, max_steps=NUM_STEPS,
        learning_rate=1e-3, checkpoint_every_steps=5, min_samples_per_checkpoint=16 * BATCH_SIZE,
        async_checkpoint=layout.is_async, activation_checkpointing="none", data_weights=(2, 1), validate_every_steps=8,
        hang_timeout=HANG_TIMEOUT,
    )  # fmt: skip
    return [str(paths.ROOT / "train.py"), *argv]


def start(num_ranks: int, argv: Sequence[str], output_dir: Path, *, starts: str) -> Job | ForkedJob:
    """One rank is `python train.py`, or what is forked in its place."""
    if starts == "forked":
        return ForkedJob(num_ranks if num_ranks > 1 else 0, argv, output_dir)
    if starts == "mini-trainer":
        words = ["-m", "mini_trainer", "train", f"--nproc-per-node={num_ranks}", *argv[1:]]
        return Job([sys.executable, *words], output_dir)
    return Job([sys.executable, *argv] if num_ranks == 1 else torchrun(num_ranks, *argv), output_dir)


def read_steps(output_dir: Path) -> list[dict]:
    """The metrics' rows without times; a torn last line is left out."""
    rows = []
    path = output_dir / "training_metrics_0.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            rows.append({key: value for key, value in json.loads(line).items() if key not in TIMES})
    return rows


def hashes(output_dir: Path) -> dict[str, str]:
    """SHA-256 of what is learnt in the last checkpoint, the last export and the best one; and the validations."""
    (checkpoint,) = output_dir.glob(f"checkpoints/step_{NUM_STEPS}")
    (export,) = output_dir.glob(f"hf_format/samples_{NUM_STEPS * BATCH_SIZE}")
    found = {}
    exports = (export, output_dir / "hf_format" / "best")
    for directory in (checkpoint, *(path.parent for one in exports for path in sorted(one.rglob("manifest.json")))):
        place = directory.relative_to(output_dir)
        found |= {f"{place}/{name}": digest for name, digest in read_hashes(directory).items()}
    rows = map(json.loads, (output_dir / "validation_metrics_0.jsonl").read_text().splitlines())
    return found | {"validations": json.dumps([row | {"seconds": None} for row in rows])}


def read_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of the files with a checkpoint's or an export's tensors."""
    files = json.loads((directory / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def newest_checkpoint(output_dir: Path) -> int:
    steps = [int(path.name.removeprefix("step_")) for path in output_dir.glob("checkpoints/step_*")]
    return max(steps, default=0)


def is_saving(output_dir: Path) -> bool:
    return any(itertools.chain(output_dir.glob("checkpoints/.writing_*"), output_dir.glob("hf_format/.writing_*")))


@dataclass
class Tally:
    """What came of the runs on one number of ranks, or on all of them."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    lost_steps: list[int] = field(default_factory=list)  # of each start that finds steps taken
    seconds_to_be_gone: list[float] = field(default_factory=list)  # of each kill

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.counts + other.counts,
            self.lost_steps + other.lost_steps,
            self.seconds_to_be_gone + other.seconds_to_be_gone,
        )

    def format_row(self, name: str) -> str:
        lost, gone = sorted(self.lost_steps) or [0], sorted(self.seconds_to_be_gone) or [0.0]
        cells = [name, *(self.counts[key] for key in HEAD[1:9]), f"{lost[len(lost) // 2]}, {lost[-1]}",
                 f"{gone[len(gone) // 2]:.2f}, {gone[-1]:.2f}", *(self.counts[key] for key in HEAD[11:])]  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


@dataclass(frozen=True)
class Reference:
    """The undisturbed run on one number of ranks."""

    rows: list[dict]
    files: dict[str, str]  # SHA-256 by name
    seconds_to_first_step: float
    seconds_of_scoring: float
    seconds_per_step: float  # with its share of checkpoints and exports


class Soak:
    def __init__(self, root: Path, seed: int, *, starts: str, stops: bool = False, layouts: Sequence[Layout] = LAYOUTS):
        self.root, self.random, self.starts, self.stops = root, random.Random(seed), starts, stops
        self.is_forked = starts == "forked"
        self.inputs = make_inputs(root, {layout.kind for layout in layouts})
        self.references: dict[tuple[int, str], Reference] = {}
        self.tallies = {(layout.num_ranks, layout.kind): Tally() for layout in layouts}
        self.kills = dict.fromkeys(layouts, 0)
        self.endings: collections.Counter[str] = collections.Counter()  # exit.json after a rank or torchrun was killed

    def reference(self, num_ranks: int, kind: str) -> Reference:
        """What the undisturbed run leaves; written synchronously, which must make no difference."""
        if (num_ranks, kind) not in self.references:
            forget_reference(self.root)
            output_dir = self.root / f"reference_{num_ranks}_{kind}"
            argv = make_arguments(self.inputs[kind], output_dir, Layout(num_ranks, False, kind))
            job = start(num_ranks, argv, output_dir, starts=self.starts)
            begin = time.monotonic()
            wait_until(job, lambda: says(job, TO_SCORE) or says(job, SCORED))
            scoring = time.monotonic()
            wait_until(job, lambda: says(job, SCORED))
            scored = time.monotonic()
            if not wait_until(job, lambda: read_steps(output_dir)):
                raise RuntimeError(f"the undisturbed run does not begin:\n{job.log.read_text()}")
            first = time.monotonic()
            job.process.wait()
            seconds = first - begin, scored - scoring, (time.monotonic() - first) / NUM_STEPS
            self.references[num_ranks, kind] = Reference(read_steps(output_dir), hashes(output_dir), *seconds)
        return self.references[num_ranks, kind]

    def run_once(self, number: int, layout: Layout, may_kill: Callable[[], bool]) -> None:
        """One run from zero to its end, killed again and again while it may be."""
        num_ranks, _, kind = layout
        reference, tally = self.reference(num_ranks, kind), self.tallies[num_ranks, kind]
        output_dir = self.root / f"run_{number}"
        argv = make_arguments(self.inputs[kind], output_dir, layout)
        forget_reference(self.root)
        kills, expected, begun, is_same = 0, 0, 0, True
        while True:
            if kind in SCORING_KINDS and self.is_scored(kind) and self.random.random() < 0.5:
                forget_reference(self.root)  # also in the middle of a run, whose weights are no longer the reference's
            job = start(num_ranks, argv, output_dir, starts=self.starts)
            is_killed = kills < KILLS_PER_RUN and may_kill() and self.kill(job, layout)
            job.process.wait(timeout=600)
            self.check_start(job, tally, expected=expected, begun=begun)
            rows = read_steps(output_dir)
            if rows != reference.rows[: len(rows)]:
                is_same = False
                self.bad(tally, job, f"step {begun} on: not the metrics of the undisturbed run")
            if not is_killed:
                break
            kills += 1
            self.kills[layout] += 1
            expected, begun = newest_checkpoint(output_dir), len(rows)
        if job.process.returncode != 0:
            self.bad(tally, job, f"ended by itself with {job.process.returncode}")
        elif hashes(output_dir) != reference.files or len(rows) != NUM_STEPS:
            is_same = False
            self.bad(tally, job, "not the checkpoint and the export of the undisturbed run")
        tally.counts["runs"] += 1
        tally.counts["mismatches"] += not is_same
        verdict = "the same bit for bit" if is_same else "DIFFERENT"
        print(f"{time.strftime('%H:%M:%S')} run {number}: {layout}, {kills} kills, {verdict};", end=" ")
        print(f"{self.total().counts['kills']} kills so far", flush=True)
        if is_same and job.process.returncode == 0:
            shutil.rmtree(output_dir)

    def kill(self, job: Job | ForkedJob, layout: Layout) -> bool:
        """Kills what is chosen at the instant that is chosen; False if the run was over before."""
        num_ranks, tally, output_dir = layout.num_ranks, self.tallies[layout.num_ranks, layout.kind], job.output_dir
        moment = self.choose_moment(layout)
        if not self.wait_for(moment, job, self.reference(num_ranks, layout.kind)):
            if job.process.poll() is None:
                self.bad(tally, job, f"{moment} never came")
                job.kill()
            return False

        # Who is killed.
        ranks = self.find_ranks(job, num_ranks)
        targets = ["all", "one rank"] if self.is_forked else ["all", "one rank", "torchrun"]
        is_tied, is_scoring = says(job, TIED), says(job, TO_SCORE) and not says(job, SCORED)
        target = self.random.choice(targets) if len(ranks) == num_ranks > 1 else "all"
        is_stopped = self.stops and len(ranks) == num_ranks > 1 and is_tied
        target, seconds = ("one rank", 1.1 * HANG_TIMEOUT + 2) if is_stopped else (target, 0)
        pids = {"all": {job.process.pid, *ranks}, "one rank": {self.random.choice(ranks or [0])}}
        victims = pids.get(target, {job.process.pid})
        send(signal.SIGSTOP if is_stopped else signal.SIGKILL, victims)
        killed = time.monotonic()
        if target == "one rank" and self.is_forked and not is_tied:
            send(signal.SIGTERM, set(ranks) - victims)

        # When the others are gone, and what they have said.
        while any(map(is_alive, ranks)) and time.monotonic() < killed + seconds + SECONDS_TO_BE_GONE:
            time.sleep(0.01)
        tally.seconds_to_be_gone.append(time.monotonic() - killed)
        tally.counts.update(["kills", f"of {target}", *(["stops"] if is_stopped else [])])
        survivors = list(filter(is_alive, ranks))
        if survivors:
            self.bad(tally, job, f"{target} killed: {len(survivors)} ranks still there after {SECONDS_TO_BE_GONE} s")
            send(signal.SIGKILL, survivors)
        tally.counts["in scoring"] += is_scoring
        if moment == "start-up" and not is_scoring:
            tally.counts["in start-up"] += 1
        else:
            tally.counts["in a save"] += is_saving(output_dir)
            if target != "all":
                self.check_ending(job, tally)
        return True

    def choose_moment(self, layout: Layout) -> str:
        """Most kills hit the scoring until the reference is known; of the others most hit a save."""
        if layout.kind in SCORING_KINDS and not self.is_scored(layout.kind) and self.random.random() < 0.8:
            return "scoring"
        return self.random.choices(["a save", "the loop", "start-up"], [0.65, 0.2, 0.15])[0]

    def is_scored(self, kind: str) -> bool:
        """Whether every row of the data sets has its reference's numbers."""
        paths = [*self.inputs[kind]["data_path"], self.inputs[kind]["validation_data_path"]]
        found = [file for path in paths for file in path.parent.glob(f"{path.name}.reference-*.safetensors")]
        return len(found) == len(paths) and not any(np.isnan(load_file(file)["values"]).any() for file in found)

    def wait_for(self, moment: str, job: Job | ForkedJob, reference: Reference) -> bool:
        """Waits until a start is where it is to be killed; False if it has ended, or does not get there."""
        if moment == "start-up":
            seconds = self.random.uniform(0, 1.1 * reference.seconds_to_first_step)
            return not wait_until(job, lambda: False, seconds=seconds) and job.process.poll() is None
        if moment == "scoring":
            if not wait_until(job, lambda: says(job, TO_SCORE)):
                return False
            wait_until(job, lambda: says(job, SCORED), seconds=self.random.uniform(0, reference.seconds_of_scoring))
            return job.process.poll() is None
        if not wait_until(job, lambda: says(job, r"^step \d+/")):
            return False
        if moment == "the loop":
            seconds = self.random.uniform(0, 12 * reference.seconds_per_step)
            wait_until(job, lambda: False, seconds=seconds)
        else:
            for _ in range(self.random.choice([0, 0, 1, 2])):  # let pass, or no run would get past its next save
                wait_until(job, lambda: is_saving(job.output_dir), pause=0.001)
                wait_until(job, lambda: not is_saving(job.output_dir), pause=0.001)
            if not wait_until(job, lambda: is_saving(job.output_dir), pause=0.001):
                return False
            time.sleep(self.random.choice([0, 0, self.random.uniform(0, 0.02), self.random.uniform(0, 0.1)]))
        return job.process.poll() is None

    def find_ranks(self, job: Job | ForkedJob, num_ranks: int) -> list[int]:
        """Process ids; fewer than there are to be while torchrun is starting them."""
        if self.is_forked:
            return list(job.ranks.values())
        return [job.process.pid] if num_ranks == 1 else list_children(job.process.pid)

    def check_start(self, job: Job | ForkedJob, tally: Tally, *, expected: int, begun: int) -> None:
        """The start must have continued from the newest checkpoint there, unless it was killed before it said so."""
        text = job.log.read_text(errors="replace")
        found = re.search(TIED, text, re.MULTILINE)
        resumed = int(found[2] or 0) if found else None
        if resumed:
            tally.counts["resumes"] += 1
        if found and begun > 0:
            tally.lost_steps.append(max(0, begun - resumed))
        if resumed not in (None, expected) or "is not valid" in text:
            self.bad(tally, job, f"step {expected} was there, and the start went on from {resumed}")

    def check_ending(self, job: Job | ForkedJob, tally: Tally) -> None:
        """What the ranks that were not killed have said of it; the run may have been over by then."""
        path = job.output_dir / "exit.json"
        name = json.loads(path.read_text())["name"] if path.exists() else "none"
        self.endings[name] += 1
        if name not in ("peer_died", "done", *(["hang"] if self.stops else [])):
            self.bad(tally, job, f"exit.json says {name}")

    def bad(self, tally: Tally, job: Job | ForkedJob, what: str) -> None:
        tally.counts["bad"] += 1
        copy = job.log.with_suffix(f".bad_{self.total().counts['bad']}")
        shutil.copy(job.log, copy)
        print(f"BAD: {what}; see {copy}", flush=True)

    def total(self) -> Tally:
        return sum(self.tallies.values(), Tally())

    def print_table(self) -> None:
        print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
        for (num_ranks, kind), tally in self.tallies.items():
            print(tally.format_row(f"{num_ranks}, {kind}"))
        print(self.total().format_row("all"))
        print("kills by layout:", "; ".join(f"{layout}: {count}" for layout, count in self.kills.items()))
        print("exit.json after one rank or torchrun was killed in the loop:",
              ", ".join(f"{name} {count}" for name, count in self.endings.items()) or "-", flush=True)  # fmt: skip


def make_inputs(root: Path, kinds: set[str]) -> dict[str, dict[str, object]]:
    text = make_text_inputs(root)
    inputs = {"text": text, "dora": text}
    if "vision" in kinds:
        inputs["vision"] = make_vision_inputs(root)
    return inputs | {kind: make_preference_inputs(root, kind) for kind in PREFERENCE_KINDS if kind in kinds}


def make_text_inputs(root: Path) -> dict[str, object]:
    model = save_tokenizer(save_model(FAMILIES["qwen3"], root / "model"))
    paths = [
        write_samples(root / f"{name}.arrow", make_samples(size, vocab_size=VOCAB_SIZE, seed=size))
        for name, size in (("data", 37), ("other", 11), ("held_out", 9))
    ]
    return dict(model_name_or_path=model, data_path=tuple(paths[:2]), validation_data_path=paths[2])


def make_vision_inputs(root: Path) -> dict[str, object]:
    """A model that sees, two data sets and a held-out one, like those for text; rows with and without images."""
    model, paths = save_vision_model(root, "llava"), []
    for name, times in (("data", 5), ("other", 2), ("held_out", 1)):
        (directory := root / f"seen_{name}").mkdir()
        paths.append(tokenize(times * make_rows(directory), model, directory).rename(directory / f"{name}.arrow"))
        (directory / "data.arrow.meta.json").rename(directory / f"{name}.arrow.meta.json")
    return dict(model_name_or_path=model, data_path=tuple(paths[:2]), validation_data_path=paths[2])


def make_preference_inputs(root: Path, kind: str) -> dict[str, object]:
    """Data sets large enough that scoring takes seconds and several parts."""
    model = root / "preference_model"
    if not model.exists():
        save_tokenizer(save_model(FAMILIES["llama"], model))
    paths = []
    for name, size in (("data", PART_SIZE + 2000), ("other", 3000), ("held_out", 9)):
        path = root / f"{kind}_{name}.arrow"
        paths.append(write_pairs(path, model, size=size, seed=size, numbers=True, good=kind == "kto"))
    return dict(model_name_or_path=model, data_path=tuple(paths[:2]), validation_data_path=paths[2])


def forget_reference(root: Path) -> None:
    """Removes what earlier runs have scored, so that the next one scores everything."""
    for path in root.glob("*.reference-*.safetensors"):
        path.unlink()


def says(job: Job | ForkedJob, pattern: str) -> bool:
    """Whether a line of the job's console begins with `pattern`."""
    return re.search(pattern, job.log.read_text(errors="replace"), re.MULTILINE) is not None


def wait_until(
    job: Job | ForkedJob, condition: Callable[[], object], *, seconds: float = SECONDS_TO_MOMENT, pause: float = 0.01
) -> bool:
    """Whether `condition` came true, while the run lasted and within `seconds`."""
    deadline = time.monotonic() + seconds
    while job.process.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(min(pause, max(0, deadline - time.monotonic())))
    return False


def send(number: signal.Signals, pids: Sequence[int] | set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="no kill after them; the last run ends by itself")
    parser.add_argument("--kills", type=int, default=1000, help="so many, rounded up to an equal share of each layout")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="only layouts on so many")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="only layouts of these kinds")
    parser.add_argument("--starts", choices=("torchrun", "mini-trainer", "forked"), default="torchrun")
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ |= ENV  # which forked processes have from this one
    root = Path(tempfile.mkdtemp(prefix="soak_"))
    layouts = [layout for layout in LAYOUTS if layout.num_ranks in options.ranks and layout.kind in options.kinds]
    soak = Soak(root, options.seed, starts=options.starts, stops=options.stops, layouts=layouts)
    begin, share = time.monotonic(), -(-options.kills // len(layouts))
    for number in itertools.count():
        layout = min(layouts, key=soak.kills.__getitem__)

        def may_kill(layout: Layout = layout) -> bool:
            return soak.kills[layout] < share and time.monotonic() < begin + 60 * options.minutes

        if not may_kill():
            break
        soak.run_once(number, layout, may_kill)
    stops = f", {soak.total().counts['stops']} of the kills are stops" * options.stops
    print(f"seed {options.seed}, {options.starts} starts{stops}, {(time.monotonic() - begin) / 60:.0f} minutes")
    soak.print_table()
    if soak.total().counts["bad"]:
        sys.exit(f"not as promised; {root} is kept")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
