"""Sweeps: the same trials, results and winner whatever is killed, failures, devices, and the commands of trials."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from heavy import need
from processes import run as run_command
from run_directories import read_page
from small_runs import read_rows
from sweep_runs import ForkedPool, Killed, KilledPool, make_settings, read_results, run, write_settings
from tiny_data import read_lines

from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.command_line import parse_options
from mini_trainer.run.stages import Stage
from mini_trainer.tools.sweep.running import Pool, divide_devices
from mini_trainer.tools.sweep.settings import SweepSettings, draw_trials, read_settings

need("optuna")

from mini_trainer.tools.sweep.search import describe_command, find_direction, read_best, settle


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict:
    """Settings whose model and data all tests share."""
    return make_settings(tmp_path_factory.mktemp("inputs"))


def vary(given: dict, **parameters: object) -> dict:
    train = {name: value for name, value in given["train"].items() if name not in parameters}
    return given | {"train": train, "parameters": parameters}


def read_losses(root: Path) -> dict[str, list]:
    """Metrics and validations of every trial, without times."""
    found = {}
    for path in sorted(root.glob("trial_*/run")):
        lines = read_lines(path / "validation_metrics_0.jsonl")
        found[path.parent.name] = [read_rows(path), [line | {"seconds": None} for line in lines]]
    return found


def test_a_sweep_that_is_killed_finds_the_same(given, tmp_path, capsys):
    """With a schedule that depends on the run's end, and checkpoints in every second step."""
    schedule = {"lr_scheduler": "linear", "num_warmup_steps": 0.25, "checkpoint_every_steps": 2}
    given = given | {"train": given["train"] | schedule}
    whole = run(given | {"output_dir": str(tmp_path / "whole")}, tmp_path, num_parallel=2)
    results = read_results(whole)
    assert [one["state"] for one in results] == ["complete"] * 4
    assert [len(read_rows(whole / f"trial_{one['number']}/run")) for one in results] == [4] * 4
    killed = given | {"output_dir": str(tmp_path / "killed")}
    for moment, number in (("step", 1), ("end", 1), ("start", 2)):
        with pytest.raises(Killed):
            run(killed, tmp_path, KilledPool(tmp_path / "killed", moment, number))
    root = run(killed, tmp_path, KilledPool(tmp_path / "killed", "alone", 3))
    assert re.search(r"trial_3: .*signal 9", capsys.readouterr().out)
    assert read_results(root) == results
    assert read_losses(root) == read_losses(whole)
    assert not list(root.glob("trial_*/run/checkpoints"))
    # The learning rate is that of a run of four steps, one of them for warming up.
    rates = [row["lr"] for row in read_rows(root / f"trial_{results[0]['number']}" / "run")]
    peak = yaml.safe_load((root / "best.yaml").read_text())["learning_rate"]
    assert rates[2] < peak and rates[3] < rates[2] and rates[3] == pytest.approx(peak / 3)


def test_results_are_those_of_the_runs(given, tmp_path):
    """Also where trials.json is gone, and in another place. A run without a result stops the sweep, which says what to
    do."""
    given = given | {"output_dir": str(tmp_path / "there")}
    results = read_results(run(given, tmp_path, num_parallel=2))
    (tmp_path / "there").rename(root := tmp_path / "sweep")
    given["output_dir"] = str(root)
    run(given, tmp_path, NoPool(root))
    assert read_results(root) == results
    for path in (root / "trials.json", *root.glob("trial_*/train.yaml")):
        text = path.read_text().replace(str(tmp_path / "there"), str(root))
        path.unlink() if path.name == "trials.json" else path.write_text(text)
    run(given, tmp_path, NoPool(root))
    assert read_results(root) == results
    best = root / f"trial_{results[0]['number']}"
    validations = (best / "run" / "validation_metrics_0.jsonl").read_bytes()
    for damaged, message in (
        (b"{}\n" + validations, r"validation_metrics_0\.jsonl: line 1 .*/trial_"),
        (b"", r"validation_metrics_0\.jsonl: has no validation; .*/trial_\d+ to train"),
    ):
        (best / "run" / "validation_metrics_0.jsonl").write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            run(given, tmp_path, NoPool(root))


