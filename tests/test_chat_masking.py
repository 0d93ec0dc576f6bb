"""What is trained, by template: expectations are written by hand, as the text of each run of trained tokens."""

import copy
import json
import re
import resource
import signal
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tiny_model import CHATML_TEMPLATE, train_tokenizer
from mask_oracle import list_trained, list_trained_texts
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mini_trainer.data.chat import rendering as chat_rendering
from mini_trainer.data.chat.conversation import DIVIDED, Chat, Completion, Document, Remark, TokenizedChat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.rendering import UnreadableContent
from mini_trainer.data.chat.tokens import find_token
from mini_trainer.data.chat.turns import UnknownPrompt
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer, load_stop_token_ids

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
SPECIAL_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

QUESTION, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Five."}
SYSTEM, RESULT = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "sum: 5"}


@pytest.fixture(scope="module")
def base_tokenizer() -> PreTrainedTokenizerFast:
    texts = ["How many? Five. Be brief. assistant user system tool sum: 5 \n\n"] * 50
    tokenizer = train_tokenizer(texts, vocab_size=400)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.bos_token = "<|begin_of_text|>"
    return tokenizer


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> ChatMasker:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    masker = ChatMasker(tokenizer)
    masker.check_template()
    return masker


def mask_one(
    masker: ChatMasker, messages: list[dict], *, unmask: bool = False, tools: list[dict] | None = None
) -> TokenizedChat:
    (masked,) = masker.mask([Chat(messages, unmask, tools=tools)])
    if isinstance(masked, ValueError):
        raise masked
    assert all(label in (IGNORED, token) for token, label in zip(masked.input_ids, masked.labels, strict=True))
    if tools or Remark(DIVIDED) not in masked.remarks:
        expected = masker.tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)
        assert masked.input_ids == expected["input_ids"]
    return masked


def trained_texts(masker: ChatMasker, messages: list[dict], **options: object) -> list[str]:
    masked = mask_one(masker, messages, **options)
    return list_trained_texts(masked, masker)


OR_SIX = {"role": "assistant", "content": "Or six."}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, QUESTION, ANSWER, RESULT, OR_SIX], ["Five.<|im_end|>", "Or six.<|im_end|>"]),
        ([ANSWER, QUESTION], ["Five.<|im_end|>"]),
        ([SYSTEM, ANSWER], ["Five.<|im_end|>"]),
        ([SYSTEM, QUESTION], []),
    ],
)
def test_chatml_trains_contents_and_stop_tokens(masker, messages, expected):
    assert trained_texts(masker, messages) == expected


def test_unmask_trains_every_role_but_system(base_tokenizer, masker):
    developer = {"role": "developer", "content": "Be kind."}
    texts = trained_texts(masker, [SYSTEM, developer, QUESTION, ANSWER, RESULT], unmask=True)
    assert texts == ["How many?<|im_end|>", "Five.<|im_end|>", "sum: 5<|im_end|>"]
    only_the_assistants = "('<|im_end|>' if message['role'] == 'assistant' else '')"
    masker = with_template(base_tokenizer, CHATML_TEMPLATE.replace("'<|im_end|>'", only_the_assistants))
    assert trained_texts(masker, [SYSTEM, QUESTION, ANSWER], unmask=True) == ["How many?", "Five.<|im_end|>"]


@pytest.mark.parametrize(
    ("written", "trained"),
    [
        ("<|im_end|><|eot_id|>", "<|im_end|>"),
        ("<|eot_id|><|im_end|><|end_header_id|>", "<|eot_id|><|im_end|>"),
        ("<|eot_id|><|end_header_id|>", "<|eot_id|><|end_header_id|>"),  # no token that ends generation
    ],
)
def test_of_several_tokens_the_first_that_ends_generation_ends_a_turn(base_tokenizer, written, trained):
    masker = with_template(base_tokenizer, CHATML_TEMPLATE.replace("<|im_end|>", written))
    texts = ["Five." + trained, "Or six." + trained]
    assert trained_texts(masker, [QUESTION, ANSWER, QUESTION, OR_SIX]) == texts


