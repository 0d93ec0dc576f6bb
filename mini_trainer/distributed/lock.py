"""A run's hold on its output directory: the lock that keeps it to one run, and how the run ended."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from mini_trainer.distributed.ending import EXIT_FILE, Cause, ExitCode, RunError, log
from mini_trainer.distributed.messages import say
from mini_trainer.options.reading import open_descriptor, open_own, open_regular, read_bytes, read_text

SECONDS_PER_BEAT = 5  # interval at which the holder touches its lock
SECONDS_TO_WATCH = 20  # a lock of another host that is not touched for this long counts as stale

LOCK_FILE, STOP_FILE, ERRORS_DIR = ".lock", "stop", "errors"
REQUEUES_FILE = "requeues.json"  # a batch script's count
CLIENTS_FILE = "training_hub_callbacks.json"  # training_hub's own
OWN_FILES = {LOCK_FILE, EXIT_FILE, STOP_FILE, ERRORS_DIR, REQUEUES_FILE, CLIENTS_FILE}  # with only these: no run


class RunLock:
    """A file that one process holds with flock, which is released however the process ends. Where flock does not work
    (across hosts on some shared file systems), the file's modification time shows whether the holder, named in it, is
    alive: it touches the file every `SECONDS_PER_BEAT`."""

    def __init__(self, output_dir: Path):
        """Creates the directory if it is missing. RunError with `LOCKED` if another run is using it."""
        self.path = output_dir / LOCK_FILE
        self.made_directory = not output_dir.exists()
        output_dir.mkdir(parents=True, exist_ok=True)
        while True:
            self.file = open_descriptor(self.path, os.O_RDWR | os.O_CREAT, follows=False)
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
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        content = {"host": socket.gethostname(), "boot_id": read_boot_id(), "pid": os.getpid(), "started": started}
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, json.dumps(content).encode(), 0)
        os.fsync(self.file)

    def beat(self) -> None:
        os.utime(self.file)

    def is_in_place(self) -> bool:
        """Whether the path still refers to this lock, not to another run's in a new directory of the same name."""
        return is_same_file(self.file, self.path)

    def release(self) -> None:
        if self.is_in_place():
            self.path.unlink(missing_ok=True)
        file, self.file = self.file, -1  # a late `beat` then touches nothing
        os.close(file)


class RunFiles:
    """This rank's hold on the run's directory. The training thread takes it, the watch writes how the run ended. The
    directory is held open, since its path can come to refer to another one during the run."""

    def __init__(self) -> None:
        self.output_dir: Path | None = None  # None until this run owns it
        self.descriptor: int | None = None  # of the directory, if it is visible on this host
        self.lock: RunLock | None = None  # rank 0's

    def lock_directory(self, output_dir: Path) -> None:
        """Rank 0: locks the directory for this run; RunError if it is in use or cannot be written."""
        try:
            self.lock = RunLock(output_dir)
        except OSError as error:
            raise RunError(ExitCode.IO, f"--output-dir {output_dir}: cannot be written: {error}") from None

    def own(self, output_dir: Path) -> None:
        """Makes the checked directory this run's: from now on exit.json says how this run ended, not an earlier one."""
        if self.lock is not None:
            (output_dir / EXIT_FILE).unlink(missing_ok=True)
        self.output_dir = output_dir
        with contextlib.suppress(FileNotFoundError):
            # Open, so that its inode number is not reused.
            self.descriptor = os.open(output_dir, os.O_RDONLY | os.O_DIRECTORY)

    def find_loss(self) -> str | None:
        """Error message if the owned directory has been moved or removed; a new one at its path is not this run's."""
        if self.descriptor is None or is_same_file(self.descriptor, self.output_dir):
            return None
        found = ""
        with contextlib.suppress(OSError):
            found = os.readlink(f"/proc/self/fd/{self.descriptor}")
        fate, advice = "removed", "from another directory's checkpoint (--resume), or from the beginning"
        if found and not found.endswith(" (deleted)") and os.path.isdir(found):
            fate, advice = f"moved to {found}", "after moving it back, or with --output-dir set to its new path"
        return (
            f"--output-dir {self.output_dir} was {fate} while the run was writing to it; writing has stopped. Start"
            f" again {advice}"
        )

    def record(self, cause: Cause) -> bool:
        """Writes exit.json if this run owns its directory. False if another rank has already said why the run ended."""
        if self.output_dir is None or self.find_loss() is not None or self._is_untouched(cause):
            return True
        try:
            return write_exit_file(self.output_dir, cause.record)
        except OSError as error:
            say(f"error: {self.output_dir / EXIT_FILE} cannot be written: {error}", is_error=True)
            return True

    def clean_up(self, cause: Cause, *, was_stopped: bool) -> None:
        """Rank 0: removes the stop file that was obeyed, the lock, and an output directory without other files."""
        if self.lock is None:
            return
        output_dir, is_untouched = self.lock.path.parent, self._is_untouched(cause)
        with contextlib.suppress(OSError):
            if was_stopped and self.lock.is_in_place():
                (output_dir / STOP_FILE).unlink(missing_ok=True)
            self.lock.release()
            if is_untouched:
                output_dir.rmdir()

    def _is_untouched(self, cause: Cause) -> bool:
        """Whether the run failed before writing anything to a directory that it had created."""
        if cause.code not in (ExitCode.BAD_INPUT, ExitCode.IO) or self.lock is None:
            return False
        is_new = self.lock.made_directory and self.lock.is_in_place()
        return is_new and os.listdir(self.lock.path.parent) == [LOCK_FILE]


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
    """Whether the path still refers to this file or directory; True if the file system cannot say."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        return error.errno != errno.ESTALE  # ESTALE: removed by another host


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
        with open_regular(path, follows=False) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return -1


def read_holder(path: Path) -> dict[str, Any] | None:
    """The lock's contents, which name its holder; None if it is empty (never held), {} if it cannot be read."""
    try:
        text = read_bytes(path, follows=False)
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
        return read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    except OSError:
        return socket.gethostname()


def write_exit_file(output_dir: Path, content: dict[str, int | str]) -> bool:
    """Writes exit.json atomically unless it exists: the first to end a run says why. True if this call wrote it."""
    # Not `written_aside`: its rename replaces an existing file, and its temporary name is unique on one host only.
    path = output_dir / EXIT_FILE
    aside = output_dir / f".{EXIT_FILE}.{socket.gethostname()}.{os.getpid()}"
    try:
        with open_own(aside, "w") as file:
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
