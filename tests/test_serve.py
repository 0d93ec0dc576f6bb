"""mini-trainer serve and chat: the servers they become, and answers equal to the model's own."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from heavy import need
from make_tiny_model import save_tiny_model, train_tokenizer
from processes import free_port, wait_until
from transformers import AutoModelForCausalLM

from mini_trainer.options import group_options
from mini_trainer.options.tools import ServeOptions
from mini_trainer.tools import serve
from mini_trainer.tools.serve import KEY, SERVERS, check_engine, name_for_transformers, name_for_vllm, read_server_args
from mini_trainer.tools.server_front import LOOPBACK, MAX_BODY, Front, choose_hosts
from mini_trainer.tools.server_requests import Served, find_served
from mini_trainer.use.inference.loading import find_answering_model
from mini_trainer.use.inference.openai_engine import read_context


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    tokenizer = train_tokenizer(["Where is Lima? In Peru."], vocab_size=300)
    save_tiny_model(path, tokenizer, hidden_size=64, num_layers=2, seed=1)
    random = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for weight in random.model.layers.parameters():
            weight.mul_(20)  # otherwise it repeats the prompt's last token, a line's end
    random.save_pretrained(path)
    return path


def make_options(**values: object) -> ServeOptions:
    return group_options(ServeOptions, **values)


def test_the_words_that_start_a_server(model):
    found = find_answering_model(str(model))
    assert name_for_transformers(found) == (str(model), ["serve", str(model)])
    of_hub = replace(found, name="org/model", base_name="org/model")
    assert name_for_transformers(of_hub) == ("org/model", ["serve", str(model)])
    assert find_served(of_hub).name == name_for_vllm(of_hub)[0] == "org/model"
    name, words = name_for_vllm(found)
    assert (name, words[:2]) == (str(model), ["serve", str(model)])
    assert words[words.index("--chat-template") + 1] == str(model / "chat_template.jinja")
    given = ("max_model_len=256", "enforce_eager=true", "enable_prefix_caching=false", 'rope_scaling={"factor": 2}')
    assert serve.list_common(make_options(model=str(model), port=8001), read_server_args(given)) == [
        *("--host", "127.0.0.1", "--port", "8001", "--dtype", "auto", "--max-model-len", "256", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--rope-scaling", '{"factor": 2}'),
    ]


def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(model, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: Address already in use; give another --port"):
            serve.check_port("127.0.0.1", port)
    adapter = replace(find_answering_model(str(model)), adapter=Path("runs/a b"))
    with pytest.raises(ValueError, match=r"takes no adapters, such as runs/a b: .* merge-adapter --adapter 'runs/a b'"):
        name_for_transformers(adapter)
    with pytest.raises(ValueError, match=r"--engine vllm needs the package vllm, which is not installed: pip install"):
        serve.choose_engine("vllm")
    with pytest.raises(ValueError, match=r"^--trust-remote-code: transformers serve .* vLLM serves them: pip install"):
        check_engine("hf", make_options(model=str(model), trust_remote_code=True), {})
    with pytest.raises(ValueError, match=r"^--engine-args continuous_batching: .* use --engine vllm$"):
        check_engine("hf", make_options(model=str(model)), {"continuous_batching": True})
    check_engine("vllm", make_options(model=str(model), trust_remote_code=True), {})
    with pytest.raises(ValueError, match=r"^--allowed-hosts has no effect with --engine vllm"):
        check_engine("vllm", make_options(model=str(model), allowed_hosts=("gpu7",)), {})
    for given in ("trust_remote_code=true", "host=0.0.0.0", "port=1", "dtype=auto"):
        name = given.partition("=")[0]
        with pytest.raises(ValueError, match=f"^--engine-args {name}: is set by --{name.replace('_', '-')}$"):
            read_server_args([given])
    for key in ("", "abcdef\n"):  # that protect nothing
        monkeypatch.setenv(KEY, key)
        with pytest.raises(ValueError, match=f"^{KEY}: is empty, or begins or ends with white space"):
            serve.read_key()


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_no_key_is_printed_and_the_server_gets_it(engine, model, monkeypatch, capsys):
    started = {}
    name, words, _ = SERVERS[engine]

    def start(words, found, *, options, arguments, key):
        started.update(words=words, key=key)

    monkeypatch.setitem(SERVERS, engine, (name, words, start))
    monkeypatch.setattr("mini_trainer.tools.serve.choose_engine", lambda _: engine)
    monkeypatch.setenv(KEY, "key-of-ours")
    port = free_port()
    serve.serve(make_options(model=str(model), port=port, engine_args=("api_key=key-of-vllm", "max_model_len=9")))
    printed = capsys.readouterr().out
    assert "--api-key '***' --max-model-len 9\n" in printed and f"--api-key-env {KEY}\n" in printed
    assert "key-of" not in printed
    assert started["words"][-4:] == ["--api-key", "key-of-vllm", "--max-model-len", "9"]
    assert started["key"] == "key-of-ours"


def test_vllm_gets_the_key_by_its_own_variable(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "another")
    found = []
    monkeypatch.setattr(os, "execv", lambda program, words: found.append((words, os.environ["VLLM_API_KEY"])))
    become = SERVERS["vllm"][2]
    become(["serve"], None, options=None, key="key-of-ours")
    become(["serve"], None, options=None, key=None)
    assert [key for _, key in found] == ["key-of-ours", "key-of-ours"] and "key-of-ours" not in found[0][0]


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
METHODS = {CHAT: "POST", TEXT: "POST", "/v1/models": "GET", "/health": "GET"}
# What OpenAI's protocol has as default, so that it changes nothing.
NEUTRAL = dict(n=1, best_of=1, frequency_penalty=0, presence_penalty=0.0, top_logprobs=0, logprobs=False, echo=False,
               store=False, logit_bias={}, metadata={}, stop=[], tools=[], parallel_tool_calls=True, suffix="",
               response_format={"type": "text"}, stream_options={"include_usage": True}, tool_choice="auto",
               user="me", reasoning_effort=None)  # fmt: skip
HOST = ("host", "localhost:8000")
SAID = {"role": "assistant", "content": "In Peru. In Peru."}
CHAT_ANSWER = {"choices": [{"message": SAID, "finish_reason": "length"}]}
TEXT_ANSWER = {"choices": [{"text": "In Peru.", "finish_reason": "length"}]}
ASKED = {"messages": [{"role": "user", "content": "Where is Lima?"}]}


class Behind:
    """An application that records what reaches it, and answers in pieces."""

    def __init__(self, answer: object = CHAT_ANSWER, *, status: int = 200) -> None:
        self.body, self.status = json.dumps(answer).encode(), status
        self.requests = []

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive()).get("body", b"")
        self.requests.append(json.loads(body) if scope["method"] == "POST" else None)
        if scope["method"] == "POST":
            sizes = {name: value for name, value in scope["headers"] if name.lower().startswith(b"content-")}
            assert sizes == {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
        headers = [(b"content-length", str(len(self.body)).encode()), (b"x-request-id", b"7")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": self.body[9:]})


@pytest.fixture(scope="module")
def served() -> Served:
    tokenizer = train_tokenizer(["Where is Lima? In Peru."], vocab_size=300)
    return Served("runs/chats", "/runs/chats", tokenizer, context=200)


class Answer:
    """The front's answer to one request, by its parts."""

    def __init__(self, front: Front, path: str, *headers: tuple[str, str], method: str, pieces: list[bytes]) -> None:
        length = ("Content-Length", str(sum(map(len, pieces))))
        self.sent, encoded = [], [(name.encode(), value.encode()) for name, value in (*headers, length)]
        incoming = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        incoming = iter([*incoming, {"type": "http.request", "more_body": False}])

        async def send(message) -> None:
            self.sent.append(message)

        async def receive():
            return next(incoming)

        asyncio.run(front({"type": "http", "method": method, "path": path, "headers": encoded}, receive, send))
        self.status, self.headers = self.sent[0]["status"], dict(self.sent[0]["headers"])
        assert len(self.headers) == len(self.sent[0]["headers"])
        self.body = b"".join(message["body"] for message in self.sent[1:])
        assert int(self.headers[b"content-length"]) == len(self.body)

    @property
    def error(self) -> tuple[int, str, str | None]:
        error = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "code"} and error["type"] == "invalid_request_error"
        return self.status, error["message"], error["code"]


