"""--batch-tokens: batches as the definition says, found from any position, their number computed; runs on any ranks."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import train_here, train_on, train_once
from small_runs import NUM_SAMPLES, OPTIONS, check_same, copy_until, make_inputs, read_rows
from tiny_data import write_samples
from tiny_models import save_tokenizer
from tiny_pairs import write_pairs

from mini_trainer import sampler
from mini_trainer.data.tokenized import by_row
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import DataOptions, EndOptions, TrainOptions, group_options
from mini_trainer.run.due import Calendar
from mini_trainer.run.plan.planner import list_export_steps
from mini_trainer.sampler import RunPosition, StreamTokens, TokenBatches, choose_batching, count_steps, draw_batches

SEED, NUM_POSITIONS = 5, 400
STEPS, BATCH_TOKENS = 7, 150
BEGIN = RunPosition()


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Several blocks and chunks in an epoch of a few samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_row, "BLOCK", 4)
        patch.setattr(by_row, "CHUNK", 12)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


def open_lengths(folder: Path, *lengths: list[int], **options) -> Mixture:
    """A mixture of data sets whose samples have these lengths."""
    paths = [
        write_samples(folder / f"{i}.arrow", [([7] * length, [7] * length) for length in of_set])
        for i, of_set in enumerate(lengths)
    ]
    return Mixture([TokenizedData(path) for path in paths], **options)


def list_stream(lengths: list[int], seed: int) -> list[int]:
    """The first rows of one data set's stream, in plain Python."""
    rows = []
    while len(rows) < NUM_POSITIONS:
        rows += np.random.default_rng([seed, len(rows) // len(lengths)]).permutation(len(lengths)).tolist()
    return rows


def divide(lengths: list[int], size: int) -> list[list[int]]:
    """Positions of each batch, by the definition; the last one, which may not be whole, is left out."""
    batches: list[list[int]] = []
    num_before = 0  # tokens before a position
    for position, length in enumerate(lengths):
        t = num_before // size
        while len(batches) <= t:
            batches.append([])
        batches[t].append(position)
        num_before += length
    return batches[:-1]


def draw_by(options: DataOptions, data: Mixture, *, start: int = 0) -> Iterator[np.ndarray]:
    return draw_batches(data, choose_batching(data, options), seed=options.seed, start=start)


def count_by(options: DataOptions, data: Mixture, *, start: RunPosition = BEGIN, **end: int) -> int:
    return count_steps(data, choose_batching(data, options), EndOptions(**end), seed=options.seed, start=start)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), more=st.integers(0, 120), seed=st.integers(0, 3))
@settings(max_examples=20)
def test_batches_are_those_of_the_definition_from_any_of_them_on(folder, lengths, more, seed):
    data, size, stream = open_lengths(folder, lengths), max(lengths) + more, list_stream(lengths, seed)
    options = DataOptions(batch_tokens=size, seed=seed)
    expected = divide([lengths[row] for row in stream], size)
    assert all(expected)  # none is empty
    found = list(itertools.islice(draw_by(options, data), len(expected)))
    assert [rows.tolist() for rows in found] == [[stream[p] for p in batch] for batch in expected]
    for t in range(0, len(expected), 7):
        (rows,) = itertools.islice(draw_by(options, data, start=expected[t][0]), 1)
        assert rows.tolist() == found[t].tolist()
    tokens = [sum(lengths[row] for row in rows.tolist()) for rows in found]
    assert all(size - max(lengths) < count < size + max(lengths) for count in tokens)


@pytest.mark.long
@given(
    lengths=st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=20), min_size=2, max_size=3),
    is_weighted=st.booleans(),
    more=st.integers(0, 60),
)
@settings(max_examples=15)
def test_batches_of_a_mixture_are_those_of_the_definition(folder, lengths, is_weighted, more):
    weights = dict(weights=(3, 1, 2)[: len(lengths)]) if is_weighted else {}
    data, size = open_lengths(folder, *lengths, **weights), max(map(max, lengths)) + more
    stream = sampler.draw_samples(data, seed=SEED, start=0, count=NUM_POSITIONS)
    options, expected = DataOptions(batch_tokens=size, seed=SEED), divide(data.lengths[stream].tolist(), size)
    assert all(expected)
    found = itertools.islice(draw_by(options, data), len(expected))
    assert [rows.tolist() for rows in found] == [stream[batch].tolist() for batch in expected]
    ends = np.cumsum(data.lengths[stream])
    counts = StreamTokens(data, seed=SEED)
    assert [counts.count(n) for n in range(NUM_POSITIONS + 1)] == [0, *ends.tolist()]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    more=st.integers(0, 100),
    end=st.one_of(
        st.integers(1, 4).map(lambda n: dict(max_epochs=n)),
        st.integers(1, 150).map(lambda n: dict(max_samples=n)),
        st.integers(1, 1500).map(lambda n: dict(max_tokens=n)),
    ),
)
@settings(max_examples=25)
def test_the_number_of_steps_is_the_number_that_is_counted(folder, lengths, more, end):
    data, size = open_lengths(folder, lengths), max(lengths) + more
    options, positions = DataOptions(batch_tokens=size, seed=SEED), [RunPosition()]
    goals = dict(
        max_epochs=lambda at, n: at.num_samples >= n * len(lengths),
        max_samples=lambda at, n: at.num_samples >= n,
        max_tokens=lambda at, n: at.num_tokens >= n,
    )
    ((name, goal),) = end.items()
    batches = draw_by(options, data)
    while not goals[name](positions[-1], goal):
        rows, last = next(batches), positions[-1]
        tokens = last.num_tokens + int(data.lengths[rows].sum())
        positions.append(RunPosition(last.step + 1, last.num_samples + len(rows), tokens, len(rows)))
    for start in positions:
        assert count_by(options, data, start=start, **end) == len(positions) - 1
    batching = choose_batching(data, options)
    for earlier, later in itertools.combinations(positions[:6], 2):
        num_batches = later.step - earlier.step
        assert batching.count(earlier.num_samples, later.num_samples) == num_batches
        assert batching.find_end(earlier.num_samples, num_batches=num_batches) == later.num_samples


