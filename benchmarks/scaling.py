"""How the step scales: processes on this machine, the cost of micro-batches measured, and many GPUs simulated.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py --data-path gsm8k.arrow

1. train.py in 1, 2 and 4 processes on the same batches: the losses have to be the same, and the metrics say which
   share of a step was spent on waiting for data and, by the packer's costs, for slower ranks.
2. Forward and backward of micro-batches of many shapes, and the costs that explain them: fixed, per token, per trained
   token (the head), per pair of attention. Tried on micro-batches that were not fitted: packed, of real lengths.
3. The steps of 8 to 1,024 GPUs: real lengths, the real packer, and a cost model of FSDP2. Without a CUDA device the
   costs of a micro-batch are its FLOPs at `--sustained-tflops`, an assumption; on one they are measured as in 2.

The cost model of 3: a micro-batch takes as long as its costliest rank, since every block's collectives wait for all.
Each block's weights are gathered before its forward and again before its backward, and its gradients reduced after;
that runs beside the neighbouring block's computing, so that a block takes the longer of the two, and the first gather
and the last reduction of a pass are not hidden. A ring over n ranks moves (n - 1) / n of the bytes at the slowest
link's speed, with one latency a hop, nodes being hops of the network. Contention, stragglers and failures are not in
it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import paths
import torch
import torch.distributed as dist
from harness import build, describe_versions, make_options, time_call, write_random_data
from make_tiny_model import train_tokenizer
from packing import DISTRIBUTIONS, draw_lengths
from train_step import SHAPES, make_config, make_empty_model, open_world, save_random_model

from mini_trainer.batch_packer import pack_batch
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import setup_logging
from mini_trainer.model.flops import FlopCount, count_flops
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.families.text_tower import find_blocks
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.run.step import run_backward

GPUS_PER_NODE = 8
FIRST_STEPS = 2  # of a run, not timed


# --- 1. Processes -------------------------------------------------------------------------------------------


def train_in_processes(num_processes: int, model_dir: Path, data_path: Path, args: argparse.Namespace) -> list[dict]:
    """The metrics of a run of train.py."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}",
                   str(paths.ROOT / "train.py"), "--model-name-or-path", str(model_dir), "--data-path", str(data_path),
                   "--output-dir", f"{directory}/run", "--batch-size", str(args.batch_size), "--max-tokens-per-gpu",
                   str(args.max_tokens), "--max-steps", str(args.num_steps + FIRST_STEPS), "--learning-rate", "1e-3",
                   "--lr-scheduler", "constant", "--no-save-final-checkpoint", "--checkpoint-at-epoch"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, check=False)
        if done.returncode != 0:
            sys.exit(f"train.py in {num_processes} processes failed:\n{done.stdout}\n{done.stderr}")
        return [json.loads(line) for line in Path(directory, "run/training_metrics_0.jsonl").read_text().splitlines()]


def print_processes(runs: dict[int, list[dict]]) -> None:
    reference = np.array([step["loss"] for step in next(iter(runs.values()))])
    print("| ranks | micro-batches | loss, first and last | off by, at most | waiting for data | for slower ranks |")
    print("| --- " * 6 + "|")
    for num_ranks, steps in runs.items():
        losses = np.array([step["loss"] for step in steps])
        timed = steps[FIRST_STEPS:]
        wait = sum(step["data_wait_seconds"] for step in timed)
        total = wait + sum(step["time_per_batch"] for step in timed)
        balance = np.mean([step["rank_balance"] for step in timed])
        print(
            f"| {num_ranks} | {timed[-1]['grad_accum']} | {losses[0]:.6f} {losses[-1]:.6f}"
            f" | {np.abs(losses / reference - 1).max():.1e} | {wait / total:.2%} | {1 - balance:.2%} |"
        )


