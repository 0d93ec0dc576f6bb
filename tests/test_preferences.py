"""Preferences against a plain loop over transformers' own logits: losses, gradients, ranks, resuming."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from breadth import long, wide
from in_process import train_on
from op_recording import OpRecorder
from small_runs import check_step, read_rows
from tiny_models import FAMILIES, balance_plainly, save_model, save_tokenizer
from tiny_pairs import NUM_PAIRS, sum_plainly, write_pairs
from torch.nn import Identity
from torch.nn.functional import cross_entropy, linear, logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline

from mini_trainer.data.columns.base import list_sequences
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.model.hashed_tensors import read_hashed, write_hashed
from mini_trainer.objectives.next_tokens import TrainedTokens
from mini_trainer.objectives.preferences import LOSSES, sum_logps
from mini_trainer.options import group_options
from mini_trainer.options.tools import ScoreDataOptions
from mini_trainer.run.record import find_changes
from mini_trainer.run.references import identify_reference, split_rows
from mini_trainer.sampler import draw_samples
from mini_trainer.tools.score_data import score

BATCH_SIZE, BETA = 8, 0.3


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and one that differs from it."""
    paths = []
    for seed in (0, 1):
        paths.append(save_tokenizer(save_model(FAMILIES["llama"], tmp_path_factory.mktemp("model"), seed=seed)))
    return tuple(paths)


def make_options(root: Path, models: tuple[Path, Path], *, numbers: bool = False, **changes: object) -> dict:
    data = write_pairs(root / "pairs.arrow", models[0], numbers=numbers)
    return dict(
        model_name_or_path=str(models[0]), data_path=(str(data),), objective="preference",
        output_dir=str(root / "run"), batch_size=BATCH_SIZE, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=3,
        compute_dtype="float32", activation_checkpointing="none", export_dtype="float32", preference_beta=BETA,
        checkpoint_every_steps=1,
    ) | changes  # fmt: skip


def measure_plainly(model, reference, data: Mixture, rows: list[int], loss: str) -> torch.Tensor:
    """The loss of the pairs, each sequence by itself, by the formulas of the papers."""
    total, weights, nll, num_chosen = 0.0, 0.0, 0.0, 0
    for row in rows:
        sample = data.read(row)
        labels = np.split(sample["labels"], sample["sequence_lengths"][:1])
        sequences = list(zip(list_sequences(sample), labels, strict=True))
        c, r = (sum_plainly(model, *sequence) for sequence in sequences)
        with torch.no_grad():
            rc, rr = (sum_plainly(reference, *sequence) for sequence in sequences)
        nc, nr = (int((side != -100).sum()) for side in labels)
        margin, weight = float(sample.get("margin", [0])[0]), float(sample.get("pair_weight", [1])[0])
        value = measure_pair(loss, c, r, rc, rr, nc, nr, margin)
        total, weights, nll, num_chosen = total + weight * value, weights + weight, nll - c, num_chosen + nc
    return total / weights, nll / num_chosen


def measure_pair(loss: str, c, r, rc, rr, nc: int, nr: int, margin: float) -> torch.Tensor:
    """From the log-probabilities of the chosen and the rejected answer, the reference's, and their tokens."""
    h = BETA * ((c - rc) - (r - rr))
    match loss:
        case "dpo":
            return -logsigmoid(h - margin)
        case "cdpo":
            return -0.8 * logsigmoid(h) - 0.2 * logsigmoid(-h)
        case "ipo":
            return ((c - rc) / nc - (r - rr) / nr - 1 / (2 * BETA)) ** 2
        case "apo-zero":
            return 1 - torch.sigmoid(BETA * (c - rc)) + torch.sigmoid(BETA * (r - rr))
        case "simpo":
            return -logsigmoid(BETA * (c / nc - r / nr) - 0.5)
        case "orpo":
            return -BETA * logsigmoid(log_odds(c / nc) - log_odds(r / nr))
    raise ValueError(loss)


def log_odds(mean: torch.Tensor) -> torch.Tensor:
    return mean - torch.log(1 - torch.exp(mean))


