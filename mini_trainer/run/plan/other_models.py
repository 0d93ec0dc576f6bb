"""The work of a reference model before the first step of a run, and of a teacher that reads each micro-batch."""

import itertools

import numpy as np
import torch

from mini_trainer.distributed.devices import DTYPES
from mini_trainer.model.build import make_meta_model
from mini_trainer.model.flops import count_flops
from mini_trainer.model.method import Full
from mini_trainer.run.auto_choice import NUM_BATCHES
from mini_trainer.run.inputs import REFERENCE_MODEL, TEACHER_MODEL, RunInputs
from mini_trainer.run.plan.findings import PlannedReference, PlannedTeacher, Target
from mini_trainer.run.plan.memory import simulated_compute
from mini_trainer.run.plan.simulation import PlannedModel
from mini_trainer.run.references import find_unscored
from mini_trainer.run.step import StepOptions
from mini_trainer.sampler import RunPosition


def plan_reference(
    options: StepOptions, target: Target, inputs: RunInputs, model: PlannedModel | None
) -> PlannedReference | None:
    """The samples that no run has scored, and what the model or --reference-model needs for them."""
    objective = inputs.objective
    if model is None or inputs.data is None or objective is None or objective.reference_column is None:
        return None
    unscored, flops, num_bytes = find_unscored(inputs), model.flops, 0
    num_rows = sum(len(rows) for _, rows in unscored)
    source = inputs.other_models.get(REFERENCE_MODEL)
    if source is not None and num_rows:
        compute, device = simulated_compute(options.compute, target, inputs), torch.device("cpu")
        other = make_meta_model(source, compute, family=inputs.family, method=Full(), device=device).model
        num_params = sum(param.numel() for param in other.parameters())
        flops = count_flops(other)
        if not target.ranks.offloads:
            num_bytes = num_params * inputs.compute_dtype.itemsize // target.ranks.num_shards
    total = sum(flops.of_scores(rows, data, objective) for data, rows in unscored)
    return PlannedReference(num_rows, total, num_bytes)


def plan_teacher(
    options: StepOptions, target: Target, inputs: RunInputs, model: PlannedModel | None
) -> PlannedTeacher | None:
    """The teacher's memory on a rank, and the FLOPs of its forward pass over a batch; None without one."""
    objective, data = inputs.objective, inputs.data
    if model is None or inputs.batching is None or objective is None or objective.teacher_model is None:
        return None
    source = inputs.other_models.get(TEACHER_MODEL)
    if source is None:  # the model as the run starts: copies of what trains
        flops, num_bytes = model.flops, model.num_trainable * DTYPES[options.optimization.master_weights].itemsize
    else:
        compute, device = simulated_compute(options.compute, target, inputs), torch.device("cpu")
        other = make_meta_model(source, compute, family=inputs.family, method=Full(), device=device).model
        flops = count_flops(other)
        num_bytes = sum(param.numel() for param in other.parameters()) * inputs.compute_dtype.itemsize
    rows = np.concatenate(list(itertools.islice(inputs.draw_batches(RunPosition()), NUM_BATCHES)))
    on_rank = 0 if target.ranks.offloads else num_bytes // target.ranks.num_shards
    read = data if inputs.teacher_data is None else inputs.teacher_data  # whose rows have the same numbers
    return PlannedTeacher(flops.of_scores(rows, read, objective) / NUM_BATCHES, on_rank)
