"""Makes everything for measuring what a pretrained model learns and what it forgets: three tasks, and questions and
answers that nobody trains.

    python examples/quickstart/make_forgetting.py --model runs/smollm2_plain --output-dir runs/forgetting
    mini-trainer continual examples/recipes/keeping.yaml

- `facts`: 150 facts about 30 people of a company that does not exist. Of four wordings of a question two are trained,
  one is for choosing among settings, and one for the result.
- `tickets`: a sentence becomes a line in a fixed format. `chains`: a sum and a difference, step by step.
- Probes: `knowledge`, `arithmetic` and `instructions`, whose answers are known; `own_answers`: what the model says to
  about 150 requests, greedily, before it learns anything. Of as many others there is `known`, which OSFT calibrates on,
  and which can be replayed.

All that is written by hand is in questions.json.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from make_continual import make_chat, run, write_rows

TEXTS = json.loads((Path(__file__).parent / "questions.json").read_text())
FIRST, LAST = TEXTS["first_names"], TEXTS["last_names"]
HARNESS_TASK = """task: forgetting_arithmetic
dataset_path: json
dataset_kwargs:
  data_files: {rows}
test_split: train
output_type: multiple_choice
doc_to_text: '{{{{prompt}}}}'
doc_to_choice: '{{{{choices}}}}'
doc_to_target: answer
metric_list:
  - metric: acc
"""


@dataclass(frozen=True)
class Attribute:
    """What is known of each person: its values, four ways to ask for it, and the answer."""

    values: tuple[str, ...]
    wordings: tuple[str, str, str, str]
    answer: str


ATTRIBUTES = (
    Attribute(
        ("Turin", "Oslo", "Lagos", "Quito", "Perth", "Seoul", "Bergen", "Tampa", "Porto", "Leeds"),
        (
            "In which city does {name} of Velmora work?",
            "Where is the office of {name} from Velmora?",
            "Which city's office of Velmora has {name} in it?",
            "{name} works for Velmora. In what city?",
        ),
        "{name} works in {value}.",
    ),
    Attribute(
        ("accountant", "welder", "chemist", "lawyer", "designer", "driver", "nurse", "translator", "plumber", "editor"),
        (
            "What is the job of {name} at Velmora?",
            "As what does {name} work at Velmora?",
            "Which profession does {name} of Velmora have?",
            "{name} is employed by Velmora. What is the role?",
        ),
        "{name} is a {value}.",
    ),
    Attribute(
        ("parrot", "rabbit", "goat", "lizard", "hamster", "donkey", "turtle", "ferret", "pony", "goose"),
        (
            "Which animal does {name} of Velmora keep?",
            "What kind of pet does {name} from Velmora have?",
            "{name} of Velmora has a pet. What is it?",
            "Which animal lives with {name} of Velmora?",
        ),
        "{name} keeps a {value}.",
    ),
    Attribute(
        ("cello", "flute", "trumpet", "harp", "banjo", "drums", "organ", "clarinet", "ukulele", "tuba"),
        (
            "Which instrument does {name} of Velmora play?",
            "What does {name} from Velmora play in the band?",
            "On which instrument is {name} of Velmora heard?",
            "{name} of Velmora makes music. With what instrument?",
        ),
        "{name} plays the {value}.",
    ),
    Attribute(
        ("purple", "orange", "green", "yellow", "silver", "brown", "white", "pink", "blue", "black"),
        (
            "What color is the badge of {name} at Velmora?",
            "Which color does the badge of {name} from Velmora have?",
            "{name} wears a badge at Velmora. In which color?",
            "Of what color is the badge that {name} of Velmora wears?",
        ),
        "The badge of {name} is {value}.",
    ),
)
ITEMS = ("pump", "printer", "door", "scanner", "heater", "lamp", "fan", "lock", "screen", "phone", "valve", "chair")
CITIES = ATTRIBUTES[0].values
URGENT, CALM = ("at once", "today", "right now"), ("next week", "some time", "when there is time")


@dataclass(frozen=True, kw_only=True)
class ForgettingOptions:
    """Make tasks, questions and a model's own answers."""

    model: str
    """Model that is measured: a directory, or a name on the hub."""
    output_dir: str
    """Directory for all rows."""
    num_people: int = 30
    """Number of people that facts are about, at most 30."""
    num_rows: int = 300
    """Number of rows of the other two tasks."""
    num_test: int = 100
    """Number of questions of each test of these tasks."""
    num_requests: int = 400
    """Number of requests that the model answers, at most 400."""
    seed: int = 0
    """Seed of facts, tasks and requests."""


def make_facts(rng: random.Random, *, num_people: int) -> Iterator[tuple[list[str], str, str]]:
    """Each fact's four questions, its answer, and the word that the answer is about."""
    names = [f"{first} {last}" for first, last in zip(FIRST, rng.sample(LAST, len(LAST)), strict=True)]
    for name in names[:num_people]:
        for attribute in ATTRIBUTES:
            value = rng.choice(attribute.values)
            asked = [wording.format(name=name) for wording in attribute.wordings]
            yield asked, attribute.answer.format(name=name, value=value), value


