"""All problems with options that can be found without reading files."""

from typing import Any

from mini_trainer.options.doors import Doors
from mini_trainer.options.problems.facts import find_single_problems

# Functions that find problems across options, by the class of the options.
TOGETHER = Doors(
    {
        "TrainOptions": "mini_trainer.options.problems.training:find_train_problems",
        "ProcessDataOptions": "mini_trainer.options.problems.rows:find_data_problems",
        "PlotOptions": "mini_trainer.options.problems.tools:find_plot_problems",
        "BoardOptions": "mini_trainer.options.problems.tools:find_board_problems",
        "GenerateOptions": "mini_trainer.options.problems.tools:find_generate_problems",
        "EvaluateOptions": "mini_trainer.options.problems.tools:find_evaluate_problems",
        "ScoreDataOptions": "mini_trainer.options.problems.tools:find_score_problems",
        "ContinualOptions": "mini_trainer.options.problems.tools:find_continual_problems",
    }
)


def find_problems(options: Any) -> list[str]:
    """Lists all problems with the options that can be found without reading files, one line each.

    Packages that are not installed are named once nothing else is wrong.
    """
    problems = find_wrong_options(options)
    if problems:
        return problems
    from mini_trainer.options.problems.packages import find_missing_packages

    return find_missing_packages(options)


def find_wrong_options(options: Any) -> list[str]:
    """The problems that are the same on every machine."""
    name = type(options).__name__
    return [*find_single_problems(options), *(TOGETHER[name](options) if name in TOGETHER else [])]
