"""How much of what it knows a model forgets while it learns: full fine-tuning, LoRA, OSFT of both kinds, and the start
as a teacher.

    OMP_NUM_THREADS=1 python benchmarks/continual_learning.py --output-dir runs/continual
    for seed in 0 1 2; do … --output-dir runs/seed_$seed --seed $seed; done
    … --summarize runs/seed_*

A small random model is trained on task A (continual_tasks.py, or `--task-a FILE` of chats), then on B with every method
and learning rate, then on C from there with some of them: the same batches for each. Losses are those on held-out
chats. Writes after each run what is known so far: results.json (what is there is not run again), results.md (tables),
and in the end front.png. `--summarize` gives mean and spread over runs of several seeds. Needs peft and matplotlib, of
the extra `dev`.
"""

import argparse
import io
import itertools
import json
import platform
import shutil
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

import paths
import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

ROOT = paths.ROOT
from continual_tasks import make_tasks
from harness import build, build_state, count_state_bytes, make_options, time_call
from make_tiny_model import save_tiny_model, train_tokenizer

from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import RowPlace, World, init_world, setup_logging
from mini_trainer.model.config import ModelSource, load_generation_config
from mini_trainer.model.method import Full
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.model.methods.osft_directions import prepare_statistics
from mini_trainer.model.methods.osft_subspaces import find_targets
from mini_trainer.model.optim.optimizers import build_optimizer, learning_rate_at
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import find_blocks
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import ObjectiveSettings, PackedModel
from mini_trainer.objectives.teachers import Taught
from mini_trainer.options import DataOptions, LoRAOptions, TrainOptions, group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.osft import OSFT
from mini_trainer.process_data import process_data
from mini_trainer.run.export import ExportParts, export_model
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.step import TrainState, train_step
from mini_trainer.run.teachers import OtherModel
from mini_trainer.sampler import Batch, iterate_batches

KL = dict(teacher_model="start", teacher_weight=0.5)  # --teacher-divergence forward-kl
METHODS: dict[str, dict] = {  # train.py's options, `only_linear` apart
    "full": {},
    "full linear": dict(only_linear=True),  # embeddings, norms, head frozen, as the others have them
    "LoRA 4": dict(lora_rank=4),
    "LoRA 32": dict(lora_rank=32),
    "OSFT weights 0.1": dict(osft_unfreeze_rank_ratio=0.1),
    "OSFT weights 0.25": dict(osft_unfreeze_rank_ratio=0.25),
    "OSFT weights 0.5": dict(osft_unfreeze_rank_ratio=0.5),
    "OSFT activations 0.25": dict(osft_unfreeze_rank_ratio=0.25, osft_basis="activations"),
    "OSFT activations 0.5": dict(osft_unfreeze_rank_ratio=0.5, osft_basis="activations"),
    "OSFT activations 0.75": dict(osft_unfreeze_rank_ratio=0.75, osft_basis="activations"),
    "OSFT activations 99 %": dict(osft_keep_energy=0.99, osft_basis="activations"),
    "kl 0.5": KL,
    "OSFT + kl": dict(osft_unfreeze_rank_ratio=0.5, osft_basis="activations") | KL,
}
LEARNING_RATES = {
    "full": ["1e-4", "3e-4", "1e-3", "3e-3", "3e-5"],
    "kl": ["1e-4", "3e-4", "1e-3", "3e-3", "3e-5"],
    "LoRA": ["1e-3", "3e-3", "1e-2", "3e-4", "1e-4"],
    "OSFT": ["1e-3", "3e-3", "1e-2"],
}
IN_SEQUENCE = ("full", "LoRA 32", "OSFT weights 0.25", "OSFT activations 0.5")  # A, B, C
MAX_TOKENS = 4096  # of a micro-batch
WARMUP = 0.1  # share of a run's steps


