"""Messages about data as users read them, whole; other tests know an error by its type and what it names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from make_tiny_model import CHATML_TEMPLATE, train_tokenizer
from pyarrow.feather import write_feather
from refusals import read_refusal
from tiny_data import to_row, write_rows
from trait_templates import CLOSED_BY_THE_NEXT_TURN

from mini_trainer.data.rows.column_names import RefusedColumn
from mini_trainer.data.stores.contents import check_recorded
from mini_trainer.data.stores.model_files import find_model, find_weights
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": NaN}'}}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
GOOD, BAD = {"text": "a", "label": "good"}, {"text": "b", "label": "bad"}
DOCUMENT = {"messages": [{"role": "pretrain", "content": "a"}]}
ROW, UNKNOWN = {"messages": [USER, ANSWER]}, {"dialog": [], "tools": [{"name": "add"}]}
ONE, FIX = "1 of 1 rows cannot be used:\n  ", "\nfix them, or pass --skip-invalid to skip them"
FORMATS = (
    "expected messages: messages; sharegpt: conversations; alpaca: instruction and output; completion: prompt and"
    " completion or generation; document: document or text"
)


def in_file(*rows: dict) -> dict[str, str]:
    return {"in.jsonl": "\n".join(map(json.dumps, rows))}


# A name, the error, files of which the first is the input, options, and what process_data.py says.
PREPARED = [
    ("rows of no format", ValueError, in_file(UNKNOWN, {"n": float("nan")}, UNKNOWN), {},
     f"3 of 3 rows cannot be used:\n  in.jsonl:1: unrecognised format: its keys are ['dialog', 'tools'], {FORMATS};"
     " other names: --messages-field, or for a chat of a question and an answer --format alpaca --prompt-field question"
     " --completion-field answer\n    also in.jsonl:3\n  in.jsonl:2: not JSON: NaN is not a JSON"
     f" number{FIX}"),
    ("a weight of what is not trained", ValueError, in_file({"messages": [USER | {"weight": 0.5}, ANSWER]}), {},
     f"{ONE}in.jsonl:1: message 1 (user) has 'weight': 0.5 but is not trained; add 'train': true, or remove the"
     f" weight{FIX}"),
    ("arguments of calls", ValueError, in_file({"messages": [USER, CALL]}), {},
     f"{ONE}in.jsonl:1: message 2 (assistant): call 1 has the arguments '{{\"x\": NaN}}', expected an object, or its"
     f" JSON text: not JSON: NaN is not a JSON number{FIX}"),
    ("tools that are not written", ValueError, in_file(ROW | {"tools": [TOOL]}), {},
     f"{ONE}in.jsonl:1: the chat template leaves out the row's tools: use one that writes them (--chat-template), or"
     f" describe them in the system message{FIX}"),
    ("a column of another objective", RefusedColumn, in_file(ROW | {"label": False}), {},
     "in.jsonl:1: has 'label' (False), which says whether an answer is good or bad. The messages format does not read"
     " such columns, so the file is refused. Remove the rows that should not be trained as they are, and pass"
     " --ignore-columns label to train on the others without it; --format classification reads labels"),
    ("a list as Python prints it", ValueError, {"in.csv": "messages\n\"[{'role': 'user', 'content': 'a'}]\"\n"}, {},
     f"{ONE}in.csv:2: 'messages' is a list of messages as Python prints it, not JSON: write it with json.dumps{FIX}"),
    ("a quote without end", ValueError, {"in.csv": 'prompt,completion\n"a,b\n'}, {},
     "in.csv: damaged, or not in the format of its ending: a quote in line 2 opens a cell that does not end"),
    ("several formats", ValueError, {"rows/a.jsonl": json.dumps(ROW), "rows/b.txt": "b"}, {"input_file": "rows"},
     "rows: its files have different formats: a.jsonl is read as messages, b.txt as document. Name the files to read"
     " instead of their folder, or the format of all of them (--format)"),
    ("no label", ValueError, in_file(GOOD, BAD, {"text": "c"}), {"format": "classification"},
     "1 of 3 rows cannot be used:\n  in.jsonl:3: no label: 'label' or 'labels' is missing or empty; the row has"
     f" ['text'] (--label-field){FIX}"),
    ("several kinds of labels", ValueError, in_file(GOOD, BAD | {"label": 1}), {"format": "classification"},
     "labels are of several kinds: a name (in.jsonl:1) and an integer (in.jsonl:2); fix the rows, or name one kind"
     " with --label-type"),
    ("equal answers", ValueError, in_file({"prompt": "a", "chosen": "b", "rejected": "b"}), {"format": "preference"},
     f"{ONE}in.jsonl:1: the chosen and the rejected answer are equal: there is nothing to prefer{FIX}"),
    ("chats that would be cut", ValueError, in_file(DOCUMENT, ROW), {"block_size": 8},
     f"1 of 2 rows cannot be used:\n  in.jsonl:2: not a document: --block-size cuts only documents{FIX}"),
    ("the input as output", ValueError, in_file(ROW), {"output_file": "in.jsonl"},
     "the output in.jsonl would overwrite the input; choose another name"),
    ("credentials", ValueError, {}, {"input_file": "https://me:hunter2@host/a.jsonl"},
     "--input-file https://***@host/a.jsonl: has a password, key or signature in it, which would be written to logs"
     " and sidecars: set the credentials in the environment (docs/reference/data.md)"),
    ("a template that ends no turn", ValueError,
     in_file(ROW) | {"own.jinja": CHATML_TEMPLATE.replace("<|im_end|>", "")}, {"chat_template": "own.jinja"},
     "--chat-template own.jinja cannot be used: the chat template writes no end-of-turn token after an assistant"
     " turn: '\\n' within a conversation, '\\n' at its end; if a token that begins the next turn ends generation, the"
     " model's generation_config.json has to name it as eos_token_id; to append a stop token to conversations, pass"
     " --append-stop-token; to train without, which does not teach the model to stop, pass"
     " --allow-missing-stop-token; tried with [{'role': 'user', 'content': 'What is 2 + 2?'}, {'role': 'assistant',"
     " 'content': 'It is 4.'}]"),
    ("a template that does not end the last turn", ValueError,
     in_file(ROW) | {"own.jinja": CLOSED_BY_THE_NEXT_TURN}, {"chat_template": "own.jinja"},
     "only 0 of 1 rows have a trained stop token such as '<|im_end|>', so the model would not learn to stop: the chat"
     " template writes none after a conversation's last turn. Pass --append-stop-token to append one there and train"
     " on it, or --allow-missing-stop-token to train without"),
]  # fmt: skip


def write_set(**changes: Any) -> TokenizedData:
    """Two rows of tokens, the second of which is changed."""
    rows = [to_row(([5, 6, 7], [-100, 6, 7])), to_row(([5, 6, 7, 8], [-100, 6, 7, 8])) | changes]
    return TokenizedData(write_rows(Path("data.arrow"), rows))


def read_messages() -> None:
    write_feather(pa.table({"messages": [[]]}), "rows.arrow")
    TokenizedData("rows.arrow")


def check_hash() -> None:
    path = write_rows(Path("data.arrow"), [])
    check_recorded(path, {"size": path.stat().st_size, "sha256": "0"}, record="data.arrow.meta.json")


def write_model(*files: str, **config: object) -> str:
    Path("model").mkdir()
    for file in files:
        Path("model", file).touch()
    Path("model", "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return find_model("model", revision=None, trust_remote_code=False)


OTHERS = [
    ("rows that are not tokenized", read_messages,
     "--data-path rows.arrow: no column input_ids, labels, len, num_loss_counted_tokens; found messages. Tokenize rows"
     " with mini-trainer process-data, or give them to train with --input-file"),
    ("another count of trained tokens", lambda: write_set(num_loss_counted_tokens=9).read(1),
     "data.arrow: row 2: num_loss_counted_tokens is 9, but 3 labels after the first are not -100: tokenize the data"
     " again with process_data.py"),
    ("a row without tokens", lambda: write_set(len=0),
     "data.arrow: row 2: len is 0, but a sample has at least one token; leave the row out, or tokenize the data again"
     " with process_data.py"),
    ("a row that is too long", lambda: write_set().fit_to(3, drop_overlong=False),
     "data.arrow: 1 of 2 samples are longer than --max-tokens-per-gpu 3; the longest, row 2, has 4 tokens. Raise"
     " --max-tokens-per-gpu to at least that, or drop these samples with --drop-overlong"),
    ("another hash", check_hash,
     "data.arrow: its SHA-256 is not the one in data.arrow.meta.json: it is damaged or was replaced: copy it again"
     " from its source; --skip-verification uses it anyway"),
    ("code of a model", lambda: write_model(model_type="own", auto_map={"AutoConfig": "own.Config"}),
     "model: needs its own code, which was not run: config.json (auto_map: own.Config). Read that code, and add"
     " --trust-remote-code (and for a model on the hub its --model-revision) if you trust it"),
    ("only a pickle", lambda: find_weights("model", write_model("pytorch_model.bin")),
     "model: no weights: there is neither model.safetensors nor model.safetensors.index.json, only pytorch_model.bin."
     " Pickles can run code when loaded, so only safetensors are accepted: if you trust it, convert it"
     " (AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"),
    ("trust in a branch", lambda: find_model("a/b", revision="main", trust_remote_code=True),
     "--trust-remote-code needs --model-revision with a commit's 40 hexadecimal digits, not main: a branch or tag can"
     " move to code that you have not read"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    train_tokenizer(["a b user assistant"] * 9, vocab_size=300).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("error", "files", "options", "text"), [row[1:] for row in PREPARED], ids=[row[0] for row in PREPARED]
)
def test_what_process_data_says(error, files, options, text, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    given = dict(input_file=next(iter(files), ""), output_file="out.arrow", model_name_or_path=model, num_proc=1)
    given_options = group_options(ProcessDataOptions, **given | options)
    assert read_refusal(lambda: process_data(given_options), kind=error) == text


@pytest.mark.parametrize(("fail", "text"), [row[1:] for row in OTHERS], ids=[row[0] for row in OTHERS])
def test_what_is_said_of_data_sets_and_models(fail: Callable[[], object], text: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_refusal(fail) == text
