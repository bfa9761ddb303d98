"""Oracles against brute force: quadrature over x0, autograd of the log density, sums over the data."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm

from mvm import noise
from mvm.oracle import finite_data, gaussian, mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving

MEANS, STDS, WEIGHTS = (-1.0, 0.2, 1.5), (0.3, 0.1, 0.5), (1.0, 2.0, 3.0)
SCHEDULES = [MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving()]


def three(labels=None):
    return mixture(
        torch.tensor(MEANS, dtype=torch.float64)[:, None],
        torch.tensor(STDS, dtype=torch.float64),
        torch.tensor(WEIGHTS),
        labels,
    )


def in_plane():
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    return mixture(means, torch.tensor([0.2, 0.4, 0.1, 0.7]), torch.tensor([1.0, 2.0, 1.0, 0.5]))


def prior(x0):
    w = np.array(WEIGHTS) / sum(WEIGHTS)
    return sum(w[k] * norm.pdf(x0, MEANS[k], STDS[k]) for k in range(3))


def brute_force(x, alpha, sigma):
    """(p_t(x), E[x0 | x]) by quadrature over x0."""
    options = {"limit": 400, "epsabs": 1e-13, "epsrel": 1e-11, "points": [*MEANS, min(6, max(-4, x / alpha))]}
    p = quad(lambda x0: prior(x0) * norm.pdf(x, alpha * x0, sigma), -4, 6, **options)[0]
    m = quad(lambda x0: x0 * prior(x0) * norm.pdf(x, alpha * x0, sigma), -4, 6, **options)[0]
    return p, m / p


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("part", [0.02, 0.3, 0.8])
def test_posterior_mean_and_density_by_quadrature(schedule, part):
    t = part * schedule.end
    alpha, sigma = float(schedule.alpha(t)), float(schedule.sigma(t))
    xs = [-1.3, 0.0, 0.4, 2.0]
    x, times = torch.tensor(xs, dtype=torch.float64)[:, None], torch.full((4,), t, dtype=torch.float64)
    got = three().denoise(x, times, schedule)[:, 0]
    density = three().log_density(x, times, schedule).exp()
    want = [brute_force(value, alpha, sigma) for value in xs]
    assert got.tolist() == pytest.approx([m for _, m in want], abs=1e-8)
    assert density.tolist() == pytest.approx([p for p, _ in want], rel=1e-8)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("part", [0.001, 0.2, 0.9, 1.0])
def test_score_is_the_gradient_of_log_density(schedule, part):
    oracle = in_plane()
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    t = torch.full((6,), part * schedule.end, dtype=torch.float64)
    (want,) = torch.autograd.grad(oracle.log_density(x, t, schedule).sum(), x)
    got = oracle.predict("score", x.detach(), t, schedule)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 1.0])
def test_density_integrates_to_one(schedule, part):
    grid = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    t = torch.full_like(grid, part * schedule.end)
    total = torch.trapezoid(three().log_density(grid[:, None], t, schedule).exp(), grid)
    assert float(total) == pytest.approx(1, abs=1e-9)


def test_class_conditions_are_sub_mixtures():
    labels = torch.tensor([4, 9, 4])
    oracle = three(labels)
    stds = torch.tensor([0.3, 0.5], dtype=torch.float64)
    only = mixture(torch.tensor([[-1.0], [1.5]]), stds, torch.tensor([1.0, 3.0]))
    x = torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None]
    t = torch.full((7,), 0.4, dtype=torch.float64)
    s = MeanVelocity()
    four = torch.full((7,), 4)
    torch.testing.assert_close(oracle.denoise(x, t, s, four), only.denoise(x, t, s))
    torch.testing.assert_close(oracle.log_density(x, t, s, four), only.log_density(x, t, s))
    # one Gaussian, in closed form
    variance = 0.6**2 * 0.1**2 + 0.4
    want = 0.2 + 0.6 * 0.1**2 / variance * (x - 0.6 * 0.2)
    torch.testing.assert_close(oracle.denoise(x, t, s, torch.full((7,), 9)), want)
    # conditions may differ from row to row
    mixed = oracle.field(s)(x, t, torch.tensor([4, 9] * 3 + [4]))
    torch.testing.assert_close(mixed[1::2], want[1::2])
    torch.testing.assert_close(mixed[0::2], only.denoise(x, t, s)[0::2])


def test_condition_without_labels_is_refused():
    with pytest.raises(ValueError, match="labels"):
        three().denoise(torch.zeros(1, 1), torch.tensor([0.5]), MeanVelocity(), torch.tensor([0]))


def test_law_of_total_probability_over_classes():
    labels = torch.tensor([0, 1, 1])
    oracle = three(labels)
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    t = torch.full((9,), 0.3, dtype=torch.float64)
    joint = [oracle.log_density(x, t, MeanVelocity(), torch.full((9,), c)) + math.log(w) for c, w in ((0, 1), (1, 5))]
    want = torch.logsumexp(torch.stack(joint), dim=0) - math.log(6)
    torch.testing.assert_close(oracle.log_density(x, t, MeanVelocity()), want)


def points():
    return torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("t", [1e-3, 0.05, 0.5, 0.99])
def test_finite_data_is_the_softmax_over_the_points(t):
    data = points()
    alpha, sigma = 1 - t, math.sqrt(t)
    x = alpha * data[:8] + sigma * noise.normal(torch.arange(8), 0, (5,), torch.float64)
    square = ((x[:, None] - alpha * data[None]) ** 2).sum(-1).numpy() / (2 * t)
    share = np.exp(-square - logsumexp(-square, axis=1, keepdims=True))
    got = finite_data(data).denoise(x, torch.full((8,), t, dtype=torch.float64), MeanVelocity())
    np.testing.assert_allclose(got.numpy(), share @ data.numpy(), atol=1e-9)


@pytest.mark.parametrize("t", [0.0, 1e-300, 1e-16, 1e-9])
def test_finite_data_near_data_returns_the_nearest_point(t):
    data = points()
    times = torch.full((30,), t, dtype=torch.float64)
    oracle = finite_data(data)
    assert torch.equal(oracle.denoise(data, times, MeanVelocity()), data)
    torch.testing.assert_close(oracle.denoise(data + 1e-3, times, MeanVelocity()), data, rtol=0, atol=1e-12)


def test_finite_data_off_the_data_at_zero_is_the_nearest_point():
    """Far from every point at t = 0 the posterior is the nearest one, never NaN."""
    data = torch.randn(20, 100, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    got = finite_data(data).denoise(x, torch.zeros(6, dtype=torch.float64), MeanVelocity())
    torch.testing.assert_close(got, data[torch.cdist(x, data).argmin(1)])


@pytest.mark.parametrize("t", [1 - 1e-12, 1.0])
def test_finite_data_at_noise_returns_the_mean(t):
    x = 3 * torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = finite_data(points()).denoise(x, torch.full((4,), t, dtype=torch.float64), MeanVelocity())
    torch.testing.assert_close(got, points().mean(0).expand(4, 5), rtol=0, atol=1e-10)


def test_times_may_differ_in_a_batch_and_dtype_is_kept():
    oracle, x = in_plane(), torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    got = oracle.denoise(x, t, MeanVelocity())
    assert got.dtype == torch.float32
    for i in range(3):
        torch.testing.assert_close(got[i : i + 1], oracle.denoise(x[i : i + 1], t[i : i + 1], MeanVelocity()))


def test_exact_sampling_moments():
    n = 40_000
    x = three().sample(torch.arange(n))[:, 0].numpy()
    w = np.array(WEIGHTS) / 6
    mean = float(w @ np.array(MEANS))
    variance = float(w @ (np.array(STDS) ** 2 + np.array(MEANS) ** 2)) - mean**2
    assert x.shape == (n,)
    assert x.mean() == pytest.approx(mean, abs=5 * math.sqrt(variance / n))
    assert x.var() == pytest.approx(variance, rel=0.03)
    assert (x < -0.4).mean() == pytest.approx(w[0] * norm.cdf(2) + w[2] * norm.cdf(-3.8), abs=5 * 0.5 / math.sqrt(n))


def test_exact_sampling_by_class_and_at_t():
    oracle = three(torch.tensor([4, 9, 4]))
    seeds = torch.arange(20_000)
    x = oracle.sample(seeds, torch.full((20_000,), 9))
    assert float(x.mean()) == pytest.approx(0.2, abs=5 * 0.1 / math.sqrt(20_000))
    assert float(x.std()) == pytest.approx(0.1, rel=0.03)
    one = gaussian(0.3, 0.5, (2,)).sample_at(seeds, 0.4, MeanVelocity())
    assert one.mean(0).tolist() == pytest.approx([0.6 * 0.3] * 2, abs=0.03)
    assert one.std(0).tolist() == pytest.approx([math.sqrt(0.36 * 0.25 + 0.4)] * 2, rel=0.03)


def test_samples_belong_to_their_seeds():
    seeds = torch.tensor([5, 1, 9])
    whole = three().sample(seeds)
    torch.testing.assert_close(three().sample(seeds.flip(0)).flip(0), whole, rtol=0, atol=0)


def test_data_and_noise_of_one_seed_are_independent():
    """Neither the place in a component nor the component may follow what these seeds draw elsewhere."""
    seeds, n = torch.arange(20_000), 20_000
    spread = gaussian(0.0, 1.0, (2,)).sample(seeds)
    chosen = three().sample(seeds)
    drawn = [noise.normal(seeds, stream, (2,), torch.float64) for stream in (noise.INITIAL, noise.TRAIN, noise.STEP)]
    drawn += [noise.uniform(seeds, stream, (1,)) for stream in (noise.LABEL, noise.TIME)]
    table = np.corrcoef(torch.cat((spread, chosen, *drawn), dim=1).numpy().T)
    assert np.abs(table[:3, 3:]).max() < 5 / math.sqrt(n)


def test_shapes():
    oracle = gaussian(0.0, 1.0, (1, 2, 3))
    assert oracle.sample(torch.arange(4)).shape == (4, 1, 2, 3)
    x = torch.zeros(4, 1, 2, 3)
    assert oracle.denoise(x, torch.full((4,), 0.5), MeanVelocity()).shape == x.shape
    for bad in (torch.zeros(4, 6), torch.zeros(4, 1, 3, 2), torch.zeros(4)):
        with pytest.raises(ValueError, match="shape"):
            oracle.denoise(bad, torch.full((4,), 0.5), MeanVelocity())
        with pytest.raises(ValueError, match="shape"):
            oracle.log_density(bad, torch.full((4,), 0.5), MeanVelocity())


def test_negative_std_is_refused():
    with pytest.raises(ValueError, match="std"):
        mixture(torch.zeros(2, 1), torch.tensor([0.1, -0.1]))
    with pytest.raises(ValueError, match="std"):
        gaussian(0.0, float("nan"))
