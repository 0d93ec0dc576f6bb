"""Small files that unpack to gigabytes: read in bounded memory, or refused by file and rows."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import options_for, read_file

from mini_trainer.data.rows.hub_rows import find_dataset
from mini_trainer.data.stores import parquet
from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES, TooLong
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import RowOptions
from mini_trainer.process_data import process_data

MODEL = "tokenizer"


def in_one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def write(path: Path, column: pa.Array, **options: object) -> Path:
    """A file of prompts and completions with a column that unpacks to more than it takes in the file."""
    table = pa.table({"prompt": ["q"] * len(column), "completion": ["x"] * len(column), "column": column})
    limit = {"dictionary_pagesize_limit": 1 << 28, "store_schema": False, "compression": "zstd"}
    pq.write_table(table, path, **limit | options)
    assert path.stat().st_size < 100_000
    return path


def test_a_row_that_is_too_long_is_named_alone(tmp_path):
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["c" * (1 << 20)]))
    rows = read_file(write(tmp_path / "rows.parquet", in_one_list(values)))
    assert isinstance(rows[0].value, TooLong) and rows[0].value.num_bytes > 1000 << 20 and rows[0].number == 1
    parts = [pa.array([["a"]]), in_one_list(pa.array(["d" * (MAX_ROW_BYTES + 1)])), pa.array([["b"]])]
    rows = read_file(write(tmp_path / "several.parquet", pa.concat_arrays(parts)))
    assert [type(row.value) for row in rows] == [dict, TooLong, dict] and [row.number for row in rows] == [1, 2, 3]


REFUSED = r"rows.parquet: row group 2 has [0-9,]+ bytes uncompressed, allowed: 2,000: rewrite .*row_group_size=\d+\)"


def test_a_row_group_that_is_too_large_is_refused_unread(model, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 2000)
    path = tmp_path / "in" / "rows.parquet"
    path.parent.mkdir()
    texts = ["a", "b" * 5000]
    pq.write_table(pa.table({"prompt": texts, "completion": ["x", "y"]}), path, row_group_size=1)
    with pytest.raises(ValueError, match=REFUSED):
        process_data(options_for(model, path, tmp_path / "out.arrow"))
    with pytest.raises(ValueError, match=REFUSED):
        find_dataset(RowOptions(input_dataset=str(path.parent)))
    with pytest.raises(ValueError, match=REFUSED):
        TokenizedData(path)


def test_a_first_line_of_tokenized_rows_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.data.tokenized.converted.BLOCK_BYTES", 10)
    monkeypatch.setattr("mini_trainer.data.tokenized.converted.MAX_ROW_BYTES", 100)
    (tmp_path / "data.jsonl").write_text('{"input_ids": [' + "1, " * 100 + "1]}\n")
    with pytest.raises(ValueError, match=r"data\.jsonl: .*line .*100 bytes"):
        TokenizedData(tmp_path / "data.jsonl")
