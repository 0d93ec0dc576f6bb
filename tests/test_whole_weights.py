"""One rank's weights, cast once a step, train to the bits of FSDP2's, which --reshard-after-forward always brings."""

import pytest
import torch
from breadth import long
from in_process import train_here
from small_runs import OPTIONS, load_checkpoint, make_inputs, read_rows
from tiny_models import FAMILIES, build, check, save_model
from torch.distributed.fsdp import FSDPModule

from mini_trainer.model import sharding
from mini_trainer.model.sharding import stays_whole
from mini_trainer.options import ShardingOptions

STEPS = 3
LORA = dict(lora=True, lora_rank=4)
CASES = [
    ("llama", {}),
    ("llama_tied_bias", dict(activation_checkpointing="selective")),
    ("llama", dict(optimizer="adamw8bit", master_weights="bfloat16")),
    ("llama", dict(osft=True, osft_unfreeze_rank_ratio=0.5)),
    ("llama", LORA | dict(lora_dropout=0.1)),
    long("qwen3", dict(optimizer="muon", weight_average="ema", validation=True)),
    long("mixtral", dict(activation_checkpointing="full", router_aux_loss=0.01)),
    long("gemma3", dict(tiled_mlp=True)),
    long("llama", LORA | dict(base_quantization="nf4")),
]


@pytest.mark.parametrize("dtype", ["bfloat16", long("float32")])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_both_ways_train_to_the_same_bits(family, options, dtype, world, tmp_path):
    if dtype == "float32" and "base_quantization" in options:
        pytest.skip("a base in NF4 computes in bf16")
    inputs = make_inputs(tmp_path, family)
    run = OPTIONS | inputs | options | dict(max_steps=STEPS, checkpoint_every_steps=STEPS, compute_dtype=dtype)
    if run.pop("validation", False):
        run |= dict(validation_data_path=inputs["data_path"], validate_every_steps=1)
    if "osft" in options:
        run |= dict(osft_cache_dir=str(tmp_path / "osft"))
    outputs = {}
    for resharding in ("auto", "always"):
        outputs[resharding] = tmp_path / resharding
        train_here(world, **run, reshard_after_forward=resharding, output_dir=str(outputs[resharding]))
    rows, expected = map(read_rows, outputs.values())
    assert rows == expected and len({row["loss"] for row in rows}) == STEPS
    ours, others = (load_checkpoint(path / "checkpoints" / f"step_{STEPS}") for path in outputs.values())
    assert ours.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in ours.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_a_product_that_adds_is_not_the_gradient_that_autograd_adds(
    family, options, dtype, world, tmp_path, monkeypatch
):
    """What GPUs do, with several micro-batches a step."""
    if dtype == "float32" and "base_quantization" in options:
        pytest.skip("a base in NF4 computes in bf16")
    run = OPTIONS | make_inputs(tmp_path, family) | options | dict(max_steps=STEPS, compute_dtype=dtype)
    run |= dict(osft_cache_dir=str(tmp_path / "osft"))
    run.pop("validation", None)
    rounds, rows = "bfloat16" in (dtype, options.get("master_weights")), []
    for adds in (False, True):
        monkeypatch.setattr(sharding, "adds_products", lambda model, device, adds=adds: adds)
        train_here(world, **run, output_dir=str(tmp_path / f"adds_{adds}"))
        rows.append(read_rows(tmp_path / f"adds_{adds}"))
    for row, expected in zip(*rows, strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=5e-2 if rounds else 1e-5)
        assert row["grad_accum"] > 1


def test_only_what_needs_fsdp_on_one_rank_has_it(world, tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    for given in (
        {},
        dict(cpu_offload=True),
        dict(micro_batch_grad_sync="last"),
        dict(reshard_after_backward="always"),
    ):
        model = build(path, world, **given)
        assert any(isinstance(module, FSDPModule) for module in model.modules()) == bool(given)
        check(model, world)


def test_fsdp_is_there_where_another_copy_of_the_weights_has_no_room():
    model = torch.nn.Linear(100, 10, bias=False)  # 4,000 bytes, 16,000 with gradient and moments, 2,000 in bf16
    frozen = torch.nn.Linear(100, 10, bias=False).requires_grad_(False)  # 4,000 bytes, 2,000 in bf16

    def is_whole(model: torch.nn.Module, memory: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return stays_whole(model, dtype, ShardingOptions(), world_size=1, memory=memory)

    for module, needed in ((model, 18_000), (frozen, 6_000)):
        assert is_whole(module, int(needed / 0.85) + 1) and not is_whole(module, int(needed / 0.85) - 1)
        assert is_whole(module, 1, torch.float32), "weights that have the compute type need no copy"
