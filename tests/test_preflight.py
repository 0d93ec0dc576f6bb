"""The start on several nodes: who is there, and whether their output directory is one that can hold a run."""

import errno
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_forked, succeed
from processes import flags
from refusals import read_refusal

from mini_trainer.distributed.ending import RunError
from mini_trainer.distributed.meeting import MOST_NODES
from mini_trainer.distributed.process import check_tasks
from mini_trainer.run import preflight, preflight_nodes
from mini_trainer.run.preflight import MADE, check_disk, find_failure
from mini_trainer.run.preflight_nodes import Node, check_launch, check_nodes, describe_nodes, refuse_problems

OF_SRUN = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")


def list_words(inputs: dict[str, str]) -> list[str]:
    return flags(**inputs, batch_size=8, max_tokens_per_gpu=64, max_steps=2, checkpoint_every_steps=1)


# What a file system can do.


def test_a_disk_can_hold_a_run_and_nothing_is_left(tmp_path):
    (tmp_path / MADE).mkdir()
    (tmp_path / MADE / "appended").write_text("of a killed start")
    check_disk(tmp_path)
    assert not list(tmp_path.iterdir())


def refuse(*args: object) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("append", "cannot append to a file that others read, .*Operation not supported"),
        ("replace", "cannot replace a file by .*Operation not supported"),
        ("rename", "cannot rename a directory, .*Operation not supported"),
    ],
)
def test_a_bucket_that_lacks_an_operation_is_refused_by_name(lacking, message, tmp_path, monkeypatch):
    place, name = ("mini_trainer.run.preflight", "open_own") if lacking == "append" else ("pathlib.Path", lacking)
    monkeypatch.setattr(f"{place}.{name}", refuse)
    with pytest.raises(ValueError, match=rf"^--output-dir {tmp_path}: {message}\. .*--upload-to"):
        check_disk(tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "stale", "said"),
    [("appended", "1\n", "appended bytes"), ("replaced", "1", "earlier one"), ("file", "", "reads differently")],
)
def test_a_bucket_that_shows_what_was_there_before_can_hold_a_run(name, stale, said, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "read_text", lambda path: stale if path.name == name else path.read_text())
    with pytest.raises(ValueError, match=rf"^--output-dir {tmp_path}: cannot .*{said}"):
        check_disk(tmp_path)


def test_a_full_disk_is_not_one_that_lacks_an_operation(tmp_path, monkeypatch):
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match=rf"^--output-dir {tmp_path}: cannot be written: .*No space left"):
        check_disk(tmp_path)


