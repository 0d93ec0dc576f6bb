"""Adapters on disk in peft's format: their settings, their files, and their base models.

An adapter whose config has an unsupported key is refused, and the key named. Regular expressions over a model's names
have a limit on their time: those of an adapter are its author's.
"""

import copy
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mini_trainer.data.stores.contents import verify_model
from mini_trainer.data.stores.json_lines import refuse_repeated_keys
from mini_trainer.data.stores.model_files import GENERATION, check_values
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.limits import time_limit
from mini_trainer.model.config import load_generation_file
from mini_trainer.model.stored_tensors import Readers, read_tensor
from mini_trainer.model.weights import grow_rows, read_finite
from mini_trainer.options.learning import MOST_RANK
from mini_trainer.options.problems.finding import require
from mini_trainer.options.reading import hash_file, open_tensors, read_object, read_text

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    from mini_trainer.model.method import MetaModel


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
    ValueError, beginning with `where`, for an invalid pattern, and for one that takes too long."""
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

Runner = Literal["here", "peft", "vllm"]  # the program that runs the adapter
RUNNERS = {"here": "this program", "peft": "generating with peft", "vllm": "vLLM"}
FOLLOWED_BY = {"here": FOLLOWED, "peft": FOLLOWED | BY_PEFT, "vllm": FOLLOWED - NOT_BY_VLLM}

PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # which leave the base's weights as they are
REPEATABLE_INITS = ("pissa", "olora")  # repeated exactly by peft on the base when it loads the adapter

TIED = (
    "the base ties its head to its embedding, and the adapter has trained them apart; save a base with"
    " tie_word_embeddings: false, or merge the adapter with peft"
)

CONVERSION = (
    "convert it to an ordinary adapter with peft: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)

MOST_ALPHA = 1e9  # far above values in use, and far below fp32 overflow


def check_settings(directory: Path, *, flag: str, runner: Runner = "here") -> None:
    """ValueError, naming `flag` and the setting, if the adapter has a setting that its runner does not support."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = read_settings(directory, flag=flag)
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(str(settings.get("peft_type")))
    if config_class is None:
        raise ValueError(f"{flag} {directory}: peft_type {settings.get('peft_type')!r} is unknown to peft")
    missing = dataclasses.MISSING
    fields = {
        field.name: field.default if field.default_factory is missing else field.default_factory()
        for field in dataclasses.fields(config_class)
    }
    given = {name: value for name, value in settings.items() if value not in (None, False, [], {}, fields.get(name))}
    unknown = given.keys() - fields.keys() - {"runtime_config"}
    if settings["peft_type"] == "LORA":
        unknown |= given.keys() - INERT - FOLLOWED_BY[runner]
        check_numbers(settings, directory, flag)
        check_init(settings.get("init_lora_weights", True), directory, flag, runner=runner)
    elif runner != "peft":
        raise ValueError(f"{flag} {directory}: is of type {settings['peft_type']}, but only LORA is supported here")
    if unknown:
        named = ", ".join(f"{name}: {json.dumps(given[name])[:60]}" for name in sorted(unknown))
        raise ValueError(
            f"{flag} {directory}: {ADAPTER_CONFIG} has settings that {RUNNERS[runner]} does not support, and without"
            f" which the adapter would give wrong results: {named}. Merge it with the program that trained it"
        )
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in read_shapes(directory)}
    check_patterns(settings, modules, where=f"{flag} {directory}: {ADAPTER_CONFIG}")


def check_numbers(settings: dict[str, Any], directory: Path, flag: str) -> None:
    """ValueError for ranks above the file's own sizes, for which nobody should reserve memory, and for alphas that
    nothing can compute with. peft checks neither."""
    most = min(MOST_RANK, max((size for shape in read_shapes(directory).values() for size in shape), default=MOST_RANK))
    for name, patterns, is_allowed, allowed in (
        ("r", "rank_pattern", lambda rank: type(rank) is int and 1 <= rank <= most, f"an integer from 1 to {most:,}"),
        ("lora_alpha", "alpha_pattern", is_alpha, f"a number other than 0, of magnitude at most {MOST_ALPHA:.0e}"),
    ):
        own, values = settings.get(patterns) or {}, {name: settings.get(name, 1)}
        values |= {f"{patterns}: {key}": v for key, v in own.items()} if isinstance(own, dict) else {patterns: own}
        for key, value in values.items():
            if not is_allowed(value):
                given = json.dumps(value)[:60]
                raise ValueError(f"{flag} {directory}: {ADAPTER_CONFIG}: {key} is {given}, but must be {allowed}")


def is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < abs(value) <= MOST_ALPHA  # False for NaN and infinity


