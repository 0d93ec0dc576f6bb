"""Finds the turns of rendered chats with skeletons of the template, which are learned once per outline.

data/chat/masking.py says why a turn's bounds are known and never guessed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mini_trainer.data.chat.chat_renderer import WITHOUT_TOOLS, ChatRenderer
from mini_trainer.data.chat.conversation import ASSISTANT, Message, PreparedChat, make_outline
from mini_trainer.data.chat.learned_skeletons import SkeletonLearner
from mini_trainer.data.chat.placing import check_names
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.skeletons import Render, Skeleton, Span, match_text
from mini_trainer.data.chat.turns import Stops

MAX_NUM_SKELETONS = 4096  # bounds memory if every conversation has its own outline
MAX_NUM_SLOTS = 250_000  # of all skeletons: some 100 MB where long conversations have outlines of their own


class TurnFinder:
    """Finds turns in texts of `renderer`. Invariant: its skeletons were learned from that template, with `stops`."""

    def __init__(self, renderer: ChatRenderer, stops: Stops) -> None:
        self.renderer, self.stops = renderer, stops
        self.skeletons: dict[tuple[Any, ...], Skeleton] = {}
        self.num_slots = 0  # total over `skeletons`
        self.written_tools: set[tuple[Any, ...]] = set()  # tools, with the roles of a chat, that the template writes
        self.learners = {has_tools: SkeletonLearner(self.stops) for has_tools in (False, True)}

    def let_stops_be_missing(self) -> None:
        """Accepts turns without a stop token from now on; their contents are trained."""
        self.stops = replace(self.stops, may_be_missing=True)
        self.learners = {has_tools: SkeletonLearner(self.stops) for has_tools in (False, True)}
        self.skeletons.clear()
        self.num_slots = 0

    def find_spans(self, text: str, chat: PreparedChat) -> list[Span]:
        """The spans of the turns in a rendered chat."""
        render = partial(self.renderer.render, tools=chat.tools)
        skeleton = self.find_skeleton(chat, render)
        spans = skeleton.find_spans(text, chat.values)
        if spans is None:
            spans = catch_error(match_text, text, chat.outline, skeleton, render=render)
        if isinstance(spans, ValueError):
            spans = self.find_spans_alone(text, chat, render, spans)
        if skeleton.named_by_id:
            check_names(skeleton, chat.values, chat.outline)
        return spans

    def find_spans_alone(self, text: str, chat: PreparedChat, render: Render, error: ValueError) -> list[Span]:
        """`find_spans` with a skeleton for this row alone, for templates that write other parts differently depending
        on the texts of roles other than the assistant. Raises `error` if that does not help."""
        outline = make_outline(chat.messages, only=ASSISTANT)
        if chat.unmasked or outline.text == chat.outline.text:
            raise error
        try:
            skeleton = SkeletonLearner(self.stops).learn(outline, unmasked=set(), render=render)
            return match_text(text, outline, skeleton, render=render)
        except ValueError:
            raise error from None

    def find_skeleton(self, chat: PreparedChat, render: Render) -> Skeleton:
        """The chat's skeleton, learned once per outline."""
        key = chat.key
        if key not in self.skeletons:
            self.check_tools_are_written(chat, render)
            learner = self.learners[bool(chat.tools)]
            self.remember(key, learner.learn(chat.outline, unmasked=chat.unmasked, render=render))
        return self.skeletons[key]

    def remember(self, key: tuple[Any, ...], skeleton: Skeleton) -> None:
        if len(self.skeletons) >= MAX_NUM_SKELETONS or self.num_slots >= MAX_NUM_SLOTS:
            self.skeletons.clear()
            self.num_slots = 0
        self.skeletons[key] = skeleton
        self.num_slots += len(skeleton.slots)

    def check_tools_are_written(self, chat: PreparedChat, render: Render) -> None:
        """Refuses a template that leaves out the tools, which can depend on the set of roles, the first and the last
        role."""
        if not chat.tools:
            return
        roles = [message["role"] for message in chat.messages]
        key = (repr(chat.tools), roles[0], roles[-1], frozenset(roles))
        messages = chat.outline.messages
        if key not in self.written_tools and catch_error(self.renderer.render, [messages]) == catch_error(
            render, [messages]
        ):
            raise ValueError(WITHOUT_TOOLS)
        if len(self.written_tools) >= MAX_NUM_SKELETONS:
            self.written_tools.clear()
        self.written_tools.add(key)

    def find_marked_spans(self, text: str, marked: list[tuple[int, int]], chat: PreparedChat) -> list[Span]:
        """The turns of the passages that the template marks as generated, without the text of the generation prompt
        and without whitespace after the stop token."""
        skeleton = self.find_marked_skeleton(chat)
        if skeleton.named_by_id:
            check_names(skeleton, chat.values, chat.outline)
        spans = skeleton.find_spans(text, chat.values)
        if spans is not None:
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

    def find_marked_skeleton(self, chat: PreparedChat) -> Skeleton:
        """The chat's skeleton with the turns that the template marks, learned once per outline."""
        key = ("marked", *chat.key)
        if key not in self.skeletons:
            render = partial(self.renderer.render, tools=chat.tools)
            self.check_tools_are_written(chat, render)
            rendered = self.renderer.render_one(chat.outline.messages, tools=chat.tools)
            marked = rendered.marked or []
            check_num_marked(marked, chat.messages)
            learner = self.learners[bool(chat.tools)]
            self.remember(key, learner.learn_marked(chat.outline, marked, rendered.text, render=render))
        return self.skeletons[key]

    def forget(self, key: tuple[Any, ...]) -> None:
        """Forgets the skeletons of a chat's outline."""
        for each in (key, ("marked", *key)):
            self.skeletons.pop(each, None)


def check_num_marked(marked: Sequence[tuple[int, int]], messages: Sequence[Message]) -> None:
    num_turns = sum(message["role"] == ASSISTANT for message in messages)
    if len(marked) != num_turns:
        raise ValueError(
            f"the chat template marks {len(marked)} passages as generated where the assistant has"
            f" {num_turns} turns; without its {{% generation %}} markers it may be usable"
        )
