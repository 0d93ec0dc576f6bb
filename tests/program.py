"""The modules of the program, as git knows them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTSIDE = {"tests", "benchmarks", "quickstart", "docs", "clusters"}


def list_sources() -> dict[str, str]:
    """The source of every module of the program by its path."""
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in done.stdout.splitlines()]
    return {
        str(path): (ROOT / path).read_text()
        for path in paths
        if path.parts[0] not in OUTSIDE and (ROOT / path).exists()
    }
