"""An experiment: all orders and seeds, one after the other, and the record that keeps a directory to its settings."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from mini_trainer.continual.data import HeldOut, PreparedFiles, prepare, prepare_known
from mini_trainer.continual.matrix import FILE, Experiment, MatrixRow, Sequence, read_experiment, write_experiment
from mini_trainer.continual.measuring import describe_row, measure
from mini_trainer.continual.page import describe_comparison, write_page
from mini_trainer.continual.replay import Context, Model, find_replay, mix
from mini_trainer.continual.running import Runner
from mini_trainer.continual.settings import (
    OF_METHODS,
    SHARED_FOLDERS,
    ContinualSettings,
    SetSettings,
    Task,
    Values,
    check_statistics,
    choose_adapter_options,
    draw_orders,
)
from mini_trainer.data.stores.disk import read_fields, remove, written_aside
from mini_trainer.distributed.messages import say
from mini_trainer.run.file_names import EXPORTS_DIR, LATEST, PARAMS_FILE
from mini_trainer.run.stages import Record, Stage, hash_files, list_changes, write_record

STATISTICS = "osft_statistics.safetensors"
BASES = Path("osft", "bases.safetensors")  # model.methods.osft_subspaces.BASES_FILE, without its imports


def run_sequence(
    context: Context, tasks: list[Task], *, order: int, start: MatrixRow, report: Callable[[Sequence], None]
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
    options = mix(options, own.train, find_replay(context, earlier, model, folder), settings.replay)
    context.runner.run(Stage(program="train", folder=folder, options=options))
    export = folder / "run" / EXPORTS_DIR / (LATEST if settings.export == "last" else settings.export)
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


RECORD, PAGE = "continual.json", "results.html"
ADDED_TO = {"tasks", "seeds"}  # settings that may grow at their end
OF_DATA = ("data", "known")  # folders of tokenized rows


def find_root(several: list[ContinualSettings]) -> Path:
    """The directory of an experiment, or of all methods' experiments."""
    return several[0].root if len(several) == 1 else several[0].root.parent


def run_experiments(several: list[ContinualSettings], runner: Runner) -> None:
    """Runs, or continues, one experiment, or one for each method with the data and the start model's measurements that
    they share, and then compares them. ValueError, OSError or RunError say why it cannot."""
    from mini_trainer.continual.checking import check_experiments

    root = runner.root
    try:
        orders = settle_all(several, root)
        sets: list[SetSettings] = [*several[0].probes, *several[0].tasks]
        prepared = {one.name: prepare(one, several[0], root / "data" / one.name, runner) for one in sets}
        held_out = HeldOut(prepared.values(), several[0])
        known = [prepare_known(settings, runner) for settings in several]
        check_experiments(several, prepared, held_out, known)
        for settings, own, replayed in zip(several, orders, known, strict=True):
            run_experiment(settings, own, prepared, held_out, replayed, runner)
        if len(several) > 1:
            experiments = [read_experiment(settings.root) for settings in several]
            write_page(root / PAGE, experiments)
            say(f"{describe_comparison(experiments)}\nresults page: {(root / PAGE).as_uri()}")
    finally:
        runner.lock.release()


def run_experiment(
    settings: ContinualSettings,
    orders: list[list[str]],
    prepared: dict[str, PreparedFiles],
    held_out: HeldOut,
    known: Path | None,
    runner: Runner,
) -> None:
    """Trains on all orders with all seeds."""
    done: dict[tuple[int, int], Sequence] = {}

    def report(sequence: Sequence) -> None:
        done[sequence.order, sequence.seed] = sequence
        if runner.has_run:  # until then, an earlier start's results say more
            write_results(settings, list(done.values()))

    start = measure_start(settings, prepared, runner)
    for i, names in enumerate(orders):
        for seed in settings.seeds:
            context = Context(
                settings=settings,
                runner=runner,
                prepared=prepared,
                held_out=held_out,
                known=known,
                folder=settings.root / f"order_{i + 1}_seed_{seed}",
                seed=seed,
            )
            tasks = [settings.find_task(name) for name in names]
            run_sequence(context, tasks, order=i + 1, start=start, report=report)
    write_results(settings, list(done.values()))
    say(f"results: {settings.root / FILE}\nresults page: {(settings.root / PAGE).as_uri()}")


