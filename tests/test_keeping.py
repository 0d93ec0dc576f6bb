"""`--keep`: the divergence from the start on old samples, against a plain loop over transformers' own logits; ranks,
caps and resumes; what is computed once, and what is refused."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long, wide
from in_process import train_on
from plain_loop import load, read_logits, train_plainly
from scored_data import write_data
from small_runs import forget_since, read_rows
from tiny_data import write_counting_chats, write_jsonl
from tiny_models import FAMILIES, save_model, save_tokenizer
from torch.nn.functional import cross_entropy

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import RunError
from mini_trainer.options import DataOptions, TrainOptions, group_options, replace_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.run import keeping
from mini_trainer.run.checkpointing import NoValidCheckpoint
from mini_trainer.run.keeping import StartScores
from mini_trainer.run.old_stream import open_stream
from mini_trainer.run.raw_rows import find_data
from mini_trainer.sampler import derive_seed, draw_samples

BATCH_SIZE, SHARE, NUM_OLD = 8, 0.33, 3
NUMBERS = ("loss", "grad_norm", "kept_kl", "kept_tail", "kept_agreement")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tokenizer(save_model(FAMILIES["llama"], tmp_path_factory.mktemp("models") / "m"))


def make_options(root: Path, model: Path, **changes: object) -> dict:
    """A run on new samples, beside old ones, whose scores are kept in `root`."""
    root.mkdir(parents=True, exist_ok=True)
    new, old = (write_data(root / f"{name}.arrow", model, seed=i) for i, name in enumerate(("new", "old")))
    return dict(
        model_name_or_path=str(model), data_path=(str(new),), keep=(str(old),), output_dir=str(root / "run"),
        data_cache_dir=str(root / "cache"), batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-2,
        max_steps=4, compute_dtype="float32", activation_checkpointing="none", export_dtype="float32", weight_decay=0.1,
        adam_eps=1e-5, checkpoint_every_steps=1,
    ) | changes  # fmt: skip


def read_numbers(root: Path) -> np.ndarray:
    return np.array([[row[key] for key in NUMBERS] for row in read_rows(root / "run")])


def diverge(start: torch.Tensor, logits: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """The sum of KL(start || model), over the whole vocabulary, or over its likeliest tokens and a bucket of others."""
    q, p = start.softmax(1), logits.softmax(1)
    if top_k is not None:
        ids = q.topk(top_k, dim=1).indices
        q, p = (torch.cat([v.gather(1, ids), 1 - v.gather(1, ids).sum(1, keepdim=True)], 1) for v in (q, p))
    return (q * (q / p).log()).sum()


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_a_kept_step_is_not_that_of_a_plain_loop(weight, model, world, tmp_path):
    """Four steps of AdamW: losses, norms and divergences."""
    train_on(1, world, **make_options(tmp_path, model, keep_weight=weight))
    student, start = load(model), load(model)
    new, old = (Mixture([TokenizedData(tmp_path / f"{name}.arrow")]) for name in ("new", "old"))
    kept, whole = [], []

    def backward(rows: list[int], num_before: int) -> float:
        own = [cross_entropy(*read_logits(student, new.read(row)), reduction="sum") for row in rows]
        loss = sum(own) / sum(len(read_logits(student, new.read(row))[1]) for row in rows)
        first = num_before // BATCH_SIZE * NUM_OLD
        drawn = draw_samples(old, seed=derive_seed(42, 0, 0), start=first, count=NUM_OLD).tolist()
        with torch.no_grad():
            theirs = [read_logits(start, old.read(row))[0].double() for row in drawn]
        mine = [read_logits(student, old.read(row))[0].double() for row in drawn]
        count = sum(map(len, theirs))
        divergence, over_all = (
            sum(diverge(*pair, k) for pair in zip(theirs, mine, strict=True)) / count for k in (32, None)
        )
        (loss + weight * divergence).backward()
        kept.append(divergence.item()), whole.append(over_all.item())
        return loss.item()

    losses, norms = train_plainly(
        student, new, backward, num_steps=4, batch_size=BATCH_SIZE, learning_rate=1e-2, eps=1e-5
    )
    numbers = read_numbers(tmp_path)
    np.testing.assert_allclose(numbers[:, 0], losses, rtol=1e-5)
    np.testing.assert_allclose(numbers[:, 1], norms, rtol=1e-4)
    np.testing.assert_allclose(numbers[:, 2], kept, rtol=1e-4, atol=1e-6)
    assert kept[0] == pytest.approx(0, abs=1e-9) and (np.array(kept) <= np.array(whole) + 1e-9).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [(1, dict(max_tokens_per_gpu=1024)), (2, {}), long(2, dict(context_parallel=2)), wide(2, dict(lora=True))],
    ids=["one micro-batch", "2 ranks", "context parallel", "LoRA, 2 ranks"],
)
def test_kept_numbers_depend_on_ranks_or_caps(num_ranks, changes, model, world, tmp_path):
    method = {name: value for name, value in changes.items() if name == "lora"}
    train_on(1, world, **make_options(tmp_path / "one", model, **method))
    train_on(num_ranks, world, **make_options(tmp_path / "other", model, **changes))
    one, other = (read_rows(tmp_path / name / "run") for name in ("one", "other"))
    np.testing.assert_allclose(read_numbers(tmp_path / "other"), read_numbers(tmp_path / "one"), rtol=2e-5, atol=1e-6)
    assert [row["num_kept_tokens"] for row in one] == [row["num_kept_tokens"] for row in other]
    assert one[0]["grad_accum"] > 2 > 1 == len({row["num_samples"] for row in other})


@pytest.mark.parametrize("own", [{}, dict(lora=True), long(dict(osft=True, osft_unfreeze_rank_ratio=0.5))])
def test_a_resumed_run_draws_other_old_samples(own, model, world, tmp_path):
    """Bit for bit, also where what the start says of the samples has to be computed again after the resume."""
    cache = dict(osft_cache_dir=str(tmp_path / "osft")) if "osft" in own else {}
    for root in ("whole", "resumed"):
        train_on(1, world, **make_options(tmp_path / root, model, **own, **cache))
    forget_since(tmp_path / "resumed" / "run", 2)
    shutil.rmtree(tmp_path / "resumed" / "run" / "hf_format")
    shutil.rmtree(tmp_path / "resumed" / "cache")
    train_on(1, world, **make_options(tmp_path / "resumed", model, **own, **cache))
    np.testing.assert_array_equal(read_numbers(tmp_path / "resumed"), read_numbers(tmp_path / "whole"))
    assert read_numbers(tmp_path / "whole")[-1, 2] > 0  # it has moved away from its start


def test_what_the_start_says_is_computed_twice(model, world, tmp_path, caplog, monkeypatch):
    """Or not again where a file was changed; a killed run's parts stay."""
    monkeypatch.setattr("mini_trainer.run.keeping.PART_SIZE", 5)
    caplog.set_level("INFO", logger="mini_trainer")

    def train(name: str, **changes: object) -> tuple[str, np.ndarray]:
        caplog.clear()
        options = make_options(tmp_path, model, output_dir=str(tmp_path / name / "run"), **changes)
        (tmp_path / name).mkdir()
        train_on(1, world, **options)
        (line,) = (line for line in caplog.messages if "in the run's steps" in line)
        return line, read_numbers(tmp_path / name)

    line, first = train("first")
    assert line == "keep: 12 samples in the run's steps, 12 of them to score"
    part, second, _ = sorted((tmp_path / "cache" / "kept").glob("*/*.records"))
    line, again = train("again")
    assert line.endswith(" 0 of them to score")
    np.testing.assert_array_equal(again, first)
    second.unlink(), (part.parent / "made.json").unlink()
    line, again = train("killed")
    assert line.endswith(" 5 of them to score")
    np.testing.assert_array_equal(again, first)
    part.write_bytes(part.read_bytes()[:-8])
    line, again = train("damaged")
    assert line.endswith(" 12 of them to score") and any("made again" in text for text in caplog.messages)
    np.testing.assert_array_equal(again, first)
    assert train("longer", max_steps=9)[0].startswith("keep: 24 samples in the run's steps, 24 of them")
    line, other = train("seed", seed=7)
    assert line.endswith(" 12 of them to score") and not np.array_equal(other, first)