@pytest.mark.parametrize("loss", ["cdpo", *LOSSES])
def test_loss_and_gradient_are_those_of_a_plain_loop(loss, models, world, tmp_path):
    own = dict(preference_loss="dpo", label_smoothing=0.2) if loss == "cdpo" else dict(preference_loss=loss)
    own |= dict(reference_model=str(models[1])) if loss not in ("simpo", "orpo") else {}
    options = make_options(tmp_path, models, max_steps=1, numbers=loss == "dpo", **own)
    train_on(1, world, **options)
    (row,) = read_rows(tmp_path / "run")
    model, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models)
    data = Mixture([TokenizedData(options["data_path"][0])])
    rows = draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist()
    expected, nll = measure_plainly(model, reference, data, rows, loss)
    (expected + (nll if loss == "orpo" else 0)).backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
    assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert row["nll_loss"] == pytest.approx(nll.item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def read_numbers(root: Path) -> np.ndarray:
    keys = ("rewards/accuracies", "loss", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen", "nll_loss")
    numbers = np.array([[row[key] for key in keys] for row in read_rows(root / "run")])
    numbers[0, 0] = np.nan  # the model is still its reference: which answer is ahead is rounding
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        long(1, dict(max_tokens_per_gpu=1024)),
        (1, dict(max_tokens_per_gpu=48)),
        (2, {}),
        wide(4, {}),
        (2, dict(context_parallel=2)),
        long(1, dict(activation_checkpointing="full")),
    ],
    ids=["cap", "small cap", "2 ranks", "4 ranks", "context parallel", "checkpointing"],
)
def test_ranks_and_caps_do_not_change_the_numbers(num_ranks, changes, models, world, tmp_path):
    (tmp_path / "one").mkdir(), (tmp_path / "other").mkdir()
    common = dict(preference_nll_weight=0.5, numbers=True)
    train_on(1, world, **make_options(tmp_path / "one", models, **common))
    train_on(num_ranks, world, **make_options(tmp_path / "other", models, **common, **changes))
    np.testing.assert_allclose(read_numbers(tmp_path / "other"), read_numbers(tmp_path / "one"), rtol=2e-5, atol=1e-6)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit_and_reads_its_reference(models, world, tmp_path):
    (tmp_path / "whole").mkdir(), (tmp_path / "parts").mkdir()
    train_on(1, world, **make_options(tmp_path / "whole", models))
    options = make_options(tmp_path / "parts", models)
    train_on(1, world, **options | dict(max_steps=1))
    (stored,) = (tmp_path / "parts").glob("pairs.arrow.reference-*.safetensors")
    written = stored.stat().st_mtime_ns
    train_on(1, world, **options)
    assert read_rows(tmp_path / "parts" / "run") == read_rows(tmp_path / "whole" / "run")
    assert stored.stat().st_mtime_ns == written


def read_values(path: Path) -> np.ndarray:
    return read_hashed(path, what="")[0]["values"].numpy()


def test_scoring_that_is_continued_gives_the_same_bits(models, world, tmp_path, monkeypatch):
    """A run that is killed has written some of the parts, in their order; the next one scores the others alike."""
    monkeypatch.setattr("mini_trainer.run.references.PART_SIZE", 10)
    options = make_options(tmp_path, models, max_steps=1, reference_model=str(models[1]))
    other = write_pairs(tmp_path / "other.arrow", models[0], seed=7)
    options |= dict(data_path=(*options["data_path"], str(other)))
    train_on(1, world, **options)
    paths = [path for name in ("pairs", "other") for path in tmp_path.glob(f"{name}.arrow.reference-*.safetensors")]
    known = list(map(read_values, paths))
    for num_known in (10, 24, 34):
        for path, values, first in zip(paths, known, (0, len(known[0])), strict=True):
            part = np.where(first + np.arange(len(values))[:, None] < num_known, values, np.nan)
            write_hashed(path, {"values": torch.from_numpy(part)}, read_hashed(path, what="")[1])
        train_on(1, world, **options | dict(output_dir=str(tmp_path / f"after_{num_known}")))
        for path, values in zip(paths, known, strict=True):
            np.testing.assert_array_equal(read_values(path), values)


