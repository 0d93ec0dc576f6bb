"""Answers of a server by the real client, and a chat in the terminal: what is sent, tried again, interrupted.

A server's reasoning and tool calls are kept, in the form of rows, and another server is noticed.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionAssistantMessageParam
from openai_standin import Refusal, Server, repeat, serve
from pydantic import TypeAdapter
from stock_templates import TEMPLATES, make_tokenizer
from tiny_data import read_lines, write_jsonl
from tiny_models import FAMILIES, save_model, save_tokenizer
from trait_templates import TRAITS
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_standin import install_vllm

from mini_trainer.continual.replay import replace_answer
from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.rows.prompts import Prompt, as_protocol
from mini_trainer.distributed.ending import describe_error
from mini_trainer.generate import generate
from mini_trainer.options import group_options
from mini_trainer.options.tools import EngineOptions, GenerateOptions, SamplingOptions
from mini_trainer.tools.server_requests import read_parameters
from mini_trainer.use.inference import openai_engine
from mini_trainer.use.inference.engine import Engine, Request, open_engine
from mini_trainer.use.inference.loading import find_answering_model
from mini_trainer.use.inference.terminal import chat


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture
def prompts(tmp_path) -> str:
    rows = [{"question": f"q{i}"} for i in range(9)] + [{"prompt": "go on"}]
    return str(write_jsonl(tmp_path / "prompts.jsonl", rows))


def connect(server: Server) -> Engine:
    engine = EngineOptions(engine="openai", base_url=server.url)
    return open_engine(None, "m", engine, SamplingOptions(), device=None)


def run(world, server: Server, prompts: str, output: Path, **changes: object) -> list[dict]:
    given = dict(model="m", engine="openai", base_url=server.url, prompts=prompts, output=str(output), concurrency=4)
    generate(group_options(GenerateOptions, **given | changes), world)
    return read_lines(output)


def test_many_requests_are_under_way_and_what_fails_in_passing_is_tried_again(server, prompts, world, tmp_path):
    server.failures = 2
    lines = run(world, server, prompts, tmp_path / "answers.jsonl", max_new_tokens=7)
    assert [line["answer"] for line in lines] == [*(f"Q{i}" for i in range(9)), "GO ON"]
    assert len(server.asked) == 12 and 2 <= server.most_running <= 4
    assert lines[0]["num_tokens"] == 2 and lines[0]["made_by"]["base_url"] == server.url
    paths = {path for path, _ in server.asked}
    assert paths == {"/v1/chat/completions", "/v1/completions"}
    first = next(body for path, body in server.asked if path == "/v1/chat/completions")
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 7, 0.0)
    assert "seed" not in first and first["key"] == "Bearer none"


@pytest.mark.parametrize(
    ("status", "code", "names_place"),
    [(400, 2, True), (422, 2, True), (401, 2, False), (404, 2, False), (429, 8, True), (500, 8, True), (503, 8, True),
     (None, 8, False)],
)  # fmt: skip
def test_a_server_in_trouble_ends_with_another_code_than_a_refusal(
    status, code, names_place, server, prompts, world, tmp_path, monkeypatch
):
    monkeypatch.setattr(openai_engine, "NUM_RETRIES", 0)
    monkeypatch.setattr(openai_engine, "LISTING_RETRIES", 0)

    def refuse(body: dict) -> dict:
        raise Refusal(status, message="can only concatenate str")

    server.complete = refuse
    given = {"base_url": "http://127.0.0.1:1/v1"} if status is None else {}
    said = "" if status is None else rf"refused \({status}\): can only concatenate"
    with pytest.raises(ValueError, match=rf"--base-url http://127.*, --model m: {said}") as error:
        run(world, server, prompts, tmp_path / "answers.jsonl", concurrency=1, **given)
    assert describe_error(error.value)[0] == code
    assert str(error.value).startswith("prompts.jsonl:1: ") == names_place


def test_sampling_and_the_key_are_sent_and_every_answer_has_its_seed(server, prompts, world, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    drawn = dict(temperature=0.5, top_p=0.9, top_k=5, num_samples=2, api_key_env="MY_KEY")
    lines = run(world, server, prompts, tmp_path / "answers.jsonl", **drawn)
    assert len(lines) == 20 and "secret" not in json.dumps(lines)
    bodies = [body for _, body in server.asked]
    assert len({body["seed"] for body in bodies}) == 20
    assert {(body["top_p"], body["top_k"], body["key"]) for body in bodies} == {(0.9, 5, "Bearer secret")}


CALL = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": {"terms": "2, 3"}}}
ASKED = [{"role": "user", "content": "How many are 12 and 30?"}]
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "content": "5", "tool_call_id": "abc123def", "name": "add"}]  # fmt: skip


def test_a_server_is_sent_what_the_template_is_given_here(server, world, tmp_path):
    """Servers read a call's JSON text into an object: rendered so, what is sent is what a row has up to the answer."""
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    chats = ASKED, [{"role": "system", "content": "Be brief."}, *ASKED], [*ASKED, *CALLED]
    answered = [[*messages, {"role": "assistant", "content": "Five."}] for messages in chats]
    rows = [{"messages": messages, "tools": tools} for messages in answered]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    run(world, server, str(tmp_path / "rows.jsonl"), tmp_path / "answers.jsonl", concurrency=1)
    tokenizer = make_tokenizer(*TRAITS["closed by the next turn"])
    masked = ChatMasker(tokenizer).mask([Chat(messages, tools=tools) for messages in answered])
    for (_, sent), row in zip(server.asked, masked, strict=True):
        for message in sent["messages"]:
            assert None not in message.values()
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        prompt = tokenizer.apply_chat_template(sent["messages"], tools=sent["tools"], add_generation_prompt=True)
        assert prompt["input_ids"] == row.input_ids[: row.spans[-1].start]


