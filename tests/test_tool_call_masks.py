"""Tool calls: the rule of masks (mask_oracle.py) over every template there is x kinds of conversations."""

import copy
import json
from functools import cache

import pytest
from breadth import thin, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_oracle import find_faults, list_trained_texts
from stock_templates import TEMPLATES, TRL, in_parts, make_masker, make_tokenizer
from trait_templates import JSON_CALL, TRAITS, chatml, each_call

from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.normalizing import normalize

USER, MORE = {"role": "user", "content": "How many are there?"}, {"role": "user", "content": "And now?"}
ANSWER = {"role": "assistant", "content": "Five of them."}
PARAMETERS = {"type": "object", "properties": {"terms": {"type": "string", "description": "Which ones."}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": PARAMETERS}}
    for name in ("add", "look_up")
]


def call(arguments: dict | str, *, name: str = "add", id: str = "abc123def") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict, **fields) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def result(text: str = "sum: 5 apples", *, name: str = "add", id: str = "abc123def") -> dict:
    return {"role": "tool", "content": text, "tool_call_id": id, "name": name}


TEXT, EMPTY = call({"terms": "two, three", "n": 2}), call({})
FLAG = call({"deep": True})
VALUES = call({"a": True, "b": False, "c": None, "d": "", "e": {}, "f": [], "g": 7, "h": -2.5})
NESTED = call({"terms": "two, three", "where": {"in": ["a box", {"deep": False, "n": 3}], "of": {}}})
SECOND = call({"terms": "four, five"}, name="look_up", id="ghi456jkl")
SECOND_RESULT = result("a house", name="look_up", id="ghi456jkl")
CASES = {
    "text": [USER, calling(TEXT), result(), ANSWER],
    "no arguments": [USER, calling(EMPTY), result(), ANSWER],
    "a boolean": [USER, calling(FLAG), result(), ANSWER],
    "values": [USER, calling(VALUES), result(), ANSWER],
    "nested": [USER, calling(NESTED), result(), ANSWER],
    "content": [USER, calling(TEXT, content="Let me see."), result(), ANSWER],
    "content, no arguments": [USER, calling(EMPTY, content="Let me see."), result(), ANSWER],
    "null content": [USER, calling(FLAG, content=None), result(), ANSWER],
    "no content": [USER, {"role": "assistant", "tool_calls": [NESTED]}, result(), ANSWER],
    "two calls": [USER, calling(TEXT, SECOND), result(), SECOND_RESULT, ANSWER],
    "two empty calls": [
        USER, calling(EMPTY, call({}, name="look_up", id="ghi456jkl")), result(), SECOND_RESULT, ANSWER
    ],
    "two rounds": [
        USER, calling(TEXT), result(), calling(SECOND), SECOND_RESULT, ANSWER, MORE, {**ANSWER, "content": "Six of us."}
    ],
    "same ids": [USER, calling(TEXT), result(), calling(FLAG), result("true enough"), ANSWER],
    "reasoning": [
        USER, calling(TEXT, reasoning_content="I have to add."), result(),
        {**ANSWER, "reasoning_content": "That is it then."},
    ],
    "reasoning, no arguments": [USER, calling(EMPTY, reasoning_content="I have to add."), result(), ANSWER],
    "call last": [USER, calling(FLAG)],
    "content and call last": [USER, calling(EMPTY, content="Let me see.")],
    "result last": [USER, calling(TEXT), result()],
    "content and result last": [USER, calling(TEXT, content="Let me see."), result()],
    "arguments as text": [USER, calling(call('{"terms": "two, three", "n": 2}')), result(), ANSWER],
    "ids with names": [
        USER, calling(call({"deep": True}, id="functions.add:0")), result(id="functions.add:0"), ANSWER
    ],
    "parts": [in_parts(USER), in_parts(ANSWER), in_parts(MORE), in_parts({**ANSWER, "content": "Six of us."})],
    "parts and calls": [in_parts(USER), calling(FLAG), in_parts(result()), in_parts(ANSWER)],
}  # fmt: skip


