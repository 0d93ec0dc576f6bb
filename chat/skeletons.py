"""What a chat template writes around the leaves of a conversation: the conversation's *skeleton*.

Rendering an outline (chat/placeholders.py) shows the template's own text between the placeholders. Laying out the
real texts in the skeleton has to give the real rendering, character by character; then it is known, not guessed,
which of its characters the model generates.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

from chat.examples import ASSISTANT, Message
from chat.placeholders import Outline, replace_placeholders

STRIPS = ("", "\n", None)  # what templates strip from a text's ends: nothing, newlines, all whitespace
PADDING = "\n \n"  # tells apart what each of STRIPS leaves of it
LETTER = "\u00e9"  # tells apart how a text is written
MAX_NUM_REMEMBERED = 20_000  # bounds memory where every conversation is written in its own way


class Render(Protocol):
    """Conversations -> their texts, by the chat template; raises ValueError where the template fails."""

    def __call__(self, conversations: Sequence[list[Message]], *, generation_prompt: bool = False) -> list[str]: ...


@dataclass(frozen=True)
class Writing:
    """How the template writes a leaf."""

    left: str | None = ""  # what is stripped, each of STRIPS
    right: str | None = ""
    write: Callable[[str], str] = str

    def place(self, value: Any) -> str:
        if isinstance(value, str):
            return self.write(value.lstrip(self.left).rstrip(self.right))
        return json.dumps(value)


@dataclass(frozen=True)
class Slot:
    """Where a leaf goes in a skeleton."""

    leaf: int
    writing: Writing


@dataclass(frozen=True)
class Beginning:
    """The beginning of a turn after its `header`, which ends at `place`: `written`, up to the turn's first text (None:
    that is reasoning). The generation prompt is `prompt`: the same header and `prompted`, or another header (None)."""

    place: tuple[int, int]  # literal, offset into it
    header: str
    prompt: str
    prompted: str | None
    written: str | None


@dataclass(frozen=True)
class Turn:
    """A message's part of a skeleton: (literal, offset into it) where it begins, and where it ends."""

    message: int
    start: tuple[int, int]
    end: tuple[int, int]
    prompted: tuple[str, ...] = ()  # with what the generation prompt may already begin it; the first that fits counts
    prompt: str | None = None  # the generation prompt's text after the last text before the turn
    has_stop: bool = True
    num_skipped: int | None = 0  # of a marked turn: characters from its mark's beginning; None where text is between
    header: tuple[int, int] | None = None  # where the header ends, if the turn begins later
    beginning: Beginning | None = None  # None where the prompt has nothing after the header
    lacks_reasoning: bool = False  # its message has some that the template leaves out

    def covers(self, slot: int) -> bool:
        return self.start[0] <= slot < self.end[0]


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a rendered chat that belong to a turn, and could be trained. The header before them
    ends at `opens`."""

    start: int
    end: int
    turn: Turn
    opens: int

    @property
    def message(self) -> int:
        return self.turn.message


@dataclass(frozen=True)
class Skeleton:
    """What the template writes for an outline: literals[0], slot 0, literals[1], ..., slot n-1, literals[n]."""

    literals: list[str]
    slots: list[Slot]
    turns: list[Turn]
    named_by_id: list[tuple[int, int]] = field(default_factory=list)  # leaves: a name that only stands in the id

    def lay_out(self, values: Sequence[Any], bodies: dict[tuple[int, int], str]) -> tuple[str, list[int]]:
        """The text with `values` in the slots, and where each of its pieces begins: literals and slots in turn.

        `bodies`: for some turns, by where they start, what stands from there to the literal that ends them.
        """
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
        """Where the turns stand in `text`; None unless it is what the skeleton has with `values` in the slots."""
        expected, positions = self.lay_out(values, {})
        return [self.span(turn, text, positions) for turn in self.turns] if text == expected else None

    def span(self, turn: Turn, text: str, positions: list[int]) -> Span:
        """Where in `text`, which was laid out with `positions`, the turn stands, without the generation prompt."""
        start, end = (positions[2 * literal] + offset for literal, offset in (turn.start, turn.end))
        place = turn.start if turn.beginning is None else turn.beginning.place
        opens = positions[2 * place[0]] + place[1]
        start += next((len(prompted) for prompted in turn.prompted if text.startswith(prompted, start)), 0)
        return Span(start, end, turn, opens)


def dump_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dump_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


WAYS_TO_WRITE = (str, dump_json, dump_ascii_json)  # as it is, or what stands between the quotes of a JSON string


@dataclass
class SlotMemory:
    """How slots are written, by what stands around them, so that it need not be learned for every conversation."""

    known: dict[tuple[str, str, str, str], Writing] = field(default_factory=dict)

    def learn_slots(
        self, outline: Outline, order: list[int], literals: list[str], pad: Callable[[], list[str]]
    ) -> list[Slot]:
        """How the template writes each leaf. pad() gives the literals where texts are padded."""
        leaves = outline.leaves
        keys = [
            (leaves[leaf].kind, outline.messages[leaves[leaf].message]["role"], literals[k], literals[k + 1])
            for k, leaf in enumerate(order)
        ]
        if not all(key in self.known for key in keys):
            if len(self.known) > MAX_NUM_REMEMBERED:
                self.known.clear()
            kinds = [key[0] for key in keys]
            self.known.update(zip(keys, fit_writings(kinds, literals, pad()), strict=True))
        return [Slot(leaf, self.known[key]) for key, leaf in zip(keys, order, strict=True)]


Written = tuple[str, Writing]  # a leaf's kind, and how it is written
NOTHING = ("", Writing())  # stands before a conversation's first leaf, and after its last


def fit_writings(kinds: list[str], literals: list[str], gaps: list[str]) -> list[Writing]:
    """How the template writes leaves of these kinds. `gaps` are the literals where texts are padded: with what is left
    of it."""
    written = [NOTHING, *((kind, Writing()) for kind in kinds), NOTHING]
    for k, (literal, gap) in enumerate(zip(literals, gaps, strict=True)):
        before, after = written[k], written[k + 1]
        choice = fit_gap(literal, gap, before, after)
        if choice is None:
            raise ValueError(f"the chat template changes whitespace at a text's ends: {literal!r} became {gap!r}")
        written[k], written[k + 1] = (before[0], choice[0]), (after[0], choice[1])
    return [writing for _, writing in written[1:-1]]


def fit_gap(literal: str, gap: str, before: Written, after: Written) -> tuple[Writing, Writing] | None:
    """`before` with its right end and `after` with its left end and its way of writing, so that padding explains how
    `literal` became `gap`. None if nothing does.

    What the template puts around some arguments only (CDATA, say) is left open: a turn that has it is read as what
    stands between what surrounds it.
    """
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
    """What may be left of a leaf's padding at its end."""
    if not is_padded(kind):
        return [(writing, "")]
    return [(replace(writing, right=chars), writing.write((LETTER + PADDING).rstrip(chars))) for chars in STRIPS]