def test_parts_of_the_scoring_do_not_depend_on_what_is_known(monkeypatch):
    monkeypatch.setattr("mini_trainer.run.references.PART_SIZE", 10)
    rows = np.setdiff1d(np.arange(24 + 11), [3, 12, 30])  # some are not kept
    parts = split_rows(rows, [24, 11])
    assert [(part[0], part[-1], len(part)) for part in parts] == [(0, 9, 9), (10, 19, 9), (20, 23, 4), (24, 33, 9),
                                                                  (34, 34, 1)]  # fmt: skip
    for k in range(len(parts) + 1):
        rest = np.concatenate([*parts[k:], rows[:0]])
        assert list(map(list, split_rows(rest, [24, 11]))) == list(map(list, parts[k:]))


def test_validation_reports_rewards_and_chooses_the_best_by_them(models, world, tmp_path):
    held_out = write_pairs(tmp_path / "held_out.arrow", models[0], seed=3)
    options = make_options(tmp_path, models, validation_data_path=(str(held_out),), best_metric="rewards/accuracies")
    train_on(1, world, **options)
    first, last = map(json.loads, (tmp_path / "run" / "validation_metrics_0.jsonl").read_text().splitlines())
    assert first["loss"] == pytest.approx(np.log(2)) and first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    assert first["rewards/accuracies"] < last["rewards/accuracies"] == last["sets"]["held_out"]["rewards/accuracies"]


def test_margins_that_a_loss_does_not_use_are_refused(models, world, tmp_path):
    with pytest.raises(ValueError, match="margins"):
        train_on(1, world, **make_options(tmp_path, models, numbers=True, preference_loss="ipo"))


N, H, V, NUM_SUMS = 17, 8, 31, 4


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_sums_and_their_gradients_are_those_of_all_logits_at_once(rows_per_chunk, softcap, trained):
    def make():
        torch.manual_seed(0)
        tensors = [torch.randn(N, H), torch.randn(V, H), torch.randn(V)]
        return [
            tensor.requires_grad_(on) for tensor, on in zip(tensors, (trained[0], trained[1], trained[1]), strict=True)
        ]

    targets, places = torch.randint(V, (N,)), torch.randint(NUM_SUMS, (N,))
    ours, naive = make(), make()
    tokens = TrainedTokens(ours[0], ours[1], ours[2], targets=targets, softcap=softcap)
    sums = sum_logps(tokens, places, NUM_SUMS, chunk_bytes=rows_per_chunk * 4 * V)
    logits = linear(*naive)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = torch.zeros(NUM_SUMS).index_add(0, places, -cross_entropy(logits, targets, reduction="none"))
    torch.testing.assert_close(sums, expected)
    factors = torch.randn(NUM_SUMS)
    (sums.sin() @ factors).backward(), (expected.sin() @ factors).backward()
    for tensor, reference in zip(ours, naive, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad)


def test_logits_are_never_all_held_and_a_frozen_head_is_multiplied_twice():
    hidden, weight = torch.randn(64, H, requires_grad=True), torch.randn(V, H)
    tokens = TrainedTokens(hidden, weight, targets=torch.randint(V, (64,)))
    with OpRecorder() as recorder:
        sums = sum_logps(tokens, torch.zeros(64, dtype=torch.long), 2, chunk_bytes=8 * 4 * V)
        sums.square().sum().backward()
    assert recorder.largest <= max(64 * H, 8 * V, V * H) * 4
    products = [name for name in recorder.names if name in ("aten::mm", "aten::mm.out", "aten::addmm")]
    assert len(products) == 2 * 8  # logits, and back


