"""The commands in README.md and docs/: each is run as it stands, by bash, on tiny models, or says why it is not.

A block of commands is fenced as ```sh. One that is not run has a comment above it: <!-- not run: the reason -->.
Programs of the project run in processes forked from one that has imported them; how many processes a command starts is
torchrun's, and test_package.py's.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import run_forked
from heavy import need
from make_encoder import save_encoder, train_word_pieces
from make_tiny_model import save_tiny_model, train_tokenizer
from program import ROOT
from tiny_data import write_jsonl
from tiny_vision import make_image, save_vision_model

from mini_trainer.__main__ import PROGRAMS, split_options

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"sh", "text", "python", "yaml", "json"}
BLOCK = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```sh\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
# Pages whose commands build on those of the pages before them.
TASKS = [
    *("start/your_data", "tasks/tokenize_on_many_nodes", "tasks/one_gpu", "tasks/another_cluster"),
    *("tasks/keep_knowledge", "tasks/serve", "tasks/sweep", "tasks/classify", "tasks/look_at_images"),
]
NEEDS_RUNS = {"curves", "using"}  # pages that look at runs of the reader's
CAPITALS = {"Peru": "Lima", "Mali": "Bamako", "Oman": "Muscat", "Cuba": "Havana", "Iran": "Tehran", "Chad": "N'Djamena"}
OPINIONS = {"good": "positive", "great": "positive", "bad": "negative", "dull": "negative"}
TEXT_MODELS = (
    *("M", "base", "tuned", "math", "code", "BIG", "SMALL"),
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B"),
)
VISION_MODELS = ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct")
RUN = {"model_name_or_path": "M", "data_path": "chats.arrow", "validation_data_path": "chats.validation.arrow"}
RUN |= {"batch_size": 16, "max_tokens_per_gpu": 4096, "max_steps": 2, "activation_checkpointing": "none"}
# Stands for python, torchrun and mini-trainer: hands on what it is called with, and ends as the program did.
STAND_IN = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    link.sendall(json.dumps([os.path.basename(sys.argv[0]), os.getcwd(), sys.argv[1:]]).encode() + b"\\n")
    sys.exit(int(link.recv(16)))
"""


def find_blocks(page: Path) -> list[tuple[str, str]]:
    """Reason (empty: it is run) and commands of each block of a page."""
    return BLOCK.findall(page.read_text())


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


ALONE = [page for page in PAGES if name_page(page) not in TASKS and any(not reason for reason, _ in find_blocks(page))]


def test_every_block_has_a_language():
    """A block of commands without one would not be run."""
    blocks = [block for page in PAGES for block in find_blocks(page)]
    fences = [fence for page in PAGES for fence in re.findall(r"^```(.*)$", page.read_text(), flags=re.MULTILINE)]
    assert set(fences[::2]) <= LANGUAGES and set(fences[1::2]) == {""}
    assert fences.count("sh") == len(blocks)


class Shell:
    """Runs blocks of commands in a folder, as a reader would."""

    def __init__(self, folder: Path, tools: Path):
        self.folder, self.output = folder, ""
        tools.mkdir()
        address = str(tools / "socket")
        for name in ("python", "torchrun", "mini-trainer"):
            (tools / name).write_text(STAND_IN.format(python=sys.executable, address=address))
            (tools / name).chmod(0o755)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(address)
        self.server.listen()
        self.server.settimeout(0.05)
        self.env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}

    def run(self, commands: str) -> None:
        bash = subprocess.Popen(["bash", "-euc", commands], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL)
        while bash.poll() is None:
            try:
                link, _ = self.server.accept()
            except TimeoutError:
                continue
            with link:
                link.sendall(b"%d" % self.run_program(*json.loads(link.makefile().readline())))
        assert bash.returncode == 0, f"{commands}\n{self.output}"

    def run_program(self, program: str, folder: str, words: list[str]) -> int:
        """Exit code of one of the project's scripts, in one process."""
        if words[:2] == ["-m", "mini_trainer"]:
            program, words = "mini-trainer", words[2:]
        if program == "mini-trainer":
            _, words = split_options(words)
            if words[0] == "train" and "self" in words:  # as the launcher does
                model = words[words.index("--model-name-or-path") + 1]
                self.run_program("mini-trainer", folder, ["draw-samples", "--model-name-or-path", model])
            words = [find_spec(f"mini_trainer.{PROGRAMS[words[0]][0]}").origin, *words[1:]]
        elif program == "torchrun":
            words = words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]
        if words[0] == "-m":
            words = [find_spec(words[1]).origin, *words[2:]]
        cache = {"HOME": str(self.folder), "MPLCONFIGDIR": str(Path.home() / ".cache" / "matplotlib")}
        done = run_forked(0, ROOT / words[0], *words[1:], folder=Path(folder), env=cache, timeout=900)
        self.output = done.stdout + done.stderr
        return done.returncode


