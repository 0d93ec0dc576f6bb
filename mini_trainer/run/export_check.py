"""The trainer's own numbers beside an export, check.json, with which any reader of the export is compared.

The trained model continues four short texts greedily. n prompts, V vocabulary size, C classes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mini_trainer.data.stores.tokenizers import fingerprint_chat_template
from mini_trainer.distributed.devices import run_eagerly
from mini_trainer.distributed.world import World
from mini_trainer.model.check import in_high_precision
from mini_trainer.model.config import list_stops
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.family import MicroBatch, RowModel
from mini_trainer.objectives.families.text import TextRowModel
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.objectives.next_tokens import compute_logits
from mini_trainer.objectives.objective import PackedModel, Unlabeled
from mini_trainer.options.reading import read_object
from mini_trainer.run.export import ExportParts

CHECK_FILE = "check.json"
TEXTS = ("The capital of France is", "One, two, three, four,", "def add(a, b):\n    return", "Water boils at")
NUM_TOKENS, NUM_TOP = 8, 5  # of an answer; of the most probable tokens after a prompt
# Allowed difference of logits (of classes) and log-probabilities, by whether all is in fp32; and of a base in 4 bits.
TOLERANCES, TOLERANCE_4_BITS = {True: 0.02, False: 0.3}, 1.0
MARGIN = 0.1  # of log-probability between the best two tokens, under which rounding may choose


@dataclass(frozen=True)
class Said:
    """A reader's answer to a prompt; None for what it does not say."""

    values: dict[str, float] | None  # of those recorded, by token or class
    answer: list[int] | None
    prompt: list[int] | None = None  # as the reader's tokenizer encodes it
    text: str | None = None


