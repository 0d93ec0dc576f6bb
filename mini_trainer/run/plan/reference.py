"""What a reference model has to score before the first step of a run."""

import torch

from mini_trainer.model.build import make_meta_model
from mini_trainer.model.flops import count_flops
from mini_trainer.model.methods.full import Full
from mini_trainer.options import TrainOptions
from mini_trainer.run.inputs import REFERENCE_MODEL, RunInputs
from mini_trainer.run.plan.findings import PlannedReference, Target
from mini_trainer.run.plan.memory import simulated_compute
from mini_trainer.run.plan.simulation import PlannedModel
from mini_trainer.run.reference import find_unscored


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
