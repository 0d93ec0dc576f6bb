"""Stages of an experiment: programs of this project, each started from an option file, so that it can be repeated.

A stage's folder has PROGRAM.yaml, its options; PROGRAM.log, its output; and PROGRAM.done once it is complete. A stage
that was killed is started again: the programs resume by themselves. The experiment's directory is locked, and has a
record of the settings that it belongs to.
"""

import json
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mini_trainer.data.stores.disk import check_output_dir, hash_json, is_running, write_text
from mini_trainer.distributed.children import run_child
from mini_trainer.distributed.ending import ExitCode, RunError, ending_with_message, exit_with_message
from mini_trainer.distributed.lock import LOCK_FILE, RunLock, read_boot_id, read_holder
from mini_trainer.distributed.messages import say
from mini_trainer.options.option_files import escape
from mini_trainer.options.reading import hash_file, open_own, read_fields, read_text
from mini_trainer.run.file_names import PARAMS_FILE

CAN_GROW = ("evaluate",)  # computes only missing results when its options have changed
SECONDS_TO_WAIT = 600  # for processes of an earlier start that are still saving
Record = dict[str, Any]  # settings and hashes that an experiment's directory belongs to


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A program and its options."""

    program: str  # a word of mini-trainer
    folder: Path
    options: dict[str, Any]

    def file(self, ending: str) -> Path:
        return self.folder / f"{self.program}.{ending}"

    @property
    def text(self) -> str:
        """The option file."""
        values = {name: escape(value) for name, value in self.options.items()}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)

    def write_options(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.file("yaml"), self.text)

    @property
    def is_done(self) -> bool:
        """Whether it has run with these options; ValueError if it has run with others and cannot continue."""
        if not self.file("done").is_file():
            return False
        advice = f"; remove it to run {self.program} again, which keeps what is complete"
        done = read_fields(self.file("done"), {"options": str}, written_by="mini-trainer", advice=advice)
        is_same = done["options"] == hash_json(self.text)
        if not is_same and self.program not in CAN_GROW:
            raise ValueError(f"{self.file('yaml')}: was run with other options before; choose another output directory")
        return is_same

    @property
    def has_ended(self) -> bool:
        """Whether it is a run of train that has ended with these options, but was killed before that was recorded. A
        run without checkpoints cannot be started again then."""
        record = Path(self.options["output_dir"], PARAMS_FILE) if self.program == "train" else None
        if record is None or not record.is_file() or not self.file("yaml").is_file():
            return False
        kinds = {"options": dict, "finished": str | None}
        # Of its last start, which may have had another end.
        found = read_fields(record, kinds, written_by="train.py", advice=f"; remove {record.parent} to train again")
        is_same = found["options"].get("max_steps") == self.options.get("max_steps")
        return is_same and read_text(self.file("yaml")) == self.text and bool(found["finished"])


class Stopped(BaseException):
    """SIGTERM. Not an Exception, which a reader of files could take for its own error."""


def stop_at_sigterm() -> None:
    """Lets SIGTERM end the experiment as a scheduler asks: the running program saves first."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end the wait for that
        raise Stopped

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def ending_experiment() -> Iterator[None]:
    """Errors and stop requests inside of it end this process with one message and the exit code of their cause."""
    again = "start the same command again to continue"
    with ending_with_message(when_interrupted=f"interrupted; {again}"):
        try:
            yield
        except Stopped:
            exit_with_message(f"stopped (SIGTERM); {again}", code=ExitCode.SAVED_AND_REQUEUE)


def describe_code(code: int) -> ExitCode:
    """Converts a program's exit code to the experiment's."""
    return ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED


def wait_for_lock(output_dir: Path) -> RunLock:
    """Locks the directory. Programs that a killed experiment has left hold its lock until they have saved."""
    check_output_dir(output_dir, flag="output_dir:")
    deadline, is_first = time.monotonic() + SECONDS_TO_WAIT, True
    while True:
        try:
            return RunLock(output_dir)
        except OSError as error:
            raise RunError(ExitCode.IO, f"output_dir: {output_dir}: cannot be written in: {error.strerror}") from None
        except RunError:
            holder = read_holder(output_dir / LOCK_FILE)
            died_here = holder and holder.get("boot_id") == read_boot_id() and not is_running(holder.get("pid", 0))
            if not died_here or time.monotonic() > deadline:
                raise
            if is_first:
                say(f"{output_dir}: waiting for programs of an earlier start to end")
            is_first = False
            time.sleep(0.2)


class Runner:
    """Runs stages, one after the other, in a locked directory."""

    def __init__(self, root: Path, *, num_processes: int):
        """Locks the directory; RunError if another process uses it."""
        self.root, self.num_processes, self.lock = root, num_processes, wait_for_lock(root)
        self.has_run = False  # whether a stage has been run, and not only found done
        stop_at_sigterm()

    def say(self, folder: Path, text: str) -> None:
        """Prints a message about a folder of the directory."""
        say(f"{folder.relative_to(self.root)}: {text}")

    def run(self, stage: Stage) -> None:
        """Runs a stage unless it is done; RunError if it fails or stops."""
        if stage.is_done:
            return
        if stage.has_ended:
            return self.record(stage, seconds=None)
        stage.write_options()
        words = [stage.program, "--config", str(stage.file("yaml"))]
        by_harness_or_server = stage.options.get("lm_eval") or stage.options.get("engine", "hf") != "hf"
        is_parallel = stage.program in ("train", "generate", "evaluate") and not by_harness_or_server
        if self.num_processes > 1 and is_parallel:
            words += ["--nproc-per-node", str(self.num_processes)]
        start, self.has_run = time.monotonic(), True
        self.say(stage.folder, f"mini-trainer {' '.join(words)}")
        code, last_words = self.start(words, stage.file("log"))
        if code != ExitCode.DONE:
            raise RunError(describe_code(code), f"{last_words}\n(all output: {stage.file('log')})")
        seconds = time.monotonic() - start
        self.record(stage, seconds=round(seconds, 1))
        self.say(stage.folder, f"{stage.program} took {seconds:.0f} s")

    def record(self, stage: Stage, *, seconds: float | None) -> None:
        """Notes that the stage is complete."""
        write_text(stage.file("done"), json.dumps({"options": hash_json(stage.text), "seconds": seconds}) + "\n")

    def start(self, words: list[str], log_file: Path) -> tuple[int, str]:
        """Runs a program to its end; returns its exit code and its error message or last lines."""
        with open_own(log_file, "a") as log:
            return run_child(words, log, prints=False, pass_fds=(self.lock.file,))


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, and of all files in a directory."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return {str(file): hash_file(file)["sha256"] for file in files if file.is_file()}


def write_record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=2) + "\n")


def list_changes(before: Any, now: Any, where: str = "") -> list[str]:
    """The places at which two JSON values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        places = [(f"{where}.{key}".strip("."), before.get(key), now.get(key)) for key in keys]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        places = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(before, now, strict=True))]
    else:
        return [] if before == now else [f"{where}: {before!r:.100} before, {now!r:.100} now"]
    return [line for place, *pair in places for line in list_changes(*pair, place)]
