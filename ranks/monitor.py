"""How a run ends: requests to stop, dead and stuck ranks, the first cause reported once, one exit code on every rank.

A daemon thread in every process (the monitor) watches. The training thread leaves marks (`progress`), reads `flags`
once a step, and hands over its end (`finish`, `fail`); only the monitor ends the process. What it knows of the other
ranks it hears over the lifeline (ranks/lifeline.py): each rank's heartbeats, failures and end at rank 0, and rank 0's
verdict at the others.
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
from enum import IntFlag
from pathlib import Path
from typing import NoReturn

from ranks.ending import (
    EXIT_FILE,
    SECONDS_TO_BE_ENDED,
    Cause,
    ExitCode,
    RanksDiffer,
    RunError,
    choose_cause,
    describe_error,
    dump_stacks,
    leave,
    wait_forever,
    within,
)
from ranks.lifeline import Lifeline, Message, make_socket_pair
from ranks.lock import ERRORS_DIR, SECONDS_PER_BEAT, STOP_FILE, HeldDirectory, RunLock, write_exit_file
from ranks.messages import clean, say
from ranks.peers import SECONDS_PER_HEARTBEAT, SLOW_LIMIT, Peer, describe_death, describe_hang, is_hanging
from ranks.terminal import leave_bars

# Asked for while the program is being imported, since this process gets another parent once torchrun has died.
PARENT = os.getppid()

TICK = 0.25  # seconds between two looks at everything
# From the first report of a failure to the verdict: a death that is noticed meanwhile explains other ranks' errors.
SECONDS_TO_COLLECT = 0.5
SECONDS_FOR_VERDICT = 5.0  # A rank that has reported a failure waits this long for rank 0's verdict, then ends alone.
SECONDS_TO_TELL = 3.0  # Each of the last steps gets this long: printing and writing, the others' ends, cleaning up.
SECONDS_OF_ONE_SIGNAL = 2.0  # SLURM and torchrun both hand on one SIGTERM: within this time they are the same request.
LARGEST_TEXT = 10_000  # characters of a message; of a traceback, its last ones


class Flag(IntFlag):
    """What one rank knows and all must agree on; they ride on the step's reduction, OR-ed over ranks."""

    SIGTERM = 1
    SIGUSR1 = 2
    SIGHUP = 4
    MAX_TIME = 8
    SIGINT = 16
    STOP_FILE = 32
    CHECKPOINT_DUE = 64
    CHECKPOINT_UNDER_WAY = 128


BY_USER = Flag.SIGINT | Flag.STOP_FILE
STOPS = BY_USER | Flag.SIGTERM | Flag.SIGUSR1 | Flag.SIGHUP | Flag.MAX_TIME
FLAG_NAMES = {Flag.SIGINT: "Ctrl-C (SIGINT)", Flag.STOP_FILE: "the stop file", Flag.MAX_TIME: "--max-time"}
ERRORS = set(ExitCode) - {ExitCode.DONE, ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER}
SIGNALS = {getattr(signal, flag.name): flag for flag in Flag if flag.name.startswith("SIG")}


def stop_reason(flags: int) -> tuple[ExitCode, str] | None:
    """The exit code and the words for why the ranks are to stop after this step; None if they are not."""
    stops = Flag(flags & STOPS)
    if not stops:
        return None
    code = ExitCode.STOPPED_BY_USER if stops & BY_USER else ExitCode.SAVED_AND_REQUEUE
    return code, " and ".join(FLAG_NAMES.get(flag, flag.name) for flag in stops)


@dataclass
class Marks:
    """What the training thread leaves for the monitor: plain attributes, each written in one go."""

    count: int = 0
    where: str = "the start"
    steps_done: int = 0
    num_slow_phases: int = 1  # Slow phases nest; everything until the end of the first step is one.
    in_loop: bool = False
    has_stepped: bool = False
    flags: int = 0  # This one goes the other way: the monitor raises flags, the training thread reads them.


