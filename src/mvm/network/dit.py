"""The pixel DiT: patches become tokens, blocks conditioned on noise level and class denoise them, patches come back."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import silu

from mvm import noise
from mvm.network.conditions import Given
from mvm.network.config import BY_LABELS, ConditionConfig, DiTConfig
from mvm.network.extras import DESIGNS, AugmentMap, Local, Skip
from mvm.network.layers import Block, Head, Stack
from mvm.network.patches import PatchTransformer

AUGMENT_MAP = "augment.weight"  # the one weight that only training reads


class Output(NamedTuple):
    """prediction, of x's shape; inner: the inner head's, or None; features: outputs of the blocks in taps."""

    prediction: Tensor
    inner: Tensor | None
    features: dict[int, Tensor]


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