def test_a_stop_token_that_takes_the_line_break_after_it_ends_a_turn(base_tokenizer):
    """Phi 3's tokens are of this kind."""
    tokenizer = copy.deepcopy(base_tokenizer)
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)])
    masker = with_template(tokenizer, CHATML_TEMPLATE.replace("<|im_end|>", "<|end|>"))
    assert trained_texts(masker, [QUESTION, ANSWER, QUESTION, ANSWER]) == ["Five.<|end|>"] * 2


TAMPERED = {  # a wrong mask of two answers, by what the check says of it
    "returns other token ids": lambda ids, one, two: ([*ids, 0], [one, two]),
    "2 assistant turns, 1 stretches": lambda ids, one, two: (ids, [replace(one, end=two.end)]),
    "not all the assistant's": lambda ids, one, two: (ids, [one, replace(two, start=one.end + 1)]),
    "is trained instead of": lambda ids, one, two: (ids, [one, replace(two, start=two.start + 2)]),
    "does not end with a special token": lambda ids, one, two: (ids, [replace(one, end=one.end - 1), two]),
}


@pytest.mark.parametrize("reason", TAMPERED)
def test_the_check_of_a_template_notices_masks_that_are_wrong(masker, reason):
    checker = masker.chats.make_checker()

    def mask(chats: list[Chat]) -> list[TokenizedChat | ValueError]:
        (found,) = checker.mask(chats)
        if isinstance(found, ValueError) or len(found.spans) < 2:
            return [found]
        ids, spans = TAMPERED[reason](found.input_ids, *found.spans)
        return [replace(found, input_ids=ids, spans=spans)]

    checker.check("mine")
    with pytest.raises(ValueError, match=f"mine cannot be used: .*{reason}"):
        replace(checker, mask=mask).check("mine")


def test_a_prompt_that_is_not_before_the_answer_is_noted(masker):
    checker = masker.chats.make_checker()

    def mask(chats: list[Chat]) -> list[TokenizedChat | ValueError]:
        (found,) = checker.mask(chats)
        if isinstance(found, ValueError):
            return [found]
        return [replace(found, input_ids=[5, *found.input_ids[1:]], remarks=(Remark(DIVIDED),))]  # else it is refused

    notes = replace(checker, mask=mask).check("mine")
    assert notes and all(note.startswith("prompts end with ") for note in notes)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
         "{% if add_generation_prompt %}assistant: {% endif %}", "end-of-turn"),
        ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}",
         "add_generation_prompt"),
        (CHATML_TEMPLATE.replace("assistant\n", "model\n"), r"assistant\\n.*\|im_start\|>model"),
        (CHATML_TEMPLATE.replace("message['content']", "message['content'] | upper"), r"message 1 \(user\) 0 times"),
        (CHATML_TEMPLATE.replace("message['content']", "message['content'] * 2"), r"message 1 \(user\) 2 times"),
        (CHATML_TEMPLATE.replace("message['content']", "message['content'].replace('It', 'Id')"), "'Id is 4.*'It is 4"),
        (CHATML_TEMPLATE.replace("message['content']", "message['content'] | replace('\n', '')"), "whitespace"),
        ("{{ raise_exception('none of it') }}", "none of it"),
        ("{% if %}", "template fails"),
        (CHATML_TEMPLATE + "{{ ''.__class__.__mro__ }}", r"__class__.*unsafe"),  # outside of the sandbox
        pytest.param(CHATML_TEMPLATE + "{{ ('a' * 10 ** 10) and '' }}", "4 GiB", marks=ON_LINUX),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_masked_are_refused(base_tokenizer, template, reason):
    with pytest.raises(ValueError, match=reason):
        with_template(base_tokenizer, template)


