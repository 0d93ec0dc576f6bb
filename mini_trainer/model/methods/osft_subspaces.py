"""OSFT's directions: the layers that have them, their computation, and a cache of the slow decompositions, whose names
are hashes of the matrices.

Letters as in osft.py: a weight is treated as a matrix A of L rows and s columns; k of the s directions are kept.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import show_progress
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.blocks import find_linear_layers
from mini_trainer.model.hashed_tensors import open_hashed, read_hashed, write_hashed
from mini_trainer.model.precision import choose_types
from mini_trainer.options.reading import hash_file

CACHE_VERSION = 2  # version of the cached files' format
# Eigenvalues of a Gram matrix below this share of the largest are recomputed separately: fp64 has 16 digits.
RESOLVED = 1e-8


def find_targets(
    model: PreTrainedModel, blocks: nn.ModuleList, patterns: tuple[str, ...]
) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers inside the blocks whose names contain one of `patterns`; all layers without patterns. Routers
    that stay in fp32 in a bfloat16 model are none of them. ValueError for a pattern that no layer's name contains."""
    found = find_linear_layers(model, blocks)
    types = choose_types(model, (f"{name}.weight" for name in found), torch.bfloat16)
    layers = {name: layer for name, layer in found.items() if types[f"{name}.weight"] == torch.bfloat16}
    unused = [pattern for pattern in patterns if not any(pattern in name for name in layers)]
    if unused or not layers:
        kinds = sorted({name.rpartition(".")[2] for name in layers})
        raise ValueError(
            f"--osft-target-patterns {' '.join(unused)}: contained in no name of a linear layer inside the blocks;"
            f" there are {', '.join(kinds) or 'none'}"
        )
    return {name: layer for name, layer in layers.items() if not patterns or any(p in name for p in patterns)}


