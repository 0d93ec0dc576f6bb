"""Rows that say the same in other forms, doubtful rows, and what a data set depends on beside its rows."""

import contextlib
import copy
import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from data_runs import tokenize_rows
from hypothesis import given
from hypothesis import strategies as st
from stock_templates import TEMPLATES, make_tokenizer, mask, write_model
from tiny_data import write_jsonl
from trait_templates import PROMPTED_REASONING

from mini_trainer.data.chat import linting
from mini_trainer.data.chat.conversation import NORMALIZED, Chat, Completion, Document, Remark, TokenizedChat
from mini_trainer.data.chat.linting import DOUBTS
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.rendering import set_date
from mini_trainer.data.rows import files, preparing
from mini_trainer.data.rows.files import Chunk
from mini_trainer.data.rows.formats import read_example
from mini_trainer.data.rows.preference_rows import read_feedback, read_preference
from mini_trainer.data.rows.prompts import encode_prompt, read_prompt
from mini_trainer.data.rows.split import list_said
from mini_trainer.options import RowOptions, doors

QWEN3, OSS, CHATML = "trl:qwen3", "trl:gptoss", "smollm2"
USER = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Five."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"terms": "2, 3"}}}
RESULT = {"role": "tool", "content": "5", "name": "add"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"terms": {"type": "string", "description": "Which."}}}}}  # fmt: skip


def make_masker(name: str, **options: object) -> ChatMasker:
    drops = "reasoning only in contents"
    template, stops = (PROMPTED_REASONING[drops][0], ("<|im_end|>",)) if name == drops else TEMPLATES[name]
    tokenizer = make_tokenizer(template, stops)
    stop_token_ids = tokenizer.convert_tokens_to_ids(list(stops))
    return ChatMasker(tokenizer, stop_token_ids=stop_token_ids, missing_stop_token="allow", **options)


def said(content: object = None, **keys: object) -> dict:
    return {"role": "assistant", "content": content, **keys}


def on(channel: str, content: str, **keys: object) -> dict:
    return said(content, channel=channel, **keys)


CALLED = [USER, said("", tool_calls=[CALL]), RESULT, ANSWER]
SAME = {  # rows that say the same as the first of each list
    "reasoning": [
        [USER, said("Five.", reasoning_content="Count.")],
        [USER, said("Five.", thinking="Count.")],
        [USER, said("Five.", reasoning="Count.", thinking="Count.")],
        [USER, said("<think>\nCount.\n</think>\n\nFive.")],
        [USER, said("Count.\n</think>\n\nFive.")],
        [USER, said("<think>Count.</think>Five.", reasoning_content="", thinking="")],
        [USER, on("analysis", "Count.", reasoning_content=None), on("final", "Five.", reasoning_content=None)],
        [USER, on("analysis", "Count.", tool_calls=None, id=1), on("final", "Five.", tool_calls=[], id=2)],
        [USER, said("[THINK]Count.[/THINK]Five.")],
        [USER, said([{"type": "text", "text": "<think>Count.</think>Five."}])],
        [USER, said("<think>Count.</think>Five.", reasoning_content="Count.\n")],
        [USER, on("analysis", "Count."), on("final", "Five.")],
        [USER, on("analysis", "Count.", recipient="all"), on("final", [{"type": "text", "text": "Five."}])],
    ],
    "calls": [
        CALLED,
        [USER, said(tool_calls=[CALL]), RESULT, ANSWER],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT, ANSWER],
        [USER, {"role": "tool_call", "content": json.dumps(CALL)}, RESULT, ANSWER],
        [USER, {"role": "tool_call", "content": CALL["function"]}, RESULT | {"role": "tool_response"}, ANSWER],
        [USER, on("commentary", '{"terms": "2, 3"}', recipient="functions.add", content_type="<|constrain|> json"),
         RESULT | {"name": "functions.add", "channel": "commentary", "recipient": "assistant"}, on("final", "Five.")],
    ],
    "reasoning, calls": [
        [USER, said("", reasoning_content="Add.", tool_calls=[CALL, CALL]), RESULT, RESULT, ANSWER],
        [USER, on("analysis", "Add."), *[on("commentary", '{"terms": "2, 3"}', recipient="functions.add")] * 2,
         *[RESULT] * 2, on("final", "Five.")],
    ],
    "content and calls": [
        [USER, said("Let me see.", tool_calls=[CALL]), RESULT, ANSWER],
        [USER, said("Let me see."), {"role": "tool_call", "content": json.dumps([CALL["function"]])}, RESULT, ANSWER],
    ],
}  # fmt: skip


