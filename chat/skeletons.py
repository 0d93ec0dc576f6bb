"""What a chat template writes around the texts of a conversation, learned from renderings with placeholders.

The *outline* of a conversation is the conversation with a numbered placeholder for each of its texts: contents,
reasoning, the values of tool calls' arguments, ids. Rendering an outline shows the template's own text between the
placeholders, which is the outline's *skeleton*. Laying out the real texts in the skeleton has to give the real
rendering, character by character; then it is known, not guessed, which of its characters the model generates.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

ASSISTANT = "assistant"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the names that transformers knows
REASONING_OPENING = re.compile(r"<\|?think(?:ing)?\|?>")
PROMPTED_REASONING = re.compile(REASONING_OPENING.pattern + r"\s*(?:</\|?think(?:ing)?\|?>\s*)?\Z")

# Templates test their input: a text is letters and digits, as long as the ids that Mistral's templates accept; a
# number is a number.
PLACEHOLDER = re.compile(r"xQ(\d{5})Qx|7391(\d{5})1937")
MAX_NUM_LEAVES = 99_990
STAND_IN = "xQ99999Qx"  # content of an assistant turn that only has content
OTHER_STAND_IN = "xQ99998Qx"  # content of a user turn
STRIPS = ("", "\n", None)  # what templates strip from a text's ends: nothing, newlines, all whitespace
PADDING = "\n \n"  # tells apart what each of STRIPS leaves of it
LETTER = "\u00e9"  # tells apart how a text is written

Message = dict[str, Any]


class Render(Protocol):
    """Conversations -> their texts, by the chat template; raises ValueError where the template fails."""

    def __call__(self, conversations: Sequence[list[Message]], *, generation_prompt: bool = False) -> list[str]: ...


@dataclass(frozen=True)
class Leaf:
    """A text or number of a conversation."""

    message: int  # index into the messages
    kind: str  # content, reasoning, argument, number, id
    value: Any


@dataclass(frozen=True)
class Outline:
    """A conversation with placeholders, and what they stand for."""

    messages: list[Message]
    leaves: list[Leaf]

    @cached_property
    def text(self) -> str:
        return repr(self.messages)


@dataclass(frozen=True)
class Stops:
    """Which tokens end turns: `special` matches any special token, `known` are those that end generation. With
    `may_be_missing` a turn without one ends where its content does."""

    special: re.Pattern[str]
    known: frozenset[str]
    may_be_missing: bool = False


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a rendered chat that belong to a message, and could be trained."""

    start: int
    end: int
    message: int


@dataclass(frozen=True)
class Slot:
    """Where a leaf goes in a skeleton, and how the template writes it."""

    leaf: int
    left: str | None = ""  # what is stripped, each of STRIPS
    right: str | None = ""
    write: Callable[[str], str] = str

    def place(self, value: Any) -> str:
        if isinstance(value, str):
            return self.write(value.lstrip(self.left).rstrip(self.right))
        return json.dumps(value)


@dataclass(frozen=True)
class Turn:
    """A message's part of a skeleton: (literal, offset into it) where it begins, and where it ends."""

    message: int
    start: tuple[int, int]
    end: tuple[int, int]
    prompted: tuple[str, ...] = ()  # with what the generation prompt may already begin it; the first that fits counts
    has_stop: bool = True


