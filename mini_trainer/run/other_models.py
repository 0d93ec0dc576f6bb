"""Models that a run reads without training them: its reference and its teacher."""

from collections.abc import Mapping

from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.model.config import ModelSource, check_rope, load_config
from mini_trainer.objectives.objective import SELF
from mini_trainer.run.inputs import TEACHER_MODEL, Errors, OpenedData, OpenedModel


def open_other_models(
    names: Mapping[str, str | None], data: OpenedData, model: OpenedModel, errors: Errors
) -> dict[str, ModelSource]:
    """The models by the options that name them, without those that cannot be used."""
    found: dict[str, ModelSource] = {}
    for flag, name in names.items():
        if name not in (None, SELF):
            opened = errors.attempt(lambda flag=flag, name=name: open_other_model(flag, name, model))
            found |= {} if opened is None else {flag: opened}
    if names[TEACHER_MODEL] is not None and data.training is not None:
        teacher = found.get(TEACHER_MODEL)
        config = model.config if teacher is None else teacher.config
        errors.attempt(lambda: check_rope(config, longest=data.longest_taught))
    return found


def open_other_model(flag: str, name: str, model: OpenedModel) -> ModelSource:
    """The model of this flag; ValueError if it cannot read the run's data."""
    trust = model.trust_remote_code
    model_dir = find_model(name, revision=None, trust_remote_code=trust, flag=flag)
    config = load_config(model_dir, model.family, trust_remote_code=trust)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust)
    if fingerprint_tokenizer(tokenizer) != fingerprint_tokenizer(model.tokenizer):
        raise ValueError(
            f"{flag} {name}: its tokenizer differs from the one that the data was made with: its probabilities would"
            f" be of other texts"
        )
    return ModelSource(model_dir, config, trust, name=name)
