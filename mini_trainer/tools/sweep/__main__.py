"""Trains a model with different options, and ranks them by their validation loss.

    python -m mini_trainer sweep sweep.yaml
    python -m mini_trainer sweep sweep.yaml --output-dir runs/again
    python -m mini_trainer sweep sweep.yaml --print-command
    python -m mini_trainer sweep sweep.yaml --task 3/8

Every trial is a run of train.py in a directory of its own, as many at a time as there are GPUs. Killed at any moment, a
sweep continues when the same command is started again, and finds the same (docs/reference/sweeps.md). Needs the package
optuna.
"""

from pathlib import Path

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import SweepOptions

if __name__ == "__main__":
    options = parse_options(SweepOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.distributed.messages import say
from mini_trainer.run.stages import ending_experiment
from mini_trainer.tools.sweep.running import Pool, divide_devices, list_devices
from mini_trainer.tools.sweep.settings import SweepSettings, Values, check_trials, list_files, read_settings
from mini_trainer.tools.sweep.tasks import TASKS, choose_task


def sweep(options: SweepOptions) -> None:
    """Runs or continues the sweep, or prints its commands."""
    settings = read_settings(Path(options.config_file), output_dir=options.output_dir, allowed=options.allow_env)
    try:
        from mini_trainer.tools.sweep.results import describe_command
        from mini_trainer.tools.sweep.search import find_direction, run_sweep, run_task
        from mini_trainer.tools.sweep.study import draw_trials
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ValueError("sweeps need the package optuna, which is not installed: pip install optuna") from None
    drawn = draw_trials(settings)
    check_trials(settings, drawn)
    more_is_better = find_direction(settings.metric)
    if options.print_command:
        return say("\n".join(describe_command(settings, number, values) for number, values in enumerate(drawn)))
    list_files(settings, drawn)
    environments = divide_devices(settings, list_devices())
    task = choose_task(options.task, search=settings.search)
    if task is None:
        pool = Pool(settings.root, environments, num_processes=settings.num_processes)
        describe_start(settings, drawn, environments)
        return run_sweep(settings, drawn, pool, more_is_better=more_is_better)
    is_first = not (settings.root / TASKS).exists()
    pool = Pool(task.name_folder(settings.root), environments, num_processes=settings.num_processes)
    describe_start(settings, [one for number, one in enumerate(drawn) if task.has(number)], environments)
    run_task(settings, drawn, pool, task, is_first=is_first, more_is_better=more_is_better)


def describe_start(settings: SweepSettings, drawn: list[Values], environments: list[dict[str, str]]) -> None:
    """Prints the sweep's plan."""
    rungs = "" if settings.search != "halving" else f", compared after steps {', '.join(map(str, settings.rungs))}"
    num_parallel = min(len(drawn), len(environments))
    say(f"sweep: {settings.search}, {len(drawn)} trials{rungs}, {num_parallel} at a time, in {settings.root}")


if __name__ == "__main__":
    with ending_experiment():
        sweep(options)
