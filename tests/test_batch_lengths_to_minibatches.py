"""One rank's column of a packed batch: greedy, and as `pack_batch` packs it. `python run_tests.py` compares both."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mini_trainer import batch_packer, sampler
from mini_trainer.batch_packer import batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt

both = pytest.mark.parametrize("pack", [batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt])


def list_columns(pack, lengths, cap: int, num_ranks: int) -> list[list[list[int]]]:
    return [pack(lengths, cap, num_ranks, rank) for rank in range(num_ranks)]


def draw_lengths(seed: int) -> list[int]:
    return np.random.default_rng(seed).lognormal(6, 1, 200).astype(int).clip(1, 8192).tolist()


class TestBatchLengthsToMinibatches:
    @both
    def test_empty_batch(self, pack):
        assert list_columns(pack, [], 130_000, 4) == [[]] * 4

    @both
    def test_a_single_sample_leaves_the_other_ranks_idle(self, pack):
        assert sorted(list_columns(pack, [5_000], 130_000, 4)) == [[[-1]], [[-1]], [[-1]], [[0]]]

    @both
    @pytest.mark.parametrize("num_ranks", [1, 3, 8])
    def test_every_sample_is_in_one_micro_batch_under_the_cap(self, pack, num_ranks):
        lengths = draw_lengths(num_ranks)
        columns = list_columns(pack, lengths, 8192, num_ranks)
        assert len(set(map(len, columns))) == 1, "ranks differ in their number of steps"
        cells = [[i for i in cell if i != -1] for column in columns for cell in column]
        assert sorted(i for cell in cells for i in cell) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in cell) <= 8192 for cell in cells)
        assert all(cell == [-1] or -1 not in cell for column in columns for cell in column)

    @both
    def test_arrays_are_packed_as_lists_are(self, pack):
        lengths = draw_lengths(0)
        assert pack(np.array(lengths), 8192, 4, 1) == pack(lengths, 8192, 4, 1)

    @both
    def test_samples_of_one_length_are_spread_equally(self, pack):
        columns = list_columns(pack, [10] * 96, 60, 8)
        assert [[len(cell) for cell in column] for column in columns] == [[6, 6]] * 8

    def test_greedy_gives_each_sample_to_the_emptiest_rank_until_one_does_not_fit(self):
        assert list_columns(batch_lengths_to_minibatches, [6, 5, 4, 5], 10, 2) == [[[0], [3]], [[1, 2], [-1]]]
        assert list_columns(batch_lengths_to_minibatches, [6, 5, 7, 1], 10, 2) == [[[0], [2]], [[1], [3]]]

    @both
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([3, 12, 5], 10, 2, 0), r"lengths\[1\] is 12 .* 10 .*max_tokens_per_gpu"),
            (([3, 0], 10, 2, 0), r"lengths\[1\] is 0"),
            (([3], 0, 2, 0), "cap is 0"),
            (([3], 10, 0, 0), "num_ranks is 0"),
            (([3], 10, 2, -1), r"rank is -1.*0\.\.1"),
            (([3], 10, 2, 2), r"rank is 2.*0\.\.1"),
        ],
    )
    def test_batches_that_cannot_be_packed_are_refused(self, pack, arguments, message):
        with pytest.raises(ValueError, match=message):
            pack(*arguments)


def test_the_greedy_packer_is_found_where_the_first_mini_trainer_had_it():
    assert sampler.batch_lengths_to_minibatches is batch_packer.batch_lengths_to_minibatches


@pytest.mark.slow
def test_the_analysis_compares_both_packers():
    command = [sys.executable, "run_tests.py", "--analysis-only"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if " greedy " in line or " lpt " in line]
    assert len(rows) == 24
    for greedy, lpt in zip(rows[::2], rows[1::2], strict=True):
        assert (greedy[2], lpt[2]) == ("greedy", "lpt") and int(lpt[3]) <= int(greedy[3])
