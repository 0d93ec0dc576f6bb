"""Triton's kernels, ours and liger-kernel's, in Triton's interpreter: as exact as the eager code, compiled for GPUs."""

import os
import sys

import pytest
from breadth import long
from heavy import need
from processes import ROOT, run

need("triton")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [("updates",), ("rotations",), long(("llama", "mixtral"))])
def test_a_kernel_is_as_exact_as_the_eager_code_for_both_types_and_odd_sizes(parts):
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = run([sys.executable, "benchmarks/kernel_errors.py", *parts], env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
