"""Injects faults into the real program, and prints what came of them as a table (docs/developers/reliability.md).

    python benchmarks/fault_table.py [--ranks 1,2,4] [--only PATTERN] [--steps 420] [--seed 0]

For each number of ranks one training run suffers one fault after the other: it is started, hit from outside, started
again with the same command, and so on to its end. After each fault its metrics and checkpoints are compared, bit for
bit, with those of a run that nobody disturbed. Mounts file systems and makes network namespaces, so it needs root. Runs
of one rank are `python train.py`, except where torchrun is what is hit. Exits with 1 if anything is not as promised.
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import paths
import torch
from forked import ForkedJob
from processes import RAISING_RANK, Job, flags, is_alive, list_children, torchrun, torchrun_node
from soak import newest_checkpoint, read_hashes, read_steps, send
from tiny_data import make_samples, write_samples
from tiny_models import SHAPE, VOCAB_SIZE, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from mini_trainer.data.stores.contents import write_manifest
from mini_trainer.run.checkpoint_files import read_manifest

NUM_STEPS, EVERY, BATCH_SIZE = 420, 5, 8
SECONDS_TO_BE_GONE, HANG_TIMEOUT = 10, 6
DISK_BYTES = 256 << 20
IO, REQUEUE, USER, DIED = {"io"}, {"saved_and_requeue"}, {"stopped_by_user"}, {"peer_died"}
NOTHING = {"none"}  # all ranks killed: nobody was left to write exit.json


@dataclass
class Run:
    """The run of one number of ranks that suffers fault after fault, and the one that nobody disturbs."""

    num_ranks: int
    root: Path
    output_dir: Path  # a small disk of its own
    reference: Path
    inputs: dict[str, Any]
    num_steps: int = NUM_STEPS
    is_forked: bool = False  # sooner started, for faults that strike in or after a step and need no torchrun
    job: Job | ForkedJob = None
    begin: float = 0.0  # when the fault struck
    seconds: float = 0.0  # from then until every process was gone
    log: str = ""
    said_elsewhere: str = ""

    def command(self, **changes: Any) -> list[str]:
        options = self.inputs | dict(output_dir=self.output_dir, max_steps=self.num_steps, keep_checkpoints=2) | changes
        return [str(paths.ROOT / "train.py"), *flags(**options)]

    def start(self, fault: "Fault | None" = None) -> None:
        fault = fault or Fault("", lambda run: None, set())
        argv = self.command(**fault.options)
        alone = self.num_ranks == 1 and not fault.needs_torchrun
        env = {name: text.format(root=self.root) for name, text in fault.env.items()}
        if self.is_forked:
            self.job = ForkedJob(0 if alone else self.num_ranks, argv, self.output_dir, env=env)
            return
        self.job = Job([sys.executable, *argv] if alone else torchrun(self.num_ranks, *argv), self.output_dir, env=env)

    def steps(self, count: int = 4) -> None:
        """Waits until this start has taken `count` steps, for a fault that strikes then."""
        resumed = self.wait_for_log(r"^(resuming from .*step_(\d+)|starting from step 0)")
        first = int(resumed[2] or 0)
        self.wait_for_log(rf"^step {first + 1}/")  # the metrics have been cut
        self.until(lambda: len(read_steps(self.output_dir)) >= first + count)
        self.job.find_ranks()
        self.begin = time.monotonic()

    def wait_for_log(self, pattern: str) -> re.Match:
        self.until(lambda: re.search(pattern, self.job.log.read_text(), re.MULTILINE))
        return re.search(pattern, self.job.log.read_text(), re.MULTILINE)

    def until(self, condition: Callable[[], Any], *, pause: float = 0.02) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            if self.job.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the moment for the fault never came:\n{self.job.log.read_text()}")
            time.sleep(pause)

    def writing(self, where: str) -> None:
        """Waits for a write under way in `where`; the loop is tight, since it may last a few milliseconds."""
        self.steps(2)
        self.until(lambda: any((self.output_dir / where).glob(".writing_*")), pause=0)

    def send(self, number: int, pids: list[int] | None = None) -> None:
        self.begin = time.monotonic()
        send(number, self.victims("all") if pids is None else pids)

    def victims(self, who: str) -> list[int]:
        """Process ids: all with torchrun, torchrun, the ranks, or one rank that is not the first where there is one."""
        ranks = [self.job.ranks[rank] for rank in sorted(self.job.ranks)]
        return {
            "all": [self.job.process.pid, *ranks],
            "torchrun": [self.job.process.pid],
            "ranks": ranks,
            "one": ranks[-1:],
        }[who]

    def wait_until_gone(self) -> None:
        pids = {self.job.process.pid, *self.job.ranks.values()}
        deadline = time.monotonic() + 120
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            pids |= set(list_children(self.job.process.pid))
            time.sleep(0.01)
            self.job.process.poll()
        self.seconds = time.monotonic() - self.begin
        self.job.kill()
        self.log, self.said_elsewhere = self.job.log.read_text() + self.said_elsewhere, ""

    def find_difference(self) -> str | None:
        """What of the metrics, checkpoints and exports is not the undisturbed run's."""
        rows = read_steps(self.output_dir)
        if rows != read_steps(self.reference)[: len(rows)]:
            return "metrics"
        for path in (*self.output_dir.glob("checkpoints/step_*"), *self.output_dir.glob("hf_format/samples_*")):
            other = self.reference / path.relative_to(self.output_dir)
            if other.exists() and read_hashes(path) != read_hashes(other):
                return path.name
        return None