def measure_start(settings: ContinualSettings, prepared: dict[str, PreparedFiles], runner: Runner) -> MatrixRow:
    """The start model's row; with measure: seen, that of the probes alone."""
    measured = [*settings.probes, *(settings.tasks if settings.measure == "all" else ())]
    folder = runner.root / "start"
    row = measure(settings.model, measured, prepared, settings, folder, runner)
    if row:
        runner.say(folder, describe_row(row))
    return row


def write_results(settings: ContinualSettings, sequences: list[Sequence]) -> None:
    """Writes results.json and the page with all results so far."""
    names = [tuple(one.name for one in group) for group in (settings.tasks, settings.probes)]
    experiment = Experiment(settings.label, describe_method(settings), *names, tuple(sequences), settings.measure)
    write_experiment(experiment, settings.root / FILE)
    write_page(settings.root / PAGE, [experiment])


def describe_method(settings: ContinualSettings) -> str:
    """The method in a few words."""
    values = settings.train
    if values.get("osft"):
        said = (
            values.get("osft_basis", "weights"),
            values.get("osft_keep_energy"),
            values.get("osft_unfreeze_rank_ratio"),
        )
        words = [f"OSFT ({', '.join(str(value) for value in said if value is not None)})"]
    elif values.get("lora"):
        words = [f"{'QLoRA' if values.get('base_quantization') == 'nf4' else 'LoRA'}, {settings.adapters}"]
    else:
        words = ["full fine-tuning"]
    if values.get("teacher_weight") is not None:
        words.append(f"{values.get('teacher_divergence', 'forward-kl')} to {values.get('teacher_model', 'files')}")
    if settings.replay is not None:
        words.append(f"{settings.replay.share:.0%} {settings.replay.kind.replace('-', ' ')} replayed")
    return ", ".join(words)


def settle_all(several: list[ContinualSettings], root: Path) -> list[list[list[str]]]:
    """The orders of the tasks of each experiment. Several also have a record of their common settings."""
    paths = [settings.root / RECORD for settings in several]
    inputs = {"files": hash_inputs(several[0]), "model": hash_model(several[0].model)}
    known = [hash_known(one, where=f"methods: {one.label}: " if len(several) > 1 else "") for one in several]
    own_inputs = [inputs | {"files": inputs["files"] | own} for own in known]
    if not any(path.exists() for path in (*paths, root / RECORD)):
        refuse_foreign(root, [path.parent for path in paths])
    if len(several) > 1:
        settle(several[0], root / RECORD, describe_settings(several[0], left_out=OF_METHODS) | inputs)
    found = [
        settle(one, path, describe_settings(one) | own)
        for one, path, own in zip(several, paths, own_inputs, strict=True)
    ]
    for settings, orders in zip(several, found, strict=True):
        for order in orders:
            check_statistics(settings, order)
    return found


def refuse_foreign(root: Path, experiments: list[Path]) -> None:
    """ValueError if a directory without a record has files where an experiment would write its own."""
    names = {PARAMS_FILE, FILE, PAGE, *OF_DATA, *SHARED_FOLDERS, "order_1_seed_*"}
    found = [path for one in {root, *experiments} for name in names for path in one.glob(name)]
    if found:
        raise ValueError(f"output_dir: {root} has {found[0].name} of something else; choose another directory")


