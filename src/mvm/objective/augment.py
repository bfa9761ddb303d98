"""Differentiable augmentation (Zhao et al. 2020): what a discriminator sees is tinted, moved and cut, by seeds.

Images are in [-1, 1]; a place that no pixel comes to is 0, mid grey. Real and fake images of one seed change alike.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvm import noise
from mvm.options import between


def _brighten(x: Tensor, u: Tensor) -> Tensor:
    """Return x with up to 0.5 added or taken."""
    return x + (u - 0.5)


def _saturate(x: Tensor, u: Tensor) -> Tensor:
    """Return x with its distance from grey multiplied by 0 to 2."""
    grey = x.mean(1, keepdim=True)
    return (x - grey) * (2 * u) + grey


def _contrast(x: Tensor, u: Tensor) -> Tensor:
    """Return x with its distance from its mean multiplied by 0.5 to 1.5."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return (x - mean) * (u + 0.5) + mean


def _one_of(u: Tensor, count: int) -> Tensor:
    """Return whole numbers 0 .. count - 1, each for an equal part of u in (0, 1)."""
    return (u * count).floor().long()


def _come_from(shift: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return for every place of an axis the place its pixel comes from (B, size), and whether there is one."""
    place = torch.arange(size, device=shift.device) - shift[:, None]
    return place.clamp(0, size - 1), (place >= 0) & (place < size)


class _Move(torch.autograd.Function):
    """Images moved by whole pixels. The gradient moves back, by gathering: a scatter's sums have no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(down, right)
        rows, has_row = _come_from(down, x.shape[2])
        columns, has_column = _come_from(right, x.shape[3])
        moved = x.gather(2, rows[:, None, :, None].expand_as(x)).gather(3, columns[:, None, None, :].expand_as(x))
        return moved * (has_row[:, None, :, None] & has_column[:, None, None, :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        down, right = ctx.saved_tensors
        return _Move.apply(grads[0], -down, -right), None, None


def _reach(share: float, size: int) -> int:
    """Return the share of a side in whole pixels, halves up."""
    return int(share * size + 0.5)


def _translate(x: Tensor, u: Tensor, share: float) -> Tensor:
    """Return x moved by up to the share of its sides; u (B, 2)."""
    reaches = (_reach(share, size) for size in x.shape[2:])
    down, right = (_one_of(u[:, axis], 2 * reach + 1) - reach for axis, reach in enumerate(reaches))
    return _Move.apply(x, down, right)


def _in_box(u: Tensor, size: int, share: float) -> Tensor:
    """Return whether a place of an axis lies in the box (B, size), whose middle is anywhere on it."""
    length = _reach(share, size)
    first = _one_of(u, size + 1 - length % 2) - length // 2
    place = torch.arange(size, device=u.device)
    return (place >= first[:, None]) & (place < first[:, None] + length)


def _cut(x: Tensor, u: Tensor, share: float) -> Tensor:
    """Return x without a box of that share of its sides, which may reach over the edge; u (B, 2)."""
    rows, columns = _in_box(u[:, 0], x.shape[2], share), _in_box(u[:, 1], x.shape[3], share)
    return x * ~(rows[:, None, :, None] & columns[:, None, None, :])


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
        u = noise.uniform(
            seeds.to(images.device), noise.AUGMENT, (7,)
        )  # each draw has its place, whatever is switched on
        x = images
        if self.colour:
            tints = u[:, :3, None, None, None].to(x.dtype)
            x = _contrast(_saturate(_brighten(x, tints[:, 0]), tints[:, 1]), tints[:, 2])
        if self.translate:
            x = _translate(x, u[:, 3:5], self.translate)
        if self.cutout:
            x = _cut(x, u[:, 5:7], self.cutout)
        return x
