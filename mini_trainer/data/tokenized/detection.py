"""Whether a file is a tokenized data set, and what becomes one."""

import json
from collections.abc import Collection
from pathlib import Path

from mini_trainer.options import SELF
from mini_trainer.options.reading import open_regular
from mini_trainer.options.urls import is_url

ENDING = ".meta.json"  # of the file next to a data set that records its sources
TOKENS_COLUMN = "input_ids"
DRAWN_FILE = "samples.jsonl"  # of samples that a model has drawn (--keep self)


def is_tokenized(path: str) -> bool:
    """Whether a path names a data set: by its sidecar, an ending that files of chats do not have, or its columns."""
    if path.endswith(".arrow") or (not is_url(path) and Path(f"{path}{ENDING}").exists()):
        return True
    return not is_url(path) and Path(path).is_file() and TOKENS_COLUMN in list_columns(Path(path))


def may_become(given: str, data: str) -> bool:
    """Whether this data set can be the one that a value of --keep was made into: by its name, which rows hand on."""
    if given != SELF and is_tokenized(given):
        return given == data
    return Path(data).name.split(".")[0] == Path(DRAWN_FILE if given == SELF else given).name.split(".")[0]


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
