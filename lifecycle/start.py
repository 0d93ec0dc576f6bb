"""The start of a run and of its plan: which objective and method, the files they read, all that is refused early.

Takes the options as they are, as the scripts do.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from corpus.mixture import Mixture
from corpus.reader import TokenizedData
from families.family import Family
from families.packed_row import check_positions
from families.text_tower import text_config
from lifecycle.choosing import IMPLEMENTED, choose_method, choose_objective, choose_settings
from lifecycle.record import identify_run
from methods.full import Full
from model.attention import list_heads
from model.build import build_model, choose_compute_dtype
from model.check import check_model
from model.config import ModelSource, check_rope, choose_tokenizer, load_config, load_generation_config
from model.context_parallel import describe_heads
from model.files import find_model
from model.flops import FlopCount, count_flops
from model.method import Method
from model.offloading import check_offloading
from objectives.choice import make_family, make_objective
from objectives.columns import Task
from objectives.data_kinds import COLUMNS, describe_task
from objectives.objective import Objective
from objectives.packed_model import PackedModel
from options import DataOptions, ModelOptions, TrainOptions, ValidationOptions, parse_subset
from options.choices import check_choices
from ranks.devices import DTYPES
from ranks.ending import log
from ranks.memory import give_back_freed_memory
from ranks.world import World
from sampler import RunPosition, count_steps

Result = TypeVar("Result")


class Errors(list[ValueError | OSError]):
    """What is wrong with a run, as far as it can be seen."""

    def attempt(self, function: Callable[[], Result]) -> Result | None:
        """The function's result, or None and one error more."""
        try:
            return function()
        except (ValueError, OSError) as error:
            self.append(error)
            return None

    def raise_all(self) -> None:
        """Raises the one error there is, or a ValueError that names them all."""
        if len(self) == 1:
            raise self[0]
        if self:
            listed = "".join(f"\n  - {error}" for error in self)
            raise ValueError(f"{len(self)} problems:{listed}")


