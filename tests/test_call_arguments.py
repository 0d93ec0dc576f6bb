"""Arguments of tool calls as JSON text, as OpenAI's API has them: every template trains what it trains for objects.

The oracle is transformers' `apply_chat_template` on the form that the template's source takes.
"""

import copy
import json
import re
from collections import Counter
from functools import partial

import pytest
from mask_oracle import with_arguments_as_text
from stock_templates import TEMPLATES, TRL, make_masker

from mini_trainer.data.chat.rendering import takes_calls_as_text, takes_text
from mini_trainer.data.rows.chat_rows import take_images
from mini_trainer.data.rows.formats import read_example
from mini_trainer.data.rows.labelled import read_row as read_labelled
from mini_trainer.data.rows.preference_rows import read_feedback, read_preference
from mini_trainer.data.rows.prompts import read_prompt
from mini_trainer.data.rows.values import read_message
from mini_trainer.options import RowOptions

USER, ANSWER = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "It is 20."}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "20"}
ARGUMENTS = {"city": 'Lima é "x"', "n": 2, "deep": {"on": True, "none": None, "list": [1.5, "a"]}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": PARAMETERS}}]
ONLY_TEXT = {"trl:deepseekv3", "closed on a new line"}  # their sources concatenate arguments, or print them


def calling(arguments: object, **fields: object) -> dict:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


def make_messages(arguments: object) -> list[dict]:
    return [USER, calling(arguments), RESULT, ANSWER]


def read_chat(row: dict):
    return read_example(row, "sharegpt" if "conversations" in row else "messages", is_given=False)


TEXTS = {
    "as it is sent": json.dumps(ARGUMENTS),
    "compact": json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":")),
    "on several lines": json.dumps(ARGUMENTS, indent=2),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_trains_what_an_object_trains(name):
    """On every template; and both are what transformers renders, or both are refused."""
    masker, turns = make_masker(name), [{"from": "human", "value": "Weather?"}]
    rows = [{"messages": make_messages(arguments)} for arguments in (ARGUMENTS, *TEXTS.values())]
    expected, *found = masker.mask([read_chat(row | {"tools": TOOLS}) for row in rows])
    for one in found:
        assert str(one) == str(expected) if isinstance(expected, ValueError) else one == expected
    said = [json.dumps({"name": "weather", "arguments": given}) for given in (ARGUMENTS, TEXTS["compact"])]
    calls = [{"conversations": [*turns, {"from": "function_call", "value": text}]} for text in said]
    first, second = masker.mask([read_chat(row) for row in calls])
    assert str(first) == str(second) if isinstance(first, ValueError) else first == second
    assert takes_calls_as_text(masker.tokenizer) == (name in ONLY_TEXT)
    if isinstance(expected, ValueError):
        return
    messages = copy.deepcopy(rows[0]["messages"])
    if name in ONLY_TEXT:
        messages = [with_arguments_as_text(message) for message in messages]
    try:
        rendered = masker.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    except Exception:  # some take contents as parts only
        return
    assert masker.tokenizer.decode(expected.input_ids) == rendered


def test_a_form_that_cannot_be_read_back_is_not_taken():
    """Templates of which one form is refused, quoted twice, printed by Python, or dropped."""

    def render(messages: list[dict], *, of_object: str | None, of_text: str | None) -> str | None:
        given = messages[1]["tool_calls"][0]["function"]["arguments"]
        form = of_text if isinstance(given, str) else of_object
        return form and form.format(given=given, json=json.dumps(given))

    json_call, printed = "<call>{json}</call>", "<call>{given}</call>"
    for of_object, of_text, expected in (
        (json_call, json_call, False),
        (json_call, printed, False),
        (None, printed, True),
        (printed, printed, True),
        (printed, None, False),
        (None, json_call, False),
        ("<call></call>", "<call></call>", False),
        (None, None, False),
    ):
        assert takes_text(partial(render, of_object=of_object, of_text=of_text)) == expected


def read_pair(row: dict):
    return read_preference(row, RowOptions(), Counter())


