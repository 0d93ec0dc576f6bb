"""Servers of other programs, on this machine alone, and their answers to `generate.py --engine openai`."""

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine_exports import run
from engine_table import NUM_TOKENS
from processes import ENV
from tiny_data import read_lines, write_jsonl

SECONDS_TO_START = 300


@contextmanager
def served(
    words: Sequence[object], port: int, folder: Path, *, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Runs a server until the block ends, once it says that it is well."""
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(list(map(str, words)), env=ENV | (env or {}), stdout=file, stderr=file)
    try:
        end = time.monotonic() + SECONDS_TO_START
        while not is_ready(port):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield server
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def ask_server(port: int, model: str, chats: Sequence[list], folder: Path) -> list[str]:
    return ask_here(folder, chats, model=model, engine="openai", base_url=f"http://127.0.0.1:{port}/v1")


def ask_here(folder: Path, chats: Sequence[list], **options: object) -> list[str]:
    """The answers of generate.py."""
    prompts, output = write_jsonl(folder / "asked.jsonl", [{"messages": chat} for chat in chats]), folder / "said.jsonl"
    run("generate.py", prompts=prompts, output=output, max_new_tokens=NUM_TOKENS, **options)
    return [row["answer"] for row in read_lines(output)]
