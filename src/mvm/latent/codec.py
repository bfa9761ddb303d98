"""Codecs: between uint8 images or float arrays and what the path works on."""

from abc import ABC, abstractmethod
from typing import NoReturn

from torch import Tensor

from mvm.pixels import to_uint8, to_unit


class Codec(ABC):
    """encode: uint8 images (B, C, *space) -> samples; decode: the reverse; latent_shape of one sample.

    Pixels also encode images between two grey levels, float32 of 0 to 255, as augmentation makes them.
    """

    latent_shape: tuple[int, ...]

    @property
    def identity(self) -> dict[str, str]:
        """Return what identifies a codec among those of its shape: {"codec": ...} and what else samples depend on."""
        return {}

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor: ...
    @abstractmethod
    def decode(self, samples: Tensor) -> Tensor: ...


class Undecoded(Codec):
    """Latents whose autoencoder was not given: a field in them can be sampled, and no image be made."""

    def __init__(self, shape: tuple[int, ...], kind: str) -> None:
        self.latent_shape, self.kind = shape, kind

    def refuse(self) -> NoReturn:
        """Say what is missing."""
        raise ValueError(
            f"codec.kind='{self.kind}': this model makes latents {self.latent_shape} and came without its autoencoder; "
            "give its folder: mvm.load(..., codec=FOLDER), or mvm convert ... --codec FOLDER"
        )

    def encode(self, images: Tensor) -> Tensor:
        self.refuse()

    def decode(self, samples: Tensor) -> Tensor:
        self.refuse()


class Pixels(Codec):
    """The identity up to scale: 0..255 <-> [-scale, scale], rounded and clipped on the way back."""

    def __init__(self, shape: tuple[int, ...], scale: float = 1.0) -> None:
        self.latent_shape, self.scale = shape, scale

    def encode(self, images: Tensor) -> Tensor:
        return to_unit(images) * self.scale

    def decode(self, samples: Tensor) -> Tensor:
        return to_uint8(samples / self.scale)


class Arrays(Codec):
    """Float arrays over a scale, e.g. their standard deviation; back they are float32, nothing clipped."""

    def __init__(self, shape: tuple[int, ...], scale: float = 1.0) -> None:
        self.latent_shape, self.scale = shape, scale

    def encode(self, images: Tensor) -> Tensor:
        return images.float() / self.scale

    def decode(self, samples: Tensor) -> Tensor:
        return samples.float() * self.scale


def require_unit_scale(codec: Codec, what: str) -> None:
    """Refuse pixels of another scale than [-1, 1] where something else than the codec makes images of samples."""
    if isinstance(codec, Arrays):
        raise ValueError(f"data.values='float': {what} makes images; sample arrays with mvm.generate")
    if isinstance(codec, Pixels) and codec.scale != 1:
        raise ValueError(f"codec.scale={codec.scale}: {what} takes pixels in [-1, 1]; sample with mvm.generate")
