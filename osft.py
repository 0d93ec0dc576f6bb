"""Orthogonal subspace fine-tuning (Nayak et al. 2025, arXiv 2504.07097), exact; mathematics: docs/reference/osft.md.

Every targeted linear layer's weight becomes W = W0 + dW, with W0 frozen and dW confined to the free directions of W0.
Letters: a weight is treated as a matrix A of L rows and s columns, whose columns are the factored side: the shorter
one, or the input if the kept directions come from activations. k of the s directions are kept, r = s - k are free.
A = U S V^T; U_high, V_high are kept, U_low, V_low are free. T tokens.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from mini_trainer.data.stores.contents import verify_file
from mini_trainer.data.tokenized.reader import TokenizedData, verify_data
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, broadcast_from_rank0
from mini_trainer.model.method import MetaModel, Method
from mini_trainer.model.methods import osft_directions
from mini_trainer.model.methods import osft_subspaces as subspaces
from mini_trainer.model.weights import Readers, WeightGroup, copy_to_cpu, gather_one, gather_parameters
from mini_trainer.objectives.objective import Objective, PackedModel
from mini_trainer.options import DataOptions, OSFTOptions
from mini_trainer.options.reading import hash_file

# Singular values below this share of the largest count as zero: they are rounding errors of the weight.
NULL = 1e-10


class OSFTLinear(nn.Module):
    """A linear layer with weight W0 + dW: `base` holds W0, frozen, and dW = B V_low^T with trainable B (L, r).

    `project_updates` keeps B orthogonal to U_high after each optimizer step. A square weight with few free directions
    uses dW = U_low C V_low^T instead, with trainable C (r, r), and needs no projection: at R = 0.25 this takes 42 %
    (bfloat16: 50 %) less memory than B, which is 6 to 7 % of a Llama whose q and o are square, in about the same time
    (benchmarks/results/osft_cost.txt). `base`, `V_low` and `U_low` are frozen parameters that FSDP shards with their
    block; `U_high` is a buffer, sharded by rows like B.
    """

    def __init__(self, module: nn.Linear | Conv1D, *, num_kept: int, basis: str, dtype: torch.dtype):
        """`dtype`: that of W0 in the model's files, so that it is exact."""
        super().__init__()
        self.is_conv1d = isinstance(module, Conv1D)
        self.on_input = subspaces.is_on_input(module, basis)  # A = W, else A = W^T
        self.num_rows, self.num_columns = subspaces.oriented_shape(module, basis)  # L, s
        self.num_kept, num_free = num_kept, self.num_columns - num_kept
        self.is_core = not subspaces.BASES[basis] and self.num_rows == self.num_columns and num_free <= num_kept
        self.projects = not subspaces.BASES[basis] and num_kept > 0 and not self.is_core
        device = module.weight.device
        self.bias = module.bias
        self.base = nn.Parameter(torch.empty(self.num_rows, self.num_columns, dtype=dtype, device=device), False)
        rows = num_free if self.is_core else self.num_rows
        self.coefficients = nn.Parameter(torch.empty(rows, num_free, device=device))  # C or B
        self.V_low = nn.Parameter(torch.empty(self.num_columns, num_free, device=device), False)
        self.register_parameter("U_low", None)
        if self.is_core:
            self.U_low = nn.Parameter(torch.empty(self.num_rows, num_free, device=device), False)
        U_high = torch.empty(self.num_rows, num_kept, device=device) if self.projects else None
        self.register_buffer("U_high", U_high)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """Computes x W0^T + x dW^T through the free directions, without building dW."""
        flat = x.reshape(-1, x.shape[-1])  # (T, in)
        if self.on_input:
            low = linear(flat @ self.V_low, self.coefficients)
            update, base = low if self.U_low is None else linear(low, self.U_low), self.base.t()
        else:
            low = flat if self.U_low is None else flat @ self.U_low
            update, base = linear(low @ self.coefficients, self.V_low), self.base
        if self.bias is not None:
            update = update + self.bias
        out = torch.addmm(update, flat, base)  # last, and the only addmm: see choose_kept_operations in model
        return out.view(*x.shape[:-1], out.shape[-1])

    @property
    def weight(self) -> Tensor:
        """W0 + dW in the replaced layer's layout, with gradients, for models that read it beside calling the layer."""
        rows = self.coefficients if self.U_low is None else self.U_low @ self.coefficients
        return subspaces.orient(self.base + rows @ self.V_low.t(), on_input=self.on_input, is_conv1d=self.is_conv1d)

    @torch.no_grad()
    def local_update(self) -> Tensor:  # (this rank's rows of L, s)
        """This rank's rows of dW, in fp32. All ranks call this."""
        rows = self.coefficients.to_local()
        if self.U_low is not None:
            rows = self.U_low.to_local() @ self.coefficients.full_tensor()
        return rows @ self.V_low.full_tensor().T

    @property
    def num_left(self) -> int:
        """Number of elements of the kept directions of its output side."""
        return self.num_rows * self.num_kept if self.projects or self.is_core else 0

    @torch.no_grad()
    def gather_bases(self, *, world: World) -> subspaces.Bases | None:
        """The free and the kept directions, unsharded, on rank 0's CPU; None on other ranks. All ranks call this."""
        left = self.U_low if self.is_core else self.U_high
        V_low, left = self.V_low.full_tensor(), None if left is None else left.full_tensor()
        if world.rank != 0:
            return None
        left = subspaces.complement(left) if self.is_core else left
        return subspaces.Bases(V_low.cpu(), None if left is None else left.cpu().contiguous())

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the replaced layer's weight, in its layout."""
        shape = (self.num_rows, self.num_columns)
        return shape if self.on_input != self.is_conv1d else shape[::-1]

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype) -> Tensor:
        """W0 + dW, unsharded, in the replaced layer's layout. All ranks call this."""
        base = self.base
        rows = (base.to_local().float() + self.local_update()).to(dtype)
        whole = DTensor.from_local(
            rows, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride()
        ).full_tensor()
        return subspaces.orient(whole, on_input=self.on_input, is_conv1d=self.is_conv1d)


