"""CPU time of bfloat16 attention, forward and backward, one sequence at a time: in bfloat16 and in fp32.

    OMP_NUM_THREADS=1 python benchmarks/short_attention.py

SmolLM2-135M's heads, rows of 1,024 tokens; the least of nine times each. `model.attention.SHORT` follows from it.
"""

import sys
import time
from types import SimpleNamespace

import paths  # noqa: F401
import torch

from mini_trainer.model import attention

NUM_TOKENS, NUM_HEADS, NUM_KEY_VALUE_HEADS, HEAD_SIZE, NUM_TIMES = 1024, 9, 3, 64, 9


def time_row(length: int, *, short: int) -> float:
    """CPU seconds of a row of sequences, those of up to `short` tokens in fp32."""
    attention.SHORT = short
    shapes = [(1, heads, NUM_TOKENS, HEAD_SIZE) for heads in (NUM_HEADS, NUM_KEY_VALUE_HEADS, NUM_KEY_VALUE_HEADS)]
    tensors = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    row, rule = SimpleNamespace(seq_lengths=[length] * (NUM_TOKENS // length)), attention.Rule(HEAD_SIZE**-0.5)
    times = []
    for _ in range(NUM_TIMES):
        start = time.process_time()
        output = attention.attend_sdpa(*tensors, row, rule)
        torch.autograd.grad(output, tensors, torch.ones_like(output))
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {sys.platform}\n")
    print("| tokens of a sequence | bfloat16 | fp32 | ratio |\n| --- | --- | --- | --- |")
    for length in (16, 32, 64, 128, 256, 512, 1024):
        plain, exact = time_row(length, short=0), time_row(length, short=NUM_TOKENS)
        print(f"| {length} | {plain * 1e3:.1f} ms | {exact * 1e3:.1f} ms | {plain / exact:.2f} |")


if __name__ == "__main__":
    main()
