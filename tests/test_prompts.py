"""Prompts and rows: what a model is asked is what it was trained after, or process_data.py says how the two differ.

For lists of messages under prompt and completion the oracle is TRL's rule, computed with transformers: the completion
is what follows the ids of the prompt, which is rendered with the generation prompt.
"""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from breadth import wide
from data_runs import tokenize_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_oracle import find_faults
from stock_templates import TEMPLATES, in_parts, make_tokenizer, mask, write_model
from tiny_data import read_lines, write_jsonl
from trait_templates import ONLY_PARTS, PROMPTED_REASONING
from transformers import PreTrainedTokenizerFast
from vllm_standin import install_vllm

from mini_trainer.data.chat.conversation import Chat, Completion, Remark
from mini_trainer.data.chat.linting import LEFT_OUT
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.prompting import AS_PROMPTED, AS_RENDERED, EARLIER, UNREAD_KEY
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.column_names import RefusedColumn
from mini_trainer.data.rows.formats import OWN_NAMES, FieldPaths, read_example, read_fields
from mini_trainer.data.rows.labelled_tokens import LabelledTokenizer
from mini_trainer.data.rows.prompts import Prompt, as_protocol, encode_prompt, read_prompt, read_prompts
from mini_trainer.generate import open_model
from mini_trainer.options import group_options
from mini_trainer.options.tools import GenerateOptions
from mini_trainer.use.inference.engine import Request

IM_END = "<|im_end|>"
USER, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Five."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"terms": {"type": "string", "description": "Which."}}}}}  # fmt: skip
RESULT = {"role": "tool", "content": "5", "tool_call_id": "abc123def", "name": "add"}


def calling(arguments: dict | str, **fields: str) -> dict:
    call = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


