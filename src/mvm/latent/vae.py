"""Any AutoencoderKL of diffusers as a codec. The only module of mvm.latent that imports diffusers.

    vae = load_vae(folder, 256)                        # config.json and diffusion_pytorch_model.safetensors
    vae.decode(vae.encode(images))

The network is built from numbers and known names in config.json; nothing else of a folder is read or obeyed.
"""

import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from mvm import noise
from mvm.files import atomic, claimed, write_text
from mvm.latent.codec import Codec, fingerprint, save_tensors
from mvm.options import choose, needs, quiet_torchao
from mvm.pixels import to_unit
from mvm.untrusted import cut, read_json, refusal

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
POSTERIORS = ("mean", "draw")
MOST_CONFIG = 1 << 16  # bytes
MOST_FACTOR = 1e30  # of latents: published ones lie between 0.01 and 100
MOST_LAYERS = 16  # blocks of a VAE, and layers of a block: published ones have 4 and 2
# layers of the attention in files of before 2023
RENAMED = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
MIX = torch.tensor(0x9E3779B97F4A7C15 - (1 << 64))


def image_seeds(images: Tensor) -> Tensor:
    """Return a seed for each image (B, C, H, W), int64 from 0 on, a function of its uint8 values alone."""
    values = images.flatten(1).to(torch.int64)
    places = torch.arange(1, values.shape[1] + 1, device=values.device) * MIX.to(values.device)
    mixed = (values + 1) * (places ^ (places >> 29))
    return (mixed ^ (mixed >> 32)).sum(1) & ((1 << 62) - 1)


class VAE(nn.Module, Codec):
    """Any AutoencoderKL of diffusers.

    encode: (z - shift) scale with the model's own factors; decode: the reverse. posterior: z is the mean of the
    posterior, or a draw from it, whose seed is a function of the image: an image's latent is always the same.
    """

    mean: Tensor | None
    deviation: Tensor | None

    def __init__(self, network: nn.Module, size: int, posterior: str = "mean") -> None:
        super().__init__()
        config: Any = network.config
        choose("codec.posterior", posterior, dict.fromkeys(POSTERIORS))
        self.network, self.posterior = network.requires_grad_(False).eval(), posterior
        self.scale = float(config.scaling_factor)
        self.shift = float(getattr(config, "shift_factor", None) or 0.0)
        factor = 2 ** (len(config.block_out_channels) - 1)
        if size < 1 or size % factor:
            raise ValueError(f"size={size} does not suit this VAE; it must be a multiple of {factor}")
        self.latent_shape: tuple[int, ...] = (config.latent_channels, size // factor, size // factor)
        self.image_shape: tuple[int, ...] = (getattr(config, "in_channels", 3), size, size)
        # of single channels, where the model has them: the VAEs of LightningDiT and others
        spread = (getattr(config, "latents_mean", None), getattr(config, "latents_std", None))
        spread = tuple(None if values is None else torch.tensor(values).reshape(-1, 1, 1) for values in spread)
        self.register_buffer("mean", spread[0], persistent=False)
        self.register_buffer("deviation", spread[1], persistent=False)
        facts: dict[str, Any] = {"scale": self.scale, "shift": self.shift, "latent_shape": self.latent_shape}
        facts |= {name: values.flatten().tolist() for name, values in self.named_buffers(recurse=False)}
        facts |= {} if posterior == "mean" else {"posterior": posterior}
        self.fingerprint = fingerprint(facts, network.state_dict())

    @property
    def identity(self) -> dict[str, str]:
        return {"codec": self.fingerprint}

    def train(self, mode: bool = True) -> "VAE":
        """Stay in eval, whatever mode a surrounding module is in."""
        return super().train(False)

    def _placed(self, values: Tensor) -> Tensor:
        return values.to(next(self.network.parameters()))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        network: Any = self.network
        posterior = network.encode(self._placed(to_unit(images))).latent_dist
        z = posterior.mode().float()
        if self.posterior == "draw":
            z = z + posterior.std.float() * noise.normal(image_seeds(images), noise.TRAIN, z.shape[1:]).to(z)
        z = z if self.mean is None else z - self.mean
        return (z - self.shift) * self.scale / (1 if self.deviation is None else self.deviation)

    def decode_float(self, samples: Tensor) -> Tensor:
        network: Any = self.network
        z = samples.float() * (1 if self.deviation is None else self.deviation) / self.scale + self.shift
        z = z if self.mean is None else z + self.mean
        return network.decode(self._placed(z)).sample

    def save(self, folder: Path) -> None:
        """Write a folder that load_vae reads."""
        network: Any = self.network
        config = {name: value for name, value in network.config.items() if not name.startswith("_")}
        with claimed(folder), atomic(folder) as temporary:
            temporary.mkdir()
            write_text(temporary / CONFIG, json.dumps(config, indent=2) + "\n")
            save_tensors(temporary / WEIGHTS, network.state_dict(), {"format": "pt"})


def _plain(value: Any) -> bool:
    """Return whether a value of config.json is a number, a short text, or a short list of such."""
    if isinstance(value, list):
        return len(value) <= 256 and all(_plain(one) and not isinstance(one, list) for one in value)
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 64)


