"""TRL: its trainers' keys that depend on others, their defaults (SFTConfig, DPOConfig, KTOConfig, ORPOConfig, CPOConfig
and RewardConfig), and their data sets. Their files do not name the trainer."""

from dataclasses import replace
from typing import Any

from mini_trainer.tools.importers import conversion
from mini_trainer.tools.importers.axolotl import settle_losses

DATA_KEYS = (
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_mixture", "datasets", "dataset_mixer"),
    *("dataset_splits", "chat_template", "chat_template_path", "max_seq_length"),
)


def prepare(to: conversion.Conversion) -> None:
    if "max_seq_length" in to.given:
        to.given.setdefault("max_length", to.given["max_seq_length"])
    if to.name == "trl":
        to.given.setdefault("assistant_only_loss", False)
    elif to.name == "trl-dpo":
        to.given.setdefault("loss_type", ["sigmoid"])
        settle_losses(to, "loss_type", "loss_weights")
    elif to.name == "trl-cpo":
        settle_simpo(to)


def settle_simpo(to: conversion.Conversion) -> None:
    """ "alphapo" is short for simpo without the likelihood; the SimPO paper's own trainer has gamma_beta_ratio and
    sft_weight in place of simpo_gamma and cpo_alpha."""
    given = to.given
    loss = given.pop("loss_type", "sigmoid")
    if loss == "alphapo":
        loss, given["cpo_alpha"] = "simpo", 0
    if "gamma_beta_ratio" in given and loss == "sigmoid":
        beta = given.setdefault("beta", 2.0)
        ratio = conversion.read_number("gamma_beta_ratio", given.pop("gamma_beta_ratio"))
        loss, given["simpo_gamma"] = "simpo", ratio * conversion.read_number("beta", beta)
        given["cpo_alpha"] = given.pop("sft_weight", 0)
    if loss != "simpo":
        raise ValueError(f"loss_type: CPO's loss {loss!r}, without a reference, is not supported: simpo is")
    to.set("loss_type", preference_loss="simpo")


def read_data(to: conversion.Conversion) -> None:
    """One data set of the hub with its configuration and its split, or several with their shares of rows."""
    conversion.set_template(to, "chat_template")
    conversion.set_template(to, "chat_template_path")
    mixture, mixer = to.get("dataset_mixture", "datasets"), to.get("dataset_mixer")
    if isinstance(mixer, dict):  # the older mixture: names with shares, and a list of splits for training and testing
        splits = [split for split in to.get("dataset_splits", default=["train"]) if "train" in str(split)] or ["train"]
        sets = [{"id": str(name), "weight": share, "split": split} for name, share in mixer.items() for split in splits]
        mixture = {"datasets": sets}
    if mixture is not None:
        read_mixture(to, mixture)
    elif name := to.get("dataset_name"):
        source = conversion.name_hub_rows(str(name), to.get("dataset_config"), split=to.get("dataset_train_split"))
        conversion.add_sources(to, "dataset_name", [source])


def read_mixture(to: conversion.Conversion, mixture: dict[str, Any]) -> None:
    sources = []
    for entry in mixture["datasets"]:
        name, split = entry.get("id") or entry["path"], str(entry.get("split") or "train").strip()
        source = conversion.name_hub_rows(name, entry.get("config", entry.get("name")), split=split)
        weight = conversion.read_number("weight", 1 if entry.get("weight") is None else entry["weight"])
        if weight != 1:  # becomes a slice of the split
            if not 0 < weight < 1 or "[" in split or not (weight * 100).is_integer():
                raise ValueError(f"weight {weight} of {name}: must be whole percents up to 1")
            to.note("dataset_mixture", f"of {name} the first {weight:.0%}, there as many at random")
            source["split"] = f"{split}[:{round(weight * 100)}%]"
        sources.append(source)
    size = conversion.read_number("test_split_size", mixture.get("test_split_size") or 0)
    if 0 < size < 1:
        to.set("dataset_mixture", validation_share=size)
    elif size:
        to.note("dataset_mixture", f"validation_share is a share, given test_split_size {size}")
    conversion.add_sources(to, "dataset_mixture", sources)


DEFAULTS = {"lr_scheduler": "linear", "adam_beta2": 0.999, "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05,
            "lora_target_modules": ("q_proj", "v_proj")}  # fmt: skip
SFT = conversion.Trainer(
    batch=("per_device_train_batch_size", 8),
    length=("max_length", 1024),
    epochs=("num_train_epochs", 3),
    packing=("packing",),
    data_keys=DATA_KEYS,
    read_data=read_data,
    prepare=prepare,
    defaults=DEFAULTS | {"learning_rate": 2e-5},
)
DPO = CPO = replace(SFT, objective="preference", defaults=DEFAULTS | {"learning_rate": 1e-6})
KTO = replace(DPO, objective="kto")
ORPO = replace(DPO, defaults=DPO.defaults | {"preference_loss": "orpo"})
REWARD = replace(SFT, objective="reward", defaults=DEFAULTS | {"learning_rate": 1e-4})
