"""A run as AdamW alone computes it, for comparison with the program's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.sampler import draw_samples


def train_plainly(
    model: torch.nn.Module,
    data: Mixture,
    backward: Callable[[list[int], int], float],
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    eps: float,
    seed: int = 42,
) -> tuple[list[float], list[float]]:
    """Trains by `backward`, which takes a step's rows and the number of samples before them, adds the gradients of
    their mean loss and returns that loss; the losses and the norms of the gradients."""
    params, losses, norms = [param for param in model.parameters() if param.requires_grad], [], []
    groups = [
        dict(params=[param for param in params if param.ndim >= 2], weight_decay=0.1),
        dict(params=[param for param in params if param.ndim < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=eps)
    for start in range(0, num_steps * batch_size, batch_size):
        rows = draw_samples(data, seed=seed, start=start, count=batch_size).tolist()
        losses.append(backward(rows, start))
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def read_logits(model: torch.nn.Module, sample: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits at a sample's trained tokens, and these tokens."""
    labels = torch.from_numpy(sample["labels"].astype(np.int64))[1:]
    logits = model(input_ids=torch.from_numpy(sample["input_ids"].astype(np.int64))[None]).logits[0, :-1]
    return logits[labels >= 0], labels[labels >= 0]