@dataclass
class Fault:
    name: str
    strike: Callable[[Run], None]
    outcomes: set[str]  # what exit.json may say
    words: str = ""  # a pattern that the console has to show
    ranks: tuple[int, ...] = (1, 2, 4)
    needs_torchrun: bool = False
    prompt: bool = True  # whether the promise of `SECONDS_TO_BE_GONE` holds: not where a save comes first
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    before: Callable[[Run], None] = lambda run: None
    after: Callable[[Run], None] = lambda run: None


# Moments


def in_step(run: Run) -> None:
    run.steps()
    time.sleep(random.uniform(0, 0.05))


in_save, in_export = partial(Run.writing, where="checkpoints"), partial(Run.writing, where="hf_format")


def at_birth(run: Run) -> None:
    """The ranks exist, and have not run a line of this program."""
    alone = run.num_ranks == 1 and run.job.process.args[1] != "-m"
    run.until(lambda: alone or len(list_children(run.job.process.pid)) == run.num_ranks, pause=0.001)
    run.job.ranks = dict(enumerate([run.job.process.pid] if alone else list_children(run.job.process.pid)))


def at_start(run: Run) -> None:
    """Before the first step: the model is being loaded."""
    run.wait_for_log(r"^(resuming|starting) from")
    run.job.find_ranks()


def signals(number: int, who: str, when: Callable[[Run], None] = in_step) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        when(run)
        run.send(number, run.victims(who))

    return strike


# Faults


def stop_file(run: Run) -> None:
    run.steps()
    (run.output_dir / "stop").touch()


def time_passes(run: Run) -> None:
    run.steps(1)
    run.until(lambda: time.time() - Path(f"/proc/{run.victims('ranks')[0]}").stat().st_ctime > 20)
    run.begin = time.monotonic()


def second_signal(run: Run) -> None:
    """The step cannot end, since one rank is frozen; the first signal waits for it, the second does not."""
    run.steps()
    os.kill(run.job.ranks[1], signal.SIGSTOP)
    os.kill(run.job.ranks[0], signal.SIGTERM)
    time.sleep(2.5)
    run.send(signal.SIGTERM, [run.job.ranks[0]])


injected = partial(Run.steps, count=2)


def fill_disk(leave: int) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        run.steps()
        write_ballast(run.output_dir, leave)

    return strike


def fill_disk_in(when: Callable[[Run], None]) -> Callable[[Run], None]:
    """The room was there when it was looked at, and is gone when it is needed."""

    def strike(run: Run) -> None:
        when(run)
        run.send(signal.SIGSTOP, run.victims("ranks"))
        write_ballast(run.output_dir, 0)
        run.send(signal.SIGCONT, run.victims("ranks"))

    return strike


def write_ballast(disk: Path, leave: int) -> None:
    with (disk / ".ballast").open("wb") as file:
        while (free := shutil.disk_usage(disk).free) > leave:
            size = os.fstat(file.fileno()).st_size
            with contextlib.suppress(OSError):  # the run has written in between: once more
                os.posix_fallocate(file.fileno(), size, free - leave)