def send_request(front: Front, path: str, *headers: tuple[str, str], method: str | None = None, **given) -> Answer:
    pieces = [json.dumps(ASKED if path == CHAT else {"prompt": "Where"}).encode()]
    return Answer(front, path, *headers, method=method or METHODS.get(path, "POST"), **{"pieces": pieces, **given})


def make_front(served: Served, hosts=LOOPBACK, behind=None, **options) -> Front:
    return Front(behind or Behind(), served=served, hosts=hosts, **options)


def post(served: Served, parameters: object, *, path: str = CHAT, behind=None) -> Answer:
    piece = parameters if isinstance(parameters, bytes) else json.dumps(parameters).encode()
    return send_request(make_front(served, behind=behind), path, HOST, pieces=[piece[:5], piece[5:]])


def test_only_the_model_s_own_paths_reach_the_server(served):
    front = make_front(served)
    assert {send_request(front, path, HOST).status for path in METHODS} == {200}
    others = ("load_model", "reset", "/load_model", "v1/../load_model", "load_model/", "docs", "v1/responses")
    assert {send_request(front, path, HOST).status for path in ("", *(f"/{name}" for name in others))} == {404}
    wrong = {CHAT: "GET", TEXT: "PUT", "/v1/models": "OPTIONS", "/health": "POST"}
    assert {send_request(front, path, HOST, method=method).status for path, method in wrong.items()} == {405}
    assert len(front.behind.requests) == 3


