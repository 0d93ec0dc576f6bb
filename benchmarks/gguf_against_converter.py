"""GGUF files of export-gguf against those of llama.cpp's converter: their tensors, and what llama.cpp computes of them.

    python benchmarks/gguf_against_converter.py --model M --llama-cpp VENV/bin/python --source llama.cpp

VENV has llama-cpp-python, whose source distribution holds the converter in vendor/llama.cpp; the converter imports
sentencepiece. transformers answers four questions greedily in fp32; llama.cpp reads the same token ids.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import paths
import torch
from harness import describe_versions
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mini_trainer.use.exporters.gguf_file import write_gguf

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 7 plus 5?",
    "Name three colours.",
)
MAX_TOKENS = 32
# Runs the converter for a tokenizer whose checksum it does not know; `name` is how that tokenizer splits text.
NAMING = """
import sys
source, name = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, source)
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: name
convert_hf_to_gguf.main()
"""
# (cache, flash attention)
SETTINGS = (("f32", False), ("f16", False), ("f16", True))


def convert(model_dir: Path, target: Path, dtype: str, source: Path, *, split: str | None = None) -> Path:
    """Writes a file by llama.cpp's converter in `source`; `split` names the splitting of a tokenizer it cannot know."""
    program = [source / "convert_hf_to_gguf.py"] if split is None else ["-c", NAMING, source, split]
    command = [sys.executable, *program, model_dir, "--outfile", target, "--outtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def compare_files(one: Path, other: Path) -> tuple[int, list[str], list[str]]:
    """The number of tensors that are equal, byte for byte and in type; the names of others, and of other fields."""
    readers = [gguf.GGUFReader(path) for path in (one, other)]
    tensors = [
        {tensor.name: (tensor.tensor_type, tensor.shape.tolist(), tensor.data) for tensor in reader.tensors}
        for reader in readers
    ]
    fields = [{name: value.contents() for name, value in reader.fields.items()} for reader in readers]
    names = tensors[0].keys() | tensors[1].keys()
    equal = {
        name
        for name in tensors[0].keys() & tensors[1].keys()
        if tensors[0][name][:2] == tensors[1][name][:2] and np.array_equal(tensors[0][name][2], tensors[1][name][2])
    }
    keys = fields[0].keys() | fields[1].keys()
    return len(equal), sorted(names - equal), sorted(key for key in keys if fields[0].get(key) != fields[1].get(key))


def ask(python: str, path: Path, requests: Sequence[dict[str, Any]], **settings: object) -> dict[str, Any]:
    """What llama.cpp replies in another Python: tests/engines/asked_llama_cpp.py."""
    done = subprocess.run(
        [python, paths.ROOT / "tests" / "engines" / "asked_llama_cpp.py"],
        input=json.dumps(dict(model=str(path), requests=requests, **settings)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)
    return ids[0, len(prompt) :].tolist()


def normalize(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities."""
    return torch.from_numpy(logits).double().log_softmax(-1).numpy()


@torch.no_grad()
def compute_logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> np.ndarray:
    return model(torch.tensor([[*prompt, *answer]])).logits[0].numpy()


def describe(logits: list[np.ndarray], expected: list[np.ndarray], answers: list[list[int]]) -> str:
    """How far logits are apart, and what they say of the answers."""
    most = max(np.abs(one - other).max() for one, other in zip(logits, expected, strict=True))
    same, apart = [], 0.0
    for one, other, answer in zip(logits, expected, answers, strict=True):
        one, other = (normalize(rows[-len(answer) - 1 : -1]) for rows in (one, other))
        same += (one.argmax(-1) == other.argmax(-1)).tolist()
        apart = max(apart, np.abs(one - other)[np.arange(len(answer)), answer].max())
    return f"{sum(same)} of {len(same)} | {apart:.2g} | {most:.2g} |"


def measure(model_dir: Path, python: str, source: Path, work_dir: Path) -> None:
    """Prints a table of files and one of what is computed of them."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModelForCausalLM.from_pretrained(model_dir).float()
    chats = [[dict(role="user", content=question)] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    answers = [generate(model, prompt) for prompt in prompts]
    expected = [compute_logits(model, *pair) for pair in zip(prompts, answers, strict=True)]
    files = {}
    print("\n| type | equal tensors | others | other fields |\n|---|---|---|---|")
    for dtype in ("f32", "bf16", "f16", "q8_0"):
        files["ours", dtype] = work_dir / f"{dtype}.gguf"
        write_gguf(model_dir, files["ours", dtype], dtype)
        files["converter's", dtype] = convert(model_dir, work_dir / f"converted-{dtype}.gguf", dtype, source)
        num_equal, others, keys = compare_files(files["ours", dtype], files["converter's", dtype])
        print(f"| {dtype} | {num_equal} | {', '.join(others) or 0} | {', '.join(keys)} |", flush=True)
    requests = [
        dict(ids=prompt, score=answer, logits=str(work_dir / f"{i}.npy"))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    requests += [dict(text=text, max_tokens=MAX_TOKENS) for text in texts]
    print("\n| file | computed by | prompts | answers | most probable token | log-probabilities | logits |")
    print("|---|---|---|---|---|---|---|")
    for (origin, dtype), path in files.items():
        for cache, flash in SETTINGS:
            replies = ask(python, path, requests, cache=cache, flash_attention=flash)["answers"][len(texts) :]
            counts = [
                sum(reply[key] == wanted for reply, wanted in zip(replies, all_wanted, strict=True))
                for key, all_wanted in (("prompt", prompts), ("greedy", answers))
            ]
            logits = [np.load(work_dir / f"{i}.npy") for i in range(len(texts))]
            how = f"llama.cpp, cache {cache}{', flash attention' if flash else ''}"
            cells = " | ".join(f"{count} of {len(texts)}" for count in counts)
            print(f"| {origin} {dtype} | {how} | {cells} | {describe(logits, expected, answers)}", flush=True)
        if origin == "ours":
            rounded = AutoModelForCausalLM.from_pretrained(work_dir, gguf_file=path.name, dtype=torch.float32)
            logits = [compute_logits(rounded, *pair) for pair in zip(prompts, answers, strict=True)]
            count = sum(generate(rounded, prompt) == answer for prompt, answer in zip(prompts, answers, strict=True))
            cells = f" | {count} of {len(texts)} | {describe(logits, expected, answers)}"
            print(f"| {origin} {dtype} | transformers, in fp32 |{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--llama-cpp", required=True, help="a Python that has llama_cpp")
    parser.add_argument("--source", type=Path, required=True, help="the folder of convert_hf_to_gguf.py")
    args = parser.parse_args()
    shown = subprocess.run(
        [args.llama_cpp, "-c", "import llama_cpp; print(llama_cpp.__version__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    packages = describe_versions("torch", "transformers", "gguf")
    print(f"{packages}, llama-cpp-python {shown.stdout.strip()} and the converter of its llama.cpp; CPU, 1 thread")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work_dir:
        measure(args.model, args.llama_cpp, args.source, Path(work_dir))


if __name__ == "__main__":
    main()
