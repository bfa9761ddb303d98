"""Augmentation that does not leak into samples (Karras et al. 2022, EDM, appendix F.2): an input of the network.

Each of five transformations is drawn with one probability: up-down flip, size, rotation, stretch, translation. What was
drawn is eight numbers, zero for what was not; they make the warp, and the network gets the very same. In sampling it
gets none, and draws images as they were.

For a stretch 2^(0.2 n) in direction r EDM gives n (cos r, sin r), which it also gives for the opposite, -n in
direction r + pi. Here it is n (cos 2r, sin 2r): the same for what is the same, and for nothing else. EDM stretches
along the axes half of the time; here every direction is as likely.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from mvm import noise
from mvm.data.loader import send
from mvm.pixels import GREY_SCALE

# Of standard normals, as EDM has them: binary orders of magnitude, and shares of the side.
SIZE, STRETCH, SHIFT = 0.2, 0.2, 0.125
# Which of the five transformations each of the eight numbers belongs to.
PARTS = (0, 1, 2, 2, 3, 3, 4, 4)
AUGMENT_SIZE = len(PARTS)


def augmentation(seeds: Tensor, chance: float) -> Tensor:
    """Return what is done to each image (B, 8), float32: flipped, size, cos - 1, sin, stretch's two, right, down.

    Each transformation by its own chance; the flip then by a coin's toss, as in EDM. Zeros: nothing is done.
    """
    u = noise.uniform(seeds, noise.WARP, (8,))  # each draw has its place, whatever the chance
    size, stretch, right, down = noise.normal(seeds, noise.WARP_NORMAL, (4,), torch.float64).unbind(1)
    coin, angle, doubled = u[:, 5] < 0.5, math.pi * (2 * u[:, 6] - 1), 2 * math.pi * u[:, 7]
    turned = (torch.cos(angle) - 1, torch.sin(angle))
    stretched = (stretch * torch.cos(doubled), stretch * torch.sin(doubled))
    drawn = torch.stack((coin, size, *turned, *stretched, right, down), dim=1)
    return torch.where((u[:, :5] < chance)[:, PARTS], drawn, 0).float()


def sources(parameters: Tensor) -> Tensor:
    """Return the maps (B, 2, 3), float64, from a place of the warped image to where its content comes from.

    Places are (right, down) from the middle, in half sides. An image is flipped, scaled, turned counter-clockwise,
    stretched by s along a line and by 1/s across it, and moved; the map undoes that from the last to the first.
    """
    flipped, size, cosine, sine, along, across, right, down = parameters.double().unbind(1)
    length, angle = torch.hypot(along, across), torch.atan2(across, along) / 2
    line = torch.stack((torch.cos(angle), torch.sin(angle)), dim=1)
    onto = line[:, :, None] * line[:, None]  # the projection onto the line
    s = torch.exp2(STRETCH * length)[:, None, None]
    unstretch = onto / s + (torch.eye(2) - onto) * s
    cosine = 1 + cosine
    unturn = torch.stack((cosine, -sine, sine, cosine), dim=1).unflatten(1, (2, 2))
    unflip = torch.stack((torch.ones_like(flipped), 1 - 2 * flipped), dim=1)[:, :, None]
    linear = unflip * torch.exp2(-SIZE * size)[:, None, None] * unturn @ unstretch
    moved = 2 * SHIFT * torch.stack((right, down), dim=1)[:, :, None]
    return torch.cat((linear, -linear @ moved), dim=2)


def spreads(linear: Tensor) -> Tensor:
    """Return two vectors (B, 2, 2), in pixels of the source, by which the samples of a pixel lie apart.

    A pixel of the warped image covers a square of the source that the map has stretched by its singular values. Where
    one exceeds 1, two samples that lie e to either side add what a box of its width is wider than a pixel: in variance
    e^2 = (value^2 - 1)/12. Where none does, samples coincide, and interpolation alone is at work.
    """
    axes, values, _ = torch.linalg.svd(linear)
    return (axes * torch.sqrt((values**2 - 1).clamp(min=0) / 12)[:, None]).mT


def warp(images: Tensor, parameters: Tensor) -> Tensor:
    """Return float32 images (B, C, S, S) of 0 to 255 warped by parameters (B, 8), mirrored beyond their edges.

    Four samples a pixel, each by cubic interpolation: exact for flips, quarter turns and moves by whole pixels. Where
    an image shrinks the four lie apart, so that what becomes too fine is averaged, not aliased. (EDM goes by wavelets
    to twice the side and back.)
    """
    side, where = images.shape[-1], sources(parameters)
    first, second = (2 / side * spreads(where[..., :2])).unbind(1)
    apart = torch.stack((first + second, first - second, second - first, -first - second))  # (4, B, 2)
    where, apart = send(where.float(), images.device)[:, None, None], send(apart.float(), images.device)
    middle = (2 * torch.arange(side, device=images.device) + 1) / side - 1
    right, down = middle[:, None], middle[:, None, None]
    places = where[..., 0] * right + where[..., 1] * down + where[..., 2]  # (B, S, S, 2)
    each = (places + offset[:, None, None] for offset in apart)
    seen = [grid_sample(images, at, "bicubic", "reflection", align_corners=False) for at in each]
    return torch.stack(seen).mean(0).clamp(0, 2 * GREY_SCALE)  # cubic interpolation overshoots


def augmented(images: Tensor, parameters: Tensor) -> Tensor:
    """Return uint8 images as float32 of 0 to 255, each warped by its parameters; where nothing is, exactly as it was.

    parameters are on the CPU: to know there which images to warp, nobody waits for a GPU.
    """
    values, which = images.float(), parameters.any(1).nonzero()[:, 0]
    if not len(which):
        return values
    places = send(which, images.device)
    return values.index_copy(0, places, warp(values[places], parameters[which]))
