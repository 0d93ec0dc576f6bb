"""Rules for keys that several other trainers share: model, optimizer, schedule, end, saves, adapters, sharding."""

import math
from typing import Any

from mini_trainer.options.doors import TRACKERS
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    MISSING,
    NEEDLESS,
    Conversion,
    Refusal,
    by_value,
    noting,
    of_new_lora,
    only_if,
    read_number,
    refuse_any,
    say,
    set_data_option,
    set_option,
    set_to,
)


def convert_entropy_weighting(to: Conversion, key: str, value: Any) -> str:
    """EAFT; other powers or numbers of tokens than the paper's are refused."""
    for name, default in (("eaft_alpha", 1), ("eaft_k", 20)):
        if to.get(name, default=default) != default:
            raise Refusal(f"{name} {to.get(name)}: the weight is the entropy of the 20 most probable tokens itself")
    to.train["loss_weighting"] = "eaft"
    return f"loss_weighting: eaft; {DIFFERS}: the entropy is divided by ln 20 = 2.9957, there by 3"


def counts_rows(to: Conversion, key: str, value: Any) -> str:
    """Rule for the factors whose product is the number of rows, or packs, per step."""
    read_number(key, value)
    return f"{NEEDLESS}: included in the batch"


ADAMW, ADAMW_8BIT = set_to(optimizer="adamw"), set_to(optimizer="adamw8bit")
NOT_PAGED = "never paged: --cpu-offload moves its state off the GPU"
OPTIMIZER = by_value(
    {
        **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ADAMW),
        **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), noting(ADAMW, NOT_PAGED)),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), ADAMW_8BIT),
        "paged_adamw_8bit": noting(ADAMW_8BIT, NOT_PAGED),
        **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit"),
                        noting(ADAMW_8BIT, f"{DIFFERS}: its moments have 8 bits instead of 4")),
        "muon": set_to(optimizer="muon"),
    },
    other=refuse_any("optimizer {value!r}: only AdamW, with 32- or 8-bit moments (adamw, adamw8bit), and muon"),
)  # fmt: skip
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant_with_warmup", "linear": "linear",
             "cosine": "cosine", "polynomial": "polynomial", "inverse_sqrt": "inverse_sqrt",
             "cosine_with_restarts": "cosine_with_restarts", "warmup_stable_decay": "wsd",
             "cosine_with_min_lr": "cosine"}  # fmt: skip
SCHEDULE = by_value(
    {theirs: set_to(lr_scheduler=ours) for theirs, ours in SCHEDULES.items()},
    other=refuse_any(f"schedule {{value!r}}: must be one of {', '.join(SCHEDULES)}"),
)


def has_no_warmup(to: Conversion) -> bool:
    return to.get("lr_scheduler", "lr_scheduler_type") == "constant"


def convert_warmup(to: Conversion, key: str, value: Any) -> str:
    """Sets warm-up steps, or the warm-up ratio, which in transformers can also be steps below 1; steps override it."""
    value = read_number(key, value)
    if has_no_warmup(to):
        return f"{NEEDLESS}: the constant schedule has no warm-up"
    if key == "warmup_ratio" and to.get_number("warmup_steps", default=0) > 0:
        return f"{NEEDLESS}: warmup_steps overrides it"
    is_ratio = key == "warmup_ratio" or 0 < value < 1
    if is_ratio and value >= 1:
        raise ValueError(f"{key} {value}: must be below 1")
    return set_option("num_warmup_steps")(to, key, value)


def convert_alpha(to: Conversion, key: str, value: Any) -> str:
    """Adapters are scaled by alpha / rank; rank-stabilized ones by alpha / sqrt(rank)."""
    value, is_stable = read_number(key, value), to.get("use_rslora", "peft_use_rslora")
    rank = to.get_number("lora_r", "lora_rank", default=16)
    return set_option("lora_alpha")(to, key, value * math.sqrt(rank) if is_stable else value)


STABLE_RANK = of_new_lora(
    only_if(
        lambda to: to.get("use_rslora", "peft_use_rslora") and to.get("lora_alpha") is None,
        lambda to, key, value: convert_alpha(to, key, 2 * to.get_number("lora_r", "lora_rank", default=16)),
        otherwise="lora_alpha is scaled by the square root of the rank",
    )
)


def convert_schedule_details(to: Conversion, key: str, value: Any) -> str:
    """Sets the minimum learning rate, given as a ratio or as a rate, and the schedule's shape."""
    if not isinstance(value, dict):
        return f"{MISSING}: unknown here"
    given = dict(value)
    rate, lowest = given.pop("min_lr_rate", None), given.pop("min_lr", None)
    if rate is None and lowest is not None:
        peak = to.get_number("learning_rate", default=0)
        if peak <= 0:
            raise ValueError(f"min_lr needs a positive learning rate, which is {peak}")
        rate = read_number("min_lr", lowest) / peak
    scheduler = SCHEDULES.get(str(to.get("lr_scheduler", "lr_scheduler_type")))
    shapes = {"cosine_with_restarts": ("num_cycles", "lr_shape"), "polynomial": ("power", "lr_shape"),
              "wsd": ("num_decay_steps", "num_decay_steps")}  # fmt: skip
    values = {"min_lr_ratio": rate}
    if scheduler in shapes:
        theirs, ours = shapes[scheduler]
        values[ours] = given.pop(theirs, None)
    said = [set_option(name)(to, key, option) for name, option in values.items() if option is not None]
    return "; ".join(said + ([f"{MISSING}: {', '.join(map(str, given))}"] if given else [])) or NEEDLESS


def convert_clip(to: Conversion, key: str, value: Any) -> str:
    """Sets the maximum gradient norm; in transformers, 0 turns clipping off."""
    value = read_number(key, value)
    return set_option("max_grad_norm")(to, key, value if value > 0 else None)


