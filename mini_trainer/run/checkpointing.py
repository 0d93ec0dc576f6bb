"""Checkpoints for exact resumption: written atomically by all ranks, verified, and read by any number of ranks."""

import contextlib
import re
import shutil
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mini_trainer.data.stores import disk
from mini_trainer.data.stores.contents import FORMAT, write_json, write_manifest
from mini_trainer.distributed.ending import ExitCode, RunError, log
from mini_trainer.distributed.process import count_local_ranks
from mini_trainer.distributed.world import World, call_on_rank0, gather_on_rank0
from mini_trainer.model.method import Method
from mini_trainer.model.optim.optimizers import state_keys
from mini_trainer.model.stored_tensors import check_finite
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options.reading import hash_file, read_json
from mini_trainer.run import checkpoint_files, file_names
from mini_trainer.run.step import TrainState
from mini_trainer.run.write_pool import WritePool

if TYPE_CHECKING:
    from mini_trainer.model.optim.averages import WeightAverage

OPTIMIZER = "optimizer"  # optimizer tensors are named optimizer/<state key>/<parameter>
AVERAGE = "average"  # and those of --weight-average average/<parameter>
WAITING_BYTES = 256 << 20  # of a shard on its way from a GPU to the disk; a larger tensor waits alone


class NoValidCheckpoint(RunError):
    """There is no valid checkpoint to resume from."""

    def __init__(self, message: str):
        super().__init__(ExitCode.NO_VALID_CHECKPOINT, message)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, without the hashes of its files, of which every rank has one."""

    path: Path
    digest: str  # a hash of the manifest, and so of everything in it
    layout: dict[str, Any]  # the manifest's `num_shards` and `tensors`
    state: dict[str, Any]  # the argument of `Checkpointer.save`

    @property
    def num_steps(self) -> int:
        """Optimizer steps up to it, also of the runs that its run has continued."""
        return self.state["position"]["step"] + self.state.get("num_steps_before", 0)

    def open_tensors(self) -> checkpoint_files.TensorReader:
        return checkpoint_files.TensorReader(self.path, self.layout)


class Checkpointer:
    """Writes and reads the checkpoints of one run. All ranks call every method.

    With `is_async`, `save` returns as soon as the state has been copied to the CPU, and a thread writes the copy:
    `is_writing` says on each rank whether its write is still in progress, and `finish` waits for it and commits it.
    `committed` is called with the directory of each checkpoint, once it is complete.
    """

    def __init__(
        self,
        directory: Path,
        *,
        world: World,
        num_kept: int,
        is_async: bool,
        committed: Callable[[Path], None] = lambda path: None,
    ):
        self.directory, self.world, self.num_kept, self.is_async = directory, world, num_kept, is_async
        self.committed = committed
        self.begun: set[Path] = set()  # see `make_aside`
        self.staging: dict[str, Tensor] = {}
        # The same threads for all writes: memory may be too low to start others later.
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.pool = WritePool(num_lanes=1, max_bytes=WAITING_BYTES)
        self.write: Future[dict[str, Any]] | None = None  # the write in progress

    @property
    def is_writing(self) -> bool:
        return self.write is not None and not self.write.done()

    def save(self, train_state: TrainState, *, step: int, state: dict[str, Any]) -> None:
        """Writes `step_N` for N = `step`, after waiting for an earlier write; `state` must be JSON-serializable.
        OSError on every rank if any of them cannot write; existing checkpoints are not changed then."""
        self.finish()
        tensors = collect_tensors(train_state)
        self.state, self.target = state, self.directory / f"step_{step}"
        self.layouts = {name: describe_layout(tensor) for name, tensor in tensors.items()}
        self.needed_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        self.aside = call_on_rank0(
            self.world, lambda: disk.make_aside(self.target, self.needed_bytes, what="the checkpoint", begun=self.begun)
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
        """Waits for a write in progress, if any, and commits it; raises the errors of all ranks."""
        if self.write is not None:
            write, self.write = self.write, None
            self._commit_all(write.result())

    def close(self) -> None:
        """Finishes, and ends the threads."""
        self.finish()
        self.writer.shutdown()
        self.pool.close()

    def _commit_all(self, outcome: dict[str, Any]) -> None:
        """Gathers every rank's `outcome`, and commits on rank 0; then removes old checkpoints."""
        outcomes = gather_on_rank0(self.world, outcome)
        call_on_rank0(self.world, lambda: self._commit(outcomes))
        self.committed(self.target)

    def _stage(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies the tensors to the CPU, into memory that later copies reuse."""
        for name, tensor in shards.items():
            if name not in self.staging:
                self.staging[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self.staging[name].copy_(tensor, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: self.staging[name] for name in shards}

    def _write(self, shards: dict[str, Tensor]) -> dict[str, Any]:
        """Writes this rank's file, if it belongs to the first copy of the model.
        Returns errors as data for `_commit`: no rank raises before all are done."""
        if self.world.rank >= self.world.num_shards:
            return {}
        name = checkpoint_files.shard_name(self.world.rank)
        try:
            return {"file": name, "entry": checkpoint_files.write_tensors(self.aside / name, shards, self.pool)}
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            place = f" on {socket.gethostname()}" if count_local_ranks() < self.world.world_size else ""
            return {"file": name, "error": f"{name}{place}: {str(error) or type(error).__name__}", "errno": number}

    def _commit(self, outcomes: list[dict[str, Any]]) -> None:
        """Rank 0: once all ranks' files are written, writes the rest and renames; then removes old checkpoints."""
        try:
            for error in (outcome for outcome in outcomes if "error" in outcome):
                failure = OSError(error["error"])
                failure.errno = error["errno"]
                raise failure
            files = {outcome["file"]: outcome["entry"] for outcome in outcomes if outcome}
            files[checkpoint_files.STATE] = write_json(self.aside / checkpoint_files.STATE, self.state)
            shards = {"num_shards": self.world.num_shards, "tensors": self.layouts}
            write_manifest(self.aside, {"format": FORMAT, **shards, "files": files})
            disk.put_in_place(self.aside, self.target)  # it exists if the run has resumed from an earlier checkpoint
        except OSError as error:
            message = disk.describe_failed_write(f"the checkpoint {self.target}", error, self.aside, self.needed_bytes)
            shutil.rmtree(self.aside, ignore_errors=True)
            raise OSError(f"{message}. Older checkpoints are unchanged") from None
        num_valid = 0
        for path in file_names.find_checkpoints(self.directory):
            if num_valid == self.num_kept:
                disk.remove_directory(path)
                continue
            with contextlib.suppress(ValueError):  # a file is missing or short; their content is verified on loading
                checkpoint_files.read_manifest(path)
                num_valid += 1

    def choose(self, resume: str) -> Checkpoint | None:
        """Chooses the checkpoint for `--resume`: auto, strict, none, or a checkpoint's path."""
        call_on_rank0(self.world, lambda: checkpoint_files.check_links(self.directory))
        call_on_rank0(self.world, lambda: disk.remove_leftovers(self.directory))
        if resume == "none":
            return None
        if resume in ("auto", "strict"):
            return self.open_newest(strict=resume == "strict")
        checkpoint = self.open(Path(resume))
        newer = call_on_rank0(self.world, lambda: file_names.find_checkpoints(self.directory))
        newer = [path.name for path in newer if file_names.step_of(path) > checkpoint.state["position"]["step"]]
        if newer:
            raise ValueError(
                f"--resume {resume}: {self.directory} has newer checkpoints ({', '.join(newer)}), which the next start"
                " would take for this run's: remove them, or choose a new --output-dir"
            )
        return checkpoint

    def open_newest(self, *, strict: bool) -> Checkpoint | None:
        """Opens the newest valid checkpoint; None if there never was one. A damaged one is renamed, and the next older
        one is tried. NoValidCheckpoint if none is left, or, with `strict`, if the newest is damaged."""
        for path in call_on_rank0(self.world, lambda: file_names.find_checkpoints(self.directory)):
            damage, checkpoint = self._verify(path)
            if damage is None:
                return checkpoint
            if strict:
                raise NoValidCheckpoint(
                    f"--resume strict: {path} is not valid: {damage}; --resume auto tries older ones"
                )
            renamed = call_on_rank0(self.world, lambda path=path: checkpoint_files.set_aside(path))
            log.warning(f"warning: the checkpoint {path} is not valid: {damage}; renamed to {renamed.name}")
        damaged = call_on_rank0(
            self.world, lambda: sorted(path.name for path in self.directory.glob(f"{checkpoint_files.DAMAGED}*"))
        )
        if damaged:
            raise NoValidCheckpoint(
                f"{self.directory}: no valid checkpoint is left, only {', '.join(damaged)}; to start from scratch,"
                " choose a new --output-dir"
            )
        return None

    def open(self, path: Path) -> Checkpoint:
        """Opens the checkpoint at `path`; NoValidCheckpoint if there is none or it is damaged."""
        damage, checkpoint = self._verify(path)
        if damage is not None:
            raise NoValidCheckpoint(f"--resume {path}: is not valid: {damage}")
        return checkpoint

    def verify_origin(self, origin: Checkpoint) -> None:
        """NoValidCheckpoint if a file of the checkpoint of --continue-from is damaged."""
        if (damage := self._find_damage(origin)) is not None:
            raise NoValidCheckpoint(f"--continue-from {origin.path}: is not valid: {damage}")

    def _verify(self, path: Path) -> tuple[str | None, Checkpoint | None]:
        """Returns (None, the checkpoint) if every file is unchanged, else (the problem, None)."""

        def read() -> tuple[str | None, Checkpoint | None]:
            try:
                return None, read_checkpoint(path)
            except ValueError as error:
                return str(error), None

        damage, checkpoint = call_on_rank0(self.world, read)
        return self._find_damage(checkpoint) if damage is None else damage, checkpoint

    def _find_damage(self, checkpoint: Checkpoint) -> str | None:
        """Describes the first damaged file; None if all are unchanged. The ranks share the files."""
        own = range(self.world.rank, checkpoint.layout["num_shards"], self.world.world_size)
        found = gather_on_rank0(
            self.world, {name: hash_file(checkpoint.path / name) for name in map(checkpoint_files.shard_name, own)}
        )
        return call_on_rank0(self.world, lambda: find_damage(checkpoint, found))

    def load(self, checkpoint: Checkpoint, train_state: TrainState) -> None:
        """Fills weights and optimizer state; ValueError if the checkpoint is of a different model or optimizer."""
        self.load_weights(checkpoint, train_state.model, train_state.method)
        self.load_optimizer(checkpoint, train_state)

    def load_weights(self, checkpoint: Checkpoint, model: PackedModel, method: Method) -> None:
        """Fills the weights that the checkpoint has; ValueError if they are of a different model."""
        reader, layouts = checkpoint.open_tensors(), checkpoint.layout["tensors"]
        for name, tensor in collect_weights(model, method).items():
            found, wanted = layouts.get(name), describe_layout(tensor)
            if found is None or (found["shape"], found["dtype"]) != (wanted["shape"], wanted["dtype"]):
                raise ValueError(f"{checkpoint.path}: the model's {name} is {wanted}, the checkpoint's {found}")
            fill(tensor, name, reader)

    def load_optimizer(self, checkpoint: Checkpoint, train_state: TrainState) -> None:
        """Fills the state of optimizer and average; ValueError if the checkpoint is of a different optimizer."""
        reader, layouts = checkpoint.open_tensors(), checkpoint.layout["tensors"]
        optimizer, saved_keys = train_state.optimizer, group_state(layouts)
        for param_name, param in train_state.model.named_parameters():
            if (keys := saved_keys.get(param_name, [])) and set(keys) != state_keys(optimizer, param):
                raise ValueError(
                    f"{checkpoint.path}: was written with a different --optimizer: for {param_name} it has"
                    f" {', '.join(sorted(keys))}, not {', '.join(sorted(state_keys(optimizer, param)))}"
                )
            for key in keys:
                saved_name = f"{OPTIMIZER}/{key}/{param_name}"
                value = make_state(param, layouts[saved_name])
                fill(value, saved_name, reader)
                optimizer.state[param][key] = value
        if train_state.average is not None:
            self.load_average(checkpoint, train_state.average)

    def load_average(self, checkpoint: Checkpoint, average: "WeightAverage") -> None:
        """Fills the average; parameters missing from the checkpoint's start at the restored weights."""
        reader, layouts = checkpoint.open_tensors(), checkpoint.layout["tensors"]
        average.start()
        held = {name for name in average.values if f"{AVERAGE}/{name}" in layouts}
        for name in held:
            fill(average.values[name], f"{AVERAGE}/{name}", reader)
        if not held:
            log.info(f"{checkpoint.path} has no average of weights: --weight-average starts at its weights")


def read_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint without verifying its tensors; ValueError if it is not one or is incomplete."""
    manifest = checkpoint_files.read_manifest(path)
    name = checkpoint_files.STATE
    checkpoint_files.check_hash(name, hash_file(path / name), manifest["files"][name])
    state = read_json(path / name)
    check_state(state, path.name)
    layout = {key: manifest[key] for key in ("num_shards", "tensors")}
    return Checkpoint(path, disk.hash_json(manifest), layout, state)


def check_state(state: Any, name: str) -> None:
    """ValueError if `state` does not have the form that train.py saves, or its step differs from the one in `name`."""
    try:
        position = state["position"]
        keys = {"step", "num_samples", "num_tokens", "num_in_step"}
        is_sound = position.keys() == keys and isinstance(state["identity"], dict)
        counts = [*position.values(), state.get("num_steps_before", 0)]
        is_sound &= all(isinstance(count, int) and count >= 0 for count in counts)
    except (KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{checkpoint_files.STATE} does not have the form that train.py writes")
    if re.fullmatch(file_names.STEP_NAME, name) and name != f"step_{position['step']}":
        raise ValueError(f"{checkpoint_files.STATE} is of step {position['step']}, but the directory's name is {name}")


def find_damage(checkpoint: Checkpoint, found: list[dict[str, dict[str, Any]]]) -> str | None:
    """Describes the first file whose size or hash, as each rank has `found` them, is not the manifest's."""
    try:
        manifest = checkpoint_files.read_manifest(checkpoint.path)
        if disk.hash_json(manifest) != checkpoint.digest:
            raise ValueError("it has been replaced meanwhile")
        for name, entry in sorted(entry for entries in found for entry in entries.items()):
            checkpoint_files.check_hash(name, entry, manifest["files"][name])
        return None
    except ValueError as error:
        return str(error)


def collect_tensors(state: TrainState) -> dict[str, Tensor]:
    """All weights and their optimizer state, by name."""
    tensors, optimizer = collect_weights(state.model, state.method), state.optimizer
    for name, param in state.model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"{OPTIMIZER}/{key}/{name}"] = value
    if state.average is not None:
        tensors |= {f"{AVERAGE}/{name}": value for name, value in state.average.values.items()}
    return tensors


