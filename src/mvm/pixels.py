"""Grey levels and the numbers the path works on: level g of 0..255 is the value g/127.5 - 1."""

import torch
from torch import Tensor

GREY_SCALE = 127.5


def to_unit(images: Tensor) -> Tensor:
    """Return images of 0 to 255, uint8 or float, as float32 in [-1, 1]."""
    return images.float() / GREY_SCALE - 1


def to_uint8(values: Tensor) -> Tensor:
    """Return values in [-1, 1] as uint8, rounded and clipped."""
    return ((values.float() + 1) * GREY_SCALE).round().clamp(0, 255).to(torch.uint8)
