"""Models that a run reads and does not train: its reference and its teacher."""

from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.model.config import ModelSource, check_rope, load_config
from mini_trainer.objectives.objective import SELF
from mini_trainer.options import TrainOptions
from mini_trainer.run.inputs import REFERENCE_MODEL, TEACHER_MODEL, RunInputs


def open_other_models(options: TrainOptions, inputs: RunInputs) -> None:
    """Finds the models that options name, and collects what is wrong with them."""
    names = {REFERENCE_MODEL: options.preference.reference_model, TEACHER_MODEL: options.teacher.teacher_model}
    for flag, name in names.items():
        if name not in (None, SELF):
            found = inputs.errors.attempt(lambda flag=flag, name=name: open_other_model(flag, name, options, inputs))
            inputs.other_models |= {} if found is None else {flag: found}
    if options.teacher.teacher_model is not None and inputs.data is not None:
        teacher = inputs.other_models.get(TEACHER_MODEL)
        config = inputs.config if teacher is None else teacher.config
        inputs.errors.attempt(lambda: check_rope(config, longest=inputs.longest_taught))


def open_other_model(flag: str, name: str, options: TrainOptions, inputs: RunInputs) -> ModelSource:
    """The model of this flag; ValueError if it cannot read the run's data."""
    trust = options.model.trust_remote_code
    model_dir = find_model(name, revision=None, trust_remote_code=trust, flag=flag)
    config = load_config(model_dir, inputs.family, trust_remote_code=trust)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust)
    if fingerprint_tokenizer(tokenizer) != fingerprint_tokenizer(inputs.tokenizer):
        raise ValueError(
            f"{flag} {name}: has another tokenizer than the data was made with: its probabilities would be of other"
            " texts"
        )
    return ModelSource(model_dir, config, trust, name=name)