def settle(settings: ContinualSettings, path: Path, now: Record) -> list[list[str]]:
    """The orders of the tasks. Records the settings, and refuses ones that differ from the directory's; seeds and tasks
    may be added at the end, and such tasks come last in every order."""
    names = [task.name for task in settings.tasks]
    if not path.exists():
        orders = draw_orders(names, settings.orders)
        write_record(path, now | {"orders": orders})
        return orders
    before = read_record(path)
    orders = before.pop("orders")
    num_before = len(before["settings"]["tasks"])
    kept = json.loads(json.dumps(now))
    for name in ADDED_TO & before["settings"].keys():
        kept["settings"][name] = kept["settings"][name][: len(before["settings"][name])]
    kept["files"] = {name: hashed for name, hashed in kept["files"].items() if name in before["files"]}
    changes = list_changes(before, kept)
    if changes and not has_begun(path.parent):
        for name in OF_DATA:
            remove(path.parent / name)
        path.unlink()
        return settle(settings, path, now)
    if changes:
        listed = "".join(f"\n  {change}" for change in changes)
        raise ValueError(
            f"{path.parent} belongs to an experiment with other settings:{listed}\nundo the changes, or choose another"
            " output_dir; only seeds and tasks at the end can be added"
        )
    orders = [order + names[num_before:] for order in orders]
    write_record(path, now | {"orders": orders})
    return orders


def has_begun(directory: Path) -> bool:
    """Whether a model has been measured or trained there; before that, an error in the settings or rows can be fixed
    in place."""
    return any(any(directory.glob(pattern)) for pattern in ("start", "order_*", "*/order_*"))


def read_record(path: Path) -> Record:
    """The record of an experiment's settings; ValueError names the file and a key that has been changed."""
    advice = "; restore it, or choose another output_dir"
    kinds = {"settings": dict, "files": dict, "model": str, "orders": list}
    record = read_fields(path, kinds, written_by="mini-trainer continual", advice=advice)
    tasks, seeds = (record["settings"].get(name) for name in ("tasks", "seeds"))
    is_whole = isinstance(tasks, list) and all(isinstance(task, dict) for task in tasks)
    names = sorted(str(task.get("name")) for task in tasks) if is_whole else []
    has_orders = all(isinstance(order, list) and sorted(map(str, order)) == names for order in record["orders"])
    has_seeds = seeds is None or isinstance(seeds, list)  # those of methods are in their own records
    if not (is_whole and has_orders and has_seeds):
        wrong = "settings.tasks" if not is_whole else "settings.seeds" if not has_seeds else "orders"
        raise ValueError(f"{path}: not as mini-trainer continual writes it (see {wrong}){advice}")
    return record


def describe_settings(settings: ContinualSettings, *, left_out: Iterable[str] = ()) -> Record:
    """The settings that decide the results."""
    values = asdict(settings)
    for key in ("name", "output_dir", "num_processes", *left_out):
        del values[key]
    return {"settings": values}


def hash_inputs(settings: ContinualSettings) -> dict[str, str]:
    """The SHA-256 of each file that the tasks and probes name, and of all files of a directory; ValueError for one
    that does not exist."""
    paths = [Path(one.lm_eval) for one in (*settings.tasks, *settings.probes) if one.lm_eval is not None]
    for one in (*settings.tasks, *settings.probes):
        is_task = isinstance(one, Task)
        named = {"test": one.test, "held_out": one.held_out}
        named |= {"data_path": one.data_path, "validation": one.validation} if is_task else {}
        given = [(key, path) for key, path in named.items() if path is not None]
        for key, name in given + [("input_file", name) for name in (one.input_file if is_task else ())]:
            if not Path(name).exists():
                raise ValueError(f"{'tasks' if is_task else 'probes'}: {one.name}: {key}: {name} does not exist")
            paths.append(Path(name))
    return hash_files(paths)


def hash_known(settings: ContinualSettings, *, where: str) -> dict[str, str]:
    """The hash of the data that the method replays with every task."""
    known = None if settings.replay is None else settings.replay.known
    if known is not None and not Path(known).exists():
        raise ValueError(f"{where}replay: known: {known} does not exist")
    return {} if known is None else hash_files([Path(known)])


def hash_model(name: str) -> str:
    """A hash of the model's config and weights, which are downloaded if they are on the hub."""
    from mini_trainer.data.stores.model_files import find_model, find_weights
    from mini_trainer.model.fingerprints import fingerprint_model  # seconds to import

    directory = find_model(name, revision=None, trust_remote_code=False, flag="model:")
    find_weights(name, directory)
    return fingerprint_model(directory)
