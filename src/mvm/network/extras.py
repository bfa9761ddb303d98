"""Options of the networks, each off by default: other designs and times, convolutions, skips, dropout, augmentation."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, silu

from mvm.network.layers import MLP, Attention, LevelEmbedding, RotaryAttention, rotate


class PlainAttention(Attention):
    """Attention of the classic design: no positions, no norm, a bias with queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return self.products(x)


class BiasedAttention(RotaryAttention):
    """RotaryAttention with a bias of queries, keys and values, as in RAEv2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.qkv = nn.Linear(width, 3 * width)


class LightningAttention(PlainAttention):
    """Attention of the lightning design: rotary positions, and a bias with queries, keys and values; no norm."""

    def placed(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.products(x)
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class GELU(MLP):
    """The classic design's MLP, down(gelu(up(x))), gelu by tanh."""

    def __init__(self, width: int, ratio: float = 4.0) -> None:
        super().__init__()
        hidden = 16 * math.ceil(ratio * width / 16)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def hidden(self, x: Tensor) -> Tensor:
        return gelu(self.up(x), approximate="tanh")


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


class Skip(nn.Linear):
    """What an early block's output adds to the tokens of a late one."""


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


def drop(shift: Tensor, scale: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shift and scale by which `modulate` gives kept (norm(x) (1 + scale) + shift); all (B, 1, d).

    Dropout of whole channels goes into a modulation so; a mask of tokens would not.
    """
    return (kept * shift).to(shift.dtype), (kept * (1 + scale) - 1).to(scale.dtype)


class AugmentMap(nn.Module):
    """What was done to an image -> an addition to its condition: (B, augment_size) -> (B, d); zero adds nothing.

    Zero at the start, and made without a random number: all other weights are those of a network without it.
    """

    def __init__(self, augment_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, augment_size))

    def forward(self, augment: Tensor) -> Tensor:
        return linear(augment.to(self.weight.dtype), self.weight)


class FourierEmbedding(nn.Module):
    """Waves of a time at random frequencies, then an MLP: (B,) -> (B, d). Frequencies are stored, but not learned."""

    def __init__(self, width: int, frequencies: int = 256) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.zeros(frequencies), requires_grad=False)
        self.up = nn.Linear(2 * frequencies, width)
        self.out = nn.Linear(width, width)

    def reset(self) -> None:
        """Draw the frequencies, in cycles: from a standard normal distribution."""
        nn.init.normal_(self.rates)

    def forward(self, time: Tensor) -> Tensor:
        angle = time[:, None].float() * self.rates.float() * (2 * math.pi)
        waves = torch.cat((torch.sin(angle), torch.cos(angle)), dim=-1)
        return self.out(silu(self.up(waves.to(self.up.weight.dtype))))


# What a network receives for time (mvm.path.field.network_time), and how it is embedded.
TIMES: dict[str, tuple[str, Callable[[int], LevelEmbedding | FourierEmbedding]]] = {
    "level": ("level", LevelEmbedding),
    "t": ("t", partial(LevelEmbedding, scale=1)),
    "1-t": ("1-t", partial(LevelEmbedding, scale=1)),
    "step": ("step", partial(LevelEmbedding, scale=1)),
    "fourier": ("t", FourierEmbedding),
}