def test_an_epoch_of_whole_batches_ends_with_one_and_another_sample_needs_one_more(folder):
    data, options = open_lengths(folder, [5] * 8), DataOptions(batch_tokens=10, seed=SEED)
    assert count_by(options, data, max_epochs=1) == 4  # 40 tokens
    assert count_by(options, data, max_samples=9) == 5
    # The last sample, of 4 tokens, begins in the second batch and ends after it: none is left for a third.
    data, options = open_lengths(folder, [4] * 4), DataOptions(batch_tokens=7, seed=SEED)
    assert count_by(options, data, max_epochs=1) == 2


def test_a_run_that_changes_its_batches_goes_on_where_it_is(folder):
    """The first batch after the change may be smaller; from then on they are those of the definition."""
    data = open_lengths(folder, list(range(1, 21)))
    options = DataOptions(batch_tokens=40, seed=SEED)
    whole = np.concatenate(list(itertools.islice(draw_by(options, data), 9)))
    rows = list(itertools.islice(draw_by(options, data, start=13), 4))
    assert all(map(len, rows)) and np.concatenate(rows).tolist() == whole[13 : 13 + sum(map(len, rows))].tolist()


def test_a_sample_longer_than_a_batch_is_named(folder):
    data = open_lengths(folder, [3, 9, 4], [2, 11, 5])
    assert isinstance(choose_batching(data, DataOptions(batch_tokens=11)), TokenBatches)
    with pytest.raises(ValueError, match=r"--batch-tokens 10: .* row 2 of \S*/1\.arrow, has 11 tokens"):
        choose_batching(data, DataOptions(batch_tokens=10))
    data.fit_to(9, drop_overlong=True)  # a sample that is dropped is no obstacle
    assert choose_batching(data, DataOptions(batch_tokens=9)).size == 9


def test_a_pair_counts_both_of_its_sequences(folder):
    model = save_tokenizer(folder / "model")
    data = Mixture([TokenizedData(write_pairs(folder / "pairs.arrow", model))])
    of_pairs = data.list_sequences(data.kept)
    assert (data.lengths == of_pairs.sum_by_row(of_pairs.lengths)).all() and (of_pairs.counts == 2).all()
    options = DataOptions(batch_tokens=int(data.lengths.max()) + 20)
    expected = divide(
        data.lengths[sampler.draw_samples(data, seed=42, start=0, count=90)].tolist(), options.batch_tokens
    )
    found = itertools.islice(draw_by(options, data), len(expected))
    assert [len(rows) for rows in found] == [len(batch) for batch in expected]


def test_without_it_a_batch_is_a_number_of_samples(folder):
    data = open_lengths(folder, [3, 9, 4])
    for options, size in ((DataOptions(), 128), (DataOptions(batch_size=4), 4)):
        batching = choose_batching(data, options)
        assert str(batching) == f"{size} samples" and batching.find_end(7) == 7 + size
        assert batching.count(7, 7 + size) == 1 and batching.count(7, 8 + size) == 2 and batching.count(7, 7) == 0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    made = make_inputs(tmp_path_factory.mktemp("inputs"), "llama_tied_bias")
    return OPTIONS | made | dict(batch_size=None, batch_tokens=BATCH_TOKENS)


@pytest.fixture(scope="module")
def run(inputs, world, tmp_path_factory) -> Path:
    """Two epochs and a part of a third on one rank."""
    return train_once(tmp_path_factory, world, **inputs, max_steps=STEPS)


