"""Atomic files: written aside and renamed when complete, hashed, renamed before they are removed."""

import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mini_trainer.options.reading import open_descriptor, open_regular

ASIDE = (".writing_", ".removing_")  # prefixes of the directories that a killed run may leave
SPARE_SHARE = 20  # a twentieth more than what is written has to be free: for logs, and what others write meanwhile
# A full disk, a full quota, the largest size of a file, and a failing disk.
FAILED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def written_aside(*targets: Path) -> Iterator[list[Path]]:
    """Hidden paths next to `targets` to write to. They replace the targets, in order, if the block succeeds; a target
    that was not written is removed, because it would belong to an older run. On failure nothing is left.

    Parts of the same targets from killed processes are removed first. The hidden names hold this machine's name, for
    processes of several machines may write the same targets on a shared file system.
    """
    for target in targets:
        remove_parts(target)
    asides = [target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}.part") for target in targets]
    try:
        with naming_failed_writes(*targets, parts=asides):
            yield asides
        for aside, target in zip(asides, targets, strict=True):
            if aside.is_dir() or not aside.exists():
                remove(target)  # a directory cannot be replaced in one step
            if aside.exists():
                aside.replace(target)
    finally:
        for aside in asides:
            remove(aside)


def write_text(path: Path, text: str) -> None:
    """Replaces a file by a text, in UTF-8, in one step."""
    with written_aside(path) as (aside,):
        aside.write_text(text, encoding="utf-8")


def is_part(path: Path) -> bool:
    """Whether a file is one that `written_aside` writes to, of any target."""
    return path.name.startswith(".") and path.name.endswith(".part")


@contextmanager
def naming_failed_writes(*targets: Path, parts: Sequence[Path], needed_bytes: int | None = None) -> Iterator[None]:
    """Adds to the error of a full or failing disk which file could not be written, the one with the largest of
    `parts`, and how much room it needs. OSError, as before."""
    try:
        yield
    except OSError as error:
        if error.errno not in FAILED_WRITES:
            raise
        sizes = list(map(count_bytes, parts))
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        needed = f"more than {sizes[largest]:,}" if needed_bytes is None else f"{needed_bytes:,}"
        reason = OSError(os.strerror(error.errno))
        raise OSError(describe_failed_write(str(targets[largest]), reason, parts[largest], needed)) from None


def count_bytes(path: Path) -> int:
    """Size of a file, or of all files in a directory; 0 if there is none."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def remove_parts(target: Path) -> None:
    """Removes parts of `target` that `written_aside` left in processes of this machine that have ended."""
    begin = f".{target.name}.{socket.gethostname()}."
    for part in target.parent.glob(f"{glob.escape(begin)}*.part"):
        pid = part.name.removeprefix(begin).removesuffix(".part")
        if pid.isascii() and pid.isdecimal() and not is_running(int(pid)):
            with suppress(OSError):
                remove(part)


def is_running(pid: int) -> bool:
    try:
        with suppress(PermissionError, OverflowError):
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_output(path: Path, *, flag: str = "--output") -> None:
    """ValueError if `path` cannot become a file: it is a directory, or its directory cannot be made."""
    if path.is_dir():
        raise ValueError(f"{flag} {path}: is a directory")
    check_place(path.parent, named=f"{flag} {path}")


def check_output_dir(path: Path, *, flag: str = "--output-dir") -> None:
    """ValueError if `path` is not a writable directory, and cannot become one."""
    check_place(path, named=f"{flag} {path}")


def check_place(directory: Path, *, named: str) -> None:
    """ValueError if a directory is not writable, or cannot be made. `named`: the output in it."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{named}: {existing} is a file, not a directory")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{named}: no permission to write in {existing}")


def make_parent(path: Path) -> None:
    """Makes the directory of a file that is about to be written."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)


def identify_file(path: Path) -> tuple[int, int] | None:
    """An identity that changes if another file replaces this one; None if it does not exist."""
    if not path.exists():
        return None
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def remove(path: Path) -> None:
    """Removes a file or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, *, flags: int = os.O_RDWR | os.O_CREAT, waits: bool = True) -> Iterator[bool]:
    """Lets one process at a time into the block; yields False where the file system has no locks. `flags`: to open the
    file with. BlockingIOError if another process is in it, unless this one waits."""
    import fcntl

    file, has_lock = open_descriptor(path, flags, follows=not flags & os.O_CREAT), False
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_lock = True
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield has_lock
    finally:
        os.close(file)


