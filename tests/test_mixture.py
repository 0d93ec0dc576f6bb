"""Several data sets: drawn by their weights, a pure function of the position, on any ranks and after a resume."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made import read_triple
from in_process import train_here, train_on, train_once
from small_runs import OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from transformers import AutoModelForCausalLM

from mini_trainer.data.tokenized.mixture import Mixture, interleave
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.sampler import StreamTokens, count_drawn, draw_samples

SIZES, WEIGHTS = dict(a=30, b=11, c=5), (0.5, 0.3, 0.2)
STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("inputs")
    paths = []
    for i, (name, size) in enumerate(SIZES.items()):
        samples = make_samples(size, vocab_size=VOCAB_SIZE, max_len=12 + 14 * i, seed=i)
        paths.append(str(write_samples(root / f"{name}.arrow", samples)))
    model = save_tokenizer(save_model(FAMILIES["llama_tied_bias"], root / "model"))
    return OPTIONS | dict(model_name_or_path=str(model), data_path=tuple(paths), data_weights=WEIGHTS, max_steps=STEPS)


def open_mixture(inputs: dict, **options) -> Mixture:
    return Mixture([TokenizedData(path) for path in inputs["data_path"]], **options)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (0.001, 0.999), (1 / 3, 1 / 3, 1 / 3)])
def test_sources_take_turns_by_their_shares_from_any_position(shares):
    shares, count = np.array(shares), 5000
    due = sorted(((k + 0.5) / share, i) for i, share in enumerate(shares) for k in range(count))
    expected = np.array([i for _, i in due[:count]])
    assert (interleave(shares, start=0, count=count)[0] == expected).all()
    for start in (0, 1, 2, 17, 999, 4000):
        sources, before = interleave(shares, start=start, count=100)
        assert (sources == expected[start : start + 100]).all()
        assert (before == np.bincount(expected[:start], minlength=len(shares))).all()
    drawn = np.cumsum(expected[:, None] == np.arange(len(shares)), axis=0)  # after each position
    assert np.abs(drawn - shares * np.arange(1, count + 1)[:, None]).max() <= 2
    assert interleave(shares, start=10**12, count=10)[1].sum() == 10**12


def test_each_source_goes_through_its_own_permutations(inputs):
    data = open_mixture(inputs, weights=WEIGHTS)
    stream = draw_samples(data, seed=1, start=0, count=400)
    sources = data.numbers.source_of(stream)
    for i, (size, kept) in enumerate(zip(SIZES.values(), data.kept_of, strict=True)):
        own = stream[sources == i]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) > 1 and (np.sort(epochs) == kept).all() and (epochs[0] != epochs[1]).any()
        assert len(own) == count_drawn(data, 400)[i] and abs(len(own) / 400 - WEIGHTS[i]) < 0.005
    for start, count in ((3, 50), (123, 1), (300, 100)):
        assert (draw_samples(data, seed=1, start=start, count=count) == stream[start : start + count]).all()
    assert [data.locate(row)[1] for row in data.kept_of[1][:2].tolist()] == [1, 2]
    assert data.name_rows([45, 0, 31]) == "; ".join(
        f"{path}: {row}" for path, row in zip(inputs["data_path"], (1, 2, 5), strict=True)
    )


def test_data_sets_of_one_size_are_drawn_in_the_same_order(inputs, tmp_path):
    paths = [shutil.copy(inputs["data_path"][0], tmp_path / f"{name}.arrow") for name in "ab"]
    data, size = Mixture(list(map(TokenizedData, paths))), SIZES["a"]
    stream = draw_samples(data, seed=1, start=0, count=2 * size)
    orders = [(stream[stream // size == i] % size).tolist() for i in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(size)) and orders[0] != orders[1]
    data.take_subset(9, seed=1)
    assert (data.kept_of[0] != data.kept_of[1] - size).any()


def test_without_weights_an_epoch_has_every_sample_once(inputs):
    stream = draw_samples(open_mixture(inputs), seed=1, start=0, count=3 * 46).reshape(3, 46)
    assert (np.sort(stream) == np.arange(46)).all() and (stream[0] != stream[1]).any()


def test_weights_can_count_tokens_of_the_rows_that_are_kept(inputs):
    data = open_mixture(inputs, weights=(1, 1, 2), by="tokens")
    for source in data.sources:
        source.kept = source.kept[source.lengths[:] > np.median(source.lengths)]
    data._find_kept()
    stream = draw_samples(data, seed=1, start=0, count=20000)
    tokens = np.bincount(data.numbers.source_of(stream), weights=data.lengths[stream])
    assert tokens / tokens.sum() == pytest.approx([0.25, 0.25, 0.5], rel=0.01)


@pytest.mark.parametrize("weights", [(), WEIGHTS])
def test_the_position_at_which_tokens_have_been_read(inputs, weights):
    data = open_mixture(inputs, weights=weights)
    ends = np.cumsum(data.lengths[draw_samples(data, seed=7, start=0, count=2000)])
    stream = StreamTokens(data, seed=7)
    assert stream.count(0) == 0 and stream.count(2000) == ends[-1]
    for num_tokens in (1, int(ends[0]), int(ends[0]) + 1, int(ends[45]), 9999):
        assert stream.find(num_tokens) == np.searchsorted(ends, num_tokens) + 1


@pytest.fixture(scope="module")
def run(inputs, world, tmp_path_factory) -> Path:
    """On one rank."""
    return train_once(tmp_path_factory, world, **inputs)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_losses_of_sources_do_not_depend_on_ranks(num_ranks, inputs, run, world, tmp_path):
    train_on(num_ranks, world, **inputs, output_dir=tmp_path / "run")
    for row, expected in zip(read_rows(tmp_path / "run"), read_rows(run), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["sources"].keys() == SIZES.keys()
        for name, source in row["sources"].items():
            other = expected["sources"][name]
            assert source["loss"] == (other["loss"] and pytest.approx(other["loss"], rel=1e-5))
            assert {**source, "loss": 0} == {**other, "loss": 0}


@pytest.mark.slow
def test_losses_of_sources_are_those_of_their_samples_alone(inputs, run):
    """Of the first step, by transformers, one sample at a time."""
    data, row = open_mixture(inputs, weights=WEIGHTS), read_rows(run)[0]
    model = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"])
    sums, counts = np.zeros(3), np.zeros(3, dtype=int)
    for sample in draw_samples(data, seed=42, start=0, count=OPTIONS["batch_size"]).tolist():
        input_ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in read_triple(data, sample)[:2])
        with torch.no_grad():
            logits = model(input_ids=input_ids[None], use_cache=False).logits[0]
        source = int(data.numbers.source_of(np.array(sample)))
        sums[source] += torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum").item()
        counts[source] += int((labels[1:] != -100).sum())
    for i, source in enumerate(row["sources"].values()):
        assert source["num_loss_counted_tokens"] == counts[i]
        assert source["loss"] == (pytest.approx(sums[i] / counts[i], rel=1e-5) if counts[i] else None)
    assert row["loss"] == pytest.approx(sums.sum() / counts.sum(), rel=1e-5)


@pytest.mark.slow
def test_a_resumed_mixture_is_the_uninterrupted_one(inputs, run, world, tmp_path):
    """From the middle, on one rank, to the bit; other weights are refused, unless they are allowed."""
    output_dir = Path(shutil.copytree(run, tmp_path / "run"))
    for step in range(4, STEPS + 1):
        shutil.rmtree(output_dir / "checkpoints" / f"step_{step}")
    shutil.rmtree(output_dir / "hf_format")
    changed = inputs | dict(output_dir=str(output_dir), data_weights=(0.4, 0.4, 0.2))
    with pytest.raises(ValueError, match=r"data-weights \(\[0\.5, 0\.3, 0\.2\] .*\[0\.4, 0\.4, 0\.2\]\)"):
        train_here(world, **changed)
    train_here(world, **inputs, output_dir=str(output_dir))
    assert read_rows(output_dir) == read_rows(run)
    shutil.rmtree(output_dir / "checkpoints" / f"step_{STEPS}")
    train_here(world, **changed | dict(allow_changed_options=True))
    params = json.loads((output_dir / "training_params.json").read_text())
    assert "data-weights" in str(params["starts"][-1])


def test_a_data_set_given_twice_or_made_otherwise_is_named(inputs, world, tmp_path):
    first = inputs["data_path"][0]
    with pytest.raises(ValueError, match=r"twice: \S*a\.arrow; .*--data-weights"):
        train_here(world, **inputs | dict(data_path=(first,) * 3), output_dir=str(tmp_path / "run"))
    other = Path(shutil.copy(first, tmp_path / "other.arrow"))
    sidecar = dict(tokenizer_fingerprint="0" * 64, max_token_id=5)
    Path(f"{other}.meta.json").write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match=r"--data-path \S*other\.arrow .*tokenizer"):
        train_here(
            world, **inputs | dict(data_path=(first, str(other)), data_weights=()), output_dir=str(tmp_path / "r")
        )
