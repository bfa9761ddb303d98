"""Metrics against scipy, scikit-learn, closed forms and points placed by hand."""

import inspect

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import polynomial_kernel
from sklearn.neighbors import NearestNeighbors

from mvm.data import digits
from mvm.metrics import distances as metrics
from mvm.metrics.distances import (
    Moments,
    density_coverage,
    frechet_distance,
    inception_score,
    jackknife,
    jackknife_frechet,
    kernel_distance,
    moments,
    pixel_features,
    precision_recall,
    shrunken_features,
)
from mvm.metrics.moments import Accumulator, random_blocks


def draw(count, d, seed, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return torch.randn(count, d, generator=generator, dtype=torch.float64) @ mix * scale + shift


def accumulate_blocks(features, blocks, seed=0):
    """Accumulators of features dealt into random blocks."""
    parts = []
    for rows in random_blocks(len(features), blocks, seed):
        parts.append(Accumulator(features.shape[1]))
        parts[-1].add(features[rows])
    return parts


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


def test_shrunken_features():
    """Means of 2x2 pixels of a 16x16 image; smaller images stay as they are."""
    images = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    images[0, 0, 0, 1] = 255
    found = shrunken_features(images)
    assert found.shape == (1, 64)
    assert found[0, :2].tolist() == pytest.approx([-0.5, -1.0])
    assert shrunken_features(images[..., :4, :4]).shape == (1, 16)


# Frechet distance: singular and rounded covariances


@settings(max_examples=25, deadline=None)
@given(data=st.data(), d=st.integers(1, 6))
def test_commuting_gaussians(data, d):
    """sum (m1 - m2)^2 + (s1 - s2)^2 in a common eigenbasis, any of the deviations zero."""
    numbers = st.lists(st.floats(0, 10).map(lambda x: round(x, 3)), min_size=d, max_size=d)
    s1, s2, m1, m2 = (torch.tensor(data.draw(numbers), dtype=torch.float64) for _ in range(4))
    turn = torch.linalg.qr(draw(d, d, data.draw(st.integers(0, 9))))[0]
    a, b = (Moments(turn @ m, turn @ torch.diag(s**2) @ turn.T, 9) for m, s in ((m1, s1), (m2, s2)))
    want = float(((m1 - m2) ** 2 + (s1 - s2) ** 2).sum())
    assert frechet_distance(a, b) == pytest.approx(want, rel=1e-9, abs=1e-5)  # the root of a rounded 0 is 1e-7


def test_one_dimension_is_by_hand():
    a, b = (Moments(torch.tensor([m]).double(), torch.tensor([[v]]).double(), 9) for m, v in ((1.0, 4.0), (4.0, 25.0)))
    assert frechet_distance(a, b) == pytest.approx(9 + 9, rel=1e-14)


def test_fewer_samples_than_dimensions():
    """Exact from the samples: tr (C1 C2)^1/2 is the nuclear norm of X Y^T / sqrt((n-1)(m-1)), X, Y centred."""
    x, y = draw(20, 60, 1), draw(30, 60, 2, 1.3, 0.2)
    xc, yc = x - x.mean(0), y - y.mean(0)
    cross = torch.linalg.svdvals(xc @ yc.T).sum() / (19 * 29) ** 0.5
    gap = ((x.mean(0) - y.mean(0)) ** 2).sum()
    want = float(gap + xc.square().sum() / 19 + yc.square().sum() / 29 - 2 * cross)
    a, b = moments(x), moments(y)
    assert frechet_distance(a, b) == pytest.approx(want, rel=1e-6)
    assert frechet_distance(b, a) == pytest.approx(want, rel=1e-6)


def test_tiny_negative_eigenvalues_count_as_zero():
    """Covariances of float32 files have eigenvalues like -1e-10; their roots must be 0, not NaN or 1e-5."""
    turn = torch.linalg.qr(draw(3, 3, 4))[0]
    mean = torch.zeros(3, dtype=torch.float64)
    a, b = (
        Moments(mean, turn @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ turn.T, 9)
        for values in ([4.0, 1.0, -1e-10], [1.0, 9.0, 4.0])
    )
    assert frechet_distance(a, b) == pytest.approx(1 + 4 + 4, abs=1e-6)
    assert frechet_distance(b, a) == pytest.approx(1 + 4 + 4, abs=1e-6)


# kernel distance


def kernel_distance_by_sklearn(a, b, subsets, size, seed):
    draws, found = np.random.RandomState(seed), []
    for _ in range(subsets):
        x = a[draws.choice(len(a), size, replace=False)]
        y = b[draws.choice(len(b), size, replace=False)]
        kxx, kyy, kxy = (polynomial_kernel(u, v, degree=3, coef0=1) for u, v in ((x, x), (y, y), (x, y)))
        off = ~np.eye(size, dtype=bool)
        found.append(kxx[off].mean() + kyy[off].mean() - 2 * kxy.mean())
    return np.mean(found), np.std(found)


@pytest.mark.parametrize("tile", [7, 2048])
def test_kernel_distance_equals_sklearn(monkeypatch, tile):
    monkeypatch.setattr(metrics, "TILE", tile)
    a, b = draw(90, 5, 1), draw(70, 5, 2, 0.7, 0.4)
    found = kernel_distance(a.float(), b.float(), subsets=6, size=40)
    want = kernel_distance_by_sklearn(a.float().double().numpy(), b.float().double().numpy(), 6, 40, 2020)
    assert found == pytest.approx(want, rel=1e-10)
    assert kernel_distance(a, b, 6, 40, seed=1) == pytest.approx(
        kernel_distance_by_sklearn(a.numpy(), b.numpy(), 6, 40, 1), rel=1e-10
    )


@pytest.mark.parametrize(
    ("metric", "want"),
    [
        (kernel_distance, {"subsets": 100, "size": 1000, "seed": 2020}),
        (precision_recall, {"k": 3}),
        (density_coverage, {"k": 5}),
        (inception_score, {"splits": 10, "seed": 2020}),
    ],
)
def test_defaults_are_those_of_published_figures(metric, want):
    options = inspect.signature(metric).parameters
    assert {name: options[name].default for name in want} == want


def test_kernel_distance_by_hand():
    """d = 1, sets {0, 1} and {2, 3}: k(x, y) = (x y + 1)^3; 1 + 343 - (1 + 1 + 27 + 64) / 2."""
    found = kernel_distance(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]]), subsets=3, size=2)
    assert found == pytest.approx((1 + 343 - 93 / 2, 0), rel=1e-14)