def make_aside(target: Path, needed_bytes: int, *, what: str, begun: set[Path] | None = None) -> Path:
    """Creates an empty hidden directory next to `target`, for writing the new `what`; OSError if the disk is too full.

    Makes the directory of `target`, and none above it. With `begun`, the caller's set of such directories, makes each
    only once: one that is missing later was moved or removed.
    """
    aside = target.parent / f"{ASIDE[0]}{target.name}"
    remove_quietly(aside)
    try:
        if begun is None or target.parent not in begun:
            target.parent.mkdir(exist_ok=True)
        if begun is not None:
            begun.add(target.parent)
        aside.mkdir()
        check_room(aside, needed_bytes, f"{what} {target}")
    except OSError as error:
        remove_quietly(aside)
        raise OSError(f"cannot write {what} {target}: {error}" if error.errno else str(error)) from None
    return aside


def count_free(directory: Path) -> int:
    """Bytes that are free on the disk of a directory, or of what exists above it."""
    return shutil.disk_usage(find_existing(directory)).free


def find_existing(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(path for path in (directory, *directory.absolute().parents) if path.is_dir())


def check_room(directory: Path, needed_bytes: int, what: str) -> None:
    """OSError, without a number, if the disk of `directory` has no room for `what`."""
    needed = needed_bytes + needed_bytes // SPARE_SHARE
    if (free := count_free(directory)) < needed:
        raise OSError(
            f"no room for {what}: it needs {needed:,} bytes (a twentieth of them to spare), the disk"
            f" has {free:,} free: free some, or write to another disk"
        )


def commit(aside: Path, target: Path) -> None:
    """Renames the complete directory `aside` to `target`: it exists only from then on."""
    sync_dir(aside)
    os.rename(aside, target)
    sync_dir(target.parent)


def put_in_place(aside: Path, target: Path) -> None:
    """`commit` that replaces an existing directory `target`, on Linux in one step."""
    if not target.exists():
        return commit(aside, target)
    sync_dir(aside)
    if exchange(aside, target):
        sync_dir(target.parent)
        return remove_directory(aside)
    remove_directory(target)
    commit(aside, target)


def exchange(first: Path, second: Path) -> bool:
    """Exchanges the names of two directories in one step; False if the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here, rename_exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fs.h
    return renameat2(here, os.fsencode(first), here, os.fsencode(second), rename_exchange) == 0


def sync_dir(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that keep directories in order themselves
            raise
    finally:
        os.close(descriptor)


def link_beside(directory: Path, name: str) -> None:
    """Makes `name`, beside a directory, a relative link to it, or changes where it leads in one step. OSError if the
    file system has no links, or if something else has this name."""
    link, aside = directory.with_name(name), directory.with_name(f"{ASIDE[0]}{name}")
    if link.is_symlink() and os.readlink(link) == directory.name:
        return
    if link.exists() and not link.is_symlink():
        raise FileExistsError("something else has this name")
    remove_quietly(aside)
    aside.symlink_to(directory.name, target_is_directory=True)
    aside.replace(link)


def is_link_beside(path: Path) -> bool:
    """Whether it is a link to a neighbour, so that its content exists twice."""
    return path.is_symlink() and len(Path(os.readlink(path)).parts) == 1


def remove_directory(directory: Path) -> None:
    """Removes a checkpoint or an export, renamed first, so that a partial one is never taken for complete."""
    aside = directory.parent / f"{ASIDE[1]}{directory.name}"
    remove_quietly(aside)
    os.rename(directory, aside)
    remove_quietly(aside)


def remove_quietly(path: Path) -> None:
    """Removes a directory as far as possible; of a link only the link, as the directory may be someone else's."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Removes leftovers in `directory` of runs killed while they wrote or removed something."""
    for path in list(directory.iterdir()) if directory.is_dir() else []:
        if path.name.startswith(ASIDE):
            remove_quietly(path)


def hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_failed_write(what: str, error: Exception, aside: Path, needed_bytes: int | str) -> str:
    """The message for a failed write, before the part in `aside` is removed. `needed_bytes`: or in words."""
    needed = needed_bytes if isinstance(needed_bytes, str) else f"{needed_bytes:,}"
    free = ""
    # Of errors that have no number, such as those of libraries, space may be the reason.
    if not isinstance(error, OSError) or error.errno in (None, *FAILED_WRITES):
        with suppress(OSError):  # the directory itself is gone
            free = f"; it needs {needed} bytes, the disk has {shutil.disk_usage(aside.parent).free:,} free"
    return f"cannot write {what}: {error}{free}"


def sync_file(file: Path) -> None:
    """Flushes a file to the disk and gives it the permissions of any new file (safetensors writes 0600)."""
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)
    with open_regular(file) as stream:
        os.fsync(stream.fileno())
