"""What --batch-tokens costs on many samples: CPU seconds and memory of finding batches, beside drawing the order.

    OMP_NUM_THREADS=1 python benchmarks/batch_tokens.py --num-samples 100000000 [--output results/batch_tokens.txt]

Lengths alone, in memory, as training holds them. The order of an epoch is drawn with --batch-size, too.
"""

import argparse
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from corpus.by_row import RowRange
from ranks.memory import resident_memory
from sampler import StreamTokens, TokenBatches, epoch_permutations

BATCH_TOKENS, NUM_STEPS = 1 << 18, 300


@dataclass
class Lengths:
    """What `StreamTokens` reads of a mixture of one data set."""

    lengths: np.ndarray

    def __post_init__(self) -> None:
        self.sources, self.shares = [None], np.ones(1)
        self.kept_of = [RowRange(0, len(self.lengths))]


def measure(num_samples: int) -> list[str]:
    random = np.random.default_rng(0)
    data = Lengths(np.clip(random.lognormal(5.5, 1.0, num_samples), 8, 8192).astype(np.int32))
    lines, last = [], [time.process_time(), resident_memory()]

    def note(what: str, *, per: int = 1) -> None:
        now = [time.process_time(), resident_memory()]
        seconds, more = (now[0] - last[0]) / per, (now[1] - last[1]) / 1e6
        lines.append(f"{what}: {seconds:.4f} CPU s, {more:+,.0f} MB resident")
        last[:] = [time.process_time(), resident_memory()]

    epoch_permutations((0,), num_samples)(0)
    note("the order of an epoch, as with --batch-size")
    stream = StreamTokens(data, seed=0)
    batching = TokenBatches(BATCH_TOKENS, stream)
    note("tokens in all, at the start")
    position = batching.find_end(0)
    note("first batch of an epoch: the tokens of its blocks")
    for _ in range(NUM_STEPS):
        position = batching.find_end(position)
    note(f"a further batch of {BATCH_TOKENS:,} tokens (mean of {NUM_STEPS})", per=NUM_STEPS)
    batching.count(0, num_samples)
    note("number of steps of an epoch, its order known")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=10_000_000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    command = f"$ OMP_NUM_THREADS=1 python {' '.join(sys.argv)}"
    versions = f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    text = "\n".join([command, f"{versions}, {args.num_samples:,} samples", *measure(args.num_samples)])
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
