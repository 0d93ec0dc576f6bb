"""Teachers: divergences against autograd, TRL and torch; files against transformers' own top tokens; whole runs against
a plain loop over transformers' logits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long, wide
from in_process import train_on
from peft import LoraConfig, PeftModel, get_peft_model
from plain_loop import load, read_logits
from scored_data import TOP_K, score_here, write_data
from small_runs import check_step, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, change_json, save_model, save_tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import RunError
from mini_trainer.model.scoring.score_files import PART_BYTES, ScoreFile
from mini_trainer.objectives.next_tokens import CrossEntropy, TrainedTokens, sum_token_loss
from mini_trainer.objectives.soft_targets import SoftTargets, diverge_from_top, make_record_type
from mini_trainer.objectives.teachers import Terms, measure_taught_chunk
from mini_trainer.options.doors import DIVERGENCES
from mini_trainer.sampler import draw_samples

R, V, K = 9, 23, 6
BATCH_SIZE = 8


def make_chunk(*, top_k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SoftTargets]:
    """A student's and a teacher's logits in fp64, targets, and what a file would say of the teacher."""
    generator = torch.Generator().manual_seed(top_k)
    logits, teacher = (2 * torch.randn(R, V, generator=generator, dtype=torch.float64) for _ in range(2))
    target = torch.randint(V, (R, 1), generator=generator)
    q = teacher.softmax(1)
    top = q.topk(top_k, dim=1)
    tail = q.scatter(1, top.indices, 0).sum(1, keepdim=True)
    return logits, target, teacher, SoftTargets(top.indices, torch.cat([top.values, tail], 1).log())


def diverge_plainly(name: str, logits, teacher, ids):
    """The sum over rows, by the definitions; `ids` None: over the whole vocabulary."""
    p, q = logits.softmax(1), teacher.softmax(1)
    if ids is not None:
        p, q = (torch.cat([v.gather(1, ids), v.scatter(1, ids, 0).sum(1, keepdim=True)], 1) for v in (p, q))
    m = (p + q) / 2
    pairs = {"reverse-kl": [(p, q)], "jsd": [(p, m), (q, m)]}.get(name, [(q, p)])
    sums = [torch.special.xlogy(a, torch.where(a > 0, a / b.clamp(min=1e-300), 1.0)).sum() for a, b in pairs]
    return sum(sums) / len(sums)


@pytest.mark.parametrize(
    ("name", "top_k"), [*(("forward-kl", top_k) for top_k in (2, K, V)), *((name, None) for name in DIVERGENCES)]
)
def test_divergences_are_their_definitions(name, top_k):
    """From a file of the teacher's `top_k` most probable tokens, and from its whole distributions."""
    logits, _, teacher, soft = make_chunk(top_k=top_k or K)
    own = logits.clone().requires_grad_()
    expected = diverge_plainly(name, own, teacher, soft.ids if top_k else None)
    expected.backward()
    found = diverge_from_top(logits.log_softmax(1), soft) if top_k else DIVERGENCES[name](logits, teacher)
    torch.testing.assert_close(found.values.sum(), expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.d_logits, own.grad, rtol=1e-10, atol=1e-10)


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
@pytest.mark.parametrize("name", ["forward-kl", wide("jsd")])
def test_the_compiled_chunk_computes_the_same(name):
    """Traced as --compile traces it, for chunks of any number of rows, without a break."""
    compiled = torch.compile(measure_taught_chunk, dynamic=True, backend="aot_eager", fullgraph=True)
    logits, target, whole, soft = make_chunk()
    soft = SoftTargets(soft.ids, soft.log_q.float())
    for rows in (R, R - 2):
        teacher = soft.slice(slice(rows)) if name == "forward-kl" else whole[:rows].float()
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


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A student and a teacher, which has dropout that must stay off, with one tokenizer."""
    root = tmp_path_factory.mktemp("models")
    paths = tuple(save_tokenizer(save_model(FAMILIES["llama"], root / n, seed=i)) for i, n in enumerate("st"))
    change_json(paths[1] / "config.json", attention_dropout=0.3)
    return paths


def make_options(root: Path, models: tuple[Path, Path], **changes: object) -> dict:
    return dict(
        model_name_or_path=str(models[0]), data_path=(str(root / "data.arrow"),), output_dir=str(root / "run"),
        batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=3, compute_dtype="float32",
        activation_checkpointing="none", export_dtype="float32", teacher_weight=0.6, checkpoint_every_steps=1,
    ) | changes  # fmt: skip


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


def measure_plainly(student, teacher, data: Mixture, rows: list[int], terms: Terms, top_k: int | None):
    """The mean over trained tokens, by the definitions."""
    total, count = 0.0, 0
    for row in rows:
        sample = data.read(row)
        logits, labels = read_logits(student, sample)
        with torch.no_grad():
            theirs, _ = read_logits(teacher, sample)
        p, q = logits.double() / terms.temperature, theirs.double() / terms.temperature
        ids = None if top_k is None else q.topk(top_k, dim=1).indices
        losses = cross_entropy(logits, labels, reduction="sum")
        divergence = diverge_plainly(terms.divergence, p, q, ids)
        total = total + (1 - terms.weight) * losses + terms.weight * terms.temperature**2 * divergence
        count += len(labels)
    return total / count


@pytest.mark.parametrize(
    ("divergence", "temperature", "online"),
    [("forward-kl", 1.0, False), ("forward-kl", 2.0, False), ("forward-kl", 2.0, True), ("reverse-kl", 1.0, True)],
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


NUMBERS = ("loss", "grad_norm", "cross_entropy", "teacher_kl", "teacher_tail", "teacher_agreement")


def read_numbers(root: Path) -> np.ndarray:
    return np.array([[row[key] for key in NUMBERS] for row in read_rows(root / "run")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, dict(max_tokens_per_gpu=1024)),
        (2, {}),
        long(2, dict(context_parallel=2)),
        wide(1, dict(teacher_model="T", max_tokens_per_gpu=1024)),
        long(2, dict(teacher_model="T", max_tokens_per_gpu=48, micro_batch_grad_sync="last")),
    ],
    ids=["cap", "2 ranks", "context parallel", "online", "online, 2 ranks, one reduction a step"],
)
def test_ranks_and_caps_do_not_change_the_numbers(num_ranks, changes, models, world, tmp_path):
    changes = {name: str(models[1]) if value == "T" else value for name, value in changes.items()}
    teacher = {name: value for name, value in changes.items() if name == "teacher_model"}
    for root, (ranks, own) in {"one": (1, teacher), "other": (num_ranks, changes)}.items():
        (tmp_path / root).mkdir()
        path = write_data(tmp_path / root / "data.arrow", models[0])
        if not teacher:
            score_here(world, models[1], path)
        train_on(ranks, world, **make_options(tmp_path / root, models, **own))
    np.testing.assert_allclose(read_numbers(tmp_path / "other"), read_numbers(tmp_path / "one"), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("online", [False, long(True)])
def test_a_resumed_run_is_the_uninterrupted_one(online, models, world, tmp_path):
    own = dict(teacher_model=str(models[1])) if online else {}
    for root in ("whole", "resumed"):
        (tmp_path / root).mkdir()
        path = write_data(tmp_path / root / "data.arrow", models[0])
        if not online:
            score_here(world, models[1], path)
    train_on(1, world, **make_options(tmp_path / "whole", models, max_steps=4, **own))
    train_on(1, world, **make_options(tmp_path / "resumed", models, max_steps=2, **own))
    train_on(1, world, **make_options(tmp_path / "resumed", models, max_steps=4, **own))
    np.testing.assert_array_equal(read_numbers(tmp_path / "resumed"), read_numbers(tmp_path / "whole"))


def test_without_weight_the_run_is_the_one_without_a_teacher(models, world, tmp_path):
    for root, weight in (("plain", None), ("taught", 0.0)):
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
    for run, own in {"taught": {}, "weighted": dict(teacher_weight=None, loss_weighting="dft")}.items():
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
    score_here(world, models[1], path)
    with pytest.raises(ValueError, match=r"--teacher-scores teacher: .*--teacher-temperature"):
        train_on(1, world, **make_options(tmp_path, models, teacher_temperature=2.0))
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
