from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batch_packer import batch_lengths_to_minibatches_lpt, pack_batch, sum_step_costs

settings.register_profile("packing", deadline=None)  # the first call may compile
settings.load_profile("packing")


@st.composite
def packing_problems(draw, max_samples=60, max_cap=200):
    """Draws (lengths, cap, num_ranks, attention_cost), half of them with only large samples."""
    cap = draw(st.integers(1, max_cap))
    shortest = draw(st.sampled_from([1, max(1, cap // 4)]))
    lengths = draw(st.lists(st.integers(shortest, cap), min_size=1, max_size=max_samples))
    return lengths, cap, draw(st.integers(1, 9)), draw(st.sampled_from([0.0, 0.01, 1.0]))


def count_first_fit_decreasing(lengths, cap):
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = next((i for i, room in enumerate(rooms) if room >= length), None)
        if fitting is None:
            rooms.append(cap - length)
        else:
            rooms[fitting] -= length
    return len(rooms)


def solve_by_brute_force(lengths, cap, num_ranks, attention_cost):
    """Returns the fewest steps and the least cost over every partition into bins that keep the cap."""
    best = (inf, inf)
    costs = [length + attention_cost * length**2 for length in lengths]

    def place(i, bins):
        nonlocal best
        if i == len(lengths):
            loads = sorted((sum(costs[j] for j in b) for b in bins), reverse=True)
            best = min(best, (-(-len(bins) // num_ranks), sum(loads[::num_ranks])))
            return
        for b in bins:
            if sum(lengths[j] for j in b) + lengths[i] <= cap:
                b.append(i)
                place(i + 1, bins)
                b.pop()
        place(i + 1, [*bins, [i]])

    place(0, [])
    # A step may hold spare bins, so fewest steps is over bins, but the least cost may use every bin of them.
    return best


@given(packing_problems())
@example(([5], 5, 4, 0.0))
@example(([7] * 50, 21, 3, 0.0))
@example(([100] + [1] * 40, 100, 2, 1.0))  # an outlier fixes the cost of a step
def test_table_keeps_the_contract(problem):
    lengths, cap, num_ranks, attention_cost = problem
    table = pack_batch(lengths, cap, num_ranks, attention_cost)
    assert sorted(i for step in table for indices in step for i in indices) == list(range(len(lengths)))
    assert all(len(step) == num_ranks for step in table)
    assert all(sum(lengths[i] for i in indices) <= cap for step in table for indices in step)
    assert all(any(step) for step in table), "a step in which every rank idles"


@given(packing_problems())
def test_steps_lie_between_the_bound_and_first_fit_decreasing(problem):
    lengths, cap, num_ranks, attention_cost = problem
    steps = len(pack_batch(lengths, cap, num_ranks, attention_cost))
    assert steps >= -(-sum(lengths) // (cap * num_ranks))
    assert steps <= -(-count_first_fit_decreasing(lengths, cap) // num_ranks)
    assert steps == len(pack_batch(lengths, cap, num_ranks)), "the cost changed the number of steps"


@given(packing_problems(), st.randoms())
def test_same_lengths_give_the_same_table(problem, random):
    lengths, cap, num_ranks, attention_cost = problem
    table = pack_batch(lengths, cap, num_ranks, attention_cost)
    assert table == pack_batch(np.array(lengths, np.int32), cap, num_ranks, attention_cost)
    shuffled = random.sample(lengths, len(lengths))
    by_length = [
        [[shuffled[i] for i in indices] for indices in step]
        for step in pack_batch(shuffled, cap, num_ranks, attention_cost)
    ]
    assert [[sorted(x) for x in step] for step in by_length] == [
        [sorted(lengths[i] for i in indices) for indices in step] for step in table
    ], "the order of arrival changed more than the indices"


def test_table_is_the_same_on_every_machine():
    lengths = [(37 * i * i + 11 * i) % 97 + 3 for i in range(24)]
    assert pack_batch(lengths, 300, 2, 0.01) == PINNED


@given(packing_problems())
def test_each_rank_gets_its_column(problem):
    lengths, cap, num_ranks, _ = problem
    table = pack_batch(lengths, cap, num_ranks)
    for rank in range(num_ranks):
        column = batch_lengths_to_minibatches_lpt(lengths, cap, num_ranks, rank)
        assert column == [step[rank] or [-1] for step in table]


def test_ranks_idle_when_samples_are_fewer():
    table = pack_batch([3, 9], max_tokens_per_gpu=10, num_ranks=4)
    assert len(table) == 1
    assert sorted(table[0]) == [[], [], [0], [1]]
    columns = [batch_lengths_to_minibatches_lpt([3, 9], 10, 4, rank) for rank in range(4)]
    assert sorted(columns) == [[[-1]], [[-1]], [[0]], [[1]]]


def test_no_samples_need_no_micro_batches():
    assert pack_batch([], 10, 4) == []
    assert batch_lengths_to_minibatches_lpt([], 10, 4, 0) == []


def test_samples_at_the_cap_stay_alone():
    table = pack_batch([8] * 6, max_tokens_per_gpu=8, num_ranks=2)
    assert len(table) == 3
    assert all(len(indices) == 1 for step in table for indices in step)


def test_equal_samples_are_spread_equally():
    table = pack_batch([10] * 96, max_tokens_per_gpu=60, num_ranks=8)
    assert [[len(indices) for indices in step] for step in table] == [[6] * 8] * 2


def test_pairs_and_triples_that_fill_the_cap_are_found():
    """First-fit decreasing needs one bin more here: it begins with 5 + 3 and 4 + 4."""
    lengths = [6, 5, 5, 4, 4, 4, 3, 3, 3, 3]
    assert sum(lengths) == 4 * 10
    assert len(pack_batch(lengths, 10, 1)) == 4
    rng = np.random.default_rng(0)
    first = rng.integers(250, 501, 60)
    second = rng.integers(250, 751 - first)
    triples = np.concatenate([first, second, 1000 - first - second])
    dense = count_first_fit_decreasing(triples.tolist(), 1000)
    assert 60 <= len(pack_batch(triples, 1000, 1)) <= 62 < dense


def test_outliers_share_a_step():
    """Eight outliers on 8 ranks cost one long step; spread over both, they would cost two."""
    lengths = [100] * 8 + [10] * 80
    assert sum_step_costs(pack_batch(lengths, 100, 8), lengths) == 200
    lengths = [100] * 4 + [10] * 40
    table = pack_batch(lengths, 100, 4, attention_cost=1.0)
    assert {len(indices) for indices in max(table, key=lambda step: max(sum(lengths[i] for i in x) for x in step))}


@pytest.mark.parametrize("attention_cost", [0.0, 1 / 2048])
def test_chat_like_batches_cost_near_the_mean_over_ranks(attention_cost):
    lengths = np.random.default_rng(0).lognormal(5, 0.4, 1024).astype(int).clip(20, 500)
    table = pack_batch(lengths, 4096, 8, attention_cost)
    total = sum(length + attention_cost * length**2 for length in lengths.tolist())
    assert 1 <= sum_step_costs(table, lengths, attention_cost) / (total / 8) < 1.002


def test_attention_cost_changes_the_table():
    lengths = np.random.default_rng(1).lognormal(5, 1, 64).astype(int).clip(1, 2048)
    plain, attended = pack_batch(lengths, 4096, 2), pack_batch(lengths, 4096, 2, 0.01)
    assert sum_step_costs(attended, lengths, 0.01) < sum_step_costs(plain, lengths, 0.01)


def test_step_costs_are_summed_over_the_costliest_ranks():
    assert sum_step_costs([[[0], [1, 2]], [[], [3]]], [5, 2, 1, 4], attention_cost=0.5) == 5 + 12.5 + 4 + 8


def test_the_costliest_step_is_first():
    lengths = np.random.default_rng(2).integers(1, 100, 200)
    costs = [sum_step_costs([step], lengths) for step in pack_batch(lengths, 200, 4)]
    assert len(costs) > 10
    assert costs == sorted(costs, reverse=True)
