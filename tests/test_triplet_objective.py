"""An objective whose losses are of samples, not of tokens: embeddings that learn from triplets, in one file.

N sequences in a micro-batch, P triplets, H hidden size.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from forked import succeed
from in_process import train_on
from processes import flags
from small_runs import check_step, read_rows
from tiny_data import read_lines
from tiny_models import FAMILIES, VOCAB_SIZE, balance_plainly, save_model, save_tokenizer
from torch import Tensor
from torch.nn.functional import normalize, softplus
from transformers import AutoModelForCausalLM

from mini_trainer.data.columns.base import (
    COLUMNS,
    LENGTHS_COLUMN,
    Columns,
    CountLabels,
    DataTask,
    RowFacts,
    Sample,
    list_sequences,
)
from mini_trainer.data.rows.report import Totals
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.objectives.families.family import Family, MicroBatch, ReferenceForward, Row, RowModel, Targets
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.objective import Loss, LossSums, Objective, ObjectiveSettings, Scores
from mini_trainer.options import ClassificationOptions, TrainOptions, group_options
from mini_trainer.options.objectives import ALL_OBJECTIVES, OBJECTIVES, ObjectiveFacts
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.sampler import draw_samples
from mini_trainer.use.pages.preview import format_figures, format_targets

NAME, TAU = "triplet", 0.5
NUM_SAMPLES, BATCH_SIZE = 24, 8
SUMS = ("loss", "accuracy", "triplets")  # columns of `Scores.sums`
FACTS = ObjectiveFacts(
    "test_triplet_objective:Triplets", excluded={"context_parallel": "whose targets are of sequences"}
)
COUNTED = "is_counted"  # of a sample: False of one without a target


class TripletColumns(Columns):
    """An anchor, a sequence like it and one unlike it, one after the other."""

    schema = pa.schema(
        dict.fromkeys(("input_ids", LENGTHS_COLUMN), pa.list_(pa.int32()))
        | dict.fromkeys(("len", "num_loss_counted_tokens"), pa.int32())  # targets: 1, the triplet
    )

    def describe(self, task: DataTask) -> str:
        return "triplets"

    def check(self, sample: Sample, row: RowFacts) -> None:
        if len(sample[LENGTHS_COLUMN]) != 3:
            raise ValueError(f"{row.where}: {len(sample[LENGTHS_COLUMN])} sequences, expected three")

    def make_row(self, tokens: list[list[int]]) -> dict[str, Any]:
        ids = [token for sequence in tokens for token in sequence]
        return {"input_ids": ids, LENGTHS_COLUMN: list(map(len, tokens)), "len": len(ids), "num_loss_counted_tokens": 1}


COLUMNS_OF_TRIPLETS = TripletColumns()


@dataclass
class TripletTargets(Targets):
    """Sequences; the triplet of each, and whether it is the anchor, positive or negative."""

    places: Tensor = None  # (N,) int64: three times the triplet, plus 0, 1 or 2
    num_triplets: int = 0

    def find_sequences(self, row: Row) -> Tensor:
        return self.index


@dataclass(frozen=True)
class TripletLoss(Loss):
    """log(1 + exp((cos(anchor, negative) - cos(anchor, positive)) / tau)) of each triplet, on last hidden states."""

    tau: float

    def measure(self, states: Tensor, targets: TripletTargets) -> Tensor:  # (N, H) -> (P, len(SUMS))
        """Sequences that are missing, as in checks and measurements, are the first axis; a negative its opposite."""
        axis = torch.eye(1, states.shape[1], device=states.device)[0]
        embeddings = torch.stack([axis, axis, -axis]).repeat(targets.num_triplets, 1)
        embeddings = embeddings.index_copy(0, targets.places, normalize(states.float(), dim=1))
        anchors, positives, negatives = embeddings.unflatten(0, (-1, 3)).unbind(1)
        differences = ((negatives - positives) * anchors).sum(1)
        losses = softplus(differences / self.tau)
        return torch.stack([losses, (differences < 0).float(), torch.ones_like(losses)], dim=1)

    def predict(self, row_model: RowModel, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:  # (N, H)
        """The last hidden state of each sequence."""
        return hidden[0, micro_batch.row.cu_seqlens[1:].long()[micro_batch.targets.index] - 1]

    def sum(self, predicted: Tensor, micro_batch: MicroBatch, *, shared: Tensor | None = None) -> LossSums:
        sums = self.measure(predicted, micro_batch.targets)
        by_source = sum_by_source(sums.detach(), micro_batch.targets)
        reports = {"triplet_sums": by_source.sum(0)}
        if len(by_source) > 1:
            reports["source_losses"] = by_source[:, 0]
        return LossSums(sums[:, 0].sum(), reports=reports)

    def score(self, row_model: RowModel, micro_batch: MicroBatch) -> Scores:
        sums = self.measure(self.read(row_model, micro_batch), micro_batch.targets)
        return Scores(sum_by_source(sums.double(), micro_batch.targets))

    def sum_own(self, own: ReferenceForward, targets: TripletTargets) -> Tensor:
        return self.measure(own.hidden[0, -1:], targets)[:, 0].sum()


def sum_by_source(sums: Tensor, targets: TripletTargets) -> Tensor:  # (P, ...) -> (num_sources, ...)
    sources = torch.zeros(len(sums), dtype=torch.long, device=sums.device)
    if targets.sources is not None:
        sources = sources.index_copy(0, targets.places // 3, targets.sources)
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

    @classmethod
    def make_family(cls, settings: ObjectiveSettings) -> Family:
        return TextFamily(settings.router_aux_loss, settings.router_loss_over)

    @classmethod
    def make(
        cls, settings: ObjectiveSettings, family: Family, task: DataTask, count_labels: CountLabels | None
    ) -> "Triplets":
        return cls(family)

    def with_targets(self, sample: Sample, trainable: np.ndarray, *, num_trained: int | None = None) -> Sample:
        """One sequence: an anchor alone."""
        return sample | {COUNTED: num_trained != 0}

    def pack_targets(self, samples: Sequence[Sample], row: Row) -> TripletTargets:
        sequences, places, num_triplets, start = [], [], 0, 0
        for sample in samples:
            num_sequences = len(list_sequences(sample))
            if sample.get(COUNTED, True):
                sequences += range(start, start + num_sequences)
                places += range(3 * num_triplets, 3 * num_triplets + num_sequences)
                num_triplets += 1
            start += num_sequences
        index, places = (torch.tensor(numbers, dtype=torch.long) for numbers in (sequences, places))
        return TripletTargets(index, places=places, num_triplets=num_triplets)

    def make_loss(self, *, is_fused: bool = False) -> TripletLoss:
        return TripletLoss(self.tau)

    def describe_step(self, reports: Mapping[str, np.ndarray], divisors: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": describe_means(reports["triplet_sums"])["accuracy"]}

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        return describe_means(sums.numpy())


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        yield


def register(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(COLUMNS.data, NAME, "test_triplet_objective:COLUMNS_OF_TRIPLETS")
    patch.setitem(OBJECTIVES, NAME, FACTS)
    patch.setitem(ALL_OBJECTIVES, NAME, FACTS)
    option = ClassificationOptions.__dataclass_fields__["objective"]
    names = Literal[*OBJECTIVES]
    patch.setattr(option, "type", names)
    patch.setitem(ClassificationOptions.__annotations__, "objective", names)


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
    names = ("first", "second", "held_out")
    first, second, held_out = (
        str(write_triplets(root / f"{name}.arrow", model_dir, seed=seed)) for seed, name in enumerate(names)
    )
    return dict(
        model_name_or_path=str(model_dir), data_path=(first, second), validation_data_path=(held_out,), objective=NAME,
        output_dir=str(root / "run"), batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=4,
        compute_dtype="float32", activation_checkpointing="none", export_dtype="float32", checkpoint_every_steps=1,
        best_metric="accuracy",
    ) | changes  # fmt: skip


@pytest.fixture(scope="module")
def whole(registered, model_dir, world, tmp_path_factory) -> Path:
    """An uninterrupted run on one rank."""
    root = tmp_path_factory.mktemp("whole")
    train_on(1, world, **make_options(root, model_dir))
    return root


def measure_plainly(model: torch.nn.Module, data: Mixture, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The losses of triplets whose sequences are run one by one, and whether the positive is the nearer one."""
    losses, hits = [], []
    for row in rows:
        states = [
            model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states[-1][0, -1]
            for ids in list_sequences(data.read(row))
        ]
        positive, negative = (torch.cosine_similarity(states[0], other, dim=0) for other in states[1:])
        losses.append(softplus((negative - positive) / TAU))
        hits.append(positive > negative)
    return torch.stack(losses), torch.stack(hits).float()