IN_OSS = [(name, OSS) for name in ("reasoning", "calls")]  # it writes one call a turn, and no content beside it


@pytest.mark.parametrize(("name", "template"), [*((name, QWEN3) for name in SAME), *IN_OSS])
def test_rows_that_say_the_same_have_the_same_tokens_and_prompts(name, template):
    masker, tools = make_masker(template), [TOOL] if "calls" in name else None
    first, *others = ({"messages": messages, "tools": tools} for messages in SAME[name])
    expected = mask(masker, first)
    assert isinstance(expected, TokenizedChat), expected
    for row in others:
        found = mask(masker, row)
        assert isinstance(found, TokenizedChat), found
        assert (found.input_ids, found.labels) == (expected.input_ids, expected.labels), row
        assert NORMALIZED in {remark.kind for remark in found.remarks}
        asked = [encode_prompt(read_prompt(one, None), masker.tokenizer) for one in (first, row)]
        assert asked[0] == asked[1], row


def test_reasoning_in_contents_stays_where_the_template_has_no_key_for_it():
    masker = make_masker(CHATML)
    found = mask(masker, {"messages": [USER, said("<think>\nCount.\n</think>\n\nFive.")]})
    assert "<think>\nCount.\n</think>\n\nFive.<|im_end|>" in masker.tokenizer.decode(found.input_ids)
    assert found.remarks == ()


@pytest.mark.parametrize(
    ("messages", "reason", "template"),
    [
        ([USER, said("<think>A.</think>Five.", reasoning_content="B.")], "'reasoning_content' and in its", QWEN3),
        ([USER, said("A.\n</think>\nFive.", thinking="B.")], "in 'thinking' and in its content", QWEN3),
        ([USER, said("Five.", thinking="A.", reasoning="B.")], "different reasoning", QWEN3),
        ([USER, on("analysis", "A."), on("final", "Five.")], "reasoning on a channel", CHATML),
        ([USER, on("analysis", "A."), on("analysis", "B."), on("final", "Five.")], "second reasoning", OSS),
        ([USER, on("commentary", "Let me see."), on("final", "Five.")], "message 2 .*'commentary'.* no place", OSS),
        ([USER, on("analysis", "1 + 1", recipient="python"), on("final", "2")], "'python'", OSS),
        ([USER, on("final", 7)], "message 2 .*expected text", OSS),
        ([USER, on("analysis", "A.", train=False), on("final", "Five.", train=True)], "has another 'train'", OSS),
        ([USER, said("", function_call={"name": "add"})], "'function_call', OpenAI's form", QWEN3),
        ([USER, said("", function_calls=[])], "'function_calls'", QWEN3),
        ([USER, {"role": "tool_call", "content": "add(2)"}], "message 2 .*not JSON", QWEN3),
        ([USER, {"role": "tool_call", "content": "[null]"}], "message 2 .*expected objects with 'name'", QWEN3),
        ([USER, said("A."), {"role": "tool_call", "content": CALL, "thinking": "B."}], "'thinking' beside", QWEN3),
        ([USER, on("final", "Bye.", tool_calls=[CALL])], "'tool_calls' beside a part of the turn", OSS),
        ([USER, on("analysis", "A.", reasoning_content="B.")], "message 2 .*'reasoning_content' beside", OSS),
        ([USER, on("commentary", "{}", recipient=5)], "the recipient 5", OSS),
        ([USER, on("commentary", "{}", recipient="functions.")], "'functions.', for which", OSS),
        ([USER, on("commentary", "{}", recipient="f", content_type=5)], "'f', for which", OSS),
    ],
)  # fmt: skip
def test_rows_of_which_it_is_not_certain_what_they_say_are_refused(messages, reason, template):
    with pytest.raises(ValueError, match=reason):
        if isinstance(error := mask(make_masker(template), {"messages": messages}), ValueError):
            raise error


@pytest.mark.parametrize("prompt", [[USER], [USER, said("Four."), {"role": "user", "content": "Again."}]])
def test_a_prompt_s_messages_stay_untrained_where_its_answer_is_of_several_pieces(prompt):
    answer = [on("analysis", "Count."), on("final", "Five.")]
    whole = read_example({"prompt": [on("final", "Hi."), *prompt], "completion": answer}, "completion", is_given=False)
    assert [message.get("train") for message in whole.messages] == [*[False] * (len(prompt) + 1), None]
    with pytest.raises(ValueError, match="the prompt ends with an assistant's message"):
        read_example({"prompt": [USER, answer[0]], "completion": answer[1:]}, "completion", is_given=False)


