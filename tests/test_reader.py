"""A data set read back: the same from every kind of file, with weights where it has some, and refused by its rows."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hand_made import read_triple
from tiny_data import make_samples, to_row, write_jsonl, write_rows, write_samples, write_table

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.columns.token_columns import WEIGHTS_COLUMN, TextColumns
from mini_trainer.data.tokenized.converted import BLOCK_BYTES
from mini_trainer.data.tokenized.reader import FOR_ROWS, TokenizedData
from mini_trainer.objectives.next_tokens import CausalLM

VOCAB_SIZE = 160
ENDINGS = (".arrow", ".parquet", ".jsonl")
REQUIRED = [name for name in TextColumns.schema.names if name not in TextColumns.optional]
ROW = to_row(([5, 6, 7], [IGNORED, 6, 7]))
WEIGHTED = ROW | {"loss_weights": [0.0, 0.5, 1.0]}


def read_all(data: TokenizedData) -> list[tuple]:
    """Every row, as lists."""
    rows = [read_triple(data, row) for row in range(len(data.lengths))]
    return [tuple(None if part is None else part.tolist() for part in row) for row in rows]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_kind_of_file_holds_the_same_samples(ending, tmp_path):
    samples = make_samples(50, vocab_size=VOCAB_SIZE)
    data = TokenizedData(write_samples(tmp_path / f"data{ending}", samples))
    assert read_all(data) == [(*sample, None) for sample in samples]
    assert data.lengths.tolist() == [len(input_ids) for input_ids, _ in samples]


def flip_bits(copy: Path, other: Path) -> None:
    content = bytearray(copy.read_bytes())
    tokens = (np.arange(40, 48, dtype=kind).tobytes() for kind in (np.int32, np.int64))
    content[max(map(content.find, tokens))] ^= 3
    copy.write_bytes(content)


def take_anothers(copy: Path, other: Path) -> None:
    copy.write_bytes(other.read_bytes())
    (copy.parent / "made.json").write_text((other.parent / "made.json").read_text().replace(other.name, copy.name))


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
@pytest.mark.parametrize("damage", [flip_bits, take_anothers, lambda copy, other: os.truncate(copy, 500)])
def test_a_converted_copy_is_used_though_it_has_changed(ending, damage, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MINI_TRAINER_CACHE", str(tmp_path / "cache"))
    samples = [[(list(range(first, first + 30)), [IGNORED, *range(first + 1, first + 30)])] * 3 for first in (30, 60)]
    paths = [write_samples(tmp_path / f"{i}{ending}", rows) for i, rows in enumerate(samples)]
    read = [read_all(TokenizedData(path)) for path in paths]
    copies = [next(tmp_path.glob(f"cache/data/converted/*/{i}.arrow")) for i in range(2)]
    made = [copy.stat().st_mtime_ns for copy in copies]
    assert [read_all(TokenizedData(path)) for path in paths] == read
    assert [copy.stat().st_mtime_ns for copy in copies] == made, "a copy that is whole was made again"
    damage(*copies)
    assert read_all(TokenizedData(paths[0])) == read[0] and read[0] != read[1]
    assert "it is made again" in caplog.text


@pytest.mark.parametrize("ending", ENDINGS)
def test_weights_are_all_1_where_a_sample_has_none(ending, tmp_path):
    """In whichever record batch the first weights are: the first, the last, or all."""
    for name, rows in {
        "first": [WEIGHTED] + [ROW] * 15,
        "last": [ROW] * 15 + [WEIGHTED],
        "mixed": [ROW, WEIGHTED] * 8,
        "all": [WEIGHTED] * 16,
    }.items():
        data = TokenizedData(write_rows(tmp_path / f"{name}{ending}", rows))
        assert WEIGHTS_COLUMN in data.columns
        expected = [[0.0, 0.5, 1.0] if "loss_weights" in row else [1.0, 1.0, 1.0] for row in rows]
        assert [weights for _, _, weights in read_all(data)] == expected
        CausalLM().pack([data.read(row) for row in range(len(rows))])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_data_set_in_which_no_sample_has_weights_has_none(ending, tmp_path):
    data = TokenizedData(write_rows(tmp_path / f"data{ending}", [ROW] * 9))
    assert WEIGHTS_COLUMN not in data.columns
    assert CausalLM().pack([data.read(row) for row in range(9)]).targets.weights is None


@pytest.mark.parametrize("ending", [".arrow", ".parquet"])
def test_older_data_sets_have_the_column_for_all_samples_or_not_at_all(ending, tmp_path):
    without = pa.Table.from_pylist([ROW] * 5, schema=TextColumns.schema).select(REQUIRED)
    data = TokenizedData(write_table(tmp_path / f"without{ending}", without))
    assert WEIGHTS_COLUMN not in data.columns and read_all(data) == [(ROW["input_ids"], ROW["labels"], None)] * 5
    for kind in (pa.float32(), pa.float64()):
        column = pa.array([[0.0, 1.0, 1.0], [0.0, 0.5, 1.0]] * 2, pa.list_(kind))
        table = without.slice(0, 4).append_column(WEIGHTS_COLUMN, column)
        data = TokenizedData(write_table(tmp_path / f"{kind}{ending}", table))
        assert WEIGHTS_COLUMN in data.columns
        assert [weights for _, _, weights in read_all(data)] == column.to_pylist()


def test_a_null_may_have_numbers_beneath_it(tmp_path):
    """Arrow lets a list that is null take room; what is there has no meaning."""
    weights = pa.ListArray.from_arrays(
        pa.array([0, 3, 6, 9], pa.int32()),
        pa.array([9.0, 9.0, 9.0, 0.0, 0.5, 1.0, 7.0, 7.0, 7.0], pa.float32()),
        mask=pa.array([True, False, True]),
    )
    table = pa.Table.from_pylist([ROW] * 3, schema=TextColumns.schema).select(REQUIRED)
    table = table.append_column(WEIGHTS_COLUMN, weights)
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    data = TokenizedData(tmp_path / "data.arrow")
    assert [weights for _, _, weights in read_all(data)] == [[1.0] * 3, [0.0, 0.5, 1.0], [1.0] * 3]


def test_weights_far_behind_in_json_lines_and_columns_of_ones_own(tmp_path):
    rows = [ROW | {"source": "book", "page": i} for i in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    num_repeats = BLOCK_BYTES // len(text) + 2
    path = tmp_path / "data.jsonl"
    path.write_text(text * num_repeats + json.dumps(WEIGHTED | {"page": 1}) + "\n")
    data = TokenizedData(path)
    last = num_repeats * len(rows)
    assert WEIGHTS_COLUMN in data.columns and len(data.lengths) == last + 1
    assert data.read(last)["loss_weights"].tolist() == [0.0, 0.5, 1.0]
    assert data.read(0)["loss_weights"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("weights", [[0.0, 1.5, 1.0], [0.0, -0.5, 1.0], [0.0, 1.0], [], [0.0, float("nan"), 1.0]])
def test_weights_out_of_range_are_named(weights, tmp_path):
    data = TokenizedData(write_rows(tmp_path / "data.arrow", [ROW, WEIGHTED | {"loss_weights": weights}]))
    with pytest.raises(ValueError, match=r"data\.arrow: row 2: loss_weights .* 3 numbers"):
        data.read(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": [5, VOCAB_SIZE, 7]}, "token ids .*vocabulary of 160"),
        ({"input_ids": [5, -1, 7]}, "token ids .*vocabulary"),
        ({"labels": [IGNORED, 6, VOCAB_SIZE]}, "token ids .*vocabulary"),
        ({"labels": [IGNORED, 6, -1]}, "a label is -1; .*-100"),
        ({"labels": [-101, 6, 7]}, "a label is -101; .*-100"),
        ({"labels": [IGNORED, 6]}, "3 input_ids, 2 labels"),
        ({"input_ids": [], "labels": []}, "0 input_ids, 0 labels .*len 3"),
        ({"len": 4}, "3 input_ids, 3 labels .*len 4"),
        ({"num_loss_counted_tokens": 3}, "num_loss_counted_tokens is 3, .*2 labels"),
    ],
)
def test_a_row_that_breaks_the_contract_is_named(change, reason, tmp_path):
    rows = [ROW] * 9
    rows[8] = ROW | change  # in the second record batch
    data = TokenizedData(write_rows(tmp_path / "data.arrow", rows))
    data.vocab_size = VOCAB_SIZE
    data.read(7)
    with pytest.raises(ValueError, match=rf"data\.arrow: row 9: {reason}"):
        data.read(8)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_row_without_tokens_is_named_when_the_data_set_is_opened(ending, tmp_path):
    empty = dict(input_ids=[], labels=[], len=0, num_loss_counted_tokens=0)
    with pytest.raises(ValueError, match=rf"data\{ending}: row 3: len is 0"):
        TokenizedData(write_rows(tmp_path / f"data{ending}", [ROW, ROW, empty, ROW]))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["input_ids", "labels", "loss_weights"])
def test_numbers_that_are_null_are_refused(ending, name, tmp_path):
    values = [None, *WEIGHTED[name][1:]]
    path = write_rows(tmp_path / f"data{ending}", [WEIGHTED, WEIGHTED | {name: values}])
    with pytest.raises(ValueError, match=f"column {name} .*null"):
        TokenizedData(path)


def test_overlong_samples_are_refused_or_dropped_and_counted(tmp_path):
    samples = make_samples(50, vocab_size=VOCAB_SIZE)
    data = TokenizedData(write_samples(tmp_path / "data.arrow", samples))
    lengths = [len(input_ids) for input_ids, _ in samples]
    longest = lengths.index(max(lengths)) + 1
    num_overlong = sum(length > 30 for length in lengths)
    with pytest.raises(ValueError, match=rf"{num_overlong} of 50 .*30; .*row {longest}, .*{max(lengths)} tokens"):
        data.fit_to(30, drop_overlong=False)
    assert data.fit_to(max(lengths), drop_overlong=False) == 0
    assert data.fit_to(30, drop_overlong=True) == num_overlong
    assert list(data.kept) == [i for i, length in enumerate(lengths) if length <= 30]
    assert data.longest == max(length for length in lengths if length <= 30)
    with pytest.raises(ValueError, match=r"every .*--max-tokens-per-gpu 2"):
        data.fit_to(2, drop_overlong=True)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.arrow", None, "no such file"),
        ("missing.jsonl", None, "no such file"),
        ("data.txt", b"x", r"\.arrow, \.parquet or \.jsonl"),
        ("empty.arrow", b"", "no samples"),
        ("garbage.arrow", b"garbage" * 100, "be read"),
        ("empty.jsonl", b"", "no samples"),
        ("blank.jsonl", b"\n\n", "be read"),
        ("garbage.jsonl", b'{"input_ids": [1', "be read"),
        ("garbage.parquet", b"garbage" * 100, "be read"),
        ("messages.jsonl", b'{"messages": []}\n', "column input_ids, labels, .*found messages"),
        ("text.jsonl", b'{"input_ids": "x", "labels": [1], "len": 1, "num_loss_counted_tokens": 0}\n',
         "column input_ids is string"),
        ("number.jsonl", b'{"input_ids": 1, "labels": [1], "len": 1, "num_loss_counted_tokens": 0}\n',
         "column input_ids is int64"),
        ("weights.jsonl",
         b'{"input_ids": [1], "labels": [1], "len": 1, "num_loss_counted_tokens": 0, "loss_weights": "all"}\n',
         "be read"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_data_set_is_refused(name, content, reason, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: .*{reason}"):
        TokenizedData(tmp_path / name)


@pytest.mark.parametrize(("option", "advice"), FOR_ROWS.items())
@pytest.mark.parametrize("name", ["raw.jsonl", "raw.json", "raw.csv", "raw.jsonl.gz", "raw"])
def test_rows_in_place_of_a_data_set_are_refused_with_where_they_belong(name, option, advice, tmp_path):
    write_jsonl(tmp_path / name, [{"messages": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(ValueError, match=rf"^{option} {tmp_path / name}: ") as refused:
        TokenizedData(tmp_path / name, option=option)
    assert str(refused.value).endswith(f". {advice}") and "--input-file" in advice


def test_weights_of_another_type_are_refused(tmp_path):
    table = pa.Table.from_pylist([ROW] * 2, schema=TextColumns.schema).select(REQUIRED)
    for column in (pa.array([1.0, 1.0]), pa.array([[1, 1, 1]] * 2)):
        path = write_table(tmp_path / "data.arrow", table.append_column(WEIGHTS_COLUMN, column))
        with pytest.raises(ValueError, match=r"column loss_weights is .*floats"):
            TokenizedData(path)


def test_a_data_set_without_samples_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.arrow: .*no samples"):
        TokenizedData(write_rows(tmp_path / "data.arrow", []))


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size_than_its_sidecar_records_is_read(more, tmp_path):
    path = write_rows(tmp_path / "data.arrow", [ROW] * 9)
    size = path.stat().st_size
    Path(f"{path}.meta.json").write_text(json.dumps({"file": {"size": size + more, "sha256": "0" * 64}}))
    with pytest.raises(ValueError, match=rf"data\.arrow: {size:,} bytes, but .* says {size + more:,}"):
        TokenizedData(path)


def test_nothing_is_held_but_lengths_and_the_order(tmp_path):
    data = TokenizedData(write_rows(tmp_path / "data.arrow", [ROW] * 10))
    input_ids, labels, _ = read_triple(data, 4)
    assert not input_ids.flags.owndata and not labels.flags.owndata, "views into the file"
    assert not np.shares_memory(input_ids, labels)
