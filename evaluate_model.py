"""Measures models side by side: losses and classes on tokenized sets, answers to tasks, EleutherAI's harness.

    python evaluate_model.py Qwen/Qwen2.5-7B runs/qwen/hf_format/samples_* --task gsm8k_test.jsonl --output-dir compared
    python evaluate_model.py --model base tuned --data held_out.arrow --output-dir compared
    torchrun --nproc-per-node=8 evaluate_model.py --model base tuned --task questions.jsonl --output-dir compared

Writes results.json, each model's answers to each sample, and results.html, a page that shows them side by side.
Existing results are reused: a killed evaluation resumes, and adding a model computes only that model.
"""

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import EvaluateOptions

if __name__ == "__main__":
    options = parse_options(EvaluateOptions)  # before the heavy imports: --help and typos answer at once
    pause_collector()

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import check_output_dir
from mini_trainer.data.tokenized.fetched import download_data_sets
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.agreement import compare_ranks, describe_program
from mini_trainer.distributed.messages import say
from mini_trainer.distributed.world import World, call_on_each_node, call_with_world
from mini_trainer.options import flatten_options
from mini_trainer.options.problems.finding import require
from mini_trainer.use.evaluation.data_sets import check_set, collect_set, measure_sets, open_set, verify_files
from mini_trainer.use.evaluation.harness import HARNESS, check_harness, collect_harness, run_harness
from mini_trainer.use.evaluation.models import Named, list_models, name_files
from mini_trainer.use.evaluation.results import Measured, write_results
from mini_trainer.use.evaluation.tasks import EvaluationTask, collect_task, measure_task, open_task
from mini_trainer.use.inference.engine import open_engine
from mini_trainer.use.inference.loading import FoundModel, check_answering, find_answering_model


def evaluate(options: EvaluateOptions, world: World) -> None:
    """Measures all models, and writes the results; ValueError or OSError for user errors."""
    # Check inputs before any model is loaded.
    require("scipy", flag="evaluate_model.py")
    check_output_dir(Path(options.output_dir))
    may_differ = ("config", "output_dir", "data_cache_dir")
    compare_ranks(world, lambda: describe_program(flatten_options(options), world, may_differ=may_differ))
    if world.world_size > 1 and (options.engines.engine != "hf" or options.lm_eval):
        raise ValueError("--lm-eval, and engines other than hf, run in one process, but torchrun has started several")
    check_harness(options.lm_eval)
    options = replace(options, **download_data_sets({"data": options.data}, world, cache_dir=options.data_cache_dir))
    models = list_models(options.model)
    names = name_files([*options.task, *options.data])
    tasks = [open_task(path, names[path], options) for path in options.task]
    data_sets = {names[path]: open_set(path, cache_dir=options.data_cache_dir) for path in options.data}
    found = [find_model(model, options) for model in models]
    for one in found:
        if one is not None and (tasks or options.lm_eval):
            check_answering(one)
        for data in data_sets.values():
            check_set(data, one)
    if not options.skip_verification:
        call_on_each_node(world, lambda: verify_files(filter(None, found), data_sets.values()))
    # Measures one model after the other on all sets, then collects the results side by side.
    outcomes = []
    for model, own in zip(models, found, strict=True):
        if world.rank == 0:
            say(f"{model.label}: {model.name}")
        outcomes.append(measure(model, own, options, tasks, data_sets, world=world))
        gc.collect()  # frees the model before the next one is loaded
    if world.rank == 0:
        measured = [collect_task(task, [own[task.name] for own in outcomes]) for task in tasks]
        measured += [
            collect_set(name, data, found[0], [own[name] for own in outcomes]) for name, data in data_sets.items()
        ]
        measured += collect_harness([own.get(HARNESS) for own in outcomes])
        report(options, models, found, measured)


def find_model(model: Named, options: EvaluateOptions) -> FoundModel | None:
    """Finds the model's files; None for a server's model."""
    if options.engines.engine == "openai":
        return None
    revision = None if Path(model.name).is_dir() else options.model_revision
    return find_answering_model(model.name, revision=revision, trust_remote_code=options.trust_remote_code)


def measure(
    model: Named,
    found: FoundModel | None,
    options: EvaluateOptions,
    tasks: list[EvaluationTask],
    data_sets: dict[str, Mixture],
    *,
    world: World,
) -> dict[str, Any]:
    """One model's results on every set, by the set's name."""
    folder = Path(options.output_dir) / "samples" / model.label
    folder.mkdir(parents=True, exist_ok=True)
    engine = open_engine(found, model.name, options.engines, options.sampling, device=world.device)
    outcome = {task.name: measure_task(task, engine, options.sampling, folder, world=world) for task in tasks}
    del engine
    if data_sets:
        outcome |= measure_sets(
            found, data_sets, folder, dtype=options.engines.dtype, cap=options.max_tokens_per_gpu, world=world
        )
    if options.lm_eval:
        outcome[HARNESS] = run_harness(found, options, folder, device=world.device)
    return outcome


def report(
    options: EvaluateOptions, models: list[Named], found: list[FoundModel | None], measured: list[Measured]
) -> None:
    """Writes the results, and prints the comparison."""
    folder = Path(options.output_dir)
    identities = [
        {"label": model.label, "name": model.name} | ({} if own is None else own.identify())
        for model, own in zip(models, found, strict=True)
    ]
    verdicts = write_results(folder, measured, identities, num_resamples=options.num_resamples)
    say("\n".join(verdicts))
    say(f"results: {folder / 'results.json'}\nresults page: {(folder / 'results.html').absolute().as_uri()}")


if __name__ == "__main__":
    resume_collector()
    call_with_world(lambda world: evaluate(options, world))
