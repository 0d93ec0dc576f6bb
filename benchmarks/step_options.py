"""What the options of a step cost and save: activation checkpointing, compile, and the optimizer's precision.

    OMP_NUM_THREADS=1 python benchmarks/step_options.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/step_options.py --only optimizers    # rank 0's figures

Builds a random Qwen2 of the given shape, runs forward and backward of the same micro-batches with each option in turn,
and prints the median time and the bytes that a forward pass leaves for its backward; then one update of each optimizer,
what it adds to a step, and this rank's bytes of weights and moments; then what bf16 gradients lose when they are summed
over micro-batches; then what the losses of several data sets and a validation cost; then what a checkpoint costs beside
its work, with and without the random number generators' states. Time on the CPU is the process's own, which other work
on the machine moves little.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from harness import build_state, make_batch, make_options, time_call
from op_recording import OpRecorder

from families.micro_batch import MicroBatch
from lifecycle.step import TrainState, run_backward, update_weights
from model.sharding import reshard
from objectives.packed_model import PackedModel
from ranks.world import call_on_rank0, init_world, setup_logging
from sampler import Batch

BLOCKS = {
    "none": dict(),
    "selective": dict(activation_checkpointing="selective"),
    "full": dict(activation_checkpointing="full"),
    "none, compiled": dict(compile=True),
}
OPTIMIZERS = {
    "adamw": dict(),
    "adamw8bit": dict(optimizer="adamw8bit"),
    "adamw, bf16 weights": dict(master_weights="bfloat16"),
    "muon": dict(optimizer="muon"),
    "adamw8bit, bf16 weights": dict(optimizer="adamw8bit", master_weights="bfloat16"),
}
LEARNING_RATE = 1e-4
NUM_CHECKPOINTS = 200  # of a round
NUM_SUMMED = (1, 2, 4, 8, 16, 32)  # micro-batches

Build = Callable[..., TrainState]  # with options by name


def run_backwards(model: PackedModel, batch: Batch) -> None:
    for micro_batch in batch.micro_batches:
        run_backward(model, micro_batch, batch.divisors)


def count_kept_bytes(model: PackedModel, micro_batch: MicroBatch) -> int:
    """Bytes that a forward pass leaves for its backward, gathered weights included."""
    with OpRecorder() as recorder:
        loss = model(micro_batch)
    num_bytes = recorder.live_bytes()
    loss.backward()
    return num_bytes


def print_blocks(build: Build, batch: Batch, *, repeats: int) -> None:
    states = {name: build(**options) for name, options in BLOCKS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(repeats + 1):
        for name, state in states.items():
            seconds[name].append(time_call(lambda model=state.model: run_backwards(model, batch), state.world.device))
    print("| blocks | first time | then, ms per 1,000 tokens | of none | kept for backward, bytes a token |")
    print("| --- | --- | --- | --- | --- |")
    plain = statistics.median(seconds["none"][1:])
    for name, (first, *later) in seconds.items():
        median = statistics.median(later)
        kept = "as it compiles"
        if "compiled" not in name:
            tokens = sum(batch.micro_batches[0].row.seq_lengths)
            kept = f"{count_kept_bytes(states[name].model, batch.micro_batches[0]) / tokens:,.0f}"
        per_token = 1e6 * median / batch.lengths.sum()
        print(f"| {name} | {first:.1f} s | {per_token:.0f} | {median / plain:.2f} | {kept} |")


def print_optimizers(build: Build, batch: Batch, *, repeats: int) -> None:
    print("\n| optimizer | update | of adamw | step, of adamw | weights, bytes each | moments, bytes each |")
    print("| --- | --- | --- | --- | --- | --- |")
    states = {name: build(**options) for name, options in OPTIMIZERS.items()}
    updates: dict[str, list[float]] = {name: [] for name in states}
    backwards = []
    for step in range(repeats + 1):
        for name, state in states.items():
            device = state.world.device
            backwards.append(time_call(lambda model=state.model: run_backwards(model, batch), device))
            updates[name].append(
                time_call(
                    lambda state=state, step=step: update_weights(state, step=step, lr=LEARNING_RATE, num_samples=1),
                    device,
                )
            )
    medians = {name: statistics.median(seconds[1:]) for name, seconds in updates.items()}
    backward, plain = statistics.median(backwards), medians["adamw"]
    for name, state in states.items():
        params = list(state.model.parameters())
        count = sum(param.numel() for param in params)
        weights = sum(param.nbytes for param in params) / count
        moments = sum(value.nbytes for kept in state.optimizer.state.values() for value in kept.values()) / count
        median, ratio = medians[name], (backward + medians[name]) / (backward + plain)
        print(
            f"| {name} | {1e3 * median:.0f} ms | {median / plain:.1f} | {ratio:.2f} | {weights:.2f} | {moments:.2f} |"
        )


def join_gradients(model: PackedModel) -> Tensor:
    return torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])


def print_gradient_sums(build: Build, batch: Batch) -> None:
    """The error of gradients that a step sums in bf16, as those of bf16 weights are, against sums in fp32.

    Both compute in bf16 from the same numbers. "Shrunk": what the sum's length lacks in the direction of the exact one.
    """
    exact, rounded = build().model, build(master_weights="bfloat16").model
    micro_batches, divisors = batch.micro_batches, batch.divisors
    print("\n| micro-batches a step | error of bf16 sums | shrunk by |\n| --- | --- | --- |")
    for k in range(NUM_SUMMED[-1]):
        for model in (exact, rounded):
            run_backward(model, micro_batches[k % len(micro_batches)], divisors)
        if k + 1 in NUM_SUMMED:
            sums, found = (join_gradients(model).double() for model in (exact, rounded))
            error, share = (found - sums).norm() / sums.norm(), found @ sums / (sums @ sums)
            print(f"| {k + 1} | {error:.2%} | {1 - share:.2%} |")


def print_reports(build: Build, batch: Batch, *, repeats: int) -> None:
    """What a step's losses by data set cost, and a validation; a data set alone computes none of the former."""
    model = build().model
    mixed = []
    for micro_batch in batch.micro_batches:
        sources = torch.arange(len(micro_batch.targets.index)) % 3
        targets = replace(micro_batch.targets, sources=sources, num_sources=3)
        mixed.append(MicroBatch(micro_batch.row, targets))

    def score() -> None:
        for micro_batch in batch.micro_batches:
            model.score(micro_batch)
        reshard(model)

    jobs = {
        "forward and backward, one data set": lambda: run_backwards(model, batch),
        "the same, with the losses of three": lambda: run_backwards(model, replace(batch, micro_batches=mixed)),
        "validation": score,
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            seconds[name].append(time_call(job, batch.micro_batches[0].row.input_ids.device))
    print("\n| | ms per 1,000 tokens | of the first |\n| --- | --- | --- |")
    medians = {name: statistics.median(later) for name, (_, *later) in seconds.items()}
    for name, median in medians.items():
        print(f"| {name} | {1e6 * median / batch.lengths.sum():.0f} | {median / next(iter(medians.values())):.3f} |")


def print_random_states(*, repeats: int) -> None:
    """What recomputing a block costs beside its work, in turn, the fastest of `repeats` rounds. A state is 5 KB."""
    layer, row = torch.nn.Linear(8, 8), torch.zeros(4, 8, requires_grad=True)
    fastest, read, write, calls = {}, torch.get_rng_state, torch.set_rng_state, []
    for _ in range(repeats):
        for preserves in (True, False):

            def run(preserves: bool = preserves) -> None:
                checkpoint(layer, row, use_reentrant=False, preserve_rng_state=preserves).sum().backward()

            begin = time.thread_time()
            for _ in range(NUM_CHECKPOINTS):
                run()
            seconds = (time.thread_time() - begin) / NUM_CHECKPOINTS
            fastest[preserves] = min(seconds, fastest.get(preserves, seconds))
    print("\n| random states | CPU us a block | reads | writes |\n| --- | --- | --- | --- |")
    torch.get_rng_state = lambda: calls.append("read") or read()
    torch.set_rng_state = lambda state: calls.append("write") or write(state)
    for preserves, seconds in fastest.items():
        calls.clear()
        checkpoint(layer, row, use_reentrant=False, preserve_rng_state=preserves).sum().backward()
        kept = "kept" if preserves else "not kept"
        print(f"| {kept} | {1e6 * seconds:.0f} | {calls.count('read')} | {calls.count('write')} |")
    torch.get_rng_state, torch.set_rng_state = read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--num-micro-batches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["optimizers"], help="this table alone")
    args = parser.parse_args()
    setup_logging("ERROR")
    world = init_world()
    if world.rank > 0:
        sys.stdout = None  # nothing is printed
    config = Qwen2Config(
        hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size, num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 32, num_key_value_heads=args.hidden_size // 64,
        vocab_size=args.vocab_size, max_position_embeddings=4096,
    )  # fmt: skip
    random = np.random.default_rng(0)
    rows = [
        [random.integers(3, args.vocab_size, length) for length in random.integers(60, 300, 12)]
        for _ in range(args.num_micro_batches)
    ]
    batch = make_batch(rows, world=world)
    with tempfile.TemporaryDirectory() as own_dir:
        model_dir = call_on_rank0(world, lambda: own_dir)
        if world.rank == 0:
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model_dir)
        dist.barrier()

        def build(**options: object) -> TrainState:
            given = dict(activation_checkpointing="none", weight_decay=0.1) | options
            return build_state(model_dir, make_options(**given), world)

        count = sum(param.numel() for param in build().model.parameters())
        print(f"{count:,} parameters, {batch.lengths.sum():,} tokens, {world.device.type} x {world.world_size}\n")
        if args.only is None:
            print_blocks(build, batch, repeats=args.repeats)
        print_optimizers(build, batch, repeats=args.repeats)
        if args.only is not None:
            return dist.destroy_process_group()
        print_gradient_sums(build, make_batch(rows, world=world))
        print_reports(build, batch, repeats=args.repeats)
    print_random_states(repeats=20 * args.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
