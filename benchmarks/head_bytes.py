"""The bytes that a language model's head moves, and the least time they take on a GPU, by rows of a chunk and beside
other ways to compute it. Counted, not timed.

    OMP_NUM_THREADS=1 python benchmarks/head_bytes.py --tokens 16384

Ours: forward and backward of `sum_token_loss` run on tensors without content; each operation counts its operands and
its result once. What lies between two products counts as --compile fuses it: a row of logits is read three times
(maximum, sum, derivative) and its derivatives are written once. Liger's and cut-cross-entropy's: by their sources, as
`count_liger` and `count_cut` say. An operation takes the longer of its arithmetic and its bytes at MOST of what the
device promises.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from objectives import token_loss

SHAPES = {"qwen2.5-1.5b": (151936, 1536), "llama-3.1-8b": (128256, 4096), "llama-2-7b": (32000, 4096),
          "gemma-3-4b": (262208, 2560), "llama-3.1-70b": (128256, 8192)}  # V, H  # fmt: skip
DEVICES = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "A100": (312e12, 2.04e12)}  # bf16 FLOPs, bytes a second
MOST = 0.8
LIGER, CUT = "Liger 0.8.5, sums in fp32", "cut-cross-entropy 25.1.1, exact, at best"


@dataclass
class Work:
    """Operations: (arithmetic, bytes) of each; and the most bytes of logits and their derivatives at a time."""

    operations: list[tuple[float, float]] = field(default_factory=list)
    held: float = 0

    def add(self, num_bytes: float, flops: float = 0) -> None:
        self.operations.append((flops, num_bytes))

    def find_milliseconds(self, device: str) -> float:
        flops, rate = DEVICES[device]
        return 1e3 * sum(max(a / flops, b / rate) for a, b in self.operations) / MOST


class Recorder(TorchDispatchMode):
    """Adds up the operations that are not views and not allocations."""

    def __init__(self):
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            read = [each for each in args if isinstance(each, Tensor)]
            flops = 2 * read[0].numel() * read[1].shape[1] if name == "mm" else 0
            if name in ("zeros_like", "zero_"):
                read = []
            self.work.add(sum(map(find_bytes, [*read, kwargs.get("out", result)])), flops)
        return result


class Context:
    """Autograd's, for tensors without content."""

    needs_input_grad = (True, True, False)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def find_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def count_ours(num_tokens: int, vocab_size: int, hidden_size: int, chunk_bytes: int) -> Work:
    hidden = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device="meta")
    recorder, context = Recorder(), Context()
    work = recorder.work

    def measure(logits: Tensor, chunk: slice, needs_bias: bool) -> tuple[Tensor, Tensor, None]:
        work.add(4 * find_bytes(logits))
        work.held = max(work.held, 2 * find_bytes(logits))
        return torch.empty(len(logits), 1, device="meta"), torch.empty_like(logits), None

    def add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        num_bytes = find_bytes(left) + find_bytes(right) + find_bytes(total) * (1 if is_first else 2)
        work.add(num_bytes, 2 * left.numel() * right.shape[1])

    with recorder, patch.object(token_loss, "add_product", add_product):  # addmm of bf16 to fp32 is CUDA's alone
        loss = token_loss._SumTokenLoss.forward(context, hidden, weight, None, measure, chunk_bytes, None)
        token_loss._SumTokenLoss.backward(context, loss)
    return work


def count_liger(num_tokens: int, vocab_size: int, hidden_size: int) -> Work:
    """fused_linear_cross_entropy.py: chunks of about as many logits as there are hidden states, each one's derivatives
    in place of its logits, which are read twice; the gradients are scaled in backward."""
    rows = min(2 ** math.ceil(math.log2(-(-num_tokens // -(-vocab_size // hidden_size)))), num_tokens)
    work, head = Work(held=2 * rows * vocab_size), vocab_size * hidden_size
    work.add(4 * head)  # zeros
    for size in split(num_tokens, rows):
        flops, logits, hidden = 2 * size * head, 2 * size * vocab_size, 2 * size * hidden_size
        work.add(hidden + 2 * head + logits, flops)
        work.add(3 * logits)
        work.add(logits + 2 * head + hidden, flops)
        work.add(logits + hidden + 8 * head, flops)
    work.add(4 * head + 2 * head)  # to bf16
    work.add(2 * 2 * head)  # scaled
    return work


def count_cut(num_tokens: int, vocab_size: int, hidden_size: int) -> Work:
    """cce.py and cce_backward.py without filtered gradients: logits stay on the chip, and are computed again in
    backward. Only these four products, no bytes, since those depend on what its tiles find in the cache."""
    work = Work()
    for _ in range(4):
        work.add(0, 2.0 * num_tokens * vocab_size * hidden_size)
    return work


def split(total: int, size: int) -> Iterator[int]:
    yield from (min(size, total - start) for start in range(0, total, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="trained tokens of a micro-batch")
    args = parser.parse_args()
    print(f"torch {torch.__version__}; {args.tokens} trained tokens, bf16; milliseconds at {MOST:.0%} of the device")
    for name, (vocab_size, hidden_size) in SHAPES.items():
        shape = args.tokens, vocab_size, hidden_size
        ideal = 1e3 * 6 * math.prod(shape) / MOST
        print(f"\n{name}: V {vocab_size}, H {hidden_size}; three products alone: "
              + ", ".join(f"{device} {ideal / flops:.1f} ms" for device, (flops, _) in DEVICES.items()))  # fmt: skip
        print(f"{'':40} {'rows':>6} {'GB moved':>9} {'GB held':>8} " + " ".join(f"{device:>7}" for device in DEVICES))
        for rows in (128, 256, 512, 1024, 2048):
            show("chunks of as many rows", count_ours(*shape, 4 * vocab_size * rows), rows)
        rows = token_loss.iterate_chunks(args.tokens, vocab_size)[0].stop
        show("ours", count_ours(*shape, token_loss.CHUNK_BYTES), rows)
        show(LIGER, count_liger(*shape), "")
        show(CUT, count_cut(*shape), "")


def show(name: str, work: Work, rows: int | str) -> None:
    moved = sum(num_bytes for _, num_bytes in work.operations)
    times = " ".join(f"{work.find_milliseconds(device):7.1f}" for device in DEVICES)
    print(f"{name:40} {rows:>6} {f'{moved / 1e9:.1f}' if moved else '':>9} {work.held / 1e9:8.2f} {times}")


if __name__ == "__main__":
    main()
