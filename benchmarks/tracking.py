"""What trackers cost a step: the same training step in turns with none, each tracker, and all of them.

    OMP_NUM_THREADS=1 python benchmarks/tracking.py

Everything stays on this machine: wandb offline, MLflow's database and trackio's in a temporary directory. Each tracker
is started once, before the first step is timed, and hears only of its own turns' steps. Wall time of the step and of
telling the trackers; the CPU seconds are the process's, trackers' threads and all. What the trackers do in processes of
their own (wandb) is in the wall time alone.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]
from harness import build_state, make_batch, make_options

from lifecycle.metrics import StepMetrics
from lifecycle.step import TrainState, train_step
from lifecycle.tracker_packages import PACKAGES
from lifecycle.trackers import TrackedRun, Trackers
from ranks.world import World, init_world, setup_logging
from sampler import Batch

SECONDS_TO_SETTLE = 2.0  # after each turn, untimed: what was queued in it is not counted for the next


def start_trackers(names: list[str], directory: Path) -> Trackers:
    """A sink of these trackers, which are starting."""

    def describe(name: str) -> TrackedRun:
        return TrackedRun("benchmark", "benchmark", directory / name, 0, options=dict(learning_rate=1e-5), facts={},
                          read_earlier=lambda step: iter(()), known={}, keep=lambda known: None)  # fmt: skip

    for name in names:
        (directory / name).mkdir(exist_ok=True)
    return Trackers({name: PACKAGES[name]() for name in names}, describe)


def wait_until_started(sinks: dict[str, Trackers]) -> None:
    for trackers in sinks.values():
        trackers.write(dict(step=0, loss=0.0))
    while any(thread.queue.qsize() for trackers in sinks.values() for thread in trackers.threads):
        time.sleep(0.1)
    dead = [thread.title for trackers in sinks.values() for thread in trackers.threads if thread.is_dead]
    assert not dead, f"not started: {dead}"


def make_state(args: argparse.Namespace, directory: Path, world: World) -> tuple[TrainState, Batch]:
    config = Qwen2Config(
        hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size, num_hidden_layers=4, vocab_size=1024,
        num_attention_heads=args.hidden_size // 32, num_key_value_heads=args.hidden_size // 64,
        max_position_embeddings=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    random = np.random.default_rng(0)
    rows = [[random.integers(3, 1024, length) for length in random.integers(20, 80, 8)]]
    return build_state(directory / "model", make_options(), world), make_batch(rows, world=world)


def time_steps(take_step: Callable[[], object], told: list[Trackers], steps: range) -> tuple[list[float], float]:
    """Wall seconds of each step with telling the trackers of it, and the process's CPU seconds a step."""
    seconds, cpu = [], time.process_time()
    for step in steps:
        start = time.monotonic()
        take_step()
        for trackers in told:
            trackers.write(dict.fromkeys(StepMetrics.__dataclass_fields__, 1.0) | dict(step=step))
        seconds.append(time.monotonic() - start)
    while any(thread.queue.qsize() for trackers in told for thread in trackers.threads):
        time.sleep(0.05)
    time.sleep(SECONDS_TO_SETTLE if told else 0.0)
    return seconds, (time.process_time() - cpu) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trackers", nargs="+", default=list(PACKAGES))
    args = parser.parse_args()
    setup_logging("WARNING")
    world = init_world()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        os.environ |= dict(WANDB_MODE="offline", WANDB_SILENT="true", TRACKIO_DIR=str(directory / "trackio_data"),
                           MLFLOW_TRACKING_URI=f"sqlite:///{directory}/mlflow.db")  # fmt: skip
        state, batch = make_state(args, directory, world)
        options = make_options()

        def take_step() -> None:
            train_step(state, batch, options, lr=1e-5)

        sinks = {name: start_trackers([name], directory) for name in args.trackers}
        arms = {"none": []} | {name: [trackers] for name, trackers in sinks.items()} | {"all": list(sinks.values())}
        wait_until_started(sinks)
        for _ in range(3):
            take_step()
        wall = {arm: [] for arm in arms}
        cpu = {arm: [] for arm in arms}
        first = 1
        for _ in range(args.rounds):
            for arm, told in arms.items():
                first += args.steps
                seconds, cpu_seconds = time_steps(take_step, told, range(first, first + args.steps))
                wall[arm] += seconds
                cpu[arm].append(cpu_seconds)
        print("| trackers | step, median | of none | CPU a step, with the trackers' threads | of none |")
        print("| --- " * 5 + "|")
        for arm in arms:
            step, used = statistics.median(wall[arm]), statistics.median(cpu[arm])
            base, base_used = statistics.median(wall["none"]), statistics.median(cpu["none"])
            print(f"| {arm} | {1e3 * step:.1f} ms | {step / base:.3f} | {1e3 * used:.1f} ms | {used / base_used:.3f} |")
        for trackers in sinks.values():
            trackers.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
