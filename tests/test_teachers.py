"""Teachers: divergences against autograd, TRL and torch; files against transformers' own top tokens; whole runs against
a plain loop over transformers' logits, also where a teacher reads other prompts than the model."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long, wide
from in_process import print_plan, train_on
from peft import LoraConfig, PeftModel, get_peft_model
from scored_data import TOP_K, score_here, write_data
from small_runs import check_step, read_rows
from tiny_data import make_samples, read_lines, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, change_json, save_model, save_tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.model.scoring.score_files import PART_BYTES, ScoreFile
from mini_trainer.objectives.next_tokens import CrossEntropy, TrainedTokens, sum_token_loss
from mini_trainer.objectives.soft_targets import Top, make_record_type
from mini_trainer.objectives.teachers import Terms, measure_taught_chunk
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.doors import FROM_LOGITS, FROM_TOP
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.run_model import build_run_model
from mini_trainer.run.start import open_inputs
from mini_trainer.run.step import run_backward
from mini_trainer.sampler import RunPosition, draw_samples, iterate_batches

R, V, K = 9, 23, 6
BATCH_SIZE = 8


def make_chunk(*, top_k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Top]:
    """A student's and a teacher's logits in fp64, targets, and what a file would say of the teacher."""
    generator = torch.Generator().manual_seed(top_k)
    logits, teacher = (2 * torch.randn(R, V, generator=generator, dtype=torch.float64) for _ in range(2))
    target = torch.randint(V, (R, 1), generator=generator)
    q = teacher.softmax(1)
    top = q.topk(top_k, dim=1)
    target[0] = top.indices[0, -1]
    tail = q.scatter(1, top.indices, 0).sum(1, keepdim=True)
    return logits, target, teacher, Top(top.indices, torch.cat([top.values, tail], 1).log(), q.gather(1, target).log())


def diverge_plainly(name: str, logits, labels, teacher, ids):
    """The sum over rows, by the definitions; `ids` None: over the whole vocabulary."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if name == "masked-kl":
        kept.scatter_(1, labels[:, None], False)
    p, q = (torch.where(kept, v.softmax(1), 0.0) for v in (logits, teacher))
    if ids is not None:
        named = torch.zeros_like(kept).scatter(1, ids, True) & kept
        rests = [torch.where(named, 0.0, v).sum(1, keepdim=True) for v in (p, q)]
        p, q = (torch.cat([torch.where(named, v, 0.0), *rests[i : i + 1]], 1) for i, v in enumerate((p, q)))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    m = (p + q) / 2
    pairs = {"reverse-kl": [(p, q)], "jsd": [(p, m), (q, m)]}.get(name, [(q, p)])
    sums = [torch.special.xlogy(a, torch.where(a > 0, a / b.clamp(min=1e-300), 1.0)).sum() for a, b in pairs]
    return sum(sums) / len(sums)


@pytest.mark.parametrize(
    ("name", "top_k"), [*((name, top_k) for name in FROM_TOP for top_k in (2, K, V)), *((n, None) for n in FROM_LOGITS)]
)
def test_divergences_are_their_definitions(name, top_k):
    """From a file of the teacher's `top_k` most probable tokens, and from its whole distributions."""
    logits, target, teacher, top = make_chunk(top_k=top_k or K)
    own = logits.clone().requires_grad_()
    expected = diverge_plainly(name, own, target[:, 0], teacher, top.ids if top_k else None)
    expected.backward()
    found = FROM_TOP[name](logits, target, top) if top_k else FROM_LOGITS[name](logits, target, teacher)
    torch.testing.assert_close(found.values.sum(), expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.d_logits, own.grad, rtol=1e-10, atol=1e-10)
    if top_k == V:
        whole = FROM_LOGITS[name](logits, target, teacher)
        torch.testing.assert_close(found.values, whole.values, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.d_logits, whole.d_logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "beta"), [("forward-kl", 0.0), ("jsd", 0.5), ("reverse-kl", 1.0)])
