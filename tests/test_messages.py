"""What people read on a terminal: nothing that it obeys, no secrets; and no code from the hub."""

import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from breadth import wide
from forked import run_forked
from processes import ENV, ROOT

from mini_trainer.distributed.messages import CleanFormatter, hide_secrets, make_visible

TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # Unicode's names for what turns writing


def test_nothing_stays_that_a_terminal_obeys():
    """Every character there is: by Unicode's own categories, and nothing else is changed."""
    for code in range(sys.maxunicode + 1):
        text = chr(code)
        obeyed = unicodedata.category(text) in ("Cc", "Cs") or unicodedata.bidirectional(text) in TURNING
        is_kept = text in "\n\t" or (not obeyed and text not in "\u061c\u200e\u200f")
        assert (make_visible(text) == text) == is_kept, hex(code)
        assert is_kept or make_visible(text).isascii()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://me:p@ss@host/x", "see https://***@host/x"),
        ("https://bucket/a.png?X-Amz-Signature=abc&size=3", "https://bucket/a.png?X-Amz-Signature=***&size=3"),
        ("http://h/?API-Key=abc sqlite://u:p@h/db", "http://h/?API-Key=*** sqlite://***@h/db"),
        ("me@example.org, a/b@c, 1 < 2 & 3 = 3?", "me@example.org, a/b@c, 1 < 2 & 3 = 3?"),
        ("the key is longer-secret", "the key is ***"),
        ("/home/me/hf_token and 100000 and false", "/home/me/hf_token and 100000 and false"),
    ],
)
def test_secrets_are_hidden_wherever_they_stand(text, shown, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "longer-secret")
    monkeypatch.setenv("HF_TOKEN_PATH", "/home/me/hf_token")
    monkeypatch.setenv("MAX_TOKENS", "100000")
    assert hide_secrets(text) == shown


def test_log_lines_are_clean():
    record = logging.LogRecord("mini_trainer", logging.INFO, "", 0, "name \x1b]0;x\x07 at http://a:b@c", None, None)
    assert CleanFormatter().format(record) == r"name \x1b]0;x\x07 at http://***@c"


@pytest.mark.slow
def test_messages_of_scripts_are_clean(tmp_path):
    name = tmp_path / "a\x1b[31m\u202eb.jsonl"
    name.write_text('{"messages": "\\u001b]0;x\\u0007"}\n')
    words = ["--input-file", str(name), "--output-file", str(tmp_path / "o.arrow"), "--model-name-or-path", "none"]
    done = run_forked(0, "process_data.py", *words)
    assert done.returncode == 2 and "error: " in done.stderr
    assert make_visible(done.stderr) == done.stderr and make_visible(done.stdout) == done.stdout


KERNELS = """
def get_kernel(name, *args, **options):
    open(__file__ + ".asked", "a").write(name + "\\n")
    raise OSError("no network here")
"""
LOADS = """
import sys, importlib.util, types
{guard}
import bitsandbytes
from transformers.integrations.hub_kernels import lazy_load_kernel
from transformers.utils.import_utils import is_kernels_available
print(lazy_load_kernel("causal-conv1d"), is_kernels_available())
try:
    from kernels import get_kernel  # as bitsandbytes does on processors with AVX512-BF16, and on Macs
    get_kernel("control")
except Exception as error:
    print(type(error).__name__)
"""
GUARD = """
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import GenerateOptions
parse_options(GenerateOptions, ["--model", "m"])
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("guard", "asks"), [(GUARD, False), wide("", True)])
def test_libraries_ask_the_hub_for_no_compiled_code(guard, asks, tmp_path):
    """Where the package kernels is installed (a stand-in, which writes down what it is asked for)."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(KERNELS)
    (tmp_path / "kernels-0.12.0.dist-info").mkdir()
    (tmp_path / "kernels-0.12.0.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.12.0\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), ENV.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LOADS.format(guard=guard)],
        env=ENV | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    asked = Path(f"{package}/__init__.py.asked")
    assert asked.exists() == asks, done.stdout + done.stderr
    if not asks:
        assert done.returncode == 0 and "None False" in done.stdout, done.stderr
        assert "pip install" not in done.stderr
