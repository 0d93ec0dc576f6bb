"""Completion in shells: what the program offers, and the code that asks it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENV, ROOT

from mini_trainer.options import TrainOptions
from mini_trainer.options.completion import SHELLS, complete_options
from mini_trainer.options.tools import PlotOptions


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-st"], ["--max-steps"]),
        (["--no-compil"], ["--no-compile"]),
        (["--nno"], ["--nnodes"]),
        (["--max-steps", "3", "--lr-scheduler", "con"], ["constant", "constant_with_warmup"]),
        (["--lr-scheduler", "cosine", ""], []),  # it takes one value
        (["--track", "wandb", "ten"], ["tensorboard"]),  # takes several
        (["--data-path", ""], []),  # files, by the shell
        ([""], []),
    ],
)  # fmt: skip
def test_the_program_offers_flags_and_values(words, expected):
    assert sorted(complete_options(TrainOptions, words, more=["--nnodes"])) == expected


def test_options_without_choices_offer_nothing():
    assert complete_options(PlotOptions, ["runs"]) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A directory for PATH with a command mini-trainer."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "mini-trainer").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m mini_trainer "$@"\n')
    (folder / "mini-trainer").chmod(0o755)
    return folder


def run_shell(shell: str, code: str, folder: Path) -> list[str]:
    env = ENV | {"PATH": f"{folder}:{ENV['PATH']}"}
    done = subprocess.run([shell, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("process-", ["process-data"]),
        ("completion f", ["fish"]),
        ("train --nproc", ["--nproc-per-node"]),
        ("train --lr-scheduler ws", ["wsd"]),
        ("process-data --nproc", []),
        ("trian --max", []),
    ],
)
def test_bash_completes_words_flags_and_values(words, expected, folder):
    code = f"""source <(mini-trainer completion bash)
COMP_WORDS=(mini-trainer {words}) COMP_CWORD={len(words.split())}
_mini_trainer; echo "${{COMPREPLY[@]}}" """
    assert run_shell("bash", code, folder) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish on this machine")
def test_fish_completes_flags(folder):
    code = "mini-trainer completion fish | source; complete -C'mini-trainer train --lr-sche'"
    assert run_shell("fish", code, folder) == ["--lr-scheduler"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_reads_its_code(folder):
    code = "autoload -U compinit; compinit -u -D; source <(mini-trainer completion zsh); echo $_comps[mini-trainer]"
    assert run_shell("zsh", code, folder) == ["_mini_trainer"]


def test_every_word_has_options_to_complete():
    assert set(SHELLS) == {"bash", "zsh", "fish"}
