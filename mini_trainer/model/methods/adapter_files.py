"""Adapters on disk in peft's format, and their base models."""

import copy
import functools
import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mini_trainer.data.stores.contents import Tell, verify_model
from mini_trainer.data.stores.disk import hash_file, read_object
from mini_trainer.data.stores.model_files import GENERATION, check_values
from mini_trainer.distributed.ending import log
from mini_trainer.model.config import load_generation_file
from mini_trainer.model.methods.adapter_settings import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PREFIX,
    check_patterns,
    check_settings,
    read_settings,
)
from mini_trainer.model.stored_tensors import Reader, check_finite, read_tensor
from mini_trainer.model.weights import grow_rows
from mini_trainer.options.problems.finding import require

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    from mini_trainer.model.method import MetaModel

TOKENIZER_CONFIG = "tokenizer_config.json"
BASE_FILE = "base_model.json"  # next to config and weights: name, revision and fingerprint of the base model


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file()


def find_beside(adapter: Path | None, name: str) -> Path | None:
    """Directory of the adapter's own file `name`: the adapter's, or that of the merged model whose export contains it.

    None without an adapter, and for adapters without the file, to which the base model's applies.
    """
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


def verify_adapter(directory: Path, tell: Tell = log.info) -> None:
    """Checks an adapter's files against the hashes of its export (`verify_model`)."""
    verify_model(directory, [ADAPTER_WEIGHTS], tell)


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
    is_directory = Path(name).is_dir()
    return name, None if is_directory else known.get("revision")


def check_adapter(adapter: Path, *, flag: str) -> None:
    """ValueError, naming `flag`, for an adapter that peft cannot run, or not as it was trained."""
    check_readable(adapter, flag=flag)
    check_settings(adapter, flag=flag, reader="peft")


def check_readable(adapter: Path, *, flag: str) -> None:
    """ValueError if a file of the adapter is missing, or the package that reads adapters."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise ValueError(f"{flag} {adapter}: has no {name}; give the directory of an adapter in peft's format")
    require("peft", flag=f"{flag} {adapter}")


def read_config(directory: Path, *, flag: str = "--lora-adapter", trains: bool = False) -> "LoraConfig":
    """Reads peft's config of a LoRA adapter; ValueError, naming `flag`, if it is missing or of another kind.

    `trains`: the adapter will be trained, not only run.
    """
    check_readable(directory, flag=flag)
    from peft import PeftConfig

    check_settings(directory, flag=flag, trains=trains)
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
    with safe_open(directory / ADAPTER_WEIGHTS, framework="pt") as file:
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
    if known and not {"name", "fingerprint"} <= known.keys():
        raise ValueError(
            f"{path}: does not name the model that the adapter was trained on: remove the file, or copy it again"
        )
    if known and known["fingerprint"] != base["fingerprint"]:
        raise ValueError(
            f"adapter {directory}: was trained on a different model ({known['name']}, by its config and weights)"
            f" than --model-name-or-path {base['name']}: give that model"
        )
    name = config.base_model_name_or_path
    if not known and name and Path(name).name != Path(base["name"]).name:
        log.warning(f"warning: adapter {directory}: was trained on {name}; this model is {base['name']}")


def read_adapter(
    directory: Path, meta: "MetaModel", saved_names: dict[str, str], *, new: Collection[str]
) -> dict[str, Reader]:
    """Returns a reader for each trained parameter that the adapter holds; `saved_names` has their names in the file.

    Parameters in `new` may be missing, and a head may be for other labels: these start as without the adapter. Rows of
    added tokens are appended to embeddings and heads. ValueError if the file holds other names or shapes.
    """
    path, model = directory / ADAPTER_WEIGHTS, meta.model
    try:
        with safe_open(path, framework="pt") as file:
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
    missing = {key for key in wanted.keys() - stored.keys() if saved_names[key] not in new}
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
    readers: dict[str, Reader] = {}
    for saved in wanted.keys() & stored.keys() - of_labels:
        read = functools.partial(read_finite, path, saved)
        is_short = saved in grown
        readers[saved_names[saved]] = functools.partial(grow_rows, read, wanted[saved][0]) if is_short else read
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


def read_finite(path: Path, saved: str) -> Tensor:
    return check_finite(read_tensor(path, saved), saved, where=f"adapter {path}")


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
