"""--validation-share: a row's side is a function of what it says, and both sides are data sets by themselves."""

import hashlib
import json
import math
import random
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import tokenize_rows
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from make_tiny_model import train_tokenizer
from tiny_data import read_files, write_jsonl
from transformers import AutoTokenizer

from mini_trainer.data.chat.conversation import Chat, Completion, Document
from mini_trainer.data.rows.formats import read_example
from mini_trainer.data.rows.labelled import Labelled, TextPair
from mini_trainer.data.rows.split import falls_into_validation, hash_example
from mini_trainer.data.tokenized.outputs import Outputs
from mini_trainer.data.tokenized.reader import TokenizedData

SHARE = 0.3
TEXTS = st.text(min_size=1).filter(lambda text: text.strip() and not any("\ud800" <= c <= "\udfff" for c in text))
TURNS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)
CALL = {"name": "add", "arguments": {"x": 1, "y": {"b": [None, "2"], "a": 2.5}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two tokenizers that cut texts differently, with different templates."""
    paths = [tmp_path_factory.mktemp("model") for _ in range(2)]
    train_tokenizer(["question answer 12 and 30"] * 9, vocab_size=300).save_pretrained(paths[0])
    other = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    other += "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    train_tokenizer([], vocab_size=280, chat_template=other).save_pretrained(paths[1])
    return paths


def to_messages(turns: list[tuple[str, str]], roles: tuple[str, str] = ("user", "assistant")) -> list[dict]:
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def chat(i: int) -> dict:
    return {"messages": to_messages([(f"question {i}", f"answer {i}" + " and" * (i % 5))])}


def split(model: Path, source: Path, output: Path, **options) -> tuple[list[dict], list[dict]]:
    """The samples of both sides of `output`."""
    tokenize_rows(model, source, output, **{"validation_share": SHARE} | options)
    return read_samples(output), read_samples(validation_of(output))


def validation_of(output: Path) -> Path:
    return output.with_name(f"{output.stem}.validation{output.suffix}")


def read_samples(path: Path) -> list[list[int]]:
    data = TokenizedData(path)
    return [data.read(row)["input_ids"].tolist() for row in range(len(data.lengths))]


def read_meta(path: Path) -> dict:
    return TokenizedData(path).sidecar


def read_texts(model: Path, samples: list[list[int]]) -> list[str]:
    """What the samples of chats begin with: the question's number."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.decode(sample).partition("question ")[2].partition("<|im_end|>")[0] for sample in samples]


@settings(deadline=None)
@given(TURNS, TEXTS, st.randoms())
def test_what_is_said_decides_and_not_how_it_is_written(turns, system, shuffler):
    messages = [{"role": "system", "content": system}, *to_messages(turns)]
    conversations = [{"from": "system", "value": system}]
    conversations += [{"from": m["role"].replace("user", "human"), "value": m["content"]} for m in messages[1:]]
    *history, (instruction, output) = turns
    alpaca = dict(instruction=instruction, output=output, system=system, history=[list(turn) for turn in history])
    shuffled = [dict(shuffler.sample(list(message.items()), 2)) for message in messages]
    parts = [m | {"content": [{"type": "text", "text": text} for text in m["content"]]} for m in messages]
    noted = [m | {"weight": 0.5, "train": True, "turn_id": shuffler.random()} for m in messages]
    rows = [
        ("messages", {"messages": shuffled, "id": shuffler.random(), "source": "another"}),
        ("messages", {"messages": parts, "unmask": True}),
        ("messages", {"messages": noted, "tools": [{"name": "a"}]}),
        ("sharegpt", {"conversations": conversations}),
        ("sharegpt", {"system": system, "conversations": conversations[1:]}),
        ("alpaca", alpaca),
    ]
    expected = hash_example(Chat(messages))
    assert [hash_example(read_example(row, name, is_given=False)) for name, row in rows] == [expected] * len(rows)


@settings(deadline=None)
@given(TURNS, TURNS)
def test_other_words_have_another_hash(turns, others):
    assume(turns != others)
    chats = [Chat(to_messages(turns)), Chat(to_messages(others)), Chat(to_messages(turns, ("assistant", "user")))]
    texts = [Document(turns[0][0] + "a"), Completion(turns[0][0], "b"), Document(json.dumps(to_messages(turns)))]
    assert len({hash_example(example) for example in [*chats, *texts]}) == 6


def test_calls_reasoning_and_texts():
    def say(**fields) -> int:
        return hash_example(Chat([{"role": "user", "content": "a"}, {"role": "assistant"} | fields]))

    calls = [
        say(tool_calls=[CALL]),
        say(tool_calls=[{"id": "x", "type": "function", "function": CALL}], content=None),
        say(tool_calls=[{"function": CALL | {"arguments": json.dumps(CALL["arguments"], sort_keys=True)}}], content=""),
    ]
    assert len(set(calls)) == 1
    reasoned = [say(content="b", reasoning_content="c"), say(content="b", thinking="c", reasoning=None)]
    assert len(set(reasoned)) == 1
    other_calls = [[CALL | {"name": "sub"}], [CALL, CALL], [CALL | {"arguments": "{"}], [CALL | {"arguments": {}}]]
    others = [say(content="b"), say(content="c"), *(say(tool_calls=made) for made in other_calls)]
    assert len({calls[0], reasoned[0], *others}) == 8
    assert hash_example(Document("a b")) == hash_example(Completion("a", " b")) == hash_example(Completion("a ", "b"))
    pairs = [Labelled(TextPair("a", second), label) for second in "bc" for label in "xy"]
    assert len({hash_example(pair) for pair in pairs[:2]}) == 1 and len({hash_example(pair) for pair in pairs}) == 2


def test_sides_are_the_same_in_every_version():
    """Or data sets made by different versions could not be used together."""
    assert hash_example(Document("Once upon a time")) == 15159197032921022746
    assert hash_example(Chat(to_messages([("2 + 2?", "4 €")]))) == 2063957006072820788


def draw_by_hand(text: str) -> float:
    """Where a document falls between 0 and 1: the first bytes of its JSON text's hash."""
    digest = hashlib.sha256(json.dumps(text, ensure_ascii=False).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@settings(deadline=None)
@given(TEXTS, st.floats(0, 1, exclude_min=True, exclude_max=True), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_larger_share_only_moves_rows_to_validation(text, share, other):
    smaller, larger = sorted([share, other])
    example = Document(text)
    assert falls_into_validation(example, smaller) <= falls_into_validation(example, larger)
    assert falls_into_validation(example, share) == (draw_by_hand(text) < share)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.97])
def test_the_share_is_what_was_asked_for(share):
    num_rows = 40_000
    num_found = sum(falls_into_validation(Chat(chat(i)["messages"]), share) for i in range(num_rows))
    assert abs(num_found - share * num_rows) < 4 * math.sqrt(num_rows * share * (1 - share))


@pytest.mark.parametrize("ending", [".arrow", ".parquet", ".jsonl"])
def test_both_sides_are_data_sets_by_themselves(models, tmp_path, ending):
    rows = [chat(i) for i in range(300)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    limit = dict(max_sample_num_tokens=60)
    output = tmp_path / f"out{ending}"
    whole = tmp_path / f"whole{ending}"
    tokenize_rows(models[0], source, whole, **limit)
    training, validation = split(models[0], source, output, chat_template="llama3", **limit)
    sides = [read_meta(output), read_meta(validation_of(output))]
    assert [side["num_samples"] for side in sides] == [len(training), len(validation)]
    assert [side["num_tokens"] for side in sides] == [sum(map(len, samples)) for samples in (training, validation)]
    assert [side["split"] for side in sides] == [
        {"side": "training", "validation_share": SHARE, "other_side": f"out.validation{ending}"},
        {"side": "validation", "validation_share": SHARE, "other_side": f"out{ending}"},
    ]
    assert all(side["options"]["validation_share"] == SHARE for side in sides)
    assert sides[0].keys() == sides[1].keys() == read_meta(whole).keys() and read_meta(whole)["split"] is None
    (tmp_path / "elsewhere").mkdir()
    for path in tmp_path.glob("out.validation*"):  # all that belongs to it is called like it
        path.rename(tmp_path / "elsewhere" / path.name)
    moved = tmp_path / "elsewhere" / f"out.validation{ending}"
    assert read_samples(moved) == validation
    tokenizer = AutoTokenizer.from_pretrained(moved.parent / read_meta(moved)["tokenizer_dir"])
    assert tokenizer.decode(validation[0]).startswith("<|start_header_id|>user")


def test_nothing_is_lost_and_every_side_counts_its_own(models, tmp_path, capsys):
    rows = [chat(i) for i in range(400)]
    rows += [{"messages": rows[i]["messages"][:1]} for i in range(50)]  # nothing trained
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    source.write_bytes(b"\n{\n" + source.read_bytes())
    options = dict(skip_invalid=True, max_sample_num_tokens=34)
    tokenize_rows(models[0], source, tmp_path / "whole.arrow", **options)
    capsys.readouterr()
    sides = split(models[0], source, tmp_path / "out.arrow", **options)
    whole = read_samples(tmp_path / "whole.arrow")
    of_validation = [sample for sample in whole if sample in sides[1]]
    assert list(sides) == [[sample for sample in whole if sample not in sides[1]], of_validation]
    paths = [tmp_path / f"{name}.arrow" for name in ("whole", "out", "out.validation")]
    counts, *of_sides = [Counter(read_meta(path)["rows"]) for path in paths]
    assert counts["too_long"] and counts["nothing_trained"] == 50 and counts["invalid"] == counts["blank_lines"] == 1
    assert of_sides[0] + of_sides[1] == +counts
    assert all(side["too_long"] and side["nothing_trained"] for side in of_sides)
    assert of_sides[1]["invalid"] == of_sides[1]["blank_lines"] == 0, "rows that cannot be used have no side"
    for side in of_sides:
        assert side["in"] == side["kept"] + side["too_long"] + side["nothing_trained"] + side["invalid"]
    assert {path.name for path in tmp_path.glob("*.rejected.jsonl")} == {"whole.arrow.rejected.jsonl",
                                                                         "out.arrow.rejected.jsonl"}  # fmt: skip
    report = capsys.readouterr().out
    for name, samples in zip(("training", "validation"), sides, strict=True):
        assert f"{name:<24}{len(samples):>14,}  samples of {sum(map(len, samples)):,} tokens" in report


def test_sides_depend_on_nothing_else(models, tmp_path, monkeypatch):
    """Order, duplicates, other rows, files, formats, tokenizers, templates, the limit, and the number of workers."""
    monkeypatch.setattr("mini_trainer.data.rows.files.CHUNK_ROWS", 7)
    monkeypatch.setattr("mini_trainer.data.rows.preparing.BYTES_PER_WORKER", 100)
    rows = [chat(i) for i in range(120)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    sides = [set(read_texts(models[0], side)) for side in split(models[0], source, tmp_path / "out.arrow", num_proc=1)]
    expected = {f"{i}": Document("") for i in range(120)}.keys()
    assert sides[0] | sides[1] == expected and not sides[0] & sides[1] and min(map(len, sides)) > 10

    def check(source: Path, model: Path = models[0], *, known: set[str] = expected, **options) -> None:
        found = split(model, source, tmp_path / "again.arrow", **options)
        for side, samples in zip(sides, found, strict=True):
            assert set(read_texts(model, samples)) & known == side & known

    split(models[0], source, tmp_path / "out3.arrow", num_proc=3)
    for name in ("out{}.arrow", "out{}.validation.arrow"):
        assert (tmp_path / name.format("")).read_bytes() == (tmp_path / name.format(3)).read_bytes()
    check(source, models[1])
    shuffled = [row for row in rows + rows[:50] for _ in range(2)] + [chat(i) for i in range(1000, 1100)]
    random.Random(1).shuffle(shuffled)
    check(write_jsonl(tmp_path / "shuffled.jsonl", shuffled), num_proc=2)
    sharegpt = [{"conversations": [{"from": "human", "value": a["content"]}, {"from": "gpt", "value": b["content"]}]}
                for a, b in (row["messages"] for row in rows)]  # fmt: skip
    check(write_jsonl(tmp_path / "sharegpt.jsonl", sharegpt))
    noted = [row | {"id": i, "unmask": None} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(noted), tmp_path / "in.parquet")
    check(tmp_path / "in.parquet")
    check(write_jsonl(tmp_path / "some.jsonl", rows[40:]), known={f"{i}" for i in range(40, 120)})


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("block_size", [None, 7, 64])
def test_whole_documents_fall_on_one_side(models, tmp_path, monkeypatch, block_size, num_proc):
    monkeypatch.setattr("mini_trainer.data.rows.files.CHUNK_ROWS", 3)
    monkeypatch.setattr("mini_trainer.data.rows.preparing.BYTES_PER_WORKER", 100)
    texts = [f"answer {i} and " * (1 + i % 9) for i in range(60)]
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    sides = split(models[0], source, tmp_path / "out.arrow", block_size=block_size, num_proc=num_proc)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    for is_validation, samples in enumerate(sides):
        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts
               if (draw_by_hand(text) < SHARE) == is_validation]  # fmt: skip
        assert len(ids) > 10
        if block_size is None:
            assert samples == ids
        else:
            assert [*chain(*samples)] == [*chain(*ids)]
            assert max(map(len, samples)) <= block_size and {*map(len, samples[:-1])} <= {block_size - 1, block_size}
        path = tmp_path / ("out.validation.arrow" if is_validation else "out.arrow")
        assert read_meta(path)["rows"]["kept"] == len(ids)


def test_a_later_output_leaves_no_stale_side(models, tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [chat(i) for i in range(40)])
    split(models[0], source, tmp_path / "out.jsonl", chat_template="llama3")
    split(models[0], source, tmp_path / "out.jsonl")  # the tokenizer directories of the run before go
    names = {"in.jsonl"} | {f"out{side}.jsonl{end}" for side in ("", ".validation") for end in ("", ".meta.json")}
    assert read_files(tmp_path).keys() == names and not list(tmp_path.glob("*.tokenizer"))
    split(models[0], source, tmp_path / "out.jsonl", chat_template="llama3")
    capsys.readouterr()
    tokenize_rows(models[0], source, tmp_path / "out.jsonl")
    assert {path.name for path in tmp_path.iterdir()} - {".cache"} == {"in.jsonl", "out.jsonl", "out.jsonl.meta.json"}
    assert re.search(r"out\.validation\.jsonl, .*earlier run", capsys.readouterr().out)


@pytest.mark.parametrize("sidecar", [None, "{", "[]", '{"split": null}', '{"split": {"other_side": "another.jsonl"}}'])
def test_a_data_set_of_ones_own_is_no_stale_side(models, tmp_path, sidecar):
    source = write_jsonl(tmp_path / "in.jsonl", [chat(i) for i in range(40)])
    (tmp_path / "out.validation.jsonl").write_text("mine\n")
    if sidecar is not None:
        (tmp_path / "out.validation.jsonl.meta.json").write_text(sidecar)
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match=r"--validation-share .*out\.validation\.jsonl, .* out\.jsonl; "):
        split(models[0], source, tmp_path / "out.jsonl")
    assert read_files(tmp_path) == before
    tokenize_rows(models[0], source, tmp_path / "out.jsonl")
    after = read_files(tmp_path)
    assert {name: after[name] for name in before} == before and "out.jsonl" in after


def test_the_training_data_appears_last_and_a_stale_sidecar_goes_last(tmp_path):
    files = Outputs(tmp_path / "a.b.arrow", page=tmp_path / "page.html", is_split=True)
    kinds = [".tokenizer", ".meta.json", ""]
    expected = ["page.html", "a.b.arrow.rejected.jsonl"]
    expected += [f"a.b{side}.arrow{kind}" for side in (".validation", "") for kind in kinds]
    assert [path.name for path in files.in_order] == expected
    (tmp_path / "a.b.validation.arrow.meta.json").write_text('{"split": {"other_side": "a.b.arrow"}}')
    files = Outputs(tmp_path / "a.b.arrow", page=None, is_split=False)
    stale = [f"a.b.validation.arrow{kind}" for kind in ("", ".tokenizer", ".meta.json")]
    assert [path.name for path in files.in_order] == [*stale, "a.b.arrow.rejected.jsonl",
                                                      *(f"a.b.arrow{kind}" for kind in kinds)]  # fmt: skip


def test_inputs_are_not_overwritten(models, tmp_path):
    source = write_jsonl(tmp_path / "out.validation.jsonl", [chat(1)])
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match=r"output \S*out\.validation\.jsonl .*input; "):
        split(models[0], source, tmp_path / "out.jsonl")
    assert read_files(tmp_path) == before


@pytest.mark.parametrize(
    ("share", "num_rows", "reason"),
    [
        (1e-9, 40, r"--validation-share 1e-09: .* 40 .*validation; .*larger"),
        (1 - 1e-9, 40, r"--validation-share 0\.9+: .* 40 .*training; .*smaller"),
        (0.5, 1, r"--validation-share 0\.5: .* 1 kept .*(validation|training); "),
    ],
)
def test_a_side_without_rows_is_refused(models, tmp_path, share, num_rows, reason):
    source = write_jsonl(tmp_path / "in.jsonl", [chat(i) for i in range(num_rows)])
    (tmp_path / "out.arrow").write_bytes(b"an older output")
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match=reason):
        split(models[0], source, tmp_path / "out.arrow", validation_share=share)
    assert read_files(tmp_path) == before


def test_a_failure_leaves_both_sides_as_they_were(models, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [chat(i) for i in range(40)])
    split(models[0], source, tmp_path / "out.arrow")
    source.write_bytes(source.read_bytes() + b"{")
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match=r"in\.jsonl:41: not JSON"):
        split(models[0], source, tmp_path / "out.arrow", validation_share=0.5)
    assert read_files(tmp_path) == before


def test_shown_samples_say_which_side_they_are_on(models, tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [chat(i) for i in range(30)])
    page = tmp_path / "page.html"
    split(models[0], source, tmp_path / "out.arrow", preview=30, preview_html=str(page))
    places = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- in.jsonl:")]
    num_validation = len(read_samples(tmp_path / "out.validation.arrow"))
    assert len(places) == 30
    assert sum(" (validation): " in place for place in places) == num_validation
    assert page.read_text().count(" (validation)") == num_validation
