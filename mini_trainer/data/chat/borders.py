"""Encodes an answer apart from the text before it, as inference does: no token spans the border between them.

A prompt that ends with a space, or with a line break, would otherwise share a token with the answer's beginning, which
the model is never asked for.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

from mini_trainer.data.chat.control_tokens import ControlTokens
from mini_trainer.data.chat.token_bytes import ByteEncoder, ByteEncoding

LEADS = ("\n", ".", "1", "a")  # before a text that is to be encoded as the continuation of another


@dataclass(frozen=True)
class Part:
    """A text's part from character `start` on. The encoding's first tokens, `skipped` of them, are of a `lead`."""

    start: int
    encoding: Any
    num_dropped: int = 0  # last tokens that are not the part's
    lead: str = ""
    skipped: int = 0

    @cached_property
    def ids(self) -> list[int]:
        return self.encoding.ids[self.skipped : len(self.encoding.ids) - self.num_dropped]

    def find_token(self, at: int) -> int:
        """The part's first token that begins at the text's character `at` or later."""
        own = len(self.lead) + at - self.start
        return find_token(self.encoding, own, self.skipped + len(self.ids)) - self.skipped


class JoinedEncoding:
    """The encodings of a text's parts, one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.ids = list(chain.from_iterable(part.ids for part in parts))
        self.bounds = [0, *accumulate(len(part.ids) for part in parts)]

    def __len__(self) -> int:
        return len(self.ids)

    def find_token(self, at: int) -> int:
        """The first token that begins at character `at` or later."""
        i = max(i for i, part in enumerate(self.parts) if part.start <= at)
        return self.bounds[i] + self.parts[i].find_token(at)


class BorderEncoder:
    """Encodes the parts of texts with one tokenizer."""

    def __init__(self, tokenizer: Any, encoder: ByteEncoder, control: ControlTokens) -> None:
        self.encoder, self.control = encoder, control
        self.backend, self.eos = encoder.backend, (tokenizer.eos_token_id, tokenizer.eos_token)

    def divide(self, text: str, starts: Sequence[int], *, plain: Sequence[tuple[int, int]] = ()) -> JoinedEncoding:
        """The encodings of the text's parts, which begin at the `starts`; the `plain` parts [start, end) are encoded as
        if the tokenizer had no control tokens."""
        bounds = sorted({0, *starts, *chain.from_iterable(plain), len(text)})
        texts = [text[start:end] for start, end in pairwise(bounds)]
        is_plain = [any(start <= at < end for start, end in plain) for at in bounds[:-1]]
        encodings = [self.encode(each, is_plain=one) for each, one in zip(texts, is_plain, strict=True)]
        return self.join(texts, encodings, is_plain=is_plain)

    def encode(self, text: str, *, is_plain: bool = False, adds_special: bool = False) -> Any:
        """The text's encoding; if `is_plain` as if the tokenizer had no control tokens, ValueError if it still has."""
        if is_plain:
            self.control.check(encode(text, self.control.plain).ids, text)
        return encode(text, self.control.plain if is_plain else self.encoder, adds_special=adds_special)

    def join(
        self,
        texts: Sequence[str],
        encodings: Sequence[Any],
        *,
        is_plain: Sequence[bool],
        adds_special: bool = False,
    ) -> JoinedEncoding:
        """The encodings of the parts of one text; `adds_special`: the first is encoded as the tokenizer begins and ends
        texts, and keeps the beginning.

        Raises ValueError if their tokens together do not decode to the text.
        """
        parts = [Part(0, encodings[0], num_dropped=self.count_ending(encodings[0].ids, texts[0]) * adds_special)]
        for i, text in enumerate(texts[1:], start=1):
            before = "".join(texts[:i])
            part = Part(len(before), encodings[i])
            if not isinstance(part.encoding, ByteEncoding):  # whose tokens' bytes are the text's
                encoder = self.control.plain if is_plain[i] else self.encoder
                wholes = [
                    encode(before + text, each, adds_special=adds_special).ids for each in {self.encoder, encoder}
                ]
                wholes = [ids[: len(ids) - self.count_ending(ids, text) * adds_special] for ids in wholes]
                part = self.choose(parts, chain([part], list_continuations(part, text, encoder)), text, wholes)
            parts.append(part)
        return JoinedEncoding(parts)

    def choose(self, parts: Sequence[Part], candidates: Iterable[Part], text: str, wholes: list[list[int]]) -> Part:
        """The first of the text's encodings with which, after the `parts`, decoding gives the row's text, as it is or
        as the tokenizer alters texts: this one alone, or all of them, whose tokens are the `wholes`."""
        first, *others = candidates
        ids = list(chain.from_iterable(part.ids for part in parts))
        before, alone = self.decode(ids), self.decode(first.ids)
        wanted = {before + text, *map(self.decode, wholes)}
        if leading_space(alone) == leading_space(text):  # not with a space mark of its own
            wanted.add(before + alone)
        for part in (first, *others):
            if self.decode([*ids, *part.ids]) in wanted:
                return part
        raise ValueError(
            f"the tokenizer cannot encode the answer apart from its prompt: {before[-20:]!r} and {text[:20]!r} would"
            " not decode to the row's text; move the space at the prompt's end to the answer's beginning"
        )

    def count_ending(self, ids: Sequence[int], text: str) -> int:
        return count_ending(ids, text, *self.eos)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


def encode(text: str, encoder: ByteEncoder, *, adds_special: bool = False) -> Any:
    (encoding,) = encoder.encode([text], add_special_tokens=adds_special)
    return encoding


def count_ending(ids: Sequence[int], text: str, eos_token_id: int | None, eos_token: str | None) -> int:
    """Last tokens with which the tokenizer ends a text by itself: one eos token that the text does not have."""
    return int(len(ids) > 1 and ids[-1] == eos_token_id and not text.endswith(eos_token))


def leading_space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def list_continuations(part: Part, text: str, encoder: ByteEncoder) -> Iterator[Part]:
    """The text behind characters that share no token with it: without a space mark for its beginning."""
    for lead in LEADS:
        encoding = encode(lead + text, encoder)
        if not spans_border(encoding, len(lead)):
            skipped = find_token(encoding, len(lead), len(encoding.ids))
            yield Part(part.start, encoding, lead=lead, skipped=skipped)


def spans_border(encoding: Any, at: int) -> bool:
    """Whether a token has characters on both sides of the border before character `at`."""
    if isinstance(encoding, ByteEncoding):
        return encoding.find_start(at) is None
    token = encoding.char_to_token(at)
    return token is not None and encoding.token_to_chars(token)[0] < at


def find_token(encoding: Any, at: int, num_tokens: int) -> int:
    """The first of the tokens that begins at character `at` or later.

    Searches around the token that has the character; building the list of all offsets takes much longer.
    """
    if isinstance(encoding, JoinedEncoding):
        return min(encoding.find_token(at), num_tokens)
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
