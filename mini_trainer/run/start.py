"""The start of a run or of its plan: opens the data, the model's files, the objective and the schedule.

Errors are collected, so that all of them are reported at once.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import COLUMNS, DataTask
from mini_trainer.data.stores.disk import check_output_dir
from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.monitor import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.build import choose_compute_dtype
from mini_trainer.model.config import ModelSource, check_rope, choose_tokenizer, load_config, load_generation_config
from mini_trainer.model.method import Method
from mini_trainer.model.optim.optimizers import open_optimizer
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.objectives.objective import Objective, ObjectiveSettings
from mini_trainer.objectives.specs import find_data_kind, make_family, make_objective
from mini_trainer.options import (
    DataOptions,
    EndOptions,
    ModelOptions,
    OptimizationOptions,
    PreferenceOptions,
    TeacherOptions,
    TrainOptions,
    ValidationOptions,
    list_data_sets,
    list_validation_data,
    names_raw_data,
    parse_subset,
)
from mini_trainer.options.fields import check_choices
from mini_trainer.run.checkpointing import Checkpoint
from mini_trainer.run.choosing import choose_method, choose_objective, choose_settings
from mini_trainer.run.identity import flatten_with_urls
from mini_trainer.run.inputs import (
    REFERENCE_MODEL,
    TEACHER_MODEL,
    Errors,
    OpenedData,
    OpenedModel,
    OpenedObjective,
    RunInputs,
    Schedule,
    list_roles,
)
from mini_trainer.run.run_model import describe_data, describe_schedule
from mini_trainer.run.start_checks import check_placeholders, check_schedule, check_validation, find_oddities
from mini_trainer.sampler import RunPosition, choose_batching, count_steps

if TYPE_CHECKING:
    from mini_trainer.run.callbacks import Classes
    from mini_trainer.run.samples import Samples


def open_inputs(
    options: TrainOptions,
    *,
    device: torch.device,
    world_size: int,
    start: RunPosition,
    origin: Checkpoint | None = None,
) -> RunInputs:
    """Opens the data, the model's files, the objective's models and scores, and the schedule; collects all errors and
    conflicts.

    `origin`: the checkpoint of --continue-from.
    """
    check_choices(options)
    errors, num_sharing = Errors(), options.sharding.context_parallel or 1
    name, settings, method = choose_objective(options), choose_settings(options), choose_method(options)
    callbacks = open_callbacks(options.callbacks.callbacks, errors)
    if options.compute.offload_activations:
        from mini_trainer.model.offloading import check_offloading

        errors.attempt(lambda: check_offloading(device))
    data = open_data(options.data, options.validation, options.teacher, num_sharing=num_sharing, errors=errors)
    made = make_from_data(name, settings, data, best_metric=options.validation.deciding[0], errors=errors)
    model = open_model(
        options.model, data, make_family(name, settings) if made is None else made.family, method, errors
    )
    if model.config is not None:
        errors.attempt(lambda: open_optimizer(options.optimization).check(model.config))
    num_dropped = data.num_dropped
    if model.tokenizer is not None and data.training.has_images and made is not None:
        from mini_trainer.run.images import count_images

        model, num_more = errors.attempt(lambda: count_images(data, model, options.vision, options.data)) or (model, 0)
        num_dropped += num_more
    read = open_objective(made, data, model, method, errors, options.preference, options.teacher)
    schedule = open_schedule(data.training, options.data, options.end, options.optimization, start, errors)
    inputs = RunInputs(
        family=model.family,
        method=method,
        data_options=data.options,
        model_options=options.model,
        compute_dtype=choose_compute_dtype(options.compute, device),
        values=flatten_with_urls(options),
        data_paths=tuple(itertools.chain(*list_data_sets(options).values())),
        data=data.training,
        sidecars=data.sidecars,
        validation_data=data.validation,
        teacher_data=data.read_by_teacher,
        model_dir=model.directory,
        config=model.config,
        generation_config=model.generation_config,
        tokenizer=model.tokenizer,
        **vars(read),
        **vars(schedule),
        origin=origin,
        callbacks=callbacks,
        samples=open_sample_prompts(options.validation, data, model, errors),
        errors=errors,
    )
    if inputs.batching is not None:
        errors.attempt(lambda: check_schedule(inputs, options.optimization))
        describe_data(inputs, num_dropped=num_dropped, start=start)
        for line in describe_schedule(inputs, options.optimization, start=start):
            log.info(line)
    o, num_rows = options, world_size // num_sharing
    find_oddities(inputs, o.optimization, o.end, o.validation, o.exports, num_rows=num_rows)
    return inputs


def make_data_local(options: TrainOptions, world: World, control: RunControl) -> TrainOptions:
    """The options with rank 0's local data sets in place of rows and URLs. All ranks call this."""
    if not call_on_rank0(world, lambda: names_raw_data(options)):
        return options
    call_on_rank0(world, lambda: check_output_dir(Path(options.output_dir)))  # before the work of tokenizing
    from mini_trainer.run import raw_rows

    return raw_rows.make_data_local(options, world, control)