# --- 2. Costs of a micro-batch ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds of forward and backward of a micro-batch, by what is in it."""

    fixed: float
    per_token: float
    per_loss_token: float
    per_pair: float  # half the square of each sample's length, summed

    def of(self, lengths: np.ndarray, num_loss_tokens: float) -> float:
        return float(count_terms(lengths, num_loss_tokens) @ np.array(astuple(self)))

    @property
    def attention_cost(self) -> float:
        """c in a sample's cost L + c·L², for the packer."""
        return self.per_pair / 2 / self.per_token


def count_terms(lengths: np.ndarray, num_loss_tokens: float) -> np.ndarray:  # (4,)
    lengths = np.asarray(lengths, float)
    return np.array([1.0, lengths.sum(), num_loss_tokens, (lengths**2).sum() / 2])


def assume_costs(flops: FlopCount, *, sustained: float, fixed: float, recompute: bool) -> Costs:
    """Costs from FLOPs at `sustained` FLOP/s; with full activation checkpointing, blocks run forward twice."""
    assert set(flops.windows) == {None}, "layers with a window"
    again = 4 / 3 if recompute else 1.0
    per_pair = again * sum(flops.per_pair) / sustained
    return Costs(fixed, again * flops.per_token / sustained, flops.per_loss_token / sustained, per_pair)


