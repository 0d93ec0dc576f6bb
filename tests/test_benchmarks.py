"""The benchmarks of the training step still run, at their smallest size, and find what they are to find."""

import sys

import pytest
from processes import ROOT, run

pytestmark = pytest.mark.slow


def read_table(text: str, first_column: str) -> dict[str, list[str]]:
    """The rows of the first table of `text` whose header begins with `first_column`, by their first cell."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = cells
    return rows


def test_the_training_step_is_compared_on_equal_batches_and_mixed_samples_are_found():
    done = run([sys.executable, ROOT / "benchmarks/train_step.py", "--shape", "nano", "--batch-size", "8",
                "--micro-batch-size", "4", "--max-tokens-per-gpu", "512", "--num-steps", "1", "--num-rounds", "1",
                "--learning-rate", "1e-2", "--in-one-process"])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_table(done.stdout, "method")
    apart = {method: cells[-1] for method, cells in rows.items()}
    assert {method for method, answer in apart.items() if answer != "yes"} == {"trl-wrapped"}, apart
    losses = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines() if line.startswith("  ")}
    exact = [losses[method] for method in ("ours", "padded", "rebalanced", "trl")]
    for before, *after in zip(*exact, strict=True):
        assert all(abs(float(loss) - float(before)) <= 2e-4 for loss in after), exact
    assert losses["ours"][-1] != losses["ours"][0], "nothing was trained"


def test_scaling_trains_the_same_on_two_processes_and_simulates_more():
    done = run([sys.executable, ROOT / "benchmarks/scaling.py", "--measured-shape", "nano", "--processes", "1", "2",
                "--num-steps", "1", "--max-tokens", "512", "--batch-size", "8", "--num-repeats", "1", "--gpus", "8",
                "64", "--num-batches", "1", "--lengths", "chats", "--samples-per-gpu", "8"])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_table(done.stdout, "ranks")
    assert set(rows) == {"1", "2"} and float(rows["2"][2]) < 1e-5, rows
    simulated = read_table(done.stdout, "GPUs")
    for cells in simulated.values():
        shares = [float(cell.strip("%")) for cell in (cells[2], cells[3], cells[5], cells[6])]
        assert abs(sum(shares) - 100) < 0.2, simulated
