"""Reads a model's weights from its safetensors files one tensor at a time: no process ever holds the whole model;
and gathers a sharded model's tensors on rank 0, one at a time.

transformers decides which stored tensors make up which parameters (renamed keys, prefixes, experts that are stored
separately and fused in the model): its own loader runs once on placeholders without data, which yields the mapping.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from mini_trainer.data.stores.model_files import list_weights
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import without_library_bars
from mini_trainer.distributed.world import World
from mini_trainer.model.config import ModelSource
from mini_trainer.model.precision import choose_types
from mini_trainer.model.stored_tensors import (
    QUANTIZED_TYPES,
    Reader,
    Readers,
    Stored,
    StoredFiles,
    check_finite,
    choose_dtype,
    find_quantization,
)
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text_tower import text_config

# transformers' conversions that change no number: tensors stored in bf16 stay in bf16, at half the memory of fp32.
MOVING_OPERATIONS = {
    "Chunk", "Split", "Concatenate", "Interleave", "MergeModulelist", "SplitModulelist", "Transpose", "PermuteForRope",
}  # fmt: skip

NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names

# Errors that transformers' internals, which change between versions, and torch on placeholders may raise.
NOT_PLANNABLE = (ImportError, AttributeError, TypeError, KeyError, RuntimeError)


def read_weights(source: ModelSource, family: Family) -> Readers:
    """Returns a function by name that reads each parameter and buffer; for tied parameters, only the source's.
    Embeddings (and rows of the head) of new tokens, and those that the config has beyond the files', are the mean of
    the others. ValueError if the weights do not match the config."""
    model_dir = source.directory
    try:
        model, readers, report = plan_reading(source, family)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--model-name-or-path {model_dir}: cannot load the weights: {error}") from None
    except NOT_PLANNABLE as error:
        if find_quantization(model_dir) is not None:
            raise ValueError(
                f"--model-name-or-path {model_dir}: the quantized weights cannot be read one by one: use the bf16"
                f" release ({type(error).__name__}: {error})"
            ) from None
        log.warning(
            f"warning: {model_dir}: the weights cannot be read one by one, so rank 0 loads the whole model in fp32, and"
            f" exports omit tensors that transformers' model does not use ({type(error).__name__}: {error})"
        )
        model, readers, report = read_whole(source, family)
    if report.get("unused"):
        log.info(describe_unused(report["unused"], are_kept=family.keeps_unused))
    initialize_missing(model, readers, report, family)
    problems = [f"{kind}: {report[kind]}" for kind in ("missing_keys", "mismatched_keys") if report[kind]]
    if problems:
        raise ValueError(f"--model-name-or-path {model_dir}: the weights do not fit the config: {'; '.join(problems)}")
    for target, origin in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        is_twice = target in readers and origin in readers
        if is_twice and not torch.equal(readers[target](), readers[origin]()):
            raise ValueError(
                f"--model-name-or-path {model_dir}: the config ties the head to the embedding, but the weights"
                " contain two different ones: set tie_word_embeddings to false in config.json to train both"
            )
        if target in readers:
            readers.setdefault(origin, readers[target])
            del readers[target]
    family.leave_out(model)
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = params | {name for name, _ in model.named_buffers(remove_duplicate=False)}
    where = f"--model-name-or-path {model_dir}"
    readers = {
        name: partial(read_finite, read, name, where) if name in params else read
        for name, read in readers.items()
        if name in kept
    }
    vocab_size = text_config(source.config).vocab_size
    if vocab_size > text_config(model.config).vocab_size or source.new_tokens:
        initialize_tokens(model, readers, vocab_size, source.new_tokens)
    return readers


def read_finite(read: Reader, name: str, where: str) -> Tensor:
    return check_finite(read(), name, where=where)


def initialize_missing(model: PreTrainedModel, readers: Readers, report: dict[str, Any], family: Family) -> None:
    """Adds readers for parameters that the family initializes, such as a classifier's head; updates the report."""
    others = {key[0] for key in report["mismatched_keys"]}  # of a different shape: a head for other labels
    absent = {*report["missing_keys"], *others}
    made = family.make_missing(model, sorted(absent))
    if not made:
        return
    readers |= {name: partial(torch.Tensor.detach, tensor) for name, tensor in made.items()}
    report["missing_keys"] = [key for key in report["missing_keys"] if key not in made]
    report["mismatched_keys"] = [key for key in report["mismatched_keys"] if key[0] not in made]
    discarded = ", ".join(sorted(others & made.keys()))
    replaced = f" ({discarded} for other labels are discarded)" if discarded else ""
    log.info(f"newly initialized, since the model's files do not have them: {', '.join(sorted(made))}{replaced}")


