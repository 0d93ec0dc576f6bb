"""On 4 ranks: loss and gradients of one global batch, whole rows first, then rows that 2 and 4 ranks share.

torchrun ... shared_rows.py OUTPUT NAME=MODEL...
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "quickstart")]

import torch
import torch.distributed as dist
from small_runs import make_samples_of
from tiny_models import build

from lifecycle.step import run_backward
from objectives.causal_lm import CausalLM
from optim.optimizers import local_gradients
from optim.reduction import reduce_step
from ranks.row_group import count_sharing, make_row_group
from ranks.world import init_world

# Sequences of each row: borders at the border of a part, just before, just after, and several within one; rows that
# divide by 4 and that do not; one sequence over all parts; nothing at all.
ROWS = [
    [(16, 16, 32), (17, 31, 4, 4, 1, 1), (33,), ()],
    [(15, 1, 17, 31), (64,), (2, 2, 2), (5, 9, 3, 3, 3, 3, 30)],
]
output, *models = sys.argv[1:]
world = init_world()
row_groups = {size or 1: make_row_group(world.rank, world.world_size, size) for size in (None, 2, 4)}
results = {}
for name, path in (model.split("=", 1) for model in models):
    objective = CausalLM(router_aux_loss=0.1 if "experts" in name else None)
    model = build(path, world, objective=objective)
    for size, row_group in row_groups.items():
        objective.row_group = row_group
        num_groups, group = world.world_size // count_sharing(row_group), world.rank // count_sharing(row_group)
        rows = [row for step in ROWS for row in step][group::num_groups]
        samples = [make_samples_of(row, seed=len(row) + sum(row)) for row in rows]
        losses, reports = [], []
        for batch in samples:
            losses.append(run_backward(model, objective.pack(batch), divisor=100, num_tokens=100))
            reports.append(model.reports)
        sums = reduce_step(
            losses, local_gradients(model), device=world.device, num_shards=4, data_wait_seconds=0.0, reports=reports
        )
        gradients = {name: param.grad.full_tensor() for name, param in model.model.named_parameters()}
        results[name, size] = dict(
            loss=sums.loss_sum, grad_norm=sums.grad_norm, gradients=gradients, reports=sums.reports
        )
        model.zero_grad()
if world.rank == 0:
    torch.save(results, output)
dist.destroy_process_group()
os._exit(0)  # as train.py ends: gloo's threads and the interpreter's own end do not always go together
