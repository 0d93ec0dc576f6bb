"""The shape of a format of rows: a row's values become examples, and examples become tokens."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mini_trainer.data.chat.conversation import TokenizedChat
from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.rows.column_names import Fields, RefusedColumn
from mini_trainer.data.rows.files import Chunk, iterate_rows
from mini_trainer.data.rows.labelled_tokens import TokenizedText
from mini_trainer.data.rows.lines import parse_row
from mini_trainer.data.stores.json_lines import Row

ExampleT = TypeVar("ExampleT")
# A row's examples, most often one. Counts unread columns; raises ValueError for an unusable row, and RefusedColumn for
# an unread column that changes what is learned.
ReadValues = Callable[[Fields, Chunk, Counter[str]], Sequence[ExampleT]]


@dataclass(frozen=True)
class Preparation(Generic[ExampleT]):
    """How rows become samples of a task."""

    task: DataTask
    read: ReadValues[ExampleT]
    tokenize: Callable[[Sequence[ExampleT]], list[TokenizedChat | TokenizedText | ValueError]]
    stop_token_ids: frozenset[int] | None = None  # tokens that end turns; None: not counted


def read_rows(
    chunk: Chunk, read: ReadValues[ExampleT], tally: Counter[str]
) -> Iterator[tuple[Row, ExampleT | ValueError | None]]:
    """Yields the chunk's rows, each with its example, the error that makes it unusable, or None for a blank line; a row
    with several examples once with each. RefusedColumn names the row."""
    for row in iterate_rows(chunk):
        try:
            values = parse_row(row.value, chunk.encoding)
            examples = [None] if values is None else read(values, chunk, tally)
        except RefusedColumn as error:
            raise RefusedColumn(f"{chunk.file}:{row.place}: {error}") from None
        except ValueError as error:
            examples = [error]
        for example in examples:
            yield row, example
