"""Counts what one training step does, beside what it has to do; written to results/counts.txt.

    python benchmarks/counts.py

Trains a tiny Llama in bf16 on 2 gloo ranks with `run.step.train_step`, with 2 and 4 blocks and with 1 and 3
micro-batches a step, and counts collectives and their bytes, operations that compute, casts, copies, allocations and
reads by the host. All are linear in blocks and micro-batches, so four steps give what each of them adds. Then compiles
blocks with inductor and counts the kernels of one. No count depends on the machine or its load.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paths
import torch
from harness import build_state, describe_versions, make_batch, make_options
from make_tiny_model import train_tokenizer
from op_recording import OpRecorder, WaitRecorder
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from transformers import LlamaConfig, LlamaForCausalLM

from mini_trainer.distributed.world import World, init_world, setup_logging
from mini_trainer.model import attention
from mini_trainer.options import TrainOptions
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.start import choose_method
from mini_trainer.run.step import TrainState, train_step

NUM_RANKS, NUM_TOKENS, LORA_RANK, RESULTS = 2, 64, 8, paths.ROOT / "benchmarks/results/counts.txt"
SHAPE = dict(
    vocab_size=288, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    tie_word_embeddings=False,
)  # fmt: skip
SIZES = ((2, 1), (4, 1), (2, 3), (4, 3))  # numbers of blocks and of micro-batches
BASE = dict(activation_checkpointing="none", compute_dtype="bfloat16", max_grad_norm=1e-3)
CASES = {
    "full": {},
    "full, checkpointing": dict(activation_checkpointing="full"),
    "full, adamw8bit": dict(optimizer="adamw8bit"),
    "LoRA": dict(lora=True, lora_rank=LORA_RANK),
    "OSFT": dict(osft=True, osft_unfreeze_rank_ratio=0.5),
}
CASTS = ("aten::_to_copy",)
COPIES = ("aten::copy_", "aten::clone", "aten::_foreach_copy_")
VIEWS = ("aten::_unsafe_view",)  # and those that torch declares
WITHOUT_KERNEL = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_", "c10d::", "profiler::")

NOTES = """\
block, micro-batch: for each block in each micro-batch, forward and backward; block, step: for each block once a step;
negative: the first micro-batch of a step does not add to gradients. kernels: operations that are neither views nor
plain allocations nor collectives, as a CPU counts them: attention is one each way, and add_product's two casts of the
head's factors and the casts of weights that FSDP2 gathers are there. views: operations that only make a tensor.
"""


class Cost(NamedTuple):
    """A count's four parts: count(L blocks, M micro-batches) = step + M micro_batch + L block_step + L M block."""

    block: int  # each block in each micro-batch
    micro_batch: int
    block_step: int  # each block in each step
    step: int


class StepCounter(OpRecorder):
    """While it is entered: what `results` returns."""

    def __init__(self):
        super().__init__()
        self.num_ops: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name()
        is_view = operation.is_view or name.startswith(VIEWS)
        self.num_ops["views"] += is_view
        self.num_ops["kernels"] += not is_view and not name.startswith(WITHOUT_KERNEL)
        self.num_ops["casts"] += name in CASTS
        self.num_ops["copies"] += name in COPIES
        return super().__torch_dispatch__(operation, types, args, kwargs)

    def results(self) -> Counter[str]:
        """Counts by name."""
        kinds = {f"{kind}s": number for kind, number in self.num_collectives.items()}
        sent = {f"{kind}s, bytes": number for kind, number in self.collective_bytes.items()}
        return Counter(kinds | sent | self.num_ops | {"allocations": self.num_allocations})


def count_step(state: TrainState, options: TrainOptions, *, num_micro_batches: int) -> Counter[str]:
    """Counts the second of two equal steps, by name; the first one makes the optimizer's state."""
    row = [np.arange(NUM_TOKENS)]
    for step in range(2):
        batch = make_batch([row] * num_micro_batches, step=step, world=state.world)
        with WaitRecorder() as waits, StepCounter() as counter:
            train_step(state, batch, choose_step_options(options), lr=1e-4)
    # Where reduce_step has copied its results to the host, it reads no more from the device.
    names = [name for is_inside, name in waits.events if not is_inside or name == "torch.Tensor.cpu"]
    return counter.results() + Counter({"waits for the device": len(names)})


def split_counts(counts: dict[tuple[int, int], Counter[str]]) -> dict[str, Cost]:
    """The parts of each count; AssertionError if a count is not linear in both numbers."""
    names, costs = sorted(set(itertools.chain.from_iterable(counts.values()))), {}
    (few, one), (many, _), _, (_, several) = SIZES
    for name in names:
        a, b, c, d = (counts[size][name] for size in SIZES)
        scale = (many - few) * (several - one)
        block, rest = divmod(d - c - b + a, scale)
        block_step, other = divmod(b - a - (many - few) * one * block, many - few)
        micro_batch, more = divmod(c - a - few * (several - one) * block, several - one)
        assert not (rest or other or more), f"{name}: {a}, {b}, {c}, {d} is not linear"
        costs[name] = Cost(block, micro_batch, block_step, a - few * one * block - few * block_step - one * micro_batch)
    return costs


