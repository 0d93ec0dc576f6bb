"""A terminal for tests: a process on a pty, and what its screen shows in the end."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

COLUMNS = 250


def open_terminal() -> tuple[int, int]:
    """Both ends of a pty, ours and the program's."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    return ours, theirs


def run_on_terminal(command: list[str], *, env: dict[str, str], cwd: str) -> tuple[int, str]:
    """Runs `command` with stderr and stdout on a terminal; its exit code and all that it wrote."""
    ours, theirs = open_terminal()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env, cwd=cwd)
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return process.wait(), written.decode()


def read_screen(written: str) -> list[str]:
    """The lines that a terminal without an end shows: carriage returns, line feeds, cursor up, erasing to the end."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b["):
            if token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
            elif token.endswith("K"):
                lines[row] = lines[row][:column]
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]