class NoPool(ForkedPool):
    """Starts nothing."""

    def __init__(self, root: Path):
        super().__init__(root, [{}], num_processes=1)

    def launch(self, words: list[str], log_file: Path, environment: dict[str, str]) -> None:
        raise AssertionError(words)


class EndingPool(NoPool):
    """Trials end with this exit code, and leave a run's directory, if `begins`, and nothing else."""

    def __init__(self, root: Path, code: int, *, begins: bool):
        super().__init__(root)
        self.code, self.begins = code, begins

    def launch(self, words: list[str], log_file: Path, environment: dict[str, str]) -> subprocess.Popen:
        log_file.write_text("")
        if self.begins:
            (log_file.parent / "run").mkdir(exist_ok=True)
        return subprocess.Popen(["sh", "-c", f"exit {self.code}"])


@pytest.mark.parametrize(
    ("code", "begins", "message"),
    [
        (ExitCode.FAILED, False, r"trial_0: failed \(1\): "),
        (ExitCode.IO, True, r"trial_0: io \(8\): "),
        (ExitCode.NO_VALID_CHECKPOINT, True, r"trial_0: no_valid_checkpoint \(4\): "),
    ],
)
def test_an_end_that_says_nothing_of_a_trial_is_no_result(code, begins, message, given, tmp_path):
    """It could not be started, or a file was at fault: the sweep stops, and runs it when it is started again."""
    given = given | {"output_dir": str(tmp_path / "sweep")}
    with pytest.raises(RunError, match=message) as stopped:
        run(given, tmp_path, EndingPool(tmp_path / "sweep", code, begins=begins))
    assert stopped.value.code == code
    assert not (tmp_path / "sweep" / "trials.json").exists()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"low"'])
def test_a_result_that_is_no_number_never_wins(value, tmp_path):
    path = tmp_path / "validation_metrics_0.jsonl"
    lines = [
        f'{{"step": {step}, "loss": {loss}, "is_best": true}}\n' for step, loss in ((1, 0.5), (2, value), (3, 0.4))
    ]
    for kept, best in ((1, (1, 0.5)), (2, (1, 0.5)), (3, (3, 0.4))):
        path.write_text("".join(lines[:kept]))
        found = read_best(path, "loss")
        assert (found["step"], found["loss"]) == best
    path.write_text(lines[1])
    assert read_best(path, "loss") is None


def test_a_trial_that_fails_is_reported_and_the_others_go_on(given, tmp_path, capsys):
    given = vary(given, max_tokens_per_gpu=[8, 64]) | {"output_dir": str(tmp_path / "sweep")}
    root = run(given, tmp_path)
    good, bad = read_results(root)
    assert (good["number"], good["state"], bad["state"]) == (1, "complete", "failed")
    assert "bad_input (2): " in bad["facts"]["error"] and "--max-tokens-per-gpu" in bad["facts"]["error"]
    said = capsys.readouterr().out
    assert "best: trial_1" in said and f"all output: {root}/trial_0/train.log" in said
    shown = read_page((root / "curves.html").read_text())["runs"]  # without what has failed
    assert [(one["name"], one["is_best"]) for one in shown] == [("trial_1, best", True)]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("train.log")}
    run(given, tmp_path)  # all is done: nothing is started again
    assert {path: path.stat().st_mtime_ns for path in root.rglob("train.log")} == before
    # A directory of something else is refused.
    with pytest.raises(ValueError, match=r"output_dir: .*/trial_1/run has training_params\.json "):
        run(given | {"output_dir": str(root / "trial_1" / "run")}, tmp_path)
    (foreign := tmp_path / "evaluated" / "results.json").parent.mkdir()
    foreign.write_text("{}")
    with pytest.raises(ValueError, match=r"output_dir: .*/evaluated has results\.json "):
        run(given | {"output_dir": str(foreign.parent)}, tmp_path)
    assert foreign.read_text() == "{}"