def convert_epochs(to: Conversion, key: str, value: Any) -> str:
    value = read_number(key, value)
    if to.get_number("max_steps", default=-1) > 0:
        return f"{NEEDLESS}: max_steps ends the run"
    if value <= 0:
        raise ValueError(f"{key} must be above 0, given {value}")
    to.epochs = value
    return f"max_epochs: {value}" if value == int(value) else "becomes max_samples or max_epochs, below"


def convert_steps(to: Conversion, key: str, value: Any) -> str:
    value = read_number(key, value)
    return set_option("max_steps")(to, key, value) if value > 0 else NEEDLESS


def convert_saves(to: Conversion, key: str, value: Any) -> str:
    """Sets how often checkpoints are saved; they are also saved at regular times."""
    if value == "epoch" or (key == "saves_per_epoch" and value == 1):
        to.train["checkpoint_at_epoch"] = True
        return "checkpoint_at_epoch: true"
    is_by_steps = key == "save_steps" and to.get("save_strategy", default="steps") == "steps"
    if is_by_steps and (steps := read_number(key, value)) >= 1:
        to.train["checkpoint_every_steps"] = steps
        return f"checkpoint_every_steps: {steps} (to resume from; --min-samples-per-checkpoint exports models)"
    return f"{NEEDLESS}: a checkpoint is written every half hour, and the model at the end"


VALIDATION_DATA = say(f"{MISSING}: tokenize data for validation, and give validation_data_path")


def has_validation(to: Conversion) -> bool:
    """Whether a share of the rows is split off for validation."""
    try:
        return 0 < to.get_number("val_set_size", "val_size", default=0) < 1
    except ValueError:
        return False


def convert_evals(to: Conversion, key: str, value: Any) -> str:
    if value in ("no", "none", False, 0):
        return NEEDLESS
    if not has_validation(to):
        return VALIDATION_DATA(to, key, value)
    if value == "epoch" or (key == "evals_per_epoch" and value == 1):
        to.train["validate_at_epoch"] = True
        return "validate_at_epoch: true"
    if key == "eval_steps" and (steps := read_number(key, value)) >= 1:
        return set_option("validate_every_steps")(to, key, steps)
    if value == "steps":
        return f"{NEEDLESS}: the run is validated at its start and end"
    return f"{MISSING}: validate_every_steps counts steps"


def convert_patience(to: Conversion, key: str, value: Any) -> str:
    return (set_option("early_stopping_patience") if has_validation(to) else VALIDATION_DATA)(to, key, value)


def convert_share(to: Conversion, key: str, value: Any) -> str:
    value = read_number(key, value)
    if value == 0:
        return NEEDLESS
    if not 0 < value < 1:
        return f"{MISSING}: validation_share must be below 1, given {value} rows"
    return set_data_option("validation_share")(to, key, value)


def convert_lora(to: Conversion, key: str, value: Any) -> str:
    """Sets LoRA or QLoRA from Axolotl's and LLaMA-Factory's names."""
    if value in (None, "", "full"):
        return NEEDLESS
    if value not in ("lora", "qlora"):
        raise Refusal(f"{value!r}: only full fine-tuning, LoRA, QLoRA and OSFT are supported")
    to.train["lora"] = True
    if value == "qlora":
        to.train["base_quantization"] = "nf4"
    return "lora: true" + (", base_quantization: nf4" if value == "qlora" else "")


def convert_bits(to: Conversion, key: str, value: Any) -> str:
    if not value:
        return NEEDLESS
    if key == "load_in_8bit" or value == 8:
        return (
            f"{DIFFERS}: the base stays unquantized, which is more accurate but takes more memory"
            " (--base-quantization nf4: 4 bits)"
        )
    if value not in (True, 4):
        raise Refusal(f"the base can be quantized to 4 bits (nf4), given {value!r}")
    return set_to(base_quantization="nf4")(to, key, value)


ALL_LINEAR = (["all"], ["all-linear"], [])
OUTSIDE = {"lm_head", "embed_tokens", "embed_out", "wte"}  # not linear layers of the blocks


def convert_targets(to: Conversion, key: str, value: Any) -> str:
    """Sets the target layers: names, or one regular expression; empty means every linear layer of the blocks."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of names, given {value!r}")
    if names in ALL_LINEAR:
        return f"{NEEDLESS}: every linear layer of the blocks gets an adapter"
    return set_option("lora_target_modules")(to, key, names)


def convert_trackers(to: Conversion, key: str, value: Any) -> str:
    names = [str(name) for name in (value if isinstance(value, list) else [value] if value else [])]
    known = [name for name in names if name in TRACKERS]
    other = [name for name in names if name not in (*known, "none", "all")]
    said = [set_option("track")(to, key, known)] if known else []
    return "; ".join(said + ([f"{MISSING}: {', '.join(other)}"] if other else [])) or NEEDLESS


def offloads(value: Any) -> bool:
    """Whether a file name mentions offloading, or an entry enables it."""
    if not isinstance(value, dict):
        return "offload" in str(value).lower()
    for key, item in value.items():
        switch = item.get("device") if isinstance(item, dict) else item
        if offloads(item) or ("offload" in str(key) and switch not in (False, None, "none", "false")):
            return True
    return False


def convert_sharding(to: Conversion, key: str, value: Any) -> str:
    """Rule for DeepSpeed's and FSDP's settings: FSDP2 shards everything here."""
    if offloads(value):
        to.train["cpu_offload"] = True
        return "cpu_offload: true; the rest needs no option: FSDP2 shards everything"
    return f"{NEEDLESS}: FSDP2 shards weights, gradients and optimizer"
