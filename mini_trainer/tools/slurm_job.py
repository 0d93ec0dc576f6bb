"""Helpers for the batch script of a run under SLURM (examples/clusters/multi_node.sbatch).

python -m mini_trainer.tools.slurm_job start OPTIONS...         # once, before the ranks: prints --output-dir
python -m mini_trainer.tools.slurm_job end OUTPUT_DIR STATUS    # after them: exits with 0 to have the job requeued
"""

import json
import os
import sys
from pathlib import Path

from mini_trainer.data.stores.disk import write_text
from mini_trainer.distributed.command import COMMAND
from mini_trainer.distributed.ending import EXIT_FILE, ExitCode, ending_with_message
from mini_trainer.distributed.lock import REQUEUES_FILE
from mini_trainer.distributed.messages import say
from mini_trainer.options import TrainOptions
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.reading import read_fields

MOST_IDLE = 3  # requeues in a row that may bring no step
# Of requeues.json; `step` is that of the newest checkpoint, `num_idle` counts requeues in a row with that same one.
REQUEUES = {"job": str, "step": int, "num_idle": int}


def start(argv: list[str]) -> str:
    """Reads the options, and returns --output-dir. Removes exit.json, which is an earlier start's."""
    os.environ[COMMAND] = json.dumps([os.getpid(), ["", "train"], True])  # messages name the ranks' command
    output_dir = Path(parse_options(TrainOptions, argv).output_dir)
    (output_dir / EXIT_FILE).unlink(missing_ok=True)
    return str(output_dir)


def end(output_dir: Path, status: int) -> bool:
    """Whether the job is to be requeued, after srun has returned `status`. Says why not, of a run that was stopped."""
    ended = output_dir / EXIT_FILE
    if status != ExitCode.SAVED_AND_REQUEUE and ended.exists():
        status = read_fields(ended, {"code": int}, written_by="train.py")["code"]
    if status != ExitCode.SAVED_AND_REQUEUE:
        return False
    names = [path.name.removeprefix("step_") for path in output_dir.glob("checkpoints/step_*")]
    job, step = os.environ["SLURM_JOB_ID"], max((int(name) for name in names if name.isdecimal()), default=0)
    path, before = output_dir / REQUEUES_FILE, {}
    if path.exists():
        before = read_fields(path, REQUEUES, written_by="this script", advice="; remove it")
    is_idle = (before.get("job"), before.get("step")) == (job, step)
    num_idle = before["num_idle"] + 1 if is_idle else 0 if step else 1
    if num_idle > MOST_IDLE:
        say(
            f"error: not requeued again: {MOST_IDLE} requeues have brought no step after step {step}: this job was"
            f" signalled to end before it had saved one. Raise its time limit (sbatch --time), or lower the seconds of"
            " --signal to those of one step and one checkpoint, and submit it again: it resumes",
            is_error=True,
        )
        path.unlink()
        return False
    output_dir.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"job": job, "step": step, "num_idle": num_idle}) + "\n")
    idle = f"; requeue {num_idle} of {MOST_IDLE} without a new step" if num_idle else ""
    say(f"requeueing this job, to continue after step {step}{idle}", is_error=True)
    return True


def main(argv: list[str]) -> None:
    with ending_with_message(when_interrupted="interrupted"):
        match argv:
            case ["start", *options]:
                print(start(options))
            case ["end", output_dir, status]:
                sys.exit(0 if end(Path(output_dir), int(status)) else 1)
            case _:
                sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