def test_divergences_are_those_of_trl(name, beta):
    from trl.experimental.gkd import GKDTrainer

    logits, target, teacher, _ = make_chunk()
    own = logits.clone().requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(own[None], teacher[None], beta=beta, temperature=2.0, reduction="sum")
    expected.backward()
    terms = Terms(1.0, name, temperature=2.0)
    values, d_logits, _ = measure_taught_chunk(logits, target, None, None, teacher, terms, False)
    torch.testing.assert_close(values[:, 2].sum(), expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(d_logits, 4 * own.grad, rtol=1e-10, atol=1e-10)  # the loss is T^2 times the divergence


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_chunks_derivatives_are_those_of_autograd(softcap):
    logits, target, teacher, _ = make_chunk()
    weights, own, terms = torch.rand(R, 1, dtype=torch.float64), logits.clone().requires_grad_(), Terms(0.3, "jsd", 2.0)
    capped = own if softcap is None else softcap * torch.tanh(own / softcap)
    losses = 0.7 * cross_entropy(capped, target[:, 0], reduction="none")
    p, q = (t.div(2).log_softmax(1) for t in (capped, teacher))
    m = torch.logaddexp(p, q) - np.log(2)
    divergence = (p.exp() * (p - m) + q.exp() * (q - m)).sum(1) / 2
    ((losses + 0.3 * 4 * divergence) * weights[:, 0]).sum().backward()
    values, d_logits, d_bias = measure_taught_chunk(logits, target, weights, softcap, teacher, terms, True)
    torch.testing.assert_close(d_logits, own.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(d_bias, own.grad.sum(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(values[:, 2], divergence.detach() * weights[:, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", [wide("forward-kl"), "masked-kl", wide("jsd")])
def test_the_compiled_chunk_computes_the_same(name):
    """Traced as --compile traces it, for chunks of any number of rows, without a break."""
    compiled = torch.compile(measure_taught_chunk, dynamic=True, backend="aot_eager", fullgraph=True)
    logits, target, whole, top = make_chunk()
    for rows in (R, R - 2):
        single = Top(top.ids, top.log_q.float(), top.log_q_target.float())
        teacher = Top(*(part[:rows] for part in single)) if name in FROM_TOP else whole[:rows].float()
        arguments = (target[:rows], torch.rand(rows, 1), 1.5, teacher, Terms(0.3, name, 2.0), True)
        for ours, expected in zip(
            compiled(logits[:rows].float(), *arguments),
            measure_taught_chunk(logits[:rows].float(), *arguments),
            strict=True,
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighting", ["dft", "eaft"])
def test_weights_by_the_models_own_probabilities(weighting):
    hidden, weight = torch.randn(R, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    target = torch.randint(V, (R,))
    tokens = TrainedTokens(hidden, weight, targets=target)
    loss = sum_token_loss(tokens, CrossEntropy(tokens, weighting=weighting), chunk_bytes=4 * V * 4)
    found = torch.autograd.grad(loss, [hidden, weight])
    logits = hidden @ weight.T
    p = logits.softmax(1).detach()
    if weighting == "dft":
        factors = p.gather(1, target[:, None])[:, 0]
    else:  # LLaMA-Factory's, which divides by 3 where the paper's normalisation is ln 20 = 2.9957
        top = p.topk(20, dim=1).values
        top = top / top.sum(1, keepdim=True)
        factors = -(top * top.log()).sum(1) / np.log(20)
    expected = (factors * cross_entropy(logits, target, reduction="none")).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for ours, reference in zip(found, torch.autograd.grad(expected, [hidden, weight]), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", [wide("forward-kl"), wide("masked-kl"), "jsd"])
@pytest.mark.parametrize("temperature", [wide(1.0), 2.0])
def test_weights_of_rows_are_those_of_chunks_with_one_weight(name, temperature):
    """Row by row, also compiled; a row with weight 0 says nothing of a teacher."""
    logits, target, whole, top = make_chunk()
    teacher, weights = top if name in FROM_TOP else whole, torch.linspace(0, 1, R, dtype=torch.float64)[:, None]
    terms, rest = Terms(weights, name, temperature), (torch.rand(R, 1, dtype=torch.float64), 1.5, teacher)
    torch.compiler.reset()  # variants of the other tests count towards its limit
    compiled = torch.compile(measure_taught_chunk, dynamic=True, backend="aot_eager", fullgraph=True)
    for measure in (measure_taught_chunk, compiled):
        values, d_logits, _ = measure(logits, target, *rest, terms, False)
        assert not values[0, 2:].any()
        for row in range(R):
            own = Terms(weights[row].item(), name, temperature)
            expected, d_expected, _ = measure_taught_chunk(logits, target, *rest, own, False)
            first = 2 if row == 0 else None
            torch.testing.assert_close(values[row, :first], expected[row, :first], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(d_logits[row], d_expected[row], rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A student and a teacher of other size, with one tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return tuple(save_tokenizer(save_model(FAMILIES["llama"], root / n, seed=i)) for i, n in enumerate("st"))


def make_options(root: Path, models: tuple[Path, Path], **changes: object) -> dict:
    return dict(
        model_name_or_path=str(models[0]), data_path=(str(root / "data.arrow"),), output_dir=str(root / "run"),
        batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=3, compute_dtype="float32",
        activation_checkpointing="none", export_dtype="float32", teacher_weight=0.6, checkpoint_every_steps=1,
    ) | changes  # fmt: skip


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def read_logits(model: torch.nn.Module, sample: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits at a sample's trained tokens, and these tokens."""
    labels = torch.from_numpy(sample["labels"].astype(np.int64))[1:]
    logits = model(input_ids=torch.from_numpy(sample["input_ids"].astype(np.int64))[None]).logits[0, :-1]
    return logits[labels >= 0], labels[labels >= 0]


@torch.no_grad()
def test_files_hold_the_teachers_most_probable_tokens(models, world, tmp_path):
    path = write_data(tmp_path / "data.arrow", models[0])
    score_here(world, models[1], path, temperature=2.0)
    data, teacher = TokenizedData(path), load(models[1])
    file = ScoreFile(data, "teacher")
    for row in range(len(data.lengths)):
        logits, labels = read_logits(teacher, data.read(row))
        log_q = (logits / 2).log_softmax(1)
        top = log_q.topk(5, dim=1)
        records = file[row]
        np.testing.assert_array_equal(records["ids"], top.indices)
        np.testing.assert_allclose(records["nll"], -top.values, rtol=1e-3)
        np.testing.assert_allclose(np.exp(-records["tail"].astype(float)), 1 - top.values.exp().sum(1), rtol=5e-3)
        np.testing.assert_allclose(records["target"], -log_q.gather(1, labels[:, None])[:, 0], rtol=1e-3)


def test_an_adapter_on_its_base_is_a_teacher(models, world, tmp_path):
    """As peft runs it; with more tokens than the base has it is refused, as by generate.py."""
    torch.manual_seed(0)
    adapted = get_peft_model(load(models[1]), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight.data.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    path = write_data(tmp_path / "data.arrow", models[0])
    score_here(world, tmp_path / "adapter", path)
    data, teacher = TokenizedData(path), PeftModel.from_pretrained(load(models[1]), tmp_path / "adapter").eval()
    file = ScoreFile(data, "teacher")
    for row in range(len(data.lengths)):
        logits = read_logits(teacher, data.read(row))[0].detach()
        top = logits.log_softmax(1).topk(TOP_K, dim=1)
        np.testing.assert_array_equal(file[row]["ids"], top.indices)
        np.testing.assert_allclose(file[row]["nll"], -top.values, rtol=1e-3)
    assert not torch.equal(read_logits(load(models[1]), data.read(0))[0], read_logits(teacher, data.read(0))[0])
    train_on(1, world, **make_options(tmp_path, models))
    with pytest.raises(ValueError, match=r"scores\.json: .*other teacher"):
        score_here(world, models[1], path)
    tokenizer = AutoTokenizer.from_pretrained(models[1])
    tokenizer.add_tokens([f"<|added_{i}|>" for i in range(VOCAB_SIZE + 1 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"--model .* 289 .* 288 .*merge-adapter"):
        score_here(world, tmp_path / "adapter", path)


def test_scoring_continues_where_a_killed_one_ended(models, world, tmp_path, monkeypatch):
    path, whole = write_data(tmp_path / "data.arrow", models[0]), tmp_path / "whole"
    score_here(world, models[1], path)
    file = tmp_path / "data.arrow.teacher.scores"
    file.rename(whole), Path(f"{file}.json").unlink()
    monkeypatch.setattr("mini_trainer.model.scoring.score_files.PART_BYTES", 60 * make_record_type(5).itemsize)
    assert PART_BYTES > 10**6
    calls = []

    def fail_at_third(*args: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    from mini_trainer.model.scoring.score_files import ScoreWriter

    original = ScoreWriter.write
    monkeypatch.setattr(ScoreWriter, "write", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        score_here(world, models[1], path)
    part = Path(f"{file}.part")
    with open(part, "ab") as torn:
        torn.write(b"torn in the middle of a record")
    with pytest.raises(ValueError, match=r"part\.json: .*other top k"):
        score_here(world, models[1], path, top_k=4)

    def cut_before(writer: ScoreWriter, first: int, *args: object) -> None:
        if first:
            writer.part.write_bytes(b"")  # by another process, which has begun later
        original(writer, first, *args)

    monkeypatch.setattr(ScoreWriter, "write", cut_before)
    begun = part.read_bytes()
    with pytest.raises(RunError, match=r"scores\.part: another process"):
        score_here(world, models[1], path)
    part.write_bytes(begun)
    monkeypatch.setattr(ScoreWriter, "write", original)
    score_here(world, models[1], path)
    assert file.read_bytes() == whole.read_bytes() and not part.exists()
    file.write_bytes(whole.read_bytes()[:-9])
    score_here(world, models[1], path)  # made again, as training asks for
    assert file.read_bytes() == whole.read_bytes()
    with pytest.raises(ValueError, match=r"scores\.json: .*other teacher"):
        score_here(world, models[0], path)
    score_here(world, models[0], path, name="another")
    Path(f"{path}.meta.json").unlink()
    with pytest.raises(ValueError, match=r"data\.arrow: .*data\.arrow\.meta\.json"):
        score_here(world, models[0], path, name="third")


def measure_plainly(
    student, teacher, data: Mixture, rows: list[int], terms: Terms, top_k: int | None, *, seen: Mixture | None = None
):
    """The mean over trained tokens, by the definitions; `by_source` of the terms are weights of the data sets, `seen`
    the rows that the teacher reads."""
    total, count = 0.0, 0
    for row in rows:
        sample = data.read(row)
        logits, labels = read_logits(student, sample)
        with torch.no_grad():
            theirs, same = read_logits(teacher, (seen or data).read(row))
        assert torch.equal(labels, same)
        p, q = logits.double() / terms.temperature, theirs.double() / terms.temperature
        ids = None if top_k is None else q.topk(top_k, dim=1).indices
        losses = cross_entropy(logits, labels, reduction="sum")
        divergence = diverge_plainly(terms.divergence, p, labels, q, ids)
        weight = terms.by_source[data.numbers.source_of(np.array([row]))[0]] if terms.by_source else terms.weight
        total = total + (1 - weight) * losses + weight * terms.temperature**2 * divergence
        count += len(labels)
    return total / count


@pytest.mark.parametrize(
    ("divergence", "temperature", "online"),
    [
        ("forward-kl", 1.0, False),
        ("forward-kl", 2.0, False),
        ("masked-kl", 1.0, False),
        ("forward-kl", 2.0, True),
        ("masked-kl", 1.0, True),
        ("reverse-kl", 1.0, True),
    ],
)
def test_loss_and_gradient_are_those_of_a_plain_loop(divergence, temperature, online, models, world, tmp_path):
    path = write_data(tmp_path / "data.arrow", models[0])
    own = dict(teacher_model=str(models[1])) if online else {}
    if not online:
        score_here(world, models[1], path, temperature=temperature)
    train_on(
        1, world, **make_options(
            tmp_path, models, max_steps=1, teacher_divergence=divergence, teacher_temperature=temperature,
            max_grad_norm=None, **own,
        )
    )  # fmt: skip
    (metrics,) = read_rows(tmp_path / "run")
    student, teacher, data = load(models[0]), load(models[1]), Mixture([TokenizedData(path)])
    rows = draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist()
    terms = Terms(0.6, divergence, temperature)
    expected = measure_plainly(student, teacher, data, rows, terms, None if online else 5)
    check_step(metrics, student, expected, tolerance=1e-5 if online else 1e-3)  # files are in half precision
    assert metrics["teacher_tail"] == 0 if online else metrics["teacher_tail"] > 0


WEIGHTS = (0.0, 0.7, 0.2)  # of three data sets


def write_mixture(root: Path, models: tuple[Path, Path], world, *, scored: bool) -> tuple[str, ...]:
    """Three data sets, and a teacher's scores of those that need some."""
    root.mkdir(exist_ok=True)
    paths = [write_data(root / f"{name}.arrow", models[0], seed=i, num_samples=9) for i, name in enumerate("abc")]
    for path, weight in zip(paths, WEIGHTS, strict=True):
        if scored and weight:
            score_here(world, models[1], path)
    return tuple(map(str, paths))


@pytest.mark.parametrize(
    ("divergence", "online"), [("forward-kl", False), wide("masked-kl", False), ("reverse-kl", True)]
)
def test_each_data_set_has_its_own_weight(divergence, online, models, world, tmp_path):
    paths = write_mixture(tmp_path, models, world, scored=not online)
    own = dict(teacher_model=str(models[1]), teacher_temperature=2.0) if online else {}
    train_on(
        1, world, **make_options(
            tmp_path, models, max_steps=1, teacher_divergence=divergence, teacher_weight=WEIGHTS, data_path=paths,
            max_grad_norm=None, batch_size=12, **own,
        )
    )  # fmt: skip
    (metrics,) = read_rows(tmp_path / "run")
    student, teacher, data = load(models[0]), load(models[1]), Mixture([TokenizedData(path) for path in paths])
    rows = draw_samples(data, seed=42, start=0, count=12).tolist()
    terms = Terms(0.7, divergence, 2.0 if online else 1.0, WEIGHTS)
    expected = measure_plainly(student, teacher, data, rows, terms, None if online else 5)
    check_step(metrics, student, expected, tolerance=1e-5 if online else 1e-3)  # files are in half precision
    untaught, *taught = metrics["sources"].values()
    assert untaught["loss"] == pytest.approx(untaught["cross_entropy"], rel=1e-6)
    assert (untaught["teacher_kl"], untaught["teacher_tail"], untaught["teacher_agreement"]) == (None, None, None)
    counts = [source["num_loss_counted_tokens"] for source in taught]
    mean = np.average([source["teacher_kl"] for source in taught], weights=counts)
    assert metrics["teacher_kl"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.long
def test_the_start_as_a_teacher_of_some_data_sets(models, world, tmp_path):
    """Its divergence is 0 in the first step: the second one is compared, with the model that the first one left."""
    paths = write_mixture(tmp_path, models, world, scored=False)
    train_on(
        1, world, **make_options(
            tmp_path, models, max_steps=2, teacher_model="self", teacher_weight=WEIGHTS, data_path=paths,
            min_samples_per_checkpoint=BATCH_SIZE, max_grad_norm=None,
        )
    )  # fmt: skip
    student, data = load(tmp_path / "run/hf_format/samples_8"), Mixture([TokenizedData(path) for path in paths])
    rows = draw_samples(data, seed=42, start=BATCH_SIZE, count=BATCH_SIZE).tolist()
    expected = measure_plainly(student, load(models[0]), data, rows, Terms(0.7, "forward-kl", 1.0, WEIGHTS), None)
    check_step(read_rows(tmp_path / "run")[1], student, expected, tolerance=1e-5)
    card = (tmp_path / "run/hf_format/samples_16/README.md").read_text()
    assert "teacher (forward-kl, weights 0, 0.7, 0.2, temperature 1)" in card


def test_one_weight_for_all_data_sets_is_that_weight_for_each(models, world, tmp_path):
    for root, weight in (("one", 0.6), ("each", (0.6, 0.6, 0.6))):
        paths = write_mixture(tmp_path / root, models, world, scored=False)
        own = dict(teacher_model=str(models[1]), data_path=paths, teacher_weight=weight)
        train_on(1, world, **make_options(tmp_path / root, models, **own))
    np.testing.assert_array_equal(read_numbers(tmp_path / "one"), read_numbers(tmp_path / "each"))


NUMBERS = ("loss", "grad_norm", "cross_entropy", "teacher_kl", "teacher_tail", "teacher_agreement")


def read_numbers(root: Path, keys: tuple[str, ...] = NUMBERS) -> np.ndarray:
    return np.array([[row[key] for key in keys] for row in read_rows(root / "run")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, dict(max_tokens_per_gpu=1024)),
        (2, {}),
        long(2, dict(context_parallel=2)),
        wide(1, dict(teacher_model="T", max_tokens_per_gpu=1024)),
        long(2, dict(teacher_model="T")),
        wide(2, dict(teacher_model="self", max_tokens_per_gpu=48, micro_batch_grad_sync="last")),
        wide(2, dict(teacher_weight=WEIGHTS, context_parallel=2)),
        long(2, dict(teacher_weight=WEIGHTS)),
    ],
    ids=["cap", "2 ranks", "context parallel", "online", "online, 2 ranks", "self, 2 ranks, one reduction a step",
         "weights, context parallel", "weights, 2 ranks"],
)  # fmt: skip
def test_ranks_and_caps_do_not_change_the_numbers(num_ranks, changes, models, world, tmp_path):
    changes = {name: str(models[1]) if value == "T" else value for name, value in changes.items()}
    teacher = {name: value for name, value in changes.items() if name in ("teacher_model", "teacher_weight")}
    for root, (ranks, own) in {"one": (1, teacher), "other": (num_ranks, changes)}.items():
        (tmp_path / root).mkdir()
        if "teacher_weight" in teacher:
            own = own | dict(data_path=write_mixture(tmp_path / root, models, world, scored=True))
        else:
            path = write_data(tmp_path / root / "data.arrow", models[0])
            if not teacher:
                score_here(world, models[1], path)
        train_on(ranks, world, **make_options(tmp_path / root, models, **own))
    np.testing.assert_allclose(read_numbers(tmp_path / "other"), read_numbers(tmp_path / "one"), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("own", [{}, long(dict(teacher_model="self")), wide(dict(teacher_model="self", lora=True))])
def test_a_resumed_run_is_the_uninterrupted_one(own, models, world, tmp_path):
    """The teacher `self` is the model as the run started, also after a resume."""
    for root in ("whole", "resumed"):
        (tmp_path / root).mkdir()
        path = write_data(tmp_path / root / "data.arrow", models[0])
        if not own:
            score_here(world, models[1], path)
    train_on(1, world, **make_options(tmp_path / "whole", models, max_steps=4, **own))
    train_on(1, world, **make_options(tmp_path / "resumed", models, max_steps=2, **own))
    train_on(1, world, **make_options(tmp_path / "resumed", models, max_steps=4, **own))
    np.testing.assert_array_equal(read_numbers(tmp_path / "resumed"), read_numbers(tmp_path / "whole"))
    assert read_numbers(tmp_path / "whole")[-1, 3] > 0  # it has moved away from its teacher


@pytest.mark.parametrize("method", [{}, dict(lora=True), wide(dict(osft=True, osft_unfreeze_rank_ratio=0.5))])
def test_the_start_as_a_teacher_is_a_second_copy_of_it_without_dropout(method, models, world, tmp_path):
    student = shutil.copytree(models[0], tmp_path / "student")
    change_json(student / "config.json", attention_dropout=0.3)
    models = (student, models[1])
    for root, teacher in (("copy", str(student)), ("self", "self")):
        (tmp_path / root).mkdir()
        write_data(tmp_path / root / "data.arrow", models[0])
        cache = dict(osft_cache_dir=str(tmp_path / "cache")) if "osft" in method else {}
        train_on(1, world, **make_options(tmp_path / root, models, teacher_model=teacher, **method, **cache))
    np.testing.assert_allclose(read_numbers(tmp_path / "self"), read_numbers(tmp_path / "copy"), rtol=2e-5, atol=1e-6)


def test_without_weight_the_run_is_the_one_without_a_teacher(models, world, tmp_path):
    for root, weight in (("plain", ()), ("taught", 0.0)):
        (tmp_path / root).mkdir()
        path = write_data(tmp_path / root / "data.arrow", models[0])
        if root == "taught":
            score_here(world, models[1], path)
        train_on(1, world, **make_options(tmp_path / root, models, teacher_weight=weight))
    plain, taught = (read_rows(tmp_path / root / "run") for root in ("plain", "taught"))
    assert [(row["loss"], row["grad_norm"]) for row in plain] == [(row["loss"], row["grad_norm"]) for row in taught]


def test_each_data_set_reports_its_own_share(models, world, tmp_path):
    paths = [write_data(tmp_path / f"{name}.arrow", models[0], seed=i, num_samples=12) for i, name in enumerate("ab")]
    for path in paths:
        score_here(world, models[1], path)
    for run, own in {"taught": {}, "weighted": dict(teacher_weight=(), loss_weighting="dft")}.items():
        options = make_options(tmp_path, models, data_path=tuple(map(str, paths)), output_dir=str(tmp_path / run))
        train_on(1, world, **options | own)
        for row in read_rows(tmp_path / run):
            sources = row["sources"].values()
            counts = [source["num_loss_counted_tokens"] for source in sources]
            for name in ("cross_entropy", *(("teacher_kl", "teacher_tail", "teacher_agreement") if not own else ())):
                values = [source[name] for source in sources]
                assert row[name] == pytest.approx(np.average(values, weights=counts), rel=1e-5)
                assert values[0] != values[1] or name == "teacher_agreement"


@pytest.mark.long
def test_validations_report_the_teacher_where_they_have_one(models, world, tmp_path, caplog):
    paths = [write_data(tmp_path / f"{name}.arrow", models[0], seed=i) for i, name in enumerate(("data", "a", "b"))]
    for path in paths[:2]:
        score_here(world, models[1], path)
    for held_out, has_scores in ((paths[1], True), (paths[2], False)):
        caplog.clear()
        caplog.set_level("INFO", logger="mini_trainer")
        output_dir = tmp_path / held_out.stem / "run"
        output_dir.parent.mkdir()
        options = make_options(tmp_path, models, validation_data_path=(str(held_out),), output_dir=str(output_dir))
        train_on(1, world, **options)
        first = json.loads((output_dir / "validation_metrics_0.jsonl").read_text().splitlines()[0])
        student, data = load(models[0]), Mixture([TokenizedData(held_out)])
        with torch.no_grad():
            pairs = [read_logits(student, data.read(row)) for row in range(24)]
            loss = sum(cross_entropy(*pair, reduction="sum") for pair in pairs) / sum(len(pair[1]) for pair in pairs)
        assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert (first["teacher_kl"] is not None) == has_scores
        card = (output_dir / "hf_format" / "samples_24" / "README.md").read_text()
        assert " teacher t (forward-kl, weight 0.6, temperature 1) |" in card
        assert ("| teacher kl |" in card) == ("  teacher kl " in caplog.text) == has_scores


def test_what_does_not_fit_is_refused_by_name(models, world, tmp_path):
    path = write_data(tmp_path / "data.arrow", models[0])
    with pytest.raises(ValueError, match=r"data\.arrow: mini-trainer score-data --data-path .* --name teacher "):
        train_on(1, world, **make_options(tmp_path, models))
    score_here(world, models[1], path, top_k=1)
    with pytest.raises(ValueError, match=r"--teacher-scores teacher: .*--teacher-temperature"):
        train_on(1, world, **make_options(tmp_path, models, teacher_temperature=2.0))
    with pytest.raises(ValueError, match=r"--teacher-scores teacher: .*--top-k 2"):
        train_on(1, world, **make_options(tmp_path, models, teacher_divergence="masked-kl"))
    sidecar = Path(f"{path}.teacher.scores.json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | dict(max_token_id=VOCAB_SIZE)))
    with pytest.raises(ValueError, match=rf"teacher\.scores: .*token id {VOCAB_SIZE}, "):
        train_on(1, world, **make_options(tmp_path, models))
    write_data(path, models[0], seed=9)
    with pytest.raises(ValueError, match=r"teacher\.scores: .*other data"):
        train_on(1, world, **make_options(tmp_path, models))
    for key, what in {"tokenizer_fingerprint": "tokenizer", "chat_template_fingerprint": "chat template"}.items():
        sidecar = json.loads(Path(f"{path}.meta.json").read_text())
        Path(f"{path}.meta.json").write_text(json.dumps(sidecar | {key: "0" * 64}))
        with pytest.raises(ValueError, match=rf"data\.arrow: .*{what} other than "):
            score_here(world, models[1], path, name="other")
        Path(f"{path}.meta.json").write_text(json.dumps(sidecar))


def test_the_teacher_may_read_other_prompts(models, world, tmp_path):
    """Self-distillation: the same answers after prompts that the student does not see."""
    path, seen = (write_data(tmp_path / f"{name}.arrow", models[0]) for name in ("data", "seen"))
    samples = make_samples(24, vocab_size=VOCAB_SIZE)
    write_samples(seen, [([5, 6, 7, *ids], [-100] * 3 + labels) for ids, labels in samples])
    score_here(world, models[1], path, teacher_data=(str(seen),))
    score_here(world, models[1], seen)
    name = "data.arrow.teacher.scores"
    assert (tmp_path / name).read_bytes() == (tmp_path / "seen.arrow.teacher.scores").read_bytes()
    write_data(seen, models[0], seed=1)
    with pytest.raises(RunError, match=r"seen\.arrow: row 1: .*tokens"):
        score_here(world, models[1], path, teacher_data=(str(seen),), name="other")


NUM_SAMPLES, CAP = 24, 160


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


def make_pair_options(root: Path, models: tuple[Path, Path], **changes: object) -> dict:
    return make_options(root, models) | dict(
        teacher_data=(str(root / "seen.arrow"),), teacher_model=str(models[1]), teacher_divergence="reverse-kl",
        max_tokens_per_gpu=CAP, max_steps=1, teacher_weight=(1.0,), max_grad_norm=None,
    ) | changes  # fmt: skip


@pytest.mark.parametrize(("divergence", "weight", "cap"), [
    ("reverse-kl", 1.0, CAP), ("reverse-kl", 1.0, 4096), ("jsd", 0.7, CAP), ("forward-kl", 1.0, CAP),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_a_plain_loop(divergence, weight, cap, models, world, tmp_path):
    """For micro-batches of one or two samples as for one of the whole batch."""
    write_pair(tmp_path, models)
    own = dict(teacher_divergence=divergence, teacher_weight=(weight,), max_tokens_per_gpu=cap)
    options = group_options(TrainOptions, **make_pair_options(tmp_path, models, **own))
    inputs = open_inputs(options, device=world.device, world_size=1, start=RunPosition())
    inputs.errors.raise_all()
    model = build_run_model(inputs, choose_step_options(options), world)
    batch = next(iterate_batches(inputs.data, options.data, objective=inputs.objective, num_steps=1,
                                 attention_cost=0.1, world=world))  # fmt: skip
    assert len(batch.micro_batches) > 3 if cap == CAP else len(batch.micro_batches) == 1
    own, beside = (TokenizedData(tmp_path / f"{name}.arrow").lengths[:] for name in ("data", "seen"))
    assert inputs.data.load_of(np.arange(NUM_SAMPLES)).squares.tolist() == (own**2 + beside**2).tolist()
    for micro_batch in batch.micro_batches:
        read = sum(len(part.row.input_ids[0]) for part in (micro_batch, micro_batch.targets.seen))
        assert read <= cap  # the teacher's tokens count
    losses = [
        run_backward(model, model.prepare(micro_batch), batch.divisors).loss for micro_batch in batch.micro_batches
    ]
    student, teacher = load(models[0]), load(models[1])
    data, seen = (Mixture([TokenizedData(tmp_path / f"{name}.arrow")]) for name in ("data", "seen"))
    rows = draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist()
    expected = measure_plainly(student, teacher, data, rows, Terms(weight, divergence, 1.0), None, seen=seen)
    expected.backward()
    assert sum(losses) / batch.num_loss_tokens == pytest.approx(expected.item(), rel=1e-6)
    grads = {name.removeprefix("model."): param.grad.full_tensor() for name, param in model.named_parameters()}
    for name, param in student.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-6)


read_pair_numbers = partial(read_numbers, keys=("loss", "grad_norm", "teacher_kl", "teacher_agreement"))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "changes"), [
    (1, dict(max_tokens_per_gpu=4096)), long(2, {}), long(2, dict(teacher_model="self", teacher_divergence="jsd")),
])  # fmt: skip
def test_with_prompts_of_its_own_ranks_and_caps_do_not_change_the_numbers(num_ranks, changes, models, world, tmp_path):
    """A batch of 3: the second rank has nothing to do in some micro-batches."""
    same = {name: value for name, value in changes.items() if name != "max_tokens_per_gpu"}
    for root, (ranks, own) in {"one": (1, same), "other": (num_ranks, changes)}.items():
        write_pair(tmp_path / root, models)
        train_on(ranks, world, **make_pair_options(tmp_path / root, models, max_steps=3, batch_size=3, **own))
    np.testing.assert_allclose(
        read_pair_numbers(tmp_path / "other"), read_pair_numbers(tmp_path / "one"), rtol=2e-5, atol=1e-6
    )
    assert (read_pair_numbers(tmp_path / "one")[:, 2] > 0).all()


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one_and_needs_the_same_rows(models, world, tmp_path):
    for root in ("whole", "resumed"):
        write_pair(tmp_path / root, models)
    train_on(1, world, **make_pair_options(tmp_path / "whole", models, max_steps=4))
    train_on(1, world, **make_pair_options(tmp_path / "resumed", models, max_steps=2))
    train_on(1, world, **make_pair_options(tmp_path / "resumed", models, max_steps=4))
    np.testing.assert_array_equal(read_pair_numbers(tmp_path / "resumed"), read_pair_numbers(tmp_path / "whole"))
    own = dict(max_steps=6, teacher_data=(str(tmp_path / "resumed" / "data.arrow"),))
    with pytest.raises(ValueError, match="other teacher"):
        train_on(1, world, **make_pair_options(tmp_path / "resumed", models, **own))


def test_a_teacher_that_reads_the_same_rows_is_one_without_its_own(models, world, tmp_path):
    for root, own in {"beside": {}, "same": dict(teacher_data=())}.items():
        write_pair(tmp_path / root, models)
        (tmp_path / root / "seen.arrow").write_bytes((tmp_path / root / "data.arrow").read_bytes())
        validation = dict(validation_data_path=(str(tmp_path / root / "data.arrow"),))
        train_on(1, world, **make_pair_options(tmp_path / root, models, max_steps=2, **own, **validation))
    np.testing.assert_allclose(read_pair_numbers(tmp_path / "beside"), read_pair_numbers(tmp_path / "same"), rtol=1e-6)
    rows = [read_lines(tmp_path / root / "run/validation_metrics_0.jsonl")[0] for root in ("beside", "same")]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6)
    assert (rows[0]["teacher_kl"], rows[1]["teacher_kl"] > 0) == (None, True)  # no rows of it belong to validations


def test_rows_of_its_own_that_do_not_fit_are_refused_by_name(models, world, tmp_path):
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
            train_on(1, world, **make_pair_options(tmp_path, models))
    write_pair(tmp_path, models)
    with pytest.raises(ValueError, match=r"data\.arrow: .* \d+ tokens, .*teacher"):
        train_on(1, world, **make_pair_options(tmp_path, models, max_tokens_per_gpu=64))


@pytest.mark.long
def test_a_plan_counts_what_a_teacher_reads(models, elsewhere, tmp_path):
    write_pair(tmp_path, models)
    options = make_pair_options(tmp_path, models, dry_run=True, max_tokens_per_gpu=4096, max_steps=1)
    code, text = elsewhere(print_plan, options)
    rows = draw_samples(Mixture([TokenizedData(tmp_path / "data.arrow")]), seed=42, start=0, count=BATCH_SIZE)
    seen = int(TokenizedData(tmp_path / "seen.arrow").lengths[rows].sum())
    assert code == ExitCode.DONE and f"teacher reads {seen:,} " in text and "teacher: " in text, text
