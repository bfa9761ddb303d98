"""Building blocks of the Transformers: normalisation, rotary positions, attention, SwiGLU, embeddings."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

NORM_EPS = 1e-6


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return norm(x) (1 + scale) + shift; x (B, N, d), shift and scale (B, 1, d)."""
    return rms_norm(x, x.shape[-1:], None, NORM_EPS) * (1 + scale) + shift


def rotary_table(side: int, head_width: int, base: float = 100.0) -> Tensor:
    """Return angles (side^2, head_width/2) of 2-D rotary positions: first half by row, second by column.

    base 100 suits grids of 4 to 32 tokens a side; a language model's 10,000 would leave most angles flat.
    """
    quarter = head_width // 4
    frequency = base ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angle = torch.arange(side, dtype=torch.float64)[:, None] * frequency  # (side, quarter)
    rows, columns = angle[:, None].expand(-1, side, -1), angle[None].expand(side, -1, -1)
    return torch.cat((rows, columns), dim=-1).reshape(side * side, 2 * quarter).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., N, head) with its halves rotated as (real, imaginary) by the table's angles."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)


class Attention(nn.Module):
    """Multi-head self-attention with QK-norm and rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_norm = RMSNorm(width // heads)
        self.key_norm = RMSNorm(width // heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # each (B, heads, N, head)
        query, key = rotate(self.query_norm(query), cos, sin), rotate(self.key_norm(key), cos, sin)
        mixed = scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); hidden is 2/3 of ratio * width, so that it costs what a plain MLP does."""

    def __init__(self, width: int, ratio: float = 4.0) -> None:
        super().__init__()
        hidden = 16 * math.ceil(2 / 3 * ratio * width / 16)
        self.gate_up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


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
