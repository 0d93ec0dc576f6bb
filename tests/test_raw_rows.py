"""Rows from anywhere: the datasets library, columns of other names, random tokens; and from rows to a run at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from data_runs import read_arrow
from hub_standin import Hub
from make_tiny_model import train_tokenizer
from tiny_data import write_jsonl

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.data.tokenized.sidecar import find_outputs
from mini_trainer.options import DataOptions, RowOptions, TrainOptions, group_options, parse_subset
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data
from mini_trainer.run.raw_rows import find_data
from mini_trainer.run.start import open_validation_data

MODEL = "llama_tied_bias"
ROOT = Path(__file__).parent.parent


def make_turns(i: int) -> list[dict]:
    return [{"role": "user", "content": f"How many are {i}?"}, {"role": "assistant", "content": f"{i} of them"}]


CHATS = [{"messages": make_turns(i)} for i in range(30)]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["How many are 12 of them?"] * 9, vocab_size=300).save_pretrained(path)
    return path


def tokenize(model: Path, output: Path, **options) -> list[dict]:
    """The samples that process_data.py makes."""
    paths = dict(output_file=str(output), model_name_or_path=str(model))
    process_data(group_options(ProcessDataOptions, **paths, **{"num_proc": 1, "preview": 0} | options))
    return read_arrow(output)


# --- where rows come from


def write_folders(path: Path) -> None:
    """The rows of CHATS in folders of the datasets library; in two of them their first three are a split, test."""
    rows = datasets.Dataset.from_list(CHATS)
    rows.save_to_disk(path / "saved")
    datasets.DatasetDict(train=rows, test=rows.select(range(3))).save_to_disk(path / "several")
    (path / "parquet").mkdir()
    rows.to_parquet(path / "parquet" / "train-00000.parquet")
    rows.select(range(3)).to_parquet(path / "parquet" / "test-00000.parquet")


def test_folders_of_the_datasets_library_give_what_the_file_gives(tokenizer_dir, tmp_path):
    expected = tokenize(tokenizer_dir, tmp_path / "a.arrow", input_file=str(write_jsonl(tmp_path / "a.jsonl", CHATS)))
    write_folders(tmp_path)
    for name in ("saved", "several", "parquet"):
        output = tmp_path / f"{name}.arrow"
        assert tokenize(tokenizer_dir, output, input_dataset=str(tmp_path / name)) == expected
        (source,) = json.loads(Path(f"{output}.meta.json").read_text())["sources"]
        assert (source["file"], source["format"], len(source["sha256"])) == (f"{name} train", "messages", 64)
        slices = {"train[:10%]": expected[:3], "train[-4:]": expected[-4:]}
        if name != "saved":
            slices |= {"test": expected[:3], "train[5:7]+test[:1]": expected[5:7] + expected[:1]}
        for split, samples in slices.items():
            assert tokenize(tokenizer_dir, output, input_dataset=str(tmp_path / name), split=split) == samples


def test_what_cannot_be_had_names_what_there_is(tokenizer_dir, tmp_path):
    rows = datasets.Dataset.from_list(CHATS)
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "several")
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "train-0.parquet")
    (tmp_path / "empty").mkdir()
    for given, message in (
        (dict(input_dataset=str(tmp_path / "several"), split="tset"), "several.* tset: .*train"),
        (dict(input_dataset=str(tmp_path / "several"), split="tset[:2]"), 'split tset.:2.: Unknown split "tset"'),
        (dict(input_dataset=str(tmp_path / "several"), split="train[:"), "Unrecognized instruction format: train"),
        (dict(input_dataset=str(tmp_path / "parquet"), split="tset"), "Bad split: tset. Available splits: ..train"),
        (dict(input_dataset=str(tmp_path / "empty")), "--input-dataset .*empty: "),
        (dict(input_dataset=str(tmp_path / "several"), revision="v1"), "several.* no revisions"),
        (dict(input_dataset=str(tmp_path / "parquet" / "train-0.parquet")), r"train-0\.parquet: .*--input-file"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenize(tokenizer_dir, tmp_path / "o.arrow", **given)
        assert not list(tmp_path.glob("*o.arrow*"))


def test_the_hub_is_asked_for_the_commit_and_what_it_does_not_have_is_said_with_the_code_of_its_cause(tmp_path):
    """In a process of its own: the client reads the hub's address when it is imported."""
    hub = Hub()
    hub.datasets = {"me/chats": {"main": "a" * 40, "v1": "b" * 40}, "me/cut": {}}
    hub.repos = {"me/model": {"main": {}}}
    hub.failures["models"] = [403, *[503] * 9]
    code = """
from mini_trainer.data.rows.hub_rows import find_revision, open_rows
from mini_trainer.data.stores.model_files import download
from mini_trainer.distributed.ending import describe_error
from mini_trainer.options import RowOptions
for name in ("me/chats@", "me/chats:config@v1", "me/chats@v2", "me/none@", "me/cut@"):
    name, _, revision = name.partition("@")
    try:
        print(find_revision(RowOptions(input_dataset=name, revision=revision or None)))
    except ValueError as error:
        print(int(describe_error(error)[0]), error)
for load in (lambda: download("me/model", revision=None, patterns=["x"], flag="--model"),) * 2 + (
    lambda: open_rows("me/none", "train", "a" * 40), lambda: open_rows("me/cut", "train", "a" * 40)):
    try:
        load()
    except ValueError as error:
        print(int(describe_error(error)[0]), " ".join(str(error).split()))
"""
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    hub.close()
    found = done.stdout.splitlines()
    assert found[:2] == ["a" * 40, "b" * 40], done.stderr
    assert "me/chats" in found[2] and "--revision v2" in found[2]
    assert found[3].startswith("2 --input-dataset me/none: ") and "reached" not in found[3]
    assert found[4].startswith("8 --input-dataset me/cut: ") and "reached: " in found[4]
    assert found[5].startswith("2 --model me/model: ") and found[6].startswith("8 --model me/model: "), found[5:]
    assert found[7].startswith("2 --input-dataset me/none: ") and found[8].startswith("8 --input-dataset me/cut: ")


