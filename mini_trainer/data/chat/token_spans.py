"""Trained tokens of a row: tokens that begin in a trained passage; rows without a chat template."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from mini_trainer.data.chat.conversation import Completion, Document
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.tokens import (
    AS_TEXT,
    CONTROL,
    CONTROL_AS_TEXT,
    REFUSE,
    BorderEncoder,
    ByteEncoder,
    find_token,
)
from mini_trainer.data.columns.base import IGNORED


@dataclass(frozen=True)
class TrainedSpan:
    """Trained tokens [start, end) of a row, with their role and loss weight."""

    start: int
    end: int
    role: str
    weight: float = 1.0

    @property
    def num_targets(self) -> int:
        """Number of tokens, without the row's first, which is never predicted."""
        return self.end - max(self.start, 1)


@dataclass(frozen=True)
class Pictures:
    """The images of a row: path or data: URL, height and width, and tokens of each."""

    references: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]  # tokens [start, end) from each image's first to its last
    num_tokens: int
    input_ids: tuple[int, ...]  # the row as tokenized by the processor


DIVIDED = "divided"  # kind of the remark on a row whose passages did not begin with tokens of their own


@dataclass(frozen=True)
class Remark:
    """A remark on a row's turns (data/chat/prompting.py): its kind, the end of the prompt, and the row's text there.

    For an unread key, `prompted` is the message's role and `rendered` the key.
    """

    kind: str
    prompted: str = ""
    rendered: str = ""


@dataclass(frozen=True)
class TokenizedChat:
    """Token ids and their trained spans, in order. `is_weighted`: a message of the row has a weight."""

    input_ids: list[int]
    spans: list[TrainedSpan]
    is_weighted: bool = False
    pictures: Pictures | None = None
    is_stop_appended: bool = False  # by --missing-stop-token append
    remarks: tuple[Remark, ...] = ()

    @property
    def labels(self) -> list[int]:
        """One label per token, unshifted; IGNORED if not trained."""
        labels = [IGNORED] * len(self.input_ids)
        for span in self.spans:
            labels[span.start : span.end] = self.input_ids[span.start : span.end]
        return labels

    @property
    def loss_weights(self) -> list[float] | None:
        """One weight per token, 0 if not trained; None unless a message of the row has a weight."""
        if not self.is_weighted:
            return None
        weights = [0.0] * len(self.input_ids)
        for span in self.spans:
            weights[span.start : span.end] = [span.weight] * (span.end - span.start)
        return weights

    @property
    def num_loss_counted_tokens(self) -> int:
        return sum(span.num_targets for span in self.spans)

    @property
    def summary(self) -> str:
        images = "" if self.pictures is None else f", {len(self.pictures.references):,} images"
        return f"{len(self.input_ids):,} tokens, {self.num_loss_counted_tokens:,} trained{images}"

    @property
    def shown(self) -> tuple[tuple[str, "TokenizedChat"], ...]:
        """The parts of a preview, each with its title."""
        return (("", self),)

    @property
    def num_trained_by_role(self) -> Counter[str]:
        """Number of targets by role."""
        counts: Counter[str] = Counter()
        for span in self.spans:
            counts[span.role] += span.num_targets
        return +counts


@dataclass(frozen=True)
class TokenizedPair(TokenizedChat):
    """Two tokenized chats, one after the other: the chosen and the rejected side of a preference."""

    sides: tuple[TokenizedChat, ...] = ()
    margin: float | None = None
    weight: float | None = None

    @property
    def summary(self) -> str:
        chosen, rejected = self.sides
        return f"chosen: {chosen.summary}; rejected: {rejected.summary}"

    @property
    def shown(self) -> tuple[tuple[str, TokenizedChat], ...]:
        return tuple(zip(("chosen", "rejected"), self.sides, strict=True))


def pair_up(
    chosen: TokenizedChat, rejected: TokenizedChat, *, margin: float | None = None, weight: float | None = None
) -> TokenizedPair:
    """The pair; its spans have the sides' names as their roles."""
    return TokenizedPair(
        chosen.input_ids + rejected.input_ids,
        join_spans((chosen, rejected), ("chosen", "rejected")),
        is_stop_appended=chosen.is_stop_appended or rejected.is_stop_appended,
        remarks=chosen.remarks + rejected.remarks,
        sides=(chosen, rejected),
        margin=margin,
        weight=weight,
    )


