"""Converts labelled rows to token ids, token types and targets, tokenized as transformers' tokenizers do by default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_trainer.data.chat import rendering
from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.normalizing import separate_reasoning
from mini_trainer.data.columns.base import IGNORED, TOKENS
from mini_trainer.data.rows.labelled import Content, Labelled, Labels, TextPair, Words, count_classes
from mini_trainer.distributed.messages import one_line

NUM_WORDS_SHOWN = 8  # words with labels shown of a printed sample
PROBE_WORDS = ["ab", "cd", "ef"]


@dataclass(frozen=True)
class TokenizedText:
    """Token ids and their target, or each token's class (IGNORED if it has none)."""

    input_ids: list[int]
    target: list[float] | list[int]
    is_sequence: bool  # whether the target is for the whole text
    type_ids: list[int] | None  # None if all tokens are of the first text
    is_truncated: bool
    label_counts: dict[str, int]
    said: str  # the labels in words
    is_weighted: bool = False
    loss_weights: None = None
    pictures: None = None
    spans: tuple[()] = ()

    @property
    def num_loss_counted_tokens(self) -> int:
        return 1 if self.is_sequence else sum(label != IGNORED for label in self.target)

    @property
    def labels(self) -> list[float] | list[int]:
        """One label per token, IGNORED if it has none."""
        return [IGNORED] * len(self.input_ids) if self.is_sequence else self.target

    @property
    def summary(self) -> str:
        return f"{len(self.input_ids):,} tokens, {self.said}"

    @property
    def shown(self) -> tuple[tuple[str, "TokenizedText"], ...]:
        """The parts of a preview, each with its title."""
        return (("", self),)


