"""How weights and gradients are held, and when they are summed, changes no number; on ranks: test_distributed.py."""

import functools
import json

import numpy as np
import pytest
import torch
from forked import succeed
from hand_made import pack_samples
from processes import ROOT
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE, build, check, save_model
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from mini_trainer.distributed.world import count_shards
from mini_trainer.model.optim.optimizers import build_optimizer, local_gradients
from mini_trainer.model.sharding import prepare_backward
from mini_trainer.objectives.families.text_tower import find_blocks
from mini_trainer.options import OptimizationOptions, ShardingOptions

WHERE = dict(reshard_after_forward="never", cpu_offload=True)


def make_micro_batches(num: int) -> list:
    """`num` micro-batches, the last one without a trained token, as a rank with nothing to do gets it."""
    random = np.random.default_rng(0)
    batches = []
    for k in range(num):
        ids = random.integers(3, VOCAB_SIZE, 20)
        labels = np.full_like(ids, -100) if k == num - 1 else ids
        batches.append(pack_samples([(ids, labels, None)]))
    return batches


def run_backward(model, micro_batches, when: str) -> list[list[torch.Tensor]]:
    """What gradients this rank holds after each micro-batch."""
    seen = []
    for k, micro_batch in enumerate(micro_batches):
        sharding = ShardingOptions(micro_batch_grad_sync=when)
        prepare_backward(model, sharding, is_last=k + 1 == len(micro_batches))
        model(micro_batch).loss.backward()
        seen.append([gradient.clone() for gradient in local_gradients(model)])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_gradients_summed_at_the_last_micro_batch_are_those_summed_at_every(family, dtype, world, tmp_path):
    path = save_model(FAMILIES[family], tmp_path)
    by_fsdp = build(path, world, dtype=dtype, reshard_after_forward="always")
    every = run_backward(by_fsdp, make_micro_batches(3), "every")
    last = run_backward(build(path, world, dtype=dtype, **WHERE), make_micro_batches(3), "last")
    assert [len(gradients) > 0 for gradients in every] == [True, True, True]
    assert [len(gradients) > 0 for gradients in last] == [False, False, True]
    assert len(every[-1]) == len(last[-1])
    for gradient, expected in zip(last[-1], every[-1], strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("policy", "blocks_kept", "root_kept"), [("auto", True, True), ("always", False, False), ("never", True, True)]
)
def test_weights_are_freed_after_forward_as_asked(policy, blocks_kept, root_kept, world, tmp_path):
    model = build(save_model(FAMILIES["llama"], tmp_path), world, reshard_after_forward=policy)
    model(make_micro_batches(2)[0])
    for block in find_blocks(model.model):
        assert all(isinstance(param, DTensor) != blocks_kept for param in block.parameters())
    assert isinstance(model.model.get_output_embeddings().weight, DTensor) != root_kept
    # The checks at the start run no backward; the optimizer must find the shards.
    check(model, world)
    build_optimizer(model, OptimizationOptions(learning_rate=1e-3, weight_decay=0.0))


