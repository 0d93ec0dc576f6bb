"""What the options of sharding cost in memory and time, on gloo ranks of one machine; written to results/sharding.txt.

    python benchmarks/sharding.py --work-dir /tmp/sharding

trains a random model of 47 million parameters in float32 for two steps of 4 micro-batches on 4 ranks, once for each
set of options; then on one rank in bfloat16, with and without FSDP2. On a CPU all ranks share the processor
and nothing overlaps: the memory is what this is for, and the bytes sent are counted, not timed.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.utils._python_dispatch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]
from harness import build_state, describe_versions, make_batch, make_options, read_status, watch_memory

from lifecycle.step import train_step
from ranks.world import divide_world, init_world

BOTH = dict(reshard_after_forward="never", reshard_after_backward="never")
OPTIONS = {
    "defaults": {},
    "--reshard-after-forward never": dict(reshard_after_forward="never"),
    "--reshard-after-backward never": dict(reshard_after_backward="never"),
    "both never": BOTH,
    "--prefetch-blocks 3": dict(prefetch_blocks=3),
    "--micro-batch-grad-sync last": dict(micro_batch_grad_sync="last"),
    "--sharding hybrid (2 x 2)": dict(sharding="hybrid", shard_size=2),
}
ON_ONE_RANK = {
    "1 rank, bfloat16, --reshard-after-forward always": dict(compute_dtype="bfloat16", reshard_after_forward="always"),
    "1 rank, bfloat16": dict(compute_dtype="bfloat16"),
}
NUM_RANKS, NUM_MICRO_BATCHES, NUM_TOKENS, NUM_STEPS = 4, 4, 16, 2
SHAPE = dict(
    vocab_size=8_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=11, num_attention_heads=8,
    num_key_value_heads=4, tie_word_embeddings=True,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--machine", default="unnamed", help="what this machine is, for the report")
    args = parser.parse_args()
    num_params = write_model(args.work_dir)
    lines = [
        f"{num_params:,} parameters in float32 on {NUM_RANKS} gloo ranks, {NUM_MICRO_BATCHES} micro-batches a step",
        f"$ python {shlex.join(sys.argv)}",
        f"{args.machine}; {describe_versions('torch', 'transformers')}",
        "",
        f"{'':40}{'own memory, peak':>18}{'gathers':>9}{'gathered, MB':>14}{'reduced, MB':>13}{'CPU s a step':>14}",
    ]
    # What is freed has to go back, or the peak is what malloc keeps.
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    for name in OPTIONS | ON_ONE_RANK:
        num_ranks = NUM_RANKS if name in OPTIONS else 1
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
                   __file__, "--worker", str(args.work_dir), name]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT, env=env)
        row = json.loads((args.work_dir / "row.json").read_text())
        lines.append(
            f"{name:40}{row['peak']:>15.2f} GB{row['gathers']:>9}{row['gathered'] / 1e6:>14.0f}"
            f"{row['reduced'] / 1e6:>13.0f}{row['cpu']:>14.2f}"
        )
    shutil.rmtree(args.work_dir)
    lines += [
        "",
        "Of rank 0. own memory: RssAnon while it trains, less what it was before the model was loaded. gathers: of a",
        "block's or the root's weights in one step; on one rank they are copied and cast. reduced: what FSDP2 hands to",
        "the collectives of one step, whole tensors: gradients to reduce-scatter and (hybrid) their shards to",
        "all-reduce.",
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    (Path(__file__).parent / "results" / "sharding.txt").write_text(report)


def write_model(path: Path) -> int:
    """Writes the random model; its number of parameters."""
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))
    model.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


class CommunicationCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Units that FSDP2 gathers, and bytes of what it gathers and reduces, as whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.gathered = self.reduced = 0

    def __enter__(self) -> "CommunicationCounter":
        counter, self.to_unsharded = self, FSDPParamGroup._to_unsharded

        def count_gather(group: FSDPParamGroup) -> None:
            if not group.is_unsharded:
                counter.gathers += 1
                counter.gathered += sum(param.unsharded_param.nbytes for param in group.fsdp_params)
            counter.to_unsharded(group)

        FSDPParamGroup._to_unsharded = count_gather
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        FSDPParamGroup._to_unsharded = self.to_unsharded
        super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name in ("c10d::_reduce_scatter_base_", "c10d::allreduce_"):
            self.reduced += args[1].nbytes if "scatter" in name else sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def run_worker(model_dir: str, name: str) -> None:
    """One rank's steps; rank 0 writes what they took."""
    values = dict(compute_dtype="float32", learning_rate=1e-4) | (OPTIONS | ON_ONE_RANK)[name]
    options = make_options(**values)
    world = divide_world(init_world(), options.sharding)
    before = read_status("RssAnon")
    state = build_state(model_dir, options, world)
    ids = np.random.default_rng(world.rank).integers(0, SHAPE["vocab_size"], NUM_TOKENS)
    for step in range(NUM_STEPS):
        batch = make_batch([[ids]] * NUM_MICRO_BATCHES, step=step, world=world)
        cpu = time.process_time()
        with watch_memory() as peak, CommunicationCounter() as counter:
            train_step(state, batch, options, lr=options.optimization.learning_rate)
        cpu = time.process_time() - cpu
        if step + 1 == NUM_STEPS and world.rank == 0:
            row = dict(peak=peak[0] - before, cpu=cpu)
            row |= {name: getattr(counter, name) for name in ("gathers", "gathered", "reduced")}
            (Path(model_dir) / "row.json").write_text(json.dumps(row))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        run_worker(*sys.argv[2:])
    else:
        main()
