"""Measures a model on tasks and probes by evaluate_model.py, and reads the scores of each question."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.continual.data import Prepared
from mini_trainer.continual.matrix import Cell, MatrixRow
from mini_trainer.continual.settings import ContinualSettings, SetSettings, Values
from mini_trainer.options.reading import read_fields, read_object
from mini_trainer.run.stages import Runner, Stage
from mini_trainer.use.evaluation.results import read_lines

SCORE, LOSS = "score", "loss"  # kinds of a row
LOSSES = {"num_targets": int | float, "loss_sum": int | float}
OF_TESTS = ("format", "engine", "base_url", "api_key_env", "concurrency")


# One start of evaluate: its folder's name, kinds and sets that are measured with the same options, and these.
Measuring = tuple[str, list[tuple[str, SetSettings]], Values]


def measure(
    model: str, sets: list[SetSettings], prepared: Prepared, settings: ContinualSettings, folder: Path, runner: Runner
) -> MatrixRow:
    """The model's scores and losses on the sets, in their order."""
    row: MatrixRow = {}
    for name, measured, given in group(sets, prepared, settings):
        place = folder / name
        # Nothing here reads evaluate's own intervals, so a few resamples do.
        options = {"num_resamples": 100} | given | {"model": [model], "output_dir": str(place)}
        runner.run(Stage(program="evaluate", folder=place, options=options))
        for name, count in count_refused(place).items():
            runner.say(place, f"{name}: prompts too long for the model, counted as wrong: {count:,}")
        for kind, own in measured:
            row.setdefault(kind, {})[own.name] = read_cell(place, own, kind, root=settings.root)
    return {kind: {one.name: cells[one.name] for one in sets if one.name in cells} for kind, cells in row.items()}


def count_refused(folder: Path) -> dict[str, int]:
    """Prompts of each set that were too long to be answered, where there are any."""
    path, advice = folder / "results.json", f"; remove {folder} to measure again"
    sets = read_fields(path, {"sets": list}, written_by="evaluate", advice=advice)["sets"]
    counts = {one["name"]: sum(extra.get("num_refused", 0) for extra in one["extras"]) for one in sets}
    return {name: count for name, count in counts.items() if count}


def group(sets: list[SetSettings], prepared: Prepared, settings: ContinualSettings) -> list[Measuring]:
    """Sets that one start of evaluate can measure together. Probes come first: their names stay as tasks are added."""
    found: list[Measuring] = []
    held_out = [one for one in sets if prepared[one.name].held_out is not None]
    losses = {"data": [str(prepared[one.name].held_out) for one in held_out]} if held_out else {}
    with_losses = [(LOSS, one) for one in held_out]
    for own in group_tests(sets, settings):
        metrics = sorted({one.metric for one in own} - {None})
        options = settings.evaluate | own[0].evaluate | {"task": [str(prepared[one.name].test) for one in own]}
        options |= {"metrics": metrics} if metrics else {}
        measured = [(SCORE, one) for one in own]
        if options.get("engine", "hf") == "hf":  # the first start measures the losses as well
            options, measured = options | losses, measured + with_losses
            losses, with_losses = {}, []
        found.append(("answers" if not found else f"answers_{len(found) + 1}", measured, options))
    if losses:
        found.append(("losses", with_losses, keep_common(settings.evaluate) | losses))
    for one in sets:
        if one.lm_eval is not None:
            options = keep_common(settings.evaluate | one.evaluate) | {"lm_eval": [one.lm_eval]}
            found.append((f"harness_{one.name}", [(SCORE, one)], options))
    return found


def group_tests(sets: list[SetSettings], settings: ContinualSettings) -> list[list[SetSettings]]:
    """Tests with the same options of evaluate; those without a metric, which have the default ones, are apart."""
    found: dict[str, list[SetSettings]] = {}
    for one in sets:
        if one.test is not None:
            key = json.dumps([settings.evaluate | one.evaluate, one.metric is None])
            found.setdefault(key, []).append(one)
    return list(found.values())


def keep_common(options: Values) -> Values:
    """The options without those of prompts' rows and of other engines, which losses and the harness do not use."""
    return {name: value for name, value in options.items() if name not in OF_TESTS}


def read_cell(folder: Path, one: SetSettings, kind: str, *, root: Path) -> Cell:
    """Each question's score, or each sample's mean loss with its number of trained tokens; ValueError names a file that
    is not as evaluate writes it."""
    (samples,), advice = (folder / "samples").iterdir(), f"remove {folder} to measure again"
    if kind == LOSS:
        path = samples / f"{one.name}_held_out.losses.jsonl"
        lines = [line for line in read_lines(path, LOSSES, advice=advice) if line["num_targets"] > 0]
        weights = np.array([line["num_targets"] for line in lines], float)
        return Cell("loss", np.array([line["loss_sum"] for line in lines]) / weights, weights)
    path = samples / ("lm_eval.json" if one.lm_eval is not None else f"{one.name}.scores.jsonl")
    lines = read_harness(path) if one.lm_eval is not None else read_lines(path, {"scores": dict}, advice=advice)
    scores = lines[0]["scores"] if lines else {}
    metric = one.metric or next(iter(scores), "")
    if scores and metric not in scores:
        raise ValueError(f"{one.name}: metric: given {metric!r}, allowed: {', '.join(scores)}")
    if not scores or not all(isinstance(line["scores"].get(metric), int | float) for line in lines):
        raise ValueError(f"{path}: is damaged: a line without a number as {metric}; {advice}")
    values = np.array([line["scores"][metric] for line in lines], float)
    return Cell(metric, values, None, os.path.relpath(path, root))


def read_harness(path: Path) -> list[dict[str, Any]]:
    """The samples of a task of the harness; of a group of tasks, of all of them."""
    found = read_object(path)
    return [sample for task in sorted(found) for sample in sorted(found[task], key=lambda sample: sample["index"])]


def describe_row(row: MatrixRow) -> str:
    """The means of a row in one line."""
    cells = [(name, cell) for kind in sorted(row, reverse=True) for name, cell in row[kind].items()]
    return ", ".join(f"{name} {cell.mean:.3f} ({cell.metric})" for name, cell in cells)