def test_what_the_template_takes_out_of_answers_is_not_there_to_train(base_tokenizer):
    template = CHATML_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
    masker = with_template(base_tokenizer, template)
    thinking = {"role": "assistant", "content": "<think>x</think>Six."}
    assert trained_texts(masker, [QUESTION, thinking]) == ["Six.<|im_end|>"]
    texts = ["Six.<|im_end|>", "Five.<|im_end|>", "Six.<|im_end|>"]
    assert trained_texts(masker, [QUESTION, thinking, QUESTION, ANSWER, QUESTION, thinking]) == texts
    # an answer that holds what follows answers: where it ends cannot be seen, so it is rendered alone
    between = "<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    forged = {"role": "assistant", "content": f"<think>x</think>Six.{between}Seven."}
    texts = [f"Six.{between}Seven.<|im_end|>", "Six.<|im_end|>"]
    assert trained_texts(masker, [QUESTION, forged, QUESTION, thinking]) == texts


def test_what_the_template_changes_of_others_is_refused(base_tokenizer):
    template = CHATML_TEMPLATE.replace("message['content']", "message['content'].replace('cold', message['role'])")
    masker = with_template(base_tokenizer, template)
    answer = {"role": "assistant", "content": "It is cold."}
    assert trained_texts(masker, [QUESTION, answer]) == ["It is assistant.<|im_end|>"]
    with pytest.raises(ValueError, match=r"changes the contents.* 'user\?.*expected: 'cold\?"):
        trained_texts(masker, [{"role": "user", "content": "Is it cold?"}, answer], unmask=True)
    # where the user's text decides what the assistant's turn looks like, placeholders cannot stand for it
    template = CHATML_TEMPLATE.replace("'<|im_end|>'", "('<|im_end|>' if 'x' in messages[0].content else '<|eot_id|>')")
    masker = with_template(base_tokenizer, template)
    assert trained_texts(masker, [{"role": "user", "content": "y"}, answer]) == ["It is cold.<|eot_id|>"]


def test_one_failing_chat_leaves_the_others_alone(base_tokenizer):
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('not supported') }}{% endif %}"
    masker = with_template(base_tokenizer, no_system + CHATML_TEMPLATE)
    surrogate = {"role": "assistant", "content": "a\ud800b"}
    chats = [[QUESTION, ANSWER], [SYSTEM, ANSWER], [QUESTION, surrogate]]
    first, second, third, fourth = masker.mask([Chat(messages) for messages in chats] + [Document("a")])
    assert isinstance(second, ValueError) and isinstance(third, ValueError) and r"\ud800" in str(third)
    assert first == mask_one(masker, [QUESTION, ANSWER])
    assert fourth.labels[-1] == masker.tokenizer.eos_token_id


def test_documents_are_trained_whole_and_end_once(masker):
    for content in ("Five. How many?", "Five. How many?<|im_end|>"):
        (masked,) = masker.mask([Document(content)])
        assert masker.tokenizer.decode(masked.input_ids) == "Five. How many?<|im_end|>"
        assert masked.labels == masked.input_ids


@pytest.fixture(scope="module")
def masker(base_tokenizer: PreTrainedTokenizerFast) -> ChatMasker:
    return with_template(base_tokenizer, CHATML_TEMPLATE)


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
with_delimiters = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "assistant\n", "\n", " ", "Five."]), min_size=1
)
contents = texts | with_delimiters.map("".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), contents), min_size=1, max_size=5))
def test_any_chat_is_masked_as_if_concatenated(masker, turns):
    """ChatML by hand: the characters of each assistant turn are trained; turns are encoded apart where a token would
    begin before one and end in it."""
    masked = mask_one(masker, [{"role": role, "content": content} for role, content in turns])
    text, trained = "", set()
    for role, content in turns:
        text += f"<|im_start|>{role}\n"
        turn = content + "<|im_end|>"
        trained |= set(range(len(text), len(text) + len(turn))) if role == "assistant" else set()
        text += turn + "\n"
    spans = encode_by_hand(masker, text)[1]
    joined = [at for at in trained if at - 1 not in trained and any(start < at < end for start, end in spans)]
    bounds = [0, *sorted(joined), len(text)]
    ids, starts = [], []
    for begin, end in pairwise(bounds):
        part, places = encode_by_hand(masker, text[begin:end])
        ids += part
        starts += [begin + start for start, _ in places]
    assert ids == masked.input_ids
    assert [label != IGNORED for label in masked.labels] == [start in trained for start in starts]


