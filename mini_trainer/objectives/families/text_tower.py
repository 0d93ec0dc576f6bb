"""Parts of a model: the text tower of a multimodal one, its other towers, and its blocks.

On text, such a model trains like a language model: its decoder reads packed rows, its head predicts the next token.
Image and audio towers are not used. They are removed from the model before memory is allocated, their names stay
reserved, and exports copy their tensors from the model's own files.
"""

import inspect
import re
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# Config keys of the placeholder tokens for images, videos and audio.
PLACEHOLDER = re.compile(r"(?:(image|video|audio|media|speech)(?:_placeholder)?_token)_(?:id|index)")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's config: a part of a multimodal model's, else the config itself."""
    text = config.get_text_config(decoder=True)
    return config if type(text) is type(config) else text


def find_cut(config: PreTrainedConfig) -> int | None:
    """Where the model itself cuts its logits off, before the rows that pad its vocabulary (Inkling); None: nowhere."""
    return getattr(text_config(config), "unpadded_vocab_size", None)


def count_logits(config: PreTrainedConfig) -> int:
    """Number of token ids that the model gives logits of."""
    vocab_size = text_config(config).vocab_size
    return min(vocab_size, find_cut(config) or vocab_size)


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether the config describes more than a language model."""
    return text_config(config) is not config


def find_placeholders(config: PreTrainedConfig) -> dict[int, str]:
    """Ids of the placeholder tokens for images, videos or audio, with the config's name for each."""
    if not is_multimodal(config):
        return {}
    settings = config.to_dict()
    found = {name: value for name, value in settings.items() if PLACEHOLDER.fullmatch(name)}
    towers = {name: part for name, part in settings.items() if isinstance(part, dict) and "vocab_offset" in part}
    embedded = {  # ids embedded by a tower
        token_id: f"{name}.vocab_offset"
        for name, part in towers.items()
        for token_id in range(part["vocab_offset"], part["vocab_offset"] + part["vocab_size"])
    }
    return embedded | {value: name for name, value in found.items() if isinstance(value, int) and value >= 0}


def find_base(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head; in Llama 4's text model, `base_model_prefix` does not name it."""
    if model.base_model is not model:
        return model.base_model
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that maps token ids to hidden states; in a multimodal model, the language model's."""
    if not is_multimodal(model.config):
        return find_base(model)
    decoder = model.get_decoder()
    return find_base(decoder) if decoder.get_output_embeddings() is not None else decoder


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Sets the language model's attention implementation; other towers, which do not run, keep theirs."""
    (find_decoder(model) if is_multimodal(model.config) else model).set_attn_implementation(implementation)


class AbsentTower(nn.Module):
    """Placeholder for a removed tower: reports the model's device and dtype, which some models query (Qwen2-Audio)."""

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.beside = [embedding]  # in a list, so that it is not registered as a submodule again

    @property
    def device(self) -> torch.device:
        return self.beside[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.beside[0].weight.dtype


class AbsentEmbedder(AbsentTower):
    """Placeholder for an embedder of ids beyond the text's (Gemma 3n), which the model calls for every text.
    Its zeros are used only for those ids, and data with any of them is refused."""

    def __init__(self, embedding: nn.Module, embedder: nn.Module):
        super().__init__(embedding)
        self.vocab_offset, self.vocab_size = embedder.vocab_offset, embedder.vocab_size

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # (1, T) -> (1, T, 1)
        return torch.zeros(*input_ids.shape, 1, dtype=self.dtype, device=input_ids.device)


@dataclass(frozen=True)
class LeftOut:
    """Parts removed from a model: neither loaded nor trained."""

    modules: list[str] = field(default_factory=list)  # names, including nested modules
    parts: list[str] = field(default_factory=list)  # names of the outermost modules
    num_params: int = 0

    def describe(self, *, num_bytes: int) -> str:
        """Line of the start report; `num_bytes` is the memory that each number would take."""
        return (
            f"the text tower trains; unchanged and not loaded: {', '.join(self.parts)}"
            f" ({self.num_params:,} parameters, {self.num_params * num_bytes / 1e9:,.2f} GB)"
        )


def find_needed(model: PreTrainedModel) -> list[str]:
    """Required arguments of the model's forward besides token ids."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    given = ("self", "input_ids")
    return [p.name for p in parameters
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in given]  # fmt: skip


def keep_text_tower(model: PreTrainedModel) -> LeftOut:
    """Removes from a multimodal model on meta everything but its decoder, embedding and head."""
    if not is_multimodal(model.config):
        return LeftOut()
    kept = [find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {module for part in kept if part is not None for module in part.modules()}
    around = {module for module in model.modules() if not inside.isdisjoint(module.modules())} - inside
    num_params = sum(param.numel() for param in model.parameters())
    modules, parts = [], []
    for prefix, module in [(name, module) for name, module in model.named_modules() if module in around]:
        for name, child in list(module.named_children()):
            holds_any = any(True for _ in (*child.parameters(), *child.buffers()))  # else the text's forward may use it
            if holds_any and child not in around and child not in inside:
                path = f"{prefix}.{name}".lstrip(".")
                parts.append(path)
                modules += [f"{path}.{inner}".rstrip(".") for inner, _ in child.named_modules()]
                embedding = model.get_input_embeddings()
                absent = AbsentEmbedder(embedding, child) if hasattr(child, "vocab_offset") else None
                module._modules[name] = AbsentTower(embedding) if isinstance(child, PreTrainedModel) else absent
        for tensors in (module._parameters, module._buffers):
            for name in tensors:
                tensors[name] = None
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: origin for target, origin in model.all_tied_weights_keys.items() if {target, origin} <= names
    }
    return LeftOut(modules, parts, num_params - sum(param.numel() for param in model.parameters()))


PROJECTORS = ("projector", "connector", "merger", "embed_vision", "aligner")  # words in projectors' names


def list_parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Names of a model's parameters by part: vision tower, projector and language model."""
    language = [find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(param) for part in language if part is not None for param in part.parameters()}
    parts: dict[str, list[str]] = {"vision": [], "projector": [], "language": []}
    for name, param in model.named_parameters():
        is_projector = any(word in name for word in PROJECTORS)
        parts["language" if id(param) in inside else "projector" if is_projector else "vision"].append(name)
    return parts


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Finds the transformer blocks: the module list whose length is the config's number of layers. If there is none
    (several layers per block, several stacks, a decoder's own): the longest list that is in no other one, plus all
    lists of modules of the same class."""
    decoder, num_blocks = find_decoder(model), getattr(text_config(model.config), "num_hidden_layers", None)
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            return module
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    inner = {inside for outer in lists for block in outer for inside in block.modules()}
    lists = [blocks for blocks in lists if blocks not in inner]
    if not lists:
        raise ValueError(f"model type {model.config.model_type!r}: no list of blocks found to shard")
    kind = type(max(lists, key=len)[0])
    return nn.ModuleList(block for blocks in lists if type(blocks[0]) is kind for block in blocks)


def find_number(config: PreTrainedConfig, *names: str) -> int:
    """The first of these integers that the config has; 0 if none."""
    return next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), 0)
