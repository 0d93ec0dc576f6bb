"""Exports: models in Hugging Face format, written under a temporary name, renamed when complete, loaded to check."""

import contextlib
import copy
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from mini_trainer.data.stores import disk
from mini_trainer.data.stores.contents import FORMAT, write_manifest
from mini_trainer.data.stores.model_files import CONFIG, GENERATION, INDEX, WEIGHTS
from mini_trainer.data.stores.older_keys import rewrite_config, save_tokenizer
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import show_progress, without_library_bars
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.config import ModelSource
from mini_trainer.model.method import Method
from mini_trainer.model.stored_tensors import Stored, StoredFiles
from mini_trainer.model.weights import NOT_PLANNABLE, WeightGroup, list_left_out
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text_tower import is_multimodal, text_config
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options.reading import hash_file
from mini_trainer.run.write_pool import DTYPES, TensorFile, WritePool

PATTERN = WEIGHTS.replace(".safetensors", "{suffix}.safetensors")
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
PROCESSOR_FILES = ("*processor*.json", "chat_template.json")


class WeightStream:
    """An export's weight files, laid out from shapes and filled by `add`, on the threads of `pool`. Names passed in are
    the model's own; transformers' conversions map them to stored names, and split tensors such as fused experts, once
    all tensors that a conversion needs have arrived. These are kept in memory until then."""

    def __init__(
        self,
        shell: PreTrainedModel,
        shapes: dict[str, Tensor],
        directory: Path,
        pool: WritePool,
        *,
        max_bytes: int,
        left_out: Mapping[str, Stored],
        source_names: Collection[str] = (),
    ):
        """`shell` and `shapes` are on the meta device; `left_out` are tensors that the model lacks, by stored names;
        `source_names` are those in the base model's files."""
        self.shell, self.conversions = shell, list_conversions(shell, source_names)
        shell._weight_conversions = self.conversions or None  # or transformers lists them again for every tensor
        shapes = {name: shape for name, shape in shapes.items() if name not in (shell._keys_to_ignore_on_save or ())}
        self.left_out = left_out
        stored = self.revert(shapes) | {name: describe_stored(tensor) for name, tensor in left_out.items()}
        split = split_state_dict_into_shards_factory(
            stored,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # parts of one tensor share a file
            filename_pattern=PATTERN,
            max_shard_size=max_bytes,
        )
        self.pool, self.stored = pool, stored
        self.file_of: dict[str, TensorFile] = {}
        for file, names in split.filename_to_tensors.items():
            entries = {name: (DTYPES[stored[name].dtype], stored[name].shape) for name in names}
            self.file_of |= dict.fromkeys(names, TensorFile(directory / file, entries, pool))
        if split.is_sharded:
            metadata = {"total_parameters": shell.num_parameters(), **split.metadata}
            index = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
            (directory / INDEX).write_text(index + "\n", encoding="utf-8")
        self.members = find_groups(shell, shapes)  # for each tensor, those converted together with it
        self.turns = self.find_turns(shapes)
        self.held: dict[str, Tensor] = {}  # tensors that wait for others of their conversion

    def sort(self, groups: list[WeightGroup]) -> list[int]:
        """The indices of `groups` in the order in which `add` should receive them. In any other order most bytes would
        be read back to be hashed, and one file would be hashed at a time."""
        return sorted(range(len(groups)), key=lambda i: min(self.turns.get(name, (0, 0)) for name in groups[i].shapes))

    def find_turns(self, shapes: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
        """For each tensor, the turn of the first that its conversion stores."""
        turns = {}
        for name, members in self.members.items():
            if name == members[0]:
                is_plain = len(members) == 1 and name in self.stored
                group = {member: shapes[member] for member in members}
                stored = [name] if is_plain else self.revert(group)
                turns |= dict.fromkeys(members, min(map(self.turn_of, stored)))
        return turns

    def revert(self, group: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are stored."""
        return revert_weight_conversion(self.shell, group) if self.conversions else group

    def turn_of(self, stored_name: str) -> tuple[int, int]:
        """When to write a stored tensor, among the others."""
        file = self.file_of[stored_name]
        return self.pool.turn_of(file.number, file.places[stored_name].start)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Adds tensors, and starts writing all conversions that are now complete."""
        self.held |= {name: tensor for name, tensor in tensors.items() if name in self.members}
        for name in tensors:
            members = self.members.get(name, ())
            if members and all(member in self.held for member in members):
                self.write({member: self.held.pop(member) for member in members})

    def write(self, group: dict[str, Tensor]) -> None:
        converted = self.revert(group)
        for name in sorted(converted, key=self.turn_of):
            tensor = converted[name]
            kinds = [f"{list(each.shape)} {each.dtype}" for each in (tensor, self.stored[name])]
            assert kinds[0] == kinds[1], f"{name} is {kinds[0]}, but {kinds[1]} was planned"
            self.file_of[name].write(name, tensor)

    def finish(self) -> None:
        """Adds the tensors that the model lacks, and waits until everything is written; raises the first error. Checks
        that everything has been added."""
        for name in sorted(self.left_out, key=self.turn_of):
            self.pool.make_room(self.stored[name].nbytes)
            self.file_of[name].write(name, self.left_out[name].read())
        self.pool.wait()
        missing = [name for name, file in self.file_of.items() if name in file.places]
        assert not missing, f"{len(missing)} tensors were not written, such as {min(missing)}"


def describe_stored(tensor: Stored) -> Tensor:
    """Its dtype and shape, on the meta device."""
    return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")


def find_groups(model: PreTrainedModel, names: Iterable[str]) -> dict[str, list[str]]:
    """For each tensor of the model, the tensors that go through the same transformers conversion, in order."""
    names = list(names)
    try:
        targets = find_targets(model, names)
    except NOT_PLANNABLE as error:
        log.warning(
            f"warning: rank 0 holds the whole model during the export, since it is not known which of its tensors are"
            f" stored together ({type(error).__name__}: {error})"
        )
        targets = dict.fromkeys(names, "")
    groups: dict[str, list[str]] = {}
    for name, target in targets.items():
        groups.setdefault(target, []).append(name)
    return {name: groups[target] for name, target in targets.items()}


def find_targets(model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """Maps each tensor to its converted, stored name, or its own; uses transformers' internals, which change between
    versions."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = reversed(list_conversions(model))
    converters = [each.reverse_transform() for each in conversions if isinstance(each, WeightConverter)]
    return {name: rename_source_key(name, [], converters, reverse=True)[0] for name in names}


def list_conversions(model: PreTrainedModel, source_names: Collection[str] = ()) -> list[Any]:
    """The conversions to revert for a model that was made from a config: those of prefixes, as transformers does, only
    if loading the stored names of its base model applied them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = get_model_conversion_mapping(model, add_legacy=False)
    return [
        each for each in found
        if type(each).__name__ != "PrefixChange" or any(each.rename_source_key(name)[1] for name in source_names)
    ]  # fmt: skip


MAX_SHARD_BYTES = 5 * 10**9  # maximum size of a weight file; a single tensor may be larger
NUM_FILES = 4  # written and hashed at the same time
WAITING_BYTES = 2 << 30  # in CPU memory, gathered and not yet written; at most a quarter of the weights


@dataclass(frozen=True)
class ExportParts:
    """The parts of an export: the source of its weights, and its other contents."""

    family: Family
    method: Method
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    source: ModelSource  # has the other towers of a multimodal model
    notes: dict[str, str] = field(default_factory=dict)  # additional text files, by name
    begun: set[Path] | None = None  # see `make_aside`


def export_model(packed_model: PackedModel, export_dir: Path, parts: ExportParts, *, world: World) -> None:
    """Writes sharded safetensors, config, generation config, tokenizer and chat template to `export_dir`.

    All ranks call this. One parameter at a time is gathered, cast to `dtype` and moved to rank 0's CPU memory, while
    threads write and hash those before it, so no device or process ever holds the whole model. RunError on every rank
    if rank 0 cannot write; no files are left then.
    """
    groups = parts.method.gather_weights(packed_model, parts.dtype, world=world)
    write_export(groups, export_dir, packed_model.model.config, parts, world=world)


def write_export(
    groups: list[WeightGroup], export_dir: Path, config: PreTrainedConfig, parts: ExportParts, *, world: World
) -> None:
    """Writes weights and all other files to a directory next to `export_dir`, then renames it to that. All ranks call
    this. Replaces an existing export of the same name, which a run has if it resumed from before it."""
    writer = ExportWriter(export_dir, parts)
    try:
        order = call_on_rank0(world, lambda: writer.begin(groups, config))
        groups = [groups[i] for i in order] if groups else []
        for group in show_progress(groups, "exporting", unit="tensor"):
            if world.rank == 0:
                writer.pool.make_room(sum(shape.nbytes for shape in group.shapes.values()))
            tensors = group.gather()
            if world.rank == 0:
                writer.stream.add(tensors)  # write errors surface in `commit`, since the other ranks are gathering now
        call_on_rank0(world, writer.commit)
    finally:
        writer.clean_up()


def follow_tokenizer(
    config: PreTrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int
) -> None:
    """Sets the tokenizer's BOS and padding ids in `config`, if they are in the model's vocabulary. This is done only
    for exports: a model's embedding does not train at the padding id in its config."""
    for name in ("bos_token_id", "pad_token_id"):
        if (token_id := getattr(tokenizer, name)) is not None and token_id < vocab_size:
            setattr(config, name, token_id)


class ExportWriter:
    """Writes an export on rank 0, from an empty temporary directory to its rename. Does nothing on other ranks."""

    def __init__(self, export_dir: Path, parts: ExportParts):
        self.export_dir, self.parts = export_dir, parts
        self.aside: Path | None = None
        self.pool: WritePool | None = None
        self.stream: WeightStream | None = None

    def begin(self, groups: list[WeightGroup], config: PreTrainedConfig) -> list[int]:
        """Checks disk space, writes the configs, and lays out the weight files. Returns the order in which `groups` are
        to be gathered."""
        shapes = {name: shape for group in groups for name, shape in group.shapes.items()}
        parts = self.parts
        left_out = list_left_out(parts.source, parts.family, trained=shapes.keys()) if shapes else {}
        self.is_multimodal = bool(shapes) and is_multimodal(config)
        of_model = sum(one.nbytes for one in (*shapes.values(), *map(describe_stored, left_out.values())))
        self.needed_bytes = parts.method.count_export_bytes(of_model)
        self.aside = disk.make_aside(self.export_dir, self.needed_bytes, what="the export", begun=parts.begun)
        with self.describing_errors():
            self.pool = WritePool(NUM_FILES, min(WAITING_BYTES, self.needed_bytes // 4))
            shell = self.make_shell(config)
            if shapes:  # otherwise the method writes everything
                with without_library_bars():
                    shell.save_pretrained(self.aside, state_dict={})
                rewrite_config(self.aside / CONFIG, shell.config)
                names = StoredFiles(Path(parts.source.directory)).find()
                given = dict(max_bytes=MAX_SHARD_BYTES, left_out=left_out, source_names=names)
                self.stream = WeightStream(shell, shapes, self.aside, self.pool, **given)
            if shell.can_generate():
                self.write_generation_config(text_config(shell.config).vocab_size)
        return [] if self.stream is None else self.stream.sort(groups)

    def make_shell(self, config: PreTrainedConfig) -> PreTrainedModel:
        """A meta model with the config to write, and transformers' file names and conversions."""
        parts = self.parts
        with torch.device("meta"):
            shell = parts.family.make_model(copy.deepcopy(config), dtype=parts.dtype, trust_remote_code=False)
        shell.generation_config = GenerationConfig()  # replaced by `write_generation_config`
        text = text_config(shell.config)
        follow_tokenizer(text, parts.tokenizer, vocab_size=text.vocab_size)
        return shell

    def write_generation_config(self, vocab_size: int) -> None:
        """Writes the file that `save_pretrained` writes, but also with settings that transformers ignores and calls
        invalid, such as a temperature without `do_sample`: published models have them."""
        config = copy.deepcopy(self.parts.generation_config)
        follow_tokenizer(config, self.parts.tokenizer, vocab_size=vocab_size)
        config.to_json_file(self.aside / GENERATION, keys_to_pop=["compile_config"])

    def commit(self) -> None:
        """Writes the rest, and renames the directory."""
        aside, parts = self.aside, self.parts
        with self.describing_errors():
            if self.stream is not None:
                self.stream.finish()
            save_tokenizer(parts.tokenizer, aside)
            if self.is_multimodal:
                copy_processor_files(Path(parts.source.directory), aside)
            parts.method.write_extras(aside, parts.tokenizer)
            for name, text in parts.notes.items():
                (aside / name).write_text(text, encoding="utf-8")
            hashed = self.pool.finish()
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            for file in files:
                disk.sync_file(file)
            for directory in {file.parent for file in files}:
                disk.sync_dir(directory)
            entries = {str(file.relative_to(aside)): hashed.get(file) or hash_file(file) for file in files}
            write_manifest(aside, {"format": FORMAT, "files": entries})
            disk.put_in_place(aside, self.export_dir)

    @contextlib.contextmanager
    def describing_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            what = f"the export {self.export_dir}"
            raise OSError(disk.describe_failed_write(what, error, self.aside, self.needed_bytes)) from None

    def clean_up(self) -> None:
        """Ends the threads, and removes the temporary directory, if still there."""
        if self.pool is not None:
            self.pool.close()
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)


def copy_processor_files(model_dir: Path, directory: Path) -> None:
    """Copies the processors' configuration, but no chat template if the tokenizer has written one."""
    has_template = (directory / "chat_template.jinja").exists()
    for pattern in PROCESSOR_FILES:
        for file in sorted(model_dir.glob(pattern)):
            if not (file.name == "chat_template.json" and has_template):
                shutil.copyfile(file, directory / file.name)