class LabelledTokenizer:
    """Tokenizes rows, cut to `max_length` tokens, and encodes their labels. `template_args`: of the chat template."""

    def __init__(
        self, tokenizer: Any, labels: Labels, *, max_length: int | None, template_args: Mapping[str, Any]
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} does not report the word of a token: use a model that has a fast"
                " tokenizer (tokenizer.json)"
            )
        self.tokenizer, self.labels, self.template_args = tokenizer, labels, template_args
        self.max_length = max_length
        tokenizer(["a"])  # sets the tokenizer to neither truncate nor pad
        self.backend = tokenizer.backend_tokenizer
        self.has_types = "token_type_ids" in tokenizer.model_input_names
        self.spaces_words = needs_spaces(self.backend)

    def tokenize(self, rows: Sequence[Labelled]) -> list[TokenizedText | ValueError]:
        """Each row's tokens and target, or the error that makes it unusable."""
        targets = [rendering.catch_error(self.labels.encode, row) for row in rows]
        prepared = [rendering.catch_error(self.prepare, row.content) for row in rows]
        by_kind: dict[tuple[bool, bool], list[int]] = {}
        for i, (row, text) in enumerate(zip(rows, prepared, strict=True)):
            if not isinstance(text, ValueError):
                kind = isinstance(row.content, Words), not isinstance(row.content, Chat)
                by_kind.setdefault(kind, []).append(i)
        encodings: dict[int, Any] = {}
        for (is_words, adds_special), indices in by_kind.items():
            encoded = self.encode([prepared[i] for i in indices], is_words=is_words, adds_special=adds_special)
            encodings.update(zip(indices, encoded, strict=True))
        return [
            rendering.catch_error(self.build, row, encodings.get(i), target, text)
            for i, (row, target, text) in enumerate(zip(rows, targets, prepared, strict=True))
        ]

    def prepare(self, content: Content) -> str | tuple[str, str] | list[str]:
        """The tokenizer's input for the content; a chat is rendered by its template."""
        match content:
            case TextPair():
                return content.first, content.second
            case Words() if self.spaces_words:
                return [content.words[0], *(f" {word}" for word in content.words[1:])]
            case Words():
                return list(content.words)
            case Chat():
                return self.render(content)
            case _:
                return content

    def render(self, chat: Chat) -> str:
        if self.tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template: name one with --chat-template, or use rows of text")
        args = {**self.template_args, **rendering.select_args(self.tokenizer, chat.template_args or {})}
        chat = separate_reasoning(self.tokenizer, chat)
        with rendering.template_errors():
            messages = rendering.prepare_for(self.tokenizer, chat.messages)
            text = self.tokenizer.apply_chat_template(messages, tools=chat.tools, tokenize=False, **args)
        return rendering.check_unicode(rendering.check_length(text))

    def encode(self, texts: Sequence[Any], *, is_words: bool, adds_special: bool) -> list[Any]:
        return self.backend.encode_batch(texts, is_pretokenized=is_words, add_special_tokens=adds_special)

    def build(self, row: Labelled, encoding: Any, target: list[float] | list[int], text: Any) -> TokenizedText:
        """The row's tokens and target. Raises ValueError for a row without tokens, or a label without a token."""
        if is_truncated := self.max_length is not None and len(encoding.ids) > self.max_length:
            encoding = self.encode_truncated(text, row.content)
        if not encoding.ids:
            raise ValueError("the tokenizer makes no tokens of the text")
        task, is_words = self.labels.task, isinstance(row.content, Words)
        said = self.describe(row, target)
        if is_words:
            target = spread_labels(encoding.word_ids, target, row.content.words, is_truncated=is_truncated)
        counts = count_classes(target, task)
        types = encoding.type_ids if self.has_types and any(encoding.type_ids) else None
        return TokenizedText(encoding.ids, target, task.objective != TOKENS, types, is_truncated, dict(counts), said)

    def encode_truncated(self, text: Any, content: Content) -> Any:
        """The encoding, truncated by the tokenizer: the longer text of a pair first, special tokens kept."""
        strategy, direction = "longest_first", self.tokenizer.truncation_side
        try:
            self.backend.enable_truncation(self.max_length, strategy=strategy, direction=direction)
            is_words, adds_special = isinstance(content, Words), not isinstance(content, Chat)
            (encoding,) = self.encode([text], is_words=is_words, adds_special=adds_special)
        except BaseException as error:  # panics of the tokenizer's Rust code are no Exceptions
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ValueError(f"cannot be cut to {self.max_length} tokens: {one_line(error)}") from None
        finally:
            self.backend.no_truncation()
        return encoding

    def describe(self, row: Labelled, target: Sequence[float]) -> str:
        """The row's labels in words."""
        task = self.labels.task
        if isinstance(row.content, Words):
            pairs = [
                f"{word} {task.label_names[label]}"
                for word, label in zip(row.content.words, target, strict=True)
                if label != IGNORED and task.label_names[label] != "O"
            ]
            more = f", and {len(pairs) - NUM_WORDS_SHOWN} more" if len(pairs) > NUM_WORDS_SHOWN else ""
            return f"words with labels: {', '.join(pairs[:NUM_WORDS_SHOWN]) or 'none'}{more}"
        if task.label_type == "regression":
            return f"value: {', '.join(f'{value:g}' for value in target)}"
        return f"label: {', '.join(count_classes(target, task)) or 'none'}"


def spread_labels(
    word_ids: Sequence[int | None], labels: Sequence[int], words: Sequence[str], *, is_truncated: bool
) -> list[int]:
    """Each token's label: its word's, if it is the word's first token. Raises ValueError for a word without tokens."""
    spread, seen = [], -1
    present = {word for word in word_ids if word is not None}
    last = max(present, default=-1) if is_truncated else len(words) - 1
    lost = next((i for i in range(last + 1) if i not in present and labels[i] != IGNORED), None)
    if lost is not None and not (is_truncated and lost < min(present)):  # cut on the left
        raise ValueError(f"word {lost + 1}, {words[lost]!r}, has no token, so its label would be lost")
    for word in word_ids:
        spread.append(IGNORED if word is None or word == seen else labels[word])
        seen = seen if word is None else word
    return spread


def needs_spaces(backend: Any) -> bool:
    """Whether words need a leading space to become the same tokens as in a text. They do with byte-level vocabularies,
    unless the tokenizer adds the spaces itself."""
    in_text = backend.encode(" ".join(PROBE_WORDS), add_special_tokens=False).ids
    first, *others = PROBE_WORDS

    def encode(words: list[str]) -> list[int]:
        return backend.encode(words, is_pretokenized=True, add_special_tokens=False).ids

    return encode(PROBE_WORDS) != in_text and encode([first, *(f" {word}" for word in others)]) == in_text
