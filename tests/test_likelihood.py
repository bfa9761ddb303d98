"""Likelihood and inversion against densities known exactly."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from mvm.bridge import VarianceExploding
from mvm.latent import Pixels
from mvm.likelihood import (
    T_MIN,
    bits_per_dim,
    decode,
    dequantise,
    divergence,
    encode,
    log_likelihood,
    unit_vectors,
)
from mvm.oracle import gaussian, mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving
from mvm.solver import sample

PURE = [MeanVelocity(), MeanVelocity(2.0), LinearFlow()]  # alpha = 0 at the end
SCHEDULES = [*PURE, VariancePreserving(), VarianceExploding()]
GAUSSIAN = gaussian(0.3, 0.5, (3,))
MIXTURE = mixture(
    torch.tensor([[0.5, -0.3], [-0.6, 0.4], [0.1, 1.0]]),
    torch.tensor([0.2, 0.3, 0.5]),
    torch.tensor([1.0, 2.0, 3.0]),
    labels=torch.tensor([0, 1, 1]),
)


def smeared(mean, std):
    """Mean and std of x at t = T_MIN, where data count as a state."""
    return (1 - T_MIN) * mean, math.sqrt((1 - T_MIN) ** 2 * std**2 + T_MIN)


def exact_noise(x, mean, std, schedule):
    """The noise of x under N(mean, std^2): a Gaussian's flow is linear, and keeps standard scores.

    At the end of the schedule the state has mean alpha mean and variance alpha^2 std^2 + sigma^2.
    """
    alpha, sigma = float(schedule.alpha(schedule.end)), float(schedule.sigma(schedule.end))
    first, spread = smeared(mean, std)
    return alpha * mean + math.hypot(alpha * std, sigma) * (x - first) / spread


def points(shape, count=12, seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.6


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.5), (0.0, 1.0)])
def test_gaussian(schedule, mean, std):
    """p is the law of images made from noise at the schedule's end, by the change of variables."""
    x = points((3,))
    slope = exact_noise(1.0, mean, std, schedule) - exact_noise(0.0, mean, std, schedule)
    wide = float(schedule.norm(schedule.end))  # 80 by EDM's path, 1 by all others
    want = norm.logpdf(exact_noise(x, mean, std, schedule), scale=wide).sum(1) + 3 * math.log(slope)
    field = gaussian(mean, std, (3,)).field(schedule)
    found = log_likelihood(field, x, schedule=schedule, method="exact", steps=60)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(want.tolist(), abs=2e-6)
    if schedule in PURE or std == 1:  # where the sampler's law is the data's
        assert found.tolist() == pytest.approx(norm.logpdf(x, *smeared(mean, std)).sum(1).tolist(), abs=1e-5)


@pytest.mark.parametrize("schedule", PURE, ids=str)
def test_mixture(schedule):
    x = points((2,))
    means, stds = ((0.5, -0.3), (-0.6, 0.4), (0.1, 1.0)), (0.2, 0.3, 0.5)
    density = np.zeros(len(x))
    for weight, mean, std in zip((1 / 6, 2 / 6, 3 / 6), means, stds, strict=True):
        sd = smeared(0.0, std)[1]
        density += weight * np.prod([norm.pdf(x[:, i], (1 - T_MIN) * mean[i], sd) for i in (0, 1)], axis=0)
    found = log_likelihood(MIXTURE.field(schedule), x, schedule=schedule, method="exact", steps=80)
    assert found.tolist() == pytest.approx(np.log(density).tolist(), abs=1e-4)


def test_condition():
    """Class 0 is one Gaussian."""
    x = points((2,), 4)
    labels = torch.zeros(4, dtype=torch.int64)
    found = log_likelihood(MIXTURE.field(MeanVelocity()), x, method="exact", condition=labels)
    sd = smeared(0.0, 0.2)[1]
    want = sum(norm.logpdf(x[:, i], (1 - T_MIN) * m, sd) for i, m in enumerate((0.5, -0.3)))
    assert found.tolist() == pytest.approx(want.tolist(), abs=1e-4)


def test_fourth_order():
    x = points((2,))
    field = MIXTURE.field(MeanVelocity())
    truth = log_likelihood(field, x, method="exact", steps=320)
    errors = [float((log_likelihood(field, x, method="exact", steps=n) - truth).abs().max()) for n in (20, 40, 80)]
    assert errors[0] / errors[1] > 8
    assert errors[1] / errors[2] > 8


def test_density_integrates_to_one():
    law = mixture(torch.tensor([[-0.5], [0.6]]), torch.tensor([0.2, 0.1]))
    x = torch.linspace(-2, 2, 801, dtype=torch.float64)[:, None]
    p = log_likelihood(law.field(MeanVelocity()), x, method="exact", steps=60).exp()
    assert float(torch.trapezoid(p, x[:, 0])) == pytest.approx(1, abs=1e-4)


