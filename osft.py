"""Orthogonal subspace fine-tuning (Nayak et al. 2025, arXiv 2504.07097), exact: see docs/osft.md for the mathematics.

Every targeted linear layer's weight becomes W = W0 + dW, with W0 frozen and dW confined to what is free of it.
Letters: a weight is held as a matrix A of L rows and s columns, with the side that has the factors as columns: its
shorter side, or its input where the kept directions come from activations. k of the s directions are kept, r = s - k
are free. A = U S V^T; U_high, V_high are kept, U_low, V_low are free. T tokens.
"""

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from disk import written_aside
from model.weights import Reader
from ranks.ending import log
from ranks.world import World, call_on_rank0

DEFAULT_CACHE_DIR = "~/.cache/mini_trainer/osft"
CACHE_VERSION = 1  # of what a cached file holds
# Of a Gram matrix, eigenvalues below this share of the largest are computed again without it: fp64 has 16 digits.
RESOLVED = 1e-8
# Singular values below this share of the largest are taken for zero: rounding of the weight itself.
NULL = 1e-10
BUCKET_NUMEL = 2**24  # most numbers in one all-reduce of a projection
MIN_RETENTION = 0.1  # of --osft-rank-allocation importance: the share that every layer keeps (the paper's mrr)


@dataclass
class Statistics:
    """What earlier tasks gave the layers to see (osft_calibration.py), each data set weighing the same.

    Rank 0's; the other ranks' are empty. Layers with the same input (query, key and value) share one covariance, kept
    under the first one's name.
    """

    covariances: dict[str, Tensor] = field(default_factory=dict)  # (in, in) fp64: sum over data sets of mean x x^T
    inputs: dict[str, str] = field(default_factory=dict)  # layer -> the layer whose covariance is its own
    similarities: dict[str, float] = field(default_factory=dict)  # block -> sum of mean cosine of input and output
    data_hashes: list[str] = field(default_factory=list)  # SHA-256 of the data sets' files

    def covariance(self, layer: str) -> Tensor:
        return self.covariances[self.inputs[layer]]

    def importance(self, block: str) -> float:
        """The block's cosine similarity, divided by the mean over blocks."""
        return self.similarities[block] / (sum(self.similarities.values()) / len(self.similarities))


@dataclass(frozen=True)
class OSFTSettings:
    """What is kept, and of which layers; one of `unfreeze_rank_ratio` and `keep_energy` is given."""

    unfreeze_rank_ratio: float | None
    keep_energy: float | None = None  # share of the activations' energy to keep
    target_patterns: tuple[str, ...] = ()  # parts of layers' names; none: every linear layer inside the blocks
    train_others: bool = False  # embeddings, norms, biases, head
    basis: Literal["weights", "activations"] = "weights"
    allocation: Literal["uniform", "importance"] = "uniform"
    cache_dir: str = DEFAULT_CACHE_DIR
    statistics: Statistics | None = None  # rank 0's, where the basis or the allocation needs them


