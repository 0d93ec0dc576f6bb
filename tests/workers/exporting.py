"""Exports a model from every rank's shards: exporting.py MODEL EXPORT DTYPE MAX_BYTES FAULT

Files of weights have at most MAX_BYTES. FAULT is none, or open, write, hash or sync: rank 0 fails there, on the way.
Each rank writes how it ended to EXPORT.rank_N.
"""

import os
import sys
from pathlib import Path

import torch
from exports import export

from mini_trainer.distributed.ending import RunError
from mini_trainer.distributed.world import World, init_world
from mini_trainer.run import export as exporting
from mini_trainer.run import write_pool
from mini_trainer.run.export import WeightStream

MODEL, EXPORT = map(Path, sys.argv[1:3])
DTYPE, FAULT = getattr(torch, sys.argv[3]), sys.argv[5]


def failing(function, *, number: int, message: str):
    """`function`, whose call of this number, and every later one, is an error."""
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) >= number:
            raise OSError(28, message)
        return function(*args, **kwargs)

    return call


def inject(fault: str) -> None:
    message = f"injected in {fault}"
    if fault == "open":
        opened, fails = os.open, failing(os.open, number=2, message=message)
        os.open = lambda path, *args, **kwargs: (fails if str(path).endswith(".safetensors") else opened)(
            path, *args, **kwargs
        )
    elif fault == "write":
        os.pwrite = failing(os.pwrite, number=9, message=message)
    elif fault == "hash":
        write_pool.HashedFile.read_back = failing(None, number=1, message=message)
        WeightStream.sort = lambda self, groups: range(len(groups))  # the model's order, not the files'
    elif fault == "sync":
        os.fsync = failing(os.fsync, number=2, message=message)
    else:
        assert fault == "none", f"unknown fault {fault}"


def main() -> None:
    world: World = init_world()
    exporting.MAX_SHARD_BYTES = int(sys.argv[4])
    if world.rank == 0:
        inject(FAULT)
    try:
        export(MODEL, EXPORT, world, dtype=DTYPE)
        ending = "done"
    except RunError as error:
        ending = f"{error.code.name}: {error}"
    EXPORT.with_suffix(f".rank_{world.rank}").write_text(ending)


main()