@dataclass
class RunInputs:
    """What a run reads before anything large is loaded; None in the place of what cannot be read.

    Invariant: whatever is None, or does not fit, is told by `errors`. A run goes on only if there are none.
    """

    family: Family  # complete once there is a tokenizer
    method: Method
    data_options: DataOptions  # with a number for max_tokens_per_gpu: the longest sample's, where it is auto
    compute_dtype: torch.dtype
    data: Mixture | None = None
    sidecars: list[dict[str, Any] | None] = field(default_factory=list)  # of each data set, if it has one
    validation_data: Mixture | None = None  # None, too, where none is asked for
    model_dir: str | None = None
    config: PreTrainedConfig | None = None
    generation_config: GenerationConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    objective: Objective | None = None
    num_steps: int | None = None  # None: no end
    errors: Errors = field(default_factory=Errors)
    warnings: list[str] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that is trained or measured on."""
        return max(data.longest for data in (self.data, self.validation_data) if data is not None)

    def source(self, options: ModelOptions) -> ModelSource:
        return ModelSource(self.model_dir, self.config, options.trust_remote_code, name=options.model_name_or_path)

    def identify(self, options: TrainOptions) -> dict[str, Any]:
        """What decides the numbers of the run (see lifecycle.record)."""
        return identify_run(
            options,
            model_dir=self.model_dir,
            data=self.data,
            data_sources=[sidecar and sidecar.get("source") for sidecar in self.sidecars],
            tokenizer=self.tokenizer,
            method_data=self.method.list_data_hashes(),
            compute_dtype=self.compute_dtype,
            num_steps=self.num_steps if options.optimization.needs_end else None,
        )


def open_inputs(options: TrainOptions, *, device: torch.device, world_size: int, start: RunPosition) -> RunInputs:
    """Opens data, tokenizer, the model's config and the method's files, and collects all that does not fit together."""
    check_choices(options, IMPLEMENTED)
    name, settings = choose_objective(options), choose_settings(options)
    family, method = make_family(name, settings), choose_method(options)
    inputs = RunInputs(family, method, options.data, choose_compute_dtype(options.compute, device))
    if options.compute.offload_activations:
        inputs.errors.attempt(lambda: check_offloading(device))
    num_sharing = options.sharding.context_parallel or 1
    num_dropped = open_data(inputs, options, num_sharing=num_sharing)
    open_validation_data(inputs, options)
    objective = None
    if inputs.data is not None:
        objective = inputs.errors.attempt(
            lambda: make_objective(name, settings, family, inputs.data.task, inputs.data.count_labels)
        )
        inputs.errors.attempt(lambda: check_validation(inputs, objective, options.validation))
        inputs.family = family if objective is None else objective.family
    elif not COLUMNS[name].has_labels:  # a plan without data, which alone names the labels
        objective = make_objective(name, settings, family, Task(name))
    open_model_config(inputs, options)
    if inputs.config is not None and inputs.data is not None:
        inputs.errors.attempt(lambda: check_rope(inputs.config, longest=inputs.longest))
        for data in filter(None, (inputs.data, inputs.validation_data)):
            inputs.errors.attempt(lambda data=data: check_placeholders(inputs, data))
        open_tokenizer(inputs, options)
    if inputs.tokenizer is not None and inputs.data.has_images:
        num_dropped = (num_dropped or 0) + (inputs.errors.attempt(lambda: count_images(inputs, options)) or 0)
    if inputs.tokenizer is not None:
        inputs.errors.attempt(lambda: inputs.method.open_files(inputs.tokenizer, inputs.data_options))
    inputs.objective = objective and replace(objective, family=inputs.family)
    if inputs.data is not None:
        inputs.errors.attempt(lambda: inputs.data.check_trained("--data-path"))
        inputs.num_steps = count_steps(inputs.data, options.data, options.end, start=start)
        describe_data(inputs, num_dropped=num_dropped or 0, start=start)
    find_oddities(inputs, options, num_rows=world_size // num_sharing)
    return inputs


def open_data(inputs: RunInputs, options: TrainOptions, *, num_sharing: int) -> int | None:
    """The data sets and their sidecars; returns how many samples are too long."""
    o, cap = options.data, options.data.max_tokens_per_gpu
    inputs.data = data = inputs.errors.attempt(
        lambda: Mixture([TokenizedData(path) for path in o.data_path], weights=o.data_weights, by=o.data_weights_by)
    )
    if data is None:
        return None
    if cap == "auto":  # until the model is there to choose it
        cap = -(-int(data.lengths.max()) // num_sharing)
    inputs.data_options = replace(o, max_tokens_per_gpu=cap)
    num_dropped = inputs.errors.attempt(
        lambda: data.fit_to(cap, num_sharing=num_sharing, drop_overlong=o.drop_overlong)
    )
    if o.subset is not None and num_dropped is not None:
        data.take_subset(parse_subset(o.subset), seed=o.seed)
    inputs.sidecars = [source.sidecar for source in data.sources]
    return num_dropped


def open_validation_data(inputs: RunInputs, options: TrainOptions) -> None:
    """The sets of --validation-data-path, and where it is asked for the training data; each must have something to
    predict."""
    o, paths = options.data, options.validation.validation_data_path
    if options.validation.validate_training_data:
        paths = tuple(dict.fromkeys((*paths, *o.data_path)))

    def open_sets() -> Mixture:
        data = Mixture([TokenizedData(path, option="--validation-data-path") for path in paths])
        if o.subset is not None:
            data.take_subset(parse_subset(o.subset), seed=o.seed)
        data.check_trained("--validation-data-path")
        return data

    if paths:
        inputs.validation_data = inputs.errors.attempt(open_sets)


def check_validation(inputs: RunInputs, objective: Objective | None, options: ValidationOptions) -> None:
    """ValueError for validation data that is for something else than the data, and for what it cannot measure."""
    data, validation_data = inputs.data, inputs.validation_data
    if validation_data is not None and validation_data.task != data.task:
        raise ValueError(
            f"--validation-data-path is for {describe_task(validation_data.task)}, --data-path for"
            f" {describe_task(data.task)}:"
            " tokenize the one again with --labels-from the other"
        )
    if objective is not None and options.best_metric not in objective.metrics:
        raise ValueError(
            f"--best-metric {options.best_metric}: validations of this objective and data have"
            f" {', '.join(objective.metrics)}"
        )


def open_model_config(inputs: RunInputs, options: TrainOptions) -> None:
    name, revision, trust = (
        options.model.model_name_or_path,
        options.model.model_revision,
        options.model.trust_remote_code,
    )
    inputs.model_dir = inputs.errors.attempt(lambda: find_model(name, revision=revision, trust_remote_code=trust))
    if inputs.model_dir is not None:
        inputs.config = inputs.errors.attempt(
            lambda: load_config(inputs.model_dir, inputs.family, trust_remote_code=trust)
        )
    if inputs.config is not None:
        inputs.generation_config = load_generation_config(inputs.model_dir, inputs.config)


def check_placeholders(inputs: RunInputs, data: Mixture) -> None:
    """ValueError for data with a token that a multi-modal model puts an image, a video or a sound in place of."""
    config, placeholders = inputs.config, inputs.family.list_foreign(inputs.config)
    found = data.find_tokens(list(placeholders)) if placeholders else None
    if found is not None:
        row, token_id = found
        path, number = data.locate(row)
        raise ValueError(
            f"{path}: row {number} holds the token id {token_id}, which stands for something that is no text"
            f" ({placeholders[token_id]} in config.json of model type {config.model_type!r}). Only text trains here:"
            " leave out rows with images, videos or sounds, and take their placeholders out of the texts"
        )


def open_tokenizer(inputs: RunInputs, options: TrainOptions) -> None:
    """The tokenizer that made the data; the config learns how many embeddings it needs, and what ends a turn."""
    config, text, validation_data = inputs.config, text_config(inputs.config), inputs.validation_data
    known = {source.path: sidecar for source, sidecar in zip(inputs.data.sources, inputs.sidecars, strict=True)}
    if validation_data is not None:
        known |= {source.path: source.sidecar for source in validation_data.sources}
    found = inputs.errors.attempt(
        lambda: choose_tokenizer(
            inputs.model_dir,
            known,
            vocab_size=text.vocab_size,
            vocabulary_multiple=inputs.method.vocabulary_multiple,
            trust_remote_code=options.model.trust_remote_code,
        )
    )
    inputs.tokenizer, vocab_size = found or (None, text.vocab_size)
    for part in (text, *([config] if hasattr(config, "vocab_size") else [])):
        part.vocab_size = vocab_size
    if inputs.tokenizer is not None:
        trust = options.model.trust_remote_code
        inputs.family = inputs.family.complete(config, inputs.tokenizer, trust_remote_code=trust)
    for data in (inputs.data, validation_data):
        if data is not None:
            data.vocab_size = vocab_size
    for sidecar in filter(None, reversed(inputs.sidecars)):  # the first one's is the first in the end
        if inputs.tokenizer is not None and sidecar.get("stop_token_id") is not None:
            replaces = sidecar.get("tokenizer_dir") is not None  # the data's chat template is not the model's
            end_turns_with(sidecar["stop_token_id"], inputs, replaces=replaces)


def count_images(inputs: RunInputs, options: TrainOptions) -> int:
    """Learns what the data's images are to the tower; returns how many samples have too many."""
    cap, data, validation_data = options.vision.max_image_tokens_per_gpu, inputs.data, inputs.validation_data
    count_patches = functools.cache(inputs.family.eyes.count_patches)
    num_dropped = data.count_images(count_patches, cap=cap, drop_overlong=options.data.drop_overlong)
    if validation_data is not None:
        validation_data.count_images(count_patches, cap=None, drop_overlong=False)
        most = None if cap is None else max(cap, int(validation_data.images.patches.max()))
        validation_data.images = replace(validation_data.images, cap=most)
    sizes = [tuple(size) for source in data.sources for size in np.unique(source.image_sizes.sizes, axis=0).tolist()]
    largest = max(sizes, key=lambda size: math.prod(count_patches(*size)), default=None)
    inputs.family = replace(inputs.family, largest_image=largest)
    return num_dropped