TEXTS = st.sampled_from(["", "a", "final", "analysis", "functions.add", "{}"])
ANSWERS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "type", "text"]), inner),
    max_leaves=4,
)
KEYS = ("content", "channel", "recipient", "content_type", "tool_calls", "thinking", "reasoning", "name", "train")


@given(messages=st.lists(st.fixed_dictionaries(
    {"role": st.sampled_from(["assistant", "tool_call", "tool_response", "tool", "user"])},
    optional=dict.fromkeys(KEYS, ANSWERS),
), min_size=1, max_size=4))  # fmt: skip
def test_rows_of_any_values_are_read_or_refused_and_stay_as_they_are(messages):
    before = copy.deepcopy(messages)
    with contextlib.suppress(ValueError):
        read_example({"messages": messages}, "messages", is_given=True)
    assert messages == before


def test_an_answer_that_begins_with_a_call_keeps_the_prompt_of_its_pair():
    beginnings = [{"role": "tool_call", "content": json.dumps(CALL["function"])}, RESULT], CALLED[1:3]
    pairs = [{"prompt": [USER], "chosen": [*one, ANSWER], "rejected": [*one, said("Six.")]} for one in beginnings]
    first, second = (read_preference(pair, RowOptions(), Counter()) for pair in pairs)
    assert first.chosen.messages == second.chosen.messages and first.prompt == second.prompt
    continued, chunk = {"prompt": [USER, on("analysis", "A.")]}, Chunk("in.jsonl", 1, "json", [], b"", 0)
    answers = {name: [on("final", f"{name}.")] for name in ("chosen", "rejected")}
    with pytest.raises(ValueError, match="the prompt ends with an assistant's message"):
        read_preference(continued | answers, RowOptions(), Counter())
    rated = continued | {"completion": answers["chosen"], "label": True}
    with pytest.raises(ValueError, match="the prompt ends with an assistant's message"):
        read_feedback(rated, chunk, Counter(), options=RowOptions())


def test_forms_of_a_row_fall_on_one_side():
    for content, keys in ("Five.", {}), (None, {"tool_calls": [CALL]}):
        inline, keyed = said(f"<think>A.</think>{content or ''}", **keys), said(content, reasoning_content="A.", **keys)
        assert list_said(Chat([USER, inline])) == list_said(Chat([USER, keyed]))


NULL = {"type": "function", "function": {"name": "add", "arguments": {"terms": ["2", {"n": None}]}}}
AS_JSON = f"Tools: {json.dumps([TOOL])}"
WRITES_ALL = "content that may not be null"  # any role, tools, no reasoning of its own
DOUBTFUL = [  # a kind of doubt, messages and tools of a row, a template
    (linting.LEFT_OUT, [USER, said("Count.\n</think>\n\nFive.")], None, "reasoning only in contents"),
    (linting.CUT, [USER, said("<think>\nCount and")], None, QWEN3),
    (linting.CUT, [USER, said("<think>\nCount.\n</think>")], None, QWEN3),
    (linting.CUT, [USER, ANSWER, USER, said("<think>\nCount and")], None, QWEN3),
    (linting.TAGS, [USER, said("<think>A.</think>Five.<think>B.</think>")], None, CHATML),
    (linting.TAGS, [USER, said("Count.\n</think>\n\nFive.")], None, CHATML),
    (linting.TAGS, [USER, said("<think>A.<think>B.</think>Five.")], None, CHATML),
    (linting.TAGS, [USER, said("Well. <think>A.</think>Five.")], None, "marks with the header"),
    (linting.UNKNOWN_TOOLS, CALLED, [TOOL | {"function": {"name": "sub"}}], QWEN3),
    (linting.NO_TOOLS, CALLED, None, QWEN3),
    (linting.RESULTS_FIRST, [USER, RESULT, ANSWER], None, QWEN3),
    (linting.TOOLS_TWICE, [{"role": "system", "content": AS_JSON}, USER, ANSWER], [TOOL], QWEN3),
    (linting.TOOLS_TWICE, [{"role": "developer", "content": AS_JSON}, USER, ANSWER], [TOOL], WRITES_ALL),
    (linting.MARKERS, [USER, said("Write <|im_end|> at the end.")], None, CHATML),
    (linting.MARKERS, [USER, ANSWER], [TOOL | {"function": TOOL["function"] | {"description": "<|im_end|>"}}], QWEN3),
    (linting.NULL_ARGUMENTS, [USER, said("", tool_calls=[NULL])], [TOOL], QWEN3),
]


def kinds(masked: TokenizedChat | ValueError) -> set[str]:
    assert isinstance(masked, TokenizedChat), masked
    return {remark.kind for remark in masked.remarks} & DOUBTS.keys()


