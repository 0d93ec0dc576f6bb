"""mini-trainer serve and chat: the servers they become, and answers equal to the model's own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
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
from mini_trainer.tools.serve import check_port, choose_engine, list_common, name_for_transformers, name_for_vllm
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
    assert list_common(make_options(model=str(model), port=8001, engine_args=given)) == [
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


def ask(port: int, name: str, content: str) -> str:
    body = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


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
        said = ask(port, str(model), "A word?")
        short = ["--max-new-tokens", "6"]
        ways = [[*chat, *short], [sys.executable, "-m", "mini_trainer", "chat", model, *short]]
        for way in ways:
            told = subprocess.run(way, input="A word?\n", capture_output=True, text=True, env=env, check=True).stdout
            assert show(said) and show(said) in show(told), (said, told)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
