"""The columns of texts with images."""

from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mini_trainer.data.columns import base
from mini_trainer.data.columns.token_columns import IMAGES_COLUMN, TextColumns

if TYPE_CHECKING:
    from mini_trainer.data.chat.conversation import TokenizedChat


class PicturedColumns(TextColumns):
    """Texts with as many placeholders for each image as the model's processor makes."""

    schema = pa.schema(
        base.BY_TOKEN
        | {
            "num_image_tokens": pa.int32(),  # placeholders among the tokens
            "image_sizes": pa.list_(pa.int32()),  # height and width of the first image, of the second, ...
            IMAGES_COLUMN: pa.list_(pa.string()),  # paths, from the data set's directory, or data: URLs; or null
        }
    )
    optional: ClassVar = {IMAGES_COLUMN: ()}
    facts = ("image_sizes",)

    def describe(self, task: base.DataTask) -> str:
        return "language modelling on texts with images"

    def make_row(self, tokens: "TokenizedChat") -> dict[str, Any]:
        row, pictures = super().make_row(tokens), tokens.pictures
        return row | {
            "num_image_tokens": 0 if pictures is None else pictures.num_tokens,
            "image_sizes": [] if pictures is None else [number for size in pictures.sizes for number in size],
            IMAGES_COLUMN: None if pictures is None else list(pictures.references),
        }

    describe_data, encode = base.Columns.describe_data, base.Columns.encode


PICTURED = PicturedColumns()
