"""LoRA and QLoRA against full fine-tuning, transformers with peft, and TRL with peft: step time, memory, state.

    OMP_NUM_THREADS=1 python benchmarks/lora.py --shape medium --data-path gsm8k.arrow       # CPU
    python benchmarks/lora.py --shape qwen2.5-1.5b --batch-size 256 --max-tokens-per-gpu 8192 --micro-batch-size 16

Two parts. First train_step.py, whose options are taken, with the same targets, rank 16 and alpha 32 for all. Then what
a rank holds between two steps of our own methods in bf16, counted byte by byte after a step, beside the arithmetic:
2 bytes a frozen weight, or in NF4 half a byte, a 64th for its scale and 4 / 16,384 for the scale's; 4 bytes of weight,
gradient and each of two moments for a number that trains.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import paths
import torch.distributed as dist
from harness import build_state, count_state_bytes, make_batch, make_options, write_random_data
from torch import nn
from train_step import LORA_RANK, SHAPES, make_config, make_empty_model, make_method, save_random_model

from mini_trainer.distributed.world import init_world, setup_logging
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.step import train_step

METHODS = ("ours+lora", "ours", "ours+qlora", "padded+lora", "grouped+lora", "trl+lora")
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)


def count_by_arithmetic(shape: str, method: str) -> float:
    """Bytes of a rank that is alone: weights, gradients and moments."""
    model = make_empty_model(make_config(shape))
    num_all = sum(param.numel() for param in model.parameters())
    if method == "ours":
        return 16 * num_all
    layers = [m for m in model.base_model.modules() if isinstance(m, nn.Linear)]
    num_linear = sum(layer.weight.numel() for layer in layers)
    num_trained = sum(LORA_RANK * (layer.in_features + layer.out_features) for layer in layers)
    linear_bytes = num_linear * (NF4_BYTES if method == "ours+qlora" else 2)
    return linear_bytes + 2 * (num_all - num_linear) + 16 * num_trained


def main() -> None:
    arguments = sys.argv[1:]
    subprocess.run(
        [sys.executable, str(paths.ROOT / "benchmarks/train_step.py"), *arguments, "--methods", *METHODS], check=True
    )
    setup_logging("ERROR")
    shape = arguments[arguments.index("--shape") + 1] if "--shape" in arguments else "small"
    assert shape in SHAPES
    world = init_world()
    print("\n| method | weights, gradients, moments of a rank | by arithmetic | more |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        model_dir, data = f"{directory}/model", Path(directory) / "data.arrow"
        save_random_model(shape, model_dir)
        write_random_data(data, np.full(8, 32))
        for method in METHODS[:3]:
            options = make_options(compute_dtype="bfloat16", data_path=str(data), max_tokens_per_gpu=64)
            state = build_state(model_dir, options, world, method=make_method(method, options))
            train_step(state, make_batch([[np.arange(3, 35)]], world=world), choose_step_options(options), lr=1e-4)
            counted, expected = count_state_bytes(state), count_by_arithmetic(shape, method)
            print(f"| {method} | {counted / 1e6:,.2f} MB | {expected / 1e6:,.2f} MB | {counted / expected - 1:+.1%} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
