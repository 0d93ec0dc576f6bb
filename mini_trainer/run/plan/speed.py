"""How fast this machine trains: a few micro-batches of the run, for real, on a model that is thrown away."""

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mini_trainer.distributed.world import World
from mini_trainer.model.flops import count_flops
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.options import TrainOptions
from mini_trainer.run.run_model import build_run_model
from mini_trainer.run.start import open_inputs
from mini_trainer.run.step import TrainState, run_backward, update_weights
from mini_trainer.sampler import RunPosition, iterate_batches

NUM_TIMED = 3  # micro-batches that are timed, after one to warm up


@dataclass(frozen=True)
class Speed:
    """What can be measured of a run in advance."""

    seconds_per_flop: float  # of a micro-batch, on all ranks together
    seconds_per_scored_flop: float  # of a forward pass without gradients
    update_seconds: float


def measure_speed(options: TrainOptions, world: World) -> Speed:
    """Times forward, backward and update of the run that the options make. All ranks call this."""
    inputs = open_inputs(options, device=world.device, world_size=world.world_size, start=RunPosition())
    model = build_run_model(options, inputs, world, only_measures=True)
    flops = count_flops(model.model)
    state = TrainState(model, inputs.method, build_optimizer(model, options.optimization), world)
    batches = iterate_batches(
        inputs.data,
        inputs.data_options,
        objective=inputs.objective,
        batching=inputs.batching,
        num_steps=1 + NUM_TIMED,
        attention_cost=flops.attention_cost,
        world=world,
    )
    micro_batches = (
        (batch, row, micro_batch)
        for batch in batches
        for row, micro_batch in zip(batch.table, batch.micro_batches, strict=True)
    )
    measured = []
    for batch, row, micro_batch in itertools.islice(micro_batches, 1 + NUM_TIMED):
        rows = batch.sample_ids[np.concatenate([np.array(indices, dtype=int) for indices in row])]
        micro_batch = micro_batch.to(world.device)
        times = [now(world)]
        micro_batch = model.prepare(micro_batch)
        if model.looks_ahead:
            model.look_ahead(micro_batch)
        run_backward(model, micro_batch, batch.divisors)
        times.append(now(world))
        if inputs.objective.reference_column is not None:
            model.score(micro_batch)
        times.append(now(world))
        counted = [count(rows, inputs.data, inputs.objective) for count in (flops.of_rows, flops.of_scores)]
        measured.append((*np.diff(times), *counted))
    trained, scored, trained_flops, scored_flops = np.sum(measured[1:], axis=0).tolist()
    update_weights(state, step=0, lr=0.0, num_samples=1)  # makes the optimizer's state
    run_backward(model, micro_batch, batch.divisors)
    begin = now(world)
    update_weights(state, step=1, lr=0.0, num_samples=1)
    return Speed(trained / trained_flops, scored / scored_flops, now(world) - begin)


def now(world: World) -> float:
    """The time when all ranks have got here."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    dist.barrier(group=world.control)
    return time.perf_counter()