@pytest.mark.parametrize("num_ranks", [1, long(2)])
def test_a_reward_model_is_transformers_own_and_its_loss_a_plain_loops(num_ranks, models, world, tmp_path):
    """The export has the random head that the run started with, as nothing is learned at a rate of 0."""
    options = make_options(tmp_path, models, numbers=True, objective="reward", reward_centering=0.1, max_steps=1)
    del options["preference_beta"]
    train_on(num_ranks, world, **options | dict(learning_rate=0.0))
    (export,) = (tmp_path / "run/hf_format").glob("samples_*")
    model = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32)
    assert model.config.num_labels == 1
    # Programs that read one output return the reward itself, and not its sigmoid.
    text, classify = "a text", pipeline("text-classification", model=str(export))
    with torch.no_grad():
        reward = model(**classify.tokenizer(text, return_tensors="pt")).logits.item()
    assert classify(text) == [{"label": "reward", "score": pytest.approx(reward, abs=1e-5)}]
    assert model.config.sentence_transformers == {"activation_fn": f"{Identity.__module__}.{Identity.__name__}"}
    data, total, weights = Mixture([TokenizedData(options["data_path"][0])]), 0.0, 0.0
    for row in draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist():
        sample = data.read(row)
        sides = [torch.from_numpy(ids.astype(np.int64)) for ids in list_sequences(sample)]
        padding = torch.full((20,), model.config.pad_token_id)  # which must not change an answer's reward
        c, r = (model(torch.cat([ids, padding])[None]).logits[0, 0] for ids in sides)
        weight = float(sample["pair_weight"][0])
        total = total + weight * (-logsigmoid(c - r - float(sample["margin"][0])) + 0.1 * (c + r) ** 2)
        weights += weight
    (metrics,) = read_rows(tmp_path / "run")
    check_step(metrics, model, total / weights)


def make_kto_options(root: Path, models: tuple[Path, Path], **changes: object) -> dict:
    root.mkdir(exist_ok=True)
    options = make_options(root, models, objective="kto", kto_weight_ratio=3.0)
    data = write_pairs(root / "feedback.arrow", models[0], numbers=True, good=True)
    return options | dict(data_path=(str(data),)) | changes


def measure_kto_plainly(model, reference, data: Mixture, rows: list[int]) -> tuple[torch.Tensor, float]:
    """The loss, and the point of reference, which is of all rows that have an unrelated answer."""
    ratios, unrelated = [], []
    for row in rows:
        sample = data.read(row)
        labels = np.split(sample["labels"], sample["sequence_lengths"][:-1])
        for *sequence, found in zip(list_sequences(sample), labels, (ratios, unrelated), strict=False):
            with torch.no_grad():
                known = sum_plainly(reference, *sequence)
            found.append(sum_plainly(model, *sequence) - known)
    point, total, weights = max(0.0, float(sum(unrelated).detach() / len(unrelated))), 0.0, 0.0
    for row, ratio in zip(rows, ratios, strict=True):
        good, weight = (float(data.read(row)[name][0]) for name in ("good", "pair_weight"))
        h = BETA * (ratio - point)
        total = total + weight * (3 * (1 - torch.sigmoid(h)) if good else 1 - torch.sigmoid(-h))
        weights += weight
    return total / weights, point


