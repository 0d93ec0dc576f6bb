"""Messages + chat template -> token ids, and which of them are trained.

Nothing here searches rendered text for role markers, because a user can write them too. Each *shape* of
conversation (its roles, and everything but the contents) is rendered once with placeholders for contents, which
shows what the template itself writes around each of them: the shape's skeleton. A real conversation is rendered
by the tokenizer, unaltered, and must equal, character by character, its contents set into that skeleton. So where
each content stands and where each turn begins and ends is known, never guessed; a conversation that differs is
refused. The price is one rendering per row.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Protocol, TypeVar

IGNORED = -100  # label of a token that is not trained
ASSISTANT = "assistant"
PRETRAIN = "pretrain"
SYSTEM_ROLES = ("system", "developer")
MAX_NUM_SKELETONS = 4096  # bounds memory where every conversation has a shape of its own

PLACEHOLDER = re.compile(r"xQ(\d+)Qx")  # letters and digits only, so that templates pass it through
STRIPS = ("", "\n", None)  # what templates strip from a content's ends: nothing, newlines, all whitespace
PADDING = "\n \n"  # tells apart what each of STRIPS leaves of it

# Whitespace runs, digits, case, composed and decomposed accents, scripts, an emoji of several code points, a
# byte-order mark, code: where pre-tokenizers and normalizers differ although the vocabularies are the same.
FINGERPRINT_TEXT = (
    " a  b\t\tc\n\nd\r\n    e 0123456789 1,234.50 It's DON'T na\u00efve nai\u0308ve \u00a0\u2003\ufeff"
    " Stra\u00dfe \ufb01 \u00bd \u4f60\u597d\uff0c \u0417\u0434\u0440 \u0645\u0631\u062d \u0928\u092e"
    " \U0001f469\u200d\U0001f467 def f(x):\n\treturn x**2  # ok\n"
)

PROBES = (
    [("user", "What is 2 + 2?"), ("assistant", "It is 4.")],
    [
        ("user", "What is 2 + 2?"),
        ("assistant", "It is 4."),
        ("user", "And 3 + 3?"),
        ("assistant", "It is 6."),
    ],
)

Message = dict[str, Any]
T = TypeVar("T")


class Render(Protocol):
    """Conversations -> their texts, by the chat template; raises ValueError where the template fails."""

    def __call__(self, conversations: Sequence[list[Message]], *, generation_prompt: bool = False) -> list[str]: ...


@dataclass(frozen=True)
class Chat:
    """One row of data. `unmask`: all roles but system are trained, not only the assistant."""

    messages: list[Message]
    unmask: bool = False

    def trains(self, role: str) -> bool:
        return role == ASSISTANT or (self.unmask and role not in SYSTEM_ROLES)


@dataclass(frozen=True)
class TokenizedChat:
    """`input_ids` and unshifted `labels`, equally long."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a rendered chat that are trained, and whose they are."""

    start: int
    end: int
    role: str


@dataclass(frozen=True)
class Slot:
    """Where a message's content goes in a skeleton, and how much template text around it belongs to its turn."""

    message: int  # index into the messages
    role: str
    strips: tuple[str | None, str | None]  # what the template strips from the content: left, right, each of STRIPS
    trained: bool
    num_chars_before: int = 0  # template text between generation prompt and content
    num_chars_after: int = 0  # template text from the content to the end-of-turn token, which is included

    def place(self, content: str) -> str:
        """The content as the template writes it."""
        left, right = self.strips
        return content.lstrip(left).rstrip(right)


@dataclass(frozen=True)
class Skeleton:
    """What the template writes for a shape: literals[0], slot 0, literals[1], ..., slot n-1, literals[n]."""

    literals: list[str]
    slots: list[Slot]


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


