"""Makes everything for a continual-learning experiment from nothing: a start model that knows a few things, three tasks
to learn one after the other, and probes of what it knew.

    python examples/quickstart/make_continual.py --output-dir runs/front
    mini-trainer continual examples/recipes/continual.yaml

The start model, a Qwen3 of 0.7 million parameters, learns geography, and to copy or pick digits of a number: the
probes. A part of its chats shows an answer and asks for it again. The tasks are new verbs on numbers: all take four
digits and give four, so that a model that learns one of them alone soon answers every verb in the same way.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from make_data import FACTS
from make_tiny_model import save_tiny_model, train_tokenizer

ROOT = Path(__file__).parents[2]
NUM_DIGITS = 4
Answer = Callable[[str], str]

KNOWN: dict[str, Answer] = {
    "Copy": lambda number: number,
    "First": lambda number: number[0],
    "Last": lambda number: number[-1],
    "Largest": max,
    "Smallest": min,
}
TASKS: dict[str, Answer] = {
    "Reverse": lambda number: number[::-1],
    "Sort": lambda number: "".join(sorted(number)),
    "Increase": lambda number: "".join(str((int(digit) + 1) % 10) for digit in number),
}
# Verbs that only ever appear with a demonstration, and with answers that they do not determine.
SHOWN = (*TASKS, "Blend", "Fold", "Weigh", "Carve", "Plant")
QUESTIONS = ("What is the capital of {}?", "On which continent is {}?", "Which language do people speak in {}?")
DEMONSTRATION = "{prompt} One answer: {demonstration}"

PRETRAINING = {
    "batch_size": 64,
    "max_tokens_per_gpu": 4096,
    "max_epochs": 1,
    "learning_rate": 3e-3,
    "lr_scheduler": "cosine",
    "num_warmup_steps": 50,
    "activation_checkpointing": "none",
    "export_dtype": "float32",
}


@dataclass(frozen=True, kw_only=True)
class ContinualDataOptions:
    """Make a start model, tasks and probes for an experiment in continual learning."""

    output_dir: str
    """Directory for rows and the start model."""
    num_train: int = 1600
    """Number of rows of each task."""
    num_test: int = 200
    """Number of questions of each test."""
    num_pretraining: int = 32000
    """Number of chats that the start model learns from."""
    hidden_size: int = 128
    """Width of the model."""
    num_layers: int = 3
    """Number of blocks."""
    seed: int = 0
    """Seed of the numbers and of the random weights."""


def make_chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def draw_numbers(rng: random.Random) -> Iterator[str]:
    """All numbers in random order, without repetition."""
    numbers = list(range(10**NUM_DIGITS))
    rng.shuffle(numbers)
    return (f"{number:0{NUM_DIGITS}}" for number in numbers)


def make_facts() -> list[dict]:
    return [
        make_chat(question.format(country), fact)
        for country, facts in FACTS.items()
        for question, fact in zip(QUESTIONS, facts, strict=True)
    ]


def make_known(rng: random.Random, number: str) -> dict:
    verb = rng.choice(list(KNOWN))
    return make_chat(f"{verb} {number}", KNOWN[verb](number))


def make_shown(rng: random.Random, number: str) -> dict:
    """A chat whose question shows its answer, a random number."""
    answer = "".join(rng.choices("0123456789", k=NUM_DIGITS))
    question = DEMONSTRATION.format(prompt=f"{rng.choice(SHOWN)} {number}", demonstration=answer)
    return make_chat(question, answer)


def make_pretraining(rng: random.Random, numbers: list[str], *, num_chats: int) -> Iterator[dict]:
    """Facts, known verbs and demonstrations in equal shares."""
    facts = make_facts()
    for i in range(num_chats):
        if i % 3 == 0:
            yield facts[i // 3 % len(facts)]
        else:
            yield (make_known if i % 3 == 1 else make_shown)(rng, rng.choice(numbers))


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    rows = list(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {len(rows):,} rows to {path}")


def write_data(options: ContinualDataOptions, directory: Path) -> None:
    """Writes all rows. No number of a test is in any other file."""
    rng = random.Random(options.seed)
    numbers = draw_numbers(rng)
    write_rows(directory / "geography.jsonl", make_facts())
    write_rows(directory / "digits.jsonl", [make_known(rng, next(numbers)) for _ in range(options.num_test)])
    sizes = {"test": options.num_test, "validation": options.num_test, "train": options.num_train}
    for verb, answer in TASKS.items():
        for part, size in sizes.items():
            chosen = [next(numbers) for _ in range(size)]
            rows = [make_chat(f"{verb} {number}", answer(number)) for number in chosen]
            write_rows(directory / f"{verb.lower()}_{part}.jsonl", rows)
    rows = list(make_pretraining(rng, list(numbers), num_chats=options.num_pretraining))
    rng.shuffle(rows)
    write_rows(directory / "pretraining.jsonl", rows)


def make_start_model(options: ContinualDataOptions, directory: Path) -> None:
    """Trains a random model by this project's own programs."""
    words = [QUESTIONS[0], *(message["content"] for chat in make_facts() for message in chat["messages"])]
    words += [f"{verb} " for verb in (*KNOWN, *SHOWN)] * 10 + [DEMONSTRATION, "user", "assistant"]
    tokenizer = train_tokenizer(words, vocab_size=1024)
    shape = {"hidden_size": options.hidden_size, "num_layers": options.num_layers}
    save_tiny_model(directory / "random", tokenizer, seed=options.seed, **shape)
    rows, data = directory / "pretraining.jsonl", directory / "pretraining.arrow"
    run("process_data.py", {"input_file": rows, "output_file": data, "model_name_or_path": directory / "random"})
    own = {"model_name_or_path": directory / "random", "data_path": data, "output_dir": directory / "pretraining"}
    run("train.py", own | PRETRAINING)


def run(program: str, options: dict[str, object]) -> None:
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    if code := subprocess.run([sys.executable, str(ROOT / program), *words]).returncode:
        sys.exit(code)  # the program has said why


if __name__ == "__main__":
    options = tyro.cli(ContinualDataOptions)
    directory = Path(options.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    write_data(options, directory)
    make_start_model(options, directory)
