"""Noise on a model's embeddings while it trains (NEFTune, arXiv 2310.05914, algorithm 1).

T tokens in a packed row, L tokens of one sequence, H numbers of an embedding.
"""

import numpy as np
import torch
from torch import Tensor, nn

from mini_trainer.objectives.families.micro_batch import MicroBatch

OF_NOISE = (1,)  # keeps these seeds apart from those of dropout, which are drawn from the same one


class EmbeddingNoise:
    """Uniform noise of at most alpha / sqrt(L x H) on the embeddings of a sequence of L tokens.

    A function of the seed and the sample's position in the stream alone, so it is the same however a batch is divided.
    """

    def __init__(self, alpha: float, *, seed: int):
        self.alpha, self.seed = alpha, seed
        self.micro_batch: MicroBatch | None = None  # whose embeddings get noise

    def attach(self, packed_model: nn.Module) -> None:
        """From now on the model trains with it. Validations, checks and measurements are of rows without positions in
        the stream."""
        packed_model.register_forward_pre_hook(lambda module, inputs: self.look_at(inputs[0], is_on=module.training))
        packed_model.register_forward_hook(lambda *_: self.look_at(None), always_call=True)
        packed_model.model.get_input_embeddings().register_forward_hook(lambda _, __, output: self.add(output))

    def look_at(self, micro_batch: MicroBatch | None, *, is_on: bool = False) -> None:
        self.micro_batch = micro_batch if is_on and micro_batch.stream_positions else None

    def add(self, embeddings: Tensor) -> Tensor:  # (1, T, H)
        if self.micro_batch is None:
            return embeddings
        lengths, positions = self.micro_batch.row.seq_lengths, self.micro_batch.stream_positions
        assert embeddings.shape[:2] == (1, sum(lengths)), f"{tuple(embeddings.shape)}, of {sum(lengths)} tokens"
        noise, generator = torch.zeros_like(embeddings), torch.Generator(embeddings.device)
        for part, position in zip(noise[0].split(lengths), positions, strict=False):  # a row's filling is not a sample
            generator.manual_seed(derive_noise_seed(self.seed, position))
            largest = self.alpha / part.numel() ** 0.5
            part.uniform_(-largest, largest, generator=generator)
        return embeddings + noise


def derive_noise_seed(seed: int, position: int) -> int:
    return int(np.random.SeedSequence([seed, position], spawn_key=OF_NOISE).generate_state(1)[0])
