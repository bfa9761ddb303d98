"""Codecs: between uint8 images and what the path works on."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

GREY_SCALE = 127.5  # grey level g of 0..255 is the value g/127.5 - 1


class Codec(ABC):
    """encode: uint8 images (B, C, H, W) -> samples; decode: the reverse; latent_shape of one sample."""

    latent_shape: tuple[int, ...]

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor: ...
    @abstractmethod
    def decode(self, samples: Tensor) -> Tensor: ...


class Pixels(Codec):
    """The identity up to scale: 0..255 <-> [-1, 1], rounded and clipped on the way back."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.latent_shape = shape

    def encode(self, images: Tensor) -> Tensor:
        return images.float() / GREY_SCALE - 1

    def decode(self, samples: Tensor) -> Tensor:
        return ((samples.float() + 1) * GREY_SCALE).round().clamp(0, 255).to(torch.uint8)
