"""Exports: models in Hugging Face format, written under a temporary name, renamed when complete, loaded to check."""

import contextlib
import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mini_trainer.data.stores.contents import FORMAT, write_manifest
from mini_trainer.data.stores.disk import (
    SPARE_BYTES,
    describe_failed_write,
    hash_file,
    make_aside,
    put_in_place,
    sync_dir,
    sync_file,
)
from mini_trainer.data.stores.model_files import GENERATION
from mini_trainer.distributed.messages import show_progress, without_library_bars
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.config import ModelSource
from mini_trainer.model.gathering import WeightGroup
from mini_trainer.model.method import Method
from mini_trainer.model.weights import list_left_out
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text_tower import is_multimodal, text_config
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.run.export_weights import WeightStream
from mini_trainer.run.write_pool import WritePool

if TYPE_CHECKING:
    from mini_trainer.run.export_left_out import StoredTensor

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
    groups: list[WeightGroup],
    export_dir: Path,
    config: PreTrainedConfig,
    parts: ExportParts,
    *,
    world: World,
    spare_bytes: int = SPARE_BYTES,
) -> None:
    """Writes weights and all other files to a directory next to `export_dir`, then renames it to that.

    All ranks call this. Replaces an existing export of the same name, which a run has if it resumed from before it.
    """
    writer = ExportWriter(export_dir, parts, spare_bytes=spare_bytes)
    try:
        order = call_on_rank0(world, lambda: writer.begin(groups, config))
        groups = [groups[i] for i in order] if groups else []
        for group in show_progress(groups, "exporting", unit="tensor"):
            if world.rank == 0:
                writer.make_room(group)
            tensors = group.gather()
            if world.rank == 0:
                writer.add(tensors)
        call_on_rank0(world, writer.commit)
    finally:
        writer.clean_up()


def follow_tokenizer(
    config: PreTrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int
) -> None:
    """Sets the tokenizer's BOS and padding ids in `config`, if they are in the model's vocabulary.

    This is done only for exports: a model's embedding does not train at the padding id in its config.
    """
    for name in ("bos_token_id", "pad_token_id"):
        token_id = getattr(tokenizer, name)
        if token_id is not None and token_id < vocab_size:
            setattr(config, name, token_id)


class ExportWriter:
    """Writes an export on rank 0, from an empty temporary directory to its rename. Does nothing on other ranks."""

    def __init__(self, export_dir: Path, parts: ExportParts, *, spare_bytes: int):
        self.export_dir, self.parts, self.spare_bytes = export_dir, parts, spare_bytes
        self.aside: Path | None = None
        self.pool: WritePool | None = None
        self.stream: WeightStream | None = None

    def begin(self, groups: list[WeightGroup], config: PreTrainedConfig) -> list[int]:
        """Checks disk space, writes the configs, and lays out the weight files.

        Returns the order in which `groups` are to be gathered.
        """
        shapes = {name: shape for group in groups for name, shape in group.shapes.items()}
        parts = self.parts
        self.left_out = list_left_out(parts.source, parts.family, trained=shapes.keys()) if shapes else {}
        self.own_tensors: dict[str, StoredTensor] = {}
        if self.left_out:
            from mini_trainer.run.export_left_out import find_tensors

            self.own_tensors = find_tensors(Path(parts.source.directory))
        self.is_multimodal = bool(shapes) and is_multimodal(config)
        self.needed_bytes = sum(shape.nbytes for shape in shapes.values())
        self.needed_bytes += sum(tensor.num_bytes for name, tensor in self.own_tensors.items() if name in self.left_out)
        self.aside = make_aside(
            self.export_dir, self.needed_bytes, what="the export", spare_bytes=self.spare_bytes, begun=parts.begun
        )
        with self.describing_errors():
            self.pool = WritePool(NUM_FILES, min(WAITING_BYTES, self.needed_bytes // 4))
            shell = self.make_shell(config)
            if shapes:  # otherwise the method writes everything
                with without_library_bars():
                    shell.save_pretrained(self.aside, state_dict={})
                self.stream = WeightStream(shell, shapes, self.aside, self.pool, max_bytes=MAX_SHARD_BYTES)
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

    def make_room(self, group: WeightGroup) -> None:
        """Waits until the group's tensors fit into memory."""
        self.pool.make_room(sum(shape.nbytes for shape in group.shapes.values()))

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Starts writing tensors. Write errors surface in `commit`, since the other ranks are gathering now."""
        self.stream.add(tensors)

    def commit(self) -> None:
        """Writes the rest, and renames the directory."""
        aside, parts = self.aside, self.parts
        with self.describing_errors():
            if self.stream is not None:
                self.stream.finish()
            parts.tokenizer.save_pretrained(aside)
            if self.left_out:
                from mini_trainer.run.export_left_out import add_tensors

                add_tensors(aside, self.left_out, self.own_tensors, self.pool, max_bytes=MAX_SHARD_BYTES)
            if self.is_multimodal:
                from mini_trainer.run.export_left_out import copy_processor_files

                copy_processor_files(Path(parts.source.directory), aside)
            parts.method.write_extras(aside, parts.tokenizer)
            for name, text in parts.notes.items():
                (aside / name).write_text(text, encoding="utf-8")
            hashed = self.pool.finish()
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            for file in files:
                sync_file(file)
            for directory in {file.parent for file in files}:
                sync_dir(directory)
            entries = {str(file.relative_to(aside)): hashed.get(file) or hash_file(file) for file in files}
            write_manifest(aside, {"format": FORMAT, "files": entries})
            put_in_place(aside, self.export_dir)

    @contextlib.contextmanager
    def describing_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            what = f"the export {self.export_dir}"
            raise OSError(describe_failed_write(what, error, self.aside, self.needed_bytes)) from None

    def clean_up(self) -> None:
        """Ends the threads, and removes the temporary directory, if still there."""
        if self.pool is not None:
            self.pool.close()
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
