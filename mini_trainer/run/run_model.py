"""Building, checking and reporting a run's model; the report on its data."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mini_trainer.distributed.devices import DTYPES, give_back_freed_memory
from mini_trainer.distributed.ending import FEWER_TOKENS, log
from mini_trainer.distributed.world import World, count_sharing
from mini_trainer.model.attention import list_heads
from mini_trainer.model.build import build_model
from mini_trainer.model.check import check_model
from mini_trainer.model.flops import FlopCount, count_flops
from mini_trainer.model.method import Full
from mini_trainer.model.optim.optimizers import learning_rate_at
from mini_trainer.model.sharding import choose_resharding, is_worth_measuring
from mini_trainer.objectives.families.family import check_positions
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options import OptimizationOptions, flatten_options
from mini_trainer.run.inputs import TEACHER_MODEL, RunInputs
from mini_trainer.run.step import StepOptions, TrainState
from mini_trainer.sampler import RunPosition

if TYPE_CHECKING:
    from mini_trainer.model.optim.averages import WeightAverage


def build_run_model(
    inputs: RunInputs,
    options: StepOptions,
    world: World,
    *,
    load_start: Callable[[PackedModel], None] = lambda model: None,
    progress: Callable[[str], None] = lambda where: None,
    only_measures: bool = False,
) -> PackedModel:
    """Builds the sharded model and runs its self-checks; ValueError if they fail. `progress` is called during that.
    `load_start` fills the weights of another run's checkpoint, if this one starts with them. `only_measures`: leaves
    out the reference's scores of the data, which take a forward pass and are written."""
    method, compute = inputs.method, options.compute
    chosen = (options.data.max_tokens_per_gpu, compute.activation_checkpointing)
    # The budget applies to a run only if something is "auto"; otherwise only plans use it.
    if compute.memory_budget_gb is not None and "auto" in chosen and world.device.type == "cpu":
        give_back_freed_memory()
    build_from = functools.partial(
        build_model,
        sharding=options.sharding,
        objective=inputs.objective,
        weights_dtype=DTYPES[options.optimization.master_weights],
        world=world,
        progress=progress,
    )
    build = functools.partial(build_from, inputs.source)
    plain = replace(
        compute,
        compile=False,
        activation_checkpointing="none",
        tiled_mlp=False,
        offload_activations=False,
        kernels="eager",
    )
    method.study(lambda: build(compute=plain, method=Full()), objective=inputs.objective, world=world)
    model = build(compute=compute, method=method)
    check_positions(model.model, longest=inputs.longest)
    if model.kernels.num_modules:
        from mini_trainer.model.kernels import check_with_kernels

        check_with_kernels(model, inputs.objective, world=world)
    else:
        check_model(model, inputs.objective, world=world)
    if model.compiled:
        from mini_trainer.model.compiled_check import check_compiled

        check_compiled(model, inputs.objective, world=world, progress=progress)
    weigh_images(inputs, count_flops(model.model))
    load_start(model)
    build_other = functools.partial(build_from, compute=plain, method=Full(), weights_dtype=inputs.compute_dtype)
    if TEACHER_MODEL in inputs.other_models:
        from mini_trainer.run.teachers import add_teacher

        add_teacher(inputs, model, build_other)
    if inputs.objective.reference is not None:
        from mini_trainer.run.references import add_reference, assume_reference

        if only_measures:
            assume_reference(inputs)
        else:
            add_reference(inputs, model, build_other, world=world, progress=progress)
    if inputs.old is not None and not only_measures:
        from mini_trainer.run.keeping import add_scores

        add_scores(inputs, model, world=world, progress=progress)
    log.info(describe_model(inputs, options, model))
    return model


def make_average(model: PackedModel, options: OptimizationOptions, *, end: int | None) -> "WeightAverage | None":
    """The average of --weight-average, or None. `end`: optimizer steps up to the run's end; None without one."""
    if options.weight_average == "none":
        return None
    from mini_trainer.model.optim import averages

    return averages.make_average(model, options, end=end)


