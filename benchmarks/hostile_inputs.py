"""Seconds, peak memory and last words of programs that are given hostile files: small ones that unpack to gigabytes,
files without an end, patterns that take forever, absurd sizes.

    OMP_NUM_THREADS=1 python benchmarks/hostile_inputs.py
    OMP_NUM_THREADS=1 python benchmarks/hostile_inputs.py --checkout ../before   # the same of another checkout

Each program may take 60 seconds and 6 GiB of memory (RLIMIT_DATA). Exits with 1 if one does not end, is
killed, or has a traceback.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import paths
import pyarrow as pa
import pyarrow.parquet as pq
from make_tiny_model import save_tiny_model, train_tokenizer
from tiny_data import write_jsonl

SECONDS, MEMORY_BYTES = 60, 6 << 30
CATASTROPHE = r"(([a-z_.]+)+)+[0-9]!"  # takes time exponential in a name's length


def write_long_text(path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * (1 << 30)]}), path, compression="zstd")


def write_long_list(path: Path) -> None:
    turns = [{"role": "user", "content": "x" * 1_000_000}] * 1000
    pq.write_table(pa.table({"messages": [turns]}), path, compression="zstd")


def write_nulls(path: Path) -> None:
    """One row."""
    nulls = pa.nulls(300_000_000, pa.string())
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, len(nulls)], nulls)}), path, compression="zstd")


def write_config(path: Path, **changes: object) -> None:
    """A copy of the model with other values in its config."""
    shutil.copytree(path.parent / "model", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def write_adapter(path: Path, **changes: object) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent / "model")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(path)
    config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": "model"}
    (path / "adapter_config.json").write_text(json.dumps(config | changes))


def write_run(path: Path) -> None:
    """A run whose metrics are a pipe."""
    path.mkdir()
    (path / "training_params.json").write_text("{}")
    os.mkfifo(path / "training_metrics_0.jsonl")


PROCESS = ("process-data", "--output-file", "out.arrow", "--model-name-or-path", "model", "--num-proc", "1")
TRAIN = ("train", "--nproc-per-node", "1", "--data-path", "data.arrow", "--output-dir", "run", "--max-steps", "1")
GENERATE = ("generate", "--prompts", "prompts.txt", "--output", "a.jsonl")
# Name: what writes it, and the program that reads it.
CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a text of 1 GiB.parquet": (write_long_text, (*PROCESS, "--format", "document", "--input-file")),
    "a list of 1,000 MB.parquet": (write_long_list, (*PROCESS, "--input-file")),
    "300,000,000 nulls.parquet": (write_nulls, (*PROCESS, "--input-file")),
    "options: dev zero": (lambda path: path.symlink_to("/dev/zero"), (*TRAIN, "--config")),
    "options: a pipe": (os.mkfifo, (*TRAIN, "--config")),
    "options: 2 MB.yaml": (lambda path: path.write_text("seed: 1 # " + "x" * (2 << 20)), (*TRAIN, "--config")),
    "options: 100,000 keys.yaml": (
        lambda path: path.write_text("".join(f"k{i}: 1\n" for i in range(100_000))), (*TRAIN, "--config")),
    "adapter: a pattern": (lambda path: write_adapter(path, target_modules=CATASTROPHE), (*GENERATE, "--model")),
    "adapter: r 10^9": (lambda path: write_adapter(path, r=10**9), (*GENERATE, "--model")),
    "model: hidden_size -1": (lambda path: write_config(path, hidden_size=-1), (*TRAIN, "--model-name-or-path")),
    "model: hidden_size 10^12": (lambda path: write_config(path, hidden_size=10**12), (*GENERATE, "--model")),
    "model: two layers": (
        lambda path: write_config(path, num_hidden_layers="two"), (*TRAIN, "--model-name-or-path")),
    "plots: a pipe": (write_run, ("plot-metrics", "--output", "curves.html")),
}  # fmt: skip


def measure(checkout: Path, work: Path, words: tuple[str, ...]) -> tuple[str, float, float, str]:
    """Exit code, or that there is none, seconds, peak MB, and the error or what else was said last."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))

    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "mini_trainer", *words]
    start = time.monotonic()
    with open(work / "said.txt", "w+") as said:
        child = subprocess.Popen(command, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                 start_new_session=True, preexec_fn=limit)  # fmt: skip
        ended = 0
        while not ended and time.monotonic() - start < SECONDS:
            time.sleep(0.1)
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        if not ended:
            os.killpg(child.pid, signal.SIGKILL)
            _, status, usage = os.wait4(child.pid, 0)
        said.seek(0)
        output = said.read()
    ending = "does not end" if not ended else str(os.waitstatus_to_exitcode(status))
    errors = [line for line in output.splitlines() if line.startswith("error")]
    words_said = "Traceback" if "Traceback" in output else (errors or output.splitlines() or ["-"])[-1]
    return ending, time.monotonic() - start, usage.ru_maxrss / 1024, words_said


def shorten(said: str, checkout: Path) -> str:
    """The words for a table, without this machine's paths."""
    return said.replace(f"{checkout}/", "").replace(sys.executable, "python").replace("|", "/")[:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=paths.ROOT)
    args = parser.parse_args()
    checkout, failures = args.checkout.resolve(), 0
    print("| input | ends with | seconds | MB | says |\n| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        texts = [f"Which is {i}? It is {i}." for i in range(40)]
        tokenizer = train_tokenizer(texts, vocab_size=300)
        save_tiny_model(work / "model", tokenizer, hidden_size=32, num_layers=2, seed=0)
        write_jsonl(work / "rows.jsonl", [{"prompt": text[:12], "completion": text[12:]} for text in texts])
        (work / "prompts.txt").write_text("Which is 3?\n")
        model = ("--model-name-or-path", "model")
        made = measure(
            paths.ROOT, work, ("process-data", "--input-file", "rows.jsonl", "--output-file", "data.arrow", *model)
        )
        assert made[0] == "0", made
        for name, (write, words) in CASES.items():
            path = work / name.replace(" ", "_").replace(":", "").replace(",", "")
            writer = multiprocessing.Process(target=write, args=(path,))  # its memory would count as the program's
            writer.start(), writer.join()
            ending, seconds, peak, said = measure(checkout, work, (*words, path.name))
            failures += ending not in ("0", "2") or said == "Traceback"
            print(f"| {name} | {ending} | {seconds:.1f} | {peak:,.0f} | {shorten(said, checkout)} |", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
