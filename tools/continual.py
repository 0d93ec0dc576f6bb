"""Trains a model on tasks one after the other, and measures after each one what it has learnt and forgotten.

    python tools/continual.py tasks.yaml
    python tools/continual.py tasks.yaml --output-dir runs/again
    python tools/continual.py --compare runs/full runs/osft --output comparison.html

Only starts this project's programs, with option files that it writes and that can be started by hand. Killed at any
moment, it continues when the same command is started again; tasks can be added at the end (docs/continual.md).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # imports are relative to the root

from command_line import parse_options
from options import ContinualOptions

if __name__ == "__main__":
    options = parse_options(ContinualOptions)  # before the slow imports: --help and typos answer at once

from continual.compare import describe_comparison
from continual.experiment import find_root, run_experiments
from continual.matrix import read_experiment
from continual.page import write_page
from continual.running import Runner
from continual.settings import read_settings
from disk import check_output
from lifecycle.stages import ending_experiment
from ranks.messages import say


def continual(options: ContinualOptions) -> None:
    """Runs an experiment, or compares several."""
    if not options.compare:
        several = read_settings(Path(options.paths[0]), output_dir=options.output_dir, allowed=options.allow_env)
        return run_experiments(several, Runner(find_root(several), num_processes=several[0].num_processes))
    if options.output is not None:
        check_output(Path(options.output))
    directories = [Path(path) for path in options.paths]
    experiments = [read_experiment(directory) for directory in directories]
    say(describe_comparison(experiments))
    if options.output is not None:
        write_page(Path(options.output), experiments, directories)
        say(f"comparison: {Path(options.output).absolute().as_uri()}")


if __name__ == "__main__":
    with ending_experiment():
        continual(options)
