"""Locates the turns of a conversation in its rendering, and the passages to train."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mini_trainer.data.chat import conversation, rendering, skeletons
from mini_trainer.data.chat.conversation import Chat, Located, Message, Outline, Passage, PreparedChat
from mini_trainer.data.chat.placing import PlaceMemory, check_completeness, check_names, check_places, check_rest
from mini_trainer.data.chat.prompting import PromptMatcher, find_unread_keys
from mini_trainer.data.chat.skeletons import Beginning, Render, Skeleton, SlotMemory, Span, Turn
from mini_trainer.data.chat.turns import Stops, TurnLearner, TurnMemory

MAX_NUM_SKELETONS = 4096  # bounds memory if every conversation has its own outline
MAX_NUM_SLOTS = 250_000  # of all skeletons: some 100 MB where long conversations have outlines of their own


def describe_beginnings(outline: Outline, skeleton: Skeleton) -> None:
    """Sets `beginning` and `lacks_reasoning` of the skeleton's assistant turns."""
    written = {slot.leaf for slot in skeleton.slots}
    reasoning: dict[int, list[int]] = {}  # by message, under any of its keys
    for i, leaf in enumerate(outline.leaves):
        if leaf.kind == "reasoning":
            reasoning.setdefault(leaf.message, []).append(i)
    lacking = {message for message, own in reasoning.items() if written.isdisjoint(own)}
    skeleton.turns[:] = [
        replace(turn, beginning=describe_beginning(turn, outline, skeleton), lacks_reasoning=turn.message in lacking)
        if outline.messages[turn.message]["role"] == conversation.ASSISTANT
        else turn
        for turn in skeleton.turns
    ]


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


@dataclass(frozen=True)
class SkeletonLearner:
    """Learns skeletons of one template, with or without tools. Remembers the parts of conversations that it knows."""

    stops: Stops
    slots: SlotMemory = field(default_factory=SlotMemory)
    turns: TurnMemory = field(default_factory=TurnMemory)
    places: PlaceMemory = field(default_factory=PlaceMemory)

    def learn(self, outline: Outline, *, unmasked: set[int], render: Render) -> Skeleton:
        """The skeleton of `outline`, with the turns that can be trained: the assistant's, and the messages in
        `unmasked`. Raises ValueError if the template leaves out, repeats or displaces a text, writes it in an unknown
        way, or if an assistant's turn does not begin with the generation prompt or has no end-of-turn token."""
        text, skeleton = self.start(outline, render)
        if (divided := divide_turns(outline, [slot.leaf for slot in skeleton.slots])) is None:
            self.learn_turns(outline, skeleton, text, unmasked=unmasked, render=render)
        else:
            divided_outline, original = divided
            if render([divided_outline.messages]) != [text]:
                raise ValueError(
                    "the chat template writes other messages within an assistant's turn: move the content to a message"
                    " of its own, after the results of the calls"
                )
            parts = {i for i, message in enumerate(original) if message in unmasked}
            self.learn_turns(divided_outline, skeleton, text, unmasked=parts, render=render)
            skeleton.turns[:] = [replace(turn, message=original[turn.message]) for turn in skeleton.turns]
        describe_beginnings(outline, skeleton)
        return skeleton

    def start(self, outline: Outline, render: Render) -> tuple[str, Skeleton]:
        """The outline's rendering, and its skeleton without turns."""
        check_rest(outline, self.stops)
        try:
            (text,) = render([outline.messages])
        except ValueError as error:
            raise ValueError(f"{error}; tried with placeholder texts and names, to locate them") from None
        order, literals = conversation.split_at_placeholders(text)
        if any(leaf >= len(outline.leaves) for leaf in order):
            raise ValueError("the chat template writes text that looks like a placeholder used for masking")
        named_by_id = check_completeness(outline, order, render)

        def pad() -> list[str]:
            padded_order, gaps = conversation.split_at_placeholders(render([skeletons.pad_outline(outline)])[0])
            if order != padded_order:
                raise ValueError("the chat template writes other texts, or reorders them, if whitespace surrounds them")
            return gaps

        return text, Skeleton(literals, self.slots.learn_slots(outline, order, literals, pad), [], named_by_id)

    def learn_turns(
        self, outline: Outline, skeleton: Skeleton, text: str, *, unmasked: set[int], render: Render
    ) -> None:
        """Adds the turns to the skeleton, and checks that every text is in the right turn."""
        learner = TurnLearner(outline, skeleton, render, self.stops, self.turns)
        for i, message in enumerate(outline.messages):
            if message["role"] == conversation.ASSISTANT:
                skeleton.turns.append(learner.learn_assistant_turn(i))
            elif i in unmasked:
                skeleton.turns.extend(learner.learn_other_turn(i))
        check_places(outline, skeleton)
        self.places.check_arguments(outline, skeleton, render, text)

    def learn_marked(self, outline: Outline, marked: list[tuple[int, int]], text: str, *, render: Render) -> Skeleton:
        """The skeleton of an outline whose turns are the passages `marked` of its rendering `text`, which the template
        marks as generated, without their part in the generation prompt."""
        rendered, skeleton = self.start(outline, render)
        if rendered != text:
            raise ValueError("the chat template writes different text when it marks generated passages")
        assistants = [i for i, message in enumerate(outline.messages) if message["role"] == conversation.ASSISTANT]
        learner = TurnLearner(outline, skeleton, render, self.stops, self.turns)
        for i, (first, last) in zip(assistants, marked, strict=True):
            mark, end = locate(text, first), locate(text, self.stops.trim(text, first, last))
            try:
                start, rests, prompt = learner.learn_start(i)
            except ValueError:  # there may be no generation prompt; the marks alone bound the turn then
                start, rests, prompt = mark, (), None
            header, start = start, max(mark, start)
            num_skipped = start[1] - mark[1] if start[0] == mark[0] else None
            skeleton.turns.append(Turn(i, start, end, rests, prompt=prompt, num_skipped=num_skipped, header=header))
        describe_beginnings(outline, skeleton)
        check_places(outline, skeleton)
        self.places.check_arguments(outline, skeleton, render, text)
        return skeleton


