"""Which directions of each layer OSFT keeps: by a share of them, or by the activations' energy.

Letters as in osft.py: a weight is treated as a matrix A of L rows and s columns; k of the s directions are kept.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.method import MetaModel
from mini_trainer.model.methods.osft_bases import Bases, count_earlier, read_bases, restrict
from mini_trainer.model.methods.osft_calibration import Statistics, check_statistics
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
from mini_trainer.options import OSFTOptions

UNKNOWN_ENERGY_RATIO = 0.5  # unfreeze rank ratio that plans assume with --osft-keep-energy


class Directions:
    """The directions of a model's targets, and how many of them are kept.

    Invariant: every target keeps at least the directions that earlier tasks have kept of it.
    """

    def __init__(self, meta: MetaModel, options: OSFTOptions):
        self.options = options
        self.targets: dict[str, nn.Linear | Conv1D] = find_targets(
            meta.model, meta.blocks, options.osft_target_patterns
        )
        self.shapes = {name: oriented_shape(module, options.osft_basis) for name, module in self.targets.items()}
        self.statistics = Statistics()
        self.num_earlier: dict[str, int] = {}  # directions that --osft-bases keeps in each target; empty without it
        self.files: dict[str, Path] = {}  # on rank 0: the free subspace of each target

    @property
    def num_columns(self) -> dict[str, int]:
        return {name: columns for name, (_, columns) in self.shapes.items()}

    @property
    def of_inputs(self) -> bool:
        """Whether they come from activations."""
        return BASES[self.options.osft_basis]

    def assume(self) -> dict[str, int]:
        """Number of directions to keep in each target, if known without weights."""
        self.num_earlier = count_earlier(self.options.osft_bases, self.shapes, self.options.osft_basis)
        ratio = self.options.osft_unfreeze_rank_ratio
        ratio = UNKNOWN_ENERGY_RATIO if ratio is None else ratio
        return self.keep_earlier({name: count_kept(columns, ratio) for name, columns in self.num_columns.items()})

    def compute(
        self,
        statistics: Statistics,
        readers: dict[str, Reader],
        compute_dtype: torch.dtype,
        *,
        world: World,
        progress: Callable[[str], None],
    ) -> dict[str, int]:
        """Decomposes the targets; returns the number of directions to keep in each. All ranks call this.

        ValueError if nothing would train, or if the statistics lack a target.
        """
        self.statistics = statistics
        if self.of_inputs:
            call_on_rank0(world, lambda: check_statistics(statistics, self.targets))
        self.num_earlier = call_on_rank0(
            world, lambda: count_earlier(self.options.osft_bases, self.shapes, self.options.osft_basis)
        )

        # Count kept directions first, if possible without decompositions: errors then show before hours of these.
        num_kept: dict[str, int] = {}
        if self.options.osft_keep_energy is None:
            num_kept = call_on_rank0(world, self.count_by_ratio)

        dtype = torch.float64 if self.of_inputs else compute_dtype
        dtype = torch.float32 if not self.of_inputs and any(self.num_earlier.values()) else dtype

        def get_matrix(name: str) -> Tensor:
            matrix, earlier = self.read_matrix(name, readers, compute_dtype), self.read_earlier(name)
            return (matrix if earlier is None else restrict(matrix, earlier, device=world.device)).to(dtype)

        self.files = prepare_subspaces(
            self.list_free_shapes(),
            get_matrix,
            dtype=dtype,
            cache_dir=Path(self.options.osft_cache_dir).expanduser(),
            world=world,
            progress=progress,
        )
        return call_on_rank0(world, lambda: self.count_by_energy(num_kept)) if self.of_inputs else num_kept

    def list_free_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices to decompose, for each target that earlier tasks do not keep as a whole (see
        `restrict`)."""
        free = {name: columns - self.num_earlier.get(name, 0) for name, columns in self.num_columns.items()}
        return {
            name: (number if self.of_inputs else self.shapes[name][0], number)
            for name, number in free.items()
            if number
        }

    def read_matrix(self, name: str, readers: dict[str, Reader], dtype: torch.dtype) -> Tensor:
        """The target's weight A, in the dtype of computation, or the covariance of its inputs. On rank 0."""
        if self.of_inputs:
            return self.statistics.covariance(name)
        module = self.targets[name]
        weight = readers[f"{name}.weight"]().to(dtype)
        return orient(weight, on_input=is_on_input(module, "weights"), is_conv1d=isinstance(module, Conv1D))

    def read_earlier(self, name: str) -> Bases | None:
        """The target's directions after earlier tasks; None if these keep nothing of it. On rank 0."""
        return read_bases(Path(self.options.osft_bases), name) if self.num_earlier.get(name, 0) else None

    def read(self, name: str) -> dict[str, Tensor]:
        """A target's subspace as `fill_layer` needs it, with directions of the whole layer. On rank 0."""
        subspace = read_subspace(self.files[name])
        if (earlier := self.read_earlier(name)) is not None:
            subspace["basis"] = (earlier.V_free.double() @ subspace["basis"].double()).float()
            subspace["U_earlier"] = earlier.U_kept
        return subspace

    def keep_earlier(self, wanted: dict[str, int]) -> dict[str, int]:
        return {name: max(self.num_earlier.get(name, 0), number) for name, number in wanted.items()}

    def count_by_ratio(self) -> dict[str, int]:
        """Number of directions to keep in each target; on rank 0. ValueError if nothing would train."""
        ratio = self.options.osft_unfreeze_rank_ratio
        wanted = {name: count_kept(columns, ratio) for name, columns in self.num_columns.items()}
        num_kept = self.keep_earlier(wanted)
        self.refuse_nothing(num_kept, "--osft-unfreeze-rank-ratio", ratio)
        warn_of_full(self.num_earlier, wanted, ratio=ratio)
        return num_kept

    def count_by_energy(self, num_kept: dict[str, int]) -> dict[str, int]:
        """`num_kept`, or if empty the numbers that hold the requested energy; logs the energy outside. On rank 0."""
        spectra = {name: self.read_spectrum(name) for name in self.targets}
        if (wanted := self.options.osft_keep_energy) is not None:
            shares = {name: spectrum.cumsum(0) / spectrum.sum() for name, spectrum in spectra.items()}
            num_kept = self.keep_earlier(
                {
                    name: min(columns, int((shares[name] < wanted).sum()) + 1)
                    for name, columns in self.num_columns.items()
                }
            )
            self.refuse_nothing(num_kept, "--osft-keep-energy", wanted)
        report_energy(spectra, num_kept)
        return num_kept

    def read_spectrum(self, name: str) -> Tensor:  # (s,)
        """The energy of each input direction; that of the earlier ones is summed up in the first."""
        file, num_earlier = self.files.get(name), self.num_earlier.get(name, 0)
        free = torch.zeros(0, dtype=torch.float64) if file is None else read_subspace(file)["singular_values"].square()
        if num_earlier == 0:
            return free
        carried = torch.zeros(num_earlier, dtype=torch.float64)
        carried[0] = (self.statistics.covariance(name).trace() - free.sum()).clamp(min=0)
        return torch.cat([carried, free])

    def refuse_nothing(self, num_kept: dict[str, int], flag: str, value: float) -> None:
        """ValueError if nothing is left to train."""
        if num_kept == self.num_columns and not self.options.osft_train_others:
            raise ValueError(f"{flag} {value}: nothing is left to train; keep less")


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
