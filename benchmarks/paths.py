"""Where benchmarks find this checkout's package, the quickstart's data and the tests' models: imported before these."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "runs"))

from processes import PATHS

sys.path[:0] = map(str, PATHS)
