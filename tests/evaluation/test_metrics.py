"""Metrics against scipy and closed forms."""

import numpy as np
import pytest
import scipy.linalg
import torch

from mvm.data import digits
from mvm.evaluation.metrics import Moments, frechet_distance, moments, pixel_features


def draw(count, d, seed, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return torch.randn(count, d, generator=generator, dtype=torch.float64) @ mix * scale + shift


def by_sqrtm(a, b):
    ca, cb = a.covariance.numpy(), b.covariance.numpy()
    root = scipy.linalg.sqrtm(ca @ cb)
    gap = a.mean.numpy() - b.mean.numpy()
    return float(gap @ gap + np.trace(ca) + np.trace(cb) - 2 * np.trace(root).real)


@pytest.mark.parametrize("d", [1, 2, 7, 30])
def test_frechet_distance_equals_sqrtm(d):
    a, b = moments(draw(200, d, 1)), moments(draw(300, d, 2, 0.7, 0.4))
    assert frechet_distance(a, b) == pytest.approx(by_sqrtm(a, b), rel=1e-9)


@pytest.mark.filterwarnings("ignore:Matrix is singular")
def test_frechet_distance_of_digits_equals_sqrtm():
    """Some corner pixels never vary: the covariance is singular, where sqrtm itself is only good to 1e-6."""
    a, b = (moments(pixel_features(digits(split).images)) for split in ("train", "held-out"))
    assert frechet_distance(a, b) == pytest.approx(by_sqrtm(a, b), rel=1e-5)


def test_closed_form_of_commuting_gaussians():
    """|m1 - m2|^2 + sum (s1 - s2)^2 in a common eigenbasis."""
    turn = torch.linalg.qr(draw(4, 4, 3))[0]
    s1, s2 = torch.tensor([1.0, 2, 0.5, 0], dtype=torch.float64), torch.tensor([3.0, 0.1, 0.5, 2], dtype=torch.float64)
    m1, m2 = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, -2, 0, 0.5], dtype=torch.float64)
    a = Moments(m1, turn @ torch.diag(s1**2) @ turn.T, 10)
    b = Moments(m2, turn @ torch.diag(s2**2) @ turn.T, 10)
    want = 5.25 + 4 + 1.9**2 + 0 + 4
    assert frechet_distance(a, b) == pytest.approx(want, rel=1e-7)  # a singular covariance: roots of rounding


def test_closed_form_of_two_gaussians_in_the_plane():
    """tr (C1^1/2 C2 C1^1/2)^1/2 = sqrt(tr(C1 C2) + 2 sqrt(det C1 det C2)) in two dimensions."""
    c1 = torch.tensor([[2.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
    c2 = torch.tensor([[0.4, -0.2], [-0.2, 1.5]], dtype=torch.float64)
    cross = torch.sqrt((c1 @ c2).trace() + 2 * torch.sqrt(torch.det(c1) * torch.det(c2)))
    a, b = Moments(torch.zeros(2).double(), c1, 5), Moments(torch.ones(2).double(), c2, 5)
    assert frechet_distance(a, b) == pytest.approx(float(2 + c1.trace() + c2.trace() - 2 * cross), rel=1e-12)


def test_symmetric():
    a, b = moments(draw(50, 6, 1)), moments(draw(80, 6, 2, 2.0))
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-10)


@pytest.mark.parametrize("features", [draw(100, 6, 1), draw(3, 6, 1), torch.ones(5, 6).double()])
def test_zero_on_itself(features):
    """Also where the covariance is singular."""
    a = moments(features)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6 * (1 + float(a.covariance.trace())))


def test_shift_by_a_constant():
    x = draw(100, 5, 1)
    assert frechet_distance(moments(x), moments(x + 0.5)) == pytest.approx(5 * 0.25, abs=1e-8)


def test_moments_equal_numpy():
    x = draw(40, 3, 1, 1.0, 5.0).float()
    found = moments(x)
    assert found.mean.dtype == torch.float64
    assert found.mean.numpy() == pytest.approx(x.double().numpy().mean(0))
    assert found.covariance.numpy() == pytest.approx(np.cov(x.double().numpy(), rowvar=False))
    assert found.count == 40


@pytest.mark.parametrize("shape", [(5,), (1, 3), (0, 3), (4, 3, 2)])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match="features have shape"):
        moments(torch.zeros(shape))


def test_moments_of_other_dimensions_do_not_mix():
    with pytest.raises((ValueError, RuntimeError)):
        frechet_distance(moments(draw(9, 3, 1)), moments(draw(9, 4, 1)))


def test_pixel_features():
    images = torch.tensor([[[[0, 255], [51, 204]]]], dtype=torch.uint8)
    assert pixel_features(images).tolist() == [pytest.approx([-1.0, 1.0, -0.6, 0.6])]
    assert pixel_features(digits().images).shape == (1797, 64)
