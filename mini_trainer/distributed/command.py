"""The command that started this program, as its user typed it, and commands for the programs beside it.

Messages name these, so that they can be copied.
"""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from mini_trainer import __version__
from mini_trainer.root_files import ROOT

COMMAND = "MINI_TRAINER_COMMAND"  # in the environment, by `mini-trainer`, as JSON: process, argv, whether by -m
SCRIPTS = {  # of the root, by their words
    "train": "train.py",
    "process-data": "process_data.py",
    "generate": "generate.py",
    "evaluate": "evaluate_model.py",
}


def name_command() -> str:
    """The typed command up to its options: `mini-trainer train`, `torchrun train.py`, `python train.py`."""
    if (found := find_installed_command()) is not None:
        return shlex.join([*found[0], found[1][0]])
    spec = sys.modules["__main__"].__spec__
    is_module = spec is not None and spec.name.startswith("mini_trainer.")
    script = ["-m", spec.name] if is_module else [show_path(sys.argv[0])]
    return shlex.join(["torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else name_python(), *script])


def name_program(word: str) -> str:
    """The command that starts another program in the same way: the one of this `word` of `mini-trainer`."""
    if (found := find_installed_command()) is not None:
        return shlex.join([*found[0], word])
    return shlex.join([name_python(), *find_script(word)])


def name_launch(word: str, num_processes: int) -> list[str]:
    """The words that start a script in several processes, in the way that this program was started."""
    if (found := find_installed_command()) is not None:
        return [*found[0], word, f"--nproc-per-node={num_processes}"]
    start = [name_python()] if num_processes == 1 else ["torchrun", f"--nproc-per-node={num_processes}"]
    return [*start, *find_script(word)]


def find_script(word: str) -> list[str]:
    """The words after `python` in the command for a word: a script of the checkout, or this package."""
    script = ROOT / SCRIPTS.get(word, "")
    return [show_path(str(script))] if script.is_file() else ["-m", "mini_trainer", word]


def find_installed_command() -> tuple[list[str], list[str]] | None:
    """The words of `mini-trainer` and those after it, if it started this process or its torchrun; otherwise None."""
    process, argv, is_module = json.loads(os.environ.get(COMMAND, "[null, [], false]"))
    if process not in (os.getpid(), os.getppid()):
        return None
    program, *words = argv
    if is_module:
        return [name_python(), "-m", "mini_trainer"], words
    return [Path(program).name if shutil.which(Path(program).name) == program else show_path(program)], words


def describe_version() -> str:
    return f"mini_trainer {__version__}"


def name_python() -> str:
    """python, where the shell finds this interpreter by that name; else its path."""
    found = shutil.which("python")
    is_found = found is not None and Path(found).parent == Path(sys.executable).parent
    return "python" if is_found else show_path(sys.executable)


def show_path(path: str) -> str:
    """The path relative to the current directory for a file below it; other paths unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
