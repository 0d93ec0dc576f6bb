"""Language models that see: next tokens of texts with images (see `objectives.objective.Objective`).

T tokens in a packed row, H hidden size. Pixels are read and resized where batches are made, in the background; what a
row needs beside its tokens goes with its micro-batch.
"""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from chat.labels import IGNORED
from chat.pictures import as_data_url, load_processor, open_image
from objectives.causal_lm import CausalLM, PackedCausalLM, find_lost_scale
from objectives.columns import VISION, CountLabels, Sample, Task, check_task
from objectives.micro_batch import MicroBatch, make_idle_sample, pack_samples
from objectives.sight import Sight, list_parts
from objectives.text_tower import LeftOut, find_placeholders, is_multimodal, text_config
from options import VisionOptions

# What cannot be had, whatever the data.
REFUSED = {
    "llama4": "its get_image_features leaves out the projector, which only the whole model's forward applies",
    "paligemma": "it looks at a whole prompt both ways, and where that ends the data does not say",
}
WITH_BLOCKS = ("gemma3",)  # whose tokens of an image see each other both ways, in every layer
CHECK_IMAGES = ((24, 32), (40, 24))  # pixels
NO_BLOCK = -1


class VisionLanguage:
    """The objective of language models that see images.

    Invariant: `processor` is there once `use_tokenizer` has been called, `sight` once a model has been wrapped.
    """

    name, peft_task = VISION, "CAUSAL_LM"
    keeps_unused = True

    def __init__(self, options: VisionOptions, text: CausalLM):
        """`text`: the objective of what is said; its settings are of both."""
        self.options, self.text = options, text
        self.row_group = None  # an image is seen whole
        self.config: PreTrainedConfig | None = None
        self.trust_remote_code = False
        self.processor: Any = None
        self.sight: Sight | None = None
        self.largest_image: tuple[int, int] | None = None  # height and width, of those in the data

    # What is trained on.

    def open_data(self, task: Task, count_labels: CountLabels) -> None:
        check_task(task, self.name)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.processor = load_processor(self.config.name_or_path, trust_remote_code=self.trust_remote_code)

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        """Videos and sounds."""
        return {token: name for token, name in find_placeholders(config).items() if token != config.image_token_id}

    # The model.

    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        self.config, self.trust_remote_code = config, trust_remote_code
        if type(config) not in AutoModelForImageTextToText._model_mapping or not is_multimodal(config):
            return f"model type {config.model_type!r} sees no images in transformers, and the data has some"
        if config.model_type in REFUSED:
            return f"model type {config.model_type!r} cannot be trained on images: {REFUSED[config.model_type]}"
        if getattr(config, "image_token_id", None) is None:
            return f"model type {config.model_type!r} has no image_token_id: where an image stands is not known"
        return find_lost_scale(config)

    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        parts = list_parts(model)
        for part in self.options.freeze:
            for name in parts.get(part, ()):
                model.get_parameter(name).requires_grad_(False)
        if not any(param.requires_grad for param in model.parameters()):
            raise ValueError(f"--freeze {' '.join(self.options.freeze)}: nothing is left to train")
        return model

    def load_model(
        self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        return self.text.load_model(model_dir, dtype=dtype, trust_remote_code=trust_remote_code)

    def leave_out(self, model: PreTrainedModel) -> LeftOut:
        return LeftOut()

    def find_head(self, model: PreTrainedModel) -> list[str]:
        return []

    def find_tower_layers(self, model: PreTrainedModel) -> list[str]:
        parts = list_parts(model)
        outside = {*parts["vision"], *parts["projector"]}
        return [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and f"{name}.weight" in outside
        ]

    def make_missing(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor]:
        return {}

    def wrap(
        self, model: PreTrainedModel, *, backend: str, compute_dtype: torch.dtype, fuses_loss: bool
    ) -> PackedCausalLM:
        packed = self.text.wrap(model, backend=backend, compute_dtype=compute_dtype, fuses_loss=fuses_loss)
        self.sight = packed.sight = Sight(model)
        return packed

    # Samples.

    def pack(self, samples: Sequence[Sample], *, sources: np.ndarray | None = None, num_sources: int = 1) -> MicroBatch:
        texts = [(input_ids, labels, None) for input_ids, labels, _ in samples]
        micro_batch = pack_samples(texts, sources=sources, num_sources=num_sources)
        pixels = join_pixels([self.read_pixels(references) for _, _, references in samples if references])
        blocks = self.number_blocks(micro_batch) if pixels and has_blocks(self.config) else None
        return replace(
            micro_batch,
            pixels=pixels,
            num_image_tokens=int((micro_batch.input_ids == self.config.image_token_id).sum()),
            axis_positions=self.find_positions(samples, micro_batch, pixels),
            blocks=blocks,
            has_blocks_everywhere=self.config.model_type in WITH_BLOCKS,
        )

    def read_pixels(self, references: Sequence[str]) -> dict[str, Tensor]:
        """What the model's tower takes of a sample's images, as its processor makes it of them together.

        What it makes of one image may depend on how many there are (LLaVA-OneVision).
        """
        images = [open_image(reference, directory=Path()) for reference in references]
        places = self.processor.image_token * len(images)
        made = self.processor(text=[places], images=[images], add_special_tokens=False, return_tensors="pt")
        return {name: value for name, value in made.items() if name in self.sight.taken}

    def count_patches(self, height: int, width: int) -> tuple[int, int]:
        """Into how many tiles the processor cuts an image, and how many patches of each enter the tower.

        Of what the processor makes of several images together, as if each were alone: that is never less.
        """
        vision, images = self.config.vision_config, self.processor.image_processor
        patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if count is None or not hasattr(images, "get_number_of_image_patches"):  # then it always says 1
            import PIL.Image

            shown = [[PIL.Image.new("RGB", (width, height))]]
            made = self.processor(text=[self.processor.image_token], images=shown, add_special_tokens=False)
            shape = np.shape(made["pixel_values"])
            if len(shape) == 3:  # (images, patches, values of one), which the processor has laid out
                return shape[0], shape[1]
            *tiles, _, rows, columns = shape
            return math.prod(tiles), (rows // patch) * (columns // patch)
        number = int(count(image_sizes=[[height, width]])["num_image_patches"][0])
        if "image_grid_thw" in images.model_input_names:  # whose tower takes any size whole
            return 1, number
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        return number, (side // patch) ** 2

    def find_positions(
        self, samples: Sequence[Sample], micro_batch: MicroBatch, pixels: dict[str, Tensor]
    ) -> Tensor | None:  # (3, 1, T)
        """Of models whose positions have several axes: each sample's, which begin anew; None: there is one axis."""
        if not self.sight.has_axes:
            return None
        axes, grids = micro_batch.position_ids.expand(3, 1, -1).clone(), pixels.get("image_grid_thw")
        start = first = 0
        for input_ids, _, references in samples:
            end, after = start + len(input_ids), first + len(references or ())
            if after > first:
                axes[..., start:end] = self.sight.number_axes(micro_batch.input_ids[:, start:end], grids[first:after])
            start, first = end, after
        return axes

    def number_blocks(self, micro_batch: MicroBatch) -> Tensor:  # (T,)
        """The number of the image that each token is of, NO_BLOCK for text."""
        is_image = micro_batch.input_ids[0] == self.config.image_token_id
        begins = is_image.clone()
        begins[1:] &= ~is_image[:-1]
        return torch.where(is_image, begins.cumsum(0) - 1, NO_BLOCK)

    def make_idle_sample(self) -> Sample:
        return make_idle_sample()

    def make_probe(self, num_tokens: int, num_trained: int, *, longest: int) -> MicroBatch:
        """As full of the data's largest images as tokens and the cap of patches let it be."""
        if self.largest_image is None:
            return self.text.make_probe(num_tokens, num_trained, longest=longest)
        shown, reference, num_patches = self.make_probe_image(self.largest_image)
        num_left = (
            num_tokens
            if self.options.max_image_tokens_per_gpu is None
            else (self.options.max_image_tokens_per_gpu // num_patches)
        )
        samples = []
        for start in range(0, num_tokens, longest):
            length = min(longest, num_tokens - start)
            num_images = min(num_left, length // len(shown))
            num_left -= num_images
            input_ids = np.concatenate([*[shown] * num_images, np.zeros(length - num_images * len(shown), np.int64)])
            labels = np.full(length, IGNORED)
            labels[1 : 1 + -(-num_trained * length // num_tokens)] = 1
            samples.append((input_ids, labels, (reference,) * num_images))
        return self.pack(samples)

    def make_probe_image(self, size: tuple[int, int]) -> tuple[np.ndarray, str, int]:
        """The tokens of a black image of this height and width and one more, where it is, and its patches."""
        reference = write_data_url(np.zeros((*size, 3), dtype=np.uint8))
        image = open_image(reference, directory=Path())
        made = self.processor(text=[self.processor.image_token], images=[[image]], add_special_tokens=False)
        num_tiles, num_in_tile = self.count_patches(*size)
        input_ids = np.append(made["input_ids"][0], 0)  # a text's token, which keeps it from the next one
        return input_ids, reference, num_tiles * num_in_tile

    def make_check_sample(self, token_ids: np.ndarray) -> Sample:
        """With one image, or of an even number of tokens with two, after the first two; others for other tokens."""
        random, sizes = np.random.default_rng(int(token_ids[0])), CHECK_IMAGES[: 2 - len(token_ids) % 2]
        references = tuple(write_data_url(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes)
        images = [open_image(reference, directory=Path()) for reference in references]
        places = " and ".join([self.processor.image_token] * len(images))
        made = self.processor(text=[places], images=[images], add_special_tokens=False)
        input_ids = np.concatenate([token_ids[:2], np.array(made["input_ids"][0]), token_ids[2:]])
        labels = np.where(input_ids == self.config.image_token_id, IGNORED, input_ids)
        return input_ids, labels, references

    def measure_divisor(self, num_targets: int, samples: Iterable[Sample]) -> float:
        return num_targets

    # What a validation says.

    def list_metrics(self) -> dict[str, bool]:
        return self.text.list_metrics()

    def summarize(self, sums: Tensor, predictions: np.ndarray | None) -> dict[str, Any]:
        return self.text.summarize(sums, predictions)

    def describe_prediction(self, prediction: np.ndarray) -> dict[str, Any]:
        return self.text.describe_prediction(prediction)


def has_blocks(config: PreTrainedConfig) -> bool:
    """Whether the tokens of an image see each other both ways."""
    is_said = getattr(text_config(config), "use_bidirectional_attention", None) == "vision"  # Gemma 4
    return is_said or config.model_type in WITH_BLOCKS


def join_pixels(made: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Those of several samples one after the other; where they are of different sizes, with zeros behind the smaller,
    as processors put them behind images of a sample."""
    return {name: join_tensors([pixels[name] for pixels in made]) for name in (made[0] if made else ())}


def join_tensors(tensors: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *shape)
    start = 0
    for tensor in tensors:
        joined[(slice(start, start := start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
    return joined


def write_data_url(pixels: np.ndarray) -> str:
    """Pixels (height, width, 3) as an image in a text."""
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return as_data_url(file.getvalue())
