"""Runs the stages of an experiment, one after the other."""

import json
import time
from pathlib import Path

from mini_trainer.data.stores.disk import hash_json, written_aside
from mini_trainer.distributed.children import run_child
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.messages import say
from mini_trainer.run.stages import Stage, describe_code, stop_at_sigterm, wait_for_lock


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
    return stage.program in ("train", "generate", "evaluate") and not by_harness_or_server
