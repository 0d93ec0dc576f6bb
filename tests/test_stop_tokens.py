"""Whether rows teach a model to stop: counted, refused, or a stop token appended, with templates that leave it out."""

import json
from pathlib import Path

import pytest
from data_runs import tokenize_rows
from make_tiny_model import CHATML_TEMPLATE, train_tokenizer
from tiny_data import read_lines, write_jsonl
from tiny_vision import make_image, save_vision_model
from trait_templates import CLOSED_BY_THE_NEXT_TURN, CLOSED_ON_A_NEW_LINE, DESCRIBED
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.column_names import RefusedColumn
from mini_trainer.data.tokenized.reader import TokenizedData

# What begins the next turn ends the last one, as in GLM 4.6 and GLM 4.7: a user's turn a text, a tool's result a call.
ENDED_BY_THE_NEXT_TURN = (
    DESCRIBED + "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
    "{{ '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<call>' + c.function | tojson + '</call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
WITHOUT_STOP = CHATML_TEMPLATE.replace("<|im_end|>", "")

ASK, ANSWER = {"role": "user", "content": "How many are 12 and 30?"}, {"role": "assistant", "content": "42"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"x": "12"}}}]}
CALL_AS_TEXT = {
    "role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": "12"}'}}]
}  # fmt: skip
RESULT = {"role": "tool", "content": "42", "name": "add"}

# The template, what the tokenizer ends texts with, what ends generation; what ends a text and a call.
TRAITS = {
    "closed by the next turn": (CLOSED_BY_THE_NEXT_TURN, "<|im_end|>", [], "<|im_end|>", "<|im_end|>"),
    "closed on a new line": (CLOSED_ON_A_NEW_LINE, "<eos>", ["<|end|>"], "\n<|end|>", "\n<|end|>"),
    "ended by the next turn": (
        *(ENDED_BY_THE_NEXT_TURN, "<|endoftext|>", ["<|user|>", "<|observation|>"]),
        *("<|user|>", "<|observation|>"),
    ),
}
SPECIAL = ("<eos>", "<|end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")


def save_model(path: Path, template: str, eos_token: str = "<|im_end|>", stops: list[str] = ()) -> Path:
    tokenizer = train_tokenizer(["How many are 12 and 30? 42 user assistant system"] * 9, vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.eos_token, tokenizer.chat_template = eos_token, template
    tokenizer.save_pretrained(path)
    ids = tokenizer.convert_tokens_to_ids([eos_token, *stops])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: save_model(root / name, *trait[:3]) for name, trait in TRAITS.items()}
    return found | {"none": save_model(root / "none", WITHOUT_STOP), "all": save_model(root / "all", CHATML_TEMPLATE)}


def prepare(model: Path, rows: list[dict], directory: Path, **options) -> tuple[list[dict], dict]:
    """The samples, and what the sidecar says of their stop tokens."""
    output = tokenize_rows(model, write_jsonl(directory / "in.jsonl", rows), directory / "out.jsonl", **options)
    return read_lines(output), json.loads((directory / "out.jsonl.meta.json").read_text())


def rows_of(*turns: dict, count: int = 1, **columns) -> list[dict]:
    return [{"messages": list(turns)} | columns for _ in range(count)]


def decode_trained(tokenizer: PreTrainedTokenizerBase, sample: dict) -> str:
    return tokenizer.decode([label for label in sample["labels"] if label != IGNORED])


def count_by_hand(model: Path, samples: list[dict]) -> int:
    """Samples that train a token of the model's generation_config.json, read token by token."""
    stops, count = json.loads((model / "generation_config.json").read_text())["eos_token_id"], 0
    for sample in samples:
        for label in sample["labels"][1:]:
            if label in stops:
                count += 1
                break
    return count


