"""Models that a run reads without training them: its reference and its teacher, which may be scores in files.

A teacher reads a row before the model that trains does: another model, or the model as its run started. N trained
tokens of a micro-batch, H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.stores.model_files import find_model, name_model
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture, pair
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import log
from mini_trainer.model.config import ModelSource, check_rope, load_config
from mini_trainer.model.fingerprints import fingerprint_data, fingerprint_model
from mini_trainer.model.scoring.score_files import NoScores, ScoreColumn, ScoreFile, locate_scores
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.family import MicroBatch, RowModel, check_positions
from mini_trainer.objectives.next_tokens import TrainedTokens
from mini_trainer.objectives.objective import SELF, Objective, PackedModel, TeacherModel
from mini_trainer.objectives.soft_targets import SOFT_COLUMN
from mini_trainer.objectives.teachers import SEEN_COLUMN
from mini_trainer.run.inputs import TEACHER_MODEL, RunInputs
from mini_trainer.run.start_checks import check_task

Predict = Callable[[RowModel, MicroBatch], TrainedTokens]


class OtherModel:
    """A frozen model, sharded as the one that trains is."""

    def __init__(self, model: PackedModel):
        self.model = model

    def read(self, micro_batch: MicroBatch, predict: Predict) -> TrainedTokens:
        return read_by(self.model, micro_batch, predict, copies_head=self.model.frees_head)


class StartWeights:
    """The model that trains, with the weights that it had when this was made. Holds a copy of each shard that trains,
    and exchanges it for the current one while the model reads: all of a model that trains as a whole, an adapter's few
    parameters."""

    def __init__(self, model: PackedModel):
        self.model = model
        # This rank's shards, which share the parameters' memory.
        self.trained = [param.detach().to_local() for param in model.parameters() if param.requires_grad]
        self.start = [shard.clone() for shard in self.trained]
        self.trains_head = any(param.requires_grad for param in model.model.get_output_embeddings().parameters())

    @property
    def num_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.start)

    @torch.no_grad()
    def read(self, micro_batch: MicroBatch, predict: Predict) -> TrainedTokens:
        """Without dropout or noise. A head that trains is copied, as the current one takes its place again."""
        model, was_training = self.model, self.model.training
        model.eval()
        self.exchange()
        tokens = read_by(model, micro_batch, predict, copies_head=self.trains_head or model.frees_head)
        self.exchange()
        model.train(was_training)
        return tokens

    def exchange(self) -> None:
        """Puts the start's shards in the current ones' place, and the other way round."""
        reshard(self.model)  # gathered weights are rebuilt from the shards
        for own, start in zip(self.trained, self.start, strict=True):
            held = own.clone()
            own.copy_(start)
            start.copy_(held)


def read_by(model: PackedModel, micro_batch: MicroBatch, predict: Predict, *, copies_head: bool) -> TrainedTokens:
    """The model's predictions; with a copy of its head, where the head itself will be freed or changed."""

    def read(row_model: RowModel, micro_batch: MicroBatch) -> TrainedTokens:
        tokens = predict(row_model, micro_batch)
        if not copies_head:
            return tokens
        bias = None if tokens.bias is None else tokens.bias.clone()
        return replace(tokens, weight=tokens.weight.clone(), bias=bias)

    return model.predict(micro_batch, read)


def open_teacher_data(data: Mixture, paths: Sequence[str], *, cache_dir: str) -> Mixture:
    """Opens the data sets that a teacher reads beside the run's; ValueError if their rows do not fit."""
    seen = Mixture([TokenizedData(path, option="--teacher-data", cache_dir=cache_dir) for path in paths])
    check_task(data, seen, option="--teacher-data")
    pair(data, seen, column=SEEN_COLUMN)
    return seen


