"""Cost of a step with a teacher against supervised fine-tuning on the same rows; written to results/teacher_cost.txt.

    pip install trl==1.16
    OMP_NUM_THREADS=1 python benchmarks/teacher_cost.py --work-dir /tmp/teacher_cost

trains a random Llama of 35 million parameters in fp32 on random rows. The teacher's files are scored by another random
model of the same shape, which is also the teacher that reads the rows. TRL is a plain loop over padded batches with the
`generalized_jsd_loss` of its GKDTrainer on both models' full logits. Seconds are CPU seconds of one thread in one
process where all ways take a step in turns: medians over rounds, of seconds and of ratios within a round. Memory is the
largest private resident memory (RssAnon) of a process that trains one way.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import paths
import torch
from harness import build, build_state, describe_versions, make_options, pad_samples, time_call, watch_memory
from preferences_cost import SHAPE, make_sides, to_row, write_data
from tiny_models import save_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.columns.token_columns import TextColumns
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import RowPlace, World, init_world, setup_logging
from mini_trainer.model.method import Full
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import ObjectiveSettings
from mini_trainer.objectives.teachers import Taught
from mini_trainer.options import DataOptions, TrainOptions
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.step import TrainState, train_step
from mini_trainer.run.teachers import OtherModel, add_scores
from mini_trainer.sampler import Batch, iterate_batches

NUM_ROWS, BATCH_SIZE, TOP_K = 32, 8, 32
NUM_ROUNDS, NUM_MEMORY_STEPS = 5, 2  # after a first step that is not counted; steps of a process that is watched
LEARNING_RATE = 1e-4
# The options of train.py, and the way to compare with.
WAYS: dict[str, tuple[dict, str | None]] = {
    "plain": ({}, None),
    "files, forward-kl": (dict(teacher_weight=0.5), "plain"),
    "files, forward-kl, T 2": (dict(teacher_weight=0.5, teacher_temperature=2.0, teacher_scores="at_2"), "plain"),
    "plain, LoRA": (dict(lora=True), None),
    "files, forward-kl, LoRA": (dict(lora=True, teacher_weight=0.5), "plain, LoRA"),
    "other model, forward-kl": (dict(teacher_weight=1.0, teacher_model="teacher"), "plain"),
    "TRL, other model, forward-kl": ({}, "other model, forward-kl"),
}
Step = Callable[[Batch], object]


def open_data(folder: Path) -> Mixture:
    data = Mixture([TokenizedData(folder / "data.arrow")])
    data.fit_to(2048, drop_overlong=False)
    return data


def make_objective(options: TrainOptions, data: Mixture) -> CausalLM:
    """The objective; a teacher's files become a column of the data."""
    if options.teacher.teacher_weight is None:
        return CausalLM()
    objective = Taught.make(ObjectiveSettings(teacher=options.teacher), TextFamily(), DataTask(), None)
    if (name := objective.teacher_scores) is None:
        return objective
    return objective.with_scores([file.sidecar for file in add_scores(data, name)])


def open_state(folder: Path, options: TrainOptions, objective: CausalLM, world: World) -> TrainState:
    method = LoRA(options.lora, seed=0) if options.lora.lora else Full()
    state = build_state(folder / "model", options, world, method=method)
    state.model.loss = objective.make_loss()
    name = options.teacher.teacher_model
    if name is not None:
        other = build(folder / name, options, world)
        state.model.row_model.teacher = OtherModel(other.requires_grad_(False).eval())
    return state


def open_ours(folder: Path, given: dict, *, world: World) -> tuple[Step, Iterator[Batch]]:
    data = open_data(folder)
    options = make_options(activation_checkpointing="none", compute_dtype="float32", **given)
    objective = make_objective(options, data)
    state = open_state(folder, options, objective, world)
    return lambda batch: train_step(state, batch, choose_step_options(options), lr=LEARNING_RATE), read_batches(
        data, objective
    )


def open_trl(folder: Path) -> tuple[Step, Iterator[Batch]]:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("model", "teacher")
    )
    optimizer, data = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE), open_data(folder)

    def step(batch: Batch) -> None:
        padded = pad_samples([data.read(row) for row in batch.sample_ids], torch.device("cpu"))
        labels = padded.pop("labels")[:, 1:]
        logits = student(**padded).logits[:, :-1]
        with torch.no_grad():
            theirs = teacher(**padded).logits[:, :-1]
        GKDTrainer.generalized_jsd_loss(logits, theirs, labels=labels, beta=0.0).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, read_batches(data, CausalLM())


