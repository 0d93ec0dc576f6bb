"""Merges a LoRA adapter into its base model, in fp32, and writes a standalone model.

    python -m mini_trainer merge-adapter --adapter runs/lora/hf_format/samples_7473 --output-dir merged

Runs on the CPU, a layer at a time. Any adapter in peft's format will do.
"""

from pathlib import Path

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import MergeAdapterOptions

if __name__ == "__main__":
    options = parse_options(MergeAdapterOptions)  # before the heavy imports: --help and typos answer at once
    pause_collector()

import torch
from transformers import PreTrainedModel

from mini_trainer.data.stores.disk import check_place, make_parent
from mini_trainer.data.stores.model_files import find_model, find_weights, naming_config, verify_weights
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.distributed.messages import say
from mini_trainer.distributed.world import World, call_on_rank0, call_with_world
from mini_trainer.model.config import ModelSource, load_config, load_generation_config
from mini_trainer.model.method import Full, MetaModel
from mini_trainer.model.methods import adapter_files
from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import find_blocks, is_multimodal, text_config
from mini_trainer.objectives.families.vision import VisionLanguageFamily
from mini_trainer.options.doors import METHODS
from mini_trainer.options.reading import open_tensors
from mini_trainer.run.export import ExportParts, write_export
from mini_trainer.run.export_check import carry_check
from mini_trainer.use.inference.loading import find_in_run


def merge_adapter(options: MergeAdapterOptions, world: World) -> None:
    """Writes the merged model; ValueError or OSError for user errors."""
    output_dir, adapter = Path(options.output_dir), Path(find_in_run(options.adapter, flag="--adapter"))
    if output_dir.exists():
        raise ValueError(f"--output-dir {output_dir}: already exists; choose a new one")
    check_place(output_dir.parent, named=f"--output-dir {output_dir}")

    # Find the adapter's base model, and the tokenizer and stop tokens that it was trained with.
    config = adapter_files.read_config(adapter, flag="--adapter")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"--adapter {adapter}: belongs to a classifier ({config.task_type}), but only adapters of language models"
            " can be merged here: train with --lora-export merged, or merge it with peft"
        )
    if (name := options.model_name_or_path or config.base_model_name_or_path) is None:
        raise ValueError(f"--adapter {adapter}: does not name its base model: give --model-name-or-path")
    is_own = name == config.base_model_name_or_path and not Path(name).is_dir()
    revision = options.model_revision or (config.revision if is_own else None)
    model_dir = find_model(name, revision=revision, trust_remote_code=options.trust_remote_code)
    find_weights(name, model_dir)
    if not options.skip_verification:
        verify_weights(model_dir)
        adapter_files.verify_adapter(adapter)
    family = TextFamily()
    model_config = load_config(model_dir, family, trust_remote_code=options.trust_remote_code)
    generation_config = adapter_files.read_generation_config(adapter) or load_generation_config(model_dir, model_config)
    tokenizer_dir = adapter_files.find_beside(adapter, adapter_files.TOKENIZER_CONFIG) or model_dir
    tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=options.trust_remote_code)
    text = text_config(model_config)
    text.vocab_size = max(text.vocab_size, len(tokenizer))

    # Build the model with its adapters on the meta device, then write each merged tensor.
    source = ModelSource(model_dir, model_config, options.trust_remote_code, name=name)
    with torch.device("meta"), naming_config(model_dir):
        model = family.make_model(model_config, dtype=torch.float32, trust_remote_code=options.trust_remote_code)
    if adapts_tower(adapter, model):
        family = VisionLanguageFamily(family)
    left_out = family.leave_out(model)
    meta = MetaModel(model, find_blocks(model), "eager", torch.float32, source, family, left_out)
    method = METHODS["lora"].from_adapter(adapter, flag="--adapter")
    method.choose_layers(meta)
    readers = read_weights(source, family)
    method.prepare(meta, readers, world=world, progress=lambda where: None)
    dtype = DTYPES[options.export_dtype]
    call_on_rank0(world, lambda: make_parent(output_dir))
    write_export(
        method.merger.list_groups({name: readers[name]().float() for name in method.saved_names.values()}, dtype),
        output_dir,
        model_config,
        ExportParts(family, Full(), generation_config, tokenizer, dtype, source, carry_check(adapter, dtype)),
        world=world,
    )
    say(f"{method.describe()}; merged into {name}: {output_dir}")


def adapts_tower(adapter: Path, model: PreTrainedModel) -> bool:
    """Whether layers outside the language model (vision tower, projector) have adapters."""
    if not is_multimodal(model.config):
        return False
    layers = VisionLanguageFamily(TextFamily()).find_tower_layers(model)
    outside = tuple(f"{adapter_files.PREFIX}{name}." for name in layers)
    with open_tensors(adapter / adapter_files.ADAPTER_WEIGHTS) as file:
        return any(key.startswith(outside) for key in file.keys())  # noqa: SIM118


if __name__ == "__main__":
    resume_collector()
    call_with_world(lambda world: merge_adapter(options, world), when_interrupted="interrupted; no output is left")
