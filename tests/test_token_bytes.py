"""Where tokens stand, found without offsets, is where offsets say; where that is not certain, it is not used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_tiny_model import train_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mini_trainer.data.chat.tokens import ByteEncoder, ByteEncoding, list_byte_characters


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How many are 12 and 30? 42 user assistant 好 é 😀 the"] * 9, vocab_size=350)


@given(
    text=st.text(
        st.one_of(st.sampled_from("How many 12好é😀\u0301 \n"), st.characters(exclude_categories=["Cs"])), max_size=30
    ),
    special=st.sampled_from(["", "<|im_end|>", "<|im_start|>"]),
)
def test_tokens_stand_where_offsets_say(tokenizer, text, special):
    text += special + text
    (fast,) = ByteEncoder(tokenizer).encode([text], add_special_tokens=False)
    exact = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert isinstance(fast, ByteEncoding)
    assert fast.ids == exact.ids and len(fast) == len(exact)
    starts = {start for start, _ in exact.offsets}
    for at in range(len(text)):
        token = fast.find_start(at)
        assert token is None or exact.offsets[token][0] == at, "it begins there"
        assert token is None or token == 0 or exact.offsets[token - 1][0] < at, "and none before it does"
        assert token is not None or at not in starts or exact.offsets[fast.slow.char_to_token(at)][0] == at


def test_byte_characters_are_those_of_the_library():
    assert sorted(list_byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert list_byte_characters()[ord("\n")] == "Ċ" and list_byte_characters()[ord(" ")] == "Ġ"


def test_texts_that_a_normalizer_changes_are_encoded_with_offsets(tokenizer):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFC()
    encoder = ByteEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    changed, unchanged = encoder.encode(["e\u0301 a", "e a"], add_special_tokens=False)
    assert isinstance(unchanged, ByteEncoding) and not isinstance(changed, ByteEncoding)
    assert changed.ids == backend.encode("\u00e9 a").ids


def test_other_vocabularies_are_encoded_with_offsets():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    (encoding,) = ByteEncoder(PreTrainedTokenizerFast(tokenizer_object=backend)).encode(
        ["a b"], add_special_tokens=True
    )
    assert encoding.ids == [0, 1] and encoding.offsets == [(0, 1), (2, 3)]
