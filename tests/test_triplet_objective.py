"""An objective whose losses are of samples, not of tokens: embeddings that learn from triplets, in one file.

n sequences in a packed row, N of them in triplets, P triplets, H hidden size.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pytest
import torch
from forked import run_forked
from in_process import print_plan, train_on
from processes import flags
from small_runs import read_rows
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from torch import Tensor
from torch.nn.functional import normalize, softplus
from transformers import AutoModelForCausalLM

from chat.fingerprints import fingerprint_tokenizer
from chat.templates import load_tokenizer
from corpus.mixture import Mixture
from corpus.reader import TokenizedData
from families.family import Own, Reader
from families.micro_batch import MicroBatch, Row, Targets
from families.sample import LENGTHS_COLUMN, Sample, list_sequences
from objectives.choice import KINDS, Kind, make_text_family
from objectives.columns import Bars, Columns, Counts, RowFacts, Task, format_count
from objectives.data_kinds import COLUMNS
from objectives.objective import Loss, Objective, Scores
from options import ClassificationOptions
from ranks.ending import ExitCode
from sampler import draw_samples

NAME, TAU = "triplet", 0.5
NUM_SAMPLES, BATCH_SIZE = 24, 8
SUMS = ("loss", "accuracy", "triplets")  # columns of `Scores.sums`
COUNTED = "is_counted"  # of a sample: False of one without a target


class TripletColumns(Columns):
    """An anchor, a sequence like it and one unlike it, one after the other."""

    schema = pa.schema(
        {
            "input_ids": pa.list_(pa.int32()),
            LENGTHS_COLUMN: pa.list_(pa.int32()),
            "len": pa.int32(),
            "num_loss_counted_tokens": pa.int32(),  # targets: 1, the triplet
        }
    )

    def describe(self, task: Task) -> str:
        return "triplets"

    def describe_data(self, counts: Counts, task: Task) -> dict[str, Any]:
        return {"objective": task.objective}

    def check(self, sample: Sample, row: RowFacts) -> None:
        super().check(sample, row)
        if len(sample[LENGTHS_COLUMN]) != 3:
            raise ValueError(f"{row.where}: {len(sample[LENGTHS_COLUMN])} sequences, expected three")

    def make_row(self, tokens: list[list[int]]) -> dict[str, Any]:
        ids = [token for sequence in tokens for token in sequence]
        return {"input_ids": ids, LENGTHS_COLUMN: list(map(len, tokens)), "len": len(ids), "num_loss_counted_tokens": 1}

    def report(self, counts: Counts, task: Task) -> Iterator[str]:
        yield format_count("triplets", counts.num_samples)

    def draw(self, counts: Counts, task: Task) -> Bars:
        return Bars("Samples", {"triplets": counts.num_samples}, counts.num_samples)

    def summarize(self, counts: Counts, task: Task) -> tuple[str, str]:
        return "triplets", f"{counts.num_samples:,}"


@dataclass
class TripletTargets(Targets):
    """`index` is of sequences: the anchor, the positive and the negative of each triplet."""

    places: Tensor = None  # (N,) int64: three times the triplet, and which of the three it is
    firsts: Tensor = None  # (P,) int64: the first one of each triplet, in `index`

    def find_sequences(self, row: Row) -> Tensor:
        return self.index


def embed(hidden: Tensor, row: Row) -> Tensor:  # (T, H) -> (n, H)
    """The mean state of each sequence, of length 1."""
    lengths = row.cu_seqlens.diff().long()
    sequence_of = torch.repeat_interleave(lengths, output_size=len(hidden))
    sums = hidden.new_zeros(len(lengths), hidden.shape[1], dtype=torch.float32)
    return normalize(sums.index_add(0, sequence_of, hidden.float()), dim=1)


@dataclass(frozen=True)
class TripletLoss(Loss):
    """log(1 + exp((cos(anchor, negative) - cos(anchor, positive)) / tau)), of each triplet."""

    tau: float

    def measure(self, embeddings: Tensor, targets: TripletTargets) -> Tensor:  # (N, H) -> (P, len(SUMS))
        """Sequences that are missing, as in checks, are the first axis and its opposite."""
        num_triplets, size = len(targets.firsts), embeddings.shape[-1]
        axis = torch.eye(1, size, device=embeddings.device)[0]
        missing = torch.stack([axis, axis, -axis]).repeat(num_triplets, 1)
        anchors, positives, negatives = missing.index_copy(0, targets.places, embeddings).view(-1, 3, size).unbind(1)
        differences = ((negatives - positives) * anchors).sum(1)
        losses = softplus(differences / self.tau)
        return torch.stack([losses, (differences < 0).float(), torch.ones_like(losses)], dim=1)

    def measure_row(self, reader: Reader, micro_batch: MicroBatch) -> Tensor:
        embeddings = embed(reader.encode(micro_batch)[0], micro_batch.row)
        return self.measure(embeddings[micro_batch.targets.index], micro_batch.targets)

    def sum(self, reader: Reader, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> Tensor:
        sums, targets = self.measure_row(reader, micro_batch), micro_batch.targets
        reader.reports["triplet_sums"] = sums.detach().sum(0)
        if targets.num_sources > 1:
            by_source = sum_by_source(sums.detach(), targets)
            reader.reports["source_losses"], reader.reports["source_divisors"] = by_source[:, 0], by_source[:, -1]
        return sums[:, 0].sum()

    def score(self, reader: Reader, micro_batch: MicroBatch) -> Scores:
        return Scores(sum_by_source(self.measure_row(reader, micro_batch).double(), micro_batch.targets))

    def sum_own(self, own: Own, targets: TripletTargets) -> Tensor:
        embedding = normalize(own.hidden[0].float().sum(0, keepdim=True), dim=1)
        return self.measure(embedding, targets)[0, 0]


def sum_by_source(sums: Tensor, targets: TripletTargets) -> Tensor:  # (P, ...) -> (num_sources, ...)
    sources = torch.zeros_like(targets.firsts) if targets.sources is None else targets.sources[targets.firsts]
    return sums.new_zeros(targets.num_sources, sums.shape[1]).index_add(0, sources, sums)


def describe_means(sums: np.ndarray) -> dict[str, float]:
    *totals, num_triplets = sums.tolist()
    return {name: total / (num_triplets or 1) for name, total in zip(SUMS, totals, strict=False)}


@dataclass(frozen=True)
class Triplets(Objective):
    """Embeddings: an anchor's is to be nearer to a positive sequence's than to a negative one's."""

    tau: float = TAU

    name = NAME
    pipeline_tag = "feature-extraction"
    metrics = {"loss": False, "accuracy": True}  # noqa: RUF012

    def give_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        """One sequence: an anchor alone."""
        return sample | {COUNTED: num_trained != 0}

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> TripletTargets:
        index, places, firsts, sequence = [], [], [], 0
        for sample in samples:
            count = len(list_sequences(sample))
            if sample.get(COUNTED, True):
                places += [3 * len(firsts) + role for role in range(count)]
                firsts.append(len(index))
                index += range(sequence, sequence + count)
            sequence += count
        return TripletTargets(
            *(torch.tensor(values, dtype=torch.long) for values in (index,)),
            places=torch.tensor(places, dtype=torch.long),
            firsts=torch.tensor(firsts, dtype=torch.long),
        )

    def make_loss(self, *, is_fused: bool = False) -> TripletLoss:
        return TripletLoss(self.tau)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": describe_means(reports["triplet_sums"])["accuracy"]}

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        return describe_means(sums.numpy())


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    register(monkeypatch)


