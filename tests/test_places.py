"""Caches for users without a home, on read-only disks, with little shared memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENV, flags

from mini_trainer.distributed.ending import ExitCode
from mini_trainer.options.places import OWN, PLACES, choose_places, expand, find_root

NOWHERE = "/dev/null/home"  # whoever runs the test
# In namespaces of its own: all is read-only but /mnt, shared memory has 1 MB, and the user has no name.
CONFINED = """
mount -t tmpfs -o size=1m tmpfs /dev/shm && mount -t tmpfs -o size=300m tmpfs /mnt &&
mkdir -m 777 /mnt/tmp && mount -o remount,ro,bind / || exit 90
cd /; exec unshare --user --map-user=54321 -- "$@"
"""


def confine(*command: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", CONFINED, "bash", *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, env=env, check=False, timeout=300)


@pytest.fixture
def env(monkeypatch):
    """An environment that says nothing about caches."""
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_cache_moves_though_its_place_can_be_written(env, tmp_path):
    env.setenv("HOME", str(tmp_path))
    assert choose_places() is None
    assert expand("~/.cache/mini_trainer/data") == tmp_path / ".cache/mini_trainer/data" and expand("~") == tmp_path
    assert {name for name in PLACES if name in os.environ} == {"TORCHINDUCTOR_CACHE_DIR"}
    env.setenv(OWN, str(tmp_path / "own"))
    env.setitem(PLACES, "NUMBA_CACHE_DIR", "/dev/null/packers")  # as in a wheel that another user has installed
    assert choose_places() is None and os.environ["NUMBA_CACHE_DIR"].startswith(str(tmp_path / "own"))
    assert expand("~/.cache/mini_trainer/osft") == tmp_path / "own/osft"


def test_a_cache_stays_where_nothing_can_be_written(env, tmp_path):
    env.setenv("HOME", NOWHERE)
    env.setenv("NUMBA_CACHE_DIR", "/dev/null/numba")
    env.setattr("tempfile.tempdir", str(tmp_path))
    said, root = choose_places(), tmp_path / f"mini_trainer-{os.getuid()}"
    moved = [name for name in PLACES if os.environ.get(name, "").startswith(str(root))]
    assert moved == list(PLACES) and said.endswith(f"in {root}: {', '.join(moved)}")
    assert choose_places() is None, "a process that this one starts says it again"
    assert expand("~/.cache/mini_trainer/data") == root / "data"
    assert expand("/given") == Path("/given")


def test_somebody_elses_temporary_directory_is_used(env, tmp_path):
    env.setenv("HOME", NOWHERE)
    env.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / f"mini_trainer-{os.getuid()}"
    place.symlink_to(tmp_path)
    assert find_root() is None and "kept nowhere" in choose_places()
    place.unlink(), place.mkdir(), place.chmod(0o777)
    assert find_root() is None


@pytest.mark.skipif(confine("true", env=ENV).returncode != 0, reason="nobody may make namespaces and mounts here")
def test_a_user_without_a_home_cannot_train_on_a_read_only_disk(inputs):
    env = {name: value for name, value in ENV.items() if name not in ("HOME", "TMPDIR", *PLACES)}
    words = flags(**inputs, output_dir="/mnt/run", batch_size=8, max_tokens_per_gpu=64, max_steps=3)
    command = [sys.executable, "-m", "mini_trainer", "train", *words]
    done = confine(*command, env=env)
    assert done.returncode == ExitCode.BAD_INPUT and len(done.stderr.splitlines()) == 2, done.stderr
    assert done.stderr.startswith("error: No usable temporary directory found") and "set TMPDIR" in done.stderr
    done = confine(*command, env=env | {"TMPDIR": "/mnt/tmp", "NUMBA_CACHE_DIR": "/nowhere"})
    said = re.findall(r"^warning: caches .*", done.stderr, re.MULTILINE)
    assert done.returncode == 0 and "step 3/3" in done.stdout + done.stderr, done.stdout + done.stderr
    assert len(said) == 1 and "in /mnt/tmp/mini_trainer-54321: MINI_TRAINER_CACHE, " in said[0]