def encode_by_hand(masker: ChatMasker, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoded = masker.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], encoded["offset_mapping"]


@settings(max_examples=100, deadline=None)
@given(contents, st.integers(0, 30))
def test_tokens_are_found_by_where_they_begin(masker, text, at):
    (encoding,) = masker.labeller.borders.encoder.encode([text], add_special_tokens=False)
    found = find_token(encoding, min(at, len(text)), len(encoding.ids))
    exact = masker.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert found == sum(start < min(at, len(text)) for start, _ in exact.offsets)


def test_fingerprints(base_tokenizer):
    same = copy.deepcopy(base_tokenizer)
    same.chat_template = "another"
    same.padding_side, same.model_max_length = "left", 7
    same.backend_tokenizer.enable_truncation(5)
    same.backend_tokenizer.enable_padding(length=9)
    assert fingerprint_tokenizer(same) == fingerprint_tokenizer(base_tokenizer)
    begins, bos = copy.deepcopy(base_tokenizer), (base_tokenizer.bos_token, base_tokenizer.bos_token_id)
    begins.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    same.add_tokens(["new"])
    assert len({fingerprint_tokenizer(each) for each in (base_tokenizer, same, begins)}) == 3
    templates = [fingerprint_chat_template(each) for each in (base_tokenizer, same)]
    same.chat_template = None
    assert fingerprint_chat_template(same) is None and len({None, *templates}) == 3


def test_messages_can_be_left_out_or_weighted(masker):
    left_out, half = {**ANSWER, "train": False}, {"role": "assistant", "content": "Six.", "weight": 0.5}
    messages = [{**QUESTION, "train": True}, left_out, QUESTION, half, QUESTION, ANSWER]
    (masked,) = masker.mask([Chat(messages)])
    plain = mask_one(masker, [{key: message[key] for key in ("role", "content")} for message in messages])
    assert masked.input_ids == plain.input_ids and plain.loss_weights is None
    trained = list_trained(masked)
    texts = ["How many?<|im_end|>", "Six.<|im_end|>", "Five.<|im_end|>"]
    assert [masker.tokenizer.decode(ids) for ids in trained] == texts
    expected = iter([1.0] * len(trained[0]) + [0.5] * len(trained[1]) + [1.0] * len(trained[2]))
    assert masked.loss_weights == [next(expected) if label != IGNORED else 0.0 for label in masked.labels]
    assert [(span.role, span.num_targets) for span in masked.spans] == [
        ("user", len(trained[0])), ("assistant", len(trained[1])), ("assistant", len(trained[2]))
    ]  # fmt: skip


def test_a_weight_of_zero_leaves_out(masker):
    masked, none = masker.mask(
        [Chat([QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER]), Chat([QUESTION, {**ANSWER, "weight": 0.0}])]
    )
    assert masked.loss_weights is None and set(none.labels) == {IGNORED} and none.spans == []
    assert [span.role for span in masked.spans] == ["assistant"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"train": "no"}, "'train': 'no'"),
        ({"weight": 2}, "'weight': 2"),
        ({"weight": True}, "'weight': True"),
        ({"weight": float("nan")}, "'weight': nan"),
        ({"train": False, "weight": 0.5}, r"'weight': 0\.5 .*not trained"),
    ],
)
def test_weights_that_mean_nothing_are_refused(masker, fields, reason):
    (error,) = masker.mask([Chat([QUESTION, {**ANSWER, **fields}])])
    assert isinstance(error, ValueError) and re.search(rf"message 2 \(assistant\) .*{reason}", str(error))
    (error,) = masker.mask([Chat([{**QUESTION, "weight": 0.5}, ANSWER])])
    assert isinstance(error, ValueError) and re.search(r"message 1 \(user\) .*'weight': 0\.5", str(error))


