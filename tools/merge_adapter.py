"""Adds a LoRA adapter to the weights of its model, in fp32, and writes a model like any other.

    python tools/merge_adapter.py --adapter runs/lora/hf_format/samples_7473 --output-dir merged

A layer at a time, on the CPU; the adapter may be another program's, as long as peft wrote it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # imports are looked for in the root

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from chat.templates import load_tokenizer
from command_line import parse_options
from families.seeing import SeeingFamily
from families.text import TextFamily
from lifecycle.choosing import choose_adapter_method
from lifecycle.export import ExportParts, write_export
from methods.adapter_files import ADAPTER_WEIGHTS, PREFIX, read_config
from methods.full import Full
from model.blocks import find_blocks
from model.config import ModelSource, load_config, load_generation_config
from model.method import MetaModel
from model.weights import read_weights
from options import MergeAdapterOptions
from options.choices import check_choices
from pretrained.files import find_model, find_weights
from pretrained.text_tower import is_multimodal, text_config
from ranks.devices import DTYPES
from ranks.messages import say
from ranks.world import World, call_on_rank0, call_with_world


def merge_adapter(options: MergeAdapterOptions, world: World) -> None:
    """Writes the merged model; ValueError or OSError for what cannot be done."""
    check_choices(options, {"export_dtype": DTYPES})
    output_dir, adapter = Path(options.output_dir), Path(options.adapter)
    if output_dir.exists():
        raise ValueError(f"--output-dir {output_dir}: is there already; name a new one")

    # The model that the adapter belongs to, and the tokenizer that it was trained with.
    config = read_config(adapter, flag="--adapter")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"--adapter {adapter}: is a classifier's ({config.task_type}), and only those of language models are merged"
            " here: train with --lora-export merged, or merge it with peft"
        )
    name = options.model_name_or_path or config.base_model_name_or_path
    if name is None:
        raise ValueError(f"--adapter {adapter}: does not say which model it belongs to: give --model-name-or-path")
    is_own = name == config.base_model_name_or_path and not Path(name).is_dir()
    revision = options.model_revision or (config.revision if is_own else None)
    model_dir = find_model(name, revision=revision, trust_remote_code=options.trust_remote_code)
    find_weights(name, model_dir)
    family = TextFamily()
    model_config = load_config(model_dir, family, trust_remote_code=options.trust_remote_code)
    generation_config = load_generation_config(model_dir, model_config)
    with_tokenizer = [path for path in (adapter, adapter.parent) if (path / "tokenizer_config.json").is_file()]
    tokenizer = load_tokenizer(
        str(with_tokenizer[0] if with_tokenizer else model_dir), trust_remote_code=options.trust_remote_code
    )
    text = text_config(model_config)
    text.vocab_size = max(text.vocab_size, len(tokenizer))

    # Its layers with adapters, without memory; then each tensor of the sum.
    source = ModelSource(model_dir, model_config, options.trust_remote_code, name=name)
    with torch.device("meta"):
        model = family.make_model(model_config, dtype=torch.float32, trust_remote_code=options.trust_remote_code)
    if adapts_tower(adapter, model):
        family = SeeingFamily(family)
    left_out = family.leave_out(model)
    meta = MetaModel(model, find_blocks(model), "eager", torch.float32, source, family, left_out)
    method = choose_adapter_method(adapter, flag="--adapter")
    method.choose_layers(meta)
    readers = read_weights(source, family)
    method.prepare(meta, readers, world=world, progress=lambda where: None)
    dtype = DTYPES[options.export_dtype]
    call_on_rank0(world, lambda: output_dir.absolute().parent.mkdir(parents=True, exist_ok=True))
    write_export(
        method.merge_given(readers, dtype),
        output_dir,
        model_config,
        ExportParts(family, Full(), generation_config, tokenizer, dtype, source),
        world=world,
    )
    say(f"{method.describe()}; merged into {name}: {output_dir}")


def adapts_tower(adapter: Path, model: PreTrainedModel) -> bool:
    """Whether layers of what a model sees with have adapters, and not the language model's alone."""
    if not is_multimodal(model.config):
        return False
    outside = tuple(f"{PREFIX}{name}." for name in SeeingFamily(TextFamily()).find_tower_layers(model))
    with safe_open(adapter / ADAPTER_WEIGHTS, framework="pt") as file:
        return any(key.startswith(outside) for key in file.keys())  # noqa: SIM118


def main() -> None:
    options = parse_options(MergeAdapterOptions)
    call_with_world(lambda world: merge_adapter(options, world), when_interrupted="interrupted; nothing is left")


if __name__ == "__main__":
    main()
