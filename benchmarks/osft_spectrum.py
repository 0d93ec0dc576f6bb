"""Which directions of a real model's layers are free in OSFT, and how much of them is rounding noise of 4-bit weights.

    OMP_NUM_THREADS=1 python benchmarks/osft_spectrum.py --model smollm2 --statistics osft_statistics.safetensors

Singular values of every linear layer of the blocks, and, with the statistics of a run, the energies of its inputs.
Printed by kind of layer, medians over blocks: the share of the squared singular values (of the inputs' energy) in the
free directions for R = 0.25 and 0.5, and the share of these squared singular values that is rounding noise of GGUF's
Q4_1: blocks of 32 weights in 16 steps of d from least to largest, so an error of d^2 / 12 each, the same in all
directions.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

import paths  # noqa: F401
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mini_trainer.model.methods.osft_directions import read_statistics

RATIOS, BLOCK, NUM_STEPS = (0.25, 0.5), 32, 15


def measure_noise(weight: Tensor) -> float:
    """The mean squared rounding error of a weight (out, in)."""
    blocks = weight.reshape(-1, BLOCK)
    return float(((blocks.amax(1) - blocks.amin(1)) / NUM_STEPS).square().mean() / 12)


def share_below(squares: Tensor, ratio: float) -> float:
    """The share of the smallest directions; `squares` descend."""
    return float(squares[-round(len(squares) * ratio) :].sum() / squares.sum())


def find_energies(path: str) -> dict[str, Tensor]:
    """Energies of each layer's inputs in the directions of their covariance, descending."""
    statistics = read_statistics(Path(path))
    found = {name: torch.linalg.eigvalsh(one).flip(0).clamp(min=0) for name, one in statistics.covariances.items()}
    return {name: found[shared] for name, shared in statistics.inputs.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--statistics", help="file of train --osft-statistics")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    layers = {name: one for name, one in model.model.named_modules(prefix="model") if isinstance(one, torch.nn.Linear)}
    energies = find_energies(args.statistics) if args.statistics else {}
    found = defaultdict(list)
    for name, layer in layers.items():
        squares, noise = torch.linalg.svdvals(layer.weight.double()).square(), measure_noise(layer.weight)
        row = []
        for ratio in RATIOS:
            free = squares[-round(len(squares) * ratio) :]
            row += [share_below(squares, ratio), len(free) * max(layer.weight.shape) * noise / float(free.sum())]
        row += [share_below(energies[name], ratio) for ratio in RATIOS] if energies else []
        found[name.rpartition(".")[2]].append(row)
    titles = [f"{what}, R = {ratio}" for ratio in RATIOS for what in ("free", "of it noise")]
    titles += [f"inputs' energy, R = {ratio}" for ratio in RATIOS] if energies else []
    print(f"| layer | {' | '.join(titles)} |\n{'| --- ' * (len(titles) + 1)}|")
    for kind, rows in found.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"| {kind} | {' | '.join(f'{value:.1%}' for value in medians)} |")


if __name__ == "__main__":
    main()
