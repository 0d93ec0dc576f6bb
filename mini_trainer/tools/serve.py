"""Serves a model on this machine, with an OpenAI-compatible API, by `vllm serve` or by `transformers serve` behind a
front (tools/server_front.py).

    python -m mini_trainer serve runs/chats
    python -m mini_trainer serve Qwen/Qwen3-0.6B --adapter runs/lora/hf_format/latest --port 8001

What cannot be served is refused first: the server's own errors come after a model is loaded.
"""

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ServeOptions

if __name__ == "__main__":
    options = parse_options(ServeOptions)  # before the slow imports: --help and typos answer at once

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mini_trainer.distributed.command import name_program
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.options import flag_name, parse_named_values
from mini_trainer.options.problems.finding import describe_missing, is_installed
from mini_trainer.options.urls import HIDDEN, is_secret
from mini_trainer.tools.server_front import choose_hosts, run_behind_front
from mini_trainer.tools.server_requests import find_served
from mini_trainer.use.inference.loading import FoundModel, check_answering, find_given_model

ADAPTER = "adapter"  # name of an adapter on vLLM's server
NEEDED = ("fastapi", "uvicorn", "openai", "rich")  # by transformers serve
KEY = "MINI_TRAINER_API_KEY"  # environment variable


def serve(options: ServeOptions) -> None:
    """Runs the server; ValueError or OSError for what cannot be done."""
    engine = choose_engine(options.engine)
    arguments = read_server_args(options.engine_args)
    check_engine(engine, options, arguments)
    key = read_key()
    check_port(options.host, options.port)
    found = find_given_model(options)
    check_answering(found)
    program, name_words, start = SERVERS[engine]
    name, words = name_words(found)
    shown = {name: HIDDEN if is_secret(name) else value for name, value in arguments.items()}
    shown_words = [*words, *list_common(options, shown)]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{options.port}/v1"
    chat = [*shlex.split(name_program("chat")), name, "--engine", "openai", "--base-url", url]
    chat += [] if key is None else ["--api-key-env", KEY]
    say(f"serving {name} at {url} by {shlex.join([program, *shown_words])}\nchat: {shlex.join(chat)}")
    start([*words, *list_common(options, arguments)], found, options=options, arguments=arguments, key=key)


def read_server_args(given: Sequence[str]) -> dict[str, Any]:
    """The server's own arguments by name; ValueError for one that an option of ours sets."""
    try:
        arguments = parse_named_values(given)
    except ValueError as error:
        raise ValueError(f"--engine-args: {error}") from None
    for field in fields(ServeOptions):
        if field.name in arguments:
            raise ValueError(f"--engine-args {field.name}: is set by {flag_name(field.name)}")
    return arguments


def check_engine(engine: str, options: ServeOptions, arguments: Mapping[str, Any]) -> None:
    """ValueError for an option or an argument that this server cannot have."""
    if engine == "hf" and arguments.get("continuous_batching"):
        raise ValueError(
            "--engine-args continuous_batching: transformers serve samples all requests as the first one, and does not"
            " stop at stop texts: remove it, or use --engine vllm"
        )
    if engine == "hf" and options.trust_remote_code:
        raise ValueError(
            "--trust-remote-code: transformers serve is not made for models with code of their own; vLLM serves them:"
            " pip install vllm, and --engine vllm"
        )
    if engine == "vllm" and options.allowed_hosts:
        raise ValueError("--allowed-hosts has no effect with --engine vllm: its server does not read a request's Host")


def choose_engine(given: str | None) -> str:
    """vllm or hf; ValueError if its packages are not installed."""
    engine = given or ("vllm" if is_installed("vllm") else "hf")
    problems = describe_missing("--engine vllm", ["vllm"]) if engine == "vllm" else describe_missing("serve", NEEDED)
    if problems:
        others = "" if engine == "vllm" else ' (pip install "transformers[serving]" has all, or pip install vllm)'
        raise ValueError(f"{problems[0]}{others}")
    return engine


def read_key() -> str | None:
    """The key that clients have to send, None for none; ValueError for one that protects nothing or cannot be sent."""
    if (key := os.environ.get(KEY)) is not None and (not key or key != key.strip()):
        raise ValueError(f"{KEY}: is empty, or begins or ends with white space: correct it, or unset it")
    return key


def check_port(host: str, port: int) -> None:
    """ValueError if nothing can listen there, found before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror or error}; give another --port") from None


def name_for_vllm(found: FoundModel) -> tuple[str, list[str]]:
    """The model's name on the server, and the words that start it."""
    words = ["serve", found.directory, "--tokenizer", str(found.tokenizer_dir)]
    words += ["--generation-config", str(found.generation_dir), "--served-model-name", found.base_name]
    if (template := Path(found.tokenizer_dir) / "chat_template.jinja").is_file():
        words += ["--chat-template", str(template)]
    if found.adapter is None:
        return found.base_name, words
    from mini_trainer.use.inference.vllm_engine import choose_rank

    lora = ["--enable-lora", "--lora-modules", f"{ADAPTER}={found.adapter}", "--max-lora-rank", str(choose_rank(found))]
    return ADAPTER, [*words, *lora]


def name_for_transformers(found: FoundModel) -> tuple[str, list[str]]:
    """The model's name on the server, and the words that start it; ValueError for an adapter."""
    if found.adapter is not None:
        raise ValueError(
            f"transformers serve takes no adapters, such as {found.adapter}: {name_program('merge-adapter')} --adapter"
            f" {shlex.quote(str(found.adapter))} --output-dir MERGED writes a model to serve; vLLM takes adapters"
        )
    return found.base_name, ["serve", found.directory]


def become_vllm(words: list[str], found: FoundModel, *, key: str | None, **others: Any) -> None:
    os.environ |= {} if key is None else {"VLLM_API_KEY": key}
    os.execv(sys.executable, [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *words])


def run_transformers(
    words: list[str], found: FoundModel, *, options: ServeOptions, arguments: Mapping[str, Any], key: str | None
) -> None:
    hosts = choose_hosts(options.host, options.allowed_hosts)
    allows_origins = bool(arguments.get("enable_cors"))
    run_behind_front(words, served=find_served(found), hosts=hosts, allows_origins=allows_origins, key=key)


# Program, and the functions that name the model and begin its words, and that start it, by --engine.
SERVERS = {
    "vllm": ("vllm", name_for_vllm, become_vllm),
    "hf": ("transformers", name_for_transformers, run_transformers),
}


def list_common(options: ServeOptions, arguments: Mapping[str, Any]) -> list[str]:
    """Words that both servers know, and the server's own arguments."""
    words = ["--host", options.host, "--port", str(options.port), "--dtype", options.dtype]
    words += ["--trust-remote-code"] if options.trust_remote_code else []
    for name, value in arguments.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value) if isinstance(value, str | int | float) else json.dumps(value)]
    return words


if __name__ == "__main__":
    with ending_with_message(when_interrupted="interrupted"):
        serve(options)
