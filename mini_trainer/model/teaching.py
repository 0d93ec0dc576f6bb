"""Teachers that read a row before the model that trains does: another model, or the model as its run started.

N trained tokens of a micro-batch, H hidden size, V vocabulary size.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.family import RowModel
from mini_trainer.objectives.families.micro_batch import MicroBatch
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.objectives.token_loss import TrainedTokens

Predict = Callable[[RowModel, MicroBatch], TrainedTokens]


class OtherModel:
    """A frozen model, sharded as the one that trains is."""

    def __init__(self, model: PackedModel):
        self.model = model

    def read(self, micro_batch: MicroBatch, predict: Predict) -> TrainedTokens:
        return read_by(self.model, micro_batch, predict, copies_head=self.model.frees_head)


class StartWeights:
    """The model that trains, with the weights that it had when this was made.

    Holds a copy of each shard that trains, and exchanges it for the current one while the model reads: all of a model
    that trains as a whole, an adapter's few parameters.
    """

    def __init__(self, model: PackedModel):
        self.model = model
        self.trained = [get_local(param) for param in model.parameters() if param.requires_grad]
        self.start = [shard.clone() for shard in self.trained]
        self.trains_head = any(param.requires_grad for param in model.model.get_output_embeddings().parameters())

    @property
    def num_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.start)

    @torch.no_grad()
    def read(self, micro_batch: MicroBatch, predict: Predict) -> TrainedTokens:
        """Without dropout or noise. A head that trains is copied, as the current one takes its place again."""
        model, was_training = self.model, self.model.training
        model.eval()
        self.exchange()
        tokens = read_by(model, micro_batch, predict, copies_head=self.trains_head or model.frees_head)
        self.exchange()
        model.train(was_training)
        return tokens

    def exchange(self) -> None:
        """Puts the start's shards in the current ones' place, and the other way round."""
        reshard(self.model)  # gathered weights are rebuilt from the shards
        for own, start in zip(self.trained, self.start, strict=True):
            held = own.clone()
            own.copy_(start)
            start.copy_(held)


def read_by(model: PackedModel, micro_batch: MicroBatch, predict: Predict, *, copies_head: bool) -> TrainedTokens:
    """The model's predictions; with a copy of its head, where the head itself will be freed or changed."""

    def read(reader: RowModel, micro_batch: MicroBatch) -> TrainedTokens:
        tokens = predict(reader, micro_batch)
        if not copies_head:
            return tokens
        bias = None if tokens.bias is None else tokens.bias.clone()
        return replace(tokens, weight=tokens.weight.clone(), bias=bias)

    return model.predict(micro_batch, read)


def get_local(param: Tensor) -> Tensor:
    """This rank's shard, which shares the parameter's memory."""
    return param.detach().to_local()
