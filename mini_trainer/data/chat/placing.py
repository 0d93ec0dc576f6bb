"""The rule of masks: all of an assistant message's text is in its turn, and all other text is outside.

Leaves have placeholders, so a skeleton shows where they are. Keys and constants of calls' arguments are located by
changing them. A conversation with a text in another place, or without it, is refused.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from mini_trainer.data.chat import conversation
from mini_trainer.data.chat.rendering import LIST_AS_IT_STANDS
from mini_trainer.data.chat.skeletons import MAX_NUM_REMEMBERED, Render, Skeleton, Turn, common_length
from mini_trainer.data.chat.turns import Stops


def check_rest(outline: conversation.Outline, stops: Stops) -> None:
    """Refuses text outside of leaves that looks like a placeholder or like a special token."""
    counts = Counter(int(a or b) for a, b in conversation.PLACEHOLDER.findall(outline.text))
    written_once = [i for i in range(len(outline.leaves)) if not outline.is_echoed(i)]
    if len(counts) != len(outline.leaves) or any(counts[i] != 1 for i in written_once):
        raise ValueError("contains text that looks like a placeholder used for masking")
    calls = [message["tool_calls"] for message in outline.messages if message.get("tool_calls")]
    if calls and (found := stops.special.search(json.dumps(calls, ensure_ascii=False, default=repr))):
        raise ValueError(f"has the special token {found[0]!r} in the name of a tool or argument")
    if calls and conversation.ANOTHER_TEXT in outline.text:
        raise ValueError(f"contains {conversation.ANOTHER_TEXT!r}, which is reserved for masking")


def check_completeness(outline: conversation.Outline, order: list[int], render: Render) -> list[tuple[int, int]]:
    """The names of calls that are only written as a part of the call's id, with that id. Refuses a template that
    repeats a text, or leaves out one that it would write in the last turn."""
    counts, cuts = Counter(order), {}
    named_by_id = []
    # the first written id of each call
    ids = {leaf.call: i for i, leaf in reversed([*enumerate(outline.leaves)]) if leaf.kind == "id" and counts[i]}
    for i, leaf in enumerate(outline.leaves):
        count, message = counts[i], outline.messages[leaf.message]
        if leaf.kind == "id" or (leaf.kind == "reasoning" and count == 0):
            continue
        if leaf.kind == "name":
            if message["role"] == conversation.ASSISTANT and count == 0:
                if leaf.call not in ids:
                    raise not_written(outline, i, 0)
                named_by_id.append((i, ids[leaf.call]))
            continue
        is_earlier = message["role"] == conversation.ASSISTANT and leaf.message < len(outline.messages) - 1
        if count == 0 and is_earlier and leaf.kind == "content":  # templates may drop contents of earlier turns
            if leaf.message not in cuts:
                cuts[leaf.message] = Counter(
                    conversation.split_at_placeholders(render([outline.messages[: leaf.message + 1]])[0])[0]
                )
            count = cuts[leaf.message][i]
        if count != 1:
            raise not_written(outline, i, count)
    for i, message in enumerate(outline.messages):
        if conversation.has_calls(message) and not all(has_name(call) for call in message["tool_calls"]):
            raise ValueError(f"message {i + 1} ({message['role']}) has a tool call without a name")
    return named_by_id


def not_written(outline: conversation.Outline, leaf: int, count: int) -> ValueError:
    kind, message = outline.leaves[leaf].kind, outline.leaves[leaf].message
    what = "tool calls" if kind in ("argument", "number", "name") else kind
    role = outline.messages[message]["role"]
    return ValueError(f"the chat template writes the {what} of message {message + 1} ({role}) {count} times, not once")


def has_name(call: Any) -> bool:
    return isinstance(call, dict) and ("name" in call or has_name(call.get("function")))


def check_names(skeleton: Skeleton, chat: conversation.PreparedChat) -> None:
    """Refuses calls whose names are not in their ids if the template writes only the ids."""
    for name, id in ((chat.outline.leaves[leaf] for leaf in leaves) for leaves in skeleton.named_by_id):
        if name.value not in id.value:
            raise ValueError(
                f"the chat template writes the id of a call of message {name.message + 1}, which is {id.value!r}, in"
                f" place of its name {name.value!r}: use ids that contain the name, such as 'functions.{name.value}:0'"
            )


def check_places(outline: conversation.Outline, skeleton: Skeleton) -> None:
    """Refuses a skeleton with a message's text in another's turn, or the assistant's outside of its own."""
    turns = sorted(skeleton.turns, key=lambda turn: turn.start)
    starts = [turn.start[0] for turn in turns]
    placed = set()
    for k, slot in enumerate(skeleton.slots):
        leaf, at = outline.leaves[slot.leaf], bisect_right(starts, k) - 1
        turn = turns[at] if at >= 0 and k < turns[at].end[0] else None
        role = outline.messages[leaf.message]["role"]
        if turn is not None and turn.message != leaf.message:
            raise ValueError(
                f"the chat template writes the {leaf.kind} of message {leaf.message + 1} ({role}) within the turn of"
                f" message {turn.message + 1}"
            )
        if turn is None and role == conversation.ASSISTANT and not outline.is_echoed(slot.leaf):
            raise ValueError(
                f"the chat template writes the {leaf.kind} of message {leaf.message + 1} outside of its turn"
            )
        if turn is not None:
            placed.add(slot.leaf)
        is_list = isinstance(outline.messages[leaf.message].get("content"), list) and leaf.kind == "content"
        if is_list and LIST_AS_IT_STANDS.search(skeleton.literals[k]):
            raise ValueError(
                f"the chat template does not support contents that are lists of parts, and prints that of message"
                f" {leaf.message + 1} as a list: write the content as text"
            )
    by_id = dict(skeleton.named_by_id)
    for i, leaf in enumerate(outline.leaves):
        if leaf.kind == "name" and outline.is_assistants(i) and by_id.get(i, i) not in placed:
            raise ValueError(
                f"the chat template writes the name of a call of message {leaf.message + 1} only outside of its turn"
            )


