"""Orthogonal subspace fine-tuning (Nayak et al. 2025, arXiv 2504.07097), exact: see docs/osft.md for the mathematics.

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
from transformers.pytorch_utils import Conv1D

from mini_trainer.data.stores.contents import verify_file
from mini_trainer.data.stores.disk import hash_file
from mini_trainer.data.tokenized.reader import TokenizedData, verify_data
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.gathering import WeightGroup, copy_to_cpu, gather_one, gather_parameters
from mini_trainer.model.method import MetaModel, Method
from mini_trainer.model.methods.osft_bases import (
    BASES_FILE,
    NEW,
    Bases,
    count_earlier,
    hash_bases,
    open_bases,
    read_bases,
    restrict,
    write_bases,
)
from mini_trainer.model.methods.osft_calibration import (
    Statistics,
    check_statistics,
    find_block,
    open_calibration_data,
    prepare_statistics,
    read_data_hashes,
)
from mini_trainer.model.methods.osft_layers import OSFTLinear, fill_layer, shard_rows
from mini_trainer.model.methods.osft_subspaces import (
    BASES,
    count_kept,
    find_targets,
    is_on_input,
    orient,
    oriented_shape,
    prepare_subspaces,
    read_subspace,
)
from mini_trainer.model.weights import Reader
from mini_trainer.objectives.objective import Objective
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.options import DataOptions, OSFTOptions

ALLOCATIONS = {"uniform": False, "importance": True}  # whether a block's rank follows its importance
BUCKET_NUMEL = 2**24  # maximum number of elements in one all-reduce of a projection
MIN_RETENTION = 0.1  # share that every layer keeps with --osft-rank-allocation importance (the paper's mrr)
UNKNOWN_ENERGY_RATIO = 0.5  # unfreeze rank ratio that plans assume with --osft-keep-energy


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
        self.targets: dict[str, nn.Linear | Conv1D] = {}  # layers of the meta model, by name
        self.layers: list[OSFTLinear] = []
        self.subspace_files: dict[str, Path] = {}  # on rank 0, by layer
        self.calibration_data: TokenizedData | None = None
        self.data_options: DataOptions | None = None
        self.statistics = Statistics()
        self.shapes: dict[str, tuple[int, int]] = {}  # (L, s) of each target
        self.num_earlier: dict[str, int] = {}  # directions that --osft-bases keeps in each target; empty without it
        self.bases: dict[str, Bases] = {}  # on rank 0: gathered for an export

    @property
    def needs_statistics(self) -> bool:
        return BASES[self.options.osft_basis] or ALLOCATIONS[self.options.osft_rank_allocation]

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        self.data_options = data_options
        if (path := self.options.osft_calibration_data) is not None:
            self.calibration_data = open_calibration_data(
                path, tokenizer, max_tokens_per_gpu=data_options.max_tokens_per_gpu
            )

    def list_data_hashes(self) -> list[str]:
        earlier = [] if self.options.osft_bases in (None, NEW) else [hash_bases(Path(self.options.osft_bases))]
        if not self.needs_statistics:
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
        if self.needs_statistics:
            self.statistics = prepare_statistics(
                self.options.osft_statistics and Path(self.options.osft_statistics),
                self.calibration_data,
                self.data_options,
                build_plain=build_plain,
                objective=objective,
                world=world,
            )

    def choose_layers(self, meta: MetaModel) -> None:
        self.targets = find_targets(meta.model, meta.blocks, self.options.osft_target_patterns)
        self.shapes = {name: oriented_shape(module, self.options.osft_basis) for name, module in self.targets.items()}

    def prepare(
        self, meta: MetaModel, readers: dict[str, Reader], *, world: World, progress: Callable[[str], None]
    ) -> None:
        options, targets = self.options, self.targets
        warn_of_experts(meta.model, trains=options.osft_train_others)
        num_columns = {name: columns for name, (_, columns) in self.shapes.items()}
        uses_weights = not BASES[options.osft_basis]
        if self.needs_statistics:
            call_on_rank0(world, lambda: check_statistics(self.statistics, targets, needs_covariances=not uses_weights))
        self.num_earlier = call_on_rank0(
            world, lambda: count_earlier(options.osft_bases, self.shapes, options.osft_basis)
        )

        # Count kept directions first, if possible without decompositions: errors then show before hours of these.
        num_kept: dict[str, int] = {}
        if options.osft_keep_energy is None:
            num_kept = call_on_rank0(world, lambda: self.count_kept_by_ratio(num_columns))

        dtype = meta.compute_dtype if uses_weights else torch.float64
        dtype = torch.float32 if uses_weights and any(self.num_earlier.values()) else dtype

        def get_matrix(name: str) -> Tensor:
            matrix = self.read_matrix(name, readers, meta.compute_dtype)
            earlier = self.read_earlier(name)
            return matrix if earlier is None else restrict(matrix, earlier, device=world.device)

        self.subspace_files = prepare_subspaces(
            self.list_free_shapes(),
            lambda name: get_matrix(name).to(dtype),
            dtype=dtype,
            cache_dir=Path(options.osft_cache_dir).expanduser(),
            world=world,
            progress=progress,
        )
        if not uses_weights:
            num_kept = call_on_rank0(world, lambda: self.count_kept_by_energy(num_columns, num_kept))
        self.replace_layers(meta, num_kept)

    def list_free_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of what is decomposed of each target that earlier tasks do not keep whole (see `restrict`)."""
        free = {name: columns - self.num_earlier.get(name, 0) for name, (_, columns) in self.shapes.items()}
        on_inputs = BASES[self.options.osft_basis]
        return {
            name: (number if on_inputs else self.shapes[name][0], number) for name, number in free.items() if number
        }

    def read_matrix(self, name: str, readers: dict[str, Reader], dtype: torch.dtype) -> Tensor:
        """The target's weight A, as it is computed with, or the covariance of its inputs. On rank 0."""
        if BASES[self.options.osft_basis]:
            return self.statistics.covariance(name)
        module = self.targets[name]
        weight = readers[f"{name}.weight"]().to(dtype)
        return orient(weight, on_input=is_on_input(module, "weights"), is_conv1d=isinstance(module, Conv1D))

    def read_earlier(self, name: str) -> Bases | None:
        """The layer's directions after earlier tasks; None if these keep nothing of it. On rank 0."""
        return read_bases(Path(self.options.osft_bases), name) if self.num_earlier.get(name, 0) else None

    def read_directions(self, name: str) -> dict[str, Tensor]:
        """A layer's subspace as `fill_layer` needs it, with directions of the whole layer. On rank 0."""
        subspace = read_subspace(self.subspace_files[name])
        if (earlier := self.read_earlier(name)) is not None:
            subspace["basis"] = (earlier.V_free.double() @ subspace["basis"].double()).float()
            subspace["U_earlier"] = earlier.U_kept
        return subspace

    def lay_out(self, meta: MetaModel) -> None:
        ratio = self.options.osft_unfreeze_rank_ratio
        ratio = UNKNOWN_ENERGY_RATIO if ratio is None else ratio
        self.num_earlier = count_earlier(self.options.osft_bases, self.shapes, self.options.osft_basis)
        kept = {name: count_kept(columns, ratio) for name, (_, columns) in self.shapes.items()}
        self.replace_layers(meta, {name: max(self.num_earlier.get(name, 0), number) for name, number in kept.items()})

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

    def count_kept_by_ratio(self, num_columns: dict[str, int]) -> dict[str, int]:
        """Number of directions to keep in each layer; on rank 0. ValueError if nothing would train."""
        wanted = {name: count_kept(columns, self.choose_ratio(name)) for name, columns in num_columns.items()}
        num_kept = {name: max(self.num_earlier.get(name, 0), number) for name, number in wanted.items()}
        self.refuse_nothing(num_kept, num_columns, "--osft-unfreeze-rank-ratio")
        warn_of_full(self.num_earlier, wanted, ratio=self.options.osft_unfreeze_rank_ratio)
        return num_kept

    def count_kept_by_energy(self, num_columns: dict[str, int], num_kept: dict[str, int]) -> dict[str, int]:
        """`num_kept`, or if empty the numbers that hold the requested energy; logs the energy outside. On rank 0."""
        spectra = {name: self.read_spectrum(name) for name in num_columns}
        if (wanted := self.options.osft_keep_energy) is not None:
            shares = {name: spectrum.cumsum(0) / spectrum.sum() for name, spectrum in spectra.items()}
            num_kept = {
                name: max(self.num_earlier.get(name, 0), min(columns, int((shares[name] < wanted).sum()) + 1))
                for name, columns in num_columns.items()
            }
            self.refuse_nothing(num_kept, num_columns, "--osft-keep-energy")
        report_energy(spectra, num_kept)
        return num_kept

    def read_spectrum(self, name: str) -> Tensor:  # (s,)
        """The energy of each input direction; that of the earlier ones is summed up in the first."""
        file, num_earlier = self.subspace_files.get(name), self.num_earlier.get(name, 0)
        free = torch.zeros(0, dtype=torch.float64) if file is None else read_subspace(file)["singular_values"].square()
        if num_earlier == 0:
            return free
        carried = torch.zeros(num_earlier, dtype=torch.float64)
        carried[0] = (self.statistics.covariance(name).trace() - free.sum()).clamp(min=0)
        return torch.cat([carried, free])

    def refuse_nothing(self, num_kept: dict[str, int], num_columns: dict[str, int], flag: str) -> None:
        """ValueError if nothing is left to train."""
        if num_kept == num_columns and not self.options.osft_train_others:
            value = getattr(self.options, flag.removeprefix("--").replace("-", "_"))
            raise ValueError(f"{flag} {value}: nothing is left to train; keep less")

    def choose_ratio(self, name: str) -> float:
        """The layer's unfreeze rank ratio: R, or from its block's importance I (the paper's section on adaptive ranks).

        The kept share is mrr + I (trr - mrr), with I of mean 1 over the blocks, mrr `MIN_RETENTION` and trr = 1 - R.
        """
        if not ALLOCATIONS[self.options.osft_rank_allocation]:
            return self.options.osft_unfreeze_rank_ratio
        block = find_block(name, self.statistics.similarities)
        target = 1 - self.options.osft_unfreeze_rank_ratio
        least = min(MIN_RETENTION, target)
        kept = least + self.statistics.importance(block) * (target - least)
        return 1 - min(1.0, max(0.0, kept))

    def fill(self, module: nn.Module, name: str, readers: dict[str, Reader], *, world: World) -> None:
        if isinstance(module, OSFTLinear) and module.base.is_meta:
            subspace = self.read_directions(name) if world.rank == 0 else {}
            fill_layer(module, name, readers, subspace, num_earlier=self.num_earlier.get(name, 0), world=world)

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
        if not self.num_earlier:
            return model_bytes
        return model_bytes + sum(4 * (layer.V_low.numel() + layer.num_left) for layer in self.layers)

    def describe(self) -> str:
        num_trained = sum(layer.coefficients.numel() for layer in self.layers)
        num_weights = sum(layer.base.numel() for layer in self.layers)
        trained = f"OSFT on {len(self.layers)} layers: {num_trained:,} numbers train instead of {num_weights:,}"
        if not self.num_earlier:
            return trained
        total, earlier = sum(columns for _, columns in self.shapes.values()), sum(self.num_earlier.values())
        free = sum(layer.num_columns - layer.num_kept for layer in self.layers)
        kept = f"{earlier:,} are kept from earlier tasks, {total - earlier - free:,} newly"
        return f"{trained} (of {total:,} directions, {kept})"

    def gather_weights(self, packed_model: PackedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
        """Merges each OSFT layer into the single weight that it represents."""
        model, merged, groups = packed_model.model, set(), []
        if self.num_earlier:
            self.bases = self.gather_bases(model, world)

        def gather(layer: OSFTLinear) -> Tensor | None:
            weight = layer.merged_weight(dtype)
            return copy_to_cpu(weight) if world.rank == 0 else None

        for prefix, layer in model.named_modules():
            if isinstance(layer, OSFTLinear):
                name = f"{prefix}.weight"
                groups.append(gather_one(name, layer.weight_shape, dtype, functools.partial(gather, layer)))
                merged |= {f"{prefix}.{key}" for key in (*layer._parameters, *layer._buffers) if key != "bias"}
        return groups + gather_parameters(model, dtype, world=world, leave_out=merged)

    def gather_bases(self, model: PreTrainedModel, world: World) -> dict[str, Bases]:
        """On rank 0, what the model keeps of each target, as it was trained; empty on others. All ranks call this."""
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, OSFTLinear)}
        bases = {name: Bases(torch.empty(columns, 0)) for name, (_, columns) in self.shapes.items()}
        for name, layer in layers.items():
            bases[name] = layer.gather_bases(world=world)
        return bases if world.rank == 0 else {}

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.bases:
            write_bases(self.bases, directory / BASES_FILE, basis=self.options.osft_basis)
        self.bases = {}