def weigh_images(inputs: RunInputs, flops: FlopCount) -> None:
    """Sets the tower's cost for the data's images, in the packer's unit: a token of the language model."""
    for data in (inputs.data, inputs.validation_data):
        if data is not None and data.images is not None:
            data.images = replace(data.images, costs=flops.of_images(data.images) / flops.per_token)


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
    dropped = f"; {num_dropped:,} dropped, longer than --max-tokens-per-gpu" if num_dropped else ""
    log.info(
        f"data: {len(data.kept):,} samples, {data.num_tokens:,} tokens{dropped}{inputs.chosen}{sources}\n"
        f"run: {'no end' if num_steps is None else f'{num_steps:,} steps'} of {inputs.batching}"
        f"{'; nothing is left to train' if num_steps is not None and start.step >= num_steps else ''}"
    )


def describe_schedule(inputs: RunInputs, o: OptimizationOptions, *, start: RunPosition) -> list[str]:
    """The run's start and its next learning rate, if it continues another run or shares a schedule; else no line."""
    origin, step = inputs.origin, inputs.num_steps_before + start.step
    if origin is None and o.schedule_steps is None:
        return []
    lr = learning_rate_at(step, o, num_steps=inputs.schedule_steps)
    total = "" if o.schedule_steps is None else f" of {o.schedule_steps:,}"
    own = f"schedule: this run's step {start.step + 1:,} is step {step + 1:,}{total}, with a learning rate of {lr:g}"
    if origin is None:
        return [own]
    return [f"start: weights and optimizer state of {origin.path}, after {origin.num_steps:,} steps", own]


def describe_model(inputs: RunInputs, options: StepOptions, model: PackedModel) -> str:
    compute, method, num_sharing = options.compute, inputs.method, options.sharding.context_parallel
    num_params = sum(param.numel() for param in model.parameters()) - method.count_added()
    sharing: list[str] = []  # how the ranks of --context-parallel share a row
    if num_sharing is not None:
        from mini_trainer.model.context_parallel import describe_heads

        num_heads = max((count for count, _ in list_heads(text_config(inputs.config))), default=0)
        sharing.append(describe_heads(num_heads, num_sharing))
    parts = [
        f"{str(inputs.compute_dtype).removeprefix('torch.')} compute",
        f"{model.backend} attention",
        *sharing,
        f"{compute.activation_checkpointing} activation checkpointing",
        *(["tiled MLPs"] if compute.tiled_mlp else []),
        *(["offloaded activations"] if compute.offload_activations else []),
        *(["fused kernels"] if model.kernels.num_modules and model.kernels.is_on else []),
        *(["compiled blocks"] if compute.compile else []),
        method.describe(),
        f"objective {inputs.objective.title}",
    ]
    return (
        f"model: {inputs.config.model_type}, {num_params:,} parameters; {', '.join(parts)};"
        " packing and loss agree with the model's own forward pass"
    )


def settle_auto_options(
    state: TrainState,
    inputs: RunInputs,
    options: StepOptions,
    *,
    start: RunPosition,
    previous: dict[str, Any] | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The values in place of every "auto", by option, and the measurements behind them, if any, as JSON.
    All ranks call this and agree. See `auto_settings.measure_auto_options`."""
    values = flatten_options(options)
    settled: dict[str, Any] = {}
    if values["kernels"] != "eager" and not state.model.kernels.num_modules:  # the model has none, or they fail
        settled = {"kernels": "eager"}
    choices = ("kernels", "activation_checkpointing", "max_tokens_per_gpu")
    names = [name for name in choices if settled.get(name, values[name]) == "auto"]
    unmeasured = choose_resharding(options.sharding, has_room=state.model.is_whole)
    if not names and not is_worth_measuring(unmeasured, state.world.device):
        return settled | unmeasured, None
    from mini_trainer.run.auto_settings import measure_auto_options

    names += unmeasured
    chosen, record = measure_auto_options(
        state, inputs, options, names, start=start, previous=previous, progress=progress
    )
    return settled | chosen, record


def find_fewer_tokens(settled: dict[str, Any], inputs: RunInputs, world: World) -> int | None:
    """Tokens of a micro-batch with which the run starts over, once, if it has no room for those chosen for it; None if
    they were not chosen, or if the longest sample needs more."""
    half = settled.get("max_tokens_per_gpu", 0) // 2
    has_room = half * count_sharing(world.row_group) >= inputs.longest_set.longest
    return half if has_room and FEWER_TOKENS not in os.environ else None
