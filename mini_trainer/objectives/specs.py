"""The choice of a run's objective by its name (options/objectives.py), and of the model family that it learns with."""

from mini_trainer.data.columns.base import VISION, CountLabels, DataTask
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.objective import Objective, ObjectiveSettings
from mini_trainer.options.doors import open_door
from mini_trainer.options.objectives import ALL_OBJECTIVES, OBJECTIVES


def find_class(name: str) -> type[Objective]:
    """The class of the objective of this name."""
    return open_door(ALL_OBJECTIVES[name].place)


def list_metrics() -> dict[str, bool]:
    """The metrics that some objective's validations report, and whether more of each is better."""
    found: dict[str, bool] = {}
    for name in ALL_OBJECTIVES:
        found |= find_class(name).list_metrics()
    return found


def find_data_kind(name: str) -> str:
    """The kind of data that the objective of this name learns from."""
    return ALL_OBJECTIVES[name].data or name


def make_family(name: str, settings: ObjectiveSettings) -> Family:
    """The model family of the objective of this name."""
    return find_class(name).make_family(settings)


def make_objective(
    name: str, settings: ObjectiveSettings, family: Family, task: DataTask, count_labels: CountLabels | None = None
) -> Objective:
    """The objective on data for `task`; ValueError if the data is for another one.

    `count_labels`: of classifiers.
    """
    if task.objective == VISION and name != VISION:
        raise ValueError(
            f"--objective {name}: learns from texts alone, but the data has images (process_data.py --images): give"
            f" --objective causal-lm, or data that was tokenized for {find_data_kind(name)}"
        )
    if task.objective != find_data_kind(name):
        options = [other for other in ALL_OBJECTIVES if other in OBJECTIVES or other == task.objective]
        fitting = [f"--objective {other}" for other in options if task.objective == find_data_kind(other)]
        raise ValueError(
            f"--objective {name}: the data was tokenized for {task.objective}: give {' or '.join(fitting)}, or tokenize"
            " the data again"
        )
    return find_class(name).make(settings, family, task, count_labels)
