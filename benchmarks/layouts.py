"""Which layout for which model and length: context parallelism and sharding over many GPUs, simulated.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py

Global batches of samples up to 8 thousand, 128 thousand and a million tokens, on models of 8, 32 and 70 billion
parameters, in each layout: N ranks that share a row (--context-parallel), and full sharding or copies of the model over
so many GPUs (--sharding hybrid --shard-size). For each the memory of a GPU, whether it fits, and where a step's time
goes; then the fastest that fits.

Memory is the plan's own simulation of the step of a model of a few blocks, and an input for each of the others; to
it come the shard's weights, gradients and moments in fp32, 16 bytes a parameter. Time is the cost model of
benchmarks/scaling.py with the real packer, which packs a row for each N ranks. Beside what that says, it is
assumed that
- every token is trained, blocks are checkpointed (full) and keep their bf16 inputs on the GPU, and matrix products and
  attention run at --sustained-tflops whatever the length;
- an all-to-all is hidden by nothing. A GPU sends to those of its node at --node-bandwidth and to others at its network
  card's --nic-bandwidth, both at once. Heads that are filled up or repeated travel and compute like others;
- copies of the model sum their gradients once a step, each GPU its shard by a ring over network cards, unhidden;
- the update, checkpoints, contention, stragglers and failures take no time.
"""

import argparse
import sys
from dataclasses import astuple, dataclass, replace

import numpy as np
import paths  # noqa: F401
import scaling
import torch
from harness import describe_versions
from scaling import GPUS_PER_NODE, Communication, Costs, Simulated, assume_costs, simulate_step
from transformers import LlamaConfig

from mini_trainer.distributed.world import setup_logging
from mini_trainer.model.context_parallel import count_key_heads
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.plan.simulation import SHARDED, Load, PlannedModel, Ranks, lay_out_model
from mini_trainer.run.plan.simulation import simulate_step as plan_step
from mini_trainer.run.start import choose_method

SPARE = 0.1  # of a GPU's memory, for what no plan sees
COLUMNS = (
    "N | sharding | GB a GPU | micro-batches | step | computing | idle | all-to-all | other communication"
    " | tokens/s/GPU | |"
)
MODELS = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary: Llama 3 8B, Qwen 2.5 32B, Llama 3 70B
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "32B": (5120, 27648, 64, 40, 8, 152064),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
LENGTHS = {"8k": 1 << 13, "128k": 1 << 17, "1M": 1 << 20}
FEW_BLOCKS = 4  # simulated: each of the others keeps its input, in bf16
PROBED_TOKENS = 1 << 16  # of a rank
SIMULATED_GPUS = 64  # the size of their shards is not in what is taken from the simulation
MOST_TOKENS = 1 << 15  # of a rank: larger micro-batches buy next to nothing


