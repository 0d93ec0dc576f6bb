"""The *skeleton* of a conversation: the chat template's text around its leaves.

Rendering an outline (data/chat/conversation.py) shows the template's own text between the placeholders. The real texts
laid out in the skeleton must give the real rendering, character by character; then the characters that the model
generates are known, not guessed.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

from mini_trainer.data.chat.conversation import ASSISTANT, Message, Outline, replace_placeholders

STRIPS = ("", "\n", None)  # templates strip nothing, newlines or all whitespace from a text's ends
PADDING = "\n \n"  # each of STRIPS leaves a different part of it
LETTER = "\u00e9"  # looks different in each of WAYS_TO_WRITE
MAX_NUM_REMEMBERED = 20_000  # bounds memory if every conversation is written in its own way


class Render(Protocol):
    """Renders conversations with the chat template; raises ValueError if the template fails."""

    def __call__(self, conversations: Sequence[list[Message]], *, generation_prompt: bool = False) -> list[str]: ...


@dataclass(frozen=True)
class Writing:
    """How the template writes a leaf."""

    left: str | None = ""  # stripped characters, one of STRIPS
    right: str | None = ""
    write: Callable[[str], str] = str

    def place(self, value: Any) -> str:
        if isinstance(value, str):
            return self.write(value.lstrip(self.left).rstrip(self.right))
        return json.dumps(value)


@dataclass(frozen=True)
class Slot:
    """The place of a leaf in a skeleton."""

    leaf: int
    writing: Writing


@dataclass(frozen=True)
class Beginning:
    """The beginning of a turn after its `header`, which ends at `place`: `written`, up to the turn's first text (None
    if that is reasoning). The generation prompt `prompt` is the same header and `prompted` (None: another header)."""

    place: tuple[int, int]  # literal, offset into it
    header: str
    prompt: str
    prompted: str | None
    written: str | None


@dataclass(frozen=True)
class Turn:
    """A message's part of a skeleton. Places are (literal, offset into it)."""

    message: int
    start: tuple[int, int]
    end: tuple[int, int]
    prompted: tuple[str, ...] = ()  # beginnings that the generation prompt may already write; the first match counts
    prompt: str | None = None  # the generation prompt's text after the last text before the turn
    num_skipped: int | None = 0  # characters from the mark's beginning to the turn; None if a text is in between
    header: tuple[int, int] | None = None  # end of the header, if the turn begins later
    beginning: Beginning | None = None  # None if the prompt has nothing after the header
    lacks_reasoning: bool = False  # the template leaves out the message's reasoning


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a rendered chat: a turn that could be trained. Its header ends at `opens`."""

    start: int
    end: int
    turn: Turn
    opens: int

    @property
    def message(self) -> int:
        return self.turn.message


@dataclass(frozen=True)
class Skeleton:
    """The template's text for an outline: literals[0], slot 0, literals[1], ..., slot n-1, literals[n]."""

    literals: list[str]
    slots: list[Slot]
    turns: list[Turn]
    named_by_id: list[tuple[int, int]] = field(default_factory=list)  # (name, id) leaves: name only written in the id

    def lay_out(self, values: Sequence[Any], bodies: dict[tuple[int, int], str]) -> tuple[str, list[int]]:
        """The text with `values` in the slots, and the start of each of its pieces, alternating literals and slots.
        `bodies`: start of a turn -> its text from there to the literal that ends it, for some turns."""
        pieces = [""] * (2 * len(self.slots) + 1)
        pieces[::2] = self.literals
        pieces[1::2] = [slot.writing.place(values[slot.leaf]) for slot in self.slots]
        for turn in self.turns:
            if turn.start in bodies:
                (first, offset), (last, _) = turn.start, turn.end
                pieces[2 * first] = self.literals[first][:offset]
                pieces[2 * first + 1 : 2 * last] = [bodies[turn.start], *[""] * (2 * (last - first - 1))]
        return "".join(pieces), list(accumulate(map(len, pieces), initial=0))

    def find_spans(self, text: str, values: Sequence[Any]) -> list[Span] | None:
        """The spans of the turns in `text`; None unless it equals the skeleton with `values` in the slots."""
        expected, positions = self.lay_out(values, {})
        return [self.span(turn, text, positions) for turn in self.turns] if text == expected else None

    def span(self, turn: Turn, text: str, positions: list[int]) -> Span:
        """The span of the turn in `text`, laid out with `positions`, without the generation prompt."""
        start, end = (positions[2 * literal] + offset for literal, offset in (turn.start, turn.end))
        place = turn.start if turn.beginning is None else turn.beginning.place
        opens = positions[2 * place[0]] + place[1]
        start += next((len(prompted) for prompted in turn.prompted if text.startswith(prompted, start)), 0)
        return Span(start, end, turn, opens)