def prepare(args: argparse.Namespace, work: Path) -> None:
    """Writes the tokenized data of all tasks, and a random model whose tokenizer knows task A's text alone."""
    tasks = make_tasks(num_held_out=args.num_held_out, num_problems=args.num_problems)
    for task, file in (("a", args.task_a), ("b", args.task_b), ("c", args.task_c)):
        if file is not None:
            chats = read_chats(Path(file))
            tasks[task] = (chats[args.num_held_out :], chats[: args.num_held_out])
    texts = (message["content"] for chat in tasks["a"][0] for message in chat["messages"])
    tokenizer = train_tokenizer(texts, vocab_size=args.vocab_size)
    save_tiny_model(
        work / "random", tokenizer, hidden_size=args.hidden_size, num_layers=args.num_layers, seed=args.seed
    )
    for task, (trained, held_out) in tasks.items():
        for part, chats in (("train", trained), ("held_out", held_out)):
            write_tokenized(chats, data_path(work, task, part), work / "random")


def read_chats(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_tokenized(chats: list[dict], path: Path, model_dir: Path) -> None:
    """Writes chats, and beside them their tokenized data set to `path`."""
    source = path.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    options = group_options(
        ProcessDataOptions, input_file=(str(source),), output_file=str(path), model_name_or_path=str(model_dir),
        preview=0, num_proc=1,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()):
        process_data(options)


def data_path(work: Path, task: str, part: str) -> Path:
    return work / f"{task}_{part}.arrow"


def build_only_linear(model_dir: Path, options: TrainOptions, world: World) -> TrainState:
    """Full fine-tuning of the layers that the other methods train, and of nothing else."""
    model = build(model_dir, options, world).requires_grad_(False)
    for layer in find_targets(model.model, find_blocks(model.model), ()).values():
        layer.weight.requires_grad_(True)
    return TrainState(model, Full(), build_optimizer(model, options.optimization), world)


def save(state: TrainState, export_dir: Path, model_dir: Path) -> None:
    """Writes the model as an ordinary one."""
    generation_config = load_generation_config(str(model_dir), state.model.model.config)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    source = ModelSource(str(model_dir), state.model.model.config)
    parts = ExportParts(TextFamily(), state.method, generation_config, tokenizer, torch.float32, source)
    export_model(state.model, export_dir, parts, world=state.world)


def open_data(path: Path) -> Mixture:
    data = Mixture([TokenizedData(path)])
    data.fit_to(MAX_TOKENS, drop_overlong=True)
    return data


def data_options(*, batch_size: int, seed: int) -> DataOptions:
    return DataOptions(data_path="", batch_size=batch_size, max_tokens_per_gpu=MAX_TOKENS, seed=seed)


def read_batches(data: Mixture, options: DataOptions, *, objective: CausalLM, num_steps: int) -> Iterator[Batch]:
    return iterate_batches(
        data, options, objective=objective, num_steps=num_steps, attention_cost=0.0, world=RowPlace()
    )


@torch.no_grad()
def measure_loss(model: PackedModel, path: Path, objective: CausalLM) -> float:
    """Mean cross-entropy over the trained tokens of a data set."""
    data = open_data(path)
    options = data_options(batch_size=len(data.kept), seed=0)
    batch = next(read_batches(data, options, objective=objective, num_steps=1))
    return (
        sum(model.score(micro_batch).sums[0, 0].item() for micro_batch in batch.micro_batches) / batch.num_loss_tokens
    )


def gather(work: Path, model: str, task: str, file: Path) -> None:
    """Writes what `model` sees of a task's data, added to what the file holds unless it is there already."""
    world = init_worker.world
    prepare_statistics(
        file, open_data(data_path(work, task, "train")).sources[0], data_options(batch_size=1, seed=0),
        build_plain=lambda: build(work / model, make_options(activation_checkpointing="none"), world),
        family=TextFamily(), world=world,
    )  # fmt: skip


def split_teacher(method: dict) -> tuple[dict, dict]:
    """A method's options of the teacher, and its others."""
    teacher = {name: value for name, value in method.items() if name.startswith("teacher_")}
    return teacher, {name: value for name, value in method.items() if name not in teacher}


def add_teacher(state: TrainState, options: TrainOptions, model_dir: Path) -> CausalLM:
    """Adds the start as a teacher, if the options name one; returns the objective."""
    if options.teacher.teacher_model is None:
        return CausalLM()
    objective = Taught.make(ObjectiveSettings(teacher=options.teacher), TextFamily(), DataTask(), None)
    start = build(model_dir, options, state.world).requires_grad_(False).eval()
    state.model.loss, state.model.row_model.teacher = objective.make_loss(), OtherModel(start)
    return objective


def apply_method(
    work: Path, start: str, task: str, *, name: str, method: dict, common: dict
) -> tuple[TrainState, TrainOptions]:
    """The export `start`, ready to be trained with a method on a task, in a run called `name`; and all its options.

    `common` are those that do not depend on the method.
    """
    world, model_dir = init_worker.world, work / start
    options = make_options(**common)
    if "lora_rank" in method:
        lora = LoRA(LoRAOptions(lora=True, lora_export="merged", **method), seed=options.data.seed)
        return build_state(model_dir, options, world, method=lora), options
    if "only_linear" in method:
        return build_only_linear(model_dir, options, world), options
    if not method:
        return build_state(model_dir, options, world), options
    given = dict(osft=True, osft_cache_dir=str(work / "cache")) | method
    if method.get("osft_basis") == "activations":
        file = work / "a.statistics.safetensors"  # gathered already
        if task == "c":
            file = shutil.copy(file, work / f"{name}.statistics.safetensors")
            gather(work, start, "b", Path(file))
        given["osft_statistics"] = str(file)
    options = make_options(**common, **given)
    return build_state(model_dir, options, world, method=OSFT(options.osft)), options


def run(
    work: Path, start: str, task: str, name: str, *, method: dict, lr: float, num_steps: int, batch_size: int,
) -> dict[str, float]:  # fmt: skip
    """Trains the export `start` on `task`, exports it as `name`, and returns losses, CPU seconds a step, and bytes."""
    teacher, own = split_teacher(method)
    common = teacher | dict(
        activation_checkpointing="none",
        learning_rate=lr,
        lr_scheduler="cosine",
        num_warmup_steps=int(WARMUP * num_steps),
    )
    state, options = apply_method(work, start, task, name=name, method=own, common=common)
    objective, seconds = add_teacher(state, options, work / start), []
    data, order = open_data(data_path(work, task, "train")), data_options(batch_size=batch_size, seed=1)
    for batch in read_batches(data, order, objective=objective, num_steps=num_steps):
        lr = learning_rate_at(batch.step, options.optimization, num_steps=num_steps)
        seconds.append(
            time_call(
                lambda batch=batch, lr=lr: train_step(state, batch, choose_step_options(options), lr=lr),
                torch.device("cpu"),
            )
        )
    save(state, work / name, work / start)  # before FSDP gathers the weights for another forward pass
    state.model.eval()
    losses = {key: measure_loss(state.model, data_path(work, key, "held_out"), objective) for key in "abc"}
    return losses | dict(seconds=sorted(seconds)[len(seconds) // 2], bytes=count_state_bytes(state))


def init_worker() -> None:
    torch.set_num_threads(1)
    setup_logging("ERROR")
    disable_progress_bar()
    init_worker.world = init_world()


def find_front(points: dict[str, tuple[float, float]]) -> set[str]:
    """Those that no other point beats on both axes."""
    return {
        name for name, (a, b) in points.items()
        if not any(x <= a and y <= b and (x, y) != (a, b) for x, y in points.values())
    }  # fmt: skip


def loss_at(points: list[tuple[float, float]], most: float) -> float:
    """The least loss on the new task at a loss of at most `most` on the old one.

    `points` (old, new) are a method's runs from no learning on, joined by straight lines.
    """
    least = min(b for a, b in points if a <= most)
    for (a, b), (next_a, next_b) in itertools.pairwise(points):
        if (a <= most) != (next_a <= most):
            least = min(least, b + (next_b - b) * (most - a) / (next_a - a))
    return least


def read_runs(results: dict[str, dict]) -> dict[tuple[str, str], dict]:
    """The runs on B, by method and learning rate."""
    return {tuple(name.split(" @ ")): r for name, r in results.items() if name.count(" @ ") == 1}


def read_points(results: dict[str, dict]) -> dict[tuple[str, str], tuple[float, float]]:
    """Their losses on A and B."""
    return {name: (r["a"], r["b"]) for name, r in read_runs(results).items()}


def losses_at(results: dict[str, dict], method: str, levels: list[float]) -> list[float]:
    """A method's least loss on B at each level of forgetting; none where it has no runs."""
    own = sorted((float(lr), point) for (m, lr), point in read_points(results).items() if m == method)
    if not own:
        return []
    start = (results["a"]["a"], results["a"]["b"])
    return [loss_at([start, *(point for _, point in own)], start[0] + level) for level in levels]


def write_report(results: dict[str, dict], args: argparse.Namespace, path: Path) -> None:
    start = results["a"]
    runs, points = read_runs(results), read_points(results)
    lines = [f"Before task B: {start['a']:.3f} on A, {start['b']:.3f} on B.", ""]
    lines += ["| method | learning rate | A | B | on its front |", "|---|---|---|---|---|"]
    fronts = find_front(points)
    for (method, lr), r in sorted(runs.items(), key=lambda item: (list(METHODS).index(item[0][0]), float(item[0][1]))):
        lines.append(f"| {method} | {lr} | {r['a']:.3f} | {r['b']:.3f} | {'yes' if (method, lr) in fronts else ''} |")
    levels = [float(level) for level in args.levels]
    lines += ["", "Loss on B at no more forgetting (loss on A, less that before B) than:", ""]
    lines += ["| method | " + " | ".join(map(str, levels)) + " |", "|---" * (len(levels) + 1) + "|"]
    for method in METHODS:
        losses = losses_at(results, method, levels)
        if losses:
            lines.append(f"| {method} | " + " | ".join(f"{loss:.3f}" for loss in losses) + " |")
    lines += ["", "| method | CPU seconds a step | weights, gradients, optimizer |", "|---|---|---|"]
    for method in METHODS:
        own = [r for (m, _), r in runs.items() if m == method]
        if own:
            seconds = sorted(r["seconds"] for r in own)[len(own) // 2]
            lines.append(f"| {method} | {seconds:.3f} | {own[0]['bytes'] / 1e6:.1f} MB |")
    of_three = {name: r for name, r in results.items() if name.count(" @ ") == 2}
    if of_three:
        lines += ["", "After A, B and C in sequence:", ""]
        lines += ["| method | learning rate | A | B | C | mean |", "|---|---|---|---|---|---|"]
        for method, lr in sorted(
            (name.split(" @ ")[:2] for name in of_three), key=lambda key: (list(METHODS).index(key[0]), float(key[1]))
        ):
            r = of_three[f"{method} @ {lr} @ c"]
            mean = (r["a"] + r["b"] + r["c"]) / 3
            lines.append(f"| {method} | {lr} | {r['a']:.3f} | {r['b']:.3f} | {r['c']:.3f} | {mean:.3f} |")
    path.write_text("\n".join(lines) + "\n")


def summarize(runs: list[dict[str, dict]], levels: list[float]) -> str:
    """A table over runs of several seeds: loss on B at each level of forgetting, mean and standard deviation.

    And in how many of the runs one of the method's learning rates is on the front of all methods.
    """
    lines = [f"{len(runs)} seeds; loss on B at no more forgetting than, mean and standard deviation:", ""]
    lines += ["| method | " + " | ".join(map(str, levels)) + " | on the front |", "|---" * (len(levels) + 2) + "|"]
    fronts = [find_front(read_points(results)) for results in runs]
    for method in METHODS:
        losses = [losses_at(results, method, levels) for results in runs]
        if not all(losses):
            continue
        columns = [
            f"{statistics.mean(of_level):.3f} ± {statistics.stdev(of_level):.3f}"
            for of_level in zip(*losses, strict=True)
        ]
        count = sum(any(name == method for name, _ in front) for front in fronts)
        lines.append(f"| {method} | {' | '.join(columns)} | {count} of {len(runs)} |")
    return "\n".join(lines)


def plot(results: dict[str, dict], path: Path) -> None:
    """Every run as a point, the points of a method joined in the order of its learning rates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    styles = {
        "full": ("black", "o"), "LoRA": ("tab:orange", "s"), "OSFT weights": ("tab:blue", "^"),
        "OSFT activations": ("tab:green", "D"), "kl": ("tab:red", "v"), "OSFT + kl": ("tab:olive", "X"),
    }  # fmt: skip
    for kind, (color, marker) in styles.items():
        for method, line in zip([m for m in METHODS if m.startswith(kind)], ("-", "--", ":", "-."), strict=False):
            names = [name for name in results if name.startswith(f"{method} @ ") and name.count(" @ ") == 1]
            runs = [results[name] for name in sorted(names, key=lambda name: float(name.split(" @ ")[1]))]
            if runs:
                axes.plot([r["b"] for r in runs], [r["a"] for r in runs], line, color=color, marker=marker,
                          markersize=5, label=method)  # fmt: skip
    axes.axhline(results["a"]["a"], color="grey", linewidth=0.8)
    axes.set(xlabel="loss on the new task B", ylabel="loss on the old task A (grey: before B)")
    axes.legend(fontsize=8, handlelength=4)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output-dir")
    parser.add_argument("--summarize", nargs="+", help="output directories of runs with different seeds")
    for task in "abc":
        parser.add_argument(f"--task-{task}", help="chats (messages JSONL) in place of the project's own task")
    parser.add_argument("--num-held-out", type=int, default=96)
    parser.add_argument("--num-problems", type=int, default=4000, help="chats of the project's own tasks B and C")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-a", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60, help="on B, and on C")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--learning-rates", nargs="+", help="of all methods, in place of each one's own")
    parser.add_argument("--levels", nargs="+", default=["0.02", "0.05", "0.1", "0.2", "0.5"], help="of forgetting")
    parser.add_argument("--without-c", action="store_true", help="leave out the third task")
    parser.add_argument("--num-workers", type=int, default=2)
    args = parser.parse_args()
    if args.summarize is not None:
        runs = [json.loads((Path(directory) / "results.json").read_text()) for directory in args.summarize]
        return print(summarize(runs, [float(level) for level in args.levels]))
    if args.output_dir is None:
        parser.error("--output-dir is needed")
    work = Path(args.output_dir).absolute()
    work.mkdir(parents=True, exist_ok=True)
    results_file = work / "results.json"
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    if not results:
        prepare(args, work)

    def keep(name: str, result: dict[str, float]) -> None:
        results[name] = result
        results_file.write_text(json.dumps(results, indent=1) + "\n")
        print(name, {key: round(value, 3) for key, value in result.items()}, flush=True)
        write_report(results, args, work / "results.md")

    def rates_of(method: str) -> list[str]:
        return args.learning_rates or LEARNING_RATES[method.split()[0]]

    common = dict(num_steps=args.steps, batch_size=args.batch_size)
    with ProcessPoolExecutor(args.num_workers, get_context("spawn"), init_worker) as pool:
        if "a" not in results:
            of_a = common | dict(num_steps=args.steps_a)
            keep("a", pool.submit(run, work, "random", "a", "a", method={}, lr=3e-3, **of_a).result())
        pool.submit(gather, work, "a", "a", work / "a.statistics.safetensors").result()
        waiting = {}
        rounds = itertools.zip_longest(*([f"{method} @ {lr}" for lr in rates_of(method)] for method in args.methods))
        for name in filter(None, itertools.chain(*rounds)):
            if name not in results:
                method, lr = name.split(" @ ")
                waiting[pool.submit(
                    run, work, "a", "b", name, method=METHODS[method], lr=float(lr), **common
                )] = name  # fmt: skip
        for done in as_completed(waiting):
            keep(waiting[done], done.result())
        waiting = {}
        in_sequence = () if args.without_c else IN_SEQUENCE
        for name in (f"{method} @ {lr} @ c" for method in in_sequence for lr in rates_of(method)):
            method, lr, _ = name.split(" @ ")
            if name not in results and method in args.methods:
                waiting[pool.submit(
                    run, work, f"{method} @ {lr}", "c", name, method=METHODS[method], lr=float(lr),
                    **common,
                )] = name  # fmt: skip
        for done in as_completed(waiting):
            keep(waiting[done], done.result())
    plot(results, work / "front.png")
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}: see {work}")


if __name__ == "__main__":
    main()
