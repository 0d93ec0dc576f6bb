"""Runs of a tiny model that a GPU must train to the losses of fp32 on a CPU, which benchmarks/gpu_expected.json has."""

import shutil
from pathlib import Path
from typing import Any

from forked import succeed
from processes import flags
from small_runs import OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import SHAPE, VOCAB_SIZE, save_model, save_tokenizer
from transformers import LlamaConfig

NUM_STEPS = 6
WIDER = LlamaConfig(**SHAPE | dict(hidden_size=256, intermediate_size=512, initializer_range=0.05))
LORA = dict(lora=True, lora_rank=8, learning_rate=2e-2)
# Options that decide the numbers; what else a GPU's run is given must not.
DECIDING: dict[str, dict[str, Any]] = {
    "full": {},
    "8-bit moments": dict(optimizer="adamw8bit"),
    "8-bit moments, bf16 weights": dict(optimizer="adamw8bit", master_weights="bfloat16"),
    "lora": LORA,
    "nf4": LORA | dict(base_quantization="nf4"),
    "osft": dict(osft=True, osft_unfreeze_rank_ratio=0.5),
}


def make_inputs(root: Path) -> dict[str, Any]:
    """The model and its data, as options of a run of `NUM_STEPS`."""
    model, data = root / "model", root / "data.arrow"
    if not data.exists():
        save_tokenizer(save_model(WIDER, model))
        write_samples(data, make_samples(40, vocab_size=VOCAB_SIZE))
    run = OPTIONS | dict(learning_rate=1e-3, max_steps=NUM_STEPS, save_final_checkpoint=False)
    del run["checkpoint_every_steps"]
    return run | dict(model_name_or_path=str(model), data_path=str(data))


def train_on_cpu(options: dict[str, Any], root: Path) -> list[dict[str, float]]:
    """Loss and gradient norm of each step in fp32, in a process without a GPU."""
    root.mkdir(exist_ok=True)
    run = make_inputs(root) | options | dict(output_dir=root / "run", compute_dtype="float32")
    if "osft" in options:
        run |= dict(osft_cache_dir=root / "osft")
    shutil.rmtree(root / "run", ignore_errors=True)
    succeed(0, "train.py", *flags(**run), env={"CUDA_VISIBLE_DEVICES": ""})
    return [{key: row[key] for key in ("loss", "grad_norm")} for row in read_rows(root / "run")]