Call = tuple[int, int]  # index of its message, and its index in the message's calls
Place = tuple[int, int]  # characters [start, end) of an outline's rendering
T = TypeVar("T")
Stretch = tuple[Place, list[str]]  # a part of a turn, and the template's text between its leaves


@dataclass
class PlaceMemory:
    """Calls, with the template's text around them, whose keys and constants are known to be in their turn."""

    known: set[tuple[str, ...]] = field(default_factory=set)

    def check_arguments(self, outline: conversation.Outline, skeleton: Skeleton, render: Render, text: str) -> None:
        """Refuses a conversation with a key or constant of a call not written, or not in the message's turn. `text`:
        the outline's rendering."""
        forms = {}
        starts = [0, *(match.end() for match in conversation.PLACEHOLDER.finditer(text))]
        for call, stretches in find_stretches(outline, skeleton, starts).items():
            written = repr(outline.messages[call[0]]["tool_calls"][call[1]])
            # Its placeholders are replaced by words that do not depend on its place in the conversation.
            description = conversation.PLACEHOLDER.sub(lambda match: "text" if match[1] else "number", written)
            forms[call] = {(description, *literals): place for place, literals in stretches}
        if not (new := [call for call, by_form in forms.items() if self.known.isdisjoint(by_form)]):
            return
        places = ((turn.start, turn.end, turn.message) for turn in skeleton.turns)
        bounds = sorted((starts[i] + first, starts[j] + last, message) for (i, first), (j, last), message in places)
        prober = ArgumentProber(outline, render, text, bounds)
        prober.check_each(prober.find_problem_of_keys, new)
        prober.check_constants(new)
        if len(self.known) > MAX_NUM_REMEMBERED:
            self.known.clear()
        for call in new:
            holding = [
                form
                for form, (start, end) in forms[call].items()
                if all(start <= first and last <= end for first, last in prober.places[call])
            ]
            self.known.update(holding[:1])


def find_stretches(outline: conversation.Outline, skeleton: Skeleton, starts: list[int]) -> dict[Call, list[Stretch]]:
    """The place of each call in its message's turn, twice: from its first leaf, and from the leaf before, each to the
    next leaf that is not its own. Empty for calls without leaves. `starts`: see `cut_stretch`."""
    calls = [(i, k) for i, message in enumerate(outline.messages) for k in range(len(conversation.list_calls(message)))]
    turned = {turn.message for turn in skeleton.turns}
    stretches = {call: [] for call in calls if call[0] in turned}
    for turn in skeleton.turns:
        slots = defaultdict(list)
        for k in range(turn.start[0], turn.end[0]):
            leaf = outline.leaves[skeleton.slots[k].leaf]
            if leaf.message == turn.message and leaf.call >= 0:
                slots[calls[leaf.call]].append(k)
        for call, own in slots.items():
            last = own[-1] + 1
            stretches[call] = [cut_stretch(skeleton, turn, first, last, starts) for first in (own[0] + 1, own[0])]
    return stretches


def cut_stretch(skeleton: Skeleton, turn: Turn, first: int, last: int, starts: list[int]) -> Stretch:
    """The literals `first` to `last`, as far as they are in the turn. `starts`: the first character of each literal."""
    literals = skeleton.literals[first : last + 1]
    start = turn.start[1] if first == turn.start[0] else 0
    end = turn.end[1] if last == turn.end[0] else len(literals[-1])
    literals[-1] = literals[-1][:end]
    literals[0] = literals[0][start:]
    return (starts[first] + start, starts[last] + end), literals