class OSFTLinear(nn.Module):
    """A linear layer with weight W0 + dW: `base` holds W0, frozen, and dW = B V_low^T with trainable B (L, r).

    B is kept orthogonal to U_high by `project_updates`, after each optimizer step. A square weight with few free
    directions holds dW = U_low C V_low^T instead, with trainable C (r, r), and needs no projection. `base`, `V_low`
    and `U_low` are frozen parameters that FSDP shards with their block; `U_high` is a buffer, sharded by rows as B is.
    """

    def __init__(self, module: nn.Linear | Conv1D, *, num_kept: int, basis: str, compute_dtype: torch.dtype):
        super().__init__()
        self.is_conv1d = isinstance(module, Conv1D)
        self.on_input = is_on_input(module, basis)  # A = W, else A = W^T
        self.num_rows, self.num_columns = oriented_shape(module, basis)  # L, s
        self.num_kept, num_free = num_kept, self.num_columns - num_kept
        self.is_core = basis == "weights" and self.num_rows == self.num_columns and num_free <= num_kept
        self.projects = basis == "weights" and num_kept > 0 and not self.is_core
        device = module.weight.device
        self.bias = module.bias
        self.base = nn.Parameter(
            torch.empty(self.num_rows, self.num_columns, dtype=compute_dtype, device=device), False
        )
        rows = num_free if self.is_core else self.num_rows
        self.coefficients = nn.Parameter(torch.empty(rows, num_free, device=device))  # C or B
        self.V_low = nn.Parameter(torch.empty(self.num_columns, num_free, device=device), False)
        self.register_parameter("U_low", None)
        if self.is_core:
            self.U_low = nn.Parameter(torch.empty(self.num_rows, num_free, device=device), False)
        self.register_buffer("U_high", None)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """x W0^T + x dW^T, through the free directions: dW is never built."""
        flat = x.reshape(-1, x.shape[-1])  # (T, in)
        if self.on_input:
            low = linear(flat @ self.V_low, self.coefficients)
            update, base = low if self.U_low is None else linear(low, self.U_low), self.base.t()
        else:
            low = flat if self.U_low is None else flat @ self.U_low
            update, base = linear(low @ self.coefficients, self.V_low), self.base
        if self.bias is not None:
            update = update + self.bias
        out = torch.addmm(update, flat, base)  # last, and the one addmm: see choose_kept_operations in model
        return out.view(*x.shape[:-1], out.shape[-1])

    @torch.no_grad()
    def local_update(self) -> Tensor:  # (this rank's rows of L, s)
        """This rank's rows of dW, in fp32. All ranks call this."""
        rows = self.coefficients.to_local()
        if self.U_low is not None:
            rows = self.U_low.to_local() @ self.coefficients.full_tensor()
        return rows @ self.V_low.full_tensor().T

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype) -> Tensor:
        """W0 + dW, whole, shaped as the layer that was replaced stored it. All ranks call this."""
        base = self.base
        rows = (base.to_local().float() + self.local_update()).to(dtype)
        whole = DTensor.from_local(
            rows, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride()
        ).full_tensor()
        return orient(whole, on_input=self.on_input, is_conv1d=self.is_conv1d)