@pytest.mark.parametrize("completion", [" Five.", "Five.", "", "Five.<|im_end|>", " 👍 é"])
def test_completions_train_what_follows_the_prompt_and_one_eos(base_tokenizer, completion):
    masker = ChatMasker(base_tokenizer)
    (masked,) = masker.mask([Completion("How many?", completion)])
    eos = base_tokenizer.eos_token
    whole = base_tokenizer("How many?" + completion)["input_ids"]
    assert masked.input_ids == (whole if completion.endswith(eos) else [*whole, base_tokenizer.eos_token_id])
    (ids,) = list_trained(masked)
    assert masked.input_ids[-len(ids) :] == ids and base_tokenizer.decode(masked.input_ids[: -len(ids)]) == "How many?"
    assert base_tokenizer.decode(ids) == completion.removesuffix(eos) + eos
    assert [(span.role, span.num_targets) for span in masked.spans] == [("completion", len(ids))]


def test_texts_begin_as_the_tokenizer_begins_them(base_tokenizer):
    tokenizer = copy.deepcopy(base_tokenizer)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)]
    )
    completion, document = ChatMasker(tokenizer).mask([Completion("How many?", " Five."), Document("Five.")])
    assert tokenizer.decode(completion.input_ids) == f"{bos}How many? Five.{eos}"
    assert tokenizer.decode([label for label in completion.labels if label != IGNORED]) == f" Five.{eos}"
    assert tokenizer.decode(document.labels) == f"{bos}Five.{eos}"
    (span,) = document.spans
    assert (span.role, span.num_targets) == ("document", len(document.labels) - 1)  # nothing predicts the first


MARKED_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_generation_markers_are_used(base_tokenizer):
    masker = with_template(base_tokenizer, MARKED_TEMPLATE)
    texts = trained_texts(masker, [SYSTEM, QUESTION, ANSWER, RESULT, OR_SIX])
    assert texts == ["Five.<|im_end|>", "Or six.<|im_end|>"]
    assert trained_texts(masker, [QUESTION, ANSWER], unmask=True) == ["How many?<|im_end|>", "Five.<|im_end|>"]
    # they hold what a text of the template alone would not show
    changing = MARKED_TEMPLATE.replace(
        "m['content'] + '<|im_end|>\n' }}{% endgen", "'So: ' + m['content'] + '<|im_end|>\n' }}{% endgen"
    )
    assert trained_texts(with_template(base_tokenizer, changing), [QUESTION, ANSWER]) == ["So: Five.<|im_end|>"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}", "'It is 4.' .*special"),
        ("{% if m['role'] == 'assistant' %}", "{% if m['role'] != 'system' %}", "2 passages"),
    ],
)
def test_generation_markers_that_are_wrong_are_refused(base_tokenizer, old, new, reason):
    assert old in MARKED_TEMPLATE
    with pytest.raises(ValueError, match=reason):
        with_template(base_tokenizer, MARKED_TEMPLATE.replace(old, new))