@torch.no_grad()
def fill_layer(
    layer: OSFTLinear, name: str, readers: Readers, subspace: dict[str, Tensor], *, num_earlier: int = 0, world: World
) -> None:
    """Fills a meta layer, except its bias: W0, a zero update and directions, from rank 0's `readers` and `subspace`.
    `subspace` is that of `make_subspace`. After earlier tasks, which keep `num_earlier` directions, its basis holds the
    others, (s, s - num_earlier), and `U_earlier` (L, num_earlier) what they keep of the output side."""
    weight = None
    if world.rank == 0:
        weight = readers.pop(f"{name}.weight")()
        weight = subspaces.orient(weight, on_input=layer.on_input, is_conv1d=layer.is_conv1d)
    num_columns, num_new, device = layer.num_columns, layer.num_kept - num_earlier, world.device
    shape = (num_columns, num_columns - num_earlier)
    basis = broadcast_from_rank0(subspace.get("basis"), shape, dtype=torch.float32, device=device)
    values = broadcast_from_rank0(subspace.get("singular_values"), shape[1:], dtype=torch.float64, device=device)
    base = broadcast_from_rank0(weight, layer.base.shape, dtype=layer.base.dtype, device=device)
    layer.base = nn.Parameter(base, requires_grad=False)
    layer.coefficients = nn.Parameter(torch.zeros(layer.coefficients.shape, device=device))
    layer.V_low = nn.Parameter(basis[:, num_new:].contiguous(), requires_grad=False)
    if layer.is_core and num_earlier == 0:
        square = (num_columns, num_columns)
        left = broadcast_from_rank0(subspace.get("left"), square, dtype=torch.float32, device=device)
        layer.U_low = nn.Parameter(left[:, num_new:].contiguous(), requires_grad=False)
        return
    if layer.projects or layer.is_core:
        earlier = None
        if num_earlier > 0:
            shape = (layer.num_rows, num_earlier)
            earlier = broadcast_from_rank0(subspace.get("U_earlier"), shape, dtype=torch.float32, device=device)
        U_high = make_U_high(base, basis[:, :num_new], values, earlier=earlier, world=world)
        if layer.projects:
            layer.U_high = U_high
        else:
            U_low = subspaces.complement(U_high.full_tensor())
            U_low = broadcast_from_rank0(U_low, U_low.shape, dtype=torch.float32, device=device)
            layer.U_low = nn.Parameter(U_low, requires_grad=False)


