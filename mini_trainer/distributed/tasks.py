"""The number of this process among those that torchrun or srun started; torch is not imported."""

import os

NAMES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))  # torchrun's and srun's variables


def find_task() -> tuple[int, int] | None:
    """This process's number, from 1, and the number of processes; None if there is only one."""
    for names in NAMES:
        number, count = (os.environ.get(name, "") for name in names)
        if number.isdecimal() and count.isdecimal() and int(count) > 1:
            return int(number) + 1, int(count)
    return None
