"""Drawing tokens so that an answer depends on nothing but its own prompt, its number, and the seed."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from options import SamplingOptions


class OwnNoise(LogitsProcessor):
    """Adds Gumbel noise to the logits, of which the largest is then a draw by their softmax (Gumbel-max trick).

    Each row of the batch has a generator of its own, seeded by what the answer is, so that neither the others in its
    batch nor the number of processes, nor a restart, changes what is drawn.
    """

    def __init__(self, keys: Sequence[tuple[int, int]], seed: int, device: torch.device):
        self.generators = [torch.Generator(device).manual_seed(make_seed(seed, *key)) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (rows, vocab)
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise.log()


def make_seed(*numbers: int) -> int:
    """A seed of 63 bits that no neighbouring numbers share."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1


def make_processors(
    sampling: SamplingOptions, keys: Sequence[tuple[int, int]], device: torch.device
) -> LogitsProcessorList:
    """What is done to the logits before the largest is taken; nothing where answers are greedy."""
    if sampling.temperature == 0:
        return LogitsProcessorList()
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(OwnNoise(keys, sampling.seed, device))
    return processors