def weight_shape(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """Shape (out, in) of the layer's weight."""
    shape = tuple(module.weight.shape)
    return shape[::-1] if isinstance(module, Conv1D) else shape


BASES = {"weights": False, "activations": True}  # whether kept directions come from activations


def is_on_input(module: nn.Linear | Conv1D, basis: str) -> bool:
    """Whether the factored side is the layer's input."""
    out_features, in_features = weight_shape(module)
    return BASES[basis] or in_features <= out_features


def oriented_shape(module: nn.Linear | Conv1D, basis: str) -> tuple[int, int]:
    """(L, s) of the layer's matrix A."""
    out_features, in_features = weight_shape(module)
    return (out_features, in_features) if is_on_input(module, basis) else (in_features, out_features)


def orient(weight: Tensor, *, on_input: bool, is_conv1d: bool) -> Tensor:
    """Converts a weight between its stored layout and A (L, s), in either direction."""
    return (weight if on_input != is_conv1d else weight.T).contiguous()


def count_kept(num_directions: int, unfreeze_rank_ratio: float) -> int:
    """floor(n (1 - R)), robust to rounding: 10 (1 - 0.9) = 1."""
    return math.floor(num_directions * (1 - unfreeze_rank_ratio) + 1e-9)


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Right singular vectors (s, s) and singular values (s,), descending, of a matrix (L, s), L >= s, in fp64. Uses
    `eigh` of the Gram matrix, which loses singular values below 1e-8 of the largest; directions below `RESOLVED` are
    therefore decomposed again separately."""
    values, basis = torch.linalg.eigh(matrix.T @ matrix)
    values, basis = values.flip(0).clamp_(min=0), basis.flip(1)
    num_resolved = max(1, int((values > RESOLVED * values[0]).sum()))
    singular_values = values.sqrt()
    if values[0] > 0 and num_resolved < len(values):
        tail_basis, singular_values[num_resolved:] = decompose(matrix @ basis[:, num_resolved:])
        basis[:, num_resolved:] = basis[:, num_resolved:] @ tail_basis
    return basis, singular_values


def make_subspace(matrix: Tensor, *, device: torch.device) -> dict[str, Tensor]:
    """Computes a layer's tensors to cache, for any R: `basis` (s, s), `singular_values` (s,), `left` (L, L) if square.
    `matrix`: A (L, s), or in fp64 the covariance (s, s) of the inputs, whose singular values and basis are returned."""
    is_covariance = matrix.dtype == torch.float64
    matrix = matrix.to(device, torch.float64)
    if is_covariance:
        values, basis = torch.linalg.eigh(matrix)
        subspace = dict(basis=basis.flip(1), singular_values=values.flip(0).clamp(min=0).sqrt())
    else:
        basis, singular_values = decompose(matrix)
        subspace = dict(basis=basis, singular_values=singular_values)
        if matrix.shape[0] == matrix.shape[1]:
            subspace["left"] = torch.linalg.qr(matrix @ basis, mode="complete").Q  # U, completed where S is 0
    return {
        name: value.to("cpu", torch.float64 if name == "singular_values" else torch.float32).contiguous()
        for name, value in subspace.items()
    }


def prepare_subspaces(
    shapes: dict[str, tuple[int, int]],
    get_matrix: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    cache_dir: Path,
    world: World,
    progress: Callable[[str], None] = lambda where: None,
) -> dict[str, Path]:
    """Returns cache files with the subspaces of all layers, computing missing ones; empty except on rank 0.

    `get_matrix` is called on rank 0 only and returns the argument of `make_subspace`, of shape `shapes[name]` and
    `dtype`; fp64 means covariances. Layers are distributed by size, one per rank at a time; rank 0 sends each matrix to
    the rank that decomposes it, receives the result, and writes it.
    """
    # Find the decompositions missing from the cache.
    files: dict[str, Path] = {}

    def find_missing() -> list[str]:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--osft-cache-dir {cache_dir}: cannot be created: {error}") from None
        for name in show_progress(shapes, "OSFT: hashing", unit="layer"):
            matrix = get_matrix(name)
            if not matrix.isfinite().all():
                raise ValueError(f"{name}: not finite, so it has no singular vectors")
            digest = hashlib.sha256(f"{CACHE_VERSION} {tuple(matrix.shape)} {matrix.dtype}".encode())
            digest.update(as_bytes(matrix).numpy())
            files[name] = cache_dir / f"{digest.hexdigest()}.safetensors"
        unique = {file: name for name, file in files.items()}
        return [name for file, name in unique.items() if not file.exists()]

    missing = call_on_rank0(world, find_missing)
    missing.sort(key=lambda name: shapes[name][1] ** 2 * sum(shapes[name]), reverse=True)
    log.info(
        f"OSFT: directions of {len(shapes)} layers: {len(missing)} matrices to decompose, the rest are in {cache_dir}"
    )
    # Decompose it, one matrix per rank at a time.
    rounds = range(0, len(missing), world.world_size)
    for start in show_progress(rounds, "OSFT: decomposing", unit="layer of each rank"):
        dealt = missing[start : start + world.world_size]
        progress(f"OSFT, after {start} of {len(missing)} decompositions")
        if world.rank == 0:
            for rank, name in enumerate(dealt[1:], start=1):
                dist.send(as_bytes(get_matrix(name)), rank, group=world.control)
            subspace = make_subspace(get_matrix(dealt[0]), device=world.device)
            write_subspace(files[dealt[0]], subspace)
            for rank, name in enumerate(dealt[1:], start=1):
                subspace = empty_subspace(shapes[name], dtype)
                for value in subspace.values():
                    dist.recv(as_bytes(value), rank, group=world.control)
                write_subspace(files[name], subspace)
        elif world.rank < len(dealt):
            matrix = torch.empty(shapes[dealt[world.rank]], dtype=dtype)
            dist.recv(as_bytes(matrix), 0, group=world.control)
            for value in make_subspace(matrix, device=world.device).values():
                dist.send(as_bytes(value), 0, group=world.control)
    return files


def as_bytes(tensor: Tensor) -> Tensor:
    """Views the tensor as flat bytes, for functions that support neither bfloat16 nor several dimensions."""
    return tensor.view(-1).view(torch.uint8)


def empty_subspace(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Empty tensors like those that `make_subspace` returns for a matrix of `shape` and `dtype`, in the same order."""
    num_rows, num_columns = shape
    subspace = dict(
        basis=torch.empty(num_columns, num_columns), singular_values=torch.empty(num_columns, dtype=torch.float64)
    )
    if num_rows == num_columns and dtype != torch.float64:
        subspace["left"] = torch.empty(num_rows, num_rows)
    return subspace


def write_subspace(file: Path, subspace: dict[str, Tensor]) -> None:
    """Writes a cache file atomically, so that runs can share a cache."""
    try:
        write_hashed(file, subspace, {"matrix": file.stem})
    except OSError as error:
        raise ValueError(f"--osft-cache-dir: cannot write {file}: {error}") from None


def read_subspace(file: Path) -> dict[str, Tensor]:
    subspace, about = read_hashed(file, "matrix", what=f"--osft-cache-dir: remove {file}")
    if about["matrix"] != file.stem:
        raise ValueError(f"--osft-cache-dir: remove {file}: it is of another matrix, {about['matrix']}")
    return subspace


NEW = "new"  # --osft-bases of the first task
BASES_FILE = Path("osft", "bases.safetensors")  # in an export; not at its root, where vLLM loads every such file
ADVICE = "give the bases of the export that this run starts from, with the same --osft-basis and --osft-target-patterns"


@dataclass(frozen=True)
class Bases:
    """A layer's directions after the earlier tasks."""

    V_free: Tensor  # (s, r)
    U_kept: Tensor | None = None  # (L, k); None with --osft-basis activations, or if nothing or all is kept


@contextmanager
def open_bases(path: Path) -> Iterator[tuple[safe_open, str]]:
    """Yields the open file and its `--osft-basis`; ValueError, also in the block, if it is not a file of bases."""
    what = f"--osft-bases {path}: not {BASES_FILE} of an export, which OSFT writes, nor {NEW!r} for the first task"
    with open_hashed(path, "basis", what=what) as (file, about):
        yield file, about["basis"]


def hash_bases(path: Path) -> str:
    """SHA-256 of the file; ValueError if it is missing or of another kind."""
    with open_bases(path):
        return hash_file(path)["sha256"]


def count_earlier(option: str | None, shapes: dict[str, tuple[int, int]], basis: str) -> dict[str, int]:
    """Number of directions that earlier tasks keep in each layer of shape (L, s); empty without `--osft-bases`.
    ValueError if the file belongs to other layers or to another `--osft-basis`."""
    if option is None:
        return {}
    if option == NEW:
        return dict.fromkeys(shapes, 0)
    with open_bases(Path(option)) as (file, made_with):
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    if made_with != basis:
        raise ValueError(f"--osft-bases {option}: made with --osft-basis {made_with}, not {basis}; {ADVICE}")
    names = {key.removesuffix(".V_free") for key in stored if key.endswith(".V_free")}
    if names != shapes.keys():
        name = min(names ^ shapes.keys())
        known = "has bases of" if name in names else "has no bases of"
        chosen = "which this run does not constrain" if name in names else "which this run constrains"
        raise ValueError(f"--osft-bases {option}: {known} {name}, {chosen}; {ADVICE}")
    return {name: count_kept_of(option, name, shape, stored, basis=basis) for name, shape in shapes.items()}


def count_kept_of(
    option: str, name: str, shape: tuple[int, int], stored: dict[str, tuple[int, ...]], *, basis: str
) -> int:
    """Number of directions of one layer that the file keeps; ValueError if the layer has another shape there."""
    num_rows, num_columns = shape
    free = stored[f"{name}.V_free"]
    num_kept = num_columns - free[-1]
    expected = (num_rows, num_kept) if not BASES[basis] and 0 < num_kept < num_columns else None
    left = stored.get(f"{name}.U_kept")
    if len(free) != 2 or free[0] != num_columns or num_kept < 0 or left != expected:
        raise ValueError(
            f"--osft-bases {option}: {name} has bases of shape {free} and {left}, which do not fit its weight of"
            f" {num_rows} x {num_columns}: these are of another model; {ADVICE}"
        )
    return num_kept


def read_bases(path: Path, name: str) -> Bases:
    """The directions of one layer."""
    with open_bases(path) as (file, _):
        left = f"{name}.U_kept"
        U_kept = file.get_tensor(left) if left in file.keys() else None  # noqa: SIM118
        return Bases(file.get_tensor(f"{name}.V_free"), U_kept)


def write_bases(bases: dict[str, Bases], path: Path, *, basis: str) -> None:
    tensors = {f"{name}.V_free": layer.V_free for name, layer in bases.items()}
    tensors |= {f"{name}.U_kept": layer.U_kept for name, layer in bases.items() if layer.U_kept is not None}
    path.parent.mkdir()
    write_hashed(path, tensors, {"basis": basis})


def restrict(matrix: Tensor, earlier: Bases, *, device: torch.device) -> Tensor:
    """The part of a weight A (L, s), or of a covariance (s, s), outside the earlier directions, in fp64. Its columns,
    and the covariance's rows, are in the coordinates of V_free: (I - U U^T) A V_free or V_free^T C V_free."""
    V_free = earlier.V_free.to(device, torch.float64)
    part = matrix.to(device, torch.float64) @ V_free
    if earlier.U_kept is None:
        return (V_free.T @ part).cpu()
    U_kept = earlier.U_kept.to(device, torch.float64)
    return (part - U_kept @ (U_kept.T @ part)).cpu()


def complement(basis: Tensor) -> Tensor:  # (n, k) -> (n, n - k)
    """An orthonormal basis, in fp32, of the directions orthogonal to the columns of `basis`."""
    return torch.linalg.qr(basis.double(), mode="complete").Q[:, basis.shape[1] :].float().contiguous()
