"""The pages of docs/tasks: their commands do what the pages say, as they stand, one after the other in one directory.

In this process, with a tiny model in a folder of the name that the pages give. How many processes a command starts is
torchrun's, and test_package.py's.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from in_process import train_here
from make_encoder import save_encoder, train_word_pieces
from make_tiny_model import save_tiny_model, train_tokenizer
from processes import ROOT
from tiny_vision import make_image, save_vision_model

from command_line import parse_options
from evaluate_model import evaluate
from generate import generate
from options import (
    EvaluateOptions,
    GenerateOptions,
    MergeAdapterOptions,
    ProcessDataOptions,
    TrainOptions,
    flatten_options,
)
from process_data import process_data
from tools.merge_adapter import merge_adapter

TASKS = ROOT / "docs" / "tasks"
PAGES = ("one_gpu", "another_cluster", "keep_knowledge", "serve", "classify", "look_at_images")  # in this order
CAPITALS = {"Peru": "Lima", "Mali": "Bamako", "Oman": "Muscat", "Cuba": "Havana", "Iran": "Tehran", "Chad": "N'Djamena"}
OPINIONS = {"good": "positive", "great": "positive", "bad": "negative", "dull": "negative"}
COMMANDS = {
    "process-data": (ProcessDataOptions, lambda options, world: process_data(options)),
    "train": (TrainOptions, lambda options, world: train_here(world, **flatten_options(options))),
    "generate": (GenerateOptions, generate),
    "evaluate": (EvaluateOptions, evaluate),
    "merge-adapter": (MergeAdapterOptions, merge_adapter),
}


def read_commands(page: str) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", (TASKS / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def run_command(words: list[str], world) -> None:
    program, *words = words
    if program == "cp":
        shutil.copytree(*words[1:])
        return
    assert program == "mini-trainer", f"{program}: no command that a page may have"
    group, function = COMMANDS[words[0]]
    function(parse_options(group, words[1:]), world)


def make_directory(path: Path) -> None:
    """What a reader of the pages begins with: a model, chats, questions; an encoder, reviews."""
    rows = [
        [
            {"role": "user", "content": f"What is the capital of {country}? ({i})"},
            {"role": "assistant", "content": city},
        ]
        for i in range(8)
        for country, city in CAPITALS.items()
    ]
    (path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (path / "questions.txt").write_text("What is the capital of Peru?\nWhat is the capital of Mali?\n")
    tokenizer = train_tokenizer((message["content"] for row in rows for message in row), vocab_size=320)
    save_tiny_model(path / "Qwen" / "Qwen3-0.6B", tokenizer, hidden_size=64, num_layers=2, seed=0)
    reviews = [(f"Film {i} is {word}.", label) for i in range(10) for word, label in OPINIONS.items()]
    (path / "reviews.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in reviews))
    words = train_word_pieces((text for text, _ in reviews), vocab_size=100)
    save_encoder(path / "answerdotai" / "ModernBERT-base", words, hidden_size=32, num_layers=3, seed=0)
    save_vision_model(path, "qwen2.5-vl").rename(path / "Qwen" / "Qwen2.5-VL-3B-Instruct")
    shown = [{"type": "image", "image": "photos/0.png"}, {"type": "text", "text": "Which part is this?"}]
    seen = [[{"role": "user", "content": shown}, {"role": "assistant", "content": f"A hinge, {i}."}] for i in range(24)]
    (path / "seen.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in seen))
    (path / "photos").mkdir()
    make_image(0).save(path / "photos" / "0.png")


@pytest.mark.wide
def test_the_commands_of_each_page_do_what_it_says(world, tmp_path, monkeypatch):
    assert set(PAGES) == {page.stem for page in TASKS.glob("*.md")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where decompositions are kept
    make_directory(tmp_path)
    for page in PAGES:
        for words in read_commands(page):
            run_command(words, world)
    answers = [Path(name).read_text().splitlines() for name in ("answers.jsonl", "merged_answers.jsonl")]
    assert [len(lines) for lines in answers] == [2, 2]
    steps = [json.loads(line)["step"] for line in Path("moved/training_metrics_0.jsonl").read_text().splitlines()]
    assert steps == [1, 2] and json.loads(Path("moved/training_params.json").read_text())["first_step"] == 1
    labels = json.loads(Path("runs/reviews/hf_format/best/config.json").read_text())["id2label"]
    assert labels == {"0": "negative", "1": "positive"} and (tmp_path / "review_scores/results.html").is_file()
    assert "data:image" in Path("seen.html").read_text()
    assert (tmp_path / "runs/seeing/hf_format/best/preprocessor_config.json").is_file()
    assert (tmp_path / "compared/results.html").is_file() and (tmp_path / "runs/osft/hf_format/last").is_dir()


@pytest.mark.parametrize("page", PAGES)
def test_a_task_is_told_on_one_screen(page):
    assert read_commands(page) and len((TASKS / f"{page}.md").read_text().splitlines()) <= 30