def make_U_high(
    base: Tensor, V_high: Tensor, singular_values: Tensor, *, earlier: Tensor | None = None, world: World
) -> DTensor:  # (L, k)
    """U_high = A V_high / S_high, sharded by rows; zero where S is zero, since any direction would do there.

    Each rank computes its own rows in fp64. After the division, directions with small singular values are not exactly
    orthogonal, which the Cholesky factor of their Gram matrix corrects. `earlier` directions (L, num_earlier) come
    first, as they are, and the new ones are made orthogonal to them.
    """
    num_new = V_high.shape[1]
    kept_values = singular_values[:num_new]
    largest = singular_values[0] if earlier is None else base.double().norm()
    is_null = kept_values <= NULL * largest
    scale = torch.where(is_null, 0.0, 1 / kept_values)
    mesh = world.shard_mesh

    def own_rows(matrix: Tensor) -> Tensor:  # as Shard(0) does
        chunks, part = matrix.chunk(mesh.size()), mesh.get_local_rank()
        return chunks[part] if part < len(chunks) else matrix[:0]

    U_high = own_rows(base).double() @ (V_high.double() * scale)
    if earlier is not None:
        earlier = own_rows(earlier)
        for _ in range(2 if num_new > 0 else 0):  # the second time removes the rounding error
            seen = earlier.double().T @ U_high
            dist.all_reduce(seen, group=mesh.get_group())
            U_high = U_high - earlier.double() @ seen
    if num_new > 0:
        gram = U_high.T @ U_high
        dist.all_reduce(gram, group=mesh.get_group())
        factor = torch.linalg.cholesky(gram + torch.diag(is_null.double()))
        U_high = torch.linalg.solve_triangular(factor.T, U_high, upper=True, left=False)
    U_high = U_high.float() if earlier is None else torch.cat([earlier, U_high.float()], dim=1)
    return shard_rows(U_high, (len(base), U_high.shape[1]), world=world)


def shard_rows(rows: Tensor, shape: tuple[int, int], *, world: World) -> DTensor:
    """Makes a DTensor of `shape`, sharded over the ranks of one copy of the model, from this rank's `rows`."""
    return DTensor.from_local(rows, world.shard_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))


BUCKET_NUMEL = 2**24  # maximum number of elements in one all-reduce of a projection


