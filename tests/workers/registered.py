"""Runs a script with an objective of a test among those to choose from: registered.py MODULE SCRIPT WORD..."""

import importlib
import runpy
import sys

import pytest

importlib.import_module(sys.argv[1]).register(pytest.MonkeyPatch())
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
