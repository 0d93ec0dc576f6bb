"""The two sides of a data set, training and validation: which rows fall on which, and what is written of each.

A row's side is a function of what it says and of the share, and of nothing else. What is said is hashed in one
canonical form, and a hash in the lowest `share` of all hashes is validation. So rows that say the same fall on the same
side whatever their files and formats, and a larger share only moves rows from training to validation.
"""

import hashlib
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chat.masking import Chat, Completion, Document
from chat.placeholders import REASONING_KEYS
from corpus.formats import Example, join_parts, parse_json
from corpus.labelled import Labelled, TextPair, Words
from corpus.report import SHOWN_SAMPLES_SEED, Totals
from corpus.writer import BlockCutter, EncodedSamples, TokenizedSample, encode_samples
from objectives.columns import Task

SIDES = ("training", "validation")
HASH_BYTES = 8
# Values that JSON does not have can come from Parquet. Made once, as this takes longer than a row.
CANONICAL_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=repr)


@dataclass(frozen=True)
class SideResult:
    """What a worker makes of those rows of a chunk that fall on one side."""

    samples: EncodedSamples | np.ndarray  # token ids, if documents are cut into blocks, which is done later
    totals: Totals


def falls_into_validation(example: Example | Labelled, share: float) -> bool:
    return hash_example(example) < share * 256**HASH_BYTES


def hash_example(example: Example | Labelled) -> int:
    """A number from 0 to 256**HASH_BYTES, the same for all that say the same."""
    said = CANONICAL_JSON.encode(list_said(example))
    digest = hashlib.sha256(said.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:HASH_BYTES], "big")


def list_said(example: Example | Labelled) -> Any:
    """What is said, in one form. Whatever is left out here can only bring rows together on a side, never apart: so of
    a chat there is nothing but who says what, and neither weights nor ids nor the tools that are offered; and of what
    is classified, not its label."""
    match example:
        case Labelled(content=str() as text):
            return text
        case Labelled(content=TextPair() as pair):
            return [pair.first, pair.second]
        case Labelled(content=Words() as text):
            return " ".join(text.words)
        case Labelled():
            return list_said(example.content)
        case Document():
            return example.text
        case Completion():
            return example.prompt + example.completion
        case Chat():
            return [list_message(message) for message in example.messages]


def list_message(message: dict[str, Any]) -> list[Any]:
    """Role, content, reasoning, and calls with their names and arguments. A content of parts is their text."""
    content = message.get("content") or ""
    content = join_parts(content, "") if isinstance(content, list) else content
    if len(message) == 2 and content:  # a role and a content, as most have, and nothing to look for
        return [message["role"], content, None, []]
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    calls = [call.get("function") or call for call in message.get("tool_calls") or []]
    return [message["role"], content, reasoning, [list_call(call) for call in calls]]


def list_call(call: Any) -> Any:
    """Name and arguments. These can be an object, or that object as JSON text."""
    if not isinstance(call, dict):
        return call
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # it is a text like any other
            arguments = parse_json(arguments)
    return [call.get("name"), arguments]


class SideWriter:
    """Writes what becomes of a side's rows. Invariant: `totals` are of all that was added.

    A block can hold documents of several chunks, so that blocks are cut here, and not by the workers; each side has a
    stream of its own.
    """

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
        """Writes what is left of the stream of documents."""
        if self.cutter is not None:
            self.write_blocks(self.cutter.cut(np.empty(0, np.int32), is_last=True))

    def write_blocks(self, blocks: list[TokenizedSample]) -> None:
        for block in blocks:
            self.totals.add_sample(block, random.Random(f"{SHOWN_SAMPLES_SEED} {block.place}").random())
        if blocks:
            self.write(encode_samples(blocks, self.ending, Task()))


def mark_place(place: str, side: str) -> str:
    """A sample's place, as it is shown, with its side where that is not training."""
    return place if side == "training" else f"{place} ({side})"


def describe_split(side: str, *, share: float, other: Path) -> dict[str, Any]:
    """What a side's sidecar says of the other."""
    return {"side": side, "validation_share": share, "other_side": other.name}