def test_a_start_that_ends_while_it_scores_leaves_files_that_refuse_the_next(model, world, tmp_path, monkeypatch):
    """Samples that a model has drawn are copied into the run's directory."""
    options = make_options(tmp_path, model)
    sidecar = Path(f"{options['keep'][0]}.meta.json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"drawn_with": {}}))
    with monkeypatch.context() as patched, pytest.raises(RunError):
        patched.setattr(keeping, "find_missing", lambda paths: (_ for _ in ()).throw(InterruptedError))
        train_on(1, world, **options)
    train_on(1, world, **options)
    assert (tmp_path / "run" / "kept_old.arrow").is_file()


def test_an_old_sample_that_is_not_finite_is_not_named(model, world, tmp_path, monkeypatch):
    read, bad = StartScores.__getitem__, []

    def spoil(scores: StartScores, row: int) -> np.ndarray:
        records = read(scores, row).copy()
        if not bad or bad == [row]:
            bad[:] = [row]
            records["nll"] = np.nan
        return records

    monkeypatch.setattr(StartScores, "__getitem__", spoil)
    with pytest.raises(RunError, match=r"step 1: the loss is not finite .*Rows of \S*old\.arrow: ") as caught:
        train_on(1, world, **make_options(tmp_path, model, max_tokens_per_gpu=48))
    assert f": {bad[0] + 1}" in str(caught.value).replace(", ", ": ") and "new.arrow" not in str(caught.value)


def test_old_samples_balance_the_experts(world, tmp_path):
    """The load-balancing loss is that of the same run without --keep."""
    mixtral = save_tokenizer(save_model(FAMILIES["mixtral"], tmp_path / "m"))
    own = dict(router_aux_loss=0.1, max_steps=1)
    for name, changes in {"kept": {}, "plain": dict(keep=())}.items():
        train_on(1, world, **make_options(tmp_path / name, mixtral, **own, **changes))
    kept, plain = (read_rows(tmp_path / name / "run")[0] for name in ("kept", "plain"))
    for name in ("loss", "router_aux_loss", "expert_balance"):
        assert kept[name] == pytest.approx(plain[name], rel=1e-6)


def test_a_share_is_of_other_than_the_batch(model, world, tmp_path):
    """A share of --batch-size counts samples, one of --batch-tokens tokens. What else is logged counts the new ones."""
    for name, changes in {"half": dict(keep_share=0.5), "all": dict(keep_share=2.0), "none": dict(keep=())}.items():
        train_on(1, world, **make_options(tmp_path / name, model, max_steps=2, **changes))
    rows = {name: read_rows(tmp_path / name / "run") for name in ("half", "all", "none")}
    same = ("epoch", "num_samples", "num_loss_counted_tokens", "num_total_tokens", "total_tokens_accumulated")
    for a, b, c in zip(*rows.values(), strict=True):
        assert len({tuple(row[name] for name in same) for row in (a, b, c)}) == 1
        assert a["num_kept_tokens"] < b["num_kept_tokens"]
    tokens = dict(batch_size=None, batch_tokens=120, keep_share=0.5, max_steps=20, checkpoint_every_steps=None)
    train_on(1, world, **make_options(tmp_path / "tokens", model, **tokens))
    old = Mixture([TokenizedData(tmp_path / "tokens" / "old.arrow")])
    stream = open_stream(old, DataOptions(batch_tokens=120), 0.5)
    counts = [int(old.lengths[ids].sum()) for ids in itertools.islice(stream.draw_batches(0), 20)]
    assert 20 * 60 <= sum(counts) < 20 * 60 + 40
    trained = [int(old.num_loss_tokens[ids].sum()) for ids in itertools.islice(stream.draw_batches(0), 20)]
    assert [row["num_kept_tokens"] for row in read_rows(tmp_path / "tokens" / "run")] == trained
    np.testing.assert_array_equal(next(stream.draw_batches(7)), list(itertools.islice(stream.draw_batches(0), 8))[7])
    with pytest.raises(ValueError, match=r"--keep-share 0\.1: 12 tokens a step, but the longest sample of --keep has"):
        train_on(1, world, **make_options(tmp_path / "few", model, **tokens | dict(keep_share=0.1)))


def test_a_continued_run_keeps_another_start(model, world, tmp_path):
    """It keeps what the checkpoint of --continue-from knows, also where it is resumed and has to ask it again, unless
    that is damaged."""
    train_on(1, world, **make_options(tmp_path / "one", model, max_steps=1))
    origin = shutil.copytree(tmp_path / "one" / "run" / "checkpoints" / "step_1", tmp_path / "origin")
    for root in ("whole", "resumed"):
        options = make_options(tmp_path / root, model, max_steps=2, continue_from=str(origin))
        train_on(1, world, **options | dict(seed=3))
        if root == "resumed":
            forget_since(tmp_path / root / "run", 1)
            shutil.rmtree(tmp_path / root / "run" / "hf_format")
            shutil.rmtree(tmp_path / root / "cache")
            train_on(1, world, **options | dict(seed=3))
    numbers = read_numbers(tmp_path / "whole")
    np.testing.assert_array_equal(read_numbers(tmp_path / "resumed"), numbers)
    assert abs(numbers[0, 2]) < 1e-6 < numbers[1, 2]
    part = origin / "rank_00000.safetensors"
    part.write_bytes(part.read_bytes()[:-9] + b"elsewhere")
    with pytest.raises(NoValidCheckpoint, match=r"--continue-from \S*origin: .*rank_00000"):
        train_on(1, world, **options | dict(seed=3, max_steps=3))


def test_a_run_resumes_with_other_old_samples(model, world, tmp_path):
    options = make_options(tmp_path, model, max_steps=2)
    train_on(1, world, **options)
    other = write_data(tmp_path / "other.arrow", model, seed=5)
    for changes, named in ((dict(keep=(str(other),)), "samples of --keep"), (dict(keep_weight=2.0), "keep-weight")):
        with pytest.raises(ValueError, match=rf"was made with other {named}"):
            train_on(1, world, **options | dict(max_steps=3) | changes)
    card = (tmp_path / "run" / "hf_format" / "samples_16" / "README.md").read_text()
    assert "keeping the start on old samples (share 0.33, weight 1)" in card


def test_rows_to_keep_need_the_runs_format(model, tmp_path):
    """Rows become a data set by the run's template, not by the format and the columns of its own rows."""
    write_counting_chats(tmp_path / "old.jsonl")
    asked = [{"frage": f"{i}?", "antwort": f"{i}."} for i in range(4)]
    write_jsonl(tmp_path / "new.jsonl", asked)
    options = group_options(
        TrainOptions, model_name_or_path=str(model), output_dir=str(tmp_path / "run"), num_proc=1,
        input_file=(str(tmp_path / "new.jsonl"),), columns=("prompt=frage", "completion=antwort"),
        keep=(str(tmp_path / "old.jsonl"), str(write_data(tmp_path / "old.arrow", model))),
        data_cache_dir=str(tmp_path / "cache"), chat_template="chatml",
    )  # fmt: skip
    found = find_data(options)
    assert found["keep"][1] == str(tmp_path / "old.arrow") and Path(found["keep"][0]).parent.parent.name == "cache"
    made = [json.loads(Path(f"{found[name][0]}.meta.json").read_text()) for name in ("keep", "data_path")]
    assert [one["options"]["columns"] for one in made] == [[], ["prompt=frage", "completion=antwort"]]
    assert {one["options"]["chat_template"] for one in made} == {"chatml"}
    with pytest.raises(ValueError, match=r"--keep selfish: no such file; self is "):
        find_data(replace_options(options, keep=("selfish",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(teacher_weight=0.5), "--keep and --teacher-weight "),
        (dict(objective="preference"), "--keep: .*--objective preference"),
        (dict(keep=(), keep_share=0.5), "--keep-share: no effect without --keep"),
        (dict(keep_share=0.0), "--keep-share 0.0: must be above 0"),
        (dict(keep_weight=-1.0), "--keep-weight -1.0: must be above 0"),
    ],
)
def test_what_keep_cannot_be_used_with_is_taken(changes, message):
    given = dict(model_name_or_path="m", output_dir="d", data_path=("a.arrow",), max_steps=1, keep=("o.arrow",))
    problems = find_problems(group_options(TrainOptions, **given | changes))
    assert len(problems) == 1 and re.match(message, problems[0]), problems
