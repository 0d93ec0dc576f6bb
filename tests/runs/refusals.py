"""What a command line that cannot be used ends with."""

import os

import pytest

from mini_trainer.distributed.ending import ExitCode
from mini_trainer.options import TrainOptions
from mini_trainer.options.command_line import parse_options


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
