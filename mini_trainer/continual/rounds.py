"""Self-distillation in rounds: the model answers a task's prompts, a teacher that sees a good answer reads its tokens,
and the model learns from the teacher's distributions.

SDFT: Shenfeld et al. 2026, arXiv 2601.19897. For KL(teacher || model) they are written to files, of the most probable
tokens and one bucket; for other divergences the teacher is a second model in training.
"""

import itertools
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_trainer.continual.context import Context, Model
from mini_trainer.continual.data import OF_ROWS, as_row, read_questions, tokenize, write_rows
from mini_trainer.continual.settings import SelfDistillation, Task, Values, needs_end
from mini_trainer.data.chat.conversation import REASONING_KEYS
from mini_trainer.data.rows.prompts import join_content
from mini_trainer.data.stores.disk import (
    commit,
    describe_failed_write,
    hash_file,
    make_aside,
    sync_dir,
    sync_file,
    written_aside,
)
from mini_trainer.data.stores.model_files import find_model, list_weights
from mini_trainer.model.stored_tensors import StoredFiles, find_quantization
from mini_trainer.options import DEFAULT_BATCH_SIZE
from mini_trainer.run.file_names import EXPORTS_DIR, LATEST
from mini_trainer.run.stages import Stage
from mini_trainer.use.evaluation.results import read_lines
from mini_trainer.use.inference.answers import Line, is_empty, is_refused

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
    advice = "remove it, and generate.done next to it, to answer again"
    lines = read_lines(path, {"index": int, "answer": str, "finish_reason": str | None}, advice=advice)
    for number, line in enumerate(lines, start=1):
        if not 0 <= line["index"] < num_prompts:
            raise ValueError(f"{path}: line {number} is damaged: see index; {advice}")
    return lines


def describe_refused(lines: list[Line]) -> str:
    """The number of prompts that were too long to be answered, for the end of a message; "" if there are none."""
    num_refused = sum(map(is_refused, lines))
    return f"; prompts too long for the model: {num_refused:,}" if num_refused else ""


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


EXPORT = Path(EXPORTS_DIR, LATEST)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round, with the results of earlier rounds."""

    folder: Path
    number: int  # from 0
    student: str  # the model that answers
    teacher: str
    checkpoint: Path | None


def learn_in_rounds(context: Context, task: Task, model: Model, folder: Path, options: Values) -> Path:
    """Trains on a task's prompts, and returns the run of the last round."""
    settings = context.settings.self_distillation
    batch_size = options.get("batch_size") or DEFAULT_BATCH_SIZE
    epochs = options.pop("max_epochs")
    parts = split_evenly(draw_rows(context, task, epochs=epochs), settings.rounds)
    steps = [math.ceil(len(part) / batch_size) for part in parts]
    student, teacher, checkpoint, run = model.path, model.path, None, None
    for i, part in enumerate(parts):
        place = folder / f"round_{i + 1}"
        one = Round(folder=place, number=i, student=student, teacher=teacher, checkpoint=checkpoint)
        learnt_from = make_data(context, task, one, part)
        own = options | {"max_steps": steps[i], "checkpoint_every_steps": steps[i]}
        own |= {"schedule_steps": sum(steps)} if needs_end(options) else {}
        own |= learnt_from | {"teacher_weight": 1.0, "output_dir": str(place / "run")}
        if checkpoint is not None:
            own["continue_from"] = str(checkpoint)
        context.runner.run(Stage(program="train", folder=place, options=own))
        run = place / "run"
        checkpoint, student = run / "checkpoints" / f"step_{steps[i]}", str(run / EXPORT)
        if settings.teacher == "average" and i + 1 < len(parts):
            teacher = average(context, one, student, settings)
    return run


def draw_rows(context: Context, task: Task, *, epochs: int) -> list[dict[str, Any]]:
    """The task's rows in the order of their rounds: an epoch is a permutation drawn from the seed."""
    rows = [as_row(prompt, prompt.references[0]) for prompt in read_questions(task, context.settings)]
    drawn = []
    for epoch in range(epochs):
        drawn += random.Random(f"{context.seed} {epoch}").sample(rows, len(rows))
    return drawn


