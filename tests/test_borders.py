"""Prompts and answers are tokenized apart with vocabularies that treat spaces and line breaks in different ways.

Where tokens stand, found without offsets, is where offsets say.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from make_tiny_model import train_tokenizer
from small_tokenizers import MAKERS, wrap
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mini_trainer.data.chat.conversation import DIVIDED, Chat, Completion
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.tokens import ByteEncoder, ByteEncoding
from mini_trainer.data.rows.preference_rows import Feedback, Preference, mask_feedback, mask_preferences
from mini_trainer.data.rows.prompts import encode_text

PROMPTS = ["Answer: ", "Answer:", "Answer:\n", "### Response:\n\n", "Q? "]
ANSWERS = ["Lima", " Lima", "yes", "\nno", "\n\nLima", "51", "  yes"]


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    made = wrap(request.param)
    made.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return made


def check_side(tokenizer, side, *, prompt_ids: list[int], text: str, answer: str) -> None:
    """The prompt's tokens are inference's, all that follow are trained, and decoding gives the tokenizer's own text."""
    labels = side.labels
    assert side.input_ids[: len(prompt_ids)] == prompt_ids
    assert set(labels[: len(prompt_ids)]) <= {-100}
    assert labels[len(prompt_ids) :] == side.input_ids[len(prompt_ids) :]
    assert side.input_ids[-1] == tokenizer.eos_token_id
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(side.input_ids[:-1]) == tokenizer.decode(whole)
    trained = tokenizer.decode([tokenizer.eos_token_id, *side.input_ids[len(prompt_ids) : -1]])
    assert "".join(answer.split()) == "".join(trained.removeprefix("</s>").split())


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_whole_answer_is_trained_after_inferences_prompt(tokenizer, prompt):
    masker = ChatMasker(tokenizer)
    prompt_ids = encode_text(prompt, tokenizer, is_rendered=False)
    ended = encode_text(prompt + tokenizer.eos_token, tokenizer, is_rendered=False)
    assert ended[-1] == tokenizer.eos_token_id != prompt_ids[-1]  # the prompt's own
    pairs = [Preference(prompt, Completion(prompt, one), Completion(prompt, "Quito")) for one in ANSWERS]
    rated = [Feedback(prompt, Completion(prompt, one), True) for one in ANSWERS]
    completions = masker.mask([Completion(prompt, answer) for answer in ANSWERS])
    for answer, row, pair, feedback in zip(
        ANSWERS, completions, mask_preferences(masker, pairs), mask_feedback(masker, rated), strict=True
    ):
        for side in (row, pair.sides[0], feedback.sides[0]):
            check_side(tokenizer, side, prompt_ids=prompt_ids, text=prompt + answer, answer=answer)


def test_what_would_not_decode_to_the_rows_text_is_refused(monkeypatch):
    tokenizer = wrap("make_sentencepiece")
    monkeypatch.setattr("mini_trainer.data.chat.tokens.LEADS", ())
    refused, kept = ChatMasker(tokenizer).mask([Completion("Answer: ", "Lima"), Completion("", "Lima")])
    assert isinstance(refused, ValueError) and "'Answer: '" in str(refused) and "'Lima'" in str(refused)
    assert tokenizer.decode(kept.input_ids) == "Lima</s>"


def test_answers_of_chats_are_trained_whole(tokenizer):
    masker = ChatMasker(tokenizer)
    if tokenizer.unk_token_id not in tokenizer("It is 4.")["input_ids"]:  # has all characters of the check's chats
        assert len(masker.check_template()) <= 1
    question = {"role": "user", "content": "Q? "}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True)["input_ids"]
    for answer in ("Lima", "yes"):
        chat = Chat([question, {"role": "assistant", "content": answer}])
        (row,) = masker.mask([chat])
        text = tokenizer.apply_chat_template(chat.messages, tokenize=False).removesuffix("</s>")
        check_side(tokenizer, row, prompt_ids=prompt, text=text, answer=answer)
        whole = tokenizer.apply_chat_template(chat.messages, return_dict=True)["input_ids"]
        assert (row.input_ids != whole) <= (DIVIDED in {remark.kind for remark in row.remarks})


def test_a_pair_s_prompt_has_inference_s_tokens_also_where_no_token_spans_the_border():
    template = (
        "{% for m in messages %}{{ m.role + '\n\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n\n' }}{% endif %}"
    )
    tokenizer = train_tokenizer(["assistant\n\n", "user\n\n", "Lima"] * 9, vocab_size=300, chat_template=template)
    chat = Chat([{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "Lima"}])
    prompt, whole = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=True)["input_ids"]
        for messages, asks in ((chat.messages[:1], True), (chat.messages, False))
    )
    (row,) = ChatMasker(tokenizer).mask([chat], divides=True)
    rest = row.input_ids[len(prompt) :]
    assert whole[: len(prompt)] != prompt == row.input_ids[: len(prompt)] and tokenizer.decode(rest) == "Lima<|im_end|>"
    assert row.labels == [-100] * len(prompt) + rest


@pytest.fixture(scope="module")
def mixed_tokenizer():
    return train_tokenizer(["How many are 12 and 30? 42 user assistant 好 é 😀 the"] * 9, vocab_size=350)


@example(text=" \U0001f000", special="")  # its first bytes are in the space's token
@given(
    text=st.text(
        st.one_of(st.sampled_from("How many 12好é😀\u0301 \n"), st.characters(exclude_categories=["Cs"])), max_size=30
    ),
    special=st.sampled_from(["", "<|im_end|>", "<|im_start|>"]),
)
def test_tokens_stand_where_offsets_say(mixed_tokenizer, text, special):
    text += special + text
    (fast,) = ByteEncoder(mixed_tokenizer).encode([text], add_special_tokens=False)
    exact = mixed_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert isinstance(fast, ByteEncoding)
    assert fast.ids == exact.ids
    # A token of a character's later bytes does not begin there.
    ends = [0, *(end for _, end in exact.offsets)]
    starts = {start for (start, _), end in zip(exact.offsets, ends, strict=False) if end <= start}
    for at in range(len(text)):
        token = fast.find_start(at)
        assert token is None or exact.offsets[token][0] == at, "it begins there"
        assert token is None or token == 0 or exact.offsets[token - 1][0] < at, "and none before it does"
        assert token is not None or at not in starts or exact.offsets[fast.slow.char_to_token(at)][0] == at


def test_texts_that_a_normalizer_changes_are_encoded_with_offsets(mixed_tokenizer):
    backend = Tokenizer.from_str(mixed_tokenizer.backend_tokenizer.to_str())
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
