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

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from torch import nn
from transformers import Qwen3Config

from lifecycle.checkpointing import Checkpointer
from model.build import build_model, load_config
from objectives.micro_batch import pack_samples
from optim.optimizers import build_optimizer
from ranks.world import call_on_rank0, init_world


def write_model(path: Path, hidden_size: int, num_layers: int) -> None:
    from transformers import AutoModelForCausalLM

    config = Qwen3Config(
        vocab_size=32_000, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 128, head_dim=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, num_tokens: int = 256) -> float:
    """One small training step; returns its seconds."""
    start = time.perf_counter()
    ids = torch.randint(0, 32_000, (num_tokens,)).numpy()
    (model(pack_samples([(ids, ids, None)])) / num_tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    world = init_world()
    root = Path(call_on_rank0(world, lambda: tempfile.mkdtemp(prefix="checkpointing_")))
    call_on_rank0(world, lambda: write_model(root / "model", options.hidden_size, options.num_layers))
    model = build_model(
        str(root / "model"), load_config(str(root / "model")), world=world, compute_dtype=torch.float32,
        attention="auto", activation_checkpointing="none", compile=False, use_liger_kernels=False,
    )  # fmt: skip
    optimizer = build_optimizer(model, learning_rate=1e-5, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    step_seconds = statistics.median(step(model, optimizer) for _ in range(options.repeats + 1))
    stalls, writes, steps_meanwhile = {False: [], True: []}, [], []
    for is_async in (False, True):
        checkpointer = Checkpointer(root / str(is_async), world=world, num_kept=1, is_async=is_async)
        for number in range(options.repeats + 1):
            start = time.perf_counter()
            position = {"step": number, "num_samples": 0, "num_tokens": 0}
            checkpointer.save(model, optimizer, step=number, state={"position": position, "identity": {}})
            stalls[is_async].append(time.perf_counter() - start)
            if is_async:
                while checkpointer.is_writing and world.world_size == 1:
                    steps_meanwhile.append(step(model, optimizer))
                checkpointer.finish()
                writes.append(time.perf_counter() - start)
    size = sum(file.stat().st_size for file in (root / "True" / f"step_{options.repeats}").iterdir())
    start = time.perf_counter()
    checkpoint = checkpointer.open_newest(strict=True)
    verify_seconds = time.perf_counter() - start
    checkpointer.load(checkpoint, model, optimizer)
    load_seconds = time.perf_counter() - start - verify_seconds
    if world.rank == 0:
        num_params = sum(param.numel() for param in model.parameters())
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