def test_kernel_distance_is_unbiased():
    """Zero on average for one law, also with few samples; the biased estimate would be far above."""
    x = draw(4000, 3, 5)
    found = kernel_distance(x[:2000], x[2000:], subsets=400, size=20)
    assert abs(found.mean) < 4 * found.std / 400**0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [({"size": 31}, "30 and 40 features; at least 31"), ({"size": 1}, "size=1"), ({"subsets": 0}, "subsets=0")],
)
def test_kernel_distance_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        kernel_distance(draw(30, 2, 1), draw(40, 2, 2), **{"size": 10, **options})


# neighbours: precision, recall, density, coverage


def neighbours_by_sklearn(real, fake, k):
    """Return d(fake, real), radii of real, radii of fake."""
    radii = [NearestNeighbors(n_neighbors=k + 1).fit(x).kneighbors(x)[0][:, k] for x in (real, fake)]
    distance, index = NearestNeighbors(n_neighbors=len(real)).fit(real).kneighbors(fake)
    table = np.empty_like(distance)
    np.put_along_axis(table, index, distance, 1)
    return table, *radii


@pytest.mark.parametrize("tile", [16, 2048])
@pytest.mark.parametrize(("n", "m", "d", "k"), [(80, 60, 3, 3), (40, 90, 8, 1), (33, 17, 2, 5)])
def test_neighbour_metrics_equal_sklearn(monkeypatch, tile, n, m, d, k):
    monkeypatch.setattr(metrics, "TILE", tile)
    real, fake = draw(n, d, 1), draw(m, d, 2, 0.8, 0.3)
    table, real_radii, fake_radii = neighbours_by_sklearn(real.numpy(), fake.numpy(), k)
    pr, dc = precision_recall(real, fake, k), density_coverage(real, fake, k)
    assert pr.precision == pytest.approx((table <= real_radii).any(1).mean(), abs=1e-12)
    assert pr.recall == pytest.approx((fake_radii >= table.T).any(1).mean(), abs=1e-12)
    assert dc.density == pytest.approx((table < real_radii).sum(1).mean() / k, abs=1e-12)
    assert dc.coverage == pytest.approx((table.min(0) < real_radii).mean(), abs=1e-12)
    assert 0 < pr.precision != pr.recall < 1


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_neighbours_by_hand(shift):
    """k = 1, real radii 1, 1, 2, 9 at 0, 1, 3, 12; fakes 0.5, 2.9, 5, 22 have 2.1, 2.1, 2.1, 17.

    Fake 5 lies at distance 2 from real 3: in the closed ball, not the open one. 2.9 is inside one ball, 0.5 in two;
    12's ball reaches 3..21, so it holds 5 and not 22. Real 0, 1, 3 are near 0.5, 2.9; 12 is in 22's ball.
    """
    real, fake = column(0, 1, 3, 12) + shift, column(0.5, 2.9, 5, 22) + shift
    # balls by fake: 0.5 -> {0, 1}; 2.9 -> {3}; 5 -> {3 (edge), 12}; 22 -> {}
    assert precision_recall(real, fake, 1) == (0.75, 1.0)
    assert density_coverage(real, fake, 1) == ((2 + 1 + 1 + 0) / 4, 1.0)
    # without 5 only 22's neighbour changes; 12 is then covered by none
    far = column(0.5, 2.9, 22) + shift
    assert density_coverage(real, far, 1) == (1.0, 0.75)
    # a fake on the very edge of 3's ball: closed balls hold it, open ones do not
    edge = column(5, 40) + shift
    assert precision_recall(real[:3], edge, 1) == (0.5, 1.0)
    assert density_coverage(real[:3], edge, 1) == (0.0, 0.0)


