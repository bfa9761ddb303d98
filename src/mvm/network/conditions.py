"""How each kind of condition enters a network: with the level's embedding, the tokens, or the input's channels.

Each has a null, the condition of one row that stands for none. Of vectors and images it is NaN, as of missing values:
no condition that is given holds one, and zeros may mean something. Of text it is padding alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from mvm.network.config import ConditionConfig
from mvm.network.layers import NORM_EPS

Given = Any  # labels (B,), vectors (B, width), images (B, width, *space), {"tokens", "mask"}, or None


class Conditioning(nn.Module):
    """condition -> what is added to the level's embedding, (B, d); and what joins the channels and the tokens."""

    def reset(self) -> None:
        """Initialise what no linear layer has."""
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)

    def join_channels(self, x: Tensor, condition: Given) -> Tensor:
        """Return the input (B, C, *space) with the condition's channels after its own."""
        return x

    def join_tokens(self, tokens: Tensor, condition: Given) -> Tensor:
        """Return an image's tokens (B, N, d) with the condition's after them."""
        return tokens


class NoCondition(Conditioning):
    """Nothing at all."""

    zero: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.null = None
        self.register_buffer("zero", torch.zeros(1, width), persistent=False)

    def forward(self, condition: None) -> Tensor:
        return self.zero


class Labels(Conditioning, nn.Embedding):
    """Class labels, a learned vector each; the last is the null class."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__(num_classes + 1, width)
        self.null = num_classes


class Vector(Conditioning):
    """Vectors (B, size), by a linear map; a learned vector in place of one that is missing."""

    null: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(size, width)
        self.missing = nn.Parameter(torch.empty(width))
        self.register_buffer("null", torch.full((1, size), torch.nan), persistent=False)

    def forward(self, condition: Tensor) -> Tensor:
        values = condition.to(self.map.weight.dtype)
        return torch.where(values.isnan().any(-1, keepdim=True), self.missing, self.map(values.nan_to_num()))


class ImageChannels(Conditioning):
    """Images (B, channels, *space) as channels after the input's; zeros and a learned vector where one is missing."""

    null: Tensor

    def __init__(self, channels: int, space: Sequence[int], width: int) -> None:
        super().__init__()
        self.missing = nn.Parameter(torch.empty(width))
        self.register_buffer("null", torch.full((1, channels, *space), torch.nan), persistent=False)

    def forward(self, condition: Tensor) -> Tensor:
        return condition.flatten(1).isnan().any(-1, keepdim=True) * self.missing

    def join_channels(self, x: Tensor, condition: Tensor) -> Tensor:
        return torch.cat((x, condition.to(x.dtype).nan_to_num()), dim=1)


class TextTokens(Conditioning):
    """Embedded text {"tokens" (B, length, size), "mask" (B, length)} as tokens after the image's, and their mean.

    Both by a linear map of the normed embeddings, as text encoders differ in scale. A learned token stands where the
    mask has none, so that attention needs no mask.
    """

    tokens: Tensor
    mask: Tensor

    def __init__(self, size: int, length: int, width: int) -> None:
        super().__init__()
        self.map, self.mean = nn.Linear(size, width), nn.Linear(size, width)
        self.missing = nn.Parameter(torch.empty(width))
        self.positions = nn.Parameter(torch.empty(length, width))
        self.register_buffer("tokens", torch.zeros(1, length, size), persistent=False)
        self.register_buffer("mask", torch.zeros(1, length, dtype=torch.bool), persistent=False)

    @property
    def null(self) -> dict[str, Tensor]:
        """Text without a token."""
        return {"tokens": self.tokens, "mask": self.mask}

    def normed(self, condition: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the embeddings over their rms, zero where there is no token, and the mask (B, length, 1)."""
        mask = condition["mask"].bool()[..., None]
        tokens = torch.where(mask, condition["tokens"], 0).to(self.map.weight.dtype)
        return rms_norm(tokens, tokens.shape[-1:], eps=NORM_EPS), mask

    def forward(self, condition: Mapping[str, Tensor]) -> Tensor:
        tokens, mask = self.normed(condition)
        return self.mean(tokens.sum(1) / mask.sum(1).clamp(min=1))

    def join_tokens(self, tokens: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        text, mask = self.normed(condition)
        text = torch.where(mask, self.map(text), self.missing) + self.positions
        return torch.cat((tokens, text.to(tokens.dtype)), dim=1)


def conditioning(
    config: ConditionConfig, sample_shape: Sequence[int], num_classes: int, width: int
) -> NoCondition | Labels | Vector | ImageChannels | TextTokens:
    """Return the module of a kind of condition, for a network of this width."""
    if config.missing:
        raise ValueError(f"{config.missing}=0: condition.kind='{config.kind}' needs it; give it, or data that say it")
    match config.kind:
        case "none":
            return NoCondition(width)
        case "vector":
            return Vector(config.width, width)
        case "image":
            return ImageChannels(config.width, sample_shape[1:], width)
        case "tokens":
            return TextTokens(config.width, config.length, width)
    return Labels(num_classes, width)
