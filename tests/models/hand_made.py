"""Samples of language models made by hand, and what they are packed into."""

from collections.abc import Sequence

import numpy as np

from mini_trainer.data.columns.base import Sample
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.next_tokens import CausalLM

Triple = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # input_ids, labels, and weights if there are some


def make_sample(input_ids: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> Sample:
    return {"input_ids": input_ids, "labels": labels} | ({} if weights is None else {"loss_weights": weights})


def pack_samples(samples: Sequence[Triple]) -> MicroBatch:
    return CausalLM().pack([make_sample(*sample) for sample in samples])


def read_triple(data: TokenizedData | Mixture, row: int) -> Triple:
    sample = data.read(row)
    return sample["input_ids"], sample["labels"], sample.get("loss_weights")
