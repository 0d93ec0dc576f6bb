"""The objectives: their modules, and the facts that options need before anything heavy is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ObjectiveFacts:
    """An objective's class, data and options."""

    place: str  # of its class: "module:name"
    data: str | None = None  # the kind of data it learns from (data.columns.base); None: of its own name
    row_format: str | None = None  # --format of its rows; None: any format of texts
    options: tuple[str, ...] = ()  # the options it uses, of those that not every objective has
    excluded: Mapping[str, str] = field(default_factory=dict)  # options it cannot be used with, and why
    validation_modules: tuple[str, ...] = ()  # which validations import


REFERENCE_OPTIONS = ("preference_beta", "reference_model")
NO_ROUTER = dict.fromkeys(("router_aux_loss", "router_loss_over"), "whose models have no such loss in transformers")
OF_SEQUENCES = {"context_parallel": "whose targets are of whole sequences"}
NO_TEXT = {"sample_prompts": "whose models write no text"}
CLASSIFIER = ObjectiveFacts(
    "mini_trainer.objectives.classes:Classification",
    row_format="classification",
    options=("class_weights", "label_smoothing"),
    excluded=NO_ROUTER | OF_SEQUENCES | NO_TEXT,
    validation_modules=("sklearn",),
)

# The values of --objective. A new one is a row here, and its class.
OBJECTIVES: dict[str, ObjectiveFacts] = {
    "causal-lm": ObjectiveFacts(
        "mini_trainer.objectives.next_tokens:CausalLM",
        options=("label_smoothing", "loss_weighting", "teacher_weight", "keep"),
    ),
    "sequence-classification": CLASSIFIER,
    "token-classification": replace(CLASSIFIER, place="mini_trainer.objectives.classes:TokenClassification"),
    "preference": ObjectiveFacts(
        "mini_trainer.objectives.preferences:Preferences",
        row_format="preference",
        options=(
            *("preference_loss", "preference_gamma", "preference_nll_weight", "label_smoothing"),
            *REFERENCE_OPTIONS,
        ),
    ),
    "kto": ObjectiveFacts(
        "mini_trainer.objectives.kto:Feedback",
        data="feedback",
        row_format="feedback",
        options=(*REFERENCE_OPTIONS, "kto_weight_ratio"),
    ),
    "reward": ObjectiveFacts(
        "mini_trainer.objectives.rewards:Rewards",
        data="preference",
        row_format="preference",
        options=("reward_centering",),
        excluded=NO_ROUTER | OF_SEQUENCES | NO_TEXT,
    ),
}

# Objectives that follow from the data, or from other options.
TAUGHT, KEEPING = "taught", "keeping"
ALL_OBJECTIVES = OBJECTIVES | {
    "vision-language": ObjectiveFacts("mini_trainer.objectives.next_tokens:VisionLanguage"),
    TAUGHT: ObjectiveFacts("mini_trainer.objectives.teachers:Taught", data="causal-lm"),
    KEEPING: ObjectiveFacts("mini_trainer.objectives.keeping:Keeping", data="causal-lm"),
}