@dataclass(frozen=True)
class LayoutModel:
    """What a model of some size takes."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    num_blocks: int
    block_parameters: int
    other_parameters: int
    costs: Costs
    memory: dict[int, tuple[float, float]]  # by N: bytes of a rank without state at no tokens, and for each token

    @property
    def num_parameters(self) -> int:
        return self.num_blocks * self.block_parameters + self.other_parameters

    def count_bytes(self, num_sharing: int, num_shards: int, num_tokens: int) -> float:
        """Of a rank: fp32 weights, gradients and two moments of its shard, and what else a step holds."""
        fixed, per_token = self.memory[num_sharing]
        return 16 * self.num_parameters / num_shards + fixed + per_token * num_tokens


@dataclass(frozen=True)
class Layout:
    num_sharing: int  # N
    num_shards: int

    def describe(self, num_gpus: int) -> str:
        sharding = "full" if self.num_shards == num_gpus else f"hybrid, {self.num_shards}"
        return f"{self.num_sharing} | {sharding}"


def make_config(name: str, num_blocks: int) -> LlamaConfig:
    hidden, inner, _, num_heads, num_kv_heads, vocab_size = MODELS[name]
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=num_blocks, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, vocab_size=vocab_size, max_position_embeddings=1 << 20,
    )  # fmt: skip


def lay_out_few(name: str, num_blocks: int, num_sharing: int) -> tuple[TrainOptions, PlannedModel]:
    options = group_options(
        TrainOptions, model_name_or_path="", output_dir="", compute_dtype="bfloat16", activation_checkpointing="full",
        context_parallel=num_sharing if num_sharing > 1 else None,
    )  # fmt: skip
    inputs = RunInputs(
        TextFamily(), choose_method(options), options.data, options, torch.bfloat16, objective=CausalLM()
    )
    inputs.model_dir, inputs.config = "", make_config(name, num_blocks)
    return options, lay_out_model(choose_step_options(options), inputs, options.compute, choose_method(options))


def simulate_memory(name: str, num_sharing: int) -> tuple[float, float]:
    """Of a rank, by the plan's own simulation of a few blocks: bytes without state, and for each of its tokens."""
    hidden, _, num_blocks, *_ = MODELS[name]
    options, planned = lay_out_few(name, FEW_BLOCKS, num_sharing)
    num_tokens = PROBED_TOKENS * num_sharing
    load = Load(num_tokens, num_tokens // 2, num_tokens, accumulates=True)
    memory = plan_step(options, planned, load, Ranks(SIMULATED_GPUS, SIMULATED_GPUS, options.sharding.context_parallel))
    per_token = memory.per_token * num_sharing
    rest = sum(size for kind, size in memory.peak.items() if kind not in SHARDED)
    return rest - per_token * PROBED_TOKENS, per_token + 2 * hidden * (num_blocks - FEW_BLOCKS)


def measure_model(name: str, args: argparse.Namespace) -> LayoutModel:
    """What a model takes, from one that has a few of its blocks."""
    hidden, _, num_blocks, num_heads, num_kv_heads, _ = MODELS[name]
    (_, one), (_, few) = (lay_out_few(name, number, 1) for number in (1, FEW_BLOCKS))
    of_block = (few.num_params - one.num_params) // (FEW_BLOCKS - 1)
    more = (num_blocks - 1) / (FEW_BLOCKS - 1)
    flops = replace(
        one.flops,
        per_pair=one.flops.per_pair * num_blocks,
        windows=one.flops.windows * num_blocks,
        **{
            name: getattr(one.flops, name) + more * (getattr(few.flops, name) - getattr(one.flops, name))
            for name in ("per_token", "forward_per_token")
        },
    )
    costs = assume_costs(flops, sustained=1e12 * args.sustained_tflops, fixed=1e-3 * args.fixed_ms, recompute=True)
    memory = {num_sharing: simulate_memory(name, num_sharing) for num_sharing in args.sharing}
    return LayoutModel(
        num_heads, num_kv_heads, hidden // num_heads, num_blocks, of_block, one.num_params - of_block, costs, memory
    )


@dataclass(frozen=True)
class LaidOut:
    """A step in a layout."""

    layout: Layout
    num_bytes: float  # of a rank
    step: Simulated | None = None  # None: it does not fit
    exchanged: float = 0.0  # seconds of all-to-alls, which are part of what is exposed
    tokens_per_second: float = 0.0  # of a GPU


def lay_out_step(model: LayoutModel, layout: Layout, lengths: np.ndarray, args: argparse.Namespace) -> LaidOut:
    """A global batch of `lengths` in a layout, with the largest micro-batch that fits up to MOST_TOKENS."""
    num_sharing, num_gpus = layout.num_sharing, args.gpus
    least, limit = -(-int(lengths.max()) // num_sharing), 1e9 * args.memory_gb * (1 - SPARE)
    sizes = [size for size in (MOST_TOKENS, MOST_TOKENS // 2, MOST_TOKENS // 4) if size > least] + [least]
    sizes = [size for size in sizes if model.count_bytes(num_sharing, layout.num_shards, size) <= limit]
    if not sizes:
        return LaidOut(layout, model.count_bytes(num_sharing, layout.num_shards, least))
    num_kv = count_key_heads(model.num_heads, model.num_kv_heads, num_sharing)
    num_query, num_kv = (num + -num % num_sharing for num in (model.num_heads, num_kv))  # filled up
    filled = replace(model.costs, per_pair=model.costs.per_pair * num_query / model.num_heads)
    communication = Communication(
        [model.block_parameters] * model.num_blocks, model.other_parameters, layout.num_shards, reduce_every=True,
        forward_share=1 / 4,
    )  # fmt: skip
    step = simulate_step(
        lengths, share=1.0, num_ranks=num_gpus // num_sharing, max_tokens=sizes[0] * num_sharing,
        costs=Costs(filled.fixed, *(part / num_sharing for part in astuple(filled)[1:])),
        network=scaling.read_network(args), communication=communication,
    )  # fmt: skip
    # Forward, forward once more, backward: queries and outputs, keys and values of all of a rank's tokens, in bf16.
    num_tokens = lengths.sum() / num_gpus
    num_bytes = 3 * model.num_blocks * 2 * 2 * (num_query + num_kv) * model.head_size * num_tokens
    exchanged = exchange_seconds(num_bytes, num_sharing, args)
    summed = sum_seconds(4 * model.num_parameters / layout.num_shards, num_gpus // layout.num_shards, args)
    step = replace(step, exposed=step.exposed + exchanged + summed)
    return LaidOut(
        layout, model.count_bytes(num_sharing, layout.num_shards, sizes[0]), step, exchanged, num_tokens / step.total
    )


def draw_long(longest: int, num_tokens: int) -> np.ndarray:
    """Lengths up to `longest`, as many of each order of size, that come to `num_tokens` or a little more."""
    random = np.random.default_rng(0)
    drawn = np.exp(random.uniform(np.log(longest / 32), np.log(longest), 64 * num_tokens // longest)).astype(int)
    drawn[0] = longest
    return drawn[: np.searchsorted(np.cumsum(drawn), num_tokens) + 1]


def print_layouts(args: argparse.Namespace) -> None:
    num_gpus, best = args.gpus, []
    for name in args.models:
        model = measure_model(name, args)
        for length_name, longest in LENGTHS.items():
            lengths = draw_long(longest, args.batch_tokens)
            layouts = [Layout(n, shards) for n in args.sharing for shards in (*args.shards, num_gpus)]
            found = [lay_out_step(model, layout, lengths, args) for layout in layouts]
            chosen = max(found, key=lambda each: each.tokens_per_second)
            print(f"\n{name}, samples of {lengths.min():,} to {longest:,} tokens, {len(lengths):,} of them a batch:\n")
            print(f"| {COLUMNS}\n{'| --- ' * 11}|")
            for each in found:
                print(describe_layout(each, each is chosen, num_gpus), flush=True)
            best.append(f"| {name} | {length_name} {describe_layout(chosen, False, num_gpus)}")
    print(f"\nThe fastest that fits:\n\n| model | samples up to | {COLUMNS}\n{'| --- ' * 13}|")
    print("\n".join(best))


def describe_layout(found: LaidOut, is_chosen: bool, num_gpus: int) -> str:
    start, step = f"| {found.layout.describe(num_gpus)} | {found.num_bytes / 1e9:,.0f}", found.step
    if step is None:
        return f"{start} {'| ' * 7}| does not fit |"
    shares = [
        part / step.total for part in (step.computing, step.idle, found.exchanged, step.exposed - found.exchanged)
    ]
    return (
        f"{start} | {step.num_micro_batches} | {step.total:.1f} s | {' | '.join(f'{share:.1%}' for share in shares)}"
        f" | {found.tokens_per_second:,.0f} | {'**the fastest**' if is_chosen else ''} |"
    )


def exchange_seconds(num_bytes: float, num_sharing: int, args: argparse.Namespace) -> float:
    """Of all-to-alls in which each of N ranks has `num_bytes`, of which it keeps the N-th part."""
    num_near = min(num_sharing, GPUS_PER_NODE)
    near, far = (num_bytes * num / num_sharing for num in (num_near - 1, num_sharing - num_near))
    return max(near / (1e9 * args.node_bandwidth), far / (1e9 * args.nic_bandwidth))


def sum_seconds(num_bytes: float, num_copies: int, args: argparse.Namespace) -> float:
    """Of a ring's all-reduce of `num_bytes` over the copies of the model."""
    return 2 * (num_copies - 1) / num_copies * num_bytes / (1e9 * args.nic_bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--sharing", type=int, nargs="+", default=[1, 8, 32, 64], help="values of N")
    parser.add_argument("--shards", type=int, nargs="+", default=[8, 32], help="GPUs of a copy, beside all of them")
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--memory-gb", type=float, default=80, help="of a GPU; a tenth stays free")
    parser.add_argument("--batch-tokens", type=int, default=1 << 26)
    parser.add_argument("--sustained-tflops", type=float, default=360, help="of an H100: as measured; its peak is 989")
    parser.add_argument("--nic-bandwidth", type=float, default=45, help="GB/s of one GPU's own network card")
    scaling.add_machine(parser)
    args = parser.parse_args()
    setup_logging("ERROR")
    print(f"python benchmarks/layouts.py {' '.join(sys.argv[1:])}\n{describe_versions('torch', 'transformers')}")
    print(f"{vars(args)}")
    print_layouts(args)


if __name__ == "__main__":
    main()