def open_callbacks(names: Sequence[str], errors: Errors) -> "Classes":
    """The classes of --callbacks, which are imported."""
    if not names:
        return {}
    from mini_trainer.run.callbacks import load_callbacks

    return errors.attempt(lambda: load_callbacks(names)) or {}


def open_sample_prompts(o: ValidationOptions, data: OpenedData, model: OpenedModel, errors: Errors) -> "Samples | None":
    """The prompts of --sample-prompts for the model."""
    path, has_images = o.sample_prompts, data.training is not None and data.training.has_images
    if path is None or model.tokenizer is None:
        return None
    from mini_trainer.run.samples import open_samples

    parts = (model.config, model.generation_config, model.tokenizer)
    return errors.attempt(lambda: open_samples(path, *parts, has_images=has_images))


def open_data(
    o: DataOptions, validation: ValidationOptions, teacher: TeacherOptions, *, num_sharing: int, errors: Errors
) -> OpenedData:
    """Opens all data sets and their sidecars."""
    held_out = open_validation_data(o, validation, errors)
    data = errors.attempt(
        lambda: Mixture([TokenizedData(path) for path in o.data_path], weights=o.data_weights, by=o.data_weights_by)
    )
    if data is None:
        return OpenedData(o, validation=held_out)
    read_by_teacher = None
    if teacher.teacher_data:
        from mini_trainer.run.teachers import open_teacher_data

        read_by_teacher = errors.attempt(lambda: open_teacher_data(data, teacher.teacher_data))
    cap = o.max_tokens_per_gpu
    if cap == "auto":  # a provisional value until the model is loaded
        cap = -(-data.longest // num_sharing)
    num_dropped = errors.attempt(lambda: data.fit_to(cap, num_sharing=num_sharing, drop_overlong=o.drop_overlong))
    if o.subset is not None and num_dropped is not None:
        data.take_subset(parse_subset(o.subset), seed=o.seed)
    sidecars = [source.sidecar for source in data.sources]
    return OpenedData(
        replace(o, max_tokens_per_gpu=cap), data, held_out, read_by_teacher, sidecars, num_dropped=num_dropped or 0
    )


def open_validation_data(o: DataOptions, validation: ValidationOptions, errors: Errors) -> Mixture | None:
    """Opens the sets of --validation-data-path; each must have something to predict."""
    paths = list_validation_data(validation.validation_data_path, o.data_path)

    def open_sets() -> Mixture:
        data = Mixture([TokenizedData(path, option="--validation-data-path") for path in paths])
        if o.subset is not None:
            data.take_subset(parse_subset(o.subset), seed=o.seed)
        data.check_trained("--validation-data-path")
        return data

    return errors.attempt(open_sets) if paths else None


def make_from_data(
    name: str, settings: ObjectiveSettings, data: OpenedData, *, best_metric: str, errors: Errors
) -> Objective | None:
    """The objective for the data, before the model's files are known; None if it cannot be made."""
    if data.training is None:
        kind = find_data_kind(name)
        if COLUMNS[kind].has_labels:  # known only from data
            return None
        return make_objective(name, settings, make_family(name, settings), DataTask(kind))  # a plan without data
    made = errors.attempt(
        lambda: make_objective(
            name, settings, make_family(name, settings), data.training.task, data.training.count_labels
        )
    )
    errors.attempt(lambda: check_validation(data, made, best_metric=best_metric))
    return made


def open_model(o: ModelOptions, data: OpenedData, family: Family, method: Method, errors: Errors) -> OpenedModel:
    """Opens the model's config, and the tokenizer that made the data; the family then knows both."""
    trust = o.trust_remote_code
    directory = errors.attempt(
        lambda: find_model(o.model_name_or_path, revision=o.model_revision, trust_remote_code=trust)
    )
    config = None
    if directory is not None:
        config = errors.attempt(lambda: load_config(directory, family, trust_remote_code=trust))
    if config is None:
        return OpenedModel(family, directory)
    own = errors.attempt(method.read_generation_config)
    generation = own or errors.attempt(lambda: load_generation_config(directory, config)) or GenerationConfig()
    if data.training is None:
        return OpenedModel(family, directory, config, generation)
    errors.attempt(lambda: check_rope(config, longest=data.longest))
    for mixture in data.mixtures:
        errors.attempt(lambda mixture=mixture: check_placeholders(config, family, mixture))
    found = errors.attempt(
        lambda: choose_tokenizer(
            directory,
            {source.path: source.sidecar for mixture in data.mixtures for source in mixture.sources},
            vocab_size=text_config(config).vocab_size,
            vocabulary_multiple=method.vocabulary_multiple,
            trust_remote_code=trust,
        )
    )
    tokenizer, vocab_size = found or (None, text_config(config).vocab_size)
    for part in (text_config(config), *([config] if hasattr(config, "vocab_size") else [])):
        part.vocab_size = vocab_size
    for mixture in data.mixtures:
        mixture.vocab_size = vocab_size
    if tokenizer is None:
        return OpenedModel(family, directory, config, generation)
    for sidecar in filter(None, reversed(data.sidecars)):  # reversed, so that the first sidecar's token ends up first
        if sidecar.get("stop_token_id") is not None:
            replaces = sidecar.get("tokenizer_dir") is not None  # the data's chat template replaces the model's
            end_turns_with(sidecar["stop_token_id"], config, generation, tokenizer, replaces=replaces)
    if "completion" in list_roles(data.sidecars) and tokenizer.chat_template is not None:
        log.warning(
            "warning: the data has prompts and completions as plain text, without the model's chat template, so chats"
            " with the trained model do not begin like its training data (--format alpaca makes chats of them)"
        )
    family = family.complete(config, tokenizer, trust_remote_code=trust)
    return OpenedModel(family, directory, config, generation, tokenizer, trust_remote_code=trust)


def open_objective(
    made: Objective | None,
    data: OpenedData,
    model: OpenedModel,
    method: Method,
    errors: Errors,
    preference: PreferenceOptions,
    teacher: TeacherOptions,
) -> OpenedObjective:
    """Completes the objective that was `made` with the models and scores that it reads; opens the method's files."""
    other_models: dict[str, ModelSource] = {}
    if model.tokenizer is not None:
        errors.attempt(lambda: method.open_files(model.tokenizer, data.options))
        if preference.reference_model is not None or teacher.teacher_model is not None:
            from mini_trainer.run.teachers import open_other_models

            names = {REFERENCE_MODEL: preference.reference_model, TEACHER_MODEL: teacher.teacher_model}
            other_models = open_other_models(names, data, model, errors)
    opened = OpenedObjective(made, other_models)
    if data.training is not None and made is not None and made.teacher is not None:
        from mini_trainer.run.teachers import open_scores

        opened = errors.attempt(lambda: open_scores(opened, data)) or replace(opened, objective=None)
    if opened.objective is None:
        return opened
    return replace(opened, objective=replace(opened.objective, family=model.family))


def open_schedule(
    data: Mixture | None,
    o: DataOptions,
    end: EndOptions,
    optimization: OptimizationOptions,
    start: RunPosition,
    errors: Errors,
) -> Schedule:
    """The steps of the run, if known."""
    if data is None:
        return Schedule()
    errors.attempt(lambda: data.check_trained("--data-path"))
    batching = errors.attempt(lambda: choose_batching(data, o))
    if batching is None:
        return Schedule()
    num_steps = count_steps(data, batching, end, seed=o.seed, start=start)
    return Schedule(batching, num_steps, optimization.schedule_steps or num_steps)


def end_turns_with(
    stop_token_id: int,
    whole: PreTrainedConfig,
    generation: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    replaces: bool,
) -> None:
    """Makes the data's stop token one that ends generation: the first, and with `replaces` the only one.

    The model's own config may name only others, and generate() would then continue past the end of every turn.
    """
    text = text_config(whole)
    has_own = whole is not text and getattr(whole, "eos_token_id", None) is not None
    for config in (text, *([whole] if has_own else []), generation):
        known = config.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        if replaces:
            config.eos_token_id = stop_token_id
        elif stop_token_id not in known:
            config.eos_token_id = [stop_token_id, *known] if known else stop_token_id
            if config is generation:
                token = tokenizer.convert_ids_to_tokens(stop_token_id)
                log.info(f"exports: generation also ends with {token!r}, the data's stop token (id {stop_token_id})")
