"""Packages of the extra test-all, which hardly any test needs: with `make test` those tests are skipped."""

import importlib
import os
from types import ModuleType

import pytest

MODULES = ("heavy", "range_server", "s3_server")  # whose names only modules import that have such tests


def need(name: str) -> ModuleType:
    """Imports a package, or skips the test or module that calls; where everything has to run, its absence fails."""
    if os.environ.get("MINI_TRAINER_TEST_ALL"):
        return importlib.import_module(name)
    return pytest.importorskip(
        name, reason=f"needs {name.partition('.')[0]}, of the extra test-all: make test-all", exc_type=ImportError
    )
