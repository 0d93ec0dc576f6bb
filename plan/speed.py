"""How fast this machine trains: a few micro-batches of the run, for real, on a model that is thrown away."""

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from lifecycle.run_model import build_run_model
from lifecycle.start import open_inputs
from lifecycle.step import TrainState, run_backward, update_weights
from model.flops import count_flops
from optim.optimizers import build_optimizer
from options import TrainOptions
from ranks.world import World
from sampler import RunPosition, iterate_batches

NUM_TIMED = 3  # micro-batches that are timed, after one to warm up


@dataclass(frozen=True)
class Speed:
    """What can be measured of a step in advance."""

    seconds_per_flop: float  # of a micro-batch, on all ranks together
    update_seconds: float


def measure_speed(options: TrainOptions, world: World) -> Speed:
    """Times forward, backward and update of the run that the options make. All ranks call this."""
    inputs = open_inputs(options, device=world.device, world_size=world.world_size, start=RunPosition())
    model = build_run_model(options, inputs, world)
    flops = count_flops(model.model)
    state = TrainState(model, inputs.method, build_optimizer(model, options.optimization), world)
    batches = iterate_batches(
        inputs.data,
        inputs.data_options,
        objective=inputs.objective,
        num_steps=1 + NUM_TIMED,
        attention_cost=flops.attention_cost,
        world=world,
    )
    micro_batches = (
        (batch, row, micro_batch)
        for batch in batches
        for row, micro_batch in zip(batch.table, batch.micro_batches, strict=True)
    )
    seconds = timed_flops = 0.0
    for i, (batch, row, micro_batch) in zip(range(1 + NUM_TIMED), micro_batches, strict=False):
        ids = np.concatenate([np.array(indices, dtype=int) for indices in row])
        begin = now(world)
        run_backward(model, micro_batch.to(world.device), batch.divisors)
        if i > 0:
            seconds += now(world) - begin
            rows, images = batch.sample_ids[ids], inputs.data.images
            num_trained = int(inputs.data.num_loss_tokens[rows].sum())
            timed_flops += flops.of_batch(batch.lengths[ids], num_trained, images and images.of(rows))
    update_weights(state, step=0, lr=0.0)  # makes the optimizer's state
    run_backward(model, micro_batch.to(world.device), batch.divisors)
    begin = now(world)
    update_weights(state, step=1, lr=0.0)
    return Speed(seconds / timed_flops, now(world) - begin)


def now(world: World) -> float:
    """The time when all ranks have got here."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    dist.barrier(group=world.control)
    return time.perf_counter()
