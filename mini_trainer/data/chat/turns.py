"""Bounds of assistant turns in a skeleton: from the end of the generation prompt to the end of the stop token.

The prompt and the end are learned from renderings that are cut before and after the turn, and remembered by the
template's text there, so that a long conversation of similar turns costs few renderings.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mini_trainer.data.chat import conversation, reasoning
from mini_trainer.data.chat.conversation import Message, Outline, is_simple
from mini_trainer.data.chat.skeletons import MAX_NUM_REMEMBERED, Render, Skeleton, Turn, common_length


class UnknownPrompt(ValueError):
    """The template's `prompt` for a turn, its text after the last message, is not the turn's beginning."""

    def __init__(self, message: str, prompt: str) -> None:
        super().__init__(message)
        self.prompt = prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownPrompt, (*self.args, self.prompt), self.__dict__  # pickle would call it with `args` alone


@dataclass(frozen=True)
class Stops:
    """Tokens that end turns: `special` matches any special token, `known` are those that end generation. With
    `may_be_missing` a turn without one ends with its content."""

    special: re.Pattern[str]
    known: frozenset[str]
    may_be_missing: bool = False

    def trim(self, text: str, start: int, end: int) -> int:
        """The end of text[start:end] without whitespace after its last special token."""
        *_, last = [None, *self.special.finditer(text, start, end)]
        return end if last is None or text[last.end() : end].strip() else last.end()


def find_stops(tokenizer: Any, stop_token_ids: Sequence[int]) -> Stops:
    """The tokenizer's special tokens, longest match first, and those that end generation."""
    added = tokenizer.added_tokens_decoder
    known = {tokenizer.eos_token, *(added[id].content for id in stop_token_ids if id in added)} - {None}
    special = {token.content for token in added.values() if token.special} | known
    longest_first = sorted(special, key=lambda token: (-len(token), token))
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) never matches
    return Stops(pattern, frozenset(known))


@dataclass(frozen=True)
class GenerationPrompt:
    """The template's text after a conversation's last text, with (`text`) and without (`plain`) a generation prompt."""

    text: str
    plain: str
    order: list[int]  # the leaves before it
    header: str = ""  # header of a turn that has only a content

    @property
    def base(self) -> str:
        """The prompt without the reasoning that it opens (and may close), which some turns lack."""
        opening = reasoning.PROMPTED.search(self.text)
        base = self.text[: opening.start()] if opening else self.text
        return base if base.strip() else self.text

    def find_header(self, literal: str) -> str:
        """The part of `literal`, the text before a turn's first text, that precedes the turn: the prompt or a prefix of
        it. Whitespace between two turns may be missing after the last turn of a conversation."""
        candidates = [self.base, self.header]
        if self.text.startswith(self.plain) and literal.startswith(self.plain):
            spaces = literal[len(self.plain) :][: count_spaces(literal, len(self.plain))]
            candidates.append(self.plain + spaces + self.base.removeprefix(self.plain))
        for candidate in candidates:
            if candidate.strip() and literal.startswith(candidate):
                return candidate
        added = self.base.removeprefix(self.plain) if self.text.startswith(self.plain) else ""
        if added.strip() and literal.count(added) == 1:  # the text before it can differ in whitespace
            return literal[: literal.index(added) + len(added)]
        raise no_prompt(literal, self.text)

    def find_rests(self, header: str) -> tuple[str, ...]:
        """The prompt's parts that can begin a turn after `header`: all the rest, or up to where reasoning opens."""
        rest = self.text.removeprefix(header if self.text.startswith(header) else self.base)
        return tuple(filter(None, [rest, *(rest[: opening.end()] for opening in reasoning.OPENING.finditer(rest))]))


