"""One run at a time in an output directory, and the file that says how the last one ended."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ranks.ending import EXIT_FILE, ExitCode, RunError, log

SECONDS_PER_BEAT = 5  # between two touches of the lock by its holder
SECONDS_TO_WATCH = 20  # without a touch after which the lock of another host counts as left behind

LOCK_FILE, STOP_FILE, ERRORS_DIR = ".lock", "stop", "errors"
OWN_FILES = {LOCK_FILE, EXIT_FILE, STOP_FILE, ERRORS_DIR}  # a directory that holds only these holds no run


class HeldDirectory:
    """A run's directory, held open: during the run its path may come to lead to another directory."""

    def __init__(self, path: Path):
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # else its inode's number could be reused

    def is_in_place(self) -> bool:
        """Whether the path still leads to the directory; True if the file system gives no answer."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            return error.errno != errno.ESTALE  # removed by another host

    def describe_loss(self) -> str:
        """Message for a directory that is no longer in its place: where it is, or that it is gone."""
        found = ""
        with contextlib.suppress(OSError):
            found = os.readlink(f"/proc/self/fd/{self.descriptor}")
        fate, advice = "removed", "from another directory's checkpoint (--resume), or from the beginning"
        if found and not found.endswith(" (deleted)") and os.path.isdir(found):
            fate, advice = f"moved to {found}", "with the directory where it was, or with --output-dir at its new place"
        return (
            f"--output-dir {self.path} was {fate} while the run was writing to it; nothing more is written. Start"
            f" again {advice}"
        )


class RunLock:
    """A file that one process holds with flock, which ends with the process, however that ends.

    Where flock does not reach (another host, on some shared file systems), the file's time shows whether the holder,
    named in it, still lives: it touches the file every `SECONDS_PER_BEAT`.
    """

    def __init__(self, output_dir: Path):
        """Makes the directory if it is missing. RunError with `LOCKED` if another run has it."""
        self.path = output_dir / LOCK_FILE
        self.made_directory = not output_dir.exists()
        output_dir.mkdir(parents=True, exist_ok=True)
        while True:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            flock_works = try_flock(self.file, self.path)
            if is_same_file(self.file, self.path):
                break
            os.close(self.file)  # The holder has removed it between our two calls: once more, with a new one.
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
        """Whether the path still leads to this lock, not to another run's in a new directory of the same name."""
        return is_same_file(self.file, self.path)

    def is_alone_in_its_directory(self) -> bool:
        """Whether this lock made the directory, and nothing else has been written to it since."""
        return self.made_directory and self.is_in_place() and os.listdir(self.path.parent) == [LOCK_FILE]

    def release(self) -> None:
        if self.is_in_place():
            self.path.unlink(missing_ok=True)
        file, self.file = self.file, -1  # A late beat then touches nothing.
        os.close(file)


def try_flock(file: int, path: Path) -> bool:
    """Whether the lock is ours for certain; False where the file system has no locks. RunError if it is another's."""
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
    """Watches the file's time for `SECONDS_TO_WATCH`; compares it with itself only, since hosts' clocks differ."""
    log.warning(f"{path} names {describe_holder(holder)}: watching for {SECONDS_TO_WATCH} s whether that run is alive")
    start = read_time(path)
    for _ in range(SECONDS_TO_WATCH):
        time.sleep(1)
        if read_time(path) != start:
            return True
    return False


def read_time(path: Path) -> int:
    """Modification time in ns, of a file opened anew: that is when a network file system asks its server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return -1


def read_holder(path: Path) -> dict[str, Any] | None:
    """Who wrote the lock; None for an empty one, which nobody has held, and {} for one that cannot be read."""
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
        f"--output-dir {path.parent} is in use by {describe_holder(holder)}: wait for it to end, or name another"
        f" directory. If that run is certainly gone, remove {path}",
    )


def read_boot_id() -> str:
    """Tells this running kernel from every other, containers' host names notwithstanding."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def write_exit_file(output_dir: Path, content: dict[str, int | str]) -> bool:
    """Writes exit.json, whole, if there is none: whoever ends a run first says why. True if it was this call."""
    # Not `written_aside`: its rename replaces what is there, and its name aside is one process's on one host only.
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
            # On a file system without hard links the last to end the run says why.
            os.rename(aside, path)
        return True
    finally:
        aside.unlink(missing_ok=True)
