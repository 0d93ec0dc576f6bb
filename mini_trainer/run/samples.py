"""--sample-prompts: at each validation the model answers a few prompts, for people to read.

In: rows of the formats that generate.py reads. Out: samples_0.jsonl, a line for each prompt at each validation. Answers
are greedy, by the model as it is sharded, without a cache of keys and values. n unfinished sequences, V vocabulary
size.
"""

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mini_trainer.data.rows.prompts import encode_prompt, find_refusal, read_prompts
from mini_trainer.data.stores.disk import hash_json, written_aside
from mini_trainer.data.stores.json_lines import parse_sample
from mini_trainer.distributed.devices import run_eagerly
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, gather_on_rank0
from mini_trainer.model.config import list_stops
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.family import MicroBatch, Targets, pack_row
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options.reading import open_own, open_regular
from mini_trainer.run.export_check import read_outputs
from mini_trainer.run.file_names import SAMPLES_FILE
from mini_trainer.run.step import TrainState
from mini_trainer.run.training_log import Sink, write_line

NO_TARGETS = Targets(torch.empty(0, dtype=torch.long))
IDLE = np.zeros(2, dtype=np.int64)  # the row of a rank whose answers are complete, while others continue


@torch.no_grad()
@run_eagerly()  # in eval mode and without gradients the blocks would be compiled once more
def answer_greedily(
    model: PackedModel,
    prompts: Sequence[Sequence[int]],
    *,
    room: Sequence[int],
    stops: Collection[int],
    world: World,
    progress: Callable[[str], None],
) -> list[list[int]] | None:
    """Token ids of each prompt's answer, up to `room` of them, with the stop token; None on ranks other than 0.
    All ranks call this, and each answers its share. Leaves no trace in training: no random numbers, no gradients."""
    was_training = model.training
    model.eval()
    answers: dict[int, list[int]] = {i: [] for i in range(world.rank, len(prompts), world.world_size)}
    waiting = list(answers)
    while is_any(bool(waiting), world):
        progress(f"sample prompts, {len(waiting)} unfinished")
        row = pack_row([np.array([*prompts[i], *answers[i]]) for i in waiting] or [IDLE])
        logits = model.predict(MicroBatch(row, NO_TARGETS).to(world.device), read_outputs)  # (n, V)
        for i, token in zip(waiting, logits.argmax(-1).tolist(), strict=False):  # an idle row's is left out
            answers[i].append(token)
        waiting = [i for i in waiting if answers[i][-1] not in stops and len(answers[i]) < room[i]]
    reshard(model)
    model.train(was_training)
    parts = gather_on_rank0(world, answers)
    return None if parts is None else [parts[i % world.world_size][i] for i in range(len(prompts))]


