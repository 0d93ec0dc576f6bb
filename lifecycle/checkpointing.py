"""Checkpoints, from which a run resumes exactly: written aside by all ranks, verified, read by any number of them."""

import re
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from disk import commit, describe_failed_write, make_aside, read_json, remove_directory, remove_leftovers
from lifecycle.checkpoint_files import (
    DAMAGED,
    DTYPES,
    FORMAT,
    STATE,
    STEP_NAME,
    TensorReader,
    check_hash,
    check_links,
    chunk_range,
    find_checkpoints,
    read_manifest,
    set_aside,
    shard_name,
    step_of,
    write_json,
    write_manifest,
    write_tensors,
)
from lifecycle.step import TrainState
from optim.optimizers import state_keys
from pretrained.finite import check_finite
from ranks.ending import ExitCode, RunError, log
from ranks.world import World, call_on_rank0, gather_on_rank0

OPTIMIZER = "optimizer"  # the optimizer's tensors are named optimizer/<key of the state>/<parameter>


class NoValidCheckpoint(RunError):
    """There is nothing to resume from that can be trusted."""

    def __init__(self, message: str):
        super().__init__(ExitCode.NO_VALID_CHECKPOINT, message)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that has been verified."""

    path: Path
    manifest: dict[str, Any]
    state: dict[str, Any]  # what `Checkpointer.save` was given


class Checkpointer:
    """Writes and reads the checkpoints of one run. All ranks call every method.

    With `is_async`, `save` returns as soon as the state has been copied to the CPU, and a thread writes the copy:
    `is_writing` says on each rank whether it still does, and `finish` waits for it and makes it a checkpoint.
    """

    def __init__(self, directory: Path, *, world: World, num_kept: int, is_async: bool):
        self.directory, self.world, self.num_kept, self.is_async = directory, world, num_kept, is_async
        self.staging: dict[str, Tensor] = {}
        # One thread for all writes: there may be no memory to start another when the next one is due.
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.write: Future[dict[str, Any]] | None = None  # the write under way

    @property
    def is_writing(self) -> bool:
        return self.write is not None and not self.write.done()

    def save(self, train_state: TrainState, *, step: int, state: dict[str, Any]) -> None:
        """Writes `step_N` for N = `step`, once an earlier write has ended; `state` has to be JSON.

        OSError on every rank if any of them cannot write; the checkpoints that there are stay as they were.
        """
        self.finish()
        tensors = collect_tensors(train_state)
        self.state, self.target = state, self.directory / f"step_{step}"
        self.layouts = {name: describe_layout(tensor) for name, tensor in tensors.items()}
        self.needed_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        self.aside = call_on_rank0(
            self.world, lambda: make_aside(self.target, self.needed_bytes, what="the checkpoint")
        )
        shards = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in tensors.items()
            if self.world.rank == 0 or (isinstance(tensor, DTensor) and self.world.rank < self.world.num_shards)
        }
        if self.is_async:
            self.write = self.writer.submit(self._write, self._stage(shards))
        else:
            self._commit_all(self._write(shards))

    def finish(self) -> None:
        """Waits for the write under way, if there is one, and commits it; raises what went wrong on any rank."""
        if self.write is not None:
            write, self.write = self.write, None
            self._commit_all(write.result())

    def _commit_all(self, outcome: dict[str, Any]) -> None:
        """With every rank's `outcome` rank 0 decides."""
        outcomes = gather_on_rank0(self.world, outcome)
        call_on_rank0(self.world, lambda: self._commit(outcomes))

    def _stage(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy on the CPU, in memory that is kept for the next one."""
        for name, tensor in shards.items():
            if name not in self.staging:
                self.staging[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self.staging[name].copy_(tensor, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: self.staging[name] for name in shards}

    def _write(self, shards: dict[str, Tensor]) -> dict[str, Any]:
        """Writes this rank's file, if it is one of the first copy of the model.

        What happened is data for `_commit`: no rank raises before all are done.
        """
        if self.world.rank >= self.world.num_shards:
            return {}
        name = shard_name(self.world.rank)
        try:
            return {"file": name, "entry": write_tensors(self.aside / name, shards)}
        except Exception as error:
            return {"file": name, "error": str(error) or type(error).__name__}

    def _commit(self, outcomes: list[dict[str, Any]]) -> None:
        """Rank 0: with every rank's file written, writes the rest and renames; then removes what is too old."""
        try:
            errors = [outcome for outcome in outcomes if "error" in outcome]
            if errors:
                raise OSError(f"{errors[0]['file']}: {errors[0]['error']}")
            files = {outcome["file"]: outcome["entry"] for outcome in outcomes if outcome}
            files[STATE] = write_json(self.aside / STATE, self.state)
            shards = {"num_shards": self.world.num_shards, "tensors": self.layouts}
            write_manifest(self.aside, {"format": FORMAT, **shards, "files": files})
            if self.target.exists():  # of a run that resumed from an earlier one
                remove_directory(self.target)
            commit(self.aside, self.target)
        except OSError as error:
            message = describe_failed_write(f"the checkpoint {self.target}", error, self.aside, self.needed_bytes)
            shutil.rmtree(self.aside, ignore_errors=True)
            raise OSError(f"{message}. Older checkpoints are as they were") from None
        num_valid = 0
        for path in find_checkpoints(self.directory):
            if num_valid == self.num_kept:
                remove_directory(path)
            else:
                num_valid += is_whole(path)

    def choose(self, resume: str) -> Checkpoint | None:
        """What `--resume` asks for: auto, strict, none, or a checkpoint's path."""
        call_on_rank0(self.world, lambda: check_links(self.directory))
        call_on_rank0(self.world, lambda: remove_leftovers(self.directory))
        if resume == "none":
            return None
        if resume in ("auto", "strict"):
            return self.open_newest(strict=resume == "strict")
        checkpoint = self.open(Path(resume))
        newer = call_on_rank0(self.world, lambda: find_checkpoints(self.directory))
        newer = [path.name for path in newer if step_of(path) > checkpoint.state["position"]["step"]]
        if newer:
            raise ValueError(
                f"--resume {resume}: {self.directory} holds newer checkpoints ({', '.join(newer)}), which the next"
                " start would take for this run's: remove them, or name a new --output-dir"
            )
        return checkpoint

    def open_newest(self, *, strict: bool) -> Checkpoint | None:
        """The newest valid checkpoint, verified; None where there never was one.

        One that is damaged is set aside, and the next older one taken. NoValidCheckpoint if none is left; with
        `strict` if the newest is damaged.
        """
        for path in call_on_rank0(self.world, lambda: find_checkpoints(self.directory)):
            damage, checkpoint = self._verify(path)
            if damage is None:
                return checkpoint
            if strict:
                raise NoValidCheckpoint(
                    f"--resume strict: {path} cannot be trusted: {damage}; --resume auto takes an older one"
                )
            renamed = call_on_rank0(self.world, lambda path=path: set_aside(path))
            log.warning(f"warning: the checkpoint {path} cannot be trusted: {damage}; set aside as {renamed.name}")
        damaged = call_on_rank0(self.world, lambda: sorted(path.name for path in self.directory.glob(f"{DAMAGED}*")))
        if damaged:
            raise NoValidCheckpoint(
                f"{self.directory}: no checkpoint is left that can be trusted, only {', '.join(damaged)}; to start from"
                " zero, name a new --output-dir"
            )
        return None

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint at `path`, verified; NoValidCheckpoint if it is none, or damaged."""
        damage, checkpoint = self._verify(path)
        if damage is not None:
            raise NoValidCheckpoint(f"--resume {path}: cannot be trusted: {damage}")
        return checkpoint

    def _verify(self, path: Path) -> tuple[str | None, Checkpoint | None]:
        """(None, the checkpoint) if every file is as it was written, else (what is wrong, None)."""

        def read() -> tuple[str | None, Checkpoint | None]:
            try:
                manifest = read_manifest(path)
                check_hash(path, STATE, manifest["files"][STATE])
                state = read_json(path / STATE)
                check_state(state, path.name)
                return None, Checkpoint(path, manifest, state)
            except ValueError as error:
                return str(error), None

        damage, checkpoint = call_on_rank0(self.world, read)
        if damage is None:
            names = sorted(checkpoint.manifest["files"])[self.world.rank :: self.world.world_size]
            damages = gather_on_rank0(self.world, find_damage(path, names, checkpoint.manifest))
            damage = call_on_rank0(self.world, lambda: next((damage for damage in damages if damage), None))
        return damage, checkpoint

    def load(self, checkpoint: Checkpoint, train_state: TrainState) -> None:
        """Fills weights and optimizer state; ValueError if they are not the same model's."""
        reader, layouts = TensorReader(checkpoint.path, checkpoint.manifest), checkpoint.manifest["tensors"]
        optimizer = train_state.optimizer
        for name, tensor in collect_weights(train_state).items():
            found, wanted = layouts.get(name), describe_layout(tensor)
            if found is None or (found["shape"], found["dtype"]) != (wanted["shape"], wanted["dtype"]):
                raise ValueError(f"{checkpoint.path}: the model's {name} is {wanted}, the checkpoint's {found}")
            fill(tensor, name, reader)
        saved_keys = group_state(layouts)
        for param_name, param in train_state.model.named_parameters():
            keys = saved_keys.get(param_name, [])
            if keys and set(keys) != state_keys(optimizer, param):
                raise ValueError(
                    f"{checkpoint.path}: was written by another --optimizer: of {param_name} it holds"
                    f" {', '.join(sorted(keys))}, and not {', '.join(sorted(state_keys(optimizer, param)))}"
                )
            for key in keys:
                saved_name = f"{OPTIMIZER}/{key}/{param_name}"
                value = make_state(param, layouts[saved_name])
                fill(value, saved_name, reader)
                optimizer.state[param][key] = value


def collect_tensors(state: TrainState) -> dict[str, Tensor]:
    """Everything that a run has learnt, by name: weights, and the optimizer's state of each."""
    tensors, optimizer = collect_weights(state), state.optimizer
    for name, param in state.model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"{OPTIMIZER}/{key}/{name}"] = value
    return tensors