def weigh_images(inputs: RunInputs, flops: FlopCount) -> None:
    """What the model's tower costs for the data's images, in the packer's unit: a token of the language model."""
    for data in (inputs.data, inputs.validation_data):
        if data is not None and data.images is not None:
            data.weigh_images(flops.of_images(data.images) / flops.per_token)


def end_turns_with(stop_token_id: int, inputs: RunInputs, *, replaces: bool) -> None:
    """Makes the token that ends the data's turns one that ends generation: the first, and with `replaces` the only one.

    What the model was published with may name others alone, and generate() would run on past every turn's end.
    """
    text, whole = text_config(inputs.config), inputs.config
    has_own = whole is not text and getattr(whole, "eos_token_id", None) is not None
    for config in (text, *([whole] if has_own else []), inputs.generation_config):
        known = config.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        if replaces:
            config.eos_token_id = stop_token_id
        elif stop_token_id not in known:
            config.eos_token_id = [stop_token_id, *known] if known else stop_token_id
            if config is inputs.generation_config:
                token = inputs.tokenizer.convert_ids_to_tokens(stop_token_id)
                log.info(
                    f"exports: generation ends with {token!r}, too, which ends the data's turns (id {stop_token_id})"
                )


def describe_data(inputs: RunInputs, *, num_dropped: int, start: RunPosition) -> None:
    data, num_steps, validation_data = inputs.data, inputs.num_steps, inputs.validation_data
    sources = ""
    if len(data.sources) > 1:
        sources = "".join(
            f"\n  {name}: {len(kept):,} samples, {share:.1%} of those drawn"
            for name, kept, share in zip(data.names, data.kept_of, data.shares, strict=True)
        )
    if validation_data is not None:
        sources += f"\nvalidation: {len(validation_data.kept):,} samples of {', '.join(validation_data.names)}"
    log.info(
        f"data: {len(data.kept):,} samples, {data.lengths[data.kept].sum(dtype=np.int64):,} tokens;"
        f" {num_dropped:,} dropped, longer than --max-tokens-per-gpu{sources}\n"
        f"run: {'no end' if num_steps is None else f'{num_steps:,} steps'} of {inputs.data_options.batch_size} samples"
        f"{'; nothing is left to train' if num_steps is not None and start.step >= num_steps else ''}"
    )


