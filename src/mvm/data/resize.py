"""From a stored picture to size x size pixels."""

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image

from mvm.options import choose

MODES = {1: "L", 3: "RGB"}  # by channels
BOX_UP_TO = 64  # pixels; small images are published squashed whole (ImageNet-32, -64), large ones cropped (ADM)


class BadImage(ValueError):
    """A picture that cannot be decoded."""


def box(image: Image.Image, size: int) -> Image.Image:
    """Return the whole picture squashed to size x size; each pixel is the mean over its box."""
    return image if image.size == (size, size) else image.resize((size, size), Image.Resampling.BOX)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the middle square, its side resized to `size`, as ADM does: halve by boxes, then bicubic, then crop."""
    while min(image.size) >= 2 * size:
        width, height = image.size
        image = image.resize((width // 2, height // 2), Image.Resampling.BOX)
    width, height = (round(side * size / min(image.size)) for side in image.size)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def unchanged(image: Image.Image, size: int) -> Image.Image:
    """Return the picture, which must have the size already."""
    if image.size != (size, size):
        raise ValueError(f"is {image.size[0]}x{image.size[1]}, not {size}x{size}, and resize='none'; choose a resize")
    return image


def auto(image: Image.Image, size: int) -> Image.Image:
    """Return the picture by the resize that is usual at this size."""
    return RESIZES[resolve("auto", size)](image, size)


RESIZES: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "auto": auto,
    "box": box,
    "centre-crop": centre_crop,
    "none": unchanged,
}


def resolve(resize: str, size: int) -> str:
    """Return the name of the resize that will be done: what "auto" stands for at this size."""
    choose("resize", resize, RESIZES)
    return ("box" if size <= BOX_UP_TO else "centre-crop") if resize == "auto" else resize


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey in 8 bits; Pillow's own conversion would cut everything above 255 to white."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def _converted(image: Image.Image, mode: str) -> Image.Image:
    image = _eight_bits(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours; straight to RGB Pillow warns
    image.load()  # now: Pillow would find damage only when someone looks at the pixels
    return image if image.mode == mode else image.convert(mode)


def _opened(image: bytes | np.ndarray) -> Image.Image:
    if isinstance(image, bytes):
        return Image.open(io.BytesIO(image))
    return Image.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[-1] == 1 else image))


def decode(image: bytes | np.ndarray, channels: int) -> Image.Image:
    """Return the picture in RGB or grey (transparency dropped); BadImage when it is none, or not whole."""
    mode = choose("channels", str(channels), {str(number): mode for number, mode in MODES.items()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return _converted(_opened(image), mode)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged files: OSError, SyntaxError, struct.error...
        what = "not an image" if isinstance(error, Image.UnidentifiedImageError) else f"{type(error).__name__}: {error}"
        raise BadImage(what) from None


def planes(image: Image.Image) -> np.ndarray:
    """Return uint8 pixels (C, H, W)."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
