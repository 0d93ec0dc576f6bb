"""The memory of a long row with and without --tiled-mlp and --offload-activations: plan beside run.

    OMP_NUM_THREADS=1 python benchmarks/long_rows.py                     # plan and run, on the CPU
    python benchmarks/long_rows.py --model recipes/models/qwen3-8b --tokens 32768 131072 --ranks 8   # plans of a shape

Run: the most that tensors take in forward and backward of one row, by the project's counter of memory, in fp32 on one
rank; what is offloaded is in CPU memory, as on a GPU, and not in it. Plan: what --dry-run simulates of the same step.
The counter sees no scratch memory inside of an operation. Seconds are of one forward and backward without the counter.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "quickstart")]
from tiny_models import build, load_source

from families.text import TextFamily
from lifecycle.choosing import choose_method
from lifecycle.inputs import RunInputs
from objectives.next_tokens import CausalLM
from optim.optimizers import build_optimizer
from options import TrainOptions, group_options
from plan.simulation import Load, Ranks, lay_out_model, simulate_step
from ranks.memory import MemoryCounter
from ranks.world import World, init_world

OFFLOADED = dict(activation_checkpointing="full", offload_activations=True)
SETTINGS = {
    "none": dict(activation_checkpointing="none"),
    "none, tiled": dict(activation_checkpointing="none", tiled_mlp=True),
    "selective": dict(activation_checkpointing="selective"),
    "selective, tiled": dict(activation_checkpointing="selective", tiled_mlp=True),
    "full": dict(activation_checkpointing="full"),
    "full, tiled": dict(activation_checkpointing="full", tiled_mlp=True),
    "full, offloaded": OFFLOADED,
    "full, tiled, offloaded": OFFLOADED | dict(tiled_mlp=True),
}
LONGEST = 512  # tokens of a sample, where the row is really computed


def make_options(path: Path, dtype: str, changes: dict) -> TrainOptions:
    given = dict(model_name_or_path=str(path), data_path="", output_dir="", compute_dtype=dtype, learning_rate=1e-5)
    return group_options(TrainOptions, **given, **changes)


def plan(path: Path, dtype: str, changes: dict, num_tokens: int, longest: int, num_ranks: int) -> tuple[float, ...]:
    """GiB of the peak and of what is in CPU memory, KiB of a token more."""
    options = make_options(path, dtype, changes)
    inputs = RunInputs(TextFamily(), choose_method(options), options.data, getattr(torch, dtype), objective=CausalLM())
    inputs.model_dir, inputs.config = str(path), load_source(path).config
    load = Load(num_tokens, num_tokens, longest=longest, accumulates=False)
    memory = simulate_step(options, lay_out_model(options, inputs, options.compute), load, Ranks(num_ranks, num_ranks))
    return memory.total / 2**30, memory.offloaded / 2**30, memory.per_token / 2**10


def run(path: Path, changes: dict, num_tokens: int, *, world: World) -> tuple[float, float, float]:
    """GiB of the peak and of what is in CPU memory, seconds."""
    options = make_options(path, "float32", changes)
    model = build(path, world, **changes)
    optimizer = build_optimizer(model, options.optimization)
    micro_batch = CausalLM().make_probe(num_tokens, num_tokens, longest=LONGEST)
    model(micro_batch).backward()
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    counter = MemoryCounter()
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    for tensor in [*model.parameters(), *model.buffers(), *state]:
        counter.count(tensor)
    begin = time.perf_counter()
    model(micro_batch).backward()
    seconds = time.perf_counter() - begin
    optimizer.zero_grad()
    with counter:
        model(micro_batch).backward()
    return counter.num_peak / 2**30, counter.most_offloaded / 2**30, seconds


def compare(num_tokens: int, world: World, pool: Pool) -> None:
    """Plans are made in a process of their own, since a simulation wants no other process group."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        config = Qwen3Config(
            vocab_size=512, hidden_size=256, intermediate_size=896, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        print(f"a row of {num_tokens:,} tokens, 8 blocks of width 256, 896 inside of their MLPs, fp32")
        print(f"{'':24}plan GiB   run GiB   error   in CPU memory GiB   seconds")
        for setting, changes in SETTINGS.items():
            planned, _, _ = pool.apply(plan, (path, "float32", changes, num_tokens, LONGEST, 1))
            shown, offloaded, seconds = run(path, changes, num_tokens, world=world)
            error = planned / shown - 1
            print(f"{setting:24}{planned:8.3f}{shown:10.3f}{error:+8.1%}{offloaded:20.3f}{seconds:10.1f}", flush=True)


def plan_shape(path: Path, num_tokens: int, num_ranks: int) -> None:
    print(f"{path.name}, one sample of {num_tokens:,} tokens on each of {num_ranks} ranks, bf16: planned")
    print(f"{'':24}a GPU's GiB   in CPU memory GiB   a token more KiB")
    for setting, changes in SETTINGS.items():
        total, offloaded, per_token = plan(path, "bfloat16", changes, num_tokens, num_tokens, num_ranks)
        print(f"{setting:24}{total:11.1f}{offloaded:20.1f}{per_token:19.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    if args.model is not None:
        for num_tokens in args.tokens:
            plan_shape(args.model, num_tokens, args.ranks)
        return
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        world = init_world()
        for num_tokens in args.tokens:
            compare(num_tokens, world, pool)


if __name__ == "__main__":
    main()
