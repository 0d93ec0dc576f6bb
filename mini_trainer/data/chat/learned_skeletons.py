"""Learns the skeleton of an outline: the template's text around its leaves, and where turns begin and end."""

from dataclasses import dataclass, field, replace

from mini_trainer.data.chat.conversation import ASSISTANT, PLACEHOLDER, Message, Outline, split_at_placeholders
from mini_trainer.data.chat.placing import PlaceMemory, check_completeness, check_places, check_rest
from mini_trainer.data.chat.prompting import describe_beginnings
from mini_trainer.data.chat.skeletons import Render, Skeleton, SlotMemory, Turn, pad_outline
from mini_trainer.data.chat.turns import Stops, TurnLearner, TurnMemory


@dataclass(frozen=True)
class SkeletonLearner:
    """Learns skeletons of one template, for conversations with or without tools. Remembers the parts of conversations
    that it has learned."""

    stops: Stops
    slots: SlotMemory = field(default_factory=SlotMemory)
    turns: TurnMemory = field(default_factory=TurnMemory)
    places: PlaceMemory = field(default_factory=PlaceMemory)

    def learn(self, outline: Outline, *, unmasked: set[int], render: Render) -> Skeleton:
        """The skeleton of `outline`, with the turns that can be trained: the assistant's, and the messages in
        `unmasked`.

        Raises ValueError if the template leaves out, repeats or displaces a text, writes it in an unknown way, or if
        an assistant's turn does not begin with the generation prompt or has no end-of-turn token.
        """
        text, skeleton = self.start(outline, render)
        divided = divide_turns(outline, [slot.leaf for slot in skeleton.slots])
        if divided is None:
            self.learn_turns(outline, skeleton, text, unmasked=unmasked, render=render)
            describe_beginnings(outline, skeleton)
            return skeleton
        divided_outline, original = divided
        (divided_text,) = render([divided_outline.messages])
        if divided_text != text:
            raise ValueError(
                "the chat template writes other messages within an assistant's turn: move the content to a message of"
                " its own, after the results of the calls"
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
        order, literals = split_at_placeholders(text)
        if any(leaf >= len(outline.leaves) for leaf in order):
            raise ValueError("the chat template writes text that looks like a placeholder used for masking")
        named_by_id = check_completeness(outline, order, render)

        def pad() -> list[str]:
            padded_order, gaps = split_at_placeholders(render([pad_outline(outline)])[0])
            if order != padded_order:
                raise ValueError(
                    "the chat template writes different texts, or in a different order, if whitespace surrounds them"
                )
            return gaps

        slots = self.slots.learn_slots(outline, order, literals, pad)
        return text, Skeleton(literals, slots, [], named_by_id)

    def learn_turns(
        self, outline: Outline, skeleton: Skeleton, text: str, *, unmasked: set[int], render: Render
    ) -> None:
        """Adds the turns to the skeleton, and checks that every text is in the right turn."""
        learner = TurnLearner(outline, skeleton, render, self.stops, self.turns)
        for i, message in enumerate(outline.messages):
            if message["role"] == ASSISTANT:
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
        assistants = [i for i, message in enumerate(outline.messages) if message["role"] == ASSISTANT]
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
    start, k = 0, 0
    for k, placeholder in enumerate(PLACEHOLDER.finditer(text)):
        if at <= placeholder.start():
            return k, at - start
        if at < placeholder.end():
            raise ValueError("the chat template marks a part of a text as generated")
        start = placeholder.end()
    return len(PLACEHOLDER.findall(text)), at - start


def divide_turns(outline: Outline, order: list[int]) -> tuple[Outline, list[int]] | None:
    """The conversation with each content that follows the results of its message's calls (Gemma 4) as a message of its
    own, after the results; and the original index of each message. None if there is no such content."""
    divided = find_divided(outline, order)
    if not divided:
        return None
    contents_at = {}  # index of a message -> the message whose content comes before it
    for i in divided:
        j = i + 1
        while j < len(outline.messages) and outline.messages[j]["role"] == "tool":
            j += 1
        contents_at[j] = i
    messages: list[Message] = []
    original: list[int] = []
    place, content_place = {}, {}
    for i, message in enumerate([*outline.messages, None]):
        if i in contents_at:
            content_place[contents_at[i]] = len(messages)
            messages.append({"role": ASSISTANT, "content": outline.messages[contents_at[i]]["content"]})
            original.append(contents_at[i])
        if message is not None:
            place[i] = len(messages)
            messages.append({key: message[key] for key in message if not (i in divided and key == "content")})
            original.append(i)
    leaves = [
        replace(
            leaf, message=(content_place if leaf.kind == "content" and leaf.message in divided else place)[leaf.message]
        )
        for leaf in outline.leaves
    ]
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