def test_the_mount_is_named(monkeypatch, tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nbucket {tmp_path}/runs fuse.rclone rw 0 0\nb {tmp_path}/ru xfs rw 0 0\n")
    monkeypatch.setattr("mini_trainer.run.preflight.MOUNTS", mounts)
    monkeypatch.setattr(Path, "rename", refuse)
    (tmp_path / "runs").mkdir()
    assert f"(fuse.rclone at {tmp_path}/runs)" in find_failure(tmp_path / "runs")


# Who takes part.


def make_nodes(*hosts: str, num_ranks: int = 8) -> list[Node]:
    return [Node(host, range(i * num_ranks, (i + 1) * num_ranks), None) for i, host in enumerate(hosts)]


def test_hosts_and_ranks_are_one_line_and_many_nodes_are_cut():
    assert describe_nodes(make_nodes("a", "b")) == "a (ranks 0-7), b (ranks 8-15)"
    assert describe_nodes(make_nodes(*(f"pod-{i}-x" for i in range(0, 60, 2)))).endswith("(ranks 120-127) and 14 more")


def test_the_nodes_with_a_problem_are_listed(tmp_path):
    nodes = [Node(f"n{i}", range(i, i + 1), "no such thing" if i else None) for i in range(MOST_NODES + 3)]
    message = read_refusal(lambda: refuse_problems(tmp_path, nodes), folder=tmp_path)
    first, *listed, more, advice = message.split("\n")
    assert first == "--output-dir: DIR has to be one directory for all nodes, to which each can write:"
    assert listed == [f"  n{i} (rank {i}): no such thing" for i in range(1, MOST_NODES + 1)]
    assert more == "  and 2 more nodes" and "may be on local disks" in advice


@pytest.mark.parametrize(
    ("call", "environment", "message"),
    [
        (check_tasks, dict(), None),
        (check_tasks, dict(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1"), None),
        (check_tasks, dict(SLURM_PROCID="0", SLURM_NTASKS="4"), None),  # a batch script
        (check_tasks, dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", RANK="0"), None),
        (check_tasks, dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2"), "^srun has started 2 tasks without torchrun"),
        (check_launch, dict(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="2"), None),
        (check_launch, dict(), None),
        (check_launch, dict(SLURM_STEP_NUM_TASKS="16", SLURM_STEP_NUM_NODES="2"), "^srun .* 16 torchruns on 2 nodes"),
    ],
)
def test_launches_by_srun(call: Callable[[], None], environment, message, monkeypatch):
    for name in OF_SRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if message is None:
        return call()
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_tasks_of_srun_are_no_ranks(inputs, tmp_path):
    env = dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2")
    done = run_forked(0, "train.py", *list_words(inputs), "--output-dir", tmp_path / "run", env=env)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "error: srun has started 2 tasks without torchrun" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["run", "run/checkpoints"])  # the second may be a link or a mount of its own
def test_a_node_with_another_disk_in_one_place_writes_there(place, world, tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    check_nodes(world, tmp_path / "run")
    find, other = preflight_nodes.find_token, tmp_path / place
    monkeypatch.setattr(preflight_nodes, "SECONDS_TO_APPEAR", 0)
    monkeypatch.setattr(preflight_nodes, "find_token", lambda path, token: find(path, token * (path != other)))
    with pytest.raises(RunError, match=rf"{other} has .*\n  .* \(rank 0\): it is another directory than rank 0's"):
        check_nodes(world, tmp_path / "run")
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert preflight_nodes.try_writing(tmp_path / "0", "token").startswith("it cannot be written: [Errno 95]")


ONE_RANK_A_NODE = dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


@pytest.mark.slow
def test_two_nodes_of_one_directory_train(inputs, tmp_path):
    words = [*list_words(inputs), "--output-dir", tmp_path / "run"]
    done = succeed(2, "train.py", *words, env=ONE_RANK_A_NODE)
    host = socket.gethostname()
    assert f"\n2 nodes: {host} (rank 0), {host} (rank 1)\n" in f"\n{done.stderr}"
    assert not (tmp_path / "run" / MADE).exists() and (tmp_path / "run" / "checkpoints" / "step_2").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(("is_there", "problem"), [(False, "there is no such directory"), (True, "it is another .*")])
def test_a_node_with_another_directory_is_named(is_there, problem, inputs, tmp_path):
    if is_there:
        (tmp_path / "its own").mkdir()
    own = [",", "--output-dir", tmp_path / "run", ",", "--output-dir", tmp_path / "its own"]
    workers = ["tests/workers/impatient.py", "2", "tests/workers/by_rank.py"]
    done = run_forked(2, *workers, "train.py", *list_words(inputs), *own, env=ONE_RANK_A_NODE, timeout=100)
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith(f"error: --output-dir: {tmp_path / 'run'} has")]
    assert lines[first + 1].startswith(f"  {socket.gethostname()} (rank 1): {problem.removesuffix('.*')}")
    assert " free" not in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_checkpoint_that_fails_names_the_node(inputs, tmp_path):
    workers, words = ["tests/workers/limited.py", "100000"], [*list_words(inputs), "--output-dir", tmp_path / "run"]
    done = run_forked(2, *workers, "train.py", *words, env=ONE_RANK_A_NODE)
    assert done.returncode != 0
    place = rf"step_1: rank_00000\.safetensors on {re.escape(socket.gethostname())}: \[Errno 27\]"
    assert re.search(
        rf"^error: cannot write the checkpoint \S*{place} File too large.* free\.", done.stderr, re.MULTILINE
    )