def plan_reading(source: ModelSource, family: Family) -> tuple[PreTrainedModel, Readers, dict[str, Any]]:
    """Returns the model without data, a reader for each of its tensors, and transformers' loading report.
    Buffers that the model computes and no file holds, such as rotary frequencies, are computed here, in fp32."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    # Make the model that its files describe, and list their tensors.
    model_dir, trust_remote_code = source.directory, source.trust_remote_code
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    own_dtype = choose_dtype(config)  # making the model overwrites the config's dtype
    with torch.device("meta"):
        model = family.make_model(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    files = StoredFiles(Path(model_dir))
    stored = open_stored(files.find(), source, model, own_dtype)
    wanted = model.state_dict()

    named, by_pattern = name_stored(model, stored)
    sources = group_sources(named)
    raw = [key for keys in sources.values() for key, _ in keys if stored[key].dtype in QUANTIZED_TYPES]
    if raw:
        raise ValueError(
            f"{raw[0]} is stored as {stored[raw[0]].dtype}, and neither config nor scales say how to dequantize it (of"
            " bitsandbytes' weights, only those in 4 bits can be): use the bf16 release"
        )

    # Run transformers' loader on placeholders: everything that from_pretrained checks, and the computed buffers.
    computed = [name for name, _ in model.named_non_persistent_buffers()]
    loading = LoadStateDictConfig(
        pretrained_model_name_or_path=model_dir,
        ignore_mismatched_sizes=True,  # the caller refuses them
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),
        device_map={"": "meta", **dict.fromkeys(computed, "cpu")},
    )
    stand_ins = {key: torch.empty(tensor.shape, device="meta") for key, tensor in stored.items()}
    with without_library_bars():  # nothing is read here
        info, _ = convert_and_load_state_dict_in_model(model, stand_ins, loading)
    info = model._finalize_model_loading(model, loading, info)

    # Make a reader for every tensor: read directly, or converted from several stored ones.
    def convert(name: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(by_pattern[sources[name][0][1]])
        for key, pattern in sources[name]:
            converter.add_tensor(name, key, pattern, partial(read, key))
        values = converter.convert(name, model=model, config=config, loading_info=info)
        return {target: value[0] if isinstance(value, list) else value for target, value in values.items()}

    def read_converted(name: str, target: str) -> Tensor:
        keeps_type = find_kept_type(sources[name], stored, by_pattern) is not None

        def read(key: str) -> Tensor:
            tensor = stored[key].read()
            return tensor if keeps_type else tensor.to(wanted[target].dtype)

        with files.kept_open():
            return convert(name, read)[target]

    readers: Readers = {name: partial(model.get_buffer, name) for name in computed}
    for name, keys in sources.items():
        if keys[0][1] is None:
            readers[name] = stored[keys[0][0]].read
        else:
            readers |= {target: partial(read_converted, name, target) for target in convert(name, stand_ins.get)}
    report = info.to_dict() | {"unused": {key: tensor for key, tensor in stored.items() if key not in named}}
    unknown = wanted.keys() - readers.keys() - set(report["missing_keys"]) - model.all_tied_weights_keys.keys()
    if unknown:
        raise NotImplementedError(f"no file holds {', '.join(sorted(unknown))}, which transformers initializes")
    return model, readers, report


def open_stored(
    stored: dict[str, Stored], source: ModelSource, model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, Stored]:
    """The stored tensors of the `model` of `source`, those that are quantized as whole weights of `dtype`."""
    if (settings := find_quantization(source.directory)) is None:
        return stored
    from mini_trainer.model.quantized import check_modules, open_dequantized

    check_modules(settings, model)
    return open_dequantized(stored, settings, dtype)


def name_stored(
    model: PreTrainedModel, stored: Iterable[str]
) -> tuple[dict[str, tuple[str, str | None]], dict[str, Any]]:
    """Maps each stored tensor that the model uses to the parameter's name and its conversion's pattern, if any; and
    each pattern to its conversion. Applies transformers' own rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    wanted, named = model.state_dict(), {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if name in wanted:
            named[key] = name, pattern
    return named, {pattern: converter for converter in converters for pattern in converter.source_patterns}


def group_sources(named: dict[str, tuple[str, str | None]]) -> dict[str, list[tuple[str, str | None]]]:
    """The stored keys and patterns of each tensor, or of a conversion's first, from `name_stored`."""
    sources: dict[str, list[tuple[str, str | None]]] = {}
    for key, (name, pattern) in named.items():
        sources.setdefault(name, []).append((key, pattern))
    return sources


