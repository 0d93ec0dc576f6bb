"""Cases that are left out of `make test`: those that take long, and repeats that only `tox -e test-wide` runs."""

import pytest


def long(*values: object):
    """The values of a case of `pytest.mark.parametrize` that takes long."""
    return pytest.param(*values, marks=pytest.mark.long)


def wide(*values: object):
    """The values of a case that repeats on another model or with another option what a cheaper one proves."""
    return pytest.param(*values, marks=pytest.mark.wide)
