"""Which figures there are and what they need; bias and jackknife against brute force."""

import inspect
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from mvm.metrics import distances as metrics
from mvm.metrics import measures
from mvm.metrics.distances import (
    LeaveOneOut,
    frechet_distance,
    jackknife_error,
    moments,
    paired_difference,
    sampling_bias,
)
from mvm.metrics.measures import MEASURES, Figure, Gathered, Key, feature_keys, figures, parse_metrics
from mvm.metrics.moments import SPATIAL, Accumulator, Moments, load_moments, save_moments

POOL, PIXELS = Key("inception", "pool"), Key("pixels", "pool")


def draw(count, d, seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, d, generator=generator, dtype=torch.float64) + shift


def gathered(features, key, blocks=1):
    """Features of one key as `Judge.gather` returns them."""
    found = Gathered(len(features))
    for part in features.tensor_split(blocks):
        accumulator = Accumulator(features.shape[1])
        accumulator.add(part)
        found.blocks.setdefault(key, []).append(accumulator)
    found.features[key] = features.float()
    return found


# ---- names


def test_names_are_parsed_once_each_in_order():
    assert parse_metrics(" kid, fid,kid ,,") == ("kid", "fid")
    with pytest.raises(ValueError, match=r"metrics='fidd'.*'fid'.*fid, sfid, kid"):
        parse_metrics("fid,fidd")
    with pytest.raises(ValueError, match=r"--metrics ', ' names none; allowed: fid"):
        parse_metrics(", ")


def test_what_each_figure_needs():
    assert feature_keys(["fid", "sfid"]) == {POOL: False, Key("inception", "spatial"): False}
    assert feature_keys(["fid", "kid"]) == feature_keys(["kid", "fid"]) == {POOL: True}
    assert feature_keys(["fd-pixels", "kd-dino"]) == {PIXELS: False, Key("dino", "pool"): True}
    assert [name for name, measure in MEASURES.items() if measure.alone and not measure.paired] == ["is"]
    assert [name for name, measure in MEASURES.items() if measure.paired] == ["psnr", "ssim", "lpips", "lpips-vgg"]
    assert {name for name, measure in MEASURES.items() if not measure.paired} == {
        "fid", "sfid", "kid", "precision", "recall", "density", "coverage", "is",
        "fd-dino", "kd-dino", "fd-clip", "kd-clip", "fd-effnet", "kd-effnet", "fd-pixels", "kd-pixels",
    }  # fmt: skip


# ---- figures


def test_figures_are_those_of_the_metrics():
    x, y = draw(60, 4, 1), draw(70, 4, 2, 0.5)
    a, b = gathered(x, POOL), gathered(y, POOL)
    found = figures(["recall", "fid", "kid", "density"], a, b, kid_size=20)
    assert list(found) == ["recall", "fid", "kid", "density"]
    x, y = x.float(), y.float()
    assert found["recall"].value == metrics.precision_recall(y, x, 3).recall
    assert found["density"].value == metrics.density_coverage(y, x, 5).density
    assert found["kid"].value == metrics.kernel_distance(x, y, 100, 20).mean
    assert found["fid"] == Figure(frechet_distance(a.moments(POOL), b.moments(POOL)), None, "")
    swapped = figures(["precision"], b, a)["precision"].value
    assert swapped == found["recall"].value  # so the reference is the real side


def test_kid_takes_no_more_than_there_are():
    a, b = gathered(draw(12, 3, 1), PIXELS), gathered(draw(30, 3, 2), PIXELS)
    found = figures(["kd-pixels"], a, b)["kd-pixels"]
    assert "100 subsets of 12" in found.note
    assert found.value == metrics.kernel_distance(a.features[PIXELS], b.features[PIXELS], 100, 12).mean


def test_the_inception_score_needs_no_reference():
    key = Key("inception", "probabilities")
    p = torch.softmax(draw(50, 6, 1), 1)
    found = figures(["is"], gathered(p, key), Gathered())["is"]
    assert (found.value, found.error) == metrics.inception_score(p.float(), 10)


def test_blocks_together_are_the_whole_and_give_an_error():
    x, y = draw(200, 4, 1), draw(300, 4, 2, 0.3)
    whole = figures(["fd-pixels"], gathered(x, PIXELS), gathered(y, PIXELS))["fd-pixels"]
    dealt = figures(["fd-pixels"], gathered(x, PIXELS, 10), gathered(y, PIXELS))["fd-pixels"]
    assert whole.error is None
    assert dealt.value == pytest.approx(whole.value, rel=1e-12)
    target = moments(y)
    left = [frechet_distance(moments(torch.cat((x[:i], x[i + 20 :]))), target) for i in range(0, 200, 20)]
    textbook = (9 / 10 * ((np.array(left) - np.mean(left)) ** 2).sum()) ** 0.5
    assert dealt.error == pytest.approx(textbook, rel=1e-8)
    assert "jackknife over 10 blocks" in dealt.note


def test_moments_are_merged_once():
    found = gathered(draw(40, 3, 1), PIXELS, 4)
    assert found.moments(PIXELS) is found.moments(PIXELS)
    assert found.moments(PIXELS).count == 40


def test_published_defaults():
    assert (measures.KID_SUBSETS, measures.KID_SIZE, measures.SPLITS) == (100, 1000, 10)
    assert inspect.signature(figures).parameters["kid_size"].default == 1000