def group_state(names: Iterable[str]) -> dict[str, list[str]]:
    """The keys of the optimizer's state by parameter, in the order of the saved `names`."""
    keys: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == OPTIMIZER:
            key, _, param_name = rest.partition("/")
            keys.setdefault(param_name, []).append(key)
    return keys


def collect_weights(state: TrainState) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint holds: all of them, or what trains, as the method says."""
    model = state.model
    params = {name: param.detach() for name, param in model.named_parameters()
              if param.requires_grad or state.method.saves_frozen}  # fmt: skip
    saved = model.state_dict().keys() if state.method.saves_frozen else ()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {f"model/{name}": tensor for name, tensor in (params | buffers).items()}


def describe_layout(tensor: Tensor) -> dict[str, Any]:
    """What the manifest says of a tensor: `dim` is the one along which the ranks share it; None if rank 0 has it."""
    dim = None
    if isinstance(tensor, DTensor):
        *copies, placement = tensor.placements
        assert all(copy.is_replicate() for copy in copies), f"cannot save a tensor that is placed as {copies}"
        assert isinstance(placement, Shard), f"cannot save a tensor that is placed as {placement}"
        dim = placement.dim
    return {"shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype], "dim": dim}


@torch.no_grad()
def make_state(param: DTensor, layout: dict[str, Any]) -> Tensor:
    """Zeros for optimizer state of `layout`, shared among the ranks as `param` is; shorter in the last dimension."""
    dtype = next(dtype for dtype, text in DTYPES.items() if text == layout["dtype"])
    if layout["dim"] is None:
        return torch.zeros(layout["shape"], dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype)[..., : layout["shape"][-1]].contiguous()


@torch.no_grad()
def fill(tensor: Tensor, name: str, reader: TensorReader) -> None:
    """Gives `tensor`, or this rank's shard of it, the values saved under `name`."""
    offset = [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        dim, mesh = tensor.placements[-1].dim, tensor.device_mesh["shard"]
        offset[dim], _ = chunk_range(tensor.shape[dim], mesh.get_local_rank(), mesh.size())
        tensor = tensor.to_local()
    reader.read(tensor, name, offset)
    check_finite(tensor, name, where=reader.directory)


def check_state(state: Any, name: str) -> None:
    """ValueError if `state` is not what train.py saves, or the checkpoint's `name` tells another step than it does."""
    try:
        position = state["position"]
        is_sound = position.keys() == {"step", "num_samples", "num_tokens"} and isinstance(state["identity"], dict)
        is_sound &= all(isinstance(count, int) and count >= 0 for count in position.values())
    except (KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{STATE} is not of the form that train.py writes")
    if re.fullmatch(STEP_NAME, name) and name != f"step_{position['step']}":
        raise ValueError(f"{STATE} is of step {position['step']}, and the directory's name is {name}")


def is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there in full; their content is verified when it is loaded."""
    try:
        read_manifest(path)
        return True
    except ValueError:
        return False


def find_damage(path: Path, names: list[str], manifest: dict[str, Any]) -> str | None:
    """What is wrong with the first of the files `names` that is not as it was written."""
    try:
        for name in names:
            check_hash(path, name, manifest["files"][name])
        return None
    except ValueError as error:
        return str(error)