def test_only_expected_hosts_and_origins_reach_a_server_on_loopback(served):
    allowed = [[("host", "127.0.0.1")], [("Host", "LOCALHOST:99")], [("host", "[::1]:8000")]]
    others = ("evil.example:8000", "localhost.evil.example", "localhost@evil.example", "[::1")  # that lead to 127.0.0.1
    unexpected = [[], [HOST, ("host", "evil.example")], *([("host", host)] for host in others)]
    origins = {"http://localhost:3000": 200, "https://evil.example": 403, "null": 403}
    cases = [*((one, 200) for one in allowed), *((one, 421) for one in unexpected)]
    for headers, status in [*cases, *(([HOST, ("origin", origin)], status) for origin, status in origins.items())]:
        assert send_request(make_front(served), "/v1/models", *headers).status == status, headers


def test_a_server_elsewhere_answers_to_the_given_names_or_to_any(served):
    assert choose_hosts("127.0.0.1", ()) == LOOPBACK
    assert choose_hosts("127.0.0.2", ("Proxy",)) == (*LOOPBACK, "127.0.0.2", "proxy")
    assert choose_hosts("0.0.0.0", ("GPU7",)) == ("gpu7",)
    assert choose_hosts("0.0.0.0", ()) is choose_hosts("::", ()) is None
    page = ("origin", "http://evil.example")
    for front, host, status, of_page in (
        (make_front(served, None), "gpu7:8000", 200, 403),
        (make_front(served, ("gpu7",)), "gpu7:8000", 200, 403),
        (make_front(served, ("gpu7",)), "gpu8", 421, 421),
        (make_front(served, None, allows_origins=True), "gpu7", 200, 200),
    ):
        assert send_request(front, "/health", ("host", host)).status == status
        assert send_request(front, "/health", ("host", host), page).status == of_page


def test_requests_without_the_key_are_refused(served):
    front, key = make_front(served, key="the key"), ("authorization", "Bearer the key")

    def ask(*headers: tuple[str, str]) -> list[Answer]:
        return [send_request(front, path, HOST, *headers) for path in (CHAT, TEXT, "/v1/models")]

    for header in (key, ("Authorization", "bearer the key")):
        assert {answer.status for answer in ask(header)} == {200}
    wrong = [("authorization", value) for value in ("Bearer the ke", "Bearer ", "Basic the key", "the key")]
    for headers in ([], [key, ("authorization", "Bearer another")], *([header] for header in wrong)):
        answers = ask(*headers)
        assert {answer.status for answer in answers} == {401}, headers
        assert answers[0].error[2] == "invalid_api_key" and b"the key" not in answers[0].body
    assert send_request(front, "/health", HOST).status == 200


def test_pages_of_other_sites_may_ask_and_read_if_they_are_allowed(served):
    front = make_front(served, allows_origins=True, key="the key")
    page, question = ("origin", "http://site.example"), ("access-control-request-method", "POST")
    asked = send_request(front, CHAT, HOST, page, question, method="OPTIONS")  # browsers send it without the key
    assert asked.status == 200 and asked.headers[b"access-control-allow-headers"].startswith(b"authorization")
    for path in (CHAT, "/v1/models"):
        refused = send_request(front, path, HOST, page)
        assert refused.status == 401 and refused.headers[b"access-control-allow-origin"] == b"*"
    assert not front.behind.requests


