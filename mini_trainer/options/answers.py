"""Answers to unknown options and values: the option or value with the same meaning here, the reason why there is none,
or the closest name. Loaded only for unknown ones."""

import difflib
import re
from collections.abc import Callable, Collection

from mini_trainer.options import TrainOptions, flag_name, list_types
from mini_trainer.options.fields import COLUMN_NAMES
from mini_trainer.options.foreign_names import NO_NOISE, PRIVATE, RANK_STABLE, RATES_BY_NAME, TABLE, TRACKED, find_row
from mini_trainer.options.tools import ProcessDataOptions

LEAST_SIMILARITY = 0.75  # below, most suggestions mean something else: --sharding-strategy is not --learning-rate
# Names that options had, and what to use instead.
RENAMED: dict[str, str] = {
    "warmup_ratio": "--num-warmup-steps takes a share below 1, such as 0.03",
    "ema_decay": "--ema-half-life, in samples: the batch's size x ln 0.5 / ln DECAY",
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), "--kto-weight-ratio is the first over the second"),
    "preference_label_smoothing": "--label-smoothing",
    "validate_training_data": "--validation-data-path training-data",
    "validate_average": "--weight-average ema is validated beside the model",
    "write_predictions": "evaluate_model.py --data writes the predictions of each sample",
    "reuse_reference_only": "log-probabilities that an earlier run kept beside the data are reused by themselves",
    **{f"{name}_field": f"--columns {name}=COLUMN" for name in COLUMN_NAMES},
    **dict.fromkeys(("track_project", "track_name"), TRACKED),
    "hub_private": PRIVATE,
    "hub_license": "the license of the base model's card is taken over; change it in the repository's README.md",
    "lora_use_rslora": RANK_STABLE,
    "mock_length": "--block-size",
    "as_chat": "--format alpaca --columns prompt=prompt completion=completion",
    "strict_reasoning": "--refuse left-out",
    "control_tokens": "--refuse markers",
    "append_stop_token": "--missing-stop-token append",
    "allow_missing_stop_token": "--missing-stop-token allow",
    **dict.fromkeys(("plan_world_size", "plan_device"), "--plan-for 8, or 8xH100"),
    **dict.fromkeys(("num_cycles", "lr_power"), "--lr-shape"),
    "muon_momentum": "it is always 0.95",
    "muon_scale": "it is always that of AdamW's updates, so that AdamW's learning rates carry over",
    **dict.fromkeys(("adam_learning_rate", "layer_lr_decay"), RATES_BY_NAME),
    "callback_errors": "an exception ends the run; catch it in the hook to continue",
    "osft_rank_allocation": "every layer keeps the same share (--osft-unfreeze-rank-ratio); --osft-keep-energy lets the"
    " activations decide how many",
    "allow_downloads": "images are read from files and data: URLs: download them before",
    "allow_env": "give the option as a flag, whose variables the shell fills in",
    "neftune_alpha": NO_NOISE,
    "follow": "mini-trainer board DIR follows the runs in a directory, and their curves",
}
REMOVED = {  # values that options had
    ("preference_loss", "robust"): "dpo with --label-smoothing, which also allows for swapped pairs",
    ("preference_loss", "hinge"): "dpo, or ipo, which also stops at a margin",
    ("preference_loss", "apo-down"): "apo-zero or dpo",
    ("track", "trackio"): "wandb, tensorboard or mlflow; the metrics files have every number",
}
PROGRAMS = {"train.py": list_types(TrainOptions), "process_data.py": list_types(ProcessDataOptions)}


def describe_unknown(name: str, known: Collection[str], *, spell: Callable[[str], str]) -> str:
    """The end of a message about an unknown option: a reason, the option that may be meant, or nothing.
    `known`: options of the program, with no_ in front where that turns one off. `spell`: writes one as users do."""
    if (old := name.removeprefix("no_")) in RENAMED:
        return f": {name_programs(RENAMED[old], known)}"
    is_off = name.startswith(("no_", "disable_"))
    for each in (name, re.sub("^(no|disable|use|enable|with)_", "", name)):
        row = None if find_program(each) else find_row(each)
        if row is not None and not row.options:
            return f": {name_programs(row.reason, known)}"
        meant = [each] if row is None else row.list_options(each)
        if option := next((option for option in meant if option in known), None):
            value = row.values.get(True) if row is not None and each == name and spell is flag_name else None
            given = f" {value}" if isinstance(value, str) else ""
            return f"; did you mean {spell(f'no_{option}' if is_off and f'no_{option}' in known else option)}{given}?"
        if program := find_program(meant[0]):
            return f"; {flag_name(meant[0])} is an option of {program}"
    close = difflib.get_close_matches(
        name, [option for option in known if is_off or not option.startswith("no_")], n=1, cutoff=LEAST_SIMILARITY
    )
    return f"; did you mean {spell(close[0])}?" if close else ""


def describe_value(option: str, value: str) -> str:
    """The end of a message about an unknown value of an option: what to use instead of one that is gone, what another
    trainer's is here, or nothing."""
    if (option, value) in REMOVED:
        return f"; {value} was removed: use {REMOVED[option, value]}"
    row = next((row for row in TABLE if option in row.list_options(option) and value in row.values), None)
    if row is None:
        return ""
    ours = row.convert(value, name=option)
    others = "".join(f" with {flag_name(name)}" for name in ours if name != option)
    return f"; did you mean {ours.get(option, value)}{others}?"


def find_program(option: str) -> str | None:
    return next((program for program, options in PROGRAMS.items() if option in options), None)


def name_programs(text: str, known: Collection[str]) -> str:
    """A text with the program's name after options that are another program's."""

    def name_program(flag: re.Match) -> str:
        option = flag[1].replace("-", "_")
        program = None if option in known else find_program(option)
        return flag[0] if program is None else f"{flag[0]} of {program}"

    return re.sub(r"--([a-z][a-z\d-]+)", name_program, text)
