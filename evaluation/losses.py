"""Losses of a model on tokenized sets, a sample at a time, by what a run's validation computes them with."""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from batch_packer import pack_batch
from chat.masking import fingerprint_tokenizer
from corpus.mixture import Mixture
from corpus.reader import TokenizedData
from disk import written_aside
from evaluation.comparison import Scores
from evaluation.models import is_made_by
from evaluation.results import Measured
from inference.models import FoundModel
from methods.full import Full
from methods.lora import LoRA
from methods.lora_files import read_config
from model.build import build_model
from model.check import check_model
from model.config import ModelSource, check_rope
from model.fingerprints import fingerprint_data
from model.method import Method
from objectives.causal_lm import MAX_EXPONENT, CausalLM
from objectives.columns import CAUSAL_LM
from objectives.objective import Objective, PackedModel
from options import ComputeOptions, LoRAOptions, ShardingOptions
from ranks.terminal import show_progress
from ranks.world import World, call_on_rank0

NUM_PACKED = 8192  # samples that are packed together
SUMS = ("loss_sum", "num_right", "num_targets")  # of a sample, as files name them


def open_set(path: str) -> Mixture:
    """A tokenized data set; ValueError where nothing of it has a loss."""
    data = Mixture([TokenizedData(path, option="--data")])
    if data.task.objective != CAUSAL_LM:
        raise ValueError(
            f"--data {path}: is for {data.task.describe()}, and losses of language models are measured here; train.py's"
            " --validation-data-path measures the others"
        )
    if data.num_loss_tokens.sum() == 0:
        raise ValueError(f"--data {path}: no token of it is trained, so it has no loss")
    return data


def check_set(data: Mixture, found: FoundModel) -> None:
    """ValueError if the set was made with another tokenizer than the model's, or its samples are too long for it."""
    path = data.sources[0].path
    sidecar = data.sources[0].sidecar
    if sidecar is not None and sidecar["tokenizer_fingerprint"] != fingerprint_tokenizer(found.tokenizer):
        raise ValueError(
            f"--data {path}: was made with another tokenizer than that of {found.name}: tokenize it with that model's"
            " (losses of different tokenizers cannot be compared)"
        )
    data.vocab_size = found.config.get_text_config(decoder=True).vocab_size
    check_rope(found.config, longest=data.longest)


def build_scorer(found: FoundModel, *, dtype: str, world: World) -> PackedModel:
    """The model as a run would have it in a validation. All ranks call this."""
    objective, method = CausalLM(), choose_method(found)
    if dtype == "float16":
        raise ValueError("--dtype float16: --data is computed in bfloat16 or float32, as a run does it")
    model = build_model(
        ModelSource(found.directory, found.config, found.trust_remote_code, name=found.base_name),
        ComputeOptions(compute_dtype=dtype, activation_checkpointing="none"),
        ShardingOptions(),
        objective=objective,
        method=method,
        world=world,
    )
    check_model(model, objective, method, device=world.device)
    return model.eval()


def choose_method(found: FoundModel) -> Method:
    """What puts an adapter's layers into the model."""
    if found.adapter is None:
        return Full()
    method = LoRA(LoRAOptions(lora=True, lora_adapter=str(found.adapter)), seed=0)
    method.given = read_config(found.adapter, flag="--model")
    return method


@torch.no_grad()
def score_samples(
    model: PackedModel, data: Mixture, objective: Objective, *, cap: int, world: World
) -> np.ndarray:  # (samples, scores) fp64
    """What `PackedModel.score` says of each sample: its summed loss, targets that were likeliest, and targets."""
    sums = torch.zeros(len(data.lengths), 3, dtype=torch.float64)
    batches = list(plan_batches(data, max(cap, data.longest), world=world))
    for rows in show_progress(batches, "losses", unit="batch"):
        samples = [data.read(row) for row in rows.tolist()] or [objective.make_idle_sample()]
        micro_batch = objective.pack(samples, sources=np.arange(len(samples)), num_sources=len(samples))
        scores = model.score(micro_batch.to(world.device)).sums
        if len(rows):
            sums[rows] = scores.cpu()
    sums = sums.to(world.device)
    dist.all_reduce(sums)
    return sums.cpu().numpy()


def plan_batches(data: Mixture, cap: int, *, world: World) -> Iterator[np.ndarray]:  # of (rows,)
    """This rank's rows, a micro-batch at a time; as many as every other rank has, the last of which may be empty."""
    for start in range(0, len(data.kept), NUM_PACKED):
        rows = data.kept[start : start + NUM_PACKED]
        for cell in pack_batch(data.lengths[rows], cap, world.world_size):
            yield rows[cell[world.rank]]


def measure_losses(
    found: FoundModel, data_sets: dict[str, Mixture], folder: Path, *, dtype: str, cap: int, world: World
) -> dict[str, np.ndarray]:  # of (samples, 3)
    """Every set's scores of its samples, by its name; those that are in `folder` are read. All ranks call this."""
    identity = found.identify() | {"dtype": dtype, "device": world.device.type, "torch": torch.__version__}
    scorer, sums = None, {}
    for name, data in data_sets.items():
        (source,) = data.sources
        digest = fingerprint_data(source.path, source=None, lengths=source.lengths, kept=source.kept)
        path, made_by = folder / f"{name}.losses.jsonl", identity | {"data": digest}
        if not call_on_rank0(world, lambda path=path, made_by=made_by: is_made_by(path, made_by)):
            scorer = scorer or build_scorer(found, dtype=dtype, world=world)
            scores = score_samples(scorer, data, CausalLM(), cap=cap, world=world)
            call_on_rank0(world, functools.partial(write_sums, path, scores, made_by))
        sums[name] = np.array([list(json.loads(line).values())[1:] for line in path.read_text().splitlines()])
    return sums


def write_sums(path: Path, sums: np.ndarray, made_by: dict[str, Any]) -> None:
    lines = [dict(zip(("index", *SUMS), (i, *row), strict=True)) for i, row in enumerate(sums.tolist())]
    with written_aside(path, path.with_suffix(".made_by.json")) as (aside, beside):
        aside.write_text("".join(json.dumps(line) + "\n" for line in lines))
        beside.write_text(json.dumps(made_by))


def collect_losses(name: str, data: Mixture, sums: Sequence[np.ndarray]) -> Measured:
    """All models' sums, side by side; samples of which nothing is trained are left out."""
    together = np.stack(sums)  # (models, samples, 3)
    kept = np.flatnonzero(together[0, :, 2] > 0)
    losses, right, targets = together[:, kept, 0], together[:, kept, 1], together[0, kept, 2]
    scores = [Scores("loss", losses, targets, higher_is_better=False), Scores("token_accuracy", right, targets)]
    samples = [
        [{"scores": {"loss": loss, "token_accuracy": share}} for loss, share in zip(*rows, strict=True)]
        for rows in zip((losses / targets).tolist(), (right / targets).tolist(), strict=True)
    ]
    shown = [{"place": f"sample {i}", "prompt": "", "references": []} for i in kept.tolist()]
    extras = [
        {"perplexity": math.exp(min(mean, MAX_EXPONENT)), "num_loss_counted_tokens": int(targets.sum())}
        for mean in (losses.sum(1) / targets.sum()).tolist()
    ]
    return Measured(name, "losses", shown, samples, scores, extras)
