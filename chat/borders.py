"""Encodes an answer apart from the text before it, as inference does: no token spans the border between them.

A prompt that ends with a space, or with a line break, would otherwise share a token with the answer's beginning, which
the model is never asked for.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

from chat.token_bytes import ByteEncoder, ByteEncoding

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

    def __init__(self, tokenizer: Any, encoder: ByteEncoder) -> None:
        self.encoder, self.backend, self.eos_token_id = encoder, encoder.backend, tokenizer.eos_token_id

    def divide(self, text: str, starts: Sequence[int]) -> JoinedEncoding:
        """The encodings of the text's parts, which begin at the `starts`."""
        texts = [text[start:end] for start, end in pairwise([0, *starts, len(text)])]
        return self.join(texts, self.encoder.encode(texts, add_special_tokens=False))

    def join(self, texts: Sequence[str], encodings: Sequence[Any], *, adds_special: bool = False) -> JoinedEncoding:
        """The encodings of the parts of one text; `adds_special`: the first is encoded as the tokenizer begins and ends
        texts, and keeps the beginning.

        Raises ValueError if their tokens together do not decode to the text.
        """
        parts = [Part(0, encodings[0], num_dropped=self.count_ending(encodings[0].ids, texts[0]) * adds_special)]
        for i, text in enumerate(texts[1:], start=1):
            before = "".join(texts[:i])
            plain = Part(len(before), encodings[i])
            exact = isinstance(plain.encoding, ByteEncoding)  # its tokens' bytes are the text's
            parts.append(plain if exact else self.choose(parts, plain, before, text, adds_special=adds_special))
        return JoinedEncoding(parts)

    def choose(self, parts: Sequence[Part], plain: Part, before: str, text: str, *, adds_special: bool) -> Part:
        """`plain`, or another encoding of its text with which, after the `parts`, decoding gives the row's text, as it
        is or as the tokenizer alters texts."""
        ids = list(chain.from_iterable(part.ids for part in parts))
        whole = self.encode(before + text, adds_special=adds_special).ids
        whole = whole[: len(whole) - self.count_ending(whole, text) * adds_special]
        wanted = (self.decode(ids) + text, self.decode(whole))
        for part in (plain, *self.list_continuations(plain.start, text)):
            if self.decode([*ids, *part.ids]) in wanted:
                return part
        raise ValueError(
            f"the tokenizer cannot encode the answer apart from its prompt: {before[-20:]!r} and {text[:20]!r} would"
            " not decode to the row's text; move the space at the prompt's end to the answer's beginning"
        )

    def list_continuations(self, start: int, text: str) -> Iterator[Part]:
        """The text behind characters that share no token with it: without a space mark for its beginning."""
        for lead in LEADS:
            encoding = self.encode(lead + text)
            if not spans_border(encoding, len(lead)):
                yield Part(start, encoding, lead=lead, skipped=find_token(encoding, len(lead), len(encoding.ids)))

    def encode(self, text: str, *, adds_special: bool = False) -> Any:
        (encoding,) = self.encoder.encode([text], add_special_tokens=adds_special)
        return encoding

    def count_ending(self, ids: Sequence[int], text: str) -> int:
        """Last tokens with which the tokenizer ends a text by itself."""
        return int(len(ids) > 1 and ids[-1] == self.eos_token_id and not text.endswith(self.eos_token))

    @cached_property
    def eos_token(self) -> str:
        return self.backend.id_to_token(self.eos_token_id)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


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
