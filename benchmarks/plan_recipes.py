"""What each recipe in mini_trainer/options/known_models needs, by train.py --dry-run: their first lines.

    python benchmarks/plan_recipes.py                                                 # all of them
    python benchmarks/plan_recipes.py mini_trainer/options/known_models/qwen3-0.6b/full-1x24gb.yaml  # one

The models' weights are not needed, which is the one problem that a plan may find: their configs are in the folders.
"""

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paths
import pyarrow as pa
from harness import make_random_answers
from make_tiny_model import train_tokenizer
from tiny_data import make_samples, write_samples

from mini_trainer.data.columns.base import CAUSAL_LM, COLUMNS, PREFERENCE
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer
from mini_trainer.options import TrainOptions
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.option_files import RECIPES
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.run.plan.planner import plan_run

MACHINES = {  # by the end of a recipe's name: GPUs, their name, GiB of each
    "1x24gb": (1, "RTX 4090", 24),
    "1x80gb": (1, "H100", 80),
    "8x80gb": (8, "H100", 80),
    "8x141gb": (8, "H200", 141),
}
NUM_SAMPLES, NUM_TOKENS, VOCAB_SIZE = 256, 2048, 300
NOT_HERE = ("no weights", "checkpoints and exports need")  # problems of this machine's disk, and none of the recipe's


@dataclass(frozen=True)
class Plan:
    """What a dry run says of a recipe."""

    num_params: int
    num_trained: int
    gib: float
    seconds: float
    problems: tuple[str, ...]


def name_data(recipe: Path) -> str:
    """The kind of data that a recipe trains on."""
    return PREFERENCE if recipe.stem.startswith("dpo-") else CAUSAL_LM


def make_data(directory: Path, kind: str) -> Path:
    """Rows of about 1,000 tokens, 2,048 at most, half of them trained; pairs have two of such sequences."""
    path = directory / f"{kind}.arrow"
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE, max_len=NUM_TOKENS)
    if kind == CAUSAL_LM:
        return write_samples(path, samples)
    random, lengths = np.random.default_rng(0), [max(4, 2 * len(sample[0])) for sample in samples]
    rows = [make_random_answers(random, kind, length, vocab_size=VOCAB_SIZE) for length in lengths]
    pairs = COLUMNS[kind].encode(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pairs.schema) as writer:
        writer.write_batch(pairs)
    tokenizer = fingerprint_tokenizer(train_tokenizer([], vocab_size=VOCAB_SIZE))
    recorded = {"objective": kind, "tokenizer_fingerprint": tokenizer, "max_token_id": VOCAB_SIZE - 1}
    Path(f"{path}.meta.json").write_text(json.dumps(recorded))
    return path


def copy_model(directory: Path, model: Path) -> Path:
    """The folder of a recipe with a tokenizer, of which the plan needs to know that there is one."""
    path = directory / model.name
    if not path.exists():
        path.mkdir()
        shutil.copy(model / "config.json", path)
        train_tokenizer([], vocab_size=VOCAB_SIZE).save_pretrained(path)
    return path


def read_recipe(recipe: Path, *, model: Path, data: Path) -> TrainOptions:
    """The options of a dry run of the recipe on the machine that its name ends with."""
    num_gpus, device, gib = MACHINES[recipe.stem.split("-")[-1]]
    return parse_options(
        TrainOptions,
        ["--config", str(recipe), "--model-name-or-path", str(model), "--data-path", str(data), "--output-dir",
         str(data.parent / "run"), "--dry-run", "--plan-for", f"{num_gpus}x{device}",
         "--memory-budget-gb", str(gib)],
    )  # fmt: skip


def plan_recipe(options: TrainOptions) -> Plan:
    assert find_problems(options) == []
    with contextlib.redirect_stdout(io.StringIO()) as text:
        plan_run(options)
    report = text.getvalue()
    params, trained = re.search(r"([\d,]+) parameters, ([\d,]+) of them trainable", report).groups()
    problems = tuple(
        line for line in re.findall(r"(?m)^  - (.*)", report) if not any(word in line for word in NOT_HERE)
    )
    gib, seconds = re.search(r"together +([\d.,]+) GiB", report), re.search(r"a step, ([\d.,]+) s", report)
    if gib is None or seconds is None:
        raise ValueError(report)
    return Plan(*(int(number.replace(",", "")) for number in (params, trained)),
                *(float(match[1].replace(",", "")) for match in (gib, seconds)), problems)  # fmt: skip


def describe_plan(recipe: Path, plan: Plan) -> str:
    """The recipe's first line."""
    num_gpus, device, gib = MACHINES[recipe.stem.split("-")[-1]]
    return (
        f"# {num_gpus} x {device}: {plan.gib:.1f} of {gib} GiB a GPU, a step of 128 samples in {plan.seconds:.0f} s"
        f" (planned); trains {plan.num_trained / 1e9:.2f} of {plan.num_params / 1e9:.2f} billion parameters\n"
    )


def write_header(recipe: Path, plan: Plan) -> None:
    lines = recipe.read_text().splitlines(keepends=True)
    recipe.write_text(describe_plan(recipe, plan) + "".join(line for line in lines if not line.startswith("#")))


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        data = {kind: make_data(directory, kind) for kind in (CAUSAL_LM, PREFERENCE)}
        for recipe in [Path(word).resolve() for word in words] or sorted(RECIPES.glob("*/*.yaml")):
            model = copy_model(directory, recipe.parent)
            plan = plan_recipe(read_recipe(recipe, model=model, data=data[name_data(recipe)]))
            write_header(recipe, plan)
            problems = "".join(f"\n  PROBLEM {problem}" for problem in plan.problems)
            print(f"{recipe.relative_to(paths.ROOT)}{problems}\n  {describe_plan(recipe, plan)}", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
