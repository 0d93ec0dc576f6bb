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
    assert sorted(complete_options(TrainOptions, words, more={"--nnodes": "machines"})) == expected


def test_options_without_choices_offer_nothing():
    assert complete_options(PlotOptions, ["runs"]) == {}


def test_every_flag_has_the_first_sentence_of_its_help():
    described = complete_options(TrainOptions, ["--"], more={"--nnodes": "machines"})
    assert described["--max-steps"] == STEPS
    assert described["--no-compile"] == f"Off: {described['--compile']}" and described["--nnodes"] == "machines"
    assert all(described.values()) and not any({"\n", "\t"} & set(text) for text in described.values())
    assert "--allow-env" in described and "--allow-env" not in complete_options(PlotOptions, ["--"])


STEPS = "Stop after this many optimizer steps"


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
    return done.stdout.splitlines()


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
_mini_trainer; printf '%s\\n' "${{COMPREPLY[@]}}" """
    assert run_shell("bash", code, folder) == (expected or [""])


def test_bash_lists_descriptions_where_it_inserts_no_word(folder):
    code = """source <(mini-trainer completion bash)
COMP_WORDS=(mini-trainer train --max-s) COMP_CWORD=2 COLUMNS=40
for COMP_TYPE in 9 63; do _mini_trainer; printf '%s\\n' "${COMPREPLY[@]}"; done"""
    words = ["--max-sample-num-tokens", "--max-samples", "--max-steps"]
    *before, sample_tokens, _, steps = run_shell("bash", code, folder)
    assert before == words and steps == f"--max-steps  {STEPS}"[:38]
    assert sample_tokens.startswith(f"{words[0]}  ")


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish on this machine")
def test_fish_completes_flags(folder):
    code = "mini-trainer completion fish | source; complete -C'mini-trainer train --max-ste'"
    assert run_shell("fish", code, folder) == [f"--max-steps\t{STEPS}"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_reads_its_code(folder):
    code = "autoload -U compinit; compinit -u -D; source <(mini-trainer completion zsh); echo $_comps[mini-trainer]"
    assert run_shell("zsh", code, folder) == ["_mini_trainer"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_hands_words_and_descriptions_to_its_list(folder):
    code = """compdef() { }; _describe() { print -l -- "${(@P)2}" }; source <(mini-trainer completion zsh)
words=(mini-trainer train --max-st) CURRENT=3; _mini_trainer
words=(mini-trainer train --no-compi) CURRENT=3; _mini_trainer"""
    steps, no_compile = run_shell("zsh", code, folder)
    assert steps == f"--max-steps:{STEPS}" and no_compile.startswith("--no-compile:Off: ")


def test_every_word_has_options_to_complete():
    assert set(SHELLS) == {"bash", "zsh", "fish"}
