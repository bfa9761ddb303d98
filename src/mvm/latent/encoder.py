"""Frozen encoders as the first half of an autoencoder: uint8 images -> a grid of latents.

    encoder = load_latent_encoder(EncoderConfig("facebook/dinov2-with-registers-base", layers="last-4"))
    latents = encoder(images)                          # (B, C, h, w), float32

Conventions, fixed and part of the fingerprint: levels / 255, bicubic antialiased resize to the encoder's resolution,
the checkpoint's mean and deviation; the tokens after each chosen block pass a LayerNorm without weights, then are
averaged. A mirrored latent is the latent of the mirrored image: flipped latents are something else.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from mvm.latent.fingerprint import Origin, fingerprint
from mvm.network.pretrained import Encoder, PatchTokens, load_encoder
from mvm.options import at_least

NORM_EPS = 1e-5  # of the norm without weights, for every family: as RAEv2 replaces it
KINDS = ("dinov2", "dinov2_with_registers", "dinov3_vit")
CONVENTION = "levels/255; bicubic antialiased, clipped; norm of each block without weights; mean over blocks"


class Pictures(Protocol):
    """uint8 images by index: pictures[indices (B,) on the CPU] -> (B, C, H, W). A tensor is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class EncoderConfig:
    """Frozen encoder of the autoencoder, and which of its layers are the latent.

    Numbers in a list of layers become text. RAEv2's K = 7 of a ViT-L, [layers=11.13...23] counted from 0, is
    "12,14,16,18,20,22,24".
    """

    name: str = ""
    """Frozen encoder: a hub name, a folder in transformers' format, or Meta's .pth of a DINOv3."""
    layers: str = "last"
    """Blocks whose tokens are averaged into the latent: "last", "last-K" (the last K), or numbers from 1 such as
    "3,6,9,12"."""
    resolution: int = 0
    """Side in pixels to which images are resized for the encoder; 0: its own."""
    global_mean: bool = False
    """Add the mean token of the last chosen block to all tokens, as RAEv2 does for DINOv3."""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", _as_text(self.layers))
        at_least("encoder.resolution", self.resolution, 0)


def _as_text(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(layers: str, depth: int) -> list[int]:
    """Return the block numbers that the text says; none where it makes no sense."""
    if re.fullmatch(r"\d+( *, *\d+)*", layers):
        return [int(number) for number in layers.split(",")]
    found = re.fullmatch(r"last(?:-(\d+))?", layers)
    count = int(found[1] or 1) if found else 0
    return list(range(depth - count + 1, depth + 1))


def chosen_blocks(layers: str | Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the numbers of the blocks, from 1, in rising order."""
    layers_from_1 = _numbers(layers, depth) if isinstance(layers, str) else list(layers)
    blocks = tuple(sorted(set(layers_from_1)))
    if not blocks or len(blocks) != len(layers_from_1) or blocks[0] < 1 or blocks[-1] > depth:
        raise ValueError(
            f"encoder.layers={layers!r} does not suit {depth} blocks; give 'last', 'last-K' with K from 1 to {depth}, "
            f"or different block numbers from 1 to {depth}"
        )
    return blocks


def plain_norm(tokens: Tensor) -> Tensor:
    """Return tokens (..., C) with mean 0 and variance 1 each: a LayerNorm without weights."""
    return layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPS)


class LatentEncoder(nn.Module):
    """encoder(images uint8) -> latents (B, C, h, w) float32, unnormalised; frozen, without gradient, always in eval.

    eval matters: in training mode a DINOv3 rescales its positions at random.
    """

    def __init__(self, encoder: Encoder, layers: str | Sequence[int] = "last", global_mean: bool = False) -> None:
        super().__init__()
        kind = cast(Any, encoder.body.network).config.model_type if isinstance(encoder.body, PatchTokens) else "no ViT"
        if kind not in KINDS:
            raise ValueError(f"encoder.name='{encoder.name}' ({kind}) gives no latents; known: {', '.join(KINDS)}")
        self.encoder, self.global_mean = encoder, global_mean
        model = cast(Any, encoder.body.network).config
        self.blocks = chosen_blocks(layers, model.num_hidden_layers)
        self.config = EncoderConfig(encoder.name, _as_text(self.blocks), encoder.resolution, global_mean)
        self.latent_shape = (encoder.width, encoder.side, encoder.side)
        facts = asdict(self.config) | {"scaling": asdict(encoder.scaling), "eps": NORM_EPS, "convention": CONVENTION}
        facts["layers"] = self.blocks
        del facts["name"]  # a folder may be moved
        for name in ("model_type", "num_attention_heads", "layer_norm_eps", "hidden_act", "rope_theta"):
            facts[name] = getattr(model, name, None)  # which the shapes of the weights do not show
        weights = {name: value for name, value in encoder.body.state_dict().items() if "mask_token" not in name}
        self.fingerprint = fingerprint(facts, weights)  # now: the weights may be rounded later

    @property
    def origin(self) -> Origin:
        """Return what is written into all that is made with this encoder."""
        blocks = ", ".join(map(str, self.blocks))
        extra = ", global mean" if self.global_mean else ""
        return Origin(self.fingerprint, f"'{self.config.name}' (blocks {blocks}{extra}; {self.config.resolution} px)")

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever mode a surrounding module is in."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        device = next(self.encoder.parameters()).device
        tokens = [plain_norm(found) for found in self.encoder.after_blocks(images.to(device), self.blocks)]
        mean = torch.stack(tokens).mean(0)
        if self.global_mean:
            mean = mean + tokens[-1].mean(1, keepdim=True)
        return mean.transpose(1, 2).reshape(-1, *self.latent_shape)


def load_latent_encoder(config: EncoderConfig, option: str = "codec") -> LatentEncoder:
    """Return the encoder of a config; option: the group of options it comes from, for errors."""
    encoder = load_encoder(config.name, config.resolution, option)
    return LatentEncoder(encoder, config.layers, config.global_mean)
