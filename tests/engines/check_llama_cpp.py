"""Exports as GGUF files in llama.cpp, beside transformers; SmolLM2's beside those of llama.cpp's own converter.

Needs ENGINES_LLAMA_CPP, a Python that has llama-cpp-python, and ENGINES_LLAMA_CPP_SOURCE, the folder of its llama.cpp's
convert_hf_to_gguf.py, which imports sentencepiece.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from engine_exports import ask_chats
from engine_table import ANY, EXACT, NUM_TOKENS, ROUNDED, Said, Table, expect
from gguf_against_converter import ask, compare_files, convert
from transformers import AutoTokenizer, GenerationConfig

from mini_trainer.options.tools import ExportGgufOptions
from mini_trainer.tools.export_gguf import export_gguf

PYTHON = os.environ.get("ENGINES_LLAMA_CPP", "")
SOURCE = Path(os.environ.get("ENGINES_LLAMA_CPP_SOURCE", ""))
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "smollm3")
EMBEDDING, FACTORS = "token_embd.weight", "rope_freqs.weight"
TYPES = ("f32", "bf16", "f16", "q8_0")
# llama.cpp rounds activations to the type of the weights, too; a file in q8_0 is its converter's.
BOUNDS = {"f32": EXACT, "bf16": ROUNDED, "f16": ROUNDED, "q8_0": ANY}
TOLERANCE_OF_GELU = 2e-3  # llama.cpp looks it up in a table of f16
# Each family in each type; each type from exports of both dtypes.
PAIRS = [
    (family if (i + j) % 2 else f"{family}_bf16", type)
    for i, family in enumerate(FAMILIES)
    for j, type in enumerate(TYPES)
]
KINDS = [(kind, type) for kind in ("full", "full_bf16", "lora_merged", "osft", "grown") for type in ("f32", "q8_0")]


def export(model_dir: Path, target: Path, type: str) -> Path:
    export_gguf(ExportGgufOptions(model_name_or_path=str(model_dir), output=str(target), dtype=type))
    return target


def answer(model_dir: Path, path: Path, chats: Sequence[list[dict[str, str]]]) -> tuple[list[Said], list[int]]:
    """llama.cpp's greedy answers to the chats, of whose text it makes the tokens; the tokens at which it ends them."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    reply = ask(PYTHON, path, [dict(text=text, max_tokens=NUM_TOKENS) for text in texts])
    said = [Said(one["prompt"], one["greedy"], one["logprobs"], one["stop"] == "token") for one in reply["answers"]]
    return said, reply["stops"]


def end(said: Said, stops: list[int]) -> Said:
    """An answer as far as it goes with these stop tokens: llama.cpp has some of its own, known by their text."""
    length = next((i + 1 for i, token in enumerate(said.ids) if token in stops), len(said.ids))
    return replace(
        said, ids=said.ids[:length], logprobs=said.logprobs[:length], gaps=said.gaps[:length],
        stopped=said.ids[length - 1] in stops,
    )  # fmt: skip


def compare_answers(
    table: Table, kind: str, model_dir: Path, path: Path, chats: list, bounds: tuple[float, float]
) -> None:
    """llama.cpp's answers beside transformers'; every stop token of the export is one of llama.cpp."""
    given, stops = answer(model_dir, path, chats)
    own = GenerationConfig.from_pretrained(model_dir).eos_token_id
    assert set(own if isinstance(own, list) else [own]) <= set(stops)
    table.compare("llama.cpp", kind, [end(said, stops) for said in expect(model_dir, chats)], given, bounds)


def check_converted(model_dir: Path, path: Path, type: str, *, split: str | None = None) -> int:
    """The number of tensors, each of which is the converter's; so what q8_0 loses is what the converter's file does."""
    converted = convert(model_dir, path.with_name("converted.gguf"), type, SOURCE, split=split)
    num_equal, others, _ = compare_files(path, converted)
    if others == [EMBEDDING]:  # of Gemma the converter leaves out rows beyond the tokenizer's
        ours, theirs = (read_tensor(file, EMBEDDING) for file in (path, converted))
        assert len(theirs) < len(ours) and (ours[: len(theirs)] == theirs).all()
        return num_equal + 1
    if others == [FACTORS]:  # which the converter computes in float32, in another order
        ours, theirs = (read_tensor(file, FACTORS) for file in (path, converted))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        return num_equal + 1
    assert not others, f"not the converter's: {others}"
    return num_equal


def read_tensor(path: Path, name: str) -> np.ndarray:
    return next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)


@pytest.mark.parametrize(("kind", "type"), [*PAIRS, *KINDS])
def test_an_export_answers_in_llama_cpp_as_in_transformers(kind, type, exports, table: Table, tmp_path):
    model_dir, chats = exports[kind], ask_chats()
    path = export(model_dir, tmp_path / "model.gguf", type)
    bounds = BOUNDS[type]
    if type == "q8_0":
        split = gguf.GGUFReader(path).fields["tokenizer.ggml.pre"].contents()
        assert check_converted(model_dir, path, type, split=split) > 10
    elif kind.startswith("gemma3"):
        bounds = (max(bounds[0], TOLERANCE_OF_GELU), bounds[1])
    compare_answers(table, f"{kind} {type}", model_dir, path, chats, bounds)


# Runs a command with llama-cpp-python's environment behind this program's own.
BORROWING = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('mini_trainer', run_name='__main__')"


@pytest.mark.parametrize("reader", ["llama.cpp", "file"])
def test_llama_cpp_answers_otherwise_than_the_run_recorded(reader, exports, table: Table, tmp_path):
    model_dir = exports["full_bf16"]
    against = export(model_dir, tmp_path / "model.gguf", "bf16") if reader == "file" else reader
    (site,) = Path(PYTHON).parents[1].glob("lib/python*/site-packages")
    words = [sys.executable, "-c", BORROWING, site, "verify", model_dir, "--against", against]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "answers as the trained model does" in done.stdout, done.stderr[-2000:]
    table(engine="verify --against", kind=f"full_bf16, {reader}", greedy="as recorded")


@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_a_real_models_tensors_are_those_of_llama_cpps_converter(type, smollm2, table: Table, tmp_path):
    path = export(smollm2, tmp_path / "model.gguf", type)
    assert check_converted(smollm2, path, type) == 272
    chats = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Count to seven.")]
    compare_answers(table, f"SmolLM2-135M {type}", smollm2, path, chats, BOUNDS[type])
