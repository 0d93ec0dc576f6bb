"""The lock that keeps an output directory to one run, how the last one ended, and the state of its ranks."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.distributed.ending import EXIT_FILE, ExitCode, RunError, log
from mini_trainer.distributed.messages import describe_ranks

SECONDS_PER_BEAT = 5  # interval at which the holder touches its lock
SECONDS_TO_WATCH = 20  # a lock of another host that is not touched for this long counts as stale

LOCK_FILE, STOP_FILE, ERRORS_DIR = ".lock", "stop", "errors"
OWN_FILES = {LOCK_FILE, EXIT_FILE, STOP_FILE, ERRORS_DIR}  # a directory with only these files contains no run


class HeldDirectory:
    """A run's directory, held open, since its path can come to refer to another directory during the run."""

    def __init__(self, path: Path):
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # open, so that its inode number is not reused

    def is_in_place(self) -> bool:
        """Whether the path still refers to this directory; True if the file system cannot say."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            return error.errno != errno.ESTALE  # ESTALE: removed by another host

    def describe_loss(self) -> str:
        """Error message for a directory that has been moved or removed."""
        found = ""
        with contextlib.suppress(OSError):
            found = os.readlink(f"/proc/self/fd/{self.descriptor}")
        fate, advice = "removed", "from another directory's checkpoint (--resume), or from the beginning"
        if found and not found.endswith(" (deleted)") and os.path.isdir(found):
            fate, advice = f"moved to {found}", "after moving it back, or with --output-dir set to its new path"
        return (
            f"--output-dir {self.path} was {fate} while the run was writing to it; writing has stopped. Start"
            f" again {advice}"
        )


class RunLock:
    """A file that one process holds with flock, which is released however the process ends.

    Where flock does not work (across hosts on some shared file systems), the file's modification time shows whether
    the holder, named in it, is alive: it touches the file every `SECONDS_PER_BEAT`.
    """

    def __init__(self, output_dir: Path):
        """Creates the directory if it is missing. RunError with `LOCKED` if another run is using it."""
        self.path = output_dir / LOCK_FILE
        self.made_directory = not output_dir.exists()
        output_dir.mkdir(parents=True, exist_ok=True)
        while True:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            flock_works = try_flock(self.file, self.path)
            if is_same_file(self.file, self.path):
                break
            os.close(self.file)  # The holder removed it between our two calls: try again with a new file.
        holder = read_holder(self.path)
        died_here = flock_works and holder is not None and holder.get("boot_id") == read_boot_id()
        if holder is not None and not died_here and is_being_touched(self.path, holder):
            os.close(self.file)
            raise make_locked_error(self.path, holder)
        if holder is not None:
            log.warning(f"warning: {self.path}: took over the lock that {describe_holder(holder)} left behind")
        self._write_holder()

    def _write_holder(self) -> None:
        content = {
            "host": socket.gethostname(),
            "boot_id": read_boot_id(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, json.dumps(content).encode(), 0)
        os.fsync(self.file)

    def beat(self) -> None:
        os.utime(self.file)

    def is_in_place(self) -> bool:
        """Whether the path still refers to this lock, not to another run's in a new directory of the same name."""
        return is_same_file(self.file, self.path)

    def is_alone_in_its_directory(self) -> bool:
        """Whether this lock created the directory and nothing else has been written to it since."""
        return self.made_directory and self.is_in_place() and os.listdir(self.path.parent) == [LOCK_FILE]

    def release(self) -> None:
        if self.is_in_place():
            self.path.unlink(missing_ok=True)
        file, self.file = self.file, -1  # a late `beat` then touches nothing
        os.close(file)


def try_flock(file: int, path: Path) -> bool:
    """True if flock succeeded, False if the file system does not support it. RunError if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        os.close(file)
        raise make_locked_error(path, read_holder(path)) from None
    except OSError:
        return False


def is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_being_touched(path: Path, holder: dict[str, Any]) -> bool:
    """Watches the file's time for `SECONDS_TO_WATCH`; compares it only with itself, since hosts' clocks differ."""
    log.warning(f"{path} names {describe_holder(holder)}: waiting {SECONDS_TO_WATCH} s to see if that run is alive")
    start = read_time(path)
    for _ in range(SECONDS_TO_WATCH):
        time.sleep(1)
        if read_time(path) != start:
            return True
    return False


def read_time(path: Path) -> int:
    """Modification time in ns, after reopening the file: only then does a network file system ask its server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return -1


