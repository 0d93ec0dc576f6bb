"""Option files of an experiment, started by hand in clean processes, make the bytes that the driver's starts made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from continual_runs import make_inputs, read_options, run
from tiny_data import read_lines

WRITTEN_BETWEEN = ("prompts.jsonl", "rows.jsonl")  # by the driver
MADE = (".safetensors", ".arrow", ".jsonl", ".scores")
TIMES = ("time_per_batch", "data_wait_seconds", "tokens_per_second", "samples_per_second", "peak_memory_usage_GB")
OWN_ANSWERS = {"kind": "own-answers", "num_prompts": 8, "min_score": 0.0, "share": 0.3}


def repeat(before: Path, again: Path, folder: Path) -> int:
    """Starts the option files of an experiment in their order, in another directory; returns how many there were."""
    for path in before.rglob("*"):
        if path.name in WRITTEN_BETWEEN or (path.is_symlink() and path.is_file()):  # not hf_format/latest
            (copy := again / path.relative_to(before)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    done = sorted(before.rglob("*.done"), key=lambda path: path.stat().st_mtime_ns)
    kept = ("PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    for path in done:
        config = again / path.relative_to(before).with_suffix(".yaml")
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(path.with_suffix(".yaml").read_text().replace(str(before), str(again)))
        command = [sys.executable, "-m", "mini_trainer", config.stem, "--config", str(config)]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, f"{config}: {ended.stdout}{ended.stderr}"
    return len(done)


def read_made(root: Path) -> dict[str, Any]:
    """What the programs have made by its path: bytes without the directory's name, and metrics without times."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.suffix not in MADE or "/checkpoints/" in name:
            continue
        if path.name.endswith("metrics_0.jsonl"):
            found[name] = [{key: line[key] for key in line if key not in TIMES} for line in read_lines(path)]
        else:
            found[name] = path.read_bytes().replace(str(root).encode(), b"ROOT")
    return found


@pytest.mark.wide
def test_option_files_are_complete(tmp_path: Path):
    settings = make_inputs(tmp_path) | {"adapters": "continued", "replay": OWN_ANSWERS}
    settings["train"] |= {"lora": True, "lora_rank": 4}
    before, again = run(settings, tmp_path), tmp_path / "by_hand"
    done = {path: path.stat().st_mtime_ns for path in before.rglob("*.done")}
    run(settings, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in before.rglob("*.done")} == done  # nothing is started again
    assert repeat(before, again, tmp_path) == len(done) >= 9
    made = [read_made(root) for root in (before, again)]
    assert made[0].keys() == made[1].keys()
    assert [name for name in made[0] if made[0][name] != made[1][name]] == []
    kinds = {Path(name).name for name in made[0]}
    assert {"adapter_model.safetensors", "twice.answers.jsonl"} <= kinds


@pytest.mark.long
def test_what_a_kill_left_is_not_made_again(tmp_path: Path):
    """A kill between a program's end and its record; without checkpoints, train would refuse to start again."""
    settings = make_inputs(tmp_path)
    settings |= {"tasks": [settings["tasks"][0]], "measure": "seen"}
    del settings["tasks"][0]["held_out"]
    root = run(settings, tmp_path)
    task = root / "order_1_seed_42" / "1_twice"
    made, results, log = read_made(root), (root / "results.json").read_text(), (task / "train.log").read_text()
    record = json.loads((task / "train.done").read_text())
    for path in (task / "train.done", task / "measured" / "answers" / "evaluate.done", task / "train.log"):
        path.unlink()
    (answers := task / "measured" / "answers" / "results.json").write_text('{"models": [')
    (root / "data" / "twice" / "train" / "process-data.done").unlink()
    assert run(settings, tmp_path) == root
    assert json.loads((task / "train.done").read_text()) == record | {"seconds": None}
    assert log and not (task / "train.log").exists() and "models" in json.loads(answers.read_text())
    assert read_made(root) == made and (root / "results.json").read_text() == results
    assert read_options(task)["keep_exports"] == 1