def locate(text: str, at: int) -> tuple[int, int]:
    """The literal that holds character `at` of an outline's rendering, and the offset into it."""
    _, literals = conversation.split_at_placeholders(text)
    starts = [0, *(match.end() for match in conversation.PLACEHOLDER.finditer(text))]
    k = bisect_right(starts, at) - 1
    if at > starts[k] + len(literals[k]):
        raise ValueError("the chat template marks a part of a text as generated")
    return k, at - starts[k]


def divide_turns(outline: Outline, order: list[int]) -> tuple[Outline, list[int]] | None:
    """The conversation with each content that follows the results of its message's calls (Gemma 4) as a message of its
    own, after the results; and the original index of each message. None if there is no such content."""
    if not (divided := find_divided(outline, order)):
        return None
    contents_at = {}  # index of a message -> the message whose content comes before it
    for i in divided:
        j = i + 1
        while j < len(outline.messages) and outline.messages[j]["role"] == "tool":
            j += 1
        contents_at[j] = i
    messages: list[Message] = []
    original: list[int] = []
    for i, message in enumerate([*outline.messages, None]):
        if i in contents_at:
            messages.append({"role": conversation.ASSISTANT, "content": outline.messages[contents_at[i]]["content"]})
            original.append(contents_at[i])
        if message is not None:
            messages.append({key: message[key] for key in message if not (i in divided and key == "content")})
            original.append(i)
    last = {i: place for place, i in enumerate(original)}  # of a divided message: its content
    first = {i: original.index(i) for i in last}
    places = [(last if leaf.kind == "content" else first)[leaf.message] for leaf in outline.leaves]
    leaves = [replace(leaf, message=place) for leaf, place in zip(outline.leaves, places, strict=True)]
    return Outline(messages, leaves), original


def find_divided(outline: Outline, order: list[int]) -> set[int]:
    """The messages with calls whose content follows another message's text."""
    called: dict[int, int] = {}  # message -> slot of its first call
    latest: list[tuple[int, int]] = []  # the last two messages with a text, and its slot
    divided = set()
    for k, leaf in enumerate(order):
        message, kind = outline.leaves[leaf].message, outline.leaves[leaf].kind
        if kind == "name" and outline.is_assistants(leaf):
            called.setdefault(message, k)
        if outline.is_echoed(leaf):
            continue
        if kind == "content" and any(m != message and at > called.get(message, k) for m, at in latest):
            divided.add(message)
        latest = [(message, k), *(spoke for spoke in latest if spoke[0] != message)][:2]
    return divided