# --- columns of other names


def test_columns_of_other_names_give_what_the_usual_ones_give(tokenizer_dir, tmp_path):
    def samples_of(rows: list[dict], **options) -> list[dict]:
        return tokenize(tokenizer_dir, tmp_path / "o.arrow", input_file=str(write_jsonl(tmp_path / "r.jsonl", rows)),
                        **options)  # fmt: skip

    chats = samples_of(CHATS)
    nested = [{"text": "not this", "chat": {"turns": row["messages"]}} for row in CHATS]
    assert samples_of(nested, columns=("messages=chat.turns",)) == chats
    assert samples_of([{"a.b": row["messages"]} for row in CHATS], columns=("messages=a.b",)) == chats
    speakers = {"user": "human", "assistant": "gpt"}
    shared = [
        {"dialog": [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in row["messages"]]}
        for row in CHATS
    ]
    assert samples_of(shared, columns=("messages=dialog",)) == chats
    pairs = [{"prompt": f"{i} and", "completion": f" {i}"} for i in range(5)]
    renamed = [{"q": {"x": row["prompt"]}, "answer": row["completion"], "text": "not this"} for row in pairs]
    assert samples_of(renamed, columns=("prompt=q.x", "completion=answer")) == samples_of(pairs)
    half = [{"question": row["prompt"], "completion": row["completion"]} for row in pairs]
    assert samples_of(half, columns=("prompt=question",)) == samples_of(pairs)
    texts = [{"text": "How many"}, {"text": "are 12"}]
    assert samples_of([{"body": row["text"], "messages": []} for row in texts], columns=("text=body",)) == samples_of(
        texts
    )


def test_a_wrong_name_lists_the_columns_there_are(tokenizer_dir, tmp_path):
    source = write_jsonl(tmp_path / "r.jsonl", [{"id": 1, "chat": {"turns": make_turns(1), "lang": "en"}}] * 3)
    names = r"'chat\.turns'\?; .* chat, chat\.lang, chat\.turns, id$"
    with pytest.raises(ValueError, match=rf"--columns messages=chat\.turn: .*{names}"):
        tokenize(tokenizer_dir, tmp_path / "o.arrow", input_file=str(source), columns=("messages=chat.turn",))
    mixed = write_jsonl(tmp_path / "m.jsonl", [{"chat": make_turns(1)}, {"talk": make_turns(2)}])
    with pytest.raises(ValueError, match=r"m\.jsonl:2: .*'chat' \(--columns messages=\).*'talk'"):
        tokenize(tokenizer_dir, tmp_path / "o.arrow", input_file=str(mixed), columns=("messages=chat",))


# --- random tokens


def test_random_tokens_are_ordinary_ones_and_the_same_for_every_number_of_workers(tokenizer_dir, tmp_path):
    first = tokenize(tokenizer_dir, tmp_path / "a.arrow", mock_data=2500, block_size=7)
    assert first == tokenize(tokenizer_dir, tmp_path / "b.arrow", mock_data=2500, block_size=7, num_proc=2)
    ids = np.array([row["input_ids"] for row in first])
    assert ids.shape == (2500, 7) and len(np.unique(ids, axis=0)) == 2500
    special = train_tokenizer([], vocab_size=300).all_special_ids
    assert not np.isin(ids, special).any()
    assert all(row["labels"] == row["input_ids"] and row["num_loss_counted_tokens"] == 6 for row in first)