class ChatMasker:
    """Renders, tokenizes and masks with one tokenizer. Invariant: its skeletons were learned from its template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not tell which characters a token covers, so masks cannot be"
                " placed with certainty: use a model that has a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.special_token = compile_special_tokens(tokenizer)
        self.skeletons: dict[str, Skeleton] = {}

    def mask(self, chats: Sequence[Chat]) -> list[TokenizedChat | ValueError]:
        """Each chat's token ids and labels, or why it cannot be used.

        Raises ValueError where none could be used: no chat template, or no end-of-text token.
        """
        results: dict[int, TokenizedChat | ValueError] = {}
        documents = [i for i, chat in enumerate(chats) if chat.messages[0]["role"] == PRETRAIN]
        others = [i for i, chat in enumerate(chats) if chat.messages[0]["role"] != PRETRAIN]
        for indices, mask in ((documents, self.mask_documents), (others, self.mask_chats)):
            if indices:
                results.update(zip(indices, mask([chats[i] for i in indices]), strict=True))
        return [results[i] for i in range(len(chats))]

    def mask_documents(self, chats: Sequence[Chat]) -> list[TokenizedChat | ValueError]:
        """Pretraining text: no template, every token trained, ended once by the tokenizer's eos token."""
        eos_token_id = self.tokenizer.eos_token_id
        if eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, which has to end every 'pretrain' message")

        def finish(encoding: Any) -> TokenizedChat:
            ids = encoding.ids if encoding.ids[-1:] == [eos_token_id] else [*encoding.ids, eos_token_id]
            return TokenizedChat(ids, ids)

        texts = [attempt(check_unicode, chat.messages[0]["content"]) for chat in chats]
        return [attempt(finish, encoding) for encoding in self.encode(texts, add_special_tokens=True)]

    def mask_chats(self, chats: Sequence[Chat]) -> list[TokenizedChat | ValueError]:
        """Chats: token ids as `apply_chat_template` gives them, labels by what the template wrote where."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: use the model's instruct version, or put the template that"
                " its chats shall have into chat_template.jinja beside the tokenizer"
            )
        texts = self.render_each([chat.messages for chat in chats])
        located = [attempt(self.locate, text, chat) for text, chat in zip(texts, chats, strict=True)]
        texts = [found if isinstance(found, ValueError) else found[0] for found in located]
        encodings = self.encode(texts, add_special_tokens=False)  # the template writes them itself
        return [attempt(label_encoding, encoding, found) for encoding, found in zip(encodings, located, strict=True)]

    def locate(self, text: str, chat: Chat) -> tuple[str, list[Span]]:
        """A rendered chat and its trained spans."""
        return check_unicode(text), find_trained_spans(text, chat, self.find_skeleton(chat))

    def find_skeleton(self, chat: Chat) -> Skeleton:
        """Learned once per shape: the messages without their contents."""
        shape = repr((chat.unmask, [{**message, "content": ""} for message in chat.messages]))
        if shape not in self.skeletons:
            if len(self.skeletons) >= MAX_NUM_SKELETONS:
                self.skeletons.clear()
            self.skeletons[shape] = learn_skeleton(chat, render=self.render, special_token=self.special_token)
        return self.skeletons[shape]

    def render_each(self, conversations: Sequence[list[Message]]) -> list[str | ValueError]:
        """All at once, which is faster, unless one of them fails: then each alone, to find out which."""
        rendered = attempt(self.render, conversations)
        if not isinstance(rendered, ValueError):
            return rendered
        return [attempt(lambda messages: self.render([messages])[0], messages) for messages in conversations]

    def render(self, conversations: Sequence[list[Message]], *, generation_prompt: bool = False) -> list[str]:
        """The texts that `apply_chat_template` tokenizes."""
        try:
            return self.tokenizer.apply_chat_template(
                conversations, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is someone else's program and can fail in any way
            raise ValueError(f"the chat template fails: {error or type(error).__name__}") from None

    def encode(self, texts: Sequence[str | ValueError], *, add_special_tokens: bool) -> list[Any]:
        """Tokenizes the texts in one call; errors among them stay where they are."""
        usable = [text for text in texts if isinstance(text, str)]
        encodings = iter(())
        if usable:
            batch = self.tokenizer(
                usable,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # no warning about the model's maximal length
            )
            encodings = iter(batch.encodings)
        return [next(encodings) if isinstance(text, str) else text for text in texts]

    def check_template(self) -> None:
        """Raises ValueError for a template that cannot be masked with certainty, by known conversations."""
        for probe in PROBES:
            messages = [{"role": role, "content": content} for role, content in probe]
            (tokenized,) = self.mask_chats([Chat(messages)])
            problem = tokenized if isinstance(tokenized, ValueError) else self.find_problem(tokenized, messages)
            if problem is not None:
                raise ValueError(f"the model's chat template cannot be used: {problem}; tried with {messages}")

    def find_problem(self, tokenized: TokenizedChat, messages: list[Message]) -> str | None:
        """What is wrong with a probe's token ids or labels, without a look at skeletons and offsets."""
        if tokenized.input_ids != self.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]:
            return "apply_chat_template gives other token ids"
        turns = split_runs(tokenized.input_ids, tokenized.labels)
        trained = [ids for ids, is_trained in turns if is_trained]
        contents = [message["content"] for message in messages if message["role"] == ASSISTANT]
        if len(trained) != len(contents):
            return f"{len(contents)} assistant turns, {len(trained)} runs of trained tokens"
        for ids, content in zip(trained, contents, strict=True):
            decoded = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            *_, stop = self.special_token.findall(decoded) or [""]
            if not stop or ids[-1] != self.tokenizer.convert_tokens_to_ids(stop):
                return f"{decoded!r} is trained, which does not end with a special token"
            if "".join(content.split()) not in "".join(decoded.split()):  # decoders add and drop spaces
                return f"{decoded!r} is trained instead of {content!r} and the end-of-turn token"
        return None


