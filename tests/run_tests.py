"""Tests the packers of a batch's samples, then compares the greedy one with the one that training uses.

    cd tests && python run_tests.py                    # half a minute
    cd tests && python run_tests.py --analysis-only    # without pytest

Prints, for generated batches of sequence lengths: the steps of a batch; the balance, which is the mean rank's tokens
over the fullest rank's in every step; the share of --max-tokens-per-gpu that is used; and the share of computed tokens
that would not be padding if each micro-batch were padded to its longest sample, which needs no padding as it is.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from packing import DISTRIBUTIONS, draw_lengths

from mini_trainer.batch_packer import batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt

PACKERS = {"greedy": batch_lengths_to_minibatches, "lpt": batch_lengths_to_minibatches_lpt}
BATCH_SIZE = 1024
NUM_RANKS = (2, 8)


def measure(columns: list[list[list[int]]], lengths: np.ndarray, cap: int) -> tuple[int, float, float, float]:
    """Steps, balance, used share of the cap, and share of tokens in padded micro-batches that are not padding."""
    cells = [[[i for i in cell if i != -1] for cell in step] for step in zip(*columns, strict=True)]
    tokens = np.array([[lengths[cell].sum() for cell in step] for step in cells])  # (steps, ranks)
    padded = sum(len(cell) * lengths[cell].max() for step in cells for cell in step if cell)
    balance = tokens.sum() / (tokens.max(axis=1).sum() * len(columns))
    return len(tokens), balance, tokens.sum() / (tokens.size * cap), tokens.sum() / padded


def print_analysis() -> None:
    print(f"batches of {BATCH_SIZE:,} samples\n")
    print(f"{'lengths':10}{'ranks':>6}  {'packer':8}{'steps':>6}{'balance':>10}{'cap used':>10}{'if padded':>11}")
    for name in DISTRIBUTIONS:
        lengths, cap = draw_lengths(name, BATCH_SIZE)
        for num_ranks in NUM_RANKS:
            for packer, pack in PACKERS.items():
                columns = [pack(lengths, cap, num_ranks, rank) for rank in range(num_ranks)]
                steps, *shares = measure(columns, lengths, cap)
                balance, used, padded = (f"{share:.1%}" for share in shares)
                print(f"{name:10}{num_ranks:6}  {packer:8}{steps:6}{balance:>10}{used:>10}{padded:>11}")


def run_tests() -> int:
    """The exit status of pytest on the packers' tests."""
    import pytest

    tests = ("test_batch_lengths_to_minibatches.py", "test_batch_packer.py")
    return int(pytest.main(["-q", *(str(ROOT / "tests" / name) for name in tests)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--analysis-only", action="store_true")
    status = 0 if parser.parse_args().analysis_only else run_tests()
    if status == 0:
        print_analysis()
    sys.exit(status)
