"""What a step costs the host where a GPU would compute: for a CUDA device whose kernels do nothing.

    NULLGPU_COPY_MB=0.01 OMP_NUM_THREADS=1 LD_PRELOAD=.../libnullgpu.so python benchmarks/gpu_host.py [WORDS]

CPU time, kernel launches and waits of a micro-batch (forward and backward), and of the rest of a step, for a model of 4
blocks of a shape. WORDS: only cases whose names have all of them.
"""

import ctypes
import gc
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import paths  # noqa: F401
import torch
from harness import build_state, make_batch, make_options
from train_step import make_method
from transformers import AutoModelForCausalLM, Qwen2Config
from triton.runtime.driver import driver

from mini_trainer.distributed.world import World, init_world
from mini_trainer.model import weights
from mini_trainer.run import step
from mini_trainer.run.plan.planner import choose_step_options

COUNTS = ("launch", "memset", "h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "d2d", "stream_sync",
          "event_sync", "device_sync")  # fmt: skip
WAITS = ("d2h_pageable", "stream_sync", "event_sync", "device_sync")
# Hidden and inner size, heads, key heads; the sequences of a micro-batch.
SHAPES = {"8B": ((4096, 14336, 32, 8), [4096]), "1.5B": ((1536, 8960, 12, 2), [182] * 45)}
NUM_BLOCKS = 4
NUM_STEPS = 8
library = ctypes.CDLL(None)
library.nullgpu_count.restype = ctypes.c_long


def count() -> np.ndarray:
    return np.array([library.nullgpu_count(i) for i in range(len(COUNTS))])


def pretend() -> None:
    """Tells Triton the limits of an H100, and lets the values that nothing has computed pass."""
    utilities = driver.active.utils
    load, read = utilities.load_binary, utilities.get_device_properties
    limits = dict(max_shared_mem=232448, multiprocessor_count=132, warpSize=32, max_num_regs=65536)
    utilities.load_binary = lambda *args: (*load(*args)[:4], 1024)
    utilities.get_device_properties = lambda device: read(device) | limits
    weights.check_finite = lambda tensor, name, where: tensor


def save_model(shape: str, path: Path) -> None:
    hidden, inner, heads, key_heads = SHAPES[shape][0]
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=NUM_BLOCKS, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=32000, tie_word_embeddings=True, max_position_embeddings=32768,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.data.zero_()
    model.save_pretrained(path)


def measure(name: str, shape: str, method: str, world: World, **given: object) -> None:
    path, lengths, of_micro_batches = Path(f"/tmp/gpu_host/{shape}"), SHAPES[shape][1], []
    if not path.exists():
        save_model(shape, path)
    options = make_options(max_tokens_per_gpu=8192, batch_size=8, learning_rate=1e-5, attention="varlen", **given)
    state = build_state(path, options, world, method=make_method(method, options))
    rows = [[np.full(length, 7) for length in lengths] for _ in range(2)]
    run_backward = step.run_backward

    def run_counted(*args: object, **kwargs: object) -> object:
        counts, start = count(), time.process_time()
        sums = run_backward(*args, **kwargs)
        of_micro_batches.append((time.process_time() - start, count() - counts))
        return sums

    step.run_backward, found = run_counted, []
    for k in range(NUM_STEPS):
        batch = make_batch(rows, step=k, world=world)
        of_micro_batches.clear()
        counts, start = count(), time.process_time()
        step.train_step(state, batch, choose_step_options(options), lr=1e-5)
        seconds, counts = time.process_time() - start, count() - counts
        rest = seconds - sum(each for each, _ in of_micro_batches), counts - sum(each for _, each in of_micro_batches)
        found.append((*of_micro_batches[-1], *rest))
    step.run_backward = run_backward
    seconds, rest = (1e3 * min(each[i] for each in found[2:]) for i in (0, 2))
    launches, waits = (sum(found[-1][1][COUNTS.index(each)] for each in names) for names in (COUNTS[:1], WAITS))
    waits_beside = sum(found[-1][3][COUNTS.index(each)] for each in WAITS)
    print(f"{name:46}{seconds:9.1f}{rest:9.1f}{launches:9}{waits:7}{waits_beside:7}", flush=True)
    del state
    gc.collect()


def main(words: list[str]) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    pretend()
    world = init_world()
    for shape, mode, kernels, method, resharding in itertools.product(
        SHAPES, ("none", "selective", "full"), ("eager", "fused"), ("ours", "ours+lora"), ("never", "always")
    ):
        ranks = "one rank" if resharding == "never" else "FSDP2"
        name = f"{shape}, {'LoRA' if '+' in method else 'full'}, {mode}, {kernels}, {ranks}"
        if all(word in name for word in words):
            given = {} if resharding == "never" else dict(reshard_after_forward=resharding)
            measure(name, shape, method, world, activation_checkpointing=mode, kernels=kernels, **given)


if __name__ == "__main__":
    main(sys.argv[1:])
