"""PSNR and SSIM against numbers by hand, loops over windows, and scikit-image's way of computing."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from mvm.metrics.restoration import psnr, ssim


def pictures(count=2, channels=3, height=16, width=19, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


def altered(images, seed=1):
    """The same with noise of some 20 levels, so that the similarity is neither 0 nor 1."""
    shift = torch.randint(-30, 31, images.shape, generator=torch.Generator().manual_seed(seed))
    return (images.int() + shift).clamp(0, 255).to(torch.uint8)


def test_psnr_by_hand():
    """An error of 51 = 255 / 5 everywhere is 20 log10(5) dB; one pixel in twelve wrong by 255 is 10 log10(12) dB."""
    black = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    other = torch.stack((torch.full((3, 2, 2), 51), torch.zeros(3, 2, 2))).to(torch.uint8)
    other[1, 2, 0, 1] = 255
    found = psnr(black, other)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([20 * math.log10(5), 10 * math.log10(12)], rel=1e-14)
    assert torch.equal(psnr(other, black), found)
    assert psnr(black, black).tolist() == [math.inf, math.inf]


def ssim_by_loops(x, y):
    """Wang et al. (2004), window by window, of one plane."""
    place = np.arange(11) - 5
    weight = np.exp(-(place[:, None] ** 2 + place[None, :] ** 2) / (2 * 1.5**2))
    weight /= weight.sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
            mean_a, mean_b = (weight * a).sum(), (weight * b).sum()
            var_a, var_b = (weight * (a - mean_a) ** 2).sum(), (weight * (b - mean_b) ** 2).sum()
            both = (weight * (a - mean_a) * (b - mean_b)).sum()
            top = (2 * mean_a * mean_b + c1) * (2 * both + c2)
            values.append(top / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    return np.mean(values)


def ssim_as_scikit_image(x, y):
    """structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255)."""

    def smooth(plane):
        return gaussian_filter(plane, 1.5, truncate=3.5, mode="reflect")

    mean_x, mean_y = smooth(x), smooth(y)
    var_x, var_y, both = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2, smooth(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    whole = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return whole[5:-5, 5:-5].mean()


@pytest.mark.parametrize("by", [ssim_by_loops, ssim_as_scikit_image])
@pytest.mark.parametrize("channels", [1, 3])
def test_ssim_equals_other_writings(by, channels):
    a = pictures(channels=channels)
    b = altered(a)
    planes = zip(a.double().flatten(0, 1).numpy(), b.double().flatten(0, 1).numpy(), strict=True)
    want = np.array([by(x, y) for x, y in planes]).reshape(2, channels).mean(1)
    found = ssim(a, b)
    assert found.dtype == torch.float64
    assert 0.5 < found.min() < found.max() < 0.99
    assert np.allclose(found.numpy(), want, rtol=0, atol=1e-12)


def test_ssim_of_constants_by_hand():
    """Without structure only the brightness counts: (2 a b + c1) / (a^2 + b^2 + c1)."""
    a, b = torch.full((1, 1, 11, 11), 100, dtype=torch.uint8), torch.full((1, 1, 11, 11), 50, dtype=torch.uint8)
    c1 = 2.55**2
    assert float(ssim(a, b)) == pytest.approx((10_000 + c1) / (12_500 + c1), abs=1e-12)
    assert float(ssim(a, a)) == pytest.approx(1, abs=1e-12)


def test_both_judge_each_image_alone():
    a = pictures(4)
    b = altered(a)
    for measure in (psnr, ssim):
        assert torch.equal(measure(a, b), torch.cat((measure(a[:1], b[:1]), measure(a[1:], b[1:]))))


def test_floats_of_zero_to_one_give_the_same():
    a = pictures()
    b = altered(a)
    for measure in (psnr, ssim):
        assert torch.allclose(measure(a.double() / 255, b.double() / 255), measure(a, b), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.full((1, 1, 11, 11), -0.5), torch.zeros(1, 1, 11, 11), r"lie in \[-0\.5, -0\.5\].*clamp"),
        (torch.full((1, 1, 11, 11), torch.nan), torch.zeros(1, 1, 11, 11), r"lie in \[nan, nan\]"),
        (torch.zeros(1, 1, 11, 11, dtype=torch.int64), torch.zeros(1, 1, 11, 11), "int64; uint8 or floats"),
        (torch.zeros(1, 1, 11, 11), torch.zeros(1, 1, 11, 12), r"\(1, 1, 11, 11\) with \(1, 1, 11, 12\)"),
    ],
)
def test_what_is_no_pair_of_images_is_refused(a, b, message):
    for measure in (psnr, ssim):
        with pytest.raises(ValueError, match=message):
            measure(a, b)


def test_ssim_refuses_images_smaller_than_its_window():
    small = torch.zeros(1, 1, 10, 40, dtype=torch.uint8)
    with pytest.raises(ValueError, match="11 pixels a side or more, not 10x40"):
        ssim(small, small)