def warn_of_full(num_earlier: dict[str, int], wanted: dict[str, int], *, ratio: float) -> None:
    """Warns of the layers whose earlier directions already take what R keeps."""
    full = [name for name, number in num_earlier.items() if number > 0 and number >= wanted[name]]
    if full:
        earlier, room = (sum(numbers[name] for name in full) for numbers in (num_earlier, wanted))
        log.warning(
            f"warning: in {len(full)} of {len(wanted)} layers --osft-bases already keeps {earlier:,} directions, and"
            f" --osft-unfreeze-rank-ratio {ratio} keeps {room:,}: nothing new is kept there of the model that this run"
            " starts from, so nothing of the last task; lower the ratio from task to task"
        )


def warn_of_experts(model: PreTrainedModel, *, trains: bool) -> None:
    experts = [param for param in model.parameters() if param.ndim == 3 and min(param.shape) > 1]
    if experts:
        log.warning(
            f"warning: --osft does not cover the {len(experts)} weights ({sum(p.numel() for p in experts):,} numbers)"
            f" of fused experts: they {'train without constraint' if trains else 'are frozen'}"
        )


def report_energy(spectra: dict[str, Tensor], num_kept: dict[str, int]) -> None:
    """Logs how much of the activations' energy is outside the kept directions."""
    outside = {name: spectrum[num_kept[name] :].sum().item() for name, spectrum in spectra.items()}
    shares = {name: energy / max(spectra[name].sum().item(), 1e-300) for name, energy in outside.items()}
    for name, share in shares.items():
        log.debug(f"OSFT: {name}: {num_kept[name]} of {len(spectra[name])} kept, {share:.2e} of the energy outside")
    total = sum(outside.values()) / sum(spectrum.sum().item() for spectrum in spectra.values())
    worst = max(shares, key=shares.get)
    log.info(
        f"OSFT: {sum(num_kept.values()):,} of {sum(map(len, spectra.values())):,} input directions kept;"
        f" {total:.2e} of the activations' energy is outside them, at most {shares[worst]:.2e} ({worst})"
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