def is_any(value: bool, world: World) -> bool:
    """Whether the value is true on any rank. All ranks call this."""
    flag = torch.tensor(int(value), device=world.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


FLAG = "--sample-prompts"
# They bound the cost: a forward pass over all prompts and answers for each new token.
MOST_PROMPTS, MOST_TOKENS, MOST_NEW_TOKENS = 16, 4096, 64
CHARS_SHOWN = 80  # of a prompt and of an answer, on the console


@dataclass(frozen=True)
class Samples:
    """The prompts, and the limits of their answers."""

    shown: tuple[str, ...]
    ids: tuple[list[int], ...]
    room: tuple[int, ...]  # most tokens of each answer
    stops: tuple[int, ...]  # tokens that end an answer
    tokenizer: PreTrainedTokenizerBase

    @property
    def digest(self) -> str:
        return hash_json([self.ids, self.room, self.stops])

    def answer(self, state: TrainState, step: int, *, progress: Callable[[str], None]) -> list[dict[str, Any]]:
        """The lines of samples_0.jsonl after `step`; none on ranks other than 0. All ranks call this."""
        found = answer_greedily(
            state.model, self.ids, room=self.room, stops=self.stops, world=state.world, progress=progress
        )
        return [
            {
                "step": step,
                "prompt": self.shown[i],
                "answer": self.tokenizer.decode(ids, skip_special_tokens=True),
                "finish_reason": "stop" if ids and ids[-1] in self.stops else "length",
                "num_tokens": len(ids),
            }
            for i, ids in enumerate(found or ())
        ]


def open_samples(
    path: str,
    config: PreTrainedConfig,
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    has_images: bool,
) -> Samples:
    """Reads the prompts of --sample-prompts for a model; ValueError for what it cannot answer."""
    if has_images:
        raise ValueError(f"{FLAG}: answers of models that train on images are not implemented: remove the option")
    prompts = read_prompts([path], None, flag=FLAG)
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(
            f"{FLAG} {path}: has {len(prompts):,} prompts, allowed: {MOST_PROMPTS}, all of which are answered at each"
            " validation: keep a few (generate.py answers any number with an export)"
        )
    ids = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    num_tokens = sum(map(len, ids))
    if num_tokens > MOST_TOKENS:
        raise ValueError(
            f"{FLAG} {path}: its {len(prompts)} prompts have {num_tokens:,} tokens together, allowed: {MOST_TOKENS:,}:"
            " shorten them, or keep fewer"
        )
    context = getattr(text_config(config), "max_position_embeddings", None)
    for prompt, own in zip(prompts, ids, strict=True):
        reason = find_refusal(len(own), context) if own else "has no tokens, so there is nothing to continue"
        if reason is not None:
            raise ValueError(f"{FLAG}: {prompt.place}: {reason}")
    return Samples(
        tuple(prompt.shown for prompt in prompts),
        tuple(ids),
        tuple(MOST_NEW_TOKENS if context is None else min(MOST_NEW_TOKENS, context - len(own)) for own in ids),
        tuple(list_stops(generation_config, tokenizer)),
        tokenizer,
    )


class SamplesFile(Sink):
    """Writes samples_0.jsonl, and the first answer to the console.
    A run that resumes after `first_step` steps keeps the lines until then; without an earlier validation, none."""

    def __init__(self, output_dir: Path, *, first_step: int, num_validations: int):
        self.path = output_dir / SAMPLES_FILE
        self.known = keep_lines(self.path, last_step=first_step if num_validations else -1)
        self.file = open_own(self.path, "a")

    def write_samples(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            # A resumed run with other validation data validates again after its last step.
            if (row["step"], row["prompt"]) not in self.known:
                write_line(row, self.file)
        first, num_others = rows[0], len(rows) - 1
        others = f"  (and {num_others} more in {SAMPLES_FILE})" if num_others else ""
        log.info(f"sample after step {first['step']}: {shorten(first['prompt'])} -> {shorten(first['answer'])}{others}")

    def flush_to_disk(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def keep_lines(path: Path, *, last_step: int) -> set[tuple[int, str]]:
    """Removes the lines after `last_step`, and damaged ones with a warning; returns step and prompt of the others."""
    if not path.exists():
        return set()
    with open_regular(path) as file:
        lines = file.readlines()
    rows = [parse_sample(line) for line in lines]
    kept = [i for i, row in enumerate(rows) if row is not None and row["step"] <= last_step]
    if damaged := sum(row is None and line.endswith(b"\n") for row, line in zip(rows, lines, strict=True)):
        log.warning(f"warning: {path}: damaged lines, which are removed: {damaged}")
    if len(kept) < len(lines):
        with written_aside(path) as (aside,):
            aside.write_bytes(b"".join(lines[i] for i in kept))
    return {(rows[i]["step"], rows[i]["prompt"]) for i in kept}


def shorten(text: str) -> str:
    """The text in quotes, on one line, and short."""
    text = " ".join(text.split())
    return json.dumps(text if len(text) <= CHARS_SHOWN else f"{text[: CHARS_SHOWN - 1]}…", ensure_ascii=False)
