"""What a checkpoint costs: its size, how long training stands still, and how long it takes to resume from.

    OMP_NUM_THREADS=1 python benchmarks/checkpointing.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 benchmarks/checkpointing.py

A Qwen3-shaped model with random weights and its AdamW state, sharded over the ranks. Stall: seconds from calling `save`
until the next step can begin, without and with --async-checkpoint; for the latter also how long the write then takes
in the background, and a step's time while it does. Each the median of `--repeats`, after one to warm up.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import build_state, make_batch, make_options

from lifecycle.checkpointing import Checkpointer
from lifecycle.step import TrainState, train_step
from options import TrainOptions
from ranks.world import call_on_rank0, init_world

VOCAB_SIZE = 32_000


def write_model(path: Path, hidden_size: int, num_layers: int) -> None:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 128, head_dim=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def take_step(state: TrainState, options: TrainOptions, num_tokens: int = 256) -> float:
    """One small training step; returns its seconds."""
    start = time.perf_counter()
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, num_tokens)
    train_step(state, make_batch([[ids]], world=state.world), options, lr=options.optimization.learning_rate)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    world = init_world()
    root = Path(call_on_rank0(world, lambda: tempfile.mkdtemp(prefix="checkpointing_")))
    call_on_rank0(world, lambda: write_model(root / "model", args.hidden_size, args.num_layers))
    options = make_options(compute_dtype="float32", activation_checkpointing="none")
    state = build_state(root / "model", options, world)
    step_seconds = statistics.median(take_step(state, options) for _ in range(args.repeats + 1))
    stalls, writes, steps_meanwhile = {False: [], True: []}, [], []
    for is_async in (False, True):
        checkpointer = Checkpointer(root / str(is_async), world=world, num_kept=1, is_async=is_async)
        for number in range(args.repeats + 1):
            start = time.perf_counter()
            position = {"step": number, "num_samples": 0, "num_tokens": 0}
            checkpointer.save(state, step=number, state={"position": position, "identity": {}})
            stalls[is_async].append(time.perf_counter() - start)
            if is_async:
                while checkpointer.is_writing and world.world_size == 1:
                    steps_meanwhile.append(take_step(state, options))
                checkpointer.finish()
                writes.append(time.perf_counter() - start)
    size = sum(file.stat().st_size for file in (root / "True" / f"step_{args.repeats}").iterdir())
    start = time.perf_counter()
    checkpoint = checkpointer.open_newest(strict=True)
    verify_seconds = time.perf_counter() - start
    checkpointer.load(checkpoint, state)
    load_seconds = time.perf_counter() - start - verify_seconds
    if world.rank == 0:
        num_params = sum(param.numel() for param in state.model.parameters())
        print(f"{num_params:,} parameters on {world.world_size} ranks: {size:,} bytes a checkpoint")
        print(f"stall, synchronous            {statistics.median(stalls[False][1:]):8.3f} s")
        print(f"stall, --async-checkpoint     {statistics.median(stalls[True][1:]):8.3f} s")
        print(f"  until it is on disk         {statistics.median(writes[1:]):8.3f} s")
        if steps_meanwhile:
            meanwhile = statistics.median(steps_meanwhile)
            print(f"  a step meanwhile            {meanwhile:8.3f} s; {step_seconds:.3f} s without a write")
        print(f"resume: verify hashes         {verify_seconds:8.3f} s")
        print(f"resume: read                  {load_seconds:8.3f} s")
        shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
