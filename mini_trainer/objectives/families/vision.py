"""Vision-language models, trained on texts in which each image occupies a number of placeholder tokens.

T tokens in a packed row, L tokens of one sequence, H hidden size. Images are read and resized when batches are made, in
the background.
"""

import functools
import inspect
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import Sample, list_sequences
from mini_trainer.data.stores.image_files import as_data_url, load_processor, open_image
from mini_trainer.objectives.families import text_tower
from mini_trainer.objectives.families.family import Blocks, Family, Loaded, MicroBatch, ReferenceForward, Row, pack_row
from mini_trainer.objectives.families.text import TextFamily, TextRowModel, find_lost_scale, find_router_loss

# Model types that cannot be trained packed, and why.
REFUSED = {
    "paligemma": "its attention over the prompt is bidirectional, but the data does not record where prompts end"
}
WITH_BLOCKS = ("gemma3",)  # model types whose attention within an image is bidirectional in every layer
# Model types whose get_image_features leaves the projector, of this name, and the pixels' dtype to the caller.
PROJECTED_APART = {"llama4": "multi_modal_projector"}
CHECK_IMAGES = ((24, 32), (40, 24))  # pixels


HAVE_CHANGED = "have image files changed since the data set was made?"


@dataclass
class Images:
    """The images of a row."""

    num_tokens: int  # placeholder tokens in the row, which the images' features replace
    pixels: dict[str, Tensor] = field(default_factory=dict)  # the tower's inputs, by argument
    axis_positions: Tensor | None = None  # (3, 1, T) int64: positions on several axes (Qwen2-VL); None: a single axis


