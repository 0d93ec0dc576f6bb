"""Images in files, URLs and rows, read safely, and the processors of models that take them.

Pillow and transformers' processors are imported only when an image is used. transformers' own code for images imports
torch if it is installed; nothing here does.
"""

import base64
import binascii
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.distributed.messages import hide_secrets, one_line
from mini_trainer.options.reading import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 89_478_485  # Pillow warns of decompression bombs above this
SHOWN_CHARS = 60  # characters of a reference in messages
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # some others of Pillow's start programs (EPS)
PHOTO = "MPO"  # a phone's photo: a JPEG followed by others, such as a preview or a depth map
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # Pillow's modes with a known black and white
LIMIT_OF_BYTES = 1 << 28  # largest file


def name_reference(reference: str) -> str:
    """The reference as shown in messages."""
    if reference.startswith("data:"):
        return "a data: URL"
    reference = hide_secrets(reference)
    return reference if len(reference) <= SHOWN_CHARS else f"...{reference[-SHOWN_CHARS:]}"


def as_data_url(data: bytes) -> str:
    """The image as a data: URL without a subtype; Pillow detects the format from the bytes."""
    return f"data:image;base64,{base64.b64encode(data).decode()}"


def read_reference(reference: str, *, directory: Path) -> bytes:
    """The bytes of an image, from a file (relative to `directory`) or a data: URL."""
    if reference.startswith("data:"):
        head, comma, data = reference.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ValueError("a data: URL that is not data:image/...;base64,...")
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"a data: URL whose base64 is broken: {error}") from None
    if "://" in reference:
        raise ValueError(f"{name_reference(reference)}: images are read from files and data: URLs: download it before")
    try:
        with open_regular(directory / reference) as file:
            data = file.read(LIMIT_OF_BYTES + 1)  # the size that fstat reports may be wrong, as under /proc
        if len(data) > LIMIT_OF_BYTES:
            raise OSError(f"larger than {LIMIT_OF_BYTES:,} bytes")
        return data
    except FileNotFoundError:
        raise ValueError(f"{name_reference(reference)}: no such file") from None
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{directory / reference}: ")
        raise ValueError(f"{name_reference(reference)}: cannot be read: {reason}") from None


def open_image(reference: str, *, directory: Path) -> "Image":
    """The image, upright (EXIF) and in RGB, as transformers loads it. ValueError for an image that cannot be decoded,
    or not without loss of meaning: animations, unknown ranges, and grey of more than 8 bits."""
    data, name = read_reference(reference, directory=directory), name_reference(reference)
    try:
        return decode_image(data)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def decode_image(data: bytes) -> "Image":
    """The image in a file's bytes; see `open_image`."""
    import PIL.Image
    import PIL.ImageOps

    with decoding_errors():
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
        num_frames = 1 if image.format == PHOTO else getattr(image, "n_frames", 1)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width:,} x {image.height:,} pixels, allowed are {MAX_PIXELS:,} in all")
    if num_frames > 1:
        kind = "holds several images" if image.format == "TIFF" else "is animated"
        raise ValueError(f"{kind} ({num_frames} frames): give one of them as an image")
    with decoding_errors():
        upright = PIL.ImageOps.exif_transpose(image)
    if upright.mode not in EIGHT_BITS:
        raise ValueError(f"pixels of Pillow's mode {upright.mode} have no definite conversion to RGB: save it as RGB")
    return upright.convert("RGB")


@contextlib.contextmanager
def decoding_errors() -> Iterator[None]:
    """Converts errors of Pillow to ValueErrors of one line."""
    import PIL.Image

    try:
        yield
    except PIL.Image.DecompressionBombError:
        raise ValueError(f"more than {MAX_PIXELS:,} pixels") from None
    except PIL.UnidentifiedImageError:
        raise ValueError(f"not an image in a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise any error for truncated or damaged files
        raise ValueError(f"is broken: {one_line(error) or type(error).__name__}") from None


def load_processor(model_dir: str, *, trust_remote_code: bool = False) -> Any:
    """The model's processor, resizing with numpy and Pillow, even if its video processor cannot be loaded. It is the
    same on every machine, so an image is as many tokens in training as it was here."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("images need the package pillow, which is not installed: pip install pillow") from None
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
    from transformers.processing_utils import ProcessorMixin

    where = f"--model-name-or-path {model_dir}: no image processor"
    try:
        settings, _ = ProcessorMixin.get_processor_dict(model_dir)
        images = AutoImageProcessor.from_pretrained(model_dir, backend="pil", trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
        name = settings.get("processor_class") or tokenizer.init_kwargs.get("processor_class")
        own = processor_class_from_name(name) if name in PROCESSOR_MAPPING_NAMES.values() else None
        if own is None:
            raise ValueError(f"transformers has no processor {name!r}")
        # The check of its parts is replaced, as the video processor may be missing.
        without_videos = type(own.__name__, (own,), {"check_argument_for_proper_class": lambda *given: type(given[-1])})
        parts = {"image_processor": images, "tokenizer": tokenizer}
        return without_videos.from_args_and_dict([parts.get(each) for each in own.get_attributes()], dict(settings))
    except (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{where} can be loaded: {one_line(error)}") from None
