"""Trained tokens of a row: tokens that begin in a trained passage."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mini_trainer.data.chat.borders import find_token
from mini_trainer.data.columns.labels import IGNORED


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
    is_stop_appended: bool = False  # by --append-stop-token
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

    No token begins before a passage and reaches into it (data/chat/borders.py). One that begins inside and reaches out
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
