"""Which directions of each layer OSFT keeps: by a share of them, or by the activations' energy.

Letters as in osft.py: a weight is treated as a matrix A of L rows and s columns; k of the s directions are kept.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.devices import GIB, available_memory, memory_limit, resident_memory
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.hashed_tensors import open_hashed, read_hashed, write_hashed
from mini_trainer.model.method import MetaModel
from mini_trainer.model.methods import osft_subspaces as subspaces
from mini_trainer.model.weights import Readers, find_types
from mini_trainer.objectives.families.family import Family, Row
from mini_trainer.objectives.families.text_tower import count_logits, find_blocks
from mini_trainer.objectives.objective import PackedModel, Unlabeled
from mini_trainer.options import DataOptions, OSFTOptions
from mini_trainer.options.places import expand
from mini_trainer.options.reading import hash_file
from mini_trainer.sampler import Batch, iterate_batches

NUM_CALIBRATION_SAMPLES = 512  # maximum number drawn from the data, with the run's seed


@dataclass
class Statistics:
    """Statistics of the layers' inputs on earlier tasks' data, with equal weight for each data set. Empty except on
    rank 0. Layers with the same input (query, key, value) share one covariance, under the first one's name."""

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
        in_features = subspaces.weight_shape(module)[1]
        if name not in statistics.inputs or len(statistics.covariance(name)) != in_features:
            raise ValueError(
                f"--osft-statistics: has nothing about the {in_features} inputs of {name}: these are statistics of"
                " another model, or of fewer layers"
            )


def read_statistics(path: Path) -> Statistics:
    covariances, about = read_hashed(path, "inputs", "data_hashes", what=name_statistics(path))
    return Statistics(covariances, about["inputs"], about["data_hashes"])


def read_data_hashes(path: Path) -> list[str]:
    """Hashes of the data sets in the file; the large covariances are not read."""
    with open_hashed(path, "data_hashes", what=name_statistics(path)) as (_, about):
        return about["data_hashes"]


def name_statistics(path: Path) -> str:
    return f"--osft-statistics {path}: not a statistics file"


def write_statistics(statistics: Statistics, path: Path) -> None:
    about = dict(inputs=statistics.inputs, data_hashes=statistics.data_hashes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_hashed(path, statistics.covariances, about)
    except OSError as error:
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
    family: Family,
    world: World,
    patterns: tuple[str, ...] = (),
) -> Statistics:
    """Statistics of earlier tasks from the file `path`, from `data`, or both; empty except on rank 0.

    `data`, of any kind, is added to the file only once: the file records the hashes of its data. `build_plain` builds
    the model of `family` that the data is run through; only the seed and the token cap of `options` matter. The file
    has all layers; without one only those whose names contain one of `patterns` are recorded.
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
    model, mixture = build_plain(), Mixture([data])
    data.vocab_size = count_logits(model.model.config)
    foreign = list(family.list_foreign(model.model.config))
    if foreign and mixture.find_tokens(foreign) is not None:
        raise ValueError(
            f"--osft-calibration-data {data.path}: has placeholders of images, which this run's model does not"
            " read: give data of texts alone"
        )
    batch = next(
        iterate_batches(
            mixture,
            replace(options, batch_size=min(NUM_CALIBRATION_SAMPLES, len(data.kept)), batch_tokens=None),
            objective=Unlabeled(family),
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
    """Runs each rank's micro-batches of `batch` forward, recording every targeted linear layer. All tokens of samples
    count, trained or not, and none that fills a row or an idle rank's. Sums are in fp64. Covariances that do not fit
    into memory together are recorded in several passes, between which rank 0's CPU memory holds them."""
    packed_model.eval()
    counts = [
        count_own(int(batch.lengths[indices].sum()), micro_batch.row)
        for indices, micro_batch in zip(batch.column, batch.micro_batches, strict=True)
    ]
    num_tokens = torch.tensor(sum(counts), dtype=torch.float64, device=world.device)
    dist.all_reduce(num_tokens)
    statistics, recorded, num_passes, is_whole = Statistics(data_hashes=[data_hash]), set(), 0, False
    while not is_whole:
        recorder = Recorder(packed_model, patterns, recorded=recorded, room=find_room(world))
        with recorder.watch():
            for micro_batch, recorder.num_counted in zip(batch.micro_batches, counts, strict=True):
                recorder.row = micro_batch.row
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


