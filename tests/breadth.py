"""Cases that are left out of `make test`: those that take long, and repeats that only `tox -e test-wide` runs."""

from collections.abc import Iterable

import pytest


def long(*values: object):
    """The values of a case of `pytest.mark.parametrize` that takes long."""
    return pytest.param(*values, marks=pytest.mark.long)


def thin(cases: Iterable[object], *, step: int) -> list[object]:
    """Every `step`-th case of one value as it is; the others take long together."""
    return [case if i % step == 0 else long(case) for i, case in enumerate(cases)]


def wide(*values: object):
    """The values of a case that repeats on another model or with another option what a cheaper one proves."""
    return pytest.param(*values, marks=pytest.mark.wide)
