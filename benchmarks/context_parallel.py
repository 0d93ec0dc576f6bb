"""Rows that ranks share (--context-parallel): how exact they are, and what memory a rank needs, measured and planned.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node=4 benchmarks/context_parallel.py

The first table: tiny models of several families in fp32, by where rows have borders: the largest relative difference
of any parameter's gradient, and of the loss, from the same global batch in rows that no ranks share. The second one:
what a rank's tensors take at the peak of a step of two micro-batches, of one packed row each, and what a plan says.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "quickstart")]
from sharing import BORDERS, run_rows
from tiny_models import FAMILIES, SHAPE, build, load_source, save_model

from families.text import TextFamily
from lifecycle.choosing import choose_method
from lifecycle.inputs import RunInputs
from lifecycle.step import run_backward
from model.build import choose_compute_dtype
from objectives.next_tokens import CausalLM
from objectives.packed_model import PackedModel
from optim.optimizers import build_optimizer
from options import OptimizationOptions, TrainOptions, group_options
from plan.simulation import Load, Ranks, lay_out_model, simulate_step
from ranks.memory import MemoryCounter
from ranks.row_group import RowGroup, make_row_group
from ranks.world import World, call_on_rank0, init_world, setup_logging

SHARING = (None, 2, 4)
MODELS = FAMILIES | {
    "6 heads, 3 of keys": Qwen3Config(**SHAPE | dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)),
    "2 heads, 1 of keys": Qwen3Config(**SHAPE | dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)),
}


def compare_families(
    names: list[str], directory: Path, row_groups: dict[int | None, RowGroup | None], world: World
) -> None:
    """Prints the first table."""
    say(world, "| model | borders | N = 2: gradient, loss | N = 4: gradient, loss |\n| --- | --- | --- | --- |")
    for name in names:
        call_on_rank0(world, lambda name=name: save_model(MODELS[name], directory / name).name)
        objective = CausalLM()
        model = build(directory / name, world, objective=objective)
        for kind, rows in BORDERS.items():
            found = []
            for row_group in row_groups.values():
                sums = run_rows(model, objective, rows, world=world, row_group=row_group)
                found.append((gather_gradients(model), sums.loss_sum))
                model.zero_grad()
            (expected, loss), *others = found
            cells = [
                f"{find_difference(gradients, expected):.0e}, {abs(other / loss - 1):.0e}"
                for gradients, other in others
            ]
            say(world, f"| {name} | {kind} | {' | '.join(cells)} |")


def gather_gradients(model: PackedModel) -> dict[str, Tensor]:
    return {name: param.grad.full_tensor() for name, param in model.model.named_parameters()}


def find_difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest of any parameter's, relative to its gradient's norm; a gradient of zeros has to be one."""
    tiny = torch.finfo(torch.float32).tiny
    return max(((gradients[name] - e).norm() / e.norm().clamp_min(tiny)).item() for name, e in expected.items())


def measure_memory(
    args: argparse.Namespace, directory: Path, row_groups: dict[int | None, RowGroup | None], world: World
) -> list[int]:
    """A rank's bytes at the peak of a step, for each number of ranks that share a row."""
    config = LlamaConfig(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers, num_attention_heads=8, num_key_value_heads=args.num_kv_heads,
        max_position_embeddings=args.num_tokens,
    )  # fmt: skip
    call_on_rank0(world, lambda: save_model(config, directory / "measured").name)
    peaks = []
    for row_group in row_groups.values():
        objective = CausalLM()
        model = build(directory / "measured", world, objective=objective)
        optimizer = build_optimizer(model, OptimizationOptions())
        counter = MemoryCounter()
        for tensor in [*model.parameters(), *model.buffers()]:
            counter.count(tensor)
        with counter:
            for _ in range(2):  # the first step makes the optimizer's state
                for _ in range(2):
                    probe = objective.make_probe(
                        args.num_tokens, args.num_tokens // 2, longest=args.longest, row_group=row_group
                    )
                    run_backward(model, probe, {"targets": args.num_tokens})
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(counter.num_peak)
    return peaks


def plan_memory(args: argparse.Namespace, directory: Path, options: TrainOptions, num_ranks: int) -> int:
    """What a plan says of the same step."""
    compute_dtype = choose_compute_dtype(options.compute, torch.device("cpu"))
    inputs = RunInputs(TextFamily(), choose_method(options), options.data, compute_dtype, objective=CausalLM())
    inputs.model_dir, inputs.config = str(directory), load_source(directory).config
    planned = lay_out_model(options, inputs, options.compute)
    load = Load(args.num_tokens, args.num_tokens // 2, args.longest, accumulates=True)
    return simulate_step(options, planned, load, Ranks(num_ranks, num_ranks, options.sharding.context_parallel)).total


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(MODELS))
    parser.add_argument("--num-tokens", type=int, default=4096, help="of a packed row")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=512)
    args = parser.parse_args()
    setup_logging("ERROR")
    world = init_world()
    options = {
        size: group_options(
            TrainOptions, model_name_or_path="", output_dir="", compute_dtype="float32",
            activation_checkpointing="none", context_parallel=size,
        )
        for size in SHARING
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as own:
        directory = Path(call_on_rank0(world, lambda: own))
        row_groups = {size: make_row_group(world.rank, world.world_size, size) for size in SHARING}
        compare_families(args.families, directory, row_groups, world)
        peaks = measure_memory(args, directory, row_groups, world)
        dist.barrier()
        rank, num_ranks = world.rank, world.world_size
        dist.destroy_process_group()  # a simulation wants no other one beside its own
        if rank == 0:
            print(f"\n{vars(args)}, {num_ranks} ranks\n\n| N | tokens of a rank | measured, MB | planned, MB |")
            print("| --- | --- | --- | --- |")
            for size, peak in zip(SHARING, peaks, strict=True):
                planned = plan_memory(args, directory / "measured", options[size], num_ranks)
                tokens = args.num_tokens // (size or 1)
                print(f"| {size or 1} | {tokens:,} | {peak / 1e6:.1f} | {planned / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
