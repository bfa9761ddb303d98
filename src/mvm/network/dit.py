"""The pixel DiT: patches become tokens, blocks conditioned on noise level and class denoise them, patches come back."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mvm import noise
from mvm.network.conditions import Given, conditioning
from mvm.network.config import BY_LABELS, ConditionConfig, DiTConfig
from mvm.network.extras import DESIGNS, TIMES, AugmentMap, FourierEmbedding, Local, Skip, sine_positions
from mvm.network.layers import Block, Head, Stack, grid_of, patchify, rotary_table, rotary_waves, unpatchify

AUGMENT_MAP = "augment.weight"  # the one weight that only training reads


class Output(NamedTuple):
    """prediction, of x's shape; inner: the inner head's, or None; features: outputs of the blocks in taps."""

    prediction: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


class PatchTransformer(nn.Module):
    """The first layers of a DiT and of a DDT: patches to tokens with positions, and embeddings of time and condition.

    context_tokens: so many more stand after the image's and the text's.
    """

    time: str  # what it receives for time, of mvm.path.field.network_time: by default the noise level
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    blocks: Stack

    def __init__(
        self,
        config: DiTConfig,
        sample_shape: Sequence[int],
        num_classes: int,
        condition: ConditionConfig,
        context_tokens: int = 0,
    ) -> None:
        super().__init__()
        _, dim, heads = config.dimensions
        design = DESIGNS[config.design]
        self.patch, self.channels, self.grid = config.patch, sample_shape[0], grid_of(sample_shape, config.patch)
        self.inner_block, self.tokens, self.text = config.inner_block, math.prod(self.grid), condition.length
        values = config.patch ** len(self.grid)
        self.pixels = self.channels * values  # of a patch
        self.embed = nn.Linear(self.pixels + condition.channels * values, dim)
        self.time, embedding = TIMES[config.time]
        self.level = embedding(dim)
        # of any kind of condition, under the name that stored weights have for the first
        self.label = conditioning(condition, sample_shape, num_classes, dim)
        angles = rotary_table(self.grid, dim // heads, design.base)
        others = angles.new_zeros(self.text + context_tokens, angles.shape[1])  # without a position: not rotated
        cos, sin = rotary_waves(torch.cat((angles, others)))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        positions = sine_positions(self.grid, dim) if design.sines else None  # modern ones are in attention
        self.register_buffer("positions", positions, persistent=False)

    @property
    def null(self) -> Any:
        """The null condition: the label of the null class, or one row of another kind."""
        return self.label.null

    def embedded(self, x: Tensor, condition: Given) -> Tensor:
        """Return the tokens of images and of what their condition adds to them."""
        tokens = self.embed(patchify(self.label.join_channels(x, condition), self.patch))
        if self.positions is not None:
            tokens = tokens + self.positions.to(tokens.dtype)
        return self.label.join_tokens(tokens, condition)

    def all_taps(self, taps: Sequence[int]) -> tuple[int, ...]:
        """Return the blocks whose tokens are needed, the inner head's among them; blocks that are not there raise."""
        if any(not 1 <= tap <= len(self.blocks) for tap in taps):
            raise ValueError(f"taps={tuple(taps)} must be block numbers, 1 to {len(self.blocks)}")
        return (*taps, self.inner_block)

    def images(self, patches: Tensor) -> Tensor:
        """Return patches (B, N, pixels) as images (B, C, *space)."""
        return unpatchify(patches, self.patch, self.channels, self.grid)

    def reset(self) -> None:
        """Initialise: Xavier, zero biases, and zero all that adds to the tokens: modulations, heads, skips, locals."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Block | Head) and module.modulation is not None:
                nn.init.zeros_(module.modulation.weight)
            if isinstance(module, Block) and module.offset is not None:
                nn.init.zeros_(module.offset)
            if isinstance(module, Head):
                nn.init.zeros_(module.linear.weight)
            if isinstance(module, Local | Skip | AugmentMap):
                nn.init.zeros_(module.weight)
            if isinstance(module, FourierEmbedding):
                module.reset()
        self.label.reset()


class DiT(PatchTransformer):
    """network(x, level, condition, taps, augment, seeds) -> Output.

    x (B, C, *space), of one to three axes of space; level (B,), the schedule's noise level in [0, 1]; condition: int64
    labels (B,), or of another kind (mvm.network.conditions), each with its `null`; taps: 1-based blocks whose token
    outputs (B, N, d) are returned. In training alone: augment (B, augment_size), what was done to the images; seeds
    (B,), from which dropout is drawn. None: neither.
    """

    def __init__(
        self,
        config: DiTConfig,
        sample_shape: Sequence[int],
        num_classes: int,
        augment_size: int = 0,
        condition: ConditionConfig = BY_LABELS,
    ) -> None:
        super().__init__(config, sample_shape, num_classes, condition)
        depth, dim, heads = config.dimensions
        design, shared = DESIGNS[config.design], config.modulation == "shared"
        self.dropout = config.dropout
        self.augment = AugmentMap(augment_size, dim) if augment_size else None
        self.shared = nn.Linear(dim, 6 * dim) if shared else None
        self.blocks = Stack(Block(dim, heads, design, shared) for _ in range(depth))
        self.skips = nn.ModuleList(Skip(dim, dim, bias=False) for _ in range(depth // 2)) if config.skip else None
        self.locals = nn.ModuleList(Local(dim, self.grid) for _ in range(depth)) if config.local else None
        self.head = Head(dim, self.pixels, design)
        self.inner_head = Head(dim, self.pixels, design) if config.inner_block else None
        self.reset()

    def reset(self) -> None:
        """Initialise: blocks are the identity, and the prediction is zero."""
        super().reset()
        if self.shared is not None:
            nn.init.zeros_(self.shared.weight)

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        condition: Given,
        taps: Sequence[int] = (),
        augment: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Output:
        c = self.level(level) + self.label(condition)
        if augment is not None:
            if self.augment is None:
                raise ValueError("augment: this network has no input for it; train with data.augment above 0")
            c = c + self.augment(augment)
        c = silu(c)
        tokens, features = self.blocks(
            self.embedded(x, condition),
            c if self.shared is None else self.shared(c),
            self.cos,
            self.sin,
            taps=self.all_taps(taps),
            image=self.tokens if self.text else None,
            skips=self.skips,
            locals=self.locals,
            masks=self.dropout_masks(seeds),
        )
        inner = None if self.inner_head is None else self.images(self.inner_head(features[self.inner_block], c))
        return Output(
            self.images(self.head(tokens, c)), inner, {tap: each for tap, each in features.items() if tap in taps}
        )

    def dropout_masks(self, seeds: Tensor | None) -> Sequence[Tensor] | None:
        """Return dropout's factors of each block's channels, for both branches (B, 2, d): 0 or 1 / (1 - dropout)."""
        if seeds is None or not self.dropout:
            return None
        drawn = noise.uniform(seeds, noise.DROPOUT, (len(self.blocks), 2, self.embed.out_features))
        return ((drawn >= self.dropout).float() / (1 - self.dropout)).unbind(1)
