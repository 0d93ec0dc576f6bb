"""A model as a run's validation has it, and what that says of a tokenized set's samples."""

from collections.abc import Iterator

import numpy as np
import torch

from batch_packer import pack_batch
from corpus.mixture import Mixture
from inference.models import FoundModel
from methods.full import Full
from methods.lora import LoRA
from methods.lora_files import read_config
from model.build import build_model
from model.check import check_model
from model.config import ModelSource
from model.method import Method
from objectives.objective import Objective, Scores
from objectives.packed_model import PackedModel
from options import ComputeOptions, LoRAOptions, ShardingOptions
from ranks.terminal import show_progress
from ranks.world import World

NUM_PACKED = 8192  # samples that are packed together


def build_scorer(found: FoundModel, objective: Objective, *, dtype: str, world: World) -> PackedModel:
    """The model as a run would have it in a validation. All ranks call this."""
    if dtype == "float16":
        raise ValueError("--dtype float16: --data is computed in bfloat16 or float32, as a run does it")
    method = choose_method(found)
    model = build_model(
        ModelSource(found.directory, found.config, found.trust_remote_code, name=found.base_name),
        ComputeOptions(compute_dtype=dtype, activation_checkpointing="none"),
        ShardingOptions(),
        objective=objective,
        method=method,
        world=world,
    )
    check_model(model, objective, method, world=world)
    return model.eval()


def choose_method(found: FoundModel) -> Method:
    """What puts an adapter's layers into the model."""
    if found.adapter is None:
        return Full()
    method = LoRA(LoRAOptions(lora=True, lora_adapter=str(found.adapter)), seed=0)
    method.given = read_config(found.adapter, flag="--model")
    return method


@torch.no_grad()
def score_batches(
    model: PackedModel, data: Mixture, objective: Objective, *, cap: int, world: World
) -> Iterator[tuple[np.ndarray, Scores]]:
    """Of this rank's micro-batches the rows (n,), and what `PackedModel.score` says of them, each a source of its own.

    As many as every other rank has; one may be empty.
    """
    batches = list(plan_batches(data, max(cap, data.longest), world=world))
    for rows in show_progress(batches, "samples", unit="batch"):
        samples = [data.read(row) for row in rows.tolist()] or [objective.make_idle_sample()]
        micro_batch = objective.pack(samples, sources=np.arange(len(samples)), num_sources=len(samples))
        yield rows, model.score(micro_batch.to(world.device))


def plan_batches(data: Mixture, cap: int, *, world: World) -> Iterator[np.ndarray]:  # of (rows,)
    """This rank's rows, a micro-batch at a time; as many as every other rank has, the last of which may be empty."""
    for start in range(0, len(data.kept), NUM_PACKED):
        rows = data.kept[start : start + NUM_PACKED]
        for cell in pack_batch(data.lengths[rows], cap, world.world_size):
            yield rows[cell[world.rank]]
