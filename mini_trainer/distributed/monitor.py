"""The training thread's side of the watch: it reports progress, learns of requests to stop, and hands over its end.

A run ends together: stop requests, dead and stuck ranks, the root cause reported once, one exit code on every rank.
distributed/watch.py is the other side, in a thread of its own; only that thread ends the process.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from mini_trainer.distributed.ending import SIGNALS, ExitCode, Flag, RanksDiffer, RunError, describe_error, wait_forever
from mini_trainer.distributed.lock import RunFiles
from mini_trainer.distributed.watch import Marks, Watch


class RunControl:
    """One per process. All methods are the training thread's, which alone writes the marks, except their flags."""

    def __init__(self, *, hang_timeout: float, max_seconds: float | None):
        self.max_seconds, self.started = max_seconds, time.monotonic()
        self.has_stepped = False
        self.marks, self.files = Marks(), RunFiles()
        self.watch = Watch(self.marks, self.files, hang_timeout=hang_timeout)
        self.lifeline = self.watch.lifeline

    def start(self) -> None:
        """Installs the signal handlers and starts the watch."""
        # The wake-up file lets the watch notice a signal even while the main thread is blocked in a collective.
        signal.set_wakeup_fd(self.watch.signals_in.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            # Keep ignoring SIGHUP under nohup.
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
                signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `mini-trainer` blocks SIGUSR1 until now
        threading.Thread(target=self.watch.run, name="watch", daemon=True).start()
        if self.watch.rank == 0:
            threading.Thread(target=self.watch.watch_files, name="files", daemon=True).start()

    def check_directory(self) -> None:
        """RunError if the output directory was moved or removed."""
        loss = self.files.find_loss()
        if loss is not None:
            raise RunError(ExitCode.IO, loss)

    def progress(self, where: str) -> None:
        """Records progress of the training thread; `where` appears in messages. Almost free."""
        self.marks.where = where
        self.marks.count += 1

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Marks a phase that may take up to `SLOW_LIMIT` without a sign of progress."""
        before = self.marks.where
        self.marks.num_slow_phases += 1
        self.progress(what)
        try:
            yield
        finally:
            self.marks.num_slow_phases -= 1
        self.progress(before)

    def start_loop(self, *, steps_done: int = 0) -> None:
        """Marks the start of the training loop, in which a signal takes effect at the end of a step."""
        self.marks.in_loop = True
        self.marks.steps_done = steps_done
        self.progress(f"the step after {steps_done}")

    def flags(self) -> int:
        """This rank's flags, for the step's reduction; rank 0 says for all when --max-time is over."""
        is_over = self.max_seconds is not None and time.monotonic() - self.started >= self.max_seconds
        return self.marks.flags | (Flag.MAX_TIME if is_over and self.watch.rank == 0 else 0)

    def step_done(self, step: int) -> None:
        """Records that `step` steps are complete; after the first one, the ordinary --hang-timeout applies."""
        if not self.has_stepped:
            self.marks.num_slow_phases -= 1
        self.has_stepped, self.marks.steps_done = True, step
        self.progress(f"the step after {step}")

    def finish(self, code: ExitCode, message: str, *, afterword: str = "") -> NoReturn:
        """Ends the run normally: all ranks call this, and their processes exit once all have.

        Rank 0 prints its message, unless the run is done, and its `afterword`.
        """
        cause = replace(self.watch.make_cause(code, message), afterword=afterword)
        self.progress("the end of the run")
        self.watch.call(self.watch.say_goodbye, cause)
        wait_forever()

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the run because of this rank's error; all processes exit once rank 0 has reported the root cause."""
        code, message, details = describe_error(error, self.marks.where)
        if code == ExitCode.IO:
            message = self.files.find_loss() or message  # A lost directory is the actual reason for the I/O error.
        cause = self.watch.make_cause(code, message, details)
        self.watch.call(self.watch.report, replace(cause, is_printed_by_all=isinstance(error, RanksDiffer)))
        wait_forever()