def quadratic(x):
    """f with a full, x-dependent Jacobian; its trace is 2 x0 + x2 + 3 cos(x2) + x0."""
    a, b, c = x[:, 0], x[:, 1], x[:, 2]
    return torch.stack((a**2 + b * c, b * c + a, 3 * torch.sin(c) + a * c), dim=1)


def trace(x):
    return 2 * x[:, 0] + x[:, 2] + 3 * torch.cos(x[:, 2]) + x[:, 0]


def test_exact_divergence():
    x = points((3,))
    value, found = divergence(quadratic, x, unit_vectors(x), 1)
    assert torch.allclose(value, quadratic(x))
    assert not value.requires_grad
    assert torch.allclose(found, trace(x), atol=1e-12)


def test_exact_divergence_of_images():
    x = points((2, 2, 2))
    scale = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 2, 2)
    found = divergence(lambda y: scale * y**2, x, unit_vectors(x), 1)[1]
    assert torch.allclose(found, (2 * scale * x).flatten(1).sum(1))


def test_hutchinson_over_all_signs_is_exact():
    """The mean over the 8 sign vectors of 3 dimensions is the expectation itself."""
    x = points((3,))
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=torch.float64)
    value, found = divergence(quadratic, x, signs[:, None].expand(8, len(x), 3), 8)
    assert torch.allclose(value, quadratic(x))
    assert torch.allclose(found, trace(x), atol=1e-12)
    one = divergence(quadratic, x, signs[:1, None].expand(1, len(x), 3), 1)[1]
    assert not torch.allclose(one, trace(x), atol=1e-3)


def test_hutchinson_is_exact_where_the_jacobian_is_diagonal():
    x = points((3,))
    field = GAUSSIAN.field(MeanVelocity())
    exact = log_likelihood(field, x, method="exact")
    assert torch.allclose(log_likelihood(field, x, seeds=range(12)), exact, atol=1e-9)


def test_hutchinson_is_unbiased():
    x = torch.tensor([[0.2, 0.3]], dtype=torch.float64)
    field = MIXTURE.field(MeanVelocity())
    exact = float(log_likelihood(field, x, method="exact", steps=40))
    found = log_likelihood(field, x.expand(600, 2), steps=40, seeds=range(600))
    assert float(found.std()) > 1e-3
    assert abs(float(found.mean()) - exact) < 4 * float(found.std()) / math.sqrt(600)
    more = log_likelihood(field, x.expand(150, 2), steps=40, probes=16, seeds=range(150))
    assert float(more.std()) < 0.5 * float(found.std())


def test_new_probes_at_every_pass_average_out():
    """One probe for the whole path leaves an rms error of 1.5 nats here."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    x = means + 0.3 * torch.randn(4, 8, generator=generator, dtype=torch.float64)
    field = mixture(means, 0.3).field(MeanVelocity())
    exact = log_likelihood(field, x, method="exact", steps=50)
    found = log_likelihood(field, x.repeat(64, 1), steps=50, seeds=range(256))
    error = found - exact.repeat(64)
    assert 0.05 < float(error.pow(2).mean().sqrt()) < 0.3
    assert abs(float(error.mean())) < 4 * float(error.std()) / 16


def test_seeds_decide():
    x, field = points((2,)), MIXTURE.field(MeanVelocity())
    together = log_likelihood(field, x, steps=10, seeds=range(12))
    assert torch.equal(log_likelihood(field, x, steps=10, seeds=range(12)), together)
    alone = log_likelihood(field, x[5:6], steps=10, seeds=[5])
    assert torch.allclose(alone, together[5:6], atol=1e-10)
    assert not torch.allclose(log_likelihood(field, x, steps=10, seeds=range(1, 13)), together, atol=1e-4)


def test_expected_bits_of_a_gaussian_by_integration():
    """E over the offset in each cell of -log2 (density / 127.5), dimension by dimension."""
    levels = torch.tensor([0, 60, 120, 128, 200, 255], dtype=torch.uint8)
    count = 64
    images = levels.reshape(1, 1, 2, 3).expand(count, 1, 2, 3)
    law = gaussian(0.1, 0.4, (1, 2, 3))
    mean, std = smeared(0.1, 0.4)

    def expected(level):
        return quad(lambda u: -norm.logpdf((level + u) / 127.5 - 1, mean, std), -0.5, 0.5)[0]

    want = (sum(expected(int(level)) for level in levels) / 6 + math.log(127.5)) / math.log(2)
    found = bits_per_dim(law.field(MeanVelocity()), images, seeds=range(count), steps=40)
    assert found.shape == (count,)
    assert float(found.std()) > 0
    assert float(found.mean()) == pytest.approx(want, abs=4 * float(found.std()) / 8)
    assert float(found.std()) < 0.01


def test_bits_of_all_grey_levels_add_up_to_one():
    """2^-bits is the probability of a level (less Jensen's gap, here 1e-5): the 256 of them share out the whole."""
    images = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1)
    law = gaussian(0.0, 0.25, (1, 1, 1))
    bits = bits_per_dim(law.field(MeanVelocity()), images, seeds=range(256), steps=40)
    assert float((2.0**-bits).sum()) == pytest.approx(1, abs=2e-3)