class TurnFinder:
    """Finds turns in texts of `renderer`. Invariant: its skeletons were learned from that template, with `stops`."""

    def __init__(self, renderer: rendering.ChatRenderer, stops: Stops) -> None:
        self.renderer, self.stops = renderer, stops
        self.skeletons: dict[tuple[Any, ...], Skeleton] = {}
        self.num_slots = 0  # total over `skeletons`
        self.written_tools: set[tuple[Any, ...]] = set()  # tools, with the roles of a chat, that the template writes
        self.learners = {has_tools: SkeletonLearner(self.stops) for has_tools in (False, True)}

    def find_spans(self, text: str, chat: PreparedChat) -> list[Span]:
        """The spans of the turns in a rendered chat."""
        render = partial(self.renderer.render, tools=chat.tools)
        skeleton = self.find_skeleton(chat, render)
        if (spans := skeleton.find_spans(text, chat.values)) is None:
            spans = rendering.catch_error(skeletons.match_text, text, chat.outline, skeleton, render=render)
        if isinstance(spans, ValueError):
            spans = self.find_spans_alone(text, chat, render, spans)
        check_names(skeleton, chat)
        return spans

    def find_spans_alone(self, text: str, chat: PreparedChat, render: Render, error: ValueError) -> list[Span]:
        """`find_spans` with a skeleton for this row alone, for templates that write other parts differently depending
        on the texts of roles other than the assistant. Raises `error` if that does not help."""
        outline = conversation.make_outline(chat.messages, only=conversation.ASSISTANT)
        if chat.unmasked or outline.text == chat.outline.text:
            raise error
        try:
            skeleton = SkeletonLearner(self.stops).learn(outline, unmasked=set(), render=render)
            return skeletons.match_text(text, outline, skeleton, render=render)
        except ValueError:
            raise error from None

    def find_skeleton(self, chat: PreparedChat, render: Render, *, is_marked: bool = False) -> Skeleton:
        """The chat's skeleton, learned once per outline; with the turns that the template marks if it `is_marked`."""
        key = ("marked", *chat.key) if is_marked else chat.key
        if key not in self.skeletons:
            self.check_tools_are_written(chat, render)
            learner = self.learners[bool(chat.tools)]
            if is_marked:
                rendered = self.renderer.render_one(chat.outline.messages, tools=chat.tools)
                check_num_marked(rendered.marked or [], chat.messages)
                skeleton = learner.learn_marked(chat.outline, rendered.marked or [], rendered.text, render=render)
            else:
                skeleton = learner.learn(chat.outline, unmasked=chat.unmasked, render=render)
            if len(self.skeletons) >= MAX_NUM_SKELETONS or self.num_slots >= MAX_NUM_SLOTS:
                self.skeletons.clear()
                self.num_slots = 0
            self.skeletons[key] = skeleton
            self.num_slots += len(skeleton.slots)
        return self.skeletons[key]

    def check_tools_are_written(self, chat: PreparedChat, render: Render) -> None:
        """Refuses a template that leaves out the tools, which can depend on the roles, the first and the last one."""
        if not chat.tools:
            return
        roles = [message["role"] for message in chat.messages]
        key = (chat.tools_text, roles[0], roles[-1], frozenset(roles))
        messages = chat.outline.messages
        if key not in self.written_tools and rendering.catch_error(
            self.renderer.render, [messages]
        ) == rendering.catch_error(render, [messages]):
            raise ValueError(rendering.WITHOUT_TOOLS)
        if len(self.written_tools) >= MAX_NUM_SKELETONS:
            self.written_tools.clear()
        self.written_tools.add(key)

    def find_marked_spans(self, text: str, marked: list[tuple[int, int]], chat: PreparedChat) -> list[Span]:
        """The turns of the passages that the template marks as generated, without the text of the generation prompt
        and without whitespace after the stop token."""
        skeleton = self.find_skeleton(chat, partial(self.renderer.render, tools=chat.tools), is_marked=True)
        check_names(skeleton, chat)
        if (spans := skeleton.find_spans(text, chat.values)) is not None:
            return spans
        check_num_marked(marked, chat.messages)
        spans = []
        for turn, (start, end) in zip(skeleton.turns, marked, strict=True):
            if turn.num_skipped is None:
                raise ValueError("the chat template marks other roles' texts as generated")
            start += turn.num_skipped
            opens = start if turn.beginning is None else start - (turn.start[1] - turn.beginning.place[1])
            start += next((len(prompted) for prompted in turn.prompted if text.startswith(prompted, start)), 0)
            spans.append(Span(start, self.stops.trim(text, start, end), turn, opens))
        return spans


def check_num_marked(marked: Sequence[tuple[int, int]], messages: Sequence[Message]) -> None:
    num_turns = sum(message["role"] == conversation.ASSISTANT for message in messages)
    if len(marked) != num_turns:
        raise ValueError(
            f"the chat template marks {len(marked)} passages as generated where the assistant has"
            f" {num_turns} turns; without its {{% generation %}} markers it may be usable"
        )


@dataclass(frozen=True)
class PassageLocator:
    """Renders chats with one template and locates the passages to train on."""

    renderer: rendering.ChatRenderer
    finder: TurnFinder  # of this renderer's texts
    matcher: PromptMatcher

    def locate_one(self, chat: Chat) -> Located:
        return self.locate(self.renderer.render_one(chat.messages, tools=chat.tools), conversation.prepare_chat(chat))

    def locate(self, rendered: rendering.Rendered, chat: PreparedChat) -> Located:
        """A rendered chat and its trained passages."""
        text = rendering.check_unicode(rendering.check_length(rendered.text))
        if rendered.marked is None:
            spans = self.finder.find_spans(text, chat)
        else:
            spans = self.finder.find_marked_spans(text, rendered.marked, chat)
            if chat.unmasked:
                others = self.finder.find_spans(text, chat)
                spans += [span for span in others if chat.messages[span.message]["role"] != conversation.ASSISTANT]
        render = partial(self.renderer.render, tools=chat.tools)
        unread = [] if chat.is_plain else find_unread_keys(chat.messages, text, render)
        text, spans, remarks = self.matcher.match(text, spans, chat, render)
        passages = [
            Passage(span.start, span.end, chat.messages[span.message]["role"], chat.weights[span.message])
            for span in sorted(spans, key=lambda span: span.start)
            if chat.weights[span.message] > 0
        ]
        is_weighted = any(weight not in (0.0, 1.0) for weight in chat.weights)
        changed = [conversation.Remark(conversation.NORMALIZED, rendered=change) for change in chat.changes]
        return Located(text, passages, is_weighted, remarks=(*remarks, *unread, *changed))
