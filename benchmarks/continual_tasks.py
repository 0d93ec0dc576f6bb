"""The tasks of continual_learning.py, as chats: the standard library's docstrings, word problems, and geography.

Nothing is downloaded. The docstrings are those of the Python that runs this.
"""

import ast
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from make_data import make_chats

MIN_CHARACTERS, MAX_CHARACTERS = 120, 1200  # of a docstring that is used
NOT_DOCUMENTED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Karen",
    "Leo",
    "Maria",
    "Nina",
    "Oscar",
    "Paul",
]
THINGS = [
    "apples",
    "books",
    "cards",
    "coins",
    "eggs",
    "files",
    "keys",
    "lines",
    "names",
    "pages",
    "pens",
    "points",
    "rows",
    "stamps",
    "stones",
    "tables",
]


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def read_docstrings() -> list[dict]:
    """What each class and function of the standard library does, in its own words."""
    chats, seen, library = [], set(), Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = [part for part in path.relative_to(library).with_suffix("").parts if part != "__init__"]
        if NOT_DOCUMENTED & set(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # some files are there to be refused
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            text = (ast.get_docstring(node) or "")[:MAX_CHARACTERS]
            if len(text) >= MIN_CHARACTERS and text not in seen:
                seen.add(text)
                chats.append(chat(f"What does {'.'.join(parts)}.{node.name} do?", text))
    return chats


def make_problem(rng: random.Random) -> dict:
    """A word problem of two steps, solved step by step."""
    (name, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b, c = rng.randint(10, 60), rng.randint(2, 9), rng.randint(2, 9)
    more, fewer, times = a + b, a - b, b * c
    return rng.choice(
        (
            chat(
                f"{name} has {a} {thing}. {name} gets {b} more and gives {c} to {other}. How many are left?",
                f"{name} has {a} + {b} = {more} {thing}. After giving {c} away, {more} - {c} = {more - c} are left."
                f" The answer is {more - c}.",
            ),
            chat(
                f"There are {b} boxes with {c} {thing} in each. {name} adds {a} {thing}. How many are there in all?",
                f"The boxes hold {b} * {c} = {times} {thing}. With those of {name}, there are {times} + {a} ="
                f" {times + a}. The answer is {times + a}.",
            ),
            chat(
                f"{name} finds {a} {thing} and {other} finds {b} fewer. How many do they find together?",
                f"{other} finds {a} - {b} = {fewer} {thing}. Together they find {a} + {fewer} = {a + fewer}."
                f" The answer is {a + fewer}.",
            ),
            chat(
                f"Each day {name} makes {b} {thing} and loses {c}. How many does {name} make in {c} days, and lose?",
                f"In {c} days {name} makes {c} * {b} = {times} {thing}, and loses {c} * {c} = {c * c}."
                f" The answer is {times} and {c * c}.",
            ),
        )
    )


def generate(make: Callable[[random.Random], dict], rng: random.Random) -> Iterator[dict]:
    """Chats without end, each one once."""
    seen = set()
    while True:
        made = make(rng)
        question = made["messages"][0]["content"]
        if question not in seen:
            seen.add(question)
            yield made


def make_tasks(*, num_held_out: int, num_problems: int) -> dict[str, tuple[list[dict], list[dict]]]:
    """For each task, chats to train on and chats held out."""
    rng = random.Random(0)
    documents = read_docstrings()
    rng.shuffle(documents)
    source = generate(make_problem, rng)
    problems = [next(source) for _ in range(num_problems + num_held_out)]
    return {
        "a": (documents[num_held_out:], documents[:num_held_out]),
        "b": (problems[num_held_out:], problems[:num_held_out]),
        "c": make_chats(rng),
    }