def group_state(names: Iterable[str]) -> dict[str, list[str]]:
    """Keys of the optimizer state by parameter, in the order of the saved `names`."""
    keys: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == OPTIMIZER:
            key, _, param_name = rest.partition("/")
            keys.setdefault(param_name, []).append(key)
    return keys


def collect_weights(model: PackedModel, method: Method) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint holds: all, or only trained parameters, depending on the method."""
    params = {name: param.detach() for name, param in model.named_parameters()
              if param.requires_grad or method.saves_frozen}  # fmt: skip
    saved = model.state_dict().keys() if method.saves_frozen else ()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {f"model/{name}": tensor for name, tensor in (params | buffers).items()}


def describe_layout(tensor: Tensor) -> dict[str, Any]:
    """A tensor's layout for the manifest: `dim` is the sharded dimension; None if rank 0 has the whole tensor."""
    dim = None
    if isinstance(tensor, DTensor):
        *copies, placement = tensor.placements
        assert all(copy.is_replicate() for copy in copies), f"cannot save a tensor that is placed as {copies}"
        assert isinstance(placement, Shard), f"cannot save a tensor that is placed as {placement}"
        dim = placement.dim
    return {"shape": list(tensor.shape), "dtype": checkpoint_files.DTYPES[tensor.dtype], "dim": dim}


@torch.no_grad()
def make_state(param: DTensor, layout: dict[str, Any]) -> Tensor:
    """Zeros for optimizer state of `layout`, sharded like `param`, possibly shorter in the last dimension."""
    dtype = next(dtype for dtype, text in checkpoint_files.DTYPES.items() if text == layout["dtype"])
    if layout["dim"] is None:
        return torch.zeros(layout["shape"], dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype)[..., : layout["shape"][-1]].contiguous()


@torch.no_grad()
def fill(tensor: Tensor, name: str, reader: checkpoint_files.TensorReader) -> None:
    """Fills `tensor`, or this rank's shard of it, with the values saved under `name`."""
    offset = [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        dim, mesh = tensor.placements[-1].dim, tensor.device_mesh["shard"]
        offset[dim], _ = checkpoint_files.chunk_range(tensor.shape[dim], mesh.get_local_rank(), mesh.size())
        tensor = tensor.to_local()
    reader.read(tensor, name, offset)
    check_finite(tensor, name, where=reader.directory)
