"""The time left that a run shows: on a clock of the test's own, against what the run then takes."""

import random
from functools import partial

import pytest

from mini_trainer.options import ValidationOptions
from mini_trainer.run.due import count_validations, is_validation_due
from mini_trainer.run.training_log import TimeLeft
from mini_trainer.sampler import RunPosition

BATCH_SIZE = 8


def make_options(every: int | None, *, at_epoch: bool = False) -> ValidationOptions:
    return ValidationOptions(validation_data_path=("d",), validate_every_steps=every, validate_at_epoch=at_epoch)


def list_due(options: ValidationOptions, *, num_steps: int, epoch_length: int) -> list[int]:
    """The steps after which train.py validates."""
    positions = [RunPosition(step, step * BATCH_SIZE, num_in_step=BATCH_SIZE) for step in range(1, num_steps + 1)]
    return [
        at.step
        for at in positions
        if is_validation_due(at, options, epoch_length=epoch_length, is_last=at.step == num_steps)
    ]


@pytest.mark.parametrize(("every", "epoch_length"), [(7, None), (None, 24), (None, 100), (100, None), (None, None)])
def test_the_validations_to_come_are_those_that_train_makes(every, epoch_length):
    options, num_steps = make_options(every, at_epoch=epoch_length is not None), 40
    due = list_due(options, num_steps=num_steps, epoch_length=epoch_length or 1)
    for step in range(1, num_steps + 1):
        found = count_validations(
            step, options, num_steps=num_steps, steps_per_epoch=(epoch_length or BATCH_SIZE) / BATCH_SIZE
        )
        assert found == sum(other >= step for other in due), step
    assert count_validations(1, ValidationOptions(), num_steps=num_steps, steps_per_epoch=3.0) == 0


@pytest.mark.parametrize("first_step", [0, 500])
@pytest.mark.parametrize("first_seconds", [(90.0, 5.0, 1.5), (1.0, 1.0, 1.0)])  # the first steps compile, or do not
@pytest.mark.parametrize("compile_seconds", [0.0, 90.0])  # of the validation before the first step
@pytest.mark.parametrize(("every", "validation_seconds"), [(5, 6.0), (100, 30.0), (None, 0.0)])
def test_the_first_estimate_is_near_what_the_run_takes(
    first_step, first_seconds, every, validation_seconds, compile_seconds
):
    """Steps of 0.4 to 1.6 s, each as its batch is long; a first estimate after at most ten of them."""
    draw, num_steps = random.Random(0), first_step + 400
    options = make_options(every)
    seconds = {step: draw.uniform(0.4, 1.6) for step in range(first_step + 1, num_steps + 1)}
    seconds |= {first_step + 1 + i: value for i, value in enumerate(first_seconds)}
    due = set(list_due(options, num_steps=num_steps, epoch_length=1)) if every else set()
    count = partial(count_validations, options=options if every else ValidationOptions(), num_steps=num_steps,
                    steps_per_epoch=1.0)  # fmt: skip
    # Without a backward a validation takes a third less than so many steps, which take a second.
    left = TimeLeft(first_step=first_step, num_steps=num_steps, count_validations=count,
                    validation_steps=1.5 * validation_seconds)  # fmt: skip
    left.validation_done(validation_seconds + compile_seconds)  # before the first step
    now, shown = 1000.0, {}
    for step in range(first_step + 1, num_steps + 1):
        now += seconds[step]
        shown[step] = (left.after(step, now), now)
        if step in due:
            now += validation_seconds
            left.validation_done(validation_seconds)
    known = [step for step, (estimate, _) in shown.items() if estimate is not None]
    assert known == list(range(known[0], num_steps + 1)) and known[0] - first_step <= 10
    for step in known:
        estimate, then = shown[step]
        assert estimate == pytest.approx(now - then, rel=0.3, abs=0.5), step
    assert shown[num_steps][0] == (validation_seconds if every else 0.0)


def test_slow_steps_are_timed_sooner_and_a_run_without_an_end_has_no_time_left():
    left = TimeLeft(first_step=0, num_steps=10, count_validations=lambda step: 0)
    assert [left.after(step, 40.0 * step) for step in range(1, 6)] == [None, None, None, 240.0, 200.0]
    endless = TimeLeft(first_step=0, num_steps=None, count_validations=lambda step: 0)
    assert [endless.after(step, 40.0 * step) for step in range(1, 10)] == [None] * 9
