"""FLOPs of a step, of each sequence by itself, forward and backward, or forward where it is only read ahead; its
metrics over all ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_pairs import write_pairs
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import RowSequences, TokenizedData
from mini_trainer.model.flops import FlopCount, count_flops
from mini_trainer.model.optim.optimizers import StepSums
from mini_trainer.objectives.kto import Feedback
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.preferences import Preferences
from mini_trainer.options import group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data
from mini_trainer.run.metrics import StepMeter
from mini_trainer.run.plan.memory import count_row_tokens
from mini_trainer.run.step import describe_bad_step
from mini_trainer.sampler import Batch, RunPosition

# Two layers, of which one has a window shorter than the sequences.
FLOPS = FlopCount(600.0, 90.0, (12.0, 24.0), (None, 5), forward_per_token=200.0, forward_per_loss_token=30.0)
LENGTHS = (20, 31)


def make_data(model: Path, directory: Path) -> Mixture:
    """Four random samples of each length."""
    paths = [directory / f"{length}.arrow" for length in LENGTHS]
    for path, length in zip(paths, LENGTHS, strict=True):
        made = dict(mock_data=4, block_size=length, output_file=str(path), num_proc=1, preview=0)
        process_data(group_options(ProcessDataOptions, **made, model_name_or_path=str(model)))
    return Mixture([TokenizedData(path) for path in paths])


def make_pairs(model: Path, directory: Path, rows: np.ndarray, *, good: bool = False) -> tuple[Mixture, np.ndarray]:
    """Two sets of four pairs, and the lengths of both sequences of these rows (rows, 2)."""
    paths = [write_pairs(directory / f"{seed}.arrow", model, size=4, seed=seed, good=good) for seed in range(2)]
    lengths = [length for path in paths for length in pa.ipc.open_file(path).read_all()["sequence_lengths"].to_pylist()]
    return Mixture([TokenizedData(path) for path in paths]), np.array(lengths)[rows]


def test_a_pair_takes_what_its_sequences_take(model, tmp_path):
    rows = np.array([1, 6, 0])
    data, lengths = make_pairs(model, tmp_path, rows)
    assert data.list_sequences(rows).lengths.tolist() == lengths.ravel().tolist()
    assert data.longest_sequence >= lengths.max()
    alone = [FLOPS.of_batch(np.array([length]), 0) for length in lengths.ravel()]
    num_trained = int(data.num_loss_tokens[rows].sum())
    assert FLOPS.of_rows(rows, data, Preferences()) == pytest.approx(sum(alone) + 90 * num_trained)
    assert count_row_tokens(data, rows, Preferences()).tolist() == lengths.sum(1).tolist()


def test_what_is_only_read_ahead_takes_a_forward_pass(model, tmp_path):
    rows = np.array([1, 6])
    data, lengths = make_pairs(model, tmp_path, rows, good=True)
    answers, unrelated = lengths.T
    num_trained = int(data.num_loss_tokens[rows].sum())  # of the answers
    trained, ahead = FLOPS.of_batch(answers, num_trained), FLOPS.of_forward(unrelated, num_trained)
    assert FLOPS.of_rows(rows, data, Feedback()) == pytest.approx(trained + ahead)
    assert ahead == pytest.approx(FLOPS.of_batch(unrelated, num_trained) / 3)
    assert FLOPS.of_scores(rows, data, Feedback()) == pytest.approx(trained / 3 + ahead)
    assert count_row_tokens(data, rows, Feedback()).tolist() == answers.tolist()


def test_a_text_is_one_sequence(model, tmp_path):
    data, rows = make_data(model, tmp_path), np.array([7, 0])
    expected = FLOPS.of_batch(np.array([31, 20]), 49)
    assert FLOPS.of_rows(rows, data, CausalLM()) == pytest.approx(expected)


@pytest.mark.parametrize("trains", [True, False])
def test_a_forward_pass_takes_what_torch_counts(trains, model):
    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").requires_grad_(trains)
    num_tokens = 24
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        loaded(torch.arange(num_tokens)[None])
    flops, lengths = count_flops(loaded), np.array([num_tokens])
    causal = flops.of_attention(lengths) / 3  # half of the square that torch counts
    assert flops.of_forward(lengths, num_tokens) + causal == counted.get_total_flops()


def test_metrics_of_a_step_are_those_of_all_ranks_data_sets_and_layers(model, tmp_path):
    """Two micro-batches on two ranks, of which only one had something to do in the second."""
    data, rows = make_data(model, tmp_path), np.array([0, 4, 5])  # 20, 31 and 31 tokens
    lengths = np.array([20, 31, 31])
    batch = Batch(1, rows, lengths, 79, dict(targets=79, tokens=82), [[[0], [1]], [[2], []]], [], data)
    loads = np.array([[3.0, 1.0], [4.0, 0.0]])
    reports = dict(source_losses=np.array([38.0, 120.0]), router_loss=np.array(41.0), expert_loads=loads)
    sums = StepSums(158.0, 1.0, 2e9, 0.5, [(0, 1)], 0, reports)
    flops = FlopCount(600.0, 0.0, (), (), 200.0, 0.0)
    meter = StepMeter(8, 40, flops, 1000.0, CausalLM())
    found = meter.measure(batch, sums, RunPosition(2, 6, 999, 3), lr=0.1, seconds=1.5)
    assert (found["loss"], found["epoch"], found["mfu"]) == (2.0, 0.75, 82 * 600 / 2 / 2000)
    assert found["rank_balance"] == (25.5 + 15.5) / (31 + 31) and found["packing_efficiency"] == 82 / (2 * 2 * 40)
    assert (found["router_aux_loss"], found["expert_balance"]) == (0.5, (2 + 2) / (3 + 4))
    found_of = [[own[name] for name in ("loss", "num_samples", "epoch")] for own in found["sources"].values()]
    assert found_of == [[2.0, 1, 0.75], [2.0, 2, 0.75]]  # 3 of each set's 4 samples
    assert describe_bad_step(batch, sums).endswith("Rows of " + data.name_rows([4]) + " (rank 1)")
    shared = replace(batch, num_sharing=2)  # four ranks, of which the last two share the second's row
    found = meter.measure(shared, sums, RunPosition(2, 6, 999, 3), lr=0.1, seconds=1.5)
    assert (found["packing_efficiency"], found["mfu"]) == (82 / (2 * 4 * 40), 82 * 600 / 2 / 4000)
    said = describe_bad_step(shared, replace(sums, bad_micro_batches=[(0, 2)]))
    assert said.endswith(f"Rows of {data.name_rows([4])} (rank 2)")


def test_sequences_of_some_rows_are_those_of_each_row():
    random = np.random.default_rng(0)
    counts = random.integers(1, 4, 50)
    lengths = [random.integers(1, 100, count) for count in counts]
    sequences = RowSequences(np.cumsum([0, *counts]), np.concatenate(lengths))
    rows = random.integers(0, 50, 20)
    chosen = sequences.of(rows)
    assert chosen.lengths.tolist() == [length for row in rows for length in lengths[row]]
    assert chosen.places.tolist() == [place for row in rows for place in range(counts[row])]
    assert sequences.find_longest(slice(7, 12)) == max(max(lengths[row]) for row in range(7, 12))
    assert chosen.sum_by_row(chosen.lengths).tolist() == [lengths[row].sum() for row in rows]
