"""Rows for classifiers: what becomes of texts, pairs, words, chats and their labels, and what is refused with its line.

What is right is said by transformers' tokenizer on its own, by the csv files that `datasets` reads, and by plain loops.
"""

import copy
import csv
import gzip
import json
import re
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import read_file, tokenize_rows
from make_encoder import train_word_pieces
from make_tiny_model import train_tokenizer
from tiny_data import read_lines, write_jsonl
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from mini_trainer.data.columns import base
from mini_trainer.data.columns.base import IGNORED, SEQUENCES, TOKENS, DataTask
from mini_trainer.data.rows.files import find_sources
from mini_trainer.data.rows.preparing import survey_labels
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import RowOptions

TEXTS = ["the film was very good", "terrible film, bad!", "Angela Merkel lives in Berlin", 'she said "no"\nand left']
SAID = [*TEXTS[:2], 'she said "good",\nand left', "bad film"]
REVIEWS = [{"text": text, "label": label} for text, label in zip(SAID, ("pos", "neg") * 2, strict=True)]


@pytest.fixture(scope="module")
def word_pieces():
    """As BERT's: it gives token types, and takes characters that cannot be seen away."""
    tokenizer = train_word_pieces(TEXTS * 9, vocab_size=200)
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    given = dict(model_input_names=["input_ids", "token_type_ids", "attention_mask"], model_max_length=20)
    given |= dict(tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map)
    return PreTrainedTokenizerFast(**given)


