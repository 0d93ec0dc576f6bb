"""Stages of an experiment: programs of this project, each started from an option file that it can be repeated from.

A stage's folder has PROGRAM.yaml, its options; PROGRAM.log, its output; and PROGRAM.done once it is complete. A stage
that was killed is started again: the programs resume by themselves.
"""

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk import hash_json, is_running, read_object, written_aside
from lifecycle.file_names import PARAMS_FILE
from ranks.children import run_child
from ranks.ending import ExitCode, RunError
from ranks.lock import LOCK_FILE, RunLock, read_boot_id, read_holder
from ranks.messages import say

CAN_GROW = ("evaluate",)  # measures only what is missing when its options have changed
SECONDS_TO_WAIT = 600  # for processes of an earlier start that are still saving


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
        import yaml

        values = {name: list(v) if isinstance(v, tuple) else v for name, v in self.options.items()}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)

    @property
    def is_done(self) -> bool:
        """Whether it has run with these options; ValueError if it has run with others and cannot continue."""
        if not self.file("done").is_file():
            return False
        is_same = json.loads(self.file("done").read_text())["options"] == hash_json(self.text)
        if not is_same and self.program not in CAN_GROW:
            raise ValueError(f"{self.file('yaml')}: was run with other options before; choose another output directory")
        return is_same

    @property
    def has_ended(self) -> bool:
        """Whether it is a run of train that has ended with these options; a kill came before that was recorded.

        A run without checkpoints cannot be started again then.
        """
        record = Path(self.options["output_dir"], PARAMS_FILE) if self.program == "train" else None
        if record is None or not record.is_file() or not self.file("yaml").is_file():
            return False
        return self.file("yaml").read_text(encoding="utf-8") == self.text and bool(read_object(record)["finished"])


class Stopped(BaseException):
    """SIGTERM. No Exception, which a reader of files could take for an error of its own."""


class Runner:
    """Runs stages, one after the other, in a locked directory."""

    def __init__(self, root: Path, *, num_processes: int):
        """Locks the directory; RunError if another process uses it."""
        self.root, self.num_processes, self.lock = root, num_processes, wait_for_lock(root)
        self.has_run = False  # whether a stage has been run, and not only found done
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: object) -> None:
        """Ends as a scheduler asks; the running program saves first (`run_child`)."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end the wait for that
        raise Stopped

    def say(self, folder: Path, text: str) -> None:
        """Prints what happens in a folder of the directory."""
        say(f"{folder.relative_to(self.root)}: {text}")

    def run(self, stage: Stage) -> None:
        """Runs a stage unless it is done; RunError if it fails or stops."""
        if stage.is_done:
            return
        if stage.has_ended:
            return self.record(stage, seconds=None)
        stage.folder.mkdir(parents=True, exist_ok=True)
        with written_aside(stage.file("yaml")) as (aside,):
            aside.write_text(stage.text, encoding="utf-8")
        words = [stage.program, "--config", str(stage.file("yaml"))]
        if self.num_processes > 1 and is_parallel(stage):
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
        with written_aside(stage.file("done")) as (aside,):
            aside.write_text(json.dumps({"options": hash_json(stage.text), "seconds": seconds}) + "\n")

    def start(self, words: list[str], log_file: Path) -> tuple[int, str]:
        """Runs a program to its end; returns its exit code and its error message or last lines."""
        with log_file.open("a", encoding="utf-8") as log:
            return run_child(words, log, prints=False, pass_fds=(self.lock.file,))


def is_parallel(stage: Stage) -> bool:
    """Whether the stage can run in several processes, one for each GPU."""
    by_harness_or_server = stage.options.get("lm_eval") or stage.options.get("engine", "hf") != "hf"
    return stage.program in ("train", "generate", "evaluate", "score-data") and not by_harness_or_server


def describe_code(code: int) -> ExitCode:
    """The exit code of the experiment for that of a program."""
    return ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED


def wait_for_lock(output_dir: Path) -> RunLock:
    """Locks the directory. Programs that a killed experiment has left hold its lock until they have saved."""
    deadline, is_first = time.monotonic() + SECONDS_TO_WAIT, True
    while True:
        try:
            return RunLock(output_dir)
        except OSError as error:
            raise RunError(ExitCode.IO, f"output_dir: {output_dir}: cannot be written in: {error.strerror}") from None
        except RunError:
            holder = read_holder(output_dir / LOCK_FILE)
            died_here = holder and holder["boot_id"] == read_boot_id() and not is_running(holder["pid"])
            if not died_here or time.monotonic() > deadline:
                raise
            if is_first:
                say(f"{output_dir}: waiting for programs of an earlier start to end")
            is_first = False
            time.sleep(0.2)
