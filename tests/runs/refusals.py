"""What a command line that cannot be used ends with, and the messages of errors."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mini_trainer.distributed.ending import ExitCode
from mini_trainer.options import TrainOptions
from mini_trainer.options.command_line import parse_options


def read_refusal(fail: Callable[[], object], *, kind: type[Exception] = ValueError, folder: Path | None = None) -> str:
    """The whole message of the error that `fail` raises, of exactly this kind, with DIR in place of the folder."""
    with pytest.raises(kind) as raised:
        fail()
    assert raised.type is kind
    message = str(raised.value)
    return message if folder is None else message.replace(str(folder), "DIR")


def refuse(argv: list[str], capfd: pytest.CaptureFixture, options_class: type = TrainOptions) -> str:
    """What is printed of a command line that cannot be used, in a process that ends by it."""
    child = os.fork()
    if child == 0:
        try:
            parse_options(options_class, argv)
        except SystemExit as end:
            os._exit(end.code)
        finally:
            os._exit(ExitCode.DONE)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == ExitCode.BAD_INPUT
    message = capfd.readouterr().err
    assert message.startswith("error: ") and "╭" not in message and "Traceback" not in message
    return message
