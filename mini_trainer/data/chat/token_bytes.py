"""Encodes texts without computing offsets if the tokens' bytes show the place of each token.

In byte-level vocabularies a token is some bytes. If the concatenated bytes of a text's tokens are the text's bytes,
they give each token's place: nothing is assumed about normalizers, pre-tokenizers or special tokens. If they are not,
or if a requested place is within a token, the text is encoded again, with offsets.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np


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

    `ends`: the end of each token, in bytes of a longer text in which this one starts after `start` bytes.
    """

    def __init__(
        self, text: str, ids: list[int], ends: np.ndarray, start: int, backend: Any, add_special_tokens: bool
    ) -> None:
        self.text, self.ids, self.ends, self.start = text, ids, ends, start
        self.backend, self.add_special_tokens = backend, add_special_tokens

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def slow(self) -> Any:
        return self.backend.encode(self.text, add_special_tokens=self.add_special_tokens)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return self.slow.offsets

    def find_start(self, at: int) -> int | None:
        """The token that begins at character `at`; None if that is within a token."""
        if at == 0:
            return 0
        end = self.start + (at if self.text.isascii() else len(self.text[:at].encode()))
        token = int(self.ends.searchsorted(end))
        return token + 1 if self.ends[token] == end else None


def find_token_bytes(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every token by id; None if the vocabulary is not byte-level."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    decoder = state["decoder"] or {}
    if "ByteLevel" not in {part["type"] for part in (decoder, *decoder.get("decoders", []))}:
        return None
    byte_of = {character: byte for byte, character in enumerate(list_byte_characters())}
    added = {token_id: token.content.encode() for token_id, token in tokenizer.added_tokens_decoder.items()}
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id not in added}
    token_bytes = [b""] * (1 + max([*vocabulary, *added]))
    for token_id, token in vocabulary.items():
        token_bytes[token_id] = bytes(byte_of[character] for character in token if character in byte_of)
    for token_id, content in added.items():
        token_bytes[token_id] = content
    return token_bytes


def list_byte_characters() -> list[str]:
    """The character for each byte in byte-level vocabularies (GPT-2); printable ones stand for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)}
    others = (chr(256 + i) for i in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