def test_bits_do_not_know_the_scale_of_pixels():
    """The same images as numbers twice as large, under a law twice as wide; 3e-4 is the blur of T_MIN."""
    images = torch.arange(0, 240, 10, dtype=torch.uint8).reshape(2, 1, 3, 4)
    plain = bits_per_dim(gaussian(0.1, 0.4, (1, 3, 4)).field(MeanVelocity()), images, seeds=[1, 2], steps=60)
    wide = gaussian(0.2, 0.8, (1, 3, 4)).field(MeanVelocity())

    class Scaled:
        codec = Pixels((1, 3, 4), 2.0)

        def __call__(self, x, t, condition=None):
            return wide(x, t, condition)

    assert bits_per_dim(Scaled(), images, seeds=[1, 2], steps=60).tolist() == pytest.approx(plain.tolist(), abs=3e-4)


def test_bits_on_another_schedule():
    images = torch.arange(0, 240, 10, dtype=torch.uint8).reshape(2, 1, 3, 4)
    law = gaussian(0.0, 0.5, (1, 3, 4))
    found = [
        bits_per_dim(law.field(path), images, schedule=path, seeds=[1, 2], steps=40).tolist()
        for path in (MeanVelocity(), LinearFlow())
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_dequantise():
    images = torch.tensor([0, 255, 128], dtype=torch.uint8).reshape(3, 1, 1, 1).expand(3, 1, 50, 50)
    x = dequantise(images, torch.arange(3))
    back = (x + 1) * 127.5
    assert torch.equal(back.round().clamp(0, 255).to(torch.uint8), images)
    offset = back - images.double()
    assert float(offset.abs().max()) < 0.5
    assert float(offset.mean()) == pytest.approx(0, abs=0.02)
    assert float(offset.std()) == pytest.approx(math.sqrt(1 / 12), abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8])
def test_only_uint8_has_bits(dtype):
    with pytest.raises(ValueError, match="images must be uint8"):
        bits_per_dim(GAUSSIAN.field(MeanVelocity()), torch.zeros(2, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "exakt"}, "method='exakt'.*'exact'"),
        ({"steps": 0}, "steps=0"),
        ({"probes": 0}, "probes=0"),
        ({"seeds": [1, 2]}, "seeds has 2 entries for a batch of 12"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        log_likelihood(GAUSSIAN.field(MeanVelocity()), points((3,)), **options)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_noise_of_a_gaussian(schedule):
    x = points((3,))
    want = exact_noise(x, 0.3, 0.5, schedule)
    field = GAUSSIAN.field(schedule)
    there = encode(field, x, schedule=schedule, nfe=100)
    assert torch.allclose(there, want, atol=1e-3 * float(schedule.norm(schedule.end)))
    finer = encode(field, x, schedule=schedule, nfe=200)
    errors = [float((y - want).abs().max()) for y in (there, finer)]
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("law", [GAUSSIAN, MIXTURE], ids=["gaussian", "mixture"])
def test_noise_leads_back_to_its_image(law, schedule):
    x, field = points(law.shape), law.field(schedule)
    there = encode(field, x, schedule=schedule, nfe=200)
    assert torch.allclose(decode(field, there, schedule=schedule, nfe=200), x, atol=1e-4)
    assert torch.allclose(sample(field, there, schedule=schedule, nfe=200), x, atol=3e-4)


def test_a_path_that_hardly_adds_noise():
    path = VariancePreserving(1e-6, 1e-6)
    for function in (encode, decode, log_likelihood):
        with pytest.raises(ValueError, match="ends with less noise than t=1e-05"):
            function(GAUSSIAN.field(path), points((3,)), schedule=path)


def test_inversion_of_a_mixture():
    x = points((2,))
    field = MIXTURE.field(MeanVelocity())
    labels = torch.arange(12) % 2
    for condition in (None, labels):
        there = encode(field, x, condition=condition)
        assert torch.allclose(decode(field, there, condition=condition), x, atol=1e-3)
    assert not torch.allclose(encode(field, x, condition=labels), encode(field, x), atol=1e-2)


@pytest.mark.parametrize("function", [encode, decode, log_likelihood])
def test_what_is_no_schedule(function):
    with pytest.raises(ValueError, match="schedule='linear-flow' is no schedule"):
        function(GAUSSIAN.field(LinearFlow()), points((3,)), schedule="linear-flow")


@pytest.mark.parametrize("function", [encode, decode])
def test_bad_nfe(function):
    with pytest.raises(ValueError, match="nfe=0"):
        function(GAUSSIAN.field(MeanVelocity()), points((3,)), nfe=0)
