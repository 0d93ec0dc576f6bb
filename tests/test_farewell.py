"""The last lines of a run: results, and commands that work as they are printed; before them the time left."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked
from in_process import train_forked, train_here
from make_tiny_model import save_tiny_model, train_tokenizer
from processes import ENV, ROOT, flags
from small_runs import OPTIONS, make_inputs
from tiny_data import make_samples, read_lines, write_jsonl, write_samples
from tiny_models import VOCAB_SIZE

from mini_trainer.distributed import command
from mini_trainer.run.training_log import TimeLeft

# As a shell finds it, or by its path.
PYTHON = "python" if shutil.which("python") == sys.executable else os.path.relpath(sys.executable, ROOT)
TEXTS = ["the capital of peru is lima", "a b c d e f g"]


def run_printed(text: str, said: str, *, stdin: str = "") -> subprocess.CompletedProcess:
    """Runs the command after `text` in a shell, as a user who copies it."""
    (line,) = [line for line in said.splitlines() if line.startswith(text)]
    words = line.removeprefix(text).strip()
    return subprocess.run(words, shell=True, cwd=ROOT, env=ENV, input=stdin, capture_output=True, text=True)


def make_options(root: Path) -> dict:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    save_tiny_model(root / "model", tokenizer, hidden_size=32, num_layers=1, seed=0)
    data = write_samples(root / "data.arrow", make_samples(20, vocab_size=250, max_len=30))
    return OPTIONS | dict(
        model_name_or_path=root / "model", data_path=data, validation_data_path=data, output_dir=root / "a run",
        max_steps=2, max_time="0.0001", resume="none",
    )  # fmt: skip


def check_stopped(stopped: subprocess.CompletedProcess, run: Path) -> None:
    how = "to continue: start the same command again, with --resume auto in place of none"
    assert re.search(rf"^stopped after step 1: --max-time.*\n{how}$", stopped.stderr, re.MULTILINE), stopped.stderr
    assert json.loads((run / "exit.json").read_text())["code"] == 3


def check_done(done: subprocess.CompletedProcess, run: Path) -> None:
    """The last words of a run of two steps, and the commands in them."""
    said = done.stderr
    assert done.returncode == 0, said
    steps = read_lines(run / "training_metrics_0.jsonl")
    (summary,) = [line for line in said.splitlines() if line.startswith("done: ")]
    losses = [f"{step['loss']:.4f}" for step in steps]
    assert len(losses) == 2 and summary.startswith(f"done: 2 steps, loss {losses[0]} -> {losses[1]}, validation ")
    assert re.search(rf"^(best )?model.*: {run}/hf_format/", said, re.MULTILINE)
    tried = run_printed("try it:", said, stdin="hello\n")
    assert tried.returncode == 0 and "Traceback" not in tried.stderr, tried.stderr
    drawn = run_printed("curves:", said)
    assert drawn.returncode == 0 and (run / "curves.html").is_file(), drawn.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_stop_says_how_to_continue_and_the_end_what_to_do_next(tmp_path):
    """--max-time is over before the first step: each start makes one, and the second start makes the last."""
    options = make_options(tmp_path)
    stopped = run_forked(0, "train.py", *flags(**options))
    check_stopped(stopped, tmp_path / "a run")
    assert stopped.returncode == 3
    check_done(run_forked(0, "train.py", *flags(**options | dict(resume="auto"))), tmp_path / "a run")


@pytest.mark.parametrize("export_best", [True, False])
def test_the_best_model_comes_first(export_best, world, tmp_path, caplog):
    caplog.set_level("INFO", logger="mini_trainer")
    options = make_inputs(tmp_path, "llama_tied_bias") | OPTIONS
    data = write_samples(tmp_path / "validation.arrow", make_samples(5, vocab_size=VOCAB_SIZE, seed=3))
    options |= dict(validation_data_path=(str(data),), validate_every_steps=1, max_steps=3, learning_rate=1.0)
    options |= dict(output_dir=str(tmp_path / "run"), lr_scheduler="constant", num_warmup_steps=3)
    warning, *said = train_here(world, **options, export_best=export_best).splitlines()
    assert warning.startswith("warning: --num-warmup-steps 3")  # of the start, again
    rows = read_lines(tmp_path / "run/validation_metrics_0.jsonl")
    best = min(rows[1:], key=lambda row: row["loss"])["step"]
    assert best != 3 and f"validation {rows[0]['loss']:.4f} -> {rows[-1]['loss']:.4f}" in said[0]
    (last,) = (tmp_path / "run/hf_format").glob("samples_*")
    shown = [f"{tmp_path}/run/hf_format/best"] * export_best
    assert [line.rpartition(": ")[2] for line in said[1:-2]] == [*shown, str(last)]
    assert not export_best or f"step {best}:" in said[1]
    assert said[-2].endswith(f" chat {tmp_path / 'run/hf_format' / ('best' if export_best else 'latest')}")


@pytest.mark.parametrize("share", [None, 0.3])
def test_a_run_that_chooses_its_values_does_not_ask_before_and_after(share, tmp_path):
    """Two questions of its data, of those held out if there are any; the right answers are shown beside the model's."""
    options = make_options(tmp_path)
    chats = {f"the capital of {word}": f"{word} has lima" for word in "abcdefghijkl"}
    rows = [{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": asked},
                          {"role": "assistant", "content": said}]} for asked, said in chats.items()]  # fmt: skip
    for name in ("data_path", "validation_data_path", "max_time", "resume", "batch_size", "learning_rate"):
        options.pop(name, None)
    options |= dict(input_file=write_jsonl(tmp_path / "chats.jsonl", rows), data_cache_dir=tmp_path / "cache")
    said = train_forked(0, **options, **({} if share is None else dict(validation_share=share)))
    answered = read_lines(tmp_path / "a run" / "samples_0.jsonl")
    asked = [row["prompt"] for row in answered[:2]]
    assert [(row["step"], row["prompt"]) for row in answered] == [(step, each) for step in (0, 2) for each in asked]
    assert [row["reference"] for row in answered] == [chats[each] for each in asked] * 2
    lines = said[said.index("done: ") :].splitlines()
    assert lines[1].startswith(f"two {'trained' if share is None else 'held-out'} questions, answered before and after")
    found = [line.split(maxsplit=1)[1] for line in lines[3:6]]
    assert [json.loads(text)[:70] for text in found] == [
        " ".join(text.split())[:70] for text in (chats[asked[0]], answered[0]["answer"], answered[2]["answer"])
    ]
    assert len(set(asked)) == 2