def split_evenly(rows: list[dict[str, Any]], num_parts: int) -> list[list[dict[str, Any]]]:
    """Parts whose lengths differ by at most one; ValueError if there are fewer rows than parts."""
    if len(rows) < num_parts:
        raise ValueError(f"self_distillation: rounds: given {num_parts}, allowed: at most one for each of {len(rows)}")
    ends = [len(rows) * i // num_parts for i in range(num_parts + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def make_data(context: Context, task: Task, one: Round, part: list[dict[str, Any]]) -> Values:
    """The options of train for the round's data: the student's answers, and the teacher's scores of their tokens."""
    settings, runner, folder = context.settings, context.runner, one.folder
    sampling = {"temperature": 1.0} | settings.generate
    answer_prompts(context, one.student, folder, lambda: part, sampling=sampling, seed=context.seed + one.number)
    answers = folder / ANSWERS
    rows = {"student": folder / "student.jsonl", "teacher": folder / "teacher.jsonl"}
    if not rows["teacher"].is_file():
        template = settings.self_distillation.demonstration
        lines = read_answers(answers, len(part))
        pairs = [pair for pair in (pair_rows(part, line, template) for line in lines) if pair]
        if not pairs:
            raise ValueError(f"{answers}: every answer is empty or refused, so there is nothing to learn from")
        if len(pairs) < len(part):
            refused = describe_refused(lines)
            runner.say(folder, f"{len(part) - len(pairs):,} empty answers are left out{refused}")
        for path, own in zip(rows.values(), zip(*pairs, strict=True), strict=True):
            write_rows(path, list(own))
    data = {name: tokenize_own(context, task, path, folder, name=name) for name, path in rows.items()}
    record(folder, [*rows.values(), *data.values()])
    own, beside = {"data_path": [str(data["student"])]}, {"teacher_data": [str(data["teacher"])]}
    if settings.self_distillation.is_online:
        divergence = settings.self_distillation.divergence
        return own | beside | {"teacher_model": one.teacher, "teacher_divergence": divergence}
    scoring = settings.score_data | {"model_name_or_path": one.teacher, "top_k": settings.self_distillation.top_k}
    runner.run(Stage(program="score-data", folder=folder, options=scoring | own | beside))
    return own


def pair_rows(part: list[dict[str, Any]], line: dict[str, Any], template: str) -> tuple[dict, dict] | None:
    """The student's row, and the teacher's, whose prompt shows the row's own answer; None for an empty answer."""
    if is_empty(line):
        return None
    row = part[line["index"]]
    student = replace_answer(row, line)
    reference = find_reference(row)
    if "completion" in row:
        return student, student | {"prompt": fill(template, row["prompt"], reference)}
    messages = [dict(message) for message in student["messages"]]
    asked = [message for message in messages if message["role"] == "user"]
    if not asked:
        raise ValueError("self_distillation: a chat without a user's message has no place for a demonstration")
    asked[-1]["content"] = fill(template, join_content(asked[-1]), reference)
    return student, student | {"messages": messages}


def fill(template: str, prompt: str, demonstration: str) -> str:
    head, _, tail = template.partition("{prompt}")
    parts = [head.replace("{demonstration}", demonstration), prompt, tail.replace("{demonstration}", demonstration)]
    return "".join(parts)


def record(folder: Path, paths: list[Path]) -> None:
    """Writes the hashes of the round's data."""
    with written_aside(folder / "data.json") as (aside,):
        hashes = {str(path.relative_to(folder)): hash_file(path)["sha256"] for path in paths}
        aside.write_text(json.dumps(hashes, indent=2) + "\n")


def average(context: Context, one: Round, student: str, settings: SelfDistillation) -> str:
    """The next teacher: a moving average of the teacher and the model after this round."""
    output = one.folder / "average"  # "teacher" is the folder of its data
    if not output.is_dir():
        context.runner.say(one.folder, f"averages {one.teacher} and {student}")
        average_models(one.teacher, student, output, share=settings.average_decay)
    return str(output)


def average_models(first: str, second: str, output: Path, *, share: float) -> None:
    """Writes share x first + (1 - share) x second, computed in fp32, a weight file at a time; all else is the first's.

    ValueError if their tensors differ; the directory appears once it is complete.
    """
    directory = Path(find_model(first, revision=None, trust_remote_code=False, flag="model:"))
    others = StoredFiles(Path(second)).find()
    shapes = [{name: one.shape for name, one in tensors.items()} for tensors in (StoredFiles(directory).find(), others)]
    if find_quantization(directory) is not None or shapes[0] != shapes[1]:
        raise ValueError(f"self_distillation: teacher: average: {first} is quantized, or unlike {second}")
    files = [file for file in directory.iterdir() if file.is_file() and file.name not in ("manifest.json", "README.md")]
    needed_bytes = sum(file.stat().st_size for file in files)
    aside = make_aside(output, needed_bytes, what="the average", spare_bytes=0)
    try:
        for file in files:
            if file.suffix != ".safetensors":
                shutil.copyfile(file, aside / file.name)
        for name in list_weights(directory):
            tensors = {
                key: mix_tensors(own, others[key].read(), share) for key, own in load_file(directory / name).items()
            }
            save_file(tensors, aside / name, metadata={"format": "pt"})
        for file in aside.iterdir():
            sync_file(file)
        sync_dir(aside)
        commit(aside, output)
    except (OSError, SafetensorError) as error:
        raise OSError(describe_failed_write(f"the average {output}", error, aside, needed_bytes)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def mix_tensors(first: Tensor, second: Tensor, share: float) -> Tensor:
    """Averages two tensors in fp32, in the first's data type; integers are the first's."""
    if not first.is_floating_point():
        return first
    return (share * first.float() + (1 - share) * second.float()).to(first.dtype)
