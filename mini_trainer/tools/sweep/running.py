"""Trials as child processes, as many at a time as the devices allow, each with its own devices."""

import os
import signal
import subprocess
import time
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mini_trainer.distributed.children import SECONDS_TO_SAVE, find_last_words, start_child
from mini_trainer.distributed.lock import SECONDS_PER_BEAT
from mini_trainer.options.reading import open_own
from mini_trainer.run.stages import Stage, stop_at_sigterm, wait_for_lock
from mini_trainer.tools.sweep.settings import SweepSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS_BETWEEN_LOOKS = 0.1
LAST_BYTES = 100_000  # of a log, in which the error message is looked for
# Several launches on one machine each take a free port.
OWN_RENDEZVOUS = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def list_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch  # seconds to import

    return list(map(str, range(torch.cuda.device_count())))


def divide_devices(settings: SweepSettings, devices: list[str]) -> list[dict[str, str]]:
    """For each trial that runs at a time the environment with its devices; ValueError for more than there are."""
    size, wanted = settings.num_processes, settings.num_parallel
    if not devices:
        return [{}] * (1 if wanted == "auto" else wanted)
    most = len(devices) // size
    if most < 1:
        raise ValueError(f"num_processes: given {size}, allowed: at most {len(devices)}, the GPUs")
    if wanted != "auto" and wanted > most:
        raise ValueError(
            f"num_parallel: given {wanted}, allowed: at most {most}, for {len(devices)} GPUs, {size} a trial"
        )
    parts = [devices[i * size : (i + 1) * size] for i in range(most if wanted == "auto" else wanted)]
    return [{VISIBLE: ",".join(part)} for part in parts]


@dataclass(frozen=True)
class Child:
    """A trial's process, and where its output begins in the log."""

    number: int
    stage: Stage
    process: subprocess.Popen
    start_of_log: int

    def read_last_words(self) -> str:
        """Its error message, or else its last lines."""
        with open_own(self.stage.file("log"), "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.start_of_log, size - LAST_BYTES))
            return find_last_words(log.read().decode(errors="replace"))


class Pool:
    """Runs trials in a locked directory."""

    def __init__(self, root: Path, environments: list[dict[str, str]], *, num_processes: int):
        """Locks the directory; RunError if another process uses it. `environments`: see `divide_devices`."""
        self.root, self.environments, self.num_processes = root, environments, num_processes
        self.lock, self.last_beat = wait_for_lock(root), time.monotonic()
        stop_at_sigterm()

    def run(self, waiting: list[int], make_stage: Callable[[int], Stage], end: Callable[[int, int, str], bool]) -> None:
        """Runs trials, given by number. `end` gets each one's exit code and last words once its process has ended, and
        returns whether it is settled; otherwise it is started again.

        However this is left, no trial is running then: those that were have saved their state.
        """
        waiting, free, running = list(waiting), list(range(len(self.environments))), {}
        try:
            while waiting or running:
                while waiting and free:
                    slot, number = free.pop(0), waiting.pop(0)
                    running[slot] = self.start(number, make_stage(number), self.environments[slot])
                for slot in [slot for slot, child in running.items() if child.process.poll() is not None]:
                    child = running.pop(slot)
                    insort(free, slot)
                    if not end(child.number, child.process.returncode, child.read_last_words()):
                        waiting.insert(0, child.number)
                self.beat()
                time.sleep(SECONDS_BETWEEN_LOOKS)
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            self.end_children(list(running.values()), signal.SIGINT if is_interrupt else signal.SIGTERM)
            raise

    def beat(self) -> None:
        """Touches the lock, where other machines see only from its time that this process is alive."""
        if time.monotonic() - self.last_beat > SECONDS_PER_BEAT:
            self.last_beat = time.monotonic()
            self.lock.beat()

    def start(self, number: int, stage: Stage, environment: Mapping[str, str]) -> Child:
        stage.write_options()
        words = [stage.program, "--config", str(stage.file("yaml")), "--nproc-per-node", str(self.num_processes)]
        words += OWN_RENDEZVOUS if self.num_processes > 1 else ()
        log = stage.file("log")
        start_of_log = log.stat().st_size if log.exists() else 0
        return Child(number, stage, self.launch(words, log, environment), start_of_log)

    def launch(self, words: list[str], log_file: Path, environment: Mapping[str, str]) -> subprocess.Popen:
        """Starts a program whose output is appended to the file."""
        with open_own(log_file, "a") as log:
            return start_child(words, log, more=environment, pass_fds=(self.lock.file,))

    def end_children(self, children: list[Child], number: signal.Signals) -> None:
        """Asks the trials to save and end, and waits. A second Ctrl-C ends them without saving, a third kills them."""
        deadline, num_interrupts = time.monotonic() + SECONDS_TO_SAVE, 0
        processes = [child.process for child in children]
        for process in processes:
            process.send_signal(number)
        while any(process.poll() is None for process in processes):
            try:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            except KeyboardInterrupt:
                num_interrupts += 1
                for process in processes:
                    process.send_signal(signal.SIGINT)
            if num_interrupts > 1 or time.monotonic() > deadline:
                for process in processes:
                    process.kill()