def test_marked_headers_are_not_trained(base_tokenizer):
    template = MARKED_TEMPLATE.replace("{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}",
                                       "{% if m['role'] == 'assistant' %}")  # fmt: skip
    template = template.replace("{% generation %}", "{% generation %}{{ '<|im_start|>assistant\n' }}")
    assert trained_texts(with_template(base_tokenizer, template), [QUESTION, ANSWER]) == ["Five.<|im_end|>"]
    masker = with_template(base_tokenizer, template.replace("m['content']", "m['content'].split('</think>')[-1]"))
    thinking = {"role": "assistant", "content": "<think>x</think>Six."}  # not what the placeholders show
    assert trained_texts(masker, [QUESTION, thinking, QUESTION, ANSWER]) == ["Six.<|im_end|>", "Five.<|im_end|>"]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_an_answer_s_text_outside_of_the_marks_is_refused(base_tokenizer, key):
    written = "{% generation %}{{ m['content']"
    assert written in MARKED_TEMPLATE
    outside = MARKED_TEMPLATE.replace(written, f"{{{{ m.{key} or '' }}}}{written}")
    masker = with_template(base_tokenizer, outside)
    assert trained_texts(masker, [QUESTION, ANSWER]) == ["Five.<|im_end|>"]
    (refused,) = masker.mask([Chat([QUESTION, ANSWER | {"reasoning_content": "Count."}])])
    assert isinstance(refused, ValueError) and "the reasoning of message 2 outside of its turn" in str(refused)


def test_a_content_printed_as_a_list_is_refused(base_tokenizer):
    printing = CHATML_TEMPLATE.replace("message['content']", "(message['content'] | string)")
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    (refused,) = with_template(base_tokenizer, printing).mask(
        [Chat([{"role": "user", "content": parts}, ANSWER], images=("a.png",))]
    )
    assert isinstance(refused, ValueError) and "prints that of message 1 as a list" in str(refused)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


LONG = "{% if 'long' in messages[0].content %}"
SLOW = {
    "endless": (ENDLESS, "1 seconds"),
    "uses much memory": ("{{ ('a' * 6 * 10 ** 9) and '' }}", "4 GiB"),
    "writes much": ("{{ 'a' * 5000 }}", "writes 5,"),
}


@ON_LINUX
@pytest.mark.parametrize("case", SLOW)
def test_limits_hold_for_rows_that_the_template_check_does_not_have(base_tokenizer, monkeypatch, case):
    bomb, reason = SLOW[case]
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    masker = with_template(base_tokenizer, CHATML_TEMPLATE + LONG + bomb + "{% endif %}")
    monkeypatch.setattr(chat_rendering, "RENDER_SECONDS", 1.0)
    monkeypatch.setattr(chat_rendering, "RENDER_CHARACTERS", 4000)
    before, bad, after = masker.mask(
        [Chat([QUESTION, ANSWER]), Chat([{"role": "user", "content": "long"}, ANSWER]), Chat([QUESTION, ANSWER])]
    )
    assert reason in str(bad) and before == after == mask_one(masker, [QUESTION, ANSWER])
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == (limits, handler)
    assert signal.getitimer(signal.ITIMER_REAL) == signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


PARTS_BY_ROLE = (  # the user's content may be a list of parts; those of others are written as they are
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'user' and m.content is not string %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SWALLOWING = CHATML_TEMPLATE.replace("message['content']", "(message['content'] if message.content is string else '')")


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, PARTS_BY_ROLE, SWALLOWING])
def test_a_list_of_one_text_is_that_text(base_tokenizer, template):
    """As transformers renders the row with its contents as texts; several parts only where the template reads lists."""
    masker = with_template(base_tokenizer, template)
    texts = [SYSTEM, QUESTION, ANSWER]
    lists = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in texts]
    (masked,) = masker.mask([Chat(lists)])
    assert masked.input_ids == masker.tokenizer.apply_chat_template(texts, return_dict=True)["input_ids"]
    assert masked.labels == mask_one(masker, texts).labels
    several = [{"type": "text", "text": text} for text in ("How ", "many?")]
    (found,) = masker.mask([Chat([{"role": "user", "content": several}, ANSWER])])
    if template == PARTS_BY_ROLE:
        assert found == mask_one(masker, [QUESTION, ANSWER])
        return
    assert isinstance(found, UnreadableContent) and "message 1 (user)" in str(found) and "2 parts" in str(found)


