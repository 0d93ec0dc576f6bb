"""Settings of LoRA adapters: an adapter whose config has an unsupported key is refused, and the key named.

Regular expressions over a model's names have a limit on their time: those of an adapter are its author's.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from mini_trainer.data.stores.json_lines import refuse_repeated_keys
from mini_trainer.distributed.process import time_limit
from mini_trainer.options.learning import MOST_RANK

SECONDS = 2.0  # for one pattern over all names; usual ones take milliseconds
PLAIN = re.compile(r"[\w.-]*")  # names, on which matching cannot take long

# The prefixes and suffixes that peft adds to the patterns of an adapter's config.
OF_PEFT = {
    **dict.fromkeys(("target_modules", "exclude_modules", "feedforward_modules"), ("", "")),
    "modules_to_save": (r"(^|.*\.)", r"($|\..*)"),
    "layers_pattern": (r"(?:(?:^|.*?\.)", r"\.(?P<idx>\d+)\.).*"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (r"(.*\.)?(", ")")),
}
ONLY_AS_TEXT = ("target_modules", "exclude_modules", "feedforward_modules")  # a list of these has plain names


def match_names(
    pattern: str, names: Collection[str], *, where: str, before: str = r"(.*\.)?(?:", after: str = ")"
) -> list[str]:
    """The names that a pattern matches in full, between `before` and `after`; by default also from a dot to the end.

    ValueError, beginning with `where`, for an invalid pattern, and for one that takes too long.
    """
    try:
        expression = re.compile(f"{before}{pattern}{after}")
        with time_limit(SECONDS):
            return [name for name in names if expression.fullmatch(name)]
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{where} {pattern:.100}: neither a name nor a regular expression: {error}") from None
    except TimeoutError:
        raise ValueError(
            f"{where} {pattern:.100}: takes longer than {SECONDS:g} seconds on {len(names):,} names: write it without"
            " repetitions of repetitions, or name the modules"
        ) from None


def check_patterns(settings: Mapping[str, Any], names: Collection[str], *, where: str) -> None:
    """ValueError for a pattern of an adapter's config on which peft would take too long; `where` names the file."""
    for key, (before, after) in OF_PEFT.items():
        value = settings.get(key)
        several = value if isinstance(value, (list, dict)) and key not in ONLY_AS_TEXT else ()
        for pattern in [value] if isinstance(value, str) else several:
            if isinstance(pattern, str) and not PLAIN.fullmatch(pattern):
                match_names(pattern, names, where=f"{where}: {key}", before=before, after=after)


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # prefix of every tensor name in that file

# peft's settings that affect an adapter's computation, and that training and merging support.
FOLLOWED = {
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "lora_dropout",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "modules_to_save", "ensure_weight_tying", "init_lora_weights",
}  # fmt: skip
# Settings that change no number: names, versions, and details of refused settings or of initializations.
INERT = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "runtime_config", "megatron_core", "qalora_group_size", "eva_config", "corda_config", "lora_ga_config",
    "loftq_config",
}  # fmt: skip
BY_PEFT = {"bias", "lora_bias", "trainable_token_indices"}  # supported only if peft runs the model
NOT_BY_VLLM = {"rank_pattern", "alpha_pattern", "modules_to_save", "use_dora"}  # ignored or not supported by vLLM

Reader = Literal["here", "peft", "vllm"]  # the program that runs the adapter
READERS = {"here": "this program", "peft": "generating with peft", "vllm": "vLLM"}
FOLLOWED_BY = {"here": FOLLOWED, "peft": FOLLOWED | BY_PEFT, "vllm": FOLLOWED - NOT_BY_VLLM}

PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # initializations that do not change the base's weights
FROZEN_B = "mica"  # does not change them either, but only half of each adapter may train
REPEATABLE_INITS = ("pissa", "olora", FROZEN_B)  # repeated exactly by peft on the base when it loads the adapter

CONVERSION = (
    "convert it to an ordinary adapter with peft: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)

MOST_ALPHA = 1e9  # far above values in use, and far below fp32 overflow


def is_whole(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_alpha(value: Any) -> bool:
    return is_number(value) and value != 0 and abs(value) <= MOST_ALPHA  # False for NaN and infinity


def is_rank(value: Any) -> bool:
    return is_whole(value, least=1) and value <= MOST_RANK


def is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def is_regex(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def is_pattern(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_regex(key) and is_item(item) for key, item in value.items())


# Allowed values of the keys that change the product: a check and its description. peft checks almost none of them.
NUMBER_OF_ALPHA = f"a number other than 0, of magnitude at most {MOST_ALPHA:.0e}"
RANK = f"an integer from 1 to {MOST_RANK:,}"
FLAG = (is_flag, "true or false")
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (is_rank, RANK),
    "lora_alpha": (is_alpha, NUMBER_OF_ALPHA),
    "lora_dropout": (lambda value: is_number(value) and 0 <= value < 1, "a number from 0 to less than 1"),
    "rank_pattern": (
        lambda value: is_pattern(value, is_rank),
        f"an object of regular expressions, each with {RANK}",
    ),
    "alpha_pattern": (
        lambda value: is_pattern(value, is_alpha),
        f"an object of regular expressions, each with {NUMBER_OF_ALPHA}",
    ),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "ensure_weight_tying"), FLAG),
}


