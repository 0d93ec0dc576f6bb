"""The whole texts of messages about models, adapters and objectives; DIR stands for the directory of a test."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import read_refusal
from transformers import LlamaConfig

from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.stores.model_files import check_values
from mini_trainer.distributed.world import check_sharing
from mini_trainer.model.config import check_rope, load_config
from mini_trainer.model.methods.adapter_settings import check_settings
from mini_trainer.model.methods.lora_layers import choose_names
from mini_trainer.model.optim.rates import choose_rates
from mini_trainer.objectives.class_scores import choose_class_weights
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.specs import make_objective
from mini_trainer.options import OptimizationOptions

DYNAMIC = LlamaConfig(max_position_embeddings=256, rope_parameters=dict(rope_type="dynamic", factor=2.0))
CLASSES = DataTask("sequence-classification", "single", ("good", "bad"), 2)


def load(directory: Path, **config: Any) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    load_config(str(directory), TextFamily())


def check_adapter(directory: Path, **settings: Any) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | settings))
    check_settings(directory, flag="--adapter")


def choose(**options: Any) -> None:
    choose_rates(torch.nn.Linear(2, 2), OptimizationOptions(**options))


# Name, what fails in a directory, text.
ROWS = [
    (
        "size",
        lambda path: check_values({"hidden_size": -1}, path / "config.json"),
        "DIR/config.json: hidden_size is -1, but must be an integer from 1 to 1,048,576",
    ),
    (
        "stop token",
        lambda path: check_values({"eos_token_id": "x"}, path / "generation_config.json"),
        'DIR/generation_config.json: eos_token_id is "x", but must be a token id, a list of those, or null',
    ),
    (
        "no language model",
        lambda path: load(path, model_type="vit"),
        "--model-name-or-path DIR: model type 'vit' has no causal language model in transformers",
    ),
    (
        "encoder-decoder",
        lambda path: load(path, model_type="t5"),
        "--model-name-or-path DIR: model type 't5' is an encoder-decoder, which needs separate source and target "
        "texts, but a row here is one text: use a decoder-only model",
    ),
    (
        "unknown quantization",
        lambda path: load(path, model_type="llama", quantization_config={"quant_method": "aqlm"}),
        "--model-name-or-path DIR: the weights are quantized by 'aqlm', which cannot be dequantized here (mxfp4, "
        "fp8, mxfp8, bitsandbytes, compressed-tensors can): use the bf16 release "
        "that this one was made from",
    ),
    (
        "rotary embeddings",
        lambda path: check_rope(DYNAMIC, longest=257),
        "model type 'llama' has dynamic rotary embeddings, which change for a whole packed row when one sequence "
        "is longer than 256; the longest sample has 257 tokens: drop samples longer than 256 (--max-tokens-per-gpu "
        "256 --drop-overlong)",
    ),
    (
        "changed base",
        lambda path: check_adapter(path, init_lora_weights="pissa"),
        "--adapter DIR: init_lora_weights 'pissa' changed the base's weights when the adapter was created, so it "
        "would give wrong results with the stored weights: convert it to an ordinary adapter with peft: "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
    ),
    (
        "adapter's setting",
        lambda path: check_adapter(path, bias="all"),
        "--adapter DIR: adapter_config.json has settings that this program does not support, and without which the "
        'adapter would give wrong results: bias: "all". Merge it with the program that trained it',
    ),
    (
        "adapter's value",
        lambda path: check_adapter(path, r="8"),
        '--adapter DIR: adapter_config.json: r is "8", but must be an integer from 1 to 65,536',
    ),
    (
        "adapted layers",
        lambda path: choose_names(["q_prj"], ["h.0.q_proj"], "--lora-target-modules"),
        "--lora-target-modules q_prj: nothing has this name; there are q_proj",
    ),
    (
        "ranks",
        lambda path: check_sharing(6, 4),
        "--context-parallel 4: cannot divide 6 ranks into groups of 4: give a number that divides the number of "
        "ranks, or change the number of ranks",
    ),
    (
        "rate of no weight",
        lambda path: choose(learning_rate_for=("head=1e-6",)),
        "--learning-rate-for head: no trained parameter has such a name that no pattern before it has; they are "
        "like weight, bias",
    ),
    (
        "another objective's data",
        lambda path: make_objective("reward", None, None, DataTask()),
        "--objective reward: the data was tokenized for causal-lm: give --objective causal-lm, or tokenize the "
        "data again",
    ),
    (
        "class weights",
        lambda path: choose_class_weights(("1",), CLASSES, lambda: (torch.tensor([3, 4]), 7)),
        "--class-weights 1: give balanced, or a number of at least 0 for each of the 2 classes, in the order good, bad",
    ),
]


@pytest.mark.parametrize(("fail", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_messages(fail, text, tmp_path):
    assert read_refusal(lambda: fail(tmp_path), folder=tmp_path) == text
