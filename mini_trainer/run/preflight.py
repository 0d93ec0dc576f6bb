"""Start-up checks of --output-dir: whether its file system supports a run, which mounted buckets often do not."""

import errno
from collections.abc import Callable
from pathlib import Path

from mini_trainer.data.stores.disk import remove_quietly
from mini_trainer.options.reading import open_own, read_bytes, read_text

MADE = ".disk_check.part"  # in the output directory; a later start ignores one left by a killed run
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MOUNTS = Path("/proc/self/mounts")
ADVICE = (
    "Write to a file system that supports this: a local disk with --upload-to for the exports, or a network file"
    " system; a bucket needs a mount with a cache of files on a disk"
)


def check_disk(output_dir: Path) -> None:
    """ValueError if the directory is on a file system that cannot hold a run; OSError if that is full."""
    directory = output_dir / MADE
    remove_quietly(directory)
    try:
        directory.mkdir()
        failure = find_failure(directory)
    except OSError as error:
        raise OSError(f"--output-dir {output_dir}: cannot be written: {error}") from None
    finally:
        remove_quietly(directory)
    if failure is not None:
        raise ValueError(f"--output-dir {output_dir}: {failure}. {ADVICE}")


def find_failure(directory: Path) -> str | None:
    """The first operation that fails in the empty `directory`, with its error and the file system; leaves files.
    OSError if there is no space left."""
    operations: dict[str, Callable[[Path], None]] = {
        "append to a file that others read, as metrics are written": append,
        "replace a file by renaming another one, as settings are written": replace_file,
        "rename a directory, as checkpoints and exports are written": rename_directory,
    }
    for name, operation in operations.items():
        try:
            operation(directory)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
            return f"cannot {name} ({describe_mount(directory)}): {error}"
    return None


def append(directory: Path) -> None:
    path = directory / "appended"
    for number in (1, 2):
        with open_own(path, "a") as file:
            file.write(f"{number}\n")
            file.flush()
            if not read_text(path).endswith(f"{number}\n"):
                raise OSError("appended bytes cannot be read")


def replace_file(directory: Path) -> None:
    path, aside = directory / "replaced", directory / "aside"
    for number in (1, 2):
        aside.write_text(str(number), encoding="utf-8")
        aside.replace(path)
    if read_text(path) != "2":
        raise OSError("the earlier one is still there")


def rename_directory(directory: Path) -> None:
    aside, target = directory / "writing", directory / "step"
    aside.mkdir()
    (aside / "file").write_text("1", encoding="utf-8")
    aside.rename(target)
    if read_text(target / "file") != "1":
        raise OSError("a file in it reads differently then")


def describe_mount(directory: Path) -> str:
    """Type and mount point of the directory's file system; known only on Linux."""
    place, kind = Path(directory.anchor), "its file system"
    path = directory.resolve()
    if MOUNTS.exists():
        for line in read_bytes(MOUNTS).decode(errors="replace").splitlines():
            _, mounted, found, *_ = line.split(" ")
            if path.is_relative_to(mounted) and len(mounted) >= len(str(place)):
                place, kind = Path(mounted), found
    return f"{kind} at {place}"
