"""Answers to --sample-prompts (samples_0.jsonl) for the page of curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.json_lines import parse_sample
from mini_trainer.options.reading import open_regular
from mini_trainer.run.file_names import SAMPLES_FILE
from mini_trainer.use.pages.page import fold

MOST_BYTES = 8 << 20  # of a file; the later lines are left out
MOST_PROMPTS = 16  # on the page
MOST_ANSWERS = 12  # to a prompt, of all runs together
MOST_CHARS = 2000  # of a text

Sample = dict[str, Any]  # a line


class SamplesReader:
    """The lines of a run's samples_0.jsonl, which are read again when the file has changed."""

    def __init__(self, path: Path):
        self.path = path / SAMPLES_FILE
        self.rows: list[Sample] = []
        self.identity: tuple[int, int, int] | None = None  # time (ns), size and inode of the file

    def read(self) -> None:
        """OSError if it is no file."""
        found = self.path.stat() if self.path.exists() else None
        identity = None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
        if identity != self.identity:
            self.rows, self.identity = [] if identity is None else read_samples(self.path), identity


def read_samples(path: Path) -> list[Sample]:
    with open_regular(path) as file:
        rows = map(parse_sample, file.read(MOST_BYTES).splitlines(keepends=True))
        return [row for row in rows if row is not None]


def describe_samples(runs: Sequence[list[Sample]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The prompts with the runs' answers, in the order of their steps, as JSON; and notes on what is left out."""
    found: dict[str, list[list[Sample]]] = {}  # by prompt, for each run
    for i, rows in enumerate(runs):
        for row in rows:
            found.setdefault(row["prompt"], [[] for _ in runs])[i].append(row)
    most, notes = max(2, MOST_ANSWERS // max(1, len(runs))), []
    if len(found) > MOST_PROMPTS:
        notes.append(f"Of {len(found):,} sample prompts, {MOST_PROMPTS} are shown.")
    largest = max((len(rows) for of_runs in found.values() for rows in of_runs), default=0)
    if largest > most:
        notes.append(f"Of the answers to each sample prompt, up to {largest:,} in a run, {most} of each run are shown.")
    prompts = [
        {
            "prompt": fold(prompt, MOST_CHARS),
            "answers": [describe_answer(row, i) for i, rows in enumerate(of_runs) for row in choose_rows(rows, most)],
        }
        for prompt, of_runs in list(found.items())[:MOST_PROMPTS]
    ]
    return prompts, notes


def choose_rows(rows: list[Sample], most: int) -> list[Sample]:
    """The first and the last, and evenly spaced ones between."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def describe_answer(row: Sample, run: int) -> dict[str, Any]:
    is_cut = row["finish_reason"] == "length"
    return {"run": run, "step": row["step"], "text": fold(row["answer"], MOST_CHARS), "is_cut": is_cut}