def check_settings(directory: Path, *, flag: str, reader: Reader = "here", trains: bool = False) -> None:
    """ValueError, naming `flag` and the setting, if the adapter has a setting that its reader does not support.

    `trains`: the adapter will be trained.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = read_settings(directory, flag=flag)
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(str(settings.get("peft_type")))
    if config_class is None:
        raise ValueError(f"{flag} {directory}: peft_type {settings.get('peft_type')!r} is unknown to peft")
    fields = {field.name: get_default(field) for field in dataclasses.fields(config_class)}
    given = {name: value for name, value in settings.items() if value not in (None, False, [], {}, fields.get(name))}
    unknown = given.keys() - fields.keys() - {"runtime_config"}
    if settings["peft_type"] == "LORA":
        unknown |= given.keys() - INERT - FOLLOWED_BY[reader]
        check_values({name: settings[name] for name in settings.keys() - unknown}, directory, flag)
        check_init(settings.get("init_lora_weights", True), directory, flag, reader=reader, trains=trains)
    elif reader != "peft":
        raise ValueError(f"{flag} {directory}: is of type {settings['peft_type']}, but only LORA is supported here")
    if unknown:
        named = ", ".join(f"{name}: {json.dumps(given[name])[:60]}" for name in sorted(unknown))
        raise ValueError(
            f"{flag} {directory}: {ADAPTER_CONFIG} has settings that {READERS[reader]} does not support, and without"
            f" which the adapter would give wrong results: {named}. Merge it with the program that trained it"
        )
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in read_shapes(directory)}
    check_patterns(settings, modules, where=f"{flag} {directory}: {ADAPTER_CONFIG}")


def check_values(settings: dict[str, Any], directory: Path, flag: str) -> None:
    """ValueError for the first value of a wrong type or out of range, and for ranks above the file's own."""
    for name, (is_allowed, allowed) in ALLOWED.items():
        if name in settings and not is_allowed(settings[name]):
            given = json.dumps(settings[name])[:60]
            raise ValueError(f"{flag} {directory}: {ADAPTER_CONFIG}: {name} is {given}, but must be {allowed}")
    check_ranks(settings, directory, flag)


def check_ranks(settings: dict[str, Any], directory: Path, flag: str) -> None:
    """ValueError for a rank larger than the adapter's own matrices, which nobody should reserve memory for."""
    most = max((size for shape in read_shapes(directory).values() for size in shape), default=None)
    ranks = {"r": settings.get("r", 1)} | {f"rank_pattern: {k}": r for k, r in settings.get("rank_pattern", {}).items()}
    for name, rank in ranks.items():
        if most is not None and rank > most:
            raise ValueError(
                f"{flag} {directory}: {ADAPTER_CONFIG}: {name} is {rank}, but must be from 1 to {most:,}, the longest"
                f" side of a tensor in {ADAPTER_WEIGHTS}"
            )


def read_shapes(directory: Path) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors by name; empty if they cannot be read, which their reader says."""
    try:
        with safe_open(directory / ADAPTER_WEIGHTS, framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}


def read_settings(directory: Path, *, flag: str) -> dict[str, Any]:
    try:
        text = (directory / ADAPTER_CONFIG).read_text(encoding="utf-8")
        settings = json.loads(text, object_pairs_hook=refuse_repeated_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {directory}: {ADAPTER_CONFIG} cannot be used: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{flag} {directory}: {ADAPTER_CONFIG} cannot be used: it is not a JSON object")
    return settings


def get_default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_init(init: Any, directory: Path, flag: str, *, reader: Reader, trains: bool) -> None:
    """ValueError for an initialization that changed the base's weights, unless peft can repeat it."""
    name = init.lower() if isinstance(init, str) else init
    is_followed = name in PLAIN_INITS or (name == FROZEN_B and not trains) or name is None
    if is_followed or (reader == "peft" and name in REPEATABLE_INITS):
        return
    if name == FROZEN_B:
        raise ValueError(
            f"{flag} {directory}: init_lora_weights {init!r} (MiCA) trains only one matrix of each adapter, but here"
            f" both would be trained: merge it, or train another adapter"
        )
    raise ValueError(
        f"{flag} {directory}: init_lora_weights {init!r} changed the base's weights when the adapter was created, so"
        f" it would give wrong results with the stored weights: {CONVERSION}"
    )
