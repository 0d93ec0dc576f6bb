"""Trains a model with different options, and ranks them by their validation loss.

    python -m mini_trainer sweep sweep.yaml
    python -m mini_trainer sweep sweep.yaml --print-command
    python -m mini_trainer sweep sweep.yaml --task 3/8

Every trial is a run of train.py in a directory of its own, as many at a time as there are GPUs. Killed at any moment, a
sweep continues when the same command is started again, and finds the same (docs/reference/sweeps.md). Drawing trials
needs optuna.
"""

from pathlib import Path

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import SweepOptions

if __name__ == "__main__":
    options = parse_options(SweepOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.distributed.messages import say
from mini_trainer.options.problems.finding import require
from mini_trainer.run.preflight import check_runs
from mini_trainer.run.stages import ending_experiment
from mini_trainer.tools.sweep import search
from mini_trainer.tools.sweep.running import Pool, divide_devices, list_devices
from mini_trainer.tools.sweep.settings import check_trials, draw_trials, list_files, read_settings


def sweep(options: SweepOptions) -> None:
    """Runs or continues the sweep, or prints its commands."""
    settings = read_settings(Path(options.config_file), output_dir=options.output_dir)
    if settings.search == "random":
        require("optuna", flag="search: random")
    drawn = draw_trials(settings)
    check_trials(settings, drawn)
    more_is_better = search.find_direction(settings.metric)
    if options.print_command:
        return say("\n".join(search.describe_command(settings, number, values) for number, values in enumerate(drawn)))
    list_files(settings, drawn)
    if not (settings.root / search.RECORD).exists():  # else some trials have written theirs
        check_runs(settings.root, [(settings.options_of(drawn[0]), len(drawn))], flag="output_dir: ")
    environments = divide_devices(settings, list_devices())
    task = search.choose_task(options.task)
    is_first = not (settings.root / search.TASKS).exists()
    folder = settings.root if task is None else task.name_folder(settings.root)
    pool = Pool(folder, environments, num_processes=settings.num_processes)
    num_trials = sum(task is None or task.has(number) for number in range(len(drawn)))
    parallel = min(num_trials, len(environments))
    say(f"sweep: {settings.search}, {num_trials} trials, {parallel} at a time, in {settings.root}")
    if task is None:
        search.run_sweep(settings, drawn, pool, more_is_better=more_is_better)
    else:
        search.run_task(settings, drawn, pool, task, is_first=is_first)


if __name__ == "__main__":
    with ending_experiment():
        sweep(options)