ROWS = {
    "one turn": {"messages": [USER, ANSWER]},
    "system": {"messages": [SYSTEM, USER, ANSWER, USER, {**ANSWER, "train": True}]},
    "parts": {"messages": [in_parts(SYSTEM), in_parts(USER), in_parts(ANSWER)]},
    "reasoning_content": {"messages": [USER, {**ANSWER, "reasoning_content": "Count."}]},
    "thinking": {"messages": [USER, {**ANSWER, "thinking": "Count."}, USER, {**ANSWER, "thinking": "Again."}]},
    "reasoning": {"messages": [SYSTEM, USER, {**ANSWER, "reasoning": "Count."}]},
    "inline": {"messages": [USER, {"role": "assistant", "content": "<think>\nCount.\n</think>\n\nFive."}]},
    "calls": {"messages": [USER, calling({"terms": "2, 3"}), RESULT, ANSWER], "tools": [TOOL]},
    "calls as text": {"messages": [USER, calling('{"terms": "2, 3"}'), RESULT, ANSWER], "tools": json.dumps([TOOL])},
    "a call at the end": {"messages": [SYSTEM, USER, calling({"terms": "2, 3"}, reasoning="Add.")], "tools": [TOOL]},
    "tools": {"messages": [SYSTEM, USER, ANSWER], "tools": [TOOL]},
    "sharegpt": {"system": "S", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    "alpaca": {"instruction": "Hi", "input": "there", "output": "Ho"},
}
OWN = {"only parts": (ONLY_PARTS, (IM_END,))} | {
    name: (template, (IM_END,)) for name, (template, _, _) in PROMPTED_REASONING.items()
}
ALL = TEMPLATES | OWN


NO_REASONING = re.compile(r"\A(?:<think></think>|</think>)")


@cache
def find_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return make_tokenizer(*ALL[name])


def make_masker(name: str, **options: object) -> ChatMasker:
    tokenizer = find_tokenizer(name)
    stops = tokenizer.convert_tokens_to_ids(list(ALL[name][1]))
    return ChatMasker(tokenizer, stop_token_ids=stops, missing_stop_token="allow", **options)


SOME = {f"trl:{name}" for name in ("qwen3", "gemma4_v5", "diffusion_gemma", "deepseek_r1_distill", "smolvlm")}
SOME |= {"trl:nemotron_3_nano_training", *OWN}


@pytest.mark.parametrize("as_prompted", [False, True])
@pytest.mark.parametrize("name", [name if name in SOME else wide(name) for name in ALL])
def test_a_prompt_is_its_row_up_to_the_answer_or_a_remark_says_how_they_differ(name, as_prompted):
    masker = make_masker(name, **({"thinking_prefix": "train-as-prompted"} if as_prompted else {}))
    for kind, row in ROWS.items():
        masked = mask(masker, row)
        if isinstance(masked, ValueError):
            continue
        prompt = encode_prompt(read_prompt(row, None), masker.tokenizer)
        said = {remark.kind for remark in masked.remarks if remark.prompted}
        assert (prompt == masked.input_ids[: masked.spans[-1].start]) == (AS_RENDERED not in said), kind
        if AS_PROMPTED in said:
            (closing,) = {remark.rendered for remark in masked.remarks if remark.kind == AS_PROMPTED}
            answers = ((found.input_ids, found.spans[-1]) for found in (mask(make_masker(name), row), masked))
            plain, trained = (masker.tokenizer.decode(ids[span.start : span.end]) for ids, span in answers)
            assert trained.startswith(closing) and plain.endswith(trained.removeprefix(closing)), kind


@pytest.mark.parametrize("name", PROMPTED_REASONING)
def test_rows_after_the_prompts_own_words(name):
    """The text is the prompt as transformers renders it, what closes the reasoning, and the answer as it was."""
    _, words, closing = PROMPTED_REASONING[name]
    masker, tokenizer = make_masker(name, thinking_prefix="train-as-prompted"), find_tokenizer(name)
    plain, changed = mask(make_masker(name), ROWS["one turn"]), mask(masker, ROWS["one turn"])
    assert [remark.kind for remark in plain.remarks] == [AS_RENDERED]
    assert plain.remarks[0].prompted == f"{IM_END}\n<|im_start|>assistant\n{words}"
    if closing is None:
        assert changed == plain
        with pytest.raises(ValueError, match="--thinking-prefix train-as-prompted "):
            ChatMasker(tokenizer, thinking_prefix="train-as-prompted").check_template()
        return
    ChatMasker(tokenizer, thinking_prefix="train-as-prompted").check_template()
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(changed.input_ids) == f"{prompt}{closing}Five.{IM_END}\n"
    assert [tokenizer.decode(changed.input_ids[span.start : span.end]) for span in changed.spans] == [
        f"{closing}Five.{IM_END}"
    ]
    assert changed.remarks == (Remark(AS_PROMPTED, plain.remarks[0].prompted, closing),)
    masked = mask(masker, {"messages": [USER, ANSWER, USER, ANSWER]})
    assert [remark.kind for remark in masked.remarks] == [EARLIER, AS_PROMPTED]
    if name == "a channel that is closed":  # its answers may begin with tags of others, which stay the first
        assert mask(masker, ROWS["inline"]) == mask(make_masker(name), ROWS["inline"])
    untrained = mask(masker, {"messages": [USER, {**ANSWER, "train": False}, USER, ANSWER]})
    assert [remark.kind for remark in untrained.remarks] == [AS_PROMPTED]


@pytest.mark.parametrize("name", PROMPTED_REASONING)
@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.text(st.sampled_from(" \nab<think></think>é|"), min_size=1).filter(str.strip), min_size=4, max_size=4
    )
)
def test_any_texts_are_trained_after_the_prompt_as_they_are_without(name, texts):
    """What is inserted aside, the rows are the same tokens with the same labels, whatever anybody says."""
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    tokenizer = find_tokenizer(name)
    (plain,) = make_masker(name).mask([Chat(messages)])
    (changed,) = make_masker(name, thinking_prefix="train-as-prompted").mask([Chat(messages)])
    if isinstance(plain, ValueError):
        assert isinstance(changed, ValueError) and str(changed) == str(plain)
        return
    if all(remark.kind != AS_PROMPTED for remark in changed.remarks):
        assert (changed.input_ids, changed.labels) == (plain.input_ids, plain.labels)
        return
    closing = PROMPTED_REASONING[name][2]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    given = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
    answer = NO_REASONING.sub("", rendered.removeprefix(given + "<|im_start|>assistant\n"), count=1)
    assert tokenizer.decode(changed.input_ids) == prompt + closing + answer
    trained = tokenizer.decode(changed.input_ids[changed.spans[-1].start : changed.spans[-1].end])
    assert (closing + answer).removesuffix("\n").endswith(trained)
    assert len(closing + answer.rstrip("\n")) - len(trained) <= 1  # a character that is one token with the prompt's
    assert changed.spans[:-1] == plain.spans[:-1]


@pytest.mark.parametrize("name", OWN)
def test_the_masks_of_templates_that_prompt_for_reasoning(name):
    if name != "only parts":  # the oracle gives texts as they are
        for row in (ROWS["one turn"], ROWS["system"], ROWS["reasoning_content"]):
            assert not find_faults(make_masker(name), row["messages"], None)


