"""Memory that a run would need, by a simulated step (simulation.py), the values of `auto` that follow, and the parts of
a plan: the machine, the known parts of the run, the packing of its batches, and the findings.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mini_trainer.batch_packer import cost_samples, pack_batch
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.devices import DTYPES, GIB, MARGIN, resident_memory
from mini_trainer.distributed.messages import say
from mini_trainer.model import sharding
from mini_trainer.model.attention import BACKENDS
from mini_trainer.model.flops import FlopCount
from mini_trainer.model.method import Method
from mini_trainer.objectives.objective import Objective
from mini_trainer.options import ComputeOptions, flag_name, replace_options
from mini_trainer.options.doors import CHECKPOINTING
from mini_trainer.run import auto_settings
from mini_trainer.run.inputs import Errors, RunInputs
from mini_trainer.run.plan import simulation
from mini_trainer.run.step import StepOptions
from mini_trainer.sampler import RunPosition


@dataclass
class Findings:
    """The lines, warnings and problems that a plan prints."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: Errors = field(default_factory=Errors)

    def add_problem(self, text: str) -> None:
        self.problems.append(ValueError(text))

    def print(self) -> None:
        count = len(self.problems)
        say("\n".join(self.lines))
        for warning in self.warnings:
            say(f"warning: {warning}")
        say(f"\n{count or 'no'} problem{'' if count == 1 else 's'} found")
        for problem in self.problems:
            say(f"  - {problem}")


@dataclass(frozen=True)
class Target:
    """The machine to plan for."""

    ranks: simulation.Ranks
    device: torch.device
    name: str
    peak_flops: float | None
    limit: int | None  # bytes that a rank may use

    @property
    def base(self) -> int:
        """Bytes of a rank besides its tensors."""
        return resident_memory() if self.device.type == "cpu" else 0


@dataclass(frozen=True)
class PlannedOther:
    """The work of a reference model before the first step, or of a teacher in every step."""

    flops: float  # of all the samples that it scores, or of its forward pass over a global batch
    num_bytes: int  # of its weights on a rank, beside the model's; 0: it is the model itself
    num_rows: int = 0  # of a reference: samples that no run has scored


@dataclass(frozen=True)
class PlannedRun:
    """The run as described by its files; None for parts with errors."""

    inputs: RunInputs
    start: RunPosition
    make_method: Callable[[], Method]  # for another model than the inputs'
    model: simulation.PlannedModel | None
    reference: PlannedOther | None = None  # None also if the objective has none
    teacher: PlannedOther | None = None  # one that reads each micro-batch


@dataclass(frozen=True)
class Packing:
    """Measurements of the next global batches; all arrays (batches,)."""

    cap: int  # tokens of a row
    num_micro_batches: np.ndarray
    fill: np.ndarray  # tokens / (micro-batches x ranks x cap)
    idle: np.ndarray  # share of the ranks' time spent on waiting for the slowest
    flops: np.ndarray
    num_tokens: int  # of the largest row that trains
    num_trained: int  # most in one micro-batch

    def beside(self, other: "Packing") -> "Packing":
        """The measurements of steps that have the micro-batches of both."""
        own, others = self.num_micro_batches, other.num_micro_batches
        share = own / (own + others)
        return Packing(
            self.cap,
            own + others,
            share * self.fill + (1 - share) * other.fill,
            share * self.idle + (1 - share) * other.idle,
            self.flops + other.flops,
            max(self.num_tokens, other.num_tokens),
            max(self.num_trained, other.num_trained),
        )

    def describe(self) -> str:
        counts = self.num_micro_batches
        return (
            f"micro-batches of at most {self.cap:,} tokens, in the next {len(counts)} batches: {counts.mean():.1f} a"
            f" step on each rank ({counts.min()} to {counts.max()}), {self.fill.mean():.0%} full; ranks idle"
            f" {self.idle.mean():.2%} of the time due to imbalance, at most {self.idle.max():.2%}"
        )


