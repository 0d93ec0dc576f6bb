"""Small tokenized data sets of random tokens, as process_data.py would write them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mini_trainer.data.columns.token_columns import TextColumns

Tokens = tuple[list[int], list[int]]  # input_ids, labels


def make_samples(num_samples: int, *, vocab_size: int, max_len: int = 40, seed: int = 0) -> list[Tokens]:
    """Random samples whose numbers of trained tokens differ widely: from one token to nearly all."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        length = int(random.integers(3, max_len + 1))
        input_ids = random.integers(3, vocab_size, length)
        num_masked = int(random.integers(1, length))
        labels = np.where(np.arange(length) < num_masked, -100, input_ids)
        samples.append((input_ids.tolist(), labels.tolist()))
    return samples


def to_row(sample: Tokens) -> dict:
    input_ids, labels = sample
    num_targets = sum(label != -100 for label in labels[1:])
    return dict(input_ids=input_ids, labels=labels, len=len(input_ids), num_loss_counted_tokens=num_targets)


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(path: Path, rows: list[dict]) -> Path:
    """`rows` as .arrow, .parquet or .jsonl, by the ending of `path`; record batches of 7 rows."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    return write_table(path, pa.Table.from_pylist(rows, schema=TextColumns.schema), batch_rows=7)


def write_table(path: Path, table: pa.Table, *, batch_rows: int = 2) -> Path:
    """Writes a table unchanged, as .arrow or .parquet."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=batch_rows)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    return path


def write_samples(path: Path, samples: list[Tokens]) -> Path:
    return write_rows(path, [to_row(sample) for sample in samples])


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_chats(path: Path) -> list[tuple[str, ...]]:
    """The contents of each chat's messages."""
    return [tuple(message["content"] for message in row["messages"]) for row in read_lines(path)]


def read_files(directory: Path) -> dict[str, bytes]:
    """All files below a directory, by their paths in it."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def flip_bit(path: Path, place: float = 0.7) -> Path:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)
    return path


def write_counting_chats(path: Path) -> None:
    """Twelve chats as a user has them: to count to a number, and the answer."""
    chats = [
        [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "1 " * n}]
        for n in range(1, 13)
    ]
    write_jsonl(path, ({"messages": chat} for chat in chats))
