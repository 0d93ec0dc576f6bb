"""A first own data set: do few chats teach a model anything, with the values that `train` chooses?

    python benchmarks/first_model.py run --model runs/smollm2_plain --output-dir runs/first
    python benchmarks/first_model.py show --output-dir runs/first

Three kinds of chats (examples/quickstart/make_forgetting.py), in several numbers. `chosen`: README's command with LoRA.
`former`: the one that README had before train chose anything. `trl`: `trl sft --use_peft` with its defaults. Right are
answers with the word (facts), the line (tickets) or the number (chains); held-out questions about facts are another
wording of those that are trained, the other ones are new. All compute in bf16, which is also `trl`'s default. What is
there already is not run again.
"""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paths
import tyro

sys.path.insert(0, str(paths.ROOT / "examples" / "quickstart"))
from make_continual import make_chat, write_rows
from make_forgetting import ATTRIBUTES, FIRST, LAST, draw, make_chain, make_ticket
from tabulate import tabulate

METRICS = {"facts": "contains", "tickets": "exact_match", "chains": "number"}
TRAIN = ["mini-trainer", "train", "--input-file", "data/train.jsonl", "--validation-share", "0.05"]
TRAIN += ["--output-dir", "run", "--compute-dtype", "bfloat16"]
FORMER = ["--learning-rate", "2e-4", "--batch-size", "16", "--max-epochs", "3"]
PROGRAMS = {
    "chosen": [*TRAIN, "--lora"],
    "former": [*TRAIN, "--lora", *FORMER],
    "trl": ["trl", "sft", "--dataset_name", "data", "--use_peft", "--output_dir", "run", "--use_cpu", "True"],
    "chosen_full": TRAIN,
}
NUM_ASKED = 100  # of the trained questions, and of those held out


@dataclass(frozen=True)
class Options:
    """Train and ask (run), or show the shares of right answers (show)."""

    action: tyro.conf.Positional[Literal["run", "show"]]
    output_dir: Path
    model: Path = Path("runs/smollm2_plain")
    programs: tuple[str, ...] = ("chosen", "former", "trl")
    sizes: tuple[int, ...] = (60, 96, 200, 1_000)
    kinds: tuple[str, ...] = tuple(METRICS)


def make_rows(kind: str, size: int) -> tuple[list[dict], list[dict], list[dict]]:
    """Rows to train, trained questions, and other wordings of these, or other rows of the kind."""
    rng = random.Random(size)
    if kind != "facts":
        rows = draw({"tickets": make_ticket, "chains": make_chain}[kind], rng, size + NUM_ASKED)
        return rows[NUM_ASKED:], rows[NUM_ASKED:], rows[:NUM_ASKED]
    names = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], -(-size // 2 // len(ATTRIBUTES)))
    rows, trained, held_out = [], [], []
    for name, one in [(name, one) for name in names for one in ATTRIBUTES][: size // 2]:
        value, questions = rng.choice(one.values), [wording.format(name=name) for wording in one.wordings]
        rows += [make_chat(question, one.answer.format(name=name, value=value)) for question in questions[:2]]
        trained.append(make_chat(questions[0], value))
        held_out.append(make_chat(questions[3], value))
    rng.shuffle(rows)
    return rows, trained, held_out


def run(directory: Path, words: list[str]) -> float:
    """Runs a program in a directory; its seconds."""
    start = time.monotonic()
    with (directory / f"{words[1]}.log").open("w") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, cwd=directory, check=True, stdout=log, stderr=subprocess.STDOUT, env=env)
    return time.monotonic() - start


def measure(program: str, kind: str, size: int, options: Options) -> None:
    directory = options.output_dir / f"{kind}_{size}_{program}"
    if (result := directory / "result.json").exists():
        return
    rows, trained, held_out = make_rows(kind, size)
    parts = {"data/train": rows, "asked/trained": trained[:NUM_ASKED], "asked/held_out": held_out[:NUM_ASKED]}
    for name, part in parts.items():
        path = directory / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, part)
    flag = "--model_name_or_path" if program == "trl" else "--model-name-or-path"
    seconds = run(directory, [*PROGRAMS[program], flag, str(options.model.resolve())])
    tasks = ["--task", "asked/trained.jsonl", "asked/held_out.jsonl", "--metrics", METRICS[kind]]
    how = ["--max-new-tokens", "32", "--dtype", "bfloat16", "--output-dir", "evaluation"]
    run(directory, ["mini-trainer", "evaluate", "run", *tasks, *how])
    found = json.loads((directory / "evaluation" / "results.json").read_text())["sets"]
    means = {one["name"]: one["metrics"][0]["values"][0]["mean"] for one in found}
    result.write_text(json.dumps(dict(kind=kind, size=size, program=program, seconds=seconds, **means)))


if __name__ == "__main__":
    options = tyro.cli(Options)
    if options.action == "run":
        for size in options.sizes:
            for kind in options.kinds:
                for program in options.programs:
                    measure(program, kind, size, options)
    found = [json.loads(path.read_text()) for path in options.output_dir.glob("*/result.json")]
    found.sort(key=lambda one: (one["kind"], one["size"], one["program"]))
    print(tabulate(found, headers="keys", floatfmt=".2f", tablefmt="github"))