def learn_skeleton(chat: Chat, *, render: Render, special_token: re.Pattern[str]) -> Skeleton:
    """Renders `chat` with placeholders for its contents, and what leads up to and ends each trained turn.

    Raises ValueError if the template leaves out or repeats a content, changes it in an unknown way, or if an
    assistant's turn does not begin with the generation prompt or has no end-of-turn token.
    """
    messages = [{**message, "content": f"xQ{i}Qx"} for i, message in enumerate(chat.messages)]
    padded = [{**message, "content": PADDING + message["content"] + PADDING} for message in messages]
    (order, literals), (padded_order, gaps) = map(split_at_placeholders, render([messages, padded]))
    for i, message in enumerate(messages):
        if order.count(i) != 1 or padded_order.count(i) != 1:
            raise ValueError(
                f"the chat template writes message {i + 1} ({message['role']}) {order.count(i)} times, not once"
            )
    slots = []
    for position, (i, strips) in enumerate(zip(order, learn_strips(literals, gaps), strict=True)):
        role = messages[i]["role"]
        slot = Slot(message=i, role=role, strips=strips, trained=chat.trains(role))
        before, after = literals[position], literals[position + 1]
        if role == ASSISTANT:
            start = learn_turn_start(messages[:i], order[:position], before, render=render)
            slot = replace(slot, num_chars_before=start)
        if slot.trained:
            end = learn_turn_end(messages[: i + 1], after, render=render, special_token=special_token)
            slot = replace(slot, num_chars_after=end)
        slots.append(slot)
    return Skeleton(literals, slots)


def learn_turn_start(previous: list[Message], order: list[int], literal: str, *, render: Render) -> int:
    """How many characters at the end of `literal`, which leads up to an assistant's content, the model generates.

    `previous` are the messages before it, with placeholders; `order` the contents that the text has before `literal`.
    """
    context = previous or [{"role": "user", "content": "xQ0Qx"}]
    (prompted,), (plain,) = render([context], generation_prompt=True), render([context])
    prompted_order, prompted_literals = split_at_placeholders(prompted)
    prompt = prompted_literals[-1]
    if previous:
        known, start = prompted_order[-1:] == order[-1:] and literal.startswith(prompt), len(prompt)
    else:  # nothing to prompt with: the conversation has to begin with the header that follows a user's turn
        header = prompted.removeprefix(plain)
        known, start = prompted.startswith(plain) and literal.endswith(header), len(literal)
    if not known:
        raise ValueError(
            f"the chat template begins an assistant turn with {literal!r}, but prompts for it with {prompt!r}"
        )
    if prompted == plain and literal[start:].strip():
        raise ValueError(
            "the chat template has no generation prompt, so the assistant's header cannot be told from its text"
            f" in {literal[start:]!r}: let the template write the header when add_generation_prompt is set"
        )
    return len(literal) - start


def learn_turn_end(turns: list[Message], literal: str, *, render: Render, special_token: re.Pattern[str]) -> int:
    """How many characters of `literal`, which follows the content of the last of `turns`, end its turn.

    They go up to and including the first special token, if the template writes the same where the conversation
    stops there: then the token belongs to this turn and not to the next one. 0 if there is none, which is an error
    for the assistant, who would never learn to stop.
    """
    order, literals = split_at_placeholders(render([turns])[0])
    stop = special_token.search(literals[-1])
    if order[-1:] == [len(turns) - 1] and stop and literal.startswith(literals[-1][: stop.end()]):
        return stop.end()
    if turns[-1]["role"] == ASSISTANT:
        raise ValueError(
            f"the chat template writes no end-of-turn token after an assistant turn: {literal!r} within a"
            f" conversation, {literals[-1]!r} at its end"
        )
    return 0


