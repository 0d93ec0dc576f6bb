"""Which optimizers are worth having: the held-out loss that each reaches at its best learning rate.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py --chats gsm8k_train_messages.jsonl --output-dir runs/optimizers

Two tasks. `quickstart`: the quickstart's chats from random weights, its batch size and epochs. `chats`: one epoch over
`--num-chats` of the chats in a file, starting from a base that is pretrained here by AdamW on `--num-documents` pieces
of Python's standard library. The same batches for all, fp32, weight decay 0, clipping at 1, 10 % warm-up, then
cosine (schedule-free: constant). Learning rates are a factor of about 3 apart, and go on until the best is not at an
edge; the best is then run with `--num-seeds` orders of the data.

adamw, adamw8bit and muon are train.py's. The others run on one rank only: Adafactor is torch's, schedule-free AdamW the
package schedulefree's (`pip install schedulefree`), Lion (arXiv 2302.06675) and C-AdamW, cautious AdamW (arXiv
2411.16085), are written here. Writes results.json after each run (what is there is not run again), and results.md.
"""

import argparse
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart")]
from continual_learning import (
    data_options,
    init_worker,
    measure_loss,
    open_data,
    read_batches,
    read_chats,
    save,
    write_tokenized,
)
from harness import build_state, make_options
from make_data import make_chats
from make_tiny_model import save_tiny_model, train_tokenizer

from lifecycle.step import TrainState, train_step
from objectives.next_tokens import CausalLM
from optim.schedules import learning_rate_at

PIECE = 4000  # characters of a document
BETAS, LION_BETAS = (0.9, 0.95), (0.9, 0.99)
LADDER = [scale * 10.0**power for power in range(-6, 0) for scale in (1, 3)]


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation between momentum and gradient (arXiv 2302.06675, algorithm 2)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.sub_(group["lr"] * momentum.lerp(param.grad, 1 - LION_BETAS[0]).sign_())
                momentum.lerp_(param.grad, 1 - LION_BETAS[1])


