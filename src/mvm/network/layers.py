"""What the Transformers are made of: norms, positions, local convolutions, embeddings, patches."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, pad, rms_norm, silu

NORM_EPS = 1e-6


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, centred: bool = False) -> Tensor:
    """Return norm(x) (1 + scale) + shift; x (B, N, d), shift and scale (B, 1 or N, d). centred: by LayerNorm."""
    norm = layer_norm if centred else rms_norm
    return norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


def drop(shift: Tensor, scale: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shift and scale by which `modulate` gives kept (norm(x) (1 + scale) + shift); all (B, 1, d).

    Whole channels are dropped for that: a mask of tokens would not go into a modulation.
    """
    return (kept * shift).to(shift.dtype), (kept * (1 + scale) - 1).to(scale.dtype)


def rotary_table(side: int, head_width: int, base: float = 100.0) -> Tensor:
    """Return angles (side^2, head_width/2) of 2-D rotary positions: first half by row, second by column.

    base 100 suits grids of 4 to 32 tokens a side; a language model's 10,000 would leave most angles flat.
    """
    quarter = head_width // 4
    frequency = base ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angle = torch.arange(side, dtype=torch.float64)[:, None] * frequency  # (side, quarter)
    rows, columns = angle[:, None].expand(-1, side, -1), angle[None].expand(side, -1, -1)
    return torch.cat((rows, columns), dim=-1).reshape(side * side, 2 * quarter).float()


def sine_positions(side: int, width: int, base: float = 10_000.0) -> Tensor:
    """Return (side^2, width), to be added to tokens: waves of the column in one half, of the row in the other.

    Their order is free, as the product before is learned; base as DiT and SiT have it.
    """
    quarter = width // 4
    frequency = base ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angle = torch.arange(side, dtype=torch.float64)[:, None] * frequency
    waves = torch.cat((angle.sin(), angle.cos()), dim=-1)  # (side, width / 2)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat((columns, rows), dim=-1).reshape(side * side, 4 * quarter).float()


def rotary_waves(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) for `rotate`, each (N, head): cos of both halves, and sin with the first half's sign turned."""
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., head) with its halves rotated as (real, imaginary): x cos + swap(x) sin.

    The halves are swapped by a flip, not cut and joined: a compiler reads that as an index, and it is much faster.
    """
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos + swapped * sin


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotate(norm(x) * weight) in x's dtype; x (B, N, heads, head), cos and sin (N, head)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = rms_norm(x.to(wide), weight.shape, weight.to(wide), NORM_EPS)
    return rotate(normed, cos[:, None], sin[:, None]).to(x.dtype)


def linear_parts(x: Tensor, layer: nn.Linear, parts: int) -> tuple[Tensor, ...]:
    """Return the layer's answer in equal parts.

    Several products with parts of one matrix, not parts of one product: its gradient would have to be put together
    again from its parts', which costs more on a GPU than the larger product saves.
    """
    biases = (None,) * parts if layer.bias is None else layer.bias.chunk(parts)
    return tuple(linear(x, weight, bias) for weight, bias in zip(layer.weight.chunk(parts), biases, strict=True))


class Local(nn.Module):
    """Tokens on their grid, and a depthwise 3x3 convolution of them added: (B, side^2, d) -> the same; zero outside.

    A sum of nine shifted products, which a compiler fuses; a library's depthwise convolution is slow backwards.
    """

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.zeros(3, 3, width))

    def forward(self, x: Tensor) -> Tensor:
        side = self.side
        padded = pad(x.unflatten(1, (side, side)), (0, 0, 1, 1, 1, 1))
        weight = self.weight.to(x.dtype)
        shifted = (weight[i, j] * padded[:, i : i + side, j : j + side] for i in range(3) for j in range(3))
        return x + sum(shifted, start=torch.zeros_like(x[:, :1, None])).flatten(1, 2)


class LevelEmbedding(nn.Module):
    """Sinusoids of 1000 * noise level, then an MLP: (B,) in [0, 1] -> (B, d).

    The level is sqrt(t) on the mean-velocity path. Scaled by 1000 it uses all frequencies; t in [0, 1]
    unscaled would leave most of them flat.
    """

    rates: Tensor

    def __init__(self, width: int, frequencies: int = 128, max_period: float = 10_000.0) -> None:
        super().__init__()
        rates = torch.exp(-math.log(max_period) * torch.arange(frequencies) / frequencies)
        self.register_buffer("rates", 1000 * rates, persistent=False)
        self.up = nn.Linear(2 * frequencies, width)
        self.out = nn.Linear(width, width)

    def forward(self, level: Tensor) -> Tensor:
        angle = level[:, None].float() * self.rates
        waves = torch.cat((torch.cos(angle), torch.sin(angle)), dim=-1)
        return self.out(silu(self.up(waves.to(self.up.weight.dtype))))


class AugmentMap(nn.Module):
    """What is done to an image -> an addition to its condition: (B, augment_size) -> (B, d). Nothing done adds nothing.

    Zero at the start, and made without a random number: all other weights are those of a network without it.
    """

    def __init__(self, augment_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, augment_size))

    def forward(self, augment: Tensor) -> Tensor:
        return linear(augment.to(self.weight.dtype), self.weight)


def patchify(x: Tensor, patch: int) -> Tensor:
    """Return (B, C, H, W) as tokens (B, N, C patch^2)."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch**2)


def unpatchify(tokens: Tensor, patch: int, channels: int, side: int) -> Tensor:
    """Return tokens (B, N, C patch^2) as (B, C, H, W); the inverse of patchify for square images."""
    batch = tokens.shape[0]
    x = tokens.reshape(batch, side, side, channels, patch, patch)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, side * patch, side * patch)
