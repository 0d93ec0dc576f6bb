"""The images of a run's data."""

import functools
import math
from dataclasses import replace

import numpy as np

from mini_trainer.options import DataOptions, VisionOptions
from mini_trainer.run.inputs import OpenedData, OpenedModel


def count_images(
    data: OpenedData, model: OpenedModel, vision: VisionOptions, o: DataOptions
) -> tuple[OpenedModel, int]:
    """Counts the patches of the data's images; returns the model whose family knows the largest, and the number of
    samples that have too many."""
    cap, training, held_out = vision.max_image_tokens_per_gpu, data.training, data.validation
    count_patches = functools.cache(model.family.vision_inputs.count_patches)
    num_dropped = training.count_images(count_patches, cap=cap, drop_overlong=o.drop_overlong)
    if held_out is not None:
        held_out.count_images(count_patches, cap=None, drop_overlong=False)
        most = None if cap is None else max(cap, int(held_out.images.patches.max()))
        held_out.images = replace(held_out.images, cap=most)
    sizes = [
        tuple(size) for source in training.sources for size in np.unique(source.image_sizes.sizes, axis=0).tolist()
    ]
    largest = max(sizes, key=lambda size: math.prod(count_patches(*size)), default=None)
    return replace(model, family=replace(model.family, largest_image=largest)), num_dropped
