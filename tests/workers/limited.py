"""Runs a script that can write no file larger than a limit: limited.py BYTES SCRIPT ARGUMENT..."""

import resource
import runpy
import sys

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
