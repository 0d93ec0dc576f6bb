"""Token ids of texts, and which of them are trained: where each token is, and the border between prompt and answer.

In byte-level vocabularies a token is some bytes. If the concatenated bytes of a text's tokens are the text's bytes,
they give each token's place: nothing is assumed about normalizers, pre-tokenizers or special tokens. If they are not,
or if a requested place is within a token, the text is encoded again, with offsets.

A prompt that ends with a space, or with a line break, would otherwise share a token with the answer's beginning, which
the model is never asked for.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from mini_trainer.data.chat import conversation
from mini_trainer.data.chat.conversation import Completion, Document, Located, Passage, TokenizedChat
from mini_trainer.data.chat.linting import Linter
from mini_trainer.data.chat.rendering import catch_error, check_unicode
from mini_trainer.data.columns.base import IGNORED

LEADS = ("\n", ".", "1", "a")  # before a text that is to be encoded as the continuation of another

PlainText = Completion | Document


class ByteEncoder:
    """Encodes with one tokenizer. Invariant: `token_bytes[i]` are the bytes of token i, if it is byte-level."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer(["a"])  # sets the tokenizer to neither truncate nor pad
        self.backend = tokenizer.backend_tokenizer
        self.token_bytes = find_token_bytes(tokenizer)
        self.num_bytes = np.fromiter(map(len, self.token_bytes or []), np.int64)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        """Encodings as `encode_batch` returns them, or equivalents with `ids` and the places of tokens."""
        if self.token_bytes is None:
            return self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        ids = [encoding.ids for encoding in encoded]
        ends = np.cumsum(self.num_bytes[np.fromiter(chain.from_iterable(ids), np.int64)])  # of all texts in a row
        bounds = np.cumsum([0, *map(len, ids)])
        starts = np.concatenate([[0], ends])[bounds]
        rows = zip(texts, ids, pairwise(bounds.tolist()), starts.tolist(), strict=False)
        return [
            ByteEncoding(text, row, ends[first:last], start, self.backend, add_special_tokens)
            if b"".join(map(self.token_bytes.__getitem__, row)) == text.encode()
            else self.backend.encode(text, add_special_tokens=add_special_tokens)
            for text, row, (first, last), start in rows
        ]


class ByteEncoding:
    """An encoding whose tokens' concatenated bytes are its text's. Has the methods of `tokenizers.Encoding` in use.
    `ends`: the end of each token, in bytes of a longer text in which this one starts after `start` bytes."""

    def __init__(
        self, text: str, ids: list[int], ends: np.ndarray, start: int, backend: Any, add_special_tokens: bool
    ) -> None:
        self.text, self.ids, self.ends, self.start = text, ids, ends, start
        self.backend, self.add_special_tokens = backend, add_special_tokens

    @cached_property
    def slow(self) -> Any:
        return self.backend.encode(self.text, add_special_tokens=self.add_special_tokens)

    def find_start(self, at: int) -> int | None:
        """The token that begins at character `at`; None if that is within a token."""
        if at == 0:
            return 0
        end = self.start + (at if self.text.isascii() else len(self.text[:at].encode()))
        token = int(self.ends.searchsorted(end))
        return token + 1 if self.ends[token] == end else None


def find_token_bytes(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every token by id; None if the vocabulary is not byte-level."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # seconds to import

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    decoder = state["decoder"] or {}
    if "ByteLevel" not in {part["type"] for part in (decoder, *decoder.get("decoders", []))}:
        return None
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    added = {token_id: token.content.encode() for token_id, token in tokenizer.added_tokens_decoder.items()}
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id not in added}
    token_bytes = [b""] * (1 + max([*vocabulary, *added]))
    for token_id, token in vocabulary.items():
        token_bytes[token_id] = bytes(byte_of[character] for character in token if character in byte_of)
    for token_id, content in added.items():
        token_bytes[token_id] = content
    return token_bytes


@dataclass(frozen=True)
class TextPart:
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

    def __init__(self, parts: Sequence[TextPart]) -> None:
        self.parts = parts
        self.ids = list(chain.from_iterable(part.ids for part in parts))
        self.bounds = [0, *accumulate(len(part.ids) for part in parts)]

    def find_token(self, at: int) -> int:
        """The first token that begins at character `at` or later."""
        i = max(i for i, part in enumerate(self.parts) if part.start <= at)
        return self.bounds[i] + self.parts[i].find_token(at)


