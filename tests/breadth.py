"""Cases that repeat on other models or options what a cheaper one proves: `make test` leaves them out."""

import pytest


def wide(*values: object):
    """The values of such a case of `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.wide)
