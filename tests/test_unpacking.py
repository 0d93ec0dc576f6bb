"""Small files that unpack to gigabytes: read in bounded memory, or refused by file and rows."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import options_for
from make_tiny_model import train_tokenizer

from mini_trainer.data.rows.files import find_sources, iterate_rows, read_chunks
from mini_trainer.data.rows.hub_rows import find_dataset
from mini_trainer.data.stores import parquet
from mini_trainer.data.stores.json_lines import MAX_ROW_BYTES, TooLong
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import RowOptions
from mini_trainer.process_data import process_data

MOST_BYTES = 100 << 20  # of Arrow's memory, for rows of 8 MiB
OF_ALL_TYPES = {
    "text": pa.array(["x" * 5000, None] * 50),
    "bytes": pa.array([b"x" * 5000, None] * 50, pa.large_binary()),
    "view": pa.array(["x" * 5000, None] * 50, pa.string_view()),
    "dictionary": pa.array(["x" * 5000, None] * 50).dictionary_encode(),
    "map": pa.array([[("key", "x" * 5000)], None] * 50, pa.map_(pa.string(), pa.string())),
    "messages": pa.array([[{"role": "user", "content": "x" * 5000}, None], []] * 50),
    "large": pa.array([["x" * 5000, None], None] * 50, pa.large_list(pa.string())),
    "fixed": pa.array([["x", "x" * 5000], ["y", None]] * 50, pa.list_(pa.string(), 2)),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"' + "x" * 5000 + '"', None] * 50)),
    "number": pa.array([1, None] * 50),
    "flag": pa.array([True, None] * 50),
    "nothing": pa.nulls(100),
}


def repeat(text: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))


def in_one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def write(path: Path, column: pa.Array, **options: object) -> Path:
    """A file of prompts and completions with a column that unpacks to more than it takes in the file."""
    table = pa.table({"prompt": ["q"] * len(column), "completion": ["x"] * len(column), "column": column})
    limit = {"dictionary_pagesize_limit": 1 << 28, "store_schema": False, "compression": "zstd"}
    pq.write_table(table, path, **limit | options)
    assert path.stat().st_size < 100_000
    return path


def read_rows(path: Path) -> list:
    (source,) = find_sources([str(path)])
    return [row for chunk in read_chunks(source) for row in iterate_rows(chunk)]


def test_rows_with_the_same_long_text_are_not_all_unpacked_at_once(tmp_path):
    path = write(tmp_path / "rows.parquet", repeat("b" * (8 << 20), 100))  # 800 MiB
    (source,), count, before = find_sources([str(path)]), 0, pa.total_allocated_bytes()
    for chunk in read_chunks(source):
        assert chunk.size < 20 << 20 and pa.total_allocated_bytes() - before < MOST_BYTES
        count += sum(1 for _ in iterate_rows(chunk))
    assert count == 100


@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd", "brotli", "lz4", "none"])
def test_values_are_the_same_where_texts_stay_in_dictionaries(compression, page_version, tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    options = {"row_group_size": 40, "data_page_version": page_version, "compression": compression}
    pq.write_table(pa.table(OF_ALL_TYPES), path, **options)
    expected = read_rows(path)
    assert len(expected) == 100
    monkeypatch.setattr(parquet, "MAX_UNPACKED_BYTES", 90_000)
    with open(path, "rb") as file:
        repeating, most_rows = parquet.check_group(file, pq.read_metadata(file), 0)
    assert len(repeating) == 8 and most_rows in (17, 18)  # texts by the extension's type are read a few at a time
    assert read_rows(path) == expected


def test_texts_with_a_common_beginning_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    encoding = {"use_dictionary": False, "column_encoding": {"column": "DELTA_BYTE_ARRAY"}}
    path = write(tmp_path / "rows.parquet", pa.array(["x" * 5000] * 90), **encoding)
    monkeypatch.setattr(parquet, "MAX_UNPACKED_BYTES", 30_000)
    with open(path, "rb") as file:
        assert parquet.check_group(file, pq.read_metadata(file), 0) == ([], 5)
    assert len(read_rows(path)) == 90


def test_a_row_that_is_too_long_is_named_alone(tmp_path):
    rows = read_rows(write(tmp_path / "rows.parquet", in_one_list(repeat("c" * (1 << 20), 1000))))
    assert isinstance(rows[0].value, TooLong) and rows[0].value.num_bytes > 1000 << 20 and rows[0].number == 1
    parts = [pa.array([["a"]]), in_one_list(pa.array(["d" * (MAX_ROW_BYTES + 1)])), pa.array([["b"]])]
    rows = read_rows(write(tmp_path / "several.parquet", pa.concat_arrays(parts)))
    assert [type(row.value) for row in rows] == [dict, TooLong, dict] and [row.number for row in rows] == [1, 2, 3]


HUGE = {
    "one page": (pa.array(["a" * (20 << 20)], pa.large_string()), {"use_dictionary": False}),
    "many nulls": (in_one_list(pa.nulls(2_000_000, pa.int8())), {}),
}


@pytest.fixture(scope="module", params=HUGE)
def huge(request, tmp_path_factory) -> Path:
    column, options = HUGE[request.param]
    return write(tmp_path_factory.mktemp("huge") / "rows.parquet", column, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    train_tokenizer(["How many are 12 and 30? 42 user assistant system"] * 9, vocab_size=300).save_pretrained(path)
    return path


REFUSED = r"rows.parquet: (cannot be read[^:]*: )?rows 1 to 1 \(row group 1\) .*[0-9,]+ bytes "


def test_pages_that_unpack_to_too_much_are_refused_unread(huge, model, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_UNPACKED_BYTES", 10 << 20)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(ValueError, match=REFUSED):
        process_data(options_for(model, huge, tmp_path / "out.arrow"))
    with pytest.raises(ValueError, match=REFUSED):
        find_dataset(RowOptions(input_dataset=str(huge.parent)))
    with pytest.raises(ValueError, match=REFUSED):
        TokenizedData(huge)
    assert pa.default_memory_pool().max_memory() == before and list(tmp_path.iterdir()) == []


def test_a_damaged_header_is_an_error_of_the_file(tmp_path):
    path = write(tmp_path / "rows.parquet", pa.array(["x"] * 5))
    content = bytearray(path.read_bytes())
    content[4:60] = b"\x1c" * 56  # structs within structs
    path.write_bytes(content)
    with pytest.raises(ValueError, match="column 'prompt'"):
        read_rows(path)


def test_a_first_line_of_tokenized_rows_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.data.tokenized.conversion.INFERRED_BYTES", 10)
    monkeypatch.setattr("mini_trainer.data.tokenized.conversion.MAX_ROW_BYTES", 100)
    (tmp_path / "data.jsonl").write_text('{"input_ids": [' + "1, " * 100 + "1]}\n")
    with pytest.raises(ValueError, match=r"data\.jsonl: .*line .*100 bytes"):
        TokenizedData(tmp_path / "data.jsonl")
