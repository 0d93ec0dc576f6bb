"""The soak tells a killed run that ends as it should from another; and a part of what fault_table.py injects."""

import dataclasses
from collections import Counter

import pytest
import soak
from fault_table import FAULTS, Run, Table, make_inputs, no_valid_checkpoint, suffer_all
from in_process import train_forked
from processes import ENV
from soak import Layout, Soak, Tally

pytestmark = pytest.mark.slow

NUM_STEPS = 40


@pytest.fixture
def soaking(tmp_path, monkeypatch) -> Soak:
    monkeypatch.setattr(soak, "NUM_STEPS", NUM_STEPS)
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    return Soak(tmp_path, seed=1, starts="forked", layouts=[Layout(1, False)])


def run_once(soaking: Soak, number: int, *, num_kills: int) -> Counter[str]:
    """What one more run, with at most so many kills, adds to the counts."""
    before = soaking.total().counts
    last = before["kills"] + num_kills
    soaking.run_once(number, Layout(1, False), lambda: soaking.total().counts["kills"] < last)
    return soaking.total().counts - before


@pytest.mark.wide
def test_only_a_run_that_is_the_undisturbed_one_is_passed(soaking):
    counts = run_once(soaking, 0, num_kills=2)
    assert counts["runs"] == 1 and counts["kills"] > 0 and counts["bad"] == counts["mismatches"] == 0, counts
    right = soaking.references[1, "text"]
    other_rows = [*right.rows[:-1], right.rows[-1] | dict(loss=right.rows[-1]["loss"] + 1e-9)]
    soaking.references[1, "text"] = dataclasses.replace(right, rows=other_rows)
    assert run_once(soaking, 1, num_kills=0)["mismatches"] == 1
    soaking.references[1, "text"] = dataclasses.replace(right, files=dict.fromkeys(right.files, "another"))
    assert run_once(soaking, 2, num_kills=0)["mismatches"] == 1


def test_a_start_from_an_older_checkpoint_or_from_none_is_bad(soaking, tmp_path):
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
