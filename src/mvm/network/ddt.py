"""The latent DDT: a deep backbone encodes the noisy latent, and a wide shallow head denoises it, conditioned on that.

As DiT^DH of RAE and RAEv2, from the parts of our DiT. The backbone's output changes little from step to step of a
solver, so that it can be computed on some steps only: `condition`, then `head` as often as wanted; a call is both.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from mvm.network.blocks import DESIGNS, Block, Head, Passed, Stack, initialise
from mvm.network.conditions import Given, conditioning
from mvm.network.config import BY_LABELS, ConditionConfig, DDTConfig, DiTConfig
from mvm.network.dit import DiT, Output
from mvm.network.extras import TIMES, sine_positions
from mvm.network.layers import NORM_EPS, grid_of, patchify, rotary_table, rotary_waves, unpatchify
from mvm.network.own import OwnConfig

Condition = Passed  # the backbone's output: tokens (B, N, d) for the head, the inner head's prediction, block outputs


class PlainBlock(nn.Module):
    """Attention and SwiGLU without modulation: the condition is among the tokens."""

    def __init__(self, width: int, heads: int, design: str = "modern") -> None:
        super().__init__()
        self.attention = DESIGNS[design].attention(width, heads)
        self.mlp = DESIGNS[design].mlp(width)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor, kept: None = None) -> Tensor:
        """Return the tokens after the block; condition and kept are not read, they make the call that of a Block."""
        x = x + self.attention(_normed(x), cos, sin)
        return x + self.mlp(_normed(x))


def _normed(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], None, NORM_EPS)  # no weight: the product after it has one


class ContextTokens(nn.Module):
    """Level and class as tokens: learned ones, each with the embedding added. (B, d) twice -> (B, M, d)."""

    def __init__(self, width: int, time_tokens: int, class_tokens: int) -> None:
        super().__init__()
        self.time = nn.Parameter(torch.empty(time_tokens, width))
        self.kind = nn.Parameter(torch.empty(class_tokens, width))

    def forward(self, level: Tensor, label: Tensor) -> Tensor:
        return torch.cat((self.time + level[:, None], self.kind + label[:, None]), dim=1)


class WideHead(nn.Module):
    """Patches of the noisy latent (B, N, p) and a condition for each (B, N, d) -> the prediction's patches (B, N, p).

    It sees the latent itself, embedded anew at its own width, and has rotary positions of its own.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dimensions: tuple[int, int, int],
        pixels: int,
        condition: int,
        grid: Sequence[int],
        design: str = "modern",
    ) -> None:
        super().__init__()
        depth, width, heads = dimensions
        self.embed = nn.Linear(pixels, width)
        self.project = nn.Linear(condition, width)
        self.blocks = Stack(Block(width, heads, design) for _ in range(depth))
        self.out = Head(width, pixels)
        cos, sin = rotary_waves(rotary_table(grid, width // heads, DESIGNS[design].base))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, patches: Tensor, condition: Tensor) -> Tensor:
        tokens, c = self.embed(patches), silu(self.project(condition))
        return self.out(self.blocks(tokens, c, self.cos, self.sin).tokens, c)


class DDT(nn.Module):
    """network(x, level, condition, taps) -> Output, as a DiT: see there for what they are; taps count the backbone's.

    network.head(x, level, network.condition(x, level, labels)) is the same prediction, to the bit.
    """

    time: str
    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    def __init__(
        self,
        config: DDTConfig,
        sample_shape: Sequence[int],
        num_classes: int,
        condition: ConditionConfig = BY_LABELS,
    ) -> None:
        super().__init__()
        depth, dim, heads = config.dimensions
        self.patch, self.channels, self.grid = config.patch, sample_shape[0], grid_of(sample_shape, config.patch)
        self.inner_block, self.tokens = config.inner_block, math.prod(self.grid)
        in_context, values = config.conditioning == "in-context", config.patch ** len(self.grid)
        pixels = self.channels * values
        self.embed = nn.Linear(pixels + condition.channels * values, dim)
        design = DESIGNS[config.design]
        self.again = silu if design.twice else nn.Identity()
        self.time, embedding = TIMES[config.time]
        self.level = embedding(dim)
        self.label = conditioning(condition, sample_shape, num_classes, dim)
        self.context = ContextTokens(dim, config.time_tokens, config.class_tokens) if in_context else None
        self.blocks = Stack((PlainBlock if in_context else Block)(dim, heads, config.design) for _ in range(depth))
        self.inner_head = Head(dim, pixels) if config.inner_block else None
        self.wide = WideHead(config.head_dimensions, pixels, dim, self.grid, config.design)
        positions = sine_positions(self.grid, dim) if design.sines else None
        self.register_buffer("positions", positions, persistent=False)
        angles = rotary_table(self.grid, dim // heads, design.base)
        others = condition.length + (config.time_tokens + config.class_tokens if in_context else 0)
        angles = torch.cat((angles, angles.new_zeros(others, angles.shape[1])))  # they have no position on the grid
        cos, sin = rotary_waves(angles)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initialise as a DiT: every modulation and the last maps zero; learned tokens as labels."""
        initialise(self)
        self.label.reset()
        if self.context is not None:
            nn.init.normal_(self.context.time, std=0.02)
            nn.init.normal_(self.context.kind, std=0.02)

    @property
    def null(self) -> Any:
        """The null condition, as a DiT's."""
        return self.label.null

    def condition(self, x: Tensor, level: Tensor, given: Given, taps: Sequence[int] = ()) -> Condition:
        """Return the backbone's output, with the inner head's prediction and the tapped blocks' tokens."""
        time = self.level(level)
        label = self.label(given).expand_as(time)
        tokens = self.embed(patchify(self.label.join_channels(x, given), self.patch))
        if self.positions is not None:
            tokens = tokens + self.positions.to(tokens.dtype)
        tokens = self.label.join_tokens(tokens, given)
        if self.context is not None:
            tokens = torch.cat((tokens, self.context(time, label).to(tokens.dtype)), dim=1)

        inner_head = self.inner_head

        def inner(tokens: Tensor) -> Tensor:
            assert inner_head is not None
            c = silu(time[:, None] + tokens)
            return self.latent(inner_head(c, self.again(c)))  # its condition is its input too, as there is no other

        return self.blocks(
            tokens,
            self.again(silu(time + label)),
            self.cos,
            self.sin,
            image=self.tokens,
            taps=taps,
            inner_block=self.inner_block,
            inner_head=None if inner_head is None else inner,
        )

    def head(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        """Return the prediction, of x's shape, at this x and level; the condition may be that of another step."""
        c = silu(self.level(level)[:, None] + condition.tokens)  # one for every token, with the level in it
        return self.latent(self.wide(patchify(x, self.patch), c))

    def forward(self, x: Tensor, level: Tensor, condition: Given, taps: Sequence[int] = ()) -> Output:
        encoded = self.condition(x, level, condition, taps)
        return Output(self.head(x, level, encoded), encoded.inner, encoded.features)

    def latent(self, patches: Tensor) -> Tensor:
        """Return patches (B, N, p) as latents (B, C, *space)."""
        return unpatchify(patches, self.patch, self.channels, self.grid)


def blocks_of(network: DiT | DDT) -> list[nn.Module]:
    """Return all transformer blocks, a DDT's head included."""
    return [*network.blocks, *(network.wide.blocks if isinstance(network, DDT) else ())]


def build_network(
    config: DiTConfig | OwnConfig,
    sample_shape: Sequence[int],
    num_classes: int,
    augment_size: int = 0,
    condition: ConditionConfig = BY_LABELS,
) -> DiT | DDT:
    """Return the network of a configuration: a DDT of a DDTConfig, else a DiT; augment_size: see there.

    sample_shape: (C, *space), one to three axes of space; condition: of what kind and shape it is.
    """
    if isinstance(config, OwnConfig):
        raise ValueError(f"{config.described} is not part of this package; give it as network=")
    if not isinstance(config, DDTConfig):
        return DiT(config, sample_shape, num_classes, augment_size, condition)
    if augment_size:
        raise ValueError("a ddt has no input for augmentation; set data.augment to 0, or network.kind to dit")
    return DDT(config, sample_shape, num_classes, condition)
