"""Data sets of very many rows: orders by arithmetic, an index in a mapped file, nothing held of every row.

The sizes from which these are used are lowered, so that a few rows are many.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from in_process import train_here
from small_runs import OPTIONS, check_same, copy_until, read_rows
from tiny_data import make_samples, to_row, write_rows, write_samples
from tiny_models import save_tokenizer
from tiny_pairs import write_pairs

from mini_trainer import sampler
from mini_trainer.data.columns.token_columns import TextColumns
from mini_trainer.data.tokenized import by_row, index
from mini_trainer.data.tokenized.by_row import (
    FeistelPermutation,
    Joined,
    RowRange,
    draw_permutation,
    find_top_row,
    join_rows,
    sum_values,
)
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import RowPlace
from mini_trainer.model.fingerprints import fingerprint_data
from mini_trainer.model.scoring import score_files
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.soft_targets import make_record_type
from mini_trainer.options import DataOptions, EndOptions
from mini_trainer.sampler import StreamTokens, choose_batching, count_steps, draw_samples, iterate_batches

MODEL = "llama_tied_bias"
VOCAB_SIZE, STEPS = 160, 5
ENDINGS = (".arrow", ".parquet", ".jsonl")


@pytest.fixture
def many(monkeypatch):
    """Every data set counts as large, and is read in many parts."""
    monkeypatch.setattr(by_row, "ARITHMETIC_ABOVE", 4)
    monkeypatch.setattr(index, "KEPT_FROM", 1)
    monkeypatch.setattr(by_row, "CHUNK", 6)
    monkeypatch.setattr(by_row, "BLOCK", 4)
    sampler.epoch_permutations.cache_clear()  # orders by the other rule
    yield
    sampler.epoch_permutations.cache_clear()


def write_lengths(path: Path, lengths: list[int]) -> Path:
    return write_samples(path, [([7] * length, [7] * length) for length in lengths])


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 4096, 65_537])
def test_arithmetic_is_a_permutation_wherever_it_is_read(size):
    whole = FeistelPermutation(size, [3, 1])[:]
    assert np.array_equal(np.sort(whole), np.arange(size))
    start, end = size // 3, size // 3 + size // 2
    assert np.array_equal(FeistelPermutation(size, [3, 1])[start:end], whole[start:end])
    assert np.array_equal(FeistelPermutation(size, [3, 1])[start : size + 9], whole[start:])


def test_the_rule_is_fixed():
    """Runs resume by it: other numbers need another name of the rule."""
    assert FeistelPermutation(1_000_003, [42, 0])[:5].tolist() == [702346, 997229, 629034, 120853, 18595]
    assert draw_permutation(1000, [42, 0]).tolist() == np.random.default_rng([42, 0]).permutation(1000).tolist()
    assert isinstance(draw_permutation(by_row.ARITHMETIC_ABOVE + 1, [42, 0]), FeistelPermutation)
    assert isinstance(draw_permutation(by_row.ARITHMETIC_ABOVE // 16, [42, 0]), np.ndarray)


@pytest.mark.parametrize("seed", [[0, 0], [0, 1], [1, 0], [42, 7, 1]])
def test_arithmetic_looks_random(seed):
    """Bounds that a random permutation exceeds once in millions; it depends on every part of the seed."""
    size, num_cells = 300_007, 32
    found = FeistelPermutation(size, seed)[:]
    cells = np.arange(size) * num_cells // size * num_cells + found * num_cells // size
    expected = size / num_cells**2
    chi_square = ((np.bincount(cells, minlength=num_cells**2) - expected) ** 2).sum() / expected
    freedom = (num_cells - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)
    for lag in (1, 2, 256):
        correlation = np.corrcoef(found[:-lag], found[lag:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(size), lag
    assert np.count_nonzero(found == np.arange(size)) < 12 and np.count_nonzero(np.diff(found) == 1) < 12
    other = FeistelPermutation(size, [*seed[:-1], seed[-1] + 1])[:]
    assert np.count_nonzero(found == other) < 12 and abs(np.corrcoef(found, other)[0, 1]) < 5 / np.sqrt(size)


def test_rows_that_are_not_held_are_indexed_like_arrays():
    rows, array = RowRange(5, 9), np.arange(5, 14, dtype=np.int32)
    assert len(rows) == 9 and list(rows) == array.tolist() and np.asarray(rows).dtype == array.dtype
    for places in (slice(2, 5), slice(None), slice(7, 99), slice(0, 9, 4), np.array([3, 0, 3]), array % 2 == 0):
        assert np.array_equal(rows[places], array[places]) and rows[places].dtype == array.dtype
    parts = [np.array([4, 9, 1], np.int32), np.array([9], np.int32), np.array([2, 0], np.int32)]
    values, joined = np.concatenate(parts), Joined(parts)
    assert len(joined) == 6 and np.array_equal(joined, values) and joined[3] == 9
    for some in (slice(1, 5), slice(None), np.array([5, 0, 3, 3]), np.array([], int)):
        assert np.array_equal(joined[some], values[some]) and joined[some].dtype == values.dtype
    for kept in (RowRange(0, 6), RowRange(2, 3), np.array([0, 3, 5])):
        own = values[np.asarray(kept)]
        assert sum_values(joined, kept) == sum_values(values, kept) == own.sum()
        first = int(np.asarray(kept)[own.argmax()])
        assert find_top_row(joined, kept) == find_top_row(values, kept) == first
    assert join_rows([RowRange(0, 3), RowRange(3, 4)]) == RowRange(0, 7)
    assert join_rows([np.array([0, 2]), RowRange(3, 2)]).tolist() == [0, 2, 3, 4]
    assert join_rows([RowRange(0, 2), RowRange(3, 2)]).tolist() == [0, 1, 3, 4]


def describe(data: TokenizedData) -> list:
    rows = [{name: np.asarray(value).tolist() for name, value in data.read(i).items()} for i in range(len(data.kept))]
    digest = fingerprint_data(data)
    return [rows, data.lengths.tolist(), data.num_loss_tokens.tolist(), sorted(data.columns), digest]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_index_in_a_file_is_that_in_memory(ending, tmp_path, monkeypatch):
    path = write_samples(tmp_path / f"data{ending}", make_samples(50, vocab_size=VOCAB_SIZE))
    kept, expected = tmp_path / f"data{ending}.index", describe(TokenizedData(path))
    assert not kept.exists()
    monkeypatch.setattr(index, "KEPT_FROM", 1)
    assert describe(TokenizedData(path)) == expected
    made = kept.stat()
    assert describe(TokenizedData(path)) == expected and kept.stat() == made  # not made again
    for damage in (kept.read_bytes()[:-8], b"", b"[1]\n", b'{"identity": [1, [5, 5]]}\n', kept.read_bytes()[:30]):
        kept.write_bytes(damage)
        assert describe(TokenizedData(path)) == expected and kept.stat().st_size == made.st_size


@pytest.mark.parametrize("is_many", [False, True])
def test_the_sequences_of_rows_are_those_that_are_read(is_many, tmp_path, monkeypatch):
    monkeypatch.setattr(by_row, "CHUNK", 6)
    if is_many:
        monkeypatch.setattr(index, "KEPT_FROM", 1)
    tokenizer = save_tokenizer(tmp_path / "model")
    paths = [write_pairs(tmp_path / f"{i}.arrow", tokenizer, size=size, seed=i) for i, size in enumerate((17, 9))]
    for path in paths:
        table = pa.ipc.open_file(path.read_bytes()).read_all()
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    for given in (paths[:1], paths):
        data = Mixture(list(map(TokenizedData, given)))
        assert is_many == (tmp_path / "0.arrow.index").exists()
        own = [data.read(row)["sequence_lengths"].tolist() for row in range(len(data.lengths))]
        rows = np.random.default_rng(0).integers(0, len(own), 40)
        for chosen in (rows, rows[:0], np.array([len(own) - 1])):
            found = data.list_sequences(chosen)
            assert found.counts.tolist() == [2] * len(chosen)
            assert found.lengths.tolist() == [length for row in chosen for length in own[row]]
        assert data.longest_sequence == max(map(max, own))
        data.fit_to(cap := int(np.median(data.lengths[:])), drop_overlong=True)
        assert data.longest_sequence == max(max(lengths) for lengths in own if sum(lengths) <= cap)


def test_scores_of_a_row_lie_after_those_of_the_rows_before(many, tmp_path, monkeypatch):
    lengths = np.random.default_rng(2).integers(1, 30, 41).tolist()
    data, name = TokenizedData(write_lengths(tmp_path / "data.arrow", lengths)), "teacher"
    kind, num_records = make_record_type(2), [length - 1 for length in lengths]
    monkeypatch.setattr(score_files, "PART_BYTES", 50 * kind.itemsize)
    records = np.zeros(sum(num_records), kind)
    records["target"] = np.arange(len(records))
    identity = score_files.ScoreIdentity(score_files.digest_data(data), "t", "tokenizer", None, 2, 1.0, 99, "float32")
    writer = score_files.ScoreWriter(data, score_files.locate_scores(data.path, name), identity, teacher="t")
    parts, before = writer.list_parts(), np.concatenate([[0], np.cumsum(num_records)])
    assert [end for _, end in parts[:-1]] == [first for first, _ in parts[1:]] and parts[-1][1] == 41
    for first, end in parts:
        assert before[end] - before[first] <= 50 and (end == 41 or before[end + 1] - before[first] > 50)
        writer.write(first, end, records[before[first] : before[end]])
    writer.finish()
    file = score_files.ScoreFile(data, name)
    for row in (40, 0, 7, *range(41)):
        assert file[row]["target"].tolist() == list(range(before[row], before[row + 1]))


def test_the_index_is_made_again_for_other_rows(many, tmp_path):
    path = write_lengths(tmp_path / "data.arrow", [3, 5, 4, 2, 2])
    assert TokenizedData(path).lengths.tolist() == [3, 5, 4, 2, 2]
    stat = path.stat()
    write_lengths(path, [5, 3, 4, 2, 2])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert path.stat().st_size == stat.st_size and TokenizedData(path).lengths.tolist() == [5, 3, 4, 2, 2]


def test_one_of_several_makes_the_index_and_process_data_does_before_them(many, tmp_path):
    path = write_lengths(tmp_path / "data.arrow", [3, 5, 4, 2, 2] * 40)
    with ThreadPoolExecutor(4) as pool:  # each has its own lock, and without them the same file to write to
        found = list(pool.map(lambda _: TokenizedData(path).lengths.tolist(), range(4)))
    assert found == [[3, 5, 4, 2, 2] * 40] * 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data.arrow", "data.arrow.index"]
    kept = tmp_path / "data.arrow.index"
    kept.unlink()
    index.keep_index(path, sha256=None)
    made = kept.stat()
    assert TokenizedData(path).lengths.tolist() == found[0] and kept.stat() == made


@pytest.mark.parametrize("share", [0.01, 0.9])  # in its first line, and in a length
def test_a_damaged_index_or_one_of_other_data_is_used(many, tmp_path, share):
    path = write_lengths(tmp_path / "data.arrow", [3, 5, 4, 2, 2] * 400)
    kept = tmp_path / "data.arrow.index"
    index.keep_index(path, sha256="of this data")
    assert TokenizedData(path).lengths[0] == 3
    content, other = kept.read_bytes(), bytearray(kept.read_bytes())
    assert json.loads(content.split(b"\n")[0])["identity"][1] is None, "an index of other data was used"
    place = content.index(np.array([3, 5, 4], np.int32).tobytes()) if share > 0.5 else content.index(b'"num_nulls"') + 1
    other[place] ^= 1
    kept.write_bytes(other)
    assert TokenizedData(path).lengths.tolist() == [3, 5, 4, 2, 2] * 400 and kept.read_bytes() == content


def test_without_a_place_for_the_index_it_is_in_a_file_without_a_name(many, tmp_path):
    name = "d" * 239 + ".arrow"  # a name for the index, written aside, would be too long
    data = TokenizedData(write_lengths(tmp_path / name, [3, 5, 4]))
    assert data.lengths.tolist() == [3, 5, 4] and len(data.read(1)["input_ids"]) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_nulls_are_refused_from_the_index_too(many, tmp_path):
    rows = [to_row(([5, 6, 7], [-100, 6, 7])), to_row(([5, 6], [-100, 6]))]
    path = write_rows(tmp_path / "data.arrow", [rows[0], rows[1] | {"len": None}])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"data\.arrow: column len .*1 null"):
            TokenizedData(path)


def test_a_stream_of_record_batches_is_read_as_a_file(many, tmp_path):
    rows = [to_row(sample) for sample in make_samples(30, vocab_size=VOCAB_SIZE)]
    expected, path = describe(TokenizedData(write_rows(tmp_path / "a.arrow", rows))), tmp_path / "b.arrow"
    table = pa.Table.from_pylist(rows, schema=TextColumns.schema)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    assert describe(TokenizedData(path))[:-1] == expected[:-1]


def test_every_epoch_has_every_sample_once_and_tokens_are_counted(many, tmp_path):
    lengths = [[int(n) for n in np.random.default_rng(i).integers(1, 30, size)] for i, size in enumerate((37, 23))]
    paths = [write_lengths(tmp_path / f"{i}.arrow", own) for i, own in enumerate(lengths)]
    for data in (Mixture([TokenizedData(paths[0])]), Mixture(list(map(TokenizedData, paths)))):
        size = len(data.kept)
        epochs = draw_samples(data, seed=5, start=0, count=3 * size).reshape(3, size)
        assert all(np.array_equal(np.sort(epoch), np.arange(size)) for epoch in epochs)
        assert (epochs[0] != epochs[1]).any()
        assert np.array_equal(draw_samples(data, seed=5, start=20, count=50), epochs.reshape(-1)[20:70])
        before = np.concatenate([[0], np.cumsum(data.lengths[epochs.reshape(-1)])])
        for stride in (1, 7, -11):  # forwards and backwards
            stream = StreamTokens(data, seed=5)
            places = range(len(before))[::stride]
            assert [stream.count(n) for n in places] == [int(before[n]) for n in places]
        options = DataOptions(batch_tokens=64, seed=5)
        counted = count_steps(data, choose_batching(data, options), EndOptions(max_epochs=2), seed=options.seed)
        assert counted == before[2 * size - 1] // 64 + 1


def test_the_length_of_a_run_is_known_without_a_walk_through_its_epochs(many):
    reads: list[int] = []
    read = lambda start, end: np.full(end - start, reads.append(end - start) or 3)  # noqa: E731
    tokens = by_row.RunningSums(read, 999, total=3 * 999)
    assert tokens.before(998) == 3 * 998 and sum(reads) == 1
    assert tokens.before(10) == 30 and sum(reads) < 30
    assert tokens.before(500) == 1500 and tokens.before(20) == 60 and sum(reads) < 530


@pytest.mark.parametrize("subset", [9, 0.3, 99])
def test_a_subset_is_drawn_by_either_rule(subset, tmp_path, monkeypatch):
    path = write_lengths(tmp_path / "data.arrow", list(range(1, 51)))
    number = min(50, 9 if subset == 9 else 15 if subset == 0.3 else 99)
    data = Mixture([TokenizedData(path)])
    data.take_subset(subset, seed=3)
    expected = np.random.default_rng([3, 0]).permutation(np.arange(50, dtype=np.int32))[:number]
    assert list(data.kept) == np.sort(expected).tolist() and data.kept.dtype == np.int32
    monkeypatch.setattr(by_row, "ARITHMETIC_ABOVE", 4)
    monkeypatch.setattr(by_row, "CHUNK", 6)
    other = Mixture([TokenizedData(path)])
    other.take_subset(subset, seed=3)
    kept = list(other.kept)
    assert len(kept) == number and kept == sorted(set(kept)) and (number == 50 or kept != list(data.kept))


def test_dropped_rows_are_the_same_however_they_are_read(tmp_path, monkeypatch):
    lengths = np.random.default_rng(1).integers(1, 40, 60).tolist()
    cap = sorted(lengths)[40]  # a sample that just fits is kept
    path, expected = write_lengths(tmp_path / "data.arrow", lengths), [i for i, n in enumerate(lengths) if n <= cap]
    for chunk in (1 << 20, 7):
        monkeypatch.setattr(by_row, "CHUNK", chunk)
        data = TokenizedData(path)
        assert data.fit_to(cap, drop_overlong=True) == 60 - len(expected)
        assert list(data.kept) == expected and data.longest == max(lengths[i] for i in expected)
        assert data.fit_to(40, drop_overlong=False) == 0 and isinstance(data.kept, RowRange)


def test_a_run_of_many_rows_resumes_bit_for_bit_and_by_no_other_rule(many, inputs, world, tmp_path, monkeypatch):
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    train_here(world, **OPTIONS, **inputs, output_dir=str(run), max_steps=STEPS)
    assert read_rows(run)[-1]["epoch"] > 1
    train_here(world, **OPTIONS, **inputs, output_dir=str(copy_until(run, 2, resumed)), max_steps=STEPS)
    check_same(run, resumed, step=STEPS)
    again = copy_until(run, 2, tmp_path / "again")
    monkeypatch.setattr(by_row, "ARITHMETIC_ABOVE", 1 << 24)
    said = r"step_2 .*arithmetic .* 4 .*permutation"
    with pytest.raises(ValueError, match=said):
        train_here(world, **OPTIONS, **inputs, output_dir=str(again), max_steps=STEPS)


@pytest.mark.parametrize("sizes", [dict(batch_size=9), dict(batch_size=None, batch_tokens=70)])
def test_ranks_share_the_batches_that_one_would_train(sizes, many, tmp_path):
    lengths = np.random.default_rng(0).integers(1, 40, 61).tolist()
    data = Mixture([TokenizedData(write_lengths(tmp_path / "data.arrow", lengths))])
    options = DataOptions(**sizes, max_tokens_per_gpu=40, seed=5)
    batches = [
        list(iterate_batches(data, options, objective=CausalLM(), num_steps=12, attention_cost=1e-4, world=place))
        for place in (RowPlace(0, 1), RowPlace(0, 2), RowPlace(1, 2))
    ]
    for whole, *parts in zip(*batches, strict=True):
        assert all(np.array_equal(whole.sample_ids, part.sample_ids) for part in parts)
        own = [(part, row[rank], one) for rank, part in enumerate(parts)
               for row, one in zip(part.table, part.micro_batches, strict=True)]  # fmt: skip
        assert sorted(i for _, drawn, _ in own for i in drawn) == list(range(len(whole.sample_ids)))
        for part, drawn, one in own:
            assert not drawn or one.row.seq_lengths[: len(drawn)] == part.lengths[drawn].tolist()