def read_numbers(root: Path) -> np.ndarray:
    return np.array([[row[key] for key in ("loss", "grad_norm", "accuracy")] for row in read_rows(root / "run")])


def read_validations(root: Path) -> np.ndarray:
    rows = read_lines(root / "run/validation_metrics_0.jsonl")
    return np.array([[row["loss"], row["accuracy"]] for row in rows])


def test_losses_gradients_and_validations_are_those_of_a_plain_loop(model_dir, world, tmp_path):
    options = make_options(tmp_path, model_dir, max_steps=1)
    train_on(1, world, **options)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    data, held_out = (
        Mixture([TokenizedData(path) for path in options[name]]) for name in ("data_path", "validation_data_path")
    )
    rows = draw_samples(data, seed=42, start=0, count=BATCH_SIZE)
    losses, hits = measure_plainly(model, data, rows.tolist())
    (metrics,) = read_rows(tmp_path / "run")
    check_step(metrics, model, losses.mean())
    assert metrics["accuracy"] == pytest.approx(hits.mean().item(), rel=1e-5)
    for i, name in enumerate(("first", "second")):
        own = losses[torch.from_numpy(data.numbers.source_of(rows) == i)]
        assert metrics["sources"][name]["loss"] == pytest.approx(own.mean().item(), rel=1e-5)
    with torch.no_grad():
        losses, hits = measure_plainly(model, held_out, range(NUM_SAMPLES))
    assert read_validations(tmp_path)[0] == pytest.approx([losses.mean().item(), hits.mean().item()], rel=1e-5)