def read_shapes(directory: Path) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors by name; empty if they cannot be read, which their reader says."""
    try:
        with open_tensors(directory / ADAPTER_WEIGHTS, "numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}


def read_settings(directory: Path, *, flag: str) -> dict[str, Any]:
    try:
        text = read_text(directory / ADAPTER_CONFIG)
        settings = json.loads(text, object_pairs_hook=refuse_repeated_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {directory}: {ADAPTER_CONFIG} cannot be used: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{flag} {directory}: {ADAPTER_CONFIG} cannot be used: it is not a JSON object")
    return settings


def check_init(init: Any, directory: Path, flag: str, *, runner: Runner) -> None:
    """ValueError for an initialization that may have changed the base's weights, unless peft can repeat it."""
    name = init.lower() if isinstance(init, str) else init
    if name not in PLAIN_INITS and not (runner == "peft" and name in REPEATABLE_INITS):
        raise ValueError(
            f"{flag} {directory}: init_lora_weights {init!r} may have changed the base's weights when the adapter was"
            f" created, so it would give wrong results with the stored weights: {CONVERSION}"
        )


TOKENIZER_CONFIG = "tokenizer_config.json"
BASE_FILE = "base_model.json"  # next to config and weights: name, revision and fingerprint of the base model


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file()


def find_beside(adapter: Path | None, name: str) -> Path | None:
    """Directory of the adapter's own file `name`: the adapter's, or that of the merged model whose export contains it.
    None without an adapter, and for adapters without the file, to which the base model's applies."""
    places = [] if adapter is None else [adapter, adapter.parent]
    return next((path for path in places if (path / name).is_file()), None)


def read_generation_config(adapter: Path | None) -> GenerationConfig | None:
    """The adapter's own generation config, None if it has none; ValueError if it cannot be used."""
    directory = find_beside(adapter, GENERATION)
    if directory is None:
        return None
    check_values(read_object(directory / GENERATION), directory / GENERATION)
    return load_generation_file(directory)


