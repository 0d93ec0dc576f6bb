"""The micro-batches with which a run starts over."""

import os
from typing import Any

from mini_trainer.distributed.restart import FEWER_TOKENS
from mini_trainer.distributed.world import World, count_sharing
from mini_trainer.run.inputs import RunInputs


def find_fewer_tokens(settled: dict[str, Any], inputs: RunInputs, world: World) -> int | None:
    """Tokens of a micro-batch with which the run starts over, once, if it has no room for those chosen for it; None if
    they were not chosen, or if the longest sample needs more."""
    half = settled.get("max_tokens_per_gpu", 0) // 2
    has_room = half * count_sharing(world.row_group) >= inputs.data.longest
    return half if has_room and FEWER_TOKENS not in os.environ else None
