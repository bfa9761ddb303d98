"""The latent DDT: a deep backbone says what the image is, a wide shallow head, told so token by token, denoises it.

As DiT^DH of RAE and RAEv2, from the parts of our DiT. The backbone's answer changes little from step to step of a
solver, so that it can be computed on some steps only: `condition`, then `head` as often as wanted; a call is both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from mvm.network.blocks import Block, Head
from mvm.network.branches import RotaryAttention, SwiGLU
from mvm.network.dit import SIZES, DiT, DiTConfig, Output
from mvm.network.layers import (
    NORM_EPS,
    LevelEmbedding,
    patchify,
    rotary_table,
    rotary_waves,
    unpatchify,
)
from mvm.options import at_least, choose

CONDITIONINGS = ("adaln", "in-context")
WIDE = (2, 2048, 16)  # of every published size: it must be wider than a latent token, however small the backbone
HEAD_SIZES: dict[str, tuple[int, int, int]] = {**dict.fromkeys(SIZES, WIDE), "tiny": (2, 128, 4)}


@dataclass(frozen=True)
class DDTConfig(DiTConfig):
    """Network: a DDT, whose backbone has the options of a DiT, followed by those of the head."""

    patch: int = 1
    conditioning: str = "adaln"
    """How noise level and class enter the backbone: by modulation, or as tokens beside the image's, with blocks that
    are not modulated. One of: adaln, in-context."""
    time_tokens: int = 4
    """Tokens that tell the noise level, with in-context conditioning."""
    class_tokens: int = 8
    """Tokens that tell the class, with in-context conditioning."""
    head_depth: int = 0
    """Number of blocks of the head; 0: by network.size."""
    head_width: int = 0
    """Channels of a token in the head, a multiple of 4 * head_heads; 0: by network.size."""
    head_heads: int = 0
    """Attention heads of the head; 0: by network.size."""
    kind: str = "ddt"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("skip", "local", "dropout"):
            if value := getattr(self, option):
                raise ValueError(f"network.{option}={value} is for network.kind='dit'; a ddt has none")
        for option, own in (("modulation", "own"), ("design", "modern")):
            if getattr(self, option) != own:
                raise ValueError(
                    f"network.{option}='{getattr(self, option)}' is for network.kind='dit'; a ddt's is '{own}'"
                )
        choose("network.conditioning", self.conditioning, dict.fromkeys(CONDITIONINGS))
        at_least("network.time_tokens", self.time_tokens, 1)
        at_least("network.class_tokens", self.class_tokens, 1)
        depth, width, heads = self.head_dimensions
        if min(depth, width, heads) < 1 or width % heads or (width // heads) % 4:
            raise ValueError(
                f"network.head_depth={depth}, network.head_width={width}, network.head_heads={heads}: "
                "head_width must be a multiple of 4 * head_heads, and head_depth at least 1"
            )

    @property
    def head_dimensions(self) -> tuple[int, int, int]:
        """(depth, width, heads) of the head, overrides applied."""
        depth, width, heads = HEAD_SIZES[self.size]
        return self.head_depth or depth, self.head_width or width, self.head_heads or heads


class Condition(NamedTuple):
    """What the backbone says: tokens (B, N, d) for the head; the inner head's prediction, or None; block outputs."""

    tokens: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


class PlainBlock(nn.Module):
    """Attention and SwiGLU without modulation: the condition is among the tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = RotaryAttention(width, heads)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the tokens after the block; condition is not read, it makes the call that of a Block."""
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


class TokenBlock(Block):
    """A Block with a condition (B, N, d) for every token."""

    def modulated(self, condition: Tensor) -> Tensor:
        return self.modulation(condition)


class TokenHead(Head):
    """A Head with a condition (B, N, d) for every token."""

    def modulated(self, condition: Tensor) -> Tensor:
        return self.modulation(condition)


