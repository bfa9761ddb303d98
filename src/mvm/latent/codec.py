"""Codecs: between uint8 images or float arrays and what the path works on. Nothing else here imports diffusers."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from mvm.latent.fingerprint import fingerprint
from mvm.options import needs, quiet_torchao
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


class VAE(nn.Module, Codec):
    """Any AutoencoderKL of diffusers.

    encode: the mode of the posterior, (z - shift) scale with the model's own factors; decode: the reverse.
    """

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        config: Any = network.config
        self.network = network.requires_grad_(False).eval()
        self.scale = float(config.scaling_factor)
        self.shift = float(getattr(config, "shift_factor", None) or 0.0)
        factor = 2 ** (len(config.block_out_channels) - 1)
        if size < 1 or size % factor:
            raise ValueError(f"size={size} does not suit this VAE; it must be a multiple of {factor}")
        self.latent_shape: tuple[int, ...] = (config.latent_channels, size // factor, size // factor)
        facts = {"scale": self.scale, "shift": self.shift, "latent_shape": self.latent_shape}
        self.fingerprint = fingerprint(facts, network.state_dict())

    def train(self, mode: bool = True) -> "VAE":
        """Stay in eval, whatever mode a surrounding module is in."""
        return super().train(False)

    def _placed(self, values: Tensor) -> Tensor:
        return values.to(next(self.network.parameters()))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        network: Any = self.network
        mode = network.encode(self._placed(to_unit(images))).latent_dist.mode()
        return (mode.float() - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, samples: Tensor) -> Tensor:
        network: Any = self.network
        return to_uint8(network.decode(self._placed(samples.float() / self.scale + self.shift)).sample)


def load_vae(name: str, size: int) -> VAE:
    """Return a diffusers VAE by hub name or local folder, for images of size x size pixels."""
    quiet_torchao()
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise ValueError(needs(f"load_vae(name='{name}')", "diffusers", "diffusers")) from error
    try:
        network = AutoencoderKL.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"load_vae(name='{name}') could not be read ({error}); give a local folder") from error
    return VAE(network, size)


def require_unit_scale(codec: Codec, what: str) -> None:
    """Refuse pixels of another scale than [-1, 1] where something else than the codec makes images of samples."""
    if isinstance(codec, Arrays):
        raise ValueError(f"data.values='float': {what} makes images; sample arrays with mvm.generate")
    if isinstance(codec, Pixels) and codec.scale != 1:
        raise ValueError(f"codec.scale={codec.scale}: {what} takes pixels in [-1, 1]; sample with mvm.generate")
