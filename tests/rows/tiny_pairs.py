"""Small tokenized pairs and feedback, as process_data.py would write them; an answer's log-probability."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from tiny_models import VOCAB_SIZE
from torch.nn.functional import cross_entropy

from mini_trainer.data.columns.preference_columns import FeedbackColumns, PreferenceColumns
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer

NUM_PAIRS = 24


def write_pairs(
    path: Path, model: Path, *, size: int = NUM_PAIRS, seed: int = 0, numbers: bool = False, good: bool = False
) -> Path:
    """Pairs, of which the second answer is an unrelated one with `good`, if there is one: then each row's first is good
    or bad."""
    random, rows = np.random.default_rng(seed), []
    for prompt, *answers in random.integers(2, 12, (size, 3)).tolist():
        shared = random.integers(3, VOCAB_SIZE, prompt)
        sides = [np.concatenate([shared, random.integers(3, VOCAB_SIZE, length)]) for length in answers]
        sides = sides[:1] if good and len(rows) % 5 == 4 else sides
        ids, labels = np.concatenate(sides), np.concatenate(sides)
        labels[:prompt] = labels[len(sides[0]) : len(sides[0]) + prompt] = -100
        row = {"input_ids": ids.tolist(), "labels": labels.tolist(), "sequence_lengths": list(map(len, sides)),
               "len": len(ids), "num_loss_counted_tokens": answers[0] if good else sum(answers)}  # fmt: skip
        row |= {"good": [float(random.integers(2))]} if good else {"margin": [random.random()]} if numbers else {}
        rows.append(row | ({"pair_weight": [random.random() + 0.5]} if numbers else {}))
    schema = FeedbackColumns.schema if good else PreferenceColumns.schema
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    made_by = {
        "tokenizer_fingerprint": fingerprint_tokenizer(load_tokenizer(str(model))),
        "max_token_id": VOCAB_SIZE - 1,
    }
    Path(f"{path}.meta.json").write_text(json.dumps({"objective": "feedback" if good else "preference"} | made_by))
    return path


def sum_plainly(model: torch.nn.Module, ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
    return -cross_entropy(logits, torch.from_numpy(labels[1:].astype(np.int64)), ignore_index=-100, reduction="sum")