def test_all_trials_failing_is_an_error_that_can_be_fixed(given, tmp_path):
    given = vary(given, max_tokens_per_gpu=[8, 9]) | {"output_dir": str(tmp_path / "sweep")}
    with pytest.raises(RunError, match="2 trials failed") as failed:
        run(given, tmp_path)
    assert failed.value.code == ExitCode.FAILED
    given["parameters"] = {"max_tokens_per_gpu": [8, 1000]}  # can be fixed in place, since nothing has been trained
    assert [one["state"] for one in read_results(run(given, tmp_path))] == ["complete", "failed"]
    with pytest.raises(ValueError, match="other settings"):
        run(given | {"parameters": {"max_tokens_per_gpu": [9, 1000]}}, tmp_path)


class ShellPool(Pool):
    """Starts a line of shell in place of train.py, with its devices."""

    script = "echo $CUDA_VISIBLE_DEVICES $(date +%s%N) > $0.devices; sleep 0.2; date +%s%N >> $0.devices"

    def launch(self, words: list[str], log_file: Path, environment: dict[str, str]) -> subprocess.Popen:
        self.words = words
        with log_file.open("a") as log:
            command = ["sh", "-c", self.script, str(log_file.parent)]
            return subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log, process_group=0)


def make_stage(folder: Path, number: int) -> Stage:
    return Stage(program="train", folder=folder / f"trial_{number}", options={"output_dir": "D"})


@pytest.fixture
def pool_of(given, tmp_path, monkeypatch):
    """A pool of `ShellPool` on GPUs of these names."""
    before = signal.getsignal(signal.SIGTERM)
    # A shell cannot trap what was ignored when it started, as Ctrl-C is in a job in the background.
    of_ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)

    def make(devices: list[str], **settings: object) -> ShellPool:
        settings = read_settings(write_settings(given | {"output_dir": str(tmp_path)} | settings, tmp_path))
        environments = divide_devices(settings, devices)
        return ShellPool(settings.root, environments, num_processes=settings.num_processes)

    yield make
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGINT, of_ctrl_c)


def test_each_trial_has_devices_of_its_own(pool_of, tmp_path):
    """Six trials of two GPUs each on five: two at a time."""
    pool, ends = pool_of(list("abcde"), num_processes=2), []
    pool.run(list(range(6)), lambda number: make_stage(tmp_path, number), lambda *end: ends.append(end) or True)
    assert sorted((number, code) for number, code, _ in ends) == [(number, 0) for number in range(6)]
    assert pool.words[3:] == ["--nproc-per-node", "2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    used: dict[str, list[tuple[int, int]]] = {}
    for path in tmp_path.glob("*.devices"):
        devices, start, end = path.read_text().split()
        used.setdefault(devices, []).append((int(start), int(end)))
    assert used.keys() == {"a,b", "c,d"}
    for spans in map(sorted, used.values()):
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("devices", "settings", "message"),
    [
        ("ab", {"num_processes": 4}, "num_processes: given 4, .*2, "),
        ("abcd", {"num_processes": 2, "num_parallel": 3}, "num_parallel: given 3, .*2, .*4 GPUs"),
    ],
)
def test_more_devices_than_there_are_are_refused(pool_of, devices, settings, message):
    with pytest.raises(ValueError, match=message):
        pool_of(list(devices), **settings)


def test_the_cpu_runs_one_trial_unless_told_otherwise(pool_of):
    assert pool_of([]).environments == [{}]
    settings = dict(output_dir="D", train={}, parameters=(), num_parallel=3)
    assert divide_devices(SweepSettings(**settings), []) == [{}, {}, {}]


def test_an_interrupt_lets_running_trials_save(pool_of, tmp_path):
    pool = pool_of(["0", "1"])
    pool.script = "trap 'echo saved; exit 10' INT; touch $0.there; while true; do sleep 0.05; done"

    def start(number: int) -> Stage:
        if number == 2:  # it has no slot before another one ends: never
            raise AssertionError
        return make_stage(tmp_path, number)

    def interrupt() -> None:
        while len(list(tmp_path.glob("*.there"))) < 2:
            time.sleep(0.01)
        time.sleep(1)  # until the pool has noted them, too
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([0, 1, 2], start, lambda *end: True)
    thread.join()
    assert [(tmp_path / f"trial_{i}" / "train.log").read_text() for i in range(2)] == ["saved\n"] * 2
    with pytest.raises(RunError) as refused:
        pool_of([])
    assert refused.value.code == ExitCode.LOCKED