PROMPTS_AFTER_USERS = CHATML_TEMPLATE.replace(
    "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'assistant'"
)


def test_two_assistant_turns_need_no_prompt_between_them(base_tokenizer):
    masker = with_template(base_tokenizer, PROMPTS_AFTER_USERS)
    expected = ["Five.<|im_end|>", "Or six.<|im_end|>", "Five.<|im_end|>"]
    assert trained_texts(masker, [QUESTION, ANSWER, OR_SIX, QUESTION, ANSWER]) == expected
    renaming = PROMPTS_AFTER_USERS.replace(
        "'<|im_start|>' + message['role'] + '\n'",
        "'<|im_start|>' + ('again' if loop.previtem and loop.previtem.role == message.role else message.role) + '\n'",
    )
    assert renaming != PROMPTS_AFTER_USERS
    (refused,) = with_template(base_tokenizer, renaming).mask([Chat([QUESTION, ANSWER, OR_SIX])])
    assert isinstance(refused, UnknownPrompt) and "role assistant" in str(refused)


REASONING = [("<|START_THINKING|>", "<|END_THINKING|>"), ("<think:fast>", "</think:fast>"),
             ("<|channel>thought\n", "<channel|>")]  # fmt: skip


@pytest.mark.parametrize(("opening", "closing"), REASONING)
def test_prompts_that_open_and_close_the_reasoning(base_tokenizer, opening, closing):
    """Turns do without it: they begin where the prompt and the row part."""
    prompt = f"{{{{ '<|im_start|>assistant\n{opening}{closing}' }}}}".replace("\n", "\\n")
    template = CHATML_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", prompt)
    assert prompt in template
    assert trained_texts(with_template(base_tokenizer, template), [QUESTION, ANSWER]) == ["Five.<|im_end|>"]


KIMI = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ '<call>functions.' + call.function.name + ':0 ' + call.function.arguments | tojson + '</call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' + m.content }}{% else %}{{ m.content }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_an_id_that_stands_only_with_the_result_does_not_belong_to_the_call(base_tokenizer):
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"n": 2}}}
    calling, result = {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}
    messages = [QUESTION, calling, result | {"tool_call_id": "functions.add:0"}, ANSWER]
    expected = ['<call>functions.add:0 {"n": 2}</call><|im_end|>', "Five.<|im_end|>"]
    assert trained_texts(with_template(base_tokenizer, KIMI), messages) == expected


TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id + ': ' + m.content | tojson }}"
    "{% else %}{{ m.content or '' }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '<call id=' + c.id + '>' + c.function | tojson + '</call>' }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def calls(*arguments: dict, ids: tuple[str, ...] = ("a", "b")) -> dict:
    made = [{"id": id, "type": "function", "function": {"name": "add", "arguments": values}}
            for id, values in zip(ids, arguments, strict=False)]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": made}


CALLS_ALONE = {"role": "assistant", "content": "", "tool_calls": calls({"x": "y"})["tool_calls"]}


trained_with_tools = partial(trained_texts, tools=[TOOL])


