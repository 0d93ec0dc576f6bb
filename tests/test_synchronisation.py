"""A step waits for the device once: in reduce_step, whatever the number of micro-batches."""

import shutil

import pytest
import torch
from breadth import wide
from in_process import train_here
from op_recording import WaitRecorder
from small_runs import LENGTHS, OPTIONS, make_inputs, make_micro_batch
from tiny_models import FAMILIES, build, save_model

from mini_trainer.model.method import Full
from mini_trainer.model.optim.optimizers import build_optimizer, clip_gradients, local_gradients
from mini_trainer.options import OptimizationOptions
from mini_trainer.run.step import TrainState, run_backward, update_weights

NUM_STEPS = 4

CASES = {
    "llama": ("llama", {}),
    "experts, selective": ("mixtral", dict(activation_checkpointing="selective")),
    "compact": ("llama", dict(optimizer="adamw8bit", master_weights="bfloat16")),
    "experts in balance": ("mixtral", dict(router_aux_loss=0.1)),
    "two data sets": ("llama", {}),
    "osft": ("llama", dict(osft=True, osft_unfreeze_rank_ratio=0.5, activation_checkpointing="full")),
}


@pytest.mark.long
@pytest.mark.parametrize("case", [case if case == "experts in balance" else wide(case) for case in CASES])
def test_only_reduce_step_waits_and_as_often_for_one_micro_batch_as_for_many(case, world, tmp_path):
    family, changes = CASES[case]
    inputs = make_inputs(tmp_path, family) | dict(checkpoint_every_steps=None, osft_cache_dir=str(tmp_path / "osft"))
    if case == "two data sets":
        inputs["data_path"] = (inputs["data_path"], str(shutil.copy(inputs["data_path"], tmp_path / "other.arrow")))
    if "osft" not in changes:
        del inputs["osft_cache_dir"]
    num_waits = {}
    for cap in (1000, 40):  # one micro-batch, and several
        output_dir = str(tmp_path / str(cap))
        options = OPTIONS | inputs | changes | dict(max_tokens_per_gpu=cap, max_steps=NUM_STEPS, output_dir=output_dir)
        with WaitRecorder() as recorder:
            train_here(world, **options)
        inside = [i for i, (is_inside, _) in enumerate(recorder.events) if is_inside]
        between = [name for is_inside, name in recorder.events[inside[0] : inside[-1]] if not is_inside]
        assert between == []
        num_waits[cap] = len(inside)
    assert num_waits[1000] == num_waits[40] > 0
    assert [name for _, name in recorder.events].count("torch.Tensor.cpu") >= NUM_STEPS  # the recorder sees them


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.set_sync_debug_mode needs a CUDA device")
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_no_micro_batch_and_no_update_waits_for_the_gpu(kind, world, tmp_path):
    weights_dtype = torch.float32 if kind == "adamw" else torch.bfloat16
    model = build(save_model(FAMILIES["llama"], tmp_path), world, dtype=torch.bfloat16, weights_dtype=weights_dtype)
    options = OptimizationOptions(optimizer=kind, learning_rate=1e-3, weight_decay=0.1)
    state = TrainState(model, Full(), build_optimizer(model, options), world)
    micro_batches = [make_micro_batch(lengths, seed=0).pin_memory() for lengths in LENGTHS]
    for mode in ("default", "error"):  # what is set up in the first step may wait
        torch.cuda.set_sync_debug_mode(mode)
        for step, micro_batch in enumerate(micro_batches):
            run_backward(model, micro_batch.to(world.device), {"targets": 1, "tokens": 1})
            clip_gradients(local_gradients(model), grad_norm=2.0, max_grad_norm=1.0)
            update_weights(state, step=step, lr=1e-3, num_samples=1)
    torch.cuda.set_sync_debug_mode("default")
