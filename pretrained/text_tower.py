"""The text tower of a model of more than text: its part of the config, its decoder, and what is left as it is.

On text such a model trains as a language model does: its decoder reads packed rows, its head predicts the next token.
Its towers of images and audio take no part. They are taken out of the model before it gets memory, keep their names'
places, and an export gets their tensors from the model's own files.
"""

import inspect
import re
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# How configs call the token that stands in a text for each part of an image, a video or a recording.
PLACEHOLDER = re.compile(r"(?:(image|video|audio|media|speech)(?:_placeholder)?_token)_(?:id|index)")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """What a config says of the language model: a part of it where it describes more, else the config itself."""
    text = config.get_text_config(decoder=True)
    return config if type(text) is type(config) else text


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether the config describes more than a language model."""
    return text_config(config) is not config


def find_placeholders(config: PreTrainedConfig) -> dict[int, str]:
    """The token ids that stand for images, videos or recordings, and how the config calls each."""
    if not is_multimodal(config):
        return {}
    settings = config.to_dict()
    found = {name: value for name, value in settings.items() if PLACEHOLDER.fullmatch(name)}
    towers = {name: part for name, part in settings.items() if isinstance(part, dict) and "vocab_offset" in part}
    embedded = {  # ids that a tower's own embedding stands for
        token_id: f"{name}.vocab_offset"
        for name, part in towers.items()
        for token_id in range(part["vocab_offset"], part["vocab_offset"] + part["vocab_size"])
    }
    return embedded | {value: name for name, value in found.items() if isinstance(value, int) and value >= 0}


def find_base(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head; Llama 4's text model calls it by another name than it says."""
    if model.base_model is not model:
        return model.base_model
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that maps token ids to hidden states: of a multi-modal one its language model's."""
    if not is_multimodal(model.config):
        return find_base(model)
    decoder = model.get_decoder()
    return find_base(decoder) if decoder.get_output_embeddings() is not None else decoder


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Makes the language model attend by this implementation; other towers, which do not run, keep theirs."""
    (find_decoder(model) if is_multimodal(model.config) else model).set_attn_implementation(implementation)


class AbsentTower(nn.Module):
    """In the place of a tower that was taken out: says where the model lies, which some ask a tower (Qwen2-Audio)."""

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.beside = [embedding]  # in a list: it is a part of the model already

    @property
    def device(self) -> torch.device:
        return self.beside[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.beside[0].weight.dtype


class AbsentEmbedder(AbsentTower):
    """In the place of an embedder of ids beyond the text's (Gemma 3n): the model asks it on every text.

    Its zeros are used for those ids alone, and data with any of them is refused.
    """

    def __init__(self, embedding: nn.Module, embedder: nn.Module):
        super().__init__(embedding)
        self.vocab_offset, self.vocab_size = embedder.vocab_offset, embedder.vocab_size

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # (1, T) -> (1, T, 1)
        return torch.zeros(*input_ids.shape, 1, dtype=self.dtype, device=input_ids.device)


@dataclass(frozen=True)
class LeftOut:
    """What of a model was taken out of it: neither loaded nor trained."""

    modules: list[str] = field(default_factory=list)  # names, with those of the modules in them
    parts: list[str] = field(default_factory=list)  # names of the outermost of them
    num_params: int = 0

    def describe(self, *, num_bytes: int) -> str:
        """For the start's report; `num_bytes` of memory that each of its numbers would take."""
        return (
            f"the text tower trains; left as they are, and not loaded: {', '.join(self.parts)}"
            f" ({self.num_params:,} parameters, {self.num_params * num_bytes / 1e9:,.2f} GB)"
        )


def find_needed(model: PreTrainedModel) -> list[str]:
    """What the model's forward pass asks for beside token ids."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    given = ("self", "input_ids")
    return [p.name for p in parameters
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in given]  # fmt: skip


def make_absent(part: nn.Module, embedding: nn.Module) -> nn.Module | None:
    """What the forward pass finds in the place of a part that was taken out."""
    if isinstance(part, PreTrainedModel):
        return AbsentTower(embedding)
    return AbsentEmbedder(embedding, part) if hasattr(part, "vocab_offset") else None


def keep_text_tower(model: PreTrainedModel) -> LeftOut:
    """Takes out of a multi-modal model on meta all but its decoder, its embedding and its head."""
    if not is_multimodal(model.config):
        return LeftOut()
    kept = [find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {module for part in kept if part is not None for module in part.modules()}
    around = {module for module in model.modules() if not inside.isdisjoint(module.modules())} - inside
    num_params = sum(param.numel() for param in model.parameters())
    modules, parts = [], []
    for prefix, module in [(name, module) for name, module in model.named_modules() if module in around]:
        for name, child in list(module.named_children()):
            holds_any = any(True for _ in (*child.parameters(), *child.buffers()))  # else it may be on the text's way
            if holds_any and child not in around and child not in inside:
                path = f"{prefix}.{name}".lstrip(".")
                parts.append(path)
                modules += [f"{path}.{inner}".rstrip(".") for inner, _ in child.named_modules()]
                module._modules[name] = make_absent(child, model.get_input_embeddings())
        for tensors in (module._parameters, module._buffers):
            for name in tensors:
                tensors[name] = None
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: origin for target, origin in model.all_tied_weights_keys.items() if {target, origin} <= names
    }
    return LeftOut(modules, parts, num_params - sum(param.numel() for param in model.parameters()))
