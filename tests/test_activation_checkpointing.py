"""What is kept for backward and what is computed again, and that the gradients are the same to the last bit."""

import numpy as np
import pytest
import torch
from breadth import wide
from hand_made import pack_samples
from op_recording import OpRecorder
from small_runs import full_gradients
from tiny_models import FAMILIES, VOCAB_SIZE, build, make_osft, save_model
from torch import Tensor

from mini_trainer.model.activation_checkpointing import ATTENTION, choose_kept_operations
from mini_trainer.model.method import Full
from mini_trainer.objectives.families.family import MicroBatch
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.start import choose_method

MODES = ("none", "selective", "full")
COSTLY = {"aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_dot_product_flash_attention_for_cpu"}


def make_micro_batch(lengths: tuple[int, ...] = (13, 1, 22, 7)) -> MicroBatch:
    random = np.random.default_rng(0)
    return pack_samples([(ids, ids, None) for ids in (random.integers(3, VOCAB_SIZE, n) for n in lengths)])


def run_backward(model, micro_batch: MicroBatch) -> tuple[dict[str, Tensor], int, list[str]]:
    """Loss and gradients, bytes that forward leaves for backward, and the operations of backward."""
    torch.manual_seed(0)  # dropout
    with OpRecorder() as forward:
        loss = model(micro_batch).loss
    num_bytes = forward.live_bytes()
    with OpRecorder() as backward:
        loss.backward()
    return {"loss": loss.detach()} | full_gradients(model), num_bytes, backward.names


def with_dropout(family: str):
    config = FAMILIES[family]
    return type(config).from_dict(config.to_dict() | dict(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3))


CASES = FAMILIES | {"dropout": with_dropout("gpt2")}
ALWAYS = ("llama", "gemma3", "gpt_oss_sinks", "mixtral", "dropout")


@pytest.mark.parametrize(
    ("case", "ratio"),
    [
        *((case, None) if case in ALWAYS else wide(case, None) for case in CASES),
        ("llama_tied_bias", 0.25),
        wide("gpt2", 0.75),
    ],
)
def test_gradients_are_bitwise_the_same_and_selective_keeps_more_to_compute_less_again(case, ratio, world, tmp_path):
    path = save_model(CASES[case], tmp_path / "model")
    results, num_bytes, num_costly = {}, {}, {}
    for mode in MODES:
        method = None if ratio is None else make_osft(tmp_path, osft_unfreeze_rank_ratio=ratio)
        model = build(path, world, activation_checkpointing=mode, method=method)
        results[mode], num_bytes[mode], names = run_backward(model, make_micro_batch())
        num_costly[mode] = sum(name in COSTLY for name in names)
    for mode in ("selective", "full"):
        assert results[mode].keys() == results["none"].keys()
        for name, value in results["none"].items():
            assert torch.equal(results[mode][name], value), f"{mode}: {name}"
    assert num_bytes["full"] < num_bytes["selective"] < num_bytes["none"]
    assert num_costly["full"] > num_costly["selective"] >= num_costly["none"]
    if ratio is None and case != "gpt_oss_sinks":  # whose experts have biases, see choose_kept_operations
        assert num_costly["selective"] == num_costly["none"]


def test_attention_that_draws_random_numbers_is_repeated(world, tmp_path):
    kept = {}
    for name, config in (("with", with_dropout("gpt2")), ("without", FAMILIES["gpt2"])):
        model = build(save_model(config, tmp_path / name), world)
        kept[name] = choose_kept_operations(model.model, Full(), backend="sdpa", compile=False)
    assert kept["without"] >= ATTENTION and kept["with"] == kept["without"] - ATTENTION


def with_noise(**changes: float):
    return type(FAMILIES["mixtral"]).from_dict(FAMILIES["mixtral"].to_dict() | changes)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (FAMILIES["llama"], dict(lora=True, lora_dropout=0.2)),
        (with_dropout("gpt2"), {}),
        (with_noise(router_jitter_noise=0.1), {}),
        (with_noise(attention_dropout=0.1), {}),
    ],
)
def test_a_recomputation_draws_the_same_random_numbers(config, options, world, tmp_path):
    path = save_model(config, tmp_path)
    given = group_options(TrainOptions, model_name_or_path=str(path), data_path="", output_dir="", **options)

    def differentiate(mode: str) -> dict[str, Tensor]:
        model = build(path, world, activation_checkpointing=mode, method=choose_method(given))
        return run_backward(model, make_micro_batch())[0]

    plain, recomputed = differentiate("none"), differentiate("full")
    for name, value in plain.items():
        assert torch.equal(recomputed[name], value), name
