"""The soak tells a start from the newest checkpoint from others; and a part of what fault_table.py injects."""

import dataclasses

import pytest
from fault_table import FAULTS, Run, Table, make_inputs, no_valid_checkpoint, suffer_all
from in_process import train_forked
from soak import Layout, Soak, Tally

pytestmark = pytest.mark.slow


def test_a_start_from_an_older_checkpoint_or_from_none_is_bad(tmp_path):
    soaking = Soak(tmp_path, seed=1, starts="forked", layouts=[Layout(1, False)])

    class Said:
        log = tmp_path / "run.log"

    for text, is_bad in [
        ("resuming from run/checkpoints/step_10: 10 steps", False),
        ("", False),  # killed before it said so
        ("resuming from run/checkpoints/step_5: 5 steps", True),
        ("starting from step 0 in run", True),
        ("step_10 is not valid: a file is missing", True),
    ]:
        Said.log.write_text(text)
        tally = soaking.tallies[1, "text"] = Tally()
        soaking.check_start(Said, tally, expected=10, begun=12)
        assert tally.counts["bad"] == is_bad, text


NUM_FAULTY_STEPS = 30
NAMES = [  # none that needs a disk of its own, and with it root
    "kill -9 of one rank, in a save",
    "SIGTERM in an asynchronous save",
    "file too large, one rank",
]


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> dict[str, list[str]]:
    """What was not as promised, by fault: one run that suffers them all, and then comes to its end."""
    root = tmp_path_factory.mktemp("faults")
    run = Run(2, root, root / "run", root / "reference", make_inputs(root), num_steps=NUM_FAULTY_STEPS, is_forked=True)
    train_forked(
        2, **run.inputs, output_dir=run.reference, max_steps=NUM_FAULTY_STEPS, keep_checkpoints=NUM_FAULTY_STEPS
    )
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
