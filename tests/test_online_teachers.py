"""Online teachers that read other prompts than the model: steps against a plain loop over transformers' own forward
passes, one sequence at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long
from in_process import print_plan, train_on
from scored_data import write_data
from small_runs import read_rows
from tiny_data import make_samples, read_lines, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.run_model import build_run_model
from mini_trainer.run.start import open_inputs
from mini_trainer.run.step import run_backward
from mini_trainer.sampler import RunPosition, draw_samples, iterate_batches

BATCH_SIZE, NUM_SAMPLES, CAP = 8, 24, 160


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A student and a teacher, with one tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return tuple(save_tokenizer(save_model(FAMILIES["llama"], root / n, seed=i)) for i, n in enumerate("st"))


def write_pair(root: Path, models: tuple[Path, Path]) -> None:
    """Rows with several trained spans, and the same with up to nine more tokens before each span."""
    root.mkdir(exist_ok=True)
    own, seen, random = [], [], np.random.default_rng(3)
    for ids, labels in make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE):
        hint, note = ([*random.integers(3, VOCAB_SIZE, random.integers(1, 10)).tolist()] for _ in range(2))
        answer, no = ids[len(ids) // 2 :], [-100]
        own.append(([*ids, 4, *answer], [*labels, -100, *answer]))
        seen.append(([*hint, *ids, *note, *answer], [*no * len(hint), *labels, *no * len(note), *answer]))
    for name, samples in {"data": own, "seen": seen}.items():
        write_samples(write_data(root / f"{name}.arrow", models[0]), samples)


def make_options(root: Path, models: tuple[Path, Path], **changes: object) -> dict:
    return dict(
        model_name_or_path=str(models[0]), data_path=(str(root / "data.arrow"),), output_dir=str(root / "run"),
        teacher_data=(str(root / "seen.arrow"),), teacher_model=str(models[1]), teacher_divergence="reverse-kl",
        batch_size=BATCH_SIZE, max_tokens_per_gpu=CAP, learning_rate=1e-2, max_steps=1, compute_dtype="float32",
        activation_checkpointing="none", export_dtype="float32", teacher_weight=(1.0,), max_grad_norm=None,
        checkpoint_every_steps=1,
    ) | changes  # fmt: skip


def read_logits(model: torch.nn.Module, sample: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits at a sample's trained tokens, and these tokens."""
    labels = torch.from_numpy(sample["labels"].astype(np.int64))[1:]
    logits = model(input_ids=torch.from_numpy(sample["input_ids"].astype(np.int64))[None]).logits[0, :-1]
    return logits[labels >= 0].double(), labels[labels >= 0]


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def diverge(name: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The sum over rows of logits of the model, p, and the teacher, q."""
    p, q = p.log_softmax(1), q.log_softmax(1)
    if name == "reverse-kl":
        return kl_div(q, p, log_target=True, reduction="sum")
    if name == "forward-kl":
        return kl_div(p, q, log_target=True, reduction="sum")
    m = torch.logaddexp(p, q) - np.log(2)
    return sum(kl_div(m, part, log_target=True, reduction="sum") for part in (p, q)) / 2


def measure_plainly(root: Path, models: tuple[Path, Path], *, divergence: str, weight: float) -> torch.nn.Module:
    """The model with the first step's loss and gradients, sequence by sequence."""
    student, teacher = load(models[0]), load(models[1])
    data, seen = (Mixture([TokenizedData(root / f"{name}.arrow")]) for name in ("data", "seen"))
    total, count = 0.0, 0
    for row in draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist():
        own, labels = read_logits(student, data.read(row))
        with torch.no_grad():
            theirs, same = read_logits(teacher, seen.read(row))
        assert torch.equal(labels, same)
        total = total + weight * diverge(divergence, own, theirs)
        total, count = total + (1 - weight) * cross_entropy(own, labels, reduction="sum"), count + len(labels)
    student.loss = total / count
    student.loss.backward()
    return student


@pytest.mark.parametrize(("divergence", "weight", "cap"), [
    ("reverse-kl", 1.0, CAP), ("reverse-kl", 1.0, 4096), ("jsd", 0.7, CAP), ("forward-kl", 1.0, CAP),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_a_plain_loop(divergence, weight, cap, models, world, tmp_path):
    """For micro-batches of one or two samples as for one of the whole batch."""
    write_pair(tmp_path, models)
    own = dict(teacher_divergence=divergence, teacher_weight=(weight,), max_tokens_per_gpu=cap)
    options = group_options(TrainOptions, **make_options(tmp_path, models, **own))
    inputs = open_inputs(options, device=world.device, world_size=1, start=RunPosition())
    inputs.errors.raise_all()
    model = build_run_model(inputs, choose_step_options(options), world)
    batch = next(iterate_batches(inputs.data, options.data, objective=inputs.objective, num_steps=1,
                                 attention_cost=0.1, world=world))  # fmt: skip
    assert len(batch.micro_batches) > 3 if cap == CAP else len(batch.micro_batches) == 1
    for micro_batch in batch.micro_batches:
        read = sum(len(part.row.input_ids[0]) for part in (micro_batch, micro_batch.targets.seen))
        assert read <= cap  # the teacher's tokens count
    losses = [
        run_backward(model, model.prepare(micro_batch), batch.divisors).loss for micro_batch in batch.micro_batches
    ]
    expected = measure_plainly(tmp_path, models, divergence=divergence, weight=weight)
    assert sum(losses) / batch.num_loss_tokens == pytest.approx(expected.loss.item(), rel=1e-6)
    grads = {name.removeprefix("model."): param.grad.full_tensor() for name, param in model.named_parameters()}
    for name, param in expected.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-6)


def read_numbers(root: Path) -> np.ndarray:
    keys = ("loss", "grad_norm", "teacher_kl", "teacher_agreement")
    return np.array([[row[key] for key in keys] for row in read_rows(root / "run")])


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "changes"), [
    (1, dict(max_tokens_per_gpu=4096)), (2, {}), long(2, dict(teacher_model="self", teacher_divergence="jsd")),
])  # fmt: skip
def test_ranks_and_caps_do_not_change_the_numbers(num_ranks, changes, models, world, tmp_path):
    """A batch of 3: the second rank has nothing to do in some micro-batches."""
    same = {name: value for name, value in changes.items() if name != "max_tokens_per_gpu"}
    for root, (ranks, own) in {"one": (1, same), "other": (num_ranks, changes)}.items():
        write_pair(tmp_path / root, models)
        train_on(ranks, world, **make_options(tmp_path / root, models, max_steps=3, batch_size=3, **own))
    np.testing.assert_allclose(read_numbers(tmp_path / "other"), read_numbers(tmp_path / "one"), rtol=2e-5, atol=1e-6)
    assert (read_numbers(tmp_path / "one")[:, 2] > 0).all()


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one_and_needs_the_same_rows(models, world, tmp_path):
    for root in ("whole", "resumed"):
        write_pair(tmp_path / root, models)
    train_on(1, world, **make_options(tmp_path / "whole", models, max_steps=4))
    train_on(1, world, **make_options(tmp_path / "resumed", models, max_steps=2))
    train_on(1, world, **make_options(tmp_path / "resumed", models, max_steps=4))
    np.testing.assert_array_equal(read_numbers(tmp_path / "resumed"), read_numbers(tmp_path / "whole"))
    own = dict(max_steps=6, teacher_data=(str(tmp_path / "resumed" / "data.arrow"),))
    with pytest.raises(ValueError, match="other teacher"):
        train_on(1, world, **make_options(tmp_path / "resumed", models, **own))


