"""Replay: rows of earlier tasks, or the model's own answers to their prompts, learnt again with a new task.

On-policy replay: arXiv 2605.29495.
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path

from continual.context import Context, Model
from continual.data import OF_ROWS, as_row, count_samples, read_questions, tokenize, write_rows
from continual.settings import Replay, Task, Values
from continual.stages import Stage
from evaluation.kept import read_lines
from evaluation.metrics import score_answer
from inference.prompts import Prompt, read_prompts


def find_replay(context: Context, earlier: Sequence[Task], model: Model, folder: Path) -> list[Path]:
    """Data sets to replay, one of each earlier task that has any; the model's answers are those before the new task."""
    replay, found = context.settings.replay, []
    if replay is None:
        return []
    for task in earlier:
        place = folder / "replay" / task.name
        if replay.kind == "rows":
            found.append(choose_rows(context, task, place))
            continue
        data = answer(context, task, model, place)
        if data is not None:
            found.append(data)
    return found


def choose_rows(context: Context, task: Task, folder: Path) -> Path:
    """The task's data, without rows that hold a question of any test or held-out set."""
    data = context.prepared[task.name].train
    num_held_out = context.held_out.count_rows(data)
    if num_held_out == 0:
        return data
    if not task.input_file:
        raise ValueError(
            f"replay: {num_held_out:,} rows of {data} hold questions of a test or held-out set: remove them, or give"
            f" input_file for task {task.name}, whose rows can be left out"
        )
    context.runner.say(folder, f"{num_held_out:,} rows with held-out questions are not replayed")
    questions = [prompt for prompt in read_questions(task, context.settings) if not context.held_out.has(prompt)]
    rows = folder / "rows.jsonl"
    write_rows(rows, [as_row(prompt, prompt.references[0]) for prompt in questions])
    return tokenize_own(context, task, rows, folder)


def answer(context: Context, task: Task, model: Model, folder: Path) -> Path | None:
    """A data set of the model's own answers that pass the task's metric; None if none does."""
    replay, settings = context.settings.replay, context.settings
    prompts, answers, rows = folder / "prompts.jsonl", folder / "answers.jsonl", folder / "rows.jsonl"
    if not prompts.is_file():
        questions = [prompt for prompt in read_questions(task, settings) if not context.held_out.has(prompt)]
        write_rows(prompts, [as_row(one, one.references[0]) for one in draw(questions, replay, seed=context.seed)])
    options = settings.generate | {"model": model.path, "prompts": [str(prompts)], "output": str(answers)}
    if options.get("temperature", 0) != 0:
        options["seed"] = context.seed
    stage = Stage(program="generate", folder=folder, options=options)
    context.runner.run(stage)
    if not rows.is_file():
        write_rows(rows, keep_passing(prompts, answers, task, replay))
    num_kept, num_asked = len(read_lines(rows)), len(read_lines(prompts))
    context.runner.say(folder, f"{num_kept:,} of {num_asked:,} own answers pass {task.metric}")
    return tokenize_own(context, task, rows, folder) if num_kept else None


def draw(questions: list[Prompt], replay: Replay, *, seed: int) -> list[Prompt]:
    """The prompts to answer, in the rows' order."""
    num = len(questions) if replay.num_prompts is None else min(replay.num_prompts, len(questions))
    chosen = sorted(random.Random(seed).sample(range(len(questions)), num))
    return [questions[i] for i in chosen]


def keep_passing(prompts: Path, answers: Path, task: Task, replay: Replay) -> list[dict]:
    """Rows of the answers that are not empty, ended by themselves, and score enough."""
    rows, asked, kept = read_lines(prompts), read_prompts([str(prompts)], None), []
    labels = sorted({find_reference(row) for row in rows})
    for line in read_lines(answers):
        prompt, answer = asked[line["index"]], line["answer"]
        score = score_answer(task.metric, answer, prompt.references, labels=labels, source=prompt.rewritten)
        if line["finish_reason"] == "stop" and answer.strip() and score >= replay.min_score:
            kept.append(replace_answer(rows[line["index"]], answer))
    return kept


def find_reference(row: dict) -> str:
    return row["completion"] if "completion" in row else row["messages"][-1]["content"]


def replace_answer(row: dict, answer: str) -> dict:
    """The row of `as_row` with another answer."""
    if "completion" in row:
        return row | {"completion": answer}
    return row | {"messages": [*row["messages"][:-1], row["messages"][-1] | {"content": answer}]}


def tokenize_own(context: Context, task: Task, rows: Path, folder: Path, *, name: str = "replayed") -> Path:
    """Tokenizes rows written by `as_row` with the task's options."""
    options = context.settings.process_data | task.process_data
    options = {key: value for key, value in options.items() if key not in OF_ROWS}
    return tokenize([str(rows)], options, context.settings, folder / name, name=name, runner=context.runner)


def mix(options: Values, own: Path, replayed: Sequence[Path], replay: Replay | None) -> Values:
    """Options of train with the replayed data in their share.

    An epoch is still one of the task's own samples.
    """
    if not replayed:
        return options | {"data_path": [str(own)]}
    weights = [1 - replay.share, *(replay.share / len(replayed) for _ in replayed)]
    mixed = options | {"data_path": [str(own), *map(str, replayed)], "data_weights": weights}
    if mixed.get("max_epochs") is not None:
        epochs = mixed.pop("max_epochs")
        mixed["max_samples"] = math.ceil(epochs * count_samples(own) / (1 - replay.share))
    if replay.teacher_weight is not None:
        mixed |= {"teacher_model": "self", "teacher_weight": [0.0, *(replay.teacher_weight for _ in replayed)]}
    return mixed
