"""Differentiable augmentation (Zhao et al. 2020): what a discriminator sees is tinted, moved and cut, by seeds.

Images are in [-1, 1]; a pixel that nothing is moved to is 0, mid grey. Real and fake images of one seed change alike.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvm import noise
from mvm.options import between


def _one_of(u: Tensor, count: int) -> Tensor:
    """Return whole numbers 0 .. count - 1, each for an equal part of u in (0, 1)."""
    return (u * count).floor().long()


def _reach(share: float, size: int) -> int:
    """Return the share of a side in whole pixels, halves up."""
    return int(share * size + 0.5)


def _source(shift: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the index that each pixel of an axis comes from (B, size), and whether it lies on the axis."""
    index = torch.arange(size, device=shift.device) - shift[:, None]
    return index.clamp(0, size - 1), (index >= 0) & (index < size)


class _Move(torch.autograd.Function):
    """Images moved by whole pixels. The gradient moves back, by gathering: a scatter's sums have no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(down, right)
        rows, has_row = _source(down, x.shape[2])
        columns, has_column = _source(right, x.shape[3])
        moved = x.gather(2, rows[:, None, :, None].expand_as(x)).gather(3, columns[:, None, None, :].expand_as(x))
        return moved * (has_row[:, None, :, None] & has_column[:, None, None, :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        down, right = ctx.saved_tensors
        return _Move.apply(grads[0], -down, -right), None, None


def _in_box(u: Tensor, size: int, share: float) -> Tensor:
    """Return whether a pixel of an axis lies in the box (B, size), whose middle is anywhere on it."""
    length = _reach(share, size)
    first = _one_of(u, size + 1 - length % 2) - length // 2
    index = torch.arange(size, device=u.device)
    return (index >= first[:, None]) & (index < first[:, None] + length)


@dataclass(frozen=True)
class Augmentation:
    """augmentation(images (B, C, H, W), seeds (B,)) -> images: a pure function of both, differentiable in the first.

    colour: brightness, saturation, contrast. translate and cutout are shares of a side; 0: none.
    """

    translate: float = 0.125
    colour: bool = True
    cutout: float = 0.0

    def __post_init__(self) -> None:
        between("translate", self.translate, 0, 1)
        between("cutout", self.cutout, 0, 1)

    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        if len(seeds) != len(images):
            raise ValueError(f"there are {len(seeds)} seeds for {len(images)} images; give one seed per image")
        u = noise.uniform(seeds.to(images.device), noise.AUGMENT, (7,))  # all seven, whatever is switched on
        x, (height, width) = images, images.shape[2:]
        if self.colour:
            brightness, saturation, contrast = u[:, :3, None, None, None].to(x.dtype).unbind(1)
            x = x + (brightness - 0.5)
            grey = x.mean(1, keepdim=True)
            x = (x - grey) * (2 * saturation) + grey
            mean = x.mean((1, 2, 3), keepdim=True)
            x = (x - mean) * (contrast + 0.5) + mean
        if self.translate:
            tall, wide = _reach(self.translate, height), _reach(self.translate, width)
            x = _Move.apply(x, _one_of(u[:, 3], 2 * tall + 1) - tall, _one_of(u[:, 4], 2 * wide + 1) - wide)
        if self.cutout:
            rows, columns = _in_box(u[:, 5], height, self.cutout), _in_box(u[:, 6], width, self.cutout)
            x = x * ~(rows[:, None, :, None] & columns[:, None, None, :])
        return x
