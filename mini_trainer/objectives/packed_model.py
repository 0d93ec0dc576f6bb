"""A model that maps a packed micro-batch to its summed loss: a family reads the row, an objective knows the targets."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mini_trainer.objectives.families.family import RowModel
from mini_trainer.objectives.families.micro_batch import MicroBatch
from mini_trainer.objectives.objective import LossSums, Objective, Scores

if TYPE_CHECKING:
    from mini_trainer.distributed.compilation import Compiled

LOSS, ROW_MODEL = "loss", "row_model"  # who needs sums over the global batch


class PackedModel(nn.Module):
    """A model that is trained, sharded and validated. H hidden size, T tokens of a row, L of one sequence."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        *,
        backend: str,
        compute_dtype: torch.dtype,
        is_fused: bool = False,
    ):
        """`backend`: of model.attention. `is_fused`: the loss's arithmetic is compiled."""
        super().__init__()
        self.model, self.backend, self.compute_dtype = model, backend, compute_dtype
        self.row_model, self.loss = objective.family.open_row_model(model), objective.make_loss(is_fused=is_fused)
        # A context in which the model runs transformers' own code, without kernels that replace parts of it.
        self.own_code: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.is_random = True  # whether training may draw random numbers, which a recomputation has to draw again
        self.whole_weights: Any = None  # WholeWeights, where one rank holds all weights
        self.frees_head = False  # after each forward pass, whose results then cannot refer to it
        self.compiled: tuple[Compiled, ...] = ()  # the blocks' forward methods, with --compile
        if objective.noise is not None:
            objective.noise.attach(self)

    @property
    def looks_ahead(self) -> bool:
        """Whether the losses of a global batch share sums over all of it (`look_ahead`)."""
        return self.loss.looks_ahead or self.row_model.looks_ahead

    def forward(self, micro_batch: MicroBatch, shared: Mapping[str, Tensor] | None = None) -> LossSums:
        """The micro-batch's loss, and all that counts beside it. `shared`: sums of `look_ahead`."""
        shared = shared or {}
        predicted, extra, reports = self._read(micro_batch, shared.get(ROW_MODEL))
        sums = self.loss.sum(predicted, micro_batch, shared=shared.get(LOSS))
        return LossSums(sums.loss, {**extra, **sums.extra}, {**reports, **sums.reports})

    def _read(
        self, micro_batch: MicroBatch, shared: Tensor | None
    ) -> tuple[Any, Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Predictions, and the sums of `encode`; the hidden states of the whole row are not kept beyond this."""
        hidden, extra, reports = self.row_model.encode(micro_batch, shared=shared)
        return self.loss.predict(self.row_model, hidden, micro_batch), extra, reports

    @torch.no_grad()
    def prepare(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch as `forward` and `score` take it. All ranks call this together."""
        return self.loss.prepare(self.row_model, micro_batch)

    @torch.no_grad()
    def predict(self, micro_batch: MicroBatch, predict: Callable[[RowModel, MicroBatch], Any]) -> Any:
        """Calls `predict` with this model's `RowModel`."""
        return predict(self.row_model, micro_batch)

    @torch.no_grad()
    def look_ahead(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Sums that the micro-batch adds to those which all losses of its global batch share, by who needs them."""
        sums = {LOSS: self.loss.look_ahead(self.row_model, micro_batch)} if self.loss.looks_ahead else {}
        return sums | ({ROW_MODEL: self.row_model.look_ahead(micro_batch)} if self.row_model.looks_ahead else {})

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> Scores:
        return self.loss.score(self.row_model, micro_batch)

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:  # (1, T, H)
        """The packed row's final hidden states, of all its parts, for the self-checks."""
        hidden, row_group = self.row_model.encode(micro_batch).hidden, micro_batch.row.row_group
        # FSDP's hooks want no view.
        return hidden.clone() if row_group is None else row_group.gather(hidden, dim=1)

    def reference(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The model's own answer for the row's one sequence: hidden states (1, L, H), and the summed loss, with all
        that counts in it."""
        with self.own_code():
            own = self.row_model.run_own(micro_batch)
        row = micro_batch.row
        targets = micro_batch.targets
        if row.row_group is not None:
            targets = targets.gather(row.row_group, num_tokens=row.seq_lengths[0])
        return own.hidden, self.loss.sum_own(own, targets) + own.extra_loss
