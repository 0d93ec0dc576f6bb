"""Our Triton kernels, in Triton's interpreter: as exact as the eager code, and compiled for GPUs."""

import sys

import pytest
from heavy import need
from processes import run

need("triton")


@pytest.mark.slow
def test_an_update_is_as_exact_as_the_eager_one_for_both_types_and_odd_sizes():
    done = run([sys.executable, "benchmarks/kernel_errors.py"])
    assert done.returncode == 0, done.stdout + done.stderr
