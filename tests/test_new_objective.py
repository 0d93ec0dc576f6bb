"""The cost of a new objective: one class for its columns, one for its loss, and a line in each of three tables.

The toy learns from pairs of sequences in one sample, by the cross-entropy of language models and a z-loss.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from in_process import print_plan, train_on
from small_runs import make_inputs
from tiny_models import VOCAB_SIZE
from torch import Tensor
from transformers import AutoModelForCausalLM

from mini_trainer.data.columns.base import COLUMNS, LENGTHS_COLUMN
from mini_trainer.data.columns.token_columns import TextColumns
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM, TokenLoss
from mini_trainer.options import ClassificationOptions
from mini_trainer.options.objectives import ALL_OBJECTIVES, OBJECTIVES, ObjectiveFacts
from mini_trainer.sampler import draw_samples

NAME, WEIGHT = "pairs", 1e-2
NUM_SAMPLES = 24


class PairColumns(TextColumns):
    schema = TextColumns.schema.append(pa.field(LENGTHS_COLUMN, pa.list_(pa.int32())))


COLUMNS_OF_PAIRS = PairColumns()


def sum_z_loss(logits: Tensor) -> Tensor:  # (N, V)
    return WEIGHT * logits.float().logsumexp(-1).square().sum()


@dataclass(frozen=True)
class PairLoss(TokenLoss):
    def sum(self, predicted, micro_batch, *, shared=None):
        sums = super().sum(predicted, micro_batch)
        return sums._replace(loss=sums.loss + sum_z_loss(predicted.hidden @ predicted.weight.T))

    def sum_own(self, own, targets):
        return super().sum_own(own, targets) + sum_z_loss(own.logits[0, targets.index])


@dataclass(frozen=True)
class PairLM(CausalLM):
    family: Family = field(default_factory=TextFamily)

    name = NAME

    @classmethod
    def make(cls, settings, family, task, count_labels):
        return cls(family, settings.noise)

    def make_loss(self, *, is_fused: bool = False) -> PairLoss:
        return PairLoss()


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    register(monkeypatch)


def register(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(COLUMNS.places, NAME, "test_new_objective:COLUMNS_OF_PAIRS")
    for table in (OBJECTIVES, ALL_OBJECTIVES):
        patch.setitem(table, NAME, ObjectiveFacts("test_new_objective:PairLM"))
    patch.setattr(ClassificationOptions.__dataclass_fields__["objective"], "type", Literal[*OBJECTIVES])


def plan_pairs(values: dict) -> tuple[ExitCode, str]:
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        return print_plan(values)


def write_pairs(path: Path, model: str | None = None, *, seed: int = 0) -> Path:
    """Samples of two sequences; of a sequence the first token is no target, and all others are."""
    random, rows = np.random.default_rng(seed), []
    for first, second in random.integers(2, 20, (NUM_SAMPLES, 2)).tolist():
        ids = random.integers(3, VOCAB_SIZE, first + second)
        labels = ids.copy()
        labels[[0, first]] = -100
        rows.append(
            {"input_ids": ids.tolist(), "labels": labels.tolist(), "len": len(ids), LENGTHS_COLUMN: [first, second],
             "num_loss_counted_tokens": len(ids) - 2}
        )  # fmt: skip
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, PairColumns.schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=PairColumns.schema))
    made_with = (
        {}
        if model is None
        else {"tokenizer_fingerprint": fingerprint_tokenizer(load_tokenizer(model)), "max_token_id": VOCAB_SIZE - 1}
    )
    Path(f"{path}.meta.json").write_text(json.dumps({"objective": NAME} | made_with))
    return path


def make_options(root: Path, **changes: object) -> dict:
    root.mkdir(exist_ok=True)
    inputs = make_inputs(root, "llama")
    model = inputs["model_name_or_path"]
    own = dict(data_path=(str(write_pairs(root / "pairs.arrow", model)),), objective=NAME, output_dir=str(root / "run"),
               batch_size=8, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=4, compute_dtype="float32",
               activation_checkpointing="none", export_dtype="float32", checkpoint_every_steps=2,
               validation_data_path=(str(write_pairs(root / "held_out.arrow", model, seed=1)),))  # fmt: skip
    return inputs | own | changes


def read_losses(root: Path, name: str = "training_metrics_0.jsonl") -> list[float]:
    return [json.loads(line)["loss"] for line in (root / "run" / name).read_text().splitlines()]


def test_it_trains_validates_and_resumes_as_a_plain_loop_says(world, tmp_path):
    options = make_options(tmp_path)
    train_on(1, world, **options)
    model = AutoModelForCausalLM.from_pretrained(options["model_name_or_path"], dtype=torch.float32)
    held_out, data = (
        TokenizedData(options["validation_data_path"][0]),
        Mixture([TokenizedData(options["data_path"][0])]),
    )
    total, count = sum_by_hand(model, held_out, range(NUM_SAMPLES), z_loss=False)
    assert read_losses(tmp_path, "validation_metrics_0.jsonl")[0] == pytest.approx(total / count, rel=1e-5)
    total, count = sum_by_hand(model, data, draw_samples(data, seed=42, start=0, count=8).tolist(), z_loss=True)
    assert read_losses(tmp_path)[0] == pytest.approx(total / count, rel=1e-5)
    train_on(1, world, **(options | dict(max_steps=6)))
    assert len(read_losses(tmp_path)) == 6


def test_it_is_planned(elsewhere, tmp_path):
    code, text = elsewhere(plan_pairs, make_options(tmp_path, dry_run=True, plan_for="2"))
    assert code == ExitCode.DONE and f"{NUM_SAMPLES} samples" in text


def sum_by_hand(model, data: TokenizedData | Mixture, rows, *, z_loss: bool) -> tuple[float, int]:
    """The summed loss of sequences that are run one by one, and their targets."""
    total, count = 0.0, 0
    for row in rows:
        sample = data.read(row)
        for ids in np.split(sample["input_ids"], np.cumsum(sample[LENGTHS_COLUMN])[:-1]):
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
            wanted = torch.from_numpy(ids.astype(np.int64))[1:]
            total += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
            total += sum_z_loss(logits).item() if z_loss else 0.0
            count += len(wanted)
    return total, count


def test_a_pair_costs_what_its_sequences_cost(tmp_path):
    data = Mixture([TokenizedData(write_pairs(tmp_path / "pairs.arrow"))])
    lengths = [data.read(row)[LENGTHS_COLUMN] for row in range(NUM_SAMPLES)]
    assert data.load_of(np.arange(NUM_SAMPLES)).squares.tolist() == [float((each**2).sum()) for each in lengths]
