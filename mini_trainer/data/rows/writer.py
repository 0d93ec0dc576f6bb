"""Writes tokenized samples as .arrow, .parquet or .jsonl."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mini_trainer.data.chat.conversation import TokenizedChat, TrainedSpan
from mini_trainer.data.columns.base import COLUMNS, DataTask
from mini_trainer.data.rows.labelled_tokens import TokenizedText
from mini_trainer.options.reading import open_own

EncodedSamples = pa.RecordBatch | bytes  # in the output's format; bytes for JSON lines


@dataclass(frozen=True)
class TokenizedSample:
    """A tokenized row or block of documents."""

    place: str  # its origin as shown in messages: file:line
    tokens: TokenizedChat | TokenizedText


def encode_samples(samples: Sequence[TokenizedSample], ending: str, task: DataTask) -> EncodedSamples:
    """The samples with the columns of their task; in JSON lines, optional ones only if a sample has them."""
    columns, tokens = COLUMNS[task.objective], [sample.tokens for sample in samples]
    if ending == ".jsonl":
        return "".join(json.dumps(columns.make_row(one)) + "\n" for one in tokens).encode()
    return columns.encode(tokens)


@contextmanager
def open_output(path: Path, ending: str, task: DataTask) -> Iterator[Callable[[EncodedSamples], Any]]:
    """A function that appends samples to a new file, which is finished when the context ends."""
    if ending == ".jsonl":
        with open_own(path, "wb") as file:
            yield file.write
    elif ending == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, COLUMNS[task.objective].schema) as writer:
            yield writer.write_batch
    else:
        with pq.ParquetWriter(path, COLUMNS[task.objective].schema) as writer:
            yield writer.write_batch


class BlockCutter:
    """Cuts the stream of documents into blocks. Invariant: `rest`, not cut yet, is no longer than a block.

    A block has `block_size` tokens, or one fewer if the next one would begin with an end-of-text token: a sequence's
    first token is never a target, but every document's end must be one. The stream ends with such a token, so the
    remainder, which is kept, has at least two tokens.
    """

    def __init__(self, block_size: int, eos_token_id: int | None, *, name: str = "block {:,}") -> None:
        self.block_size, self.eos_token_id, self.name = block_size, eos_token_id, name
        self.rest = np.empty(0, np.int32)
        self.num_blocks = 0

    def cut(self, ids: np.ndarray, *, is_last: bool = False) -> list[TokenizedSample]:
        """The blocks completed by `ids`; with `is_last` also the remainder."""
        stream, start, blocks = np.concatenate([self.rest, ids]), 0, []
        while len(stream) - start > self.block_size:  # one more token shows whether it may begin a block
            end = start + self.block_size
            end -= stream[end] == self.eos_token_id
            blocks.append(stream[start:end])
            start = end
        self.rest = stream[start:]
        if is_last and len(self.rest):
            blocks.append(self.rest)
            self.rest = stream[:0]
        return [self.make_sample(block.tolist()) for block in blocks]

    def make_sample(self, ids: list[int]) -> TokenizedSample:
        self.num_blocks += 1
        tokens = TokenizedChat(ids, [TrainedSpan(0, len(ids), "document")])
        return TokenizedSample(self.name.format(self.num_blocks), tokens)