def find_kept_type(
    sources: list[tuple[str, str | None]], stored: dict[str, Stored], by_pattern: dict[str, Any]
) -> str | None:
    """safetensors' name of the type in which a parameter's numbers are stored and read; None: computed, in fp32."""
    pattern, types = sources[0][1], {stored[key].dtype for key, _ in sources}
    operations = [] if pattern is None else by_pattern[pattern].operations
    is_moved = all(type(operation).__name__ in MOVING_OPERATIONS for operation in operations)
    return types.pop() if is_moved and len(types) == 1 else None


def find_types(source: ModelSource, model: PreTrainedModel, names: Iterable[str]) -> dict[str, torch.dtype]:
    """The narrowest types that hold parameters of the `model` of `source` as its files have them, dequantized; without
    files as its config says."""
    directory = Path(source.directory)
    own = choose_dtype(AutoConfig.from_pretrained(directory, trust_remote_code=source.trust_remote_code))
    if not list_weights(directory):
        return dict.fromkeys(names, own)
    stored = open_stored(StoredFiles(directory).find(), source, model, own)
    try:
        named, by_pattern = name_stored(model, stored)
    except NOT_PLANNABLE:  # loaded as a whole, in fp32
        return dict.fromkeys(names, torch.float32)
    types = {name: find_kept_type(keys, stored, by_pattern) for name, keys in group_sources(named).items()}
    return {name: NARROW.get(types.get(name), torch.float32) for name in names}


def list_left_out(source: ModelSource, family: Family, *, trained: Collection[str] = ()) -> dict[str, Stored]:
    """Stored tensors other than the trained weights, dequantized, for an export of the whole model. These are other
    towers and, if the family keeps them, tensors that transformers' model does not use, such as layers for multi-token
    prediction. If the files hold only tensors named in `trained`, no model is made to find them."""
    if not list_weights(Path(source.directory)):
        log.warning(f"warning: {source.directory}: its weights are gone; the export holds only the trained weights")
        return {}
    stored = StoredFiles(Path(source.directory)).find()
    if stored.keys() <= set(trained):
        return {}
    with torch.device("meta"):
        model = family.make_model(source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code)
    own = AutoConfig.from_pretrained(source.directory, trust_remote_code=source.trust_remote_code)
    stored = open_stored(stored, source, model, choose_dtype(own))
    try:
        named, _ = name_stored(model, stored)
    except NOT_PLANNABLE:  # `read_weights` has warned about it
        return {}
    family.leave_out(model)
    kept = model.state_dict().keys()
    towers = {key: stored[key] for key, (name, _) in named.items() if name not in kept}
    unused = {key: tensor for key, tensor in stored.items() if key not in named} if family.keeps_unused else {}
    sizes = [text_config(config).vocab_size for config in (own, source.config)]
    return towers | {key: fit_vocabulary(tensor, *sizes) for key, tensor in unused.items()}


def fit_vocabulary(tensor: Stored, old: int, new: int) -> Stored:
    """Extends an unused embedding or head to as many rows as the used ones have."""
    if new <= old or len(tensor.shape) != 2 or tensor.shape[0] != old:
        return tensor
    return Stored(partial(grow_rows, tensor.read, new, keeps_type=True), (new, *tensor.shape[1:]), tensor.dtype)


def describe_unused(unused: dict[str, Stored], *, are_kept: bool) -> str:
    """Line of the start report about stored tensors that transformers' model does not use."""
    kinds = list(dict.fromkeys(".".join(name.split(".")[:3]) for name in sorted(unused)))
    what = "exports of the whole model contain them unchanged" if are_kept else "exports omit them"
    num_params = sum(math.prod(tensor.shape) for tensor in unused.values())
    return (
        f"the model's files hold {len(unused)} tensors ({num_params:,} numbers) that transformers' model does not use,"
        f" such as multi-token prediction: {', '.join(kinds[:3])}{', ...' if len(kinds) > 3 else ''};"
        f" they do not train, and {what}"
    )