NO_MESSAGES = [
    None, {"content": 7}, {"content": "a", "reasoning": 7},
    {"tool_calls": ["add"]}, {"tool_calls": [{"id": "1", "type": "function"}]},
    {"tool_calls": [{"id": "1", "type": "function", "function": {"name": 3, "arguments": "{}"}}]},
    # Half a character, which no file can store.
    {"content": "\ud83d"},
    {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "\ud83d"}}}]},
]  # fmt: skip
NO_ANSWERS = [
    "<html>a proxy's page</html>", "no JSON", "[1, 2]", '{"choices": []}', '{"choices": 5}', "[" * 9**6,
    '{"choices": [{"message": {"content": "a"}}], "model": "\\ud83d"}',
    *(json.dumps({"choices": [{"message": message}]}) for message in NO_MESSAGES),
]  # fmt: skip


@pytest.mark.parametrize("text", NO_ANSWERS, ids=range(len(NO_ANSWERS)))
def test_an_answer_that_is_none_names_the_server(text, server, prompts, world, tmp_path):
    server.says = "text/html" if text.startswith("<") else "application/json", text
    with pytest.raises(ValueError, match=rf"prompts\.jsonl:\d+: --base-url {server.url}, --model m: "):
        run(world, server, prompts, tmp_path / "answers.jsonl")


def test_a_stream_that_is_none_or_breaks_off_names_the_server(server):
    deltas = [f'{{"choices": [{{"delta": {{"content": {content}}}}}]}}' for content in ("7", r'"\ud83d"', '"seven"')]
    for text in ("no JSON", "[7]", "[" * 9**6, *deltas):
        server.says, server.breaks_off = ("text/event-stream", f"data: {text}\n\n"), "seven" in text
        with pytest.raises(ValueError, match=rf"--base-url {server.url}, --model m: .*interrupted: "):
            list(connect(server).stream(Prompt(row={}, place="here", messages=ASKED)))


