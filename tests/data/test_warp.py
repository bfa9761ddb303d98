"""Augmentation: what is drawn, that it is told as it is done, and the warp against exact answers."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch.nn.functional import avg_pool2d

from mvm import noise
from mvm.data import AUGMENT_SIZE, augmentation, augmented
from mvm.data.augment import sources, spreads, warp
from mvm.latent import Pixels

NAMES = ("flipped", "size", "cos", "sin", "along", "across", "right", "down")
QUARTER = {"cos": -1.0, "sin": 1.0}


def told(count=1, **numbers):
    assert set(numbers) <= set(NAMES)
    return torch.tensor([numbers.get(name, 0.0) for name in NAMES]).expand(count, AUGMENT_SIZE)


def pictures(count=3, channels=3, side=8):
    draw = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=draw)


def mirrored_outside(images, width):
    """The images with so many pixels around them, mirrored at the edges."""
    return torch.from_numpy(np.pad(images.numpy(), ((0, 0), (0, 0), (width, width), (width, width)), "symmetric"))


def assert_warped(images, numbers, want, atol=2e-3):
    torch.testing.assert_close(warp(images.float(), told(len(images), **numbers)), want.float(), rtol=0, atol=atol)


# The warp


@pytest.mark.parametrize("side", [8, 9, 32])
def test_flips_and_quarter_turns(side):
    images = pictures(side=side)
    assert_warped(images, {"flipped": 1}, images.flip(2))
    assert_warped(images, QUARTER, torch.rot90(images, 1, (2, 3)))
    assert_warped(images, {"cos": -1, "sin": -1}, torch.rot90(images, -1, (2, 3)))
    assert_warped(images, {"cos": -2}, images.flip(2, 3))
    assert_warped(images, {"flipped": 1, "cos": -2}, images.flip(3))


@pytest.mark.parametrize(("right", "down"), [(1, 0), (0, -3), (2, 5), (-7, 4)])
@pytest.mark.parametrize("side", [8, 12])
def test_moves_by_whole_pixels(side, right, down):
    """0.125 of the side for each unit; beyond the edges lies the mirrored image."""
    images = pictures(side=side)
    around = mirrored_outside(images, side)
    want = around[:, :, side - down : 2 * side - down, side - right : 2 * side - right]
    assert_warped(images, {"right": right * 8 / side, "down": down * 8 / side}, want)


def test_an_image_is_flipped_then_turned_then_moved():
    images = pictures()
    turned = mirrored_outside(torch.rot90(images.flip(2), 1, (2, 3)), 8)
    assert_warped(images, {"flipped": 1, **QUARTER, "right": 2, "down": 1}, turned[:, :, 7:15, 6:14])


@pytest.mark.parametrize("side", [8, 16])
def test_half_the_size_is_the_mean_of_two_by_two(side):
    """2^(0.2 * -5) = 1/2: the four samples of a pixel then lie on the four pixels that it covers."""
    images = pictures(side=side)
    want = avg_pool2d(mirrored_outside(images, side // 2).float(), 2)
    assert_warped(images, {"size": -5}, want)


def test_a_stretch_is_s_along_its_line_and_the_inverse_across():
    """Twice as wide and half as high: rows are averaged in pairs; columns 3 and 4 come from 3.25 and 3.75 of eight."""
    images = pictures(side=8)
    seen = warp(images.float(), told(3, along=5))
    rows = mirrored_outside(images, 8).float()[:, :, 4:20].unflatten(2, (8, 2)).mean(3)[:, :, :, 8:16]
    for column, place in zip((3, 4), (3.25, 3.75), strict=True):
        want = sum(cubic(place - k) * rows[:, :, :, k] for k in range(1, 7))
        torch.testing.assert_close(seen[:, :, :, column], want.clamp(0, 255), rtol=0, atol=2e-3)


def cubic(x, a=-0.75):
    """Keys' kernel with torch's a."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def by_hand(flipped, n_size, angle, n_stretch, direction, right, down):
    """The map of content from before to after as 3x3 matrices, y downwards, each transformation by its definition."""
    turn = lambda a: np.array([[np.cos(a), np.sin(a), 0], [-np.sin(a), np.cos(a), 0], [0, 0, 1]])  # noqa: E731
    s = 2 ** (0.2 * n_stretch)
    stretch = turn(-direction) @ np.diag([s, 1 / s, 1]) @ turn(direction)
    move = np.array([[1, 0, 0.25 * right], [0, 1, 0.25 * down], [0, 0, 1]])
    size = np.diag([2 ** (0.2 * n_size), 2 ** (0.2 * n_size), 1])
    return move @ stretch @ turn(angle) @ size @ np.diag([1, 1 - 2 * flipped, 1])