@torch.no_grad()
@run_eagerly()  # in eval mode and without gradients the blocks would be compiled once more
def record_answers(packed_model: PackedModel, parts: ExportParts, *, world: World) -> dict[str, Any]:
    """The content of check.json. All ranks call this, and compute the same."""
    was_training, tokenizer = packed_model.training, parts.tokenizer
    config = text_config(packed_model.model.config)
    context = getattr(config, "max_position_embeddings", None)
    most = None if context is None else max(1, context - NUM_TOKENS)
    # Not rendered by the chat template, which is other people's program.
    prompts: list[dict[str, Any]] = [{"text": text, "ids": tokenizer(text)["input_ids"][:most]} for text in TEXTS]
    # Some tokenizers know no word of English, or have tokens beyond the model's.
    prompts = [prompt for prompt in prompts if 0 <= max(prompt["ids"], default=-1) < config.vocab_size]
    answers: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    generates = isinstance(packed_model.row_model, TextRowModel)
    packed_model.eval()
    with in_high_precision(packed_model.model):  # as readers compute it
        for step in range(0 if not prompts else NUM_TOKENS if generates else 1):
            rows = [np.array([*prompt["ids"], *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
            packed = Unlabeled(parts.family).pack([{"input_ids": row} for row in rows]).to(world.device)
            values = packed_model.predict(packed, read_outputs).float()  # (n, V) or (n, C)
            top = values.log_softmax(-1).topk(NUM_TOP) if generates else values.topk(values.shape[-1])
            for i, (best, ids) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
                if step == 0:
                    prompts[i]["values"] = {str(id): round(value, 4) for id, value in zip(ids, best, strict=True)}
                if generates:
                    answers[i].append(ids[0])
                    margins[i].append(best[0] - best[1])
    reshard(packed_model)
    packed_model.train(was_training)
    is_exact = parts.dtype == packed_model.compute_dtype == torch.float32
    is_packed = parts.method.export_error > 0
    margin = TOLERANCE_4_BITS if is_packed else MARGIN
    stops = list_stops(parts.generation_config, tokenizer) if generates else []
    for prompt, answer, gaps in zip(prompts, answers, margins, strict=True):
        prompt["answer"] = cut_answer(answer, gaps, stops=stops, margin=margin)
        prompt["says"] = tokenizer.decode(prompt["answer"], skip_special_tokens=True)
    return {
        "dtype": str(parts.dtype).removeprefix("torch."),
        "tolerance": TOLERANCE_4_BITS if is_packed else TOLERANCES[is_exact],
        "generates": generates,
        "stops": stops,
        "pad": tokenizer.pad_token_id,
        "chat_template": fingerprint_chat_template(tokenizer),
        "prompts": prompts,
    }


def read_outputs(row_model: RowModel, micro_batch: MicroBatch) -> Tensor:  # (n, V) or (n, C)
    """Logits of the token after each sequence, or of its classes; of its last token's, for classes of tokens."""
    row, last = micro_batch.row, micro_batch.row.cu_seqlens[1:].long() - 1
    hidden = row_model.encode(micro_batch).hidden
    if not isinstance(row_model, TextRowModel):
        return row_model.classify(hidden, row, last if row_model.of_tokens else torch.arange(len(last)).to(last))
    return compute_logits(row_model.project(hidden[0, last]), slice(None))


def cut_answer(answer: list[int], margins: list[float], *, stops: Sequence[int], margin: float) -> list[int]:
    """The tokens up to a stop, or before the first whose choice was close."""
    for i, token in enumerate(answer):
        if margins[i] < margin:
            return answer[:i]
        if token in stops:
            return answer[: i + 1]
    return answer


def read_check(export: Path) -> dict[str, Any]:
    """The check.json of an export; ValueError without one, or if it has no prompts."""
    if not (export / CHECK_FILE).is_file():
        raise ValueError(
            f"{export}: has no {CHECK_FILE}: runs write it with their last and best exports, mini-trainer export too"
        )
    recorded = read_object(export / CHECK_FILE)
    if not recorded["prompts"]:
        raise ValueError(
            f"{export / CHECK_FILE}: has no prompts, since the tokenizer makes no tokens of them that the model has"
        )
    return recorded


def carry_check(adapter: Path, dtype: torch.dtype) -> dict[str, str]:
    """The check.json of a model merged of this adapter, by its name; empty if the adapter has none."""
    if not (adapter / CHECK_FILE).is_file():
        return {}
    recorded = read_check(adapter)
    tolerance = max(recorded["tolerance"], TOLERANCES[dtype == torch.float32])
    merged = recorded | {"dtype": str(dtype).removeprefix("torch."), "tolerance": tolerance}
    return {CHECK_FILE: json.dumps(merged) + "\n"}


@torch.no_grad()
def ask(model: PreTrainedModel, recorded: dict[str, Any], *, stops: Sequence[int]) -> list[Said]:
    """The answers of a model in transformers, by its own forward pass, up to one of `stops`."""
    said, generates = [], recorded["generates"]
    for prompt in recorded["prompts"]:
        ids, first = list(prompt["ids"]), None
        for _ in range(NUM_TOKENS if generates else 1):
            logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float().cpu()
            values = logits[-1] if logits.ndim == 2 else logits  # of classes of a sequence
            values = values.log_softmax(-1) if generates else values
            first = values if first is None else first
            ids.append(int(values.argmax()))
            if ids[-1] in stops:
                break
        said.append(Said({name: first[int(name)].item() for name in prompt["values"]}, ids[len(prompt["ids"]) :]))
    return said


def compare(recorded: dict[str, Any], said: Sequence[Said]) -> list[str]:
    """What a reader says otherwise than the trained model; empty if all is equal."""
    problems = []
    for prompt, one in zip(recorded["prompts"], said, strict=True):
        where, expected = json.dumps(prompt["text"], ensure_ascii=False), prompt["answer"]
        ends = bool(expected) and expected[-1] in recorded["stops"]
        if one.prompt is not None and one.prompt != prompt["ids"]:
            problems.append(f"{where} has the tokens {one.prompt}, not {prompt['ids']}")
        differences = [abs(value - prompt["values"][name]) for name, value in (one.values or {}).items()]
        if any(not difference <= recorded["tolerance"] for difference in differences):
            allowed = f"{max(differences):.3g} apart, allowed: {recorded['tolerance']}"
            problems.append(f"log-probabilities after {where} are {allowed}")
        if one.answer is not None and (
            one.answer[: len(expected)] != expected or (ends and len(one.answer) > len(expected))
        ):
            problems.append(f"{where} is continued by the tokens {one.answer}, not {expected}")
        says = prompt["says"]
        if one.text is not None and not (one.text == says if ends else one.text.startswith(says)):
            problems.append(f"{where} is answered by {one.text!r}, not {says!r}")
    return problems
