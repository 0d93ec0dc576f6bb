"""Merging models of one architecture tensor by tensor, from file to file, without a whole model in memory.

A weighted mean of models (model soups, Wortsman et al. 2022, arXiv 2203.05482), or a base plus a weighted sum of task
vectors (task arithmetic, Ilharco et al. 2023, arXiv 2212.04089).
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mini_trainer.data.stores.disk import (
    commit,
    describe_failed_write,
    hash_json,
    make_aside,
    make_parent,
    read_object,
    sync_dir,
    sync_file,
)
from mini_trainer.data.stores.model_files import INDEX, WEIGHTS, check_weights, find_model, list_weights
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer, load_tokenizer
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import show_progress
from mini_trainer.model.fingerprints import fingerprint_model
from mini_trainer.model.stored_tensors import Stored, check_finite, find_quantization, find_stored

SHARD_BYTES = 2 << 30  # target size of a written weight file; a single tensor may be larger
ROW_BYTES = 256 << 20  # fp32 bytes of the rows computed at once
# Keys of a config that do not affect the model's architecture.
OF_NO_MATTER = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "eos_token_id",
                "bos_token_id", "pad_token_id"}  # fmt: skip
NOTE = "merge.json"  # in the new directory: the models and weights used


@dataclass(frozen=True)
class StoredModel:
    """A model's directory and the tensors in its files."""

    name: str
    directory: Path
    tensors: dict[str, Stored]


def open_models(names: Sequence[str], base: str | None) -> tuple[list[StoredModel], StoredModel | None]:
    """Opens the models; ValueError, with the first difference, if they are not of one architecture."""
    models = [open_model(name, flag="--model") for name in names]
    base_model = None if base is None else open_model(base, flag="--base")
    first, others = models[0], [*models[1:], *([] if base_model is None else [base_model])]
    for other in others:
        check_same_model(first, other)
        check_same_tokenizer(first, other, is_base=other is base_model)
    return models, base_model


def open_model(name: str, *, flag: str) -> StoredModel:
    if not Path(name).is_dir():
        raise ValueError(f"{flag} {name}: is not a directory; give a model's directory")
    directory = Path(find_model(name, revision=None, trust_remote_code=False, flag=flag))
    check_weights(directory)
    if find_quantization(directory) is not None:
        raise ValueError(f"{flag} {name}: is quantized, and quantized weights cannot be merged: use the bf16 model")
    return StoredModel(name, directory, find_stored(directory))


def check_same_model(first: StoredModel, other: StoredModel) -> None:
    """ValueError if architecture, tensors or shapes differ."""
    configs = [read_object(model.directory / "config.json") for model in (first, other)]
    mine, its = ({key: value for key, value in config.items() if key not in OF_NO_MATTER} for config in configs)
    changed = sorted(key for key in mine.keys() | its.keys() if mine.get(key) != its.get(key))
    if changed:
        shown = ", ".join(f"{key} {mine.get(key)} and {its.get(key)}" for key in changed[:3])
        raise ValueError(f"{other.name}: cannot be merged with {first.name}: their configs differ: {shown}")
    for a, b in ((first, other), (other, first)):
        missing = sorted(a.tensors.keys() - b.tensors.keys())
        if missing:
            raise ValueError(
                f"{b.name}: cannot be merged with {a.name}: it has no {missing[0]} ({len(missing)} missing)"
            )
    for name, tensor in first.tensors.items():
        mine, its = list(tensor.shape), list(other.tensors[name].shape)
        if its != mine:
            raise ValueError(f"{other.name}: cannot be merged with {first.name}: {name} is {its}, not {mine}")


def check_same_tokenizer(first: StoredModel, other: StoredModel, *, is_base: bool) -> None:
    """ValueError if tokenizers differ; warns if chat templates differ, except for the base's."""
    mine, its = (load_tokenizer(str(model.directory), flag="--model") for model in (first, other))
    if fingerprint_tokenizer(mine) != fingerprint_tokenizer(its):
        raise ValueError(f"{other.name}: cannot be merged with {first.name}: their tokenizers differ")
    if not is_base and fingerprint_chat_template(mine) != fingerprint_chat_template(its):
        log.warning(f"warning: chat templates differ: keeping {first.name}'s, not {other.name}'s")


