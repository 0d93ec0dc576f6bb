"""Step time and memory of OSFT against plain fine-tuning of the same model, side by side in one process.

    OMP_NUM_THREADS=1 python benchmarks/osft_cost.py --ratios 0.1 0.25 0.5

Builds a random Llama of the given shape, takes one optimizer step of each kind in turn, and prints the median step
time and the exact bytes of weights, gradients and optimizer state, which is what is left between two micro-batches.
Also the time of the first start (decompositions) and of the second (from the cache). Time on the CPU is the process's
own, which other work on the machine moves little.

    python benchmarks/osft_cost.py --shapes

prints the same bytes, of plain fine-tuning's, for the layers of well-known models and for these as a whole, from the
shapes of the tensors alone.

    python benchmarks/osft_cost.py --decompositions "SmolLM2 135M" "Qwen2.5 1.5B"

times one decomposition of each kind of layer, of random numbers: what the first start on a model costs, divided by the
number of ranks; later ones read it from the cache. Beside it the thin SVD in fp32 that mini_trainer of Red Hat AI
Innovation takes at every start, and what both leave in memory or on disk. Times of other models are estimated from
those of the largest matrices that were timed, as s^2 (L + s) for a matrix of L rows and s columns.

    OMP_NUM_THREADS=1 python benchmarks/osft_cost.py --square --ratios 0.25 0.5

also takes every step with `OSFTLinear`'s form for square weights switched off, so that they are held as the others are,
and prints the bytes of both by the plan's simulation of a larger model.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator

import numpy as np
import paths  # noqa: F401
import torch
import torch.distributed as dist
from harness import build_state, count_state_bytes, make_batch, make_options, read_clock, time_call
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from mini_trainer.distributed.world import World, init_world, setup_logging
from mini_trainer.model.build import choose_compute_dtype
from mini_trainer.model.methods.osft_subspaces import count_kept, make_subspace
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import TrainOptions
from mini_trainer.osft import OSFT, OSFTLinear
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.plan.simulation import SHARDED, Load, Ranks, lay_out_model, simulate_step
from mini_trainer.run.step import TrainState, train_step
from mini_trainer.sampler import Batch

MODELS = {
    "SmolLM2 135M": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                         num_key_value_heads=3, vocab_size=49152, tied=True),
    "Qwen2.5 1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                         num_key_value_heads=2, vocab_size=151936, tied=True),
    "Llama 3.1 8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=128256, tied=False),
    "Llama 3.1 70B": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                          num_key_value_heads=8, vocab_size=128256, tied=False),
}  # fmt: skip


SQUARE_SHAPE = dict(
    hidden_size=1024, intermediate_size=3584, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32_000, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
LEARNING_RATE = 1e-4


@contextlib.contextmanager
def without_square_form() -> Iterator[None]:
    """Layers made in this block hold square weights as they hold all others."""
    OSFTLinear.is_core = property(
        lambda layer: layer.__dict__["is_core"], lambda layer, value: layer.__dict__.update(is_core=False)
    )
    try:
        yield
    finally:
        del OSFTLinear.is_core


def count_layer_bytes(out_features: int, in_features: int, ratio: float, dtype: torch.dtype) -> int:
    """Bytes of weights, gradients and optimizer state of one OSFT layer without bias, `--osft-basis weights`."""
    module = nn.Linear(in_features, out_features, bias=False, device="meta")
    num_kept = count_kept(min(in_features, out_features), ratio)
    layer = OSFTLinear(module, num_kept=num_kept, basis="weights", dtype=dtype)
    num_bytes = sum(param.nbytes for param in layer.parameters()) + 3 * layer.coefficients.nbytes
    return num_bytes + (4 * layer.num_rows * num_kept if layer.projects else 0)  # U_high


def list_layers(shape: dict) -> dict[str, tuple[int, tuple[int, int]]]:
    """Kinds of a block's linear layers -> how many there are, and (out, in)."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {"q, o": (2, (hidden, hidden)), "k, v": (2, (key_value, hidden)), "MLP": (3, (inner, hidden))}