def test_recall_is_precision_with_sides_swapped():
    real, fake = draw(40, 2, 1), draw(30, 2, 2, 0.4)
    found, swapped = precision_recall(real, fake), precision_recall(fake, real)
    assert (found.precision, found.recall) == (swapped.recall, swapped.precision)
    assert found.precision != found.recall


@pytest.mark.parametrize("shift", [0.0, 1e5])
@pytest.mark.parametrize("tile", [9, 2048])
def test_a_set_with_itself(monkeypatch, tile, shift):
    """Every k-th neighbour is a tie: out of the open ball, whatever rounding does; so density is (k + 1 - 1) / k."""
    monkeypatch.setattr(metrics, "TILE", tile)
    x = draw(50, 20, 1) + shift
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert precision_recall(x, x[order], 3) == (1, 1)
    assert density_coverage(x, x[order], 5) == (1, 1)


def test_repeated_points_have_radius_zero():
    """A model that copies one point: closed balls of radius 0 hold it, open ones hold nothing."""
    x = torch.full((6, 3), 0.1)
    assert precision_recall(x, x[:4], 3) == (1, 1)
    assert density_coverage(x, x[:4], 3) == (0, 0)
    assert precision_recall(x, x[:4] + 1e-3, 3) == (0, 0)


def test_an_outlier_does_not_blur_the_rest():
    """Ties are judged by each pair's own size, though one feature is 1e9 away."""
    real = column(0, 1, 2)
    assert precision_recall(real, column(3.00001, 50, 1e9), 1).precision == 0
    assert precision_recall(real, column(2.99999, 50, 1e9), 1).precision == pytest.approx(1 / 3)
    assert density_coverage(real, column(1.5, 50, 1e9), 1) == pytest.approx((2 / 3, 2 / 3))


def test_nothing_in_common():
    real, fake = draw(20, 3, 1), draw(20, 3, 1) + 1e4
    assert precision_recall(real, fake) == (0, 0)
    assert density_coverage(real, fake) == (0, 0)


@pytest.mark.parametrize("metric", [precision_recall, density_coverage])
def test_neighbour_metrics_refuse(metric):
    x = draw(10, 3, 1)
    with pytest.raises(ValueError, match="k=0"):
        metric(x, x, 0)
    with pytest.raises(ValueError, match="10 and 4 features; at least 5"):
        metric(x, x[:4], 4)
    with pytest.raises(ValueError, match=r"\(10, 3\) and \(10, 2\)"):
        metric(x, x[:, :2], 2)
    for a, b in ((x, x.clone().fill_(torch.nan)), (x / 0, x)):
        with pytest.raises(ValueError, match="NaN or infinity"):
            metric(a, b, 2)


# inception score


def inception_score_by_scipy(p, splits):
    found = [np.exp(np.mean([scipy.stats.entropy(row, q.mean(0)) for row in q])) for q in np.array_split(p, splits)]
    return np.mean(found), np.std(found)


