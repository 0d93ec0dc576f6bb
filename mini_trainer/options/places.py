"""Where caches are: decided once, when a program starts, for this project's own and for those of libraries.

A cache that cannot be written in its usual place, as for a user without a home or on a read-only disk, is in a
temporary directory of this user; if that is somebody else's, nothing is kept. The environment hands the choice on.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

OWN, USUAL = "MINI_TRAINER_CACHE", "~/.cache/mini_trainer"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# By the environment variable that moves a cache: where it is without.
PLACES = {
    OWN: USUAL,
    COMPILED: f"{USUAL}/compiled",  # torch's own choice is in /tmp, which containers lose
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "NUMBA_CACHE_DIR": str(Path(__file__).parents[1] / "data" / "packers" / "__pycache__"),
    "HF_HOME": "~/.cache/huggingface",
    "HF_DATASETS_CACHE": "~/.cache/huggingface/datasets",
    "HF_MODULES_CACHE": "~/.cache/huggingface/modules",
}


def choose_places() -> str | None:
    """Sets the variables of caches that cannot be in their place; returns a line that names them, if any was set by the
    user, or their root has moved. ValueError without a place for temporary files, which libraries need."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ValueError(f"{error.strerror}: set TMPDIR to a directory that can be written") from None
    moved, root = [], find_root()
    has_moved = root != find_home(os.environ.get(OWN, USUAL))
    for variable, usual in PLACES.items():
        given = os.environ.get(variable)
        place = find_home(usual if given is None else given)
        # Models in a home of the hub can be read without writing there.
        is_usable = place is not None and (can_write(place) or (variable == "HF_HOME" and place.is_dir()))
        if is_usable and variable == COMPILED:
            os.environ[variable] = str(place)
        if is_usable:
            continue
        if root is not None:
            os.environ[variable] = str(root / variable.lower()) if variable != OWN else str(root)
        if given is not None or has_moved:
            moved.append(variable)
    if find_home("~") is None and root is not None:
        os.environ["HOME"] = str(root)  # libraries would make a directory named ~
    if not moved:
        return None
    place = f"kept nowhere, for this user has no own place in {tempfile.gettempdir()}" if root is None else f"in {root}"
    return f"caches that cannot be written in their places are {place}: {', '.join(moved)}"


def find_root() -> Path | None:
    """The directory of this project's caches: the usual one, or else this user's own among the temporary ones; None if
    neither can be written, or somebody else has that one."""
    usual = find_home(os.environ.get(OWN, USUAL))
    if usual is not None and can_write(usual):
        return usual
    path = Path(tempfile.gettempdir(), f"mini_trainer-{os.getuid()}")
    with contextlib.suppress(OSError):  # a full disk
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return path
    return None


def expand(path: str) -> Path:
    """The directory that an option names. ValueError if it is in a home that this user has not."""
    if Path(path).is_relative_to(USUAL) and (root := find_root()) is not None:
        return root / Path(path).relative_to(USUAL)
    if (found := find_home(path)) is None:
        raise ValueError(f"{path}: this user has neither a home nor a temporary directory: give another path")
    return found


def find_home(path: str) -> Path | None:
    """The path with the home directory in place of ~; None without one."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return None


def can_write(directory: Path) -> bool:
    """Whether files can be written in a directory, or it can be made."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
