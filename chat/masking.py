"""Messages + chat template -> token ids, and which of them are trained.

Nothing here searches rendered text for role markers, because a user can write them too. Each *shape* of
conversation (its roles, and everything but the texts) is rendered once with placeholders, which shows what the
template itself writes around each text (see chat_skeletons.py). A real conversation is rendered by the tokenizer,
unaltered, and must equal, character by character, its texts set into that skeleton. So where each turn begins and
ends is known, never guessed; a conversation that differs is refused. The price is one rendering per row. Where a
template marks itself what is generated ({% generation %}), the marks are taken instead.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from chat.labels import IGNORED
from chat.rendering import check_in_child, template_errors
from chat.skeletons import (
    ASSISTANT,
    PLACEHOLDER,
    REASONING_KEYS,
    Message,
    Outline,
    Render,
    Skeleton,
    Span,
    Stops,
    check_outline,
    learn_skeleton,
    make_outline,
    match_text,
)
from chat.token_bytes import ByteEncoder, ByteEncoding

PRETRAIN = "pretrain"
SYSTEM_ROLES = ("system", "developer")
ONLY_FOR_MASKING = ("train", "weight")  # a message's fields that templates never see
MAX_NUM_SKELETONS = 4096  # bounds memory where every conversation has a shape of its own
MISSING_STOP_TOKEN = (
    "THE MODEL IS NOT TAUGHT TO STOP: the chat template writes no stop token after the assistant's turns, so none is"
    " trained (--allow-missing-stop-token)"
)
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Whitespace runs, digits, case, composed and decomposed accents, scripts, an emoji of several code points, a
# byte-order mark, code: where pre-tokenizers and normalizers differ although the vocabularies are the same.
FINGERPRINT_TEXT = (
    " a  b\t\tc\n\nd\r\n    e 0123456789 1,234.50 It's DON'T na\u00efve nai\u0308ve \u00a0\u2003\ufeff"
    " Stra\u00dfe \ufb01 \u00bd \u4f60\u597d\uff0c \u0417\u0434\u0440 \u0645\u0631\u062d \u0928\u092e"
    " \U0001f469\u200d\U0001f467 def f(x):\n\treturn x**2  # ok\n"
)

QUESTION, ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}
MORE = [{"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": "It is 6."}]
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = {**ANSWER, "reasoning_content": "Two and two make four."}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"terms": {"type": "string", "description": "Which."}}},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"terms": "2, 2"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sum: 4", "tool_call_id": "call00001", "name": "add"}

T = TypeVar("T")


@dataclass(frozen=True)
class Chat:
    """A conversation. Messages may say `train` (true or false) or `weight` (0 to 1) for themselves; otherwise the
    assistant's are trained, and with `unmask` all roles' but system's."""

    messages: list[Message]
    unmask: bool = False
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    """A text to be gone on with, without a chat template: only what follows the prompt is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text to be trained whole, ended by the tokenizer's end-of-text token."""

    text: str


Row = Chat | Completion | Document

PROBES = [
    Chat([QUESTION, ANSWER]),
    Chat([QUESTION, ANSWER, *MORE]),
    Chat([SYSTEM, QUESTION, ANSWER]),
    Chat([QUESTION, THOUGHT]),
    Chat([QUESTION, THOUGHT, *MORE]),
    Chat([QUESTION, CALLING, RESULT, ANSWER], tools=[TOOL]),
]
NUM_REQUIRED_PROBES = 2  # the others a template can refuse


@dataclass(frozen=True)
class Run:
    """Tokens [start, end) of a row that are trained, whose they are, and how much they count."""

    start: int
    end: int
    role: str
    weight: float = 1.0

    @property
    def num_targets(self) -> int:
        """Tokens but the row's first, which nothing predicts."""
        return self.end - max(self.start, 1)