@pytest.mark.parametrize(("kind", "messages", "tools", "template"), DOUBTFUL)
def test_each_doubt_is_found_in_its_row_alone_and_refuses_it(kind, messages, tools, template):
    row = {"messages": messages, "tools": tools}
    assert kind in kinds(mask(make_masker(template), row))
    refused = mask(make_masker(template, refused=[kind]), row)
    assert isinstance(refused, ValueError) and f"(--refuse {kind})" in str(refused)
    others = [name for name in DOUBTS if name != kind]
    assert kinds(mask(make_masker(template), {"messages": [USER, ANSWER], "tools": None})) == set()
    assert kind == linting.LEFT_OUT or isinstance(mask(make_masker(template, refused=others), row), TokenizedChat)


def test_every_doubt_can_be_refused_by_name_also_as_a_row_s_second():
    assert tuple(DOUBTS) == doors.DOUBTS and {kind for kind, *_ in DOUBTFUL} == DOUBTS.keys()
    row = {"messages": [*CALLED, USER, said("Write <|im_end|>.")]}
    assert kinds(mask(make_masker(QWEN3), row)) == {linting.MARKERS, linting.NO_TOOLS}
    for kind in (linting.MARKERS, linting.NO_TOOLS):
        assert isinstance(mask(make_masker(QWEN3, refused=[kind]), row), ValueError)


def test_ordinary_rows_raise_no_doubt():
    texts = "<think>\nCount.\n</think>\n\nFive.", "Use the tag <thinker>, or a < b.", "<think></think>Five."
    chats = [*([USER, said(text)] for text in texts), [USER, said("<think>cut", train=False), USER, ANSWER], CALLED,
             [{"role": "system", "content": "You are a helpful assistant."}, USER, ANSWER],
             [USER, said("", tool_calls=[CALL, CALL]), RESULT, RESULT, ANSWER]]  # fmt: skip
    masker = make_masker(QWEN3)
    for messages, tool in product(chats, (TOOL, TOOL["function"])):
        assert kinds(mask(masker, {"messages": messages, "tools": [tool]})) == set(), messages


def test_reasoning_before_calls_is_not_cut():
    row = {"messages": [USER, said("<think>A.</think>", tool_calls=[CALL])], "tools": [TOOL]}
    assert linting.CUT not in kinds(mask(make_masker(WRITES_ALL), row))


def test_markers_are_also_words_that_are_no_tokens():
    template = "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + eos_token + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
    linter = linting.Linter(make_tokenizer(template, ("<|im_end|>",)))
    for text, marker in ("So: ### assistant:\nfoo", "### assistant:"), ("So: ### user:\n", "### user:"):
        assert linter.find_markers([text]) == [Remark(linting.MARKERS, rendered=marker)]
    assert linter.find_markers(["### A title", "an assistant: me"]) == []
    for text in (Completion("So: ", "<|im_end|>."), Document("So: <|im_end|>.")):
        (found,) = make_masker(QWEN3).mask([text])
        assert kinds(found) == {linting.MARKERS}


def test_an_answer_that_speaks_of_a_tag_is_no_reasoning():
    found = mask(make_masker(QWEN3), {"messages": [USER, said("Close it with </thinking> please.")]})
    assert NORMALIZED not in {remark.kind for remark in found.remarks} and linting.TAGS in kinds(found)


def make_model(path: Path, template: str) -> Path:
    tokenizer = make_tokenizer(template, ("<|im_end|>",))
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    return write_model(path, tokenizer)


WHO = "{% if who %}{{ 'You are ' + who + '.' }}{% endif %}"


def list_adversarial_rows() -> list[dict]:
    """Rows with arguments, forms and doubts of their own, many more than what is remembered."""
    rows = []
    for i in range(60):
        extra = {"who": f"helper {i % 40}", "enable_thinking": i % 3 != 0, "python_tools": [], "unread": None}
        messages = [SAME["reasoning"], SAME["calls"]][i % 2][i % 5]
        rows.append({"messages": messages, "tools": [TOOL] if i % 2 else None, "chat_template_kwargs": extra})
    doubtful = {kind: {"messages": messages, "tools": tools} for kind, messages, tools, _ in DOUBTFUL}
    rows += [doubtful[kind] for kind in (linting.CUT, linting.TAGS, linting.UNKNOWN_TOOLS)]
    rows.append({"messages": [USER, ANSWER], "chat_template_kwargs": {"unread": 1}})
    rows.append({"messages": [USER, said("<think>A.</think>Five.", thinking="B.")]})
    return rows * 2


