"""The benchmarks still run, at their smallest size, and find what they are to find."""

from pathlib import Path
from types import SimpleNamespace

import layouts
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


@pytest.mark.slow
@pytest.mark.wide
def test_classifiers_are_timed_against_transformers_trainer():
    done = succeed(0, "benchmarks/classification.py", "--num-samples", "8", "--batch-size", "4",
                "--num-rounds", "1")  # fmt: skip
    rows = read_table(done.stdout, "method")
    assert set(rows) == {"ours, packed", "Trainer, padded", "Trainer, group_by_length"}
    assert all(float(cells[1]) > 0 for cells in rows.values())


@pytest.mark.slow
@pytest.mark.wide
def test_scaling_runs_at_its_smallest_size():
    done = succeed(0, "benchmarks/scaling.py", "--measured-shape", "nano", "--processes", "1",
                "--num-steps", "1", "--max-tokens", "512", "--batch-size", "8", "--num-repeats", "1", "--gpus", "8",
                "64", "--num-batches", "1", "--lengths", "chats", "--samples-per-gpu", "8")  # fmt: skip
    assert set(read_table(done.stdout, "ranks")) == {"1"}
    assert set(read_table(done.stdout, "GPUs")) == {"8", "64"}


def test_layouts_are_what_fits_and_what_travels():
    costs = scaling.Costs(fixed=5e-3, per_token=1e-4, per_loss_token=1e-5, per_pair=1e-9)
    model = layouts.LayoutModel(num_heads=12, num_kv_heads=4, head_size=64, num_blocks=2, block_parameters=10**9,
                                other_parameters=10**8, costs=costs,
                                memory=dict.fromkeys((1, 4, 8), (1e9, 1e6)))  # fmt: skip
    args = SimpleNamespace(gpus=64, memory_gb=80, node_bandwidth=300, nic_bandwidth=45)
    network = scaling.Network(3e11, 1.6e11, 3e-6, 1e-5)
    lengths = layouts.draw_long(100_000, 3_000_000)
    assert lengths.max() == 100_000 and 3_000_000 <= lengths.sum() < 3_100_000
    alone, quarters, copies, eighths = (
        layouts.lay_out_step(model, layouts.Layout(*sizes), lengths, network=network, args=args)
        for sizes in ((1, 64), (4, 64), (4, 8), (8, 64))
    )
    assert alone.step is None and alone.num_bytes == pytest.approx(16 * 2.1e9 / 64 + 1e9 + 1e6 * 100_000)
    assert "not fit" in layouts.describe_layout(alone, False, 64)
    assert quarters.num_bytes == pytest.approx(16 * 2.1e9 / 64 + 1e9 + 1e6 * layouts.MOST_TOKENS)
    assert copies.num_bytes - quarters.num_bytes == pytest.approx(16 * 2.1e9 * (1 / 8 - 1 / 64))
    # 12 and 4 heads divide by 4; for 8 ranks there are 16 of both.
    assert eighths.exchanged / quarters.exchanged == pytest.approx((7 / 8 * 32) / (3 / 4 * 16))
    assert eighths.step.computing > quarters.step.computing
    for found in (quarters, copies, eighths):
        assert found.step.total * found.tokens_per_second * 64 == pytest.approx(lengths.sum())
        assert 0 < found.exchanged < found.step.exposed


@pytest.mark.wide
@pytest.mark.slow
def test_osft_cost_measures_steps_and_bytes_with_the_square_form_and_without():
    done = succeed(0, "benchmarks/osft_cost.py", "--square", "--square-layers", "1", "--ratios", "0.25",
                "--hidden-size", "64", "--intermediate-size", "128", "--num-layers", "2", "--num-heads", "4",
                "--vocab-size", "512", "--num-steps", "1", "--num-micro-batches", "1", "--tokens", "256")  # fmt: skip
    planned = read_table(done.stdout, "compute dtype, R")
    assert all(float(cells[2].rstrip("%")) > 1 for cells in planned.values()), planned
    rows = read_table(done.stdout, "kind")
    assert set(rows) == {"plain", "OSFT, R = 0.25", "OSFT, R = 0.25, square as tall"}
    assert all(float(cells[-1]) <= 1e-5 for cells in rows.values()), rows


@pytest.mark.slow
@pytest.mark.wide
def test_continual_learning_trains_with_every_method_and_goes_on_from_its_exports(tmp_path: Path):
    succeed(0, "benchmarks/continual_learning.py", "--output-dir", tmp_path, "--num-held-out",
                "4", "--num-problems", "60", "--vocab-size", "300", "--hidden-size", "32", "--num-layers", "2",
                "--steps-a", "2", "--steps", "2", "--batch-size", "2", "--learning-rates", "1e-3", "--num-workers", "1",
                "--methods", "full", "full linear", "LoRA 32", "OSFT weights 0.25",
                "OSFT activations 0.5", "OSFT + masked-kl")  # fmt: skip
    assert len(read_table((tmp_path / "results.md").read_text(), "method")) == 6
    assert (tmp_path / "LoRA 32 @ 1e-3 @ c" / "model.safetensors").exists(), "no third task from LoRA's export"


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
    in_the_open = NETWORK.seconds(2 * 1000, 16) + NETWORK.seconds(4 * 1000, 16)
    in_the_open += NETWORK.seconds(2 * 5000, 16) + NETWORK.seconds(4 * 5000, 16)
    assert hidden.exposed == pytest.approx(in_the_open)
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