def weight_shape(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """(out, in)"""
    shape = tuple(module.weight.shape)
    return shape[::-1] if isinstance(module, Conv1D) else shape


def is_on_input(module: nn.Linear | Conv1D, basis: str) -> bool:
    """Whether the factored side is the layer's input."""
    out_features, in_features = weight_shape(module)
    return basis == "activations" or in_features <= out_features


def oriented_shape(module: nn.Linear | Conv1D, basis: str) -> tuple[int, int]:
    """(L, s) of the layer's matrix A."""
    out_features, in_features = weight_shape(module)
    return (out_features, in_features) if is_on_input(module, basis) else (in_features, out_features)


def orient(weight: Tensor, *, on_input: bool, is_conv1d: bool) -> Tensor:
    """A weight as it is stored, as A (L, s); and A as it is stored."""
    return (weight if on_input != is_conv1d else weight.T).contiguous()


def find_targets(
    model: PreTrainedModel, blocks: nn.ModuleList, patterns: tuple[str, ...]
) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers inside the blocks whose name contains one of `patterns`, or all where there are none.

    Raises ValueError for a pattern that no layer's name contains.
    """
    inside = {module for block in blocks for module in block.modules()}
    layers = {
        name: module
        for name, module in model.named_modules()
        if module in inside and isinstance(module, (nn.Linear, Conv1D))
    }
    unused = [pattern for pattern in patterns if not any(pattern in name for name in layers)]
    if unused or not layers:
        kinds = sorted({name.rpartition(".")[2] for name in layers})
        raise ValueError(
            f"--osft-target-patterns {' '.join(unused)}: no linear layer inside the blocks has a name that contains it;"
            f" there are {', '.join(kinds) or 'none'}"
        )
    return {name: layer for name, layer in layers.items() if not patterns or any(p in name for p in patterns)}


def count_kept(num_directions: int, unfreeze_rank_ratio: float) -> int:
    """floor(n (1 - R)), with 10 (1 - 0.9) = 1."""
    return math.floor(num_directions * (1 - unfreeze_rank_ratio) + 1e-9)


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Right singular vectors (s, s) and singular values (s,), descending, of a matrix (L, s), L >= s, in fp64.

    By `eigh` of the Gram matrix, which loses what is smaller than 1e-8 of the largest singular value; the directions
    below `RESOLVED` are therefore decomposed again among themselves.
    """
    values, basis = torch.linalg.eigh(matrix.T @ matrix)
    values, basis = values.flip(0).clamp_(min=0), basis.flip(1)
    num_resolved = max(1, int((values > RESOLVED * values[0]).sum()))
    singular_values = values.sqrt()
    if values[0] > 0 and num_resolved < len(values):
        tail_basis, singular_values[num_resolved:] = decompose(matrix @ basis[:, num_resolved:])
        basis[:, num_resolved:] = basis[:, num_resolved:] @ tail_basis
    return basis, singular_values


def make_subspace(matrix: Tensor, *, device: torch.device) -> dict[str, Tensor]:
    """What the cache holds of a layer, whatever R is: `basis` (s, s), `singular_values` (s,), `left` (L, L) if square.

    `matrix` is A (L, s), or in fp64 the covariance (s, s) of the layer's inputs, which gives the singular values and
    the basis of these inputs.
    """
    is_covariance = matrix.dtype == torch.float64
    matrix = matrix.to(device, torch.float64)
    if is_covariance:
        values, basis = torch.linalg.eigh(matrix)
        subspace = dict(basis=basis.flip(1), singular_values=values.flip(0).clamp(min=0).sqrt())
    else:
        basis, singular_values = decompose(matrix)
        subspace = dict(basis=basis, singular_values=singular_values)
        if matrix.shape[0] == matrix.shape[1]:
            subspace["left"] = torch.linalg.qr(matrix @ basis, mode="complete").Q  # = U, completed where S is 0
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
    """Files with the subspace of every layer, decomposing what is not cached; on rank 0 (empty on the others).

    `get_matrix` is called on rank 0 alone and returns what `make_subspace` takes, of `shapes[name]` and `dtype`; fp64
    if they are covariances. Layers are dealt out by size, one to each rank at a time; rank 0 sends each matrix to the
    rank that decomposes it, receives the result, and writes it.
    """
    files: dict[str, Path] = {}

    def find_missing() -> list[str]:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--osft-cache-dir {cache_dir}: cannot be made: {error}") from None
        for name in tqdm(shapes, desc="OSFT: hashing", disable=not sys.stderr.isatty()):
            matrix = get_matrix(name)
            if not matrix.isfinite().all():
                raise ValueError(f"{name}: not finite, so there are no singular vectors")
            files[name] = cache_dir / f"{hash_matrix(matrix)}.safetensors"
        unique = {file: name for name, file in files.items()}
        return [name for file, name in unique.items() if not file.exists()]

    missing = call_on_rank0(world, find_missing)
    missing.sort(key=lambda name: shapes[name][1] ** 2 * sum(shapes[name]), reverse=True)
    log.info(
        f"OSFT: directions of {len(shapes)} layers: {len(missing)} matrices to decompose, the rest is in {cache_dir}"
    )
    is_shown = world.rank == 0 and sys.stderr.isatty()
    bar = tqdm(total=len(missing), desc="OSFT: decomposing", unit="layer", disable=not is_shown)
    for start in range(0, len(missing), world.world_size):
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
        bar.update(len(dealt))
    bar.close()
    return files


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory, for what knows neither bfloat16 nor more than one dimension."""
    return tensor.view(-1).view(torch.uint8)


def hash_matrix(matrix: Tensor) -> str:
    kind = f"{CACHE_VERSION} {tuple(matrix.shape)} {matrix.dtype}"
    digest = hashlib.sha256(kind.encode())
    digest.update(as_bytes(matrix).numpy())
    return digest.hexdigest()


def empty_subspace(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Memory for what `make_subspace` returns of a matrix of `shape` and `dtype`, in its order."""
    num_rows, num_columns = shape
    subspace = dict(
        basis=torch.empty(num_columns, num_columns), singular_values=torch.empty(num_columns, dtype=torch.float64)
    )
    if num_rows == num_columns and dtype != torch.float64:
        subspace["left"] = torch.empty(num_rows, num_rows)
    return subspace


def write_subspace(file: Path, subspace: dict[str, Tensor]) -> None:
    """Written aside and renamed, so that runs can share a cache."""
    try:
        with written_aside(file) as (aside,):
            save_file(subspace, aside)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--osft-cache-dir: cannot write {file}: {error}") from None


def read_subspace(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--osft-cache-dir: cannot read {file}: {error}; remove it") from None


def apply_osft(
    model: PreTrainedModel,
    targets: dict[str, nn.Linear | Conv1D],
    settings: OSFTSettings,
    *,
    weights: dict[str, Reader],
    compute_dtype: torch.dtype,
    world: World,
    progress: Callable[[str], None] = lambda where: None,
) -> dict[str, Path]:
    """Replaces the meta model's `targets` by OSFTLinear, and freezes all else unless others are to be trained.

    `weights`: rank 0's, by name. `progress` is told of each decomposition. Returns rank 0's files with the
    layers' subspaces, for `fill_layer`.
    """
    experts = [param for param in model.parameters() if param.ndim == 3 and min(param.shape) > 1]
    if experts:
        log.warning(
            f"warning: --osft does not cover the {len(experts)} weights ({sum(p.numel() for p in experts):,} numbers)"
            f" that hold experts as one: they {'train freely' if settings.train_others else 'stay as they are'}"
        )
    uses_weights = settings.basis == "weights"
    shapes = {name: oriented_shape(module, settings.basis) for name, module in targets.items()}
    if not uses_weights:
        call_on_rank0(world, lambda: check_statistics(settings.statistics, targets))

    def get_matrix(name: str) -> Tensor:
        if not uses_weights:
            return settings.statistics.covariance(name)
        module = targets[name]
        weight = weights[f"{name}.weight"]().to(compute_dtype)
        return orient(weight, on_input=is_on_input(module, "weights"), is_conv1d=isinstance(module, Conv1D))

    files = prepare_subspaces(
        shapes if uses_weights else {name: (columns, columns) for name, (_, columns) in shapes.items()},
        get_matrix,
        dtype=compute_dtype if uses_weights else torch.float64,
        cache_dir=Path(settings.cache_dir).expanduser(),
        world=world,
        progress=progress,
    )
    num_columns = {name: columns for name, (_, columns) in shapes.items()}
    num_kept = call_on_rank0(world, lambda: count_kept_of_layers(num_columns, settings, files))
    replace_layers(model, targets, num_kept, settings, compute_dtype=compute_dtype)
    return files


def replace_layers(
    model: PreTrainedModel,
    targets: dict[str, nn.Linear | Conv1D],
    num_kept: dict[str, int],
    settings: OSFTSettings,
    *,
    compute_dtype: torch.dtype,
) -> None:
    """Puts an OSFTLinear in the place of each of `targets` that has free directions; decides what else trains."""
    if not settings.train_others:
        model.requires_grad_(False)
    for name, module in targets.items():
        if num_kept[name] == oriented_shape(module, settings.basis)[1]:
            module.weight.requires_grad_(False)  # FSDP has no place for a parameter without numbers
            continue
        layer = OSFTLinear(module, num_kept=num_kept[name], basis=settings.basis, compute_dtype=compute_dtype)
        model.set_submodule(name, layer)


def check_statistics(statistics: Statistics, targets: dict[str, nn.Linear | Conv1D]) -> None:
    """Refuses statistics of a model with other layers."""
    for name, module in targets.items():
        in_features = weight_shape(module)[1]
        if name not in statistics.inputs or len(statistics.covariance(name)) != in_features:
            raise ValueError(
                f"--osft-statistics: nothing there about the {in_features} inputs of {name}: these are statistics of"
                " another model, or of fewer layers"
            )


def count_kept_of_layers(num_columns: dict[str, int], settings: OSFTSettings, files: dict[str, Path]) -> dict[str, int]:
    """How many directions each layer keeps; on rank 0. Reports the energy of the activations that is left outside."""
    spectra = {}
    if settings.basis == "activations":
        spectra = {name: read_subspace(files[name])["singular_values"].square() for name in num_columns}
    num_kept = {}
    for name, columns in num_columns.items():
        if settings.keep_energy is not None:
            shares = spectra[name].cumsum(0) / spectra[name].sum()
            num_kept[name] = min(columns, int((shares < settings.keep_energy).sum()) + 1)
        else:
            num_kept[name] = count_kept(columns, choose_ratio(name, settings))
    if settings.keep_energy is not None and not settings.train_others and num_kept == num_columns:
        raise ValueError(f"--osft-keep-energy {settings.keep_energy}: nothing is left to train; keep less")
    if spectra:
        outside = {name: spectrum[num_kept[name] :].sum().item() for name, spectrum in spectra.items()}
        shares = {name: energy / max(spectra[name].sum().item(), 1e-300) for name, energy in outside.items()}
        for name, share in shares.items():
            log.debug(f"OSFT: {name}: {num_kept[name]} of {num_columns[name]} kept, {share:.2e} of the energy outside")
        total = sum(outside.values()) / sum(spectrum.sum().item() for spectrum in spectra.values())
        worst = max(shares, key=shares.get)
        log.info(
            f"OSFT: {sum(num_kept.values()):,} of {sum(num_columns.values()):,} input directions kept;"
            f" {total:.2e} of the activations' energy is outside of them, at most {shares[worst]:.2e} ({worst})"
        )
    return num_kept


def choose_ratio(name: str, settings: OSFTSettings) -> float:
    """The layer's unfreeze rank ratio: R, or by its block's importance I (the paper's section on adaptive ranks).

    Kept is mrr + I (trr - mrr), with I of mean 1 over the blocks, mrr `MIN_RETENTION` and trr = 1 - R.
    """
    if settings.allocation == "uniform":
        return settings.unfreeze_rank_ratio
    block = next(block for block in settings.statistics.similarities if name.startswith(f"{block}."))
    target = 1 - settings.unfreeze_rank_ratio
    least = min(MIN_RETENTION, target)
    kept = least + settings.statistics.importance(block) * (target - least)
    return 1 - min(1.0, max(0.0, kept))


@torch.no_grad()
def fill_layer(layer: OSFTLinear, name: str, *, weights: dict[str, Reader], file: Path | None, world: World) -> None:
    """Gives a meta layer W0, no update, and its directions: from rank 0's `weights` and subspace `file`. No bias."""
    weight, subspace = None, {}
    if world.rank == 0:
        weight = weights.pop(f"{name}.weight")().to(layer.base.dtype)
        weight = orient(weight, on_input=layer.on_input, is_conv1d=layer.is_conv1d)
        subspace = read_subspace(file)
    num_columns, num_kept = layer.num_columns, layer.num_kept
    basis = broadcast(subspace.get("basis"), (num_columns, num_columns), torch.float32, world.device)
    singular_values = broadcast(subspace.get("singular_values"), (num_columns,), torch.float64, world.device)
    base = broadcast(weight, tuple(layer.base.shape), layer.base.dtype, world.device)
    layer.base = nn.Parameter(base, requires_grad=False)
    layer.coefficients = nn.Parameter(torch.zeros(layer.coefficients.shape, device=world.device))
    layer.V_low = nn.Parameter(basis[:, num_kept:].contiguous(), requires_grad=False)
    if layer.U_low is not None:
        left = broadcast(subspace.get("left"), (num_columns, num_columns), torch.float32, world.device)
        layer.U_low = nn.Parameter(left[:, num_kept:].contiguous(), requires_grad=False)
    if layer.projects:
        layer.U_high = make_U_high(base, basis[:, :num_kept], singular_values, world=world)


def broadcast(value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rank 0's `value`, on every rank's `device`."""
    received = torch.empty(shape, dtype=dtype, device=device)
    if dist.get_rank() == 0:
        received.copy_(value)
    dist.broadcast(received, src=0)
    return received


def make_U_high(base: Tensor, V_high: Tensor, singular_values: Tensor, *, world: World) -> DTensor:  # (L, k)
    """U_high = A V_high / S_high, sharded by rows; zero where S is, since any direction would do there.

    Each rank computes its own rows in fp64. Directions whose singular values are small are not quite orthogonal after
    the division, which the Cholesky factor of their Gram matrix mends.
    """
    num_kept = V_high.shape[1]
    kept_values = singular_values[:num_kept]
    is_null = kept_values <= NULL * singular_values[0]
    scale = torch.where(is_null, 0.0, 1 / kept_values)
    mesh = world.shard_mesh
    chunks, part = base.chunk(mesh.size()), mesh.get_local_rank()  # as Shard(0) does
    rows = chunks[part] if part < len(chunks) else base[:0]
    U_high = rows.double() @ (V_high.double() * scale)
    gram = U_high.T @ U_high
    dist.all_reduce(gram, group=mesh.get_group())
    factor = torch.linalg.cholesky(gram + torch.diag(is_null.double()))
    U_high = torch.linalg.solve_triangular(factor.T, U_high, upper=True, left=False).float()
    return DTensor.from_local(
        U_high, mesh, [Shard(0)], run_check=False, shape=(len(base), num_kept), stride=(num_kept, 1)
    )


def find_osft_layers(model: nn.Module) -> list[OSFTLinear]:
    return [module for module in model.modules() if isinstance(module, OSFTLinear)]


def describe_osft(layers: list[OSFTLinear]) -> str:
    """For the start's report: how much of the layers trains; nothing where there are none."""
    if not layers:
        return ""
    num_trained = sum(layer.coefficients.numel() for layer in layers)
    num_weights = sum(layer.base.numel() for layer in layers)
    return f", OSFT on {len(layers)} layers: {num_trained:,} numbers train in place of {num_weights:,}"


@torch.no_grad()
def project_gradients(layers: list[OSFTLinear]) -> None:
    """Leaves of every gradient what is applied: the part that U_high does not see. All ranks call this."""
    layers = [layer for layer in layers if layer.projects and layer.coefficients.grad is not None]
    project(layers, [layer.coefficients.grad.to_local() for layer in layers])


@torch.no_grad()
def project_updates(layers: list[OSFTLinear]) -> None:
    """After an optimizer step, takes out of every B what U_high sees; the step itself does not keep it out.

    The whole of B is projected, not its last change, so that rounding never adds up. All ranks call this.
    """
    layers = [layer for layer in layers if layer.projects]
    project(layers, [layer.coefficients.to_local() for layer in layers])


def shard_group(layer: OSFTLinear) -> dist.ProcessGroup:
    """The ranks that hold the rows of the layer's tensors between them."""
    return layer.coefficients.device_mesh.get_group("shard")


def project(layers: list[OSFTLinear], tensors: list[Tensor]) -> None:
    """X <- X - U_high U_high^T X in place, on each rank's rows (of L, r); few all-reduces for all layers."""
    bucket: list[tuple[OSFTLinear, Tensor, Tensor]] = []
    for i, (layer, rows) in enumerate(zip(layers, tensors, strict=True)):
        bucket.append((layer, rows, layer.U_high.to_local().T @ rows))
        if i + 1 < len(layers) and sum(seen.numel() for _, _, seen in bucket) < BUCKET_NUMEL:
            continue
        flat = torch.cat([seen.flatten() for _, _, seen in bucket])
        dist.all_reduce(flat, group=shard_group(layer))
        parts = flat.split([seen.numel() for _, _, seen in bucket])
        for (layer, rows, seen), part in zip(bucket, parts, strict=True):
            rows.addmm_(layer.U_high.to_local(), part.view_as(seen), alpha=-1)
        bucket = []


@torch.no_grad()
def measure_leak(layers: list[OSFTLinear]) -> float:
    """The largest share of any layer's dW, in fp32, that lies in kept directions of either side. All ranks call this.

    max(||U_high^T dW||, ||dW V_high||) / ||dW||, Frobenius norms; V_high is what V_low leaves.
    """
    leaks = [0.0]
    for layer in layers:
        rows, V_low = layer.local_update(), layer.V_low.full_tensor()
        right = (rows - rows @ V_low @ V_low.T).square().sum()
        left = torch.zeros_like(right)
        known = layer.U_low if layer.is_core else layer.U_high
        if known is not None:
            seen = known.to_local().T @ rows  # (r or k, s)
            dist.all_reduce(seen, group=shard_group(layer))
            outside = rows - known.to_local() @ seen if layer.is_core else known.to_local() @ seen
            left = outside.square().sum()
        squares = torch.stack([rows.square().sum(), left, right])
        dist.all_reduce(squares, group=shard_group(layer))
        total, left, right = squares.sqrt().tolist()
        leaks.append(max(left, right) / total if total > 0 else 0.0)
    return max(leaks)