@pytest.mark.parametrize("name", TRAITS)
def test_single_turns_that_never_stop_are_refused_or_get_a_stop_token(name, models, tmp_path, capsys):
    _, _, _, ending, _ = TRAITS[name]
    rows, tokenizer = rows_of(ASK, ANSWER, count=50), AutoTokenizer.from_pretrained(models[name])
    with pytest.raises(ValueError, match=r"0 of 50 rows .*--missing-stop-token append .*--missing-stop-token allow"):
        prepare(models[name], rows, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    rendered = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert not any(stop in rendered.partition("assistant")[2] for stop in SPECIAL if stop != "<|assistant|>")
    allowed, sidecar = prepare(models[name], rows, tmp_path, missing_stop_token="allow")
    assert count_by_hand(models[name], allowed) == 0
    assert sidecar["stop_tokens"] == {"rows_that_train_one": 0, "appended": 0}
    assert [tokenizer.decode(sample["input_ids"]) for sample in allowed] == [rendered] * 50
    assert "note: 0 of 50 rows " in capsys.readouterr().out
    samples, sidecar = prepare(models[name], rows, tmp_path, missing_stop_token="append")
    assert count_by_hand(models[name], samples) == 50
    assert sidecar["stop_tokens"] == {"rows_that_train_one": 50, "appended": 50}
    assert tokenizer.convert_ids_to_tokens(sidecar["stop_token_id"]) == ending.strip()
    assert [tokenizer.decode(sample["input_ids"]) for sample in samples] == [rendered + ending] * 50
    assert [decode_trained(tokenizer, sample) for sample in samples] == [ANSWER["content"] + ending] * 50
    report = capsys.readouterr().out
    for line in ("rows with a trained stop            50  100.0%", "stop tokens appended                50"):
        assert line in report


@pytest.mark.parametrize("name", TRAITS)
def test_inner_turns_and_what_follows_calls(name, models, tmp_path):
    """What is appended is what the template itself writes where the same conversation continues."""
    _, _, _, after_text, after_call = TRAITS[name]
    tokenizer = AutoTokenizer.from_pretrained(models[name])
    cases = [
        ([ASK, ANSWER, ASK, ANSWER], None, after_text, 1),
        ([ASK, CALL, RESULT, ANSWER], [TOOL], after_text, 1),
        ([ASK, CALL], [TOOL], after_call, 0),
    ]
    for messages, tools, ending, num_before in cases:
        rows = rows_of(*messages, **({"tools": tools} if tools else {}))
        follower = RESULT if messages[-1] is CALL else ASK
        if name == "closed on a new line":  # its template prints arguments, which have to be JSON text therefore
            messages = [CALL_AS_TEXT if message is CALL else message for message in messages]
        rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        continued = tokenizer.apply_chat_template([*messages, follower], tools=tools, tokenize=False)
        assert continued.startswith(rendered + ending)
        ((sample,), sidecar) = prepare(models[name], rows, tmp_path, missing_stop_token="append")
        assert tokenizer.decode(sample["input_ids"]) == rendered + ending
        assert decode_trained(tokenizer, sample).endswith(ending)
        assert sidecar["stop_tokens"] == {"rows_that_train_one": 1, "appended": 1}
        if num_before:
            ((sample,), sidecar) = prepare(models[name], rows, tmp_path)
            assert sidecar["stop_tokens"] == {"rows_that_train_one": 1, "appended": 0}
            assert count_by_hand(models[name], [sample]) == 1
            assert tokenizer.decode(sample["input_ids"]) == rendered


@pytest.mark.parametrize("num_inner", [9, 10, 20])
def test_half_of_the_rows_is_enough(num_inner, models, tmp_path, capsys):
    model = models["closed by the next turn"]
    rows = rows_of(ASK, ANSWER, count=20 - num_inner) + rows_of(ASK, ANSWER, ASK, ANSWER, count=num_inner)
    if num_inner < 10:
        with pytest.raises(ValueError, match=r"9 of 20 rows .*'<\|im_end\|>'"):
            prepare(model, rows, tmp_path)
        return
    samples, _ = prepare(model, rows, tmp_path)
    assert count_by_hand(model, samples) == num_inner
    assert ("note: 10 of 20 rows " in capsys.readouterr().out) == (num_inner == 10)
    prepare(model, rows, tmp_path, missing_stop_token="allow")
    assert ("--missing-stop-token allow is" in capsys.readouterr().out) == (num_inner == 20)


def test_turns_that_are_not_trained_get_none(models, tmp_path, capsys):
    model = models["closed by the next turn"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    inner = [ASK, ANSWER, ASK, ANSWER | {"train": False}]
    ((sample,), sidecar) = prepare(model, rows_of(*inner), tmp_path, missing_stop_token="append")
    bare = [{key: message[key] for key in ("role", "content")} for message in inner]
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.apply_chat_template(bare, tokenize=False)
    assert sidecar["stop_tokens"] == {"rows_that_train_one": 1, "appended": 0}
    assert "--missing-stop-token append" in capsys.readouterr().out
    # Nor do answers that have one, and those before one that is not trained.
    said = ANSWER | {"content": "42<|im_end|>"}
    ((sample,), sidecar) = prepare(model, rows_of(ASK, said), tmp_path, missing_stop_token="append")
    assert decode_trained(tokenizer, sample) == "42<|im_end|>" and sidecar["stop_tokens"]["appended"] == 0
    rows = rows_of(ASK, ANSWER, ANSWER | {"train": False})
    ((sample,), _) = prepare(models["ended by the next turn"], rows, tmp_path, missing_stop_token="append")
    assert decode_trained(tokenizer, sample) == "42"
    # A weight is the stop token's, too.
    ((sample,), _) = prepare(model, rows_of(ASK, ANSWER | {"weight": 0.25}), tmp_path, missing_stop_token="append")
    assert sample["loss_weights"][-1] == 0.25 and sample["labels"][-1] == tokenizer.eos_token_id


def test_a_template_without_any_stop_token_gets_the_tokenizers(models, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(models["none"])
    with pytest.raises(ValueError, match=r"end-of-turn .*--missing-stop-token allow"):
        prepare(models["none"], rows_of(ASK, ANSWER), tmp_path)
    samples, sidecar = prepare(models["none"], rows_of(ASK, ANSWER, count=3), tmp_path, missing_stop_token="append")
    rendered = tokenizer.apply_chat_template([ASK, ANSWER], tokenize=False)
    assert [tokenizer.decode(sample["input_ids"]) for sample in samples] == [rendered + "<|im_end|>"] * 3
    assert sidecar["stop_token_id"] == tokenizer.eos_token_id
    assert sidecar["stop_tokens"] == {"rows_that_train_one": 3, "appended": 3}
    ((sample,), sidecar) = prepare(models["none"], rows_of(ASK, ANSWER), tmp_path, missing_stop_token="allow")
    assert decode_trained(tokenizer, sample) == ANSWER["content"] and "TO STOP" in capsys.readouterr().out
    assert sidecar["stop_token_id"] is None and sidecar["options"]["missing_stop_token"] == "allow"


def test_completions_and_documents_end_with_the_tokenizers_eos(models, tmp_path):
    model = models["ended by the next turn"]
    for rows, options in (
        ([{"prompt": "12 and 30?", "completion": " 42"}] * 4, {}),
        ([{"text": "How many are 12 and 30?"}] * 40, {"block_size": 8}),
    ):
        samples, sidecar = prepare(model, rows, tmp_path, **options)
        eos_token_id = AutoTokenizer.from_pretrained(model).eos_token_id
        assert sidecar["stop_tokens"] == {"rows_that_train_one": len(rows), "appended": 0}
        assert sum(sample["labels"][1:].count(eos_token_id) for sample in samples) == len(rows)


def test_options_without_effect_are_refused(models, tmp_path):
    for choice in ("allow", "append"):
        with pytest.raises(ValueError, match=f"^--missing-stop-token {choice} .*stop token"):
            prepare(models["all"], rows_of(ASK, ANSWER), tmp_path, missing_stop_token=choice)


def test_rows_with_images(tmp_path):
    """The stop token follows the text that the model's processor makes of the row."""
    model = save_vision_model(tmp_path, "llava")
    tokenizer = AutoTokenizer.from_pretrained(model)
    left_out = "{{ '' if loop.last else '<|im_end|>' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", left_out)
    tokenizer.save_pretrained(model)
    (model / "chat_template.jinja").write_text(tokenizer.chat_template)
    make_image(1).save(tmp_path / "1.png")
    rows = rows_of({"role": "user", "content": "<image> What is this?"}, ANSWER, images=["1.png"])
    given = dict(images=True)
    with pytest.raises(ValueError, match=r"0 of 1 rows .*--missing-stop-token append"):
        prepare(model, rows, tmp_path, **given)
    ((sample,), sidecar) = prepare(model, rows, tmp_path, missing_stop_token="append", **given)
    assert sidecar["stop_tokens"] == {"rows_that_train_one": 1, "appended": 1}
    assert decode_trained(tokenizer, sample) == "42\n<|im_end|>"  # the line break is what the template writes last
    assert len(TokenizedData(tmp_path / "out.jsonl").lengths) == 1
    (tmp_path / "more").mkdir()
    sources = tmp_path / "in.jsonl", write_jsonl(tmp_path / "more" / "in.jsonl", rows)
    with pytest.raises(ValueError, match="--images: two input files have the same name"):
        tokenize_rows(model, sources, tmp_path / "out.jsonl", missing_stop_token="append", **given)
    with pytest.raises(RefusedColumn, match=r"^in.jsonl:1: has 'rejected_response' \('41'\)"):
        prepare(model, [rows[0] | {"rejected_response": "41"}], tmp_path, **given)
