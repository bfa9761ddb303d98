"""Differentiable augmentation: pixel by pixel by loops, by seeds alone, and with the right gradient."""

import math

import numpy as np
import pytest
import torch

from mvm import noise
from mvm.objective.adversarial import augmented


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 - 1


def augmented_by_hand(image, u, translate, colour, cutout):
    """One image (C, H, W) by loops over its pixels, from its seven uniforms."""
    channels, height, width = image.shape
    x = image.copy()
    if colour:
        x = x + (u[0] - 0.5)
        grey = x.sum(0, keepdims=True) / channels
        x = grey + 2 * u[1] * (x - grey)
        mean = x.sum() / x.size
        x = mean + (0.5 + u[2]) * (x - mean)
    if translate:
        tall, wide = math.floor(translate * height + 0.5), math.floor(translate * width + 0.5)
        down, right = math.floor(u[3] * (2 * tall + 1)) - tall, math.floor(u[4] * (2 * wide + 1)) - wide
        moved = np.zeros_like(x)
        for i in range(height):
            for j in range(width):
                if 0 <= i + down < height and 0 <= j + right < width:
                    moved[:, i + down, j + right] = x[:, i, j]
        x = moved
    if cutout:
        tall, wide = math.floor(cutout * height + 0.5), math.floor(cutout * width + 0.5)
        top = math.floor(u[5] * (height + 1 - tall % 2)) - tall // 2
        left = math.floor(u[6] * (width + 1 - wide % 2)) - wide // 2
        for i in range(top, top + tall):
            for j in range(left, left + wide):
                if 0 <= i < height and 0 <= j < width:
                    x[:, i, j] = 0
    return x


ALL = {"translate": 0.25, "colour": True, "cutout": 0.5}


@pytest.mark.parametrize(
    "change", [(0.125, True, 0), (0.25, False, 0), (0, True, 0), (0, False, 0.5), tuple(ALL.values())]
)
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 6, 11)])
def test_augmentation_equals_loops(change, shape):
    images, seeds = draw(40, *shape, dtype=torch.float64), torch.arange(40)
    u = noise.uniform(seeds, noise.AUGMENT, (7,)).numpy()
    want = np.stack([augmented_by_hand(x, row, *change) for x, row in zip(images.numpy(), u, strict=True)])
    found = augmented(images, seeds, *change)
    assert np.allclose(found.numpy(), want, rtol=0, atol=1e-14)
    assert not torch.equal(found, images)


def test_translation_reaches_an_eighth_each_way_and_all_shifts_are_equally_likely():
    picture = torch.zeros(3000, 1, 16, 16)
    picture[:, :, 8, 8] = 1
    moved = augmented(picture, torch.arange(3000), colour=False)
    rows, columns = moved[:, 0].amax(2).argmax(1), moved[:, 0].amax(1).argmax(1)
    for places in (rows, columns):
        counts = torch.bincount(places, minlength=16)
        assert counts.nonzero()[:, 0].tolist() == [6, 7, 8, 9, 10]
        assert (counts[6:11] - 600).abs().max() < 5 * math.sqrt(3000 * 0.2 * 0.8)


def test_augmentation_belongs_to_seeds_alone():
    images, seeds = draw(4, 3, 8, 8), torch.tensor([5, 7, 7, 9])
    state = torch.get_rng_state()
    found = augmented(images, seeds, **ALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, augmented(images, seeds, **ALL))
    assert torch.equal(found.flip(0), augmented(images.flip(0), seeds.flip(0), **ALL))
    assert torch.equal(found[1:3], augmented(images[1:3], seeds[1:3], **ALL))
    assert torch.equal(augmented(images[1:2].expand(2, -1, -1, -1), seeds[1:3], **ALL)[0], found[1])
    assert not torch.equal(augmented(images, seeds + 1, **ALL), found)


def test_augmentation_is_differentiable():
    images = draw(3, 2, 4, 5, dtype=torch.float64).requires_grad_()
    seeds = torch.tensor([1, 2, 3])
    assert not torch.equal(augmented(images, seeds, 0.25, False), images)
    assert torch.autograd.gradcheck(lambda x: augmented(x, seeds, **ALL), (images,))
    assert torch.autograd.gradgradcheck(lambda x: augmented(x, seeds, **ALL) ** 2, (images,))


def test_nothing_is_done_when_nothing_is_asked():
    images = draw(2, 3, 4, 4)
    assert augmented(images, torch.arange(2), 0, False, 0) is images


def test_augmentation_refuses_too_few_seeds():
    with pytest.raises(ValueError, match="1 seeds for 2 images"):
        augmented(draw(2, 3, 4, 4), torch.arange(1))
