"""Runs a script, and writes what it had imported at its end, and how often the collector had scanned all objects.

loaded.py REPORT SCRIPT WORD...
"""

import atexit
import gc
import json
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn


def report() -> None:
    found = {"modules": sorted(sys.modules), "full_collections": gc.get_stats()[2]["collections"]}
    path.write_text(json.dumps(found | {"collects": gc.isenabled()}))


def report_and_exit(code: int) -> NoReturn:
    report()
    exit_now(code)


path, sys.argv = Path(sys.argv[1]), sys.argv[2:]
exit_now, os._exit = os._exit, report_and_exit  # train.py ends by it, without Python's own end
atexit.register(report)
runpy.run_path(sys.argv[0], run_name="__main__")
