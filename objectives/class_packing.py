"""Samples with classes -> the micro-batch that a classifier trains on."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from chat.labels import IGNORED
from objectives.columns import Sample
from objectives.micro_batch import MicroBatch


def pack_classified(
    samples: Sequence[Sample], *, num_values: int | None, sources: np.ndarray | None = None, num_sources: int = 1
) -> MicroBatch:
    """Packs samples into one row; `sources`: of each, which data set it is from.

    `num_values`: K, the numbers of each sample's target, of which an idle one has none; None: targets are the tokens'
    classes, IGNORED where there is none. Where no sample has more than one token an idle one joins them, as in
    `pack_samples`.
    """
    num_real = len(samples)
    if max(len(input_ids) for input_ids, _, _ in samples) == 1:
        samples = [*samples, make_idle_classified(of_tokens=num_values is None)]
    lengths = [len(input_ids) for input_ids, _, _ in samples]
    cu_seqlens = np.cumsum([0, *lengths])
    if num_values is None:
        targets = np.concatenate([targets for _, targets, _ in samples]).astype(np.int64)
        trained_index = np.flatnonzero(targets != IGNORED)
        sequence_of = np.searchsorted(cu_seqlens, trained_index, side="right") - 1
    else:
        counted = [targets for _, targets, _ in samples if len(targets) > 0]
        targets = np.zeros((len(samples), num_values), dtype=np.float32)
        trained_index = np.flatnonzero([len(targets) > 0 for _, targets, _ in samples])
        targets[trained_index] = np.reshape(counted, (len(counted), num_values))
        sequence_of = trained_index
    if sources is not None:
        assert len(sources) == num_real, f"{len(sources)} sources of {num_real} samples"
        sources = torch.from_numpy(sources[sequence_of])  # an idle sample has no targets
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate([input_ids for input_ids, _, _ in samples]).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        targets=torch.from_numpy(targets),
        trained_index=torch.from_numpy(trained_index),
        target_weights=None,
        max_seqlen=max(lengths),
        seq_lengths=lengths,
        sources=sources,
        num_sources=num_sources,
        token_type_ids=pack_token_types(samples),
        is_two_sided=True,
    )


def pack_token_types(samples: Sequence[Sample]) -> torch.Tensor | None:  # (1, T) int64
    """Which text of a pair each token is of; of samples that do not say it all are of the first."""
    if all(types is None for _, _, types in samples):
        return None
    types = [np.zeros(len(input_ids)) if types is None else types for input_ids, _, types in samples]
    return torch.from_numpy(np.concatenate(types).astype(np.int64))[None]


def make_idle_classified(*, of_tokens: bool) -> Sample:
    """What a rank without work trains on: two tokens without a target."""
    targets = np.full(2, IGNORED) if of_tokens else np.zeros(0, np.float32)
    return (np.zeros(2, dtype=np.int64), targets, None)


def cut_lengths(num_tokens: int, longest: int) -> list[int]:
    """The lengths of sequences that are together this long, none of them longer than `longest`."""
    starts = itertools.count(0, longest)
    return [min(longest, num_tokens - start) for start in itertools.takewhile(lambda start: start < num_tokens, starts)]