def test_reasoning_that_the_template_leaves_out_is_said_and_refused():
    name = "reasoning only in contents"
    for kind in ("reasoning_content", "thinking", "reasoning", "inline"):
        masked = mask(make_masker(name, thinking_prefix="train-as-prompted"), ROWS[kind])
        assert Remark(LEFT_OUT) in masked.remarks, kind
        assert all(remark.kind != AS_PROMPTED for remark in masked.remarks), "has reasoning, though it is not written"
        refused = mask(make_masker(name, refused=[LEFT_OUT]), ROWS[kind])
        assert isinstance(refused, ValueError) and "--refuse left-out" in str(refused)
    written = "an empty reasoning on one line"
    for kind in ("reasoning_content", "thinking", "reasoning"):
        assert LEFT_OUT not in {remark.kind for remark in mask(make_masker(written), ROWS[kind]).remarks}
    skipped = {"messages": [USER, {**ANSWER, "reasoning": "Count.", "train": False}, USER, ANSWER]}
    assert not isinstance(mask(make_masker(name, refused=[LEFT_OUT]), skipped), ValueError)


def test_keys_that_the_template_does_not_write_are_named():
    message = {**ANSWER, "reasoning_details": "Count.", "id": 7}
    masked = mask(make_masker("reasoning only in contents"), {"messages": [{**USER, "name": "Bob"}, message]})
    found = {(remark.prompted, remark.rendered) for remark in masked.remarks if remark.kind == UNREAD_KEY}
    assert found == {("assistant", "reasoning_details"), ("assistant", "id"), ("user", "name")}
    masked = mask(make_masker("reasoning ends with a stop"), {"messages": [{**USER, "name": "Bob"}, ANSWER]})
    assert not isinstance(masked, ValueError) and masked.remarks == ()


def process(path: Path, rows: list[dict], output: Path, **options: object) -> list[dict]:
    return read_lines(tokenize_rows(path, write_jsonl(output.parent / "rows.jsonl", rows), output, **options))


@pytest.mark.parametrize("name", ["only parts", "an empty reasoning on one line"])
def test_engines_are_given_what_was_trained_up_to_the_answer(name, world, tmp_path, monkeypatch):
    path = write_model(tmp_path / "model", make_tokenizer(*ALL[name]))
    rows = [ROWS[kind] for kind in ("one turn", "parts" if name == "only parts" else "reasoning_content")]
    rows.append({"messages": [SYSTEM, USER, {**ANSWER, "train": False}, USER, ANSWER]})
    options = {} if name == "only parts" else {"thinking_prefix": "train-as-prompted"}
    samples = process(path, rows, tmp_path / "data.jsonl", **options)
    firsts = [next(i for i, label in enumerate(sample["labels"]) if label != IGNORED) for sample in samples]
    expected = [sample["input_ids"][:first] for sample, first in zip(samples, firsts, strict=True)]
    prompts = read_prompts([str(tmp_path / "rows.jsonl")], None)
    requests = [Request(i, 0, prompt) for i, prompt in enumerate(prompts)]
    given = dict(model=str(path), max_new_tokens=1, batch_size=2, prompts=str(tmp_path / "rows.jsonl"), output="o")

    engine, seen = open_model(group_options(GenerateOptions, **given), world), []

    def keep(_: object, __: object, kwargs: dict) -> None:
        mask = kwargs.get("attention_mask", torch.ones_like(kwargs["input_ids"]))
        seen.extend(ids[shown.bool()].tolist() for ids, shown in zip(kwargs["input_ids"], mask, strict=True))

    assert engine.obstacle is None  # measured by the model's own calls, before the hook sees them
    engine.model.register_forward_pre_hook(keep, with_kwargs=True)
    list(engine.answer(requests))
    assert sorted(seen) == sorted(expected)
    list(engine.stream(prompts[0]))
    assert seen[len(expected)] == expected[0]

    asked = install_vllm(monkeypatch)
    list(open_model(group_options(GenerateOptions, **given, engine="vllm"), world).answer(requests))
    assert asked.prompts == expected