@dataclass(frozen=True)
class ArgumentProber:
    """Changes keys and constants of an outline to locate them in its rendering, `text`. `bounds`: the turns in it.
    `places`: the located keys and constants of each call."""

    outline: conversation.Outline
    render: Render
    text: str
    bounds: list[tuple[int, int, int]]
    places: defaultdict[Call, list[Place]] = field(default_factory=lambda: defaultdict(list))

    def find_owner(self, start: int, end: int) -> int | None:
        """The message in whose turn the characters are; None outside of turns."""
        at = bisect_right(self.bounds, (start, len(self.text) + 1, 0)) - 1
        return None if at < 0 or end > self.bounds[at][1] else self.bounds[at][2]

    def get_call(self, call: Call) -> Any:
        message, number = call
        return self.outline.messages[message]["tool_calls"][number]

    def render_with(self, changed: dict[Call, Any]) -> str | ValueError:
        messages = list(self.outline.messages)
        for i in {message for message, _ in changed}:
            calls = [changed.get((i, number), call) for number, call in enumerate(messages[i]["tool_calls"])]
            messages[i] = {**messages[i], "tool_calls": calls}
        try:
            return self.render([messages])[0]
        except ValueError as error:
            return ValueError(f"a call of message {min(changed)[0] + 1} cannot be tried with other arguments: {error}")

    def check_each(self, find_problem: Callable[[Sequence[T]], ValueError | None], parts: Sequence[T]) -> None:
        """Checks all parts at once; if that fails, each alone."""
        if find_problem(parts) is not None:
            for part in parts:
                if (problem := find_problem([part])) is not None:
                    raise problem

    def find_problem_of_keys(self, calls: Sequence[Call]) -> ValueError | None:
        marked, first = {}, len(self.outline.leaves)
        owners: list[tuple[Call, str]] = []
        for call in calls:
            changed, keys = conversation.mark_keys(self.get_call(call), first + len(owners))
            if keys:
                marked[call] = changed
                owners += [(call, key) for key in keys]
        if not marked:
            return None
        if first + len(owners) > conversation.MAX_NUM_LEAVES:
            raise ValueError(f"has too many texts and arguments, allowed: at most {conversation.MAX_NUM_LEAVES:,}")
        rendered = self.render_with(marked)
        if isinstance(rendered, ValueError):
            return rendered
        unmarked, places, at, removed = [], {}, 0, 0
        for match in conversation.PLACEHOLDER.finditer(rendered):
            number = int(match[1] or match[2])
            if first <= number < first + len(owners):
                unmarked.append(rendered[at : match.start()])
                places.setdefault(number - first, []).append(match.start() - removed)
                removed += match.end() - match.start()
                at = match.end()
        if "".join([*unmarked, rendered[at:]]) != self.text:
            return ValueError(
                f"the chat template writes the call of message {min(marked)[0] + 1} differently with other keys"
            )
        for number, (call, key) in enumerate(owners):
            own = [(place, place + 1) for place in places.get(number, [])]
            if (problem := self.judge(call, f"the key {key!r}", own)) is not None:
                return problem
        return None

    def judge(self, call: Call, what: str, places: list[Place]) -> ValueError | None:
        message, _ = call
        self.places[call] += places
        if not places:
            return ValueError(f"the chat template leaves {what} out of a call of message {message + 1}")
        if any(self.find_owner(*place) != message for place in places):
            return ValueError(f"the chat template writes {what} of a call of message {message + 1} outside of its turn")
        return None

    def check_constants(self, calls: Sequence[Call]) -> None:
        """Checks one constant of each message at a time."""
        by_message = defaultdict(list)
        for call in calls:
            by_message[call[0]] += [(call, *constant) for constant in conversation.list_constants(self.get_call(call))]
        for round in zip_longest(*by_message.values()):
            self.check_each(self.find_problem_of_constants, [change for change in round if change is not None])

    def find_problem_of_constants(self, changes: Sequence[tuple[Call, Any, Any]]) -> ValueError | None:
        rendered = self.render_with({call: changed for call, _, changed in changes})
        if isinstance(rendered, ValueError):
            return rendered
        if (places := find_differences(self.text, rendered)) is None:
            which = f"message {changes[0][0][0] + 1}"
            return ValueError(f"the chat template writes a call of {which} differently with other arguments")
        for call, value, _ in changes:
            own = [place for place in places if len(changes) == 1 or self.find_owner(*place) == call[0]]
            if (problem := self.judge(call, f"the argument {json.dumps(value)}", own)) is not None:
                return problem
        others = {message for (message, _), _, _ in changes}
        if any(self.find_owner(*place) not in others for place in places):
            return ValueError("the chat template writes an argument of a call outside of its turn")
        return None


def find_differences(text: str, other: str) -> list[Place] | None:
    """The parts [start, end) of `text` that differ in `other`, one per literal; None if the placeholders differ."""
    order, literals = conversation.split_at_placeholders(text)
    other_order, other_literals = conversation.split_at_placeholders(other)
    if order != other_order:
        return None
    starts = [0, *(match.end() for match in conversation.PLACEHOLDER.finditer(text))]
    places = []
    for start, literal, changed in zip(starts, literals, other_literals, strict=True):
        if literal != changed:
            first = common_length(literal, changed)
            same = common_length(literal[first:][::-1], changed[first:][::-1])
            places.append((start + first, start + len(literal) - same))
    return places