def test_a_quiet_run_says_nothing_more(world, tmp_path, caplog):
    caplog.set_level("WARNING", logger="mini_trainer")
    options = make_inputs(tmp_path, "llama_tied_bias") | OPTIONS
    assert train_here(world, **options, output_dir=str(tmp_path / "run"), max_steps=1) == ""


@pytest.mark.parametrize(
    ("argv", "is_module", "name", "generate"),
    [
        (["/nowhere/bin/mini-trainer", "train", "--a b"], False, "/nowhere/bin/mini-trainer", "generate"),
        (["/x/mini_trainer/__main__.py", "train", "--a b"], True, "{python} -m mini_trainer", "generate"),
    ],
)
def test_commands_are_named_as_they_were_typed(argv, is_module, name, generate, monkeypatch):
    name = name.format(python=shlex.quote(PYTHON))
    monkeypatch.setenv(command.COMMAND, json.dumps([os.getppid(), argv, is_module]))
    assert command.name_command() == f"{name} train"
    assert command.name_program("generate") == f"{name} {generate}"


def test_scripts_are_named_by_their_paths(monkeypatch):
    monkeypatch.setenv(command.COMMAND, json.dumps([-1, ["/bin/mini-trainer", "continual"], False]))  # a far ancestor's
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), "--max-steps", "1"])
    monkeypatch.chdir(ROOT)
    assert command.name_command() == f"{PYTHON} train.py"
    assert command.name_program("generate") == f"{PYTHON} generate.py"
    assert command.name_program("plot-metrics") == f"{PYTHON} -m mini_trainer plot-metrics"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert command.name_command() == "torchrun train.py"


@pytest.mark.parametrize("first_step", [0, 500])
@pytest.mark.parametrize("first_seconds", [(90.0, 5.0, 1.5), (1.0, 1.0, 1.0)])  # the first steps compile, or do not
def test_the_first_estimate_is_near_what_the_run_takes(first_step, first_seconds):
    """Steps of 0.4 to 1.6 s, each as its batch is long; a first estimate after at most ten of them."""
    draw, num_steps = random.Random(0), first_step + 400
    seconds = {step: draw.uniform(0.4, 1.6) for step in range(first_step + 1, num_steps + 1)}
    seconds |= {first_step + 1 + i: value for i, value in enumerate(first_seconds)}
    left = TimeLeft(first_step=first_step, num_steps=num_steps)
    now, shown = 1000.0, {}
    for step in range(first_step + 1, num_steps + 1):
        now += seconds[step]
        shown[step] = (left.after(step, now), now)
    known = [step for step, (estimate, _) in shown.items() if estimate is not None]
    assert known == list(range(known[0], num_steps + 1)) and known[0] - first_step <= 10
    for step in known:
        estimate, then = shown[step]
        assert estimate == pytest.approx(now - then, rel=0.3, abs=0.5), step
    assert shown[num_steps][0] == 0


def test_slow_steps_are_timed_sooner_and_a_run_without_an_end_has_no_time_left():
    left = TimeLeft(first_step=0, num_steps=10)
    assert [left.after(step, 40.0 * step) for step in range(1, 6)] == [None, None, None, 240.0, 200.0]
    endless = TimeLeft(first_step=0, num_steps=None)
    assert [endless.after(step, 40.0 * step) for step in range(1, 10)] == [None] * 9
