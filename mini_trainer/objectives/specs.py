"""Which objectives there are: the one place that names them all."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mini_trainer.data.columns.base import (
    CAUSAL_LM,
    FEEDBACK,
    PREFERENCE,
    SEQUENCES,
    TOKENS,
    VISION,
    CountLabels,
    DataTask,
)
from mini_trainer.objectives.class_scores import METRICS
from mini_trainer.objectives.classes import Classification, make_classification
from mini_trainer.objectives.embedding_noise import EmbeddingNoise
from mini_trainer.objectives.families.classifier import ClassifierFamily
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.vision import VisionLanguageFamily
from mini_trainer.objectives.kto import KTO, Feedback, make_kto
from mini_trainer.objectives.next_tokens import CausalLM, VisionLanguage
from mini_trainer.objectives.objective import Objective
from mini_trainer.objectives.preferences import Preferences, make_preferences
from mini_trainer.objectives.rewards import LABELS, REWARD, Rewards
from mini_trainer.objectives.teachers import TAUGHT, Taught, make_taught
from mini_trainer.options import ClassificationOptions, PreferenceOptions, TeacherOptions, VisionOptions
from mini_trainer.options.objectives import OBJECTIVES


@dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of objectives and families. The defaults measure a model as it is."""

    classification: ClassificationOptions = field(default_factory=ClassificationOptions)
    vision: VisionOptions = field(default_factory=VisionOptions)
    preference: PreferenceOptions = field(default_factory=PreferenceOptions)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)
    router_aux_loss: float | None = None
    router_loss_over: str = "sequence"
    noise: EmbeddingNoise | None = None
    head_seed: int | None = None  # of a classifier's head that the model's files do not have; None: they must have it


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective before its data is known."""

    make_family: Callable[[ObjectiveSettings], Family]
    make: Callable[[ObjectiveSettings, Family, DataTask, CountLabels], Objective]
    data: str | None = None  # the kind of data it learns from (data.columns.kinds); None: of its own name


def make_text_family(settings: ObjectiveSettings) -> TextFamily:
    return TextFamily(settings.router_aux_loss, settings.router_loss_over)


def make_vision_family(settings: ObjectiveSettings) -> VisionLanguageFamily:
    vision = settings.vision
    return VisionLanguageFamily(
        make_text_family(settings), tuple(vision.freeze), max_patches=vision.max_image_tokens_per_gpu
    )


def make_classifier(
    settings: ObjectiveSettings, family: ClassifierFamily, task: DataTask, count_labels: CountLabels
) -> Classification:
    return make_classification(settings.classification, family, task, count_labels, noise=settings.noise)


def make_preference(
    settings: ObjectiveSettings, family: Family, task: DataTask, count_labels: CountLabels
) -> Preferences:
    return make_preferences(settings.preference, family)


def make_feedback(settings: ObjectiveSettings, family: Family, task: DataTask, count_labels: CountLabels) -> Feedback:
    return make_kto(settings.preference, family)


def make_pupil(settings: ObjectiveSettings, family: Family, task: DataTask, count_labels: CountLabels) -> Taught:
    return make_taught(settings.teacher, family, settings.noise)


def make_rewards(
    settings: ObjectiveSettings, family: ClassifierFamily, task: DataTask, count_labels: CountLabels
) -> Rewards:
    return Rewards(family, centering=settings.preference.reward_centering)


def make_language_model(kind: type[CausalLM]) -> Callable[..., CausalLM]:
    def make(settings: ObjectiveSettings, family: Family, task: DataTask, count_labels: CountLabels) -> CausalLM:
        o = settings.classification
        return kind(family, settings.noise, label_smoothing=o.label_smoothing, weighting=o.loss_weighting)

    return make


# Those that are no value of --objective (options.objectives) follow from the data or other options.
OBJECTIVE_SPECS = {
    CAUSAL_LM: ObjectiveSpec(make_text_family, make_language_model(CausalLM)),
    VISION: ObjectiveSpec(make_vision_family, make_language_model(VisionLanguage)),
    TAUGHT: ObjectiveSpec(make_text_family, make_pupil, data=CAUSAL_LM),
    PREFERENCE: ObjectiveSpec(make_text_family, make_preference),
    KTO: ObjectiveSpec(make_text_family, make_feedback, data=FEEDBACK),
    REWARD: ObjectiveSpec(
        lambda s: ClassifierFamily(of_tokens=False, seed=s.head_seed, labels=LABELS), make_rewards, data=PREFERENCE
    ),
    SEQUENCES: ObjectiveSpec(lambda s: ClassifierFamily(of_tokens=False, seed=s.head_seed), make_classifier),
    TOKENS: ObjectiveSpec(lambda s: ClassifierFamily(of_tokens=True, seed=s.head_seed), make_classifier),
}


def list_metrics() -> dict[str, bool]:
    """The metrics that some objective's validations report, and whether more of each is better."""
    found = dict(Taught.metrics)
    for metrics in (Preferences.metrics, Feedback.metrics, Rewards.metrics, *METRICS.values()):
        found |= metrics
    return found


def find_data_kind(name: str) -> str:
    """The kind of data that the objective of this name learns from."""
    return OBJECTIVE_SPECS[name].data or name


def make_family(name: str, settings: ObjectiveSettings) -> Family:
    """The model family of the objective of this name."""
    return OBJECTIVE_SPECS[name].make_family(settings)


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
        options = [other for other in OBJECTIVE_SPECS if other in OBJECTIVES or other == task.objective]
        fitting = [f"--objective {other}" for other in options if task.objective == find_data_kind(other)]
        raise ValueError(
            f"--objective {name}: the data was tokenized for {task.objective}: give {' or '.join(fitting)}, or tokenize"
            " the data again"
        )
    return OBJECTIVE_SPECS[name].make(settings, family, task, count_labels)
