"""The latent DDT: a deep backbone encodes the noisy latent, and a wide shallow head denoises it, conditioned on that.

As DiT^DH of RAE and RAEv2, from the parts of our DiT. The backbone's output changes little from step to step of a
solver, so that it can be computed on some steps only: `condition`, then `head` as often as wanted; a call is both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from mvm.network.conditions import Given
from mvm.network.config import BY_LABELS, ConditionConfig, DDTConfig, DiTConfig
from mvm.network.dit import DiT, Output
from mvm.network.extras import DESIGNS
from mvm.network.layers import NORM_EPS, Block, Design, Head, Stack, patchify, rotary_table, rotary_waves
from mvm.network.own import OwnConfig
from mvm.network.patches import PatchTransformer


class Condition(NamedTuple):
    """The backbone's output: tokens (B, N, d) for the head, the inner head's prediction, and tapped blocks' tokens."""

    tokens: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


class PlainBlock(nn.Module):
    """Attention and SwiGLU without modulation: the condition is among the tokens."""

    def __init__(self, width: int, heads: int, design: Design) -> None:
        super().__init__()
        self.attention = design.attention(width, heads)
        self.mlp = design.mlp(width)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor, mask: None = None) -> Tensor:
        """Return the tokens after the block; condition and mask are not read, they make the call that of a Block."""
        width = x.shape[-1:]  # norms without a weight: the product after each has one
        x = x + self.attention(rms_norm(x, width, eps=NORM_EPS), cos, sin)
        return x + self.mlp(rms_norm(x, width, eps=NORM_EPS))


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
        design: Design,
    ) -> None:
        super().__init__()
        depth, width, heads = dimensions
        self.embed = nn.Linear(pixels, width)
        self.project = nn.Linear(condition, width)
        self.blocks = Stack(Block(width, heads, design) for _ in range(depth))
        self.out = Head(width, pixels)
        cos, sin = rotary_waves(rotary_table(grid, width // heads, design.base))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, patches: Tensor, condition: Tensor) -> Tensor:
        tokens, c = self.embed(patches), silu(self.project(condition))
        return self.out(self.blocks(tokens, c, self.cos, self.sin)[0], c)


class DDT(PatchTransformer):
    """network(x, level, condition, taps) -> Output, as a DiT: see there for what they are; taps count the backbone's.

    network.head(x, level, network.condition(x, level, labels)) is the same prediction, to the bit.
    """

    def __init__(
        self,
        config: DDTConfig,
        sample_shape: Sequence[int],
        num_classes: int,
        condition: ConditionConfig = BY_LABELS,
    ) -> None:
        in_context = config.conditioning == "in-context"
        context_tokens = config.time_tokens + config.class_tokens if in_context else 0
        super().__init__(config, sample_shape, num_classes, condition, context_tokens)
        depth, dim, heads = config.dimensions
        design, pixels = DESIGNS[config.design], self.pixels
        self.again = silu if design.twice else nn.Identity()
        self.context = ContextTokens(dim, config.time_tokens, config.class_tokens) if in_context else None
        self.blocks = Stack((PlainBlock if in_context else Block)(dim, heads, design) for _ in range(depth))
        self.inner_head = Head(dim, pixels) if config.inner_block else None
        self.wide = WideHead(config.head_dimensions, pixels, dim, self.grid, design)
        self.reset()

    def reset(self) -> None:
        """Initialise as a DiT: every modulation and the last maps zero; learned tokens as labels."""
        super().reset()
        if self.context is not None:
            nn.init.normal_(self.context.time, std=0.02)
            nn.init.normal_(self.context.kind, std=0.02)

    def condition(self, x: Tensor, level: Tensor, given: Given, taps: Sequence[int] = ()) -> Condition:
        """Return the backbone's output, with the inner head's prediction and the tapped blocks' tokens."""
        time = self.level(level)
        label = self.label(given).expand_as(time)
        tokens = self.embedded(x, given)
        if self.context is not None:
            tokens = torch.cat((tokens, self.context(time, label).to(tokens.dtype)), dim=1)
        c = self.again(silu(time + label))
        tokens, features = self.blocks(tokens, c, self.cos, self.sin, taps=self.all_taps(taps), image=self.tokens)
        inner = None
        if self.inner_head is not None:
            c = silu(time[:, None] + features[self.inner_block])  # its input too, as there is no other
            inner = self.images(self.inner_head(c, self.again(c)))
        return Condition(tokens, inner, {tap: each for tap, each in features.items() if tap in taps})

    def head(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        """Return the prediction, of x's shape, at this x and level; the condition may be that of another step."""
        c = silu(self.level(level)[:, None] + condition.tokens)  # one for every token, with the level in it
        return self.images(self.wide(patchify(x, self.patch), c))

    def forward(self, x: Tensor, level: Tensor, condition: Given, taps: Sequence[int] = ()) -> Output:
        encoded = self.condition(x, level, condition, taps)
        return Output(self.head(x, level, encoded), encoded.inner, encoded.features)


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