def read_holder(path: Path) -> dict[str, Any] | None:
    """The lock's contents, which name its holder; None if it is empty (never held), {} if it cannot be read."""
    try:
        text = path.read_text()
        holder = json.loads(text) if text else None
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict | None) else {}


def describe_holder(holder: dict[str, Any] | None) -> str:
    if not holder:
        return "another run"
    return f"the run with pid {holder.get('pid')} on {holder.get('host')}, started {holder.get('started')}"


def make_locked_error(path: Path, holder: dict[str, Any] | None) -> RunError:
    return RunError(
        ExitCode.LOCKED,
        f"--output-dir {path.parent} is in use by {describe_holder(holder)}: wait for it to end, or choose another"
        f" directory. If you are sure that run is gone, remove {path}",
    )


def read_boot_id() -> str:
    """Identifies the running kernel, which host names of containers do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def write_exit_file(output_dir: Path, content: dict[str, int | str]) -> bool:
    """Writes exit.json atomically unless it exists: the first to end a run says why. True if this call wrote it."""
    # Not `written_aside`: its rename replaces an existing file, and its temporary name is unique on one host only.
    path = output_dir / EXIT_FILE
    aside = output_dir / f".{EXIT_FILE}.{socket.gethostname()}.{os.getpid()}"
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError:
            # On a file system without hard links, the last to end the run says why.
            os.rename(aside, path)
        return True
    finally:
        aside.unlink(missing_ok=True)


SLOW_LIMIT = 3600.0  # seconds allowed without progress while loading, saving, or compiling in the first step
SECONDS_PER_HEARTBEAT = 1.0
MOST_DETAILS = 4  # silent ranks that a message describes one by one
MOST_PLACES = 12  # phases that a message lists with the ranks in them


@dataclass
class Peer:
    """A rank's state, from its heartbeats. Rank 0 knows all ranks, the others know rank 0 and themselves.

    Times are in `Lifeline.clock`'s seconds.
    """

    host: str
    pid: int
    heard: float  # time of its last message
    moved: float  # time of its training thread's last sign of progress
    limit: float = SLOW_LIMIT  # seconds allowed without progress in the current phase
    where: str = "the start"
    said_goodbye: bool = False


def is_hanging(peers: dict[int, Peer], clock: float, hang_timeout: float, *, is_rank0: bool) -> bool:
    """Whether a rank is silent or makes no progress. Ranks other than 0 judge rank 0 only, and later than it does."""
    if not is_rank0:
        return 0 in peers and clock - peers[0].heard > 1.1 * hang_timeout + 2
    return any(clock - peer.heard > hang_timeout or clock - peer.moved > peer.limit for peer in peers.values())


def describe_death(rank: int, peer: Peer) -> str:
    """Message about a rank whose connection closed without a report."""
    return (
        f"rank {rank} (pid {peer.pid} on {peer.host}) died without a report, last seen in {peer.where}: it crashed or"
        " was killed, perhaps for lack of memory"
    )


def describe_hang(peers: dict[int, Peer], clock: float) -> str:
    """Lists the silent ranks; if there are none, where each rank is."""
    silent = {rank: peer for rank, peer in peers.items() if clock - peer.heard > 3 * SECONDS_PER_HEARTBEAT}
    stacks = f"stack traces of the responsive ranks are in {ERRORS_DIR}/"
    if silent:
        names = [
            f"rank {rank} (pid {peer.pid} on {peer.host}) has sent no heartbeat for {clock - peer.heard:.0f} s,"
            f" last seen in {peer.where}"
            for rank, peer in sorted(silent.items())[:MOST_DETAILS]
        ]
        others = sorted(silent)[MOST_DETAILS:]
        more = f"; nor {'has' if len(others) == 1 else 'have'} {describe_ranks(others)}" if others else ""
        return f"{'; '.join(names)}{more}: stopped, or cut off from the network; {stacks}"
    places: dict[str, list[int]] = {}
    for rank, peer in sorted(peers.items()):
        places.setdefault(peer.where, []).append(rank)
    seconds = max(clock - peer.moved for peer in peers.values())
    found = "; ".join(f"{describe_ranks(ranks)} in {where}" for where, ranks in list(places.items())[:MOST_PLACES])
    if len(places) > MOST_PLACES:
        found += f"; {sum(map(len, list(places.values())[MOST_PLACES:]))} ranks elsewhere"
    return f"all ranks are alive, but some made no progress for {seconds:.0f} s (--hang-timeout): {found}; {stacks}"