@dataclass(frozen=True)
class Skeleton:
    """What the template writes for an outline: literals[0], slot 0, literals[1], ..., slot n-1, literals[n]."""

    literals: list[str]
    slots: list[Slot]
    turns: list[Turn]

    def lay_out(self, values: Sequence[Any], bodies: dict[int, str]) -> tuple[str, list[int]]:
        """The text with `values` in the slots, and where each of its pieces begins: literals and slots in turn.

        `bodies`: for some messages, what their turn has from its beginning to the literal that ends it.
        """
        pieces = [""] * (2 * len(self.slots) + 1)
        pieces[::2] = self.literals
        pieces[1::2] = [slot.place(values[slot.leaf]) for slot in self.slots]
        for turn in self.turns:
            if turn.message in bodies:
                (first, offset), (last, _) = turn.start, turn.end
                pieces[2 * first] = self.literals[first][:offset]
                pieces[2 * first + 1 : 2 * last] = [bodies[turn.message], *[""] * (2 * (last - first - 1))]
        return "".join(pieces), list(accumulate(map(len, pieces), initial=0))

    def find_spans(self, text: str, values: Sequence[Any]) -> list[Span] | None:
        """Where the turns stand in `text`; None unless it is what the skeleton has with `values` in the slots."""
        expected, positions = self.lay_out(values, {})
        return [self.span(turn, text, positions) for turn in self.turns] if text == expected else None

    def span(self, turn: Turn, text: str, positions: list[int]) -> Span:
        """Where in `text`, which was laid out with `positions`, the turn stands, without the generation prompt."""
        start, end = (positions[2 * literal] + offset for literal, offset in (turn.start, turn.end))
        start += next((len(prompted) for prompted in turn.prompted if text.startswith(prompted, start)), 0)
        return Span(start, end, turn.message)


def dump_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dump_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


WAYS_TO_WRITE = (str, dump_json, dump_ascii_json)  # as it is, or what stands between the quotes of a JSON string


def make_outline(messages: list[Message], *, only: str | None = None) -> Outline:
    """Placeholders for the texts of all messages, or `only` of those with this role. Empty texts stay as they are,
    because templates treat them like none."""
    holder = LeafHolder([], {})
    held = [
        holder.hold_message(message, i) if only is None or message["role"] == only else message
        for i, message in enumerate(messages)
    ]
    if len(holder.leaves) > MAX_NUM_LEAVES:
        raise ValueError(f"has {len(holder.leaves):,} texts, at most {MAX_NUM_LEAVES:,} can be told apart")
    return Outline(held, holder.leaves)


