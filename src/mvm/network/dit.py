"""The pixel DiT: patches become tokens, blocks conditioned on noise level and class denoise them, patches come back."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mvm import noise
from mvm.network.blocks import BLOCKS, DESIGNS, Head, SharedBlock, Stack, initialise
from mvm.network.conditions import Given, conditioning
from mvm.network.config import BY_LABELS, ConditionConfig, DiTConfig
from mvm.network.extras import TIMES, AugmentMap, Local, Skip, sine_positions
from mvm.network.layers import grid_of, patchify, rotary_table, rotary_waves, unpatchify

AUGMENT_MAP = "augment.weight"  # the one weight that only training reads


class Output(NamedTuple):
    """prediction, of x's shape; inner: the inner head's, or None; features: outputs of the blocks in taps."""

    prediction: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


class DiT(nn.Module):
    """network(x, level, condition, taps, augment, seeds) -> Output.

    x (B, C, *space), of one to three axes of space; level (B,), the schedule's noise level in [0, 1]; condition: int64
    labels (B,), or of another kind (mvm.network.conditions), each with its `null`; taps: 1-based blocks whose token
    outputs (B, N, d) are returned. In training alone: augment (B, augment_size), what was done to the images; seeds
    (B,), from which dropout is drawn. None: neither.
    """

    time: str  # what it receives for time, of mvm.path.field.network_time: by default the noise level
    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    def __init__(
        self,
        config: DiTConfig,
        sample_shape: Sequence[int],
        num_classes: int,
        augment_size: int = 0,
        condition: ConditionConfig = BY_LABELS,
    ) -> None:
        super().__init__()
        depth, dim, heads = config.dimensions
        self.patch, self.channels, self.grid = config.patch, sample_shape[0], grid_of(sample_shape, config.patch)
        self.inner_block, self.dropout, self.tokens = config.inner_block, config.dropout, math.prod(self.grid)
        self.text, values = condition.length, config.patch ** len(self.grid)
        pixels = self.channels * values
        self.embed = nn.Linear(pixels + condition.channels * values, dim)
        self.time, embedding = TIMES[config.time]
        self.level = embedding(dim)
        # of any kind of condition, under the name that stored weights have for the first
        self.label = conditioning(condition, sample_shape, num_classes, dim)
        self.augment = AugmentMap(augment_size, dim) if augment_size else None
        block, design = BLOCKS[config.modulation], DESIGNS[config.design]
        self.shared = nn.Linear(dim, 6 * dim) if block is SharedBlock else None
        self.blocks = Stack(block(dim, heads, config.design) for _ in range(depth))
        self.skips = nn.ModuleList(Skip(dim, dim, bias=False) for _ in range(depth // 2)) if config.skip else None
        self.locals = nn.ModuleList(Local(dim, self.grid) for _ in range(depth)) if config.local else None
        self.head = Head(dim, pixels, config.design)
        self.inner_head = Head(dim, pixels, config.design) if config.inner_block else None
        angles = rotary_table(self.grid, dim // heads, design.base)
        angles = torch.cat((angles, angles.new_zeros(self.text, angles.shape[1])))  # text is not rotated
        cos, sin = rotary_waves(angles)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        positions = sine_positions(self.grid, dim) if design.sines else None
        self.register_buffer("positions", positions, persistent=False)  # modern ones are in attention
        self.reset()

    def reset(self) -> None:
        """Initialise: blocks are the identity, and the prediction is zero."""
        initialise(self)
        self.label.reset()
        if self.shared is not None:
            nn.init.zeros_(self.shared.weight)

    @property
    def null(self) -> Any:
        """The null condition: the label of the null class, or one row of another kind."""
        return self.label.null

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        condition: Given,
        taps: Sequence[int] = (),
        augment: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Output:
        tokens = self.embed(patchify(self.label.join_channels(x, condition), self.patch))
        if self.positions is not None:
            tokens = tokens + self.positions.to(tokens.dtype)
        tokens = self.label.join_tokens(tokens, condition)
        c = self.level(level) + self.label(condition)
        if augment is not None:
            if self.augment is None:
                raise ValueError("augment: this network has no input for it; train with data.augment above 0")
            c = c + self.augment(augment)
        c = silu(c)
        inner_head = self.inner_head
        tokens, inner, features = self.blocks(
            tokens,
            c if self.shared is None else self.shared(c),
            self.cos,
            self.sin,
            image=self.tokens if self.text else None,
            taps=taps,
            inner_block=self.inner_block,
            inner_head=None if inner_head is None else lambda tokens: self.pixels(inner_head, tokens, c),
            skips=self.skips,
            locals=self.locals,
            kept=self.kept(seeds),
        )
        return Output(self.pixels(self.head, tokens, c), inner, features)

    def pixels(self, head: nn.Module, tokens: Tensor, condition: Tensor) -> Tensor:
        """Return the head's output as images."""
        return unpatchify(head(tokens, condition), self.patch, self.channels, self.grid)

    def kept(self, seeds: Tensor | None) -> Sequence[Tensor] | None:
        """Return dropout's factors of each block's channels, for both branches (B, 2, d): 0 or 1 / (1 - dropout)."""
        if seeds is None or not self.dropout:
            return None
        drawn = noise.uniform(seeds, noise.DROPOUT, (len(self.blocks), 2, self.embed.out_features))
        return ((drawn >= self.dropout).float() / (1 - self.dropout)).unbind(1)
