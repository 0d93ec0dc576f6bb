"""Results come in order whatever their processes do, and no death of a worker is waited for."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from mini_trainer.data.rows.worker_pool import THREADS, run_in_order

BIG = b"x" * (1 << 20)  # more than a pipe holds
NUM_ITEMS = 200


def answer_slowly(item: tuple[int, bytes]) -> tuple[int, bytes]:
    number, payload = item
    time.sleep(0.003 * (number % 3))
    return number, payload


def fail_at_50(item: tuple[int, bytes]) -> tuple[int, bytes]:
    if item[0] == 50:
        raise ValueError("item 50 cannot be used")
    return answer_slowly(item)


def assert_nothing_is_left() -> None:
    assert multiprocessing.active_children() == []
    assert not any(thread.name.startswith(THREADS) for thread in threading.enumerate())


@pytest.mark.parametrize("payload", [b"", BIG], ids=["small", "big"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_come_in_order(num_workers, payload):
    taken = []

    def make_items():
        for number in range(NUM_ITEMS):
            taken.append(number)
            yield number, payload

    for i, (item, result) in enumerate(run_in_order(answer_slowly, make_items(), num_workers=num_workers)):
        assert item == result == (i, payload)
        assert len(taken) <= i + 1 + 2 * num_workers, "items wait in their source, and not in memory"
    assert i == NUM_ITEMS - 1
    assert_nothing_is_left()


@pytest.mark.parametrize("payload", [b"", BIG], ids=["small", "big"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_killed_from_outside_ends_everything(which, payload):
    """At any moment: at work, idle because the results are not taken, or while it hands a result over."""
    for moment in (0, 1, 7):
        done = []
        with pytest.raises(ValueError, match=r"worker process .*--num-proc"):
            for item, _ in run_in_order(answer_slowly, ((i, payload) for i in range(NUM_ITEMS)), num_workers=2):
                done.append(item[0])
                if item[0] == moment:
                    time.sleep(0.02 * which)
                    os.kill(sorted(child.pid for child in multiprocessing.active_children())[which], signal.SIGKILL)
        assert done == list(range(len(done))) and moment in done
        assert_nothing_is_left()


def test_what_a_worker_raises_is_raised_with_its_traceback():
    with pytest.raises(ValueError, match="item 50") as error:
        list(run_in_order(fail_at_50, ((i, b"") for i in range(NUM_ITEMS)), num_workers=2))
    assert "fail_at_50" in error.value.__notes__[0]
    assert_nothing_is_left()


def test_results_that_nobody_waits_for_are_given_up():
    results = run_in_order(answer_slowly, ((i, BIG) for i in range(NUM_ITEMS)), num_workers=2)
    next(results)
    results.close()
    assert_nothing_is_left()
