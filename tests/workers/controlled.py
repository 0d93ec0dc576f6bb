"""A run without a model: RunControl on ranks whose steps are short sleeps, steered by files.

    RANK=r WORLD_SIZE=n LOCAL_WORLD_SIZE=n LOCAL_RANK=r python controlled.py DIR HANG_TIMEOUT MAX_SECONDS

DIR/rank_{r} names what that rank does next: raise, refuse, leak, break_the_watch, stand_still, save_slowly,
finish.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from mini_trainer.distributed.ending import ExitCode, stop_reason
from mini_trainer.distributed.lifeline import Address
from mini_trainer.distributed.watch import RunControl

directory, hang_timeout, max_seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
rank, output_dir = int(os.environ["RANK"]), directory / "run"
control = RunControl(hang_timeout=hang_timeout, max_seconds=max_seconds or None)
control.start()
order, lifeline = directory / f"rank_{rank}", directory / "lifeline.json"
(directory / f"pid_{rank}").write_text(str(os.getpid()))


def take_part() -> None:
    while (directory / "wait_at_the_start").exists():
        time.sleep(0.02)
    if rank == 0:
        control.files.lock_directory(output_dir)
        (directory / "aside").write_text(json.dumps(asdict(control.lifeline.listen())))
        (directory / "aside").rename(lifeline)
    while not lifeline.exists():
        time.sleep(0.02)
    if int(os.environ["WORLD_SIZE"]) > 1:
        control.lifeline.connect(Address(**json.loads(lifeline.read_text())))
    control.files.own(output_dir)
    (output_dir / "params.json").touch()
    control.start_loop()
    for step in range(1, 1_000_000):
        time.sleep(0.02)
        control.progress(f"step {step}")
        what = order.read_text() if order.exists() else ""
        if what == "raise":
            raise RuntimeError("the third wheel came off")
        if what == "refuse":
            raise ValueError("row 7 is bad")
        if what == "leak":
            raise ValueError(f"the key {os.environ['TEST_API_KEY']} is wrong")
        if what == "break_the_watch":
            control.watch.call(lambda: 1 / 0)
            time.sleep(1000)
        if what == "stand_still":
            time.sleep(1000)
        if what == "save_slowly":
            with control.slow("a slow phase"):
                time.sleep(hang_timeout + 3)
            order.write_text("finish")
        control.step_done(step)
        (directory / f"steps_{rank}").write_text(str(step))
        stop = stop_reason(control.flags())
        if stop is not None:
            control.finish(stop[0], f"stopped: {stop[1]}")
        if what == "finish":
            control.finish(ExitCode.DONE, "done")


try:
    take_part()
except BaseException as error:
    control.fail(error)
