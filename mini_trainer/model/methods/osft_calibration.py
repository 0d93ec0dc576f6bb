"""OSFT's statistics of earlier tasks: the covariance of every layer's inputs on a sample of their data.

Based on gradient projection memory (Saha et al. 2021, arXiv 2103.09762). T tokens.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from mini_trainer.data.stores.disk import hash_file, written_aside
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.devices import GIB, available_memory, memory_limit, resident_memory
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.methods.osft_subspaces import find_targets, load_hashed, read_about, save_hashed, weight_shape
from mini_trainer.objectives.families.text_tower import find_blocks, text_config
from mini_trainer.objectives.objective import Objective
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.options import DataOptions
from mini_trainer.options.reading import check_regular
from mini_trainer.sampler import Batch, iterate_batches

NUM_CALIBRATION_SAMPLES = 512  # maximum number drawn from the data, with the run's seed


@dataclass
class Statistics:
    """Statistics of the layers' inputs on earlier tasks' data, with equal weight for each data set.

    Empty except on rank 0. Layers with the same input (query, key and value) share one covariance, stored under the
    first one's name.
    """

    covariances: dict[str, Tensor] = field(default_factory=dict)  # (in, in) fp64: sum over data sets of mean x x^T
    inputs: dict[str, str] = field(default_factory=dict)  # layer -> layer under whose name its covariance is stored
    data_hashes: list[str] = field(default_factory=list)  # SHA-256 of the data sets' files

    def covariance(self, layer: str) -> Tensor:
        return self.covariances[self.inputs[layer]]


def open_calibration_data(path: str, tokenizer: PreTrainedTokenizerBase, *, max_tokens_per_gpu: int) -> TokenizedData:
    """Opens the calibration data without overlong samples; ValueError if a different tokenizer made it."""
    data = TokenizedData(path, option="--osft-calibration-data")
    if data.sidecar is None:
        log.warning(f"warning: no {path}.meta.json: cannot check whether this tokenizer made the data")
    elif data.sidecar.get("tokenizer_fingerprint") != fingerprint_tokenizer(tokenizer):
        raise ValueError(
            f"--osft-calibration-data {path} was made with a different tokenizer than --data-path: tokenize both with"
            " process_data.py and the same one"
        )
    data.fit_to(max_tokens_per_gpu, drop_overlong=True)
    return data


def check_statistics(statistics: Statistics, targets: dict[str, nn.Linear | Conv1D]) -> None:
    """Refuses statistics of a model with different layers."""
    for name, module in targets.items():
        in_features = weight_shape(module)[1]
        if name not in statistics.inputs or len(statistics.covariance(name)) != in_features:
            raise ValueError(
                f"--osft-statistics: has nothing about the {in_features} inputs of {name}: these are statistics of"
                " another model, or of fewer layers"
            )


@contextmanager
def open_statistics(path: Path) -> Iterator[tuple[safe_open, dict[str, Any]]]:
    """Yields the open file and its contents other than covariances; ValueError, also in the block, if it is invalid."""
    try:
        check_regular(path)
        with safe_open(path, "pt") as file:
            yield file, read_about(file)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"--osft-statistics {path}: not a statistics file: {error!r}") from None


def read_statistics(path: Path) -> Statistics:
    with open_statistics(path) as (file, about):
        return Statistics(load_hashed(file), about["inputs"], about["data_hashes"])


def read_data_hashes(path: Path) -> list[str]:
    """Hashes of the data sets in the file; the large covariances are not read."""
    with open_statistics(path) as (_, about):
        return about["data_hashes"]


def write_statistics(statistics: Statistics, path: Path) -> None:
    about = dict(inputs=statistics.inputs, data_hashes=statistics.data_hashes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as (aside,):
            save_hashed(statistics.covariances, aside, about)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--osft-statistics {path}: cannot be written: {error}") from None


def merge_statistics(old: Statistics, new: Statistics) -> Statistics:
    """Sums two statistics; ValueError if they are from models with different layers."""
    shapes = [{name: tuple(s.covariance(name).shape) for name in s.inputs} for s in (old, new)]
    if shapes[0] != shapes[1] or old.inputs != new.inputs:
        raise ValueError("--osft-statistics: these are from a model with different layers; choose another file")
    return Statistics(
        {name: old.covariances[name] + new.covariances[name] for name in old.covariances},
        old.inputs,
        old.data_hashes + new.data_hashes,
    )


def prepare_statistics(
    path: Path | None,
    data: TokenizedData | None,
    options: DataOptions,
    *,
    build_plain: Callable[[], PackedModel],
    objective: Objective,
    world: World,
    patterns: tuple[str, ...] = (),
) -> Statistics:
    """Statistics of earlier tasks from the file `path`, from `data`, or both; empty except on rank 0.

    `data` is added to the file only once: the file records the hashes of its data. `build_plain` builds the model that
    the data is run through; only the seed and the token cap of `options` matter. The file has all layers; without one
    only those whose names contain one of `patterns` are recorded.
    """
    # Read the file, and check whether it includes this data.
    statistics = Statistics()

    def read() -> list[str]:
        if path is not None and (path.exists() or data is None):
            vars(statistics).update(vars(read_statistics(path)))
        return statistics.data_hashes

    known_hashes = call_on_rank0(world, read)
    data_hash = None if data is None else call_on_rank0(world, lambda: hash_file(data.path)["sha256"])
    if data_hash is None or data_hash in known_hashes:
        return statistics
    # Compute the data's statistics, and add them to the file.
    model = build_plain()
    data.vocab_size = text_config(model.model.config).vocab_size
    batch = next(
        iterate_batches(
            Mixture([data]),
            replace(options, batch_size=min(NUM_CALIBRATION_SAMPLES, len(data.kept)), batch_tokens=None),
            objective=objective,
            num_steps=1,
            attention_cost=0.0,
            world=world,
        )
    )
    found = gather_statistics(
        model, batch, patterns=() if path is not None else patterns, data_hash=data_hash, world=world
    )
    log.info(f"OSFT: statistics of {len(batch.sample_ids)} samples of {data.path}, {batch.lengths.sum():,} tokens")

    def add() -> None:
        merged = merge_statistics(statistics, found) if known_hashes else found
        vars(statistics).update(vars(merged))
        if path is not None:
            write_statistics(statistics, path)

    call_on_rank0(world, add)
    return statistics


@torch.no_grad()
def gather_statistics(
    packed_model: PackedModel, batch: Batch, *, patterns: tuple[str, ...], data_hash: str, world: World
) -> Statistics:
    """Runs each rank's micro-batches of `batch` forward, recording every targeted linear layer.

    All tokens count, trained or not, except those of filler micro-batches of idle ranks. Sums are in fp64. Covariances
    that do not fit into memory together are recorded in several passes, between which rank 0's CPU memory holds them.
    """
    packed_model.eval()
    counts = [len(row[world.rank]) > 0 for row in batch.table]
    sizes = [one.row.input_ids.numel() for one, counting in zip(batch.micro_batches, counts, strict=True) if counting]
    num_tokens = torch.tensor(sum(sizes), dtype=torch.float64, device=world.device)
    dist.all_reduce(num_tokens)
    statistics, recorded, num_passes, is_whole = Statistics(data_hashes=[data_hash]), set(), 0, False
    while not is_whole:
        recorder = Recorder(packed_model, patterns, recorded=recorded, room=find_room(world))
        with recorder.watch():
            for micro_batch, recorder.counting in zip(batch.micro_batches, counts, strict=True):
                packed_model.hidden_states(micro_batch.to(world.device))
        num_passes, is_whole, recorded = num_passes + 1, not recorder.left_out, recorded | set(recorder.covariances)
        call_on_rank0(world, functools.partial(check_room, recorder.left_out))
        for name in list(recorder.covariances):
            total = recorder.covariances.pop(name)
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                statistics.covariances[name] = (total / num_tokens).cpu()
    statistics.inputs = recorder.inputs
    if num_passes > 1:
        log.info(f"OSFT: statistics in {num_passes} passes, each over as many layers as fit into memory")
    return statistics


class Recorder:
    """Sums up, in one pass over the data, the covariances of as many layers' inputs as there is room for."""

    def __init__(self, packed_model: PackedModel, patterns: tuple[str, ...], *, recorded: set[str], room: int):
        """`recorded`: covariances of earlier passes; `room`: bytes for those of this one. There is always one."""
        model = packed_model.model
        self.names = {module: name for name, module in model.named_modules()}
        self.layers = find_targets(model, find_blocks(model), patterns)
        self.recorded, self.room, self.counting = recorded, room, True
        self.covariances: dict[str, Tensor] = {}  # (in, in) fp64: sum of x x^T
        self.left_out: dict[str, int] = {}  # bytes of covariances for a later pass
        self.inputs: dict[str, str] = {}  # as in `Statistics`
        self.last_name, self.last_input = "", None

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = [layer.register_forward_pre_hook(self.record_input) for layer in self.layers.values()]
        yield
        for handle in handles:
            handle.remove()

    def record_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        name, x = self.names[module], args[0]
        if x is not self.last_input:
            self.last_name, self.last_input = name, x
        self.inputs[name] = self.last_name
        if name == self.last_name and name not in self.recorded:
            self.add(name, x.reshape(-1, x.shape[-1]))

    def add(self, name: str, rows: Tensor) -> None:  # (T, in)
        size = 8 * rows.shape[-1] ** 2
        if name not in self.covariances:
            if self.covariances and size > self.room:
                self.left_out[name] = size
                return
            self.room -= size
            self.covariances[name] = rows.new_zeros(rows.shape[-1], rows.shape[-1], dtype=torch.float64)
        if self.counting:
            rows = rows.double()
            self.covariances[name].addmm_(rows.T, rows)


def find_room(world: World) -> int:
    """Bytes of covariances for one pass: half of the memory that is free, on the rank with the least."""
    is_cuda = world.device.type == "cuda"
    used = torch.cuda.memory_allocated(world.device) if is_cuda else resident_memory()
    room = torch.tensor((memory_limit(None, world.device) - used) // 2, device=world.device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    return int(room)


def check_room(left_out: dict[str, int]) -> None:
    """On rank 0, which holds all covariances: ValueError if those of later passes do not fit."""
    needed, available = sum(left_out.values()), available_memory()
    if needed > available:
        raise ValueError(
            f"OSFT by activations needs {needed / GIB:,.1f} GiB more of rank 0's CPU memory, for the covariances of"
            f" {len(left_out):,} layers' inputs, and has {available / GIB:,.1f} GiB: choose fewer layers by"
            " --osft-target-patterns, or --osft-basis weights"
        )
