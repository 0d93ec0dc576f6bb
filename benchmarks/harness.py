"""What the benchmarks share: a model to train, batches to train it on, clocks, counts of bytes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from mini_trainer.data.chat.conversation import TokenizedChat, TrainedSpan
from mini_trainer.data.columns.base import IGNORED, PREFERENCE, Sample
from mini_trainer.data.columns.encoding import add_mismatched, pair_up
from mini_trainer.data.columns.token_columns import WEIGHTS_COLUMN, TextColumns
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.distributed.world import World
from mini_trainer.model.build import build_model
from mini_trainer.model.config import ModelSource, load_config
from mini_trainer.model.method import Full, Method
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.model.stored_tensors import StoredFiles
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import Objective, PackedModel, make_family, make_objective
from mini_trainer.options import TrainOptions, group_options, replace_options
from mini_trainer.run.start import choose_objective, choose_settings
from mini_trainer.run.step import TrainState
from mini_trainer.sampler import Batch


def make_options(**options: object) -> TrainOptions:
    """Options by name; in benchmarks that make their own model and batches those that name files stay empty."""
    return group_options(TrainOptions, **dict(model_name_or_path="", data_path="", output_dir="") | options)


def build(model_dir: str | Path, options: TrainOptions, world: World, *, method: Method | None = None) -> PackedModel:
    """The model at `model_dir` as train.py builds it; all of it trains if no method is given."""
    objective, method = CausalLM(), method or Full()
    plain = replace_options(options, compile=False, activation_checkpointing="none")
    method.study(lambda: build(model_dir, plain, world), objective=objective, world=world)
    return build_model(
        ModelSource(str(model_dir), load_config(str(model_dir), TextFamily())),
        options.compute,
        options.sharding,
        objective=objective,
        method=method,
        weights_dtype=getattr(torch, options.optimization.master_weights),
        world=world,
    )


def build_state(
    model_dir: str | Path, options: TrainOptions, world: World, *, method: Method | None = None
) -> TrainState:
    """The model as `build` makes it and its optimizer, for `run.step.train_step`."""
    method = method or Full()
    model = build(model_dir, options, world, method=method)
    return TrainState(model, method, build_optimizer(model, options.optimization, seed=options.data.seed), world)


def open_objective(
    options: TrainOptions, data: Mixture, model_dir: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Objective, ModelSource]:
    """What a run with these options learns from the data, and its model's config."""
    name, settings = choose_objective(options), choose_settings(options)
    family = make_family(name, settings)
    source = ModelSource(str(model_dir), load_config(str(model_dir), family))
    objective = make_objective(name, settings, family, data.task, data.count_labels)
    if tokenizer is not None:
        family = objective.family.complete(source.config, tokenizer, trust_remote_code=False)
        objective = replace(objective, family=family)
    return objective, source


def make_batch(rows: list[list[np.ndarray]], *, step: int = 0, world: World) -> Batch:
    """The batch of one step, with micro-batches of the token ids in `rows`, all trained, and as long on every rank."""
    micro_batches = [pack_sequences(row).to(world.device) for row in rows]
    lengths = np.array([len(ids) for row in rows for ids in row] * world.world_size)
    ids = np.arange(len(lengths))
    splits = np.cumsum([len(row) for row in rows])[:-1]
    columns = [np.split(part, splits) for part in np.split(ids, world.world_size)]
    table = [[list(column[k]) for column in columns] for k in range(len(rows))]
    num_loss_tokens = world.world_size * sum(map(count_targets, micro_batches))
    divisors = CausalLM().weigh(num_loss_tokens, int(lengths.sum()), ())
    return Batch(step, ids, lengths, num_loss_tokens, divisors, table, micro_batches, data=None)


def pack_sequences(sequences: Sequence[np.ndarray]) -> MicroBatch:
    """A micro-batch of sequences of token ids, all trained."""
    return CausalLM().pack([{"input_ids": ids, "labels": ids} for ids in sequences])


def pad_samples(samples: Sequence[Sample], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch of transformers, padded on the right: (samples, longest) each."""

    def pad(rows: list[np.ndarray], value: int) -> torch.Tensor:
        tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value).to(device)

    return {
        "input_ids": pad([sample["input_ids"] for sample in samples], 0),
        "labels": pad([sample["labels"] for sample in samples], IGNORED),
        "attention_mask": pad([np.ones_like(sample["input_ids"]) for sample in samples], 0),
    }


def count_targets(micro_batch: MicroBatch) -> int:
    return len(micro_batch.targets.index)


def write_random_data(path: Path, lengths: np.ndarray, *, shares: tuple[float, float] = (0.3, 0.85)) -> None:
    """A data set of random tokens; of each sample a share between `shares` is trained, as in question and answer."""
    random = np.random.default_rng(0)
    input_ids = [random.integers(3, 280, length) for length in lengths]
    firsts = [max(1, round(len(ids) * (1 - random.uniform(*shares)))) for ids in input_ids]
    labels = [np.where(np.arange(len(ids)) < k, IGNORED, ids) for ids, k in zip(input_ids, firsts, strict=True)]
    columns = {
        "input_ids": input_ids,
        "labels": labels,
        "len": lengths,
        "num_loss_counted_tokens": [np.count_nonzero(row[1:] != IGNORED) for row in labels],
        WEIGHTS_COLUMN: [None] * len(lengths),
    }
    table = pa.table(columns, schema=TextColumns.schema)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def read_clock(device: torch.device) -> float:
    """Seconds, after all that was started is done; on the CPU the process's own, which other work moves little."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.monotonic()
    return time.process_time()


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, by `read_clock`."""
    start = read_clock(device)
    function()
    return read_clock(device) - start


def count_state_bytes(state: TrainState) -> int:
    """This rank's bytes of weights, buffers, optimizer state, and gradients, as large as the weights that train."""
    params = list(state.model.parameters())
    tensors = [*params, *state.model.buffers(), *(param for param in params if param.requires_grad)]
    tensors += [value for of_param in state.optimizer.state.values() for value in of_param.values()]
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def read_status(key: str) -> float:
    """A line of /proc/self/status, in GB."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{key}:")) * 1024 / 1e9


@contextlib.contextmanager
def watch_memory() -> Iterator[list[float]]:
    """A list of one number: the peak of this process's own memory (RssAnon, GB) so far, sampled every 10 ms."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], read_status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield peak
    done.set()
    watcher.join()


def describe_versions(*packages: str) -> str:
    return ", ".join(f"{name} {find_version(name) or 'not installed'}" for name in packages)


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor in a model's files."""
    return {
        name: (tensor.dtype, tensor.shape, tensor.read().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in StoredFiles(directory).find().items()
    }


def make_random_answers(random: np.random.Generator, kind: str, length: int, *, vocab_size: int) -> TokenizedChat:
    """A random pair, or feedback with an unrelated answer: half of each sequence is a common prompt."""
    prompt = random.integers(3, vocab_size, length // 4).tolist()
    sides = []
    for num_tokens in (-(-length // 2), length // 2):
        answer = random.integers(3, vocab_size, num_tokens - len(prompt)).tolist()
        sides.append(TokenizedChat(prompt + answer, [TrainedSpan(len(prompt), num_tokens, "random")]))
    return pair_up(*sides) if kind == PREFERENCE else add_mismatched(*sides, is_good=bool(random.integers(2)))
