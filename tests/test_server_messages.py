"""A server's reasoning and tool calls are kept, in the form of rows, and another server is noticed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import run_forked
from openai.types.chat import ChatCompletion, ChatCompletionAssistantMessageParam
from openai_standin import Server, repeat, serve
from processes import flags
from pydantic import TypeAdapter
from stock_templates import make_tokenizer
from tiny_data import read_lines, write_jsonl

from mini_trainer.continual.rounds import replace_answer
from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.rows.prompts import Prompt, as_protocol
from mini_trainer.generate import generate
from mini_trainer.options import group_options
from mini_trainer.options.tools import EngineOptions, GenerateOptions, SamplingOptions
from mini_trainer.use.inference.engine import open_engine

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "How many are 12 and 30?"}]
THOUGHT = "They ask for a sum."
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"terms": [12, 30], "é": "ü"}}}
SENT_CALL = CALL | {"function": {"name": "add", "arguments": '{"terms": [12, 30], "é": "ü"}'}}
# As transformers' templates of Qwen 3 write reasoning and calls, without their conditions.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<call>' + c.function.name + ' ' + c.function.arguments | tojson"
    " + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def respond(message: dict, *, model: str = "m", fingerprint: str | None = None, finish: str = "stop") -> dict:
    """A response, by the client's own types."""
    choice = {"index": 0, "finish_reason": finish, "logprobs": None, "message": {"role": "assistant"} | message}
    completion = ChatCompletion.model_validate(
        dict(id="1", created=1, object="chat.completion", model=model, choices=[choice], system_fingerprint=fingerprint)
    )
    return completion.model_dump(mode="json")


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


def run(world, server: Server, folder: Path, **changes: object) -> list[dict]:
    rows = [{"messages": ASKED, "tools": [TOOL]}, {"messages": [{"role": "user", "content": "And 3 more?"}]}]
    prompts, output = write_jsonl(folder / "prompts.jsonl", rows), folder / "answers.jsonl"
    given = dict(
        model="m", engine="openai", base_url=server.url, prompts=str(prompts), output=str(output), concurrency=1
    )
    generate(group_options(GenerateOptions, **given | changes), world)
    return read_lines(output)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "both"])
def test_reasoning_and_calls_are_in_the_message_and_can_be_trained_on(name, server, world, tmp_path):
    thought = {key: THOUGHT for key in ("reasoning_content", "reasoning") if name in (key, "both")}
    server.complete = lambda body: respond({"content": None, "tool_calls": [SENT_CALL]} | thought, finish="tool_calls")
    line, _ = run(world, server, tmp_path)
    message = {"role": "assistant", "content": None, "reasoning_content": THOUGHT, "tool_calls": [CALL]}
    assert (line["answer"], line["message"], line["finish_reason"]) == ("", message, "tool_calls")
    # It can be sent on: what the protocol takes is what the server has said.
    (sent,) = as_protocol([line["message"]])
    assert TypeAdapter(ChatCompletionAssistantMessageParam).validate_python(sent)
    assert sent["tool_calls"] == [SENT_CALL]
    # It can be trained on, as the template renders it.
    tokenizer = make_tokenizer(TEMPLATE, ("<|im_end|>",))
    chat = [*line["row"]["messages"], line["message"]]
    (masked,) = ChatMasker(tokenizer).mask([Chat(chat)])
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    trained = "".join(tokenizer.decode(masked.input_ids[span.start : span.end]) for span in masked.spans)
    assert tokenizer.decode(masked.input_ids) == rendered
    assert trained == rendered.removeprefix(prompt).rstrip("\n")
    # In place of a row's own answer nothing of that is left.
    own = {"role": "assistant", "content": "42", "reasoning_content": "x", "tool_calls": [CALL], "weight": 0.5}
    replaced = replace_answer({"messages": [*ASKED, own]}, line)
    assert replaced["messages"][-1] == message | {"weight": 0.5}
    plain = replace_answer({"messages": [*ASKED, own]}, {"answer": "43"})
    assert plain["messages"][-1] == {"role": "assistant", "content": "43", "weight": 0.5}


def test_answers_without_content_are_reported(server, world, tmp_path, caplog):
    server.complete = lambda body: respond({"content": None, "reasoning_content": THOUGHT}, finish="length")
    lines = run(world, server, tmp_path)
    assert [line["message"]["reasoning_content"] for line in lines] == [THOUGHT, THOUGHT]
    assert re.search(r"2 of 2 answers .* 2 .*`message`", caplog.text)


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": 3, "arguments": "{}"}}]},
        {"content": None, "tool_calls": ["add"]},
        {"content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"content": "a", "reasoning": 7},
    ],
)
def test_calls_and_reasoning_that_are_none_name_the_server(message, server, world, tmp_path):
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    server.complete = lambda body: dict(id="1", object="chat.completion", created=1, model="m", choices=[choice])
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: .*--model m: "):
        run(world, server, tmp_path)


