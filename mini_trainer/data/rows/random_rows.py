"""Samples of random tokens instead of rows, to measure a model's training speed without data."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.columns.base import CAUSAL_LM, Columns, DataTask
from mini_trainer.data.columns.kinds import COLUMNS
from mini_trainer.data.rows.column_names import Fields
from mini_trainer.data.rows.files import CHUNK_BYTES, CHUNK_ROWS, Chunk, Source
from mini_trainer.data.rows.preparation import Preparation
from mini_trainer.options import RowOptions

DEFAULT_LENGTH = 2048
SEED = 42
BYTES_PER_TOKEN = 4
NAME = "random tokens"


def make_random_source(options: RowOptions) -> Source:
    """A source of `--mock-data` rows, which hold only their number."""
    length = options.block_size or DEFAULT_LENGTH
    num_bytes = BYTES_PER_TOKEN * length
    num_rows = min(CHUNK_ROWS, 1 + CHUNK_BYTES // num_bytes)

    def read(source: Source) -> Iterator[Chunk]:
        for first in range(1, options.mock_data + 1, num_rows):
            numbers = range(first, min(first + num_rows, options.mock_data + 1))
            lines = [(number, {"number": str(number)}) for number in numbers]
            yield Chunk(NAME, first, "text", lines, b"", num_bytes * len(lines))

    return Source(Path(NAME), NAME, num_bytes * options.mock_data, format="mock", read=read)


def prepare_random(tokenizer: Any, options: RowOptions) -> Preparation[int]:
    """Prepares samples drawn by their number from the vocabulary's ordinary tokens, of the kind that --format names."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    token_ids = np.array(sorted(set(tokenizer.get_vocab().values()) - special), np.int32)
    if not len(token_ids):
        raise ValueError("--mock-data: the tokenizer has only special tokens")
    length = options.block_size or DEFAULT_LENGTH
    kind = options.format or CAUSAL_LM  # also the name of --format preference and feedback data
    draw = partial(draw_samples, columns=COLUMNS[kind], token_ids=token_ids, length=length)
    return Preparation(DataTask(kind), read_numbers, draw)


def read_numbers(values: Fields, chunk: Chunk, tally: Counter[str]) -> list[int]:
    return [int(values["number"])]


def draw_samples(numbers: Sequence[int], *, columns: Columns, token_ids: np.ndarray, length: int) -> list[Any]:
    return [columns.make_random(np.random.default_rng([SEED, number]), token_ids, length) for number in numbers]