def merge_into(
    output_dir: Path, models: Sequence[StoredModel], weights: Sequence[float], base: StoredModel | None
) -> None:
    """Writes the merged model next to `output_dir`, then renames it."""
    first = models[0]
    shards = plan_shards(first)
    weight_bytes = sum(size for shard in shards for size in shard.values())
    needed_bytes = weight_bytes + sum(file.stat().st_size for file in list_companions(first.directory))
    make_parent(output_dir)
    aside = make_aside(output_dir, needed_bytes, what="the model", spare_bytes=0)
    try:
        for file in list_companions(first.directory):
            shutil.copyfile(file, aside / file.name)
        names = {}
        for number, shard in enumerate(show_progress(shards, "merging", unit="file"), start=1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_shard(aside / file, shard, models, weights, base)
            names |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": weight_bytes}, "weight_map": names}
            (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (aside / NOTE).write_text(json.dumps(describe(models, weights, base), indent=2) + "\n")
        for file in aside.iterdir():
            sync_file(file)
        sync_dir(aside)
        commit(aside, output_dir)
    except (OSError, SafetensorError) as error:
        raise OSError(describe_failed_write(f"the model {output_dir}", error, aside, needed_bytes)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_shard(
    path: Path, names: Iterable[str], models: Sequence[StoredModel], weights: Sequence[float], base: StoredModel | None
) -> None:
    """Merges these tensors and writes them; their memory is freed before the next file."""
    tensors = {name: mix_tensor(name, models, weights, base) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})


def plan_shards(model: StoredModel) -> list[dict[str, int]]:
    """Sizes in bytes of each written file's tensors, by name, in the order of the model's own files."""
    shards: list[dict[str, int]] = [{}]
    num_bytes = 0  # size of the last shard
    for name, size in list_sizes(model):
        if shards[-1] and num_bytes + size > SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = size
        num_bytes += size
    return shards


def list_sizes(model: StoredModel) -> Iterator[tuple[str, int]]:
    """Every tensor's name and size in bytes, from the files' headers."""
    for file in list_weights(model.directory):
        with open(model.directory / file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, end - start


def mix_tensor(name: str, models: Sequence[StoredModel], weights: Sequence[float], base: StoredModel | None) -> Tensor:
    """Computes one tensor of the new model, in the first model's dtype, a few rows at a time."""
    rows = read_rows(models[0], name, 0, 1)
    shape = models[0].tensors[name].shape
    if not rows.is_floating_point():
        return copy_equal(name, [*models, *([] if base is None else [base])])
    mixed = torch.empty(shape, dtype=rows.dtype)
    num_rows = shape[0] if shape else 1
    at_once = max(1, ROW_BYTES // (4 * max(1, mixed.numel() // max(num_rows, 1))))
    for start in range(0, num_rows, at_once):
        end = min(start + at_once, num_rows)
        origin = None if base is None else read_rows(base, name, start, end).float()
        total = torch.zeros(()) if origin is None else origin.clone()
        for model, weight in zip(models, weights, strict=True):
            own = read_rows(model, name, start, end).float()
            total = total + weight * (own if origin is None else own - origin)
        (mixed[start:end] if shape else mixed).copy_(total)
    return mixed


def read_rows(model: StoredModel, name: str, start: int, end: int) -> Tensor:
    """Reads rows of a tensor in its stored dtype; a scalar counts as one row."""
    tensor = model.tensors[name].read()
    return check_finite(tensor[start:end] if tensor.ndim else tensor, name, where=model.name)


def copy_equal(name: str, models: Sequence[StoredModel]) -> Tensor:
    """Returns an integer tensor, which cannot be merged; ValueError unless all models have the same."""
    tensors = [model.tensors[name].read() for model in models]
    different = [model.name for model, own in zip(models, tensors, strict=True) if not torch.equal(own, tensors[0])]
    if different:
        raise ValueError(f"{different[0]}: the integer tensor {name} differs from {models[0].name}'s")
    return tensors[0]


def list_companions(directory: Path) -> list[Path]:
    """Config, tokenizer and all other files besides the weights, except a run's notes and manifest."""
    left_out = {INDEX, NOTE, "manifest.json", "README.md"}
    files = (file for file in directory.iterdir() if file.is_file())
    return [file for file in files if file.suffix != ".safetensors" and file.name not in left_out]


def describe(models: Sequence[StoredModel], weights: Sequence[float], base: StoredModel | None) -> dict[str, Any]:
    """Contents of `NOTE`: the merged models, their weights and a digest."""

    def identify(model: StoredModel) -> dict[str, str]:
        return {"name": model.name, "fingerprint": fingerprint_model(str(model.directory))}

    parts = [identify(model) | {"weight": weight} for model, weight in zip(models, weights, strict=True)]
    recipe = {"models": parts} | ({} if base is None else {"base": identify(base)})
    return recipe | {"digest": hash_json(recipe)}
