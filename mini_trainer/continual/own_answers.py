"""The model's own answers to a task's prompts, as rows to learn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mini_trainer.continual.context import Context
from mini_trainer.continual.data import OF_ROWS, tokenize, write_rows
from mini_trainer.continual.settings import Task, Values
from mini_trainer.data.chat.placeholders import REASONING_KEYS
from mini_trainer.run.stages import Stage
from mini_trainer.use.evaluation.kept import read_lines
from mini_trainer.use.inference.answers import Line

PROMPTS, ANSWERS = "prompts.jsonl", "answers.jsonl"

DataRow = dict[str, Any]  # as `data.as_row` makes it


def answer_prompts(
    context: Context, model: str, folder: Path, make_rows: Callable[[], list[DataRow]], *, sampling: Values, seed: int
) -> None:
    """Writes the model's answers to the prompts of rows, which are made once, to files of the folder."""
    prompts = folder / PROMPTS
    if not prompts.is_file():
        write_rows(prompts, make_rows())
    options = sampling | {"model": model, "prompts": [str(prompts)], "output": str(folder / ANSWERS)}
    if options.get("temperature", 0) != 0:
        options["seed"] = seed
    context.runner.run(Stage(program="generate", folder=folder, options=options))


def read_answers(path: Path, num_prompts: int) -> list[Line]:
    """The answers to so many prompts; ValueError names a damaged file and line."""
    advice = "remove it, and generate.done beside it, to answer again"
    lines = read_lines(path, {"index": int, "answer": str, "finish_reason": str | None}, advice=advice)
    for number, line in enumerate(lines, start=1):
        if not 0 <= line["index"] < num_prompts:
            raise ValueError(f"{path}: line {number} is damaged: see index; {advice}")
    return lines


def find_reference(row: DataRow) -> str:
    return row["completion"] if "completion" in row else row["messages"][-1]["content"]


def replace_answer(row: DataRow, line: Line) -> DataRow:
    """The row with an answer in place of its own: of a server, with its reasoning and calls."""
    if "completion" in row:
        return row | {"completion": line["answer"]}
    *before, last = row["messages"]
    kept = {name: value for name, value in last.items() if name not in ("tool_calls", *REASONING_KEYS)}
    return row | {"messages": [*before, kept | line.get("message", {"content": line["answer"]})]}


def tokenize_own(context: Context, task: Task, rows: Path, folder: Path, *, name: str) -> Path:
    """Tokenizes a file of rows with the task's options."""
    options = context.settings.process_data | task.process_data
    options = {key: value for key, value in options.items() if key not in OF_ROWS}
    return tokenize([str(rows)], options, context.settings, folder / name, name=name, runner=context.runner)