def test_a_teacher_that_reads_the_same_rows_is_one_without_its_own(models, world, tmp_path):
    for root, own in {"beside": {}, "same": dict(teacher_data=())}.items():
        write_pair(tmp_path / root, models)
        (tmp_path / root / "seen.arrow").write_bytes((tmp_path / root / "data.arrow").read_bytes())
        validation = dict(validation_data_path=(str(tmp_path / root / "data.arrow"),))
        train_on(1, world, **make_options(tmp_path / root, models, max_steps=2, **own, **validation))
    np.testing.assert_allclose(read_numbers(tmp_path / "beside"), read_numbers(tmp_path / "same"), rtol=1e-6)
    rows = [read_lines(tmp_path / root / "run/validation_metrics_0.jsonl")[0] for root in ("beside", "same")]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6)
    assert (rows[0]["teacher_kl"], rows[1]["teacher_kl"] > 0) == (None, True)  # no rows of it belong to validations


def test_what_does_not_fit_is_refused_by_name(models, world, tmp_path):
    write_pair(tmp_path, models)
    samples = [data.read(row) for data in [TokenizedData(tmp_path / "seen.arrow")] for row in range(NUM_SAMPLES)]
    pairs = [(sample["input_ids"].tolist(), sample["labels"].tolist()) for sample in samples]
    (ids, labels), row = pairs[5], draw_samples(Mixture([TokenizedData(tmp_path / "data.arrow")]), seed=42, start=0,
                                                count=1)[0]  # fmt: skip
    other_tokens = list(pairs)
    other_tokens[row] = (pairs[row][0], [7 if label == pairs[row][1][-1] else label for label in pairs[row][1]])
    for written, problem in (
        (pairs[:-1], r"seen\.arrow: .*23 rows, .*data\.arrow 24"),
        ([*pairs[:5], (ids, [-100, *labels[1:-1], -100]), *pairs[6:]], r"seen\.arrow: row 6: .*tokens"),
        (other_tokens, rf"seen\.arrow: row {row + 1}: .*tokens .*data\.arrow"),
    ):
        write_samples(tmp_path / "seen.arrow", written)
        with pytest.raises(ValueError, match=problem):
            train_on(1, world, **make_options(tmp_path, models))
    write_pair(tmp_path, models)
    with pytest.raises(ValueError, match=r"data\.arrow: .* \d+ tokens, .*teacher"):
        train_on(1, world, **make_options(tmp_path, models, max_tokens_per_gpu=64))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(teacher_model=None, teacher_divergence="forward-kl"), "--teacher-data needs --teacher-model"),
        (dict(teacher_data=("a", "b")), "--teacher-data: 2 for 1 "),
        (dict(context_parallel=2), "--teacher-data cannot be used with --context-parallel"),
        (dict(teacher_weight=(), teacher_divergence="forward-kl"), "--teacher-model, --teacher-data: "),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, problem, models, tmp_path):
    (found,) = find_problems(group_options(TrainOptions, **make_options(tmp_path, models, **changes)))
    assert found.startswith(problem)


@pytest.mark.long
def test_a_plan_counts_what_a_teacher_reads(models, elsewhere, tmp_path):
    write_pair(tmp_path, models)
    options = make_options(tmp_path, models, dry_run=True, max_tokens_per_gpu=4096, max_steps=1)
    code, text = elsewhere(print_plan, options)
    rows = draw_samples(Mixture([TokenizedData(tmp_path / "data.arrow")]), seed=42, start=0, count=BATCH_SIZE)
    seen = int(TokenizedData(tmp_path / "seen.arrow").lengths[rows].sum())
    assert code == ExitCode.DONE and f"teacher reads {seen:,} " in text, text