def test_a_run_trains_the_batches_of_the_definition(inputs, run):
    data = Mixture([TokenizedData(inputs["data_path"])])
    stream = list_stream(data.lengths.tolist(), 42)
    expected = divide([int(data.lengths[row]) for row in stream], BATCH_TOKENS)[:STEPS]
    rows = read_rows(run)
    assert [row["num_samples"] for row in rows] == [len(batch) for batch in expected]
    assert [row["num_total_tokens"] for row in rows] == [
        sum(int(data.lengths[stream[p]]) for p in batch) for batch in expected
    ]
    assert len({row["num_samples"] for row in rows}) > 1 and rows[-1]["epoch"] > 2  # batches straddle epochs
    last = json.loads((run / "checkpoints" / f"step_{STEPS}" / "state.json").read_text())["position"]
    assert last["num_in_step"] == rows[-1]["num_samples"]
    assert [path.name for path in (run / "hf_format").glob("*samples_*")] == [
        f"samples_{rows[-1]['total_samples_accumulated']}"
    ]


@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(step, inputs, run, world, tmp_path):
    output_dir = copy_until(run, step, tmp_path / "run")
    train_here(world, **inputs, output_dir=str(output_dir), max_steps=STEPS)
    check_same(run, output_dir, step=STEPS)


@pytest.mark.slow
def test_a_run_that_is_resumed_on_other_ranks_trains_the_same_batches(inputs, run, world, tmp_path):
    output_dir = copy_until(run, 2, tmp_path / "run")
    changes = dict(output_dir=output_dir, max_steps=STEPS, max_tokens_per_gpu=41)
    train_on(2, world, **inputs | changes)
    for row, other in zip(read_rows(run), read_rows(output_dir), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=2e-6)
        for name in ("num_samples", "num_total_tokens", "num_loss_counted_tokens", "total_tokens_accumulated"):
            assert other[name] == row[name]


def test_another_size_is_another_run(inputs, run, world, tmp_path):
    output_dir = copy_until(run, 2, tmp_path / "run")
    for changes, said in (
        (dict(batch_tokens=160), r"batch-tokens \(150 .* 160\)"),
        (dict(batch_tokens=None), r"batch-size \(None .* 4\), batch-tokens \(150 .* None\)"),
    ):
        with pytest.raises(ValueError, match=f"step_2 .* other {said}"):
            train_here(world, **inputs | changes, output_dir=str(output_dir), max_steps=STEPS)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    sizes=st.sampled_from([dict(batch_size=5), dict(batch_size=40), dict(batch_tokens=30), dict(batch_tokens=95)]),
    every=st.sampled_from([None, 1, 7, 33]),
    at_epoch=st.booleans(),
    at_end=st.booleans(),
)
@settings(max_examples=25)
def test_the_exports_to_come_are_those_that_train_makes(folder, lengths, sizes, every, at_epoch, at_end):
    data, given_ends = open_lengths(folder, lengths), dict(checkpoint_at_epoch=at_epoch, save_final_checkpoint=at_end)
    options = group_options(TrainOptions, output_dir="run", model_name_or_path="m", seed=SEED, **sizes, **given_ends,
                            min_samples_per_checkpoint=every)  # fmt: skip
    positions, num_steps = [RunPosition()], 12
    for rows in itertools.islice(draw_by(options.data, data), num_steps):
        last = positions[-1]
        positions.append(RunPosition(last.step + 1, last.num_samples + len(rows), 0, len(rows)))
    calendar = Calendar(options.validation, options.checkpoints, options.exports, len(lengths))
    due = [calendar.find_due(at, num_steps=num_steps).export for at in positions]
    batching = choose_batching(data, options.data)
    for start in positions:
        found = list_export_steps(
            options.exports, batching, start=start, num_steps=num_steps, epoch_length=len(lengths)
        )
        assert found == [step for step in range(start.step + 1, num_steps + 1) if due[step]]


def test_a_run_has_batches_as_small_as_the_longest_sample_and_no_smaller(inputs, world, tmp_path):
    longest = int(TokenizedData(inputs["data_path"]).lengths.max())
    values = inputs | dict(output_dir=str(tmp_path / "run"), max_steps=2)
    said = rf"--batch-tokens {longest - 1}: .* row \d+ of \S+, has {longest} tokens"
    with pytest.raises(ValueError, match=said):
        train_here(world, **values | dict(batch_tokens=longest - 1))
    train_here(world, **values | dict(batch_tokens=longest))
    assert all(row["num_samples"] >= 1 for row in read_rows(tmp_path / "run"))


def test_thresholds_are_crossed_by_the_samples_of_the_last_step():
    options = group_options(TrainOptions, output_dir="run", model_name_or_path="m", min_samples_per_checkpoint=10)
    calendar = Calendar(options.validation, options.checkpoints, options.exports, NUM_SAMPLES)
    for num_samples, num_in_step, is_due in ((10, 1, True), (13, 3, False), (13, 4, True), (19, 9, False)):
        position = RunPosition(4, num_samples, 99, num_in_step)
        assert calendar.find_due(position, num_steps=None).export == is_due
