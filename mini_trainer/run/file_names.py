"""Names in a run's directory, and kinds of exports; imports nothing of ours, so that readers do not need torch."""

import re
from pathlib import Path

METRICS_FILE = "training_metrics_0.jsonl"
VALIDATION_FILE = "validation_metrics_0.jsonl"
SAMPLES_FILE = "samples_0.jsonl"  # answers to --sample-prompts
PARAMS_FILE = "training_params.json"
EXPORTS_DIR = "hf_format"
NOTES_FILE = "notes.txt"  # what somebody writes about a run, for the board
LATEST = "latest"  # beside exports: a link to the newest one that is not the best or an average
REGULAR, BEST, AVERAGE = "regular", "best", "average"  # kinds of exports
STATE = "state.json"  # in a checkpoint
STEP_NAME = r"step_\d+"  # of a checkpoint


def find_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, newest first."""
    paths = directory.iterdir() if directory.is_dir() else []
    return sorted((path for path in paths if re.fullmatch(STEP_NAME, path.name)), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))
