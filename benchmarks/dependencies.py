"""Fills in the table of docs/developers/dependencies.md: each package's newest release, size and licence, from PyPI.

    python benchmarks/dependencies.py

What a package is for, and what else was thought of, is written by hand: a row whose first cell is a package's name has
its last four cells replaced.
"""

import concurrent.futures
import json
import re
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "developers" / "dependencies.md"
ROW = re.compile(r"^\| `([A-Za-z0-9._-]+)` \| ([^|]*) \| .*$", re.MULTILINE)
DATE = re.compile(r"(?<=PyPI's as of )\d{4}-\d{2}-\d{2}")
MOST_LETTERS = 30  # of a licence


def read_release(name: str) -> tuple[str, str, str, str]:
    """Version, day, MB of the file that Linux on x86-64 with Python 3.11 would get, and licence."""
    with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as response:
        answer = json.load(response)
    files = [file for file in answer["urls"] if fits(file["filename"])] or answer["urls"]
    file = min(files, key=lambda file: (file["packagetype"] != "bdist_wheel", file["size"]))
    size = f"{file['size'] / 1e6:.1f}" + ("" if file["packagetype"] == "bdist_wheel" else " (source)")
    return answer["info"]["version"], file["upload_time"][:10], size, find_licence(answer["info"])


def fits(file_name: str) -> bool:
    own = re.search(r"-(cp311|py3|py2\.py3|cp3\d+-abi3)", file_name) is not None
    return own and ("none-any" in file_name or ("linux" in file_name and "x86_64" in file_name))


def find_licence(info: dict[str, Any]) -> str:
    """The licence that the release states, by its SPDX name if it has one; only the first of several."""
    classifiers = [each.rpartition(" :: ")[2] for each in info["classifiers"] if each.startswith("License ::")]
    stated = info.get("license_expression") or next(iter(classifiers), None) or (info.get("license") or "").strip()
    if not stated:
        return "not stated"
    first = re.split(r"\n|   ", stated)[0].removesuffix(" License")
    return first if len(first) <= MOST_LETTERS else first.partition(" AND ")[0] + " and others"


def main() -> None:
    text = PAGE.read_text()
    names = [match[1] for match in ROW.finditer(text)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        releases = dict(zip(names, pool.map(read_release, names), strict=True))
    text = ROW.sub(lambda match: f"| `{match[1]}` | {match[2]} | {' | '.join(releases[match[1]])} |", text)
    PAGE.write_text(DATE.sub(datetime.now(UTC).date().isoformat(), text))


if __name__ == "__main__":
    main()
