"""OSFT's bases: the directions that the tasks so far keep, which an export holds for the run of the next task.

Letters as in osft.py; "earlier" directions are those of `--osft-bases`. A file holds, of each layer, `V_free` (s, r),
an orthonormal basis of the directions that are not kept, and `U_kept` (L, k) where the output side is kept too.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mini_trainer.data.stores.disk import hash_file
from mini_trainer.model.methods.osft_subspaces import BASES
from mini_trainer.options.reading import check_regular

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
    try:
        check_regular(path)
        with safe_open(path, "pt") as file:
            yield file, json.loads(file.metadata()["about"])["basis"]
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"--osft-bases {path}: not a file of bases that OSFT has written: {error!r}; give {BASES_FILE} of an"
            f" export, or {NEW!r} for the first task"
        ) from None


def hash_bases(path: Path) -> str:
    """SHA-256 of the file; ValueError if it is missing or of another kind."""
    with open_bases(path):
        return hash_file(path)["sha256"]


def count_earlier(option: str | None, shapes: dict[str, tuple[int, int]], basis: str) -> dict[str, int]:
    """Number of directions that earlier tasks keep in each layer of shape (L, s); empty without `--osft-bases`.

    ValueError if the file belongs to other layers or to another `--osft-basis`.
    """
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
    save_file(tensors, path, metadata={"about": json.dumps({"basis": basis})})


def restrict(matrix: Tensor, earlier: Bases, *, device: torch.device) -> Tensor:
    """The part of a weight A (L, s), or of a covariance (s, s), outside the earlier directions, in fp64.

    Its columns, and the covariance's rows, are in the coordinates of V_free: (I - U U^T) A V_free or V_free^T C V_free.
    """
    V_free = earlier.V_free.to(device, torch.float64)
    part = matrix.to(device, torch.float64) @ V_free
    if earlier.U_kept is None:
        return (V_free.T @ part).cpu()
    U_kept = earlier.U_kept.to(device, torch.float64)
    return (part - U_kept @ (U_kept.T @ part)).cpu()


def complement(basis: Tensor) -> Tensor:  # (n, k) -> (n, n - k)
    """An orthonormal basis, in fp32, of the directions orthogonal to the columns of `basis`."""
    return torch.linalg.qr(basis.double(), mode="complete").Q[:, basis.shape[1] :].float().contiguous()
