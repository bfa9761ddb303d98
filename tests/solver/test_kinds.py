"""A model of any kind on any path is sampled right by the default solver: exact answers, told in that kind."""

import math

import pytest
import torch

from mvm import noise
from mvm.oracle import gaussian
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, to_x0
from mvm.recipes import load_recipe
from mvm.solver import sample

COUNT = 20_000
MEAN, STD = 0.3, 0.5
BASELINES = ["cifar10", *(f"cifar10-{name}" for name in ("ddpm", "score", "scoreflow", "fm-vp", "fm-ot", "x0", "v"))]


def sampled(kind, schedule, rho, dtype=torch.float64, **options):
    law = gaussian(MEAN, STD)

    def field(x, t, condition):
        """What `Model` does with a perfect network."""
        return to_x0(kind, law.predict(kind, x, t, schedule).to(dtype), x, t, schedule)

    seeds = torch.arange(COUNT)
    return sample(field, noise.initial(seeds, (1,), dtype), schedule=schedule, rho=rho, seeds=seeds, **options).double()


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_samples_the_law_it_learnt(name, rho):
    """COUNT draws leave 1/sqrt(2 COUNT) = 0.5 % of chance in the std; adams itself is within 1 % here."""
    recipe = load_recipe(name)
    x = sampled(recipe.objective.kind, recipe.path.build(), rho)
    assert float(x.mean()) == pytest.approx(MEAN, abs=5 * STD / math.sqrt(COUNT))
    assert float(x.std()) == pytest.approx(STD, rel=0.025)


@pytest.mark.parametrize("kind", ["x0", "eps", "diffusion_v", "flow", "score"])
def test_kinds_of_one_path_are_one_sampler(kind):
    """float64: the same field told in another way gives the same images, ODE and SDE."""
    path = VariancePreserving()
    for rho in (0.0, 0.75):
        torch.testing.assert_close(sampled(kind, path, rho), sampled("x0", path, rho), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "path"), [("eps", VariancePreserving()), ("score", VariancePreserving())], ids=str)
def test_float32_is_enough(kind, path):
    """x0 = (x - sigma eps)/alpha divides by 0.0066 where sampling starts: rounding must not show."""
    found = sampled(kind, path, 0.0, torch.float32)
    torch.testing.assert_close(found, sampled("x0", path, 0.0), rtol=0, atol=2e-3)


def test_paths_of_zero_signal_start_from_the_same_noise():
    """Where alpha = 0 at the end, equal SNR makes two paths one: the same noise gives the same images."""
    torch.testing.assert_close(sampled("u", MeanVelocity(), 0.0), sampled("flow", LinearFlow(), 0.0), rtol=0, atol=1e-6)