def _options(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the network in config.json; others are left out, sizes are bounded."""
    with refusal(f"'{path}' is no config of an AutoencoderKL", "give the folder of a VAE in diffusers' format"):
        table = read_json(path, MOST_CONFIG)
        if (kind := table.get("_class_name", "AutoencoderKL")) != "AutoencoderKL":
            raise ValueError(f"_class_name is {cut(kind)}")
        options = {name: value for name, value in table.items() if name in known}
        if bad := [name for name, value in options.items() if not _plain(value)]:
            raise ValueError(f"{bad[0]}={cut(options[bad[0]])} is no plain value")
        layers, channels = options.get("layers_per_block", 1), options.get("block_out_channels", [64])
        if not (isinstance(layers, int) and 0 < layers <= MOST_LAYERS):
            raise ValueError(f"layers_per_block={cut(layers)}")
        if not (isinstance(channels, list) and 0 < len(channels) <= MOST_LAYERS):
            raise ValueError(f"block_out_channels={cut(channels)}")
        for name in ("scaling_factor", "shift_factor", "latents_mean", "latents_std"):
            value = options.get(name, 1.0 if name == "scaling_factor" else None)
            optional = name != "scaling_factor" and value is None
            values = value if isinstance(value, list) else [] if optional else [value]
            low = 1 / MOST_FACTOR if name in ("scaling_factor", "latents_std") else -math.inf
            # float32 holds them, and their inverses
            if not all(isinstance(one, int | float) and low < one and abs(one) < MOST_FACTOR for one in values):
                raise ValueError(f"{name}={cut(value)}")
            if isinstance(value, list) and len(value) != options.get("latent_channels", 4):
                raise ValueError(f"{name} has {len(value)} numbers")
    return options


def load_vae(folder: str | Path, size: int, posterior: str = "mean") -> VAE:
    """Return the VAE in a local folder in diffusers' format, for images of size x size pixels."""
    quiet_torchao()
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise ValueError(needs(f"load_vae(folder='{folder}')", "diffusers", "diffusers")) from error
    folder = Path(folder)
    config, path = folder / CONFIG, folder / WEIGHTS
    if not config.is_file() or not path.is_file():
        raise ValueError(f"'{folder}' holds no VAE; a local folder with {CONFIG} and {WEIGHTS} is needed")
    options = _options(config, inspect.signature(AutoencoderKL.__init__).parameters)
    with refusal(f"'{folder}' holds no VAE", "get it again"):
        with torch.device("meta"):
            network: Any = AutoencoderKL(**options)
        wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        try:
            with safe_open(path, "pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{WEIGHTS}: {error}") from None
        names = {name: _present_name(name) for name in shapes}
        # attention was a convolution of one pixel once: (C, C, 1, 1)
        stored = {
            names[name]: shape[:2] if shape[2:] == (1, 1) and len(wanted.get(names[name], ())) == 2 else shape
            for name, shape in shapes.items()
        }
        if other := sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name)):
            raise ValueError(f"{', '.join(map(cut, other[:3]))}: missing, left over, or of another shape")
        weights = {names[name]: value.float().reshape(wanted[names[name]]) for name, value in load_file(path).items()}
        network.load_state_dict(weights, assign=True)
    return VAE(network, size, posterior)


def _present_name(name: str) -> str:
    """Return the present name of a tensor of a VAE."""
    parts = name.split(".")
    if "attentions" in parts and parts[-2] in RENAMED:
        parts[-2] = RENAMED[parts[-2]]
    return ".".join(parts)