@pytest.fixture(scope="module")
def encoder(word_pieces, tmp_path_factory) -> Path:
    return save(word_pieces, tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def byte_level():
    return train_tokenizer(TEXTS * 9, vocab_size=300)


@pytest.fixture(scope="module")
def decoder(byte_level, tmp_path_factory) -> Path:
    return save(byte_level, tmp_path_factory.mktemp("decoder"))


def save(tokenizer, path: Path) -> Path:
    tokenizer.save_pretrained(path)
    return path


def write_csv(path: Path, rows: list[dict]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        table.writeheader()
        table.writerows(rows)
    return path


def prepare(model: Path, source: Path | tuple[Path, ...], output: Path, **options) -> TokenizedData:
    """What process_data.py makes of the source, read back."""
    return TokenizedData(tokenize_rows(model, source, output, format="classification", **options))


def read_all(data: TokenizedData) -> list[tuple]:
    rows = [data.read(row) for row in range(len(data.lengths))]
    parts = [(row["input_ids"], row.get("target", row.get("labels")), row.get("token_type_ids")) for row in rows]
    return [tuple(None if part is None else part.tolist() for part in row) for row in parts]


def find_task(path: Path, **options) -> DataTask:
    """What the labels of a file are taken for, without anything being tokenized."""
    given = RowOptions(format="classification", **options)
    return survey_labels(find_sources([str(path)]), given, num_workers=1).task


# --- what is right


def test_texts_and_labels_as_the_tokenizer_gives_them_from_every_kind_of_file(encoder, word_pieces, tmp_path):
    expected = [(word_pieces(row["text"])["input_ids"], [float(row["label"] == "pos")], None) for row in REVIEWS]
    write_jsonl(tmp_path / "a.jsonl", REVIEWS)
    (tmp_path / "a.json").write_text(json.dumps(REVIEWS, indent=1))
    write_csv(tmp_path / "a.csv", REVIEWS)
    write_csv(tmp_path / "a.tsv", REVIEWS)
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes())
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    pq.write_table(pa.Table.from_pylist(REVIEWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "bom.csv", "a.csv.gz", "a.parquet"):
        data = prepare(encoder, tmp_path / name, tmp_path / "out.arrow")
        assert data.task == DataTask(SEQUENCES, "single", ("neg", "pos"), 2)
        assert read_all(data) == expected, name
        assert data.sidecar["label_counts"] == {"neg": 2, "pos": 2}
        assert data.num_loss_tokens.tolist() == [1] * 4


@pytest.mark.parametrize("ending", [".arrow", ".parquet", ".jsonl"])
def test_pairs_have_token_types_where_the_tokenizer_gives_them(ending, encoder, word_pieces, tmp_path):
    rows = [{"text": "x", "of": {"a": TEXTS[i], "b": TEXTS[i - 1], "y": i % 2}} for i in range(4)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    fields = dict(columns=("text=of.a", "text_pair=of.b", "label=of.y"), ignore_columns=("text",))
    data = prepare(encoder, source, tmp_path / f"pairs{ending}", **fields)
    expected = [word_pieces(TEXTS[i], TEXTS[i - 1], return_token_type_ids=True) for i in range(4)]
    assert data.task.label_names == ("0", "1")
    assert read_all(data) == [(one["input_ids"], [i % 2], one["token_type_ids"]) for i, one in enumerate(expected)]


def test_a_decoder_has_no_token_types(decoder, byte_level, tmp_path):
    pairs = ("ab", "c"), ("a", "bc")
    rows = [{"text": text, "text_pair": pair, "label": i} for i, (text, pair) in enumerate(pairs)]
    data = prepare(decoder, write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.arrow")
    assert read_all(data) == [(byte_level(*pair)["input_ids"], [i], None) for i, pair in enumerate(pairs)]


WORDS = [
    {"tokens": ["Angela", "Merkel", "lives", "in", "Berlin!"], "labels": ["B-PER", "I-PER", "O", "O", "B-LOC"]},
    {"tokens": ["terrible", "film,", "bad"], "labels": ["O", -100, "O"]},
]


def test_a_words_first_token_has_its_label(encoder, word_pieces, tmp_path):
    data = prepare(encoder, write_jsonl(tmp_path / "a.jsonl", WORDS), tmp_path / "out.arrow")
    names = ("B-LOC", "B-PER", "I-PER", "O")
    assert data.task == DataTask(TOKENS, "single", names, 4)
    for row, (input_ids, labels, types) in zip(WORDS, read_all(data), strict=True):
        encoding = word_pieces(row["tokens"], is_split_into_words=True)
        expected = []
        for before, word in pairwise([None, *encoding.word_ids()]):
            label = row["labels"][word] if word not in (None, before) else IGNORED
            expected.append(label if label == IGNORED else names.index(label))
        assert (input_ids, labels, types) == (encoding["input_ids"], expected, None)
    assert data.num_loss_tokens.tolist() == [5, 2]
    assert data.sidecar["label_counts"] == {"B-LOC": 1, "B-PER": 1, "I-PER": 1, "O": 4}


def test_words_of_a_byte_level_vocabulary_are_those_of_the_text(decoder, byte_level, tmp_path):
    data = prepare(decoder, write_jsonl(tmp_path / "a.jsonl", WORDS), tmp_path / "out.arrow")
    for row, (input_ids, labels, _) in zip(WORDS, read_all(data), strict=True):
        text = " ".join(row["tokens"])
        encoding = byte_level(text)
        assert input_ids == encoding["input_ids"]
        starts = [len(" ".join(row["tokens"][:i])) + (i > 0) for i in range(len(row["tokens"]))]
        firsts = {encoding.char_to_token(max(start - 1, 0)) for start in starts}  # the space is the word's
        assert {i for i, label in enumerate(labels) if label != IGNORED} <= firsts
        assert sum(label != IGNORED for label in labels) == sum(label != IGNORED for label in row["labels"])


def test_a_chat_is_rendered_by_its_template(decoder, byte_level, word_pieces, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "no"}], "label": label}
        for text, label in zip(TEXTS, "abab", strict=True)
    ]
    source, with_special = write_jsonl(tmp_path / "a.jsonl", rows), copy.deepcopy(word_pieces)
    with_special.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    for model, tokenizer in ((decoder, byte_level), (save(with_special, tmp_path / "model"), with_special)):
        data = prepare(model, source, tmp_path / "out.arrow")
        expected = [tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for row in rows]
        assert [row[0] for row in read_all(data)] == expected


def test_several_labels_and_values(encoder, tmp_path):
    multi = DataTask(SEQUENCES, "multi", ("x", "y", "z"), 3)
    value, values = (DataTask(SEQUENCES, "regression", (), num_labels) for num_labels in (1, 2))
    for write, labels, options, task, targets in (
        (write_jsonl, [["x", "z"], [], ["y"]], {}, multi, [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        (write_csv, [0.5, -3, 1e3], {}, value, [[0.5], [-3], [1000]]),
        (write_csv, ["x;z", "y"], dict(label_separator=";"), multi, [[1, 0, 1], [0, 1, 0]]),
        (write_jsonl, [[1, 0.5], [0, 2]], dict(label_type="regression"), values, [[1, 0.5], [0, 2]]),
    ):
        path = tmp_path / f"a.{write.__name__.removeprefix('write_')}"
        rows = [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)]
        data = prepare(encoder, write(path, rows), tmp_path / "out.arrow", **options)
        assert data.task == task and [target for _, target, _ in read_all(data)] == targets


def test_a_table_holds_what_datasets_reads(encoder, tmp_path, monkeypatch):
    """Quotes, commas, line breaks, spaces and other scripts; also rows of other formats than labels."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    alphabet = [*"ab ,\"\n';:|éü你\u2028\t", '""', "\r\n"]
    made = [("".join(random.choice(alphabet, 12)), "".join(random.choice(alphabet, 5))) for _ in range(300)]
    rows = [{"text": f"x{a}", "prompt": f"{i}", "completion": f"{b}y"} for i, (a, b) in enumerate(made)]
    write_csv(tmp_path / "a.csv", rows)
    features = datasets.Features(dict.fromkeys(rows[0], datasets.Value("string")))
    given = dict(features=features, cache_dir=str(tmp_path / "cache"), keep_default_na=False)
    theirs = datasets.Dataset.from_csv(str(tmp_path / "a.csv"), **given)
    ours = [row.value for row in read_file(tmp_path / "a.csv")]
    assert ours == [dict(row) for row in theirs] == rows


# --- labels


@pytest.mark.parametrize(
    ("labels", "options", "expected"),
    [
        (["b", "a", "B"], {}, ("single", ("B", "a", "b"))),
        ([10, 9, -1], {}, ("single", ("-1", "9", "10"))),
        ([True, False], {}, ("single", ("false", "true"))),
        ([0.5, 2], {}, ("regression", ())),
        (["10", "9"], {}, ("single", ("9", "10"))),
        ([["b", "a"], [], [3]], {}, ("multi", ("3", "a", "b"))),
        ([" a", "a ", "b\u00a0c"], {}, ("single", ("a", "b\u00a0c"))),
        # Labels that can mean two things are refused.
        (["a", 1], {}, r"name \(a.jsonl:1\).* integer \(a.jsonl:2\)"),
        (["a", ["b"]], {}, r"name \(a.jsonl:1\).* list .*\(a.jsonl:2\)"),
        ([1.0, 2.0], {}, r"\d\.0: .*--label-type regression"),
        ([[0.0, 1.0], [1.0, 0.0]], {}, "lists .*--label-type regression"),
        ([f"text {i}" for i in range(30)], {}, "30 .*30 rows: .*--columns label="),
        (["a", "a"], {}, "'a': .*--label-names"),
        (["a", "b"], {"label_type": "multi"}, r"--label-type multi: .*\(a.jsonl:1\)"),
        ([["a"], ["b"]], {"label_type": "single"}, r"--label-type single: .*\(a.jsonl:1\)"),
        ([0.5, 1.5], {"label_names": ("a", "b")}, "--label-names .*regression"),
    ],
)
def test_what_labels_are_shows_in_them(labels, options, expected, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)])
    with pytest.raises(ValueError, match=expected) if isinstance(expected, str) else nullcontext():
        task = find_task(source, **options)
        assert (task.label_type, task.label_names) == expected


def test_names_can_be_given_and_those_of_another_data_set_taken(encoder, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", REVIEWS)
    train = prepare(encoder, source, tmp_path / "train.arrow", label_names=("pos", "neg", "neutral"))
    assert train.task.label_names == ("pos", "neg", "neutral")
    assert [target for _, target, _ in read_all(train)] == [[0], [1], [0], [1]]
    assert train.sidecar["label_counts"] == {"pos": 2, "neg": 2, "neutral": 0}
    few = write_jsonl(tmp_path / "b.jsonl", [{"text": "a", "label": "neg"}, {"text": "b", "label": 2}])
    for known in ("train.arrow", "train.arrow.meta.json"):
        other = prepare(encoder, few, tmp_path / "few.arrow", labels_from=str(tmp_path / known))
        assert other.task == train.task
        assert [target for _, target, _ in read_all(other)] == [[1], [2]], "an integer is the number of a class"
    numbered = [{"text": "a", "label": label} for label in (9, 10)]
    prepare(encoder, write_jsonl(tmp_path / "n.jsonl", numbered), tmp_path / "numbered.arrow")
    for known, row, label in (("train", REVIEWS[0], "bad"), ("train", REVIEWS[0], 3), ("numbered", numbered[0], 1)):
        unseen = write_jsonl(tmp_path / "c.jsonl", [row, {"text": "a", "label": label}])
        with pytest.raises(ValueError, match=rf"c\.jsonl:2: .*label {label!r} is not among"):
            prepare(encoder, unseen, tmp_path / "c.arrow", labels_from=str(tmp_path / f"{known}.arrow"))
    assert not (tmp_path / "c.arrow").exists()


def test_the_names_that_datasets_writes_into_parquet_are_taken(encoder, tmp_path):
    def prepare_rows(values: dict[str, list], features: dict, **options) -> TokenizedData:
        data = datasets.Dataset.from_dict(values, features=datasets.Features(features))
        data.to_parquet(str(tmp_path / "a.parquet"))
        return prepare(encoder, tmp_path / "a.parquet", tmp_path / "out.arrow", **options)

    text, List, ClassLabel = datasets.Value("string"), datasets.List, datasets.ClassLabel
    found = prepare_rows(dict(text=["a", "b"], label=[1, 0]), dict(text=text, label=ClassLabel(names=["bad", "good"])))
    assert found.task.label_names == ("bad", "good") and [target for _, target, _ in read_all(found)] == [[1], [0]]
    features = dict(tokens=List(text), tags=List(ClassLabel(names=["O", "B-PER"])))
    found = prepare_rows(dict(tokens=[["Angela", "lives"]], tags=[[1, 0]]), features, columns=("label=tags",))
    assert found.task == DataTask(TOKENS, "single", ("O", "B-PER"), 2)


def test_a_split_keeps_the_labels_and_goes_by_the_text_alone(decoder, tmp_path):
    rows = [{"text": f"film {i % 150}", "label": "abc"[i % 3 if i < 150 else (i + 1) % 3]} for i in range(300)]
    train = prepare(decoder, write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.arrow", validation_share=0.2)
    held_out = TokenizedData(tmp_path / "out.validation.arrow")
    assert train.task == held_out.task == DataTask(SEQUENCES, "single", ("a", "b", "c"), 3)
    assert len(train.lengths) + len(held_out.lengths) == 300
    texts = [{tuple(input_ids) for input_ids, _, _ in read_all(data)} for data in (train, held_out)]
    assert not texts[0] & texts[1], "a text with two labels is on one side"


def test_workers_do_not_matter(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("mini_trainer.data.rows.preparing.BYTES_PER_WORKER", 1 << 10)
    rows = [{"text": f"film {i % 997}" + " good" * (i % 9), "label": i % 5 + i // 1500} for i in range(3000)]
    source = write_csv(tmp_path / "a.csv", rows)
    written = []
    for num_proc in (1, 2):
        data = prepare(encoder, source, tmp_path / "out.arrow", num_proc=num_proc)
        assert data.task.label_names == tuple("012345")  # the last is not in the first chunk
        written.append([(tmp_path / f"out.arrow{end}").read_bytes() for end in ("", ".meta.json")])
    assert written[0] == written[1]


# --- length


def test_what_is_too_long_is_dropped_or_cut_as_the_tokenizer_cuts(
    encoder, word_pieces, decoder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("mini_trainer.data.rows.files.CHUNK_ROWS", 2)
    rows = [{"text": TEXTS[0] * 3, "text_pair": TEXTS[1], "label": "a"}, {"text": "a", "text_pair": "b", "label": "b"}]
    source = write_jsonl(tmp_path / "a.jsonl", rows * 2)
    data = prepare(encoder, source, tmp_path / "out.arrow", max_sample_num_tokens=12)
    assert len(data.lengths) == 2 and data.sidecar["rows"]["too_long"] == 2
    data = prepare(encoder, source, tmp_path / "out.arrow", max_sample_num_tokens=12, truncate=True)
    expected = word_pieces(rows[0]["text"], rows[0]["text_pair"], truncation=True, max_length=12)["input_ids"]
    assert read_all(data)[0][0] == expected and len(expected) == 12
    assert (data.sidecar["rows"]["too_long"], data.sidecar["rows"]["truncated"]) == (0, 2)
    assert "truncated                            2" in capsys.readouterr().out
    prepare(encoder, source, tmp_path / "out.arrow")
    assert re.search(r"note: 2 of .* 20 tokens", capsys.readouterr().out)
    words = write_jsonl(tmp_path / "b.jsonl", [{"tokens": ["good", "bad"] * 20, "labels": ["x", "y"] * 20}])
    data = prepare(encoder, words, tmp_path / "words.arrow", max_sample_num_tokens=7, truncate=True)
    assert (data.lengths.tolist(), data.num_loss_tokens.tolist()) == ([7], [5])
    chat = {"messages": [{"role": "user", "content": "good " * 30}], "label": "x"}
    source = write_jsonl(tmp_path / "c.jsonl", [chat, {**chat, "label": "y"}])
    data = prepare(decoder, source, tmp_path / "c.arrow", max_sample_num_tokens=9, truncate=True)
    assert data.lengths.tolist() == [9, 9]


# --- what is refused

ROW = b'{"text": "good film", "label": "pos"}\n{"text": "bad film", "label": "neg"}\n'
TABLE = b"text,label\ngood film,pos\nbad film,neg\n"
BROKEN = {  # file, what follows two good rows (or a whole file), the message
    "no_label.jsonl": (ROW + b'{"text": "x"}\n', r"no_label.jsonl:3: .*'label' .*--columns label="),
    "nan_cell.csv": (TABLE + b"x,nan\n", r"nan_cell.csv:4: 'label' is 'nan'"),
    "empty_cell.csv": (TABLE + b"x,\n", r"empty_cell.csv:4: .*'label' .*--columns label="),
    "no_text.csv": (TABLE + b",pos\n", r"no_text.csv:4: .*'text' .*\['label'\] .*--columns text="),
    "blank_text.jsonl": (ROW + b'{"text": " ", "label": "pos"}\n', r"blank_text.jsonl:3: 'text' is ' '"),
    "object.jsonl": (ROW + b'{"text": "x", "label": {"a": 1}}\n', r"object.jsonl:3: 'label' is {'a': 1}"),
    "half.jsonl": (ROW + b'{"text": "\\ud800", "label": "pos"}\n', r"half.jsonl:3: .*\\ud800"),
    "two.jsonl": (ROW + b'{"text": "x", "tokens": ["x"], "label": "pos"}\n',
                  r"two.jsonl:3: .*'text' and 'tokens': .*--columns text="),
    "columns.csv": (TABLE + b"a,b,c\n", r"columns.csv:4: 3 cells, .* 2 columns"),
    "too_few.csv": (TABLE + b"only\n", r"too_few.csv:4: 1 cells, .* 2 columns"),
    "latin.csv": (TABLE + b"caf\xe9,pos\n", r"latin.csv:4: not UTF-8: b'\\xe9'"),
    "nul.csv": (TABLE + b"a\0b,pos\n", r"nul.csv:4: .* NUL"),
    "quote.csv": (TABLE + b'"a"b,pos\ngood,pos\n', r"quote.csv:4: .*expected after"),
    "open.csv": (TABLE + b'"a,pos\nb,neg\n', r"open.csv: .*quote in line 4"),
    "mac.csv": (b"text,label\ra,pos\rb,neg\r", r"mac.csv: .*line 1, .*new-line character"),
    "utf16.csv": ("text,label\na,pos\n".encode("utf-16"), r"utf16.csv: .*first line .*UTF-16"),
    "both.csv": (b"text;label|n\na;pos|1\n", r"both.csv: .*'text;label\|n': .*semicolons or bars"),
    "twice.csv": (b"text,label,text\na,pos,b\n", r"twice.csv: .*'text' twice"),
    "other.csv": (b"review,stars\na,1\nb,2\n", r"other.csv:2: .*'stars'\] \(--columns text=\)"),
    "header.csv": (b"text,label\n", r"header.csv: .*no rows"),
    "words.jsonl": (b'{"tokens": ["a", "b"], "labels": ["O"]}\n', r"words.jsonl:1: 1 labels .* 2 words"),
    "null_word.jsonl": (b'{"tokens": ["a", "b"], "labels": ["O", null]}\n', r"null_word.jsonl:1: 'labels', word 2 "),
    "empty_word.jsonl": (b'{"tokens": ["a", " "], "labels": ["O", "B"]}\n',
                         r"empty_word.jsonl:1: 'tokens, word 2' is ' '"),
    "lost_word.jsonl": ('{"tokens": ["a", "\u200b"], "labels": ["O", "B"]}\n'.encode(),
                        r"lost_word.jsonl:1: word 2, '.*', .*no token"),
    "lost_first.jsonl": ('{"tokens": ["\u200b", "a"], "labels": ["O", "B"]}\n'.encode(),
                         r"lost_first.jsonl:1: word 1, '.*', .*no token"),
    "mixed.jsonl": (ROW + b'{"tokens": ["x"], "labels": ["pos"]}\n',
                    r"mixed.jsonl:1\) .*mixed.jsonl:3\); .*--label-type"),
    "one_hot.jsonl": (b'{"text": "a", "label": [0, 1, 0]}\n{"text": "b", "label": [1, 2]}\n',
                      r"one_hot.jsonl:1: .*label 0 .*twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_line(name, encoder, tmp_path):
    content, reason = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        prepare(encoder, tmp_path / name, tmp_path / "out.arrow")
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is left"


def test_a_quote_that_is_not_closed_does_not_fill_memory(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr("mini_trainer.data.stores.json_lines.MAX_ROW_BYTES", 1 << 10)
    (tmp_path / "a.csv").write_bytes(TABLE + b'"x,pos\n' + b"good film,pos\n" * 1000)
    with pytest.raises(ValueError, match=r"a\.csv: .*line 4 .*1,024 bytes"):
        prepare(encoder, tmp_path / "a.csv", tmp_path / "out.arrow")


def test_rows_that_cannot_be_used_can_be_left_out(encoder, tmp_path):
    (tmp_path / "a.csv").write_bytes(TABLE + b"a,b,c\n" + b"x,\n" + b"fine,pos\n")
    data = prepare(encoder, tmp_path / "a.csv", tmp_path / "out.arrow", skip_invalid=True)
    assert (data.sidecar["rows"]["kept"], data.sidecar["rows"]["invalid"]) == (3, 2)
    rejected = read_lines(tmp_path / "out.arrow.rejected.jsonl")
    assert [(row["line"], row["row"]) for row in rejected] == [(4, "a,b,c"), (5, '{"text": "x"}')]


# --- what training reads


def test_sets_that_are_trained_together_have_the_same_labels(encoder, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", REVIEWS)
    paths = [tmp_path / f"{i}.arrow" for i in range(2)]
    sets = [prepare(encoder, source, path, label_names=("pos", "neg")) for path in paths]
    assert Mixture(sets).task.label_names == ("pos", "neg")
    sets[1] = prepare(encoder, source, paths[1])
    with pytest.raises(ValueError, match=r"0\.arrow .* pos, neg, .*1\.arrow .* neg, pos"):
        Mixture(sets)


def test_sets_with_and_without_pairs_agree_on_token_types(encoder, tmp_path):
    pairs = [{"text": "a", "text_pair": "b", "label": i} for i in range(2)]
    one = prepare(encoder, write_jsonl(tmp_path / "a.jsonl", pairs), tmp_path / "a.arrow")
    texts = [{"text": "a b", "label": i} for i in range(2)]
    other = prepare(encoder, write_jsonl(tmp_path / "b.jsonl", texts), tmp_path / "b.arrow")
    mixture = Mixture([one, other])
    assert "token_type_ids" not in other.read(0)
    assert mixture.read(2)["token_type_ids"].tolist() == [0] * int(other.lengths[0])


SINGLE, MULTI = (DataTask(SEQUENCES, kind, ("a", "b"), 2) for kind in ("single", "multi"))
OF_WORDS = DataTask(TOKENS, "single", ("a", "b"), 2)


@pytest.mark.parametrize(
    ("task", "change", "reason"),
    [
        (SINGLE, {"target": [2.0]}, "class is 2; .*0 to 1"),
        (SINGLE, {"target": [0.5]}, r"class is 0\.5"),
        (SINGLE, {"target": []}, r"target is \[\]"),
        (SINGLE, {"target": [float("nan")]}, r"target is \[nan\]"),
        (SINGLE, {"labels": [0, -100, -100, -100], "target": [1.0]}, "num_loss_counted_tokens is 2"),
        (SINGLE, {"token_type_ids": [0]}, "token_type_ids .* 4 numbers"),
        (MULTI, {"target": [1.0, 0.5]}, r"target is \[1.0, 0.5\], expected a 0 or 1 "),
        (OF_WORDS, {"labels": [0, 2, -100, -100]}, "a label is 2; .*0 to 1"),
        (OF_WORDS, {"labels": [0, -1, -100, -100]}, "a label is -1"),
        (OF_WORDS, {"labels": [0, -100, -100, -100]}, "num_loss_counted_tokens is 2, but 1 labels"),
    ],
)
def test_a_row_that_breaks_the_contract_is_named(task, change, reason):
    num_counted = 1 if "target" in change and "labels" not in change else 2
    row = base.RowFacts(task, 4, num_counted, vocab_size=9, where="out.arrow: row 3")
    sample = {name: np.array(value) for name, value in {"input_ids": [5, 6, 7, 8], "target": [1.0], **change}.items()}
    with pytest.raises(ValueError, match=f"^out.arrow: row 3: .*{reason}"):
        base.check_sample(base.COLUMNS[task.objective], sample, row)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"objective": "poetry"}, "'poetry'; .*causal-lm"),
        ({"label_type": "some"}, "label_type is 'some'"),
        ({"label_names": ["a", 1]}, r"label_names is \['a', 1\]"),
        ({"label_names": ["a", "a"]}, r"single .*\['a', 'a'\]"),
        ({"label_names": []}, r"single .*\[\]"),
    ],
)
def test_a_sidecar_that_says_what_cannot_be_is_refused(change, reason):
    with pytest.raises(ValueError, match=f"^a.json: .*{reason}"):
        base.read_task(dict(objective=SEQUENCES, label_type="single", label_names=["a", "b"]) | change, named="a.json")


def test_samples_and_labels_are_shown(encoder, tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", REVIEWS)
    prepare(encoder, source, tmp_path / "out.arrow", preview=4, preview_html=str(tmp_path / "page.html"))
    told = capsys.readouterr().out
    assert re.search("sequence-classification: .*2 labels", told)
    assert "    pos                                2  50.0%" in told
    assert re.search(r"a\.jsonl:4: 4 tokens, .*neg", told)
    page = (tmp_path / "page.html").read_text()
    assert "<h2>Labels</h2>" in page and "label: pos" in page
    prepare(encoder, write_jsonl(tmp_path / "w.jsonl", WORDS), tmp_path / "out.arrow", preview=2)
    assert "Angela B-PER, Merkel I-PER, Berlin! B-LOC" in capsys.readouterr().out
