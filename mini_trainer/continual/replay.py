"""Replay: rows of earlier tasks, the model's own answers to their prompts, or samples that it draws, which are learnt
again with a new task, or kept (train --keep).

On-policy replay: arXiv 2605.29495.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.continual.data import OF_ROWS, HeldOut, Prepared, as_row, tokenize, write_rows
from mini_trainer.continual.settings import ContinualSettings, Replay, Task, Values
from mini_trainer.data.chat.conversation import REASONING_KEYS
from mini_trainer.data.rows.prompts import Prompt, read_prompts
from mini_trainer.data.tokenized.outputs import DataSetFiles
from mini_trainer.options.reading import read_fields
from mini_trainer.run.stages import Runner, Stage
from mini_trainer.use.evaluation.metrics import score_answer
from mini_trainer.use.evaluation.results import read_lines
from mini_trainer.use.inference.answers import Line, is_refused

PROMPTS, ANSWERS = "prompts.jsonl", "answers.jsonl"
DRAWN = Path("replay", "drawn.jsonl")  # in a task's folder: samples that the model has drawn before it
ROWS, REPLAYED = "rows.jsonl", "replayed"  # in the folder of an earlier task: its rows to replay, and their data set

DataRow = dict[str, Any]  # as `data.as_row` makes it


@dataclass(frozen=True, kw_only=True)
class Context:
    """One order of the tasks with one seed."""

    settings: ContinualSettings
    runner: Runner
    prepared: Prepared
    held_out: HeldOut  # of all sequences
    known: Path | None  # data that is replayed with every task
    folder: Path
    seed: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model between two tasks."""

    path: str  # of the model to measure: of an export, of an adapter, or a name on the hub
    start: str  # of the model that the next task trains
    adapter: Path | None = None  # that the next task trains further
    statistics: Path | None = None  # of OSFT, as are the bases
    bases: Path | None = None


def find_replay(context: Context, earlier: Sequence[Task], model: Model, folder: Path) -> list[Path]:
    """Data sets to replay: of what the start model knows, and of each earlier task that has any; the model's answers
    are those before the new task."""
    if (replay := context.settings.replay) is None:
        return []
    found = [context.known]
    if replay.kind == "drawn":
        before = [context.folder / f"{t}_{task.name}" / DRAWN for t, task in enumerate(earlier, start=1)]
        found += [*before, draw_samples(context, model, folder)]
    for task in earlier if replay.kind != "drawn" else ():
        place = folder / "replay" / task.name
        found.append(
            choose_rows(context, task, place) if replay.kind == "rows" else answer(context, task, model, place)
        )
    return [path for path in found if path is not None]


def draw_samples(context: Context, model: Model, folder: Path) -> Path:
    """Samples that the model draws before the task."""
    path = folder / DRAWN
    options = {"model_name_or_path": model.start, "output_file": str(path), "seed": context.seed}
    if (num_samples := context.settings.replay.num_prompts) is not None:
        options["num_samples"] = num_samples
    context.runner.run(Stage(program="draw-samples", folder=folder, options=options))
    return path


def choose_rows(context: Context, task: Task, folder: Path) -> Path:
    """The task's data, without rows that hold a question of any test or held-out set."""
    data = context.prepared[task.name].train
    num_held_out = context.held_out.count_rows(data)
    if num_held_out == 0:
        return data
    if not task.input_file:
        raise ValueError(describe_held_out(num_held_out, data))
    context.runner.say(folder, f"{num_held_out:,} rows with held-out questions are not replayed")
    rows = folder / ROWS
    if not rows.is_file():
        write_rows(rows, [as_row(prompt, prompt.references[0]) for prompt in context.held_out.list_free(task)])
    return tokenize_own(context, task, rows, folder)


def describe_held_out(count: int, data: Path | str) -> str:
    return f"replay: {count:,} rows of {data} hold questions of a test or held-out set: remove them"