def test_inception_score_equals_scipy():
    p = draw(60, 7, 1).softmax(1)
    assert inception_score(p, 4, seed=None) == pytest.approx(inception_score_by_scipy(p.numpy(), 4), rel=1e-12)
    order = np.random.RandomState(2020).permutation(60)
    assert inception_score(p) == pytest.approx(inception_score_by_scipy(p.numpy()[order], 10), rel=1e-12)
    other = np.random.RandomState(5).permutation(60)
    assert inception_score(p, 3, 5) == pytest.approx(inception_score_by_scipy(p.numpy()[other], 3), rel=1e-12)


def test_inception_score_splits_unequally():
    """Bounds i N // splits: 11 rows in 4 splits are 2, 3, 3, 3."""
    p = draw(11, 3, 2).softmax(1).numpy()
    want = [inception_score_by_scipy(p[a:b], 1)[0] for a, b in ((0, 2), (2, 5), (5, 8), (8, 11))]
    found = inception_score(torch.from_numpy(p), 4, seed=None)
    assert found == pytest.approx((np.mean(want), np.std(want)), rel=1e-12)


def test_inception_score_closed_forms():
    """Certain and even over K classes: K. The same row everywhere: 1. In order of class, unshuffled: 1 per split."""
    even = torch.eye(5).repeat_interleave(20, 0)
    assert inception_score(even, 1) == pytest.approx((5, 0), rel=1e-14)
    assert inception_score(even, 5, seed=None) == pytest.approx((1, 0), rel=1e-14)
    assert inception_score(even, 5).mean > 3.5
    assert inception_score(torch.tensor([[0.2, 0.3, 0.5]]).expand(10, 3), 2) == pytest.approx((1, 0), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inception_score_takes_half_precision(dtype):
    p = draw(60, 1000, 1).div(30).softmax(1)
    assert inception_score(p.to(dtype), 2).mean == pytest.approx(inception_score(p, 2).mean, rel=0.02)


@pytest.mark.parametrize(
    ("p", "splits", "words"),
    [
        (torch.eye(3), 4, "splits=4"),
        (torch.eye(3), 0, "splits=0"),
        (torch.ones(3), 1, r"shape \(3,\)"),
        (torch.tensor([[3.0, -2.0]]), 1, "softmax"),
        (torch.tensor([[0.5, 0.6]]), 1, "softmax"),
        (torch.tensor([[1.0, 0.0], [torch.nan, 1.0]]), 1, "softmax"),
    ],
)
def test_inception_score_refuses(p, splits, words):
    with pytest.raises(ValueError, match=words):
        inception_score(p, splits)


# standard errors


def test_jackknife_of_a_mean():
    """Left out one at a time the error of a mean is s / sqrt(n), and there is no bias."""
    x = draw(40, 1, 1)
    found = jackknife(lambda z: float(z.mean()), x, blocks=40)
    assert found.value == float(x.mean())
    assert found.corrected == pytest.approx(found.value, rel=1e-12)
    assert found.error == pytest.approx(float(x.std()) / 40**0.5, rel=1e-10)


def test_jackknife_of_blocks():
    """Equal blocks: the error of a mean is that of the block means; no metric sees a block twice."""
    x = draw(60, 1, 2)
    means = np.array([float(x[rows].mean()) for rows in random_blocks(60, 6, 3)])
    found = jackknife(lambda z: float(z.mean()), x, blocks=6, seed=3)
    assert found.error == pytest.approx(means.std(ddof=1) / 6**0.5, rel=1e-10)
    assert jackknife(lambda z: float(z.mean()), x, blocks=6, seed=4).error != found.error


def test_jackknife_takes_off_bias():
    """The 1/n variance is biased; corrected it is the 1/(n-1) variance, exactly."""
    x = draw(30, 1, 3)
    found = jackknife(lambda z: float(z.var(correction=0)), x, blocks=30)
    assert found.corrected == pytest.approx(float(x.var()), rel=1e-10)


def test_jackknife_of_unequal_blocks():
    """Textbook formula by leaving out, blocks of 3, 2, 2 of 7: value sum w left_out, worked out here from scratch."""
    x = draw(7, 1, 4).square()
    rows = random_blocks(7, 3, 0)
    assert [len(part) for part in rows] == [3, 2, 2]
    left = [float(np.delete(x.numpy(), part.numpy(), 0).max()) for part in rows]
    value, sizes = float(x.max()), (3, 2, 2)
    corrected = 3 * value - sum((1 - m / 7) * v for m, v in zip(sizes, left, strict=True))
    squares = [
        ((7 / m) * value - (7 / m - 1) * v - corrected) ** 2 / (7 / m - 1) for m, v in zip(sizes, left, strict=True)
    ]
    found = jackknife(lambda z: float(z.max()), x, 3)
    assert found[:3] == pytest.approx((value, corrected, (sum(squares) / 3) ** 0.5))
    assert np.square(found.parts) == pytest.approx(np.array(squares) / 3)


def test_jackknife_keeps_the_order_of_rows():
    x = column(*range(9))
    seen = []
    jackknife(lambda z: seen.append(z[:, 0].tolist()) or 0.0, x, 3)
    assert all(rows == sorted(rows) for rows in seen)
    assert sorted(len(rows) for rows in seen) == [6, 6, 6, 9]


def test_jackknife_frechet_equals_leaving_out_features():
    """Downdated moments give what recomputing from the features gives."""
    x, reference = draw(130, 6, 1, 1.0, 50.0), moments(draw(200, 6, 2, 0.7, 50.4))
    direct = jackknife(lambda z: frechet_distance(moments(z), reference), x, blocks=7, seed=1)
    found = jackknife_frechet(accumulate_blocks(x, 7, seed=1), reference)
    assert found[:3] == pytest.approx(direct[:3], rel=1e-8)
    assert found.parts == pytest.approx(direct.parts, rel=1e-7)
    assert found.value == pytest.approx(frechet_distance(moments(x), reference), rel=1e-10)


def test_jackknife_frechet_error_is_the_spread_over_draws():
    """Against the standard deviation over 60 independent sets; a jackknife of 20 blocks is good to a sixth or so."""
    reference = Moments(torch.zeros(4).double(), torch.eye(4).double(), 0)
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randn(500, 4, generator=generator, dtype=torch.float64) * 1.2 + 0.3 for _ in range(60)]
    values = [frechet_distance(reference, moments(x)) for x in sets]
    errors = [jackknife_frechet(accumulate_blocks(x, 20), reference).error for x in sets[:20]]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values, ddof=1), rel=0.25)


