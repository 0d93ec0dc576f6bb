"""The images of a run's data."""

import functools
import math
from dataclasses import replace

import numpy as np

from mini_trainer.data.tokenized.image_sizes import CountPatches, SampleImages, count_row_images
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.options import VisionOptions
from mini_trainer.run.inputs import RunInputs


def count_images(inputs: RunInputs, vision: VisionOptions) -> int:
    """Counts images' patches, tells the family the largest image, and returns the number of samples with too many."""
    cap, training, held_out = vision.max_image_tokens_per_gpu, inputs.data, inputs.validation_data
    count_patches = functools.cache(inputs.family.vision_inputs.count_patches)
    num_dropped = count_set_images(training, count_patches, cap=cap, drop_overlong=inputs.data_options.drop_overlong)
    if held_out is not None:
        count_set_images(held_out, count_patches, cap=None, drop_overlong=False)
        most = None if cap is None else max(cap, int(held_out.images.patches.max()))
        held_out.images = replace(held_out.images, cap=most)
    sizes = [
        tuple(size) for source in training.sources for size in np.unique(source.image_sizes.sizes, axis=0).tolist()
    ]
    largest = max(sizes, key=lambda size: math.prod(count_patches(*size)), default=None)
    inputs.family = replace(inputs.family, largest_image=largest)  # pyrefly: ignore[unexpected-keyword]
    return num_dropped


def count_set_images(data: Mixture, count_patches: CountPatches, *, cap: int | None, drop_overlong: bool) -> int:
    """Sets the images of `data`, and drops rows with more than `cap` patches; returns their number.
    ValueError for such rows unless they may be dropped."""
    counted = [count_row_images(source.image_sizes, count_patches) for source in data.sources]
    tokens, patches, pairs = map(np.concatenate, zip(*counted, strict=True))
    data.images = SampleImages(tokens, patches, pairs, np.zeros(len(patches)), cap)
    over = data.kept[patches[data.kept] > (math.inf if cap is None else cap)]
    if len(over) == 0:
        return 0
    path, row = data.locate(int(over[patches[over].argmax()]))
    if not drop_overlong or len(over) == len(data.kept):
        raise ValueError(
            f"{path}: row {row} has {patches[over].max():,} patches of images, and {len(over):,} of"
            f" {len(data.kept):,} samples more than --max-image-tokens-per-gpu {cap}. Raise it to at least that, or"
            " drop these samples with --drop-overlong"
        )
    data.keep_where(patches <= cap)
    return len(over)
