"""The pixel DiT: patches become tokens, blocks conditioned on noise level and class denoise them, patches come back."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import silu

from mvm import noise
from mvm.network.blocks import BLOCKS, DESIGNS, Head, SharedBlock, Stack, initialise
from mvm.network.config import DiTConfig
from mvm.network.extras import TIMES, AugmentMap, Local, Skip, sine_positions
from mvm.network.layers import patchify, rotary_table, rotary_waves, unpatchify

AUGMENT_MAP = "augment.weight"  # the one weight that only training reads


class Output(NamedTuple):
    """prediction (B, C, H, W); inner: the inner head's, or None; features: outputs of the blocks in taps."""

    prediction: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


class DiT(nn.Module):
    """network(x, level, condition, taps, augment, seeds) -> Output.

    x (B, C, H, W); level (B,), the schedule's noise level in [0, 1]; condition int64 labels (B,), where num_classes is
    the null class; taps: 1-based blocks whose token outputs (B, N, d) are returned. In training alone: augment
    (B, augment_size), what was done to the images; seeds (B,), from which dropout is drawn. None: neither.
    """

    time: str  # what it receives for time, of mvm.path.field.network_time: by default the noise level
    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    def __init__(self, config: DiTConfig, sample_shape: Sequence[int], num_classes: int, augment_size: int = 0) -> None:
        super().__init__()
        channels, height, width = sample_shape
        if height != width or height % config.patch:
            raise ValueError(f"network.patch={config.patch} must divide a square image; the data are {height}x{width}")
        depth, dim, heads = config.dimensions
        self.patch, self.channels, self.side = config.patch, channels, height // config.patch
        self.num_classes, self.inner_block, self.dropout = num_classes, config.inner_block, config.dropout
        pixels = channels * config.patch**2
        self.embed = nn.Linear(pixels, dim)
        self.time, embedding = TIMES[config.time]
        self.level = embedding(dim)
        self.label = nn.Embedding(num_classes + 1, dim)  # the last is the null class
        self.augment = AugmentMap(augment_size, dim) if augment_size else None
        block, design = BLOCKS[config.modulation], DESIGNS[config.design]
        self.shared = nn.Linear(dim, 6 * dim) if block is SharedBlock else None
        self.blocks = Stack(block(dim, heads, config.design) for _ in range(depth))
        self.skips = nn.ModuleList(Skip(dim, dim, bias=False) for _ in range(depth // 2)) if config.skip else None
        self.locals = nn.ModuleList(Local(dim, self.side) for _ in range(depth)) if config.local else None
        self.head = Head(dim, pixels, config.design)
        self.inner_head = Head(dim, pixels, config.design) if config.inner_block else None
        cos, sin = rotary_waves(rotary_table(self.side, dim // heads, design.base))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        positions = sine_positions(self.side, dim) if design.sines else None
        self.register_buffer("positions", positions, persistent=False)  # modern ones are in attention
        self.reset()

    def reset(self) -> None:
        """Initialise: blocks are the identity, and the prediction is zero."""
        initialise(self)
        nn.init.normal_(self.label.weight, std=0.02)
        if self.shared is not None:
            nn.init.zeros_(self.shared.weight)

    @property
    def null(self) -> int:
        """The label of the null class."""
        return self.num_classes

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        condition: Tensor,
        taps: Sequence[int] = (),
        augment: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Output:
        tokens = self.embed(patchify(x, self.patch))
        if self.positions is not None:
            tokens = tokens + self.positions.to(tokens.dtype)
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
        return unpatchify(head(tokens, condition), self.patch, self.channels, self.side)

    def kept(self, seeds: Tensor | None) -> Sequence[Tensor] | None:
        """Return dropout's factors of each block's channels, for both branches (B, 2, d): 0 or 1 / (1 - dropout)."""
        if seeds is None or not self.dropout:
            return None
        drawn = noise.uniform(seeds, noise.DROPOUT, (len(self.blocks), 2, self.embed.out_features))
        return ((drawn >= self.dropout).float() / (1 - self.dropout)).unbind(1)
