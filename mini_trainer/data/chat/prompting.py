"""Compares the beginnings of answers in rows with the generation prompt.

Some templates prompt with more than they write into a row: R1's distills open `<think>`, but a row without reasoning
has none. The model is then never trained on answers after its actual prompt. Such rows are counted, or changed
(`--thinking-prefix train-as-prompted`): the prompt's text goes before the last answer as context, and the template's
text that closes the reasoning is trained with the answer. Both are constants of the template, inserted after the row's
mask is found.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mini_trainer.data.chat.conversation import (
    ASSISTANT,
    OTHER_STAND_IN,
    REASONING_KEYS,
    STAND_IN,
    Leaf,
    Message,
    Outline,
)
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.skeletons import Beginning, Render, Skeleton, Span, Turn
from mini_trainer.data.chat.token_spans import Remark

TAGS = (  # open and close reasoning
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<|think|>", "<|/think|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)
ANY_TAG = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair))
OPENINGS = {opening: closing for opening, closing in TAGS}
NO_REASONING = re.compile("|".join(rf"(?:{re.escape(a)})?\s*{re.escape(b)}\s*" for a, b in TAGS))
INLINE_REASONING = re.compile("|".join(rf"\s*{re.escape(a)}(.+?){re.escape(b)}" for a, b in TAGS), re.DOTALL)
THOUGHT = "xQ99997Qx"  # reasoning of a stand-in assistant turn
NUM_SHOWN = 80  # last characters of a prompt shown in remarks

AS_RENDERED, AS_PROMPTED, UNTRAINED_REASONING = "as rendered", "as prompted", "untrained reasoning"
EARLIER, UNREAD_KEY = "earlier turn", "unread key"
READ_OR_CHECKED = {"role", "content", "tool_calls", *REASONING_KEYS}  # keys that other checks cover
READ_OF_RESULTS = {"tool_call_id", "name"}


def describe_beginnings(outline: Outline, skeleton: Skeleton) -> None:
    """Sets `beginning` and `lacks_reasoning` of the skeleton's assistant turns."""
    written = {slot.leaf for slot in skeleton.slots}
    lacking = find_lacking(outline.leaves, written)
    skeleton.turns[:] = [
        replace(turn, beginning=describe_beginning(turn, outline, skeleton), lacks_reasoning=turn.message in lacking)
        if outline.messages[turn.message]["role"] == ASSISTANT
        else turn
        for turn in skeleton.turns
    ]


def find_lacking(leaves: Sequence[Leaf], written: set[int]) -> set[int]:
    """The messages whose reasoning is not written, under any of its keys."""
    by_message: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.kind == "reasoning":
            by_message.setdefault(leaf.message, []).append(i)
    return {message for message, own in by_message.items() if written.isdisjoint(own)}


def describe_beginning(turn: Turn, outline: Outline, skeleton: Skeleton) -> Beginning | None:
    """The turn's beginning; None if its prompt writes no more than the row, or if it has no prompt."""
    index, offset = turn.header or turn.start
    literal = skeleton.literals[index]
    if turn.prompt is None or turn.prompt == literal[:offset] or index != turn.start[0]:
        return None
    prompted = turn.prompt.removeprefix(literal[:offset]) if turn.prompt.startswith(literal[:offset]) else None
    has_text = turn.start[0] < turn.end[0]
    is_reasoning = has_text and outline.leaves[skeleton.slots[index].leaf].kind == "reasoning"
    end = len(literal) if has_text else turn.end[1]
    written = None if is_reasoning else literal[offset:end]
    return Beginning((index, offset), literal[:offset], turn.prompt, prompted, written)


@dataclass
class PromptMatcher:
    """Compares beginnings, and changes the last one if `as_prompted`. Remembers how the template closes reasoning."""

    encode: Callable[[str], Any]  # a text's encoding
    template: str
    as_prompted: bool
    closings: dict[tuple[str, str, bool], str | None] = field(default_factory=dict)

    def match(
        self,
        text: str,
        spans: list[Span],
        messages: Sequence[Message],
        *,
        trained: Sequence[bool],
        render: Render,
        has_tools: bool,
    ) -> tuple[str, list[Span], list[Remark]]:
        """The row and its spans, changed if `as_prompted`, and remarks on its trained turns."""
        own = [span for span in spans if messages[span.message]["role"] == ASSISTANT]
        last = max(own, key=lambda span: span.start, default=None)
        remarks = []
        for span in own:
            if not trained[span.message]:
                continue
            lacks = lacks_reasoning(text, span, messages[span.message])
            if lacks:
                remarks.append(Remark(UNTRAINED_REASONING))
            if is_prompted(text, span):
                continue
            changes = self.as_prompted and span is last and not lacks and can_begin_so(text, span)
            closing = self.find_closing(span.turn.beginning, render, has_tools) if changes else None
            remarks.append(describe_difference(text, span, closing, is_last=span is last))
            if closing is not None:
                text, spans = begin_as_prompted(text, spans, span, closing)
        return text, spans, remarks

    def find_closing(self, beginning: Beginning, render: Render, has_tools: bool) -> str | None:
        """The text between the prompt and an answer without reasoning; None if it is not known."""
        if beginning.prompted is None:
            return None
        key = (beginning.header, beginning.prompted, has_tools)
        if key not in self.closings:
            closing = find_closing(beginning.prompted, self.template, render)
            candidates = [] if closing is None else [closing, closing.lstrip()]
            self.closings[key] = next((c for c in candidates if self.stays_apart(beginning.prompt, c)), None)
        return self.closings[key]

    def stays_apart(self, prompt: str, closing: str) -> bool:
        """Whether no token spans the border between the prompt and `closing`."""
        ids = self.encode(prompt).ids
        return self.encode(prompt + closing).ids[: len(ids)] == ids


