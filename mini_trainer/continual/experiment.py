"""An experiment: its checks before the first task, all orders and seeds, one after the other, and the record that keeps
a directory to its settings."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path

from mini_trainer.continual.data import HeldOut, Prepared, prepare, prepare_known, read_questions
from mini_trainer.continual.matrix import FILE, Experiment, MatrixRow, Sequence, read_experiment, write_experiment
from mini_trainer.continual.measuring import describe_row, group_tests, measure
from mini_trainer.continual.page import describe_comparison, write_page
from mini_trainer.continual.replay import Context, Model, describe_held_out, find_replay, mix
from mini_trainer.continual.settings import (
    OF_METHODS,
    SECTIONS,
    SHARED_FOLDERS,
    ContinualSettings,
    SetSettings,
    Task,
    Values,
    check_statistics,
    choose_adapter_options,
    complete_options,
    draw_orders,
)
from mini_trainer.data.stores.disk import remove, written_aside
from mini_trainer.data.tokenized.detection import is_tokenized
from mini_trainer.distributed.messages import say
from mini_trainer.options import SELF, KeepOptions, TrainOptions, group_options
from mini_trainer.options.reading import read_fields
from mini_trainer.options.tools import EvaluateOptions
from mini_trainer.run.file_names import EXPORTS_DIR, LATEST, PARAMS_FILE
from mini_trainer.run.preflight import check_runs
from mini_trainer.run.stages import Record, Runner, Stage, hash_files, list_changes, write_record
from mini_trainer.use.evaluation.tasks import open_task

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
        measured = choose_sets(settings, tasks[: t + 1])
        row = measure(model.path, measured, context.prepared, settings, folder / "measured", context.runner)
        rows.append(row)
        context.runner.say(folder, describe_row(row))
        report(Sequence(names, order, context.seed, tuple(rows)))


def choose_sets(settings: ContinualSettings, trained: list[Task]) -> list[SetSettings]:
    """The sets that a model is measured on after these tasks."""
    return [*settings.probes, *(settings.tasks if settings.measure == "all" else trained)]


def learn(context: Context, earlier: list[Task], task: Task, model: Model, folder: Path) -> Model:
    """Trains on a task, and returns the model for the next one."""
    settings, own = context.settings, context.prepared[task.name]
    statistics = hand_on_statistics(context, task, model, folder)
    options = settings.train_options(task) | {"model_name_or_path": model.start, "output_dir": str(folder / "run")}
    options |= {"keep_exports": 1, "seed": context.seed}
    if own.validation is not None:
        options["validation_data_path"] = [str(own.validation)]
    options = choose_adapter_options(options, settings, None if model.adapter is None else str(model.adapter))
    if options.get("osft") and options.get("osft_basis") == "activations":
        options["osft_statistics"] = str(statistics)
        if earlier and options.get("osft_calibration_data") != SELF:  # the first task remembers what the settings name
            options["osft_calibration_data"] = str(context.prepared[earlier[-1].name].train)
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


RECORD, PAGE = "continual.json", "results.html"
ADDED_TO = {"tasks", "seeds"}  # settings that may grow at their end
OF_DATA = ("data", "known")  # folders of tokenized rows


def find_root(several: list[ContinualSettings]) -> Path:
    """The directory of an experiment, or of all methods' experiments."""
    return several[0].root if len(several) == 1 else several[0].root.parent


