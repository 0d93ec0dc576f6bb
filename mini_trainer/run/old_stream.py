"""The old samples of --keep beside each global batch: an order of their own, in micro-batches of their own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.objectives.keeping import OLD, Keeping
from mini_trainer.options import DataOptions
from mini_trainer.sampler import (
    Batch,
    Batching,
    RunPosition,
    choose_batching,
    derive_seed,
    draw_batches,
    draw_samples,
    iterate_batches,
)


@dataclass(frozen=True)
class OldStream:
    """The old samples in the order in which they are drawn, which depends on the run's seed and its step alone."""

    data: Mixture
    options: DataOptions  # of the run, with the old samples' batch size and seed
    batching: Batching

    def find(self, step: int) -> int:
        """The position in the stream before this step."""
        return self.batching.find_end(0, num_batches=step) if step else 0

    def list_drawn(self, num_steps: int | None) -> np.ndarray:  # (samples,)
        """The samples that a run of this length draws, sorted."""
        count = len(self.data.kept) if num_steps is None else self.find(num_steps)
        if count >= len(self.data.kept):
            return np.asarray(self.data.kept[:])
        return np.unique(draw_samples(self.data, seed=self.options.seed, start=0, count=count))

    def draw_batches(self, step: int) -> Iterator[np.ndarray]:
        """Yields the rows of each step, endlessly, from this one."""
        return draw_batches(self.data, self.batching, seed=self.options.seed, start=self.find(step))

    def add_to(
        self, batches: Iterator[Batch], objective: Keeping, options: DataOptions, *, start: RunPosition, **shared: Any
    ) -> Iterator[Batch]:
        """Yields the run's global batches from `start` with their old samples. `shared`: what the sampler takes for
        both."""
        own = replace(self.options, max_tokens_per_gpu=options.max_tokens_per_gpu)
        first = RunPosition(step=start.step, num_samples=self.find(start.step))
        objective, batching = objective.of_old, self.batching
        old = iterate_batches(self.data, own, objective=objective, batching=batching, start=first, **shared)
        return (
            replace(batch, old=part, divisors=batch.divisors | {OLD: part.num_loss_tokens})
            for batch, part in zip(batches, old, strict=True)
        )


def open_stream(old: Mixture, o: DataOptions, share: float) -> OldStream:
    """The stream for a share of the run's batches; ValueError if a sample is longer than a batch of it."""
    seed = derive_seed(o.seed, 0, 0)  # another order than that of the run's data, should they be the same
    if o.batch_tokens is None:
        own = replace(o, batch_size=max(1, round(share * o.samples_per_step)), seed=seed)
    else:
        own = replace(o, batch_tokens=max(1, round(share * o.batch_tokens)), seed=seed)
        if old.longest > own.batch_tokens:
            raise ValueError(
                f"--keep-share {share:g}: {own.batch_tokens:,} tokens a step, but the longest sample of --keep has"
                f" {old.longest:,}: raise it, or --batch-tokens, or leave long samples out"
            )
    return OldStream(old, own, choose_batching(old, own))
