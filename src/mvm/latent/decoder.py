"""The decoder of a representation autoencoder: a plain vision transformer from latents to pixels, as in MAE."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from mvm.latent.codec import Origin, fingerprint, require_same
from mvm.network.extras import sine_positions
from mvm.network.layers import unpatchify
from mvm.options import at_least, choose

NORM_EPS = 1e-12  # as published


class Dimensions(NamedTuple):
    """Shape of the transformer; hidden: width of the MLPs."""

    depth: int
    width: int
    heads: int
    hidden: int


SIZES = {
    "tiny": Dimensions(2, 64, 4, 128),  # for tests
    "S": Dimensions(8, 384, 6, 1536),
    "B": Dimensions(12, 768, 12, 3072),
    "L": Dimensions(24, 1024, 16, 4096),
    "XL": Dimensions(28, 1152, 16, 4096),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder of the autoencoder: a vision transformer from latents to pixels."""

    size: str = "B"
    """Size of the decoder, which sets depth, width and heads. One of: tiny, S, B, L, XL."""
    patch: int = 16
    """Side of the patch of pixels that one latent becomes."""

    def __post_init__(self) -> None:
        choose("decoder.size", self.size, SIZES)
        at_least("decoder.patch", self.patch, 1)


class DecoderBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to its input."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        _, width, self.heads, hidden = dimensions
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4)  # each (B, heads, N, head)
        x = x + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """decoder(latents (B, C, h, h), unnormalised) -> images (B, 3, h patch, h patch), meant to lie in [-1, 1].

    encoder: whose latents it is trained on. `head` is the last layer, at which the adversarial weight is measured.
    """

    positions: Tensor

    def __init__(self, config: DecoderConfig, latent_shape: Sequence[int], encoder: Origin) -> None:
        super().__init__()
        channels, height, width = latent_shape
        if height != width:
            raise ValueError(f"latents are {height}x{width}; a decoder needs a square")
        dimensions = SIZES[config.size]
        self.config, self.encoder = config, encoder
        self.latent_shape, self.side = (channels, height, width), height
        self.embed = nn.Linear(channels, dimensions.width)
        self.summary = nn.Parameter(torch.zeros(1, 1, dimensions.width))  # the class token: no pixels come of it
        self.blocks = nn.ModuleList(DecoderBlock(dimensions) for _ in range(dimensions.depth))
        self.norm = nn.LayerNorm(dimensions.width, eps=NORM_EPS)
        self.head = nn.Linear(dimensions.width, 3 * config.patch**2)
        self.register_buffer("positions", sine_positions((self.side, self.side), dimensions.width), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initialise as MAE: Xavier, zero biases, the class token small."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.summary, std=0.02)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return (3, H, W) of the images."""
        side = self.side * self.config.patch
        return 3, side, side

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the weights, the config and the encoder's fingerprint."""
        facts = {**asdict(self.config), "latent_shape": self.latent_shape, "encoder": self.encoder.fingerprint}
        return fingerprint(facts, self.state_dict())

    def require(self, encoder: Origin, latent_shape: Sequence[int]) -> None:
        """Raise unless this decoder is for that encoder's latents."""
        require_same("decoder", self.encoder, encoder)
        if tuple(latent_shape) != self.latent_shape:
            raise ValueError(f"the decoder takes latents {self.latent_shape}, the encoder gives {tuple(latent_shape)}")

    def forward(self, latents: Tensor) -> Tensor:
        if latents.shape[1:] != self.latent_shape:
            raise ValueError(f"latents have shape {tuple(latents.shape)}; (B, {self.latent_shape}) is needed")
        x = self.embed(latents.flatten(2).transpose(1, 2)) + self.positions
        x = torch.cat((self.summary.expand(len(x), -1, -1).to(x.dtype), x), dim=1)  # at no position: its own is zero
        for block in self.blocks:
            x = block(x)
        return unpatchify(self.head(self.norm(x[:, 1:])), self.config.patch, 3, (self.side, self.side))


class DecoderCost(NamedTuple):
    """Learned values, and multiply-adds of one image's forward pass: matrix products alone."""

    parameters: int
    multiply_adds: int


def decoder_cost(config: DecoderConfig, side: int) -> DecoderCost:
    """Return the cost for latents of side^2 places, without the first layer: that one is as wide as the encoder is."""
    with torch.device("meta"):
        decoder = Decoder(config, (1, side, side), Origin("", ""))
    values = sum(value.numel() for name, value in decoder.named_parameters() if not name.startswith("embed."))
    dimensions, places = SIZES[config.size], side**2
    tokens, width = places + 1, dimensions.width  # the class token, too
    block = tokens * (4 * width**2 + 2 * width * dimensions.hidden) + 2 * tokens**2 * width
    return DecoderCost(values, dimensions.depth * block + places * width * decoder.head.out_features)
