"""The trainer that a configuration is for, by its keys, and by its file's name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_trainer.options.foreign_names import find_row

# A file is a trainer's if it has all of the first keys, and one of the others. The last two are refused by name.
SIGNS = {
    "axolotl": ({"base_model"}, {"datasets", "micro_batch_size", "sequence_len", "adapter", "num_epochs", "rl"}),
    "llama-factory": ({"model_name_or_path"}, {"stage", "finetuning_type", "cutoff_len", "template", "export_dir"}),
    "LLaMA-Factory v1": ({"model"}, {"train_dataset", "peft_config", "quant_config", "sample_backend"}),
    "ms-swift": (set(), {"tuner_type", "train_type", "load_args", "rlhf_type", "sampler_engine"}),
    "trl": ({"model_name_or_path"}, {"dataset_name", "dataset_mixture", "dataset_mixer", "max_length", "use_peft",
                                     "num_train_epochs", "reward_funcs"}),
}  # fmt: skip
# TRL's trainers, with keys that only they have, and the words that stand for them in names of files and folders.
TRLS = {
    "trl-dpo": ({"loss_weights", "precompute_ref_log_probs", "rpo_alpha", "ld_alpha", "use_weighting"}, {"dpo"}),
    "trl-kto": ({"desirable_weight", "undesirable_weight"}, {"kto"}),
    "trl-orpo": (set(), {"orpo"}),
    "trl-cpo": ({"cpo_alpha", "simpo_gamma", "gamma_beta_ratio"}, {"cpo", "simpo"}),
    "trl-reward": ({"center_rewards_coefficient"}, {"reward", "rm"}),
}
LOSSES = {"simpo": "trl-cpo", "alphapo": "trl-cpo", "kto": "trl-kto", "apo_zero_unpaired": "trl-kto"}
SHARED_LOSSES = ("sigmoid", "hinge", "ipo", "nll", "chunked_nll", "dft")  # all others are DPO's
TASKS = {"SEQ_CLS": "trl-reward"}


def recognize(given: Mapping[str, Any], path: Path | None = None) -> str:
    """The trainer's name; ValueError if it is none that is known, or one of several."""
    fitting = [name for name, (all_of, one_of) in SIGNS.items() if all_of <= given.keys() and one_of & given.keys()]
    if not fitting:
        raise ValueError(
            "its keys are of no trainer that is known (axolotl, llama-factory, trl): name it with --trainer"
        )
    if fitting[0] in ("ms-swift", "LLaMA-Factory v1"):
        raise ValueError(
            f"a configuration of {fitting[0]}, which is not translated: axolotl, llama-factory, trl are"
            " (docs/tasks/coming_from.md)"
        )
    return fitting[0] if fitting[0] != "trl" else choose_trl(given, path)


def choose_trl(given: Mapping[str, Any], path: Path | None) -> str:
    """One of TRL's trainers: by the keys that only it has, by its loss, or by the path's name; that for supervised
    fine-tuning if no key compares answers."""
    losses = given.get("loss_type", [])
    losses = [losses] if isinstance(losses, str) else losses
    found = {name for name, (own, _) in TRLS.items() if own & given.keys()}
    found |= {LOSSES.get(loss, "trl-dpo") for loss in losses if loss not in SHARED_LOSSES}
    found |= {TASKS[task] for task in [given.get("lora_task_type")] if task in TASKS}
    if isinstance(given.get("loss_type"), list):
        found.add("trl-dpo")
    words = set(re.findall("[a-z]+", "/".join(path.absolute().parts[-2:]).lower())) if path else set()
    found = found or {name for name, (_, named) in TRLS.items() if named & words}
    if len(found) == 1:
        return found.pop()
    compares = [key for key in given if (row := find_row(key)) is not None and row.decides and "trl-dpo" in row.of]
    if not compares:
        return "trl"
    raise ValueError(f"{', '.join(compares)}: keys of several of TRL's trainers: name one with --trainer, as trl-dpo")