def dump_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dump_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


WAYS_TO_WRITE = (str, dump_json, dump_ascii_json)  # unchanged, or as the inside of a JSON string


@dataclass
class SlotMemory:
    """Writings of slots by their surroundings, so that they need not be learned for every conversation."""

    known: dict[tuple[str, str, str, str], Writing] = field(default_factory=dict)

    def learn_slots(
        self, outline: Outline, order: list[int], literals: list[str], pad: Callable[[], list[str]]
    ) -> list[Slot]:
        """The slot of each leaf. pad() returns the literals with padded texts."""
        leaves = outline.leaves
        keys = [
            (leaves[leaf].kind, outline.messages[leaves[leaf].message]["role"], literals[k], literals[k + 1])
            for k, leaf in enumerate(order)
        ]
        if not all(key in self.known for key in keys):
            if len(self.known) > MAX_NUM_REMEMBERED:
                self.known.clear()
            self.known.update(zip(keys, fit_writings([key[0] for key in keys], literals, pad()), strict=True))
        return [Slot(leaf, self.known[key]) for key, leaf in zip(keys, order, strict=True)]


Written = tuple[str, Writing]  # a leaf's kind and writing
NOTHING = ("", Writing())  # before a conversation's first leaf, and after its last


def fit_writings(kinds: list[str], literals: list[str], gaps: list[str]) -> list[Writing]:
    """The template's way of writing leaves of these kinds. `gaps`: the literals with what remains of texts' padding."""
    written = [NOTHING, *((kind, Writing()) for kind in kinds), NOTHING]
    for k, (literal, gap) in enumerate(zip(literals, gaps, strict=True)):
        before, after = written[k], written[k + 1]
        if (choice := fit_gap(literal, gap, before, after)) is None:
            raise ValueError(f"the chat template changes whitespace at a text's ends: {literal!r} became {gap!r}")
        written[k], written[k + 1] = (before[0], choice[0]), (after[0], choice[1])
    return [writing for _, writing in written[1:-1]]


def fit_gap(literal: str, gap: str, before: Written, after: Written) -> tuple[Writing, Writing] | None:
    """`before` with its right end, and `after` with its left end and way of writing, such that padding explains how
    `literal` became `gap`; None if there are none. Text that the template puts only around some arguments (CDATA, say)
    is left open: a turn with it is read as the text between its surroundings."""
    first_candidates, second_candidates = list_ends(*before), list_beginnings(*after)
    for first, left_of_gap in first_candidates:
        for second, right_of_gap in second_candidates:
            if left_of_gap + literal + right_of_gap == gap:
                return first, second
    (kind_before, first), (kind_after, second) = before, after
    if kind_before == kind_after == "argument":
        return (first, second) if literal in gap else None
    if kind_before == "argument":
        return next(((first, second) for second, right in second_candidates if gap.endswith(literal + right)), None)
    if kind_after == "argument":
        return next(((first, second) for first, left in first_candidates if gap.startswith(left + literal)), None)
    return None


def is_padded(kind: str) -> bool:
    return kind in ("content", "reasoning", "argument")


@cache
def list_ends(kind: str, writing: Writing) -> list[tuple[Writing, str]]:
    """Possible remainders of a leaf's padding at its end, each with its writing."""
    if not is_padded(kind):
        return [(writing, "")]
    return [(replace(writing, right=chars), writing.write((LETTER + PADDING).rstrip(chars))) for chars in STRIPS]


@cache
def list_beginnings(kind: str, writing: Writing) -> list[tuple[Writing, str]]:
    """Possible remainders of a leaf's padding at its beginning, each with its writing."""
    if not is_padded(kind):
        return [(writing, "")]
    return [
        (replace(writing, left=chars, write=write), write((PADDING + LETTER).lstrip(chars)))
        for write in WAYS_TO_WRITE
        for chars in STRIPS
    ]