@dataclass(frozen=True)
class TokenizedChat:
    """Token ids, and which runs of them are trained, in order. `is_weighted`: a message of the row has a weight."""

    input_ids: list[int]
    runs: list[Run]
    is_weighted: bool = False

    @property
    def labels(self) -> list[int]:
        """As many as tokens, unshifted, IGNORED where not trained."""
        labels = [IGNORED] * len(self.input_ids)
        for run in self.runs:
            labels[run.start : run.end] = self.input_ids[run.start : run.end]
        return labels

    @property
    def loss_weights(self) -> list[float] | None:
        """One per token, 0 where not trained; None unless a message of the row has a weight."""
        if not self.is_weighted:
            return None
        weights = [0.0] * len(self.input_ids)
        for run in self.runs:
            weights[run.start : run.end] = [run.weight] * (run.end - run.start)
        return weights

    @property
    def num_loss_counted_tokens(self) -> int:
        return sum(run.num_targets for run in self.runs)

    @property
    def num_trained_by_role(self) -> Counter[str]:
        """Targets by who says them."""
        counts: Counter[str] = Counter()
        for run in self.runs:
            counts[run.role] += run.num_targets
        return +counts


@dataclass(frozen=True)
class Passage:
    """Characters [start, end) of a rendered row that are trained, whose they are, and how much they count."""

    start: int
    end: int
    role: str
    weight: float = 1.0


@dataclass(frozen=True)
class Located:
    """A rendered row and what of it is trained."""

    text: str
    passages: list[Passage]
    is_weighted: bool = False


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, and what the template's generation markers enclose (None: it has none)."""

    text: str
    marked: list[tuple[int, int]] | None = None


@dataclass(frozen=True)
class Shape:
    """A conversation without what is only for masking, and the weight of each message.

    `is_plain`: each message has a role and a text, and nothing else; so its outline follows from its roles, and is
    not made for every row.
    """

    messages: list[Message]
    weights: list[float]
    tools: list[dict[str, Any]] | None
    is_plain: bool

    @property
    def unmasked(self) -> set[int]:
        """The messages that are trained though not the assistant's."""
        pairs = enumerate(zip(self.messages, self.weights, strict=True))
        return {i for i, (message, weight) in pairs if weight > 0 and message["role"] != ASSISTANT}

    @cached_property
    def outline(self) -> Outline:
        return make_outline(self.messages)

    @property
    def values(self) -> list[Any]:
        """What stands in the outline's leaves."""
        if self.is_plain:
            return [message["content"] for message in self.messages]
        return [leaf.value for leaf in self.outline.leaves]

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for conversations of the same outline."""
        texts = [(*message, message["role"]) for message in self.messages] if self.is_plain else [self.outline.text]
        return (*sorted(self.unmasked), *texts, repr(self.tools))


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """sha256 of what makes tokenizers the same: every token with its id, and how a fixed text is split.

    Independent of padding, truncation, chat template and library version.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    probe = tokenizer(FINGERPRINT_TEXT, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([vocabulary, probe]).encode()).hexdigest()


def fingerprint_chat_template(tokenizer: Any) -> str | None:
    """sha256 of the chat template (of all, where there are several by name); None without one."""
    if tokenizer.chat_template is None:
        return None
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def load_stop_token_ids(model_dir: str) -> list[int]:
    """The tokens that end generation by the model's generation_config.json; none if it has no such file."""
    from transformers import GenerationConfig  # seconds to import

    try:
        ids = GenerationConfig.from_pretrained(model_dir).eos_token_id
    except OSError:
        return []
    return [ids] if isinstance(ids, int) else list(ids or [])


