"""Laws of t and noising: quantiles, the target's identities, and noise as a function of the seed."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from mvm import noise
from mvm.path import LinearFlow, MeanVelocity, TimeLaw, VariancePreserving, perturb

N = 20_000
SEEDS = torch.arange(N)


def test_uniform_quantiles_of_lam():
    lam = MeanVelocity().lam(TimeLaw().draw(SEEDS, MeanVelocity()))
    got = torch.quantile(lam, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    assert got == pytest.approx([-2.97, -0.35, 1.45], abs=0.06)
    # exactly: lam falls with t, so the 5 % quantile of lam is that of t = 0.95
    exact = [math.log((1 - t) / math.sqrt(t)) for t in (0.95, 0.5, 0.05)]
    assert exact == pytest.approx([-2.97, -0.35, 1.45], abs=0.006)
    t = TimeLaw().quantile(torch.tensor([0.95, 0.5, 0.05], dtype=torch.float64), MeanVelocity())
    assert MeanVelocity().lam(t).tolist() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("T", [1.0, 2.5])
def test_uniform_law(T):
    t = TimeLaw("uniform").draw(SEEDS, MeanVelocity(T))
    assert t.dtype == torch.float64
    assert t.shape == (N,)
    assert kstest((t / T).numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("schedule", [MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving()], ids=str)
def test_lam_normal_moments(schedule):
    lam = schedule.lam(TimeLaw("lam-normal", 0.5, 0.8).draw(SEEDS, schedule)).numpy()
    assert lam.mean() == pytest.approx(0.5, abs=5 * 0.8 / math.sqrt(N))
    assert lam.std() == pytest.approx(0.8, rel=0.03)
    assert kstest(lam, norm(0.5, 0.8).cdf).pvalue > 1e-3


@pytest.mark.parametrize("T", [1.0, 2.5])
def test_logit_normal(T):
    part = (TimeLaw("logit-normal", -0.4, 1.3).draw(SEEDS, MeanVelocity(T)) / T).numpy()
    assert kstest(np.log(part / (1 - part)), norm(-0.4, 1.3).cdf).pvalue > 1e-3


@pytest.mark.parametrize("t_min", [1e-5, 0.25])
@pytest.mark.parametrize("T", [1.0, 2.5])
def test_uniform_law_from_t_min(T, t_min):
    t = TimeLaw("uniform", t_min=t_min).draw(SEEDS, MeanVelocity(T))
    assert kstest(((t / T - t_min) / (1 - t_min)).numpy(), "uniform").pvalue > 1e-3
    ends = TimeLaw("uniform", t_min=t_min).quantile(torch.tensor([0.0, 1.0], dtype=torch.float64), MeanVelocity(T))
    assert ends.tolist() == pytest.approx([t_min * T, T])


def test_uniform_law_from_zero_is_what_it_was_bit_for_bit():
    p = noise.uniform(SEEDS, noise.TIME, (1,))[:, 0]
    assert torch.equal(TimeLaw().draw(SEEDS, MeanVelocity(2.5)), p * 2.5)


def test_lam_uniform_law():
    path = VariancePreserving()
    law = TimeLaw("lam-uniform", t_min=1e-5)
    t = law.draw(SEEDS, path)
    first, last = float(path.lam(1e-5)), float(path.lam(1.0))
    assert kstest(((path.lam(t) - last) / (first - last)).numpy(), "uniform").pvalue > 1e-3
    ends = law.quantile(torch.tensor([0.0, 1.0], dtype=torch.float64), path)
    assert ends.tolist() == pytest.approx([1e-5, 1.0])


@pytest.mark.parametrize("T", [1.0, 2.5])
@pytest.mark.parametrize(
    ("law", "p"),
    [
        (TimeLaw("uniform"), (0.0, 1.0)),
        (TimeLaw("logit-normal"), (0.0, 1.0)),
        (TimeLaw("lam-normal"), (1.0, 0.0)),  # more lam is less noise
        (TimeLaw("lam-normal", std=1e4), (0.9, 0.1)),
    ],
)
def test_no_law_draws_an_end_of_the_path(law, p, T):
    """At 0 and T some targets and weights are infinite; wide laws round to them."""
    ends = law.quantile(torch.tensor(p, dtype=torch.float64), MeanVelocity(T))
    assert ends.tolist() == [T * 2.0**-60, T * (1 - 2.0**-53)]


def test_lam_uniform_needs_two_ends():
    with pytest.raises(ValueError, match=r"path\.law\.t_min=0: lam is infinite there"):
        TimeLaw("lam-uniform")
    with pytest.raises(ValueError, match="lam has no lower end"):
        TimeLaw("lam-uniform", t_min=1e-5).require(LinearFlow())
    with pytest.raises(ValueError, match=r"path\.law\.t_min=-1"):
        TimeLaw(t_min=-1.0)
    with pytest.raises(ValueError, match=r"path\.law\.t_min=0\.1 belongs to uniform, lam-uniform"):
        TimeLaw("logit-normal", t_min=0.1)


@pytest.mark.parametrize("law", ["uniform", "logit-normal", "lam-normal"])
@pytest.mark.parametrize("schedule", [MeanVelocity(), MeanVelocity(2.5), LinearFlow()], ids=str)
def test_dimension_shift_lowers_lam(law, schedule):
    plain = TimeLaw(law, 0.1, 0.9).draw(SEEDS[:500], schedule)
    for dimension in (1024, 4096, 16 * 16 * 768):
        moved = TimeLaw(law, 0.1, 0.9, dimension).draw(SEEDS[:500], schedule)
        by = schedule.lam(plain) - schedule.lam(moved)
        want = math.log(math.sqrt(dimension / 4096))
        torch.testing.assert_close(by, torch.full_like(by, want), rtol=1e-7, atol=1e-7)


def test_a_larger_dimension_means_noisier_times():
    shifted = TimeLaw(shift_dimension=16 * 4096).draw(SEEDS[:500], MeanVelocity())
    assert bool((shifted > TimeLaw().draw(SEEDS[:500], MeanVelocity())).all())


@pytest.mark.parametrize("T", [1.0, 2.5])
def test_target_identity(T):
    x0 = torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, t, u = perturb(x0, SEEDS[:50], MeanVelocity(T), TimeLaw(), "u")
    torch.testing.assert_close(x + t.sqrt().reshape(-1, 1, 1) * u, x0)


def test_target_variance_is_one_plus_t_var():
    x0 = torch.full((N, 4), 2.0, dtype=torch.float64) * noise.normal(SEEDS, 99, (4,), torch.float64)
    _, t, u = perturb(x0, SEEDS, MeanVelocity(), TimeLaw(), "u")
    for low, high in ((0.0, 0.1), (0.45, 0.55), (0.9, 1.0)):
        rows = (t > low) & (t < high)
        assert float(u[rows].var()) == pytest.approx(1 + 4 * (low + high) / 2, rel=0.06)


@pytest.mark.parametrize("schedule", [MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving()], ids=str)
def test_state_and_noise_are_those_of_the_path(schedule):
    x0 = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, t, eps = perturb(x0, SEEDS[:2000], schedule, TimeLaw(), "eps")
    want = schedule.alpha(t)[:, None] * x0 + schedule.sigma(t)[:, None] * eps
    torch.testing.assert_close(x, want)
    assert kstest(eps.flatten().numpy(), "norm").pvalue > 1e-3
    clean = perturb(x0, SEEDS[:2000], schedule, TimeLaw(), "x0")
    assert torch.equal(clean.target, x0)
    assert torch.equal(clean.x, x)


def test_noise_is_a_pure_function_of_the_seed():
    x0 = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0))
    seeds = torch.tensor([3, 1, 4, 15, 92, 65, 35, 89, 79])
    whole = perturb(x0, seeds, MeanVelocity(), TimeLaw(), "u")
    order = torch.tensor([8, 0, 3, 1, 2, 7, 5, 6, 4])
    torch.manual_seed(1)  # torch's own generator plays no part
    for got, want in zip(perturb(x0[order], seeds[order], MeanVelocity(), TimeLaw(), "u"), whole, strict=True):
        assert torch.equal(got, want[order])
    for i in range(9):
        one = perturb(x0[i : i + 1], seeds[i : i + 1], MeanVelocity(), TimeLaw(), "u")
        assert torch.equal(one.x, whole.x[i : i + 1])
        assert torch.equal(one.t, whole.t[i : i + 1])


def test_time_and_noise_of_a_seed_are_independent():
    x0 = torch.zeros(N, 1, dtype=torch.float64)
    _, t, eps = perturb(x0, SEEDS, MeanVelocity(), TimeLaw(), "eps")
    assert abs(float(torch.corrcoef(torch.stack([t, eps[:, 0]]))[0, 1])) < 5 / math.sqrt(N)


def test_dtype_of_the_images_is_kept():
    x0 = torch.zeros(3, 2, dtype=torch.float32)
    x, t, target = perturb(x0, SEEDS[:3], MeanVelocity(), TimeLaw(), "u")
    assert (x.dtype, t.dtype, target.dtype) == (torch.float32, torch.float64, torch.float32)


def test_bad_laws():
    with pytest.raises(ValueError, match="'logit-normal'"):
        TimeLaw("logitnormal")
    with pytest.raises(ValueError, match="std"):
        TimeLaw("lam-normal", 0.0, 0.0)
    with pytest.raises(ValueError, match="std"):
        TimeLaw("lam-normal", 0.0, math.nan)
    with pytest.raises(ValueError, match="shift_dimension"):
        TimeLaw(shift_dimension=-1)
