"""Where benchmarks find this checkout's package, the quickstart's data and the tests' models: imported before these."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
FOLDERS = [TESTS, *(TESTS / name for name in ("models", "rows", "runs", "servers")), ROOT / "examples" / "quickstart"]
sys.path[:0] = map(str, [ROOT, *FOLDERS])