def test_prompts_go_to_another_host_than_the_one_that_was_named(server, prompts, world, tmp_path):
    with serve() as other:
        server.redirects = f"{other.url}/chat/completions"  # of the same host
        assert run(world, server, prompts, tmp_path / "a.jsonl")[0]["answer"] == "Q0"
        other.asked.clear()
        server.redirects = server.redirects.replace("127.0.0.1", "localhost")
        with pytest.raises(ValueError, match=rf"--base-url {server.url}, .*: redirects to http://localhost:\d+: give"):
            run(world, server, prompts, tmp_path / "b.jsonl")
        assert other.asked == []


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_response_without_an_end_is_read_to_its_end(kind, server, monkeypatch):
    monkeypatch.setattr(openai_engine, "MAX_RESPONSE", 9000)
    server.says = kind, "data: " + "x" * 10_000
    engine, prompt = connect(server), Prompt(row={}, messages=ASKED)
    with pytest.raises(ValueError, match=rf"--base-url {server.url}, .*: the response has more than 9,000 bytes$"):
        list(engine.stream(prompt) if kind == "text/event-stream" else engine.answer([Request(0, 0, prompt)]))
    assert len(server.asked) == 1  # not tried again


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"detail": "The maximum context length is 20"}, "The maximum context length is 20"),
        ({"detail": [{"loc": ["body"], "msg": "Input too long", "input": "q"}]}, "Input too long"),
        ({"detail": {"message": "Reduce the length of it"}}, "Reduce the length of it"),
        ({"message": "no", "code": "context_length_exceeded"}, "no"),
        ({"detail": [{"msg": "no", "input": "what is a context length?"}]}, None),
    ],
)
def test_a_refusal_for_length_is_looked_for_in_openais_words_alone(error, reason, server, prompts, world, tmp_path):
    def refuse(body: dict) -> dict:
        raise Refusal(422, **error)

    server.complete = refuse
    with nullcontext() if reason else pytest.raises(ValueError, match=r"refused \(422\): no$"):
        lines = run(world, server, prompts, tmp_path / "answers.jsonl")
        assert {line["reason"] for line in lines} == {f"refused (422): {reason}"}


