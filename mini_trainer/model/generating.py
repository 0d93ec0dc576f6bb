"""Greedy answers of a model in training, sharded as it is.

There is no cache of keys and values: each token takes a forward pass over all that is there so far.

T tokens in a packed row, n unfinished sequences, H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mini_trainer.distributed.devices import run_eagerly
from mini_trainer.distributed.world import World, gather_on_rank0
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.micro_batch import MicroBatch, Targets, pack_row
from mini_trainer.objectives.families.text import TextReader
from mini_trainer.objectives.packed_model import PackedModel

NO_TARGETS = Targets(torch.empty(0, dtype=torch.long))
IDLE = np.zeros(2, dtype=np.int64)  # the row of a rank whose answers are complete, while others continue


@torch.no_grad()
@run_eagerly()  # in eval mode and without gradients the blocks would be compiled once more
def answer_greedily(
    model: PackedModel,
    prompts: Sequence[Sequence[int]],
    *,
    room: Sequence[int],
    stops: Collection[int],
    world: World,
    progress: Callable[[str], None],
) -> list[list[int]] | None:
    """Token ids of each prompt's answer, up to `room` of them, with the stop token; None on ranks other than 0.

    All ranks call this, and each answers its share. Leaves no trace in training: no random numbers, no gradients.
    """
    was_training = model.training
    model.eval()
    answers: dict[int, list[int]] = {i: [] for i in range(world.rank, len(prompts), world.world_size)}
    waiting = list(answers)
    while is_any(bool(waiting), world):
        progress(f"sample prompts, {len(waiting)} unfinished")
        row = pack_row([np.array([*prompts[i], *answers[i]]) for i in waiting] or [IDLE])
        micro_batch = MicroBatch(row, NO_TARGETS).to(world.device)
        chosen = model.predict(micro_batch, choose_next).tolist()
        for i, token in zip(waiting, chosen, strict=False):  # an idle row's is left out
            answers[i].append(token)
        waiting = [i for i in waiting if answers[i][-1] not in stops and len(answers[i]) < room[i]]
    reshard(model)
    model.train(was_training)
    parts = gather_on_rank0(world, answers)
    return None if parts is None else [parts[i % world.world_size][i] for i in range(len(prompts))]


def is_any(value: bool, world: World) -> bool:
    """Whether the value is true on any rank. All ranks call this."""
    flag = torch.tensor(int(value), device=world.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def choose_next(reader: TextReader, micro_batch: MicroBatch) -> Tensor:  # (n,)
    """The most likely next token of each sequence."""
    last = micro_batch.row.cu_seqlens[1:].long() - 1
    projection = reader.project(reader.encode(micro_batch).hidden[0, last])  # (n, H)
    return torch.nn.functional.linear(projection.hidden, projection.weight, projection.bias).argmax(-1)  # of (n, V)
