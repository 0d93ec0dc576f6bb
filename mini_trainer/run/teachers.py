"""Models that a run reads without training them: its reference and its teacher, which may be scores in files.

A teacher reads a row before the model that trains does. N trained tokens of a micro-batch, H hidden size, V vocabulary
size.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.stores.model_files import find_model, name_model
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.ending import log
from mini_trainer.model.config import ModelSource, check_rope, load_config
from mini_trainer.model.scoring.score_files import ScoreColumn, ScoreFile, locate_scores
from mini_trainer.objectives.families.family import MicroBatch, RowModel, check_positions
from mini_trainer.objectives.next_tokens import TrainedTokens
from mini_trainer.objectives.objective import Objective, PackedModel
from mini_trainer.objectives.soft_targets import SOFT_COLUMN
from mini_trainer.run.inputs import TEACHER_MODEL, RunInputs

Predict = Callable[[RowModel, MicroBatch], TrainedTokens]


class OtherModel:
    """A frozen model, sharded as the one that trains is."""

    def __init__(self, model: PackedModel):
        self.model = model

    def read(self, micro_batch: MicroBatch, predict: Predict) -> TrainedTokens:
        """The model's predictions; with a copy of its head, where the head itself will be freed."""

        def read(row_model: RowModel, micro_batch: MicroBatch) -> TrainedTokens:
            tokens = predict(row_model, micro_batch)
            if not self.model.frees_head:
                return tokens
            bias = None if tokens.bias is None else tokens.bias.clone()
            return replace(tokens, weight=tokens.weight.clone(), bias=bias)

        return self.model.predict(micro_batch, read)


def open_scores(inputs: RunInputs) -> Objective:
    """Adds the teacher's scores to the run's data; returns the objective for them. ValueError if a training set has
    none, or they do not fit. Validation sets are measured by them if all have some."""
    data, held_out, name = inputs.data, inputs.validation_data, inputs.objective.teacher_scores
    files = add_scores(data, name)
    if held_out is not None:
        without = [str(source.path) for source in held_out.sources if not locate_scores(source.path, name).exists()]
        if without:
            log.info(f"validation: no teacher's scores for {', '.join(without)}: only the cross-entropy is measured")
        else:
            files += add_scores(held_out, name)
    sidecars = [file.sidecar for file in files]
    objective = inputs.objective.with_scores(sidecars)
    inputs.teacher, inputs.scores = hash_json(sidecars), files
    return objective


def add_scores(data: Mixture, name: str) -> list[ScoreFile]:
    """Adds the scores to the data; returns the files."""
    files = [ScoreFile(source, name) for source in data.sources]
    data.add_column(SOFT_COLUMN, ScoreColumn(files))
    return files


def add_teacher(inputs: RunInputs, model: PackedModel, build: Callable[[ModelSource], PackedModel]) -> None:
    """Gives the model that reads rows its teacher, which `build` makes. All ranks call this."""
    source = inputs.other_models[TEACHER_MODEL]
    other = build(source).requires_grad_(False).eval()
    check_positions(other.model, longest=inputs.data.longest)
    model.row_model.teacher = OtherModel(other)
    num_parameters = sum(param.numel() for param in other.parameters())
    log.info(f"teacher: {name_model(source.name)}, {num_parameters:,} parameters, in {other.compute_dtype}")


def open_other_models(names: Mapping[str, str | None], inputs: RunInputs) -> dict[str, ModelSource]:
    """The models by the options that name them, without those that cannot be used."""
    found: dict[str, ModelSource] = {}
    for flag, name in names.items():
        if name is not None:
            opened = inputs.errors.attempt(lambda flag=flag, name=name: open_other_model(flag, name, inputs))
            found |= {} if opened is None else {flag: opened}
    if (teacher := found.get(TEACHER_MODEL)) is not None:
        inputs.errors.attempt(lambda: check_rope(teacher.config, longest=inputs.data.longest))
    return found


def open_other_model(flag: str, name: str, inputs: RunInputs) -> ModelSource:
    """The model of this flag; ValueError if it cannot read the run's data."""
    trust = inputs.options.model.trust_remote_code
    model_dir = find_model(name, revision=None, trust_remote_code=trust, flag=flag)
    config = load_config(model_dir, inputs.family, trust_remote_code=trust)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust)
    if fingerprint_tokenizer(tokenizer) != fingerprint_tokenizer(inputs.tokenizer):
        raise ValueError(
            f"{flag} {name}: its tokenizer differs from the one that the data was made with: its probabilities would"
            f" be of other texts"
        )
    return ModelSource(model_dir, config, trust, name=name)
