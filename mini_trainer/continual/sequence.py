"""One order of the tasks with one seed: each task is learnt, then everything is measured."""

import shutil
from collections.abc import Callable
from pathlib import Path

from mini_trainer.continual.context import Context, Model
from mini_trainer.continual.matrix import Row, Sequence
from mini_trainer.continual.measuring import describe_row, measure
from mini_trainer.continual.replay import find_replay, mix
from mini_trainer.continual.rounds import learn_in_rounds
from mini_trainer.continual.settings import SetSettings, Task, Values, choose_adapter_options
from mini_trainer.data.stores.disk import written_aside
from mini_trainer.run.file_names import EXPORTS_DIR, LATEST
from mini_trainer.run.stages import Stage

STATISTICS = "osft_statistics.safetensors"
BASES = Path("osft", "bases.safetensors")  # model.methods.osft_bases.BASES_FILE, without its imports


def run_sequence(
    context: Context, tasks: list[Task], *, order: int, start: Row, report: Callable[[Sequence], None]
) -> None:
    """Trains on the tasks in turn. `start` is the row of the start model; `report` receives all measurements so far."""
    settings = context.settings
    model, rows = Model(path=settings.model, start=settings.model), [start]
    names = tuple(task.name for task in tasks)
    for t, task in enumerate(tasks):
        folder = context.folder / f"{t + 1}_{task.name}"
        model = learn(context, tasks[:t], task, model, folder)
        measured = choose_sets(context, tasks, t)
        row = measure(model.path, measured, context.prepared, settings, folder / "measured", context.runner)
        rows.append(row)
        context.runner.say(folder, describe_row(rows[-1]))
        report(Sequence(names, order, context.seed, tuple(rows)))


def choose_sets(context: Context, tasks: list[Task], t: int) -> list[SetSettings]:
    """The sets that the model after task `t` (from 0) is measured on."""
    settings = context.settings
    return [*settings.probes, *(settings.tasks if settings.measure == "all" else tasks[: t + 1])]


def learn(context: Context, earlier: list[Task], task: Task, model: Model, folder: Path) -> Model:
    """Trains on a task, and returns the model for the next one."""
    settings, own = context.settings, context.prepared[task.name]
    statistics = hand_on_statistics(context, task, model, folder)
    options = settings.train_options(task) | {
        "model_name_or_path": model.start,
        "output_dir": str(folder / "run"),
        "keep_exports": 1,
        "seed": context.seed,
    }
    if own.validation is not None:
        options["validation_data_path"] = [str(own.validation)]
    options = choose_adapter_options(options, settings, None if model.adapter is None else str(model.adapter))
    options |= choose_statistics(context, options, earlier, statistics)
    if options.get("osft") and settings.keep_osft_bases:
        options["osft_bases"] = "new" if model.bases is None else str(model.bases)
    if settings.self_distillation is not None:
        run = learn_in_rounds(context, task, model, folder, options)
    else:
        options = mix(options, own.train, find_replay(context, earlier, model, folder), settings.replay)
        run = folder / "run"
        context.runner.run(Stage(program="train", folder=folder, options=options))
    export = run / EXPORTS_DIR / (LATEST if settings.export == "last" else settings.export)
    if settings.adapters == "merged":
        bases = export / BASES if "osft_bases" in options else model.bases
        return Model(path=str(export), start=str(export), statistics=statistics, bases=bases)
    return Model(path=str(export), start=settings.model, adapter=export, statistics=statistics)


def hand_on_statistics(context: Context, task: Task, model: Model, folder: Path) -> Path | None:
    """OSFT's statistics of all earlier tasks: a copy for this task, whose run adds the last one's data."""
    values = context.settings.train_options(task)
    if not values.get("osft") or values.get("osft_basis") != "activations":
        return model.statistics
    path = folder / STATISTICS
    if not path.exists() and model.statistics is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as (aside,):
            shutil.copyfile(model.statistics, aside)
    return path


def choose_statistics(context: Context, options: Values, earlier: list[Task], statistics: Path | None) -> Values:
    """OSFT's options on earlier tasks: the first task remembers the data that the settings name, if any."""
    if not options.get("osft") or options.get("osft_basis") != "activations":
        return {}
    chosen = {"osft_statistics": str(statistics)}
    if earlier:
        chosen["osft_calibration_data"] = str(context.prepared[earlier[-1].name].train)
    return chosen
