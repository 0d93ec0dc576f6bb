"""Splits a data set into its two sides, training and validation.

A row's side depends only on its texts and on the share. The texts are hashed in one canonical form, and hashes in the
lowest `share` of all hashes are validation. So rows with the same texts fall on the same side in any file and format,
and a larger share only moves rows from training to validation.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mini_trainer.data.chat.conversation import REASONING_KEYS, Chat, Completion, Document, Example, Message
from mini_trainer.data.chat.normalizing import take_out
from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.rows.chat_rows import join_parts
from mini_trainer.data.rows.labelled import TextPair, Words
from mini_trainer.data.rows.report import SHOWN_SAMPLES_SEED, Totals
from mini_trainer.data.rows.writer import BlockCutter, EncodedSamples, TokenizedSample, encode_samples
from mini_trainer.data.stores.json_lines import parse_json

SIDES = ("training", "validation")
HASH_BYTES = 8
# Parquet can have values that JSON lacks, hence `default`. Made once, because this takes longer than a row.
CANONICAL_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=repr)


class Identified(Protocol):
    """An example whose side depends on a part of it: the prompt without answers, or the content without label."""

    @property
    def identity(self) -> Example | str | TextPair | Words | list[Message]: ...


AnyExample = Example | Identified


@dataclass(frozen=True)
class SideResult:
    """A worker's result for a chunk's rows on one side."""

    samples: EncodedSamples | np.ndarray  # token ids, if documents are to be cut into blocks later
    totals: Totals


def falls_into_validation(example: AnyExample, share: float) -> bool:
    return hash_example(example) < share * 256**HASH_BYTES


def hash_example(example: AnyExample) -> int:
    """A number from 0 to 256**HASH_BYTES, the same for examples with the same texts."""
    digest = hashlib.sha256(CANONICAL_JSON.encode(list_said(example)).encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:HASH_BYTES], "big")


def list_said(example: AnyExample | str | TextPair | Words | list[Message]) -> Any:
    """The example's texts in canonical form. Omissions can only put more rows on the same side, so chats are just
    roles and texts, without weights, ids or offered tools."""
    match example:
        case str():
            return example
        case TextPair():
            return [example.first, example.second]
        case Words():
            return " ".join(example.words)
        case list():
            return [list_message(message) for message in example]
        case Document():
            return example.text
        case Completion():
            return example.prompt + example.completion
        case Chat():
            return list_said(example.messages)
        case _:
            return list_said(example.identity)


def list_message(message: dict[str, Any]) -> list[Any]:
    """Role, content, reasoning, and calls with their names and arguments. Parts of a content are joined."""
    message = take_out(message) or message
    content = message.get("content") or ""
    content = join_parts(content, "") if isinstance(content, list) else content
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    calls = [call.get("function") or call for call in message.get("tool_calls") or []]
    return [message["role"], content, reasoning, [list_call(call) for call in calls]]


def list_call(call: Any) -> Any:
    """Name and arguments; arguments as JSON text are parsed."""
    if not isinstance(call, dict):
        return call
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # not JSON: stays text
            arguments = parse_json(arguments)
    return [call.get("name"), arguments]


class SideWriter:
    """Writes a side's samples. Invariant: `totals` cover all added results. A block can hold documents of several
    chunks, so blocks are cut here and not by the workers; each side has a stream of its own."""

    def __init__(
        self, write: Callable[[EncodedSamples], Any], *, ending: str, num_shown: int, cutter: BlockCutter | None
    ) -> None:
        self.write, self.ending, self.cutter = write, ending, cutter
        self.totals = Totals(num_shown)

    def add(self, result: SideResult) -> None:
        self.totals.add(result.totals)
        if self.cutter is not None:
            self.write_blocks(self.cutter.cut(result.samples))
        elif result.totals.rows["kept"]:
            self.write(result.samples)

    def finish(self) -> None:
        """Writes the rest of the stream of documents."""
        if self.cutter is not None:
            self.write_blocks(self.cutter.cut(np.empty(0, np.int32), is_last=True))

    def write_blocks(self, blocks: list[TokenizedSample]) -> None:
        for block in blocks:
            self.totals.add_sample(block, random.Random(f"{SHOWN_SAMPLES_SEED} {block.place}").random())
        if blocks:
            self.write(encode_samples(blocks, self.ending, DataTask()))


def mark_place(place: str, side: str) -> str:
    """A sample's place as shown, with its side unless that is training."""
    return place if side == "training" else f"{place} ({side})"


def check_sides(sides: Sequence[Totals], *, share: float) -> None:
    """Refuses a split with nothing on one side."""
    num_kept = sum(side.rows["kept"] for side in sides)
    for name, totals, change in zip(SIDES, sides, ("smaller", "larger"), strict=True):
        if totals.rows["kept"] == 0:
            raise ValueError(
                f"--validation-share {share}: of {num_kept:,} kept rows, none is left for {name}; use a {change} share,"
                " or more rows (rows with the same text always fall on the same side)"
            )