def test_experts_are_balanced_over_the_sequences_that_have_a_target(world, tmp_path):
    """The auxiliary loss is transformers' own, of each sequence by its tokens."""
    model_dir = save_tokenizer(save_model(FAMILIES["mixtral"], tmp_path / "model"))
    options = make_options(tmp_path, model_dir, max_steps=1, router_aux_loss=0.1, max_grad_norm=None)
    train_on(1, world, **options)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    data = Mixture([TokenizedData(path) for path in options["data_path"]])
    rows = draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist()
    losses, _ = measure_plainly(model, data, rows)
    balance = balance_plainly(model, [ids for row in rows for ids in list_sequences(data.read(row))])
    (losses.mean() + 0.1 * balance).backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    (metrics,) = read_rows(tmp_path / "run")
    found = [metrics[name] for name in ("loss", "router_aux_loss", "grad_norm")]
    assert found == pytest.approx([losses.mean().item(), balance.item(), norm.item()], rel=1e-5)


def test_idle_ranks_and_rows_of_single_tokens_have_no_other_targets():
    objective = Triplets(TextFamily())
    idle = objective.pack([objective.make_idle_sample()])
    assert idle.targets.num_triplets == 0 and idle.row.has_targets.tolist() == [False]
    sample = {"input_ids": np.arange(3), LENGTHS_COLUMN: np.ones(3, np.int32)}
    micro_batch = objective.pack([sample], sources=np.array([1]), num_sources=2)
    assert micro_batch.row.seq_lengths == [1, 1, 1, 2]  # the last one is an idle sample
    assert micro_batch.row.has_targets.tolist() == [True, True, True, False]
    assert micro_batch.targets.index.tolist() == [0, 1, 2] and micro_batch.targets.sources.tolist() == [1, 1, 1]


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(whole, model_dir, world, tmp_path):
    options = make_options(tmp_path, model_dir)
    train_on(1, world, **options | dict(max_steps=2))
    train_on(1, world, **options)
    assert read_rows(tmp_path / "run") == read_rows(whole / "run")
    weights = f"run/hf_format/samples_{4 * BATCH_SIZE}/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (whole / weights).read_bytes()


def run_registered(num_ranks: int, **options: object) -> str:
    """train.py in processes of its own, where the objective is one of those to choose from; what it prints."""
    return succeed(num_ranks, "tests/workers/registered.py", __name__, "train.py", *flags(**options)).stdout


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "cap"), [(1, 1024), (2, 64)], ids=["cap", "2 ranks"])
def test_ranks_and_caps_do_not_change_the_numbers(num_ranks, cap, whole, model_dir, world, tmp_path):
    options = make_options(tmp_path, model_dir, max_tokens_per_gpu=cap)
    train_on(1, world, **options) if num_ranks == 1 else run_registered(num_ranks, **options)
    for read in (read_numbers, read_validations):
        np.testing.assert_allclose(read(tmp_path), read(whole), rtol=2e-5)


def test_its_data_is_reported_by_the_number_of_targets():
    totals, task = Totals(0, lengths=Counter([3]), num_loss_counted_tokens=1_234_567), DataTask(NAME)
    assert [line.split() for line in TripletColumns().report(totals, task)] == [["targets", "1,234,567"]]
    assert "<dt>targets</dt><dd>1,234,567</dd>" in format_figures(totals, task)
    assert format_targets(TripletColumns().draw(totals, task)) == "<p>targets 1,234,567</p>"


def test_data_without_the_number_of_targets_is_refused(model_dir, tmp_path):
    path = write_triplets(tmp_path / "data.arrow", model_dir)
    table = pa.ipc.open_file(path.read_bytes()).read_all().drop_columns(["num_loss_counted_tokens"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TripletColumns, "schema", table.schema)  # a kind of data that has forgotten it, too
        with pytest.raises(ValueError, match=r"data.arrow: no column num_loss_counted_tokens; .*targets"):
            TokenizedData(path)


def test_it_is_planned(model_dir, tmp_path):
    text = run_registered(0, **make_options(tmp_path, model_dir, dry_run=True, plan_for="2"))
    assert f"{2 * NUM_SAMPLES} samples" in text and "memory" in text and "no problems" in text


def test_options_without_effect_are_refused(model_dir, tmp_path):
    changes = dict(label_smoothing=0.1, preference_beta=0.2, context_parallel=2)
    options = group_options(TrainOptions, **make_options(tmp_path, model_dir, **changes))
    first, second = find_problems(options)
    assert first.startswith("--label-smoothing, --preference-beta: ") and f"--objective {NAME}" in first
    assert second.startswith("--context-parallel 2: ") and f"--objective {NAME}" in second