def test_our_server_refuses_what_our_client_sends(server, world, tmp_path):
    """The front of `serve` has a list of parameters that it takes of chats and of texts."""
    chat = {"messages": ASKED, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    rows = str(write_jsonl(tmp_path / "p.jsonl", [{"question": "q"}, {"prompt": "go on"}, chat]))
    run(world, server, rows, tmp_path / "answers.jsonl", temperature=0.5, top_p=0.9, top_k=5, concurrency=1)
    for path, body in server.asked:
        body.pop("key")
        assert read_parameters(path, json.dumps(body).encode())["top_p"] == 0.9
    assert server.asked[2][1]["chat_template_kwargs"] == chat["chat_template_kwargs"]


def test_what_lets_us_in_is_in_no_file_and_no_message(server, prompts, world, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_LOGIN", "k3y")
    output = tmp_path / "answers.jsonl"
    address = server.url.replace("http://", "http://someone:p%40ss-w0rd@")
    given = dict(base_url=address, api_key_env="MY_LOGIN", model="m")
    server.refuses = ("not with k3y, nor p@ss-w0rd or p%40ss-w0rd, nor Basic c29tZW9uZTpwQHNzLXcwcmQ=, at "
                      "http://someone:p%40ss-w0rd@host?access_token=abc&x=1")  # fmt: skip
    with pytest.raises(ValueError, match=r"refused \(400\)") as caught:
        run(world, server, prompts, output, **given)
    told = str(caught.value)
    expected = "not with ***, nor *** or ***, nor Basic ***, at http://***@host?access_token=***&x=1"
    assert server.url in told and expected in told
    server.refuses = None
    (tmp_path / "answers.jsonl.part0").write_text("")
    assert run(world, server, prompts, output, **given)[0]["made_by"]["base_url"] == server.url
    assert {body["key"] for _, body in server.asked} == {"Basic c29tZW9uZTpwQHNzLXcwcmQ="}  # as httpx sends it
    nobody = server.url.replace(str(server.server_port), "9").replace("http://", "http://someone:p%40ss-w0rd@")
    monkeypatch.setattr("mini_trainer.use.inference.openai_engine.NUM_RETRIES", 0)
    with pytest.raises(ValueError, match=r"--base-url http://127.0.0.1:9/v1, .*reached") as caught:
        run(world, server, prompts, tmp_path / "other.jsonl", **given | dict(base_url=nobody))
    for text in (told, str(caught.value), *(path.read_text() for path in tmp_path.iterdir())):
        assert not any(secret in text for secret in ("k3y", "w0rd", "someone", "c29tZW9uZ"))


def type_in(monkeypatch, *lines: str) -> Iterator[str]:
    typed = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    return typed


def test_an_answer_cannot_drive_the_terminal(server, monkeypatch, capsys):
    type_in(monkeypatch, "a \x1b]0;title\x07 b \x1b[2J\u202eend", "/\x1b[31m", "/exit")
    chat(connect(server))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\u202e" not in out
    assert r"A \x1b]0;TITLE\x07 B \x1b[2J\u202eEND" in out and r"/\x1b[31m" in out


def test_ctrl_c_ends_an_answer_and_not_the_program(server, monkeypatch, capsys):
    def stream(prompt: Prompt) -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    engine = connect(server)
    type_in(monkeypatch, "hello", "/help", "/exit")
    monkeypatch.setattr(engine, "stream", stream)
    chat(engine)
    assert "/system TEXT" in capsys.readouterr().out.split("half (interrupted)")[1]


def test_a_servers_answer_streams_into_a_chat(server, monkeypatch, capsys):
    words = ("/system be brief", "hello there", "again", "/reset", "new", "/nonsense", "/help", "/exit", "never")
    typed = type_in(monkeypatch, *words)
    chat(connect(server))
    out = capsys.readouterr().out
    assert "HELLO THERE" in out and "AGAIN" in out and "/nonsense" in out
    asked = [[(m["role"], m["content"].strip()) for m in body["messages"]] for _, body in server.asked]
    system = ("system", "be brief")
    assert asked == [
        [system, ("user", "hello there")],
        [system, ("user", "hello there"), ("assistant", "HELLO THERE"), ("user", "again")],
        [system, ("user", "new")],
    ]
    assert next(typed) == "never"


def run_vllm(world, model: Path, prompts: str, output: Path, **changes: object) -> list[dict]:
    given = dict(model=str(model), engine="vllm", prompts=prompts, output=str(output), temperature=0.5)
    generate(group_options(GenerateOptions, **given | changes), world)
    return read_lines(output)


def test_what_vllm_is_asked(prompts, world, tmp_path, monkeypatch):
    asked = install_vllm(monkeypatch)
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    own = dict(repetition_penalty=1.3, temperature=0.9, top_p=0.8, top_k=40, min_p=0.1, do_sample=True, eos_token_id=2)
    (path / "generation_config.json").write_text(json.dumps(own))
    changes = dict(dtype="bfloat16", engine_args=("max_model_len=512", "quantization=fp8"), top_k=7, max_new_tokens=9)
    lines = run_vllm(world, path, prompts, tmp_path / "answers.jsonl", **changes)
    assert [line["answer"] for line in lines] == [f"{line['num_prompt_tokens']} 0.5" for line in lines]
    assert lines[0]["made_by"]["engine"] == "vllm" and lines[0]["finish_reason"] == "length"
    assert lines[0]["made_by"]["engine_args"] == {"max_model_len": 512, "quantization": "fp8"}
    (model,) = asked.models
    assert model["model"] == str(path) and model["dtype"] == "bfloat16"
    assert (model["max_model_len"], model["quantization"]) == (512, "fp8")
    params = asked.params[0]
    assert params.pop("seed") is not None
    kept = dict(repetition_penalty=1.3, presence_penalty=0.0, frequency_penalty=0.0, top_p=0.8, min_p=0.1)
    assert params == kept | dict(temperature=0.5, top_k=7, max_tokens=9)


def test_answers_of_vllm_are_written_as_they_are_completed(prompts, world, tmp_path, monkeypatch, model):
    """An interrupted run resumes, even with other arguments that change only speed; not with those that change more."""
    asked = install_vllm(monkeypatch)
    whole = run_vllm(world, model, prompts, tmp_path / "whole.jsonl")
    asked.steps_to_failure = 4
    output = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_vllm(world, model, prompts, output)
    asked.steps_to_failure = None
    assert len((tmp_path / "answers.jsonl.part0").read_text().splitlines()) == 4
    with pytest.raises(ValueError, match=r"engine_args\.max_model_len None, now 512"):
        run_vllm(world, model, prompts, output, engine_args=("max_model_len=512",))
    num_asked = len(asked.prompts)
    assert run_vllm(world, model, prompts, output, engine_args=("gpu_memory_utilization=0.8",)) == whole
    assert len(asked.prompts) - num_asked == len(whole) - 4


def test_arguments_of_vllm_are_checked_by_its_own_names(prompts, world, tmp_path, monkeypatch, model):
    install_vllm(monkeypatch)
    wrong = {"max_modellen=512": "max_modellen: vLLM 0 has no such engine argument; did you mean max_model_len",
             "dtype=float32": "--engine-args dtype: is set by --dtype",
             "model=x": "--engine-args model: is set by --model"}  # fmt: skip
    for given, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            run_vllm(world, model, prompts, tmp_path / "answers.jsonl", engine_args=(given,))


def test_a_prompt_beyond_vllms_context_is_refused_and_the_others_are_answered(world, tmp_path, monkeypatch, model):
    asked = install_vllm(monkeypatch)
    prompts = str(write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a b c d e f g h"}, {"prompt": "a b"}]))
    lines = run_vllm(world, model, prompts, tmp_path / "answers.jsonl", engine_args=("max_model_len=8",))
    assert [line["finish_reason"] for line in lines] == ["refused", "length"]
    assert "model's context of 8 " in lines[0]["reason"] and len(asked.prompts) == 1


def test_a_streamed_answer_is_that_of_generate_and_what_is_closed_computes_no_more(world, tmp_path):
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    found = find_answering_model(str(path))
    engine = open_engine(found, str(path), EngineOptions(), SamplingOptions(max_new_tokens=20), device=world.device)
    prompt = Prompt(row={}, messages=ASKED)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    how = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    given = tokenizer.apply_chat_template(prompt.messages, **how)
    ids = model.generate(**given, do_sample=False, max_new_tokens=20)[0, given["input_ids"].shape[1] :]
    assert "".join(engine.stream(prompt)) == tokenizer.decode(ids, skip_special_tokens=True)
    before = threading.active_count()
    stream = engine.stream(prompt)
    next(stream)
    stream.close()
    assert threading.active_count() == before


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
THOUGHT = "They ask for a sum."
SUM_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"terms": [12, 30], "é": "ü"}}}
SENT_CALL = SUM_CALL | {"function": {"name": "add", "arguments": '{"terms": [12, 30], "é": "ü"}'}}


