"""The SLURM script and what it asks of the program; tests/slurm runs both on a real SLURM."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from breadth import long
from processes import ROOT, wait_until

from mini_trainer.tools.slurm_job import MOST_IDLE, end

SCRIPT = ROOT / "examples" / "clusters" / "multi_node.sbatch"
COMMANDS = {  # SLURM's; the step ends as one that has saved when it is signalled
    "scontrol": """
        case "$1 $2" in
            "show hostnames") echo n1; echo n2;;
            *) echo "$0 $*" >>calls;;
        esac""",
    "srun": 'echo "$*" >words; while [ ! -e warned ]; do sleep 0.1; done; exit 3',
    "scancel": 'echo "$0 $*" >>calls; touch warned',
}


@pytest.fixture
def job(tmp_path, monkeypatch) -> dict[str, str]:
    """A job's environment, with SLURM's commands in the current directory."""
    for name, text in COMMANDS.items():
        command = tmp_path / name
        command.write_text(f'#!/usr/bin/env bash\ncd {tmp_path}\nset -- "$@"\n{text.replace("$0", name)}\n')
        command.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "2"}
    for name, value in (slurm | {"PATH": path}).items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


def start(*words: object, **options: object) -> subprocess.Popen:
    argv = ["bash", SCRIPT, "--config", "examples/recipes/quickstart.yaml", *map(str, words)]
    return subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, **options)


@pytest.mark.parametrize("to_all", [False, long(True)])
def test_a_warning_to_the_script_reaches_the_step_and_the_job_is_requeued(to_all, job, tmp_path):
    """SLURM's own to the batch shell, and scancel --full's to all of its processes."""
    output_dir = tmp_path / "a run"
    output_dir.mkdir()
    (output_dir / "exit.json").write_text('{"code": 0}')  # an earlier start's
    process = start("--output-dir", output_dir, env=job)
    wait_until((tmp_path / "words").exists, seconds=60, by=process, said=process.communicate)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGUSR1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert (tmp_path / "calls").read_text() == "scancel --signal=USR1 7.0\nscontrol requeue 7\n"
    words = (tmp_path / "words").read_text().split()
    assert "python -m mini_trainer train --nnodes=2 --nproc-per-node=2" in " ".join(words)
    assert words[-2:] == [str(tmp_path / "a"), "run"]
    requeued = f"requeueing this job, to continue after step 0; requeue 1 of {MOST_IDLE} without a new step"
    assert said.splitlines() == [requeued]
    assert not (output_dir / "exit.json").exists()


def test_options_that_cannot_be_used_end_the_job_before_the_step(job, tmp_path):
    process = start("--output-dir", tmp_path / "run", "--batch-sise", 3, env=job)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and not (tmp_path / "words").exists()
    assert "--batch-size" in said and "python -m mini_trainer train --help" in said


def test_a_job_whose_requeues_bring_no_step_ends(job, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    for i in range(MOST_IDLE):
        assert end(run, 3)
        assert f"requeue {i + 1} of {MOST_IDLE} without" in capsys.readouterr().err
    (run / "checkpoints" / "step_20").mkdir(parents=True)
    for _ in range(MOST_IDLE + 1):  # the first has brought steps
        assert end(run, 3)
    assert "to continue after step 20; requeue 3 of 3" in capsys.readouterr().err
    assert not end(run, 3)
    assert re.search("^error: .*3 requeues have brought no step after step 20.*--time", capsys.readouterr().err)
    assert end(run, 3)  # as a job that is submitted again would
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert end(run, 3)
    assert json.loads((run / "requeues.json").read_text()) == {"job": "8", "step": 20, "num_idle": 0}


@pytest.mark.parametrize("text", ["{}", "[]", "3", "{", '{"code": "x", "job": 7}'])
def test_damaged_records_are_named(text, job, tmp_path):
    for name in ("exit.json", "requeues.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/{name}: "):
            end(tmp_path, 0 if name == "exit.json" else 3)
        (tmp_path / name).unlink()


def test_only_runs_that_were_told_to_stop_are_requeued(job, tmp_path):
    assert not end(tmp_path, 1) and not end(tmp_path, 0)
    (tmp_path / "exit.json").write_text('{"code": 3}')
    assert end(tmp_path, 137)  # a launcher was killed after the ranks had saved
    (tmp_path / "exit.json").write_text('{"code": 10}')
    assert not end(tmp_path, 10)
