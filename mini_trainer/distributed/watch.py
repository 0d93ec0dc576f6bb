"""The watch: the thread that sees how this rank and its peers fare, and that alone ends the process.

It learns of this rank from the marks that the training thread leaves by its `RunControl`, and of others over the
lifeline (distributed/lifeline.py): rank 0 receives each rank's heartbeats, failures and end, and the others receive
rank 0's verdict. So one cause is reported once, and every rank ends with the same exit code.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from mini_trainer.distributed import ending, hang
from mini_trainer.distributed.lifeline import Lifeline, Notice
from mini_trainer.distributed.lock import ERRORS_DIR, SECONDS_PER_BEAT, STOP_FILE, RunFiles
from mini_trainer.distributed.messages import clean, leave_bars, print_as_is, say
from mini_trainer.distributed.process import PARENT, may_be_launcher
from mini_trainer.options.reading import write_over

FIRST_STEPS = 3  # in which a run whose micro-batches were chosen automatically starts over if it runs out of memory


def describe_death(rank: int, peer: hang.Peer) -> str:
    """Notice about a rank whose connection closed without a report."""
    return (
        f"rank {rank} (pid {peer.pid} on {peer.host}) died without a report, last seen in {peer.where}: it crashed or"
        f" was killed, perhaps because it ran out of memory"
    )


TICK = 0.25  # seconds between looks at the marks and the clock
# From the first report of a failure to the verdict: a death noticed in this time explains other ranks' errors.
SECONDS_TO_COLLECT = 0.5
SECONDS_TO_ANSWER = 2.0  # for the ranks to say where they stand, once one of them hangs
SECONDS_FOR_VERDICT = 5.0  # A rank that has reported a failure waits this long for rank 0's verdict, then ends alone.
SECONDS_TO_TELL = 3.0  # Time limit for each final step: printing and writing, waiting for other ranks, cleaning up.
SECONDS_OF_ONE_SIGNAL = 2.0  # SLURM and torchrun may both forward one SIGTERM: within this time it counts once.
SUMMARY = "summary.txt"  # of a hang, in ERRORS_DIR
MOST_PROCESSES = 1000  # silent ones that one message lists
LARGEST_TEXT = 10_000  # maximum characters of a message (its first) or a traceback (its last)

# Causes that every rank learns of by itself, before the lifeline exists.
KNOWN_TO_ALL = (ending.ExitCode.INTERRUPTED, ending.ExitCode.SAVED_AND_REQUEUE, ending.ExitCode.PEER_DIED)


@dataclass
class Marks:
    """State that the training thread shares with the watch: plain attributes, each written by one of them."""

    count: int = 0
    where: str = "the start"
    steps_done: int = 0
    least_slow: float = 0.0  # seconds that the present slow phase may take at least
    num_slow_phases: int = 1  # Slow phases nest; the time until the end of the first step is one.
    in_loop: bool = False
    fewer_tokens: int | None = None  # with which the run starts over if it runs out of memory now
    flags: int = 0  # the other direction: set by the watch, read by the training thread


class Watch:
    """One per process. Its thread calls `run`, and owns everything but the marks and the files. The first verdict
    counts: later events do not change how the process ends. Other threads use `call` and `make_cause`."""

    def __init__(self, marks: Marks, files: RunFiles, *, hang_timeout: float):
        self.marks, self.files, self.hang_timeout = marks, files, hang_timeout
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world_size, self.host = int(os.environ.get("WORLD_SIZE", 1)), socket.gethostname()
        self.has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self.parent_started_this = may_be_launcher(PARENT)
        self.loop = asyncio.new_event_loop()
        self.lifeline = Lifeline(
            self.rank,
            self.world_size,
            self.loop,
            on_met=self._on_met,
            on_message=self._on_message,
            on_lost=self._on_lost,
        )
        self.signals, self.signals_in = socket.socketpair()
        for end in (self.signals, self.signals_in):
            end.setblocking(False)
        self.first_signal: float | None = None
        self.clock = 0.0  # seconds during which this process was watching
        self.last_tick, self.last_heartbeat = time.monotonic(), 0.0
        self.marks_seen = 0
        self.slow_limit = hang.limit_slow(hang_timeout)
        self.peers = {self.rank: hang.Peer(self.host, os.getpid(), 0.0, 0.0, self.slow_limit)}
        self.causes: list[ending.Cause] = []  # With the first one, the time until the verdict begins.
        self.reporters: set[int] = set()  # ranks that have sent their own error
        self.has_asked = False  # where the ranks stand, after a hang
        self.goodbye: ending.Cause | None = None
        self.verdict: asyncio.Future[ending.Cause] = self.loop.create_future()

    # Methods for other threads.

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function` in the watch's thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def make_cause(self, code: ending.ExitCode, message: str, details: str = "", *, died: bool = False) -> ending.Cause:
        texts = message[:LARGEST_TEXT], details[-LARGEST_TEXT:]
        return ending.Cause(code, texts[0], self.rank, self.host, self.marks.steps_done, texts[1], died)

    def watch_files(self) -> None:
        """Rank 0: watches the lock, the stop file and the directory, in its own thread: file systems can block."""
        beats = 0.0
        while True:
            time.sleep(1)
            if (loss := self.files.find_loss()) is not None:
                return self.call(self.report, self.make_cause(ending.ExitCode.IO, loss))
            if self.files.lock is None:
                continue
            with contextlib.suppress(OSError):
                if (self.files.lock.path.parent / STOP_FILE).exists():
                    self.marks.flags |= ending.Flag.STOP_FILE
                if time.monotonic() - beats >= SECONDS_PER_BEAT:
                    beats = time.monotonic()
                    self.files.lock.beat()

    # The thread.

    def run(self) -> NoReturn:
        """Watches until there is a verdict, then ends the process."""
        try:
            self.loop.run_until_complete(self._watch())
        except BaseException:  # Without a watch, nothing would end this process.
            try:
                traceback.print_exc()
            finally:
                ending.exit_process(ending.ExitCode.FAILED)

    async def _watch(self) -> NoReturn:
        self.loop.set_exception_handler(self._on_error)
        self.loop.add_reader(self.signals, self._on_signals)
        while not self.verdict.done():
            self._tick()
            await asyncio.wait([self.verdict], timeout=TICK)
        await self._end(self.verdict.result())

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Ends the watch with an error that a callback has raised. OSErrors are those of connections."""
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError) and not self.verdict.done():
            self.verdict.set_exception(error)

    def _tick(self) -> None:
        now = time.monotonic()
        # If more time has passed, this process was suspended, perhaps with the whole job: no peer counts as silent.
        self.clock += min(now - self.last_tick, 4 * TICK)
        self.last_tick = now
        own = self.peers[self.rank]
        own.heard, own.where = self.clock, self.marks.where
        slow_limit = max(self.slow_limit, self.marks.least_slow)
        own.limit = slow_limit if self.marks.num_slow_phases else self.hang_timeout
        if self.marks.count != self.marks_seen:
            self.marks_seen, own.moved = self.marks.count, self.clock
        if self.clock - self.last_heartbeat >= hang.SECONDS_PER_HEARTBEAT:
            self.last_heartbeat, still = self.clock, self.clock - own.moved
            beat = {"kind": "beat", "still": still, "limit": own.limit, "where": own.where}
            self.lifeline.send_to_all(beat, is_beat=True)
        if self.causes or self.has_asked:
            return
        if self.has_torchrun and (os.getppid() != PARENT or not self.parent_started_this):
            name = f"pid {PARENT} on" if self.parent_started_this else "of"
            self.report(self.make_cause(ending.ExitCode.PEER_DIED, f"torchrun ({name} {self.host}) is gone", died=True))
        elif hang.is_hanging(self.peers, self.clock, self.hang_timeout, is_rank0=self.rank == 0):
            self._ask()

    def _on_signals(self) -> None:
        for number in self.signals.recv(4096):
            if number in ending.SIGNALS:
                self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        is_warning = number == signal.SIGUSR1  # a scheduler's, which may be repeated, and followed by SIGTERM
        is_second = self.first_signal is not None and not is_warning
        if self.goodbye is not None or (is_second and now - self.first_signal < SECONDS_OF_ONE_SIGNAL):
            return
        if is_second:
            message = f"second signal ({number.name}): ended without saving"
            self.report(self.make_cause(ending.ExitCode.INTERRUPTED, message))
        elif not self.marks.in_loop:
            code = ending.ExitCode.INTERRUPTED if number == signal.SIGINT else ending.ExitCode.SAVED_AND_REQUEUE
            self.report(self.make_cause(code, f"{number.name} before the first step: nothing new to save"))
        else:
            self.marks.flags |= ending.SIGNALS[number]
        if not is_warning:
            self.first_signal = now

    # Callbacks of the lifeline.

    def _on_met(self, rank: int, host: str, pid: int) -> None:
        """Starts monitoring `rank`'s heartbeats."""
        self.peers[rank] = hang.Peer(host, pid, self.clock, self.clock, self.slow_limit)

    def _on_message(self, rank: int, message: Notice) -> None:
        peer = self.peers[rank]
        peer.heard = self.clock
        match message.pop("kind"):
            case "beat":
                peer.moved = self.clock - message["still"]
                peer.limit, peer.where = message["limit"], message["where"]
            case "look":
                stand = hang.look()
                self.lifeline.send(0, {"kind": "stands", "stand": stand})
                self._write_down(stand)  # last, since a file system can block
            case "stands":
                peer.stand = message["stand"]
                self._conclude_if_answered()
            case "failed":
                cause = ending.Cause(**message)
                if not cause.died:
                    self.reporters.add(rank)
                self.report(cause)
            case "goodbye":
                peer.said_goodbye = True
                self._end_together()
            case "end":
                # Rank 0 has printed the reason; other nodes have their own logs.
                if message["reason"] and (self.local_rank == 0 or message["is_printed_by_all"]):
                    text = f"[rank {self.rank}] {message['reason']}"
                    ending.within(SECONDS_TO_TELL, lambda: say(text, is_error=True))
                self._end_silent([tuple(process) for process in message["silent"]])
                self._leave(message["code"], message["fewer_tokens"])

    def _on_lost(self, rank: int) -> None:
        """Handles a closed connection, whose process is gone: rank 0 informs all ranks, any other rank ends."""
        if rank in self.reporters or self.has_asked:
            return  # It has reported why it ends, and did not wait for the verdict; or a hang is being looked at.
        message, host = describe_death(rank, self.peers[rank]), self.peers[rank].host
        cause = ending.Cause(ending.ExitCode.PEER_DIED, message, rank, host, self.marks.steps_done, died=True)
        self._add(cause, seconds=SECONDS_TO_COLLECT)
        if self.rank > 0:
            self._decide()

    # A hang.

    def _ask(self) -> None:
        """Looks where this rank stands; rank 0 also asks the others, and concludes when all have answered. The others,
        whose rank 0 is silent, conclude together: the first to do so kills it, if it can."""
        self.has_asked = True
        if self.rank == 0:
            self.lifeline.send_to_all({"kind": "look"})
        self.loop.call_later(SECONDS_TO_ANSWER if self.world_size > 1 else 0.0, self._conclude_hang)
        self.peers[self.rank].stand = hang.look()
        self._write_down(self.peers[self.rank].stand)
        if self.rank == 0:
            self._conclude_if_answered()

    def _conclude_if_answered(self) -> None:
        silent = hang.find_silent(self.peers, self.clock)
        if all(peer.stand is not None or rank in silent for rank, peer in self.peers.items()):
            self._conclude_hang()

    def _conclude_hang(self) -> None:
        if not hang.is_hanging(self.peers, self.clock, self.hang_timeout, is_rank0=self.rank == 0):
            self.has_asked = False  # it was only slow, and has answered
            for peer in self.peers.values():
                peer.stand = None
            return
        self._conclude(self.make_cause(ending.ExitCode.HANG, hang.describe_hang(self.peers, self.clock)))

    def _write_down(self, stand: hang.Stand) -> None:
        """Writes every thread's stack, and the collectives that torch has recorded, to output_dir/errors, the stacks to
        stderr without a directory."""
        head = (
            f"rank {self.rank}, pid {os.getpid()} on {self.host}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n"
            f"in {self.marks.where}, {self.marks.steps_done} steps done\n\n"
        )
        output_dir = self.files.output_dir
        path = None if output_dir is None else output_dir / ERRORS_DIR / f"rank_{self.rank}.txt"

        def write() -> None:
            ending.dump_stacks(head, path)
            if path is not None and stand["collectives"]:
                write_over(path.with_name(f"rank_{self.rank}_collectives.json"), json.dumps(hang.read_recorders()))

        with contextlib.suppress(OSError):
            ending.within(SECONDS_TO_TELL, write)

    def _list_processes(self, ranks: list[int]) -> list[hang.Process]:
        return [(rank, self.peers[rank].host, self.peers[rank].pid) for rank in ranks[:MOST_PROCESSES]]

    def _end_silent(self, silent: list[hang.Process]) -> None:
        """Ends the processes of this host that cannot end themselves."""
        for left in hang.end_silent(silent, self.host):
            if self.local_rank == 0:
                ending.within(SECONDS_TO_TELL, lambda left=left: say(f"[rank {self.rank}] {left}", is_error=True))

    # The verdict.

    def report(self, cause: ending.Cause) -> None:
        """Records a cause; rank 0 chooses among all that arrive within `SECONDS_TO_COLLECT`."""
        if self.rank > 0 and 0 in self.peers:
            self.lifeline.send(0, {"kind": "failed"} | asdict(cause))
            seconds = SECONDS_FOR_VERDICT
        elif self._others_know(cause):
            seconds = 0.0
        elif self.local_rank > 0:
            # Before the lifeline exists, local rank 0 reports errors common to all ranks, and torchrun ends the rest.
            seconds = ending.SECONDS_TO_BE_ENDED
        else:
            seconds = SECONDS_TO_COLLECT if self.world_size > 1 else 0.0
        self._add(cause, seconds=seconds)

    def say_goodbye(self, cause: ending.Cause) -> None:
        """Ends this rank normally, once all others have also said goodbye."""
        self.goodbye = cause
        if self.rank > 0:
            self.lifeline.send(0, {"kind": "goodbye"})
        else:
            self._end_together()

    def _end_together(self) -> None:
        """Rank 0: ends the run once every rank, itself included, has said goodbye."""
        others = (peer for rank, peer in self.peers.items() if rank != 0)
        if self.goodbye is not None and all(peer.said_goodbye for peer in others):
            self._conclude(self.goodbye)

    def _others_know(self, cause: ending.Cause) -> bool:
        """Whether, before the lifeline exists, local rank 0 has seen and reports the same cause."""
        return self.local_rank > 0 and 0 not in self.peers and cause.code in KNOWN_TO_ALL

    def _add(self, cause: ending.Cause, *, seconds: float) -> None:
        """Adds a cause to choose from; the first one decides how long others may come."""
        self.causes.append(cause)
        if len(self.causes) == 1:
            self.loop.call_later(seconds, self._decide)

    def _decide(self) -> None:
        self._conclude(ending.choose_cause(self.causes))

    def _conclude(self, cause: ending.Cause) -> None:
        if not self.verdict.done():
            self.verdict.set_result(cause)

    # The end.

    async def _end(self, cause: ending.Cause) -> NoReturn:
        """Reports the cause to the other ranks, the user and exit.json, then exits this process, or starts it over."""
        fewer = self.marks.fewer_tokens if cause.code == ending.ExitCode.OUT_OF_MEMORY else None
        if fewer is not None:
            cause = replace(cause, message=f"{cause.message}; starting over with --max-tokens-per-gpu {fewer}")
        is_error = cause.code not in (ending.ExitCode.DONE, *ending.STOPPED)
        silent = list(hang.find_silent(self.peers, self.clock)) if cause.code == ending.ExitCode.HANG else []
        if self.rank == 0:
            reason = replace(cause, details="").text if is_error else ""
            end = {"kind": "end", "code": cause.code, "reason": reason, "is_printed_by_all": cause.is_printed_by_all}
            self.lifeline.send_to_all(end | {"fewer_tokens": fewer, "silent": self._list_processes(silent)})
        ending.within(SECONDS_TO_TELL, lambda: self._tell(cause, is_end=fewer is None))
        self._end_silent(self._list_processes(silent))
        if self.rank == 0:
            left = await self.lifeline.wait_for_ends(SECONDS_TO_TELL)
            self._end_silent(self._list_processes(left if is_error and fewer is None else []))
        was_stopped = bool(self.marks.flags & ending.Flag.STOP_FILE)
        ending.within(SECONDS_TO_TELL, lambda: self.files.clean_up(cause, was_stopped=was_stopped))
        self._leave(cause.code, fewer)

    def _tell(self, cause: ending.Cause, *, is_end: bool) -> None:
        """Prints the cause, with its afterword, and writes it to exit.json if `is_end`, and no new start follows; only
        the first rank to write it prints."""
        if self._others_know(cause) or (is_end and not self.files.record(cause)):
            return
        if self.has_asked and self.rank == 0 and self.files.output_dir is not None:
            with contextlib.suppress(OSError):
                summary = f"{cause.text}\n\n{hang.describe_stands(self.peers)}"
                write_over(self.files.output_dir / ERRORS_DIR / SUMMARY, summary)
        texts = ["" if cause.code == ending.ExitCode.DONE else cause.text, cause.afterword]
        if text := "\n".join(filter(None, texts)):
            # A single write including the newline, since several ranks may print at once.
            print_as_is(f"{leave_bars()}{clean(text)}\n", sys.stderr)

    def _leave(self, code: int, fewer_tokens: int | None) -> NoReturn:
        """Starts over with fewer tokens, or exits, with `code`, or under torchrun with 0 after a stop that was asked
        for, with everything saved. torchrun would report a failure at length, and with --max-restarts start the ranks
        again. `mini-trainer` returns the code, which it reads in exit.json."""
        if fewer_tokens is not None:
            ending.start_over(fewer_tokens)
        is_stop = self.goodbye is not None and code in ending.STOPPED
        ending.exit_process(ending.ExitCode.DONE if is_stop and self.has_torchrun else code)