def answer(context: Context, task: Task, model: Model, folder: Path) -> Path | None:
    """A data set of the model's own answers that pass the task's metric; None if none does."""
    replay, prompts, answers, rows = context.settings.replay, folder / PROMPTS, folder / ANSWERS, folder / ROWS
    if not prompts.is_file():
        drawn = draw(context.held_out.list_free(task), replay, seed=context.seed)
        write_rows(prompts, [as_row(prompt, prompt.references[0]) for prompt in drawn])
    options = context.settings.generate | {"model": model.path, "prompts": [str(prompts)], "output": str(answers)}
    if options.get("temperature", 0) != 0:
        options["seed"] = context.seed
    context.runner.run(Stage(program="generate", folder=folder, options=options))
    if not rows.is_file():
        write_rows(rows, keep_passing(prompts, answers, task, replay))
    num_kept, num_asked = len(read_lines(rows)), len(read_lines(prompts))
    refused = describe_refused(read_answers(answers))
    context.runner.say(folder, f"{num_kept:,} of {num_asked:,} own answers pass {task.metric}{refused}")
    return tokenize_own(context, task, rows, folder) if num_kept else None


def draw(questions: list[Prompt], replay: Replay, *, seed: int) -> list[Prompt]:
    """The prompts to answer, in the rows' order."""
    num = len(questions) if replay.num_prompts is None else min(replay.num_prompts, len(questions))
    return [questions[i] for i in sorted(random.Random(seed).sample(range(len(questions)), num))]


def keep_passing(prompts: Path, answers: Path, task: Task, replay: Replay) -> list[DataRow]:
    """Rows of the answers that are not empty, ended by themselves, and score enough."""
    rows, asked, kept = read_lines(prompts), read_prompts([str(prompts)], None), []
    labels = sorted({reference for prompt in asked for reference in prompt.references})
    for line in read_answers(answers):
        prompt, answer = asked[line["index"]], line["answer"]
        score = score_answer(task.metric, answer, prompt.references, labels=labels)
        if line["finish_reason"] == "stop" and answer.strip() and score >= replay.min_score:
            kept.append(replace_answer(rows[line["index"]], line))
    return kept


def read_answers(path: Path) -> list[Line]:
    """The answers; ValueError names a damaged file and line."""
    advice = "remove it, and generate.done next to it, to answer again"
    return read_lines(path, {"index": int, "answer": str, "finish_reason": str | None}, advice=advice)


def describe_refused(lines: list[Line]) -> str:
    """The number of prompts that were too long to be answered, for the end of a message; "" if there are none."""
    num_refused = sum(map(is_refused, lines))
    return f"; prompts too long for the model: {num_refused:,}" if num_refused else ""


def replace_answer(row: DataRow, line: Line) -> DataRow:
    """The row with an answer in place of its own: of a server, with its reasoning and calls."""
    if "completion" in row:
        return row | {"completion": line["answer"]}
    *before, last = row["messages"]
    kept = {name: value for name, value in last.items() if name not in ("tool_calls", *REASONING_KEYS)}
    return row | {"messages": [*before, kept | line.get("message", {"content": line["answer"]})]}


def tokenize_own(context: Context, task: Task, rows: Path, folder: Path) -> Path:
    """Tokenizes a file of rows with the task's options."""
    options = context.settings.process_data | task.process_data
    options = {key: value for key, value in options.items() if key not in OF_ROWS}
    return tokenize([str(rows)], options, context.settings, folder / REPLAYED, name=REPLAYED, runner=context.runner)


def mix(options: Values, own: Path, replayed: Sequence[Path], replay: Replay | None) -> Values:
    """Options of train with the replayed data in their share. An epoch is still one of the task's own samples."""
    if not replayed:
        return options | {"data_path": [str(own)]}
    if replay.keep:
        return options | {"data_path": [str(own)], "keep": list(map(str, replayed)), "keep_share": replay.share}
    weights = [1 - replay.share, *(replay.share / len(replayed) for _ in replayed)]
    mixed = options | {"data_path": [str(own), *map(str, replayed)], "data_weights": weights}
    own_share = weights[0]  # of the samples
    if replay.share_of == "tokens":
        mixed["data_weights_by"] = "tokens"
        sizes = [read_count("num_tokens", path) / read_count("num_samples", path) for path in (own, *replayed)]
        by_sample = [weight / size for weight, size in zip(weights, sizes, strict=True)]
        own_share = by_sample[0] / sum(by_sample)
    if mixed.get("max_epochs") is not None:
        mixed["max_samples"] = math.ceil(mixed.pop("max_epochs") * read_count("num_samples", own) / own_share)
    return mixed


def read_count(name: str, data: Path) -> int:
    """A number of a data set, from its sidecar."""
    return read_fields(DataSetFiles(data).sidecar, {name: int}, written_by="process-data")[name]
