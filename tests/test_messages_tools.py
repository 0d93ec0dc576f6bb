"""The whole texts of messages about sweeps, imported configurations and the Python API; DIR stands for a directory."""

from typing import Any

import pytest
import yaml
from refusals import read_refusal

from mini_trainer import TrainingArgs
from mini_trainer.api.commands import make_train_words
from mini_trainer.api.errors import BadInputError
from mini_trainer.tools.importers.conversion import convert
from mini_trainer.tools.importers.recognition import recognize
from mini_trainer.tools.sweep.settings import check_trials, list_grid, read_settings

TRAIN = dict(model_name_or_path="M", data_path="d.arrow", validation_data_path="v.arrow", max_steps=100)
SWEEP = {"output_dir": "D", "train": TRAIN, "parameters": {"learning_rate": [1e-5, 1e-4]}}
NEEDED = dict(model_name_or_path="m", data_path="d.arrow", output_dir="o", process_data=False, max_steps=5)

# What differs from a good sweep, text.
SWEEPS: list[tuple[dict[str, Any], str]] = [
    ({"serch": "grid"}, "unknown option 'serch'; did you mean 'search'?"),
    ({"search": "tpe"}, "search cannot be 'tpe', allowed: grid, random, halving"),
    ({"search": "random"}, "search: random needs num_trials"),
    (
        {"train": TRAIN | {"output_dir": "E"}},
        "train: output_dir: is set for each trial by the sweep itself; leave it out",
    ),
    (
        {"parameters": {"learning_rate": [1]}},
        "parameters: learning_rate: given [1], allowed: a list of several values, or {low: ..., high: ...}",
    ),
    ({"parameters": {"seed": {"low": 3, "high": 2}}}, "parameters: seed: low 3, high 2: low must be below high"),
    (
        {"parameters": {"seed": {"low": 1, "high": 10**9}}},
        "a grid of 1,000,000,000 trials, allowed: at most 10,000; give shorter lists, or num_trials",
    ),
]
# Keys of another trainer's configuration, text.
IMPORTS = [
    ("axolotl", dict(rl="grpo"), "rl: 'grpo': has no objective here; reinforcement learning neither"),
    (
        "axolotl",
        dict(optimizer="adafactor"),
        "optimizer: 'adafactor': only AdamW, with 32- or 8-bit moments, and muon",
    ),
    (
        "llama-factory",
        dict(finetuning_type="freeze"),
        "finetuning_type: 'freeze': only full fine-tuning, LoRA and QLoRA are translated",
    ),
    ("trl", dict(loss_type="other"), "loss_type: 'other': has no objective here"),
    (
        "trl-dpo",
        dict(ld_alpha=0.5),
        "ld_alpha: 0.5: changes the loss, and has no counterpart: --preference-loss names those of pairs",
    ),
]
# Fields of TrainingArgs, text.
FIELDS = [
    (dict(seed=1, random_seed=2), "random_seed and seed both set --seed: give only one of them"),
    (
        dict(use_dolomite=True),
        "use_dolomite has no counterpart here: transformers' own models are trained with packed samples",
    ),
    (
        dict(process_data=True, data_path="chats.jsonl"),
        "data_output_dir is missing: give a directory for the tokenized data",
    ),
]


@pytest.mark.parametrize(("changes", "text"), SWEEPS, ids=[str(changes) for changes, _ in SWEEPS])
def test_messages_about_sweeps(changes, text, tmp_path):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP | changes))
    message = read_refusal(lambda: read_settings(tmp_path / "sweep.yaml"), folder=tmp_path)
    assert message == f"DIR/sweep.yaml: {text}"


def test_message_about_trials(tmp_path):
    parameters = {"lora_rank": [4, 8], "lora": [True, False]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP | {"parameters": parameters}))
    settings = read_settings(tmp_path / "sweep.yaml")
    assert read_refusal(lambda: check_trials(settings, list(list_grid(settings)))) == (
        "options that cannot be used as they are:\n  --lora-rank: no effect without --lora (trials 2, 3)"
    )


@pytest.mark.parametrize(("trainer", "given", "text"), IMPORTS, ids=[str(given) for _, given, _ in IMPORTS])
def test_messages_about_other_trainers_keys(trainer, given, text):
    assert read_refusal(lambda: convert(given, trainer, num_gpus=1)) == text


def test_message_about_an_unknown_trainer():
    foreign = dict(model="m", tuner_type="lora", dataset=["a"], split_dataset_ratio=0.1)
    assert read_refusal(lambda: recognize(foreign)) == (
        "a configuration of ms-swift, which is not translated: axolotl, llama-factory, trl are"
        " (docs/tasks/coming_from.md)"
    )


@pytest.mark.parametrize(("given", "text"), FIELDS, ids=[str(given) for given, _ in FIELDS])
def test_messages_about_fields(given, text):
    args = TrainingArgs(**NEEDED | given)
    assert read_refusal(lambda: make_train_words(args), kind=BadInputError) == text
