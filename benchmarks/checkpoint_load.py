"""CPU seconds that a rank takes to load a checkpoint, by the number of parameters; results/checkpoint_load.txt.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_load.py
    OMP_NUM_THREADS=1 python benchmarks/checkpoint_load.py --num-params 723 2800

The parameters are tiny and carry a decoder's names, so that the time is that of finding tensors, not of reading them.
Each has AdamW's state; the checkpoint is written and read by the run's own `Checkpointer`.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from lifecycle.checkpointing import Checkpointer
from lifecycle.step import TrainState
from methods.full import Full
from optim.optimizers import build_optimizer
from options import OptimizationOptions
from ranks.world import World, init_world

LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def make_state(num_params: int, world: World) -> TrainState:
    """A model of nested modules with `num_params` sharded parameters of 8 numbers, and AdamW's state of each."""
    model = nn.Module()
    for i in range(num_params):
        layer, part = divmod(i, len(LAYER))
        owner = model
        for name in f"model.layers.{layer}.{LAYER[part]}".split("."):
            if not hasattr(owner, name):
                owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.weight = nn.Parameter(distribute_tensor(torch.randn(4, 2), world.shard_mesh, [Shard(0)]))
    optimizer = build_optimizer(model, OptimizationOptions())
    for param in model.parameters():  # a step of so many takes longer than what is measured
        moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return TrainState(model, Full(), optimizer, world)


def measure(num_params: int, world: World) -> tuple[float, float]:
    """CPU seconds to verify a checkpoint, and to fill weights and optimizer state from it."""
    directory = Path(tempfile.mkdtemp(prefix="checkpoint_load_"))
    try:
        checkpointer = Checkpointer(directory, world=world, num_kept=1, is_async=False)
        state = make_state(num_params, world)
        position = {"step": 1, "num_samples": 0, "num_tokens": 0}
        checkpointer.save(state, step=1, state={"position": position, "identity": {}})
        begin = time.process_time()
        checkpoint = checkpointer.open_newest(strict=True)
        opened = time.process_time()
        checkpointer.load(checkpoint, state)
        return opened - begin, time.process_time() - opened
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-params", type=int, nargs="+", default=[723, 2800, 12_000])
    args = parser.parse_args()
    world = init_world()
    print(f"{'parameters':>10}{'tensors':>10}{'verify, CPU s':>15}{'load, CPU s':>13}{'ms a parameter':>16}")
    for num_params in args.num_params:
        verify, load = measure(num_params, world)
        print(f"{num_params:>10,}{4 * num_params:>10,}{verify:>15.2f}{load:>13.2f}{1000 * load / num_params:>16.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