class RunControl:
    """The monitor, and what the training thread says to it. One per process."""

    def __init__(self, *, hang_timeout: float, max_seconds: float | None):
        self.hang_timeout, self.max_seconds = hang_timeout, max_seconds
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self.parent_started_this = may_be_launcher(PARENT)
        self.marks = Marks()
        self.output_dir: Path | None = None  # It stays None until the directory is this run's.
        self.run_lock: RunLock | None = None
        self.held: HeldDirectory | None = None  # the output directory, where this host has it
        self.lifeline = Lifeline(
            self.rank, self.world_size, on_met=self._on_met, on_message=self._on_message, on_lost=self._on_lost
        )
        self.host = self.lifeline.host
        # What follows belongs to the monitor's thread alone.
        self.started = time.monotonic()
        self.peers = {self.rank: Peer(self.host, os.getpid(), 0.0, 0.0)}
        self.marks_seen = 0
        self.last_heartbeat = 0.0
        self.first_signal: float | None = None
        self.causes: list[Cause] = []
        self.verdict_due: float | None = None
        self.goodbye: Cause | None = None
        self.signals, self.signals_in = make_socket_pair()
        self.lifeline.watch(self.signals, self._on_signals)

    # What the training thread calls.

    def start(self) -> None:
        """Takes over the signals and starts the monitor."""
        # The monitor hears of a signal even while the main thread waits inside a collective.
        signal.set_wakeup_fd(self.signals_in.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            # A signal that nohup made this process ignore stays ignored.
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="monitor", daemon=True).start()

    def listen(self) -> tuple[int, str]:
        """Rank 0: opens the lifeline's port; returns it with the token that the other ranks have to show."""
        return self.lifeline.listen()

    def connect(self, port: int, token: str) -> None:
        """Ties this rank to rank 0; on rank 0, waits for all others. RunError if that cannot be."""
        self.lifeline.connect(port, token)

    def lock(self, output_dir: Path) -> None:
        """Rank 0: takes the directory for this run, or raises RunError. Nothing in it has been changed then."""
        try:
            self.run_lock = RunLock(output_dir)
        except OSError as error:
            raise RunError(ExitCode.IO, f"--output-dir {output_dir}: cannot be written: {error}") from None
        threading.Thread(target=self._watch_files, args=(output_dir,), name="files", daemon=True).start()

    def own(self, output_dir: Path) -> None:
        """The directory has been looked at and is this run's: from here on exit.json says how the run ended."""
        if self.rank == 0:
            (output_dir / EXIT_FILE).unlink(missing_ok=True)
        self.output_dir = output_dir
        with contextlib.suppress(FileNotFoundError):
            self.held = HeldDirectory(output_dir)

    def check_directory(self) -> None:
        """RunError if the output directory was moved or removed: a new one at its path is not this run's."""
        if self.held is not None and not self.held.is_in_place():
            raise RunError(ExitCode.IO, self.held.describe_loss())

    def progress(self, where: str) -> None:
        """A sign that the training thread moves on; `where` stands in messages. Costs next to nothing."""
        self.marks.where = where
        self.marks.count += 1

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """A phase that may take as long as `SLOW_LIMIT` without a sign of progress."""
        before = self.marks.where
        self.marks.num_slow_phases += 1
        self.progress(what)
        try:
            yield
        finally:
            self.marks.num_slow_phases -= 1
        self.progress(before)

    def start_loop(self, *, steps_done: int = 0) -> None:
        """From here on a signal waits for the end of a step."""
        self.marks.in_loop = True
        self.marks.steps_done = steps_done
        self.progress(f"the step after {steps_done}")

    def flags(self) -> int:
        """What this rank knows, for the step's reduction."""
        return self.marks.flags

    def step_done(self, step: int) -> None:
        """`step` steps are complete; after the first one the watchdog expects the pace of steps."""
        if not self.marks.has_stepped:
            self.marks.num_slow_phases -= 1
        self.marks.has_stepped, self.marks.steps_done = True, step
        self.progress(f"the step after {step}")

    def finish(self, code: ExitCode, message: str) -> NoReturn:
        """The end that all ranks reach together; every process ends once all have."""
        cause = self._cause(code, message)
        self.progress("the end of the run")
        self.lifeline.call(lambda: self._say_goodbye(cause))
        wait_forever()

    def fail(self, error: BaseException) -> NoReturn:
        """This rank's own end; every process ends once rank 0 has reported the first cause."""
        code, message, details = describe_error(error, self.marks.where)
        if code == ExitCode.IO and self.held is not None and not self.held.is_in_place():
            message = self.held.describe_loss()  # why nothing could be written
        cause = replace(self._cause(code, message, details), is_printed_by_all=isinstance(error, RanksDiffer))
        self.lifeline.call(lambda: self._report(cause))
        wait_forever()

    # The monitor.

    def _watch(self) -> None:
        try:
            while True:
                self.lifeline.poll(TICK)
                self._tick()
        except BaseException:  # Without a monitor nobody would end this process.
            try:
                traceback.print_exc()
            finally:
                leave(ExitCode.FAILED)

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
            self._report(self._cause(ExitCode.INTERRUPTED, f"a second signal ({number.name}): ended without saving"))
        elif not self.marks.in_loop:
            code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.SAVED_AND_REQUEUE
            self._report(self._cause(code, f"{number.name} before the first step: there is nothing new to save"))
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
        if self.rank == 0 and self.max_seconds is not None and now - self.started >= self.max_seconds:
            self._raise_flag(Flag.MAX_TIME)
        if clock - self.last_heartbeat >= SECONDS_PER_HEARTBEAT:
            self.last_heartbeat, own = clock, self.peers[self.rank]
            still = clock - own.moved
            self.lifeline.send_beat({"kind": "beat", "still": still, "limit": own.limit, "where": own.where})
        if self.verdict_due is not None:
            if now >= self.verdict_due:
                self._end(choose_cause(self.causes))
        elif is_hanging(self.peers, clock, self.hang_timeout, is_rank0=self.rank == 0):
            self._end(self._cause(ExitCode.HANG, describe_hang(self.peers, clock)))

    def _look_at_marks(self) -> None:
        """Brings what is known of this rank itself up to date."""
        own, clock = self.peers[self.rank], self.lifeline.clock
        own.heard, own.where = clock, self.marks.where
        own.limit = max(SLOW_LIMIT, self.hang_timeout) if self.marks.num_slow_phases else self.hang_timeout
        if self.marks.count != self.marks_seen:
            self.marks_seen, own.moved = self.marks.count, clock

    def _watch_files(self, output_dir: Path) -> None:
        """Rank 0, in a thread of its own, since a file system can keep one waiting: the stop file, the lock, the
        directory itself."""
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

    # What the lifeline calls.

    def _on_met(self, rank: int, host: str, pid: int) -> None:
        """From here on this rank's silence is noticed."""
        self.peers[rank] = Peer(host, pid, self.lifeline.clock, self.lifeline.clock)

    def _on_message(self, rank: int, message: Message) -> None:
        peer = self.peers[rank]
        peer.heard = self.lifeline.clock
        match message.pop("kind"):
            case "beat":
                peer.moved = self.lifeline.clock - message["still"]
                peer.limit, peer.where = message["limit"], message["where"]
            case "failed":
                self._report(Cause(**message))
            case "goodbye":
                peer.said_goodbye = True
                self._end_together()
            case "end":
                # Rank 0 has printed why; another node has logs of its own.
                if message["reason"] and (self.local_rank == 0 or message["is_printed_by_all"]):
                    print(f"[rank {self.rank}] {message['reason']}\n", end="", file=sys.stderr, flush=True)
                if message["code"] == ExitCode.HANG:
                    self._dump_stacks()
                leave(message["code"])

    def _on_lost(self, rank: int) -> None:
        """A connection ended, so its process is gone; rank 0 tells everybody before it goes."""
        if self.rank == 0 and any(cause.rank == rank and not cause.died for cause in self.causes):
            return  # It has said why it ends, and has not waited for the verdict.
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
        """Notes a cause; rank 0 decides among all that come in within `SECONDS_TO_COLLECT`."""
        self.causes.append(cause)
        if self.rank > 0 and 0 in self.peers:
            self.lifeline.send(0, {"kind": "failed"} | asdict(cause))
            seconds = SECONDS_FOR_VERDICT
        elif self._others_know(cause):
            seconds = 0.0
        elif self.local_rank > 0:
            # Before there is a lifeline, local rank 0 says what most failures have in common, and torchrun ends all.
            seconds = float(SECONDS_TO_BE_ENDED)
        else:
            seconds = SECONDS_TO_COLLECT if self.world_size > 1 else 0.0
        self.verdict_due = self.verdict_due or time.monotonic() + seconds

    def _others_know(self, cause: Cause) -> bool:
        """Before there is a lifeline: whether local rank 0 says the same, having seen the same."""
        seen_by_all = (ExitCode.INTERRUPTED, ExitCode.SAVED_AND_REQUEUE, ExitCode.PEER_DIED)
        return self.local_rank > 0 and 0 not in self.peers and cause.code in seen_by_all

    def _say_goodbye(self, cause: Cause) -> None:
        self.goodbye = cause
        if self.rank > 0:
            self.lifeline.send(0, {"kind": "goodbye"})
        else:
            self._end_together()

    def _end_together(self) -> None:
        """Rank 0: ends the run once every rank, itself included, has come to the end."""
        others = (peer for rank, peer in self.peers.items() if rank != 0)
        if self.goodbye is not None and all(peer.said_goodbye for peer in others):
            self._end(self.goodbye)

    def _end(self, cause: Cause) -> NoReturn:
        """Tells the others, the user and exit.json, and ends this process."""
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
        leave(cause.code)

    def _tell(self, cause: Cause) -> None:
        """Prints the cause, and writes it to exit.json; only the first rank to do so speaks."""
        is_first = not self._others_know(cause)
        is_in_place = self.held is None or self.held.is_in_place()
        if self.output_dir is not None and is_in_place and not self._is_untouched(cause):
            try:
                is_first = write_exit_file(self.output_dir, cause.record)
            except OSError as error:
                say(f"error: {self.output_dir / EXIT_FILE} cannot be written: {error}", is_error=True)
        if is_first and cause.code != ExitCode.DONE:
            # One write, the line's end included: several ranks may print at once.
            print(f"{leave_bars()}{clean(cause.text)}\n", end="", file=sys.stderr, flush=True)

    def _is_untouched(self, cause: Cause) -> bool:
        """Whether the run is refused before it has written anything into a directory that it made."""
        return (
            cause.code in (ExitCode.BAD_INPUT, ExitCode.IO)
            and self.run_lock is not None
            and self.run_lock.is_alone_in_its_directory()
        )

    def _clean_up(self, cause: Cause) -> None:
        """Rank 0: the stop file that was honoured, the lock, and a directory that nothing was written to."""
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
        """Every thread's stack to output_dir/errors/rank_{rank}.txt; to stderr where there is no directory yet."""
        head = (
            f"rank {self.rank}, pid {os.getpid()} on {self.host}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n"
            f"in {self.marks.where}, {self.marks.steps_done} steps done\n\n"
        )
        path = None if self.output_dir is None else self.output_dir / ERRORS_DIR / f"rank_{self.rank}.txt"
        with contextlib.suppress(OSError):
            within(SECONDS_TO_TELL, lambda: dump_stacks(head, path))


def may_be_launcher(pid: int) -> bool:
    """False if process `pid` has adopted this one: torchrun was killed before this process could ask who its parent is.

    torchrun is a Python program; a wrapper between it and this program has torchrun's variables, as this process has.
    """
    process = Path(f"/proc/{pid}")
    try:
        if b"python" in (process / "cmdline").read_bytes().split(b"\0")[0].lower():
            return True
    except OSError:
        return True  # It cannot be known, and an unfounded suspicion would end a good run.
    try:
        # A program can give itself another name than its file has.
        is_python = "python" in os.readlink(process / "exe").lower()
        return is_python or b"\0TORCHELASTIC_RUN_ID=" in b"\0" + (process / "environ").read_bytes()
    except OSError:
        return False  # It is another user's, as init is.
