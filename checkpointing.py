"""Writes the model as an ordinary Hugging Face directory (an export), aside first and renamed when whole."""

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from process_group import World, call_on_rank0

MAX_SHARD_SIZE = "5GB"


def export_model(
    model: PreTrainedModel,
    export_dir: Path,
    *,
    world: World,
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> None:
    """Writes sharded safetensors, config, generation config, tokenizer and chat template to `export_dir`.

    All ranks call this. One parameter at a time is gathered, cast to `dtype`, and moved to rank 0's CPU memory, so no
    device ever holds the whole model. Raises ValueError on every rank if rank 0 cannot write; nothing is left then.
    """
    weights = {name: weight for name, weight in gather_weights(model, dtype) if weight is not None}
    call_on_rank0(
        world,
        lambda: write_export(
            weights,
            export_dir,
            config=model.config,
            generation_config=generation_config,
            tokenizer=tokenizer,
            dtype=dtype,
        ),
    )


def gather_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | None]]:
    """Each parameter, whole and in `dtype`, on rank 0's CPU; None on the other ranks. Tied parameters come once.

    So do the buffers that belong to a checkpoint, as they are.
    """
    is_rank0 = torch.distributed.get_rank() == 0
    for name, param in model.named_parameters():
        weight = param.detach().to(dtype).full_tensor()
        yield name, weight.cpu() if is_rank0 else None
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer.cpu() if is_rank0 else None


def write_export(
    weights: dict[str, Tensor],
    export_dir: Path,
    *,
    config: PreTrainedConfig,
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> None:
    """Writes `weights` and all that belongs to them beside `export_dir`, then renames the directory to it."""
    aside = export_dir.parent / f".writing_{export_dir.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with torch.device("meta"):  # names, shapes and save_pretrained's conversions; the weights are `weights`
            shell = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        shell.generation_config = generation_config
        shell.save_pretrained(aside, state_dict=weights, max_shard_size=MAX_SHARD_SIZE)
        tokenizer.save_pretrained(aside)
        for file in aside.iterdir():
            sync_file(file)
        os.replace(aside, export_dir)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write the export {export_dir}: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync_file(file: Path) -> None:
    """Flushes a file to the disk and gives it the permissions of any new file (safetensors writes 0600)."""
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
