"""Options of the networks, each off by default: other designs and times, convolutions, skips, augmentation.

A block is of one of four designs, which cost the same. modern: RMSNorm, norm of queries and keys, rotary positions,
SwiGLU. classic, as DiT and SiT have it: LayerNorm, a bias with queries, keys and values, sine positions from the start,
GELU. lightning and raev2 are between them, as in LightningDiT and RAE, and in RAEv2: for their weights.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, silu

from mvm.network.layers import (
    MLP,
    MODERN,
    Attention,
    Design,
    LevelEmbedding,
    RotaryAttention,
    SwiGLU,
    axis_angles,
    rotate,
)


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


DESIGNS = {
    "modern": MODERN,
    "classic": Design(PlainAttention, GELU, centred=True, sines=True),
    "lightning": Design(LightningAttention, SwiGLU, sines=True, base=1e4, twice=True),
    "raev2": Design(BiasedAttention, SwiGLU, base=1e4, twice=True),
}


def sine_positions(grid: Sequence[int], width: int, base: float = 10_000.0) -> Tensor:
    """Return (N, width), to be added to tokens on a grid: waves of each axis in a part of its own, the last axis first.

    Their order is free, as the product before is learned; base as DiT and SiT have it.
    """
    waves = [torch.cat((angle.sin(), angle.cos()), dim=-1) for angle in axis_angles(grid, width // 2, base)]
    return torch.cat(waves[::-1], dim=-1).float()


class Skip(nn.Linear):
    """What an early block's output adds to the tokens of a late one."""


class Local(nn.Module):
    """Tokens on their grid of n axes, and a depthwise convolution of them added, 3 wide: (B, N, d) -> the same; zero
    outside.

    A sum of 3^n shifted products, which a compiler fuses; a library's depthwise convolution is slow backwards.
    """

    def __init__(self, width: int, grid: Sequence[int]) -> None:
        super().__init__()
        self.grid = tuple(grid)
        self.weight = nn.Parameter(torch.zeros(*(3 for _ in self.grid), width))

    def forward(self, x: Tensor) -> Tensor:
        axes = len(self.grid)
        padded = pad(x.unflatten(1, self.grid), (0, 0, *(1, 1) * axes))
        weight = self.weight.to(x.dtype)
        mixed = torch.zeros_like(x[:, :1].unflatten(1, (1,) * axes))
        for offset in product(range(3), repeat=axes):
            window = [slice(start, start + extent) for start, extent in zip(offset, self.grid, strict=True)]
            mixed = mixed + weight[offset] * padded[:, *window]
        return x + mixed.flatten(1, axes)


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
