"""How a run ends: stop requests, dead and stuck ranks, the root cause reported once, one exit code on every rank.

Each process has a daemon thread, the monitor. The training thread leaves marks (`progress`), reads `flags` once a
step, and hands over its end (`finish`, `fail`); only the monitor ends the process. Its knowledge of other ranks comes
over the lifeline (distributed/lifeline.py): rank 0 receives each rank's heartbeats, failures and end, and the others
receive rank 0's verdict.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from mini_trainer.distributed.command import find_installed_command
from mini_trainer.distributed.ending import (
    EXIT_FILE,
    SECONDS_TO_BE_ENDED,
    Cause,
    ExitCode,
    RanksDiffer,
    RunError,
    choose_cause,
    describe_error,
    dump_stacks,
    exit_process,
    wait_forever,
    within,
)
from mini_trainer.distributed.lifeline import Lifeline, Message, make_socket_pair
from mini_trainer.distributed.lock import (
    ERRORS_DIR,
    SECONDS_PER_BEAT,
    SECONDS_PER_HEARTBEAT,
    SLOW_LIMIT,
    STOP_FILE,
    HeldDirectory,
    Peer,
    RunLock,
    describe_death,
    describe_hang,
    is_hanging,
    write_exit_file,
)
from mini_trainer.distributed.messages import clean, leave_bars, print_as_is, say
from mini_trainer.distributed.process import PARENT, may_be_launcher
from mini_trainer.distributed.run_flags import SIGNALS, Flag

TICK = 0.25  # seconds between polls
# From the first report of a failure to the verdict: a death noticed in this time explains other ranks' errors.
SECONDS_TO_COLLECT = 0.5
SECONDS_FOR_VERDICT = 5.0  # A rank that has reported a failure waits this long for rank 0's verdict, then ends alone.
SECONDS_TO_TELL = 3.0  # Time limit for each final step: printing and writing, waiting for other ranks, cleaning up.
SECONDS_OF_ONE_SIGNAL = 2.0  # SLURM and torchrun may both forward one SIGTERM: within this time it counts once.
LARGEST_TEXT = 10_000  # maximum characters of a message (its first) or a traceback (its last)

ERRORS = set(ExitCode) - {ExitCode.DONE, ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER}


@dataclass
class Marks:
    """State that the training thread shares with the monitor: plain attributes, each written atomically."""

    count: int = 0
    where: str = "the start"
    steps_done: int = 0
    num_slow_phases: int = 1  # Slow phases nest; the time until the end of the first step is one.
    in_loop: bool = False
    has_stepped: bool = False
    flags: int = 0  # the other direction: set by the monitor, read by the training thread


class RunControl:
    """The monitor and the training thread's interface to it. One per process."""

    def __init__(self, *, hang_timeout: float, max_seconds: float | None):
        self.hang_timeout, self.max_seconds = hang_timeout, max_seconds
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self.parent_started_this = may_be_launcher(PARENT)
        self.marks = Marks()
        self.output_dir: Path | None = None  # None until this run owns the directory
        self.run_lock: RunLock | None = None
        self.held: HeldDirectory | None = None  # the output directory, if visible on this host
        self.lifeline = Lifeline(
            self.rank, self.world_size, on_met=self._on_met, on_message=self._on_message, on_lost=self._on_lost
        )
        self.host = self.lifeline.host
        # The attributes below belong to the monitor's thread alone.
        self.started = time.monotonic()
        self.peers = {self.rank: Peer(self.host, os.getpid(), 0.0, 0.0)}
        self.marks_seen = 0
        self.last_heartbeat = self.last_judgement = 0.0
        self.first_signal: float | None = None
        self.causes: list[Cause] = []
        self.reporters: set[int] = set()  # ranks that have sent their own error
        self.verdict_due: float | None = None
        self.goodbye: Cause | None = None
        self.signals, self.signals_in = make_socket_pair()
        self.lifeline.watch(self.signals, self._on_signals)

    # Methods for the training thread.

    def start(self) -> None:
        """Installs the signal handlers and starts the monitor."""
        # The wake-up file lets the monitor notice a signal even while the main thread is blocked in a collective.
        signal.set_wakeup_fd(self.signals_in.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            # Keep ignoring SIGHUP under nohup.
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="monitor", daemon=True).start()

    def listen(self) -> tuple[int, str]:
        """Rank 0: opens the lifeline's port; returns it with the token that the other ranks must send."""
        return self.lifeline.listen()

    def connect(self, port: int, token: str) -> None:
        """Connects this rank to rank 0; on rank 0, waits for all others. RunError on failure."""
        self.lifeline.connect(port, token)

    def lock(self, output_dir: Path) -> None:
        """Rank 0: locks the directory for this run, or raises RunError without changing anything in it."""
        try:
            self.run_lock = RunLock(output_dir)
        except OSError as error:
            raise RunError(ExitCode.IO, f"--output-dir {output_dir}: cannot be written: {error}") from None
        threading.Thread(target=self._watch_files, args=(output_dir,), name="files", daemon=True).start()

    def own(self, output_dir: Path) -> None:
        """Takes ownership of the checked directory: from now on exit.json says how this run ended."""
        if self.rank == 0:
            (output_dir / EXIT_FILE).unlink(missing_ok=True)
        self.output_dir = output_dir
        with contextlib.suppress(FileNotFoundError):
            self.held = HeldDirectory(output_dir)

    def check_directory(self) -> None:
        """RunError if the output directory was moved or removed; a new one at its path is not this run's."""
        if self.held is not None and not self.held.is_in_place():
            raise RunError(ExitCode.IO, self.held.describe_loss())

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
        return self.marks.flags | (Flag.MAX_TIME if is_over and self.rank == 0 else 0)

    def step_done(self, step: int) -> None:
        """Records that `step` steps are complete; after the first one, the ordinary --hang-timeout applies."""
        if not self.marks.has_stepped:
            self.marks.num_slow_phases -= 1
        self.marks.has_stepped, self.marks.steps_done = True, step
        self.progress(f"the step after {step}")

    def finish(self, code: ExitCode, message: str, *, afterword: str = "") -> NoReturn:
        """Ends the run normally: all ranks call this, and their processes exit once all have.

        Rank 0 prints its message, unless the run is done, and its `afterword`.
        """
        cause = replace(self._cause(code, message), afterword=afterword)
        self.progress("the end of the run")
        self.lifeline.call(lambda: self._say_goodbye(cause))
        wait_forever()

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the run because of this rank's error; all processes exit once rank 0 has reported the root cause."""
        code, message, details = describe_error(error, self.marks.where)
        if code == ExitCode.IO and self.held is not None and not self.held.is_in_place():
            message = self.held.describe_loss()  # the actual reason for the I/O error
        cause = replace(self._cause(code, message, details), is_printed_by_all=isinstance(error, RanksDiffer))
        self.lifeline.call(lambda: self._report(cause))
        wait_forever()

    # The monitor.

    def _watch(self) -> None:
        try:
            while True:
                self.lifeline.poll(TICK)
                self._tick()
        except BaseException:  # Without a monitor, nothing would end this process.
            try:
                traceback.print_exc()
            finally:
                exit_process(ExitCode.FAILED)

    def _on_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self.signals.recv(4096):
                if number in SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.goodbye is not None or (
            self.first_signal is not None and now - self.first_signal < SECONDS_OF_ONE_SIGNAL
        ):
            return
        if self.first_signal is not None:
            self._report(self._cause(ExitCode.INTERRUPTED, f"second signal ({number.name}): ended without saving"))
        elif not self.marks.in_loop:
            code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.SAVED_AND_REQUEUE
            self._report(self._cause(code, f"{number.name} before the first step: nothing new to save"))
        else:
            self._raise_flag(SIGNALS[number])
        self.first_signal = now

    def _raise_flag(self, flag: Flag) -> None:
        self.marks.flags |= flag

    def _tick(self) -> None:
        now, clock = time.monotonic(), self.lifeline.clock
        self._look_at_marks()
        if self.has_torchrun and self.verdict_due is None and (os.getppid() != PARENT or not self.parent_started_this):
            name = f"pid {PARENT} on" if self.parent_started_this else "of"
            self._report(self._cause(ExitCode.PEER_DIED, f"torchrun ({name} {self.host}) is gone", died=True))
        if clock - self.last_heartbeat >= SECONDS_PER_HEARTBEAT:
            self.last_heartbeat, own = clock, self.peers[self.rank]
            still = clock - own.moved
            self.lifeline.send_beat({"kind": "beat", "still": still, "limit": own.limit, "where": own.where})
        if self.verdict_due is not None:
            if now >= self.verdict_due:
                self._end(choose_cause(self.causes))
        elif clock - self.last_judgement >= TICK and self._sees_hang():
            self._end(self._cause(ExitCode.HANG, describe_hang(self.peers, clock)))

    def _sees_hang(self) -> bool:
        """Looks at all peers: not after every message, since each of N ranks sends one a second."""
        self.last_judgement = self.lifeline.clock
        return is_hanging(self.peers, self.lifeline.clock, self.hang_timeout, is_rank0=self.rank == 0)

    def _look_at_marks(self) -> None:
        """Updates this rank's own entry among the peers."""
        own, clock = self.peers[self.rank], self.lifeline.clock
        own.heard, own.where = clock, self.marks.where
        own.limit = max(SLOW_LIMIT, self.hang_timeout) if self.marks.num_slow_phases else self.hang_timeout
        if self.marks.count != self.marks_seen:
            self.marks_seen, own.moved = self.marks.count, clock

    def _watch_files(self, output_dir: Path) -> None:
        """Rank 0: watches the stop file, the lock and the directory, in a separate thread, since file systems can
        block."""
        beats = 0.0
        while True:
            time.sleep(1)
            if self.held is not None and not self.held.is_in_place():
                return self.lifeline.call(lambda: self._report(self._cause(ExitCode.IO, self.held.describe_loss())))
            with contextlib.suppress(OSError):
                if (output_dir / STOP_FILE).exists():
                    self.lifeline.call(lambda: self._raise_flag(Flag.STOP_FILE))
                if time.monotonic() - beats >= SECONDS_PER_BEAT:
                    beats = time.monotonic()
                    self.run_lock.beat()

    # Callbacks of the lifeline.

    def _on_met(self, rank: int, host: str, pid: int) -> None:
        """Starts monitoring `rank`'s heartbeats."""
        self.peers[rank] = Peer(host, pid, self.lifeline.clock, self.lifeline.clock)

    def _on_message(self, rank: int, message: Message) -> None:
        peer = self.peers[rank]
        peer.heard = self.lifeline.clock
        match message.pop("kind"):
            case "beat":
                peer.moved = self.lifeline.clock - message["still"]
                peer.limit, peer.where = message["limit"], message["where"]
            case "failed":
                cause = Cause(**message)
                if not cause.died:
                    self.reporters.add(rank)
                self._report(cause)
            case "goodbye":
                peer.said_goodbye = True
                self._end_together()
            case "end":
                # Rank 0 has printed the reason; other nodes have their own logs.
                if message["reason"] and (self.local_rank == 0 or message["is_printed_by_all"]):
                    print_as_is(f"[rank {self.rank}] {message['reason']}\n", sys.stderr)
                if message["code"] == ExitCode.HANG:
                    self._dump_stacks()
                self._leave(message["code"])

    def _on_lost(self, rank: int) -> None:
        """Handles a closed connection, whose process is gone: rank 0 informs all ranks, any other rank ends."""
        if rank in self.reporters:
            return  # It has reported why it ends, and did not wait for the verdict.
        message, host = describe_death(rank, self.peers[rank]), self.peers[rank].host
        self.causes.append(Cause(ExitCode.PEER_DIED, message, rank, host, self.marks.steps_done, died=True))
        if self.rank > 0:
            self._end(choose_cause(self.causes))
        self.verdict_due = self.verdict_due or time.monotonic() + SECONDS_TO_COLLECT

    # The end.

    def _cause(self, code: ExitCode, message: str, details: str = "", *, died: bool = False) -> Cause:
        texts = message[:LARGEST_TEXT], details[-LARGEST_TEXT:]
        return Cause(code, texts[0], self.rank, self.host, self.marks.steps_done, texts[1], died)

    def _report(self, cause: Cause) -> None:
        """Records a cause; rank 0 chooses among all that arrive within `SECONDS_TO_COLLECT`."""
        self.causes.append(cause)
        if self.rank > 0 and 0 in self.peers:
            self.lifeline.send(0, {"kind": "failed"} | asdict(cause))
            seconds = SECONDS_FOR_VERDICT
        elif self._others_know(cause):
            seconds = 0.0
        elif self.local_rank > 0:
            # Before the lifeline exists, local rank 0 reports errors common to all ranks, and torchrun ends the rest.
            seconds = float(SECONDS_TO_BE_ENDED)
        else:
            seconds = SECONDS_TO_COLLECT if self.world_size > 1 else 0.0
        self.verdict_due = self.verdict_due or time.monotonic() + seconds

    def _others_know(self, cause: Cause) -> bool:
        """Whether, before the lifeline exists, local rank 0 has seen and reports the same cause."""
        seen_by_all = (ExitCode.INTERRUPTED, ExitCode.SAVED_AND_REQUEUE, ExitCode.PEER_DIED)
        return self.local_rank > 0 and 0 not in self.peers and cause.code in seen_by_all

    def _say_goodbye(self, cause: Cause) -> None:
        self.goodbye = cause
        if self.rank > 0:
            self.lifeline.send(0, {"kind": "goodbye"})
        else:
            self._end_together()

    def _end_together(self) -> None:
        """Rank 0: ends the run once every rank, itself included, has said goodbye."""
        others = (peer for rank, peer in self.peers.items() if rank != 0)
        if self.goodbye is not None and all(peer.said_goodbye for peer in others):
            self._end(self.goodbye)

    def _end(self, cause: Cause) -> NoReturn:
        """Reports the cause to the other ranks, the user and exit.json, then exits this process."""
        if self.rank == 0:
            reason = replace(cause, details="").text if cause.code in ERRORS else ""
            printed = cause.is_printed_by_all
            self.lifeline.send_to_all(
                {"kind": "end", "code": cause.code, "reason": reason, "is_printed_by_all": printed}
            )
        within(SECONDS_TO_TELL, lambda: self._tell(cause))
        if cause.code == ExitCode.HANG:
            self._dump_stacks()
        if self.rank == 0:
            self.lifeline.wait_for_ends(SECONDS_TO_TELL)
        within(SECONDS_TO_TELL, lambda: self._clean_up(cause))
        self._leave(cause.code)

    def _leave(self, code: int) -> NoReturn:
        """Exits with `code`, or under torchrun with 0 after a stop that was asked for, with everything saved.

        torchrun would report a failure at length, and with --max-restarts start the ranks again; `mini-trainer` returns
        the code.
        """
        is_stop = self.goodbye is not None and code in (ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER)
        exit_process(ExitCode.DONE if is_stop and self.has_torchrun and find_installed_command() is None else code)

    def _tell(self, cause: Cause) -> None:
        """Writes the cause to exit.json and prints it; only the first rank to write it prints."""
        is_first = not self._others_know(cause)
        is_in_place = self.held is None or self.held.is_in_place()
        if self.output_dir is not None and is_in_place and not self._is_untouched(cause):
            try:
                is_first = write_exit_file(self.output_dir, cause.record)
            except OSError as error:
                say(f"error: {self.output_dir / EXIT_FILE} cannot be written: {error}", is_error=True)
        parts = [*([] if cause.code == ExitCode.DONE else [cause.text]), *filter(None, [cause.afterword])]
        if is_first and parts:
            text = "\n".join(parts)
            # A single write including the newline, since several ranks may print at once.
            print_as_is(f"{leave_bars()}{clean(text)}\n", sys.stderr)

    def _is_untouched(self, cause: Cause) -> bool:
        """Whether the run failed before writing anything to a directory that it had created."""
        return (
            cause.code in (ExitCode.BAD_INPUT, ExitCode.IO)
            and self.run_lock is not None
            and self.run_lock.is_alone_in_its_directory()
        )

    def _clean_up(self, cause: Cause) -> None:
        """Rank 0: removes the stop file that was obeyed, the lock, and an output directory without other files."""
        if self.run_lock is None:
            return
        output_dir, is_untouched = self.run_lock.path.parent, self._is_untouched(cause)
        with contextlib.suppress(OSError):
            if self.marks.flags & Flag.STOP_FILE and self.run_lock.is_in_place():
                (output_dir / STOP_FILE).unlink(missing_ok=True)
            self.run_lock.release()
            if is_untouched:
                output_dir.rmdir()

    def _dump_stacks(self) -> None:
        """Dumps every thread's stack to output_dir/errors/rank_{rank}.txt, or to stderr without a directory."""
        head = (
            f"rank {self.rank}, pid {os.getpid()} on {self.host}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n"
            f"in {self.marks.where}, {self.marks.steps_done} steps done\n\n"
        )
        path = None if self.output_dir is None else self.output_dir / ERRORS_DIR / f"rank_{self.rank}.txt"
        with contextlib.suppress(OSError):
            within(SECONDS_TO_TELL, lambda: dump_stacks(head, path))