@dataclass(frozen=True)
class LeafHolder:
    """Puts placeholders in place of texts, and keeps the texts. Ids that are equal get the same placeholder."""

    leaves: list[Leaf]
    ids: dict[str, str]

    def hold_message(self, message: Message, i: int) -> Message:
        held = {**message, "content": self.hold_text(message.get("content"), i, "content")}
        if len(message) > 2:
            for key in REASONING_KEYS:
                if key in message and message["role"] == ASSISTANT:
                    held[key] = self.hold_text(message[key], i, "reasoning")
            if "tool_call_id" in message:
                held["tool_call_id"] = self.hold_id(message["tool_call_id"], i)
            if isinstance(message.get("tool_calls"), list):
                held["tool_calls"] = [self.hold_call(call, i) for call in message["tool_calls"]]
        return held

    def hold_call(self, call: Any, i: int) -> Any:
        if not isinstance(call, dict):
            return call
        held = dict(call)
        if "id" in call:
            held["id"] = self.hold_id(call["id"], i)
        if "arguments" in call:
            held["arguments"] = self.hold_argument(call["arguments"], i)
        if "function" in call:
            held["function"] = self.hold_call(call["function"], i)
        return held

    def hold_argument(self, value: Any, i: int) -> Any:
        if isinstance(value, dict):
            return {key: self.hold_argument(item, i) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hold_argument(item, i) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.leaves.append(Leaf(i, "number", value))
            return int(f"7391{len(self.leaves) - 1:05}1937")
        return self.hold_text(value, i, "argument")

    def hold_id(self, value: Any, i: int) -> Any:
        if not isinstance(value, str):
            return value
        if value not in self.ids:
            self.ids[value] = self.hold_text(value, i, "id")
        return self.ids[value]

    def hold_text(self, value: Any, i: int, kind: str) -> Any:
        if not isinstance(value, str) or not value:
            return value
        self.leaves.append(Leaf(i, kind, value))
        return f"xQ{len(self.leaves) - 1:05}Qx"


def replace_placeholders(value: Any, exchange: Callable[[int, Any], Any]) -> Any:
    """`value`, in which exchange(leaf, placeholder) stands for each placeholder."""
    if isinstance(value, dict):
        return {key: replace_placeholders(item, exchange) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_placeholders(item, exchange) for item in value]
    if isinstance(value, str | int) and (match := PLACEHOLDER.fullmatch(str(value))):
        return exchange(int(match[1] or match[2]), value)
    return value


def split_at_placeholders(text: str) -> tuple[list[int], list[str]]:
    """The leaves that stand in `text`, in order, and the text before, between and after them."""
    parts = PLACEHOLDER.split(text)  # literal, text's number, number's number, literal, ...
    return [int(a or b) for a, b in zip(parts[1::3], parts[2::3], strict=True)], parts[::3]


def learn_skeleton(outline: Outline, *, unmasked: set[int], render: Render, stops: Stops) -> Skeleton:
    """Renders `outline`, and what leads up to and ends each of the turns that can be trained: the assistant's, and
    the messages in `unmasked`.

    Raises ValueError if the template leaves out or repeats a text, writes it in an unknown way, or if an assistant's
    turn does not begin with the generation prompt or has no end-of-turn token.
    """

    def pad(i: int, placeholder: Any) -> Any:
        if outline.leaves[i].kind in ("id", "number"):
            return placeholder
        return f"{PADDING}{LETTER}{placeholder}{LETTER}{PADDING}"

    order, literals = check_outline(outline, render=render, stops=stops)
    padded_order, gaps = split_at_placeholders(render([replace_placeholders(outline.messages, pad)])[0])
    if order != padded_order:
        raise ValueError("the chat template writes other texts, or in another order, where whitespace surrounds them")
    skeleton = Skeleton(literals, learn_slots(outline, order, literals, gaps), [])
    learner = TurnLearner(outline, skeleton, render, stops)
    for i, message in enumerate(outline.messages):
        if message["role"] == ASSISTANT:
            skeleton.turns.append(learner.learn_assistant_turn(i))
        elif i in unmasked:
            skeleton.turns.extend(learner.learn_other_turn(i))
    return skeleton


def check_outline(outline: Outline, *, render: Render, stops: Stops) -> tuple[list[int], list[str]]:
    """What `outline` is rendered to: leaves and literals. Raises ValueError if a text is missing or there twice."""
    check_rest(outline, stops)
    order, literals = split_at_placeholders(render([outline.messages])[0])
    if any(leaf >= len(outline.leaves) for leaf in order):
        raise ValueError("the chat template writes what looks like a placeholder used for masking")
    check_completeness(outline, order, render)
    return order, literals


def check_rest(outline: Outline, stops: Stops) -> None:
    """Refuses what is no leaf, and yet looks like one or like a token that ends a turn."""
    counts = Counter(int(a or b) for a, b in PLACEHOLDER.findall(outline.text))
    if len(counts) != len(outline.leaves) or any(
        counts[i] != 1 for i, leaf in enumerate(outline.leaves) if leaf.kind != "id"
    ):
        raise ValueError("contains what looks like a placeholder used for masking")
    calls = [message["tool_calls"] for message in outline.messages if message.get("tool_calls")]
    if calls and (found := stops.special.search(json.dumps(calls, ensure_ascii=False, default=repr))):
        raise ValueError(f"has the special token {found[0]!r} in the name of a tool or argument")


def check_completeness(outline: Outline, order: list[int], render: Render) -> None:
    """Refuses a template that repeats texts, or leaves out what it would not leave out of the last turn."""
    for i, leaf in enumerate(outline.leaves):
        count, role = order.count(i), outline.messages[leaf.message]["role"]
        if count == 1 or leaf.kind == "id" or (leaf.kind == "reasoning" and count == 0):
            continue
        if count == 0 and role == ASSISTANT and leaf.message < len(outline.messages) - 1:
            cut_order, _ = split_at_placeholders(render([outline.messages[: leaf.message + 1]])[0])
            count = cut_order.count(i)  # of earlier turns, templates strip what need not be remembered
        if count != 1:
            what = "tool calls" if leaf.kind in ("argument", "number") else leaf.kind
            raise ValueError(
                f"the chat template writes the {what} of message {leaf.message + 1} ({role}) {count} times, not once"
            )
    for i, message in enumerate(outline.messages):
        if message.get("tool_calls") and not any(leaf.message == i and leaf.kind != "id" for leaf in outline.leaves):
            check_calls_are_written(outline.messages[: i + 1], render)


def check_calls_are_written(messages: list[Message], render: Render) -> None:
    """Tool calls without arguments hold no text whose absence would be noticed."""
    *earlier, last = messages
    without = {**last, "tool_calls": None, "content": last.get("content") or ""}
    with_calls = render([messages])[0]
    try:
        (text,) = render([[*earlier, without]])
    except ValueError:
        return
    if text == with_calls:
        raise ValueError(f"the chat template leaves out the tool calls of message {len(messages)}")


def learn_slots(outline: Outline, order: list[int], literals: list[str], gaps: list[str]) -> list[Slot]:
    """How the template writes each leaf. `gaps` are the literals where texts are padded: with what is left of it."""
    slots = [Slot(leaf) for leaf in order]
    for k, (literal, gap) in enumerate(zip(literals, gaps, strict=True)):
        before = slots[k - 1] if k > 0 else None
        after = slots[k] if k < len(slots) else None
        choice = fit_gap(literal, gap, before, after, outline.leaves)
        if choice is None:
            raise ValueError(f"the chat template changes whitespace at a text's ends: {literal!r} became {gap!r}")
        if before is not None:
            slots[k - 1] = choice[0]
        if after is not None:
            slots[k] = choice[1]
    return slots


def fit_gap(
    literal: str, gap: str, before: Slot | None, after: Slot | None, leaves: list[Leaf]
) -> tuple[Slot | None, Slot | None] | None:
    """`before` with its right end and `after` with its left end and its way of writing, so that padding explains how
    `literal` became `gap`. None if nothing does."""

    def candidates(slot: Slot | None, side: str) -> list[tuple[Slot | None, str]]:
        if slot is None or leaves[slot.leaf].kind in ("id", "number"):
            return [(slot, "")]
        ways = WAYS_TO_WRITE if side == "left" else (slot.write,)
        strip, padding = (str.lstrip, PADDING + LETTER) if side == "left" else (str.rstrip, LETTER + PADDING)
        return [
            (replace(slot, **{side: chars, "write": write}), write(strip(padding, chars)))
            for write in ways
            for chars in STRIPS
        ]

    for first, left_of_gap in candidates(before, "right"):
        for second, right_of_gap in candidates(after, "left"):
            if left_of_gap + literal + right_of_gap == gap:
                return first, second
    return None


@dataclass(frozen=True)
class GenerationPrompt:
    """What a template writes after the last text of a conversation: to prompt for an answer, or plainly."""

    text: str
    plain: str
    order: list[int]  # the leaves before that
    header: str = ""  # of a turn that has only a content

    @property
    def base(self) -> str:
        """The prompt up to where it opens the reasoning; some go on to close it, some turns go without."""
        opening = PROMPTED_REASONING.search(self.text)
        base = self.text[: opening.start()] if opening else self.text
        return base if base.strip() else self.text

    def find_header(self, literal: str) -> str:
        """What of `literal`, which leads up to a turn's first text, is before the turn. That is the prompt, or what
        it begins with. Between two turns there may be whitespace that the last turn of a conversation goes without."""
        candidates = [self.base, self.header]
        if self.text.startswith(self.plain) and literal.startswith(self.plain):
            spaces = literal[len(self.plain) :][: count_spaces(literal, len(self.plain))]
            candidates.append(self.plain + spaces + self.base.removeprefix(self.plain))
        for candidate in candidates:
            if candidate.strip() and literal.startswith(candidate):
                return candidate
        raise no_prompt(literal, self.text)

    def find_rests(self, header: str) -> tuple[str, ...]:
        """What of the prompt a turn can begin with, where it has `header` before it: all of it, or what opens the
        reasoning."""
        rest = self.text.removeprefix(header if self.text.startswith(header) else self.base)
        return tuple(filter(None, [rest, *(rest[: opening.end()] for opening in REASONING_OPENING.finditer(rest))]))


@dataclass(frozen=True)
class TurnLearner:
    """Learns where turns begin and end in one skeleton."""

    outline: Outline
    skeleton: Skeleton
    render: Render
    stops: Stops

    @cached_property
    def order(self) -> list[int]:
        return [slot.leaf for slot in self.skeleton.slots]

    @cached_property
    def tokens_that_end_users_turns(self) -> set[str]:
        """The special token that the template writes right after a user's text, where no other turn follows."""
        _, literals = split_at_placeholders(self.render([[{"role": "user", "content": OTHER_STAND_IN}]])[0])
        found = self.stops.special.match(literals[-1])
        return {found[0]} if found else set()

    def first_slot(self, message: int) -> int | None:
        """The first slot with a leaf of this message; None if there is none."""
        leaves = self.outline.leaves
        return next((k for k, leaf in enumerate(self.order) if leaves[leaf].message == message), None)

    def learn_other_turn(self, message: int) -> list[Turn]:
        """Its content and, if it has one, its end-of-turn token; no turn if it has no content."""
        leaves = self.outline.leaves
        slots = [k for k, i in enumerate(self.order) if (leaves[i].message, leaves[i].kind) == (message, "content")]
        if not slots:
            return []
        (slot,) = slots
        cut_order, cut = split_at_placeholders(self.render([self.outline.messages[: message + 1]])[0])
        literal = self.skeleton.literals[slot + 1]
        tokens = self.find_common_tokens(cut[-1], literal) if cut_order[-1:] == [self.order[slot]] else []
        end = tokens[0].end() if tokens else 0
        return [Turn(message, (slot, len(self.skeleton.literals[slot])), (slot + 1, end))]

    def learn_assistant_turn(self, message: int) -> Turn:
        cut = split_at_placeholders(self.render([self.outline.messages[: message + 1]])[0])
        first = self.first_slot(message)
        if message == 0:
            start, rests = self.learn_first_start(first or 0)
        else:
            start, rests = self.learn_start(message, first, cut)
        end = self.learn_end(message, first, start, cut)
        if end is not None:
            return Turn(message, start, end, rests)
        return Turn(message, start, (self.find_content(message) + 1, 0), rests, has_stop=False)

    def find_content(self, message: int) -> int:
        """The slot of the content of a turn that no token ends, so that it has to be the turn's end."""
        leaves = self.outline.leaves
        *_, last = [k for k, leaf in enumerate(self.order) if leaves[leaf].message == message]
        if leaves[self.order[last]].kind != "content":
            raise ValueError(f"message {message + 1} ends with tool calls, and the chat template writes no stop token")
        return last

    def learn_start(
        self, message: int, first: int | None, cut: tuple[list[int], list[str]]
    ) -> tuple[tuple[int, int], tuple[str, ...]]:
        """Where the turn begins, and with what of the prompt it can begin."""
        prompt = self.learn_prompt(self.outline.messages[:message], self.outline.messages[message], cut)
        if first is None:
            if prompt.order and self.order.count(prompt.order[-1]) > 1:
                raise ValueError(f"it is not certain where message {message + 1} begins: it has no text of its own")
            first = self.order.index(prompt.order[-1]) + 1 if prompt.order else 0
        if prompt.order[-1:] != self.order[:first][-1:]:
            raise ValueError(f"the chat template writes texts between the prompt for message {message + 1} and its own")
        literal = self.skeleton.literals[first]
        header = prompt.find_header(literal)
        return (first, len(header)), prompt.find_rests(header)

    def learn_prompt(
        self, context: list[Message], message: Message, cut: tuple[list[int], list[str]]
    ) -> "GenerationPrompt":
        """What prompts for the message that follows `context`, checked with a turn that has only a content."""
        (prompted,), (plain,) = self.render([context], generation_prompt=True), self.render([context])
        order, literals = split_at_placeholders(prompted)
        if set(message) > {"role", "content"} or not message.get("content"):
            standing_in = {"role": ASSISTANT, "content": STAND_IN}
            cut = split_at_placeholders(self.render([[*context, standing_in]])[0])
        at = len(cut[0]) - 1  # the content is the last text there is
        literal, prompt = cut[1][at], literals[-1]
        if at < 0 or cut[0][at] in order or cut[0][:at][-1:] != order[-1:]:
            raise no_prompt(literal, prompt)
        if prompted == plain and literal[len(prompt) :].strip():
            raise ValueError(
                "the chat template has no generation prompt, so the assistant's header cannot be told from its text"
                f" in {literal[len(prompt) :]!r}: let the template write the header when add_generation_prompt is set"
            )
        unknown = GenerationPrompt(prompt, split_at_placeholders(plain)[1][-1], order)
        header = literal if prompt.startswith(literal) else unknown.find_header(literal)
        return replace(unknown, header=header)

    def learn_first_start(self, first: int) -> tuple[tuple[int, int], tuple[str, ...]]:
        """Where a conversation begins with the assistant: after the header that would follow a user's turn."""
        user = {"role": "user", "content": OTHER_STAND_IN}
        standing_in = {"role": ASSISTANT, "content": STAND_IN}
        prompt = self.learn_prompt([user], standing_in, split_at_placeholders(self.render([[user, standing_in]])[0]))
        header = prompt.header.removeprefix(prompt.plain)
        literal = self.skeleton.literals[first]
        if not header or literal.count(header) != 1:
            raise no_prompt(literal, prompt.text)
        return (first, literal.index(header) + len(header)), prompt.find_rests(prompt.header)

    def learn_end(
        self, message: int, first: int | None, start: tuple[int, int], cut: tuple[list[int], list[str]]
    ) -> tuple[int, int] | None:
        """Where the turn ends: behind its end-of-turn token. None without one, if it may be missing."""
        if first is None:
            return self.find_end_of_silent_turn(message, start)
        order, literals = cut
        own = [leaf for leaf in order if self.outline.leaves[leaf].message == message]
        if not own or order[-1] != own[-1] or own.count(own[-1]) != 1:
            raise ValueError(f"it is not certain where message {message + 1} ends: the chat template repeats its texts")
        last = self.order.index(own[-1], first) if own[-1] in self.order[first:] else None
        if last is None:
            raise ValueError(f"the chat template leaves the end of message {message + 1} out of later conversations")
        end = self.learn_end_in_literal(message, literals[-1], self.skeleton.literals[last + 1], own[-1])
        return None if end is None else (last + 1, end)

    def learn_end_in_literal(self, message: int, cut: str, literal: str, last_leaf: int) -> int | None:
        """How much of `literal`, which follows the turn's last text, belongs to it; `cut` follows it if cut there."""
        turns = self.outline.messages[: message + 1]
        is_last = len(turns) == len(self.outline.messages)
        within = self.render_continued(turns, last_leaf) if is_last else literal
        end = self.find_end(cut, within, is_last=is_last)
        if end is None and not is_last and literal.startswith(cut) and not self.stops.special.search(cut):
            # no token ends this turn, but one would if a user followed
            end = self.find_end(cut, self.render_continued(turns, last_leaf), is_last=True)
        if end is None and not self.stops.may_be_missing:
            raise ValueError(
                f"the chat template writes no end-of-turn token after an assistant turn: {literal!r} within a"
                f" conversation, {cut!r} at its end; if a token that begins the next turn ends generation, the model's"
                " generation_config.json has to name it as eos_token_id; to train without, which does not teach the"
                " model to stop, add --allow-missing-stop-token"
            )
        return end

    def find_end_of_silent_turn(self, message: int, start: tuple[int, int]) -> tuple[int, int]:
        """The end of a turn that has no text, only calls without arguments: behind the first token that is known to
        end turns, since nothing else in it can have one."""
        index, offset = start
        enders = self.stops.known | self.tokens_that_end_users_turns
        while True:
            for found in self.stops.special.finditer(self.skeleton.literals[index], offset):
                if found[0] in enders:
                    return index, found.end()
            if index == len(self.order) or self.outline.leaves[self.order[index]].kind != "id":
                raise ValueError(f"the chat template writes no known end-of-turn token after message {message + 1}")
            index, offset = index + 1, 0

    def render_continued(self, messages: list[Message], last_leaf: int) -> str | None:
        """What follows the last text of `messages` if a user goes on; None if the template does not allow that."""
        user = {"role": "user", "content": OTHER_STAND_IN}
        try:
            order, literals = split_at_placeholders(self.render([[*messages, user]])[0])
        except ValueError:
            return None
        return literals[order.index(last_leaf) + 1] if last_leaf in order else None

    def find_common_tokens(self, cut: str, literal: str) -> list[re.Match[str]]:
        """The special tokens that begin both texts."""
        common = common_length(cut, literal)
        return [found for found in self.stops.special.finditer(cut) if found.end() <= common]

    def find_end(self, cut: str, within: str | None, *, is_last: bool) -> int | None:
        """How much of the text after an assistant's last text belongs to its turn; None if no token ends it.

        `cut` is that text where the conversation ends, `within` where it goes on: only what they share surely
        belongs to this turn. If that has no special token, the one that begins `within` may still be a stop token:
        if generation is known to end with it, or if it also ends users' turns.
        """
        tokens = self.find_common_tokens(cut, cut if within is None else within)
        if tokens:
            return next((token.end() for token in tokens if token[0] in self.stops.known), tokens[-1].end())
        stop = next((token for token in self.stops.special.finditer(cut) if token[0] in self.stops.known), None)
        if is_last and stop is not None:
            return stop.end()
        tail = cut[: stop.start()] if stop else cut.rstrip()
        if within is None or not within.startswith(tail):
            return None
        found = self.stops.special.match(within, len(tail) + count_spaces(within, len(tail)))
        if found is None or found[0] not in self.stops.known | self.tokens_that_end_users_turns:
            return None
        return len(tail) if is_last else found.end()


def no_prompt(literal: str, prompt: str) -> ValueError:
    return ValueError(
        f"the chat template begins an assistant turn with {literal!r}, but prompts for it with {prompt!r}"
    )


def common_length(a: str, b: str) -> int:
    """Of what both begin with."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def count_spaces(text: str, start: int) -> int:
    """Length of the whitespace at `start`."""
    return len(text) - start - len(text[start:].lstrip())


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


def read_bodies(text: str, outline: Outline, skeleton: Skeleton, render: Render) -> dict[int, str]:
    """What the template makes of each assistant turn that has texts."""
    turns = [
        turn
        for turn in sorted(skeleton.turns, key=lambda turn: turn.start)
        if outline.messages[turn.message]["role"] == ASSISTANT and turn.start[0] < turn.end[0]
    ]
    bodies = cut_bodies(text, skeleton, turns, [leaf.value for leaf in outline.leaves])
    if bodies is None:
        bodies = [read_body(outline, skeleton, turn, render) for turn in turns]
    return {turn.message: body for turn, body in zip(turns, bodies, strict=True) if body is not None}


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
    if any(not part or count_overlapping(rest, part) != between.count(part) for part in between):
        return None
    bodies = []
    for part in between:
        body, found, rest = rest.partition(part)
        if not found:
            return None
        bodies.append(body)
    return [*bodies, rest]


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
