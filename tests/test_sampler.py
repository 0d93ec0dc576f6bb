"""The stream: every sample once an epoch, the same for any number of ranks; and what a micro-batch holds."""

import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from hand_made import pack_samples
from tiny_data import make_samples, write_samples

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import RowPlace
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import DataOptions, EndOptions
from mini_trainer.sampler import (
    RunPosition,
    choose_batching,
    collect_garbage_between,
    count_steps,
    draw_samples,
    iterate_batches,
    prefetch,
)

VOCAB_SIZE = 160
NUM_SAMPLES = 50


@pytest.fixture(scope="module")
def samples():
    return make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def data(samples, tmp_path_factory):
    return Mixture([TokenizedData(write_samples(tmp_path_factory.mktemp("data") / "data.arrow", samples))])


def batches_of(data, *, num_steps=8, batch_size=12, max_tokens_per_gpu=64, rank=0, world_size=1, seed=3):
    options = DataOptions(data_path="", batch_size=batch_size, seed=seed, max_tokens_per_gpu=max_tokens_per_gpu)
    data.vocab_size = VOCAB_SIZE
    return list(
        iterate_batches(
            data, options, objective=CausalLM(), num_steps=num_steps, attention_cost=0.01,
            world=RowPlace(rank, world_size),
        )
    )  # fmt: skip


def test_each_epoch_is_another_permutation_of_all_samples(data):
    stream = draw_samples(data, seed=1, start=0, count=3 * NUM_SAMPLES)
    epochs = stream.reshape(3, NUM_SAMPLES)
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert not (epochs[0] == epochs[1]).all() and not (epochs[1] == epochs[2]).all()
    assert not (draw_samples(data, seed=2, start=0, count=NUM_SAMPLES) == epochs[0]).all()


@pytest.mark.parametrize(("start", "count"), [(0, 1), (7, 40), (45, 10), (49, 120), (150, 50)])
def test_the_stream_is_a_function_of_the_position(data, start, count):
    stream = draw_samples(data, seed=1, start=0, count=300)
    assert (draw_samples(data, seed=1, start=start, count=count) == stream[start : start + count]).all()


def test_batches_do_not_depend_on_ranks_or_on_the_cap(data):
    reference = batches_of(data)
    for world_size, cap in ((1, 40), (2, 64), (4, 1000)):
        for batch, expected in zip(
            batches_of(data, world_size=world_size, max_tokens_per_gpu=cap), reference, strict=True
        ):
            assert (batch.sample_ids == expected.sample_ids).all()
            assert batch.num_loss_tokens == expected.num_loss_tokens


def test_a_position_after_a_batch_counts_it_in_samples_and_all_its_tokens(data, samples):
    position, tokens = RunPosition(), 0
    for step, batch in enumerate(batches_of(data, num_steps=5), 1):
        position = position.after(batch)
        tokens += sum(len(samples[i][0]) for i in batch.sample_ids)
        assert position == RunPosition(step, 12 * step, tokens, 12)


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_the_ranks_together_read_the_batch_exactly_once(data, samples, world_size):
    per_rank = [batches_of(data, rank=rank, world_size=world_size) for rank in range(world_size)]
    for batches in zip(*per_rank, strict=True):
        expected = sorted(samples[i][0] for i in batches[0].sample_ids)
        sequences, num_targets = [], 0
        for rank, batch in enumerate(batches):
            assert len(batch.micro_batches) == len(batches[0].micro_batches)
            for row, micro_batch in zip(batch.table, batch.micro_batches, strict=True):
                assert micro_batch.row.input_ids.shape[1] <= 64
                num_targets += len(micro_batch.targets.index)
                if row[rank]:
                    sequences += [s.tolist() for s in micro_batch.row.input_ids[0].split(micro_batch.row.seq_lengths)]
        assert sorted(sequences) == expected
        assert num_targets == batches[0].num_loss_tokens


def test_a_micro_batch_predicts_within_each_sequence_only():
    samples = [([5, 6, 7], [5, 6, 7]), ([8], [8]), ([9, 10], [IGNORED, 10]), ([11, 12, 13], [IGNORED, IGNORED, 13])]
    packed = pack_samples([(np.array(ids), np.array(labels), None) for ids, labels in samples])
    assert packed.row.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
    assert packed.row.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1, 2]]
    assert packed.targets.labels.tolist() == [6, 7, IGNORED, IGNORED, 10, IGNORED, IGNORED, 13, IGNORED]
    assert packed.targets.index.tolist() == [0, 1, 4, 7]
    assert packed.row.cu_seqlens.tolist() == [0, 3, 4, 6, 9] and packed.row.cu_seqlens.dtype == torch.int32
    assert packed.row.max_seqlen == 3 and packed.row.seq_lengths == [3, 1, 2, 3]
    assert packed.targets.weights is None