def test_the_list_of_models_has_the_served_one_alone_with_its_context(served, model):
    found = find_served(find_answering_model(str(model)))
    for one, name, context in ((served, "runs/chats", 200), (found, str(model), found.context)):
        (entry,) = json.loads(send_request(make_front(one), "/v1/models", HOST).body)["data"]
        assert (entry["id"], entry["object"], entry["max_model_len"]) == (name, "model", context)
        assert isinstance(entry["created"], int) and entry["owned_by"]
    assert found.context == json.loads((model / "config.json").read_text())["max_position_embeddings"]


def test_no_other_model_than_the_served_one_reaches_the_server(served):
    behind = Behind()
    status, reason, code = post(served, ASKED | {"model": "gpt2"}, behind=behind).error
    assert (status, reason, code) == (404, 'model: given "gpt2", served: runs/chats', "model_not_found")
    assert not behind.requests
    for given in ({"model": "runs/chats"}, {"model": None}, {}):
        assert post(served, ASKED | given, behind=behind).status == 200
    assert {request["model"] for request in behind.requests} == {"/runs/chats"}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_prompt_and_its_answer_have_to_fit_into_the_context(limit, served):
    prompt, behind = served.tokenizer.apply_chat_template(ASKED["messages"], add_generation_prompt=True), Behind()
    num_tokens = len(prompt.input_ids)
    status, reason, code = post(served, ASKED | {limit: 201 - num_tokens}, behind=behind).error
    assert (status, code) == (400, "context_length_exceeded")
    assert f"prompt has {num_tokens}, and max_tokens asks for {201 - num_tokens}" in reason
    assert read_context(reason) == 200
    assert post(replace(served, context=num_tokens), ASKED).error[2] == "context_length_exceeded"
    assert not behind.requests
    assert post(served, ASKED | {limit: 200 - num_tokens}, behind=behind).status == 200
    assert post(served, ASKED, behind=behind).status == 200  # an answer ends with the context
    assert [request["max_tokens"] for request in behind.requests] == [200 - num_tokens] * 2
    assert "max_completion_tokens" not in behind.requests[0]


def test_a_model_with_vision_gets_images_that_the_request_brings(served):
    def ask(url: str) -> dict:
        content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
        return {"messages": [{"role": "user", "content": content}]}

    template = "{% for m in messages %}{% for c in m['content'] %}{{ c['type'] }}{% endfor %}{% endfor %}"
    tokenizer = train_tokenizer(["Where is Lima?"], vocab_size=300, chat_template=template)
    sees, behind = replace(served, tokenizer=tokenizer, takes_images=True), Behind()
    assert post(sees, ask("data:image/png;base64,AA=="), behind=behind).status == 200
    for url in ("http://169.254.169.254/", "file:///etc/passwd", "/etc/passwd"):  # which the server would open
        assert "allowed: text, image_url with a data: URL" in post(sees, ask(url), behind=behind).error[1]
    assert len(behind.requests) == 1


def test_texts_are_counted_without_the_template(served):
    behind = Behind(TEXT_ANSWER)
    num_tokens = len(served.tokenizer("Where is Lima?").input_ids)
    asked = {"prompt": "Where is Lima?"}
    assert post(replace(served, context=num_tokens), asked, path=TEXT).error[2] == "context_length_exceeded"
    post(replace(served, context=num_tokens + 3), asked, path=TEXT, behind=behind)
    for context in (5000, None):
        post(replace(served, context=context), asked, path=TEXT, behind=behind)
    assert [request["max_tokens"] for request in behind.requests] == [3, 1024, 1024]
    assert post(served, {"prompt": ""}, path=TEXT).error[0] == 400


