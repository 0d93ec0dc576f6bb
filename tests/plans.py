"""Plans, each in a process of its own."""

import contextlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from forked import start_server

from command_line import find_problems
from options import TrainOptions, group_options
from plan.planner import plan_run
from ranks.ending import ExitCode


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable]:
    """Calls a function in a process of its own, since a simulation wants no other process group beside its own."""
    with ProcessPoolExecutor(1, mp_context=start_server()) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=240)


def print_plan(values: dict) -> tuple[ExitCode, str]:
    options = group_options(TrainOptions, **values)
    assert find_problems(options) == []
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = plan_run(options)
    return code, text.getvalue()