def respond(message: dict, *, model: str = "m", fingerprint: str | None = None, finish: str = "stop") -> dict:
    """A response, by the client's own types."""
    choice = {"index": 0, "finish_reason": finish, "logprobs": None, "message": {"role": "assistant"} | message}
    completion = dict(id="1", created=1, object="chat.completion", model=model, choices=[choice])
    return ChatCompletion.model_validate(completion | {"system_fingerprint": fingerprint}).model_dump(mode="json")


def ask_twice(world, server: Server, folder: Path) -> list[dict]:
    rows = [{"messages": ASKED, "tools": [TOOL]}, {"messages": [{"role": "user", "content": "And 3 more?"}]}]
    prompts = write_jsonl(folder / "prompts.jsonl", rows)
    return run(world, server, str(prompts), folder / "answers.jsonl", concurrency=1)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "both"])
def test_reasoning_and_calls_are_in_the_message_and_can_be_trained_on(name, server, world, tmp_path):
    thought = {key: THOUGHT for key in ("reasoning_content", "reasoning") if name in (key, "both")}
    server.complete = lambda body: respond({"content": None, "tool_calls": [SENT_CALL]} | thought, finish="tool_calls")
    line, _ = ask_twice(world, server, tmp_path)
    message = {"role": "assistant", "content": None, "reasoning_content": THOUGHT, "tool_calls": [SUM_CALL]}
    assert (line["answer"], line["message"], line["finish_reason"]) == ("", message, "tool_calls")
    # It can be sent on: what the protocol takes is what the server has said.
    (sent,) = as_protocol([line["message"]])
    assert TypeAdapter(ChatCompletionAssistantMessageParam).validate_python(sent)
    assert sent["tool_calls"] == [SENT_CALL]
    # It can be trained on, as the template renders it.
    tokenizer = make_tokenizer(*TEMPLATES["trl:qwen3"])
    chat = [*line["row"]["messages"], line["message"]]
    (masked,) = ChatMasker(tokenizer).mask([Chat(chat)])
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    trained = "".join(tokenizer.decode(masked.input_ids[span.start : span.end]) for span in masked.spans)
    assert tokenizer.decode(masked.input_ids) == rendered
    assert trained == rendered.removeprefix(prompt).rstrip("\n")
    # In place of a row's own answer nothing of that is left.
    own = {"role": "assistant", "content": "42", "reasoning_content": "x", "tool_calls": [SUM_CALL], "weight": 0.5}
    replaced = replace_answer({"messages": [*ASKED, own]}, line)
    assert replaced["messages"][-1] == message | {"weight": 0.5}
    plain = replace_answer({"messages": [*ASKED, own]}, {"answer": "43"})
    assert plain["messages"][-1] == {"role": "assistant", "content": "43", "weight": 0.5}


