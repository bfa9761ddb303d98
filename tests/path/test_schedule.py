"""Schedules: closed forms of docs/reference/notation.md, inverses, rates by autograd, the reverse SDE's noise rate."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, schedule_named
from mvm.path.schedule import like

ALL = [MeanVelocity(), MeanVelocity(2.5), MeanVelocity(0.1), LinearFlow(), VariancePreserving()]
VP = [VariancePreserving(), VariancePreserving(0.5, 3.0), VariancePreserving(4.0, 4.0)]
PARTS = [1e-9, 1e-6, 1e-3, 0.01, 0.0563, 0.25, 0.5, 0.609, 0.9, 0.999, 1 - 1e-6, 1 - 1e-9]


@pytest.mark.parametrize("T", [1.0, 2.5, 0.1])
@pytest.mark.parametrize("part", [0.0, *PARTS, 1.0])
def test_mean_velocity_closed_form(T, part):
    s = MeanVelocity(T)
    assert s.end == T
    assert float(s.alpha(part * T)) == pytest.approx(1 - part, rel=1e-12, abs=1e-15)
    assert float(s.sigma(part * T)) == pytest.approx(math.sqrt(part), rel=1e-12)
    if 0 < part < 1 - 1e-8:
        assert float(s.lam(part * T)) == pytest.approx(math.log((1 - part) / math.sqrt(part)), rel=1e-8)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_linear_flow_closed_form(t):
    assert float(LinearFlow().alpha(t)) == 1 - t
    assert float(LinearFlow().sigma(t)) == t
    assert LinearFlow().end == 1


@pytest.mark.parametrize("s", VP, ids=str)
def test_variance_preserving_closed_form(s):
    for t in (0.0, 1e-4, 0.3, 1.0):
        b = s.beta_min * t + (s.beta_max - s.beta_min) * t * t / 2
        assert float(s.alpha(t)) == pytest.approx(math.exp(-b / 2), rel=1e-13)
        assert float(s.sigma(t)) == pytest.approx(math.sqrt(1 - math.exp(-b)), rel=1e-9)
        assert float(s.alpha(t) ** 2 + s.sigma(t) ** 2) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("s", [*ALL, *VP[1:]], ids=str)
@pytest.mark.parametrize("part", [0.0, *PARTS, 1.0])
def test_lam_inverts_both_ways(s, part):
    t = part * s.end
    lam = s.lam(t)
    assert float(s.t_from_lam(lam)) == pytest.approx(t, rel=1e-9, abs=1e-300)
    if 1e-6 < part < 1 - 1e-6:
        assert float(lam) == pytest.approx(math.log(float(s.alpha(t)) / float(s.sigma(t))), rel=1e-9, abs=1e-9)
        assert float(s.lam(s.t_from_lam(lam))) == pytest.approx(float(lam), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("s", [*ALL, *VP[1:]], ids=str)
def test_lam_at_the_ends(s):
    assert float(s.lam(0.0)) == math.inf
    assert float(s.t_from_lam(math.inf)) == 0
    # pure noise, or the nearest the schedule comes to it: t_from_lam is clipped to [0, end]
    assert float(s.t_from_lam(-math.inf)) == pytest.approx(s.end)
    assert float(s.t_from_lam(-300.0)) == pytest.approx(s.end)
    assert 0 <= float(s.t_from_lam(300.0)) < 1e-100


@settings(max_examples=60, deadline=None)
@given(st.floats(-12, 12), st.floats(0.05, 20))
def test_mean_velocity_time_of_any_lam(lam, T):
    t = float(MeanVelocity(T).t_from_lam(lam))
    r = math.exp(lam)
    root = (-r + math.sqrt(r * r + 4)) / 2  # solves (1 - t)/sqrt(t) = r: the path of paper section 3.1.1
    assert 0 <= t <= T
    assert math.sqrt(t / T) == pytest.approx(root, rel=1e-5)
    # without the cancellation of the printed form
    assert math.sqrt(t / T) == pytest.approx(2 / (r + math.sqrt(r * r + 4)), rel=1e-12)


@pytest.mark.parametrize("s", [*ALL, *VP[1:]], ids=str)
def test_rates_are_derivatives(s):
    t = (torch.tensor(PARTS[2:-2], dtype=torch.float64) * s.end).requires_grad_()
    for value, rate in ((s.alpha, s.alpha_rate), (s.sigma, s.sigma_rate)):
        (want,) = torch.autograd.grad(value(t).sum(), t)
        torch.testing.assert_close(rate(t.detach()), want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("s", [*ALL, *VP[1:]], ids=str)
def test_rate_of_lam_and_monotone(s):
    t = torch.linspace(0, 1, 200, dtype=torch.float64)[1:-1] * s.end
    assert bool((s.lam(t).diff() < 0).all())
    assert bool((s.alpha(t).diff() < 0).all())
    assert bool((s.sigma(t).diff() > 0).all())


@pytest.mark.parametrize("T", [1.0, 2.5])
def test_level_on_mean_velocity_is_sqrt_t(T):
    part = torch.tensor([0.0, *PARTS, 1.0], dtype=torch.float64)
    torch.testing.assert_close(MeanVelocity(T).level(part * T), part.sqrt(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("s", ALL, ids=str)
def test_level_is_the_equal_snr_root(s):
    t = torch.tensor(PARTS, dtype=torch.float64) * s.end
    level = s.level(t)
    torch.testing.assert_close(torch.log((1 - level**2) / level), s.lam(t), rtol=1e-5, atol=1e-5)
    assert float(s.level(0.0)) == 0
    assert float(s.level(s.end)) == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("T", [1.0, 2.5, 0.1])
def test_diffusion_on_mean_velocity_is_one_over_T(T):
    t = torch.tensor([*PARTS, 1.0], dtype=torch.float64) * T
    torch.testing.assert_close(MeanVelocity(T).diffusion(t), torch.full_like(t, 1 / T), rtol=1e-9, atol=0)


@pytest.mark.parametrize("s", [*ALL, *VP[1:]], ids=str)
def test_diffusion_general_formula(s):
    t = (torch.linspace(0.02, 0.98, 40, dtype=torch.float64) * s.end).requires_grad_()
    (slope,) = torch.autograd.grad(s.lam(t).sum(), t)
    t = t.detach()
    r = s.alpha(t) / s.sigma(t)
    m = ((-r + torch.sqrt(r**2 + 4)) / 2) ** 2
    want = -2 * s.sigma(t) ** 2 * slope * (1 - m) / (1 + m)
    torch.testing.assert_close(s.diffusion(t), want, rtol=1e-6, atol=1e-9)


def test_diffusion_at_pure_noise_is_finite():
    # linear flow at t = 1: (1-m)/alpha -> level/sigma = 1, m = 1, so 2 * (0 + 1)/2
    assert float(LinearFlow().diffusion(1.0)) == pytest.approx(1)


@pytest.mark.parametrize("s", ALL, ids=str)
def test_norm(s):
    t = torch.linspace(0, 1, 11, dtype=torch.float64) * s.end
    torch.testing.assert_close(s.norm(t), torch.sqrt(s.alpha(t) ** 2 + s.sigma(t) ** 2))


@pytest.mark.parametrize("T", [0.0, -1.0, math.inf, math.nan])
def test_bad_T(T):
    with pytest.raises(ValueError, match="T="):
        MeanVelocity(T)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 2.0), (3.0, 2.0), (math.nan, 1.0), (0.1, math.nan)])
def test_bad_betas(low, high):
    with pytest.raises(ValueError, match="beta_min"):
        VariancePreserving(low, high)


def test_schedule_by_name():
    assert schedule_named("mean-velocity", T=2.0) == MeanVelocity(2.0)
    assert schedule_named("linear-flow") == LinearFlow()
    with pytest.raises(ValueError, match=r"T=2\.0.*schedule='mean-velocity'.*'variance-preserving'"):
        schedule_named("variance-preserving", T=2.0)
    with pytest.raises(ValueError, match="'linear-flow'"):
        schedule_named("linearflow")


def test_like_shapes_and_casts():
    x = torch.zeros(3, 2, 4, 4, dtype=torch.float16)
    assert like(torch.arange(3).double(), x).shape == (3, 1, 1, 1)
    assert like(torch.tensor(0.5, dtype=torch.float64), x).shape == ()
    assert like(torch.arange(3).double(), x).dtype == torch.float16


def test_coefficients_are_float64_whatever_t():
    for t in (0.25, torch.tensor([0.25]), torch.tensor([0.25], dtype=torch.float16)):
        assert MeanVelocity().alpha(t).dtype == torch.float64
        assert float(MeanVelocity().sigma(t)) == 0.5
