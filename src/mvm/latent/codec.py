"""Codecs: between uint8 images or float arrays and what the path works on.

And fingerprints: what a file of weights, statistics or latents belongs to, and the refusal of what does not.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from mvm.pixels import to_uint8, to_unit

DIGITS = 12  # hex digits in messages


class Codec(ABC):
    """encode: uint8 images (B, C, *space) -> samples; decode: the reverse; latent_shape of one sample.

    decode is two steps: decode_float, and `stored`, which rounds and clips, so that NaN would be black there.

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
    def decode_float(self, samples: Tensor) -> Tensor: ...

    def stored(self, values: Tensor) -> Tensor:
        """Return what decode_float made as images are kept: [-1, 1] as uint8."""
        return to_uint8(values)

    @torch.no_grad()
    def decode(self, samples: Tensor) -> Tensor:
        return self.stored(self.decode_float(samples))

    @torch.no_grad()
    def restore(self, images: Tensor) -> Tensor:
        """Return what becomes of images that are encoded and decoded."""
        return self.decode(self.encode(images))


class Undecoded(Codec):
    """Latents whose autoencoder was not given: a field in them can be sampled, and no image be made."""

    def __init__(self, shape: tuple[int, ...], kind: str) -> None:
        self.latent_shape, self.kind = shape, kind

    def refuse(self) -> NoReturn:
        """Say what is missing."""
        what = f"this model makes latents {self.latent_shape} and came without its autoencoder"
        remedy = "give its folder: mvm.load(..., codec=FOLDER), or mvm convert ... --codec FOLDER"
        raise ValueError(f"codec.kind='{self.kind}': {what}; {remedy}")

    def encode(self, images: Tensor) -> Tensor:
        self.refuse()

    def decode_float(self, samples: Tensor) -> Tensor:
        self.refuse()


class Pixels(Codec):
    """The identity up to scale: 0..255 <-> [-scale, scale], rounded and clipped on the way back."""

    def __init__(self, shape: tuple[int, ...], scale: float = 1.0) -> None:
        self.latent_shape, self.scale = shape, scale

    def encode(self, images: Tensor) -> Tensor:
        return to_unit(images) * self.scale

    def decode_float(self, samples: Tensor) -> Tensor:
        return samples / self.scale


class Arrays(Codec):
    """Float arrays over a scale, e.g. their standard deviation; back they are float32, nothing clipped."""

    def __init__(self, shape: tuple[int, ...], scale: float = 1.0) -> None:
        self.latent_shape, self.scale = shape, scale

    def encode(self, images: Tensor) -> Tensor:
        return images.float() / self.scale

    def decode_float(self, samples: Tensor) -> Tensor:
        return samples.float() * self.scale

    def stored(self, values: Tensor) -> Tensor:
        return values


def require_unit_scale(codec: Codec, what: str) -> None:
    """Refuse pixels of another scale than [-1, 1] where something else than the codec makes images of samples."""
    if isinstance(codec, Arrays):
        raise ValueError(f"data.values='float': {what} makes images; sample arrays with mvm.generate")
    if isinstance(codec, Pixels) and codec.scale != 1:
        raise ValueError(f"codec.scale={codec.scale}: {what} takes pixels in [-1, 1]; sample with mvm.generate")


def fingerprint(facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> str:
    """Return the sha256 of facts (as JSON) and of named tensors: names, shapes, dtypes and bytes, in order of name."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name, tensor in sorted((tensors or {}).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class Origin(NamedTuple):
    """The encoder that something was made with: its fingerprint, which decides, and words for people."""

    fingerprint: str
    words: str

    def __str__(self) -> str:
        return f"{self.words} [{self.fingerprint[:DIGITS]}]"

    @staticmethod
    def of(metadata: Mapping[str, str]) -> "Origin":
        """Return the origin in the metadata of a file."""
        return Origin(metadata["encoder"], metadata["encoder_words"])

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata of a file."""
        return {"encoder": self.fingerprint, "encoder_words": self.words}


def require_same(what: str, made_with: Origin, used_with: Origin) -> None:
    """Raise unless both encoders are one: anything else would give noise images."""
    if made_with.fingerprint != used_with.fingerprint:
        remedy = "take the encoder with the same weights, layers and resolution, or train and measure anew"
        raise ValueError(f"{what} of the encoder {made_with} cannot be used with {used_with}: {remedy}")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a .safetensors file."""
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, path, metadata)
    path.chmod(0o644)  # safetensors makes files private