@dataclass
class TurnMemory:
    """Known starts and ends of turns, by the template's text there and by their surroundings."""

    starts: dict[tuple[object, ...], tuple[int, tuple[str, ...], str | None]] = field(default_factory=dict)
    ends: dict[tuple[object, ...], tuple[int, int] | None] = field(default_factory=dict)

    def make_room(self) -> None:
        for known in (self.starts, self.ends):
            if len(known) > MAX_NUM_REMEMBERED:
                known.clear()


@dataclass(frozen=True)
class TurnLearner:
    """Learns where turns begin and end in one skeleton."""

    outline: Outline
    skeleton: Skeleton
    render: Render
    stops: Stops
    memory: TurnMemory

    @cached_property
    def order(self) -> list[int]:
        return [slot.leaf for slot in self.skeleton.slots]

    @cached_property
    def slots_by_message(self) -> dict[int, list[int]]:
        slots: dict[int, list[int]] = {}
        for k, leaf in enumerate(self.order):
            slots.setdefault(self.outline.leaves[leaf].message, []).append(k)
        return slots

    def stand_in(self, role: str, text: str) -> Message:
        """A message to replace another, with its content in the form of this conversation's contents."""
        has_parts = any(isinstance(message.get("content"), list) for message in self.outline.messages)
        return {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text}

    @cached_property
    def tokens_that_end_users_turns(self) -> set[str]:
        """The special token that the template writes directly after a user's text if no other turn follows."""
        user = self.stand_in("user", conversation.OTHER_STAND_IN)
        _, literals = conversation.split_at_placeholders(self.render([[user]])[0])
        found = self.stops.special.match(literals[-1].lstrip())
        return {found[0]} if found else set()

    def render_cut(self, message: int) -> tuple[list[int], list[str]]:
        """Leaves and literals of the conversation up to and including this message."""
        return conversation.split_at_placeholders(self.render([self.outline.messages[: message + 1]])[0])

    def learn_other_turn(self, message: int) -> list[Turn]:
        """The message's content and, if it has one, its end-of-turn token; no turn if it has no content."""
        leaves = self.outline.leaves
        slots = [k for k in self.slots_by_message.get(message, []) if leaves[self.order[k]].kind == "content"]
        if not slots:
            return []
        first, last = slots[0], slots[-1]
        cut_order, cut = self.render_cut(message)
        literal = self.skeleton.literals[last + 1]
        tokens = self.find_common_tokens(cut[-1], literal) if cut_order[-1:] == [self.order[last]] else []
        end = tokens[0].end() if tokens else 0
        return [Turn(message, (first, len(self.skeleton.literals[first])), (last + 1, end))]

    def learn_assistant_turn(self, message: int) -> Turn:
        self.memory.make_room()
        start, rests, prompt = self.learn_start(message)
        if (end := self.learn_end(message, start)) is not None:
            return Turn(message, start, end, rests, prompt=prompt)
        last = self.slots_by_message[message][-1]
        if self.outline.leaves[self.order[last]].kind != "content":
            raise ValueError(f"message {message + 1} ends with tool calls, and the chat template writes no stop token")
        return Turn(message, start, (last + 1, 0), rests, prompt=prompt)

    def learn_start(self, message: int) -> tuple[tuple[int, int], tuple[str, ...], str | None]:
        """The turn's start, the parts of the prompt that it can begin with, and the prompt's text after the last
        message; None without a prompt."""
        own = self.slots_by_message.get(message)
        if message == 0:
            return *self.learn_start_after_header(own[0] if own else 0), None
        if own is None:
            return self.learn_start_after_prompt(message, None)
        key = self.describe_start(message, own[0])
        if key not in self.memory.starts:
            (_, length), rests, prompt = self.learn_start_before(message, own[0])
            self.memory.starts[key] = length, rests, prompt
        length, rests, prompt = self.memory.starts[key]
        return (own[0], length), rests, prompt

    def describe_start(self, message: int, first: int) -> tuple[object, ...]:
        """A key of everything that the beginning of a turn depends on."""
        messages, leaves = self.outline.messages, self.outline.leaves
        before = [(m["role"], conversation.has_calls(m)) for m in messages[max(0, message - 3) : message]]
        neighbours = [(leaves[i].kind, leaves[i].message - message) for i in self.order[max(first - 1, 0) : first + 1]]
        has_system = messages[0]["role"] != "user"
        return (self.skeleton.literals[first], *neighbours, *before, has_system, is_simple(messages[message]))

    def learn_start_before(self, message: int, first: int) -> tuple[tuple[int, int], tuple[str, ...], str | None]:
        """The start of a turn whose first text is in this slot: after its prompt, or, if the template does not prompt
        after an assistant's message, after the header that would follow a user's."""
        try:
            return self.learn_start_after_prompt(message, first)
        except UnknownPrompt as error:
            if self.outline.messages[message - 1]["role"] == "user":
                raise
            try:
                return *self.learn_start_after_header(first), error.prompt
            except ValueError:
                raise error from None

    def learn_start_after_prompt(self, message: int, first: int | None) -> tuple[tuple[int, int], tuple[str, ...], str]:
        prompt = self.learn_prompt(self.outline.messages[:message], self.outline.messages[message])
        if first is None:
            if prompt.order and self.order.count(prompt.order[-1]) > 1:
                raise ValueError(f"it is not certain where message {message + 1} begins: it has no text of its own")
            first = self.order.index(prompt.order[-1]) + 1 if prompt.order else 0
        if prompt.order[-1:] != self.order[:first][-1:]:
            raise ValueError(f"the chat template writes texts between the prompt for message {message + 1} and its own")
        header = prompt.find_header(self.skeleton.literals[first])
        return (first, len(header)), prompt.find_rests(header), prompt.text

    def learn_prompt(self, context: list[Message], message: Message) -> GenerationPrompt:
        """The prompt for the message that follows `context`, checked with a turn that has only a content."""
        (prompted,), (plain,) = self.render([context], generation_prompt=True), self.render([context])
        order, literals = conversation.split_at_placeholders(prompted)
        follower = message if is_simple(message) else self.stand_in(conversation.ASSISTANT, conversation.STAND_IN)
        cut_order, cut = conversation.split_at_placeholders(self.render([[*context, follower]])[0])
        at = len(cut_order) - 1  # the content is the last text
        literal, prompt = cut[at], literals[-1]
        if at < 0 or cut_order[at] in order or cut_order[:at][-1:] != order[-1:]:
            raise no_prompt(literal, prompt)
        if prompted == plain and literal[len(prompt) :].strip():
            raise not_prompted(context[-1]["role"], literal[len(prompt) :], prompt)
        unknown = GenerationPrompt(prompt, conversation.split_at_placeholders(plain)[1][-1], order)
        header = literal if prompt.startswith(literal) else unknown.find_header(literal)
        return replace(unknown, header=header)

    def learn_start_after_header(self, first: int) -> tuple[tuple[int, int], tuple[str, ...]]:
        """The start of a turn without a prompt, such as a conversation's first message: after the header that would
        follow a user's turn."""
        user = self.stand_in("user", conversation.OTHER_STAND_IN)
        prompt = self.learn_prompt([user], self.stand_in(conversation.ASSISTANT, conversation.STAND_IN))
        literal = self.skeleton.literals[first]
        for whole in dict.fromkeys((prompt.header, prompt.base)):
            at = common_length(prompt.plain, whole)  # the header begins there, or with a special token around it
            at = next((t.start() for t in self.stops.special.finditer(whole) if t.start() < at < t.end()), at)
            header = whole[at:]
            if header.strip() and literal.count(header) == 1:
                return (first, literal.index(header) + len(header)), prompt.find_rests(whole)
        raise no_prompt(literal, prompt.text)

    def learn_end(self, message: int, start: tuple[int, int]) -> tuple[int, int] | None:
        """The turn's end, after its end-of-turn token. None if that is missing and may be."""
        if (own := self.slots_by_message.get(message)) is None:
            return self.find_end_of_silent_turn(message, start)
        last_new, key, before = self.describe_end(message, own)
        if key not in self.memory.ends:
            end = self.learn_end_by_cut(message, own)
            known = None if end is None else (end[0] - last_new, end[1] - (before if end[0] == last_new + 1 else 0))
            if known is not None and end[0] == last_new + 1 and known[1] < 0:
                return end  # within text that depends on the call's keys, so it cannot be remembered
            self.memory.ends[key] = known
        if (known := self.memory.ends[key]) is None:
            return None
        return last_new + known[0], known[1] + (before if known[0] == 1 else 0)

    def describe_end(self, message: int, own: list[int]) -> tuple[int, tuple[object, ...], int]:
        """The last slot with a new leaf of the message, a key of everything that the turn's end depends on, and the
        number of characters before the first special token after that slot.

        Repeated names and ids may follow that slot, up to another message's text. The text before the special token
        contains the keys of a call, which are left out of the key.
        """
        leaves, seen, last_new = self.outline.leaves, set(), own[0]
        for k in own:
            if self.order[k] not in seen:
                seen.add(self.order[k])
                last_new = k
        after = last_new + 1
        while after < len(self.order) and self.outline.is_echoed(self.order[after]):
            after += 1
        kinds = [(leaves[leaf].kind, leaves[leaf].message == message) for leaf in self.order[last_new : after + 1]]
        following = [m["role"] for m in self.outline.messages[message + 1 : message + 2]]
        calls = conversation.has_calls(self.outline.messages[message])
        literal, *others = self.skeleton.literals[last_new + 1 : after + 1]
        found = self.stops.special.search(literal)
        before = found.start() if found else 0
        start = literal[:before]
        if start.count('"') >= 2:  # a key needs two quotes
            for call in conversation.list_calls(self.outline.messages[message]):
                for key in conversation.mark_keys(call, 0)[1]:
                    start = start.replace(json.dumps(key, ensure_ascii=False), '"key"')
        return last_new, (start, literal[before:], *others, *kinds, *following, calls), before

    def learn_end_by_cut(self, message: int, own: list[int]) -> tuple[int, int] | None:
        order, literals = self.render_cut(message)
        cut_own = [leaf for leaf in order if self.outline.leaves[leaf].message == message]
        if not cut_own or order[-1] != cut_own[-1]:
            raise ValueError(f"it is not certain where message {message + 1} ends: the chat template repeats its texts")
        leaves, here = self.outline.leaves, {self.order[k] for k in own}
        # Reasoning may be left out if the conversation continues: the turn then ends as it does without.
        remaining = {leaf for leaf in cut_own if leaf in here or leaves[leaf].kind != "reasoning"}
        ends = [self.find_last(leaf, cut_own, own) for leaf in remaining]
        if cut_own[-1] not in remaining or None in ends:
            raise ValueError(f"the chat template leaves the end of message {message + 1} out of later conversations")
        last = max(ends)
        cut, literal = literals[-1], self.skeleton.literals[last + 1]
        is_ended = self.stops.special.search(cut) is not None and literal.startswith(cut.rstrip())
        if not is_ended:  # some write ids only before a result
            known_ids = [k for k in own if leaves[self.order[k]].kind == "id" and self.order[k] not in cut_own]
            last = max([last, *(k for k in known_ids if k == last + 1)])
        end = self.learn_end_in_literal(message, cut, self.skeleton.literals[last + 1], cut_own[-1])
        return None if end is None else (last + 1, end)

    def find_last(self, leaf: int, cut_own: list[int], own: list[int]) -> int | None:
        """The leaf's last slot within its turn, which has it as often as a conversation cut there."""
        slots, count = [k for k in own if self.order[k] == leaf], cut_own.count(leaf)
        if count > 1 and not self.outline.is_echoed(leaf):
            return None
        return slots[count - 1] if len(slots) >= count else None

    def learn_end_in_literal(self, message: int, cut: str, literal: str, last_leaf: int) -> int | None:
        """Number of characters of `literal`, the text after the turn's last text, that belong to the turn; `cut`: that
        text in a conversation cut there."""
        turns = self.outline.messages[: message + 1]
        is_last = len(turns) == len(self.outline.messages)
        end = self.find_end(cut, self.render_continued(turns, last_leaf) if is_last else literal, is_last=is_last)
        if end is None and not is_last and literal.startswith(cut) and not self.stops.special.search(cut):
            # no token ends this turn, but one would if a user's turn followed
            end = self.find_end(cut, self.render_continued(turns, last_leaf), is_last=True)
        if end is None and not is_last:
            end = self.find_end_after_ids(cut, literal)
        if end is None and not self.stops.may_be_missing:
            raise ValueError(
                f"the chat template writes no end-of-turn token after an assistant turn: {literal!r} within a"
                f" conversation, {cut!r} at its end; if a token that begins the next turn ends generation, the model's"
                " generation_config.json has to name it as eos_token_id; to append a stop token to conversations, pass"
                " --missing-stop-token append; to train without, which does not teach the model to stop, pass"
                " --missing-stop-token allow"
            )
        return end

    def find_end_after_ids(self, cut: str, literal: str) -> int | None:
        """Number of characters of `literal` that belong to a turn that ends like `cut`, but with a call's id before."""
        found = self.stops.special.search(literal)
        enders = self.stops.known | self.tokens_that_end_users_turns
        if found is None or found[0] not in enders or not cut.strip() or self.stops.special.search(cut):
            return None
        return found.end() if literal[: found.start()].rstrip().endswith(cut.rstrip()) else None

    def find_end_of_silent_turn(self, message: int, start: tuple[int, int]) -> tuple[int, int]:
        """The end of a turn without text, only calls without arguments: after the first token known to end turns, since
        nothing else in the turn can contain one."""
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
        """The text after the last text of `messages` if a user's turn follows; None if the template refuses that."""
        user = self.stand_in("user", conversation.OTHER_STAND_IN)
        try:
            order, literals = conversation.split_at_placeholders(self.render([[*messages, user]])[0])
        except ValueError:
            return None
        slots = [k for k, leaf in enumerate(order) if leaf == last_leaf]
        return literals[slots[-1] + 1] if slots else None

    def find_common_tokens(self, cut: str, literal: str) -> list[re.Match[str]]:
        """The special tokens that begin both texts."""
        common = common_length(cut, literal)
        return [found for found in self.stops.special.finditer(cut) if found.end() <= common]

    def find_end(self, cut: str, within: str | None, *, is_last: bool) -> int | None:
        """Number of characters after an assistant's last text that belong to its turn; None if no token ends it.

        `cut` is that text if the conversation ends there, `within` if it continues: only their common prefix surely
        belongs to this turn. If that has no special token, the one that begins `within` may still be a stop token: if
        it is known to end generation, or also ends users' turns.
        """
        if tokens := self.find_common_tokens(cut, cut if within is None else within):
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


def no_prompt(literal: str, prompt: str) -> UnknownPrompt:
    message = f"the chat template begins an assistant turn with {literal!r}, but prompts for it with {prompt!r}"
    return UnknownPrompt(message, prompt)


def not_prompted(role: str, literal: str, prompt: str) -> UnknownPrompt:
    if role == "user":
        return UnknownPrompt(
            "the chat template has no generation prompt, so the assistant's header cannot be distinguished from its"
            f" text in {literal!r}: let the template write the header if add_generation_prompt is set",
            prompt,
        )
    return UnknownPrompt(
        f"the chat template writes no generation prompt after a message of the role {role}, and begins the assistant's"
        f" turn there with {literal!r}, not with the header that follows a user's message",
        prompt,
    )


def count_spaces(text: str, start: int) -> int:
    """Length of the whitespace at `start`."""
    return len(text) - start - len(text[start:].lstrip())
