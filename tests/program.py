"""The modules of the program, as git knows them, and the packages that it declares."""

import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTSIDE = {"tests", "benchmarks", "docs", "examples"}


def list_sources() -> dict[str, str]:
    """The source of every module of the program by its path."""
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in done.stdout.splitlines()]
    return {
        str(path): (ROOT / path).read_text()
        for path in paths
        if path.parts[0] not in OUTSIDE and (ROOT / path).exists()
    }


def list_dependencies() -> set[str]:
    """The packages that pyproject.toml names, in extras or not, beside its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    return name_packages(itertools.chain(*wanted)) - {project["name"]}


def name_packages(requirements: Iterable[str]) -> set[str]:
    """The packages without versions and extras."""
    return {re.match(r"[\w.-]+", each)[0] for each in requirements}