DRAWN = [(1, 0.7, 2.1, -1.3, 0.6, 0.4, -1.1), (0, -1.2, -0.4, 0.9, -2.0, 0.0, 0.3), (1, 0.0, 3.0, 2.0, 1.5, -0.2, 0.0)]


def numbers_of(flipped, n_size, angle, n_stretch, direction, right, down):
    twice = 2 * direction
    turned = (math.cos(angle) - 1, math.sin(angle))
    stretched = (n_stretch * math.cos(twice), n_stretch * math.sin(twice))
    return torch.tensor([[flipped, n_size, *turned, *stretched, right, down]], dtype=torch.float64)


@pytest.mark.parametrize("drawn", DRAWN)
def test_sources_undo_what_was_done(drawn):
    want = np.linalg.inv(by_hand(*drawn))[:2]
    assert np.abs(sources(numbers_of(*drawn))[0].numpy() - want).max() < 1e-12


@pytest.mark.parametrize("drawn", DRAWN)
def test_a_slope_is_where_it_was_moved_to(drawn):
    """f(after) = f(before): torch's cubic misses a slope by (2a + 1) x (1 - x) (1 - 2x), 0.0482 of a pixel at most."""
    side, slope = 64, (40.0, -30.0)
    near = 0.0482 * 2 / side * (40 + 30)
    middle = (2 * torch.arange(side) + 1) / side - 1
    image = 127 + slope[0] * middle[None, :] + slope[1] * middle[:, None]
    seen = warp(image[None, None], numbers_of(*drawn).float())[0, 0]
    inverse = np.linalg.inv(by_hand(*drawn))
    inside = 0
    for row, column in itertools.product(range(0, side, 5), repeat=2):
        x, y, _ = inverse @ (float(middle[column]), float(middle[row]), 1)
        if max(abs(x), abs(y)) < 0.9:  # no mirror image near
            assert float(seen[row, column]) == pytest.approx(127 + slope[0] * x + slope[1] * y, abs=near)
            inside += 1
    assert inside > 40


def test_one_stretch_is_told_in_one_way():
    """A direction and its opposite are the same line; to stretch along it is to shrink across it."""
    drawn = [(0, 0, 0, n, r, 0, 0) for n, r in ((1.5, 0.4), (1.5, 0.4 + math.pi), (-1.5, 0.4 + math.pi / 2))]
    numbers = torch.cat([numbers_of(*each) for each in drawn])
    assert torch.allclose(numbers, numbers[:1].expand(3, -1), atol=1e-12)
    assert np.allclose(by_hand(*drawn[0]), by_hand(*drawn[2]))


def test_samples_lie_apart_only_where_an_image_shrinks():
    """By the variance that a box of the map's width has more than a pixel: (s^2 - 1)/12 along each axis."""
    angle = torch.tensor(0.3, dtype=torch.float64)
    axes = torch.stack((angle.cos(), angle.sin(), -angle.sin(), angle.cos())).reshape(2, 2)  # rows
    other = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    linear = axes.T @ torch.diag(torch.tensor([1.7, 0.6], dtype=torch.float64)) @ other
    apart = spreads(linear[None])[0]
    covariance = apart.T @ apart
    want = (1.7**2 - 1) / 12 * torch.outer(axes[0], axes[0])
    assert torch.allclose(covariance, want, atol=1e-12)
    assert float(spreads(other[None]).abs().max()) < 1e-7