class WideHead(nn.Module):
    """Patches of the noisy latent (B, N, p) and a condition for each (B, N, d) -> the prediction's patches (B, N, p).

    It sees the latent itself, embedded anew at its own width, and has rotary positions of its own.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dimensions: tuple[int, int, int], pixels: int, condition: int, side: int) -> None:
        super().__init__()
        depth, width, heads = dimensions
        self.embed = nn.Linear(pixels, width)
        self.project = nn.Linear(condition, width)
        self.blocks = nn.ModuleList(TokenBlock(width, heads) for _ in range(depth))
        self.out = TokenHead(width, pixels)
        cos, sin = rotary_waves(rotary_table(side, width // heads))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, patches: Tensor, condition: Tensor) -> Tensor:
        tokens, c = self.embed(patches), silu(self.project(condition))
        for block in self.blocks:
            tokens = block(tokens, c, self.cos, self.sin)
        return self.out(tokens, c)


def _per_token(time: Tensor, tokens: Tensor) -> Tensor:
    """Return the condition of a head: one vector for every token, with the level in it."""
    return silu(time[:, None] + tokens)


class DDT(nn.Module):
    """network(x, level, condition, taps) -> Output, as a DiT: see there for what they are; taps count the backbone's.

    network.head(x, level, network.condition(x, level, labels)) is the same prediction, to the bit.
    """

    cos: Tensor
    sin: Tensor
    _run = DiT._run  # a block, or a block computed again in the backward pass

    def __init__(self, config: DDTConfig, sample_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = sample_shape
        if height != width or height % config.patch:
            raise ValueError(f"network.patch={config.patch} must divide a square latent; it is {height}x{width}")
        depth, dim, heads = config.dimensions
        self.patch, self.channels, self.side = config.patch, channels, height // config.patch
        self.num_classes, self.inner_block = num_classes, config.inner_block
        self.recompute = 0  # blocks of the backbone, from the first, as in DiT
        self.keep_products = False
        pixels, in_context = channels * config.patch**2, config.conditioning == "in-context"
        self.embed = nn.Linear(pixels, dim)
        self.level = LevelEmbedding(dim)
        self.label = nn.Embedding(num_classes + 1, dim)  # the last is the null class
        self.context = ContextTokens(dim, config.time_tokens, config.class_tokens) if in_context else None
        self.blocks = nn.ModuleList((PlainBlock if in_context else Block)(dim, heads) for _ in range(depth))
        self.inner_head = TokenHead(dim, pixels) if config.inner_block else None
        self.wide = WideHead(config.head_dimensions, pixels, dim, self.side)
        angles = rotary_table(self.side, dim // heads)
        if in_context:  # tokens that stand nowhere are not turned
            angles = torch.cat((angles, angles.new_zeros(config.time_tokens + config.class_tokens, angles.shape[1])))
        cos, sin = rotary_waves(angles)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initialise as a DiT: every modulation and the last maps zero; learned tokens as labels."""
        DiT.reset(self)  # ty: ignore[invalid-argument-type] (it asks for modules and `label` alone)
        if self.context is not None:
            nn.init.normal_(self.context.time, std=0.02)
            nn.init.normal_(self.context.kind, std=0.02)

    @property
    def null(self) -> int:
        """The label of the null class."""
        return self.num_classes

    def _latent(self, patches: Tensor) -> Tensor:
        return unpatchify(patches, self.patch, self.channels, self.side)

    def _start(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Return the backbone's first tokens, the image's before any others."""
        tokens = self.embed(patchify(x, self.patch))
        if self.context is None:
            return tokens
        return torch.cat((tokens, self.context(time, label).to(tokens.dtype)), dim=1)

    def _inner(self, time: Tensor, tokens: Tensor) -> Tensor | None:
        """Return the inner head's prediction: its condition is its input too, as there is no other."""
        if self.inner_head is None:
            return None
        c = _per_token(time, tokens)
        return self._latent(self.inner_head(c, c))

    def condition(self, x: Tensor, level: Tensor, labels: Tensor, taps: Sequence[int] = ()) -> Condition:
        """Return what the backbone says, the inner head's prediction and the tapped blocks' tokens with it."""
        if any(not 1 <= tap <= len(self.blocks) for tap in taps):
            raise ValueError(f"taps={tuple(taps)} must be block numbers, 1 to {len(self.blocks)}")
        time, label = self.level(level), self.label(labels)
        tokens, c = self._start(x, time, label), silu(time + label)
        features: dict[int, Tensor] = {}
        inner, image = None, self.side**2
        for number, block in enumerate(self.blocks, start=1):
            tokens = self._run(block, number, tokens, c)
            if number in taps:
                features[number] = tokens[:, :image]
            if number == self.inner_block:
                inner = self._inner(time, tokens[:, :image])
        return Condition(tokens[:, :image], inner, features)

    def head(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        """Return the prediction (B, C, H, W) at this x and level; the condition may be that of another step."""
        c = _per_token(self.level(level), condition.tokens)
        return self._latent(self.wide(patchify(x, self.patch), c))

    def forward(self, x: Tensor, level: Tensor, condition: Tensor, taps: Sequence[int] = ()) -> Output:
        said = self.condition(x, level, condition, taps)
        return Output(self.head(x, level, said), said.inner, said.features)


def blocks_of(network: DiT | DDT) -> list[nn.Module]:
    """Return all transformer blocks, a DDT's head included."""
    return [*network.blocks, *(network.wide.blocks if isinstance(network, DDT) else ())]


def build_network(config: DiTConfig, sample_shape: Sequence[int], num_classes: int, told: int = 0) -> DiT | DDT:
    """Return the network of a configuration: a DDT of a DDTConfig, else a DiT; told: see there."""
    if not isinstance(config, DDTConfig):
        return DiT(config, sample_shape, num_classes, told)
    if told:
        raise ValueError("a ddt cannot be told of augmentation; set data.augment to 0, or network.kind to dit")
    return DDT(config, sample_shape, num_classes)
