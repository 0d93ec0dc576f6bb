"""CPU seconds until the first step, the first row and the first answer, against what the libraries alone need.

    OMP_NUM_THREADS=1 python benchmarks/start_up.py --work-dir /tmp/start_up
    ... --before CHECKOUT    # another checkout of this project, in the same rounds

A floor is a process that imports torch and transformers, loads the tokenizer and makes the model's class, and no more.
A run is the whole program on a random model of 0.9 million parameters: one step with its export, one row, one answer.
Reported are medians over rounds in which every command runs once, by the CPU time of child processes, since wall time
depends on what else the machine does. Bytecode is cached, as it is in every start but the first.
"""

import argparse
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import paths

TOOLS = ("score_data", "continual", "draw_samples", "import_config", "merge_adapter", "board", "export_gguf",
         "plot_metrics", "sweep/__main__", "verify", "export_run", "serve")  # fmt: skip
PROGRAMS = ["train.py", "process_data.py", "generate.py", "evaluate_model.py"]
PROGRAMS += [f"mini_trainer/tools/{name}.py" for name in TOOLS]
TOKENIZER = "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained({model!r})"
MODEL = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("meta"):
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({model!r}))
"""
LIBRARIES = "import torch, transformers"


def make_env(work_dir: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return env | {"PYTHONPYCACHEPREFIX": str(work_dir / "bytecode"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def prepare(work_dir: Path, env: dict[str, str]) -> tuple[Path, Path, Path]:
    """Makes the quickstart's chats, one chat, and a model; returns the chats, the chat and the model."""
    chats, one, model = work_dir / "chats" / "train.jsonl", work_dir / "one.jsonl", work_dir / "model"
    make = [sys.executable, paths.ROOT / "examples/quickstart/make_data.py", "--output-dir", chats.parent]
    subprocess.run(make, env=env, stdout=subprocess.DEVNULL, check=True)
    one.write_text(chats.read_text().splitlines(keepends=True)[0])
    make = [sys.executable, paths.ROOT / "examples/quickstart/make_tiny_model.py", "--messages-file", chats]
    subprocess.run([*make, "--output-dir", model, "--vocab-size", "1024"], env=env, capture_output=True, check=True)
    return chats, one, model


def list_runs(work_dir: Path, one: Path, model: Path) -> dict[str, list[object]]:
    """The programs' command lines, by what is measured; all write into `work_dir` / output."""
    data, output = work_dir / "train.arrow", work_dir / "output"
    train = ["train.py", "--model-name-or-path", model, "--data-path", data, "--output-dir", output / "run"]
    train += ["--max-steps", 1, "--batch-size", 8, "--max-tokens-per-gpu", 2048, "--learning-rate", 1e-3]
    ask = ["--max-new-tokens", 2]
    return {
        "train.py, one step": train,
        "process_data.py, one row": [
            *("process_data.py", "--input-file", one, "--output-file", output / "one.arrow"),
            *("--model-name-or-path", model),
        ],
        "generate.py, one answer": [
            *("generate.py", "--model", model, "--prompts", one, "--output", output / "answers.jsonl", *ask)
        ],
        "evaluate_model.py, one task": [
            *("evaluate_model.py", "--model", model, "--task", one, "--output-dir", output / "evaluated", *ask)
        ],
    }


def count_seconds(command: list[object], checkout: Path, env: dict[str, str], output: Path) -> float:
    """CPU seconds, of all threads, of a process that must succeed."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"{words} ended with {done.returncode}:\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round: by what is measured, and by the checkout's name."""
    work_dir, env = args.work_dir, make_env(args.work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    chats, one, model = prepare(work_dir, env)
    make = ["process_data.py", "--input-file", chats, "--output-file", work_dir / "train.arrow"]
    count_seconds([*make, "--model-name-or-path", model], paths.ROOT, env, work_dir / "output")
    floors = {
        "floor: import torch, transformers": ["-c", LIBRARIES],
        "floor: tokenizer": ["-c", TOKENIZER.format(model=str(model))],
        "floor: tokenizer, model's class": [
            "-c",
            "\n".join(part.format(model=str(model)) for part in (TOKENIZER, MODEL)),
        ],
    }
    programs = list_runs(work_dir, one, model) | {f"{program} --help": [program, "--help"] for program in PROGRAMS}
    checkouts = {"now": paths.ROOT} | ({} if args.before is None else {"before": args.before})
    seconds = defaultdict(lambda: defaultdict(list))
    for round_ in range(args.num_rounds + 1):
        for name, command in (floors | programs).items():
            for label, checkout in checkouts.items():
                if name in floors and label != "now":
                    continue
                taken = count_seconds(command, checkout, env, work_dir / "output")
                if round_ > 0:  # the first writes the bytecode
                    seconds[name][label].append(taken)
    return seconds


def describe(seconds: dict[str, dict[str, list[float]]], labels: list[str]) -> str:
    def show(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""

    lines = [f"| CPU seconds | {' | '.join(labels)} |", "| --- |" + " --- |" * len(labels)]
    lines += [f"| {name} | {' | '.join(show(by.get(label, [])) for label in labels)} |" for name, by in seconds.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--num-rounds", type=int, default=5)
    args = parser.parse_args()
    args.work_dir = args.work_dir.resolve()
    from harness import describe_versions

    print(f"python {platform.python_version()}, {describe_versions('torch', 'transformers', 'numba')}")
    labels = ["now"] if args.before is None else ["before", "now"]
    print(describe(measure(args), labels))


if __name__ == "__main__":
    main()