class ChatMasker:
    """Renders, tokenizes and masks with one tokenizer. Invariant: its skeletons were learned from its template.

    `stop_token_ids`: which tokens end generation besides the tokenizer's eos token (see `load_stop_token_ids`).
    `allow_missing_stop_token`: where the template writes none after the assistant's turns, train their contents alone.
    """

    def __init__(
        self, tokenizer: Any, *, stop_token_ids: Sequence[int] = (), allow_missing_stop_token: bool = False
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not tell which characters a token covers, so masks cannot be"
                " placed with certainty: use a model that has a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.stops = replace(find_stops(tokenizer, stop_token_ids), may_be_missing=allow_missing_stop_token)
        self.encoder = ByteEncoder(tokenizer)
        self.skeletons: dict[tuple[Any, ...], Skeleton] = {}
        self.checked_shapes: set[tuple[Any, ...]] = set()  # the same for templates that mark what is generated

    @cached_property
    def template_tells_time(self) -> bool:
        return "strftime_now" in json.dumps(self.tokenizer.chat_template)

    def mask(self, rows: Sequence[Row]) -> list[TokenizedChat | ValueError]:
        """Each row's token ids and labels, or why it cannot be used.

        Raises ValueError where none could be used: no chat template, or no end-of-text token.
        """
        results: dict[int, TokenizedChat | ValueError] = {}
        for kind, mask in ((Chat, self.mask_chats), (Completion, self.mask_texts), (Document, self.mask_texts)):
            indices = [i for i, row in enumerate(rows) if isinstance(row, kind)]
            if indices:
                results.update(zip(indices, mask([rows[i] for i in indices]), strict=True))
        return [results[i] for i in range(len(rows))]

    def mask_texts(self, rows: Sequence[Completion | Document]) -> list[TokenizedChat | ValueError]:
        """Rows without a template: tokenized as one text, and ended once by the tokenizer's eos token."""
        eos_token_id = self.tokenizer.eos_token_id
        if eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, which has to end every document and completion")
        located = [attempt(locate_text, row) for row in rows]
        encodings = self.encode([text_of(found) for found in located], add_special_tokens=True)
        return [
            attempt(lambda encoding, found: label_encoding(encoding, found, eos_token_id=eos_token_id), encoding, found)
            for encoding, found in zip(encodings, located, strict=True)
        ]

    def mask_chats(self, chats: Sequence[Chat]) -> list[TokenizedChat | ValueError]:
        """Chats: token ids as `apply_chat_template` gives them, labels by what the template wrote where."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: name one with --chat-template, or use the model's instruct version"
            )
        shapes = [attempt(make_shape, chat) for chat in chats]
        located = [
            attempt(self.locate, rendered, shape)
            for rendered, shape in zip(self.render_each(shapes), shapes, strict=True)
        ]
        encodings = self.encode([text_of(found) for found in located], add_special_tokens=False)  # the template's own
        return [attempt(label_encoding, encoding, found) for encoding, found in zip(encodings, located, strict=True)]

    def locate(self, rendered: Rendered, shape: Shape) -> Located:
        """A rendered chat and what of it is trained."""
        located = attempt(self.locate_now, rendered, shape)
        if isinstance(located, ValueError) and self.template_tells_time:
            self.skeletons.pop(shape.key, None)  # it, or the text, can be of yesterday
            return self.locate_now(self.render_one(shape.messages, tools=shape.tools), shape)
        if isinstance(located, ValueError):
            raise located
        return located

    def locate_now(self, rendered: Rendered, shape: Shape) -> Located:
        text = check_unicode(rendered.text)
        if rendered.marked is None:
            spans = self.find_spans(text, shape)
        else:
            self.check_marked_shape(shape)
            spans = self.assign_marked(text, rendered.marked, shape)
            if shape.unmasked:
                others = self.find_spans(text, shape)
                spans += [span for span in others if shape.messages[span.message]["role"] != ASSISTANT]
        passages = [
            Passage(span.start, span.end, shape.messages[span.message]["role"], shape.weights[span.message])
            for span in sorted(spans, key=lambda span: span.start)
            if shape.weights[span.message] > 0
        ]
        is_weighted = any(weight not in (0.0, 1.0) for weight in shape.weights)
        return Located(text, passages, is_weighted)

    def find_spans(self, text: str, shape: Shape) -> list[Span]:
        """Whose turn stands where in a rendered chat."""
        render = partial(self.render, tools=shape.tools)
        skeleton = self.find_skeleton(shape, render)
        spans = skeleton.find_spans(text, shape.values)
        if spans is None:
            spans = attempt(match_text, text, shape.outline, skeleton, render=render)
        if isinstance(spans, ValueError):
            spans = self.find_spans_alone(text, shape, render, spans)
        return spans

    def find_spans_alone(self, text: str, shape: Shape, render: Render, error: ValueError) -> list[Span]:
        """With a skeleton for this row alone, because what others than the assistant say changes what the template
        writes elsewhere. Raises `error` if that does not help."""
        outline = make_outline(shape.messages, only=ASSISTANT)
        if shape.unmasked or outline.text == shape.outline.text:
            raise error
        try:
            skeleton = learn_skeleton(outline, unmasked=set(), render=render, stops=self.stops)
            return match_text(text, outline, skeleton, render=render)
        except ValueError:
            raise error from None

    def find_skeleton(self, shape: Shape, render: Render) -> Skeleton:
        """Learned once per shape."""
        key = shape.key
        if key not in self.skeletons:
            self.check_tools_are_written(shape, render)
            if len(self.skeletons) >= MAX_NUM_SKELETONS:
                self.skeletons.clear()
            self.skeletons[key] = learn_skeleton(
                shape.outline, unmasked=shape.unmasked, render=render, stops=self.stops
            )
        return self.skeletons[key]

    def check_marked_shape(self, shape: Shape) -> None:
        """Refuses, once per shape, a chat of which a template that marks its answers leaves something out."""
        if shape.key in self.checked_shapes:
            return
        render = partial(self.render, tools=shape.tools)
        self.check_tools_are_written(shape, render)
        check_outline(shape.outline, render=render, stops=self.stops)
        if len(self.checked_shapes) >= MAX_NUM_SKELETONS:
            self.checked_shapes.clear()
        self.checked_shapes.add(shape.key)

    def check_tools_are_written(self, shape: Shape, render: Render) -> None:
        messages = shape.outline.messages
        if shape.tools and attempt(self.render, [messages]) == render([messages]):
            raise ValueError(
                "the chat template leaves out 'tools': remove them from the row, or describe them in the system message"
            )

    @cached_property
    def generation_header(self) -> str:
        """What the template adds to a user's turn to prompt for an answer."""
        (plain,), (prompted,) = self.render([[QUESTION]]), self.render([[QUESTION]], generation_prompt=True)
        return prompted[len(plain) :] if prompted.startswith(plain) else ""

    def assign_marked(self, text: str, marked: list[tuple[int, int]], shape: Shape) -> list[Span]:
        """Whose turn each passage is that the template's markers enclose. What the generation prompt already says,
        and whitespace after the stop token, are left out."""
        assistants = [i for i, message in enumerate(shape.messages) if message["role"] == ASSISTANT]
        if len(marked) != len(assistants):
            raise ValueError(
                f"the chat template marks {len(marked)} passages as generated where the assistant has"
                f" {len(assistants)} turns; without its {{% generation %}} markers it may be usable"
            )
        spans = []
        for i, (start, end) in zip(assistants, marked, strict=True):
            passage = text[start:end]
            *_, stop = [None, *self.stops.special.finditer(passage)]
            if stop is not None and not passage[stop.end() :].strip():
                end = start + stop.end()
            spans.append(Span(start + self.count_prompted(text, start), end, i))
        return spans

    def count_prompted(self, text: str, start: int) -> int:
        """How much of the generation prompt stands in `text` from `start` on, the rest being right before it."""
        header = self.generation_header
        for i in range(len(header)):
            if text.startswith(header[i:], start) and text.endswith(header[:i], 0, start):
                return len(header) - i
        return 0

    def render_each(self, shapes: Sequence[Shape | ValueError]) -> list[Rendered | ValueError]:
        """All of the same tools at once, which is faster, unless one of them fails: then each alone, to find out
        which."""
        results: list[Any] = list(shapes)
        by_tools: dict[str, list[int]] = {}
        for i, shape in enumerate(shapes):
            if not isinstance(shape, ValueError):
                by_tools.setdefault(repr(shape.tools), []).append(i)
        for indices in by_tools.values():
            conversations, tools = [shapes[i].messages for i in indices], shapes[indices[0]].tools
            rendered = attempt(self.render_marked, conversations, tools=tools)
            if isinstance(rendered, ValueError):
                rendered = [attempt(self.render_one, messages, tools=tools) for messages in conversations]
            for i, result in zip(indices, rendered, strict=True):
                results[i] = result
        return results

    def render_one(self, messages: list[Message], *, tools: list[dict[str, Any]] | None) -> Rendered:
        (rendered,) = self.render_marked([messages], tools=tools)
        return rendered

    def render_marked(
        self, conversations: Sequence[list[Message]], *, tools: list[dict[str, Any]] | None
    ) -> list[Rendered]:
        """The texts, and what the template marks as generated if it marks something."""
        template = self.tokenizer.get_chat_template(None, tools)
        if GENERATION_MARKER.search(template) is None:
            return [Rendered(text) for text in self.render(conversations, tools=tools)]
        from transformers.utils.chat_template_utils import render_jinja_template

        with template_errors():
            texts, marked = render_jinja_template(
                [prepare_messages(messages) for messages in conversations],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        return [Rendered(text, passages) for text, passages in zip(texts, marked, strict=True)]

    def render(
        self,
        conversations: Sequence[list[Message]],
        *,
        tools: list[dict[str, Any]] | None = None,
        generation_prompt: bool = False,
    ) -> list[str]:
        """The texts that `apply_chat_template` tokenizes."""
        with template_errors():
            return self.tokenizer.apply_chat_template(
                [prepare_messages(messages) for messages in conversations],
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )

    def encode(self, texts: Sequence[str | ValueError], *, add_special_tokens: bool) -> list[Any]:
        """Tokenizes the texts in one call; errors among them stay where they are."""
        usable = [text for text in texts if isinstance(text, str)]
        encodings = iter(self.encoder.encode(usable, add_special_tokens=add_special_tokens))
        return [next(encodings) if isinstance(text, str) else text for text in texts]

    def check_template(self, name: str = "the model's chat template") -> list[str]:
        """Raises ValueError, with the template's name, for one that cannot be masked with certainty, by known
        conversations. Returns what there is to know about one that can.

        What a template raises itself (no system role, say) is its right: rows of that kind will be refused.
        """
        notes: list[str] = []
        try:
            check_in_child(self.render_probes)
        except ValueError as error:
            raise ValueError(f"{name} cannot be used: {error}") from None
        for chat in PROBES:
            (tokenized,) = self.mask_chats([chat])
            if isinstance(tokenized, ValueError):
                problem = str(tokenized) if chat in PROBES[:NUM_REQUIRED_PROBES] else None
            else:
                problem = self.find_problem(tokenized, chat, notes)
            if problem is not None:
                raise ValueError(f"{name} cannot be used: {problem}; tried with {chat.messages}")
        if self.stops.may_be_missing:
            if all(turn.has_stop for skeleton in self.skeletons.values() for turn in skeleton.turns):
                raise ValueError(f"--allow-missing-stop-token has no effect: {name} writes a stop token")
            notes.insert(0, MISSING_STOP_TOKEN)
        return list(dict.fromkeys(notes))

    def render_probes(self) -> None:
        """Raises MemoryError if the template needs too much; other errors are left to be found again."""
        for chat in PROBES:
            error = attempt(self.render, [chat.messages], tools=chat.tools)
            if isinstance(error, ValueError) and isinstance(error.__context__, MemoryError):
                raise error.__context__

    def find_problem(self, tokenized: TokenizedChat, chat: Chat, notes: list[str]) -> str | None:
        """What is wrong with a probe's token ids or labels, without a look at skeletons and offsets. Adds to `notes`
        what is as the template wants it, and yet not as one would expect."""
        messages = prepare_messages(chat.messages)
        expected = self.tokenizer.apply_chat_template(messages, tools=chat.tools, return_dict=True)["input_ids"]
        if tokenized.input_ids != expected:
            return "apply_chat_template gives other token ids"
        runs = split_runs(tokenized.input_ids, tokenized.labels)
        before = [[], *(ids for ids, _ in runs)]
        trained = [(ids, earlier) for earlier, (ids, is_trained) in zip(before, runs, strict=False) if is_trained]
        turns = [message for message in chat.messages if message["role"] == ASSISTANT]
        if len(trained) != len(turns):
            return f"{len(turns)} assistant turns, {len(trained)} runs of trained tokens"
        for (ids, earlier), message in zip(trained, turns, strict=True):
            problem = self.find_problem_of_turn(ids, earlier, message)
            if problem is not None:
                return problem
            if not self.ends_with_special_token(ids) and not self.stops.may_be_missing:
                if message is not chat.messages[-1] or len(self.stops.known) < 2:
                    return f"{self.decode(ids)!r} is trained, which does not end with a special token"
                notes.append(
                    "the chat template writes no end-of-turn token after a conversation's last turn, so stopping is"
                    " trained only where another turn follows"
                )
            if squeeze(message["content"]) not in squeeze(self.decode(ids)):
                notes.append(
                    "the generation prompt's end is one token with the beginning of some answers: that token is not"
                    " trained"
                )
        return None

    def ends_with_special_token(self, ids: list[int]) -> bool:
        *_, stop = self.stops.special.findall(self.decode(ids)) or [""]
        return bool(stop) and ids[-1] == self.tokenizer.convert_tokens_to_ids(stop)

    def find_problem_of_turn(self, ids: list[int], earlier: list[int], message: Message) -> str | None:
        """What is wrong with the trained tokens of a probe's turn, which follow the tokens `earlier`."""
        decoded, with_one_before = self.decode(ids), self.decode([*earlier[-1:], *ids])
        call = message["tool_calls"][0]["function"]["arguments"]["terms"] if "tool_calls" in message else ""
        for text in (message["content"], call):
            if squeeze(text) not in squeeze(with_one_before):  # the prompt's last space can be in the first token
                return f"{decoded!r} is trained instead of {text!r} and the end-of-turn token"
        others = [QUESTION["content"], MORE[0]["content"], SYSTEM["content"], RESULT["content"]]
        for text in others:
            if squeeze(text) in squeeze(decoded):
                return f"{decoded!r} is trained, which is not all the assistant's"
        return None

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def make_shape(chat: Chat) -> Shape:
    """Raises ValueError for a chat whose fields for masking say what cannot be done."""
    messages, weights = [], []
    for number, message in enumerate(chat.messages, start=1):
        by_default = message["role"] == ASSISTANT or (chat.unmask and message["role"] not in SYSTEM_ROLES)
        try:
            weights.append(read_weight(message, by_default))
        except ValueError as error:
            raise ValueError(f"message {number} ({message['role']}) {error}") from None
        is_bare = message.keys().isdisjoint(ONLY_FOR_MASKING)
        messages.append(message if is_bare else {key: message[key] for key in message if key not in ONLY_FOR_MASKING})
    if chat.tools and PLACEHOLDER.search(repr(chat.tools)):
        raise ValueError("'tools' contain what looks like a placeholder used for masking")
    is_plain = all(len(message) == 2 and is_text(message.get("content")) for message in messages)
    return Shape(messages, weights, chat.tools, is_plain)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def read_weight(message: Message, by_default: bool) -> float:
    """How much a message's tokens count in the loss: 0 is not at all."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"has 'train': {train!r}, allowed: true, false")
    is_trained = by_default if train is None else train
    if weight is None:
        return float(is_trained)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not (0 <= weight <= 1):
        raise ValueError(f"has 'weight': {weight!r}, allowed: numbers from 0 to 1")
    if weight > 0 and not is_trained:
        raise ValueError(f"has 'weight': {weight!r} but is not trained; add 'train': true, or remove the weight")
    return float(weight)


def prepare_messages(messages: Sequence[Message]) -> list[Message]:
    """As `apply_chat_template` does, of late: templates see missing fields, not nulls, and reasoning whatever it is
    called, since gpt-oss reads "thinking" and others "reasoning_content"."""
    prepared = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
        named = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        prepared.append({key: value for key, value in named.items() if value is not None})
    return prepared


def locate_text(row: Completion | Document) -> Located:
    """The text of a row without a template, and what of it is trained."""
    if isinstance(row, Document):
        return Located(check_unicode(row.text), [Passage(0, len(row.text), "document")])
    text = check_unicode(row.prompt + row.completion)
    return Located(text, [Passage(len(row.prompt), len(text), "completion")])


def text_of(found: Located | ValueError) -> str | ValueError:
    return found if isinstance(found, ValueError) else found.text


def label_encoding(encoding: Any, located: Located, *, eos_token_id: int | None = None) -> TokenizedChat:
    """Runs from passages: a token is trained if its first character is in one.

    A token that began before a passage is not trained: it holds text of the prompt, so after the prompt the model
    never has to say it. One that begins inside and reaches out is: a stop token that takes the line break with it.
    Tokens that share one character (the bytes of an emoji) begin at the same place, so they are trained together,
    and a space mark that the tokenizer adds to a word begins where the word does. Where tokens end is not looked
    at, because some tokenizers report empty ranges. With `eos_token_id`, that token is the last one, once, and
    trained with the last passage.
    """
    input_ids, num_tokens = encoding.ids, len(encoding)
    if eos_token_id is not None:
        num_tokens -= input_ids[-1:] == [eos_token_id]
        input_ids = [*input_ids[:num_tokens], eos_token_id]
    runs = []
    for passage in located.passages:
        first = find_token(encoding, passage.start, num_tokens) if passage.start > 0 else 0
        end = find_token(encoding, passage.end, num_tokens) if passage.end < len(located.text) else len(input_ids)
        if first < end:
            runs.append(Run(first, end, passage.role, passage.weight))
    return TokenizedChat(input_ids, runs, located.is_weighted)


def find_token(encoding: Any, at: int, num_tokens: int) -> int:
    """The first of the tokens that begins at character `at` or later.

    Looks around the token that has the character; building the list of all offsets takes much longer.
    """
    if isinstance(encoding, ByteEncoding):
        token = encoding.find_start(at)
        if token is not None:
            return min(token, num_tokens)
        encoding = encoding.slow
    token = encoding.char_to_token(at)
    if token is None:  # a character that no token has
        return bisect_left(encoding.offsets[:num_tokens], at, key=itemgetter(0))
    while token > 0 and (chars := encoding.token_to_chars(token - 1)) is not None and chars[0] >= at:
        token -= 1
    while token < num_tokens and encoding.token_to_chars(token)[0] < at:
        token += 1
    return token


def split_runs(input_ids: Sequence[int], labels: Sequence[int]) -> list[tuple[list[int], bool]]:
    """Runs of token ids that are trained, or not: (ids, are they trained)."""
    pairs = zip(input_ids, labels, strict=True)
    runs = groupby(pairs, key=lambda pair: pair[1] != IGNORED)
    return [([token for token, _ in run], is_trained) for is_trained, run in runs]


def find_stops(tokenizer: Any, stop_token_ids: Sequence[int]) -> Stops:
    """The tokenizer's special tokens (of two that begin alike, the longer is found) and those that end generation."""
    added = tokenizer.added_tokens_decoder
    known = {tokenizer.eos_token, *(added[id].content for id in stop_token_ids if id in added)} - {None}
    special = {token.content for token in added.values() if token.special} | known
    longest_first = sorted(special, key=lambda token: (-len(token), token))
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) never matches
    return Stops(pattern, frozenset(known))


def squeeze(text: str) -> str:
    """Without whitespace, which decoders add and drop."""
    return "".join(text.split())


def check_unicode(text: str) -> str:
    """`text`, which can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"contains half a character: the lone surrogate {text[error.start]!r}") from None
    return text


def attempt(function: Callable[..., T], value: Any, *args: Any, **options: Any) -> T | ValueError:
    """function(value, *args, **options), or the ValueError that it raised or that an argument already is."""
    for argument in (value, *args):
        if isinstance(argument, ValueError):
            return argument
    try:
        return function(value, *args, **options)
    except ValueError as error:
        return error