def split_at_placeholders(text: str) -> tuple[list[int], list[str]]:
    """The messages whose contents stand in `text`, in order, and the text before, between and after them."""
    parts = PLACEHOLDER.split(text)
    return [int(index) for index in parts[1::2]], parts[::2]


def learn_strips(literals: list[str], gaps: list[str]) -> list[tuple[str | None, str | None]]:
    """What the template strips from each content: (left, right).

    `gaps` are the same texts where contents have PADDING around them: with what is left of it.
    """
    choices = []
    for k, (literal, gap) in enumerate(zip(literals, gaps, strict=True)):
        before, after = PADDING if k > 0 else "", PADDING if k < len(literals) - 1 else ""
        fits = [
            (right, left)
            for right in STRIPS
            for left in STRIPS
            if before.rstrip(right) + literal + after.lstrip(left) == gap
        ]
        if not fits:
            raise ValueError(f"the chat template changes whitespace at a content's ends: {literal!r} became {gap!r}")
        choices.append(fits[0])
    return [(left, right) for (_, left), (right, _) in pairwise(choices)]


def find_trained_spans(text: str, chat: Chat, skeleton: Skeleton) -> list[Span]:
    """Where in `text`, the rendered chat, what is trained stands. ValueError unless they fit exactly."""
    pieces, spans, end = [], [], 0
    for literal, slot in zip(skeleton.literals, skeleton.slots, strict=False):  # one more literal than slots
        content = slot.place(chat.messages[slot.message]["content"])
        pieces += [literal, content]
        start = end + len(literal)
        end = start + len(content)
        if slot.trained:
            spans.append(Span(start - slot.num_chars_before, end + slot.num_chars_after, slot.role))
    expected = "".join(pieces) + skeleton.literals[-1]
    if text != expected:
        pairs = enumerate(zip(text, expected, strict=False))
        at = next((i for i, (is_there, would_be) in pairs if is_there != would_be), min(len(text), len(expected)))
        raise ValueError(
            "the chat template changes the contents, so it is not certain what is trained: it writes"
            f" {text[at : at + 40]!r} where {expected[at : at + 40]!r} would follow"
        )
    return spans


def label_encoding(encoding: Any, located: tuple[str, list[Span]]) -> TokenizedChat:
    """Labels from spans: a token is trained if its first character is in one.

    A token that began before a span is not trained: it holds text of the prompt, so after the prompt the model
    never has to say it. One that begins inside and reaches out is: a stop token that takes the line break with it.
    Tokens that share one character (the bytes of an emoji) begin at the same place, so they are trained together,
    and a space mark that the tokenizer adds to a word begins where the word does. Where tokens end is not looked
    at, because some tokenizers report empty ranges.
    """
    _, spans = located
    input_ids, offsets = encoding.ids, encoding.offsets
    labels = [IGNORED] * len(input_ids)
    for span in spans:
        first, end = (bisect_left(offsets, at, key=itemgetter(0)) for at in (span.start, span.end))
        labels[first:end] = input_ids[first:end]
    return TokenizedChat(input_ids, labels)


def split_runs(input_ids: Sequence[int], labels: Sequence[int]) -> list[tuple[list[int], bool]]:
    """Runs of token ids that are trained, or not: (ids, are they trained)."""
    pairs = zip(input_ids, labels, strict=True)
    runs = groupby(pairs, key=lambda pair: pair[1] != IGNORED)
    return [([token for token, _ in run], is_trained) for is_trained, run in runs]


def compile_special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches any special token; of two that begin alike, the longer."""
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens |= {tokenizer.eos_token} - {None}
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) never matches


def check_unicode(text: str) -> str:
    """`text`, which can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"contains half a character: the lone surrogate {text[error.start]!r}") from None
    return text


def attempt(function: Callable[..., T], value: Any, *args: Any) -> T | ValueError:
    """function(value, *args), or the ValueError that it raised or that `value` already is."""
    if isinstance(value, ValueError):
        return value
    try:
        return function(value, *args)
    except ValueError as error:
        return error
