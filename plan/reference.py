"""What a reference model has to score before the first step of a run."""

import torch

from lifecycle.inputs import REFERENCE_MODEL, RunInputs
from lifecycle.reference import find_unscored
from methods.full import Full
from model.build import make_meta_model
from model.flops import count_flops
from options import TrainOptions
from plan.findings import PlannedReference, Target
from plan.memory import simulated_compute
from plan.simulation import PlannedModel


def plan_reference(
    options: TrainOptions, target: Target, inputs: RunInputs, model: PlannedModel | None
) -> PlannedReference | None:
    """The samples that no run has scored, and what the model or --reference-model needs for them."""
    objective = inputs.objective
    if model is None or inputs.data is None or objective is None or objective.reference_column is None:
        return None
    unscored, flops, num_bytes = find_unscored(options, inputs), model.flops, 0
    num_rows = sum(len(rows) for _, rows in unscored)
    source = inputs.other_models.get(REFERENCE_MODEL)
    if source is not None and num_rows:
        compute, device = simulated_compute(options, target, inputs), torch.device("cpu")
        other = make_meta_model(source, compute, family=inputs.family, method=Full(), device=device).model
        num_params = sum(param.numel() for param in other.parameters())
        flops = count_flops(other)
        if not target.ranks.offloads:
            num_bytes = num_params * inputs.compute_dtype.itemsize // target.ranks.num_shards
    total = sum(flops.of_scores(rows, data, objective) for data, rows in unscored)
    return PlannedReference(num_rows, total, num_bytes)
