"""The whole texts of messages of mini_trainer/distributed; other tests look for what they name."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from refusals import read_words

from mini_trainer.distributed import compilation, lifeline, lock, meeting, process, watch
from mini_trainer.distributed.agreement import Account, describe_differences
from mini_trainer.distributed.ending import Cause, ExitCode, Flag, RunError, choose_cause, describe_error, stop_reason
from mini_trainer.distributed.lock import RunFiles, RunLock
from mini_trainer.distributed.watch import Peer, describe_death, describe_hang
from mini_trainer.distributed.world import check_sharing, count_shards

HOLDER = {"host": "node7", "boot_id": "another", "pid": 12, "started": "2026-01-01"}


def differ(path: Path, patch: pytest.MonkeyPatch) -> str:
    seeds = [Account(rank, f"node{rank}", {"options": {"--seed": str(seed)}}) for rank, seed in ((0, 42), (2, 7))]
    return describe_differences(seeds, {0: [0, 1], 2: [2], 3: [3, 4, 5]})


def meet_nobody(path: Path, patch: pytest.MonkeyPatch) -> None:
    for name, value in dict(MASTER_ADDR="node0", MASTER_PORT="29500", RANK="0", LOCAL_WORLD_SIZE="2").items():
        patch.setenv(name, value)
    patch.setattr(meeting, "open_store", lambda *place, timeout: dist.HashStore())
    meeting.meet(0, 6, timeout=0.01)


def meet_nowhere(path: Path, patch: pytest.MonkeyPatch) -> None:
    def fail(*place: object, timeout: float) -> None:
        raise dist.DistNetworkError("timed out\nat a line of C++")

    patch.setattr(meeting, "open_store", fail)
    patch.setenv("MASTER_ADDR", "node0")
    patch.setenv("MASTER_PORT", "29500")
    meeting.meet(1, 2, timeout=9)


def wait_for_ranks(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifeline, "SECONDS_TO_CONNECT", 0.01)
    loop = asyncio.new_event_loop()
    nobody = lifeline.Lifeline(0, 3, loop, on_met=print, on_message=print, on_lost=print)
    loop.close()
    nobody.connect(lifeline.Address(7, "token", "node0", 1))


def open_few_files(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(process.resource, "getrlimit", lambda kind: (1024, 4096))
    process.check_open_files(2048, [8, 256])


def lock_twice(path: Path, patch: pytest.MonkeyPatch) -> None:
    first = RunLock(path)
    (path / ".lock").write_text(json.dumps(HOLDER))
    try:
        RunLock(path)
    finally:
        first.release()


def take_lock_over(path: Path, patch: pytest.MonkeyPatch) -> None:
    (path / ".lock").write_text(json.dumps(HOLDER))
    patch.setattr(lock, "SECONDS_TO_WATCH", 0)
    RunLock(path).release()


def lose_directory(path: Path, patch: pytest.MonkeyPatch, *, is_moved: bool) -> str:
    (path / "run").mkdir()
    files = RunFiles()
    files.own(path / "run")
    (path / "run").rename(path / "other")
    if not is_moved:
        (path / "other").rmdir()
    text = files.find_loss()
    os.close(files.descriptor)
    return text


def cache_in_a_file(path: Path, patch: pytest.MonkeyPatch) -> None:
    (path / "file").touch()
    patch.setenv(compilation.CACHE_VARIABLE, str(path / "file" / "cache"))
    compilation.choose_cache_dir()


def make_peer(pid: int, *, heard: float = 100, moved: float = 100, where: str = "step 5") -> Peer:
    return Peer("node1", pid, heard, moved, 60, where)


def make_death(rank: int) -> Cause:
    return Cause(ExitCode.PEER_DIED, f"rank {rank} died", rank, "node1", 3, died=True)


SILENT = {rank: make_peer(10 + rank, heard=39) for rank in range(3)}
STUCK = {0: make_peer(10, moved=39, where="A"), 1: make_peer(11, where="B"), 2: make_peer(12, where="B")}


def stay_silent(path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(watch, "MOST_DETAILS", 1)
    return describe_hang(SILENT, 100)


# A name, the type of the error (None: the text is returned or logged), what leads to it, and the whole text.
ROWS = [
    ("ranks that differ", None, differ,
     "the ranks differ, and nothing has been trained:\n"
     "  options: --seed: 42 on ranks 0-1 (rank 0 on node0); 7 on rank 2 (node2)\n"
     "  and ranks 3-5 differ in further ways\n"
     "make them equal on all ranks; docs/reference/running.md lists what may differ"),
    ("missing ranks", RunError, meet_nobody,
     "rank 1 (node0), ranks 2-3 (node 1, no rank has joined), ranks 4-5 (node 2, no rank has joined) (5 of 6 ranks"
     " missing) did not join within 0.01 s (--start-timeout): never started, or exited early; see the output there"),
    ("no rendezvous", RunError, meet_nowhere,
     "no rendezvous at node0, port 29500 (--start-timeout 9): timed out"),
    ("no connection", RunError, wait_for_ranks,
     "ranks 1-2 did not connect to rank 0 on node0, port 7"),
    ("sharing of rows", ValueError, lambda path, patch: check_sharing(6, 4),
     "--context-parallel 4: cannot divide 6 ranks into groups of 4: give a number that divides the number of ranks, or"
     " change the number of ranks"),
    ("copies of the model", ValueError, lambda path, patch: count_shards(8, 8, 3),
     "--sharding hybrid: cannot divide 8 ranks into several copies of the model on 3 ranks each (--shard-size); give a"
     " --shard-size of at least 2 that divides the number of ranks, or use --sharding full"),
    ("open files", ValueError, open_few_files,
     "2,048 ranks need up to 4,432 open files in a process, and the hard limit is 4,096 (ulimit -Hn): raise it to at"
     " least 4,432, in limits.conf, with systemd's LimitNOFILE or with the container's nofile limit"),
    ("cache of --compile", ValueError, cache_in_a_file,
     "--compile: cannot create DIR/file/cache, the cache of compiled code: [Errno 20] Not a directory:"
     " 'DIR/file/cache'; set TORCHINDUCTOR_CACHE_DIR to another directory"),
    ("locked directory", RunError, lock_twice,
     "--output-dir DIR is in use by the run with pid 12 on node7, started 2026-01-01: wait for it to end, or choose"
     " another directory. If you are sure that run is gone, remove DIR/.lock"),
    ("lock left behind", None, take_lock_over,
     "DIR/.lock names the run with pid 12 on node7, started 2026-01-01: waiting 0 s to see if that run is alive\n"
     "warning: DIR/.lock: took over the lock that the run with pid 12 on node7, started 2026-01-01 left behind"),
    ("removed directory", None, lambda path, patch: lose_directory(path, patch, is_moved=False),
     "--output-dir DIR/run was removed while the run was writing to it; writing has stopped. Start again from another"
     " directory's checkpoint (--resume), or from the beginning"),
    ("moved directory", None, lambda path, patch: lose_directory(path, patch, is_moved=True),
     "--output-dir DIR/run was moved to DIR/other while the run was writing to it; writing has stopped. Start again"
     " after moving it back, or with --output-dir set to its new path"),
    ("dead rank", None, lambda path, patch: describe_death(3, make_peer(13)),
     "rank 3 (pid 13 on node1) died without a report, last seen in step 5: it crashed or was killed, perhaps because"
     " it ran out of memory"),
    ("silent ranks", None, stay_silent,
     "rank 0 (pid 10 on node1) has sent no heartbeat for 61 s, last seen in step 5; nor have ranks 1-2: stopped, or cut"
     " off from the network; stack traces of the responsive ranks are in errors/"),
    ("no progress", None, lambda path, patch: describe_hang(STUCK, 100),
     "all ranks are alive, but some made no progress for 61 s (--hang-timeout): rank 0 in A; ranks 1-2 in B; stack"
     " traces of the responsive ranks are in errors/"),
    ("two deaths", None, lambda path, patch: choose_cause([make_death(5), make_death(4)]).text,
     "error: rank 5 died; and so did rank 4"),
    ("error of another rank", None, lambda path, patch: Cause(ExitCode.FAILED, "no", 2, "node1", 3).text,
     "error: rank 2 on node1: no"),
    ("unexpected error", None, lambda path, patch: describe_error(KeyError("x"), "step 3")[1],
     "failed in step 3: KeyError: 'x'"),
    ("out of memory", None, lambda path, patch: describe_error(MemoryError(), "step 3")[1],
     "out of memory in step 3: lower --max-tokens-per-gpu, use --activation-checkpointing full, or use more GPUs"
     " (MemoryError)"),
    ("two stops", None, lambda path, patch: stop_reason(Flag.SIGTERM | Flag.STOP_FILE)[1],
     "SIGTERM and the stop file"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "call", "text"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_whole_texts(kind, call, text, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    caplog.set_level("WARNING", logger="mini_trainer")
    assert read_words(kind, lambda: call(tmp_path, monkeypatch), caplog, folder=tmp_path) == text
