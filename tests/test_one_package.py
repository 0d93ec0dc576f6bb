"""One name for every module: `mini_trainer.…`, of the checkout under test, also for the root's seven files."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENV, ROOT
from program import list_sources

import mini_trainer
from mini_trainer.root_files import NAMES, is_checkout


def test_the_package_is_that_of_the_checkout_under_test():
    assert [*mini_trainer.__path__] == [str(ROOT / "mini_trainer")]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_root_is_one_module(name):
    module = importlib.import_module(f"mini_trainer.{name}")
    assert module.__file__ == str(ROOT / f"{name}.py") and module.__name__ == f"mini_trainer.{name}"
    assert getattr(mini_trainer, name) is module


def ask(code: str, folder: Path, env: dict[str, str] = ENV) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("name", NAMES)
def test_the_bare_name_is_refused_or_another_programs(name, tmp_path):
    code = f"import mini_trainer, {name}; print({name}.OWN)"
    assert ask(code, ROOT).endswith(f"No module named '{name}'; did you mean 'mini_trainer.{name}'?")
    (tmp_path / f"{name}.py").write_text("OWN = 'the user'\n")
    assert ask(f"import sys; sys.path.append({str(tmp_path)!r}); {code}", ROOT) == "the user\n"


@pytest.mark.parametrize("name", ["mini_trainer", "tests", "benchmarks", "setup"])
def test_nothing_else_of_the_root_is_in_the_package(name, tmp_path):
    assert f"No module named 'mini_trainer.{name}'" in ask(f"import mini_trainer.{name}", tmp_path)


def test_a_folder_with_some_files_of_these_names_is_no_checkout(tmp_path):
    for name in ("pyproject.toml", *(f"{name}.py" for name in NAMES[:-1])):
        (tmp_path / name).touch()
    assert is_checkout(ROOT) and not is_checkout(tmp_path)


def find_bare(source: str, names: set[str]) -> list[str]:
    """Imports of our modules by other names than their own, relative ones among them, and uses of `__package__`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.partition(".")[0] in names):
            found.append(f"from {'.' * node.level}{node.module or ''}")
        if isinstance(node, ast.Import):
            found += [f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in names]
        if isinstance(node, ast.Name) and node.id == "__package__":
            found.append("__package__")
    return found


def test_every_import_of_ours_has_the_packages_name():
    rooms = {path.name for path in (ROOT / "mini_trainer").iterdir() if (path / "__init__.py").exists()}
    sources = list_sources()
    assert rooms > {"options", "data", "model", "run"} and {"train.py", "mini_trainer/__main__.py"} <= sources.keys()
    assert {path: found for path, source in sources.items() if (found := find_bare(source, {*NAMES, *rooms}))} == {}
    code = "from .. import x\nfrom model.build import y\nimport sampler\nimport models"
    assert find_bare(code, {"model", "sampler"}) == ["from ..", "from model.build", "import sampler"]


def test_the_search_path_is_changed_only_for_callbacks():
    changing = {path for path, source in list_sources().items() if re.search(r"sys\.path(\[|\.| \+?= )", source)}
    assert changing == {"mini_trainer/run/callbacks.py"}


def test_two_checkouts_have_modules_of_their_own(tmp_path):
    """A copy, beside a package of this name that is installed."""
    for path in (*list_sources(), "pyproject.toml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    code = "from importlib.util import find_spec; print(find_spec('mini_trainer.sampler').origin)"
    env = {name: value for name, value in ENV.items() if name != "PYTHONPATH"}
    for checkout in (tmp_path, ROOT):
        assert ask(code, checkout, env) == f"{checkout / 'sampler.py'}\n"


SPAWN = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from mini_trainer.sampler import RunPosition

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
        found = pool.submit(type, RunPosition(step=1)).result()
    print(found is RunPosition, found.__module__)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_started_anew_find_the_same_modules(method, tmp_path):
    (tmp_path / "script.py").write_text(SPAWN)
    command = [sys.executable, str(tmp_path / "script.py"), method]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False)
    assert done.stdout == "True mini_trainer.sampler\n", done.stderr