NO = [{"role": "assistant", "content": "No."}]
READERS = {
    "chats": lambda said: read_chat({"messages": said, "tools": TOOLS}),
    "the prompt of a preference": lambda said: read_pair({"prompt": said[:3], "chosen": said[3:], "rejected": NO}),
    "an answer of a preference": lambda said: read_pair({"prompt": said[:1], "chosen": said[1:], "rejected": NO}),
    "feedback": lambda said: read_feedback({"messages": said, "label": True}, None, Counter(), options=RowOptions()),
    "classification": lambda said: read_labelled({"messages": said, "label": "a"}, RowOptions(), is_cell=False),
    "images": lambda said: read_example(
        take_images({"messages": said})[0], "messages", is_given=True, takes_images=True
    ),
    "prompts": lambda said: read_prompt({"messages": said, "tools": TOOLS}, None).messages,
    "prompts under another key": lambda said: read_prompt({"prompt": said, "tools": TOOLS}, None).messages,
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_messages_parses_arguments(reader):
    read = READERS[reader]
    expected = read(make_messages(ARGUMENTS))
    assert str(ARGUMENTS["deep"]) in str(expected)
    for text in TEXTS.values():
        assert read(make_messages(text)) == expected
    assert read(make_messages("")) == read(make_messages({})) == read(make_messages(None))
    for text, reason in BAD.items():
        with pytest.raises(ValueError, match=rf"call 1 .*arguments {re.escape(repr(text))}, .*{reason}"):
            read(make_messages(text))


BAD = {
    "city: Lima": "not JSON",
    '{"city": "Lima"': "not JSON",
    '["Lima"]': "object",
    '"{}"': "object",
    "null": "object",
    '{"a": 1, "a": 2}': "'a' .*twice",
    '{"a": NaN}': "not JSON: NaN",
    '{"a": 1e400}': "infinity",
}


NOTHING = {"tool_calls": None, "name": None, "refusal": None, "audio": None, "function_call": None}


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_calls_and_nulls_are_absence(name):
    """Rows as OpenAI's API writes them train the same as rows without those keys, without remarks."""
    masker = make_masker(name)
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    keyed = [said[0] | NOTHING, said[1] | NOTHING | {"tool_calls": []}]
    expected, found = masker.mask([read_chat({"messages": said}), read_chat({"messages": keyed})])
    assert str(found) == str(expected) if isinstance(expected, ValueError) else found == expected


def test_calls_as_text_and_without_a_wrapper():
    bare = {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": '{"city": "Lima"}'}]}
    assert read_message(bare, 1)["tool_calls"] == [{"name": "weather", "arguments": {"city": "Lima"}}]
    as_text = calling(ARGUMENTS) | {"tool_calls": json.dumps(calling(json.dumps(ARGUMENTS))["tool_calls"])}
    assert read_message(as_text, 1) == calling(ARGUMENTS)
    assert "tool_calls" not in read_message(calling({}) | {"tool_calls": " "}, 1)
    with pytest.raises(ValueError, match=r"message 2 \(assistant\): 'tool_calls': .*JSON"):
        read_message(bare | {"tool_calls": "[{"}, 2)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"name": "f", "parameters": {"a": 1}}, r"call 1 .*'arguments', .*\['name', 'parameters'\]"),
        ({"type": "function", "function": {"name": "f", "input": {"a": 1}}},
         r"call 1 .*'arguments', .*\['input', 'name'\]"),
        ({"function": {"name": "f"}, "arguments": {"a": 1}}, "call 1 .*'arguments' .*'function'"),
    ],
)  # fmt: skip
def test_arguments_under_other_keys_are_not_taken_for_none(call, reason):
    with pytest.raises(ValueError, match=reason):
        read_message({"role": "assistant", "tool_calls": [call]}, 1)
    if "function" not in call:
        turn = {"from": "function_call", "value": json.dumps(call)}
        with pytest.raises(ValueError, match=reason):
            read_chat({"conversations": [{"from": "human", "value": "a"}, turn]})


def test_nulls_among_arguments_stay():
    """In JSON a null is the row's own."""
    for given in ({"value": None, "keep": True}, '{"value": null, "keep": true}'):
        (call,) = read_message(calling(given), 1)["tool_calls"]
        assert call["function"]["arguments"] == {"value": None, "keep": True}


assert TRL is None or TEMPLATES.keys() >= ONLY_TEXT