@dataclass(frozen=True)
class TokenizedFeedback(TokenizedChat):
    """A tokenized answer, and after it the same prompt with an unrelated one."""

    sides: tuple[TokenizedChat, ...] = ()  # the second may be missing
    is_good: bool = True
    weight: float | None = None

    @property
    def labels(self) -> list[int]:
        """Also the unrelated answer's, which is measured and not trained."""
        return [label for side in self.sides for label in side.labels]

    @property
    def summary(self) -> str:
        return f"{'good' if self.is_good else 'bad'}: {self.sides[0].summary}"

    @property
    def shown(self) -> tuple[tuple[str, TokenizedChat], ...]:
        titles = ("good" if self.is_good else "bad", "unrelated, for KTO's point of reference")
        return tuple(zip(titles, self.sides, strict=False))


def add_mismatched(
    tokens: TokenizedChat, mismatched: TokenizedChat | None, *, is_good: bool, weight: float | None = None
) -> TokenizedFeedback:
    """The feedback; its spans, which are the answer's alone, have the role `good` or `bad`."""
    sides = (tokens,) if mismatched is None else (tokens, mismatched)
    return TokenizedFeedback(
        [token_id for side in sides for token_id in side.input_ids],
        join_spans((tokens,), ("good" if is_good else "bad",)),
        is_stop_appended=tokens.is_stop_appended,
        remarks=tokens.remarks,
        sides=sides,
        is_good=is_good,
        weight=weight,
    )


def join_spans(sides: Sequence[TokenizedChat], roles: Sequence[str]) -> list[TrainedSpan]:
    """The spans of sequences that follow each other; each sequence's have its role."""
    spans, offset = [], 0
    for side, role in zip(sides, roles, strict=False):
        spans += [replace(span, start=span.start + offset, end=span.end + offset, role=role) for span in side.spans]
        offset += len(side.input_ids)
    return spans


@dataclass(frozen=True)
class Passage:
    """Trained characters [start, end) of a rendered row, with their role and loss weight."""

    start: int
    end: int
    role: str
    weight: float = 1.0


@dataclass(frozen=True)
class Located:
    """A rendered row and its trained passages."""

    text: str
    passages: list[Passage]
    is_weighted: bool = False
    pictures: Pictures | None = None
    is_stop_appended: bool = False
    remarks: tuple[Remark, ...] = ()
    plain: tuple[tuple[int, int], ...] = ()  # characters [start, end) that are encoded without control tokens


def label_encoding(encoding: Any, located: Located, *, eos_token_id: int | None = None) -> TokenizedChat:
    """Converts passages to spans of tokens: a token is trained if its first character is in a passage.

    No token begins before a passage and reaches into it (data/chat/tokens.py). One that begins inside and reaches out
    is trained: a stop token that includes the line break. Tokens that share one character (the bytes of an emoji) begin
    at the same place, so they are trained together, and a space mark that the tokenizer adds to a word begins where the
    word does. The ends of tokens are not used, because some tokenizers report empty ranges. With `eos_token_id`, the
    row ends with exactly one such token, trained with the last passage.
    """
    input_ids, num_tokens = encoding.ids, len(encoding)
    if eos_token_id is not None:
        num_tokens -= input_ids[-1:] == [eos_token_id]
        input_ids = [*input_ids[:num_tokens], eos_token_id]
    spans = []
    for passage in located.passages:
        first = find_token(encoding, passage.start, num_tokens) if passage.start > 0 else 0
        end = find_token(encoding, passage.end, num_tokens) if passage.end < len(located.text) else len(input_ids)
        if first < end:
            spans.append(TrainedSpan(first, end, passage.role, passage.weight))
    if located.pictures is not None and tuple(input_ids) != located.pictures.input_ids:
        raise ValueError("the model's processor and tokenizer make different tokens of the row: it cannot be masked")
    return TokenizedChat(
        input_ids,
        spans,
        is_weighted=located.is_weighted,
        pictures=located.pictures,
        is_stop_appended=located.is_stop_appended,
        remarks=located.remarks,
    )


def split_by_training(input_ids: Sequence[int], labels: Sequence[int]) -> list[tuple[list[int], bool]]:
    """The row's maximal stretches of tokens that are all trained or all untrained: (ids, is_trained)."""
    pairs = zip(input_ids, labels, strict=True)
    stretches = groupby(pairs, key=lambda pair: pair[1] != IGNORED)
    return [([token for token, _ in stretch], is_trained) for is_trained, stretch in stretches]


