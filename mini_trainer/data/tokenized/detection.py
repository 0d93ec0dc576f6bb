"""Whether a file is a tokenized data set."""

import json
from collections.abc import Collection
from pathlib import Path

from mini_trainer.options.reading import open_regular
from mini_trainer.options.urls import is_url

ENDING = ".meta.json"  # of the file next to a data set that records its sources
TOKENS_COLUMN = "input_ids"


def is_tokenized(path: str) -> bool:
    """Whether a path names a data set: by its sidecar, an ending that files of chats do not have, or its columns."""
    if path.endswith(".arrow") or (not is_url(path) and Path(f"{path}{ENDING}").exists()):
        return True
    return not is_url(path) and Path(path).is_file() and TOKENS_COLUMN in list_columns(Path(path))


def list_columns(path: Path) -> Collection[str]:
    """Names of the columns of a Parquet file, or of the first row of JSON lines; none for other files."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            with open_regular(path) as file:
                return pyarrow.parquet.read_schema(file).names
        with open_regular(path) as file:
            row = json.loads(next((line for line in file if line.strip()), b"{}"))
    except (OSError, ValueError):
        return ()
    return row if isinstance(row, dict) else ()
