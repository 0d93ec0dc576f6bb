"""The benchmarks still run, at their smallest size, and find what they are to find."""

from pathlib import Path

import numpy as np
import pytest
import scaling
from forked import succeed
from harness import build_state, count_state_bytes, make_batch, make_options
from tiny_models import FAMILIES, VOCAB_SIZE, save_model

from mini_trainer.distributed.world import World
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.step import train_step


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


@pytest.mark.wide
@pytest.mark.slow
def test_the_training_step_is_compared_on_equal_batches_and_mixed_samples_are_found():
    done = succeed(0, "benchmarks/train_step.py", "--shape", "nano", "--batch-size", "8",
                "--micro-batch-size", "4", "--max-tokens-per-gpu", "512", "--num-steps", "1", "--num-rounds", "1",
                "--learning-rate", "1e-2", "--in-one-process")  # fmt: skip
    rows = read_table(done.stdout, "method")
    apart = {method: cells[-1] for method, cells in rows.items()}
    assert {method for method, answer in apart.items() if answer != "yes"} == {"trl-wrapped"}, apart
    losses = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines() if line.startswith("  ")}
    exact = [losses[method] for method in ("ours", "padded", "rebalanced", "trl")]
    for before, *after in zip(*exact, strict=True):
        assert all(abs(float(loss) - float(before)) <= 2e-4 for loss in after), exact
    assert losses["ours"][-1] != losses["ours"][0], "nothing was trained"


def test_what_benchmarks_train_is_the_programs_step_and_what_they_count_is_16_bytes_a_weight(
    tmp_path: Path, world: World
):
    options = make_options(activation_checkpointing="none", compute_dtype="float32")
    state = build_state(save_model(FAMILIES["qwen3"], tmp_path / "model"), options, world)
    random = np.random.default_rng(0)
    rows = [[random.integers(3, VOCAB_SIZE, length) for length in lengths] for lengths in ((7, 12), (5,))]
    losses = [
        train_step(state, make_batch(rows, step=k, world=world), choose_step_options(options), lr=1e-2).loss_sum
        for k in range(3)
    ]
    batch = make_batch(rows, world=world)
    assert batch.num_loss_tokens == 6 + 11 + 4 and [len(m.row.seq_lengths) for m in batch.micro_batches] == [2, 1]
    assert losses[0] > losses[1] > losses[2], losses
    params, buffers = list(state.model.parameters()), list(state.model.buffers())
    others = sum(buffer.nbytes for buffer in buffers) + 4 * len(params)  # AdamW counts every parameter's steps
    assert count_state_bytes(state) - others == 16 * sum(param.numel() for param in params)


COSTS = scaling.Costs(fixed=1e-3, per_token=1e-6, per_loss_token=2e-6, per_pair=1e-9)
NETWORK = scaling.Network(node_bandwidth=3e11, network_bandwidth=1e11, node_latency=1e-6, network_latency=1e-5)


def simulate(lengths: list[int], num_ranks: int, *, of_block: int = 1000) -> scaling.Simulated:
    communication = scaling.Communication([of_block] * 4, 5000, num_ranks, reduce_every=True, forward_share=1 / 3)
    return scaling.simulate_step(
        np.array(lengths), share=0.5, num_ranks=num_ranks, max_tokens=1000, costs=COSTS, network=NETWORK,
        communication=communication,
    )  # fmt: skip


def test_a_simulated_step_on_one_gpu_is_its_computing():
    lengths = [300, 200, 900]
    step = simulate(lengths, 1)
    assert step.idle == step.exposed == 0 and step.num_micro_batches == 2
    expected = 2 * 1e-3 + 1400 * (1e-6 + 0.5 * 2e-6) + 1e-9 * sum(length**2 / 2 for length in lengths)
    assert step.total == pytest.approx(expected)


def test_simulated_ranks_wait_for_the_costliest_and_for_a_network_that_computing_cannot_hide():
    assert simulate([500] * 16, 16).idle == pytest.approx(0)
    assert simulate([500] * 15 + [1000], 16).idle > 0
    hidden, shown = (simulate([500] * 16, 16, of_block=n) for n in (1000, 10_000_000))
    # Four collectives over two nodes, each with 7 hops within a node and one between them; 15 of 16 bytes travel.
    assert hidden.exposed == pytest.approx(4 * (7 * 1e-6 + 1e-5) + 15 / 16 * 6 * (1000 + 5000) / 1e11)
    assert shown.exposed > 10 * hidden.exposed and scaling.name_limit(shown) == "communication"


def test_fitted_costs_are_those_that_made_the_times_and_never_negative():
    random = np.random.default_rng(0)
    terms = np.array([scaling.count_terms(random.integers(1, 500, 5), n) for n in range(0, 200, 10)])
    for costs in (np.array([1e-3, 1e-6, 2e-6, 1e-9]), np.array([1e-3, 1e-6, 0, 1e-9])):
        np.testing.assert_allclose(scaling.fit_nonnegative(terms / (terms @ costs)[:, None]), costs, atol=1e-12)
    assert (scaling.fit_nonnegative(terms / (terms @ [1e-3, 1e-6, -1e-7, 1e-9])[:, None]) >= 0).all()


@pytest.mark.slow
@pytest.mark.wide
def test_the_sweep_of_types_tells_exact_ones_from_those_that_are_refused_and_those_that_are_not_built():
    types = ["bloom", "lfm2", "bart", "gemma4_assistant"]
    done = succeed(0, "benchmarks/architectures.py", "--seconds", "600", "--types", *types)
    outcomes = dict(line.split(": ")[:2] for line in done.stdout.splitlines() if line.split(":")[0] in types)
    assert outcomes == {"bloom": "exact", "lfm2": "exact", "bart": "refused", "gemma4_assistant": "not built"}
    assert done.stdout.rstrip().endswith("4 types: 2 exact, 1 refused, 1 not built")