def remove_ballast(run: Run) -> None:
    (run.output_dir / ".ballast").unlink()


def limit_file_size(who: str) -> Callable[[Run], None]:
    """As `ulimit -f` does, so that a part of a checkpoint's file can be written."""

    def strike(run: Run) -> None:
        run.steps()
        size = min(path.stat().st_size for path in run.reference.glob(f"checkpoints/step_{EVERY}/rank_*")) // 2
        for pid in run.victims(who):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))

    return strike


def limit_memory(run: Run) -> None:
    """One rank can have no more memory than it has."""
    run.steps()
    (pid,) = run.victims("one")
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def protect_checkpoints(run: Run) -> None:
    run.steps()
    directory = run.output_dir / "checkpoints"
    sh("mount", "--bind", directory, directory)
    sh("mount", "-o", "remount,bind,ro", directory)


def refused(run: Run) -> None:
    """The start is what fails."""
    run.begin = time.monotonic()


def second_run(run: Run) -> None:
    run.steps()
    second = subprocess.run([sys.executable, *run.command()], cwd=paths.ROOT, capture_output=True, text=True)
    run.said_elsewhere = f"code {second.returncode}: {second.stderr}"
    run.send(signal.SIGTERM)


def tear_metrics(run: Run) -> None:
    with (run.output_dir / "training_metrics_0.jsonl").open("a") as file:
        file.write('{"step": 123, "epo')