@cache
def look_at(name: str, case: str) -> list[str] | ValueError:
    template, _ = TEMPLATES[name]
    messages = [message for _, message in normalize(copy.deepcopy(CASES[case]))[0]]
    return find_faults(make_masker(name), messages, TOOLS if "tools" in template else None)


@pytest.mark.parametrize("name", thin(TEMPLATES, step=3))
def test_the_rule(name):
    """What the assistant wrote is trained, whole, and nothing else is; or the row is refused."""
    faults = {}
    for case in CASES:
        found = look_at(name, case)
        if not isinstance(found, ValueError) and found:
            faults[case] = found
    assert not faults


WITH_CONTENT = {"content", "content, no arguments", "content and call last", "content and result last"}
TWO = {"two calls", "two empty calls"}
AS_TEXT = {"arguments as text"}
REFUSED_BY = [  # cases, and the templates that refuse these and no others
    (set(), ("trl:qwen3", "trl:qwen3_training", "trl:qwen2_5", "trl:gemma4", "the last call in its own turn",
             "closed by the next turn", "closed on a new line", "a line break before the next turn",
             "marks with the header", "trl:deepseekv3_training", "content that may not be null")),
    (AS_TEXT, ("trl:glm4moe", "trl:lfm2_2_5", "trl:nemotron_3_nano", "trl:nemotron_3_nano_training", "only with tools",
               "CDATA around some arguments", "arguments in the order of their keys")),
    (TWO, ("trl:gptoss", "the first call in its own turn")),
    (WITH_CONTENT, ("reasoning ends with a stop", "calls only without content")),
    (WITH_CONTENT | TWO, ("trl:llama3_1", "the name is written with the result")),
    (WITH_CONTENT | {"ids with names"}, ("mistral_tekken", "mistral_v3")),
    (WITH_CONTENT | AS_TEXT, ("trl:muse_glimmer",)),
    (WITH_CONTENT - {"content and result last"}, ("a result before the content",)),
    (AS_TEXT | {"content", "content, no arguments"}, ("trl:gemma4_v5",)),
    (set(CASES) - {"ids with names", "parts"}, ("an id in place of the name",)),
]  # fmt: skip
REFUSED = {name: cases for cases, names in REFUSED_BY for name in names}


@pytest.mark.parametrize("name", [name for name in REFUSED if name in TEMPLATES])
def test_nothing_is_refused_without_need(name):
    assert {case for case in CASES if isinstance(look_at(name, case), ValueError)} == REFUSED[name]


REASONS = {
    ("trl:gptoss", "two calls"): "tool calls of message 2 (assistant) 0 times",
    ("calls only without content", "content, no arguments"): "tool calls of message 2 (assistant) 0 times",
    ("an id in place of the name", "text"): "'abc123def', in place",
    ("arguments without keys", "a boolean"): "key 'deep'",
    ("a result before the content", "content"): "other messages",
}


@pytest.mark.parametrize(("name", "case"), [pair for pair in REASONS if pair[0] in TEMPLATES])
def test_reasons_are_true(name, case):
    refused = look_at(name, case)
    assert isinstance(refused, ValueError) and REASONS[name, case] in str(refused)


