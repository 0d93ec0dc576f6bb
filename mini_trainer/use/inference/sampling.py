"""Sampling in which an answer depends only on its own prompt, its number, and the seed."""

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

from mini_trainer.options import SamplingOptions


class OwnNoise(LogitsProcessor):
    """Adds Gumbel noise to the logits, whose argmax is then a sample from their softmax (Gumbel-max trick).

    Each row of the batch has its own generator, seeded by the answer's key, so that sampling depends neither on the
    rest of the batch nor on the number of processes or restarts.
    """

    def __init__(self, keys: Sequence[tuple[int, int]], seed: int, device: torch.device):
        self.generators = [torch.Generator(device).manual_seed(make_seed(seed, *key)) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (rows, vocab)
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise.log()


def make_seed(*numbers: int) -> int:
    """Hashes the numbers into a 63-bit seed, so that neighbouring numbers give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1


def make_processors(
    sampling: SamplingOptions, keys: Sequence[tuple[int, int]], device: torch.device
) -> LogitsProcessorList:
    """The logits processors to apply before the argmax; none for greedy decoding."""
    if sampling.temperature == 0:
        return LogitsProcessorList()
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(OwnNoise(keys, sampling.seed, device))
    return processors
