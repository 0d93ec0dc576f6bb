"""The installed program: what a wheel holds, and its uses from a directory that is not the checkout.

Every module has one name, `mini_trainer.…`, also the root's seven files.
"""

import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from forked import succeed
from processes import ENV, ROOT, count_steps, flags, free_port, is_alive, list_children, wait_until
from program import list_dependencies, list_sources

import mini_trainer
from mini_trainer.__main__ import TORCHRUN_OPTIONS
from mini_trainer.root_files import NAMES, is_checkout


def list_files() -> list[Path]:
    """The files that git knows and that are there, relative to the root."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_every_direct_dependency_is_justified():
    rows = re.findall(
        r"^\| `([\w.-]+)` \|(.*)\|$", (ROOT / "docs" / "developers" / "dependencies.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(name for name, _ in rows) == sorted(list_dependencies())
    assert all(cell.strip() for _, cells in rows for cell in cells.split("|")), rows


def test_no_message_or_page_asks_to_install_the_namesakes_of_the_index():
    texts = {path: (ROOT / path).read_text() for path in list_files() if path.suffix in {".py", ".md", ".yaml"}}
    asking = {str(path) for path, text in texts.items() if re.search(r"pip install '?\"?mini.trainer", text)}
    assert asking <= {"tests/test_package.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built from a copy of the files that git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in list_files():
        (folder / "clone" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / "clone" / path)
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "clone")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder of installed packages that has the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    run_pip("install", "--no-deps", "--target", folder, wheel)
    return folder


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def run_pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--no-index", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def start(site: Path, folder: Path, *argv: object, env: dict[str, str] | None = None) -> subprocess.Popen:
    """`python -m mini_trainer` in `folder`, in a process group of its own as a shell would start it."""
    command = [sys.executable, "-m", "mini_trainer", *map(str, argv)]
    env = ENV | {"PYTHONPATH": str(site)} | (env or {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, process_group=0)


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.long
def test_a_wheel_has_one_name_and_every_file_of_the_package(wheel):
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert sorted({name.parts[0] for name in names}) == ["mini_trainer", "mini_trainer_fsdp-0.1.0.dist-info"]
    held = {name for name in names if name.parts[0] == "mini_trainer"}
    belonging = {path for path in list_files() if path.parts[0] == "mini_trainer"}
    assert held == belonging | {Path("mini_trainer", f"{name}.py") for name in NAMES}


@pytest.mark.long
@pytest.mark.slow
def test_the_command_and_the_module_list_their_words_and_import_nothing_heavy(site, elsewhere):
    code = (
        "import runpy, sys; sys.argv = ['mini-trainer', '--help']\n"
        "runpy.run_module('mini_trainer', run_name='__main__')\n"
        "print('HEAVY', sorted({'torch', 'numpy', 'tyro', 'transformers', 'options'} & set(sys.modules)))\n"
        "import mini_trainer; print(mini_trainer.__file__)"
    )
    env = ENV | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    listed = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=True).stdout
    assert "HEAVY []" in listed and str(site) in listed
    assert all(f"  {word} " in listed for word in ("train", "process-data"))
    command = [str(site / "bin" / "mini-trainer"), "--help"]
    from_command = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=True).stdout
    assert listed.startswith(from_command) and from_command
    command = [str(site / "bin" / "mini-trainer"), "process-data", "--lr", "1"]
    refused = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=False)
    assert "/bin/mini-trainer process-data --help " in refused.stderr  # as it was typed


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "command: train, process-data"),
        (["trian"], " train? (mini-trainer --help"),
        (["train", "--nproc-per-node", "0"], "--nproc-per-node 0: "),
        (["train", "--nnodes", "--rdzv-id=1"], "--nnodes needs"),
        (["train", "--nnodes", "2", "--nnodes=2"], "once: --nnodes"),
        (
            ["train", "--nnodes=2:1", *flags(model_name_or_path="M", data_path="D", output_dir="O", max_steps=1)],
            "torchrun: min_nodes",
        ),
        (["train", "--nproc-per-node=2", "--bach-size", "3"], "--bach-size"),
        (["score-data", "--nproc-per-node=2", "--model-name-or-path", "M"], "--data-path"),
        (["process-data", "--inptu-file", "3"], "--inptu-file"),
    ],
)
def test_what_cannot_be_started_gets_one_message_and_exit_code_2(argv, reason, site, elsewhere):
    done = finish(start(site, elsewhere, *argv))
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", ["mini-trainer", "rhai-innovation-mini-trainer"])
def test_another_project_in_the_same_folder_is_refused_by_its_name(name, site, elsewhere, tmp_path):
    """As pip leaves it: both have a package `mini_trainer`, and the later one's files lie over the earlier one's."""
    both = tmp_path / "both"
    shutil.copytree(site, both)
    (both / "mini_trainer" / "__init__.py").write_text("run_training = None\n")
    info = both / f"{name.replace('-', '_')}-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.0\n")
    done = finish(start(both, elsewhere, "train", "--help"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{name} 0.9.0 " in done.stderr and f"pip uninstall {name}" in done.stderr


def test_what_train_hands_to_torchrun_is_torchruns_and_no_option_of_its_own():
    from torch.distributed.run import get_args_parser

    from mini_trainer.options import TrainOptions, iterate_fields

    names = {name.replace("-", "_") for name in TORCHRUN_OPTIONS}
    assert names & {option.name for option, _ in iterate_fields(TrainOptions)} == set()
    takes_a_value = {action.dest for action in get_args_parser()._actions if action.nargs is None}
    assert names - takes_a_value == set()


@pytest.fixture(scope="module")
def run_flags(site, elsewhere) -> list[str]:
    """Flags of a run on a tiny model and on data that the installed program made."""
    from tiny_data import write_counting_chats
    from tiny_models import FAMILIES, save_model, save_tokenizer

    save_model(FAMILIES["llama"], elsewhere / "model")
    save_tokenizer(elsewhere / "model")
    write_counting_chats(elsewhere / "chats.jsonl")
    words = flags(input_file="chats.jsonl", output_file="chats.arrow", model_name_or_path="model")
    done = finish(start(site, elsewhere, "process-data", *words))
    assert done.returncode == 0, done.stderr
    return flags(
        model_name_or_path="model", data_path="chats.arrow", batch_size=4, max_tokens_per_gpu=256, learning_rate=1e-3
    )


def read_losses(output_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output_dir / "training_metrics_0.jsonl").read_text().splitlines()]


@pytest.mark.wide
@pytest.mark.slow
def test_two_machines_train_from_elsewhere_as_one_process_does_in_a_checkout(site, elsewhere, run_flags):
    end = ["--max-steps", 3]
    here = [elsewhere / word if word in ("model", "chats.arrow") else word for word in run_flags]
    succeed(0, "train.py", *here, *end, "--output-dir", elsewhere / "alone")
    meeting = ["--nnodes=2", "--nproc_per_node", 1, "--rdzv-backend=c10d", "--rdzv-id", "test"]
    argv = ["train", *meeting, f"--rdzv-endpoint=127.0.0.1:{free_port()}", *run_flags, *end, "--output-dir", "both"]
    machines = [start(site, elsewhere, *argv) for _ in range(2)]
    for machine in machines:
        done = finish(machine)
        assert done.returncode == 0, done.stderr
    assert read_losses(elsewhere / "both") == pytest.approx(read_losses(elsewhere / "alone"), rel=1e-6)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 10), (signal.SIGTERM, 3), (signal.SIGUSR1, 3)])
def test_a_signal_is_handed_on_and_the_runs_own_exit_code_comes_back(number, code, site, elsewhere, run_flags):
    name = f"stopped_{number}"
    argv = ["train", "--nproc-per-node=2", *run_flags, "--max-steps", 100_000, "--output-dir", name]
    process = start(site, elsewhere, *argv)
    wait_until(lambda: count_steps(elsewhere / name) > 0, seconds=120, by=process, said=process.stderr.read)
    ranks = list_children(process.pid)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # a terminal's Ctrl-C goes to all
    done = finish(process)
    assert (done.returncode, json.loads((elsewhere / name / "exit.json").read_text())["code"]) == (code, code)
    assert len(list((elsewhere / name / "checkpoints").glob("step_*"))) == 1
    assert len(ranks) == 2 and not any(map(is_alive, ranks))
    assert not re.search("Traceback|FAILED|death signal", done.stderr)  # torchrun's report
    last = [line.partition(": ")[0] for line in done.stderr.splitlines()[-2:]]
    assert last == ["to continue", "to export its model"]


@pytest.mark.wide
@pytest.mark.slow
def test_an_exit_file_of_an_earlier_start_is_not_taken_for_this_ones(site, elsewhere, run_flags):
    killed = elsewhere / "killed"
    killed.mkdir()
    (killed / "exit.json").write_text('{"code": 0}')
    found_first = elsewhere / "found_first"
    found_first.mkdir()
    kill_itself = "import os\nif 'RANK' in os.environ: os.kill(os.getpid(), 9)"
    (found_first / "sitecustomize.py").write_text(kill_itself)  # run by Python itself when it starts
    argv = ["train", "--nproc-per-node=2", *run_flags, "--max-steps", 9, "--output-dir", killed]
    done = finish(start(site, elsewhere, *argv, env={"PYTHONPATH": f"{found_first}:{site}"}))
    assert done.returncode == 128 + signal.SIGKILL
    assert "SIGKILL" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_root_is_one_module(name):
    module = importlib.import_module(f"mini_trainer.{name}")
    assert module.__file__ == str(ROOT / f"{name}.py") and module.__name__ == f"mini_trainer.{name}"
    assert getattr(mini_trainer, name) is module


def ask(code: str, folder: Path, env: dict[str, str] = ENV) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


@pytest.mark.long
def test_bare_names_are_refused_or_another_programs(tmp_path):
    code = "import mini_trainer, sampler; print(sampler.OWN)"
    assert ask(code, ROOT).endswith("No module named 'sampler'; did you mean 'mini_trainer.sampler'?")
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("OWN = 'the user'\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import {', '.join(NAMES)}; {code}"
    assert ask(code, ROOT) == "the user\n"


def test_a_folder_with_some_files_of_these_names_is_no_checkout(tmp_path):
    for name in ("pyproject.toml", *(f"{name}.py" for name in NAMES[:-1])):
        (tmp_path / name).touch()
    assert is_checkout(ROOT) and not is_checkout(tmp_path)


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