def measure_case(name: str, world: World, directory: Path) -> dict[str, Cost]:
    """Counts a case of `CASES`. All ranks call this."""
    given = BASE | CASES[name]
    if "osft" in given:
        given["osft_cache_dir"] = str(directory / "osft")
    options, counts = make_options(**given), {}
    for num_blocks, sizes in itertools.groupby(sorted(SIZES), key=lambda size: size[0]):
        method = choose_method(options)
        method.open_files(train_tokenizer([], vocab_size=SHAPE["vocab_size"]), options.data)
        state = build_state(directory / str(num_blocks), options, world, method=method)
        for size in sizes:
            counts[size] = count_step(state, options, num_micro_batches=size[1])
    return split_counts(counts)


def save_models(directory: Path) -> None:
    for num_blocks in {size[0] for size in SIZES}:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=num_blocks))
        model.save_pretrained(directory / str(num_blocks))


def run_worker(directory: Path, names: list[str]) -> None:
    """One rank; rank 0 writes the counts of these cases, or of all, to counts.json."""
    attention.SHORT = 0  # as on a GPU
    setup_logging("ERROR")
    world = init_world()
    costs = {name: measure_case(name, world, directory) for name in names or CASES}
    if world.rank == 0:
        (directory / "counts.json").write_text(json.dumps(costs))
    torch.distributed.barrier()
    os._exit(0)


def find_needed(name: str) -> dict[str, Cost]:
    """What a case needs, from the model's shape and FSDP2's resharding after each forward pass; bytes not for OSFT."""
    hidden, inner, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["hidden_size"] // 2
    layers = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden), *[(hidden, inner)] * 3]
    base, adapters = sum(a * b for a, b in layers) + 2 * hidden, LORA_RANK * sum(a + b for a, b in layers)
    others = 2 * SHAPE["vocab_size"] * hidden + hidden  # embedding, head and norm
    is_full = name.startswith("full")
    gathered, trained = (base, base) if is_full else (base + adapters, adapters)
    needed = {
        "all-gathers": Cost(2, 2, 0, 1),
        "reduce-scatters": Cost(1, 2 if is_full else 0, 0, 0),
        "all-reduces": Cost(0, 0, 0, 2 if name == "OSFT" else 0),
        "waits for the device": Cost(0, 0, 0, 1),
    }
    if name != "OSFT":
        needed["all-gathers, bytes"] = Cost(2 * 2 * gathered, 2 * others, 0, 64)
        needed["reduce-scatters, bytes"] = Cost(4 * trained, 4 * others if is_full else 0, 0, 0)
    return needed


def count_compiled(world: World, directory: Path) -> Iterator[tuple[int, int, int]]:
    """For each size of model: its blocks, and the graphs and kernels that inductor makes for a step from nothing."""
    for num_blocks in sorted({size[0] for size in SIZES}):
        torch.compiler.reset()
        counters.clear()
        metrics.reset()
        options = make_options(**BASE, compile=True)
        state = build_state(directory / str(num_blocks), options, world)
        batch = make_batch([[np.arange(NUM_TOKENS)]], world=world)
        with fresh_cache():
            train_step(state, batch, choose_step_options(options), lr=1e-4)
        yield num_blocks, counters["stats"]["unique_graphs"], metrics.generated_kernel_count


def render(name: str, costs: dict[str, Cost], before: dict[str, Cost]) -> list[str]:
    """The table of a case; in parentheses what is needed."""
    lines = [
        "",
        f"## {name}",
        "",
        "| count | block, micro-batch | micro-batch | block, step | step |",
        "|---|---|---|---|---|",
    ]
    needed = find_needed(name)
    for count, cost in costs.items():
        cells = []
        for field, number in zip(Cost._fields, cost, strict=True):
            old = getattr(before[count], field) if count in before else number
            cell = f"{number:,}" if old == number else f"{old:,} → {number:,}"
            cells.append(cell + (f" ({getattr(needed[count], field):,})" if count in needed else ""))
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return lines


def read_counts(text: str) -> dict[str, dict[str, Cost]]:
    """The counts of a report, by case and name."""
    costs: dict[str, dict[str, Cost]] = {}
    for line in text.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            costs[line.removeprefix("## ")] = own = {}
        elif len(cells) == len(Cost._fields) and name not in ("count", "---"):
            own[name] = Cost(*(int(re.sub(r".*→|\(.*|,", "", cell)) for cell in cells))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="an earlier report, whose counts are shown where they differ")
    args = parser.parse_args()
    before = {} if args.before is None else read_counts(args.before.read_text())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}",
               __file__, "--worker"]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        save_models(directory)
        subprocess.run([*command, made], check=True, cwd=paths.ROOT, env=env)
        costs = json.loads((directory / "counts.json").read_text())
        setup_logging("ERROR")
        compiled = list(count_compiled(init_world(), directory))
    lines = [
        f"What a step of a Llama in bf16 does on each of {NUM_RANKS} gloo ranks; in parentheses what is needed",
        "$ python benchmarks/counts.py",
        describe_versions("torch", "transformers", "peft"),
        *itertools.chain.from_iterable(
            render(name, {count: Cost(*parts) for count, parts in own.items()}, before.get(name, {}))
            for name, own in costs.items()
        ),
        "",
        "## compiled",
        "",
        "| blocks | graphs | kernels written by inductor |",
        "|---|---|---|",
        *(f"| {num_blocks} | {graphs} | {kernels} |" for num_blocks, graphs, kernels in compiled),
        "",
        NOTES,
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    RESULTS.write_text(report)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
