"""Runs a script whose nodes wait only so long for each other's files: impatient.py SECONDS SCRIPT ARGUMENT..."""

import runpy
import sys

from mini_trainer.run import preflight

preflight.SECONDS_TO_APPEAR = float(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