def test_only_trials_of_a_random_search_can_be_added(given, tmp_path):
    given = given | {"output_dir": str(tmp_path), "search": "random"}

    def settle_with(**changes: object) -> None:
        settings = read_settings(write_settings(given | changes, tmp_path))
        settle(settings, draw_trials(settings))

    settle_with(num_trials=2)
    settle_with(num_trials=3)
    (tmp_path / "trial_0" / "run").mkdir(parents=True)
    (tmp_path / "trial_0" / "run" / "training_params.json").touch()
    for changes, message in (
        (dict(num_trials=2), r"settings\.num_trials: 3 before, 2 now"),
        (dict(num_trials=4, seed=1), r"settings\.seed: 0 before, 1 now"),
        (dict(search="grid"), r"settings\.search: 'random' before, 'grid' now"),
    ):
        with pytest.raises(ValueError, match=message):
            settle_with(**changes)


def test_draws_are_a_function_of_seed_and_number(given, tmp_path):
    """More trials only come after those there are; none is drawn twice; ranges are kept to."""
    ranges = {
        "learning_rate": {"low": "1e-5", "high": "1e-1", "log": True},
        "batch_size": {"low": 2, "high": 8, "step": 2},
        "lr_scheduler": ["linear", "cosine", "constant"],
    }
    given = vary(given, **ranges) | {"search": "random", "num_trials": 12}

    def draw(**changes: object) -> list[dict]:
        return draw_trials(read_settings(write_settings(given | changes, tmp_path)))

    drawn = draw()
    assert drawn[:5] == draw(num_trials=5) and draw(seed=1)[0] != drawn[0]
    assert draw(parameters=dict(reversed(ranges.items()))) == drawn
    rates = [one["learning_rate"] for one in drawn]
    assert 1e-5 <= min(rates) < 1e-4 and 1e-2 < max(rates) <= 1e-1
    few = {name: ranges[name] for name in ("batch_size", "lr_scheduler")}
    most = draw(parameters=few)  # all that there are
    assert sorted((one["batch_size"], one["lr_scheduler"]) for one in most) == [
        (size, name) for size in (2, 4, 6, 8) for name in ("constant", "cosine", "linear")
    ]
    grid = draw(parameters=few, search="grid", num_trials=None)
    assert [(one["batch_size"], one["lr_scheduler"]) for one in grid[:4]] == [
        *((2, name) for name in ("linear", "cosine", "constant")),
        (4, "linear"),
    ]


def test_a_command_is_the_trial_with_all_its_options(given, tmp_path):
    given = given | {"parameters": {"lora": [True, False], "max_grad_norm": [1.0, None]}}
    given["train"] = given["train"] | {"export_best": True}
    settings = read_settings(write_settings(given, tmp_path))
    for number, values in enumerate(draw_trials(settings)):
        *_, script = (words := shlex.split(describe_command(settings, number, values)))[:2]
        assert script.endswith("train.py")
        options = given["train"] | values | {"output_dir": f"{given['output_dir']}/trial_{number}/run"}
        expected = group_options(TrainOptions, **options, save_final_checkpoint=False)
        assert parse_options(TrainOptions, words[2:]) == expected


def test_the_program_prints_commands_and_starts_nothing(given, tmp_path):
    path = write_settings(given | {"output_dir": str(tmp_path / "sweep"), "num_processes": 2}, tmp_path)
    done = run_command([sys.executable, "-m", "mini_trainer", "sweep", str(path), "--print-command"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(" -m mini_trainer train --nproc-per-node=2 " in line for line in lines)
    assert not (tmp_path / "sweep").exists()


def test_the_direction_of_a_metric_is_the_objectives(given):
    assert [find_direction(name) for name in ("loss", "perplexity", "mae", "token_accuracy", "f1")] == [
        *(False, False, False, True, True)
    ]
    with pytest.raises(ValueError, match=r"best_metric: given 'f2', .* loss, "):
        find_direction("f2")
