"""Gradients through a sampler, against closed forms of Gaussians and against finite differences."""

import pytest
import torch
from torch import nn

import mvm
from mvm import noise
from mvm.oracle import mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, like
from mvm.solver import SOLVERS, ClassifierFree, sa, sample, solve

MEAN, STD = 0.3, 0.5
X = noise.initial(torch.arange(4), (3,), torch.float64)
SCHEDULES = [MeanVelocity(), MeanVelocity(2.0), LinearFlow(), VariancePreserving()]
TWO = mixture(torch.tensor([[0.5, -0.3, 0.2], [-0.6, 0.4, 0.0]]), torch.tensor([0.3, 0.5]), labels=torch.tensor([0, 1]))


class Gaussian(nn.Module):
    """The exact field of N(mean, std^2), with both as parameters."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule, self.num_classes = schedule, 0
        self.mean = nn.Parameter(torch.tensor(MEAN, dtype=torch.float64))
        self.std = nn.Parameter(torch.tensor(STD, dtype=torch.float64))

    def forward(self, x, t, condition=None):
        alpha, sigma = like(self.schedule.alpha(t), x), like(self.schedule.sigma(t), x)
        pull = alpha * self.std**2 / (alpha**2 * self.std**2 + sigma**2)
        return self.mean + pull * (x - alpha * self.mean)


def gradients(schedule, **how):
    """Image, d image/d noise and d image/d (mean, std), each of the sum over a sample's elements, by autograd."""
    field, x = Gaussian(schedule), X.clone().requires_grad_()
    image = sample(field, x, schedule=schedule, grad=True, **how)
    by_noise, by_mean, by_std = torch.autograd.grad(image.sum(), (x, field.mean, field.std))
    return image.detach(), by_noise, by_mean, by_std


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_gaussian_in_closed_form(schedule):
    """x0 = mean + std (noise - alpha mean)/s, s^2 = alpha^2 std^2 + sigma^2, alpha and sigma at the schedule's end."""
    alpha, sigma = float(schedule.alpha(schedule.end)), float(schedule.sigma(schedule.end))
    spread = (alpha**2 * STD**2 + sigma**2) ** 0.5
    image, by_noise, by_mean, by_std = gradients(schedule, nfe=200)
    score = (X - alpha * MEAN) / spread
    torch.testing.assert_close(image, MEAN + STD * score, rtol=0, atol=1e-4)
    torch.testing.assert_close(by_noise, torch.full_like(X, STD / spread), rtol=0, atol=1e-4)
    per_mean = 1 - STD * alpha / spread
    assert float(by_mean) == pytest.approx(X.numel() * per_mean, abs=1e-3)
    per_std = (score * (1 - alpha**2 * STD**2 / spread**2)).sum()
    assert float(by_std) == pytest.approx(float(per_std), abs=1e-3)


FIXED = [{"solver": name} for name in SOLVERS if name not in ("adaptive", "dopri5")]


@pytest.mark.parametrize("how", [*FIXED, {"rho": 1.0, "seeds": range(4)}], ids=str)
def test_every_solver_against_finite_differences(how):
    """The derivative of the numbers that were computed, whatever their error: exact for any nfe."""
    field, x, h = TWO.field(MeanVelocity()), X.clone().requires_grad_(), 1e-5
    how = {"nfe": 6, **how}
    direction = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found,) = torch.autograd.grad(sample(field, x, grad=True, **how).square().sum(), x)
    ahead, behind = (sample(field, X + step * direction, **how).square().sum() for step in (h, -h))
    assert float((found * direction).sum()) == pytest.approx(float(ahead - behind) / (2 * h), rel=1e-6, abs=1e-6)


def test_through_guidance():
    x, h = X.clone().requires_grad_(), 1e-5
    how = {"condition": torch.tensor([0, 1, 0, 1]), "guidance": ClassifierFree(1.5), "solver": sa(), "nfe": 6}
    field = TWO.field(MeanVelocity())
    (found,) = torch.autograd.grad(sample(field, x, grad=True, **how).sum(), x)
    ahead, behind = (sample(field, X + step, **how).sum() for step in (h, -h))
    assert float(found.sum()) == pytest.approx(float(ahead - behind) / (2 * h), rel=1e-6)


def test_a_network_by_its_parameters():
    """One parameter of the shipped model, in float32: its image follows the gradient."""
    model = mvm.load("digits")
    bias = model.network.head.linear.bias.requires_grad_()
    x, label = noise.initial(torch.tensor([0]), model.sample_shape), torch.tensor([3])

    def brightness(**how):
        return sample(model, x, schedule=model.schedule, condition=label, nfe=4, **how).mean()

    (slope,) = torch.autograd.grad(brightness(grad=True), bias)
    direction, h = slope / slope.norm(), 1e-2
    with torch.no_grad():
        bias += h * direction
        ahead = brightness()
        bias -= 2 * h * direction
        behind = brightness()
    assert float((ahead - behind) / (2 * h)) == pytest.approx(float(slope.norm()), rel=1e-2)


@pytest.mark.parametrize("solver", ["adaptive", "dopri5"])
def test_adaptive_steps_have_no_gradient(solver):
    with pytest.raises(ValueError, match=f"grad=True: solver '{solver}' goes by tolerance.*use adams"):
        sample(TWO.field(MeanVelocity()), X, solver=solver, grad=True)
    assert not sample(Gaussian(MeanVelocity()), X, solver=solver).requires_grad


def test_the_answer_is_the_same_and_gradients_are_an_option():
    field, x = Gaussian(MeanVelocity()), X.clone().requires_grad_()
    with_graph, without = solve(field, x, grad=True), solve(field, x)
    assert torch.equal(with_graph.x, without.x)
    assert with_graph.x.requires_grad
    assert not without.x.requires_grad
    with torch.no_grad():  # asked for by name: a caller's no_grad does not undo it
        assert sample(field, x, grad=True, nfe=2).requires_grad