def count_own(num_tokens: int, row: Row) -> int:
    """How many of a row's first `num_tokens` tokens this rank's part of it has."""
    length, first = row.input_ids.numel(), 0 if row.row_group is None else row.row_group.rank * row.input_ids.numel()
    return min(max(0, num_tokens - first), length)


class Recorder:
    """Sums up, in one pass over the data, the covariances of as many layers' inputs as there is room for."""

    def __init__(self, packed_model: PackedModel, patterns: tuple[str, ...], *, recorded: set[str], room: int):
        """`recorded`: covariances of earlier passes; `room`: bytes for those of this one. There is always one."""
        model = packed_model.model
        self.names = {module: name for name, module in model.named_modules()}
        self.layers = subspaces.find_targets(model, find_blocks(model), patterns)
        self.recorded, self.room = recorded, room
        self.row: Row | None = None  # this rank's part of a packed row, of whose tokens the first count
        self.num_counted = 0
        self.covariances: dict[str, Tensor] = {}  # (in, in) fp64: sum of x x^T
        self.left_out: dict[str, int] = {}  # bytes of covariances for a later pass
        self.inputs: dict[str, str] = {}  # as in `Statistics`
        self.last_name = ""
        self.last_input: Tensor | None = None

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
        if self.num_counted:
            rows = self.select(name, rows).double()
            self.covariances[name].addmm_(rows.T, rows)

    def select(self, name: str, rows: Tensor) -> Tensor:
        """The inputs (T, in) of tokens that count."""
        length = self.row.input_ids.numel()
        if len(rows) == length:
            return rows[: self.num_counted]
        if self.num_counted < length:
            raise ValueError(
                f"--osft-basis activations: {name} reads {len(rows)} inputs of a row's {length} tokens,"
                f" {self.num_counted} of which are of samples, and does not say which: remove --context-parallel"
            )
        return rows


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


UNKNOWN_ENERGY_RATIO = 0.5  # unfreeze rank ratio that plans assume with --osft-keep-energy