def pack_batches(
    data: Mixture, batches: Iterator[np.ndarray], flops: FlopCount, objective: Objective, *, world_size: int, cap: int
) -> Packing:
    """Packs global batches: the rows of each."""
    rows = []
    for ids in batches:
        lengths, trained = data.lengths[ids], data.num_loss_tokens[ids]
        load = data.load_of(ids)
        table = pack_batch(lengths, cap, world_size, flops.attention_cost, load)
        costs = cost_samples(lengths, flops.attention_cost, load)
        in_row = count_row_tokens(data, ids, objective)
        loads = np.array([[costs[indices].sum() for indices in row] for row in table])  # (micro-batches, ranks)
        cells = [indices for row in table for indices in row]
        rows.append(
            (
                len(table),
                lengths.sum() / (len(cells) * cap),
                1 - loads.mean(axis=1).sum() / loads.max(axis=1).sum(),
                flops.of_rows(ids, data, objective),
                max(in_row[indices].sum() for indices in cells),
                max(trained[indices].sum() for indices in cells),
            )
        )
    *measured, num_tokens, num_trained = map(np.array, zip(*rows, strict=True))
    return Packing(cap, *measured, int(num_tokens.max()), int(num_trained.max()))


def count_row_tokens(data: Mixture, rows: np.ndarray, objective: Objective) -> np.ndarray:  # (rows,)
    """Tokens of each sample in the row that trains."""
    sequences, most = data.list_sequences(rows), objective.num_trained_sequences
    return sequences.sum_by_row(sequences.lengths * (True if most is None else sequences.places < most))


ENOUGH_TOKENS = 4096  # large enough for the fixed costs to be small

KINDS = {  # descriptions of the kinds of StepMemory.peak
    "weights": "trainable weights, sharded",
    "frozen": "frozen weights and buffers",
    "gradients": "gradients, sharded",
    "optimizer": "optimizer state, sharded",
    "gathered": "weights gathered or cast, gradients reduced",
    "activations": "activations",
    "loss": "loss: a chunk of logits, gradient of the head",
    "teacher": "teacher, sharded",
}


def plan_memory(
    options: StepOptions, target: Target, run: PlannedRun, findings: Findings
) -> tuple[StepOptions, Packing | None, bool]:
    """Adds the model and the memory it needs; returns the options without auto and, if known, the packing."""
    if run.model is None or run.inputs.batching is None:
        options = settle_mode(options)
        if run.model is not None:
            describe_model(options, run.model, findings)
        return options, None, False
    if options.compute.kernels == "auto":
        options = replace_options(options, kernels="fused" if run.model.meta.kernels.num_modules else "eager")
    packing = memory = obstacle = None
    try:
        options = settle_by_simulation(options, target, run, findings)
    except RuntimeError as error:  # torch's, of an operation that needs more than shapes
        obstacle = error
    options = settle_mode(options)
    describe_model(options, run.model, findings)
    if options.data.max_tokens_per_gpu != "auto":
        packing = pack_run(options, target, run)
    try:
        if obstacle is None and packing is not None:
            accumulates, longest = bool(packing.num_micro_batches.max() > 1), run.inputs.longest_set.longest_sequence
            most = packing.num_tokens, packing.num_trained  # the largest micro-batch, the most trained tokens
            memory = simulate(options, target, run, simulation.Load(*most, longest, accumulates))
    except RuntimeError as error:
        obstacle = error
    if obstacle is not None:
        findings.lines.append(f"memory: unknown, since a step of this model cannot be simulated: {obstacle}")
    if memory is not None:
        findings.lines.append(packing.describe())
        describe_memory(target, packing, memory, findings)
        check_memory(target, memory, findings)
        check_reference_memory(target, run, memory, findings)
    return options, packing, memory is not None


def pack_run(options: StepOptions, target: Target, run: PlannedRun) -> Packing:
    """Packs the run's next batches."""
    inputs, num_steps = run.inputs, run.inputs.num_steps
    num_left = auto_settings.NUM_BATCHES if num_steps is None else num_steps - run.start.step
    most = max(1, min(auto_settings.NUM_BATCHES, num_left))
    cap = max(options.data.max_tokens_per_gpu * (target.ranks.num_sharing or 1), inputs.longest_set.longest)

    def pack(data: Mixture, batches: Iterator[np.ndarray]) -> Packing:
        chosen, num_rows = itertools.islice(batches, most), target.ranks.num_rows
        return pack_batches(data, chosen, run.model.flops, inputs.objective, world_size=num_rows, cap=cap)

    packing = pack(inputs.data, inputs.draw_batches(run.start))
    if inputs.old is None:
        return packing
    return packing.beside(pack(inputs.old.data, inputs.old.draw_batches(run.start.step)))


