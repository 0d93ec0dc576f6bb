"""The start of a run or of its plan: opens the data, the model's files, the objective and the schedule.

Errors are collected, so that all of them are reported at once.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import CAUSAL_LM, COLUMNS, VISION, DataTask
from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData, read_sidecar
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.build import choose_compute_dtype
from mini_trainer.model.config import check_rope, choose_tokenizer, load_config, load_generation_config
from mini_trainer.model.method import Full, Method
from mini_trainer.model.optim.optimizers import open_optimizer
from mini_trainer.objectives.families.text_tower import count_logits, text_config
from mini_trainer.objectives.objective import Objective, ObjectiveSettings, find_data_kind, make_family, make_objective
from mini_trainer.options import (
    DataOptions,
    EndOptions,
    OptimizationOptions,
    PreferenceOptions,
    TeacherOptions,
    TrainOptions,
    VisionOptions,
    fill_unset,
    flag_name,
    list_data_sets,
    list_validation_data,
    names_raw_data,
    parse_subset,
    replace_options,
)
from mini_trainer.options.data import MAX_TOKENS
from mini_trainer.options.doors import METHODS
from mini_trainer.options.fields import check_choices
from mini_trainer.options.objectives import KEEPING, TAUGHT
from mini_trainer.run.checkpointing import Checkpoint
from mini_trainer.run.identity import flatten_with_urls
from mini_trainer.run.inputs import REFERENCE_MODEL, TEACHER_MODEL, RunInputs
from mini_trainer.run.run_model import describe_data, describe_schedule
from mini_trainer.run.start_checks import check_placeholders, check_schedule, check_validation, find_oddities
from mini_trainer.sampler import RunPosition, choose_batching, count_steps


def settle_by_device(
    options: TrainOptions, device: torch.device, world: World | None, *, is_known: bool = True
) -> TrainOptions:
    """The options with what the device decides. All ranks of a `world` call this; `is_known`: whether the device is
    one of this machine. ValueError for kernels that cannot be had, and for options that have no effect."""
    options = fill_unset(options, device.type)
    if options.compute.memory_budget_gb is not None:  # which some defaults leave without effect
        from mini_trainer.options.problems.choices import find_compute_problems

        if problems := find_compute_problems(options):
            raise ValueError("\n".join(problems))
    if options.compute.kernels == "eager" or not is_known:
        return options
    from mini_trainer.model.kernels import settle_kernels

    return replace_options(options, kernels=settle_kernels(options.compute.kernels, device, world))


def open_inputs(
    options: TrainOptions,
    *,
    device: torch.device,
    world_size: int,
    start: RunPosition,
    origin: Checkpoint | None = None,
) -> RunInputs:
    """Opens the data, the model's files, the objective's models and scores, and the schedule; collects all errors and
    conflicts. `origin`: the checkpoint of --continue-from."""
    check_choices(options)
    name, settings = choose_objective(options), choose_settings(options)
    inputs = RunInputs(
        family=make_family(name, settings),
        method=choose_method(options),
        data_options=options.data,
        options=options,
        compute_dtype=choose_compute_dtype(options.compute, device),
        values=flatten_with_urls(options),
        own_paths=(*itertools.chain(*list_data_sets(options).values()), options.osft.osft_cache_dir),
        origin=origin,
    )
    errors, num_sharing = inputs.errors, options.sharding.context_parallel or 1
    if options.callbacks.callbacks:
        from mini_trainer.run.callbacks import load_callbacks

        inputs.callbacks = errors.attempt(lambda: load_callbacks(options.callbacks.callbacks)) or {}
    if options.compute.offload_activations:
        from mini_trainer.model.activation_memory import check_offloading

        errors.attempt(lambda: check_offloading(device))
    num_dropped = open_data(inputs, options.validation.validation_data_path, num_sharing=num_sharing)
    if options.keep.keep and inputs.data is not None:
        from mini_trainer.run.keeping import open_old

        inputs.old_data = errors.attempt(lambda: open_old(options.keep.keep, inputs, num_sharing=num_sharing))
    inputs.objective = make_from_data(name, settings, inputs, best_metric=options.validation.deciding[0])
    if inputs.objective is not None:
        inputs.family = inputs.objective.family
    open_model(inputs)
    given = options.data.batch_size or options.data.batch_tokens, options.optimization.learning_rate
    if options.chooses_end or None in given:
        from mini_trainer.run.choices import choose_values

        options = choose_values(inputs)
    if inputs.config is not None:
        errors.attempt(lambda: open_optimizer(options.optimization).check(inputs.config))
    if inputs.tokenizer is not None and inputs.data.has_images and inputs.objective is not None:
        from mini_trainer.run.images import count_images

        num_dropped += errors.attempt(lambda: count_images(inputs, options.vision)) or 0
    open_objective(inputs, options.preference, options.teacher)
    open_schedule(inputs, options.end, options.optimization, start)
    if inputs.old_data is not None:
        from mini_trainer.run.old_stream import open_stream

        inputs.old = errors.attempt(lambda: open_stream(inputs.old_data, inputs.data_options, options.keep.keep_share))
    asks = (prompts := options.validation.sample_prompts) or (inputs.chosen and num_sharing == 1)
    if asks and inputs.tokenizer is not None:
        from mini_trainer.run.samples import open_samples

        model, data = (inputs.config, inputs.generation_config, inputs.tokenizer), (inputs.data, inputs.validation_data)
        inputs.samples = errors.attempt(lambda: open_samples(prompts, *model, *data))
    if inputs.batching is not None:
        errors.attempt(lambda: check_schedule(inputs, options.optimization))
        describe_data(inputs, num_dropped=num_dropped, start=start)
        for line in describe_schedule(inputs, options.optimization, start=start):
            log.info(line)
    o, num_rows = options, world_size // num_sharing
    find_oddities(inputs, o.optimization, o.end, o.validation, o.exports, num_rows=num_rows)
    return inputs


def choose_objective(options: TrainOptions) -> str:
    """Name of the objective: --objective; for language modelling it also depends on images and teachers."""
    name = options.classification.objective
    if name == CAUSAL_LM and has_images(options.data):
        if options.sharding.context_parallel is not None:
            raise ValueError(
                "--context-parallel: not supported with images, whose tokens cannot be split over ranks; remove the"
                " option, or tokenize the data without process_data.py --images"
            )
        given = {"--teacher-weight": options.teacher.teacher_weight is not None, "--keep": bool(options.keep.keep)}
        for flag in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{flag} cannot be used with images: it is for texts alone; leave it out")
        return VISION
    default = VisionOptions()
    if name == CAUSAL_LM and options.vision != default:
        given = [key for key, value in asdict(options.vision).items() if value != getattr(default, key)]
        raise ValueError(
            f"{', '.join(map(flag_name, given))}: no effect on data without images (process_data.py --images)"
        )
    if options.keep.keep:
        return KEEPING
    return name if options.teacher.teacher_weight is None else TAUGHT


def choose_settings(options: TrainOptions) -> ObjectiveSettings:
    """The options of objectives and model families."""
    return ObjectiveSettings(
        options.classification,
        options.vision,
        options.preference,
        options.teacher,
        options.keep,
        options.optimization.router_aux_loss,
        options.optimization.router_loss_over,
        head_seed=options.data.seed,
    )


def has_images(options: DataOptions) -> bool:
    """Whether the data was made for vision-language models; an unreadable sidecar is reported when data is opened."""
    try:
        sidecar = read_sidecar(options.data_path[0]) if options.data_path else None
    except ValueError:
        return False
    return sidecar is not None and sidecar.get("objective") == VISION


def choose_method(options: TrainOptions) -> Method:
    """Makes the method that the options select."""
    for name in METHODS:
        group = getattr(options, name)
        if getattr(group, name):
            return METHODS[name].make(group, seed=options.data.seed)
    return Full()


def make_data_local(options: TrainOptions, world: World, control: RunControl) -> TrainOptions:
    """The options with rank 0's local data sets in place of rows and URLs. All ranks call this."""
    if not call_on_rank0(world, lambda: names_raw_data(options)):
        return options
    from mini_trainer.run import raw_rows

    return raw_rows.make_data_local(options, world, control)


