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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mini_trainer.data.stores.contents import verify_file
from mini_trainer.data.stores.disk import hash_file
from mini_trainer.data.tokenized.reader import TokenizedData, verify_data
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World
from mini_trainer.model.method import MetaModel, Method
from mini_trainer.model.methods.osft_directions import (
    Directions,
    Statistics,
    open_calibration_data,
    prepare_statistics,
    read_data_hashes,
)
from mini_trainer.model.methods.osft_layers import OSFTLinear, fill_layer, shard_rows
from mini_trainer.model.methods.osft_subspaces import (
    BASES,
    BASES_FILE,
    NEW,
    Bases,
    hash_bases,
    open_bases,
    oriented_shape,
    write_bases,
)
from mini_trainer.model.weights import Reader, WeightGroup, copy_to_cpu, gather_one, gather_parameters
from mini_trainer.objectives.objective import Objective
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.options import DataOptions, OSFTOptions

BUCKET_NUMEL = 2**24  # maximum number of elements in one all-reduce of a projection


class OSFT(Method):
    """Trains only the free directions of each targeted layer's weight (see `model.method.Method`).

    Invariant: `layers` are the model's OSFT layers after `prepare` or `lay_out`.
    """

    title = "OSFT"
    tags = ("osft",)
    takes_long = True
    metrics = ("osft_leak",)  # largest share of any layer's change that lies in kept directions

    def __init__(self, options: OSFTOptions):
        self.options = options
        self.directions: Directions | None = None  # from `choose_layers` on
        self.layers: list[OSFTLinear] = []
        self.calibration_data: TokenizedData | None = None
        self.data_options: DataOptions | None = None
        self.statistics = Statistics()
        self.bases: dict[str, Bases] = {}  # on rank 0: gathered for an export

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        self.data_options = data_options
        if (path := self.options.osft_calibration_data) is not None:
            self.calibration_data = open_calibration_data(
                path, tokenizer, max_tokens_per_gpu=data_options.max_tokens_per_gpu
            )

    def list_data_hashes(self) -> list[str]:
        earlier = [] if self.options.osft_bases in (None, NEW) else [hash_bases(Path(self.options.osft_bases))]
        if not BASES[self.options.osft_basis]:
            return earlier
        path = self.options.osft_statistics
        known = read_data_hashes(Path(path)) if path is not None and Path(path).exists() else []
        own = [] if self.calibration_data is None else [hash_file(self.calibration_data.path)["sha256"]]
        return [*sorted({*known, *own}), *earlier]

    def verify_files(self) -> None:
        if self.calibration_data is not None:
            verify_data(self.calibration_data)
        if self.options.osft_bases not in (None, NEW):
            bases = Path(self.options.osft_bases)
            with open_bases(bases):  # refused here if it is none
                verify_file(bases)

    def list_read_files(self) -> dict[str, Path]:
        data = self.calibration_data
        return {} if data is None else {"--osft-calibration-data": data.path}

    def study(self, build_plain: Callable[[], PackedModel], *, objective: Objective, world: World) -> None:
        if BASES[self.options.osft_basis]:
            self.statistics = prepare_statistics(
                self.options.osft_statistics and Path(self.options.osft_statistics),
                self.calibration_data,
                self.data_options,
                build_plain=build_plain,
                objective=objective,
                world=world,
                patterns=self.options.osft_target_patterns,
            )

    def choose_layers(self, meta: MetaModel) -> None:
        self.directions = Directions(meta, self.options)

    def prepare(
        self, meta: MetaModel, readers: dict[str, Reader], *, world: World, progress: Callable[[str], None]
    ) -> None:
        warn_of_experts(meta.model, trains=self.options.osft_train_others)
        num_kept = self.directions.compute(self.statistics, readers, meta.compute_dtype, world=world, progress=progress)
        self.statistics = self.directions.statistics = Statistics()  # gigabytes, which nothing needs any more
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
            if kept == oriented_shape(module, basis)[1]:
                module.weight.requires_grad_(False)  # FSDP does not support empty parameters
                continue
            layer = OSFTLinear(module, num_kept=kept, basis=basis, compute_dtype=meta.compute_dtype)
            model.set_submodule(name, layer)
            self.layers.append(layer)

    def fill(self, module: nn.Module, name: str, readers: dict[str, Reader], *, world: World) -> None:
        if isinstance(module, OSFTLinear) and module.base.is_meta:
            subspace = self.directions.read(name) if world.rank == 0 else {}
            fill_layer(
                module, name, readers, subspace, num_earlier=self.directions.num_earlier.get(name, 0), world=world
            )

    def give_memory(self, module: nn.Module, *, world: World) -> None:
        if isinstance(module, OSFTLinear) and module.projects:
            rows = torch.empty(-(-module.num_rows // world.num_shards), module.num_kept)
            module.U_high = shard_rows(rows, (module.num_rows, module.num_kept), world=world)

    def keep_operations(self, kept: frozenset[str]) -> frozenset[str]:
        # A layer's last and largest product is an addmm; mm, also of other layers, is recomputed.
        return kept - {"aten::mm"}

    def constrain_gradients(self) -> None:
        project_gradients(self.layers)

    def constrain_weights(self) -> None:
        project_updates(self.layers)

    def measure(self) -> dict[str, float]:
        return {"osft_leak": measure_leak(self.layers)}

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

    def gather_bases(self, model: PreTrainedModel, world: World) -> dict[str, Bases]:
        """On rank 0, the directions that the trained model keeps of each target; empty on other ranks. All ranks call
        this."""
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, OSFTLinear)}
        bases = {name: Bases(torch.empty(columns, 0)) for name, columns in self.directions.num_columns.items()}
        for name, layer in layers.items():
            bases[name] = layer.gather_bases(world=world)
        return bases if world.rank == 0 else {}

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.bases:
            write_bases(self.bases, directory / BASES_FILE, basis=self.options.osft_basis)
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


def warn_of_experts(model: PreTrainedModel, *, trains: bool) -> None:
    experts = [param for param in model.parameters() if param.ndim == 3 and min(param.shape) > 1]
    if experts:
        log.warning(
            f"warning: --osft does not cover the {len(experts)} weights ({sum(p.numel() for p in experts):,} numbers)"
            f" of fused experts: they {'train without constraint' if trains else 'are frozen'}"
        )


@torch.no_grad()
def project_gradients(layers: list[OSFTLinear]) -> None:
    """Removes from every gradient its component in the span of U_high, which is never applied. All ranks call this."""
    layers = [layer for layer in layers if layer.projects and layer.coefficients.grad is not None]
    project(layers, [layer.coefficients.grad.to_local() for layer in layers])


@torch.no_grad()
def project_updates(layers: list[OSFTLinear]) -> None:
    """Removes from every B its component in the span of U_high, which an optimizer step can introduce.

    Projects all of B, not only its last change, so that rounding errors never accumulate. All ranks call this.
    """
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
def measure_leak(layers: list[OSFTLinear]) -> float:
    """Largest share of any layer's dW, in fp32, that lies in kept directions of either side. All ranks call this.

    max(||U_high^T dW||, ||dW V_high||) / ||dW||, Frobenius norms; V_high is the complement of V_low.
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