# What templates do that would train somebody else's words, or not all of the assistant's: template, chat, refusal.
REPEATING = chatml(each_call(JSON_CALL)).replace(
    "{{ m.content or '' }}",
    "{% if m.role == 'tool' %}{{ loop.previtem.tool_calls[0].function.arguments.values() | first | tojson }}"
    "{% endif %}{{ m.content or '' }}",
)
NAMED_BY_RESULTS = chatml(
    each_call("{{ '<call>' + f.arguments | tojson }}"), content="{{ (m.name or '') + (m.content or '') }}"
)
REASONING_AT_THE_END = (
    chatml(each_call(JSON_CALL)) + "{% if not add_generation_prompt %}{% for m in messages if m.reasoning_content %}"
    "{{ m.reasoning_content + '<|im_end|>' }}{% endfor %}{% endif %}"
)
TRUE, NULL = (call({"a": value, "terms": "two, three"}) for value in (True, None))
DISPLACED = {
    "true of a result": (REPEATING, [USER, calling(TRUE), result(), ANSWER], "true of a call of message 2 outside"),
    "null of a result": (REPEATING, [USER, calling(NULL), result(), ANSWER], "null of a call of message 2 outside"),
    "results of two calls": (
        REPEATING, [USER, calling(TRUE), result(), calling(TRUE), result(), ANSWER], "true of a call of message 2 outs"
    ),
    "a name of a result": (NAMED_BY_RESULTS, [USER, calling(TEXT), result(), ANSWER], "message 2 only outside"),
    "reasoning after all": (
        REASONING_AT_THE_END, [USER, {**ANSWER, "reasoning_content": "So."}, MORE], "within the turn of message 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DISPLACED)
def test_templates_that_displace_texts_are_refused(case):
    template, messages, reason = DISPLACED[case]
    masker = ChatMasker(make_tokenizer(template, ("<|im_end|>",)))
    (refused,) = masker.mask([Chat(messages, tools=TOOLS)])
    assert isinstance(refused, ValueError) and reason in str(refused)


def trained(name: str, messages: list[dict]) -> list[str]:
    masker = make_masker(name)
    (masked,) = masker.mask([Chat(messages, tools=TOOLS)])
    if isinstance(masked, ValueError):
        raise masked
    return list_trained_texts(masked, masker)


def test_someone_elses_words_within_a_turn():
    """The result stands between the call and the content that belong to one message."""
    name = "a result before the content"
    call_text = '<|tool_call>add{"terms": "two, three", "n": 2}<tool_call|><|tool_response>'
    expected = [call_text, "Let me see.<turn|>\n".removesuffix("\n")]
    assert trained(name, CASES["content and result last"]) == expected


def test_calls_without_text():
    name = "the first call in its own turn"
    text = '<|end|>\n\nfunction call<|sep|>\n{"name": "add", "arguments": {}}<|end|>'
    assert trained(name, CASES["no arguments"]) == [text, "Five of them.<|end|>"]
    assert trained(name, CASES["content and call last"]) == ["Let me see." + text]
    name = "reasoning ends with a stop"
    text = ' to=self<|message|>I have to add.<|eom|><|start|>assistant to=add<|message|><invoke name="add">{}<|eot|>'
    assert trained(name, CASES["reasoning, no arguments"])[0] == text


def test_ids_that_are_names_and_arguments_in_cdata():
    text = '<call>functions.add:0<|args|>{"deep": true}</call><|im_end|>'
    assert trained("an id in place of the name", CASES["ids with names"])[0] == text
    messages = [USER, calling(call({"a": "x < y\n", "b": "z"})), result("1 < 2"), ANSWER]
    text = "<call name=add><arg name=a><![CDATA[x < y\n]]></arg><arg name=b>z</arg></call><|im_end|>"
    assert trained("CDATA around some arguments", messages) == [text, "Five of them.<|im_end|>"]


def test_templates_that_work_only_with_tools_or_parts():
    for name in ("only with tools", "a line break before the next turn"):
        (note,) = make_masker(name).check_template()
        assert "with tools" in note
    for name in ("trl:idefics3", "trl:llava_next", "trl:smolvlm_training"):
        if name in TEMPLATES:
            masker = make_masker(name)
            (note,) = masker.check_template()
            assert "lists of parts" in note
            turns = [USER, ANSWER, MORE, {**ANSWER, "content": "Six of us."}]
            as_text, as_list = masker.mask([Chat(turns), Chat([in_parts(message) for message in turns])])
            assert as_text == as_list
            first, second = list_trained_texts(as_text, masker)
            assert first.strip().startswith("Five of them.") and second.strip().startswith("Six of us.")


def test_a_stop_token_that_only_the_next_turn_brings():
    for name, stop in (("closed by the next turn", "<|im_end|>"), ("closed on a new line", "<|end|>")):
        masker = make_masker(name)
        (note,) = masker.check_template()
        assert "another turn" in note
        assert masker.tokenizer.convert_ids_to_tokens(masker.chats.find_stop_token()) == stop
        first, last = trained(name, [USER, ANSWER, MORE, ANSWER])
        assert first.startswith("Five of them.") and first.endswith(stop) and last == "Five of them."


STOPS = {
    "trl:gptoss": "<|return|>", "trl:glm4moe": "<|user|>", "trl:gemma4": "<turn|>", "falcon_7b": None,
    "trl:smolvlm": "<end_of_utterance>", "only with tools": "<end_of_turn>",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in STOPS if name in TEMPLATES])
def test_the_token_at_which_generation_stops(name):
    masker = make_masker(name)
    found = masker.chats.find_stop_token()
    assert (None if found is None else masker.tokenizer.convert_ids_to_tokens(found)) == STOPS[name]


def test_long_conversations_cost_few_renderings(monkeypatch):
    """Each of these rows has an outline of its own; what turns and calls look like is learned once."""
    masker, rendered = make_masker.__wrapped__("trl:qwen3" if TRL else "content that may not be null"), []
    apply = type(masker.tokenizer).apply_chat_template

    def count(tokenizer: object, conversations: list, **options: object) -> object:
        rendered.extend(conversations)
        return apply(tokenizer, conversations, **options)

    def make_row(num_rounds: int) -> Chat:
        messages = [USER]
        for i in range(num_rounds):
            arguments = {"terms": f"{i}"} | ({"n": i} if i % 3 else {}) | ({"deep": i % 2 == 0} if i % 5 else {})
            messages += [calling(call(arguments, id=f"abc{i:06}")), result(f"{i}", id=f"abc{i:06}")]
        return Chat([*messages, ANSWER], tools=TOOLS)

    assert not isinstance(masker.mask([make_row(30)])[0], ValueError)
    monkeypatch.setattr(type(masker.tokenizer), "apply_chat_template", count)
    results = masker.mask([make_row(num_rounds) for num_rounds in (20, 60, 100)])
    assert not any(isinstance(found, ValueError) for found in results)
    assert 0 < len(rendered) <= 3 * 3, "each row, its outline, and once more with whitespace around the texts"


words = st.text("ab \n<\"'é", min_size=1, max_size=6).map(lambda text: f"v{text}v")
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | words | st.just(""),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("cdef"), inner, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["terms", "n", "deep"]), values, max_size=3)
spoken = st.fixed_dictionaries({}, optional={"content": words | st.none() | st.just(""), "reasoning_content": words})