class BorderEncoder:
    """Encodes the parts of texts with one tokenizer."""

    def __init__(self, tokenizer: Any, encoder: ByteEncoder) -> None:
        self.encoder = encoder
        self.backend, self.eos = encoder.backend, (tokenizer.eos_token_id, tokenizer.eos_token)

    def divide(self, text: str, starts: Sequence[int]) -> JoinedEncoding:
        """The encodings of the text's parts, which begin at the `starts`."""
        texts = [text[start:end] for start, end in pairwise(sorted({0, *starts, len(text)}))]
        return self.join(texts, list(map(self.encode, texts)))

    def encode(self, text: str, *, adds_special: bool = False) -> Any:
        (encoding,) = self.encoder.encode([text], add_special_tokens=adds_special)
        return encoding

    def join(self, texts: Sequence[str], encodings: Sequence[Any], *, adds_special: bool = False) -> JoinedEncoding:
        """The encodings of the parts of one text; `adds_special`: the first is encoded as the tokenizer begins and ends
        texts, and keeps the beginning. Raises ValueError if their tokens together do not decode to the text."""
        num_ending = count_ending(encodings[0].ids, texts[0], *self.eos)
        parts = [TextPart(0, encodings[0], num_dropped=num_ending * adds_special)]
        for i, text in enumerate(texts[1:], start=1):
            before = "".join(texts[:i])
            part = TextPart(len(before), encodings[i])
            if not isinstance(part.encoding, ByteEncoding):  # whose tokens' bytes are the text's
                whole = self.encode(before + text, adds_special=adds_special).ids
                whole = whole[: len(whole) - count_ending(whole, text, *self.eos) * adds_special]
                part = self.choose(parts, chain([part], self.list_continuations(part, text)), text, whole)
            parts.append(part)
        return JoinedEncoding(parts)

    def list_continuations(self, part: TextPart, text: str) -> Iterator[TextPart]:
        """The text behind characters that share no token with it: without a space mark for its beginning."""
        for lead in LEADS:
            encoding = self.encode(lead + text)
            if not spans_border(encoding, len(lead)):
                skipped = find_token(encoding, len(lead), len(encoding.ids))
                yield TextPart(part.start, encoding, lead=lead, skipped=skipped)

    def choose(self, parts: Sequence[TextPart], choices: Iterable[TextPart], text: str, whole: list[int]) -> TextPart:
        """The first of the text's encodings with which, after the `parts`, decoding gives the row's text, as it is or
        as the tokenizer alters texts: this one alone, or all of them, whose tokens are the `whole`."""
        first, *others = choices
        ids = list(chain.from_iterable(part.ids for part in parts))
        before, alone = self.decode(ids), self.decode(first.ids)
        wanted = {before + text, self.decode(whole)}
        if leading_space(alone) == leading_space(text):  # not with a space mark of its own
            wanted.add(before + alone)
        for part in (first, *others):
            if self.decode([*ids, *part.ids]) in wanted:
                return part
        raise ValueError(
            f"the tokenizer cannot encode the answer apart from its prompt: {before[-20:]!r} and {text[:20]!r} would"
            " not decode to the row's text; move the space at the prompt's end to the answer's beginning"
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


def count_ending(ids: Sequence[int], text: str, eos_token_id: int | None, eos_token: str | None) -> int:
    """Last tokens with which the tokenizer ends a text by itself: one eos token that the text does not have."""
    return int(len(ids) > 1 and ids[-1] == eos_token_id and not text.endswith(eos_token))


def leading_space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def spans_border(encoding: Any, at: int) -> bool:
    """Whether a token has characters on both sides of the border before character `at`."""
    if isinstance(encoding, ByteEncoding):
        return encoding.find_start(at) is None
    token = encoding.char_to_token(at)
    return token is not None and encoding.token_to_chars(token)[0] < at


def find_token(encoding: Any, at: int, num_tokens: int) -> int:
    """The first of the tokens that begins at character `at` or later. Searches around the token that has the character;
    building the list of all offsets takes much longer."""
    if isinstance(encoding, JoinedEncoding):
        return min(encoding.find_token(at), num_tokens)
    if isinstance(encoding, ByteEncoding):
        if (token := encoding.find_start(at)) is not None:
            return min(token, num_tokens)
        encoding = encoding.slow
    if (token := encoding.char_to_token(at)) is None:  # a character that no token has
        return bisect_left(encoding.offsets[:num_tokens], at, key=itemgetter(0))
    while token > 0 and (chars := encoding.token_to_chars(token - 1)) is not None and chars[0] >= at:
        token -= 1
    while token < num_tokens and encoding.token_to_chars(token)[0] < at:
        token += 1
    return token


def label_encoding(encoding: Any, located: Located, *, eos_token_id: int | None = None) -> TokenizedChat:
    """Converts passages to spans of tokens: a token is trained if its first character is in a passage.

    No token begins before a passage and reaches into it (data/chat/tokens.py). One that begins inside and reaches out
    is trained: a stop token that includes the line break. Tokens that share one character (the bytes of an emoji) begin
    at the same place, so they are trained together, and a space mark that the tokenizer adds to a word begins where the
    word does. The ends of tokens are not used, because some tokenizers report empty ranges. With `eos_token_id`, the
    row ends with exactly one such token, trained with the last passage.
    """
    input_ids, num_tokens = encoding.ids, len(encoding.ids)
    if eos_token_id is not None:
        num_tokens -= input_ids[-1:] == [eos_token_id]
        input_ids = [*input_ids[:num_tokens], eos_token_id]
    spans = []
    for passage in located.passages:
        first = find_token(encoding, passage.start, num_tokens) if passage.start > 0 else 0
        end = find_token(encoding, passage.end, num_tokens) if passage.end < len(located.text) else len(input_ids)
        if first < end:
            spans.append(conversation.TrainedSpan(first, end, passage.role, passage.weight))
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
    stretches = groupby(zip(input_ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED)
    return [([token for token, _ in stretch], is_trained) for is_trained, stretch in stretches]


class TextMasker:
    """Tokenizes and masks texts with one tokenizer."""

    def __init__(self, tokenizer: Any, borders: BorderEncoder, linter: Linter) -> None:
        self.tokenizer, self.borders, self.linter = tokenizer, borders, linter

    def mask(self, rows: Sequence[PlainText]) -> list[TokenizedChat | ValueError]:
        """Each row's token ids and labels, or the error that makes it unusable; rows of one kind, ended by one eos
        token each. ValueError if the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, which has to end every document and completion")
        located = [catch_error(self.locate, row) for row in rows]
        if isinstance(rows[0], Completion):
            encodings = self.encode_completions(rows, located)
        else:
            encodings = encode_each(self.borders.encoder, located, "text", add_special_tokens=True)
        label = partial(label_encoding, eos_token_id=self.tokenizer.eos_token_id)
        return [catch_error(label, *each) for each in zip(encodings, located, strict=True)]

    def locate(self, row: PlainText) -> Located:
        """The row's text and its trained passage. ValueError for half a character, and a row that is to be refused."""
        if isinstance(row, Document):
            located = Located(check_unicode(row.text), [Passage(0, len(row.text), "document")])
        else:
            text = check_unicode(row.prompt + row.completion)
            located = Located(text, [Passage(len(row.prompt), len(text), "completion")])
        return self.linter.lint(located)

    def encode_completions(self, rows: Sequence[Completion], located: Sequence[Located | ValueError]) -> list[Any]:
        usable = [found if isinstance(found, ValueError) else row for row, found in zip(rows, located, strict=True)]
        encode = partial(encode_each, self.borders.encoder, usable)
        prompts, answers = encode("prompt", add_special_tokens=True), encode("completion", add_special_tokens=False)
        return [catch_error(self.join, *each) for each in zip(usable, prompts, answers, strict=True)]

    def join(self, row: Completion, prompt: Any, answer: Any) -> Any:
        """The completion's encoding, from those of its prompt and its answer."""
        if not row.prompt:
            return self.borders.encode(row.completion, adds_special=True)
        return self.borders.join((row.prompt, row.completion), (prompt, answer), adds_special=True)


def encode_each(encoder: ByteEncoder, rows: Sequence[Any], name: str, *, add_special_tokens: bool) -> list[Any]:
    """Encodes the texts that the rows have under `name` in one call; errors among the rows keep their places."""
    texts = [getattr(row, name) for row in rows if not isinstance(row, ValueError)]
    encodings = iter(encoder.encode(texts, add_special_tokens=add_special_tokens))
    return [row if isinstance(row, ValueError) else next(encodings) for row in rows]
