"""Facts about each objective that the options need before anything heavy is imported; its code is in objectives/."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ObjectiveFacts:
    """Rows and options of an objective."""

    row_format: str | None = None  # --format of its rows; None: any format of texts
    options: tuple[str, ...] = ()  # the options it uses, of those that not every objective has
    excluded: Mapping[str, str] = field(default_factory=dict)  # options it cannot be used with, and why
    validation_modules: tuple[str, ...] = ()  # which validations import


REFERENCE_OPTIONS = ("preference_beta", "reference_model", "reuse_reference_only")
NO_ROUTER_LOSS = dict.fromkeys(
    ("router_aux_loss", "router_loss_over"), "whose models have no such loss in transformers"
)
OF_SEQUENCES = {"context_parallel": "whose targets are of whole sequences"}
SAME_NOISE = {"neftune_alpha": "whose answers would get different noise"}
CLASSIFIER = ObjectiveFacts(
    "classification",
    ("class_weights", "label_smoothing", "write_predictions"),
    NO_ROUTER_LOSS | OF_SEQUENCES,
    validation_modules=("sklearn",),
)

# The values of --objective. A new one has a row here, and its code a line in objectives.specs.OBJECTIVE_SPECS.
OBJECTIVES: dict[str, ObjectiveFacts] = {
    "causal-lm": ObjectiveFacts(options=("label_smoothing", "loss_weighting", "teacher_weight")),
    "sequence-classification": CLASSIFIER,
    "token-classification": CLASSIFIER,
    "preference": ObjectiveFacts(
        "preference",
        (
            *("preference_loss", "preference_gamma", "preference_label_smoothing", "preference_nll_weight"),
            *REFERENCE_OPTIONS,
        ),
        SAME_NOISE,
    ),
    "kto": ObjectiveFacts("feedback", (*REFERENCE_OPTIONS, "desirable_weight", "undesirable_weight"), SAME_NOISE),
    "reward": ObjectiveFacts("preference", ("reward_centering",), NO_ROUTER_LOSS | OF_SEQUENCES | SAME_NOISE),
}