def settle_mode(options: StepOptions) -> StepOptions:
    """Falls back to the least memory if nothing could be determined."""
    if options.compute.activation_checkpointing != "auto":
        return options
    return replace_options(options, activation_checkpointing=CHECKPOINTING[-1])


def describe_model(options: StepOptions, model: simulation.PlannedModel, findings: Findings) -> None:
    dtype = str(model.meta.compute_dtype).removeprefix("torch.")
    resharding = [f"{flag_name(name)} {value}" for name, value in sharding.list_resharding(options.sharding).items()]
    findings.lines.append(
        f"model: {model.meta.model.config.model_type}, {model.num_params:,} parameters, {model.num_trainable:,} of"
        f" them trainable; {dtype} compute, {options.compute.activation_checkpointing} activation checkpointing,"
        f" {options.compute.kernels} kernels, {', '.join([*resharding, model.method.title])}"
    )
    if model.meta.left_out.parts:
        num_bytes = DTYPES[options.optimization.master_weights].itemsize
        findings.lines.append(f"  {model.meta.left_out.describe(num_bytes=num_bytes)}")


def simulated_compute(compute: ComputeOptions, target: Target, inputs: RunInputs) -> ComputeOptions:
    """The compute options for a simulation, which always runs on a CPU.
    A GPU's attention kernels keep what SDPA keeps, unless they store their scores."""
    attention = compute.attention
    if target.device.type != "cpu" and not (attention in BACKENDS and BACKENDS[attention].stores_scores):
        attention = "auto"
    dtype = str(inputs.compute_dtype).removeprefix("torch.")
    return replace(compute, attention=attention, compute_dtype=dtype, compile=False, float8=False)


