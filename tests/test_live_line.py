"""On a terminal one live line, whole whatever else is logged; elsewhere the lines of steps."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from heavy import need
from processes import ENV, ROOT, flags
from small_runs import OPTIONS, make_inputs
from terminal import open_terminal, read_screen, run_on_terminal

from mini_trainer.distributed.messages import LinesAboveBars
from mini_trainer.run.run_directory import open_console
from mini_trainer.run.training_log import Console, LiveLine, TimeLeft

STEP = dict(step=1, epoch=0.5, loss=2.0, lr=0.1, grad_norm=1.0, tokens_per_second=1234.0, mfu=None)
END = "<end>"
VALIDATION = dict(step=1, loss=1.5, seconds=2.0, perplexity=4.5, token_accuracy=0.5, is_best=True, sets={})


@pytest.mark.slow
def test_a_run_on_a_terminal_has_one_live_line_that_nothing_tears(tmp_path):
    need("tensorboard")
    options = make_inputs(tmp_path, "llama_tied_bias") | OPTIONS | dict(output_dir=tmp_path / "run", max_steps=4)
    options |= dict(validation_data_path=options["data_path"], validate_every_steps=2, track="tensorboard")
    command = [sys.executable, "train.py", *flags(**options)]
    code, written = run_on_terminal(command, env=ENV | dict(TERM="xterm"), cwd=str(ROOT))
    assert code == 0, written
    assert "loading: " in written and "exporting: " in written
    screen = read_screen(written)
    (tracking,) = (line for line in screen if line.startswith("tracking: "))
    assert tracking == f"tracking: tensorboard: {tmp_path}/run/tensorboard"
    validations = [line for line in screen if "validation after step" in line]
    assert [line.split(":")[0] for line in validations] == [f"validation after step {step}" for step in (0, 2, 4)]
    lines = [line for line in screen if "tokens/s" in line]
    assert len(lines) == 1, "\n".join(screen)
    (live,) = lines
    assert live.startswith("step 100%|") and "| 4/4, loss " in live
    assert live.count(" validation ") == live.count(" (step 4)") == 1


@pytest.fixture
def sit_down(monkeypatch):
    """Puts a pty in the place of stderr; returns a function that gives what has been written to it."""
    opened = []

    def open_one() -> Callable[[], str]:  # in the test, since pytest puts its own stderr there once fixtures are made
        ours, theirs = open_terminal()
        stream = os.fdopen(theirs, "w", buffering=1)
        opened.append((ours, stream))
        monkeypatch.setattr(sys, "stderr", stream)

        def read_all() -> str:
            """The kernel hands on in its own time what is written, so that a single read may have a part of it."""
            stream.write(END)
            stream.flush()
            written = b""
            while not written.endswith(END.encode()):
                written += os.read(ours, 65536)
            return written.decode().removesuffix(END)

        return read_all

    yield open_one
    for ours, stream in opened:
        stream.close()
        os.close(ours)


def test_log_lines_come_above_the_live_line(sit_down, monkeypatch, caplog):
    read_terminal = sit_down()
    log = logging.getLogger("mini_trainer")
    monkeypatch.setattr(log, "handlers", [LinesAboveBars()])
    caplog.set_level("INFO", logger="mini_trainer")
    line = open_console(TimeLeft(first_step=0, num_steps=2), shown=("loss", "perplexity", "token_accuracy"))
    assert type(line) is LiveLine
    line.write(STEP)
    log.warning("warning: something that is longer than the live line " + "x" * 100)
    line.write_validation(VALIDATION)
    line.write(STEP | dict(step=2, loss=1.75))
    line.close()
    screen = [text for text in read_screen(read_terminal()) if text]
    assert screen[0] == "warning: something that is longer than the live line " + "x" * 100
    assert screen[1].startswith("validation after step 1: loss 1.5000  perplexity 4.500  token accuracy 50.00%")
    assert "| 2/2, loss 1.7500  1,234 tokens/s  validation 1.5000 (step 1)" in screen[2] and len(screen) == 3


@pytest.mark.parametrize("kind", [Console, LiveLine])
def test_a_steps_line_has_the_newest_validation_and_never_that_of_the_untrained_model(
    kind, sit_down, monkeypatch, caplog
):
    read_terminal = sit_down()
    caplog.set_level("INFO", logger="mini_trainer")
    monkeypatch.setattr("mini_trainer.run.training_log.SECONDS_BETWEEN_LINES", 0.0)
    console = kind(TimeLeft(first_step=0, num_steps=None), shown=())

    def write_step(step: int) -> str:
        console.write(STEP | dict(step=step))
        return str(console.bar) if kind is LiveLine else caplog.messages[-1]

    console.write_validation(VALIDATION | dict(step=0, loss=9.25))
    assert "validation" not in write_step(1)
    console.write_validation(VALIDATION | dict(step=1, loss=3.5))
    assert "  validation 3.5000 (step 1)" in write_step(2)
    console.write_validation(VALIDATION | dict(step=2, loss=2.5))
    assert "  validation 2.5000 (step 2)" in write_step(3)
    console.close()
    read_terminal()


def test_a_run_without_an_end_counts_its_steps(sit_down):
    read_terminal = sit_down()
    line = LiveLine(TimeLeft(first_step=3, num_steps=None), shown=())
    line.write(STEP)
    line.close()
    (shown,) = [text for text in read_screen(read_terminal()) if text]
    assert shown == "step 4, loss 2.0000  1,234 tokens/s"


@pytest.mark.parametrize("reason", ["no terminal", "another rank", "--logging-level WARNING"])
def test_elsewhere_there_are_lines(reason, sit_down, monkeypatch, caplog, tmp_path: Path):
    sit_down()
    caplog.set_level("WARNING" if reason == "--logging-level WARNING" else "INFO", logger="mini_trainer")
    if reason == "no terminal":
        monkeypatch.setattr(sys, "stderr", (tmp_path / "stderr").open("w"))
    elif reason == "another rank":
        monkeypatch.setenv("RANK", "1")
    assert type(open_console(TimeLeft(first_step=0, num_steps=2), shown=())) is Console
