"""sample_mvm and mvm_sigmas: closed forms of Gaussians, mvm.sample's own samples, and k-diffusion's conventions."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mvm import noise
from mvm.bridge import VarianceExploding, from_edm, mvm_sigmas, sample_mvm
from mvm.oracle import gaussian, mixture
from mvm.path import MEAN_VELOCITY, LinearFlow, equal_snr_time
from mvm.solver import Grid, adams, adams_power, sample

PATHS = {"ve": VarianceExploding(), "flow": LinearFlow()}
BLOBS = mixture(torch.tensor([[-1.0, 0.5], [1.0, -0.5]]), stds=torch.tensor([0.2, 0.4]))
SEEDS = torch.arange(40)
NOISE = noise.initial(SEEDS, (2,), torch.float64)


def denoiser(law=BLOBS, path="ve"):
    """model(x, sigma) of an oracle: sigma is the time of both paths."""
    return lambda x, sigma: law.denoise(x, sigma, PATHS[path])


def start(path, x=NOISE, sigma_max=80.0):
    return x * sigma_max if path == "ve" else x


def karras(n, low=0.02, high=80.0):
    ramp = torch.linspace(0, 1, n, dtype=torch.float64)
    return torch.cat([(high ** (1 / 7) + ramp * (low ** (1 / 7) - high ** (1 / 7))) ** 7, torch.zeros(1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [0.0, 0.75])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("solver", ["adams", "sa"])
def test_the_samples_are_those_of_mvm(solver, path, rho, dtype):
    """To 1e-5, from the same noise and seeds, by the solver's own sigmas, float32 in between or not."""
    how = {"rho": rho, "solver": solver, "seeds": SEEDS}
    sigmas, x = mvm_sigmas(13, path=path, solver=solver, rho=rho, size=2), start(path).to(dtype)
    want = sample(BLOBS.field(PATHS[path]), x, schedule=PATHS[path], nfe=13, **how)
    if (solver, path) == ("sa", "flow"):  # its grid begins at t = 0.999, a state of which x then is
        first = float(sigmas[0])
        x = x * float(LinearFlow().norm(first) / MEAN_VELOCITY.norm(0.999))
    found = sample_mvm(denoiser(path=path), x, sigmas.to(dtype), path=path, **how)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    assert found.dtype == dtype


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_two_paths_of_equal_snr_have_one_sample(rho):
    """sigma of x0 + sigma eps is sigma/(1 + sigma) of the flow, whose state is smaller by 1 + sigma."""
    sigmas, x = karras(12), start("ve")
    exploding = sample_mvm(denoiser(), x, sigmas, rho=rho, seeds=SEEDS)
    straight = sample_mvm(denoiser(path="flow"), x / 81, sigmas / (1 + sigmas), rho=rho, seeds=SEEDS, path="flow")
    torch.testing.assert_close(straight, exploding, rtol=0, atol=1e-9)
    cut = sample_mvm(denoiser(), x, sigmas[:-4], rho=rho, seeds=SEEDS) / (1 + sigmas[-5])
    also = sample_mvm(denoiser(path="flow"), x / 81, (sigmas / (1 + sigmas))[:-4], rho=rho, seeds=SEEDS, path="flow")
    torch.testing.assert_close(also, cut, rtol=0, atol=1e-9)