def settle_by_simulation(options: StepOptions, target: Target, run: PlannedRun, findings: Findings) -> StepOptions:
    """The options with auto resolved, assuming that every token is trained; auto stays if no memory limit is known."""
    given, mode = options.data.max_tokens_per_gpu, options.compute.activation_checkpointing
    autos = [("max-tokens-per-gpu", given), ("activation-checkpointing", mode)]
    if target.limit is None:
        for name in (name for name, value in autos if value == "auto"):
            findings.add_problem(f"--{name} auto cannot be planned without --memory-budget-gb")
    meta = run.model.meta
    is_whole = sharding.stays_whole(
        meta.model,
        meta.compute_dtype,
        options.sharding,
        kept=meta.list_kept(),
        world_size=target.ranks.world_size,
        memory=target.ranks.memory,
    )
    unmeasured = sharding.choose_resharding(options.sharding, has_room=is_whole)
    if target.limit is None or not ("auto" in (given, mode) or sharding.is_worth_measuring(unmeasured, target.device)):
        return options
    data = run.inputs.longest_set
    longest, most = auto_settings.count_useful_tokens(run.inputs, run.start, world_size=target.ranks.num_rows)
    least, enough = longest, max(longest, min(most, ENOUGH_TOKENS))
    num_sharing = target.ranks.num_sharing or 1
    if given != "auto":
        least = most = enough = max(longest, min(most, given * num_sharing))

    def find(mode: str) -> auto_settings.Room:
        settled = replace_options(options, activation_checkpointing=mode)
        return auto_settings.find_room(
            lambda num_tokens: probe_by_simulation(settled, target, run, num_tokens=num_tokens),
            first=most,
            least=least,
            most=most,
            plenty=0.0,
        )

    mode, room = auto_settings.choose_mode(
        find, CHECKPOINTING if mode == "auto" else (mode,), enough=enough, is_timed=False
    )
    cap = -(-(room.num_tokens or longest) // num_sharing) if given == "auto" else given
    if given == "auto" and room.num_tokens == 0:
        findings.add_problem(auto_settings.refuse_longest(data, room))
    weights_bytes = sharding.count_gathered_bytes(meta.model, meta.compute_dtype, meta.list_kept())
    has_room = is_whole or auto_settings.has_room_gathered(room, options.sharding, weights_bytes=weights_bytes)
    resharding = sharding.choose_resharding(options.sharding, has_room=has_room)
    return replace_options(options, activation_checkpointing=mode, max_tokens_per_gpu=cap, **resharding)


def probe_by_simulation(
    options: StepOptions, target: Target, run: PlannedRun, *, num_tokens: int
) -> auto_settings.Probe:
    """Simulates a step of micro-batches of `num_tokens`, every one trained."""
    load = simulation.Load(num_tokens, num_tokens, longest=run.inputs.longest_set.longest_sequence, accumulates=True)
    memory = simulate(options, target, run, load)
    needed = target.base + memory.total
    return auto_settings.Probe(
        tokens=num_tokens,
        bytes=needed,
        activation_bytes=memory.peak["activations"],
        excess_bytes=needed - target.limit,
        bytes_per_token=memory.per_token,
    )


def simulate(options: StepOptions, target: Target, run: PlannedRun, load: simulation.Load) -> simulation.StepMemory:
    compute, inputs = simulated_compute(options.compute, target, run.inputs), run.inputs
    memory = simulation.simulate_step(
        options, simulation.lay_out_model(options, inputs, compute, run.make_method()), load, target.ranks
    )
    memory.peak["teacher"] = 0 if run.teacher is None else run.teacher.num_bytes
    return memory


def describe_memory(target: Target, packing: Packing, memory: simulation.StepMemory, findings: Findings) -> None:
    base, lines, num_sharing = target.base, findings.lines, target.ranks.num_sharing
    shared = "" if num_sharing is None else f"; {num_sharing} ranks share it, and have an equal part each"
    lines.append(
        f"memory of a rank, at the peak of its largest micro-batch: {packing.num_tokens:,} tokens,"
        f" {packing.num_trained:,} of them trained{shared}"
    )
    items = {words: memory.peak[kind] for kind, words in KINDS.items()}
    items["interpreter and libraries"] = base
    lines += [f"  {words:<48}{size / GIB:9.3f} GiB" for words, size in items.items() if size >= 2**20]
    if target.ranks.offloads:
        lines.append("  sharded tensors are in host memory and not counted")
    lines.append(f"  {'together':<48}{(base + memory.total) / GIB:9.3f} GiB")
    lines.append(f"  {'one token more in a micro-batch':<48}{memory.per_token / 1024:9.1f} KiB")
    if memory.offloaded:
        lines.append(f"  {'inputs of blocks, in CPU memory':<48}{memory.offloaded / GIB:9.3f} GiB")


def check_memory(target: Target, memory: simulation.StepMemory, findings: Findings) -> None:
    needed = target.base + memory.total
    if target.limit is None:
        findings.lines.append("  give --memory-budget-gb to check whether that fits")
    elif needed > target.limit:
        findings.add_problem(
            f"a step needs {needed / GIB:,.1f} GiB on each rank, and of {target.limit / GIB / (1 - MARGIN):,.1f} GiB"
            f" {1 - MARGIN:.0%} may be used: lower --max-tokens-per-gpu (auto finds the largest), use"
            " --activation-checkpointing full, --tiled-mlp, --offload-activations, or more GPUs"
        )


def check_reference_memory(target: Target, run: PlannedRun, memory: simulation.StepMemory, findings: Findings) -> None:
    """Adds the memory of a separate reference model while it scores next to the model, before the optimizer's state
    exists; a problem if that does not fit."""
    if run.reference is None or not run.reference.num_bytes:
        return
    there = sum(memory.peak[kind] for kind in ("weights", "frozen", "gathered", "loss"))
    needed = target.base + there + run.reference.num_bytes
    findings.lines.append(f"  {'while --reference-model scores, before the first step':<48}{needed / GIB:9.3f} GiB")
    if target.limit is not None and needed > target.limit:
        findings.add_problem(
            f"--reference-model needs {needed / GIB:,.1f} GiB on each rank beside the model: use more GPUs, or score"
            f" the data first with a run of one step on more of them"
        )