class Directions:
    """The directions of a model's targets, and how many of them are kept.
    Invariant: every target keeps at least the directions that earlier tasks have kept of it."""

    def __init__(self, meta: MetaModel, options: OSFTOptions):
        self.options, self.meta = options, meta
        self.targets: dict[str, nn.Linear | Conv1D] = subspaces.find_targets(
            meta.model, meta.blocks, options.osft_target_patterns
        )
        self.shapes = {
            name: subspaces.oriented_shape(module, options.osft_basis) for name, module in self.targets.items()
        }
        self.statistics = Statistics()
        self.num_earlier: dict[str, int] = {}  # directions that --osft-bases keeps in each target; empty without it
        self.types: dict[str, torch.dtype] = {}  # in which the model's files hold each target
        self.files: dict[str, Path] = {}  # on rank 0: the free subspace of each target

    @property
    def num_columns(self) -> dict[str, int]:
        return {name: columns for name, (_, columns) in self.shapes.items()}

    @property
    def of_inputs(self) -> bool:
        """Whether they come from activations."""
        return subspaces.BASES[self.options.osft_basis]

    def assume(self) -> dict[str, int]:
        """Number of directions to keep in each target, if known without weights."""
        self.types = self.find_types()
        self.num_earlier = subspaces.count_earlier(self.options.osft_bases, self.shapes, self.options.osft_basis)
        ratio = self.options.osft_unfreeze_rank_ratio
        ratio = UNKNOWN_ENERGY_RATIO if ratio is None else ratio
        counts = {name: subspaces.count_kept(columns, ratio) for name, columns in self.num_columns.items()}
        return self.keep_earlier(counts)

    def compute(
        self, statistics: Statistics, readers: Readers, *, world: World, progress: Callable[[str], None]
    ) -> dict[str, int]:
        """Decomposes the targets; returns the number of directions to keep in each. All ranks call this.
        ValueError if nothing would train, or if the statistics lack a target."""
        self.statistics = statistics
        if self.of_inputs:
            call_on_rank0(world, lambda: check_statistics(statistics, self.targets))
        self.types = call_on_rank0(world, self.find_types)
        self.num_earlier = call_on_rank0(
            world, lambda: subspaces.count_earlier(self.options.osft_bases, self.shapes, self.options.osft_basis)
        )

        # Count kept directions first, if possible without decompositions: errors then show before hours of these.
        num_kept: dict[str, int] = {}
        if self.options.osft_keep_energy is None:
            num_kept = call_on_rank0(world, self.count_by_ratio)

        own, is_new = set(self.types.values()), not any(self.num_earlier.values())
        dtype = own.pop() if is_new and len(own) == 1 else torch.float32
        dtype = torch.float64 if self.of_inputs else dtype

        def get_matrix(name: str) -> Tensor:
            matrix, earlier = self.read_matrix(name, readers), self.read_earlier(name)
            if earlier is not None:
                matrix = subspaces.restrict(matrix, earlier, device=world.device)
            return matrix.to(dtype)

        self.files = subspaces.prepare_subspaces(
            self.list_free_shapes(),
            get_matrix,
            dtype=dtype,
            cache_dir=expand(self.options.osft_cache_dir),
            world=world,
            progress=progress,
        )
        return call_on_rank0(world, lambda: self.count_by_energy(num_kept)) if self.of_inputs else num_kept

    def list_free_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices to decompose, of each target that earlier tasks do not keep whole (see `restrict`)."""
        free = {name: columns - self.num_earlier.get(name, 0) for name, columns in self.num_columns.items()}
        free = {name: number for name, number in free.items() if number}
        return {name: (number if self.of_inputs else self.shapes[name][0], number) for name, number in free.items()}

    def find_types(self) -> dict[str, torch.dtype]:
        types = find_types(self.meta.source, self.meta.model, (f"{name}.weight" for name in self.targets))
        return {name: types[f"{name}.weight"] for name in self.targets}

    def read_matrix(self, name: str, readers: Readers) -> Tensor:
        """The target's weight A, or the covariance of its inputs. On rank 0."""
        if self.of_inputs:
            return self.statistics.covariance(name)
        module = self.targets[name]
        weight = readers[f"{name}.weight"]()
        return subspaces.orient(
            weight, on_input=subspaces.is_on_input(module, "weights"), is_conv1d=isinstance(module, Conv1D)
        )

    def read_earlier(self, name: str) -> subspaces.Bases | None:
        """The target's directions after earlier tasks; None if these keep nothing of it. On rank 0."""
        return subspaces.read_bases(Path(self.options.osft_bases), name) if self.num_earlier.get(name, 0) else None

    def read(self, name: str) -> dict[str, Tensor]:
        """A target's subspace as `fill_layer` needs it, with directions of the whole layer. On rank 0."""
        subspace = subspaces.read_subspace(self.files[name])
        if (earlier := self.read_earlier(name)) is not None:
            subspace["basis"] = (earlier.V_free.double() @ subspace["basis"].double()).float()
            subspace["U_earlier"] = earlier.U_kept
        return subspace

    def keep_earlier(self, wanted: dict[str, int]) -> dict[str, int]:
        return {name: max(self.num_earlier.get(name, 0), number) for name, number in wanted.items()}

    def count_by_ratio(self) -> dict[str, int]:
        """Number of directions to keep in each target; on rank 0. ValueError if nothing would train."""
        ratio = self.options.osft_unfreeze_rank_ratio
        wanted = {name: subspaces.count_kept(columns, ratio) for name, columns in self.num_columns.items()}
        num_kept = self.keep_earlier(wanted)
        self.refuse_nothing(num_kept, "--osft-unfreeze-rank-ratio", ratio)
        warn_of_full(self.num_earlier, wanted, ratio=ratio)
        return num_kept

    def count_by_energy(self, num_kept: dict[str, int]) -> dict[str, int]:
        """`num_kept`, or if empty the numbers that hold the requested energy; logs the energy outside. On rank 0."""
        spectra = {name: self.read_spectrum(name) for name in self.targets}
        if (wanted := self.options.osft_keep_energy) is not None:
            shares = {name: spectrum.cumsum(0) / spectrum.sum() for name, spectrum in spectra.items()}
            held = {name: int((shares[name] < wanted).sum()) + 1 for name in self.targets}
            num_kept = self.keep_earlier({name: min(self.num_columns[name], held[name]) for name in self.targets})
            self.refuse_nothing(num_kept, "--osft-keep-energy", wanted)
        report_energy(spectra, num_kept)
        return num_kept

    def read_spectrum(self, name: str) -> Tensor:  # (s,)
        """The energy of each input direction; that of the earlier ones is summed up in the first."""
        file, num_earlier = self.files.get(name), self.num_earlier.get(name, 0)
        free = (
            torch.zeros(0, dtype=torch.float64)
            if file is None
            else subspaces.read_subspace(file)["singular_values"].square()
        )
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