def test_calls_are_written_as_the_protocol_has_them():
    alone = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": "é"}}]}
    assert as_protocol([alone]) == [
        {"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}]}
    ]  # fmt: skip


def test_prompts_of_which_the_template_leaves_something_out_are_refused():
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = make_tokenizer(silent, (IM_END,))
    with pytest.raises(ValueError, match=r"row 3: .*content of message 1 \(system\)"):
        encode_prompt(Prompt(place="row 3", row={}, messages=[SYSTEM, USER]), tokenizer)
    with pytest.raises(ValueError, match="tools"):
        encode_prompt(Prompt(row={}, messages=[USER], tools=[TOOL]), tokenizer)
    assert encode_prompt(Prompt(row={}, messages=[USER]), tokenizer) == tokenizer("How many?")["input_ids"]


def test_classifiers_read_chats_in_the_form_that_the_template_writes():
    tokenizer = find_tokenizer("only parts")
    text = LabelledTokenizer.render(type("", (), {"tokenizer": tokenizer, "template_args": {}}), Chat([USER]))
    assert text == f"user: How many?{IM_END}\n"


def test_the_report_counts_rows_and_shows_both_ends(tmp_path, capsys):
    path = write_model(tmp_path / "model", make_tokenizer(*ALL["an empty reasoning on one line"]))
    rows = [ROWS["one turn"], ROWS["one turn"], ROWS["reasoning_content"]]
    process(path, rows, tmp_path / "data.jsonl")
    printed = capsys.readouterr().out
    assert re.search("note: 2 of 3 rows: .*NOT TRAINED", printed)
    assert r"assistant\n<think>\n'" in printed and r"'<|im_end|>\n<|im_start|>assistant\n<think>'" in printed
    process(path, rows, tmp_path / "data.jsonl", thinking_prefix="train-as-prompted")
    printed = capsys.readouterr().out
    assert re.search("2 of 3 rows: .*generation prompt", printed) and "NOT TRAINED" not in printed
    sidecar = json.loads((tmp_path / "data.jsonl.meta.json").read_text())
    assert sidecar["options"]["thinking_prefix"] == "train-as-prompted"
    write_model(tmp_path / "distill", make_tokenizer(*ALL["reasoning only in contents"]))
    with pytest.raises(ValueError, match=r"1 of 3 rows .*\n  rows.jsonl:3: .*--refuse left-out"):
        process(tmp_path / "distill", rows, tmp_path / "data.jsonl", refuse=[LEFT_OUT])


PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Five of them."},
    {"role": "user", "content": "And now?"},
]
COMPLETION = [{"role": "assistant", "content": "Six of us."}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def read(row: dict, paths: FieldPaths = OWN_NAMES) -> Chat | Completion:
    return read_example(read_fields(row, "completion", paths=paths, tally=Counter()), "completion", is_given=False)


def test_forms_that_mean_the_same():
    expected = read({"prompt": PROMPT, "completion": COMPLETION})
    assert [message.get("train") for message in expected.messages] == [False] * 4 + [None]
    as_text = {"prompt": json.dumps(PROMPT), "completion": json.dumps(COMPLETION)}
    assert read(as_text) == read({"prompt": PROMPT, "generation": COMPLETION}) == expected
    named = read({"a": {"b": PROMPT}, "c": COMPLETION}, FieldPaths(prompt="a.b", completion="c"))
    assert named == expected
    with_tools = read({"prompt": PROMPT, "completion": COMPLETION, "tools": json.dumps(TOOLS)})
    assert (with_tools.messages, with_tools.tools) == (expected.messages, TOOLS)
    beside = {"system": "Be brief.", "unmask": True, "chat_template_kwargs": {"enable_thinking": False}}
    chat = read({"prompt": PROMPT[1:], "completion": COMPLETION} | beside)
    assert (chat.messages, chat.unmask, chat.template_args) == (expected.messages, True, {"enable_thinking": False})
    assert read({"prompt": "How many? ", "completion": "Five"}) == Completion("How many? ", "Five")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": PROMPT, "completion": "Six"}, "'prompt' is .* expected text"),
        ({"prompt": "How many?", "completion": COMPLETION}, "'completion' is .* expected text"),
        ({"prompt": [], "completion": COMPLETION}, "'prompt' must be a list of at least one message"),
        ({"prompt": PROMPT, "completion": []}, "'completion' must be a list of at least one message"),
        ({"prompt": PROMPT[:3], "completion": COMPLETION}, "the prompt ends with an assistant's message"),
        ({"prompt": PROMPT, "completion": [{"role": "cat"}]}, "message 5 has the role 'cat'"),
        ({"prompt": [PROMPT[1] | {"train": True}], "completion": COMPLETION}, "has 'train': true in a message of the"),
    ],
)
def test_what_is_refused(row, reason):
    with pytest.raises(ValueError, match=reason):
        read(row)


def test_columns_and_keys_that_change_the_training_signal():
    row = {"prompt": PROMPT, "completion": [COMPLETION[0] | {"score": 0.5}]}
    with pytest.raises(RefusedColumn, match=r"completion\.score"):
        read(row)
    assert read(row, FieldPaths(ignored=("completion.score",))) == read({"prompt": PROMPT, "completion": COMPLETION})
    with pytest.raises(RefusedColumn, match="mask"):
        read({"prompt": PROMPT, "completion": COMPLETION, "assistant_masks": [1]})
    with pytest.raises(RefusedColumn, match="tools"):
        read({"prompt": "How many?", "completion": "Five", "tools": TOOLS})


def test_prompts_and_references_are_those_of_the_row(tmp_path: Path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": PROMPT, "completion": COMPLETION}])
    (prompt,) = read_prompts([str(path)], None)
    assert (prompt.messages, prompt.references) == (PROMPT, ("Six of us.",))