Row = Completion | Document


class TextMasker:
    """Tokenizes and masks texts with one tokenizer."""

    def __init__(self, tokenizer: Any, borders: BorderEncoder) -> None:
        self.tokenizer, self.borders = tokenizer, borders

    def mask(self, rows: Sequence[Row]) -> list[TokenizedChat | ValueError]:
        """Each row's token ids and labels, or the error that makes it unusable; rows of one kind, ended by one eos
        token each. ValueError if the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, which has to end every document and completion")
        located = [catch_error(self.locate, row) for row in rows]
        encode = self.encode_completions if isinstance(rows[0], Completion) else self.encode_documents
        label = partial(label_encoding, eos_token_id=self.tokenizer.eos_token_id)
        return [
            catch_error(label, encoding, found) for encoding, found in zip(encode(rows, located), located, strict=True)
        ]

    def locate(self, row: Row) -> Located:
        """The row's text and its trained passage. ValueError for half a character, and a row that is to be refused."""
        if isinstance(row, Document):
            located = Located(check_unicode(row.text), [Passage(0, len(row.text), "document")])
        else:
            text = check_unicode(row.prompt + row.completion)
            located = Located(text, [Passage(len(row.prompt), len(text), "completion")])
        control = self.borders.control
        token = control.find([located.text])
        if token is None:
            return located
        return mark_control(located, token, [(0, len(located.text))], mode=control.mode)

    def encode_documents(self, rows: Sequence[Document], located: Sequence[Located | ValueError]) -> list[Any]:
        encodings = encode_each(self.borders.encoder, [text_of(found) for found in located], add_special_tokens=True)

        def choose(encoding: Any, found: Located) -> Any:
            return self.borders.encode(found.text, is_plain=True, adds_special=True) if found.plain else encoding

        return [catch_error(choose, *each) for each in zip(encodings, located, strict=True)]

    def encode_completions(self, rows: Sequence[Completion], located: Sequence[Located | ValueError]) -> list[Any]:
        pairs = zip(rows, located, strict=True)
        usable = [found if isinstance(found, ValueError) else row for row, found in pairs]
        prompts, answers = (
            encode_each(
                self.borders.encoder,
                [catch_error(attrgetter(name), row) for row in usable],
                add_special_tokens=name == "prompt",
            )
            for name in ("prompt", "completion")
        )
        return [catch_error(self.join, *each) for each in zip(usable, located, prompts, answers, strict=True)]

    def join(self, row: Completion, located: Located, prompt: Any, answer: Any) -> Any:
        """The completion's encoding, from those of its prompt and its answer."""
        is_plain = bool(located.plain)
        if not row.prompt:
            return self.borders.encode(row.completion, is_plain=is_plain, adds_special=True)
        if is_plain:
            prompt = self.borders.encode(row.prompt, is_plain=True, adds_special=True)
            answer = self.borders.encode(row.completion, is_plain=True)
        texts = (row.prompt, row.completion)
        return self.borders.join(texts, (prompt, answer), is_plain=(is_plain, is_plain), adds_special=True)


def mark_control(located: Located, token: str, places: Sequence[tuple[int, int]], *, mode: str) -> Located:
    """A row whose texts have a control token, at the `places`. ValueError if such rows are to be refused."""
    if mode == REFUSE:
        raise ValueError(f"has the control token {token!r} in its texts (--control-tokens refuse)")
    remark = Remark(CONTROL_AS_TEXT if mode == AS_TEXT else CONTROL, rendered=token)
    return replace(located, plain=tuple(places) if mode == AS_TEXT else (), remarks=(*located.remarks, remark))


def encode_each(encoder: ByteEncoder, texts: Sequence[str | ValueError], *, add_special_tokens: bool) -> list[Any]:
    """Encodes the texts in one call; errors among them keep their places."""
    usable = [text for text in texts if isinstance(text, str)]
    encodings = iter(encoder.encode(usable, add_special_tokens=add_special_tokens))
    return [next(encodings) if isinstance(text, str) else text for text in texts]


def text_of(found: Located | ValueError) -> str | ValueError:
    return found if isinstance(found, ValueError) else found.text


def check_unicode(text: str) -> str:
    """`text`; ValueError if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"contains half a character: the lone surrogate {text[error.start]!r}") from None
    return text
