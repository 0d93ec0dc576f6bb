"""Building, checking and reporting a run's model."""

import functools
from collections.abc import Callable
from dataclasses import replace

from mini_trainer.distributed.devices import DTYPES
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.memory import give_back_freed_memory
from mini_trainer.distributed.world import World
from mini_trainer.model.activation_checkpointing import forget_random_states
from mini_trainer.model.build import build_model
from mini_trainer.model.check import check_model, draws_random_numbers
from mini_trainer.model.compiled_check import check_compiled
from mini_trainer.model.flops import FlopCount, count_flops
from mini_trainer.model.liger import forget_liger_kernels
from mini_trainer.model.methods.full import Full
from mini_trainer.objectives.families.packed_row import check_positions
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.options import TrainOptions
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.reference import add_reference, assume_reference
from mini_trainer.run.start_report import describe_model
from mini_trainer.run.teacher import add_teacher


def build_run_model(
    options: TrainOptions,
    inputs: RunInputs,
    world: World,
    *,
    load_start: Callable[[PackedModel], None] = lambda model: None,
    progress: Callable[[str], None] = lambda where: None,
    only_measures: bool = False,
) -> PackedModel:
    """Builds the sharded model and runs its self-checks; ValueError if they fail. `progress` is called during that.

    `load_start` fills the weights of another run's checkpoint, if this one starts with them. `only_measures`: leaves
    out the reference's scores of the data, which take a forward pass and are written.
    """
    if keeps_to_budget(options) and world.device.type == "cpu":
        give_back_freed_memory()
    forget_liger_kernels()  # of an earlier run in this process
    method, compute = inputs.method, options.compute
    build_from = functools.partial(
        build_model,
        sharding=options.sharding,
        objective=inputs.objective,
        weights_dtype=DTYPES[options.optimization.master_weights],
        world=world,
        progress=progress,
    )
    build = functools.partial(build_from, inputs.source(options.model))
    # Without liger-kernel: its rotary embeddings would become those of the run's model as well, which may have to keep
    # outputs that they rotate in place.
    plain = replace(
        compute,
        compile=False,
        activation_checkpointing="none",
        tiled_mlp=False,
        offload_activations=False,
        use_liger_kernels=False,
    )
    method.study(lambda: build(compute=plain, method=Full()), objective=inputs.objective, world=world)
    model = build(compute=compute, method=method)
    check_positions(model.model, longest=inputs.longest)
    check_model(model, inputs.objective, method, world=world)
    if not draws_random_numbers(model, inputs.objective, world=world):
        forget_random_states(model)
    check_compiled(model, inputs.objective, world=world, progress=progress)
    weigh_images(inputs, count_flops(model.model))
    load_start(model)
    build_other = functools.partial(build_from, compute=plain, method=Full(), weights_dtype=inputs.compute_dtype)
    add_teacher(inputs, model, build_other)
    if only_measures:
        assume_reference(inputs)
    else:
        add_reference(options, inputs, model, build_other, world=world, progress=progress)
    log.info(describe_model(options, inputs, model))
    return model


def weigh_images(inputs: RunInputs, flops: FlopCount) -> None:
    """Sets the tower's cost for the data's images, in the packer's unit: a token of the language model."""
    for data in (inputs.data, inputs.validation_data):
        if data is not None and data.images is not None:
            data.weigh_images(flops.of_images(data.images) / flops.per_token)


def keeps_to_budget(options: TrainOptions) -> bool:
    """Whether --memory-budget-gb applies to this run: only if something is "auto"; otherwise only plans use it."""
    is_auto = "auto" in (options.data.max_tokens_per_gpu, options.compute.activation_checkpointing)
    return options.compute.memory_budget_gb is not None and is_auto