def test_answers_without_content_are_reported(server, world, tmp_path, caplog):
    server.complete = lambda body: respond({"content": None, "reasoning_content": THOUGHT}, finish="length")
    lines = ask_twice(world, server, tmp_path)
    assert [line["message"]["reasoning_content"] for line in lines] == [THOUGHT, THOUGHT]
    assert re.search(r"2 of 2 answers .* 2 .*`message`", caplog.text)


def test_arguments_that_are_no_json_stay_text(server, world, tmp_path):
    broken = SENT_CALL | {"function": {"name": "add", "arguments": '{"terms": '}}
    server.complete = lambda body: respond({"content": None, "tool_calls": [broken]})
    assert ask_twice(world, server, tmp_path)[0]["message"]["tool_calls"] == [broken]


def test_a_stream_shows_reasoning_and_calls(server):
    parts = [{"name": "add", "arguments": '{"a"'}, {"arguments": ": 1}"}]
    calls = [{"tool_calls": [{"index": 0, "function": part}]} for part in parts]
    server.deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Let "}, {"reasoning": "me."},
                     {"content": "It is "}, {"content": "42."}, *calls]  # fmt: skip
    engine = connect(server)
    text = "".join(engine.stream(Prompt(row={}, messages=ASKED)))
    assert text == '<think>\nLet me.\n</think>\n\nIt is 42.\n{"name": "add", "arguments": {"a": 1}}'
    server.deltas = [{"reasoning": "Let me"}]
    assert "".join(engine.stream(Prompt(row={}, messages=ASKED))) == "<think>\nLet me\n</think>\n\n"


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
    server.complete = lambda _: respond({"content": "42"}, fingerprint="f1") if len(server.asked) == 1 else [1]
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: .*--model m: "):
        ask_twice(world, server, tmp_path)
    (line,) = read_lines(tmp_path / "answers.jsonl.part0")
    assert line["served_by"] == dict(model="m", system_fingerprint="f1", root="/models/a", max_model_len=4096)
    server.models = [SERVED | listed]
    server.complete = lambda body: respond({"content": "43"}, **dict(fingerprint="f1") | now)
    if difference is None:
        assert [one["answer"] for one in ask_twice(world, server, tmp_path)] == ["42", "43"]
        assert ("has changed" in caplog.text) == ("fingerprint" in now)
        server.shutdown()  # a complete file needs no server
        assert len(ask_twice(world, server, tmp_path)) == 2
        return
    with pytest.raises(ValueError, match=rf"answers\.jsonl: .*another server.*\({difference}\)") as caught:
        ask_twice(world, server, tmp_path)
    assert describe_error(caught.value)[0] == 2
    assert read_lines(tmp_path / "answers.jsonl.part0") == [line]


def test_a_server_without_a_list_of_models_answers_all_the_same(server, world, tmp_path):
    server.models = "none"
    server.complete = repeat
    (line, _) = ask_twice(world, server, tmp_path)
    assert line["served_by"] == {"model": "m"} and line["message"]["content"] == line["answer"]
