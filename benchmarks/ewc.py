"""Elastic weight consolidation (arXiv 1612.00796) on the tasks of examples/recipes/keeping.yaml, in a plain loop.

    python benchmarks/ewc.py examples/recipes/keeping.yaml --output-dir runs/forgetting/ewc --strengths 1e-2 1e-1 1e-0

The loss has strength / 2 x sum over sets and weights of F (w - w0)^2 more. The sets are those of --known, with the
start, and each earlier task's rows, with the model after it: w0 are its weights, F the mean over samples of the squared
gradient of a sample's mean loss, over all weights' mean, so that strengths of different sets are alike. Epochs, tokens
of batches, schedule and AdamW are the recipe's; the samples' order is another one. Everything else is `continual`.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import paths  # noqa: F401
import torch
import yaml
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mini_trainer.continual.experiment import run_experiments
from mini_trainer.continual.settings import read_settings
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.run.stages import Runner

NUM_FISHER_SAMPLES = 75
Rows = list[dict]
Weights = dict[str, torch.Tensor]


def read_rows(path: str) -> Rows:
    data = TokenizedData(path)
    return [data.read(i) for i in range(len(data.lengths))]


def load(path: str | Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def find_loss(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """Mean over the trained tokens of padded rows."""
    ids, labels = (
        pad_sequence([torch.tensor(row[key].astype("int64")) for row in rows], True, padding)
        for key, padding in (("input_ids", 0), ("labels", -100))
    )
    mask = pad_sequence([torch.ones(len(row["input_ids"])) for row in rows], True)
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def find_anchor(path: str | Path, rows: Rows) -> tuple[Weights, Weights]:
    """The weights of a model, and how much each matters to these rows."""
    model = load(path)
    fisher = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for row in random.Random(0).sample(rows, min(NUM_FISHER_SAMPLES, len(rows))):
        find_loss(model, [row]).backward()
        for name, weight in model.named_parameters():
            fisher[name].addcmul_(weight.grad, weight.grad)
        model.zero_grad()
    mean = sum(one.sum() for one in fisher.values()) / sum(one.numel() for one in fisher.values())
    return {name: weight.detach() for name, weight in model.named_parameters()}, {
        k: v / mean for k, v in fisher.items()
    }


def find_factor(step: int, num_steps: int, warmup_ratio: float) -> float:
    """The learning rate's factor: linear warmup, then cosine."""
    warmup = math.ceil(warmup_ratio * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))


def draw_batches(rows: Rows, options: dict) -> list[Rows]:
    """Batches of as many whole rows as --batch-tokens has room for, in another order at each epoch."""
    batches: list[Rows] = []
    room = 0
    for epoch in range(options["max_epochs"]):
        for row in random.Random(f"{options['seed']}, {epoch}").sample(rows, len(rows)):
            if len(row["input_ids"]) > room:
                batches.append([])
                room = options["batch_tokens"]
            batches[-1].append(row)
            room -= len(row["input_ids"])
    return batches


def train(options: dict, anchors: list[tuple[Weights, Weights]], *, strength: float) -> Iterator[dict]:
    """Yields each step's numbers, as our log has them; then writes the export."""
    batches = draw_batches(read_rows(options["data_path"][0]), options)
    torch.manual_seed(options["seed"])
    model, num_tokens = load(options["model_name_or_path"]), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: find_factor(step, len(batches), options["num_warmup_steps"])
    )
    for step, batch in enumerate(batches, start=1):
        start = time.monotonic()
        loss = find_loss(model, batch)
        loss.backward()
        for weights, fisher in anchors:
            for name, weight in model.named_parameters():
                weight.grad.addcmul_(fisher[name], weight.detach() - weights[name], value=strength)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        num_tokens += sum(len(row["input_ids"]) for row in batch)
        yield dict(
            step=step, loss=loss.item(), total_tokens_accumulated=num_tokens, time_per_batch=time.monotonic() - start
        )
    export = Path(options["output_dir"]) / "hf_format" / "latest"
    model.save_pretrained(export)
    AutoTokenizer.from_pretrained(options["model_name_or_path"]).save_pretrained(export)


class EWCRunner(Runner):
    """Runs `continual`'s stages, but trains here."""

    def __init__(self, root: Path, known: str):
        super().__init__(root, num_processes=1)
        self.known = known

    def start(self, words: list[str], log_file: Path) -> tuple[int, str]:
        if words[0] != "train":
            return super().start(words, log_file)
        options = yaml.safe_load(Path(words[2]).read_text())
        run = Path(options["output_dir"])  # ROOT/ewc_1e2/order_1_seed_42/2_tickets/run
        run.mkdir(parents=True, exist_ok=True)
        folders = [folder for folder in sorted(run.parents[1].glob("[1-9]_*")) if folder <= run.parent]
        tasks = [yaml.safe_load((folder / "train.yaml").read_text()) for folder in folders]
        sets = [(tasks[0]["model_name_or_path"], self.known)]  # then each earlier task's rows, and the model after it
        for folder, task in zip(folders[:-1], tasks, strict=False):
            sets.append((folder / "run" / "hf_format" / "latest", task["data_path"][0]))
        anchors = [find_anchor(path, read_rows(rows)) for path, rows in sets]
        strength = float(run.parents[2].name.rpartition("_")[2].replace("e", "e-"))
        with (run / "training_metrics_0.jsonl").open("w") as file:
            for metrics in train(options, anchors, strength=strength):
                print(json.dumps(metrics), file=file, flush=True)
        return 0, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--strengths", nargs="+", required=True)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--known", default="runs/forgetting/known.arrow")
    args = parser.parse_args()
    recipe = yaml.safe_load(Path(args.recipe).read_text())
    del recipe["methods"]
    recipe["train"]["learning_rate"], recipe["seeds"] = args.learning_rate, args.seeds
    for strength in args.strengths:
        folder = Path(args.output_dir).resolve() / f"ewc_{strength.replace('-', '')}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ewc.yaml").write_text(yaml.safe_dump({**recipe, "output_dir": str(folder)}, sort_keys=False))
        run_experiments(read_settings(folder / "ewc.yaml"), EWCRunner(folder, args.known))


if __name__ == "__main__":
    main()
