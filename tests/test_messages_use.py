"""The whole texts of messages about models in use: generating, evaluating and plots; DIR stands for a directory."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import read_refusal

from mini_trainer.data.rows.prompts import Prompt, encode_prompt, read_prompts
from mini_trainer.use.evaluation.metrics import choose_measures
from mini_trainer.use.evaluation.models import list_models
from mini_trainer.use.inference.answers import AnswerFile
from mini_trainer.use.inference.loading import find_answering_model
from mini_trainer.use.plots.board import Board
from mini_trainer.use.plots.run_files import open_runs

CHAT = Prompt(row={}, place="rows.jsonl:1", messages=[{"role": "user", "content": "Hi"}])


def read(directory: Path, row: dict[str, Any]) -> None:
    (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
    read_prompts([str(directory / "rows.jsonl")], None)


def resume(directory: Path, **changes: Any) -> None:
    """Answers of a file that has one of other settings, or to another row."""
    line = (
        dict(index=0, sample=0, row={"prompt": "Hi"}, made_by={"seed": 1}, answer="Ho", finish_reason="stop") | changes
    )
    (directory / "a.jsonl.part0").write_text(json.dumps(line) + "\n")
    AnswerFile(directory / "a.jsonl", [Prompt(row={"prompt": "Hi"})], {"seed": 1}, num_samples=1).collect()


def ask_another(directory: Path) -> None:
    answers = AnswerFile(directory / "a.jsonl", [], {}, num_samples=1)
    answers.served_by = {"model": "m"}
    answers.check_server({"model": "n"})


# Name, what fails in a directory, text.
ROWS = [
    (
        "no answer",
        lambda path: read(path, {"messages": [{"role": "assistant", "content": "Ho"}]}),
        "--prompts: 1 of 1 rows cannot be used:\n  rows.jsonl:1: has only an assistant message, so there is "
        "nothing to answer",
    ),
    (
        "unknown format",
        lambda path: read(path, {"other": 1}),
        "--prompts: 1 of 1 rows cannot be used:\n  rows.jsonl:1: unrecognised format: its keys are ['other'], "
        "expected messages: messages; sharegpt: conversations; alpaca: instruction and output; completion: prompt "
        "and completion or generation; document: document or text",
    ),
    (
        "no template",
        lambda path: encode_prompt(CHAT, SimpleNamespace(chat_template=None)),
        "rows.jsonl:1: a chat, but the tokenizer has no chat template: give prompts as text, or use a chat model",
    ),
    (
        "other settings",
        lambda path: resume(path, made_by={"seed": 2}),
        "DIR/a.jsonl.part0:1: was made with other settings (seed 2, now 1): choose another --output, or remove it",
    ),
    (
        "another row",
        lambda path: resume(path, row={"prompt": "Who?"}),
        "DIR/a.jsonl.part0:1: answers a different row than this prompt's: choose another --output, or remove it",
    ),
    (
        "another server",
        ask_another,
        "DIR/a.jsonl: earlier answers are from another server, or it has other settings (model 'm', now 'n'): "
        "start that one again, choose another output, or remove the file",
    ),
    (
        "no adapter",
        lambda path: find_answering_model("base", adapter=str(path)),
        "--adapter DIR: has no adapter_config.json; give the directory of an adapter in peft's format",
    ),
    (
        "metric",
        lambda path: choose_measures(["blue"], [("1",)]),
        "--metrics blue: is not one of exact_match, first_line, normalised_match, contains, number, token_f1, "
        "label, rouge_1, rouge_2, rouge_l, bleu, chrf, edit_similarity",
    ),
    (
        "no run to evaluate",
        lambda path: list_models((), str(path / "gone")),
        "--run DIR/gone: there is no such directory: name the --output-dir of a run that has exported its model",
    ),
    (
        "no exports",
        lambda path: list_models((), str(path)),
        "--run DIR: has no hf_format: name the --output-dir of a run that has exported its model",
    ),
    ("no directory of runs", lambda path: Board(path / "gone"), "DIR/gone: no such directory"),
    (
        "no run to draw",
        lambda path: open_runs([path]),
        "DIR: not a run's directory, it has no training_metrics_0.jsonl; name the --output-dir of a run",
    ),
]


@pytest.mark.parametrize(("fail", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_messages(fail, text, tmp_path):
    assert read_refusal(lambda: fail(tmp_path), folder=tmp_path) == text
