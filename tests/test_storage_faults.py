"""Faults of writing and of starting again, in the real program on two ranks: a part of what fault_table.py injects."""

import dataclasses

import pytest
from fault_table import FAULTS, Run, Table, make_inputs, no_valid_checkpoint, suffer_all
from in_process import train_forked

pytestmark = pytest.mark.slow

NUM_STEPS = 30
NAMES = [  # none that needs a disk of its own, and with it root
    "kill -9 of one rank, in a save",
    "SIGTERM in an asynchronous save",
    "file too large, one rank",
]


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> dict[str, list[str]]:
    """What was not as promised, by fault: one run that suffers them all, and then comes to its end."""
    root = tmp_path_factory.mktemp("faults")
    run = Run(2, root, root / "run", root / "reference", make_inputs(root), num_steps=NUM_STEPS, is_forked=True)
    train_forked(2, **run.inputs, output_dir=run.reference, max_steps=NUM_STEPS, keep_checkpoints=NUM_STEPS)
    run.output_dir.mkdir()
    table = Table()
    faults = [dataclasses.replace(fault, prompt=False) for fault in FAULTS if fault.name in NAMES]  # no test of times
    suffer_all(run, faults, table)
    no_valid_checkpoint(run, table)
    return table.problems


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, "to the end", "every checkpoint is damaged"])
def test_the_run_goes_on_where_it_was_with_the_same_numbers(name, problems):
    assert problems[f"{name}, 2 ranks"] == []