def register(patch: pytest.MonkeyPatch) -> None:
    kind = Kind(make_text_family, lambda settings, family, task, count_labels: Triplets(family, settings.noise))
    patch.setitem(KINDS, NAME, kind)
    patch.setitem(COLUMNS, NAME, TripletColumns())
    option = ClassificationOptions.__dataclass_fields__["objective"]
    names = Literal[(*get_args(option.type), NAME)]
    patch.setattr(option, "type", names)
    patch.setitem(ClassificationOptions.__annotations__, "objective", names)


def plan_triplets(values: dict) -> tuple[ExitCode, str]:
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        return print_plan(values)


def write_triplets(path: Path, model: Path, *, seed: int = 0) -> Path:
    random, columns = np.random.default_rng(seed), TripletColumns()
    triplets = [
        [random.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
        for lengths in random.integers(1, 14, (NUM_SAMPLES, 3)).tolist()
    ]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, columns.schema) as writer:
        writer.write_batch(columns.encode(triplets))
    fingerprint = fingerprint_tokenizer(load_tokenizer(str(model)))
    sidecar = {"objective": NAME, "tokenizer_fingerprint": fingerprint, "max_token_id": VOCAB_SIZE - 1}
    Path(f"{path}.meta.json").write_text(json.dumps(sidecar))
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tokenizer(save_model(FAMILIES["llama"], tmp_path_factory.mktemp("model")))


