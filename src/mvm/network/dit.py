"""The pixel DiT: RMSNorm, 2-D RoPE, SwiGLU, QK-norm (or the classic design), adaLN-Zero, a label with a null class."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mvm import noise
from mvm.network.blocks import BLOCKS, DESIGNS, Block, Head, ModulatedBlock, SharedBlock
from mvm.network.layers import (
    AugmentMap,
    LevelEmbedding,
    Local,
    patchify,
    rotary_table,
    rotary_waves,
    sine_positions,
    takes_kernels,
    unpatchify,
)
from mvm.options import choose
from mvm.precision import way_of


@dataclass(frozen=True)
class DiTConfig:
    """Network: a diffusion transformer. `size` sets depth, width and heads; each may be overridden."""

    size: str = "S"
    """Published size, which sets depth, width and heads. One of: tiny, S, B, L, XL."""
    patch: int = 2
    """Side of the patch that becomes one token, in pixels (or latents)."""
    depth: int = 0
    """Number of blocks; 0: by network.size."""
    width: int = 0
    """Channels of a token (hidden size), a multiple of 4 * heads; 0: by network.size."""
    heads: int = 0
    """Attention heads; 0: by network.size."""
    inner_block: int = 0
    """Block (1-based) after which an inner head predicts as well, for internal guidance; 0: none."""
    skip: bool = False
    """Long skip connections: the output of block n is added, by a learned map, before block depth + 1 - n (U-ViT)."""
    local: bool = False
    """Add a depthwise 3x3 convolution of the tokens before every block."""
    modulation: str = "own"
    """adaLN modulation: a map for each block, or one map for all with an offset each (PixArt; a third less weights).
    One of: own, shared."""
    design: str = "modern"
    """Blocks: modern (RMSNorm, rotary positions, SwiGLU), or classic as in DiT and SiT (LayerNorm, sine positions,
    GELU). One of: modern, classic."""
    dropout: float = 0.0
    """Dropout in training: fraction of the channels hidden from each branch of each block, per image; 0: none."""
    kind: str = "dit"
    """Network: a DiT, or a DDT (deep backbone, wide shallow head) for latents. One of: dit, ddt."""

    def __post_init__(self) -> None:
        choose("network.size", self.size, SIZES)
        choose("network.design", self.design, DESIGNS)
        choose("network.modulation", self.modulation, BLOCKS)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"network.dropout={self.dropout} is out of range; it must be at least 0 and less than 1")
        depth, width, heads = self.dimensions
        if self.patch < 1:
            raise ValueError(f"network.patch={self.patch} is out of range; it must be at least 1")
        if min(depth, width, heads) < 1 or width % heads or (width // heads) % 4:
            raise ValueError(
                f"network.depth={depth}, network.width={width}, network.heads={heads}: "
                "width must be a multiple of 4 * heads, and depth at least 1"
            )
        if not 0 <= self.inner_block < depth:
            raise ValueError(f"network.inner_block={self.inner_block} must lie in [0, {depth - 1}] (0: no inner head)")

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """(depth, width, heads), overrides applied."""
        depth, width, heads = SIZES[self.size]
        return self.depth or depth, self.width or width, self.heads or heads


SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (4, 64, 4),
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 18),  # heads of 64, as the others have; DiT's and SiT's 16 of 72 are 1 to 3 % slower on an H200
}


# What is dear to compute twice: matrix products and attention. All else in a block is cheap, and half its memory.
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]


# Values of the tokens of as many images as one core of a CPU takes at once: what a block makes of them, about eight
# times as much, is then still in its cache when it is needed next.
AT_ONCE = 2**17


AUGMENT_MAP = "augment.weight"  # the one weight that only training reads


class Output(NamedTuple):
    """prediction (B, C, H, W); inner: the inner head's, or None; features: block outputs asked for by taps."""

    prediction: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


