"""Trains a model on tasks one after the other, and measures after each one what it has learned and forgotten.

    python -m mini_trainer continual tasks.yaml
    python -m mini_trainer continual tasks.yaml --output-dir runs/again
    python -m mini_trainer continual --compare runs/full runs/osft --output comparison.html

Only starts this project's programs, with option files that it writes and that can be started by hand. Killed at any
moment, it continues when the same command is started again; tasks can be added at the end (docs/tasks/continual.md).
"""

from pathlib import Path

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ContinualOptions

if __name__ == "__main__":
    options = parse_options(ContinualOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.continual.experiment import find_root, run_experiments
from mini_trainer.continual.matrix import read_experiment
from mini_trainer.continual.page import describe_comparison, write_page
from mini_trainer.continual.settings import read_settings
from mini_trainer.data.stores.disk import check_output, make_parent
from mini_trainer.distributed.messages import say
from mini_trainer.distributed.process import find_task
from mini_trainer.run.stages import Runner, ending_experiment


def continual(options: ContinualOptions) -> None:
    """Runs an experiment, or compares several."""
    if not options.compare:
        if (task := find_task()) is not None:
            raise ValueError(
                f"srun or torchrun has started {task[1]} processes, but an experiment is one, which starts its programs"
                " one after the other: srun --ntasks=1, and num_processes in the file for the GPUs of this machine"
            )
        several = read_settings(Path(options.paths[0]), output_dir=options.output_dir)
        return run_experiments(several, Runner(find_root(several), num_processes=several[0].num_processes))
    if options.output is not None:
        check_output(Path(options.output))
    experiments = [read_experiment(Path(path)) for path in options.paths]
    say(describe_comparison(experiments))
    if options.output is not None:
        make_parent(Path(options.output))
        write_page(Path(options.output), experiments)
        say(f"comparison: {Path(options.output).absolute().as_uri()}")


if __name__ == "__main__":
    with ending_experiment():
        continual(options)
