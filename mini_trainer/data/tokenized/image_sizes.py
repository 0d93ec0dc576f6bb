"""The images of a data set: their sizes, and their load on a model's vision tower."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from mini_trainer.data.tokenized.index import list_views, read_numbers

CountPatches = Callable[[int, int], tuple[int, int]]  # height, width -> tiles, and patches in each


@dataclass(frozen=True)
class ImageSizes:
    """The images of all rows, concatenated."""

    row_of: np.ndarray  # (images,) int64
    sizes: np.ndarray  # (images, 2) int32: height and width
    num_tokens: np.ndarray  # (rows,) int32: tokens of the language model for all images of a row


def read_image_sizes(batches: Sequence[pa.RecordBatch]) -> ImageSizes:
    views = [list_views(batch.column("image_sizes")) for batch in batches]
    counts = np.concatenate([np.diff(offsets) for offsets, _ in views]) // 2
    numbers = np.concatenate([values[offsets[0] : offsets[-1]] for offsets, values in views])
    row_of = np.repeat(np.arange(len(counts)), counts)
    num_tokens = np.concatenate([read_numbers(batch, "num_image_tokens") for batch in batches])
    return ImageSizes(row_of, numbers.reshape(-1, 2), num_tokens)


@dataclass(frozen=True)
class SampleImages:
    """The load of each row's images on the vision tower."""

    tokens: np.ndarray  # (rows,) tokens of the language model
    patches: np.ndarray  # (rows,) int64, patches that enter the tower
    pairs: np.ndarray  # (rows,) float64, pairs of patches within a tile
    costs: np.ndarray  # (rows,) float64, in the packer's unit; 0 until the model is known
    cap: int | None  # most patches of a micro-batch

    def of(self, rows: np.ndarray) -> "SampleImages":
        return SampleImages(self.tokens[rows], self.patches[rows], self.pairs[rows], self.costs[rows], self.cap)


def count_row_images(images: ImageSizes, count_patches: CountPatches) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, patches and pairs of patches of each row; `count_patches` is called once per image size."""
    num_rows = len(images.num_tokens)
    sizes, size_of = np.unique(images.sizes, axis=0, return_inverse=True)
    found = np.array([count_patches(*size) for size in sizes.tolist()], dtype=np.int64).reshape(-1, 2)
    tiles, in_tile = found[size_of.reshape(-1)].T
    patches = np.bincount(images.row_of, tiles * in_tile, minlength=num_rows).astype(np.int64)
    pairs = np.bincount(images.row_of, tiles * in_tile**2, minlength=num_rows)
    return images.num_tokens, patches, pairs
