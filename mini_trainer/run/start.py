"""The start of a run or of its plan: opens all inputs, and collects the errors.

Takes the complete options, like the scripts.
"""

import functools
import math
from dataclasses import replace

import numpy as np
import torch
from transformers import GenerationConfig

from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.columns.kinds import COLUMNS
from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.monitor import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.build import choose_compute_dtype
from mini_trainer.model.config import check_rope, choose_tokenizer, load_config, load_generation_config
from mini_trainer.model.optim.optimizers import open_optimizer
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.objectives.specs import find_data_kind, make_family, make_objective
from mini_trainer.options import TrainOptions, names_raw_data, parse_subset
from mini_trainer.options.choices import check_choices
from mini_trainer.run.checkpointing import Checkpoint
from mini_trainer.run.choosing import choose_method, choose_objective, choose_settings
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.run_model import describe_data, describe_schedule
from mini_trainer.run.start_checks import check_placeholders, check_schedule, check_validation, find_oddities
from mini_trainer.sampler import RunPosition, choose_batching, count_steps


def open_inputs(
    options: TrainOptions,
    *,
    device: torch.device,
    world_size: int,
    start: RunPosition,
    origin: Checkpoint | None = None,
) -> RunInputs:
    """Opens data, tokenizer, the model's config and the method's files, and collects all errors and conflicts.

    `origin`: the checkpoint of --continue-from.
    """
    check_choices(options)
    name, settings = choose_objective(options), choose_settings(options)
    family, method = make_family(name, settings), choose_method(options)
    inputs = RunInputs(family, method, options.data, choose_compute_dtype(options.compute, device), origin=origin)
    if options.callbacks.callbacks:
        from mini_trainer.run.callbacks import load_callbacks

        inputs.callbacks = inputs.errors.attempt(lambda: load_callbacks(options.callbacks.callbacks)) or {}
    if options.compute.offload_activations:
        from mini_trainer.model.offloading import check_offloading

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
    elif not COLUMNS[find_data_kind(name)].has_labels:  # a plan without data; labels come only from data
        objective = make_objective(name, settings, family, DataTask(find_data_kind(name)))
    open_model_config(inputs, options)
    if inputs.config is not None:
        inputs.errors.attempt(lambda: open_optimizer(options.optimization).check(inputs.config))
    if inputs.config is not None and inputs.data is not None:
        inputs.errors.attempt(lambda: check_rope(inputs.config, longest=inputs.longest))
        for data in inputs.data_sets.values():
            inputs.errors.attempt(lambda data=data: check_placeholders(inputs, data))
        open_tokenizer(inputs, options)
    if inputs.tokenizer is not None and inputs.data.has_images and objective is not None:
        num_dropped = (num_dropped or 0) + (inputs.errors.attempt(lambda: count_images(inputs, options)) or 0)
    if inputs.tokenizer is not None:
        inputs.errors.attempt(lambda: inputs.method.open_files(inputs.tokenizer, inputs.data_options))
        if options.preference.reference_model is not None or options.teacher.teacher_model is not None:
            from mini_trainer.run.other_models import open_other_models

            open_other_models(options, inputs)
    if inputs.data is not None and objective is not None and objective.has_teacher:
        from mini_trainer.run.teachers import open_scores

        objective = inputs.errors.attempt(lambda: open_scores(inputs, objective))
    inputs.objective = objective and replace(objective, family=inputs.family)
    if inputs.data is not None:
        inputs.errors.attempt(lambda: inputs.data.check_trained("--data-path"))
        inputs.batching = inputs.errors.attempt(lambda: choose_batching(inputs.data, options.data))
    if inputs.batching is not None:
        inputs.num_steps = count_steps(inputs.data, inputs.batching, options.end, seed=options.data.seed, start=start)
        inputs.schedule_steps = options.optimization.schedule_steps or inputs.num_steps
        inputs.errors.attempt(lambda: check_schedule(inputs, options))
        describe_data(inputs, num_dropped=num_dropped or 0, start=start)
        for line in describe_schedule(inputs, options, start=start):
            log.info(line)
    find_oddities(inputs, options, num_rows=world_size // num_sharing)
    return inputs


def make_data_local(options: TrainOptions, world: World, control: RunControl) -> TrainOptions:
    """The options with local data sets in place of rows and URLs, as rank 0 has them. All ranks call this."""
    if not call_on_rank0(world, lambda: names_raw_data(options)):
        return options
    from mini_trainer.run import raw_rows

    return raw_rows.make_data_local(options, world, control)


def open_data(inputs: RunInputs, options: TrainOptions, *, num_sharing: int) -> int | None:
    """Opens the data sets and their sidecars; returns the number of samples that are too long."""
    o, cap = options.data, options.data.max_tokens_per_gpu
    inputs.data = data = inputs.errors.attempt(
        lambda: Mixture([TokenizedData(path) for path in o.data_path], weights=o.data_weights, by=o.data_weights_by)
    )
    if data is None:
        return None
    if options.teacher.teacher_data:
        from mini_trainer.run.teachers import open_teacher_data

        inputs.errors.attempt(lambda: open_teacher_data(inputs, options.teacher.teacher_data))
    if cap == "auto":  # a provisional value until the model is loaded
        cap = -(-data.longest // num_sharing)
    inputs.data_options = replace(o, max_tokens_per_gpu=cap)
    num_dropped = inputs.errors.attempt(
        lambda: data.fit_to(cap, num_sharing=num_sharing, drop_overlong=o.drop_overlong)
    )
    if o.subset is not None and num_dropped is not None:
        data.take_subset(parse_subset(o.subset), seed=o.seed)
    inputs.sidecars = [source.sidecar for source in data.sources]
    return num_dropped


def open_validation_data(inputs: RunInputs, options: TrainOptions) -> None:
    """Opens the sets of --validation-data-path, and the training data if requested; each must have something to
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
        own = inputs.errors.attempt(inputs.method.read_generation_config)
        found = own or inputs.errors.attempt(lambda: load_generation_config(inputs.model_dir, inputs.config))
        inputs.generation_config = found or GenerationConfig()


def open_tokenizer(inputs: RunInputs, options: TrainOptions) -> None:
    """Opens the tokenizer that made the data; sets the number of embeddings and the stop token in the config."""
    config, text = inputs.config, text_config(inputs.config)
    known = {source.path: source.sidecar for data in inputs.data_sets.values() for source in data.sources}
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
    for data in inputs.data_sets.values():
        data.vocab_size = vocab_size
    for sidecar in filter(None, reversed(inputs.sidecars)):  # reversed, so that the first sidecar's token ends up first
        if inputs.tokenizer is not None and sidecar.get("stop_token_id") is not None:
            replaces = sidecar.get("tokenizer_dir") is not None  # the data's chat template replaces the model's
            end_turns_with(sidecar["stop_token_id"], inputs, replaces=replaces)
    if "completion" in inputs.roles and inputs.tokenizer is not None and inputs.tokenizer.chat_template is not None:
        log.warning(
            "warning: the data has prompts and completions as plain text, without the model's chat template, so chats"
            " with the trained model begin otherwise than what it saw (process_data.py --as-chat makes chats of them)"
        )


def count_images(inputs: RunInputs, options: TrainOptions) -> int:
    """Counts the patches of the data's images; returns the number of samples that have too many."""
    cap, data, validation_data = options.vision.max_image_tokens_per_gpu, inputs.data, inputs.validation_data
    count_patches = functools.cache(inputs.family.vision_inputs.count_patches)
    num_dropped = data.count_images(count_patches, cap=cap, drop_overlong=options.data.drop_overlong)
    if validation_data is not None:
        validation_data.count_images(count_patches, cap=None, drop_overlong=False)
        most = None if cap is None else max(cap, int(validation_data.images.patches.max()))
        validation_data.images = replace(validation_data.images, cap=most)
    sizes = [tuple(size) for source in data.sources for size in np.unique(source.image_sizes.sizes, axis=0).tolist()]
    largest = max(sizes, key=lambda size: math.prod(count_patches(*size)), default=None)
    inputs.family = replace(inputs.family, largest_image=largest)
    return num_dropped


def end_turns_with(stop_token_id: int, inputs: RunInputs, *, replaces: bool) -> None:
    """Makes the data's stop token one that ends generation: the first, and with `replaces` the only one.

    The model's own config may name only others, and generate() would then continue past the end of every turn.
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
                log.info(f"exports: generation also ends with {token!r}, the data's stop token (id {stop_token_id})")