def test_jackknife_frechet_takes_off_bias():
    """For one law the plain figure is above zero by its bias; corrected, it is mostly gone."""
    reference = Moments(torch.zeros(8).double(), torch.eye(8).double(), 0)
    generator = torch.Generator().manual_seed(1)
    sets = [torch.randn(400, 8, generator=generator, dtype=torch.float64) for _ in range(20)]
    found = [jackknife_frechet(accumulate_blocks(x, 10), reference) for x in sets]
    assert abs(np.mean([each.corrected for each in found])) < 0.2 * np.mean([each.value for each in found])


def test_jackknife_refuses():
    x = draw(5, 2, 1)
    with pytest.raises(ValueError, match="blocks=6"):
        jackknife(lambda z: 0.0, x, 6)
    parts = accumulate_blocks(x, 2)
    with pytest.raises(ValueError, match=r"parts hold \[3\]"):
        jackknife_frechet(parts[:1], moments(x))
    with pytest.raises(ValueError, match=r"parts hold \[3, 0\]"):
        jackknife_frechet([parts[0], Accumulator(2)], moments(x))
    with pytest.raises(ValueError, match="features have 3 and 2 dimensions"):
        jackknife_frechet(parts, moments(draw(9, 3, 1)))


def test_kernel_distances_without_each_block():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(37, 5, generator=draw), torch.randn(29, 5, generator=draw) + 0.2
    dealt = torch.arange(37) % 4
    found = metrics.kernel_leave_one_out(a, b, dealt)

    def plain(x):
        """Every pair, one by one."""
        k = lambda u, v: float((u.double() @ v.double() / 5 + 1) ** 3)  # noqa: E731
        within = sum(k(u, v) for i, u in enumerate(x) for j, v in enumerate(x) if i != j) / (len(x) * (len(x) - 1))
        theirs = sum(k(u, v) for i, u in enumerate(b) for j, v in enumerate(b) if i != j) / (29 * 28)
        return within + theirs - 2 * sum(k(u, v) for u in x for v in b) / (len(x) * 29)

    assert found.value == pytest.approx(plain(a), abs=1e-12)
    for block, value in enumerate(found.left_out):
        assert value == pytest.approx(plain(a[dealt != block]), abs=1e-12)
