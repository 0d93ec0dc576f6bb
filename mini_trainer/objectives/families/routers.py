"""The auxiliary loss of a mixture of experts, which balances their loads, over packed rows.

T tokens in a packed row of n sequences, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_trainer.distributed.world import sum_parts
from mini_trainer.objectives.families.family import Row


def sum_router_losses(
    router_logits: Sequence[Tensor],  # (T, E) for each layer
    row: Row,
    *,
    num_chosen: int,
    loads_of_batch: Tensor | None = None,  # (E,)
) -> tuple[Tensor, Tensor]:
    """Returns the sum over sequences of tokens x loss, an fp32 scalar, and the experts' loads, (layers, E) fp32.

    With `loads_of_batch`, over all layers and the whole global batch, the sum is this row's term of tokens x loss of
    the global batch: the loss is linear in the probabilities, and loads have no gradient.

    Sequences without targets do not count, such as those of an idle rank. If several ranks share the row, the tokens
    are this rank's, the borders are the whole row's, and the results are this rank's terms of the sums over ranks.
    """
    (num_tokens, num_experts), cu_seqlens, row_group = router_logits[0].shape, row.cu_seqlens, row.row_group
    first = 0 if row_group is None else row_group.rank * num_tokens
    positions = torch.arange(first, first + num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_of = torch.searchsorted(cu_seqlens, positions, right=True) - 1  # (T,)
    lengths = cu_seqlens.diff().float()  # (n,)
    counts = row.has_targets.float()  # (n,)
    probs = lengths.new_zeros(len(lengths), num_experts)  # summed over layers and tokens
    chosen = torch.zeros_like(probs)
    loads = []
    for logits in router_logits:
        layer_probs = torch.softmax(logits, dim=-1)
        picks = torch.zeros_like(layer_probs, dtype=torch.float32)
        picks.scatter_(1, layer_probs.topk(num_chosen, dim=-1).indices, 1.0)
        picks = torch.zeros_like(probs).index_add_(0, sequence_of, picks)  # (n, E)
        probs = probs.index_add(0, sequence_of, layer_probs.float())
        chosen += picks
        loads.append((picks * counts[:, None]).sum(0))
    loads = torch.stack(loads).detach()
    if loads_of_batch is not None:
        shares = (num_chosen * loads_of_batch / loads_of_batch.sum().clamp(min=1)).float()  # of tokens and layers
        return num_experts * (probs * counts[:, None]).sum(0) @ shares / len(router_logits), loads
    chosen = sum_parts(chosen, row_group)
    num_rows = lengths * len(router_logits)
    losses = num_experts * (chosen * probs).sum(-1) / num_rows.square()  # (n,)
    return (losses * lengths * counts).sum(), loads