def pad_outline(outline: Outline) -> list[Message]:
    """The outline's messages with whitespace and a letter around each text."""

    def pad(i: int, placeholder: Any) -> Any:
        if not is_padded(outline.leaves[i].kind):
            return placeholder
        return f"{PADDING}{LETTER}{placeholder}{LETTER}{PADDING}"

    return replace_placeholders(outline.messages, pad)


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def match_text(text: str, outline: Outline, skeleton: Skeleton, *, render: Render) -> list[Span]:
    """The spans of the skeleton's turns in `text`, the rendered conversation.

    If the template changes an assistant's text (by taking reasoning out of a content), each turn is the text between
    its surroundings; if a turn could contain these, it is read from a rendering with placeholders for all other
    messages. Raises ValueError unless the whole then fits exactly.
    """
    values = [leaf.value for leaf in outline.leaves]
    if (spans := skeleton.find_spans(text, values)) is not None:
        return spans
    bodied, positions = skeleton.lay_out(values, read_bodies(text, outline, skeleton, render))
    if text == bodied:
        return [skeleton.span(turn, text, positions) for turn in skeleton.turns]
    expected, _ = skeleton.lay_out(values, {})
    at = common_length(text, expected)
    raise ValueError(
        "the chat template changes the contents, so the row cannot be masked with certainty: it writes"
        f" {text[at : at + 40]!r}, expected: {expected[at : at + 40]!r}"
    )


def read_bodies(text: str, outline: Outline, skeleton: Skeleton, render: Render) -> dict[tuple[int, int], str]:
    """Start -> rendered text of each assistant turn that has texts."""
    turns = [
        turn
        for turn in sorted(skeleton.turns, key=lambda turn: turn.start)
        if outline.messages[turn.message]["role"] == ASSISTANT and turn.start[0] < turn.end[0]
    ]
    if (bodies := cut_bodies(text, skeleton, turns, [leaf.value for leaf in outline.leaves])) is None:
        bodies = [read_body(outline, skeleton, turn, render) for turn in turns]
    return {turn.start: body for turn, body in zip(turns, bodies, strict=True) if body is not None}


def cut_bodies(text: str, skeleton: Skeleton, turns: list[Turn], values: Any) -> list[str] | None:
    """The texts of the turns in `text`; None if the text around them differs from the skeleton's, or also occurs inside
    turns, so that their ends are not certain."""
    around, positions = skeleton.lay_out(values, {})
    starts = [positions[2 * turn.start[0]] + turn.start[1] for turn in turns]
    ends = [positions[2 * turn.end[0]] for turn in turns]
    before, *between, after = (around[i:j] for i, j in zip([0, *ends], [*starts, len(around)], strict=True))
    if not text.startswith(before) or not text.endswith(after) or len(text) < len(before) + len(after):
        return None
    rest = text[len(before) : len(text) - len(after)]
    counts = Counter(between)
    if any(not part or len(re.findall(f"(?={re.escape(part)})", rest)) != count for part, count in counts.items()):
        return None
    bodies, at = [], 0
    for part in between:
        found = rest.find(part, at)
        if found < 0:
            return None
        bodies.append(rest[at:found])
        at = found + len(part)
    return [*bodies, rest[at:]]


def read_body(outline: Outline, skeleton: Skeleton, turn: Turn, render: Render) -> str | None:
    """The rendered text of one turn, with placeholders in all other messages; None if it cannot be cut out."""
    leaves, messages = outline.leaves, list(outline.messages)
    messages[turn.message] = replace_placeholders(
        messages[turn.message], lambda i, placeholder: placeholder if leaves[i].kind == "id" else leaves[i].value
    )
    values: list[Any] = []
    replace_placeholders(outline.messages, lambda i, placeholder: values.append((i, placeholder)))
    if (bodies := cut_bodies(render([messages])[0], skeleton, [turn], dict(values))) is None:
        return None
    for i, placeholder in values:
        if leaves[i].kind == "id":
            bodies[0] = bodies[0].replace(placeholder, leaves[i].value)
    return bodies[0]