def read_batches(data: Mixture, objective: CausalLM) -> Iterator[Batch]:
    order = DataOptions(data_path="", batch_size=BATCH_SIZE, max_tokens_per_gpu=2048, seed=0)
    return iterate_batches(
        data, order, objective=objective, num_steps=NUM_ROUNDS + 1, attention_cost=0.0, world=RowPlace()
    )


def open_ways(folder: Path, names: list[str]) -> list[tuple[Step, Iterator[Batch]]]:
    torch.set_num_threads(1)
    setup_logging("ERROR")
    world = init_world()
    return [
        open_trl(folder) if name.startswith("TRL") else open_ours(folder, WAYS[name][0], world=world) for name in names
    ]


def measure_seconds(folder: Path, names: list[str]) -> dict[str, list[float]]:
    """CPU seconds of the steps of each round, one of each way in turns."""
    ways, seconds = open_ways(folder, names), {name: [] for name in names}
    for _ in range(NUM_ROUNDS + 1):
        for name, (step, batches) in zip(names, ways, strict=True):
            batch = next(batches)
            seconds[name].append(time_call(lambda step=step, batch=batch: step(batch), torch.device("cpu")))
    return {name: of_way[1:] for name, of_way in seconds.items()}


def measure_memory(folder: Path, name: str) -> float:
    """GB at the peak of the first steps."""
    ((step, batches),) = open_ways(folder, [name])
    with watch_memory() as peak:
        for _ in range(NUM_MEMORY_STEPS):
            step(next(batches))
    return peak[0]


def prepare(folder: Path) -> None:
    """Writes both models, the rows, and the teacher's scores at temperatures 1 and 2."""
    folder.mkdir(parents=True)
    for seed, name in enumerate(("model", "teacher")):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).save_pretrained(folder / name)
        save_tokenizer(folder / name)
    sides = [side for seed in range(NUM_ROWS // 2) for side in make_sides(np.random.default_rng(seed))]
    rows = [{key: value for key, value in to_row([side]).items() if key != "sequence_lengths"} for side in sides]
    write_data(folder / "data.arrow", rows, TextColumns.schema, folder / "model", {})
    for name, temperature in (("teacher", 1.0), ("at_2", 2.0)):
        command = [sys.executable, "-m", "mini_trainer", "score-data", "--model-name-or-path", folder / "teacher",
                   "--data-path", folder / "data.arrow", "--name", name, "--temperature", temperature,
                   "--top-k", TOP_K, "--dtype", "float32"]  # fmt: skip
        subprocess.run(list(map(str, command)), check=True, capture_output=True)


def describe(seconds: dict[str, list[float]], memory: dict[str, float]) -> str:
    lines = [
        "OMP_NUM_THREADS=1 python benchmarks/teacher_cost.py --work-dir /tmp/teacher_cost",
        f"{describe_versions('torch', 'transformers', 'trl')}; {NUM_ROUNDS} rounds",
        "",
        "| | CPU seconds a step | memory, GB | compared with | seconds | memory |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, own in seconds.items():
        other = WAYS[name][1]
        ratios = " | "
        if other in seconds:
            rounds = [a / b for a, b in zip(own, seconds[other], strict=True)]
            ratios = f"{statistics.median(rounds):.2f} | {memory[name] / memory[other]:.2f}"
        lines.append(f"| {name} | {statistics.median(own):.2f} | {memory[name]:.2f} | {other or ''} | {ratios} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    if not args.work_dir.exists():
        prepare(args.work_dir)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        seconds = pool.submit(measure_seconds, args.work_dir, args.ways).result()
        print(seconds, flush=True)
        memory = {name: pool.submit(measure_memory, args.work_dir, name).result() for name in args.ways}
    text = describe(seconds, memory)
    print(text)
    if args.ways == list(WAYS):
        (paths.ROOT / "benchmarks/results/teacher_cost.txt").write_text(text)


if __name__ == "__main__":
    main()