def make_ticket(rng: random.Random) -> dict:
    name, place, item = rng.choice(FIRST), rng.choice(CITIES), rng.choice(ITEMS)
    is_urgent = rng.random() < 0.5
    when = rng.choice(URGENT if is_urgent else CALM)
    said = rng.choice(
        (
            f"{name} from {place} says that the {item} is broken and wants help {when}.",
            f"The {item} in {place} does not work. {name} needs it {when}.",
            f"Please fix the {item} for {name} in {place} {when}.",
        )
    )
    return make_chat(f"Ticket: {said}", f"[{item}] {name} @ {place} !{'high' if is_urgent else 'low'}")


def make_chain(rng: random.Random) -> dict:
    a, b = rng.randint(11, 79), rng.randint(11, 79)
    c = rng.randint(3, a + b - 1)
    return make_chat(f"Compute {a} + {b} - {c}.", f"{a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}.")


def draw(make: Callable[[random.Random], dict], rng: random.Random, num: int) -> list[dict]:
    """So many different rows."""
    found: dict[str, dict] = {}
    while len(found) < num:
        row = make(rng)
        found[row["messages"][0]["content"]] = row
    return list(found.values())


def write_tasks(options: ForgettingOptions, directory: Path) -> None:
    rng = random.Random(options.seed)
    facts = list(make_facts(rng, num_people=options.num_people))
    trained = [make_chat(asked[i], answer) for asked, answer, _ in facts for i in (0, 1)]
    write_rows(directory / "facts_train.jsonl", trained)
    write_rows(directory / "facts_validation.jsonl", [make_chat(asked[2], answer) for asked, answer, _ in facts])
    write_rows(directory / "facts_test.jsonl", [make_chat(asked[3], value) for asked, _, value in facts])
    for name, make in (("tickets", make_ticket), ("chains", make_chain)):
        rows = draw(make, rng, options.num_rows + options.num_test)
        write_rows(directory / f"{name}_train.jsonl", rows[options.num_test :])
        write_rows(directory / f"{name}_test.jsonl", rows[: options.num_test])


def ask_knowledge() -> Iterator[tuple[str, str]]:
    """Questions with the words that a right answer contains."""
    for country, capital in TEXTS["capitals"].items():
        yield f"What is the capital of {country}?", capital
    for word, opposite in TEXTS["opposites"].items():
        yield f'What is the opposite of the word "{word}"?', opposite
    yield from TEXTS["general"].items()


def ask_instructions() -> Iterator[tuple[str, str]]:
    """Instructions with the words that an answer contains if it follows them."""
    for word in TEXTS["words"]:
        yield f'Write a sentence that contains the word "{word}".', word
    for sentence in TEXTS["sentences"]:
        yield f"Repeat this sentence word for word: {sentence}", sentence


def make_sums(rng: random.Random) -> Iterator[dict]:
    """Sums, differences and products with four results to choose from: their likelihood, by EleutherAI's harness, does
    not depend on how a model has learnt to phrase its answers."""
    for i in range(150):
        a, b = rng.randint(2, 20), rng.randint(2, 9)
        factor = a % 9 + 2
        sums = [(f"{a} + {b}", a + b), (f"{a + b} - {b}", a), (f"{factor} times {b}", factor * b)]
        question, result = sums[i % 3]
        choices = [result, *rng.sample([result - 2, result - 1, result + 1, result + 2, result + 10], 3)]
        rng.shuffle(choices)
        yield {
            "prompt": f"Question: What is {question}?\nAnswer:",
            "choices": list(map(str, choices)),
            "answer": choices.index(result),
        }


def write_probes(directory: Path, *, seed: int) -> None:
    for name, asked in (("knowledge", ask_knowledge()), ("instructions", ask_instructions())):
        write_rows(directory / f"{name}.jsonl", [make_chat(question, answer) for question, answer in asked])
    write_rows(rows := directory / "arithmetic.jsonl", make_sums(random.Random(seed)))
    (directory / "arithmetic.yaml").write_text(HARNESS_TASK.format(rows=rows))


def write_own_answers(options: ForgettingOptions, directory: Path) -> None:
    """The model's greedy answers, half of them for measuring and half for calibration and replay; those that do not end
    are left out."""
    requests = [request.format(topic=topic) for topic in TEXTS["topics"] for request in TEXTS["requests"]]
    random.Random(options.seed).shuffle(requests)
    requests = requests[: options.num_requests]
    asked, answers = directory / "requests.jsonl", directory / "answers.jsonl"
    write_rows(asked, [{"messages": [{"role": "user", "content": request}]} for request in requests])
    run("generate.py", {"model": options.model, "prompts": asked, "output": answers, "max_new_tokens": 96})
    said = [json.loads(line) for line in answers.read_text().splitlines()]
    rows = [make_chat(requests[line["index"]], line["answer"]) for line in said if line["finish_reason"] == "stop"]
    half = len(rows) // 2
    write_rows(directory / "own_answers.jsonl", rows[:half])
    write_rows(known := directory / "known.jsonl", rows[half:])
    data = known.with_suffix(".arrow")
    run("process_data.py", {"input_file": known, "output_file": data, "model_name_or_path": options.model})


if __name__ == "__main__":
    options = tyro.cli(ForgettingOptions)
    directory = Path(options.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    write_tasks(options, directory)
    write_probes(directory, seed=options.seed)
    write_own_answers(options, directory)