@cache
def list_beginnings(kind: str, writing: Writing) -> list[tuple[Writing, str]]:
    """What may be left of a leaf's padding at its beginning, however it is written."""
    if not is_padded(kind):
        return [(writing, "")]
    return [
        (replace(writing, left=chars, write=write), write((PADDING + LETTER).lstrip(chars)))
        for write in WAYS_TO_WRITE
        for chars in STRIPS
    ]


def pad_outline(outline: Outline) -> list[Message]:
    """The outline's messages, where whitespace and a letter surround each text."""

    def pad(i: int, placeholder: Any) -> Any:
        if not is_padded(outline.leaves[i].kind):
            return placeholder
        return f"{PADDING}{LETTER}{placeholder}{LETTER}{PADDING}"

    return replace_placeholders(outline.messages, pad)


def common_length(a: str, b: str) -> int:
    """Of what both begin with."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def match_text(text: str, outline: Outline, skeleton: Skeleton, *, render: Render) -> list[Span]:
    """Where the skeleton's turns stand in `text`, the rendered conversation.

    Where the template changes what an assistant says (by taking reasoning out of a content), each turn's text is what
    stands between what surrounds it; if the same could stand inside, it is read from a rendering with placeholders
    for all other messages. Raises ValueError unless the whole then fits exactly.
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
        "the chat template changes the contents, so it is not certain what is trained: it writes"
        f" {text[at : at + 40]!r} where {expected[at : at + 40]!r} would follow"
    )


def read_bodies(text: str, outline: Outline, skeleton: Skeleton, render: Render) -> dict[tuple[int, int], str]:
    """What the template makes of each assistant turn that has texts."""
    turns = [
        turn
        for turn in sorted(skeleton.turns, key=lambda turn: turn.start)
        if outline.messages[turn.message]["role"] == ASSISTANT and turn.start[0] < turn.end[0]
    ]
    bodies = cut_bodies(text, skeleton, turns, [leaf.value for leaf in outline.leaves])
    if bodies is None:
        bodies = [read_body(outline, skeleton, turn, render) for turn in turns]
    return {turn.start: body for turn, body in zip(turns, bodies, strict=True) if body is not None}


def cut_bodies(text: str, skeleton: Skeleton, turns: list[Turn], values: Any) -> list[str] | None:
    """`text` without what the skeleton has around the turns; None if it has something else there, or has the same
    inside turns, so that it is not certain where they end."""
    around, positions = skeleton.lay_out(values, {})
    starts = [positions[2 * turn.start[0]] + turn.start[1] for turn in turns]
    ends = [positions[2 * turn.end[0]] for turn in turns]
    before, *between, after = (around[i:j] for i, j in zip([0, *ends], [*starts, len(around)], strict=True))
    if not text.startswith(before) or not text.endswith(after) or len(text) < len(before) + len(after):
        return None
    rest = text[len(before) : len(text) - len(after)]
    if any(not part or count_overlapping(rest, part) != count for part, count in Counter(between).items()):
        return None
    bodies, at = [], 0
    for part in between:
        found = rest.find(part, at)
        if found < 0:
            return None
        bodies.append(rest[at:found])
        at = found + len(part)
    return [*bodies, rest[at:]]


def count_overlapping(text: str, part: str) -> int:
    """How often `part` occurs in `text`, also where it overlaps itself."""
    count, at = 0, text.find(part)
    while at >= 0:
        count, at = count + 1, text.find(part, at + 1)
    return count


def read_body(outline: Outline, skeleton: Skeleton, turn: Turn, render: Render) -> str | None:
    """What the template makes of one turn where all other messages hold placeholders."""

    def reveal(i: int, placeholder: Any) -> Any:
        leaf = outline.leaves[i]
        return placeholder if leaf.kind == "id" else leaf.value

    messages = list(outline.messages)
    messages[turn.message] = replace_placeholders(messages[turn.message], reveal)
    values: list[Any] = []
    replace_placeholders(outline.messages, lambda i, placeholder: values.append((i, placeholder)))
    bodies = cut_bodies(render([messages])[0], skeleton, [turn], dict(values))
    if bodies is None:
        return None
    for i, placeholder in values:
        if outline.leaves[i].kind == "id":
            bodies[0] = bodies[0].replace(placeholder, outline.leaves[i].value)
    return bodies[0]