@pytest.mark.parametrize("path", PATHS)
def test_the_first_order_ode_is_eulers_method(path):
    """As k-diffusion's sample_euler, and flow matching's, write it: x + (next - sigma) (x - denoised)/sigma."""
    sigmas = karras(9) if path == "ve" else torch.linspace(1, 0, 10, dtype=torch.float64)
    model, x = denoiser(path=path), start(path)
    found = sample_mvm(model, x, sigmas, solver=adams(predictor=1, corrector=0, ending=1), path=path)
    for sigma, following in pairwise(sigmas):
        x = x + (following - sigma) * (x - model(x, sigma)) / sigma
    torch.testing.assert_close(found, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("last", [0.0, 0.3])
@pytest.mark.parametrize("first", [80.0, 2.0])
def test_the_ode_of_a_gaussian_is_exact(first, last):
    """x - mean shrinks as sqrt(std^2 + sigma^2), from any first sigma to any last one."""
    mean, std = 0.7, 0.5
    x = mean + (std**2 + first**2) ** 0.5 * NOISE
    sigmas = torch.cat([torch.logspace(math.log10(first), math.log10(last or 0.002), 60, dtype=torch.float64),
                        torch.zeros(0 if last else 1)])  # fmt: skip
    sigmas[0] = first
    found = sample_mvm(denoiser(gaussian(mean, std, (2,))), x, sigmas)
    want = mean + (std**2 + last**2) ** 0.5 * NOISE
    torch.testing.assert_close(found, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("last", [0.0, 0.5])
@pytest.mark.parametrize("path", PATHS)
def test_the_sde_keeps_the_law(path, last):
    """4,000 draws of a Gaussian of std 0.5, at the end or on the way: chance leaves 1.1 % in the std."""
    mean, std, seeds = 0.7, 0.5, torch.arange(2000)
    sigmas = mvm_sigmas(30, path=path)
    sigmas = torch.cat([sigmas[sigmas > last], torch.tensor([last])])
    x = start(path, noise.initial(seeds, (2,), torch.float64))
    found = sample_mvm(denoiser(gaussian(mean, std, (2,)), path), x, sigmas, rho=1.0, seeds=seeds, path=path)
    alpha = 1 - last if path == "flow" else 1.0
    assert float(found.std()) == pytest.approx((alpha**2 * std**2 + last**2) ** 0.5, rel=0.04)
    assert float(found.mean()) == pytest.approx(alpha * mean, abs=0.04)


def test_repeated_sigmas_are_one_level():
    sigmas, seen = karras(8), []
    want = sample_mvm(denoiser(), start("ve"), sigmas)
    twice = torch.cat([sigmas[:1], sigmas[:3], sigmas[2:4] * (1 + 3e-7), sigmas[4:], sigmas[-1:]])
    found = sample_mvm(denoiser(), start("ve"), twice, callback=lambda state: seen.append(state["i"]))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    assert seen == [0, 2, 3, 5, 6, 7, 8, 9]  # 8 evaluations; the places are those of the sigmas given


def test_nothing_to_do():
    for sigmas in ([], [3.0], [3.0, 3.0], torch.zeros(2)):
        assert sample_mvm(denoiser(), NOISE, sigmas) is NOISE


@pytest.mark.parametrize("path", PATHS)
def test_callback_once_an_evaluation(path):
    told, sigmas = [], mvm_sigmas(6, path=path)
    model, x = denoiser(path=path), start(path)
    found = sample_mvm(model, x, sigmas, callback=told.append, path=path, solver=adams(ending=1))
    assert [set(state) for state in told] == [{"x", "i", "sigma", "sigma_hat", "denoised"}] * 6
    assert [state["i"] for state in told] == list(range(6))
    assert [float(state["sigma"]) for state in told] == sigmas[:-1].tolist()
    assert all(state["sigma"] is state["sigma_hat"] for state in told)
    torch.testing.assert_close(told[0]["x"], x)
    torch.testing.assert_close(found, told[-1]["denoised"])
    for state in told:  # x is a state of the path
        assert torch.equal(model(state["x"], state["sigma"].expand(len(x))), state["denoised"])


def test_the_model_is_told_exact_sigmas_and_extra_arguments():
    told = []

    def model(x, sigma, scale, **more):
        told.append((x.dtype, sigma, more))
        return x * 0 + scale

    sigmas, x = karras(4).float(), start("ve").half()[:3]
    found = sample_mvm(model, x, sigmas, {"scale": 2.0, "mask": None})
    assert [float(sigma[0]) for _, sigma, _ in told] == sigmas[:-1].tolist()
    for dtype, sigma, more in told:
        assert (dtype, sigma.dtype, sigma.shape, more) == (torch.float16, torch.float32, (3,), {"mask": None})
    assert found.dtype == torch.float16
    assert bool((found == 2).all())


def test_progress_bar(capsys):
    sample_mvm(denoiser(), start("ve"), karras(3), disable=True)
    assert capsys.readouterr().err == ""
    sample_mvm(denoiser(), start("ve"), karras(3), disable=False)
    assert "3/3" in capsys.readouterr().err


def test_the_noise_of_a_seed_is_the_same_in_any_batch():
    sigmas, x = mvm_sigmas(6), start("ve")
    together = sample_mvm(denoiser(), x, sigmas, rho=1.0, seeds=SEEDS)
    apart = [sample_mvm(denoiser(), x[i : i + 7], sigmas, rho=1.0, seeds=SEEDS[i : i + 7]) for i in range(0, 40, 7)]
    torch.testing.assert_close(torch.cat(apart), together, rtol=0, atol=1e-12)
    assert not torch.allclose(together, sample_mvm(denoiser(), x, sigmas, rho=1.0, seeds=SEEDS + 1), atol=1e-3)


def test_noise_samplers():
    """One draw for every step but the last, from its sigma to the next; without one, torch's own."""
    sigmas, x, asked = karras(5), start("ve"), []

    def draw(sigma, following):
        asked.append((float(sigma), float(following)))
        return noise.normal(SEEDS, noise.STEP + len(asked) - 1, (2,), torch.float32)

    found = sample_mvm(denoiser(), x, sigmas, rho=0.5, noise_sampler=draw)
    torch.testing.assert_close(found, sample_mvm(denoiser(), x, sigmas, rho=0.5, seeds=SEEDS), rtol=0, atol=1e-12)
    assert asked == list(zip(sigmas[:4].tolist(), sigmas[1:5].tolist(), strict=True))
    free = []
    for _ in range(2):
        torch.manual_seed(3)
        free.append(sample_mvm(denoiser(), x, sigmas, rho=0.5))
    assert torch.equal(*free)
    assert not torch.equal(free[0], found)
    asked.clear()
    sample_mvm(denoiser(), x, sigmas, noise_sampler=draw)
    assert asked == []  # the ODE


@pytest.mark.parametrize("size", [0, 3072])
@pytest.mark.parametrize("n", [1, 2, 13])
@pytest.mark.parametrize("path", PATHS)
def test_sigmas_are_the_solvers_own_times(path, n, size):
    sigmas = mvm_sigmas(n, path=path, size=size)
    solver = adams().for_size(size) if size else adams()
    times = torch.tensor(solver.plan(PATHS[path], n, 0.0).times, dtype=torch.float64)
    torch.testing.assert_close(equal_snr_time(sigmas, PATHS[path], MEAN_VELOCITY), times, rtol=1e-12, atol=1e-15)
    assert sigmas.dtype == torch.float64
    assert float(sigmas[0]) == pytest.approx(PATHS[path].end, rel=1e-12)
    assert float(sigmas[-1]) == 0
    assert bool((sigmas[1:] < sigmas[:-1]).all())


class Halves(Grid):
    """A grid of one's own."""

    def times(self, nfe, start=1.0):
        return (*(start * 0.5**i for i in range(nfe)), 0.0)


def test_sigmas_follow_the_solver_that_is_given():
    sigmas = mvm_sigmas(4, path="flow", solver=replace(adams_power(), grid=Halves()))
    times = torch.tensor([1, 0.5, 0.25, 0.125, 0], dtype=torch.float64)
    torch.testing.assert_close(LinearFlow().lam(sigmas), MEAN_VELOCITY.lam(times), rtol=1e-12, atol=0)


def test_sigmas_of_a_model_that_knows_its_levels():
    """As `BridgedField.solver` has them: nothing cleaner than sigma_min is asked."""
    sigmas = mvm_sigmas(9, 0.03, 14.6, size=2)
    field = from_edm(denoiser(), sigma_min=0.03, sigma_max=14.6, path="own")
    assert float(sigmas[0]) == pytest.approx(14.6)
    assert float(sigmas[-2]) == pytest.approx(0.03)
    x = start("ve", sigma_max=14.6)
    want = sample(field, x, schedule=field.schedule, solver=field.solver, nfe=9)
    torch.testing.assert_close(sample_mvm(denoiser(), x, sigmas), want, rtol=0, atol=1e-5)
    by_lam = mvm_sigmas(9, 0.03, 14.6, solver="sa")
    torch.testing.assert_close(by_lam[:-1].log().diff(), by_lam[:2].log().diff().expand(8), rtol=1e-9, atol=0)
    straight = mvm_sigmas(9, 0.03 / 1.03, 14.6 / 15.6, path="flow", size=2)
    torch.testing.assert_close(straight, sigmas / (1 + sigmas), rtol=1e-9, atol=0)
    assert float(mvm_sigmas(3, sigma_max=1 + 1e-7, path="flow")[0]) == 1


@pytest.mark.parametrize("path", PATHS)
def test_a_rounded_sigma_is_no_harm(path):
    """As float32 writes it: 1.0000001 of a flow."""
    x = start(path)
    sigmas = mvm_sigmas(5, path=path)
    rounded = sigmas * (1 + 1e-7)
    found = sample_mvm(denoiser(path=path), x, rounded, path=path)
    torch.testing.assert_close(found, sample_mvm(denoiser(path=path), x, sigmas, path=path), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, 2.0, 0.0]), r"sigmas\[1\]=2 must lie in \[0, 1\]"),
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, -2.0]), r"sigmas\[1\]=-2"),
        (lambda: sample_mvm(denoiser(), NOISE, [float("nan"), 0.0]), r"sigmas\[0\]=nan"),
        (lambda: sample_mvm(denoiser(), NOISE, [float("inf"), 0.0]), r"sigmas\[0\]=inf"),
        (lambda: sample_mvm(denoiser(), NOISE, [14.6, 0.0], path="flow"), r"sigmas\[0\]=14.6 must lie in \[0, 1\]"),
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, 0.5], path="vp"), "path='vp'"),
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, 0.5], rho=-1), "rho=-1"),
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, 0.5], solver="heun"), "solver='heun' .*use adams or"),
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, 0.5], solver="adam"), "did you mean 'adams'"),
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, 0.5], seeds=[1], rho=1.0), "seeds has 1 entries"),
        (lambda: sample_mvm(denoiser(), NOISE, [1.0, 0.5], seeds=SEEDS, noise_sampler=denoiser()), "noise_sampler and"),
        (lambda: sample_mvm(lambda x, sigma: x[:1], NOISE, [1.0, 0.5]), r"model answers x of shape \(40, 2\)"),
        (
            lambda: sample_mvm(denoiser(), NOISE, [1.0, 0.5], solver="sa", path="flow"),
            "sigmas from 1: .*lam is infinite.*mvm_sigmas",
        ),
        (lambda: mvm_sigmas(0), "n=0"),
        (lambda: mvm_sigmas(4, 2.0, 1.0), "sigma_min=2.0, sigma_max=1.0"),
        (lambda: mvm_sigmas(4, sigma_max=2.0, path="flow"), "sigma_max=2.0.*<= 1 on the flow path"),
        (lambda: mvm_sigmas(4, path="vp"), "path='vp'"),
        (lambda: mvm_sigmas(4, solver="euler"), "solver='euler'"),
        (lambda: mvm_sigmas(4, size=-1), "size=-1"),
        (lambda: mvm_sigmas(4, 0.1, solver=replace(adams_power(), grid=Halves())), "cannot be made to end at a level"),
    ],
)
def test_bad_arguments_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()
