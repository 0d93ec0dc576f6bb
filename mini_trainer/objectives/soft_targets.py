"""What a teacher says of each trained token, as files and samples hold it: its K most probable tokens and the rest.

N trained tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SOFT_COLUMN = "soft_targets"  # of samples: records (trained tokens,) of `make_record_type`


def make_record_type(top_k: int) -> np.dtype:
    """A token's record: probabilities as -log q in half precision, which keeps three digits of even the smallest."""
    return np.dtype([("ids", "<i4", (top_k,)), ("nll", "<f2", (top_k,)), ("tail", "<f2"), ("target", "<f2")])


@dataclass
class SoftTargets:
    """The records of a micro-batch's trained tokens."""

    ids: Tensor  # (N, K) int32
    log_q: Tensor  # (N, K + 1) fp32: of the K tokens and of all others together; sums to 1
    log_q_target: Tensor  # (N, 1) fp32

    def slice(self, part: slice) -> "SoftTargets":
        return SoftTargets(self.ids[part], self.log_q[part], self.log_q_target[part])


def read_records(records: Sequence[np.ndarray]) -> SoftTargets:
    """The samples' records as tensors; what rounding has changed of the sum of probabilities is undone."""
    joined = np.concatenate(records)
    nll = np.concatenate([joined["nll"], joined["tail"][:, None]], axis=1).astype(np.float32)
    return SoftTargets(
        torch.from_numpy(joined["ids"].astype(np.int32)),
        torch.from_numpy(-nll).log_softmax(dim=1),
        torch.from_numpy(-joined["target"].astype(np.float32))[:, None],
    )


def make_records(ids: np.ndarray, nll: np.ndarray, tail: np.ndarray, target: np.ndarray) -> np.ndarray:  # (N,)
    """Records of N tokens: ids and -log q of the most probable ones (N, K), -log q of the rest and the target (N,)."""
    records = np.empty(len(ids), make_record_type(ids.shape[1]))
    records["ids"], records["nll"], records["tail"], records["target"] = ids, nll, tail, target
    return records


def make_even_records(num_tokens: int, top_k: int) -> np.ndarray:
    """Records for checks and measurements: the first K ids, as probable as all others together."""
    nll = np.full((num_tokens, top_k), np.log(top_k + 1))
    return make_records(np.tile(np.arange(top_k), (num_tokens, 1)), nll, nll[:, 0], nll[:, 0] + 3)