def flip_bit(run: Run) -> None:
    path = next(newest(run).glob("rank_*"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def forge_manifest(run: Run) -> None:
    """Names a file outside of the checkpoint, with all checksums in order."""
    directory = newest(run)
    manifest = read_manifest(directory)
    manifest["files"]["../../../etc/passwd"] = manifest["files"].pop("rank_00000.safetensors")
    (directory / "manifest.json").unlink()
    write_manifest(directory, manifest)


def add_pickle(run: Run) -> None:
    (newest(run) / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {run.root}/executed'\ntR.".encode())


def has_executed_nothing(run: Run) -> None:
    if (run.root / "executed").exists():
        raise RuntimeError("a pickle was executed")


def newest(run: Run) -> Path:
    return run.output_dir / "checkpoints" / f"step_{newest_checkpoint(run.output_dir)}"


def leave_rests(run: Run) -> None:
    """Of a write, a removal and an export that were killed, and a stale exit.json."""
    for name in ("checkpoints/.writing_step_7", "checkpoints/.removing_step_1", "hf_format/.removing_samples_1"):
        (run.output_dir / name).mkdir(parents=True)
        (run.output_dir / name / "part").write_text("x")


def has_no_rests(run: Run) -> None:
    rests = [*run.output_dir.glob("*/.writing_*"), *run.output_dir.glob("*/.removing_*")]
    if rests:
        raise RuntimeError(f"left behind: {rests}")


TERM = signals(signal.SIGTERM, "all")
TOO_LARGE = r"File too large.*needs [\d,]+ bytes, the disk has [\d,]+ free"
NO_SPACE = r"No space left on device.*needs [\d,]+ bytes, the disk has [\d,]+ free"
FAULTS = [
    *[Fault(f"kill -9 of {words}, {moment}", signals(signal.SIGKILL, who, when),
            NOTHING if who == "all" else DIED | more, ranks=(1, 2, 4) if who != "one" else (2, 4),
            needs_torchrun=who == "torchrun")
      for moment, when, more in [("in a step", in_step, set()), ("in a save", in_save, set()),
                                 ("in an export", in_export, set()), ("while loading", at_start, NOTHING),
                                 ("as the ranks are started", at_birth, NOTHING)]
      for who, words in [("all", "all"), ("one", "one rank"), ("torchrun", "torchrun")]],
    Fault("SIGTERM", TERM, REQUEUE, "SIGTERM; saved"),
    Fault("SIGTERM to torchrun alone", signals(signal.SIGTERM, "torchrun"), REQUEUE, "SIGTERM; saved", (2, 4)),
    Fault("SIGTERM in an asynchronous save", signals(signal.SIGTERM, "all", in_save), REQUEUE, "SIGTERM; saved",
          options=dict(async_checkpoint=True)),
    Fault("SIGTERM while loading", signals(signal.SIGTERM, "all", at_start), REQUEUE, "nothing new to save"),
    Fault("SIGUSR1 to the ranks", signals(signal.SIGUSR1, "ranks"), REQUEUE, "SIGUSR1; saved"),
    Fault("Ctrl-C", signals(signal.SIGINT, "torchrun"), USER, "SIGINT.; saved"),
    Fault("Ctrl-C in a save", signals(signal.SIGINT, "torchrun", in_save), USER, "SIGINT.; saved"),
    Fault("--max-time", time_passes, REQUEUE, "max-time; saved", options=dict(max_time="0:00:20")),
    Fault("the stop file", stop_file, USER, "the stop file; saved"),
    Fault("a stop file from before", refused, USER, "the stop file; saved",
          before=lambda run: (run.output_dir / "stop").touch(), prompt=False),
    # A stopped rank cannot end by itself, and is not woken: another one of its host kills it.
    Fault("a second signal, in a step that does not end", second_signal, {"interrupted"}, "without saving", (2, 4)),
    Fault("a rank raises", injected, {"failed"}, "error: rank 1 .*injected: a bug of rank 1", (2, 4),
          env={"PYTHONPATH": "{root}:" + str(paths.ROOT)}),
    Fault("SIGSTOP of a rank, --hang-timeout 6", signals(signal.SIGSTOP, "one"), {"hang"},
          r"rank \d .*sent no heartbeat", (2, 4), options=dict(hang_timeout=HANG_TIMEOUT)),
    Fault("out of memory on one rank", limit_memory, {"out_of_memory"}, "out of memory in .*lower --max-tok"),
    Fault("disk full, before a save", fill_disk(32 << 20), IO, r"no room for .*needs [\d,]+ bytes.*has [\d,]+ free",
          after=remove_ballast),
    Fault("disk full, in a save", fill_disk_in(in_save), IO | NOTHING, f"cannot write the checkpoint .*{NO_SPACE}",
          after=remove_ballast),
    Fault("disk full, in an export", fill_disk_in(in_export), IO | NOTHING, f"cannot write the export .*{NO_SPACE}",
          after=remove_ballast),
    Fault("disk full to the last byte, in a step", fill_disk(0), IO | NOTHING,
          "training_metrics_0.jsonl: .*No space|no room for the checkpoint", after=remove_ballast),
    Fault("file too large, every rank", limit_file_size("ranks"), IO, "cannot write the checkpoint .*" + TOO_LARGE),
    Fault("file too large, one rank", limit_file_size("one"), IO, r"rank_0000\d\.safetensors: .*" + TOO_LARGE, (2, 4)),
    Fault("read-only checkpoints", protect_checkpoints, IO, "cannot write the checkpoint .*Read-only",
          after=lambda run: sh("umount", run.output_dir / "checkpoints")),
    Fault("read-only disk at the start", refused, NOTHING, "cannot be written: .*Read-only", prompt=False,
          before=lambda run: sh("mount", "-o", "remount,ro", run.output_dir),
          after=lambda run: sh("mount", "-o", "remount,rw", run.output_dir)),
    Fault("a second run on the same directory", second_run, REQUEUE, "(?s)code 7: .*is in use by the run with pid"),
    Fault("torn last line of the metrics", TERM, REQUEUE, "resuming from", before=tear_metrics),
    Fault("kill -9 of all, to leave checkpoints", signals(signal.SIGKILL, "all"), NOTHING),
    Fault("the newest checkpoint has a flipped bit", TERM, REQUEUE, "is not valid: rank_.*SHA-256.*renamed to",
          before=flip_bit),
    Fault("the newest checkpoint has a pickle in it", TERM, REQUEUE, "is not valid: .metadata does not belong",
          before=add_pickle, after=has_executed_nothing),
    Fault("the newest checkpoint is forged", TERM, REQUEUE, "is not valid: manifest.json does not have the form",
          before=forge_manifest),
    Fault("rests of killed writes and removals", TERM, REQUEUE, "SIGTERM; saved", before=leave_rests,
          after=has_no_rests),
]  # fmt: skip


class Table:
    """Prints a row as soon as it is known; `problems` has what is wrong in each."""

    def __init__(self) -> None:
        self.problems: dict[str, list[str]] = {}
        print("| fault | ranks | seconds until all were gone | exit.json | steps lost | oracle |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)

    def add(self, name: str, ranks: Any, seconds: Any, outcome: str, lost: Any, problems: list[str]) -> None:
        self.problems[f"{name}, {ranks} ranks"] = problems
        shown = f"{seconds:.1f}" if isinstance(seconds, float) else seconds
        oracle = f"NOT: {'; '.join(problems)}" if problems else "ok"
        print(f"| {name} | {ranks} | {shown} | {outcome} | {lost} | {oracle} |", flush=True)


def suffer(run: Run, fault: Fault) -> tuple[str, list[str]]:
    """Starts the run, lets `fault` strike, and looks at what is left; returns exit.json's name and what is wrong."""
    if "damaged" not in fault.name:  # which has to replace it
        (run.output_dir / "exit.json").unlink(missing_ok=True)
    problems = []
    fault.before(run)
    try:
        run.start(fault)
        run.job.ranks = {}
        fault.strike(run)
        run.wait_until_gone()
    except (RuntimeError, KeyError) as error:
        run.job.kill()
        run.log = run.job.log.read_text()
        problems.append(str(error).splitlines()[0])
    if fault.prompt and run.seconds > SECONDS_TO_BE_GONE:
        problems.append(f"gone only after {run.seconds:.1f} s")
    path = run.output_dir / "exit.json"
    outcome = json.loads(path.read_text())["name"] if path.exists() else "none"
    try:
        fault.after(run)
    except RuntimeError as error:
        problems.append(str(error))
    if outcome not in fault.outcomes:
        problems.append(f"exit.json says {outcome}")
    if not re.search(fault.words, run.log):
        problems.append(f"the console does not say {fault.words!r}")
    if "Traceback" in run.log.split("torch/distributed")[0] and outcome != "failed":
        problems.append("a traceback")
    difference = run.find_difference()
    if difference:
        problems.append(f"{difference} differ")
    if problems:
        sys.stderr.write(f"\n--- {fault.name}, {run.num_ranks} ranks: {problems}\n{run.log[-6000:]}\n")
    return outcome, problems


def suffer_all(run: Run, faults: list[Fault], table: Table) -> None:
    """One start after the other; a row is done when the next start has said what it continues from."""
    pending = None
    for fault in [*faults, None]:
        rows, expected = len(read_steps(run.output_dir)), newest_checkpoint(run.output_dir)
        if fault is None:
            run.start()
            run.job.process.wait()
            run.log = run.job.log.read_text()
            outcome, problems = "done", [] if run.job.process.returncode == 0 else ["the run does not end well"]
            difference = run.find_difference()
            if difference or len(read_steps(run.output_dir)) != run.num_steps:
                problems.append(difference or "rows are missing")
        else:
            outcome, problems = suffer(run, fault)
        found = re.search(r"^resuming from .*step_(\d+):", run.log, re.MULTILINE)
        if pending is not None and (found or re.search("^starting from", run.log, re.MULTILINE)):
            resumed = int(found[1]) if found else 0
            is_older = fault is not None and "newest checkpoint" in fault.name
            if (resumed < expected) != is_older:
                problems.append(f"went on from {resumed} instead of {expected}")
            if not is_older:
                has_stepped = not pending[0].endswith(("while loading", "are started"))
                table.add(*pending[:4], rows - resumed if has_stepped else 0, pending[4])
                pending = None
        if pending is not None:  # this start was ended before it said so, or continues from an older checkpoint
            table.add(*pending[:4], "-", pending[4])
        pending = (fault.name if fault else "to the end", run.num_ranks, run.seconds, outcome, problems)
        run.seconds = 0.0
    table.add(*pending[:4], 0, pending[4])


def no_valid_checkpoint(run: Run, table: Table) -> None:
    """All checkpoints of a run are damaged, and exit.json has the word of an earlier start."""
    for path in run.output_dir.glob("checkpoints/step_*/rank_00000.safetensors"):
        os.truncate(path, path.stat().st_size - 1)
    words = "no valid checkpoint is left"
    more = dict(max_steps=run.num_steps + 1)  # else the run is done
    fault = Fault("every checkpoint is damaged", refused, {"no_valid_checkpoint"}, words, prompt=False, options=more)
    outcome, problems = suffer(run, fault)
    table.add(fault.name, run.num_ranks, "-", outcome, "-", problems)


def make_inputs(root: Path) -> dict[str, Any]:
    config = LlamaConfig(**SHAPE | dict(hidden_size=64, intermediate_size=256))
    model = save_tokenizer(save_model(config, root / "model"))
    data = write_samples(root / "data.arrow", make_samples(501, vocab_size=VOCAB_SIZE))
    return dict(
        model_name_or_path=model, data_path=data, batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-3,
        checkpoint_every_steps=EVERY, min_samples_per_checkpoint=10 * BATCH_SIZE, activation_checkpointing="none",
    )  # fmt: skip


def run_reference(run: Run) -> None:
    """The undisturbed run, which keeps all of its checkpoints."""
    argv = run.command(output_dir=run.reference, keep_checkpoints=run.num_steps)
    job = Job([sys.executable, *argv] if run.num_ranks == 1 else torchrun(run.num_ranks, *argv), run.reference)
    if job.process.wait() != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{job.log.read_text()}")


# Scenes of their own


def two_runs_at_once(run: Run, table: Table) -> None:
    """Two runs on one node, started together; each is the undisturbed one."""
    twins = [replace(run, output_dir=run.root / f"twin_{i}_{run.num_ranks}", num_steps=40) for i in range(2)]
    for twin in twins:
        twin.start()
    jobs = [twin.job for twin in twins]
    problems = [f"a run ended with {job.process.returncode}" for job in jobs if job.process.wait() != 0]
    problems += [f"{difference} differ" for twin in twins if (difference := twin.find_difference())]
    table.add("two runs on one node at once", run.num_ranks, "-", jobs[0].outcome()["name"], 0, problems)


def non_finite(run: Run, table: Table) -> None:
    """A weight that is met by one sample is infinite; the run ends there, however often it is started."""
    inputs = make_inputs(run.root / f"infinite_{run.num_ranks}")
    model = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"])
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCAB_SIZE - 1] = float("inf")
    model.save_pretrained(inputs["model_name_or_path"])
    samples = make_samples(501, vocab_size=VOCAB_SIZE - 1)
    samples[0] = ([VOCAB_SIZE - 1] * 9, [3] * 9)
    write_samples(inputs["data_path"], samples)
    output_dir = run.root / f"infinite_run_{run.num_ranks}"
    twin = replace(run, output_dir=output_dir, inputs=inputs, num_steps=NUM_STEPS)
    messages, problems = [], []
    for _ in range(2):
        twin.start()
        twin.job.process.wait()
        outcome = twin.job.outcome()
        messages.append(outcome["message"])
        if outcome["name"] != "non_finite":
            problems.append(outcome["message"])
    if messages[0] != messages[1] or f"{inputs['data_path']}: " not in messages[0]:
        problems.append(f"two messages: {messages}")
    checkpoint = output_dir / "checkpoints" / f"step_{newest_checkpoint(output_dir)}"
    from safetensors.torch import load_file

    tensors = {name: value for path in checkpoint.glob("rank_*") for name, value in load_file(path).items()}
    # the infinite weight itself is the user's; everything that was computed is finite
    if not all(value.isfinite().all() for name, value in tensors.items() if "embed_tokens" not in name):
        problems.append("the last checkpoint is not finite")
    table.add("a loss that is not finite, twice", run.num_ranks, "-", outcome["name"],
              len(read_steps(output_dir)) - newest_checkpoint(output_dir), problems)  # fmt: skip


def cut_network(run: Run, table: Table) -> None:
    """Two torchrun nodes of one process each, in network namespaces; the link between them goes down."""
    name = "the network between two nodes is cut, --hang-timeout 6"
    hosts = [f"ft{os.getpid()}{letter}" for letter in "ab"]
    try:
        for host in hosts:
            sh("ip", "netns", "add", host)
        sh("ip", "link", "add", "fta", "netns", hosts[0], "type", "veth", "peer", "name", "ftb", "netns", hosts[1])
        for i, (host, device) in enumerate(zip(hosts, ("fta", "ftb"), strict=True)):
            sh("ip", "-n", host, "addr", "add", f"10.231.7.{i + 1}/24", "dev", device)
            for link in ("lo", device):
                sh("ip", "-n", host, "link", "set", link, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        table.add(f"{name}: this machine does not allow network namespaces ({error})", 2, "-", "-", "-", [])
        return
    twin, problems = replace(run, output_dir=run.root / "two_nodes"), []
    try:
        jobs = start_nodes(twin, hosts, attempt=0)
        twin.until(lambda: len(read_steps(twin.output_dir)) > 8)
        children = [pid for job in jobs for pid in list_children(job.process.pid)]
        ranks = [pid for pid in children if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
        begin = time.monotonic()
        sh("ip", "-n", hosts[1], "link", "set", "ftb", "down")
        while any(map(is_alive, ranks)) and time.monotonic() < begin + 120:
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        while any(job.process.poll() is None for job in jobs) and time.monotonic() < begin + 300:
            time.sleep(0.02)
        all_seconds = time.monotonic() - begin
        outcome = json.loads((twin.output_dir / "exit.json").read_text())["name"]
        stacks = sorted(path.name for path in (twin.output_dir / "errors").glob("rank_*.txt"))
        if stacks != ["rank_0.txt", "rank_1.txt"]:
            problems.append(f"stacks: {stacks}")
        if outcome != "hang":
            problems.append(f"exit.json says {outcome}")
        sh("ip", "-n", hosts[1], "link", "set", "ftb", "up")
        for job in jobs:
            job.kill()
        rows = len(read_steps(twin.output_dir))
        jobs = start_nodes(twin, hosts, attempt=1)
        resumed = re.search(r"resuming from .*step_(\d+)", "".join(job.log.read_text() for job in jobs))
        (twin.output_dir / "stop").touch()
        for job in jobs:
            job.process.wait(timeout=120)
            job.kill()
        difference = twin.find_difference()
        if difference:
            problems.append(f"{difference} differ")
        shown = f"{seconds:.1f} (torchrun {all_seconds:.1f})"
        table.add(name, "2 nodes", shown, outcome, rows - int(resumed[1]), problems)
    finally:
        for host in hosts:
            sh("ip", "netns", "del", host)


def start_nodes(run: Run, hosts: list[str], *, attempt: int) -> list[Job]:
    """A torchrun of one rank in each network namespace; returns once a rank says what it starts from."""
    jobs = []
    for i, (host, device) in enumerate(zip(hosts, ("fta", "ftb"), strict=True)):
        argv = torchrun_node(2, 29500, *run.command(hang_timeout=HANG_TIMEOUT))
        argv = [word.replace("127.0.0.1", "10.231.7.1") for word in argv]
        argv[3:3] = [f"--local-addr=10.231.7.{i + 1}", f"--rdzv-conf=is_host={1 - i}"]
        log = run.output_dir.with_name(f"node_{attempt}_{i}")
        jobs.append(Job(["ip", "netns", "exec", host, *argv], log, env={"GLOO_SOCKET_IFNAME": device}))
    run.job = jobs[0]
    run.until(lambda: any(re.search("(resuming|starting) from", job.log.read_text()) for job in jobs))
    return jobs


def sh(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    sh("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", path)
    try:
        yield
    finally:
        sh("umount", "--recursive", "--lazy", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--only", default="", help="only faults whose name has this pattern")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="length of the runs; a fault takes about six")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    scenes = {"two runs on one node at once": two_runs_at_once, "a loss that is not finite": non_finite,
              "the network between two nodes is cut": cut_network}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="faults_") as name:
        root = Path(name)
        (root / "sitecustomize.py").write_text(RAISING_RANK)
        inputs = make_inputs(root)
        table = Table()
        for num_ranks in map(int, options.ranks.split(",")):
            run = Run(num_ranks, root, root / f"disk_{num_ranks}", root / f"reference_{num_ranks}", inputs,
                      num_steps=options.steps)  # fmt: skip
            run_reference(run)
            faults = [fault for fault in FAULTS if num_ranks in fault.ranks and re.search(options.only, fault.name)]
            if faults:
                with small_disk(run.output_dir):
                    suffer_all(run, faults, table)
                    no_valid_checkpoint(run, table)
            for name, scene in scenes.items():
                if re.search(options.only, name) and (scene is not cut_network or num_ranks == 2):
                    scene(run, table)
    sys.exit(1 if any(table.problems.values()) else 0)


if __name__ == "__main__":
    main()
