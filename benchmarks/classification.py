"""Samples per second of a classifier's training: ours, packed, against transformers.Trainer, padded and grouped.

    OMP_NUM_THREADS=1 nice python benchmarks/classification.py

The same model (a BERT of 3 layers of 256, random), the same data (texts of log-normal lengths, median 60 tokens, at
most 512), the same batch size, AdamW and clipping, fp32, one process. A round is an epoch, so that each method has
every text once; rounds take turns, and the table has the median.
Seconds are the process's own CPU seconds, which other work on the machine moves little: with one thread, the time that
passes on an idle machine. Trainer pads each batch to its longest text (padded), or draws texts of like lengths into a
batch (grouped), which makes other batches of them: the gradient is no longer that of a random batch.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paths  # noqa: F401
import pyarrow as pa
import torch
import torch.distributed as dist
from harness import describe_versions, make_options, open_objective, read_clock
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from mini_trainer.data.columns.label_columns import SequenceColumns
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import World, init_world, setup_logging
from mini_trainer.model.build import build_model
from mini_trainer.model.flops import count_flops
from mini_trainer.model.method import Full
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.step import TrainState, train_step
from mini_trainer.sampler import iterate_batches, prefetch

CONFIG = dict(vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4,
              max_position_embeddings=512, num_labels=4, hidden_dropout_prob=0.0,
              attention_probs_dropout_prob=0.0)  # fmt: skip
MEDIAN_TOKENS, MAX_TOKENS = 60, 512
LEARNING_RATE = 1e-4


def make_samples(num_samples: int) -> list[dict]:
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(np.log(MEDIAN_TOKENS), 0.9, num_samples)), 4, MAX_TOKENS).astype(int)
    return [
        dict(input_ids=random.integers(5, CONFIG["vocab_size"], length).tolist(), labels=int(random.integers(4)),
             length=int(length))
        for length in lengths
    ]  # fmt: skip


def write_data(samples: list[dict], path: Path) -> Path:
    columns = [
        [sample["input_ids"] for sample in samples], [[float(sample["labels"])] for sample in samples],
        [sample["length"] for sample in samples], [1] * len(samples), [None] * len(samples),
    ]  # fmt: skip
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SequenceColumns.schema, strict=True)]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SequenceColumns.schema) as writer:
        writer.write_table(pa.table(arrays, schema=SequenceColumns.schema))
    sidecar = dict(objective="sequence-classification", label_type="single", label_names=list("abcd"),
                   label_counts={}, num_loss_counted_tokens=len(samples))  # fmt: skip
    Path(f"{path}.meta.json").write_text(json.dumps(sidecar))
    return path


class Clock(TrainerCallback):
    """The clock before the first step and after the last."""

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self.start = read_clock(torch.device("cpu"))

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        self.end = read_clock(torch.device("cpu"))


def time_ours(model_dir: str, data_path: Path, args: argparse.Namespace, world: World) -> float:
    """Seconds of an epoch."""
    options = make_options(
        objective="sequence-classification", batch_size=args.batch_size, max_tokens_per_gpu=args.max_tokens_per_gpu,
        learning_rate=LEARNING_RATE, activation_checkpointing="none",
    )  # fmt: skip
    data = Mixture([TokenizedData(data_path)])
    objective, source = open_objective(options, data, model_dir)
    model = build_model(
        source, options.compute, options.sharding, objective=objective, method=Full(),
        world=world,
    )  # fmt: skip
    state = TrainState(model, Full(), build_optimizer(model, options.optimization), world)
    batches = iterate_batches(
        data, options.data, objective=objective, num_steps=args.num_samples // args.batch_size, world=world,
        attention_cost=count_flops(model.model).attention_cost,
    )  # fmt: skip
    start = read_clock(world.device)
    for batch in prefetch(batches):
        train_step(state, batch, choose_step_options(options), lr=LEARNING_RATE)
    return read_clock(world.device) - start


def time_trainer(model_dir: str, samples: list[dict], args: argparse.Namespace, strategy: str) -> float:
    """Seconds of an epoch."""

    def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample["input_ids"]) for sample in batch], True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(sample["input_ids"]) for sample in batch])[:, None]
        return dict(input_ids=ids, attention_mask=mask.long(), labels=torch.tensor([s["labels"] for s in batch]))

    with tempfile.TemporaryDirectory() as output_dir:
        arguments = TrainingArguments(
            output_dir, per_device_train_batch_size=args.batch_size, num_train_epochs=1, use_cpu=True,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, train_sampling_strategy=strategy,
        )  # fmt: skip
        model, clock = AutoModelForSequenceClassification.from_pretrained(model_dir), Clock()
        Trainer(model, arguments, data_collator=collate, train_dataset=samples, callbacks=[clock]).train()
    return clock.end - clock.start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=4096)
    parser.add_argument("--num-samples", type=int, default=512, help="a multiple of the batch size")
    parser.add_argument("--num-rounds", type=int, default=2)
    args = parser.parse_args()
    setup_logging("ERROR")
    set_verbosity_error()
    disable_progress_bar()
    world, samples = init_world(), make_samples(args.num_samples)
    methods: dict[str, Callable[[str, Path], float]] = {
        "ours, packed": lambda model_dir, data: time_ours(model_dir, data, args, world),
        "Trainer, padded": lambda model_dir, data: time_trainer(model_dir, samples, args, "random"),
        "Trainer, group_by_length": lambda model_dir, data: time_trainer(model_dir, samples, args, "group_by_length"),
    }
    rounds: dict[str, list[float]] = {name: [] for name in methods}
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(BertConfig(**CONFIG)).save_pretrained(f"{directory}/model")
        data = write_data(samples, Path(directory) / "data.arrow")
        for _ in range(args.num_rounds):
            for name, measure in methods.items():
                rounds[name].append(measure(f"{directory}/model", data))
    print(f"{describe_versions('torch', 'transformers')}, {torch.get_num_threads()} thread; {args.num_rounds} rounds of"
          f" {args.num_samples} texts in batches of {args.batch_size}\n")  # fmt: skip
    print("| method | CPU seconds a round | texts a second | rounds |\n|---|---|---|---|")
    for name, seconds in rounds.items():
        median = statistics.median(seconds)
        found = " ".join(f"{args.num_samples / one:.1f}" for one in seconds)
        print(f"| {name} | {median:.1f} | {args.num_samples / median:.1f} | {found} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