def list_matrices(shape: dict, *, of_inputs: bool) -> dict[tuple[int, int], int]:
    """(L, s) of the matrices to decompose -> their number in the model: weights, or covariances of distinct inputs."""
    depth, hidden, inner = shape["num_hidden_layers"], shape["hidden_size"], shape["intermediate_size"]
    if of_inputs:  # of query, key and value; of the output projection; of gate and up; of down
        return {(hidden, hidden): 3 * depth, (inner, inner): depth}
    return {(max(sizes), min(sizes)): depth * number for number, sizes in list_layers(shape).values()}


WAYS = {
    "by weights": (False, lambda matrix: make_subspace(matrix, device=matrix.device)),
    "by activations": (True, lambda matrix: make_subspace(matrix.double(), device=matrix.device)),
    "SVD in fp32": (False, lambda matrix: torch.linalg.svd(matrix, full_matrices=False)),
}


def print_decompositions(timed: list[str], world: World) -> None:
    seconds: dict[str, dict[tuple[int, int], float]] = {way: {} for way in WAYS}
    for name in timed:
        for way, (of_inputs, decompose) in WAYS.items():
            for size in list_matrices(MODELS[name], of_inputs=of_inputs).keys() - seconds[way].keys():
                matrix = torch.randn(size, device=world.device)
                matrix = matrix.T @ matrix if of_inputs else matrix
                seconds[way][size] = time_call(lambda matrix=matrix, run=decompose: run(matrix), world.device)
    print(f"| first start, by one process | {' | '.join(WAYS)} | cache, by weights | by activations |"
          " covariances, in rank 0's memory | U, S, V of the SVD |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, shape in MODELS.items():
        times = []
        for way, (of_inputs, _) in WAYS.items():
            matrices = list_matrices(shape, of_inputs=of_inputs)
            total = sum(number * find_seconds(size, seconds[way]) for size, number in matrices.items())
            times.append(f"{total / 60:,.1f} min" + ("" if name in timed else " (estimated)"))
        weights, inputs = (list_matrices(shape, of_inputs=of_inputs) for of_inputs in (False, True))
        cached = sum(4 * number * (s * s * (2 if s == L else 1)) for (L, s), number in weights.items())
        bases, covariances = (size * sum(n * s * s for (_, s), n in inputs.items()) for size in (4, 8))
        factors = sum(4 * number * (L * s + s + s * s) for (L, s), number in weights.items())
        sizes = " | ".join(f"{size / 1e9:,.1f} GB" for size in (cached, bases, covariances, factors))
        print(f"| {name} | {' | '.join(times)} | {sizes} |")


def find_seconds(size: tuple[int, int], seconds: dict[tuple[int, int], float]) -> float:
    """Measured, or estimated from the largest measured matrix."""
    largest = max(seconds, key=count_work)
    return seconds.get(size, seconds[largest] * count_work(size) / count_work(largest))


def count_work(size: tuple[int, int]) -> int:
    num_rows, num_columns = size
    return num_columns**2 * (num_rows + num_columns)


def print_shapes(ratios: list[float]) -> None:
    kinds = [(dtype, ratio) for dtype in (torch.bfloat16, torch.float32) for ratio in ratios]
    header = " | ".join(f"{str(dtype).removeprefix('torch.')}, {ratio}" for dtype, ratio in kinds)
    print(f"| compute dtype, R | {header} |\n{'|---' * (len(kinds) + 1)}|")
    for name, shape in MODELS.items():
        layers = list_layers(shape)
        embeddings = (1 if shape["tied"] else 2) * shape["vocab_size"] * shape["hidden_size"]
        rows = {f"{name}: {kind}, {out} × {into}": (0, {kind: (n, (out, into))})
                for kind, (n, (out, into)) in layers.items()}  # fmt: skip
        for row, (frozen, parts) in (rows | {f"**{name}**, with frozen embeddings": (embeddings, layers)}).items():
            depth = shape["num_hidden_layers"]
            plain = 16 * (frozen + depth * sum(n * out * into for n, (out, into) in parts.values()))
            shares = [
                (4 * frozen + depth * sum(n * count_layer_bytes(*s, ratio, dtype) for n, s in parts.values())) / plain
                for dtype, ratio in kinds
            ]
            print(f"| {row} | {' | '.join(f'{share:.2f}' for share in shares)} |")


def print_square(ratios: list[float], num_layers: int) -> None:
    """Weights, gradients and optimizer state by the plan's simulation, with the square form and without."""
    shape = SQUARE_SHAPE | dict(num_hidden_layers=num_layers)
    print(f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, MLP {shape['intermediate_size']},"
          f" vocabulary {shape['vocab_size']:,}: q and o are square\n")  # fmt: skip
    print("| compute dtype, R | square form | without | saved | of the square layers |")
    print("| --- | --- | --- | --- | --- |")
    sizes = (shape["hidden_size"], shape["hidden_size"])
    for dtype in ("float32", "bfloat16"):
        for ratio in ratios:
            own, layer = simulate_bytes(shape, ratio, dtype), count_layer_bytes(*sizes, ratio, getattr(torch, dtype))
            with without_square_form():
                plain = simulate_bytes(shape, ratio, dtype)
                as_tall = count_layer_bytes(*sizes, ratio, getattr(torch, dtype))
            print(
                f"| {dtype}, {ratio} | {own / 1e6:,.1f} MB | {plain / 1e6:,.1f} MB | {1 - own / plain:.1%}"
                f" | {1 - layer / as_tall:.1%} |"
            )
    print()


def simulate_bytes(shape: dict, ratio: float, dtype: str) -> int:
    """Bytes of one rank's weights, gradients and optimizer state where a step needs most."""
    options = make_options(osft=True, osft_unfreeze_rank_ratio=ratio, compute_dtype=dtype)
    compute_dtype = choose_compute_dtype(options.compute, torch.device("cpu"))
    inputs = RunInputs(
        TextFamily(),
        OSFT(options.osft),
        options.data,
        options,
        compute_dtype,
        model_dir="",
        config=LlamaConfig(**shape),
        objective=CausalLM(),
    )
    planned = lay_out_model(choose_step_options(options), inputs, options.compute, OSFT(options.osft))
    load = Load(num_tokens=512, num_trained=256, longest=256, accumulates=True)
    peak = simulate_step(choose_step_options(options), planned, load, Ranks(1, 1)).peak
    return sum(peak[kind] for kind in SHARDED)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=1536)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--num-key-value-heads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    parser.add_argument("--num-steps", type=int, default=7)
    parser.add_argument("--num-micro-batches", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of one micro-batch, in sequences of 256")
    parser.add_argument("--activation-checkpointing", default="full", choices=["none", "full"])
    parser.add_argument(
        "--compute-dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: bfloat16 on CUDA only"
    )
    parser.add_argument("--square", action="store_true", help="also without the form that square weights have")
    parser.add_argument("--square-layers", type=int, default=8, help="of the model that --square plans")
    parser.add_argument(
        "--decompositions", nargs="+", choices=list(MODELS), metavar="MODEL", help="only the time of their first start"
    )
    parser.add_argument("--shapes", action="store_true", help="only the bytes of well-known models")
    return parser.parse_args()


def build_kinds(
    args: argparse.Namespace, world: World
) -> tuple[dict[str, tuple[TrainState, TrainOptions]], list[float]]:
    """Every kind of training, ready for its first step, and the seconds that the first and a later OSFT start add."""
    config = LlamaConfig(
        hidden_size=args.hidden_size, intermediate_size=args.intermediate_size, num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads, num_key_value_heads=args.num_key_value_heads, vocab_size=args.vocab_size,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    common = dict(
        compute_dtype=args.compute_dtype, activation_checkpointing=args.activation_checkpointing, weight_decay=0.1
    )
    kinds = {}
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(f"{directory}/model")

        def add(name: str, **osft: object) -> float:
            """Builds and keeps one kind; the seconds that took."""
            options = make_options(**common, **osft)
            start = read_clock(world.device)
            method = OSFT(options.osft) if osft else None
            kinds[name] = (build_state(f"{directory}/model", options, world, method=method), options)
            return read_clock(world.device) - start

        plain, starts = add("plain"), []
        for ratio in (*args.ratios, args.ratios[-1]):  # the last one again: all of it is in the cache by then
            osft = dict(osft=True, osft_unfreeze_rank_ratio=ratio, osft_cache_dir=f"{directory}/cache")
            starts.append(add(f"OSFT, R = {ratio}", **osft) - plain)
            if args.square:
                with without_square_form():
                    add(f"OSFT, R = {ratio}, square as tall", **osft)
    return kinds, [starts[0], starts[-1]]


def print_steps(kinds: dict[str, tuple[TrainState, TrainOptions]], batch: Batch, *, num_steps: int) -> None:
    """Takes the steps of all kinds in turn, the first of each untimed, and prints medians, bytes and the leak."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_steps + 1):
        for kind, (state, options) in kinds.items():
            step = time_call(
                lambda state=state, options=options: train_step(
                    state, batch, choose_step_options(options), lr=LEARNING_RATE
                ),
                state.world.device,
            )
            seconds[kind].append(step)
    medians = {kind: statistics.median(of_kind[1:]) for kind, of_kind in seconds.items()}
    num_bytes = {kind: count_state_bytes(state) for kind, (state, _) in kinds.items()}
    print("| kind | step | of plain | weights, gradients, optimizer | of plain | leak |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, (state, _) in kinds.items():
        leak = state.method.measure(torch.float32).get("osft_leak", 0.0)
        print(
            f"| {kind} | {medians[kind]:.3f} s | {medians[kind] / medians['plain']:.2f}"
            f" | {num_bytes[kind] / 1e6:,.1f} MB"
            f" | {num_bytes[kind] / num_bytes['plain']:.2f} | {leak:.1e} |"
        )
    for kind in medians:
        if f"{kind}, square as tall" in medians:
            other = f"{kind}, square as tall"
            ratio = statistics.median(a / b for a, b in zip(seconds[kind][1:], seconds[other][1:], strict=True))
            print(
                f"\n{kind}: the square form's steps take {ratio:.3f} of the time without it (median of pairs)", end=""
            )


def main() -> None:
    args = parse_args()
    if args.shapes:
        return print_shapes(args.ratios)
    setup_logging("ERROR")
    if args.square:
        print_square(args.ratios, args.square_layers)  # before there is a process group
    world = init_world()
    if args.decompositions:
        print_decompositions(args.decompositions, world)
        return dist.destroy_process_group()
    kinds, (first, second) = build_kinds(args, world)
    tokens = np.random.default_rng(0).integers(3, args.vocab_size, (args.num_micro_batches, args.tokens // 256, 256))
    plain, _ = kinds["plain"]
    num_parameters = sum(param.numel() for param in plain.model.parameters())
    print(f"{num_parameters:,} parameters, {args.num_micro_batches} x {args.tokens} tokens a step,"
          f" {plain.model.compute_dtype},")  # fmt: skip
    print(f"activation checkpointing {args.activation_checkpointing}, {world.world_size} x {world.device.type}\n")
    print_steps(kinds, make_batch([list(rows) for rows in tokens], world=world), num_steps=args.num_steps)
    print(f"\nstart: {first:.1f} s more than plain the first time, {second:.1f} s from the cache")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
