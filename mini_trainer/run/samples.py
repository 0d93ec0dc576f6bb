"""The model answers a few prompts before training, at each validation and at the end, for people to read.

In: the rows of --sample-prompts; in a run that chooses its own values, else, two questions of its data. Out:
samples_0.jsonl, a line for each prompt each time. Answers are greedy, by the model as it is sharded, without a cache of
keys and values. n unfinished sequences, V vocabulary size.
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

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.prompts import Prompt, encode_prompt, find_refusal, read_prompts, render_prompt
from mini_trainer.data.stores.disk import hash_json, written_aside
from mini_trainer.data.stores.json_lines import parse_sample
from mini_trainer.data.tokenized.mixture import Mixture
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
NUM_QUESTIONS, NUM_SEEN = 2, 100  # of the data, and the samples among which they are looked for
CHARS_SHOWN = 80  # of a prompt and of an answer, on the console


@dataclass(frozen=True)
class Samples:
    """The prompts, and the limits of their answers."""

    kind: str  # what they are, for people
    shown: tuple[str, ...]
    references: tuple[str | None, ...]  # the right answers, as far as they are known
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
                **({} if self.references[i] is None else {"reference": self.references[i]}),
                "answer": self.tokenizer.decode(ids, skip_special_tokens=True),
                "finish_reason": "stop" if ids and ids[-1] in self.stops else "length",
                "num_tokens": len(ids),
            }
            for i, ids in enumerate(found or ())
        ]


def open_samples(
    path: str | None,
    config: PreTrainedConfig,
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: Mixture,
    held_out: Mixture | None,
) -> Samples | None:
    """The prompts of --sample-prompts; without a path, questions of the run's data, None if it has none. ValueError for
    prompts that the model cannot answer."""
    context = getattr(text_config(config), "max_position_embeddings", None)
    kind, asked = FLAG, []
    if path is not None:
        if data.has_images:
            raise ValueError(f"{FLAG}: answers of models that train on images are not implemented: remove the option")
        asked = read_given(path, tokenizer, context)
    elif not data.has_images:
        kind = f"two {'trained' if held_out is None else 'held-out'} questions"
        asked = cut_questions(held_out or data, tokenizer, context)
    if not asked:
        return None
    shown, ids, references = zip(*asked, strict=True)
    room = tuple(MOST_NEW_TOKENS if context is None else min(MOST_NEW_TOKENS, context - len(own)) for own in ids)
    return Samples(kind, shown, references, ids, room, tuple(list_stops(generation_config, tokenizer)), tokenizer)


Asked = list[tuple[str, list[int], str | None]]  # a prompt as shown, its token ids, and the right answer if it is known


def read_given(path: str, tokenizer: PreTrainedTokenizerBase, context: int | None) -> Asked:
    """Reads the prompts of --sample-prompts; ValueError for what the model, of this context, cannot answer."""
    prompts = read_prompts([path], None, flag=FLAG)
    ids = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    if len(prompts) > MOST_PROMPTS or sum(map(len, ids)) > MOST_TOKENS:
        raise ValueError(
            f"{FLAG} {path}: has {len(prompts):,} prompts of {sum(map(len, ids)):,} tokens together, allowed:"
            f" {MOST_PROMPTS} of {MOST_TOKENS:,}, which are answered at each validation: keep a few (mini-trainer"
            " generate answers any number with an export)"
        )
    asked: Asked = []
    for prompt, own in zip(prompts, ids, strict=True):
        reason = find_refusal(len(own), context) if own else "has no tokens, so there is nothing to continue"
        if reason is not None:
            raise ValueError(f"{FLAG}: {prompt.place}: {reason}")
        asked.append((prompt.shown, own, next(iter(prompt.references), None)))
    return asked


def cut_questions(data: Mixture, tokenizer: PreTrainedTokenizerBase, context: int | None) -> Asked:
    """The first samples' tokens up to their first answer, and that answer; none of samples that are trained whole."""
    asked: dict[str, tuple[str, list[int], str]] = {}  # by what is shown
    most = min(MOST_TOKENS // NUM_QUESTIONS, context or MOST_TOKENS)
    for row in data.kept[:NUM_SEEN]:
        sample = data.read(row)
        ids, is_trained = sample["input_ids"], sample["labels"] != IGNORED
        start = int(is_trained.argmax())
        end = start + int((~is_trained[start:]).argmax())
        if 0 < start < most:
            shown = find_question(tokenizer.decode(ids[:start]), tokenizer)
            answer = tokenizer.decode(ids[start : end if end > start else None], skip_special_tokens=True)
            asked.setdefault(shown, (shown, ids[:start].tolist(), answer))
        if len(asked) == NUM_QUESTIONS:
            break
    return list(asked.values())


def find_question(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The last user message of a rendered prompt; more of the prompt if the message's beginning is not found."""
    mark = "a question"
    try:
        message = {"role": "user", "content": mark}
        before, _, after = render_prompt(Prompt(row={}, messages=[message]), tokenizer)[0].partition(mark)
    except ValueError:  # a template that renders no single user message
        return text
    header = before[max(0, *map(before.rfind, tokenizer.get_added_vocab())) :]
    asked = (text.rpartition(after)[0] or text) if after else text
    return (asked.rpartition(header)[2] if header else asked).strip()


def describe_answers(samples: Samples, output_dir: Path) -> list[str]:
    """Lines with the first prompts' answers before training and after, as far as samples_0.jsonl has them."""
    with open_regular(output_dir / SAMPLES_FILE) as file:
        rows = [row for row in map(parse_sample, file) if row is not None]
    lines = [f"{samples.kind}, answered before and after (all in {SAMPLES_FILE}):"]
    for shown, reference in list(zip(samples.shown, samples.references, strict=True))[:NUM_QUESTIONS]:
        answers = [row["answer"] for row in rows if row["prompt"] == shown]
        parts = {"right": reference, "before": answers[0], "after": answers[-1]} if len(answers) > 1 else {}
        said = [f"    {name + ':':<8}{shorten(text)}" for name, text in parts.items() if text is not None]
        lines += [f"  {shorten(shown)}", *said]
    return lines


class SamplesFile(Sink):
    """Writes samples_0.jsonl, and the first answer to the console.
    A run that resumes after `first_step` steps keeps the lines until then; one that has neither trained nor validated
    yet, none."""

    def __init__(self, output_dir: Path, *, first_step: int, num_validations: int):
        self.path = output_dir / SAMPLES_FILE
        self.known = keep_lines(self.path, last_step=first_step if first_step or num_validations else -1)
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