class VisionInputs:
    """Converts images to the inputs of a model's tower, with its processor and the weightless part of its code."""

    def __init__(self, config: PreTrainedConfig, *, trust_remote_code: bool):
        self.config = config
        self.processor = load_processor(config.name_or_path, trust_remote_code=trust_remote_code)
        self.trust_remote_code = trust_remote_code

    @functools.cached_property
    def base(self) -> PreTrainedModel:
        """The model without its head, on the meta device."""
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(self.config, trust_remote_code=self.trust_remote_code)
        return find_vision_base(model)

    @functools.cached_property
    def taken(self) -> frozenset[str]:
        """Names of the processor's tensors that the tower takes."""
        return frozenset(inspect.signature(self.base.get_image_features).parameters)

    def read_pixels(self, references: Sequence[str]) -> dict[str, Tensor]:
        """The tower's inputs for a sample's images, which the processor handles together.
        Its result for one image can depend on the number of images (LLaVA-OneVision)."""
        images = [open_image(reference, directory=Path()) for reference in references]
        places = self.processor.image_token * len(images)
        made = self.processor(text=[places], images=[images], add_special_tokens=False, return_tensors="pt")
        return {name: value for name, value in made.items() if name in self.taken}

    def count_patches(self, height: int, width: int) -> tuple[int, int]:
        """Number of tiles that the processor cuts an image into, and number of patches per tile.
        Assumes that the image is alone; together with others it never has more."""
        vision, images = self.config.vision_config, self.processor.image_processor
        patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if count is None or not hasattr(images, "get_number_of_image_patches"):  # the count would always be 1
            import PIL.Image

            shown = [[PIL.Image.new("RGB", (width, height))]]
            made = self.processor(
                text=[self.processor.image_token], images=shown, add_special_tokens=False, return_tensors="pt"
            )
            shape = np.shape(made["pixel_values"])
            if len(shape) == 3:  # (images, patches, values per patch): flattened by the processor
                return shape[0], shape[1]
            *tiles, _, rows, columns = shape
            return math.prod(tiles), (rows // patch) * (columns // patch)
        number = int(count(image_sizes=[[height, width]])["num_image_patches"][0])
        if "image_grid_thw" in images.model_input_names:  # the tower takes images of any size untiled
            return 1, number
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        return number, (side // patch) ** 2

    def find_positions(self, samples: Sequence[Sample], row: Row, pixels: dict[str, Tensor]) -> Tensor | None:
        """Positions (3, 1, T) for models with several axes, restarting in every sample; None: a single axis."""
        if not hasattr(self.base, "get_rope_index"):
            return None
        axes, grids = row.position_ids.expand(3, 1, -1).clone(), pixels.get("image_grid_thw")
        start = first = 0
        for sample in samples:
            end, after = start + len(sample["input_ids"]), first + len(sample.get("images", ()))
            if after > first:
                axes[..., start:end] = self.number_axes(row.input_ids[:, start:end], grids[first:after])
            start, first = end, after
        return axes

    def number_axes(self, input_ids: Tensor, grids: Tensor) -> Tensor:  # (1, L), (images, 3) -> (3, 1, L)
        """Positions of one sequence on all axes, computed by the model's own code."""
        kinds = (input_ids == self.config.image_token_id).int()
        try:
            return self.base.get_rope_index(input_ids, mm_token_type_ids=kinds, image_grid_thw=grids)[0]
        except (RuntimeError, IndexError) as error:  # raised if the numbers of positions and tokens differ
            raise ValueError(f"the images' positions do not match the data's tokens: {HAVE_CHANGED}") from error

    def find_blocks(self, row: Row) -> Blocks:
        """Index of each token's image."""
        is_image = row.input_ids[0] == self.config.image_token_id
        begins = is_image.clone()
        begins[1:] &= ~is_image[:-1]
        numbers = torch.where(is_image, begins.cumsum(0) - 1, -1)
        return Blocks(numbers, are_everywhere=self.config.model_type in WITH_BLOCKS)

    def write_places(self, images: Sequence[Any]) -> np.ndarray:
        """Token ids of these images with words between them."""
        places = " and ".join([self.processor.image_token] * len(images))
        return np.array(self.processor(text=[places], images=[images], add_special_tokens=False)["input_ids"][0])


@dataclass(frozen=True)
class VisionLanguageFamily(Family):
    """Vision-language models."""

    text: TextFamily
    freeze: tuple[str, ...] = ()  # frozen parts of the model: vision, projector, language
    vision_inputs: VisionInputs | None = None  # set once the model's files are known
    largest_image: tuple[int, int] | None = None  # height and width of the data's largest image; None: no images
    max_patches: int | None = None  # maximum patches of images per micro-batch

    peft_task = "CAUSAL_LM"

    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        if type(config) not in AutoModelForImageTextToText._model_mapping or not text_tower.is_multimodal(config):
            return f"model type {config.model_type!r} does not support images in transformers, but the data has some"
        if config.model_type in REFUSED:
            return f"model type {config.model_type!r} cannot be trained on images: {REFUSED[config.model_type]}"
        if getattr(config, "image_token_id", None) is None:
            return f"model type {config.model_type!r} has no image_token_id, so images' positions are unknown"
        return find_lost_scale(config)

    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        parts = text_tower.list_parts(model) | {"nothing": ()}
        for part in self.freeze:
            for name in parts[part]:
                model.get_parameter(name).requires_grad_(False)
        if not any(param.requires_grad for param in model.parameters()):
            raise ValueError(f"--freeze {' '.join(self.freeze)}: nothing is left to train")
        self.text.check_router_loss(model)
        return model

    def load_model(self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool) -> Loaded:
        return self.text.load_model(model_dir, dtype=dtype, trust_remote_code=trust_remote_code)

    def complete(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
    ) -> "VisionLanguageFamily":
        return replace(self, vision_inputs=VisionInputs(config, trust_remote_code=trust_remote_code))

    def open_row_model(self, model: PreTrainedModel) -> "VisionLanguageRowModel":
        coefficient = find_router_loss(model, self.text.router_aux_loss)
        return VisionLanguageRowModel(model, router_aux_loss=coefficient, router_loss_over=self.text.router_loss_over)

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        """Placeholder ids for videos and audio."""
        found = text_tower.find_placeholders(config)
        return {token: name for token, name in found.items() if token != config.image_token_id}

    def find_tower_layers(self, model: PreTrainedModel) -> list[str]:
        parts = text_tower.list_parts(model)
        outside = {*parts["vision"], *parts["projector"]}
        layers = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        return [name for name in layers if f"{name}.weight" in outside]

    def pack(self, samples: Sequence[Sample]) -> tuple[Row, Images]:
        vision_inputs, row = self.vision_inputs, pack_row([ids for sample in samples for ids in list_sequences(sample)])
        made = [vision_inputs.read_pixels(sample["images"]) for sample in samples if sample.get("images")]
        pixels = {name: join_pixels([pixels[name] for pixels in made]) for name in (made[0] if made else ())}
        if pixels and has_blocks(vision_inputs.config):
            row = replace(row, blocks=vision_inputs.find_blocks(row))
        num_tokens = int((row.input_ids == vision_inputs.config.image_token_id).sum())
        return row, Images(num_tokens, pixels, vision_inputs.find_positions(samples, row, pixels))

    def make_check_sample(self, token_ids: np.ndarray) -> tuple[Sample, np.ndarray]:
        """Inserts one image after the first two tokens, or two for an even number; images depend on the tokens."""
        random, sizes = np.random.default_rng(int(token_ids[0])), CHECK_IMAGES[: 2 - len(token_ids) % 2]
        references = tuple(write_data_url(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes)
        places = self.vision_inputs.write_places([open_image(reference, directory=Path()) for reference in references])
        input_ids = np.concatenate([token_ids[:2], places, token_ids[2:]])
        return {"input_ids": input_ids, "images": references}, input_ids != self.vision_inputs.config.image_token_id

    def make_probes(self, lengths: Sequence[int]) -> list[Sample]:
        """Makes samples with as many of the data's largest images as the lengths and the cap on patches allow."""
        if self.largest_image is None:
            return super().make_probes(lengths)
        reference = write_data_url(np.zeros((*self.largest_image, 3), dtype=np.uint8))
        places = self.vision_inputs.write_places([open_image(reference, directory=Path())])
        shown = np.append(places, 0)  # a text token separates images
        num_left = sum(lengths)
        if self.max_patches is not None:
            num_left = self.max_patches // math.prod(self.vision_inputs.count_patches(*self.largest_image))
        samples = []
        for length in lengths:
            num_images = min(num_left, length // len(shown))
            num_left -= num_images
            ids = np.concatenate([*[shown] * num_images, np.zeros(length - num_images * len(shown), np.int64)])
            samples.append({"input_ids": ids, "images": (reference,) * num_images})
        return samples


class VisionLanguageRowModel(TextRowModel):
    """Reads rows with a vision-language model: the tower encodes images, whose features replace placeholders."""

    def __init__(self, model: PreTrainedModel, *, router_aux_loss: float = 0.0, router_loss_over: str = "sequence"):
        super().__init__(model, router_aux_loss=router_aux_loss, router_loss_over=router_loss_over)
        self.base = find_vision_base(model)
        name = PROJECTED_APART.get(model.config.model_type)
        self.projector = None if name is None else self.base.get_submodule(name)
        decoder = inspect.signature(type(text_tower.find_decoder(model)).forward).parameters
        self.feeds_layers = "deepstack_visual_embeds" in decoder  # features of several layers (Qwen3-VL)
        text = text_tower.text_config(model.config)
        self.has_layer_inputs = bool(getattr(text, "hidden_size_per_layer_input", None))  # Gemma 4
        self.pad_token_id = text.pad_token_id if self.has_layer_inputs else 0
        parts = text_tower.list_parts(model)
        self.outside = [*parts["vision"], *parts["projector"]]

    def embed(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Embeddings instead of token ids, including the images' features."""
        row, images = micro_batch.row, micro_batch.extras
        is_image = row.input_ids == self.model.config.image_token_id  # (1, T)
        input_ids = row.input_ids.masked_fill(is_image, self.pad_token_id)
        hidden = self.model.get_input_embeddings()(input_ids)  # (1, T, H)
        more: dict[str, Any] = {}
        if self.has_layer_inputs:  # layer inputs treat image tokens as padding
            padding = self.model.get_input_embeddings().weight[self.pad_token_id]
            texts = torch.where(is_image[..., None], padding, hidden)
            more["per_layer_inputs"] = text_tower.find_decoder(self.model).get_per_layer_inputs(input_ids, texts)
        if images.pixels:
            seen = self.base.get_image_features(**self.convert_pixels(images.pixels), return_dict=True)
            found = join(seen.pooler_output) if self.projector is None else self.projector(seen.last_hidden_state)
            features = found.reshape(-1, hidden.shape[-1]).to(hidden)
            if len(features) != images.num_tokens:
                raise ValueError(
                    f"the images have {len(features):,} feature vectors, but the data has {images.num_tokens:,} tokens"
                    f" for them: {HAVE_CHANGED}"
                )
            hidden = hidden.masked_scatter(is_image[..., None], features)
            if self.feeds_layers:
                more["visual_pos_masks"] = is_image
                more["deepstack_visual_embeds"] = [join(of) for of in seen.deepstack_features]
        if images.axis_positions is not None:
            more["position_ids"] = images.axis_positions
        return dict(input_ids=None, inputs_embeds=self.touch(hidden)) | more

    def convert_pixels(self, pixels: dict[str, Tensor]) -> dict[str, Tensor]:
        """The pixels in the tower's dtype, where the tower does not convert them itself."""
        if self.projector is None:
            return pixels
        dtype = next(self.projector.parameters()).dtype  # gathered together with the tower, in the compute type
        return {name: value.to(dtype) for name, value in pixels.items()}

    def touch(self, hidden: Tensor) -> Tensor:
        """Returns `hidden`, made to give all trained parameters of tower and projector a gradient, zero without images.
        FSDP reduces the gradients that exist on a rank, so all ranks must have gradients for the same parameters."""
        trained = [param for name in self.outside if (param := self.model.get_parameter(name)).requires_grad]
        return hidden + sum(param.sum().to(hidden) * 0 for param in trained) if trained else hidden

    def run_own(self, micro_batch: MicroBatch) -> ReferenceForward:
        kinds = (micro_batch.row.input_ids == self.model.config.image_token_id).long()
        parameters = inspect.signature(type(self.base).forward).parameters
        given = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in parameters}
        given |= {"input_ids": micro_batch.row.input_ids, **self.convert_pixels(micro_batch.extras.pixels)}
        decoded: list[Any] = []
        hook = text_tower.find_decoder(self.model).register_forward_hook(lambda *call: decoded.append(call[-1]))
        try:
            outputs = self.model(**given, use_cache=False, **self.routed)
        finally:
            hook.remove()
        return self.collect_own(decoded[0].last_hidden_state, outputs)


def find_vision_base(model: PreTrainedModel) -> PreTrainedModel:
    """The part that joins tower and decoder: the model without its head, or the whole model (Llama 4).
    ValueError if it cannot compute image features."""
    base = model if model.config.model_type in PROJECTED_APART else text_tower.find_base(model)
    if not hasattr(base, "get_image_features"):
        raise ValueError(
            f"model type {model.config.model_type!r} cannot be trained on images: {type(base).__name__} has no"
            " get_image_features"
        )
    return base


def has_blocks(config: PreTrainedConfig) -> bool:
    """Whether attention within an image is bidirectional."""
    is_said = getattr(text_tower.text_config(config), "use_bidirectional_attention", None) == "vision"  # Gemma 4
    return is_said or config.model_type in WITH_BLOCKS


def join(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Concatenates the features of all images."""
    return features if isinstance(features, Tensor) else torch.cat(list(features))


def join_pixels(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates the samples' pixels; smaller ones are zero-padded at the end, as processors do within a sample."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *shape)
    start = 0
    for tensor in tensors:
        joined[(slice(start, start := start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
    return joined


def write_data_url(pixels: np.ndarray) -> str:
    """Encodes pixels (height, width, 3) as a data URL."""
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return as_data_url(file.getvalue())
