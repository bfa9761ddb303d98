"""Representation alignment (REPA, Yu et al. 2024): a block's tokens learn to predict a frozen encoder's.

Also its variants: one convolution as projector and normalised targets (iREPA), and an end to it (HASTE).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cosine_similarity, interpolate, mse_loss

from mvm.options import check

PUBLISHED_HIDDEN = 2048
SPREAD_EPS = 1e-6

CACHES = {"device": "all features in device memory", "disk": "all features in files", "none": "encode every batch"}


@dataclass(frozen=True)
class RepaConfig:
    """Representation alignment (REPA): one block's tokens are aligned with those of a frozen encoder."""

    encoder: str = ""
    """Frozen encoder: efficientnet-lite0, a hub name, a folder, or Meta's .pth of a DINOv3; empty: no alignment."""
    resolution: int = 0
    """Side in pixels to which images are resized for the encoder; 0: its own."""
    weight: float = 0.5
    """Weight of the alignment loss."""
    block: int = 0
    """Block (1-based) whose tokens are aligned; 0: block 4 up to depth 12, block 8 beyond."""
    projector: str = "mlp"
    """From the network's tokens to the encoder's: three linear layers, or a 3x3 convolution (iREPA).
    One of: mlp, conv."""
    loss: str = "cosine"
    """Alignment loss: 1 - cosine similarity, or mean squared error as in RAEv2. One of: cosine, mse."""
    hidden: int = 0
    """Hidden width of the mlp projector; 0: twice the network's width, at most the published 2048."""
    normalise: float = 0.0
    """Fraction of the mean over tokens subtracted from the encoder's features, which are then scaled to unit standard
    deviation (iREPA); 0: features as they are."""
    stop: int = 0
    """Step from which the alignment loss is off; 0: never."""
    cache: str = "device"
    """Where the encoder's features of the training set are kept; none encodes the images at every step.
    One of: device, disk, none."""

    def __post_init__(self) -> None:
        check("repa", self, resolution=0, block=0, hidden=0, stop=0, weight=(0, 100), normalise=(0, 1))
        check("repa", self, projector=("mlp", "conv"), loss=ALIGNMENTS, cache=CACHES)

    def active(self, step: int) -> bool:
        """Return whether the step (0-based) is trained with alignment."""
        return bool(self.encoder) and (self.stop == 0 or step < self.stop)

    def tap(self, depth: int) -> int:
        """Return the block to align (1-based) of a network of that depth."""
        block = self.block or min(depth, 4 if depth <= 12 else 8)
        if block > depth:
            raise ValueError(f"repa.block={block} must lie in [0, {depth}], the network's blocks (0: by depth)")
        return block

    def hidden_width(self, width: int) -> int:
        """Return the MLP's hidden width: 2048 suits L and XL, but would outweigh a small network's blocks."""
        return self.hidden or min(PUBLISHED_HIDDEN, 2 * width)


def _grid(tokens: Tensor) -> Tensor:
    """Return tokens (B, N, z) as a map (B, z, side, side)."""
    side = math.isqrt(tokens.shape[1])
    assert side * side == tokens.shape[1], f"{tokens.shape[1]} tokens are no square grid"
    return tokens.transpose(1, 2).unflatten(2, (side, side))


def _tokens(grid: Tensor) -> Tensor:
    """Return a map (B, z, side, side) as tokens (B, N, z); the inverse of _grid."""
    return grid.flatten(2).transpose(1, 2)


class Projector(nn.Module):
    """projector(tokens (B, N, width)) -> (B, N, out), to compare with the encoder's tokens; thrown away afterwards."""

    def __init__(self, config: RepaConfig, width: int, out: int) -> None:
        super().__init__()
        self.spatial = config.projector == "conv"
        hidden = config.hidden_width(width)
        if self.spatial:
            layers: list[nn.Module] = [nn.Conv2d(width, out, 3, padding=1)]
        else:
            layers = [nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, out)]
        self.layers = nn.Sequential(*layers)
        for layer in self.layers:
            if isinstance(layer, nn.Linear | nn.Conv2d) and layer.bias is not None:
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return _tokens(self.layers(_grid(tokens))) if self.spatial else self.layers(tokens)


def match_grid(features: Tensor, side: int) -> Tensor:
    """Return features (B, M, z) on a side x side grid, (B, side^2, z) in float32.

    A grid larger by a whole factor is averaged, any other interpolated (filtered where it shrinks).
    """
    grid = _grid(features.float())
    theirs = grid.shape[-1]
    if theirs == side:
        return features.float()
    if theirs % side == 0:
        return _tokens(adaptive_avg_pool2d(grid, side))
    return _tokens(interpolate(grid, size=(side, side), mode="bilinear", align_corners=False, antialias=theirs > side))


def spatial_norm(target: Tensor, gamma: float) -> Tensor:
    """Return (x - gamma mean) / (std + 1e-6), both over the tokens of an image (B, N, z); gamma 0: x itself.

    It takes away what all tokens of an image share, so that their differences count.
    """
    if gamma == 0:
        return target
    x = target.float()
    return (x - gamma * x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + SPREAD_EPS)


ALIGNMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda projected, target: 1 - cosine_similarity(projected, target, dim=-1).mean(),
    "mse": mse_loss,
}


def alignment(projected: Tensor, target: Tensor, loss: str = "cosine") -> Tensor:
    """Return 1 - cos(projected, target), or their mean square difference, over tokens and batch; both (B, N, z).

    REPA writes -cos; with the 1 the optimum is 0. In float32, with no gradient to the target.
    """
    assert projected.shape == target.shape, f"{tuple(projected.shape)} against {tuple(target.shape)}"
    return ALIGNMENTS[loss](projected.float(), target.detach().float())
