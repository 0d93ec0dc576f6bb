"""Step time and memory of OSFT against plain fine-tuning of the same model, side by side in one process.

    OMP_NUM_THREADS=1 python benchmarks/osft_cost.py --ratios 0.1 0.25 0.5

Builds a random Llama of the given shape, takes one optimizer step of each kind in turn, and prints the median step
time and the exact bytes of weights, gradients and optimizer state, which is what is left between two micro-batches.
Also the time of the first start (decompositions) and of the second (from the cache). Time on the CPU is the process's
own, which other work on the machine moves little.

    python benchmarks/osft_cost.py --shapes

prints the same bytes, of plain fine-tuning's, for the layers of well-known models and for these as a whole, from the
shapes of the tensors alone.

    python benchmarks/osft_cost.py --decompositions "Qwen2.5 1.5B" "Llama 3.1 8B"

times one decomposition of each kind of layer, of random numbers: what the first start on a model costs, divided by the
number of ranks; later ones read it from the cache.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from model.build import PackedCausalLM, build_model, load_config
from objectives.micro_batch import MicroBatch, pack_samples
from optim.optimizers import build_optimizer, clip_gradients, local_gradients
from osft import (
    OSFTLinear,
    OSFTSettings,
    count_kept,
    find_osft_layers,
    make_subspace,
    measure_leak,
    project_gradients,
    project_updates,
)
from ranks.world import World, init_world, setup_logging

MODELS = {
    "Qwen2.5 1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                         num_key_value_heads=2, vocab_size=151936, tied=True),
    "Llama 3.1 8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=128256, tied=False),
    "Llama 3.1 70B": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                          num_key_value_heads=8, vocab_size=128256, tied=False),
}  # fmt: skip


def take_step(model: PackedCausalLM, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]) -> int:
    """One optimizer step as train.py takes it; returns the bytes held at its end, gradients included."""
    layers = find_osft_layers(model)
    for micro_batch in micro_batches:
        (model(micro_batch) / 1000).backward()
    project_gradients(layers)
    gradients = local_gradients(model)
    norm = torch.stack(torch._foreach_norm(gradients)).norm().item()
    clip_gradients(gradients, grad_norm=norm, max_grad_norm=1.0)
    optimizer.step()
    project_updates(layers)
    num_bytes = count_bytes(model, optimizer)
    optimizer.zero_grad()
    return num_bytes


def count_bytes(model: PackedCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """This rank's bytes of parameters, buffers, gradients and optimizer state."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)


def read_clock(world: World) -> float:
    """Seconds, after all that was started is done."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        return time.monotonic()
    return time.process_time()


def count_layer_bytes(out_features: int, in_features: int, ratio: float, dtype: torch.dtype) -> int:
    """Bytes of weights, gradients and optimizer state of one OSFT layer without bias, `--osft-basis weights`."""
    module = nn.Linear(in_features, out_features, bias=False, device="meta")
    num_kept = count_kept(min(in_features, out_features), ratio)
    layer = OSFTLinear(module, num_kept=num_kept, basis="weights", compute_dtype=dtype)
    num_bytes = sum(param.nbytes for param in layer.parameters()) + 3 * layer.coefficients.nbytes
    return num_bytes + (4 * layer.num_rows * num_kept if layer.projects else 0)  # U_high


def list_layers(shape: dict) -> dict[str, tuple[int, tuple[int, int]]]:
    """Kinds of a block's linear layers -> how many there are, and (out, in)."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {"q, o": (2, (hidden, hidden)), "k, v": (2, (key_value, hidden)), "MLP": (3, (inner, hidden))}