def read_whole(source: ModelSource, family: Family) -> tuple[PreTrainedModel, Readers, dict[str, Any]]:
    """Does what `plan_reading` does for any model that transformers can load, with the whole model in memory.
    Loads in fp32, since transformers would round computed values, such as an embedding's scale, to a narrower dtype."""
    try:
        model, report = family.load_model(
            source.directory, dtype=torch.float32, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--model-name-or-path {source.directory}: cannot load the weights: {error}") from None
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return model, {name: partial(torch.Tensor.detach, tensor) for name, tensor in tensors.items()}, report


def initialize_tokens(model: PreTrainedModel, readers: Readers, vocab_size: int, new_tokens: Sequence[int]) -> None:
    """Sets embeddings, and rows and biases of the head, of new tokens and up to `vocab_size`, to the mean of others."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    old = text_config(model.config).vocab_size
    if vocab_size > old and any(len(module.weight) != old for module in modules if module is not None):
        raise ValueError(
            f"model type {model.config.model_type!r} has more embeddings than its vocabulary of {old}, so it cannot"
            f" grow to {vocab_size}: do not add special tokens when tokenizing the data"
        )
    for prefix in [prefix for prefix, module in model.named_modules() if module in modules]:
        for name in (f"{prefix}.weight", f"{prefix}.bias"):
            if name in readers:
                readers[name] = partial(grow_rows, readers[name], vocab_size, new_tokens=new_tokens)


def grow_rows(read: Reader, num_rows: int, *, new_tokens: Sequence[int] = (), keeps_type: bool = False) -> Tensor:
    """Extends the rows from `read` to `num_rows`; those, and those of `new_tokens`, are the mean of the rows before.
    In fp32 unless `keeps_type`."""
    rows = read()
    grown = torch.empty(max(num_rows, len(rows)), *rows.shape[1:])
    grown[: len(rows)] = rows
    mean = grown[: min(new_tokens, default=len(rows))].mean(dim=0)  # without spare rows, which no token has trained
    grown[len(rows) :] = mean
    grown[list(new_tokens)] = mean
    return grown.to(rows.dtype) if keeps_type else grown


PINNED_BYTES = 1 << 30  # of a tensor; torch keeps pinned memory, in powers of two, for later tensors


@dataclass(frozen=True)
class WeightGroup:
    """Tensors of an export that are gathered together: their shapes, and a function that gathers them."""

    shapes: dict[str, Tensor]  # on the meta device, by name
    gather: Callable[[], dict[str, Tensor]]  # unsharded, on rank 0's CPU; empty on other ranks. All ranks call it.


def gather_parameters(
    model: PreTrainedModel, dtype: torch.dtype, *, world: World, leave_out: Collection[str] = ()
) -> list[WeightGroup]:
    """A group for each parameter, unsharded, of its type in a model of `dtype` (tied ones once), and saved buffer."""
    saved = model.state_dict().keys()
    types = choose_types(model, (name for name, _ in model.named_parameters()), dtype)
    params = [(name, param.detach(), types[name]) for name, param in model.named_parameters()]
    buffers = [(name, buffer, buffer.dtype) for name, buffer in model.named_buffers() if name in saved]
    return [
        gather_one(name, tensor.shape, kept_dtype, partial(gather_tensor, tensor, kept_dtype, world=world))
        for name, tensor, kept_dtype in params + buffers
        if name not in leave_out
    ]


def gather_all(groups: Iterable[WeightGroup]) -> dict[str, Tensor]:
    """Gathers the tensors of all groups at once. All ranks call this."""
    return {name: tensor for group in groups for name, tensor in group.gather().items()}


def gather_one(name: str, shape: Sequence[int], dtype: torch.dtype, gather: Callable[[], Tensor | None]) -> WeightGroup:
    """Makes a group of one tensor from a function that returns None on other ranks."""

    def gather_named() -> dict[str, Tensor]:
        tensor = gather()
        return {} if tensor is None else {name: tensor}

    return WeightGroup({name: torch.empty(shape, dtype=dtype, device="meta")}, gather_named)


def gather_tensor(tensor: Tensor, dtype: torch.dtype, *, world: World) -> Tensor | None:
    """The unsharded parameter or buffer on rank 0's CPU; None on other ranks. All ranks call this."""
    whole = unshard(tensor, dtype, world=world)
    return copy_to_cpu(whole) if world.rank == 0 else None


def unshard(tensor: Tensor, dtype: torch.dtype, *, world: World) -> Tensor:
    """The whole parameter or buffer, on every rank's device. All ranks call this."""
    whole = tensor.detach().to(world.device, dtype)
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """The tensor in CPU memory: pinned unless it is very large, since GPUs copy there several times as fast.
    Waits for the copy. A separate stream would gain nothing: an export writes its files more slowly than this."""
    if not tensor.is_cuda or tensor.nbytes > PINNED_BYTES:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