class OSFT(Method):
    """Trains only the free directions of each targeted layer's weight (see `model.method.Method`).
    Invariant: `layers` are the model's OSFT layers after `prepare` or `lay_out`."""

    title = "OSFT"
    tags = ("osft",)
    takes_long = True
    metrics = ("osft_leak",)
    recomputed = frozenset({"aten::mm"})  # also of other layers; a layer's last and largest product is an addmm

    def __init__(self, options: OSFTOptions):
        self.options = options
        self.directions: osft_directions.Directions | None = None  # from `choose_layers` on
        self.layers: list[OSFTLinear] = []
        self.calibration_data: TokenizedData | None = None
        self.data_options: DataOptions | None = None
        self.statistics = osft_directions.Statistics()
        self.bases: dict[str, subspaces.Bases] = {}  # on rank 0: gathered for an export
        self.has_said_leak = False  # what the rounding of exports does to it

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        self.data_options = data_options
        if (path := self.options.osft_calibration_data) is not None:
            self.calibration_data = osft_directions.open_calibration_data(
                path, tokenizer, max_tokens_per_gpu=data_options.max_tokens_per_gpu
            )

    def list_data_hashes(self) -> list[str]:
        bases = self.options.osft_bases
        earlier = [] if bases in (None, subspaces.NEW) else [subspaces.hash_bases(Path(bases))]
        if not subspaces.BASES[self.options.osft_basis]:
            return earlier
        path = self.options.osft_statistics
        known = osft_directions.read_data_hashes(Path(path)) if path is not None and Path(path).exists() else []
        own = [] if self.calibration_data is None else [hash_file(self.calibration_data.path)["sha256"]]
        return [*sorted({*known, *own}), *earlier]

    def verify_files(self) -> None:
        if self.calibration_data is not None:
            verify_data(self.calibration_data)
        if self.options.osft_bases not in (None, subspaces.NEW):
            bases = Path(self.options.osft_bases)
            with subspaces.open_bases(bases):  # refused here if it is none
                verify_file(bases)

    def list_read_files(self) -> dict[str, Path]:
        data = self.calibration_data
        return {} if data is None else {"--osft-calibration-data": data.path}

    def study(self, build_plain: Callable[[], PackedModel], *, objective: Objective, world: World) -> None:
        if subspaces.BASES[self.options.osft_basis]:
            self.statistics = osft_directions.prepare_statistics(
                self.options.osft_statistics and Path(self.options.osft_statistics),
                self.calibration_data,
                self.data_options,
                build_plain=build_plain,
                family=objective.family,
                world=world,
                patterns=self.options.osft_target_patterns,
            )

    def choose_layers(self, meta: MetaModel) -> None:
        self.directions = osft_directions.Directions(meta, self.options)

    def prepare(self, meta: MetaModel, readers: Readers, *, world: World, progress: Callable[[str], None]) -> None:
        if experts := [param for param in meta.model.parameters() if param.ndim == 3 and min(param.shape) > 1]:
            fate = "train without constraint" if self.options.osft_train_others else "are frozen"
            num_weights, num_numbers = len(experts), sum(param.numel() for param in experts)
            log.warning(
                f"warning: --osft does not cover the {num_weights} weights ({num_numbers:,} numbers) of fused experts:"
                f" they {fate}"
            )
        num_kept = self.directions.compute(self.statistics, readers, world=world, progress=progress)
        # Gigabytes, which nothing needs any more.
        self.statistics = self.directions.statistics = osft_directions.Statistics()
        self.replace_layers(meta, num_kept)

    def lay_out(self, meta: MetaModel) -> None:
        self.replace_layers(meta, self.directions.assume())

    def replace_layers(self, meta: MetaModel, num_kept: dict[str, int]) -> None:
        """Replaces each target layer that has free directions; freezes everything else unless others train."""
        model, basis = meta.model, self.options.osft_basis
        if not self.options.osft_train_others:
            model.requires_grad_(False)
            for name in meta.family.find_head(model):
                model.get_submodule(name).requires_grad_(True)
        self.layers = []
        for name, kept in num_kept.items():
            module = model.get_submodule(name)
            if kept == subspaces.oriented_shape(module, basis)[1]:
                module.weight.requires_grad_(False)  # FSDP does not support empty parameters
                continue
            layer = OSFTLinear(module, num_kept=kept, basis=basis, dtype=self.directions.types[name])
            model.set_submodule(name, layer)
            self.layers.append(layer)

    def fill(self, module: nn.Module, name: str, readers: Readers, *, world: World) -> None:
        if isinstance(module, OSFTLinear) and module.base.is_meta:
            subspace = self.directions.read(name) if world.rank == 0 else {}
            num_earlier = self.directions.num_earlier.get(name, 0)
            fill_layer(module, name, readers, subspace, num_earlier=num_earlier, world=world)

    def give_memory(self, module: nn.Module, *, world: World) -> None:
        if isinstance(module, OSFTLinear) and module.projects:
            rows = torch.empty(-(-module.num_rows // world.num_shards), module.num_kept)
            module.U_high = shard_rows(rows, (module.num_rows, module.num_kept), world=world)

    def constrain_gradients(self) -> None:
        project_gradients(self.layers)

    def constrain_weights(self) -> None:
        project_updates(self.layers)

    def measure(self, dtype: torch.dtype) -> dict[str, float]:
        leak = measure_leak(self.layers, dtype)
        if leak > 0 and dtype != torch.float32 and not self.has_said_leak:
            self.has_said_leak, exact = True, measure_leak(self.layers)
            log.info(
                f"OSFT: {leak:.1e} of the change in this export lies in kept directions, since its weights are rounded"
                f" to {str(dtype).removeprefix('torch.')}; --export-dtype float32 leaves {exact:.1e}"
            )
        return {"osft_leak": leak}

    def count_added(self) -> int:
        return sum(
            param.numel()
            for layer in self.layers
            for name, param in layer.named_parameters()
            if name not in ("base", "bias")
        )

    def count_export_bytes(self, model_bytes: int) -> int:
        if not self.directions.num_earlier:
            return model_bytes
        return model_bytes + sum(4 * (layer.V_low.numel() + layer.num_left) for layer in self.layers)

    def describe(self) -> str:
        if not self.layers:
            return f"OSFT keeps all of {len(self.directions.targets)} layers, which do not train; everything else does"
        num_trained = sum(layer.coefficients.numel() for layer in self.layers)
        num_weights = sum(layer.base.numel() for layer in self.layers)
        trained = f"OSFT on {len(self.layers)} layers: {num_trained:,} trainable parameters instead of {num_weights:,}"
        if not self.directions.num_earlier:
            return trained
        total, earlier = (sum(of.values()) for of in (self.directions.num_columns, self.directions.num_earlier))
        free = sum(layer.num_columns - layer.num_kept for layer in self.layers)
        kept = f"{earlier:,} are kept from earlier tasks, {total - earlier - free:,} newly"
        return f"{trained} (of {total:,} directions, {kept})"

    def gather_weights(self, packed_model: PackedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
        if self.directions.num_earlier:
            self.bases = self.gather_bases(packed_model.model, world)
        return gather_merged(packed_model.model, dtype, world=world)

    def gather_bases(self, model: PreTrainedModel, world: World) -> dict[str, subspaces.Bases]:
        """The directions that the model keeps of each target, on rank 0; empty on others. All ranks call this."""
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, OSFTLinear)}
        num_columns = self.directions.num_columns
        bases = {name: subspaces.Bases(torch.empty(number, 0)) for name, number in num_columns.items()}
        for name, layer in layers.items():
            bases[name] = layer.gather_bases(world=world)
        return bases if world.rank == 0 else {}

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.bases:
            subspaces.write_bases(self.bases, directory / subspaces.BASES_FILE, basis=self.options.osft_basis)
        self.bases = {}


def gather_merged(model: PreTrainedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
    """All weights of an export: each OSFT layer as the single weight that it represents. All ranks call this."""
    merged, groups = set(), []

    def gather(layer: OSFTLinear) -> Tensor | None:
        weight = layer.merged_weight(dtype)
        return copy_to_cpu(weight) if world.rank == 0 else None

    for prefix, layer in model.named_modules():
        if isinstance(layer, OSFTLinear):
            name = f"{prefix}.weight"
            groups.append(gather_one(name, layer.weight_shape, dtype, functools.partial(gather, layer)))
            merged |= {f"{prefix}.{key}" for key in (*layer._parameters, *layer._buffers) if key != "bias"}
    return groups + gather_parameters(model, dtype, world=world, leave_out=merged)


@torch.no_grad()
def project_gradients(layers: list[OSFTLinear]) -> None:
    """Removes from every gradient its component in the span of U_high, which is never applied. All ranks call this."""
    layers = [layer for layer in layers if layer.projects and layer.coefficients.grad is not None]
    project(layers, [layer.coefficients.grad.to_local() for layer in layers])


@torch.no_grad()
def project_updates(layers: list[OSFTLinear]) -> None:
    """Removes from every B its component in the span of U_high, which an optimizer step can introduce.
    Projects all of B, not only its last change, so that rounding errors never accumulate. All ranks call this."""
    layers = [layer for layer in layers if layer.projects]
    project(layers, [layer.coefficients.to_local() for layer in layers])


def shard_group(layer: OSFTLinear) -> dist.ProcessGroup:
    """The group of ranks that the layer's rows are sharded over."""
    return layer.coefficients.device_mesh.get_group("shard")


def project(layers: list[OSFTLinear], tensors: list[Tensor]) -> None:
    """X <- X - U_high U_high^T X in place, on each rank's rows of (L, r), with few all-reduces for all layers."""
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
def measure_leak(layers: list[OSFTLinear], dtype: torch.dtype = torch.float32) -> float:
    """Largest share of any layer's change that lies in kept directions of either side: from W0 as the files that were
    read have it to W0 + dW as an export of `dtype` has it, so rounded. All ranks call this.

    max(||U_high^T dW||, ||dW V_high||) / ||dW||, Frobenius norms; V_high is the complement of V_low.
    """
    leaks = [0.0]
    for layer in layers:
        base, V_low = layer.base.to_local().float(), layer.V_low.full_tensor()
        rows = (base + layer.local_update()).to(dtype).float() - base
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
