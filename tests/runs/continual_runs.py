"""Small continual-learning experiments, whose programs are forked from the tests' server."""

import json
from pathlib import Path
from typing import Any

import yaml
from forked import run_forked
from make_tiny_model import save_tiny_model, train_tokenizer

from mini_trainer.continual.experiment import find_root, run_experiments
from mini_trainer.continual.settings import read_settings
from mini_trainer.distributed.children import find_last_words
from mini_trainer.run.stages import Runner

NUM_ROWS, NUM_TESTS = 24, 8
WORDS = ("red", "green", "blue", "white", "black", "brown", "pink", "grey")
TASKS = {"twice": lambda word: f"{word} {word}", "shout": str.upper, "first": lambda word: word[0]}
SCRIPTS = {"process-data": "process_data.py", "train": "train.py", "generate": "generate.py",
           "evaluate": "evaluate_model.py", "draw-samples": "mini_trainer/tools/draw_samples.py"}  # fmt: skip
TRAIN = dict(learning_rate=1e-2, batch_size=8, max_epochs=1, max_tokens_per_gpu=512, activation_checkpointing="none")


class ForkedRunner(Runner):
    """Starts programs without Python's imports; everything else is theirs."""

    def start(self, words: list[str], log_file: Path) -> tuple[int, str]:
        program, *argv = words
        done = run_forked(0, SCRIPTS[program], *argv)
        output = done.stdout + done.stderr
        with log_file.open("a") as log:
            log.write(output)
        return done.returncode, find_last_words(output)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_inputs(folder: Path) -> dict[str, Any]:
    """A model, and rows and tests of the tasks, as settings."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks, texts = [], []
    for name, answer in TASKS.items():
        questions = [f"{name}: {a} {b}" for a in WORDS for b in WORDS]
        rows = [chat(question, answer(question.split()[-1])) for question in questions]
        texts += [message["content"] for row in rows for message in row["messages"]]
        train = write_lines(folder / f"{name}.jsonl", rows[:NUM_ROWS])
        test = write_lines(folder / f"{name}_test.jsonl", rows[NUM_ROWS : NUM_ROWS + NUM_TESTS])
        tasks.append({"name": name, "input_file": train, "test": test, "metric": "exact_match", "held_out": test})
    tokenizer = train_tokenizer(texts, vocab_size=300)
    save_tiny_model(folder / "model", tokenizer, hidden_size=32, num_layers=2, seed=0)
    return {
        "model": str(folder / "model"),
        "output_dir": str(folder / "runs"),
        "train": dict(TRAIN),
        "process_data": {"num_proc": 1},
        "evaluate": {"max_new_tokens": 4, "dtype": "float32"},
        "generate": {"max_new_tokens": 6, "dtype": "float32"},
        "tasks": tasks[:2],
    }


def run(settings: dict[str, Any], folder: Path) -> Path:
    """Runs, or continues, the experiment; returns its directory."""
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump(settings))
    several = read_settings(path)
    run_experiments(several, ForkedRunner(find_root(several), num_processes=1))
    return find_root(several)


def read_options(folder: Path, program: str = "train") -> dict[str, Any]:
    return yaml.safe_load((folder / f"{program}.yaml").read_text())
