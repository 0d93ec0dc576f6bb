"""Rows of short chats, and runs of process_data.py on them."""

import json
import sys
from pathlib import Path

import pyarrow as pa
from program import ROOT

from mini_trainer.data.rows.files import find_sources, iterate_rows, read_chunks
from mini_trainer.data.stores.json_lines import RawRow
from mini_trainer.options import group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data


def chat(i: int, *, words: int = 3) -> dict:
    turns = [("user", f"How many are {i}?" + " and" * words), ("assistant", f"{i}" + " 42" * (i % 7))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_rows(path: Path, rows: list) -> Path:
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path


def read_file(path: Path | str) -> list[RawRow]:
    """The rows of one file, as they are before anything is made of them."""
    (source,) = find_sources([str(path)])
    return [row for chunk in read_chunks(source) for row in iterate_rows(chunk)]


def read_arrow(path: str | Path) -> list[dict]:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all().to_pylist()


def options_for(model: Path, source: Path, output: Path, **options) -> ProcessDataOptions:
    paths = dict(input_file=(str(source),), output_file=str(output), model_name_or_path=str(model))
    return group_options(ProcessDataOptions, **paths, **{"num_proc": 1} | options)


def tokenize_rows(model: Path, source: Path | tuple[Path, ...], output: Path, **options) -> Path:
    """The output of process_data.py, which shows no samples."""
    given = dict(output_file=str(output), model_name_or_path=str(model), num_proc=1, preview=0)
    given["input_file"] = tuple(map(str, source if isinstance(source, tuple) else (source,)))
    process_data(group_options(ProcessDataOptions, **given | options))
    return output


def command_for(model: Path, source: Path, output: Path, *flags: str) -> list[str]:
    script = [sys.executable, str(ROOT / "process_data.py"), "--input-file", str(source), "--output-file", str(output)]
    return [*script, "--model-name-or-path", str(model), *flags]
