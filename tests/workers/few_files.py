"""Runs a script under limits of open files, soft and hard: few_files.py SOFT HARD SCRIPT ARGUMENT..."""

import resource
import runpy
import sys

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
del sys.argv[:3]
runpy.run_path(sys.argv[0], run_name="__main__")
