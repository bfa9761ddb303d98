"""Two sets on common seeds: nothing between A and A, a true difference told, and intervals that mean something."""

import json

import numpy as np
import pytest
import scipy.stats
import torch

from mvm.data import digits
from mvm.evaluation.evaluate import (
    ComparedSet,
    Comparison,
    Difference,
    Judge,
    block_of,
    compare,
    comparison_table,
    write_comparison,
)
from mvm.evaluation.images import of_model, of_tensor
from mvm.generate import Draw, Sampler
from mvm.metrics.distances import frechet_distance, kernel_leave_one_out, moments, shrunken_features, student_95
from mvm.model import load
from mvm.recipes import SampleConfig

BOTH = ("fd-pixels", "kd-pixels")


def noisy(count, seed, brightness=128.0, side=4):
    """Grey pictures of normal pixels."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 1, side, side, generator=generator) * 30 + brightness).clamp(0, 255).to(torch.uint8)


def compared(a, b, reference, names=BOTH, blocks=10, **options):
    judge = Judge(blocks=blocks, progress=False, **options)
    target = ComparedSet("ref", of_tensor(reference, "ref"))
    return compare(judge, of_tensor(a, "a"), of_tensor(b, "b"), target, names).differences


def test_a_set_and_itself_are_not_told_apart():
    for row in compared(noisy(200, 1), noisy(200, 1), noisy(300, 2)):
        assert (row.difference, row.error, row.low, row.high) == (0, 0, 0, 0)
        assert row.a == row.b
        assert not row.significant


def test_figures_are_those_of_the_sets_alone():
    a, b, reference = noisy(200, 1), noisy(200, 2, 135), noisy(300, 3)
    fd, kd = compared(a, b, reference)
    features = [shrunken_features(images) for images in (a, b, reference)]
    target = moments(features[2])
    assert fd.a == pytest.approx(frechet_distance(moments(features[0]), target), rel=1e-9)
    assert fd.b == pytest.approx(frechet_distance(moments(features[1]), target), rel=1e-9)
    dealt = torch.zeros(200, dtype=torch.int64)
    assert kd.b == pytest.approx(kernel_leave_one_out(features[1].float(), features[2].float(), dealt).value, rel=1e-9)
    assert fd.difference == fd.b - fd.a
    assert fd.low == pytest.approx(fd.difference - student_95(10) * fd.error)
    assert fd.high == pytest.approx(fd.difference + student_95(10) * fd.error)


def test_the_error_is_the_jackknife_of_pairs():
    """Written down once more: block j left out of both sets."""
    a, b, reference = noisy(120, 1), noisy(120, 2, 130), noisy(300, 3)
    (row,) = compared(a, b, reference, ("fd-pixels",), blocks=6)
    dealt, target = block_of(torch.arange(120), 6), moments(shrunken_features(reference))

    def gap(keep):
        left, right = (frechet_distance(moments(shrunken_features(x[keep])), target) for x in (a, b))
        return right - left

    sizes = dealt.bincount().double().numpy()
    left_out, h, whole = np.array([gap(dealt != j) for j in range(6)]), 120 / sizes, gap(dealt >= 0)
    pseudo = h * whole - (h - 1) * left_out
    centre = 6 * whole - ((1 - sizes / 120) * left_out).sum()
    assert row.error == pytest.approx((((pseudo - centre) ** 2 / (h - 1)).sum() / 6) ** 0.5, rel=1e-6)


def test_a_true_difference_is_told_and_its_sign_is_bs():
    a, b, reference = noisy(300, 1), noisy(300, 1, 150), noisy(400, 2)
    for row in compared(a, b, reference, blocks=5):
        assert row.low > 0
        assert row.significant
    for row in compared(b, a, reference, blocks=5):
        assert row.high < 0
        assert row.significant


@pytest.mark.parametrize("name", BOTH)
def test_the_error_is_that_of_drawing_again(name):
    """B is A, brighter: the spread of the difference over many draws, and how often the interval holds the truth."""
    reference, rows = noisy(2000, 999), []
    for seed in range(40):
        a = noisy(100, seed)
        b = (a.int() + 6).clamp(0, 255).to(torch.uint8)
        rows += compared(a, b, reference, (name,))
    gaps, errors = np.array([row.difference for row in rows]), np.array([row.error for row in rows])
    ratio = (errors**2).mean() ** 0.5 / gaps.std(ddof=1)
    assert 0.7 < ratio < 1.5
    covered = np.mean([row.low <= gaps.mean() <= row.high for row in rows])
    assert covered >= 0.85


def test_what_pairs_share_cancels():
    """The same difference between sets of other seeds has a larger error."""
    reference, a, b = noisy(2000, 999), noisy(300, 1), noisy(300, 2)
    brighter = [(x.int() + 2).clamp(0, 255).to(torch.uint8) for x in (a, b)]
    (paired,), (apart,) = (compared(a, other, reference, ("fd-pixels",)) for other in brighter)
    assert 1.5 * paired.error < apart.error


def test_unequal_numbers_are_refused():
    with pytest.raises(ValueError, match="there are 100 and 90 images; pairs are needed"):
        compared(noisy(100, 1), noisy(90, 2), noisy(100, 3))


def test_more_blocks_than_pairs_are_refused():
    with pytest.raises(ValueError, match="20 blocks of 19 images leave some empty"):
        compared(noisy(19, 1), noisy(19, 1), noisy(100, 2), blocks=20)
    assert not any(row.significant for row in compared(noisy(20, 1), noisy(20, 1), noisy(100, 2), blocks=20))


@pytest.mark.parametrize("sides", [(16, 32, 16), (16, 16, 32)])
def test_other_shapes_are_refused(sides):
    a, b, reference = (noisy(100, seed, side=side) for seed, side in enumerate(sides))
    with pytest.raises(ValueError, match="16x16"):
        compared(a, b, reference)


# ---- models


@pytest.fixture(scope="module")
def model():
    return load("digits")


def sampled(model, **settings):
    return of_model(Sampler(model), Draw(120, batch=60), SampleConfig(**settings))


def test_settings_of_a_model_are_told_apart(model):
    reference = ComparedSet("digits", of_tensor(digits("train").images, "digits"))
    judge = Judge(blocks=8, progress=False)
    (row,) = compare(judge, sampled(model, nfe=1), sampled(model, nfe=12), reference, ("fd-pixels",)).differences
    assert row.significant
    assert row.difference < 0
    (same,) = compare(judge, sampled(model, nfe=3), sampled(model, nfe=3), reference, ("fd-pixels",)).differences
    assert (same.difference, same.low, same.high) == (0, 0, 0)


# ---- telling


ROWS = [Difference("fid", 3.25, 3.0, -0.25, 0.05, -0.348, -0.152), Difference("kid", 1.0, 1.5, 0.5, 0.5, -0.48, 1.48)]


def test_the_table():
    assert comparison_table(ROWS).splitlines() == [
        "| figure | A | B | B - A | 95 % interval | |",
        "|---|---|---|---|---|---|",
        "| fid | 3.25 | 3 | -0.25 | -0.348 to -0.152 | differs |",
        "| kid | 1 | 1.5 | +0.5 | -0.48 to +1.48 | no significant difference |",
    ]


def test_the_file(tmp_path):
    write_comparison(tmp_path / "x.json", Comparison(ROWS, {"a": {"name": "run"}}))
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["a"] == {"name": "run"}
    assert [row["differs"] for row in found["differences"]] == [True, False]
    assert found["differences"][0] == {**ROWS[0]._asdict(), "differs": True}


@pytest.mark.parametrize("blocks", [*range(2, 11), 20, 100])
def test_intervals_are_students(blocks):
    assert student_95(blocks) == pytest.approx(scipy.stats.t.ppf(0.975, blocks - 1), abs=0.01)
