"""The report on data and model at a run's start."""

from mini_trainer.distributed.ending import log
from mini_trainer.model.attention import list_heads
from mini_trainer.model.context_parallel import describe_heads
from mini_trainer.model.optim.schedules import learning_rate_at
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.options import TrainOptions
from mini_trainer.run.inputs import RunInputs
from mini_trainer.sampler import RunPosition


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
        f"data: {len(data.kept):,} samples, {data.num_tokens:,} tokens{dropped}{sources}\n"
        f"run: {'no end' if num_steps is None else f'{num_steps:,} steps'} of {inputs.batching}"
        f"{'; nothing is left to train' if num_steps is not None and start.step >= num_steps else ''}"
    )


def describe_schedule(inputs: RunInputs, options: TrainOptions, *, start: RunPosition) -> list[str]:
    """Where the run begins and which learning rate is next, if it continues or shares a schedule; else no line."""
    origin, o, step = inputs.origin, options.optimization, inputs.num_steps_before + start.step
    if origin is None and o.schedule_steps is None:
        return []
    lr = learning_rate_at(step, o, num_steps=inputs.schedule_steps)
    total = "" if o.schedule_steps is None else f" of {o.schedule_steps:,}"
    own = f"schedule: this run's step {start.step + 1:,} is step {step + 1:,}{total}, with a learning rate of {lr:g}"
    if origin is None:
        return [own]
    return [f"start: weights and optimizer state of {origin.path}, after {origin.num_steps:,} steps", own]


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
        f"objective {inputs.objective.title}",
    ]
    return (
        f"model: {inputs.config.model_type}, {num_params:,} parameters; {', '.join(parts)};"
        " packing and loss agree with the model's own forward pass"
    )