def print_decompositions(names: list[str], world: World) -> None:
    print("| layer | seconds | of the model, by one process |\n|---|---|---|")
    for name in names:
        depth, total = MODELS[name]["num_hidden_layers"], 0.0
        for kind, (number, (out, into)) in list_layers(MODELS[name]).items():
            matrix = torch.randn(max(out, into), min(out, into), device=world.device)
            start = read_clock(world)
            make_subspace(matrix, device=world.device)
            seconds = read_clock(world) - start
            total += depth * number * seconds
            print(f"| {name}: {kind}, {out} × {into} | {seconds:.1f} | {depth * number} × |")
        print(f"| **{name}** | | {total / 60:.1f} min |")


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


def main() -> None:
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
    parser.add_argument("--compute-dtype", choices=["float32", "bfloat16"], help="bfloat16 on CUDA, else float32")
    parser.add_argument(
        "--decompositions", nargs="+", choices=list(MODELS), metavar="MODEL", help="only the time of their first start"
    )
    parser.add_argument("--shapes", action="store_true", help="only the bytes of well-known models")
    args = parser.parse_args()
    if args.shapes:
        return print_shapes(args.ratios)
    setup_logging("ERROR")
    world = init_world()
    if args.decompositions:
        print_decompositions(args.decompositions, world)
        return dist.destroy_process_group()
    dtype = getattr(torch, args.compute_dtype or ("bfloat16" if world.device.type == "cuda" else "float32"))
    config = LlamaConfig(
        hidden_size=args.hidden_size, intermediate_size=args.intermediate_size, num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads, num_key_value_heads=args.num_key_value_heads, vocab_size=args.vocab_size,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    random = np.random.default_rng(0)
    tokens = random.integers(3, args.vocab_size, (args.num_micro_batches, args.tokens // 256, 256))
    micro_batches = [pack_samples([(row, row, None) for row in rows]).to(world.device) for rows in tokens]
    kinds: dict[str, tuple[PackedCausalLM, torch.optim.Optimizer]] = {}
    starts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory) / "model"
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model_dir)
        for kind in ("plain", *args.ratios, "second start"):
            ratio = args.ratios[-1] if kind == "second start" else kind
            osft = None if kind == "plain" else OSFTSettings(ratio, cache_dir=f"{directory}/cache")
            start = read_clock(world)
            model = build_model(
                str(model_dir), load_config(str(model_dir)), world=world, compute_dtype=dtype, attention="auto",
                activation_checkpointing=args.activation_checkpointing, compile=False, use_liger_kernels=False,
                osft=osft,
            )  # fmt: skip
            starts[str(kind)] = read_clock(world) - start
            if kind != "second start":
                optimizer = build_optimizer(model, learning_rate=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
                kinds[str(kind)] = (model, optimizer)
        num_parameters = sum(p.numel() for p in kinds["plain"][0].parameters())
        print(f"{num_parameters:,} parameters, {args.num_micro_batches} x {args.tokens} tokens a step, {dtype},")
        print(f"activation checkpointing {args.activation_checkpointing}, {world.world_size} x {world.device.type}\n")
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        num_bytes = {}
        for _ in range(args.num_steps + 1):
            for kind, (model, optimizer) in kinds.items():
                start = read_clock(world)
                num_bytes[kind] = take_step(model, optimizer, micro_batches)
                seconds[kind].append(read_clock(world) - start)
        plain = statistics.median(seconds["plain"][1:])
        print("| kind | step | of plain | weights, gradients, optimizer | of plain | leak |")
        print("| --- | --- | --- | --- | --- | --- |")
        for kind, (model, _) in kinds.items():
            median, leak = statistics.median(seconds[kind][1:]), measure_leak(find_osft_layers(model))
            name = kind if kind == "plain" else f"OSFT, R = {kind}"
            print(
                f"| {name} | {median:.3f} s | {median / plain:.2f} | {num_bytes[kind] / 1e6:,.1f} MB"
                f" | {num_bytes[kind] / num_bytes['plain']:.2f} | {leak:.1e} |"
            )
        first = starts[str(args.ratios[0])] - starts["plain"]
        second = starts["second start"] - starts["plain"]
        print(f"\nstart: {first:.1f} s more than plain the first time, {second:.1f} s from the cache")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
