"""Image files of every kind that Pillow writes, and some made by hand, against pixels computed with numpy."""

import io
import os
import struct
import warnings
import zlib

import numpy as np
import PIL
import pytest
from PIL import Image, ImageMode
from transformers.image_utils import load_image

from mini_trainer.data.stores.image_files import FORMATS, LIMIT_OF_BYTES, decode_image, open_image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # Pillow's

HEIGHT, WIDTH = 5, 7
PALETTE = np.random.default_rng(1).integers(0, 256, (256, 3), dtype=np.uint8)
EXACTLY = {"WEBP": dict(lossless=True, exact=True), "JPEG": dict(quality=100, subsampling=0)}
LOSS_OF_JPEG = 6  # of 255, at the best quality
ORIENTATION = 0x0112
UPRIGHT = {  # by EXIF's orientation
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: np.swapaxes(pixels, 0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.swapaxes(pixels[::-1, ::-1], 0, 1),
    8: lambda pixels: np.rot90(pixels),
}


def draw(mode: str, *, seed: int = 0) -> tuple[Image.Image, np.ndarray]:
    """A random image of one of Pillow's modes, and its numbers."""
    random, bands = np.random.default_rng(seed), len(ImageMode.getmode(mode).bands)
    if mode == "1":
        numbers = random.integers(0, 2, (HEIGHT, WIDTH)).astype(bool)
        return Image.fromarray(numbers), numbers
    if mode.startswith(("I", "F")):
        kind = {"I": "<i4", "F": "<f4", "I;16B": ">u2"}.get(mode, "<u2")
        numbers = random.integers(0, 1 << 16, (HEIGHT, WIDTH)).astype(kind)
    else:
        numbers = random.integers(0, 256, (HEIGHT, WIDTH, bands), dtype=np.uint8)
    image = Image.frombytes(mode, (WIDTH, HEIGHT), numbers.tobytes())
    if mode in ("P", "PA"):
        image.putpalette(PALETTE.tobytes())
    return image, numbers


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **EXACTLY.get(kind, {}), **options)
    return file.getvalue()


def can_write(mode: str, kind: str) -> bool:
    with warnings.catch_warnings(action="ignore"):  # of what Pillow will drop
        try:
            return bool(encode(draw(mode)[0], kind))
        except (OSError, KeyError, ValueError):
            return False


def expect(mode: str, kind: str) -> np.ndarray:
    """The colours in the numbers of `draw`: (HEIGHT, WIDTH, 3)."""
    image, numbers = draw(mode)
    if mode == "1":
        grey = np.where(numbers, 255, 0)
    elif mode in ("L", "LA"):
        grey = numbers[:, :, 0]
    elif mode in ("P", "PA"):
        return PALETTE[numbers[:, :, 0]]
    elif mode in ("RGB", "RGBA", "RGBX"):
        return numbers[:, :, :3]
    elif mode == "CMYK":
        ink, black = numbers[:, :, :3].astype(float), numbers[:, :, 3:].astype(float)
        return np.round((255 - ink) * (255 - black) / 255)
    else:  # Pillow has already made 8 bits of it when it wrote the file
        return np.asarray(image.convert("RGB"))
    return np.repeat(grey[:, :, None], 3, axis=2)


KINDS = ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP")
WRITTEN = [(mode, kind) for mode in Image.MODES for kind in KINDS if can_write(mode, kind)]
UNREADABLE = {("F", "TIFF"): "mode F ", ("LAB", "TIFF"): "mode LAB "}
UNREADABLE |= {pair: "mode I" for pair in WRITTEN if pair[0].startswith("I") and pair[1] in ("PNG", "TIFF")}
if int(PIL.__version__.partition(".")[0]) < 13:  # which does not read what it writes
    UNREADABLE["YCbCr", "TIFF"] = "broken: .*truncated"


@pytest.mark.parametrize(("mode", "kind"), [pair for pair in WRITTEN if pair not in UNREADABLE])
def test_pixels_are_what_numpy_says_and_eight_bits_are_as_transformers_reads_them(mode, kind):
    data, expected = encode(draw(mode)[0], kind), expect(mode, kind).astype(int)
    found = decode_image(data)
    assert found.mode == "RGB"
    difference = np.abs(np.asarray(found).astype(int) - expected).max()
    assert difference <= (LOSS_OF_JPEG if kind == "JPEG" else 1 if mode == "CMYK" else 0)
    theirs = Image.open(io.BytesIO(data))
    if not theirs.mode.startswith("I"):
        assert np.array_equal(np.asarray(found), np.asarray(load_image(theirs)))


