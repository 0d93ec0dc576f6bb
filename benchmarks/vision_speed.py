"""Samples and images per second of training a model that sees: ours, packed, against TRL's SFTTrainer, padded.

    OMP_NUM_THREADS=1 nice python benchmarks/vision_speed.py

The same model (examples/quickstart/make_pictures.py's LLaVA, larger: an image is 36 tokens), the same rows (one picture
each, with one to four questions), the same batch size, AdamW and clipping, fp32, nothing frozen, one process. A round
is an epoch; rounds take turns, each begins with the other method, and the ratio is taken round by round. Seconds are
the process's own CPU seconds, which other work on the machine moves little; decoding and resizing images are among them
on both sides. TRL trains every token and ours what the assistant says: TRL computes logits for all tokens either way.
The share of waiting is in seconds that pass: the loader's thread shares one core with the step.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import paths
import torch.distributed as dist
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, TrainerCallback
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

ROOT = paths.ROOT
from harness import describe_versions, make_options, open_objective, read_clock
from make_pictures import TEMPLATE, ask_questions, choose_shapes, draw_picture, make_row, save_vision_model
from make_tiny_model import train_tokenizer

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import World, init_world, setup_logging
from mini_trainer.model.build import build_model
from mini_trainer.model.flops import count_flops
from mini_trainer.model.method import Full
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.options import group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.step import TrainState, train_step
from mini_trainer.sampler import iterate_batches, prefetch

LEARNING_RATE = 1e-4
ROLES = ("user", "assistant")
PATCH = 8  # pixels: an image is 6 x 6 tokens
Rows = list[tuple[str, list[tuple[str, str]]]]  # of each row its picture, and its questions with answers


def draw_rows(directory: Path, num_rows: int) -> Rows:
    rng, rows = random.Random(0), []
    for i in range(num_rows):
        shapes = choose_shapes(rng)
        draw_picture(shapes, rng).save(directory / f"{i}.png")
        rows.append((f"{i}.png", ask_questions(shapes, rng)[: rng.randint(1, 4)]))
    return rows


def prepare_model(directory: Path, rows: Rows, args: argparse.Namespace) -> str:
    texts = (f"{role}\n{text}" for _, pairs in rows for pair in pairs for role, text in zip(ROLES, pair, strict=True))
    tokenizer = train_tokenizer(texts, vocab_size=512, chat_template=TEMPLATE)
    save_vision_model(
        directory / "model", tokenizer, hidden_size=args.hidden_size, num_layers=args.num_layers, seed=0,
        patch_size=PATCH,
    )  # fmt: skip
    return str(directory / "model")


def tokenize(directory: Path, model_dir: str, rows: Rows) -> Path:
    (directory / "rows.jsonl").write_text("".join(json.dumps(make_row(name, pairs)) + "\n" for name, pairs in rows))
    given = dict(input_file=str(directory / "rows.jsonl"), output_file=str(directory / "rows.arrow"), images=True,
                 model_name_or_path=model_dir, num_proc=1, preview=0)  # fmt: skip
    process_data(group_options(ProcessDataOptions, **given))
    return directory / "rows.arrow"


def time_ours(model_dir: str, data_path: Path, args: argparse.Namespace, world: World) -> tuple[float, float]:
    """Seconds of an epoch, and the share of its steps that was spent waiting for the loader."""
    options = make_options(
        data_path=str(data_path), batch_size=args.batch_size, max_tokens_per_gpu=args.max_tokens_per_gpu,
        learning_rate=LEARNING_RATE, activation_checkpointing="none", compute_dtype="float32", freeze="nothing",
    )  # fmt: skip
    data = Mixture([TokenizedData(data_path)])
    objective, source = open_objective(options, data, model_dir, AutoTokenizer.from_pretrained(model_dir))
    model = build_model(
        source, options.compute, options.sharding, objective=objective, method=Full(),
        world=world,
    )  # fmt: skip
    state = TrainState(model, Full(), build_optimizer(model, options.optimization), world)
    batches = prefetch(iterate_batches(
        data, options.data, objective=objective, num_steps=args.num_rows // args.batch_size, world=world,
        attention_cost=count_flops(model.model).attention_cost,
    ))  # fmt: skip
    train_step(
        state, next(batches), choose_step_options(options), lr=LEARNING_RATE
    )  # the first batch is waited for whole
    waited, start, began = 0.0, read_clock(world.device), time.monotonic()
    while True:
        asked = time.monotonic()
        batch = next(batches, None)
        waited += time.monotonic() - asked
        if batch is None:
            break
        train_step(state, batch, choose_step_options(options), lr=LEARNING_RATE)
    num_timed = args.num_rows // args.batch_size - 1
    per_epoch = (num_timed + 1) / num_timed
    return (read_clock(world.device) - start) * per_epoch, waited / (time.monotonic() - began)


class Clock(TrainerCallback):
    """The clock after the first step and after the last."""

    def on_step_end(self, arguments: object, state: object, control: object, **kwargs: object) -> None:
        self.end = time.process_time()
        if state.global_step == 1:
            self.start = self.end


def time_trl(model_dir: str, directory: Path, rows: Rows, args: argparse.Namespace) -> float:
    """Seconds of an epoch."""
    from datasets import Dataset
    from PIL import Image
    from trl import SFTConfig, SFTTrainer

    chats = [
        [{"role": role, "content": text} for pair in pairs for role, text in zip(ROLES, pair, strict=True)]
        for _, pairs in rows
    ]
    images = [[Image.open(directory / name).convert("RGB")] for name, _ in rows]
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = SFTConfig(
            output_dir, per_device_train_batch_size=args.batch_size, num_train_epochs=1, use_cpu=True, bf16=False,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, max_length=None,
        )  # fmt: skip
        clock = Clock()
        trainer = SFTTrainer(
            AutoModelForImageTextToText.from_pretrained(model_dir), arguments, callbacks=[clock],
            processing_class=AutoProcessor.from_pretrained(model_dir),
            train_dataset=Dataset.from_dict({"messages": chats, "images": images}),
        )  # fmt: skip
        trainer.train()
    num_timed = args.num_rows // args.batch_size - 1
    return (clock.end - clock.start) * (num_timed + 1) / num_timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=4096)
    parser.add_argument("--num-rows", type=int, default=128, help="a multiple of the batch size")
    parser.add_argument("--num-rounds", type=int, default=3)
    args = parser.parse_args()
    setup_logging("ERROR")
    set_verbosity_error()
    disable_progress_bar()
    world = init_world()
    ours, theirs, shares = [], [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = draw_rows(directory, args.num_rows)
        model_dir = prepare_model(directory, rows, args)
        data = tokenize(directory, model_dir, rows)
        for i in range(args.num_rounds):
            for is_ours in (True, False) if i % 2 == 0 else (False, True):
                if is_ours:
                    seconds, share = time_ours(model_dir, data, args, world)
                    ours.append(seconds)
                    shares.append(share)
                else:
                    theirs.append(time_trl(model_dir, directory, rows, args))
    print(f"\n{describe_versions('torch', 'transformers', 'trl')}, 1 thread; {args.num_rounds} rounds of"
          f" {args.num_rows} rows with an image each in batches of {args.batch_size}\n")  # fmt: skip
    print("| method | CPU seconds a round | samples, and images, a second | rounds |\n|---|---|---|---|")
    for method, rounds in {"ours, packed": ours, "TRL, padded": theirs}.items():
        found = " ".join(f"{args.num_rows / one:.1f}" for one in rounds)
        median = statistics.median(rounds)
        print(f"| {method} | {median:.1f} | {args.num_rows / median:.1f} | {found} |")
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    print(f"\nTRL's seconds over ours, round by round: {' '.join(f'{ratio:.2f}' for ratio in ratios)};"
          f" median {statistics.median(ratios):.2f}")  # fmt: skip
    print(f"waiting for the loader, of the time that passes: {' '.join(f'{share:.2%}' for share in shares)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