@st.composite
def rounds(draw: st.DrawFn) -> list[dict]:
    """A message with one or two calls, and some of their results."""
    ids = draw(st.sampled_from([("abc123def", "ghi456jkl"), ("abc123def", "abc123def")]))
    calls = [call(draw(arguments), name=draw(st.sampled_from(["add", "look_up"])), id=id) for id in ids]
    calls = calls[: draw(st.integers(1, 2))]
    results = [result(draw(words), name=c["function"]["name"], id=c["id"]) for c in calls]
    return [{"role": "assistant", **draw(spoken), "tool_calls": calls}, *results[: draw(st.integers(0, 2))]]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict]:
    messages = [{"role": "user", "content": draw(words)}]
    for _ in range(draw(st.integers(1, 3))):
        messages += draw(rounds())
        if draw(st.booleans()):
            messages += [{**ANSWER, "content": draw(words)}, {"role": "user", "content": draw(words)}]
    return messages + ([ANSWER] if draw(st.booleans()) else [])


DRAWN = [
    "trl:qwen3", "trl:glm4moe", "trl:gemma4", "trl:gemma4_v5", "trl:gptoss", "trl:muse_glimmer", "trl:qwen3_5_think",
    "trl:nemotron_3_nano_training", "trl:lfm2_2_5", "mistral_v3", *TRAITS,
]  # fmt: skip
DRAWN_ALWAYS = ("trl:gemma4_v5", "trl:gptoss", "trl:nemotron_3_nano_training", "mistral_v3", *list(TRAITS)[:2])


@pytest.mark.parametrize("name", [name if name in DRAWN_ALWAYS else wide(name) for name in DRAWN if name in TEMPLATES])
@settings(max_examples=10, deadline=None)
@given(messages=conversations())
def test_the_rule_for_any_conversation(name, messages):
    found = find_faults(make_masker(name), messages, TOOLS)
    assert isinstance(found, ValueError) or not found, json.dumps(messages)