@pytest.mark.long
@pytest.mark.slow
def test_weights_that_stay_gathered_change_no_number_and_save_gathers(tmp_path):
    path, num_micro_batches, num_units = save_model(FAMILIES["llama"], tmp_path / "model"), 3, 4  # 2 of them blocks
    num_both = num_units - 1  # gathered for forward and for backward; the embedding only for forward
    expected = {  # gathers a step by --reshard-after-forward and --reshard-after-backward
        ("always", "always"): 2 * num_micro_batches * num_both + num_micro_batches,
        ("always", "never"): (num_micro_batches + 1) * num_both + num_micro_batches,
        ("auto", "always"): 2 * num_micro_batches * (num_both - 1) + 2 * num_micro_batches,  # the root once
        ("auto", "never"): (num_micro_batches + 1) * (num_both - 1) + 1 + num_micro_batches,
        ("never", "always"): num_micro_batches * num_units,
        ("never", "never"): num_units,
    }
    others = [  # other options, each with weights that are freed and that stay
        dict(micro_batch_grad_sync="last", cpu_offload=True, prefetch_blocks=2, activation_checkpointing="full"),
        dict(lora=True, lora_dropout=0.1),
        dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_cache_dir=str(tmp_path)),
        dict(context_parallel=2),
    ]
    policies = [dict(reshard_after_forward=f, reshard_after_backward=b) for f, b in expected]
    cases = [*policies, *(o | dict(reshard_after_backward=b) for o in others for b in ("always", "never"))]
    worker, output = ROOT / "tests" / "workers" / "resharding.py", tmp_path / "results"
    succeed(2, worker, path, num_micro_batches, output, *map(json.dumps, cases))
    results = torch.load(output)
    num_gathered = [[step.pop("gathered") for step in result["steps"]] for result in results]
    assert num_gathered[: len(expected)] == [[num, num, num] for num in expected.values()]
    pairs = [(0, i) for i in range(len(expected))] + [(i, i + 1) for i in range(len(expected), len(cases), 2)]
    for freed, kept in pairs:
        steps = results[kept]["steps"]
        assert steps == results[freed]["steps"], cases[kept]  # also the loss on other data, between two steps
        assert len({str(step["held_out"]) for step in steps}) == len(steps) == 3
        for name, weight in results[kept]["weights"].items():
            assert torch.equal(weight, results[freed]["weights"][name]), (cases[kept], name)
    assert all(sum(num_gathered[k]) < sum(num_gathered[f]) for f, k in pairs[len(expected) :])


@pytest.mark.parametrize("num_ahead", [1, 2, 3])
def test_weights_are_gathered_as_many_blocks_ahead_as_asked(num_ahead, world, tmp_path):
    num_blocks = 6
    config = LlamaConfig(**SHAPE | dict(num_hidden_layers=num_blocks))
    model = build(save_model(config, tmp_path), world, prefetch_blocks=num_ahead, reshard_after_forward="always")
    blocks = find_blocks(model.model)
    seen = []

    def record(i: int, *_) -> None:
        groups = [fully_shard.state(block)._fsdp_param_group for block in blocks]
        there = {k for k, group in enumerate(groups) if group.is_unsharded or group._all_gather_result is not None}
        seen.append((i, there))

    def record_backward(i: int, _module, _args, output) -> None:
        output[0].register_hook(functools.partial(record, i))

    for i, block in enumerate(blocks):
        block.self_attn.register_forward_pre_hook(functools.partial(record, i))
        block.self_attn.register_forward_hook(functools.partial(record_backward, i))
    model(make_micro_batches(2)[0]).loss.backward()
    forward, backward = seen[:num_blocks], seen[num_blocks:]
    least = num_ahead if num_ahead > 1 else 0  # FSDP2's own way forward begins a gathering when its block comes
    assert forward == [(i, set(range(i, min(num_blocks, i + 1 + least)))) for i in range(num_blocks)]
    assert backward == [(i, set(range(max(0, i - num_ahead), i + 1))) for i in reversed(range(num_blocks))]


def test_offloaded_weights_are_offloaded_in_every_part_of_the_model(world, tmp_path, monkeypatch):
    path = save_model(FAMILIES["llama"], tmp_path)
    policies = []

    def record(*args, offload_policy, **kwargs):
        policies.append(offload_policy)
        return fully_shard(*args, offload_policy=offload_policy, **kwargs)

    monkeypatch.setattr("mini_trainer.model.sharding.fully_shard", record)
    for cpu_offload in (True, False):
        policies.clear()
        build(path, world, cpu_offload=cpu_offload, reshard_after_forward="always")
        assert [isinstance(policy, CPUOffloadPolicy) for policy in policies] == 4 * [cpu_offload]  # 2 blocks


@pytest.mark.parametrize(
    ("num_ranks", "local", "shard_size", "message"),
    [
        (8, 8, None, "8 ranks into several copies of the model on 8 ranks each (the ranks of a node)"),
        (8, 4, 3, "8 ranks into several copies of the model on 3 ranks each (--shard-size)"),
        (4, 1, None, "4 ranks into several copies of the model on 1 ranks each"),
        (4, 4, 1, "4 ranks into several copies of the model on 1 ranks each"),
    ],
)
def test_ranks_that_cannot_hold_several_copies_are_refused(num_ranks, local, shard_size, message):
    with pytest.raises(ValueError) as error:
        count_shards(num_ranks, local, shard_size)
    assert message in str(error.value)
