"""What a DiT and a DDT share: patches to tokens with positions, embeddings of time and condition, initialisation."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mvm.network.conditions import Given, conditioning
from mvm.network.config import ConditionConfig, DiTConfig
from mvm.network.extras import DESIGNS, TIMES, AugmentMap, FourierEmbedding, Local, Skip, sine_positions
from mvm.network.layers import Block, Head, Stack, grid_of, patchify, rotary_table, rotary_waves, unpatchify


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