def hash_adapter(directory: Path) -> dict[str, str]:
    """SHA-256 of config and weights, by file name."""
    return {name: hash_file(directory / name)["sha256"] for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


def verify_adapter(directory: Path) -> None:
    """Checks an adapter's files against the hashes of its export (`verify_model`)."""
    verify_model(directory, [ADAPTER_WEIGHTS])


def find_base(adapter: Path, *, flag: str) -> tuple[str, str | None]:
    """Name and revision of an adapter's base model, according to its files."""
    try:
        if (adapter / BASE_FILE).is_file():
            known = read_object(adapter / BASE_FILE)
            return known["name"], known.get("revision")
        known = read_object(adapter / ADAPTER_CONFIG)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{flag} {adapter}: cannot read the name of the adapter's base model: {error}") from None
    name = known.get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{flag} {adapter}: the adapter does not name its base model: give both")
    return name, None if Path(name).is_dir() else known.get("revision")


def check_readable(adapter: Path, *, flag: str) -> None:
    """ValueError if a file of the adapter is missing, or the package that reads adapters."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise ValueError(f"{flag} {adapter}: has no {name}; give the directory of an adapter in peft's format")
    require("peft", flag=f"{flag} {adapter}")


def read_config(directory: Path, *, flag: str = "--lora-adapter") -> "LoraConfig":
    """Reads peft's config of a LoRA adapter; ValueError, naming `flag`, if it is missing or of another kind."""
    check_readable(directory, flag=flag)
    from peft import PeftConfig

    check_settings(directory, flag=flag)
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{flag} {directory}: {ADAPTER_CONFIG} cannot be used: {error}") from None
    config.init_lora_weights = True
    return config


def add_adapter(model: PreTrainedModel, directory: Path) -> "PeftModel":
    """Loads the adapter into `model` with peft; ValueError unless the file holds exactly the adapter's tensors."""
    from peft import PeftModel, get_peft_model_state_dict

    settings = read_settings(directory, flag="adapter")
    check_patterns(settings, list_names(model), where=f"{directory / ADAPTER_CONFIG}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # peft reads it
        warnings.filterwarnings("error", message=r"[\s\S]*Found missing adapter keys")  # these would stay untrained
        try:
            adapted = PeftModel.from_pretrained(model, str(directory))
        except UserWarning as error:
            raise ValueError(f"tensors are missing in {ADAPTER_WEIGHTS}: {error}") from None
    known = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() | adapted.state_dict().keys()
    with open_tensors(directory / ADAPTER_WEIGHTS) as file:
        unknown = sorted(set(file.keys()) - known)
    if unknown:
        raise ValueError(f"{ADAPTER_WEIGHTS} has {len(unknown)} unexpected tensors, such as {unknown[0]}")
    return adapted


def list_names(model: PreTrainedModel) -> list[str]:
    """Names of all modules and parameters, which an adapter's patterns are about."""
    return [name for name, _ in (*model.named_modules(), *model.named_parameters())]


def check_base(directory: Path, config: "LoraConfig", base: dict[str, Any]) -> None:
    """ValueError if the adapter's base model is not `base`; only a warning if just their names are known."""
    path = directory / BASE_FILE
    known = read_object(path) if path.is_file() else {}
    if known and known["fingerprint"] != base["fingerprint"]:
        raise ValueError(
            f"adapter {directory}: was trained on a different model ({known['name']}, by its config and weights)"
            f" than --model-name-or-path {base['name']}: give that model"
        )
    name = config.base_model_name_or_path
    if not known and name and Path(name).name != Path(base["name"]).name:
        log.warning(f"warning: adapter {directory}: was trained on {name}; this model is {base['name']}")


def read_adapter(
    directory: Path, meta: "MetaModel", saved_names: dict[str, str], *, new: Collection[str], ties: bool
) -> Readers:
    """Returns a reader for each trained parameter that the adapter holds; `saved_names` has their names in the file,
    several for a parameter of tied modules, which share it in the adapter's own model too if it `ties` them.

    Parameters in `new` may be missing, and a head may be for other labels: these start as without the adapter. Rows of
    added tokens are appended to embeddings and heads. ValueError if the file holds other names or shapes.
    """
    path, model = directory / ADAPTER_WEIGHTS, meta.model
    try:
        with open_tensors(path) as file:
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter {path}: cannot be read: {error}") from None
    params = dict(model.named_parameters())
    wanted = {saved: tuple(params[name].shape) for saved, name in saved_names.items()}
    unused = find_unused(stored.keys() - wanted.keys(), meta)
    wrong = {key for key, shape in wanted.items() if stored.get(key, shape) != shape}
    heads = tuple(f"{PREFIX}{name}." for name in meta.family.find_head(model))
    of_labels = {key for key in wrong if key.startswith(heads)}
    grown = {key for key in wrong - of_labels if is_grown(key, stored[key], wanted[key], model)}
    held = {saved_names[key] for key in wanted.keys() & stored.keys()}
    missing = {key for key in wanted.keys() - stored.keys() if saved_names[key] not in {*new, *(held if ties else ())}}
    if apart := sorted(key for key in missing if saved_names[key] in held):
        raise ValueError(f"adapter {directory}: holds another copy of {apart[0]}, which it leaves as it was: {TIED}")
    unknown, wrong = stored.keys() - wanted.keys() - unused, sorted(wrong - of_labels - grown)
    problems = [
        *(f"{len(found)} {kind}, such as {min(found)}" for kind, found in
          (("missing", missing), ("unexpected", unknown)) if found),
        *(f"{key} is {stored[key]}, not {wanted[key]}" for key in wrong[:1]),
    ]  # fmt: skip
    if problems:
        raise ValueError(f"adapter {directory}: does not fit --model-name-or-path: {'; '.join(problems)}")
    for keys, what in ((of_labels, "is for other labels"), (unused, "belongs to a part that this model does not have")):
        for key in sorted(keys):
            log.info(f"adapter {directory}: {key} {what}, and is left out")
    readers: Readers = {}
    for saved, name in saved_names.items():
        if saved not in stored or saved in of_labels:
            continue
        read = functools.partial(read_finite, functools.partial(read_tensor, path, saved), saved, f"adapter {path}")
        read = functools.partial(grow_rows, read, wanted[saved][0]) if saved in grown else read
        if name in readers and not torch.equal(readers[name](), read()):
            raise ValueError(f"adapter {directory}: holds another copy of {saved} too: {TIED}")
        readers[name] = read
    return readers


def find_unused(keys: Collection[str], meta: "MetaModel") -> set[str]:
    """Tensors of an adapter that belong to no module of a classifier, such as a language model's head."""
    modules = {name for name, _ in meta.model.named_modules()}
    owners = {key: key.removeprefix(PREFIX).rpartition(".")[0] for key in keys if ".lora_" not in key}
    return {key for key, owner in owners.items() if owner not in modules and not meta.family.keeps_unused}


def is_grown(key: str, found: tuple[int, ...], wanted: tuple[int, ...], model: PreTrainedModel) -> bool:
    """Whether the model has added tokens that the embedding or head `key` in the file, of shape `found`, lacks."""
    owner = model.get_submodule(key.removeprefix(PREFIX).rpartition(".")[0])
    is_by_token = owner in (model.get_input_embeddings(), model.get_output_embeddings())
    return is_by_token and found[1:] == wanted[1:] and found[0] < wanted[0]


def write_adapter(directory: Path, config: "LoraConfig", tensors: dict[str, Tensor], base: dict[str, Any]) -> None:
    """Writes an adapter for `PeftModel.from_pretrained`; `tensors` by their names in the file."""
    directory.mkdir(exist_ok=True)
    written = copy.deepcopy(config)
    for key in ("target_modules", "target_parameters"):  # the order of peft's sets differs between processes
        if isinstance(names := getattr(config, key), set):
            setattr(written, key, sorted(names))
    written.save_pretrained(str(directory))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # tied tensors are written twice
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (directory / BASE_FILE).write_text(json.dumps(base, indent=2) + "\n")
