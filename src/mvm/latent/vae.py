"""Any AutoencoderKL of diffusers as a codec. The only module that imports diffusers."""

from typing import Any

import torch
from torch import Tensor, nn

from mvm.latent.codec import Codec
from mvm.latent.fingerprint import fingerprint
from mvm.options import needs, quiet_torchao
from mvm.pixels import to_uint8, to_unit


class VAE(nn.Module, Codec):
    """encode: the mode of the posterior, (z - shift) scale with the model's own factors; decode: the reverse."""

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
        """Stay in eval, whatever a surrounding module is told."""
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
        raise ValueError(needs(f"codec.vae='{name}'", "diffusers", "diffusers")) from error
    try:
        network = AutoencoderKL.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"codec.vae='{name}' could not be read ({error}); give a local folder") from error
    return VAE(network, size)