def describe_difference(text: str, span: Span, closing: str | None, *, is_last: bool) -> Remark:
    """A remark on a turn that begins differently from its prompt. `closing`: the beginning of a changed turn."""
    beginning = span.turn.beginning
    if closing is not None:
        return Remark(AS_PROMPTED, shorten(beginning.prompt), closing)
    kept = beginning.header + text[span.opens : span.start]
    return Remark(AS_RENDERED if is_last else EARLIER, shorten(beginning.prompt), shorten(kept))


def is_prompted(text: str, span: Span) -> bool:
    """Whether the turn begins as its prompt does."""
    beginning = span.turn.beginning
    if beginning is None:
        return True
    return beginning.prompted is not None and text.startswith(beginning.prompted, span.opens)


def lacks_reasoning(text: str, span: Span, message: Message) -> bool:
    """Whether the turn lacks its message's reasoning, which may have a key of its own or be in the content."""
    if span.turn.lacks_reasoning:
        return True
    said = message.get("content") or ""
    content = said if isinstance(said, str) else "".join(part.get("text", "") for part in said)
    inline = INLINE_REASONING.match(content)
    return inline is not None and inline[inline.lastindex].strip() not in text[span.opens : span.end]


def find_unread_keys(messages: Sequence[Message], text: str, render: Render) -> list[Remark]:
    """Remarks on message keys that the template does not read: without them it writes the same `text`."""
    others = sorted({(message["role"], key) for message in messages for key in message.keys() - list_checked(message)})
    if not others:
        return []

    def writes_same(without: Sequence[tuple[str, str]]) -> bool:
        kept = [{key: m[key] for key in m if (m["role"], key) not in without} for m in messages]
        return catch_error(render, [kept]) == [text]

    unread = others if writes_same(others) else [other for other in others if writes_same([other])]
    return [Remark(UNREAD_KEY, role, key) for role, key in unread]


def list_checked(message: Message) -> set[str]:
    return READ_OR_CHECKED | READ_OF_RESULTS if message["role"] == "tool" else READ_OR_CHECKED


def refuse_untrained_reasoning(remarks: Sequence[Remark]) -> None:
    if any(remark.kind == UNTRAINED_REASONING for remark in remarks):
        raise ValueError(
            "the chat template leaves out the reasoning of an answer that is trained (--strict-reasoning): remove it"
            " from the row, or use a template that writes it (--chat-template)"
        )


def find_closing(prompted: str, template: str, render: Render) -> str | None:
    """The text that closes the reasoning left open by `prompted`: the template's own, or, if it only contains the
    closing tag, an empty line and that tag. "" if no reasoning is open, None if the text is not known."""
    tags = ANY_TAG.findall(prompted)
    if not tags:
        return None
    if tags[-1] not in OPENINGS:
        return ""
    before, closing = render_reasoning(render)
    if closing is not None and before.endswith(prompted):
        return closing
    opening, closing = tags[-1], OPENINGS[tags[-1]]
    opened, whole = prompted[prompted.rindex(opening) :], f"{opening}\n\n{closing}\n\n"
    return whole[len(opened) :] if closing in template and whole.startswith(opened) else None


def render_reasoning(render: Render) -> tuple[str, str | None]:
    """The template's text before an answer's reasoning, and between reasoning and content (None: not written)."""
    answer = {"role": ASSISTANT, "content": STAND_IN, "reasoning_content": THOUGHT}
    texts = catch_error(render, [[{"role": "user", "content": OTHER_STAND_IN}, answer]])
    if isinstance(texts, ValueError):
        return "", None
    before, thought, after = texts[0].partition(THOUGHT)
    between, content, _ = after.partition(STAND_IN)
    return (before, between) if thought and content else ("", None)


def can_begin_so(text: str, span: Span) -> bool:
    """Whether the turn begins with the template's text for answers without reasoning, and its content has none."""
    written = span.turn.beginning.written
    if written is None or not text.startswith(written, span.opens):
        return False
    after = span.opens + skip_empty_reasoning(written)
    return ANY_TAG.match(text, after + len(text[after:]) - len(text[after:].lstrip())) is None


def skip_empty_reasoning(written: str) -> int:
    found = NO_REASONING.match(written)
    return found.end() if found else 0


def begin_as_prompted(text: str, spans: list[Span], span: Span, closing: str) -> tuple[str, list[Span]]:
    """The row with the prompt's text before this turn, and all spans, the later ones moved."""
    beginning = span.turn.beginning
    rest = span.opens + skip_empty_reasoning(beginning.written)
    words = beginning.prompted + closing
    by = len(words) - (rest - span.opens)
    moved = [
        other if other.start < span.start else replace(other, start=other.start + by, end=other.end + by)
        for other in spans
    ]
    changed = replace(span, start=span.opens + len(beginning.prompted), end=span.end + by)
    spans = [changed if old is span else new for old, new in zip(spans, moved, strict=True)]
    return text[: span.opens] + words + text[rest:], spans


def shorten(text: str) -> str:
    return text[-NUM_SHOWN:]
