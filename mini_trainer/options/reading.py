"""Reads files that others wrote: only regular ones, and never without a limit."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NOT_REGULAR = "is not a regular file"


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read its bytes. OSError for a pipe, a device or a socket: reading it could block forever, or
    never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            raise
    raise OSError(f"{path}: {NOT_REGULAR}")


def check_regular(path: Path) -> None:
    """OSError for a pipe or a device in the place of a file that a library opens by its name."""
    if path.exists() and not path.is_file():
        raise OSError(NOT_REGULAR)