def test_ktos_experts_are_balanced_over_the_answers_that_train(world, tmp_path):
    """The unrelated answers are only read ahead."""
    path = save_tokenizer(save_model(FAMILIES["mixtral"], tmp_path / "model"))
    options = make_kto_options(tmp_path, (path, path), max_steps=1, router_aux_loss=0.1)
    train_on(1, world, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    data = Mixture([TokenizedData(options["data_path"][0])])
    rows = draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist()
    balance = balance_plainly(model, [list_sequences(data.read(row))[0] for row in rows])
    assert read_rows(tmp_path / "run")[0]["router_aux_loss"] == pytest.approx(balance.item(), rel=1e-5)


@pytest.mark.parametrize("swapped", [False, True], ids=["point at 0 or above", "the other way round"])
def test_ktos_point_of_reference_is_that_of_the_global_batch(swapped, models, world, tmp_path):
    models = models[::-1] if swapped else models
    options = make_kto_options(tmp_path, models, max_steps=1, reference_model=str(models[1]))
    held_out = write_pairs(tmp_path / "held_out.arrow", models[0], seed=5, numbers=True, good=True)
    train_on(1, world, **options | dict(validation_data_path=(str(held_out),)))
    (row,) = read_rows(tmp_path / "run")
    model, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models)
    data = Mixture([TokenizedData(options["data_path"][0])])
    rows = draw_samples(data, seed=42, start=0, count=BATCH_SIZE).tolist()
    expected, point = measure_kto_plainly(model, reference, data, rows)
    check_step(row, model, expected)
    assert row["kl"] == pytest.approx(point, rel=1e-4, abs=1e-6)
    validated = json.loads((tmp_path / "run/validation_metrics_0.jsonl").read_text().splitlines()[0])
    with torch.no_grad():
        expected, point = measure_kto_plainly(model, reference, Mixture([TokenizedData(held_out)]), range(NUM_PAIRS))
    assert validated["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert validated["kl"] == pytest.approx(point, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [(2, dict(max_tokens_per_gpu=1024)), wide(4, {}), wide(2, dict(context_parallel=2))],
    ids=["2 ranks, cap", "4 ranks", "context parallel"],
)
def test_kto_is_the_same_on_any_ranks(num_ranks, changes, models, world, tmp_path):
    for root, ranks, own in (("one", 1, {}), ("other", num_ranks, changes)):
        options = make_kto_options(tmp_path / root, models, reference_model=str(models[1]), **own)
        train_on(ranks, world, **options)
    keys = ("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected", "logps/chosen")
    one, other = (
        [[row[key] for key in keys] for row in read_rows(tmp_path / root / "run")] for root in ("one", "other")
    )
    np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


def test_a_run_resumes_only_with_the_loss_and_the_reference_that_it_began_with(models, world, tmp_path):
    options = make_options(tmp_path, models, max_steps=1)
    train_on(1, world, **options)
    others = {
        "preference-beta": dict(preference_beta=0.5),
        "preference-loss": dict(preference_loss="apo-zero"),
        "preference-nll-weight": dict(preference_nll_weight=0.5),
        "reference model": dict(reference_model=models[1]),
    }
    for name, changes in others.items():
        with pytest.raises(ValueError, match=f"step_1 .*other {name}"):
            train_on(1, world, **options | dict(max_steps=2) | changes)
    copied = shutil.copytree(models[0], tmp_path / "copied")
    train_on(1, world, **options | dict(max_steps=2, reference_model=copied))
    assert len(read_rows(tmp_path / "run")) == 2


def test_values_of_another_reference_are_not_taken_for_this_ones(models):
    """Neither of other statistics of OSFT, nor of other rounding, another type, or a checkpoint's weights."""

    def identify(*, data: str = "", base: str = "none", dtype: str = "float32", origin: str | None = None) -> str:
        return identify_reference(SimpleNamespace(
            other_models={}, method=SimpleNamespace(list_data_hashes=lambda: [data]), model_dir=str(models[0]),
            values={"base_quantization": base}, compute_dtype=dtype, origin=origin and SimpleNamespace(digest=origin),
        ))  # fmt: skip

    others = [identify(**{name: "x"}) for name in ("data", "base", "dtype", "origin")]
    assert len({identify(), *others}) == 5 and identify() == identify()


def test_a_checkpoint_that_notes_down_no_loss_of_preferences_has_the_defaults(models, world, tmp_path):
    options = make_options(tmp_path, models, max_steps=1) | dict(preference_beta=None)
    train_on(1, world, **options)
    identity = json.loads((tmp_path / "run" / "training_params.json").read_text())["identity"]
    before = {name: value for name, value in identity.items() if not name.startswith(("preference", "reference"))}
    assert identity["reference model"] is not None and len(before) < len(identity)
    assert find_changes(before, identity) == {}
    assert list(find_changes(before, identity | {"preference-beta": 0.5})) == ["preference-beta"]


def test_score_data_leaves_references_to_the_run(models, world, tmp_path):
    given = dict(model_name_or_path=str(models[0]), data_path=make_options(tmp_path, models)["data_path"])
    with pytest.raises(ValueError, match=r"is for preferences; allowed: .*a run computes its reference"):
        score(group_options(ScoreDataOptions, **given), world)
