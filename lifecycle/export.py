"""Exports: ordinary Hugging Face models, written aside and renamed when they are whole."""

import copy
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from disk import describe_failed_write, hash_file, make_aside, put_in_place, sync_dir, sync_file
from lifecycle.checkpoint_files import FORMAT, write_manifest
from lifecycle.tower_files import add_tensors, copy_processor_files, find_tensors
from model.config import ModelSource
from model.method import Method
from model.weights import list_left_out
from objectives.objective import Objective, PackedModel
from objectives.text_tower import is_multimodal, text_config
from ranks.terminal import show_progress, shows_progress
from ranks.world import World, call_on_rank0

MAX_SHARD_SIZE = "5GB"
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportParts:
    """What becomes of the weights in an export, and what lies beside them."""

    objective: Objective
    method: Method
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    source: ModelSource  # has what a multi-modal model is beside its text tower
    notes: dict[str, str] = field(default_factory=dict)  # texts by the names of their files


def export_model(packed_model: PackedModel, export_dir: Path, parts: ExportParts, *, world: World) -> None:
    """Writes sharded safetensors, config, generation config, tokenizer and chat template to `export_dir`.

    All ranks call this. One parameter at a time is gathered, cast to `dtype`, and moved to rank 0's CPU memory, so no
    device ever holds the whole model. Raises ValueError on every rank if rank 0 cannot write; nothing is left then.
    """
    gathered = parts.method.gather_weights(packed_model, parts.dtype, world=world)
    shown = show_progress(gathered, "exporting: gathering", unit="tensor")
    weights = {name: weight for name, weight in shown if weight is not None}
    call_on_rank0(world, lambda: write_export(weights, export_dir, packed_model.model.config, parts))


def follow_tokenizer(
    config: PreTrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int
) -> None:
    """Gives `config` the tokenizer's ids for beginning and padding, where it has some that the model has, too.

    Only in an export: a model's embedding does not train at the padding id that its config names.
    """
    for name in ("bos_token_id", "pad_token_id"):
        token_id = getattr(tokenizer, name)
        if token_id is not None and token_id < vocab_size:
            setattr(config, name, token_id)


def write_export(
    weights: dict[str, Tensor],
    export_dir: Path,
    config: PreTrainedConfig,
    parts: ExportParts,
) -> None:
    """Writes `weights` and all that belongs to them beside `export_dir`, then renames the directory to it.

    An export of the same name, by a run that was resumed from before it, is replaced.
    """
    is_whole = bool(weights) and is_multimodal(config)
    left_out = list_left_out(parts.source, parts.objective) if is_whole else {}
    own_tensors = find_tensors(Path(parts.source.directory)) if is_whole else {}
    needed_bytes = sum(weight.nbytes for weight in weights.values())
    needed_bytes += sum(tensor.num_bytes for name, tensor in own_tensors.items() if name in left_out)
    aside = make_aside(export_dir, needed_bytes, what="the export")
    try:
        with torch.device("meta"):  # names, shapes and save_pretrained's conversions; the weights are `weights`
            shell = parts.objective.make_model(copy.deepcopy(config), dtype=parts.dtype, trust_remote_code=False)
        shell.generation_config = copy.deepcopy(parts.generation_config)
        text = text_config(shell.config)
        for written in (text, shell.generation_config):
            follow_tokenizer(written, parts.tokenizer, vocab_size=text.vocab_size)
        if not shows_progress():
            transformers.utils.logging.disable_progress_bar()
        if weights:  # else the method writes all there is
            shell.save_pretrained(aside, state_dict=weights, max_shard_size=MAX_SHARD_SIZE)
        parts.tokenizer.save_pretrained(aside)
        if left_out:
            add_tensors(aside, left_out, own_tensors, max_bytes=MAX_SHARD_BYTES)
        if is_whole:
            copy_processor_files(Path(parts.source.directory), aside)
        parts.method.write_extras(aside, parts.tokenizer)
        for name, text in parts.notes.items():
            (aside / name).write_text(text, encoding="utf-8")
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        for file in files:
            sync_file(file)
        for directory in {file.parent for file in files}:
            sync_dir(directory)
        entries = {str(file.relative_to(aside)): hash_file(file) for file in files}
        write_manifest(aside, {"format": FORMAT, "files": entries})
        put_in_place(aside, export_dir)
    except (OSError, SafetensorError) as error:
        raise OSError(describe_failed_write(f"the export {export_dir}", error, aside, needed_bytes)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