def test_tool_calls_are_trained_as_the_template_writes_them(base_tokenizer):
    masker = with_template(base_tokenizer, TOOL_TEMPLATE)
    result = {"role": "tool", "content": 'sum: "5"\n é', "tool_call_id": "a"}
    nested = {"text": 'a "b"\n<|im_end|> é', "list": [1, -2.5, None, True, {"x": "y"}], "empty": ""}
    text = '<call id=a>{"name": "add", "arguments": {"text": "a \\"b\\"\\n<|im_end|> é", "list": [1, -2.5, null, true, {"x": "y"}], "empty": ""}}</call><|im_end|>'  # noqa: E501
    assert trained_with_tools(masker, [QUESTION, calls(nested), result, ANSWER]) == [text, "Five.<|im_end|>"]
    two = '<call id=a>{"name": "add", "arguments": {"x": 1}}</call><call id=b>{"name": "add", "arguments": {}}</call><|im_end|>'  # noqa: E501
    assert trained_with_tools(masker, [QUESTION, calls({"x": 1}, {}), result, ANSWER]) == [two, "Five.<|im_end|>"]
    silent = '<call id=a>{"name": "add", "arguments": {}}</call><|im_end|>'
    assert trained_with_tools(masker, [QUESTION, calls({}), result, calls({}), result]) == [silent, silent]
    with_text = {**calls({"x": 1}), "content": "Wait."}
    text = 'Wait.<call id=a>{"name": "add", "arguments": {"x": 1}}</call><|im_end|>'
    assert trained_with_tools(masker, [QUESTION, with_text]) == [text]


def test_unmasked_tools_and_silent_turns(base_tokenizer):
    masker = with_template(base_tokenizer, TOOL_TEMPLATE)
    result = {"role": "tool", "content": "sum: 5", "tool_call_id": "of no call"}
    messages = [QUESTION, {"role": "assistant", "content": ""}, result, ANSWER]
    assert trained_texts(masker, messages) == ["<|im_end|>", "Five.<|im_end|>"]
    texts = ["How many?<|im_end|>", "<|im_end|>", 'sum: 5"<|im_end|>', "Five.<|im_end|>"]
    assert trained_texts(masker, messages, unmask=True) == texts
    masker = with_template(base_tokenizer, TOOL_TEMPLATE.replace("<|im_end|>", "<|eot_id|>"))  # not the tokenizer's
    assert trained_texts(masker, messages) == ["<|eot_id|>", "Five.<|eot_id|>"]


def test_scaffold_that_speaks_of_thinking_is_not_trained(base_tokenizer):
    template = CHATML_TEMPLATE.replace("+ '<|im_end|>'", "+ (' Use <think>.' if m_is_user else '') + '<|im_end|>'")
    template = template.replace("m_is_user", "message['role'] == 'user'")
    for opening in ("", "<think>\n", "<think>\n\n</think>\n\n"):
        masker = with_template(base_tokenizer, template.replace("assistant\n'", f"assistant\n{opening}'"))
        texts = ["Five.<|im_end|>", "Five.<|im_end|>"]
        assert trained_texts(masker, [QUESTION, ANSWER, QUESTION, ANSWER]) == texts


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML_TEMPLATE, [QUESTION, ANSWER], "row's tools"),
        # Its content may not be missing, but with one the tools are not written either.
        (CHATML_TEMPLATE, [QUESTION, CALLS_ALONE, ANSWER], "row's tools"),
        (TOOL_TEMPLATE.replace("function | tojson", "function | upper"), [QUESTION, calls({"x": "y"})], "tool calls"),
        (TOOL_TEMPLATE.replace("if m.tool_calls", "if false"), [QUESTION, calls({})], "tool calls of message 2"),
        (TOOL_TEMPLATE, [QUESTION, calls({"<|im_end|>": 5})], "'<|im_end|>'"),
    ],
)  # fmt: skip
def test_tools_that_are_not_written_are_refused(base_tokenizer, template, messages, reason):
    tokenizer = copy.deepcopy(base_tokenizer)
    tokenizer.chat_template = template
    (error,) = ChatMasker(tokenizer).mask([Chat(messages, tools=[TOOL])])
    assert isinstance(error, ValueError) and reason in str(error)


def test_stop_tokens_are_read_from_the_generation_config(tmp_path):
    assert load_stop_token_ids(str(tmp_path)) == []
    for value, ids in ((5, [5]), ([5, 7], [5, 7]), (None, [])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert load_stop_token_ids(str(tmp_path)) == ids