def test_arguments_that_are_no_json_stay_text(server, world, tmp_path):
    broken = SENT_CALL | {"function": {"name": "add", "arguments": '{"terms": '}}
    server.complete = lambda body: respond({"content": None, "tool_calls": [broken]})
    assert run(world, server, tmp_path)[0]["message"]["tool_calls"] == [broken]


def test_a_stream_shows_reasoning_and_calls(server):
    parts = [{"name": "add", "arguments": '{"a"'}, {"arguments": ": 1}"}]
    server.deltas = [
        {"role": "assistant", "content": ""},
        *({name: text} for name, text in (("reasoning_content", "Let "), ("reasoning", "me."))),
        *({"content": text} for text in ("It is ", "42.")),
        *({"tool_calls": [{"index": 0, "function": part}]} for part in parts),
    ]
    engine = open_engine(None, "m", EngineOptions(engine="openai", base_url=server.url), SamplingOptions(), device=None)
    text = "".join(engine.stream(Prompt(row={}, messages=ASKED)))
    assert text == '<think>\nLet me.\n</think>\n\nIt is 42.\n{"name": "add", "arguments": {"a": 1}}'
    server.deltas = [{"reasoning": "Let me"}]
    assert "".join(engine.stream(Prompt(row={}, messages=ASKED))) == "<think>\nLet me\n</think>\n\n"


def interrupt_after_one(server: Server, **said: object) -> None:
    """The server's second answer fails, as it does where it is stopped."""
    server.complete = lambda body: respond({"content": "42"}, **said) if len(server.asked) == 1 else [1]


SERVED = {"id": "m", "object": "model", "created": 1, "root": "/models/a", "max_model_len": 4096, "permission": []}


@pytest.mark.parametrize(
    ("now", "listed", "difference"),
    [
        (dict(model="n"), {}, "model 'm', now 'n'"),
        ({}, {"root": "/models/b"}, "root '/models/a', now '/models/b'"),
        ({}, {"max_model_len": 512}, "max_model_len 4096, now 512"),
        (dict(fingerprint="f2"), {"created": 2, "permission": [1]}, None),
        ({}, {}, None),
    ],
)
def test_another_server_is_noticed_on_resume(now, listed, difference, server, world, tmp_path, caplog):
    server.models = [{"id": "other"}, SERVED]
    interrupt_after_one(server, fingerprint="f1")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: .*--model m: "):
        run(world, server, tmp_path)
    (line,) = read_lines(tmp_path / "answers.jsonl.part0")
    assert line["served_by"] == dict(model="m", system_fingerprint="f1", root="/models/a", max_model_len=4096)
    server.models = [SERVED | listed]
    server.complete = lambda body: respond({"content": "43"}, **dict(fingerprint="f1") | now)
    if difference is None:
        assert [one["answer"] for one in run(world, server, tmp_path)] == ["42", "43"]
        assert ("has changed" in caplog.text) == ("fingerprint" in now)
        server.shutdown()  # a complete file needs no server
        assert len(run(world, server, tmp_path)) == 2
        return
    with pytest.raises(ValueError, match=rf"answers\.jsonl: .*another server.*\({difference}\)"):
        run(world, server, tmp_path)
    assert read_lines(tmp_path / "answers.jsonl.part0") == [line]


def test_a_server_without_a_list_of_models_answers_all_the_same(server, world, tmp_path):
    server.models = "none"
    server.complete = repeat
    (line, _) = run(world, server, tmp_path)
    assert line["served_by"] == {"model": "m"} and line["message"]["content"] == line["answer"]


@pytest.mark.slow
def test_another_server_is_refused_in_one_line(server, tmp_path):
    server.models, server.complete = [SERVED], lambda body: respond({"content": "42"}, model="n")
    run_words = flags(model="m", engine="openai", base_url=server.url, output=tmp_path / "a.jsonl")
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"question": "q1"}, {"question": "q2"}])
    assert run_forked(0, "generate.py", *run_words, *flags(prompts=prompts)).returncode == 0
    first = (tmp_path / "a.jsonl").read_text().splitlines()[0]
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl.part0").write_text(json.dumps(json.loads(first) | {"served_by": {"model": "m"}}) + "\n")
    done = run_forked(0, "generate.py", *run_words, *flags(prompts=prompts))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{tmp_path / 'a.jsonl'}: " in done.stderr and "another server" in done.stderr
