"""From a stored picture to height x width pixels; a size is (height, width), or the side of a square."""

import importlib
import importlib.util
import io
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np
from PIL import Image, ImageOps

from mvm.options import choose, needs
from mvm.untrusted import MOST_PICTURE, MOST_PIXELS, cut

MODES = {1: "L", 3: "RGB"}  # by channels
# Recognized by contents, not by name. Pillow knows others, of which EPS would start Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
# Brands in the first box of a file: HEIC and AVIF share their container, and Pillow's AVIF reader fails on some HEIC.
HEIF_BRANDS = frozenset(b"heic heix heim heis hevc hevx hevm hevs mif1 msf1".split())
AVIF_BRANDS = frozenset(b"avif avis".split())
NO_HEIF = needs("a HEIC picture", "pillow-heif", "heic")  # why one is skipped
NO_AVIF = "an AVIF picture needs Pillow 11.3 or newer"
BOX_UP_TO = 64  # pixels; small images are published squashed whole (ImageNet-32, -64), large ones cropped (ADM)


Size = int | tuple[int, int]


class BadImage(ValueError):
    """A picture that cannot be decoded."""


def sides(size: Size) -> tuple[int, int]:
    """Return (height, width)."""
    return (size, size) if isinstance(size, int) else size


def box(image: Image.Image, size: Size) -> Image.Image:
    """Return the whole picture squashed to the size; each pixel is the mean over its box."""
    height, width = sides(size)
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BOX)


def centre_crop(image: Image.Image, size: Size) -> Image.Image:
    """Return the largest middle piece of this shape, resized as ADM does: halve by boxes, then bicubic, then crop."""
    rows, columns = sides(size)
    while image.size[0] >= 2 * columns and image.size[1] >= 2 * rows:
        width, height = image.size
        image = image.resize((width // 2, height // 2), Image.Resampling.BOX)
    width, height = image.size
    wanted, there = (columns, width) if width * rows <= height * columns else (rows, height)  # the side that is kept
    width, height = (round(side * wanted / there) for side in image.size)
    _check_pixels(width, height)  # a line of pixels would grow into a picture that fills the memory
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - columns) // 2, (height - rows) // 2
    return image.crop((left, top, left + columns, top + rows))


def unchanged(image: Image.Image, size: Size) -> Image.Image:
    """Return the picture, which must have the size already."""
    (width, height), (rows, columns) = image.size, sides(size)
    if (height, width) != (rows, columns):
        raise ValueError(f"is {height}x{width}, not {rows}x{columns}, and resize='none'; choose a resize")
    return image


RESIZES: dict[str, Callable[[Image.Image, Size], Image.Image]] = {
    "auto": lambda image, size: RESIZES[resolve("auto", size)](image, size),  # what is usual at this size
    "box": box,
    "centre-crop": centre_crop,
    "none": unchanged,
}


def resolve(resize: str, size: Size) -> str:
    """Return the name of the resize that will be done: what "auto" stands for at this size."""
    choose("resize", resize, RESIZES)
    return ("box" if max(sides(size)) <= BOX_UP_TO else "centre-crop") if resize == "auto" else resize


def _check_pixels(width: int, height: int) -> None:
    if not width * height:
        raise BadImage("it has no pixels")
    if width * height > MOST_PIXELS:
        raise BadImage(f"{width}x{height} is more than {MOST_PIXELS:,} pixels")


@cache
def _formats() -> tuple[str, ...]:
    """Return those of the formats that this Pillow has: AVIF came late."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def has_heif() -> bool:
    """Return whether HEIC pictures can be read here."""
    return importlib.util.find_spec("pillow_heif") is not None


@cache
def _register_heif() -> None:
    """Let Pillow read HEIC: the picture alone, in this thread, as there is a process per core."""
    module = importlib.import_module("pillow_heif")
    module.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)


def _formats_of(data: bytes) -> tuple[str, ...]:
    """Return the formats to try; BadImage where this one needs what is not installed."""
    if data[4:8] != b"ftyp":
        return _formats()
    end = min(int.from_bytes(data[:4]), 256)
    brands = {data[place : place + 4] for place in (8, *range(16, end, 4))}
    if brands & AVIF_BRANDS and "AVIF" not in _formats():
        raise BadImage(NO_AVIF)
    if not brands & HEIF_BRANDS or brands & AVIF_BRANDS:
        return _formats()
    if not has_heif():
        raise BadImage(NO_HEIF)
    _register_heif()
    return ("HEIF",)


def open_picture(data: bytes) -> Image.Image:
    """Return the picture in a file's bytes, not unpacked yet; BadImage where it is of no known format, or too large."""
    if len(data) > MOST_PICTURE:
        raise BadImage(f"its file is larger than {MOST_PICTURE:,} bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=_formats_of(data))
    except Exception as error:  # decoders raise nearly anything on damaged files: OSError, SyntaxError, struct.error...
        raise _bad(error) from None
    _check_pixels(*image.size)
    return image


def _bad(error: Exception) -> BadImage:
    if isinstance(error, BadImage):
        return error
    unknown = isinstance(error, Image.UnidentifiedImageError)
    return BadImage("not an image" if unknown else cut(f"{type(error).__name__}: {error}"))


def decode(image: bytes | np.ndarray, channels: int) -> Image.Image:
    """Return the picture in RGB or grey; BadImage when it is none, not whole, or too large.

    Of an animation the first frame; transparency is dropped; a rotation or reflection noted in EXIF is applied.
    """
    mode = choose("channels", str(channels), {str(number): mode for number, mode in MODES.items()})
    try:
        if isinstance(image, bytes):
            picture = open_picture(image)
        else:
            _check_pixels(*image.shape[:2])
            picture = Image.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[-1] == 1 else image))
        picture.load()  # now: Pillow would find damage only when someone looks at the pixels
        _check_pixels(*picture.size)  # again: of HEIC only decoding shows the size
        with suppress(Exception):  # a damaged EXIF block is no reason to lose the pixels
            ImageOps.exif_transpose(picture, in_place=True)
        if picture.mode == "F":
            raise ValueError("floating-point pixels have no agreed range")
        if picture.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion would cut all above 255 to white
            picture = Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
        if picture.mode == "P" and "transparency" in picture.info:
            picture = picture.convert("RGBA")  # the same colours; straight to RGB Pillow warns
        return picture if picture.mode == mode else picture.convert(mode)
    except Exception as error:  # as above: damage shows when pixels are unpacked
        raise _bad(error) from None


def planes(image: Image.Image) -> np.ndarray:
    """Return uint8 pixels (C, H, W)."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