def open_scores(inputs: RunInputs) -> Objective:
    """Adds the teacher's scores to the run's data, if the objective learns from them; returns the objective for them.
    ValueError if a training set that needs them has none, or they do not fit. Validation sets are measured by them if
    all have some."""
    data, held_out, scores = inputs.data, inputs.validation_data, inputs.objective.teacher
    if isinstance(scores, TeacherModel):
        inputs.teacher = SELF if scores.name == SELF else None
        return inputs.objective
    name, taught = scores.name, [source for i, source in enumerate(data.sources) if scores.needs(i)]
    files = add_scores(data, name, taught)
    if held_out is not None:
        without = [str(source.path) for source in held_out.sources if not locate_scores(source.path, name).exists()]
        if without:
            log.info(f"validation: no teacher's scores for {', '.join(without)}: only the cross-entropy is measured")
        else:
            files += add_scores(held_out, name, held_out.sources)
    sidecars = [file.sidecar for file in files]
    objective = scores.complete(sidecars)
    inputs.teacher, inputs.scores = hash_json(sidecars), files
    return objective


def add_scores(data: Mixture, name: str, taught: Sequence[TokenizedData]) -> list[ScoreFile]:
    """Adds the scores to the data; returns the files of the `taught` sets, the only ones that are read.
    ValueError for token ids beyond the model's vocabulary, from the padding rows of a server's head."""
    files = {source: ScoreFile(source, name) for source in taught}
    for file in files.values():
        if file.sidecar["max_token_id"] >= data.vocab_size:
            raise ValueError(
                f"{file.path}: names token id {file.sidecar['max_token_id']}, beyond the model's vocabulary of"
                f" {data.vocab_size}: score the data with --engine hf, which leaves out ids that are not the"
                f" tokenizer's"
            )
    top_k = files[taught[0]].sidecar["top_k"]
    data.add_column(SOFT_COLUMN, ScoreColumn([files.get(source) or NoScores(source, top_k) for source in data.sources]))
    return list(files.values())


def add_teacher(inputs: RunInputs, model: PackedModel, build: Callable[[ModelSource], PackedModel]) -> None:
    """Gives the model that reads rows its teacher, a `TeacherModel`. All ranks call this.
    `model`: the model at the start of the run, before a checkpoint is restored; `build` makes another one."""
    if inputs.objective.teacher.name == SELF:
        check_positions(model.model, longest=inputs.longest_taught)
        model.row_model.teacher = teacher = StartWeights(model)
        log.info(f"teacher: the model as it is at the start, {teacher.num_bytes / 1e9:.2f} GB of copies on each rank")
    else:
        source = inputs.other_models[TEACHER_MODEL]
        other = build(source).requires_grad_(False).eval()
        check_positions(other.model, longest=inputs.longest_taught)
        model.row_model.teacher = OtherModel(other)
        num_parameters = sum(param.numel() for param in other.parameters())
        log.info(f"teacher: {name_model(source.name)}, {num_parameters:,} parameters, in {other.compute_dtype}")


def identify_teacher(inputs: RunInputs) -> str | None:
    """A hash of the teacher's scores, or of its weights and what it reads."""
    other = inputs.other_models.get(TEACHER_MODEL)
    teacher = inputs.teacher if other is None else fingerprint_model(other.directory)
    if inputs.teacher_data is None:
        return teacher
    return hash_json([teacher, *map(fingerprint_data, inputs.teacher_data.sources)])


def open_other_models(names: Mapping[str, str | None], inputs: RunInputs) -> dict[str, ModelSource]:
    """The models by the options that name them, without those that cannot be used."""
    found: dict[str, ModelSource] = {}
    for flag, name in names.items():
        if name not in (None, SELF):
            opened = inputs.errors.attempt(lambda flag=flag, name=name: open_other_model(flag, name, inputs))
            found |= {} if opened is None else {flag: opened}
    if names[TEACHER_MODEL] is not None:
        teacher = found.get(TEACHER_MODEL, inputs)
        inputs.errors.attempt(lambda: check_rope(teacher.config, longest=inputs.longest_taught))
    return found


def open_other_model(flag: str, name: str, inputs: RunInputs) -> ModelSource:
    """The model of this flag; ValueError if it cannot read the run's data."""
    trust = inputs.model_options.trust_remote_code
    model_dir = find_model(name, revision=None, trust_remote_code=trust, flag=flag)
    config = load_config(model_dir, inputs.family, trust_remote_code=trust)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust)
    if fingerprint_tokenizer(tokenizer) != fingerprint_tokenizer(inputs.tokenizer):
        raise ValueError(
            f"{flag} {name}: its tokenizer differs from the one that the data was made with: its probabilities would"
            f" be of other texts"
        )
    return ModelSource(model_dir, config, trust, name=name)
