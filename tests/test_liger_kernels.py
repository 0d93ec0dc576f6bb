"""liger-kernel's own kernels, in Triton's interpreter: the loss and gradients of transformers' code."""

import os
import sys

import pytest
from heavy import need
from processes import ROOT, run

need("triton")


@pytest.mark.long
@pytest.mark.slow
def test_they_compute_what_transformers_computes():
    """A dense model, and one whose experts keep their own code."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = run([sys.executable, "benchmarks/liger_kernels.py", "llama", "mixtral"], env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["llama", "mixtral"]