def joined(outputs: Sequence[Output]) -> Output:
    """Return the outputs of parts of a batch as one."""
    predictions, inners, features = zip(*outputs, strict=True)
    inner = None if inners[0] is None else torch.cat(inners)
    taps = {tap: torch.cat([feature[tap] for feature in features]) for tap in features[0]}
    return Output(torch.cat(predictions), inner, taps)


class Skip(nn.Linear):
    """What an early block's output adds to the tokens of a late one."""


class DiT(nn.Module):
    """network(x, level, condition, taps, augment, seeds) -> Output.

    x (B, C, H, W); level (B,), the schedule's noise level in [0, 1]; condition int64 labels (B,), where
    num_classes is the null class; taps: 1-based blocks whose token outputs (B, N, d) are returned.
    In training alone: augment (B, told), what was done to the images, None: nothing; seeds (B,), from which dropout
    draws, None: nothing is dropped. told: how many numbers tell of an augmentation; 0: the network can be told of none.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    def __init__(self, config: DiTConfig, sample_shape: Sequence[int], num_classes: int, told: int = 0) -> None:
        super().__init__()
        channels, height, width = sample_shape
        if height != width or height % config.patch:
            raise ValueError(f"network.patch={config.patch} must divide a square image; the data are {height}x{width}")
        depth, dim, heads = config.dimensions
        self.patch, self.channels, self.side = config.patch, channels, height // config.patch
        self.num_classes, self.inner_block, self.dropout = num_classes, config.inner_block, config.dropout
        self.recompute = 0  # blocks, from the first, whose activations the backward pass computes again
        self.keep_products = False  # but for the results of their matrix products and attention
        pixels = channels * config.patch**2
        self.embed = nn.Linear(pixels, dim)
        self.level = LevelEmbedding(dim)
        self.label = nn.Embedding(num_classes + 1, dim)  # the last is the null class
        self.augment = AugmentMap(told, dim) if told else None
        block = BLOCKS[config.modulation]
        self.shared = nn.Linear(dim, 6 * dim) if block is SharedBlock else None
        self.blocks = nn.ModuleList(block(dim, heads, config.design) for _ in range(depth))
        halves = depth // 2
        self.skips = nn.ModuleList(Skip(dim, dim, bias=False) for _ in range(halves)) if config.skip else None
        self.locals = nn.ModuleList(Local(dim, self.side) for _ in range(depth)) if config.local else None
        self.head = Head(dim, pixels, config.design)
        self.inner_head = Head(dim, pixels, config.design) if config.inner_block else None
        cos, sin = rotary_waves(rotary_table(self.side, dim // heads))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        positions = sine_positions(self.side, dim) if config.design == "classic" else None
        self.register_buffer("positions", positions, persistent=False)  # modern ones are in attention
        self.reset()

    def reset(self) -> None:
        """Initialise: Xavier everywhere, zero biases; zero all that adds to the tokens: modulations, skips, locals."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.label.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, Block | Head):
                nn.init.zeros_(module.modulation.weight)
            if isinstance(module, Head):
                nn.init.zeros_(module.linear.weight)
            if isinstance(module, Local | Skip | AugmentMap):
                nn.init.zeros_(module.weight)
            if isinstance(module, SharedBlock):
                nn.init.zeros_(module.offset)
            if isinstance(module, DiT) and module.shared is not None:
                nn.init.zeros_(module.shared.weight)

    @property
    def null(self) -> int:
        """The label of the null class."""
        return self.num_classes

    def _pixels(self, head: Head, tokens: Tensor, condition: Tensor) -> Tensor:
        return unpatchify(head(tokens, condition), self.patch, self.channels, self.side)

    def _run(self, block: nn.Module, number: int, tokens: Tensor, condition: Tensor, *more: Any) -> Any:
        """Return the block's answer; more: what a ModulatedBlock may be told besides."""
        given = (tokens, condition, self.cos, self.sin, *more)
        if number > self.recompute or not torch.is_grad_enabled():
            return block(*given)
        if not self.keep_products:
            return checkpoint(block, *given, use_reentrant=False)
        kept = partial(create_selective_checkpoint_contexts, PRODUCTS)
        return checkpoint(block, *given, use_reentrant=False, context_fn=kept)

    def _leaves(self, number: int, taps: Sequence[int]) -> bool:
        """Return whether block `number` may leave its last addition to the next: its tokens themselves are not read."""
        if self.skips is not None or self.locals is not None or number in (*taps, self.inner_block, len(self.blocks)):
            return False
        return number >= self.recompute or self.keep_products  # a block computed again keeps what enters it: one tensor

    def _before(self, number: int, tokens: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Return the tokens that block `number` sees, from the outputs of the first half of the blocks."""
        mirrored = len(self.blocks) + 1 - number
        if self.skips is not None and mirrored < number:
            tokens = tokens + self.skips[mirrored - 1](outputs[mirrored - 1])
        return tokens if self.locals is None else self.locals[number - 1](tokens)

    def _kept(self, seeds: Tensor | None) -> Sequence[Tensor | None]:
        """Return for each block what multiplies the channels its branches see (B, 2, d): 0, else 1 / (1 - dropout)."""
        if seeds is None or not self.dropout:
            return [None] * len(self.blocks)
        drawn = noise.uniform(seeds, noise.DROPOUT, (len(self.blocks), 2, self.embed.out_features))
        return ((drawn >= self.dropout).float() / (1 - self.dropout)).unbind(1)

    def _condition(self, level: Tensor, label: Tensor, augment: Tensor | None) -> Tensor:
        """Return what modulates the blocks (B, d)."""
        both = self.level(level) + self.label(label)
        if augment is None:
            return silu(both)
        if self.augment is None:
            raise ValueError("augment: this network can be told of none; train with data.augment above 0")
        return silu(both + self.augment(augment))

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        condition: Tensor,
        taps: Sequence[int] = (),
        augment: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Output:
        if any(not 1 <= tap <= len(self.blocks) for tap in taps):
            raise ValueError(f"taps={tuple(taps)} must be block numbers, 1 to {len(self.blocks)}")
        if way_of(x) == "plain" or augment is not None or seeds is not None:  # sampling alone is worth cutting up
            return self._forward(x, level, condition, taps, augment, seeds)
        several = max(1, torch.get_num_threads() * AT_ONCE // (self.side**2 * self.embed.out_features))
        parts = zip(*(value.split(several) for value in (x, level, condition)), strict=True)
        return joined([self._forward(*part, taps=taps) for part in parts])

    def _forward(
        self,
        x: Tensor,
        level: Tensor,
        condition: Tensor,
        taps: Sequence[int],
        augment: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Output:
        tokens = self.embed(patchify(x, self.patch))
        if self.positions is not None:
            tokens = tokens + self.positions.to(tokens.dtype)
        c = self._condition(level, condition, augment)
        features: dict[int, Tensor] = {}
        modulation = c if self.shared is None else self.shared(c)
        inner, pending, outputs = None, None, []
        fused = torch.is_grad_enabled()  # each way to call a compiled block is one more graph, of eight
        fused &= all(isinstance(b, ModulatedBlock) and takes_kernels(b.kernels, tokens) for b in self.blocks)
        for number, (block, kept) in enumerate(zip(self.blocks, self._kept(seeds), strict=True), start=1):
            leave = fused and self._leaves(number, taps)
            found = self._run(block, number, self._before(number, tokens, outputs), modulation, pending, leave, kept)
            tokens, pending = found if leave else (found, None)
            if self.skips is not None and number <= len(self.skips):  # nothing else is kept: sampling frees it
                outputs.append(tokens)
            if number in taps:
                features[number] = tokens
            if self.inner_head is not None and number == self.inner_block:
                inner = self._pixels(self.inner_head, tokens, c)
        return Output(self._pixels(self.head, tokens, c), inner, features)