NO_PROMPT = "no prompt can be made"
REFUSED = [
    (CHAT, {"n": 2}, "n: given 2, allowed: 1"), (TEXT, {"logprobs": 0}, "logprobs: given 0, allowed: false"),
    (CHAT, {"response_format": {"type": "json_object"}},
     'response_format: given {"type": "json_object"}, allowed: {"ty'),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty: given 0.5, allowed: 0"),
    (CHAT, {"tool_choice": "required"}, 'tool_choice: given "required", allowed: "auto"'),
    (TEXT, {"suffix": "!"}, 'suffix: given "!"'),
    (CHAT, {"reasoning_effort": "low"},
     '"reasoning_effort" is not supported, allowed: messages, max_completion_tokens'),
    (CHAT, {"generation_config": "{}"}, '"generation_config" is not supported'),  # by which any limit could be passed
    (TEXT, {"messages": []}, '"messages" is not supported'),
    (CHAT, {"temperature": "warm"}, 'temperature: given "warm", allowed: a number from 0 to 2'),
    (CHAT, {"top_p": 0}, "top_p: given 0"),
    (CHAT, {"max_tokens": 0}, "max_tokens: given 0, allowed: a whole number from 1"),
    (CHAT, {"seed": 1.5}, "seed: given 1.5"), (CHAT, {"stop": ""}, 'stop: given ""'),
    (CHAT, {"stop": "a", "stream": True}, "stop: a stream cannot be cut"),
    (CHAT, {"tools": [{"type": "function"}]}, f"{NO_PROMPT}: ValueError: tools: the chat template does not read"),
    (CHAT, {"messages": None}, "messages is missing"),
    (CHAT, {"messages": [{"content": "hi"}]}, f"{NO_PROMPT}: KeyError: 'role'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, f"{NO_PROMPT}: ValueError: mess"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, f"{NO_PROMPT}: ValueError: the chat template"),
    (TEXT, {"prompt": [1, 2]}, "prompt: given [1, 2], allowed: a text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "given", "reason"), REFUSED)
def test_what_the_server_would_ignore_or_break_on_is_refused(path, given, reason, served):
    behind, asked = Behind(), ASKED if path == CHAT else {"prompt": "Where"}
    status, message, _ = post(served, asked | given, path=path, behind=behind).error
    assert status == 400 and message.startswith(reason), message
    assert not behind.requests


def test_neutral_values_are_left_out_and_honoured_ones_passed_on(served):
    behind = Behind()
    for given in (NEUTRAL, dict.fromkeys(NEUTRAL), {}):
        assert post(served, ASKED | given, behind=behind).status == 200
    plain = behind.requests[0]
    assert plain.keys() == {"messages", "model", "max_tokens"} and all(one == plain for one in behind.requests)
    given = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stream": True, "max_tokens": 5, "model": served.name}
    given |= {"tools": [{"type": "function"}], "chat_template_kwargs": {"thinks": True}}
    tokenizer = train_tokenizer(["Lima"], vocab_size=300, chat_template="{{ messages }}{{ tools }}{{ thinks }}")
    post(replace(served, tokenizer=tokenizer), ASKED | given, behind=behind)
    assert behind.requests[-1] == ASKED | given | {"model": served.directory}


def test_a_temperature_samples_from_a_model_whose_own_config_is_greedy(model):
    served, behind = find_served(find_answering_model(str(model))), Behind()
    for temperature in (0.7, 0, None):
        post(served, ASKED | {"temperature": temperature}, behind=behind)
    post(served, ASKED | {"temperature": 0.7, "top_k": 5}, behind=behind)
    sampling, *others, few = [request.get("generation_config") for request in behind.requests]
    assert others == [None, None] and json.loads(few) == json.loads(sampling) | {"top_k": 5}
    own = json.loads((model / "generation_config.json").read_text())
    assert json.loads(sampling) | own == json.loads(sampling) and json.loads(sampling)["do_sample"] is True


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("Peru", "In ", "stop"), ([" In", "Peru", "eru"], "In ", "stop"), ("Lima", "In Peru. In Peru.", "length")],
)
def test_answers_end_before_the_first_stop_text(stop, text, reason, served):
    behind = Behind()
    answer = post(served, ASKED | {"stop": stop}, behind=behind)
    (choice,) = json.loads(answer.body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
    assert behind.requests[0]["stop"] == ([stop] if isinstance(stop, str) else stop)  # so that it generates no more
    assert answer.headers[b"x-request-id"] == b"7"


def test_stop_texts_cut_texts_and_reasoning_but_no_errors(served):
    text = post(served, {"prompt": "Where", "stop": "Peru"}, path=TEXT, behind=Behind(TEXT_ANSWER))
    assert json.loads(text.body) == {"choices": [{"text": "In ", "finish_reason": "stop"}]}
    message = {"role": "assistant", "content": "", "reasoning_content": "Is it Peru"}
    thought = post(served, ASKED | {"stop": "Peru"}, behind=Behind({"choices": [{"message": message}]}))
    assert json.loads(thought.body)["choices"][0]["message"]["reasoning_content"] == "Is it "
    broken = post(served, ASKED | {"stop": "Peru"}, behind=Behind("Peru", status=500))
    assert (broken.status, broken.body) == (500, b'"Peru"')


def test_bodies_that_are_no_json_or_too_large_are_refused(served):
    for body in (b"{", b"[1]", b"\xff", b"", b"[" * 100_000):
        assert post(served, body).error[0] == 400
    behind = Behind()
    front, piece = make_front(served, behind=behind), b" " * (MAX_BODY // 2)
    body = json.dumps(ASKED).encode()
    assert send_request(front, CHAT, HOST, pieces=[piece, piece[len(body) :], body]).status == 200
    assert send_request(front, CHAT, HOST, pieces=[piece, piece[len(body) :], body, b" "]).error[0] == 413
    assert len(behind.requests) == 1


def test_events_and_the_lifespan_pass_through_at_once(served):
    seen = []

    async def behind(scope, receive, send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"data: 1", b"data: 2"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                assert seen[-1]["body"] == part
            assert [(await receive())["type"] for _ in range(2)] == ["http.request", "http.disconnect"]
        else:
            seen.append(scope["type"])

    async def run() -> None:
        messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

        async def receive():
            return next(messages)

        async def send(message) -> None:
            seen.append(message)

        scope = {"method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")]}
        await front({**scope, "type": "http"}, receive, send)
        await front({"type": "lifespan"}, receive, send)

    front, body = make_front(served, behind=behind), json.dumps(ASKED | {"stream": True}).encode()
    asyncio.run(run())
    assert len(seen) == 4 and seen[-1] == "lifespan"


def find_refusal(port: int, path: str, headers: dict[str, str]) -> int:
    headers = {"Content-Type": "application/json"} | headers
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", b'{"model": "x"}', headers))
    return error.value.code


def is_up(port: int) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
    return False


def check_client(client, name: str, said: str) -> None:
    """What OpenAI's client gets: the model's context, cut, streamed and sampled answers, and refusals."""
    from openai import APIStatusError

    def ask(content: str = "A word?", **given):
        asked = {"model": name, "max_tokens": 6, "temperature": 0} | given
        return client.chat.completions.create(messages=[{"role": "user", "content": content}], **asked)

    (listed,) = client.models.list().data
    assert listed.id == name
    pieces = [piece.choices[0].delta.content or "" for piece in ask(stream=True)]
    assert len(pieces) > 2 and show("".join(pieces)) == show(said)
    stop = re.findall(r"[A-Za-z]", said)[-1]
    cut = ask(stop=stop).choices[0]
    assert cut.message.content == said.partition(stop)[0] and cut.finish_reason == "stop"
    sampled = [ask(temperature=1.5, seed=seed, max_tokens=20).choices[0].message.content for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    text = client.completions.create(model=name, prompt="A word?", max_tokens=3, stop=["no such text"])
    assert text.usage.completion_tokens == 3 and text.choices[0].finish_reason == "length"
    refused = {
        404: lambda: ask(model="gpt2"),
        401: lambda: client.with_options(api_key="another").models.list(),
        400: lambda: ask("word " * listed.max_model_len),
    }
    for status, request in refused.items():
        with pytest.raises(APIStatusError) as raised:
            request()
        assert raised.value.status_code == status
    assert raised.value.code == "context_length_exceeded"


def show(text: str) -> str:
    """The text's letters: unfinished characters are streamed otherwise than decoded."""
    return re.sub(r"[^A-Za-z]", "", text)


@pytest.mark.long
def test_a_server_answers_as_the_model_does_in_the_terminal(model, tmp_path):
    need("fastapi")
    need("uvicorn")
    openai = need("openai")
    port = free_port()
    words = [sys.executable, "-m", "mini_trainer", "serve", model, "--port", str(port)]
    env = os.environ | {"HF_HOME": str(tmp_path / "hub"), KEY: "key-of-ours"}
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    try:
        assert f"serving {model} at http://127.0.0.1:{port}/v1" in server.stdout.readline()
        chat = server.stdout.readline().removeprefix("chat: ").split()
        wait_until(lambda: is_up(port), seconds=180, by=server)
        refused = {"/load_model": {}, "/reset": {}, "/v1/models": {"Host": "evil.example"}}
        assert [find_refusal(port, path, headers) for path, headers in refused.items()] == [404, 404, 421]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key-of-ours", max_retries=0)
        asked = {"messages": [{"role": "user", "content": "A word?"}], "max_tokens": 6, "temperature": 0}
        said = client.chat.completions.create(model=str(model), **asked).choices[0].message.content
        check_client(client, str(model), said)
        for way in (chat, [sys.executable, "-m", "mini_trainer", "chat", model]):
            way = [*way, "--max-new-tokens", "6"]
            told = subprocess.run(way, input="A word?\n", capture_output=True, text=True, env=env, check=True).stdout
            assert show(said) and show(said) in show(told), (said, told)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