def make_options(root: Path, model_dir: Path, **changes: object) -> dict:
    root.mkdir(exist_ok=True)
    return dict(
        model_name_or_path=str(model_dir), data_path=(str(write_triplets(root / "triplets.arrow", model_dir)),),
        validation_data_path=(str(write_triplets(root / "held_out.arrow", model_dir, seed=1)),), objective=NAME,
        output_dir=str(root / "run"), batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=4,
        compute_dtype="float32", activation_checkpointing="none", export_dtype="float32", checkpoint_every_steps=1,
    ) | changes  # fmt: skip


def measure_plainly(model: torch.nn.Module, data: Mixture, rows: Iterable[int]) -> tuple[Tensor, float]:
    """The mean loss and the accuracy of triplets whose sequences are run one by one."""
    losses, hits = [], []
    for row in rows:
        states = [
            model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states[-1][0].mean(0)
            for ids in list_sequences(data.read(row))
        ]
        positive, negative = (torch.cosine_similarity(states[0], other, dim=0) for other in states[1:])
        losses.append(softplus((negative - positive) / TAU))
        hits.append(float(positive > negative))
    return torch.stack(losses).mean(), float(np.mean(hits))


def read_steps(root: Path) -> list[list[float]]:
    return [[row[key] for key in ("loss", "grad_norm", "accuracy")] for row in read_rows(root / "run")]


def read_validations(root: Path) -> list[list[float]]:
    rows = map(json.loads, (root / "run/validation_metrics_0.jsonl").read_text().splitlines())
    return [[row["loss"], row["accuracy"]] for row in rows]


def test_losses_gradients_and_validations_are_those_of_a_plain_loop(model_dir, world, tmp_path):
    options = make_options(tmp_path, model_dir, max_steps=1)
    train_on(1, world, **options)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    data, held_out = (Mixture([TokenizedData(options[key][0])]) for key in ("data_path", "validation_data_path"))
    loss, accuracy = measure_plainly(model, data, draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist())
    loss.backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    assert read_steps(tmp_path)[0] == pytest.approx([loss.item(), norm.item(), accuracy], rel=1e-5)
    with torch.no_grad():
        loss, accuracy = measure_plainly(model, held_out, range(NUM_SAMPLES))
    assert read_validations(tmp_path)[0] == pytest.approx([loss.item(), accuracy], rel=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(model_dir, world, tmp_path):
    train_on(1, world, **make_options(tmp_path / "whole", model_dir))
    options = make_options(tmp_path / "parts", model_dir)
    train_on(1, world, **options | dict(max_steps=2))
    train_on(1, world, **options)
    assert read_rows(tmp_path / "parts/run") == read_rows(tmp_path / "whole/run")


def train_triplets(num_ranks: int, **options: object) -> str:
    result = run_forked(num_ranks, "tests/workers/registered.py", __name__, "train.py", *flags(**options))
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.parametrize(("num_ranks", "changes"), [(1, dict(max_tokens_per_gpu=1024)), (2, {})])
def test_ranks_and_caps_do_not_change_the_numbers(num_ranks, changes, model_dir, world, tmp_path):
    train_on(1, world, **make_options(tmp_path / "one", model_dir))
    print(train_triplets(num_ranks, **make_options(tmp_path / "other", model_dir, **changes)))
    for read in (read_steps, read_validations):
        np.testing.assert_allclose(read(tmp_path / "other"), read(tmp_path / "one"), rtol=2e-5)


def test_it_is_planned(elsewhere, model_dir, tmp_path):
    code, text = elsewhere(plan_triplets, make_options(tmp_path, model_dir, dry_run=True, plan_world_size=2))
    assert code == ExitCode.DONE and f"{NUM_SAMPLES} samples" in text