def test_weights_move_with_the_targets_they_belong_to():
    ids, labels = np.array([5, 6, 7]), np.array([IGNORED, 6, 7])
    first = ids, labels, np.array([0.0, 0.5, 1.0], dtype=np.float32)
    second = ids[:2], labels[:2], np.array([0.0, 0.25], dtype=np.float32)
    packed = pack_samples([first, second])
    assert packed.targets.weights.tolist() == [0.5, 1.0, 0.0, 0.25, 0.0]
    assert packed.targets.labels.tolist() == [6, 7, IGNORED, 6, IGNORED]


def test_an_idle_rank_trains_nothing():
    assert len(CausalLM().pack([CausalLM().make_idle_sample()]).targets.index) == 0


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({}, None),
        ({"max_steps": 7}, 7),
        ({"max_samples": 24}, 2),
        ({"max_samples": 25}, 3),
        ({"max_epochs": 1}, 5),  # 50 samples in batches of 12
        ({"max_epochs": 6}, 25),
        ({"max_epochs": 6, "max_steps": 3}, 3),
        ({"max_tokens": 1}, 1),
    ],
)
def test_the_run_ends_at_the_first_end_reached(data, ends, expected):
    options = DataOptions(data_path="", batch_size=12, seed=3)
    assert count_steps(data, choose_batching(data, options), EndOptions(**ends), seed=options.seed) == expected


@pytest.mark.parametrize("max_tokens", [2, 100, 1234, 5000])
def test_max_tokens_ends_at_the_step_that_reaches_it(data, max_tokens):
    options = DataOptions(data_path="", batch_size=12, seed=3)
    num_steps = count_steps(data, choose_batching(data, options), EndOptions(max_tokens=max_tokens), seed=options.seed)
    tokens = np.cumsum([batch.lengths.sum() for batch in batches_of(data, num_steps=num_steps)])
    assert tokens[-1] >= max_tokens
    assert num_steps == 1 or tokens[-2] < max_tokens


def test_samples_that_are_dropped_are_never_drawn(samples, tmp_path):
    data = Mixture([TokenizedData(write_samples(tmp_path / "data.arrow", samples))])
    num_overlong = data.fit_to(30, drop_overlong=True)
    drawn = draw_samples(data, seed=0, start=0, count=NUM_SAMPLES - num_overlong)
    assert sorted(drawn) == [i for i, (input_ids, _) in enumerate(samples) if len(input_ids) <= 30]


def test_prefetch_keeps_the_order_and_ends():
    assert list(prefetch(iter(range(100)))) == list(range(100))


def test_prefetch_works_ahead_but_only_so_far():
    made = []

    def make():
        for i in itertools.count():
            made.append(i)
            yield i

    items = prefetch(make(), depth=2)
    assert next(items) == 0
    for _ in range(100):
        if len(made) >= 4:  # one taken, two ready, one in the making
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 4
    items.close()


def test_prefetch_raises_what_the_producer_raised_and_leaves_no_thread():
    def fail():
        yield 1
        raise ValueError("row 7")

    items = prefetch(fail())
    assert next(items) == 1
    with pytest.raises(ValueError, match="row 7"):
        next(items)
    endless = prefetch(itertools.count())
    next(endless)
    endless.close()
    for _ in range(100):
        if not any(thread.name == "prefetch" for thread in threading.enumerate()):
            return
        time.sleep(0.01)
    raise AssertionError("the prefetch thread outlives its consumer")


def test_garbage_is_collected_between_items_only_and_as_before_afterwards():
    class Node:
        pass

    freed = []
    for i in collect_garbage_between(iter(range(1, 9)), every=3):
        assert not gc.isenabled()
        node = Node()
        node.itself = node  # which only the collector frees
        weakref.finalize(node, freed.append, i)
        del node
        assert freed == list(range(1, i // 3 * 3))
        if i == 7:
            break
    assert gc.isenabled() and gc.get_freeze_count() > 0
