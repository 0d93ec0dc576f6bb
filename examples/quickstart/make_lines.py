"""Writes a classification task that every machine has the text for: lines of Python's own library, some disordered.

    python examples/quickstart/make_lines.py --output-dir runs/lines

Each row of `train.csv` and `validation.csv` is a line of code, its tokens set apart by spaces, and what was done to
it: `original`, `swapped` (two neighbours have changed places) or `shuffled`. The words alone say nothing about that,
only their order does. No line is there twice, and validation lines are from other files.
"""

import csv
import hashlib
import io
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3"}  # folders
NO_TEXT = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER}
LEAST_TOKENS, MOST_TOKENS = 5, 32  # of a line
LONGEST_TOKEN = 40  # characters
VALIDATION_SHARE = 10  # one file in so many
CHANGES = ("original", "swapped", "shuffled")


@dataclass(frozen=True, kw_only=True)
class LinesOptions:
    """Write lines of Python's library, some of them disordered, as train.csv and validation.csv."""

    output_dir: str
    """Where they are written."""
    seed: int = 0
    """Seed of the order of lines and of what is done to each."""


def read_lines(path: Path) -> Iterator[list[str]]:
    """The tokens of each logical line of a Python file, but comments; none of a file that is no Python of today."""
    line: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NEWLINE:
                yield line
                line = []
            elif token.type not in NO_TEXT:
                line.append(token.string)
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
        return


def collect_lines(root: Path) -> dict[str, list[list[str]]]:
    """Different lines of all files below `root`, by the side that their file falls on."""
    sides: dict[str, list[list[str]]] = {"train": [], "validation": []}
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT & set(name.parts):
            continue
        number = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16)
        side = "train" if number % VALIDATION_SHARE else "validation"
        for line in read_lines(path):
            text = " ".join(line)
            is_short = all(len(token) <= LONGEST_TOKEN and token.isprintable() for token in line)
            if LEAST_TOKENS <= len(line) <= MOST_TOKENS and is_short and text not in seen:
                seen.add(text)
                sides[side].append(line)
    return sides


def disorder(line: list[str], change: str, rng: random.Random) -> list[str]:
    """A copy of the line after the change."""
    line = list(line)
    if change == "swapped":
        i = rng.choice([i for i in range(len(line) - 1) if line[i] != line[i + 1]])
        line[i], line[i + 1] = line[i + 1], line[i]
    elif change == "shuffled":
        rng.shuffle(line)
    return line


def write_lines(options: LinesOptions) -> None:
    rng = random.Random(options.seed)
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    for side, lines in collect_lines(Path(sysconfig.get_path("stdlib"))).items():
        rng.shuffle(lines)
        path = Path(options.output_dir, f"{side}.csv")
        with open(path, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for line in lines:
                change = rng.choice(CHANGES)
                rows.writerow([" ".join(disorder(line, change, rng)), change])
        print(f"wrote {len(lines):,} lines to {path}")


if __name__ == "__main__":
    write_lines(tyro.cli(LinesOptions))