class CautiousAdamW(torch.optim.Optimizer):
    """AdamW that leaves out what would go against the gradient's sign, and scales up the rest (arXiv 2411.16085)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state, grad = self.state[param], param.grad
                step = state["step"] = state.get("step", 0) + 1
                first = state.setdefault("first", torch.zeros_like(param)).lerp_(grad, 1 - BETAS[0])
                second = state.setdefault("second", torch.zeros_like(param)).lerp_(grad.square(), 1 - BETAS[1])
                root = (second / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
                mask = (first * grad > 0).to(grad.dtype)
                mask.div_(mask.mean().clamp_min_(1e-3))
                param.sub_(group["lr"] / (1 - BETAS[0] ** step) * mask * first / root)


def make_schedule_free(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(groups, betas=BETAS)
    optimizer.train()
    return optimizer


class OnOneRank:
    """An optimizer of plain tensors in the place of one of sharded parameters, all of which are on this rank."""

    def __init__(self, params: Iterable[torch.nn.Parameter], make: Callable[[list[dict[str, Any]]], Any]):
        self.params = [param for param in params if param.requires_grad]
        self.local = [torch.nn.Parameter(param.detach().to_local()) for param in self.params]
        self.inner = make([{"params": self.local, "lr": 0.0, "weight_decay": 0.0, "rate": 1.0}])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self) -> None:
        for param, local in zip(self.params, self.local, strict=True):
            local.grad = param.grad.to_local()
        self.inner.step()

    def zero_grad(self) -> None:
        for param, local in zip(self.params, self.local, strict=True):
            param.grad = local.grad = None


@dataclass(frozen=True)
class Optimizer:
    """One row of the table."""

    first: float  # learning rate, with its neighbours on the ladder tried first
    make: Callable[[list[dict[str, Any]]], Any] | None = None  # None: train.py's own, by its name
    scheduler: str = "cosine"


OPTIMIZERS = {
    "adamw": Optimizer(1e-3),
    "adamw8bit": Optimizer(1e-3),
    "muon": Optimizer(1e-3),
    "adafactor": Optimizer(3e-2, torch.optim.Adafactor),
    "lion": Optimizer(1e-4, lambda groups: Lion(groups, {})),
    "schedule-free adamw": Optimizer(3e-3, make_schedule_free, "constant_with_warmup"),
    "c-adamw": Optimizer(1e-3, lambda groups: CautiousAdamW(groups, {})),
}


@dataclass(frozen=True)
class Task:
    """A model to start from, data to train on, and chats held out of it."""

    model: Path
    train: Path
    held_out: Path
    batch_size: int
    num_steps: int


def train(task: Task, name: str, *, lr: float, seed: int) -> tuple[TrainState, dict[str, float]]:
    """Trains with an optimizer; returns the model and what is known of the run."""
    chosen = OPTIMIZERS[name]
    options = make_options(
        activation_checkpointing="none",
        optimizer=name if chosen.make is None else "adamw",
        learning_rate=lr,
        lr_scheduler=chosen.scheduler,
        num_warmup_steps=task.num_steps // 10,
    )
    state = build_state(task.model, options, init_worker.world)
    if chosen.make is not None:
        state = replace(state, optimizer=OnOneRank(state.model.parameters(), chosen.make))
    update, seconds = state.optimizer.step, []

    def timed_update() -> None:
        start = time.process_time()
        update()
        seconds.append(time.process_time() - start)

    state.optimizer.step = timed_update
    data, order = open_data(task.train), data_options(batch_size=task.batch_size, seed=seed)
    for batch in read_batches(data, order, objective=CausalLM(), num_steps=task.num_steps):
        train_step(
            state, batch, options, lr=learning_rate_at(batch.step, options.optimization, num_steps=task.num_steps)
        )
    bytes_of_weights = sum(param.numel() * 4 for param in state.model.parameters() if param.requires_grad)
    facts = dict(update=statistics.median(seconds), state=count_state(state) / bytes_of_weights * 4)
    if chosen.scheduler != "cosine":
        state.optimizer.inner.eval()  # from the weights where gradients are taken to their average
    state.model.eval()
    return state, facts | dict(loss=measure_loss(state.model, task.held_out, CausalLM()))


def count_state(state: TrainState) -> int:
    """Bytes of optimizer state."""
    tensors = [value for own in state.optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)


def list_documents(count: int) -> list[dict]:
    """Pieces of source files of the standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(file.relative_to(root).parts)
    ]
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    pieces = [text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE)]
    random.Random(0).shuffle(pieces)
    return [{"messages": [{"role": "pretrain", "content": piece}]} for piece in pieces[:count] if piece.strip()]


def make_tasks(args: argparse.Namespace, work: Path) -> dict[str, Task]:
    """Writes models and data; trains the base if it is not there."""
    trained, held_out = make_chats(random.Random(0))
    start = write_model(work / "quickstart", trained, vocab_size=1024, hidden_size=128)
    tasks = {"quickstart": write_task(start, trained, held_out, batch_size=32, num_epochs=30)}
    if args.chats is None:
        return tasks
    chats = read_chats(args.chats)
    held_out, trained = chats[: args.num_held_out], chats[args.num_held_out :][: args.num_chats]
    documents, base = list_documents(args.num_documents), work / "pretrained"
    start = write_model(
        work / "random", [*documents, *trained], vocab_size=args.vocab_size, hidden_size=args.hidden_size
    )
    pretraining = write_task(start, documents, held_out, batch_size=16, num_epochs=1)
    if not base.exists():
        began = time.process_time()
        state, facts = train(pretraining, "adamw", lr=1e-3, seed=0)
        save(state, base, start)
        seconds = time.process_time() - began
        print(f"base: {len(documents)} documents, {seconds / 3600:.2f} CPU hours; the chats' loss {facts['loss']:.3f}")
    tasks["chats"] = write_task(base, trained, held_out, batch_size=16, num_epochs=1)
    return tasks


def write_model(path: Path, texts: list[dict], *, vocab_size: int, hidden_size: int) -> Path:
    """Writes a random model, with a tokenizer of its own for the texts of these chats, unless it is there."""
    if not path.exists():
        contents = (message["content"] for chat in texts for message in chat["messages"])
        tokenizer = train_tokenizer(contents, vocab_size=vocab_size)
        save_tiny_model(path, tokenizer, hidden_size=hidden_size, num_layers=4, seed=0)
    return path