# --- from rows to a run


def test_the_cache_is_keyed_by_content_options_and_tokenizer(model, tokenizer_dir, tmp_path):
    def key(directory: Path = model, **options) -> str:
        rows = RowOptions(**{"input_file": (str(tmp_path / "a.jsonl"),)} | options)
        found = find_outputs(rows, str(directory), cache_dir=tmp_path / "cache", trust_remote_code=False)
        return found.data.parent.name

    write_jsonl(tmp_path / "a.jsonl", CHATS)
    (tmp_path / "moved").mkdir()
    moved = write_jsonl(tmp_path / "moved" / "a.jsonl", CHATS)
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    first = key()
    assert key(num_proc=7) == first and key(input_file=(str(moved),)) == first
    with_template = key(chat_template=str(template))
    others = [with_template, key(tokenizer_dir), key(max_sample_num_tokens=9), key(skip_invalid=True),
              key(validation_share=0.1), key(input_file=(), mock_data=3)]  # fmt: skip
    template.write_text("{{ messages }} ")
    write_jsonl(tmp_path / "a.jsonl", CHATS[1:])
    others += [key(chat_template=str(template)), key()]
    assert len({first, *others}) == len(others) + 1


@pytest.mark.long
@pytest.mark.slow
def test_rows_are_tokenized_once_as_process_data_does_and_nothing_half_done_is_used(model, tmp_path, capfd):
    source = write_jsonl(tmp_path / "chats.jsonl", CHATS)
    options = group_options(TrainOptions, model_name_or_path=str(model), input_file=str(source), output_dir="o",
                            data_cache_dir=str(tmp_path / "cache"), num_proc=1, validation_share=0.3)  # fmt: skip
    outputs = find_outputs(options.rows, str(model), cache_dir=tmp_path / "cache", trust_remote_code=False)
    # What a killed tokenization leaves is no data set, and goes with the next one.
    outputs.data.parent.mkdir(parents=True)
    leftover = outputs.data.with_name(f".{outputs.data.name}.123.part")
    leftover.write_bytes(b"half")
    found = find_data(options)
    assert not leftover.exists() and "trained tokens" in capfd.readouterr().out
    assert found == dict(data_path=(str(outputs.data),), validation_data_path=(str(outputs.validation.data),))
    assert read_arrow(outputs.data) == tokenize(
        model, tmp_path / "o.arrow", input_file=str(source), validation_share=0.3
    )
    assert read_arrow(outputs.validation.data) == read_arrow(tmp_path / "o.validation.arrow")
    before = os.stat(outputs.data).st_ino
    assert find_data(options) == found and os.stat(outputs.data).st_ino == before
    # What cannot be used is said once, and by the one who asked.
    write_jsonl(source, [{"messages": [{"role": "alien", "content": "?"}]}])
    with pytest.raises(ValueError, match=r"(?s)^1 of 1 rows .*chats\.jsonl:1: .*alien"):
        find_data(options)
    assert "cannot be used" not in capfd.readouterr().err
    assert len(list((tmp_path / "cache").glob("*/*.arrow"))) == 2


# --- part of the data


def test_a_subset_is_drawn_by_the_seed_of_what_is_kept(tokenizer_dir, tmp_path):
    paths = []
    for name, count in (("a", 300), ("b", 40)):
        tokenize(tokenizer_dir, tmp_path / f"{name}.arrow", mock_data=count, block_size=3 + (name == "b"))
        paths.append(tmp_path / f"{name}.arrow")

    def choose(subset: str, *, seed: int = 0) -> list[list[int]]:
        data = Mixture([TokenizedData(path) for path in paths])
        data.take_subset(parse_subset(subset), seed=seed)
        assert sorted(np.concatenate(data.kept_of).tolist()) == list(data.kept)
        return [list(source.kept) for source in data.sources]

    assert list(map(len, choose("10"))) == [10, 10] and list(map(len, choose("1%"))) == [3, 1]
    assert list(map(len, choose("60"))) == [60, 40]
    assert choose("10") == choose("10") != choose("10", seed=1)
    validation = open_validation_data(paths, DataOptions(subset="10"), cache_dir=str(tmp_path))
    assert [len(source.kept) for source in validation.sources] == [10, 10]
