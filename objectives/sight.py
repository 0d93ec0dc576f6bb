"""What a model sees: its images through its tower, and their features in the places that the text has for them."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from objectives.micro_batch import MicroBatch
from objectives.text_tower import find_base, find_decoder, text_config

PROJECTORS = ("projector", "connector", "merger", "embed_vision", "aligner")  # in the names of what joins the two

HAVE_CHANGED = "have files of images changed since the data set was made?"


def list_parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """The names of a model's parameters: those of its vision tower, its projector and its language model."""
    language = [find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(param) for part in language if part is not None for param in part.parameters()}
    parts: dict[str, list[str]] = {"vision": [], "projector": [], "language": []}
    for name, param in model.named_parameters():
        is_projector = any(word in name for word in PROJECTORS)
        parts["language" if id(param) in inside else "projector" if is_projector else "vision"].append(name)
    return parts


def join(features: Tensor | Sequence[Tensor]) -> Tensor:
    """The features of all images, one after the other."""
    return features if isinstance(features, Tensor) else torch.cat(list(features))


class Sight:
    """How one model sees. Not a module: it holds nothing that the model does not."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.base = model, find_base(model)
        if not hasattr(self.base, "get_image_features"):
            raise ValueError(
                f"model type {model.config.model_type!r} cannot be trained on images: {type(self.base).__name__} has no"
                " get_image_features, by which images become features"
            )
        self.taken = frozenset(inspect.signature(self.base.get_image_features).parameters)
        decoder = inspect.signature(type(find_decoder(model)).forward).parameters
        self.feeds_layers = "deepstack_visual_embeds" in decoder  # features of several layers (Qwen3-VL)
        text = text_config(model.config)
        self.has_layer_inputs = bool(getattr(text, "hidden_size_per_layer_input", None))  # Gemma 4
        self.pad_token_id = text.pad_token_id if self.has_layer_inputs else 0
        self.has_axes = hasattr(self.base, "get_rope_index")
        parts = list_parts(model)
        self.outside = [*parts["vision"], *parts["projector"]]

    def embed(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """What the decoder is given in the place of token ids."""
        is_image = micro_batch.input_ids == self.model.config.image_token_id  # (1, T)
        input_ids = micro_batch.input_ids.masked_fill(is_image, self.pad_token_id)
        hidden = self.model.get_input_embeddings()(input_ids)  # (1, T, H)
        more: dict[str, Any] = {}
        if self.has_layer_inputs:  # to which images are padding
            padding = self.model.get_input_embeddings().weight[self.pad_token_id]
            texts = torch.where(is_image[..., None], padding, hidden)
            more["per_layer_inputs"] = find_decoder(self.model).get_per_layer_inputs(input_ids, texts)
        if micro_batch.pixels:
            seen = self.base.get_image_features(**micro_batch.pixels, return_dict=True)
            features = join(seen.pooler_output).reshape(-1, hidden.shape[-1]).to(hidden)
            if len(features) != micro_batch.num_image_tokens:
                raise ValueError(
                    f"images became {len(features):,} vectors, and the data has {micro_batch.num_image_tokens:,} tokens"
                    f" for them: {HAVE_CHANGED}"
                )
            hidden = hidden.masked_scatter(is_image[..., None], features)
            if self.feeds_layers:
                more |= dict(
                    visual_pos_masks=is_image, deepstack_visual_embeds=[join(of) for of in seen.deepstack_features]
                )
        if micro_batch.axis_positions is not None:
            more["position_ids"] = micro_batch.axis_positions
        return dict(input_ids=None, inputs_embeds=self.touch(hidden)) | more

    def touch(self, hidden: Tensor) -> Tensor:
        """`hidden`, with gradients of zero for what of tower and projector trains: on every rank, also without images.

        FSDP sums the gradients that a rank has, so all ranks must have the same ones.
        """
        trained = [param for name in self.outside if (param := self.model.get_parameter(name)).requires_grad]
        return hidden + sum(param.sum().to(hidden) * 0 for param in trained) if trained else hidden

    def number_axes(self, input_ids: Tensor, grids: Tensor) -> Tensor:  # (1, L), (images, 3) -> (3, 1, L)
        """One sequence's positions on all axes, by the model's own code."""
        kinds = (input_ids == self.model.config.image_token_id).int()
        try:
            return self.base.get_rope_index(input_ids, mm_token_type_ids=kinds, image_grid_thw=grids)[0]
        except (RuntimeError, IndexError) as error:  # as it ends where there are more positions than tokens, or fewer
            raise ValueError(f"images have other positions than the data has tokens for: {HAVE_CHANGED}") from error

    def describe_own(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The arguments of the model's own forward pass over the row's one sequence."""
        kinds = (micro_batch.input_ids == self.model.config.image_token_id).long()
        names = ("mm_token_type_ids", "token_type_ids")
        parameters = inspect.signature(type(self.base).forward).parameters
        return {"input_ids": micro_batch.input_ids, **micro_batch.pixels} | {
            name: kinds for name in names if name in parameters
        }