def find_oddities(inputs: RunInputs, options: TrainOptions, *, num_rows: int) -> None:
    """Adds a warning for each thing that can be done, and is hardly meant. `num_rows` are packed at once."""
    batch_size, num_warmup_steps = options.data.batch_size, options.optimization.num_warmup_steps
    data, num_steps = inputs.data, inputs.num_steps
    if data is not None and batch_size > len(data.kept):
        inputs.warnings.append(f"--batch-size {batch_size}: each step draws the {len(data.kept)} samples repeatedly")
    if data is not None and inputs.validation_data is not None and not options.validation.validate_training_data:
        trained = {source.path.resolve() for source in data.sources}
        for source in inputs.validation_data.sources:
            if source.path.resolve() in trained:
                inputs.warnings.append(
                    f"--validation-data-path {source.path} is trained on, too: its loss says nothing of other data"
                )
    if batch_size < num_rows:
        sharing = options.sharding.context_parallel
        ranks = "ranks" if sharing is None else f"groups of --context-parallel {sharing} ranks"
        inputs.warnings.append(
            f"--batch-size {batch_size} is smaller than the {num_rows} {ranks}: some have nothing to do"
        )
    if not options.exports.save_final_checkpoint and not options.exports.on_the_way:
        inputs.warnings.append("--no-save-final-checkpoint: the trained model will not be exported")
    if num_steps is not None and num_warmup_steps >= num_steps:
        inputs.warnings.append(
            f"--num-warmup-steps {num_warmup_steps}: the run of {num_steps} steps ends before its peak learning rate"
        )


def build_run_model(
    options: TrainOptions, inputs: RunInputs, world: World, *, progress: Callable[[str], None] = lambda where: None
) -> PackedModel:
    """The sharded model, after its self-checks; `progress` hears of a long start. ValueError for what fails them."""
    if keeps_to_budget(options) and world.device.type == "cpu":
        give_back_freed_memory()
    method, compute = inputs.method, options.compute
    build = functools.partial(
        build_model,
        inputs.source(options.model),
        sharding=options.sharding,
        objective=inputs.objective,
        weights_dtype=DTYPES[options.optimization.master_weights],
        world=world,
        progress=progress,
    )
    plain = replace(compute, compile=False, activation_checkpointing="none", tiled_mlp=False, offload_activations=False)
    method.study(lambda: build(compute=plain, method=Full()), objective=inputs.objective, world=world)
    model = build(compute=compute, method=method)
    check_positions(model.model, longest=inputs.longest)
    check_model(model, inputs.objective, method, world=world)
    weigh_images(inputs, count_flops(model.model))
    log.info(describe_model(options, inputs, model))
    return model


def describe_model(options: TrainOptions, inputs: RunInputs, model: PackedModel) -> str:
    compute, method, num_sharing = options.compute, inputs.method, options.sharding.context_parallel
    num_heads = max((count for count, _ in list_heads(text_config(inputs.config))), default=0)
    num_params = sum(param.numel() for param in model.parameters()) - method.count_added()
    parts = [
        f"{str(inputs.compute_dtype).removeprefix('torch.')} compute",
        f"{model.backend} attention",
        *([] if num_sharing is None else [describe_heads(num_heads, num_sharing)]),
        f"{compute.activation_checkpointing} activation checkpointing",
        *(["tiled MLPs"] if compute.tiled_mlp else []),
        *(["offloaded activations"] if compute.offload_activations else []),
        *(["liger kernels"] if compute.use_liger_kernels else []),
        *(["compiled blocks"] if compute.compile else []),
        method.describe(),
    ]
    return (
        f"model: {inputs.config.model_type}, {num_params:,} parameters; {', '.join(parts)};"
        " packing and loss agree with the model's own forward pass"
    )


def keeps_to_budget(options: TrainOptions) -> bool:
    """Whether --memory-budget-gb is more than a plan's: a run takes it where something is auto."""
    is_auto = "auto" in (options.data.max_tokens_per_gpu, options.compute.activation_checkpointing)
    return options.compute.memory_budget_gb is not None and is_auto