@pytest.mark.parametrize(("mode", "kind"), UNREADABLE)
def test_modes_without_a_known_range_are_refused(mode, kind):
    with pytest.raises(ValueError, match=UNREADABLE[mode, kind]):
        decode_image(encode(draw(mode)[0], kind))


def write_png(numbers: np.ndarray, *, size: tuple[int, int] | None = None, colours: int = 0) -> bytes:
    """A PNG of 8 or 16 bits. `size`: what it says that it holds (width, height); `colours`: PNG's type of colour."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    width, height = size or (numbers.shape[1], numbers.shape[0])
    head = struct.pack(">IIBBBBB", width, height, 8 * numbers.itemsize, colours, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(f">u{row.itemsize}").tobytes() for row in numbers)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_tiff(strip: bytes, *, size: tuple[int, int] = (WIDTH, HEIGHT), order: str = "<", **tags: object) -> bytes:
    """A TIFF of one strip, uncompressed. `bits`: of each sample; `photometric`, `sample_format`: as TIFF has them."""
    bits = tags.get("bits", (16,))
    start = 8 + 2 * len(bits)
    values = {256: size[0], 257: size[1], 258: bits[0], 259: 1, 262: tags.get("photometric", 1), 273: start,
              277: len(bits), 278: size[1], 279: len(strip), 339: tags.get("sample_format", 1)}  # fmt: skip
    entries = b""
    for tag, value in values.items():
        entry = (3, len(bits), 8) if tag == 258 and len(bits) > 2 else (4, 1, value)  # more than two do not fit here
        entries += struct.pack(f"{order}HHII", tag, *entry)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, start + len(strip))
    head += struct.pack(f"{order}{len(bits)}H", *bits)
    return head + strip + struct.pack(f"{order}H", len(values)) + entries + bytes(4)


def draw_deep(*shape: int) -> np.ndarray:
    """Random numbers of 16 bits, black and white among them."""
    numbers = np.random.default_rng(2).integers(0, 1 << 16, (HEIGHT, WIDTH, *shape), dtype=np.uint16)
    numbers[0, 0], numbers[0, 1] = 0, (1 << 16) - 1
    return numbers


def check_pixels(data: bytes, expected: np.ndarray) -> None:
    expected = np.repeat(expected[:, :, None], 3, axis=2) if expected.ndim == 2 else expected[:, :, :3]
    assert np.array_equal(np.asarray(decode_image(data)), expected)


def test_all_colours_of_16_bits_in_png_keep_their_upper_8():
    for colours, bands in ((2, 3), (6, 4)):  # RGB, RGBA
        numbers = draw_deep(bands)
        check_pixels(write_png(numbers, colours=colours), numbers // 256)
    numbers = draw_deep(2)  # grey and alpha
    check_pixels(write_png(numbers, colours=4), numbers[:, :, 0] // 256)


def test_colours_of_16_bits_in_tiff_keep_their_upper_8_and_white_that_is_zero_is_turned_round():
    numbers, few = draw_deep(3), (draw_deep() // 256).astype(np.uint8)
    for order in "<>":
        strip = numbers.astype(f"{order}u2").tobytes()
        check_pixels(write_tiff(strip, order=order, bits=(16, 16, 16), photometric=2), numbers // 256)
    check_pixels(write_tiff(few.tobytes(), bits=(8,), photometric=0), 255 - few)


DEEP_GREY = {"u2": "mode I;16", "i2": "mode I ", "u4": "mode I |known format", "i4": "mode I ", "f4": "mode F ",
             "f8": "known format"}  # fmt: skip


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", DEEP_GREY)
def test_tiff_of_deep_grey_is_refused(kind, order):
    numbers, sample_format = draw_deep().astype(order + kind), {"u": 1, "i": 2, "f": 3}[kind[0]]
    data = write_tiff(numbers.tobytes(), order=order, bits=(8 * numbers.itemsize,), sample_format=sample_format)
    with pytest.raises(ValueError, match=DEEP_GREY[kind]):
        decode_image(data)


LZW = {"compression": "tiff_lzw"}  # decoded by libtiff, which is another path in Pillow
TURNED = [*((kind, {}) for kind in ("PNG", "WEBP", "TIFF", "JPEG")), ("TIFF", LZW), ("MPO", EXACTLY["JPEG"])]


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(("kind", "options"), TURNED)
def test_images_are_turned_as_exif_says(kind, options, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    shades = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 1800
    for mode in ("L", "RGB", "LA", "P"):
        if not can_write(mode, kind):
            continue
        image = Image.fromarray((shades // 256).astype(np.uint8)).convert(mode)
        expected = UPRIGHT[orientation](shades // 256)[:, :, None]
        found = np.asarray(decode_image(encode(image, kind, exif=exif, **options))).astype(int)
        assert found.shape == (*expected.shape[:2], 3)
        assert np.abs(found - expected).max() <= (LOSS_OF_JPEG if kind in ("JPEG", "MPO") else 0), mode


def test_colours_under_transparency_are_kept():
    """As the file has them, in a palette, too."""
    image, numbers = draw("P", seed=3)
    numbers = numbers[:, :, 0]
    for kind, transparency in (("PNG", bytes(range(256))), ("PNG", 3), ("GIF", int(numbers[0, 0]))):
        check_pixels(encode(image, kind, transparency=transparency), PALETTE[numbers])
    check_pixels(encode(Image.fromarray(numbers), "PNG", transparency=int(numbers[0, 0])), numbers)
    colours = PALETTE[numbers]
    check_pixels(encode(Image.fromarray(colours), "PNG", transparency=tuple(colours[0, 0].tolist())), colours)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_animations_and_files_of_several_images_are_refused_and_a_phones_photo_is_its_first(kind):
    first, second = (Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ((200, 40, 90), (0, 0, 0)))
    data = encode(first, kind, save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    if kind == "MPO":
        difference = np.asarray(decode_image(data)).astype(int) - (200, 40, 90)
        assert np.abs(difference).max() <= LOSS_OF_JPEG
        return
    with pytest.raises(ValueError, match=rf"{'several images' if kind == 'TIFF' else 'animated'} \(2 frames\)"):
        decode_image(data)


def test_formats_that_are_not_listed_are_refused():
    image, refused = Image.new("RGB", (16, 16), "red"), []
    Image.init()
    for kind in sorted(set(Image.SAVE) - {*FORMATS, "MPO"}):
        try:
            data = encode(image, kind)
        except (OSError, ValueError, KeyError):  # needs another mode, or a program
            continue
        with pytest.raises(ValueError, match="known format"):
            decode_image(data)
        refused.append(kind)
    assert {"EPS", "PPM", "TGA", "ICO", "PDF", "PCX"} <= set(refused)


def test_only_regular_files_of_limited_size_are_read(tmp_path):
    """test_reading.py has devices and sockets, for the same reader."""
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match=r"^pipe\.png: .*regular file"):
        open_image("pipe.png", directory=tmp_path)
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", LIMIT_OF_BYTES + 1)
    with pytest.raises(ValueError, match=r"^large\.png: .*268,435,456 bytes"):
        open_image("large.png", directory=tmp_path)


def list_bombs() -> list[bytes]:
    """Small files that say that they are large."""
    image, large = Image.new("RGB", (WIDTH, HEIGHT)), 65_000
    gif, bmp, jpeg = (bytearray(encode(image, kind)) for kind in ("GIF", "BMP", "JPEG"))
    gif[6:10] = struct.pack("<HH", large, large)
    bmp[18:26] = struct.pack("<ii", large, large)
    start = jpeg.index(b"\xff\xc0")
    jpeg[start + 5 : start + 9] = struct.pack(">HH", large, large)
    grey = np.zeros((1, 1), dtype=np.uint8)
    pngs = (write_png(grey, size=size) for size in ((large, large), (9_460, 9_460), (1 << 30, 1)))
    webp = encode(Image.new("L", (16_383, 5_462)), "WEBP", method=0, quality=0)
    return [*map(bytes, (gif, bmp, jpeg)), *pngs, webp, write_tiff(b"\0", size=(large, large), bits=(8,))]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_files_that_say_they_have_too_many_pixels_are_refused():
    for data in list_bombs():
        assert len(data) < 1 << 20
        with pytest.raises(ValueError, match="89,478,485"):
            decode_image(data)


def test_damaged_files_are_read_or_refused_in_one_line():
    """Cut off and changed at random places."""
    random = np.random.default_rng(4)
    for mode, kind in [("RGB", kind) for kind in KINDS] + [("I;16", "PNG"), ("I;16", "TIFF"), ("P", "GIF")]:
        whole = encode(draw(mode)[0], kind)
        for _ in range(150):
            data = bytearray(whole[: random.integers(0, len(whole) + 1)] if random.integers(3) == 0 else whole)
            for place in random.integers(0, max(1, len(data)), random.integers(0, 5)):
                data[place : place + 1] = bytes([random.integers(256)])
            try:
                assert decode_image(bytes(data)).mode == "RGB"
            except ValueError as error:
                assert "\n" not in str(error) and str(error)