def measure_costs(
    model_dir: Path, data: Mixture, *, longest: int, num_repeats: int, activation_checkpointing: str
) -> Costs:
    """Times micro-batches of up to `longest` tokens and prints how well four costs explain them."""
    world = open_world()
    model = build(model_dir, make_options(activation_checkpointing=activation_checkpointing), world)
    random = np.random.default_rng(0)

    def make(num_samples: int, length: int, share: float) -> MicroBatch:
        ids = random.integers(3, 500, (num_samples, length))
        labels = np.where(np.arange(length) < (1 - share) * length, IGNORED, ids)
        samples = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
        return CausalLM().pack(samples).to(world.device)

    def run(micro_batch: MicroBatch) -> float:
        return time_call(lambda: run_backward(model, micro_batch, {"targets": 1, "tokens": 1}), world.device)

    shapes = [(n, length, share) for length in (longest // 32, longest // 8, longest // 2, longest)
              for n in {1, longest // length // 2 or 1, longest // length} for share in (0.1, 0.9)]  # fmt: skip
    fitted = [make(*shape) for shape in shapes]
    lengths = data.lengths[: 12 * longest // int(data.lengths.mean())]
    samples = [data.read(row) for row in range(len(lengths))]
    unseen = [CausalLM().pack([samples[i] for i in row[0]]) for row in pack_batch(lengths, longest, 1)]
    micro_batches = [*fitted, *(micro_batch.to(world.device) for micro_batch in unseen)]
    run(micro_batches[-1])
    seconds = np.array([min(run(m) for _ in range(num_repeats)) for m in micro_batches])
    terms = np.array([count_terms(np.array(m.row.seq_lengths), len(m.targets.index)) for m in micro_batches])
    model.zero_grad()
    costs = fit_nonnegative((terms / seconds[:, None])[: len(fitted)])
    errors = np.abs(terms @ costs / seconds - 1)
    fit, trial = np.split(errors, [len(fitted)])
    print(
        f"{len(shapes)} shapes, {longest // 32} to {longest} tokens: {1e3 * costs[0]:.2f} ms fixed,"
        f" {1e6 * costs[1]:.2f} µs a token, {1e6 * costs[2]:.2f} µs a trained token, {1e9 * costs[3]:.2f} ns a pair;"
        f"\noff by {np.median(fit):.1%} in the middle, {fit.max():.1%} at most; on {len(trial)} packed micro-batches of"
        f" real lengths by {np.median(trial):.1%} in the middle, {trial.max():.1%} at most"
    )
    return Costs(*costs)


def fit_nonnegative(relative: np.ndarray) -> np.ndarray:  # (4,)
    """Least squares of relative @ costs = 1: relative errors count, and what would be negative is 0."""
    kept = np.arange(relative.shape[1])
    while True:
        solution = np.linalg.lstsq(relative[:, kept], np.ones(len(relative)), rcond=None)[0]
        if (solution >= 0).all():
            costs = np.zeros(relative.shape[1])
            costs[kept] = solution
            return costs
        kept = np.delete(kept, solution.argmin())


# --- 3. Simulation ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Collectives' bytes per second and rank, and seconds a hop, within a node and between nodes."""

    node_bandwidth: float
    network_bandwidth: float
    node_latency: float
    network_latency: float

    def seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Of an all-gather to, or a reduce-scatter of, `num_bytes`, over all ranks."""
        num_nodes = -(-num_ranks // GPUS_PER_NODE)
        bandwidth = self.node_bandwidth if num_nodes == 1 else min(self.node_bandwidth, self.network_bandwidth)
        hops = (min(num_ranks, GPUS_PER_NODE) - 1) * self.node_latency + (num_nodes - 1) * self.network_latency
        return (num_ranks - 1) / num_ranks * num_bytes / bandwidth + hops


@dataclass(frozen=True)
class Simulated:
    """One step, in seconds: it takes computing + fixed + idle + exposed."""

    num_micro_batches: int
    computing: float  # mean over ranks
    fixed: float
    idle: float  # mean over ranks, waiting for the costliest
    exposed: float  # communication that nothing hides
    idle_unbalanced: float  # if each rank took its share of the samples in order, in as many micro-batches
    packing: float  # the packer's time, in the background

    @property
    def total(self) -> float:
        return self.computing + self.fixed + self.idle + self.exposed


@dataclass(frozen=True)
class Communication:
    """What is gathered and reduced around the blocks, and when."""

    block_parameters: list[int]
    other_parameters: int
    num_shards: int  # ranks that hold a copy of the model together
    reduce_every: bool  # after every micro-batch, or after the last
    forward_share: float  # of a micro-batch's seconds


def simulate_step(
    lengths: np.ndarray, *, share: float, num_ranks: int, max_tokens: int, costs: Costs, network: Network,
    communication: Communication,
) -> Simulated:  # fmt: skip
    """One global batch of `lengths` whose tokens are trained to `share`; see the cost model above.

    `num_ranks` are those that have rows.
    """
    start = time.perf_counter()
    table = pack_batch(lengths, max_tokens, num_ranks, costs.attention_cost)
    packing = time.perf_counter() - start
    work = np.array([[costs.of(lengths[r], share * lengths[r].sum()) for r in row] for row in table])  # (K, ranks)
    slowest = work.max(axis=1)
    num_blocks, num_shards = len(communication.block_parameters), communication.num_shards
    of_block, of_others = communication.block_parameters[0], communication.other_parameters
    gather = network.seconds(2 * of_block, num_shards)  # bf16
    reduce = network.seconds(4 * of_block, num_shards)  # fp32
    gather_others = network.seconds(2 * of_others, num_shards)
    reduce_others = network.seconds(4 * of_others, num_shards)
    forward_share = communication.forward_share
    exposed = 0.0
    for k, seconds in enumerate(slowest):
        reduces = communication.reduce_every or k == len(slowest) - 1
        forward, backward = forward_share * seconds / num_blocks, (1 - forward_share) * seconds / num_blocks
        exposed += gather_others + gather + (num_blocks - 1) * max(0.0, gather - forward)
        exposed += num_blocks * max(0.0, gather + reduces * reduce - backward)
        exposed += reduces * (reduce + reduce_others)
    in_order = np.array_split(np.arange(len(lengths)), num_ranks)
    alone = np.array([costs.of(lengths[r], share * lengths[r].sum()) for r in in_order]) - costs.fixed
    fixed = costs.fixed * len(table)
    return Simulated(
        num_micro_batches=len(table), computing=work.mean(axis=1).sum() - fixed, fixed=fixed,
        idle=(slowest - work.mean(axis=1)).sum(), exposed=exposed,
        idle_unbalanced=1 - alone.mean() / alone.max(), packing=packing,
    )  # fmt: skip


def name_limit(step: Simulated) -> str:
    """What costs the most beside computing, if it costs 5 % of the step or more."""
    losses = {"imbalance": step.idle, "communication": step.exposed, "fixed cost": step.fixed}
    worst = max(losses, key=losses.get)
    return worst if losses[worst] >= 0.05 * step.total else "computing"


def print_simulation(lengths: np.ndarray, share: float, costs: Costs, args: argparse.Namespace) -> None:
    network, model = read_network(args), make_empty_model(make_config(args.shape))
    block_parameters = [sum(p.numel() for p in block.parameters()) for block in find_blocks(model)]
    other_parameters = sum(p.numel() for p in model.parameters()) - sum(block_parameters)
    random = np.random.default_rng(0)
    for name, batch_of in (
        (f"{args.samples_per_gpu} samples a GPU", lambda n: args.samples_per_gpu * n),
        (f"{args.fixed_batch_size:,} samples a batch, whatever the number of GPUs", lambda n: args.fixed_batch_size),
    ):
        print(f"\n{args.shape}, {name}:\n")
        print("| GPUs | micro-batches | step | computing | idle | (in order: idle) | communication | fixed", end="")
        print(" | tokens/s/GPU | packing | limit |")
        print("| --- " * 11 + "|")
        for num_ranks in args.gpus:
            drawn = [random.choice(lengths, batch_of(num_ranks)) for _ in range(args.num_batches)]
            communication = Communication(
                block_parameters, other_parameters, num_ranks, reduce_every=args.grad_sync == "every",
                forward_share=1 / 4 if args.activation_checkpointing == "full" else 1 / 3,
            )  # fmt: skip
            steps = [
                simulate_step(
                    batch, share=share, num_ranks=num_ranks, max_tokens=args.max_tokens_per_gpu, costs=costs,
                    network=network, communication=communication,
                )
                for batch in drawn
            ]  # fmt: skip
            middle = sorted(steps, key=lambda step: step.total)[len(steps) // 2]
            tokens = np.mean([batch.sum() for batch in drawn]) / np.mean([step.total for step in steps]) / num_ranks
            shares = [getattr(middle, part) / middle.total for part in ("computing", "idle", "exposed", "fixed")]
            print(
                f"| {num_ranks:,} | {middle.num_micro_batches} | {middle.total:.3f} s | {shares[0]:.1%}"
                f" | {shares[1]:.2%} | ({middle.idle_unbalanced:.1%}) | {shares[2]:.1%} | {shares[3]:.2%}"
                f" | {tokens:,.0f} | {1e3 * middle.packing:.1f} ms | {name_limit(middle)} |"
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-path", help="data set of process_data.py, for its lengths; without, drawn ones")
    parser.add_argument(
        "--lengths", choices=DISTRIBUTIONS, default="gsm8k", help="of the drawn ones, and of parts 1 and 2"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="of part 1")
    parser.add_argument("--measured-shape", choices=SHAPES, default="tiny", help="of parts 1 and 2")
    parser.add_argument("--batch-size", type=int, default=32, help="of part 1")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of parts 1 and 2")
    parser.add_argument("--num-steps", type=int, default=6, help="timed steps of part 1")
    parser.add_argument("--num-repeats", type=int, default=3, help="of part 2, of which the fastest counts")
    parser.add_argument("--only-simulate", action="store_true", help="part 3 alone, with assumed costs")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b", help="of part 3, and so on")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--samples-per-gpu", type=int, default=128)
    parser.add_argument("--fixed-batch-size", type=int, default=2048)
    parser.add_argument("--num-batches", type=int, default=5)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=16384)
    parser.add_argument("--activation-checkpointing", choices=["none", "full"], default="full")
    parser.add_argument("--grad-sync", choices=["every", "last"], default="every", help="micro-batch that reduces")
    parser.add_argument("--sustained-tflops", type=float, default=500, help="of matrix products; 989 is an H200's peak")
    add_machine(parser)
    return parser.parse_args()


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `read_network`, and a micro-batch's fixed costs."""
    parser.add_argument("--fixed-ms", type=float, default=5, help="of a micro-batch")
    parser.add_argument("--node-bandwidth", type=float, default=300, help="GB/s of a GPU's collectives in a node")
    parser.add_argument("--network-bandwidth", type=float, default=160, help="GB/s of the same between nodes")
    parser.add_argument("--node-latency", type=float, default=3, help="µs a hop")
    parser.add_argument("--network-latency", type=float, default=10, help="µs a hop")


def read_network(args: argparse.Namespace) -> Network:
    return Network(1e9 * args.node_bandwidth, 1e9 * args.network_bandwidth, 1e-6 * args.node_latency,
                   1e-6 * args.network_latency)  # fmt: skip


def measure_here(args: argparse.Namespace) -> Costs:
    """Parts 1 and 2."""
    on_cuda = torch.cuda.is_available()
    shape = args.shape if on_cuda else args.measured_shape
    with tempfile.TemporaryDirectory() as directory:
        model_dir, data_path = Path(directory) / "model", Path(directory) / "data.arrow"
        save_random_model(shape, model_dir)
        train_tokenizer([], vocab_size=288).save_pretrained(model_dir)
        write_random_data(data_path, np.minimum(draw_lengths(args.lengths, 1000)[0], args.max_tokens))
        if not on_cuda:  # one device cannot hold several ranks
            print(f"1. train.py, {shape}, {args.batch_size} samples a step\n")
            print_processes({n: train_in_processes(n, model_dir, data_path, args) for n in args.processes})
        print(f"\n2. Micro-batches of {shape}, {'wall-clock' if on_cuda else 'CPU'} seconds\n")
        costs = measure_costs(
            model_dir,
            Mixture([TokenizedData(data_path)]),
            longest=args.max_tokens_per_gpu if on_cuda else args.max_tokens,
            num_repeats=args.num_repeats,
            activation_checkpointing=args.activation_checkpointing if on_cuda else "none",
        )
    dist.destroy_process_group()
    return costs


def find_lengths(args: argparse.Namespace) -> tuple[np.ndarray, float]:
    """The lengths of all samples, and the share of their tokens that is trained."""
    if args.data_path is None:
        return np.minimum(draw_lengths(args.lengths, 10_000)[0], args.max_tokens_per_gpu), 0.57  # GSM8K's share
    data = Mixture([TokenizedData(args.data_path)])
    data.fit_to(args.max_tokens_per_gpu, drop_overlong=True)
    return data.lengths[data.kept], data.num_loss_tokens[data.kept].sum() / data.lengths[data.kept].sum()


def main() -> None:
    args = parse_args()
    setup_logging("ERROR")
    print(f"python benchmarks/scaling.py {' '.join(sys.argv[1:])}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{describe_versions('torch', 'transformers')}; {device}\n")
    measured = None if args.only_simulate else measure_here(args)
    if measured is not None and torch.cuda.is_available():
        costs, source = measured, "costs measured above"
    else:
        costs = assume_costs(
            count_flops(make_empty_model(make_config(args.shape))),
            sustained=1e12 * args.sustained_tflops,
            fixed=1e-3 * args.fixed_ms,
            recompute=args.activation_checkpointing == "full",
        )
        source = f"costs assumed: {args.sustained_tflops:g} TFLOP/s sustained, {args.fixed_ms:g} ms a micro-batch fixed"
    lengths, share = find_lengths(args)
    print(
        f"\n3. Simulated, {source};\n{args.node_bandwidth:g} GB/s and {args.node_latency:g} µs in a node of"
        f" {GPUS_PER_NODE}, {args.network_bandwidth:g} GB/s and {args.network_latency:g} µs between nodes (assumed);\n"
        f"activation checkpointing {args.activation_checkpointing}, gradients reduced at {args.grad_sync} micro-batch,"
        f" at most {args.max_tokens_per_gpu:,} tokens in one;\nlengths {lengths.mean():.0f} on average, {lengths.max()}"
        " at most"
    )
    print_simulation(lengths, share, costs, args)


if __name__ == "__main__":
    main()