def test_the_output_is_the_same_for_any_number_of_workers_and_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BYTES_PER_WORKER", 100)
    monkeypatch.setattr(files, "CHUNK_ROWS", 5)
    monkeypatch.setattr(files, "SECTION_BYTES", 2000)
    model = make_model(tmp_path / "model", WHO + TEMPLATES[QWEN3][0])
    source = write_jsonl(tmp_path / "rows.jsonl", list_adversarial_rows())

    def read(folder: str, **options: object) -> dict[str, bytes]:
        (tmp_path / folder).mkdir(exist_ok=True)
        tokenize_rows(model, source, tmp_path / folder / "out.arrow", skip_invalid=True, **options)
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir() if path.is_file()}

    whole = read("1", num_proc=1)
    assert json.loads(whole["out.arrow.meta.json"])["rows"]["invalid"] == 4
    assert whole == read("2", num_proc=2) == read("5", num_proc=5)
    for part in ("2/3", "3/3", "1/3"):
        parts = read("parts", num_proc=2, shard=part)
    assert parts == whole


def test_each_row_is_rendered_with_its_own_arguments():
    """The expected ids are transformers' own. With the argument `open`, only the last answer has a stop token."""
    template = WHO + (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '' if open and messages | length > 2 else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template, ("<|im_end|>",))
    given = [None, {"who": "A"}, {"open": True}, {"who": "B"}, {"who": "A", "open": False}, {"unread": 1}]
    found = ChatMasker(tokenizer).mask([Chat([USER, ANSWER], template_args=args) for args in given])
    for args, one in zip(given, found, strict=True):
        if args in ({"open": True}, {"unread": 1}):
            assert isinstance(one, ValueError)
            continue
        expected = tokenizer.apply_chat_template([USER, ANSWER], return_dict=True, **(args or {}))["input_ids"]
        assert one.input_ids == expected
        assert tokenizer.decode([label for label in one.labels if label >= 0]) == "Five.<|im_end|>"


DATED = "{{ strftime_now('%Y-%m-%d, %A %-d %b') }}\n" + TEMPLATES[QWEN3][0]


def test_a_data_set_has_the_date_on_which_it_was_begun_in_all_of_its_parts(tmp_path, monkeypatch, capsys):
    import mini_trainer.process_data as program

    class Day(program.date):
        now = "2026-11-28"

        @classmethod
        def today(cls):
            return cls.fromisoformat(cls.now)

    monkeypatch.setattr(program, "date", Day)
    monkeypatch.setattr(files, "SECTION_BYTES", 500)
    model = make_model(tmp_path / "model", DATED)
    source = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER]}] * 40)
    output = tmp_path / "out.jsonl"

    def texts(path: Path) -> Counter[str]:
        rows = [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]
        return Counter(make_tokenizer(*TEMPLATES[QWEN3]).decode(ids).partition("<|")[0].strip() for ids in rows)

    tokenize_rows(model, source, output, shard="1/2")
    Day.now = "2026-11-29"
    tokenize_rows(model, source, output, shard="2/2")
    assert texts(output) == {"2026-11-28, Saturday 28 Nov": 40}
    assert json.loads(Path(f"{output}.meta.json").read_text())["date"] == "2026-11-28"
    capsys.readouterr()
    tokenize_rows(model, source, output, shard="1/2")
    assert "nothing is left to do" in capsys.readouterr().out
    output.write_text("overwritten")
    tokenize_rows(model, source, output, shard="1/2")
    Day.now = "2026-11-30"
    tokenize_rows(model, source, output)
    assert texts(output) == {"2026-11-30, Monday 30 Nov": 40}
    tokenize_rows(model, source, tmp_path / "given.jsonl", template_args=("date=2020-02-03",))
    assert texts(tmp_path / "given.jsonl") == {"2020-02-03, Monday 3 Feb": 40}


def test_the_date_of_a_template_is_checked():
    dated, plain = (make_tokenizer(template, ("<|im_end|>",)) for template in (DATED, TEMPLATES[CHATML][0]))
    assert set_date(plain, {"a": 1}, "2026-11-28") == (plain, {"a": 1}, None)
    with pytest.raises(ValueError, match="the chat template writes no date"):
        set_date(plain, {"date": "2026-11-28"}, "2026-11-28")
    with pytest.raises(ValueError, match="expected YYYY-MM-DD"):
        set_date(dated, {"date": "28 Nov"}, "2026-11-28")
    reads = make_tokenizer("{{ date_string }}", ("<|im_end|>",))
    assert set_date(reads, {"date": "2026-11-28"}, "2020-01-01")[1:] == ({"date_string": "28 Nov 2026"}, "2026-11-28")
    assert set_date(reads, {}, "2020-01-01")[1:] == ({}, None)