def test_values_stay_between_black_and_white():
    """Cubic interpolation overshoots at edges; the codec's range is kept."""
    images = (255 * (pictures() > 127)).to(torch.uint8)
    seen = augmented(images, told(3, right=0.4, down=0.3))
    assert (float(seen.min()), float(seen.max())) == (0.0, 255.0)
    encoded = Pixels((3, 8, 8), 2.0).encode(seen)
    assert (float(encoded.min()), float(encoded.max())) == (-2.0, 2.0)


# What is drawn


@pytest.mark.parametrize("chance", [0.12, 0.5, 1.0])
def test_each_transformation_comes_as_often_as_asked(chance):
    count = 20_000
    drawn = augmentation(torch.arange(count), chance)
    assert drawn.shape == (count, AUGMENT_SIZE)
    applied = drawn != 0
    for place, share in enumerate((chance / 2, *[chance] * 7)):  # the flip by a coin's toss besides
        assert float(applied[:, place].double().mean()) == pytest.approx(share, abs=4 * math.sqrt(share / count))
    for one, other in ((2, 3), (4, 5), (6, 7)):  # numbers of one transformation come together
        assert torch.equal(applied[:, one], applied[:, other])
    for one, other in itertools.combinations((1, 2, 4, 6), 2):  # others without regard to each other
        both = float((applied[:, one] & applied[:, other]).double().mean())
        assert both == pytest.approx(chance**2, abs=4 * chance / math.sqrt(count))


def test_what_is_drawn_has_its_law():
    flipped, size, cos, sin, along, across, right, down = augmentation(torch.arange(20_000), 1.0).double().unbind(1)
    assert set(flipped.tolist()) == {0.0, 1.0}
    for normal in (size, right, down):
        assert kstest(normal.numpy(), "norm").pvalue > 1e-3
    assert kstest(torch.hypot(along, across).numpy(), "halfnorm").pvalue > 1e-3
    uniform = ("uniform", (-math.pi, 2 * math.pi))
    assert kstest(torch.atan2(sin, 1 + cos).numpy(), *uniform).pvalue > 1e-3
    assert kstest(torch.atan2(across, along).numpy(), *uniform).pvalue > 1e-3
    table = torch.stack((size, right, down, sin, along, across)).numpy()
    assert np.abs(np.corrcoef(table) - np.eye(6)).max() < 0.04


def test_a_smaller_chance_draws_less_of_the_same():
    seeds = torch.arange(2000)
    few, many = augmentation(seeds, 0.2), augmentation(seeds, 0.6)
    assert torch.equal(few, torch.where(few != 0, many, 0))
    assert int((few != 0).sum()) < int((many != 0).sum())
    assert torch.count_nonzero(augmentation(seeds, 0.0)) == 0


def test_it_is_decided_by_the_seed_alone():
    seeds = noise.derive(3, torch.arange(40))
    images, drawn = pictures(40), augmentation(seeds, 0.3)
    together = augmented(images, drawn)
    for place in range(40):
        assert torch.equal(augmentation(seeds[place, None], 0.3)[0], drawn[place])
        assert torch.equal(augmented(images[place, None], drawn[place, None])[0], together[place])


def test_an_image_that_drew_nothing_is_bit_equal():
    images, drawn = pictures(60), augmentation(torch.arange(60), 0.15)
    untouched = ~drawn.any(1)
    assert 10 < int(untouched.sum()) < 50
    seen = augmented(images, drawn)
    assert torch.equal(seen[untouched], images[untouched].float())
    assert not any(torch.equal(a, b.float()) for a, b in zip(seen[~untouched], images[~untouched], strict=True))
    assert torch.equal(Pixels((3, 8, 8)).encode(seen)[untouched], Pixels((3, 8, 8)).encode(images)[untouched])
    assert torch.equal(augmented(images, torch.zeros(60, AUGMENT_SIZE)), images.float())
