"""All problems with options that can be found without reading files."""

from typing import Any

from mini_trainer.options import (
    BoardOptions,
    ContinualOptions,
    EvaluateOptions,
    GenerateOptions,
    ImportConfigOptions,
    MergeModelsOptions,
    PlotOptions,
    ProcessDataOptions,
    ScoreDataOptions,
    TrainOptions,
    flatten_options,
)
from mini_trainer.options.problems.learning import (
    find_objective_problems,
    find_optimization_problems,
    find_preference_problems,
    find_teacher_problems,
)
from mini_trainer.options.problems.methods import find_lora_problems, find_osft_problems, find_vision_problems
from mini_trainer.options.problems.packages import find_missing_packages
from mini_trainer.options.problems.reporting import (
    find_callback_problems,
    find_hub_problems,
    find_tracking_problems,
    find_upload_problems,
)
from mini_trainer.options.problems.rows import find_data_problems
from mini_trainer.options.problems.tools import (
    find_board_problems,
    find_continual_problems,
    find_evaluate_problems,
    find_generate_problems,
    find_import_problems,
    find_mixing_problems,
    find_plot_problems,
    find_score_problems,
)
from mini_trainer.options.problems.training import (
    find_compute_problems,
    find_ending_problems,
    find_numbers_out_of_range,
    find_training_data_problems,
    find_url_problems,
    find_validation_problems,
)


def find_problems(options: Any) -> list[str]:
    """Lists all problems with the options that can be found without reading files, one line each.

    Packages that are not installed are named once nothing else is wrong.
    """
    return find_wrong_options(options) or find_missing_packages(options)


def find_wrong_options(options: Any) -> list[str]:
    """The problems that are the same on every machine."""
    finders = {
        TrainOptions: find_train_problems,
        ProcessDataOptions: find_data_problems,
        PlotOptions: find_plot_problems,
        BoardOptions: find_board_problems,
        GenerateOptions: find_generate_problems,
        EvaluateOptions: find_evaluate_problems,
        MergeModelsOptions: find_mixing_problems,
        ScoreDataOptions: find_score_problems,
        ContinualOptions: find_continual_problems,
        ImportConfigOptions: find_import_problems,
    }
    return finders[type(options)](options) if type(options) in finders else []


def find_train_problems(options: TrainOptions) -> list[str]:
    """Values out of range, options without effect, and options that contradict each other."""
    return [
        *find_numbers_out_of_range(flatten_options(options)),
        *find_url_problems(options),
        *find_training_data_problems(options),
        *find_validation_problems(options),
        *find_objective_problems(options),
        *find_preference_problems(options),
        *find_teacher_problems(options),
        *find_optimization_problems(options),
        *find_compute_problems(options),
        *find_osft_problems(options.osft),
        *find_lora_problems(options),
        *find_vision_problems(options),
        *find_ending_problems(options),
        *find_tracking_problems(options.tracking),
        *find_callback_problems(options.callbacks),
        *find_hub_problems(options.hub),
        *find_upload_problems(options.exports),
    ]
