"""mini-trainer serve and chat: the servers they become, and answers equal to the model's own."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from heavy import need
from make_tiny_model import save_tiny_model, train_tokenizer
from transformers import AutoModelForCausalLM

from mini_trainer.options import group_options
from mini_trainer.options.tools import ServeOptions
from mini_trainer.tools.serve import (
    check_engine,
    check_port,
    choose_engine,
    list_common,
    name_for_transformers,
    name_for_vllm,
    read_server_args,
)
from mini_trainer.tools.server_front import LOOPBACK, PATHS, Front, choose_hosts
from mini_trainer.use.inference.loading import find_answering_model


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
    name, words = name_for_vllm(found)
    assert (name, words[:2]) == (str(model), ["serve", str(model)])
    assert words[words.index("--chat-template") + 1] == str(model / "chat_template.jinja")
    given = ("max_model_len=256", "enforce_eager=true", "enable_prefix_caching=false", 'rope_scaling={"factor": 2}')
    assert list_common(make_options(model=str(model), port=8001), read_server_args(given)) == [
        *("--host", "127.0.0.1", "--port", "8001", "--dtype", "auto", "--max-model-len", "256", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--rope-scaling", '{"factor": 2}'),
    ]


def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: Address already in use; give another --port"):
            check_port("127.0.0.1", port)
    adapter = replace(find_answering_model(str(model)), adapter=Path("runs/a b"))
    with pytest.raises(ValueError, match=r"takes no adapters, such as runs/a b: .* merge-adapter --adapter 'runs/a b'"):
        name_for_transformers(adapter)
    with pytest.raises(ValueError, match=r"--engine vllm needs the package vllm, which is not installed: pip install"):
        choose_engine("vllm")
    with pytest.raises(ValueError, match=r"^--trust-remote-code: transformers serve .* vLLM serves them: pip install"):
        check_engine("hf", make_options(model=str(model), trust_remote_code=True))
    check_engine("vllm", make_options(model=str(model), trust_remote_code=True))
    with pytest.raises(ValueError, match=r"^--allowed-hosts has no effect with --engine vllm"):
        check_engine("vllm", make_options(model=str(model), allowed_hosts=("gpu7",)))


@pytest.mark.parametrize("given", ["trust_remote_code=true", "host=0.0.0.0", "port=1", "dtype=auto"])
def test_options_of_our_own_cannot_be_given_to_the_server_unchecked(given):
    name = given.partition("=")[0]
    with pytest.raises(ValueError, match=f"^--engine-args {name}: is set by --{name.replace('_', '-')}$"):
        read_server_args([given])


def send_request(front: Front, path: str, *headers: tuple[str, str], method: str = "POST") -> int:
    """The status of the front's answer; 200 if the request reaches what is behind it."""
    sent = []

    async def send(message) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers]
    asyncio.run(front({"type": "http", "method": method, "path": path, "headers": encoded}, None, send))
    return sent[0]["status"]


def make_front(hosts=LOOPBACK, **options) -> Front:
    async def behind(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200})

    return Front(behind, hosts=hosts, **options)


HOST = ("host", "localhost:8000")


def test_only_the_model_s_own_paths_reach_the_server():
    assert {send_request(make_front(), path, HOST) for path in PATHS} == {200}
    others = (
        "/load_model",
        "/reset",
        "//load_model",
        "/v1/../load_model",
        "/load_model/",
        "/docs",
        "/v1/responses",
        "",
    )
    assert {send_request(make_front(), path, HOST) for path in others} == {404}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("host", "127.0.0.1")], 200),
        ([("Host", "LOCALHOST:99")], 200),
        ([("host", "[::1]:8000")], 200),
        ([("host", "evil.example:8000")], 421),  # whose name leads to 127.0.0.1
        ([("host", "localhost.evil.example")], 421),
        ([("host", "localhost@evil.example")], 421),
        ([("host", "[::1")], 421),
        ([], 421),
        ([HOST, ("host", "evil.example")], 421),
        ([HOST, ("origin", "http://localhost:3000")], 200),
        ([HOST, ("origin", "https://evil.example")], 403),
        ([HOST, ("origin", "null")], 403),
    ],
)
def test_only_expected_hosts_and_origins_reach_a_server_on_loopback(headers, status):
    assert send_request(make_front(), "/v1/models", *headers, method="GET") == status


def test_a_server_elsewhere_answers_to_the_given_names_or_to_any():
    assert choose_hosts("127.0.0.1", ()) == LOOPBACK
    assert choose_hosts("127.0.0.2", ("Proxy",)) == (*LOOPBACK, "127.0.0.2", "proxy")
    assert choose_hosts("0.0.0.0", ("GPU7",)) == ("gpu7",)
    assert choose_hosts("0.0.0.0", ()) is choose_hosts("::", ()) is None
    page = ("origin", "http://evil.example")
    for front, host, status, of_page in (
        (make_front(None), "gpu7:8000", 200, 403),
        (make_front(("gpu7",)), "gpu7:8000", 200, 403),
        (make_front(("gpu7",)), "gpu8", 421, 421),
        (make_front(None, allows_origins=True), "gpu7", 200, 200),
    ):
        assert send_request(front, "/health", ("host", host)) == status
        assert send_request(front, "/health", ("host", host), page) == of_page


def ask(port: int, name: str, content: str) -> str:
    body = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def find_status(port: int, path: str, headers: dict[str, str]) -> int:
    body = json.dumps({"model": "another"}).encode()
    headers = {"Content-Type": "application/json"} | headers
    try:
        return urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)).status
    except urllib.error.HTTPError as error:
        return error.code


def show(text: str) -> str:
    """The text's letters: unfinished characters are streamed otherwise than decoded."""
    return re.sub(r"[^A-Za-z]", "", text)


@pytest.mark.long
def test_a_server_answers_as_the_model_does_in_the_terminal(model, tmp_path):
    need("fastapi")
    need("uvicorn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "mini_trainer", "serve", model, "--port", str(port)]
    env = os.environ | {"HF_HOME": str(tmp_path / "hub")}
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    try:
        assert f"serving {model} at http://127.0.0.1:{port}/v1" in server.stdout.readline()
        chat = server.stdout.readline().removeprefix("chat: ").split()
        end = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models")
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.5)
        refused = {"/load_model": {}, "/reset": {}, "/v1/models": {"Host": "evil.example"}}
        assert [find_status(port, path, headers) for path, headers in refused.items()] == [404, 404, 421]
        said = ask(port, str(model), "A word?")  # loaded all the same
        short = ["--max-new-tokens", "6"]
        ways = [[*chat, *short], [sys.executable, "-m", "mini_trainer", "chat", model, *short]]
        for way in ways:
            told = subprocess.run(way, input="A word?\n", capture_output=True, text=True, env=env, check=True).stdout
            assert show(said) and show(said) in show(told), (said, told)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
