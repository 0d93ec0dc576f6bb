"""A teacher's most probable tokens at each trained token: computed, and as files and samples hold them.

N trained tokens, K tokens that are kept of each, V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_trainer.objectives.families.micro_batch import MicroBatch
from mini_trainer.objectives.families.text import TextReader
from mini_trainer.objectives.next_tokens import CausalLM, TokenLoss
from mini_trainer.objectives.objective import Scores
from mini_trainer.objectives.token_loss import CHUNK_BYTES, TrainedTokens, compute_logits, iterate_chunks

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
    """The samples' records as tensors; the rounding error of the sum of probabilities is corrected."""
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


@dataclass(frozen=True)
class TopTokenLoss(TokenLoss):
    """Scores tokens; nothing trains on it."""

    top_k: int = 1
    temperature: float = 1.0
    num_ids: int = 0  # of the tokenizer: rows of the head beyond them are padding

    def score(self, reader: TextReader, micro_batch: MicroBatch) -> Scores:
        """Sums: nothing. Predictions: the K ids, their -log q, that of all others together, and the target's."""
        targets, row = micro_batch.targets, micro_batch.row
        places = torch.stack([targets.find_sequences(row), row.position_ids[0, targets.index]], dim=1)
        found = self.score_top(self.read(reader, micro_batch))
        return Scores(found.new_zeros(targets.num_sources, 1), torch.cat([places.double(), found], dim=1))

    def score_top(self, tokens: TrainedTokens, *, chunk_bytes: int = CHUNK_BYTES) -> Tensor:  # (N, 2K + 2) fp64
        parts = [tokens.hidden.new_zeros(0, 2 * self.top_k + 2, dtype=torch.float64)]
        for chunk in iterate_chunks(len(tokens.targets), len(tokens.weight), chunk_bytes=chunk_bytes):
            logits = compute_logits(tokens, chunk)[:, : self.num_ids].float()
            log_q = logits.div_(self.temperature).log_softmax(dim=1)
            top, of_target = log_q.topk(self.top_k, dim=1), log_q.gather(1, tokens.targets[chunk, None])
            tail = log_q.scatter_(1, top.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
            parts.append(
                torch.cat([top.indices.double(), *(-part.double() for part in (top.values, tail, of_target))], 1)
            )
        return torch.cat(parts)


@dataclass(frozen=True)
class TopTokens(CausalLM):
    """A language model as a teacher."""

    top_k: int = 1
    temperature: float = 1.0
    num_ids: int = 0

    gives_predictions = True

    def make_loss(self, *, is_fused: bool = False) -> TopTokenLoss:
        return TopTokenLoss(is_fused=is_fused, top_k=self.top_k, temperature=self.temperature, num_ids=self.num_ids)

    def read_predictions(self, predictions: np.ndarray) -> np.ndarray:  # (N, 2 + 2K + 2) -> (N,)
        """A file's records of the targets, from `Scores.predictions` of all ranks."""
        ids, nll, rest = np.split(predictions[:, 2:], [self.top_k, 2 * self.top_k], axis=1)
        return make_records(ids, nll, *rest.T)