# ---- jackknife of unequal blocks


def test_parts_of_an_error_give_that_of_a_difference():
    """As if the blocks had been left out of both sets at once, sizes of blocks being what they are."""
    draws, sizes = np.random.default_rng(2), [3, 8, 20, 9, 14, 6]
    bounds = np.cumsum([0, *sizes])
    x = draws.normal(size=60)
    sides = []
    for y in (x, np.exp(0.3 * x) + 0.1 * draws.normal(size=60)):
        left = [float(np.delete(y, np.s_[a:b]).var()) for a, b in pairwise(bounds)]
        sides.append(LeaveOneOut(float(y.var()), left))
    a, b = (jackknife_error(*side, sizes) for side in sides)
    want = paired_difference(*sides, sizes).error
    assert np.linalg.norm(np.subtract(b.parts, a.parts)) == pytest.approx(want, rel=1e-12)
    assert want != pytest.approx(math.hypot(a.error, b.error), rel=0.05)


def test_jackknife_of_unequal_blocks_covers_the_error_of_a_mean():
    """The mean squared estimate over many draws is the variance, whatever the sizes of the blocks."""
    draws, sizes = np.random.default_rng(1), [3, 8, 20, 9, 14, 6]
    bounds = np.cumsum([0, *sizes])
    squares = []
    for _ in range(400):
        x = draws.normal(size=60)
        left = [np.delete(x, np.s_[a:b]).mean() for a, b in pairwise(bounds)]
        squares.append(jackknife_error(float(x.mean()), left, sizes).error ** 2)
    assert np.mean(squares) == pytest.approx(1 / 60, rel=0.1)


# ---- bias of few samples


def gaussian(values, seed, count):
    """Moments of samples of a Gaussian with these eigenvalues."""
    return moments(draw(count, len(values), seed) * values.sqrt())


def test_distance_of_two_sampled_gaussians_is_the_closed_form_and_the_bias():
    """|m|^2 + sum (s1 - s2)^2; what is above it falls as 1/N."""
    a, b = torch.tensor([4.0, 1.0, 0.25]).double(), torch.tensor([1.0, 1.0, 2.25]).double()
    want = 0.5**2 * 3 + 1 + 0 + 1
    shifted = moments(draw(400_000, 3, 1) * a.sqrt() + 0.5)
    assert frechet_distance(shifted, gaussian(b, 2, 400_000)) == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("count", [200, 800])
def test_bias_is_the_mean_excess_over_many_draws(count):
    """A known Gaussian against samples of itself: the distance is all bias."""
    values = torch.tensor([3.0, 1.0, 0.5, 0.1, 0.01], dtype=torch.float64)
    truth = Moments(torch.zeros(5).double(), torch.diag(values), 0)
    found = np.array([frechet_distance(truth, gaussian(values, seed, count)) for seed in range(3000)])
    error = found.std() / len(found) ** 0.5
    bias = sampling_bias(truth.covariance, count)
    slack = 4 * error + bias * 5 / count  # of the draws, and of the next order
    assert abs(found.mean() - bias) < slack < 0.08 * bias


def test_bias_in_one_dimension_by_hand():
    """l/n for the mean, l/(2n) for the deviation."""
    assert sampling_bias(torch.tensor([[4.0]]), 10) == pytest.approx(0.4 + 0.2, rel=1e-12)


def test_bias_does_not_see_a_turn_and_dead_directions_add_nothing():
    values = torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)
    turn = torch.linalg.qr(draw(3, 3, 1))[0]
    want = sampling_bias(torch.diag(values), 50)
    assert sampling_bias(turn @ torch.diag(values) @ turn.T, 50) == pytest.approx(want, rel=1e-10)
    dead = torch.diag(torch.cat((values, torch.zeros(2).double())))
    assert sampling_bias(dead, 50) == pytest.approx(want, rel=1e-10)
    assert sampling_bias(torch.diag(values), 100) == pytest.approx(want / 2, rel=1e-12)


# ---- files of two pairs


def test_spatial_moments_are_beside_the_others(tmp_path):
    pool, spatial = moments(draw(30, 4, 1)), moments(draw(30, 3, 2))
    save_moments(tmp_path / "x.npz", pool, {"network": {"name": "n"}}, spatial=spatial)
    for suffix, want in (("", pool), (SPATIAL, spatial)):
        found = load_moments(tmp_path / "x.npz", suffix=suffix)
        assert torch.equal(found.moments.mean, want.mean)
        assert torch.equal(found.moments.covariance, want.covariance)
        assert found.moments.count == 30
        assert found.provenance == {"network": {"name": "n"}}
    with np.load(tmp_path / "x.npz") as archive:
        assert sorted(archive.files) == ["count", "mu", "mu_s", "provenance", "sigma", "sigma_s"]
    save_moments(tmp_path / "y.npz", pool, {})
    with pytest.raises(ValueError, match="but not mu_s, sigma_s"):
        load_moments(tmp_path / "y.npz", suffix=SPATIAL)


# ---- a second implementation


def test_torchmetrics_agrees():
    fid = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is not installed")
    x, y = draw(200, 8, 1), draw(300, 8, 2, 0.4)
    a, b = moments(x), moments(y)
    want = fid._compute_fid(a.mean, a.covariance, b.mean, b.covariance)
    assert frechet_distance(a, b) == pytest.approx(float(want), rel=1e-6)