class RunControl:
    """The training thread's side: reports progress, learns of requests to stop, and hands over the run's end. One per
    process. All methods are the training thread's, which alone writes the marks, except their flags."""

    def __init__(self, *, hang_timeout: float, max_seconds: float | None):
        self.max_seconds, self.started = max_seconds, time.monotonic()
        self.num_steps = 0  # of this start
        self.marks, self.files = Marks(), RunFiles()
        self.watch = Watch(self.marks, self.files, hang_timeout=hang_timeout)
        self.lifeline = self.watch.lifeline

    def start(self) -> None:
        """Installs the signal handlers and starts the watch."""
        # The wake-up file lets the watch notice a signal even while the main thread is blocked in a collective.
        signal.set_wakeup_fd(self.watch.signals_in.fileno(), warn_on_full_buffer=False)
        for number in ending.SIGNALS:
            # Keep ignoring SIGHUP under nohup.
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
                signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending.SIGNALS)  # `mini-trainer` blocks SIGUSR1 until now
        threading.Thread(target=self.watch.run, name="watch", daemon=True).start()
        if self.watch.rank == 0:
            threading.Thread(target=self.watch.watch_files, name="files", daemon=True).start()

    def check_directory(self) -> None:
        """RunError if the output directory was moved or removed."""
        if (loss := self.files.find_loss()) is not None:
            raise ending.RunError(ending.ExitCode.IO, loss)

    def progress(self, where: str) -> None:
        """Records progress of the training thread; `where` appears in messages. Almost free."""
        self.marks.where = where
        self.marks.count += 1

    @contextlib.contextmanager
    def slow(self, what: str, *, least: float = 0.0) -> Iterator[None]:
        """Marks a phase that may take up to `hang.limit_slow`, or `least` seconds, without a sign of progress."""
        before = self.marks.where, self.marks.least_slow
        self.marks.num_slow_phases += 1
        self.marks.least_slow = max(least, self.marks.least_slow)
        self.progress(what)
        try:
            yield
        finally:
            self.marks.num_slow_phases -= 1
            self.marks.least_slow = before[1]
        self.progress(before[0])

    def start_loop(self, *, steps_done: int = 0) -> None:
        """Marks the start of the training loop, in which a signal takes effect at the end of a step."""
        self.marks.in_loop = True
        self.marks.steps_done = steps_done
        self.progress(f"the step after {steps_done}")

    def flags(self) -> int:
        """This rank's flags, for the step's reduction; rank 0 says for all when --max-time is over."""
        is_over = self.max_seconds is not None and time.monotonic() - self.started >= self.max_seconds
        return self.marks.flags | (ending.Flag.MAX_TIME if is_over and self.watch.rank == 0 else 0)

    def step_done(self, step: int) -> None:
        """Records that `step` steps are complete; after the first one, the ordinary --hang-timeout applies."""
        if self.num_steps == 0:
            self.marks.num_slow_phases -= 1
        self.num_steps, self.marks.steps_done = self.num_steps + 1, step
        if self.num_steps == FIRST_STEPS:
            self.marks.fewer_tokens = None
        self.progress(f"the step after {step}")

    def finish(self, code: ending.ExitCode, message: str, *, afterword: str = "") -> NoReturn:
        """Ends the run normally: all ranks call this, and their processes exit once all have. Rank 0 prints its
        message, unless the run is done, and its `afterword`."""
        cause = replace(self.watch.make_cause(code, message), afterword=afterword)
        self.progress("the end of the run")
        self.watch.call(self.watch.say_goodbye, cause)
        ending.wait_forever()

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the run because of this rank's error; all processes exit once rank 0 has reported the root cause."""
        code, message, details = ending.describe_error(error, self.marks.where)
        if code == ending.ExitCode.IO:
            message = self.files.find_loss() or message  # A lost directory is the actual reason for the I/O error.
        cause = self.watch.make_cause(code, message, details)
        self.watch.call(self.watch.report, replace(cause, is_printed_by_all=isinstance(error, ending.RanksDiffer)))
        ending.wait_forever()
