"""Under torchrun: a few steps under each set of options: what they gather, and what comes of them, saved by rank 0.

torchrun ... resharding.py MODEL NUM_MICRO_BATCHES OUTPUT OPTIONS_AS_JSON...
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from small_runs import make_samples_of, save_and_end
from tiny_models import build
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from mini_trainer.distributed.world import World, count_sharing, divide_world, init_world
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.start import choose_method
from mini_trainer.run.step import TrainState, train_step
from mini_trainer.sampler import Batch

NUM_STEPS, LENGTHS = 3, (17, 6, 9)
model_dir, num_micro_batches, output, *cases = sys.argv[1:]
gathered, to_unsharded = [], FSDPParamGroup._to_unsharded


def record_gathering(group: FSDPParamGroup) -> None:
    if not group.is_unsharded:
        gathered.append(group)
    to_unsharded(group)


def pack(seed: int, world: World) -> MicroBatch:
    own = seed + 1000 * (world.rank // count_sharing(world.row_group))
    return CausalLM().pack(make_samples_of(LENGTHS, seed=own), row_group=world.row_group)


def take_steps(values: dict, world: World) -> dict:
    """Loss, gradient norm, gathered units and loss on other data of every step, and the weights at the end."""
    options = group_options(TrainOptions, model_name_or_path=model_dir, data_path="", output_dir="", **values)
    world, method = divide_world(world, options.sharding), choose_method(options)
    model = build(Path(model_dir), world, dtype=torch.bfloat16, method=method, **values)
    state = TrainState(model, method, build_optimizer(model, options.optimization), world)
    num_tokens = sum(LENGTHS) * int(num_micro_batches) * world.world_size // count_sharing(world.row_group)
    divisors, nothing, steps = CausalLM().weigh(num_tokens, num_tokens, ()), np.zeros(0), []
    for step in range(NUM_STEPS):
        micro_batches = [pack(100 * step + k, world) for k in range(int(num_micro_batches))]
        batch = Batch(step, nothing, nothing, num_tokens, divisors, [], micro_batches, data=None)
        gathered.clear()
        sums = train_step(state, batch, choose_step_options(options), lr=1e-2)
        num_gathered = len(gathered)
        with torch.no_grad():  # between two steps, as a validation
            held_out = model.score(pack(7777, world)).sums
        reshard(model)
        steps.append(dict(loss=sums.loss_sum, norm=sums.grad_norm, held_out=held_out.tolist(), gathered=num_gathered))
    weights = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    return dict(steps=steps, weights=weights)


FSDPParamGroup._to_unsharded = record_gathering
whole = init_world()
results = [take_steps(json.loads(case), whole) for case in cases]
save_and_end(results, output, whole)