def run_experiments(several: list[ContinualSettings], runner: Runner) -> None:
    """Runs, or continues, one experiment, or one for each method with the data and the start model's measurements that
    they share, and then compares them. ValueError, OSError or RunError say why it cannot."""
    root = runner.root
    try:
        if not list(root.glob(f"**/{RECORD}")):  # else some of it is written
            # The exports of all tasks' runs stay.
            runs = [(one.train_options(task) | {"model_name_or_path": one.model}, len(one.seeds) * one.orders)
                    for one in several for task in one.tasks]  # fmt: skip
            check_runs(root, runs, flag="output_dir: ")
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
    prepared: Prepared,
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

    folder = runner.root / "start"
    if start := measure(settings.model, choose_sets(settings, []), prepared, settings, folder, runner):
        runner.say(folder, describe_row(start))
    shared = dict(settings=settings, runner=runner, prepared=prepared, held_out=held_out, known=known)
    for i, names in enumerate(orders):
        for seed in settings.seeds:
            context = Context(**shared, folder=settings.root / f"order_{i + 1}_seed_{seed}", seed=seed)
            tasks = [settings.find_task(name) for name in names]
            run_sequence(context, tasks, order=i + 1, start=start, report=report)
    write_results(settings, list(done.values()))
    say(f"results: {settings.root / FILE}\nresults page: {(settings.root / PAGE).as_uri()}")


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
        said = (values.get("osft_basis", "weights"), *map(values.get, ("osft_keep_energy", "osft_unfreeze_rank_ratio")))
        words = [f"OSFT ({', '.join(str(value) for value in said if value is not None)})"]
    elif values.get("lora"):
        words = [f"{'QLoRA' if values.get('base_quantization') == 'nf4' else 'LoRA'}, {settings.adapters}"]
    else:
        words = ["full fine-tuning"]
    if values.get("teacher_weight") is not None:
        words.append(f"{values.get('teacher_divergence', 'forward-kl')} to {values.get('teacher_model', 'files')}")
    if settings.replay is not None:
        effect = "kept" if settings.replay.keep else "replayed"
        words.append(f"{settings.replay.share:.0%} {settings.replay.kind.replace('-', ' ')} {effect}")
    return ", ".join(words)


def settle_all(several: list[ContinualSettings], root: Path) -> list[list[list[str]]]:
    """The orders of the tasks of each experiment. Several also have a record of their common settings."""
    paths = [settings.root / RECORD for settings in several]
    inputs = {"files": hash_inputs(several[0]), "model": hash_model(several[0].model)}
    known = [hash_known(one, where=f"methods: {one.label}: " if len(several) > 1 else "") for one in several]
    own_inputs = [inputs | {"files": inputs["files"] | own} for own in known]
    if not any(path.exists() for path in (*paths, root / RECORD)):
        names = {PARAMS_FILE, FILE, PAGE, *OF_DATA, *SHARED_FOLDERS, "order_1_seed_*"}  # that an experiment would write
        folders = {root, *(path.parent for path in paths)}
        if found := [path for folder in folders for name in names for path in folder.glob(name)]:
            raise ValueError(f"output_dir: {root} has {found[0].name} of something else; choose another directory")
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


def settle(settings: ContinualSettings, path: Path, now: Record) -> list[list[str]]:
    """The orders of the tasks. Records the settings, and refuses ones that differ from the directory's; seeds and tasks
    may be added at the end, and such tasks come last in every order."""
    names = [task.name for task in settings.tasks]
    if not path.exists():
        orders = draw_orders(names, settings.orders)
        write_record(path, now | {"orders": orders})
        return orders
    kinds = {"settings": dict, "files": dict, "model": str, "orders": list}
    advice = "; restore it, or choose another output_dir"
    before = read_fields(path, kinds, written_by="mini-trainer continual", advice=advice)
    orders = before.pop("orders")
    num_before = len(before["settings"]["tasks"])
    kept = json.loads(json.dumps(now))
    for name in ADDED_TO & before["settings"].keys():
        kept["settings"][name] = kept["settings"][name][: len(before["settings"][name])]
    kept["files"] = {name: hashed for name, hashed in kept["files"].items() if name in before["files"]}
    changes, begun = list_changes(before, kept), ("start", "order_*", "*/order_*")
    # Until a model has been measured or trained there, errors in settings or rows can be fixed in place.
    if changes and not any(any(path.parent.glob(pattern)) for pattern in begun):
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


def describe_settings(settings: ContinualSettings, *, left_out: Iterable[str] = ()) -> Record:
    """The settings that decide the results."""
    values = asdict(settings)
    for key in ("name", "output_dir", "num_processes", *left_out):
        del values[key]
    return {"settings": values}


def hash_inputs(settings: ContinualSettings) -> dict[str, str]:
    """The SHA-256 of each file that tasks and probes name, and of a directory's files; ValueError for a missing one."""
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


# Checks before the first task: by train's own plan, with the prepared data, and with the start model in place of models
# that do not exist yet; and by reading tests as evaluate does.

UNSTARTED = "unstarted"  # stands for the output directory of a run; nothing is written there


