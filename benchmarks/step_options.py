"""What the options of a step cost and save: activation checkpointing, compile, and the optimizer's precision.

    OMP_NUM_THREADS=1 python benchmarks/step_options.py

Builds a random Qwen2 of the given shape, runs forward and backward of the same micro-batches with each option in turn,
and prints the median time and the bytes that a forward pass leaves for its backward; then one update of each optimizer
and the bytes of weights and moments. Time on the CPU is the process's own, which other work on the machine moves
little.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from op_recording import OpRecorder

from model.build import PackedCausalLM, build_model, load_config
from objectives.micro_batch import MicroBatch, pack_samples
from optim.optimizers import build_optimizer, set_step
from ranks.world import World, init_world, setup_logging

BLOCKS = {
    "none": dict(),
    "selective": dict(activation_checkpointing="selective"),
    "full": dict(activation_checkpointing="full"),
    "none, compiled": dict(compile=True),
}
OPTIMIZERS = {
    "adamw": ("adamw", torch.float32),
    "adamw8bit": ("adamw8bit", torch.float32),
    "adamw, bf16 weights": ("adamw", torch.bfloat16),
    "adamw8bit, bf16 weights": ("adamw8bit", torch.bfloat16),
}


def read_clock(world: World) -> float:
    """Seconds, after all that was started is done."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        return time.monotonic()
    return time.process_time()


def run_forward_backward(model: PackedCausalLM, micro_batches: list[MicroBatch]) -> None:
    for micro_batch in micro_batches:
        (model(micro_batch) / 1000).backward()


def count_kept_bytes(model: PackedCausalLM, micro_batch: MicroBatch) -> int:
    """Bytes that a forward pass leaves for its backward, gathered weights included."""
    with OpRecorder() as recorder:
        loss = model(micro_batch)
    num_bytes = recorder.live_bytes()
    loss.backward()
    return num_bytes


def print_blocks(build: Callable[..., PackedCausalLM], micro_batches: list[MicroBatch], *, repeats: int, world: World):
    models = {name: build(**options) for name, options in BLOCKS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats + 1):
        for name, model in models.items():
            start = read_clock(world)
            run_forward_backward(model, micro_batches)
            seconds[name].append(read_clock(world) - start)
    num_tokens = sum(sum(micro_batch.seq_lengths) for micro_batch in micro_batches)
    print("| blocks | first time | then, ms per 1,000 tokens | of none | kept for backward, bytes a token |")
    print("| --- | --- | --- | --- | --- |")
    plain = statistics.median(seconds["none"][1:])
    for name, (first, *later) in seconds.items():
        median = statistics.median(later)
        kept = "as it compiles"
        if "compiled" not in name:
            tokens = sum(micro_batches[0].seq_lengths)
            kept = f"{count_kept_bytes(models[name], micro_batches[0]) / tokens:,.0f}"
        print(f"| {name} | {first:.1f} s | {1e6 * median / num_tokens:.0f} | {median / plain:.2f} | {kept} |")


def print_optimizers(build: Callable[..., PackedCausalLM], micro_batch: MicroBatch, *, repeats: int, world: World):
    print("\n| optimizer | update | of adamw | weights, bytes each | moments, bytes each |")
    print("| --- | --- | --- | --- | --- |")
    plain = None
    for name, (optimizer_name, dtype) in OPTIMIZERS.items():
        model = build(weights_dtype=dtype)
        optimizer = build_optimizer(
            model, optimizer=optimizer_name, learning_rate=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8
        )
        run_forward_backward(model, [micro_batch])
        seconds = []
        for step in range(repeats + 1):
            set_step(optimizer, step=step, learning_rate=1e-4)
            start = read_clock(world)
            optimizer.step()
            seconds.append(read_clock(world) - start)
        median = statistics.median(seconds[1:])
        plain = plain or median
        count = sum(param.numel() for param in model.parameters())
        weights = sum(param.nbytes for param in model.parameters()) / count
        moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values()) / count
        print(f"| {name} | {1e3 * median:.0f} ms | {median / plain:.1f} | {weights:.2f} | {moments:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--num-micro-batches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    setup_logging("ERROR")
    world = init_world()
    config = Qwen2Config(
        hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size, num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 32, num_key_value_heads=args.hidden_size // 64,
        vocab_size=args.vocab_size, max_position_embeddings=4096,
    )  # fmt: skip
    random = np.random.default_rng(0)
    micro_batches = []
    for _ in range(args.num_micro_batches):
        rows = [random.integers(3, args.vocab_size, length) for length in random.integers(60, 300, 12)]
        micro_batches.append(pack_samples([(row, row, None) for row in rows]).to(world.device))
    with tempfile.TemporaryDirectory() as model_dir:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model_dir)

        def build(**options) -> PackedCausalLM:
            defaults = dict(activation_checkpointing="none", compile=False)
            dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
            return build_model(
                model_dir, load_config(model_dir), world=world, compute_dtype=dtype, attention="auto",
                use_liger_kernels=False, **(defaults | options),
            )  # fmt: skip

        print(f"{sum(p.numel() for p in build().parameters()):,} parameters, {world.device.type}\n")
        print_blocks(build, micro_batches, repeats=args.repeats, world=world)
        print_optimizers(build, micro_batches[0], repeats=args.repeats, world=world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
