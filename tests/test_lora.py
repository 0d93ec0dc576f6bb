"""Adapters: what peft computes, on any ranks and from any resume, in files that peft and transformers load."""

from pathlib import Path

import pytest
import torch
from in_process import train_on
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from small_runs import NUM_SAMPLES, OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, SHAPE, VOCAB_SIZE, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from corpus.reader import TokenizedData
from sampler import draw_samples

BATCH_SIZE, STEPS, SEED = OPTIONS["batch_size"], 4, 42
CONFIGS = FAMILIES | {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
}
LORA = dict(lora=True, lora_rank=4, lora_alpha=16.0, seed=SEED, max_steps=STEPS, lora_export="both")


def make_inputs(root: Path, family: str) -> dict[str, str]:
    model = save_tokenizer(save_model(CONFIGS[family], root / "model"))
    data = write_samples(root / "data.arrow", make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE))
    return dict(model_name_or_path=str(model), data_path=str(data))


def train(world, inputs: dict[str, str], output_dir: Path, **options: object) -> Path:
    """The run's last export."""
    train_on(options.pop("num_ranks", 1), world, **inputs, output_dir=output_dir, **(OPTIONS | LORA | options))
    return output_dir / "hf_format" / f"samples_{STEPS * BATCH_SIZE}"


def load_with_adapter(inputs: dict[str, str], adapter: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"], dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


def train_plainly(inputs: dict[str, str], start: Path) -> tuple[list[float], PeftModel]:
    """What the run computes, from the adapter `start`: transformers, peft and AdamW, a sample at a time."""
    data, model = TokenizedData(inputs["data_path"]), load_with_adapter(inputs, start).train()
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        dict(params=[p for p in params if p.ndim >= 2], weight_decay=OPTIONS["weight_decay"]),
        dict(params=[p for p in params if p.ndim < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIONS["learning_rate"], betas=(0.9, 0.95), eps=1e-8)
    data.vocab_size, losses = VOCAB_SIZE, []
    for step in range(STEPS):
        batch = [data.read(i) for i in draw_samples(data, seed=SEED, start=step * BATCH_SIZE, count=BATCH_SIZE)]
        num_targets = sum((labels[1:] != -100).sum() for _, labels, _ in batch)
        loss = 0.0
        for ids, labels, _ in batch:
            logits = model(input_ids=torch.tensor(ids)[None].long(), use_cache=False).logits[0, :-1]
            targets = torch.tensor(labels[1:]).long()
            part = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_targets
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(params, OPTIONS["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, model


def adapter_of(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(3, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(0))
    return model.eval()(input_ids=ids, use_cache=False).logits


TABLE = [
    ("llama", {}),
    ("llama", dict(lora_use_dora=True)),
    ("llama_tied_bias", dict(lora_use_rslora=True, lora_target_modules=("q_proj", "layers.1.mlp.*"))),
    ("qwen3", dict(lora_modules_to_save=("embed_tokens",))),  # tied
    ("qwen3_moe", {}),
    ("gemma3", {}),
    ("phi3", {}),
    ("gpt2", {}),
    ("gpt2", dict(lora_use_dora=True)),
    ("gpt_oss_sinks", {}),
    ("mixtral", {}),
]


@pytest.mark.parametrize(("family", "options"), TABLE)
def test_a_run_is_pefts_and_its_exports_load_there(family, options, world, tmp_path):
    inputs = make_inputs(tmp_path, family)
    start = train(world, inputs, tmp_path / "start", **options | dict(learning_rate=0.0, lora_export="adapter"))
    export = train(world, inputs, tmp_path / "run", **options)

    # A plain loop with peft, from the same adapter, comes to the same one.
    losses, expected = train_plainly(inputs, start)
    assert [row["loss"] for row in read_rows(tmp_path / "run")] == pytest.approx(losses, rel=1e-6)
    before, after = (
        load_file(start / "adapter_model.safetensors"),
        load_file(export / "adapter/adapter_model.safetensors"),
    )
    reference = adapter_of(expected)
    assert after.keys() == before.keys() == reference.keys()
    for name, tensor in after.items():
        moved = (reference[name] - before[name]).norm()
        assert moved > 0, name
        assert (tensor - reference[name]).norm() <= 1e-4 * moved, name

    # peft loads what was written bit for bit; merged by us, merged by peft and not merged are the same model.
    loaded = load_with_adapter(inputs, export / "adapter")
    assert all(torch.equal(tensor, after[name]) for name, tensor in adapter_of(loaded).items())
    unmerged = logits_of(loaded)
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    assert (unmerged - logits_of(AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"]))).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(merged), unmerged, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(loaded.merge_and_unload()), logits_of(merged), rtol=1e-6, atol=1e-6)