def check_experiments(
    several: list[ContinualSettings], prepared: Prepared, held_out: HeldOut, known: list[Path | None]
) -> None:
    """ValueError with all problems that runs of train, and their data, would have."""
    problems = find_test_problems(several[0], prepared)  # which all methods share
    for settings, own in zip(several, known, strict=True):
        where = f"methods: {settings.label}: " if len(several) > 1 else ""
        if own is not None and (num_held_out := held_out.count_rows(own)):
            problems.append(f"{where}{describe_held_out(num_held_out, settings.replay.known)}")
        for task in settings.tasks:
            found = find_data_problems(settings, task, prepared, held_out)
            found += find_train_problems(settings, task, prepared, own)
            problems += [f"{where}tasks: {task.name}: {problem}" for problem in found]
    if problems:
        raise ValueError("\n  ".join(dict.fromkeys(problems)))


def find_test_problems(settings: ContinualSettings, prepared: Prepared) -> list[str]:
    """Problems with the tests, which evaluate reads after every task."""
    problems = find_harness_problems([*settings.probes, *settings.tasks])
    for own in group_tests([*settings.probes, *settings.tasks], settings):
        metrics = tuple(sorted({one.metric for one in own} - {None}))
        values = SECTIONS["evaluate"].later | settings.evaluate | own[0].evaluate
        options = group_options(EvaluateOptions, **values | ({"metrics": metrics} if metrics else {}))
        for one in own:
            try:
                test = open_task(str(prepared[one.name].test), one.name, options)
                if one.metric is not None and one.metric not in test.measures:
                    problems.append(f"{one.name}: metric: {one.metric}: {one.test} has {', '.join(test.measures)}")
            except (ValueError, OSError) as error:
                problems.append(f"{one.name}: test: {error}")
    return problems


def find_harness_problems(sets: list[SetSettings]) -> list[str]:
    """Problems with tasks of EleutherAI's harness."""
    if not (tasks := tuple(one.lm_eval for one in sets if one.lm_eval is not None)):
        return []
    from mini_trainer.use.evaluation.harness import check_harness  # with torch: seconds to import

    try:
        check_harness(tasks)
    except ValueError as error:
        return [str(error).replace("--lm-eval ", "lm_eval: ", 1)]
    return []


def find_data_problems(settings: ContinualSettings, task: Task, prepared: Prepared, held_out: HeldOut) -> list[str]:
    """Problems with a task's rows, as replay reads them."""
    replay, data = settings.replay, prepared[task.name].train
    if replay is None:
        return []
    if replay.kind == "rows" and not task.input_file and held_out.count_rows(data):
        advice = f", or give input_file for task {task.name}, whose rows can be left out"
        return [describe_held_out(held_out.count_rows(data), data) + advice]
    try:
        for _ in read_questions(task, settings) if replay.kind == "own-answers" else ():
            pass
    except ValueError as error:
        return [str(error)]
    return []


def find_train_problems(settings: ContinualSettings, task: Task, prepared: Prepared, known: Path | None) -> list[str]:
    """Problems that train finds before it loads weights: data, tokenizer, model, layers, memory options."""
    from mini_trainer.run.plan.memory import Findings  # with torch: seconds to import
    from mini_trainer.run.plan.planner import choose_step_options, find_target, look_at_run

    findings = Findings()
    options = group_options(TrainOptions, **choose_options(settings, task, prepared, known))
    target = find_target(None, choose_step_options(options), settings.num_processes, findings, is_here=False)
    look_at_run(options, target, findings)
    return [f"train: {problem}" for problem in findings.problems]


def choose_options(settings: ContinualSettings, task: Task, prepared: Prepared, known: Path | None) -> Values:
    """The task's options of train with the start model and, where rows are replayed, all other tasks' data."""
    own, values = prepared[task.name], complete_options(settings, task)[0]
    others = [prepared[other.name].train for other in settings.tasks if other is not task]
    values |= {"model_name_or_path": settings.model, "output_dir": str(settings.root / UNSTARTED)}
    if own.validation is not None:
        values["validation_data_path"] = (str(own.validation),)
    if values.get("osft_basis") == "activations":  # of the task before it, whose statistics do not exist yet
        values.pop("osft_statistics")
        values.setdefault("osft_calibration_data", str(own.train))
    if values.get("osft_calibration_data") == SELF:  # not drawn yet
        values["osft_calibration_data"] = str(own.train)
    replay = settings.replay
    if (replay is not None and replay.keep) or not all(map(is_tokenized, values.get("keep", ()))):
        of_keep = {entry.name for entry in fields(KeepOptions)}
        values = {name: value for name, value in values.items() if name not in of_keep}
    replayed = others if replay is not None and replay.kind == "rows" else []
    return mix(values, own.train, [*filter(None, [known]), *replayed], replay)