def open_data(inputs: RunInputs, given: Sequence[str], *, num_sharing: int) -> int:
    """Opens all data sets, `given` for validation, with their sidecars; returns the number of dropped samples."""
    o, errors, cache_dir = inputs.data_options, inputs.errors, inputs.values["data_cache_dir"]
    if held_out := list_validation_data(given, o.data_path):
        inputs.validation_data = errors.attempt(lambda: open_validation_data(held_out, o, cache_dir=cache_dir))
    inputs.data = data = errors.attempt(
        lambda: Mixture(
            [TokenizedData(path, cache_dir=cache_dir) for path in o.data_path],
            weights=o.data_weights,
            by=o.data_weights_by,
        )
    )
    if data is None:
        return 0
    cap = o.max_tokens_per_gpu
    if cap == "auto":  # a provisional value until the model is loaded
        cap = max(MAX_TOKENS, -(-data.longest // num_sharing))
    num_dropped = errors.attempt(lambda: data.fit_to(cap, num_sharing=num_sharing, drop_overlong=o.drop_overlong))
    if o.subset is not None and num_dropped is not None:
        data.take_subset(parse_subset(o.subset), seed=o.seed)
    inputs.sidecars = [source.sidecar for source in data.sources]
    inputs.data_options = replace(o, max_tokens_per_gpu=cap)
    return num_dropped or 0


def open_validation_data(paths: Sequence[str], o: DataOptions, *, cache_dir: str) -> Mixture:
    """Opens the sets of --validation-data-path; each must have something to predict."""
    option = "--validation-data-path"
    data = Mixture([TokenizedData(path, option=option, cache_dir=cache_dir) for path in paths])
    if o.subset is not None:
        data.take_subset(parse_subset(o.subset), seed=o.seed)
    data.check_trained(option)
    return data


def make_from_data(name: str, settings: ObjectiveSettings, inputs: RunInputs, *, best_metric: str) -> Objective | None:
    """The objective for the data, before the model's files are known; None if it cannot be made."""
    family, data = inputs.family, inputs.data
    if data is None:
        kind = find_data_kind(name)
        if COLUMNS[kind].has_labels:  # known only from data
            return None
        return make_objective(name, settings, family, DataTask(kind))  # a plan without data
    made = inputs.errors.attempt(lambda: make_objective(name, settings, family, data.task, data.count_labels))
    inputs.errors.attempt(lambda: check_validation(data, inputs.validation_data, made, metric=best_metric))
    return made


def open_model(inputs: RunInputs) -> None:
    """Opens the model's config, and the tokenizer that made the data; the family then knows both."""
    o, family, method, errors = inputs.options.model, inputs.family, inputs.method, inputs.errors
    trust = o.trust_remote_code
    inputs.model_dir = directory = errors.attempt(
        lambda: find_model(o.model_name_or_path, revision=o.model_revision, trust_remote_code=trust)
    )
    if directory is not None:
        inputs.config = errors.attempt(lambda: load_config(directory, family, trust_remote_code=trust))
    if (config := inputs.config) is None:
        return
    own = errors.attempt(method.read_generation_config)
    generation = own or errors.attempt(lambda: load_generation_config(directory, config)) or GenerationConfig()
    inputs.generation_config = generation
    if inputs.data is None:
        return
    errors.attempt(lambda: check_rope(config, longest=inputs.longest))
    mixtures = inputs.data_sets.values()
    for mixture in mixtures:
        errors.attempt(lambda mixture=mixture: check_placeholders(config, family, mixture))
    found = errors.attempt(
        lambda: choose_tokenizer(
            directory,
            {source.path: source.sidecar for mixture in mixtures for source in mixture.sources},
            vocab_size=text_config(config).vocab_size,
            vocabulary_multiple=method.vocabulary_multiple,
            trust_remote_code=trust,
        )
    )
    inputs.tokenizer, vocab_size, inputs.new_tokens = found or (None, text_config(config).vocab_size, ())
    for part in (text_config(config), *([config] if hasattr(config, "vocab_size") else [])):
        part.vocab_size = vocab_size
    for mixture in mixtures:
        mixture.vocab_size = count_logits(config)
    if inputs.tokenizer is None:
        return
    for sidecar in filter(None, reversed(inputs.sidecars)):  # reversed, so that the first sidecar's token ends up first
        if sidecar.get("stop_token_id") is not None:
            replaces = sidecar.get("tokenizer_dir") is not None  # the data's chat template replaces the model's
            end_turns_with(sidecar["stop_token_id"], config, generation, inputs.tokenizer, replaces=replaces)
    if "completion" in inputs.roles and inputs.tokenizer.chat_template is not None:
        log.warning(
            "warning: the data has prompts and completions as plain text, without the model's chat template, so chats"
            " with the trained model do not begin like its training data (--format alpaca makes chats of them)"
        )
    inputs.family = family.complete(config, inputs.tokenizer, trust_remote_code=trust)


def open_objective(inputs: RunInputs, preference: PreferenceOptions, teacher: TeacherOptions) -> None:
    """Completes the objective with the models and scores that it reads; opens the method's files."""
    errors = inputs.errors
    if inputs.tokenizer is not None:
        errors.attempt(lambda: inputs.method.open_files(inputs.tokenizer, inputs.data_options))
        if preference.reference_model is not None or teacher.teacher_model is not None:
            from mini_trainer.run.teachers import open_other_models

            names = {REFERENCE_MODEL: preference.reference_model, TEACHER_MODEL: teacher.teacher_model}
            inputs.other_models = open_other_models(names, inputs)
    if inputs.data is not None and inputs.objective is not None and inputs.objective.teacher_scores is not None:
        from mini_trainer.run.teachers import open_scores

        inputs.objective = errors.attempt(lambda: open_scores(inputs))
    if inputs.objective is not None:
        inputs.objective = replace(inputs.objective, family=inputs.family)


def open_schedule(inputs: RunInputs, end: EndOptions, optimization: OptimizationOptions, start: RunPosition) -> None:
    """Finds the steps of the run, if there are data."""
    data, o = inputs.data, inputs.data_options
    if data is None:
        return
    inputs.errors.attempt(lambda: data.check_trained("--data-path"))
    inputs.batching = inputs.errors.attempt(lambda: choose_batching(data, o))
    if inputs.batching is not None:
        inputs.num_steps = count_steps(data, inputs.batching, end, seed=o.seed, start=start)
        inputs.schedule_steps = optimization.schedule_steps or inputs.num_steps


def end_turns_with(
    stop_token_id: int,
    whole: PreTrainedConfig,
    generation: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    replaces: bool,
) -> None:
    """Makes the data's stop token one that ends generation: the first, and with `replaces` the only one.
    The model's own config may name only others, and generate() would then continue past the end of every turn."""
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