@pytest.fixture(scope="module")
def belongings(tmp_path_factory) -> Path:
    """What a reader of the pages has: models, rows, data sets and the repository's recipes."""
    path = tmp_path_factory.mktemp("belongings")
    chats = [
        [{"role": "user", "content": f"Name the capital of {country}. ({i})"}, {"role": "assistant", "content": city}]
        for i in range(8)
        for country, city in CAPITALS.items()
    ]
    write_jsonl(path / "chats.jsonl", ({"messages": chat} for chat in chats))
    for name in ("questions.jsonl", "gsm8k_test.jsonl"):
        write_jsonl(path / name, ({"messages": chat} for chat in chats[:4]))
    (path / "questions.txt").write_text("What is the capital of Peru?\nWhat is the capital of Mali?\n")
    pairs = [{"prompt": chat[0]["content"], "chosen": chat[1]["content"], "rejected": "No."} for chat in chats]
    write_jsonl(path / "pairs.jsonl", pairs)
    rated = [{"prompt": o["prompt"], "completion": o["chosen"], "label": i % 2 == 0} for i, o in enumerate(pairs)]
    write_jsonl(path / "rated.jsonl", rated)
    tokenizer = train_tokenizer((message["content"] for chat in chats for message in chat), vocab_size=320)
    for name in TEXT_MODELS:
        save_tiny_model(path / name, tokenizer, hidden_size=64, num_layers=2, seed=0)
    reviews = [(f"Film {i} is {word}.", label) for i in range(10) for word, label in OPINIONS.items()]
    (path / "reviews.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in reviews))
    words = train_word_pieces((text for text, _ in reviews), vocab_size=100)
    save_encoder(path / "answerdotai" / "ModernBERT-base", words, hidden_size=32, num_layers=3, seed=0)
    save_vision_model(path, "qwen2.5-vl").rename(path / VISION_MODELS[0])
    shutil.copytree(path / VISION_MODELS[0], path / VISION_MODELS[1])
    shown = [{"type": "image", "image": "photos/0.png"}, {"type": "text", "text": "Which part is this?"}]
    seen = [[{"role": "user", "content": shown}, {"role": "assistant", "content": f"A hinge, {i}."}] for i in range(24)]
    write_jsonl(path / "seen.jsonl", ({"messages": chat} for chat in seen))
    (path / "photos").mkdir()
    make_image(0).save(path / "photos" / "0.png")
    (path / "run.yaml").write_text(json.dumps(RUN | {"output_dir": "runs/planned"}))
    axolotl = {"base_model": "M", "datasets": [{"path": "chats.jsonl", "ds_type": "json", "type": "chat_template"}]}
    axolotl |= dict(micro_batch_size=1, num_epochs=1, learning_rate=1e-4, sequence_len=512, output_dir="runs/x")
    (path / "axolotl.yaml").write_text(json.dumps(axolotl | {"optimizer": "adamw_torch", "lr_scheduler": "cosine"}))
    (path / "examples").symlink_to(ROOT / "examples")
    shell = Shell(path, tmp_path_factory.mktemp("tools") / "bin")
    shell.run(
        "python process_data.py --model-name-or-path M --input-file chats.jsonl --output-file chats.arrow"
        " --validation-share 0.1 --preview 0"
    )
    for name in ("held_out", "old", "chats_with_hints"):
        shutil.copy(path / "chats.arrow", path / f"{name}.arrow")
        shutil.copy(path / "chats.arrow.meta.json", path / f"{name}.arrow.meta.json")
    return path


@pytest.fixture(scope="module")
def runs(belongings, tmp_path_factory) -> Path:
    """Finished runs, full fine-tuning and LoRA, each with its best export."""
    path = tmp_path_factory.mktemp("finished")
    shutil.copytree(belongings, path, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
    shell = Shell(path, tmp_path_factory.mktemp("tools") / "bin")
    shell.run("python train.py --config run.yaml --output-dir runs/a")
    shell.run("python train.py --config run.yaml --output-dir runs/lora --lora")
    for name in ("b", "qwen"):
        shutil.copytree(path / "runs" / "a", path / "runs" / name)
    exports = path / "runs" / "quickstart" / "run" / "hf_format"
    shutil.copytree(path / "runs" / "a" / "hf_format" / "best", exports / "latest")
    return path


@pytest.fixture
def shell(belongings, tmp_path) -> Shell:
    shutil.copytree(belongings, tmp_path / "work", symlinks=True, copy_function=os.link)
    return Shell(tmp_path / "work", tmp_path / "bin")


@pytest.mark.long
@pytest.mark.parametrize("page", ALONE, ids=name_page)
def test_the_commands_of_a_page_do_what_it_says(page, shell, request):
    if page.stem in NEEDS_RUNS:
        shutil.copytree(request.getfixturevalue("runs") / "runs", shell.folder / "runs")
    for reason, commands in find_blocks(page):
        if not reason:
            shell.run(commands)


@pytest.mark.long
def test_the_commands_of_the_task_pages_do_what_they_say(shell):
    need("optuna")
    pages = {name_page(page): page for page in PAGES}
    for name in TASKS:
        for reason, commands in find_blocks(pages[name]):
            if not reason:
                shell.run(commands)
    path = shell.folder
    answers = [(path / name).read_text().splitlines() for name in ("answers.jsonl", "merged_answers.jsonl")]
    assert [len(lines) for lines in answers] == [2, 2]
    steps = [json.loads(line)["step"] for line in (path / "moved/training_metrics_0.jsonl").read_text().splitlines()]
    assert steps == [1, 2] and json.loads((path / "moved/training_params.json").read_text())["first_step"] == 1
    labels = json.loads((path / "runs/reviews/hf_format/best/config.json").read_text())["id2label"]
    assert labels == {"0": "negative", "1": "positive"} and (path / "review_scores/results.html").is_file()
    assert "data:image" in (path / "seen.html").read_text()
    assert (path / "runs/seeing/hf_format/best/preprocessor_config.json").is_file()
    assert (path / "compared/results.html").is_file() and (path / "runs/kept/hf_format/latest").is_dir()