def write_task(model: Path, trained: list[dict], held_out: list[dict], *, batch_size: int, num_epochs: int) -> Task:
    """Tokenizes chats for a model, and names the files after it."""
    train, rest = (model.with_name(f"{model.name}_{part}.arrow") for part in ("train", "held_out"))
    write_tokenized(trained, train, model)
    write_tokenized(held_out, rest, model)
    return Task(model, train, rest, batch_size, len(open_data(train).kept) * num_epochs // batch_size)


def search(name: str, run: Callable[[float, int], dict], *, num_seeds: int) -> None:
    """Runs the rates around the first and more while the best is at an edge; then the best with the other seeds."""
    first = min(range(len(LADDER)), key=lambda i: abs(LADDER[i] / OPTIMIZERS[name].first - 1))
    tried = {i: run(LADDER[i], 0)["loss"] for i in (first - 1, first, first + 1)}
    while (best := min(tried, key=tried.get)) in (min(tried), max(tried)):
        i = best + (1 if best == max(tried) else -1)
        if i not in range(len(LADDER)):
            break
        tried[i] = run(LADDER[i], 0)["loss"]
    for seed in range(1, num_seeds):
        run(LADDER[best], seed)


def write_tables(results: dict[str, dict], path: Path) -> str:
    """A table for each task: the best learning rate's losses over seeds, and those of the rates beside it."""
    lines: list[str] = []
    for task in dict.fromkeys(run["task"] for run in results.values()):
        runs = [run for run in results.values() if run["task"] == task]
        update = statistics.median(run["update"] for run in runs if run["optimizer"] == "adamw")
        lines += [f"## {task}: {runs[0]['num_steps']} steps", ""]
        heads = ["optimizer", "learning rate", "held-out loss, mean (by seed)", "a factor of 3 less, more"]
        heads += ["bytes of state a weight", "CPU time of an update, AdamW's = 1"]
        lines += [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
        for name in OPTIMIZERS:
            own = {(run["lr"], run["seed"]): run for run in runs if run["optimizer"] == name}
            if not own:
                continue
            rates = sorted({lr for lr, seed in own if seed == 0})
            best = min(rates, key=lambda lr: own[lr, 0]["loss"])
            losses = [run["loss"] for (lr, _), run in sorted(own.items()) if lr == best]
            beside = [own[lr, 0]["loss"] for lr in rates if lr != best and 0.2 < lr / best < 5]
            spread = f"{statistics.mean(losses):.3f} ({', '.join(f'{loss:.3f}' for loss in losses)})"
            sides = ", ".join(f"{loss:.3f}" for loss in beside)
            cost = statistics.median(run["update"] for run in own.values()) / update
            lines.append(f"| {name} | {best:.0e} | {spread} | {sides} | {own[best, 0]['state']:.2f} | {cost:.1f} |")
        lines.append("")
    path.write_text("\n".join(lines))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--chats", type=Path, help="messages JSONL; without, only the quickstart's chats")
    parser.add_argument("--num-chats", type=int, default=2000)
    parser.add_argument("--num-held-out", type=int, default=200)
    parser.add_argument("--num-documents", type=int, default=4000)
    parser.add_argument("--num-seeds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    args = parser.parse_args()
    init_worker()
    work = Path(args.output_dir)
    work.mkdir(parents=True, exist_ok=True)
    tasks = make_tasks(args, work)
    file = work / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for task_name, task in tasks.items():
        for name in args.optimizers:

            def run(lr: float, seed: int, *, task_name: str = task_name, task: Task = task, name: str = name) -> dict:
                key = f"{task_name} {name} {lr:.0e} {seed}"
                if key not in results:
                    _, facts = train(task, name, lr=lr, seed=seed)
                    about = dict(task=task_name, optimizer=name, lr=lr, seed=seed, num_steps=task.num_steps)
                    results[key] = about | facts
                    file.write_text(json.dumps(results, indent=1))
                    print(key, facts, flush=True)
                return results[key]

            search(name, run, num_seeds=args.num_seeds)
    print(write_tables(results, work / "results.md"))


if __name__ == "__main__":
    main()
