"""Trials shared among tasks of an array job: what all of them leave is what one process does."""

from pathlib import Path

import pytest
from heavy import need

need("optuna")

from sweep_runs import ForkedPool, make_settings, read_results, run, write_settings

from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.lock import RunLock
from mini_trainer.tools.sweep.search import ArrayTask, choose_task, run_task
from mini_trainer.tools.sweep.settings import draw_trials, read_settings


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict:
    """Settings of three trials, the first of which fails."""
    given = make_settings(tmp_path_factory.mktemp("inputs"))
    given["train"] = {name: value for name, value in given["train"].items() if name != "max_tokens_per_gpu"}
    return given | {"parameters": {"max_tokens_per_gpu": [8, 64, 40]}}


def run_one(given: dict, folder: Path, task: ArrayTask, *, is_first: bool) -> Path:
    settings = read_settings(write_settings(given, folder))
    pool = ForkedPool(task.name_folder(settings.root), [{}], num_processes=1)
    run_task(settings, draw_trials(settings), pool, task, is_first=is_first)
    return settings.root


def read_times(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("train.log")}


def without_log(results: list[dict]) -> list[dict]:
    """Results that do not name the sweep's directory."""
    return [{key: value for key, value in one.items() if key not in ("facts", "run")} for one in results]


def test_tasks_and_then_one_process_find_what_one_process_does(given, tmp_path, capsys):
    whole = run(given | {"output_dir": str(tmp_path / "whole")}, tmp_path)
    shared = given | {"output_dir": str(tmp_path / "shared")}
    root = run_one(shared, tmp_path, ArrayTask(2, 2), is_first=True)
    assert [path.name for path in sorted(root.glob("trial_*"))] == ["trial_1"]
    assert not (root / "results.json").exists()
    capsys.readouterr()
    run_one(shared, tmp_path, ArrayTask(1, 2), is_first=False)
    said = capsys.readouterr().out
    assert "task 1/2: 2 trials have ended, 1 of them failed. Once all tasks have," in said and "(2 of 2)" in said
    before = read_times(root)
    lock = RunLock(ArrayTask(1, 2).name_folder(root))
    with pytest.raises(RunError, match=rf"^the sweep's task in {root}/tasks/1_of_2 is in use by .* pid") as refused:
        run(shared, tmp_path)
    lock.release()
    assert refused.value.code == ExitCode.LOCKED
    run(shared, tmp_path)
    assert read_times(root) == before and len(before) == 3  # nothing is trained again, what failed included
    assert without_log(read_results(root)) == without_log(read_results(whole))
    failed = read_results(root)[-1]
    assert failed["state"] == "failed" and "--max-tokens-per-gpu" in failed["facts"]["error"]
    with pytest.raises(ValueError, match="other settings"):
        run_one(shared | {"seed": 3, "search": "random", "num_trials": 3}, tmp_path, ArrayTask(1, 2), is_first=False)


def test_the_task_is_given_or_srun_s(monkeypatch):
    """test_parts.py has all environments."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert choose_task(None) is None and choose_task("3/8") == ArrayTask(3, 8)
    monkeypatch.setenv("SLURM_PROCID", "2"), monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert choose_task(None) == ArrayTask(3, 4) and choose_task("1/1") == ArrayTask(1, 1)
    with pytest.raises(ValueError, match=r"^--task 9/8: must be .* 3/8$"):
        choose_task("9/8")
