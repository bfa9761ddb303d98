"""Solvers against exact answers: laws on Gaussians, orders of convergence, the digits, likelihood and inversion."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mvm import likelihood, noise, oracle
from mvm.data import digits
from mvm.model import load
from mvm.path import MEAN_VELOCITY, Field, LinearFlow, MeanVelocity, VariancePreserving, full_time
from mvm.solver import Adaptive, Euler, EulerMaruyama, Heun, adams, adams_power, sa, sample
from mvm.solver.base import Evaluate, Plan, Solver, no_noise, run
from mvm.verify.check import Check, Checks, lopsided, peak


@dataclass(frozen=True)
class Law:
    """Mean and std of a 1-D normal law."""

    mean: float
    std: float


def at_times(field: Field) -> Evaluate:
    """Return a field as solvers call it: at one time for all samples."""
    return lambda x, t: field(x, full_time(x, t), None)


def sampled_moments(plan: Plan, field: Field, start: Law, size: int = 1) -> tuple[Tensor, Tensor]:
    """Return the exact means and stds of a plan's output on Gaussian data of `size` values: no Monte Carlo.

    On a Gaussian oracle the solver is linear in its starting state and its noises. It is run on the mean
    and on every unit vector of that space; the coefficients' norm is the standard deviation.
    """
    # row 0: no noise at all; 1: the starting state's; then one for each noise, of which a step draws three at most
    x = torch.full((2 + 3 * plan.steps, size), start.mean, dtype=torch.float64)
    x[1] += start.std
    rows: dict[int, int] = {}

    def unit_noise(index: int) -> Tensor:
        kick = torch.zeros_like(x)
        kick[rows.setdefault(index, len(rows) + 2)] = 1
        return kick

    out = run(plan, at_times(field), x, unit_noise).x
    return out[0], (out[1:] - out[0]).norm(dim=0)


def sampled_law(solver: Solver, data: Law, rho: float, *, nfe: int = 0, times: tuple[float, ...] = ()) -> Law:
    """Return the exact law of a solver's output on Gaussian data."""
    solver = solver.for_size(1)
    plan = solver.plan_times(MEAN_VELOCITY, times, rho) if times else solver.plan(MEAN_VELOCITY, nfe, rho)
    start = marginal(data, times[0]) if times else Law(0.0, 1.0)
    mean, std = sampled_moments(plan, oracle.gaussian(data.mean, data.std).field(MEAN_VELOCITY), start)
    return Law(float(mean), float(std))


def marginal(data: Law, t: float) -> Law:
    """Return the exact law of x_t for Gaussian data."""
    return Law((1 - t) * data.mean, math.sqrt((1 - t) ** 2 * data.std**2 + t))


def _uniform_times(start: float, end: float, steps: int) -> tuple[float, ...]:
    return tuple(start + (end - start) * i / steps for i in range(steps + 1))


def measured_order(solver: Solver, rho: float, steps: int = 128) -> float:
    """Return the order of convergence of the std at t = 0.1, from t = 0.9, between `steps` and twice as many."""
    data = Law(0.3, 0.5)
    wanted = marginal(data, 0.1).std
    errors = [
        abs(sampled_law(solver, data, rho, times=_uniform_times(0.9, 0.1, n)).std - wanted) for n in (steps, 2 * steps)
    ]
    return math.log2(errors[0] / errors[1])


def nonlinear_order(solver: Solver, steps: int = 128) -> float:
    """Return the order of convergence of states at t = 0.1, from t = 0.9, on a mixture: a nonlinear ODE."""
    truth = _mixture_states(adams(), 2000)
    coarse, fine = (rmse(_mixture_states(solver, count), truth) for count in (steps, 2 * steps))
    return math.log2(coarse / fine)


@lru_cache
def _mixture_states(solver: Solver, count: int) -> Tensor:
    """Return states at t = 0.1 of 41 trajectories of the mixture's ODE that start on a line at t = 0.9."""
    x = torch.linspace(-2, 2, 41, dtype=torch.float64)[:, None]
    plan = solver.plan_times(MEAN_VELOCITY, _uniform_times(0.9, 0.1, count), 0.0)
    return run(plan, at_times(lopsided().field(MEAN_VELOCITY)), x, no_noise).x


SLACK = 0.2  # an order is measured at finite step sizes


def check_orders() -> Checks:
    solvers: dict[str, Solver] = {"euler": Euler(), "heun": Heun(), "euler-maruyama": EulerMaruyama()}
    multistep: dict[str, Callable[..., Solver]] = {"adams": adams, "adams-power": adams_power, "sa": sa}
    for name, make in multistep.items():
        solvers |= {f"{name} P{p}/C{c}": make(p, c) for p, c in ((1, 0), (2, 0), (1, 2), (2, 3), (3, 4))}
    for name, solver in solvers.items():
        least, weak = solver.order - SLACK, solver.weak_order
        yield Check(f"order of {name} on the ODE (declared {solver.order})", measured_order(solver, 0.0), least, True)
        yield Check(f"order of {name} on a nonlinear ODE", nonlinear_order(solver), least, True)
        if weak:
            order = measured_order(solver, 1.0)
            yield Check(f"weak order of {name} on the SDE (declared {weak})", order, weak - SLACK, True)


def check_shared_marginals() -> Checks:
    data = Law(0.3, 0.5)
    for end in (0.6, 0.2):
        wanted = marginal(data, end)
        times = tuple(reversed([end + (1 - end) * (i / 60) ** 2 for i in range(61)]))
        for rho in (0.0, 0.5, 0.75, 1.0):
            law = sampled_law(adams(), data, rho, times=times)
            gap = max(abs(law.std / wanted.std - 1), abs(law.mean - wanted.mean))
            yield Check(f"ODE and SDE share the marginal at t = {end}: rho = {rho}", gap, 1e-5)


def sampled_stds(solver: Solver, stds: Tensor, rho: float, nfe: int, size: int = 0) -> Tensor:
    """Return the exact stds of a solver's output on Gaussians of mean 0 and these stds.

    size: the number of values of a sample, where these are some of them.
    """
    plan = solver.for_size(size or len(stds)).plan(MEAN_VELOCITY, nfe, rho)
    return sampled_moments(plan, oracle.spectrum(stds).field(MEAN_VELOCITY), Law(0.0, 1.0), len(stds))[1]


def image_stds(side: int = 32, exponent: float = 1.3, pixel: float = 0.5) -> Tensor:
    """Return the stds of an image-like Gaussian of 3 side^2 values in its principal directions.

    They fall with spatial frequency as its power `exponent`, as those of photographs do (1 to 2); `pixel` is the std of
    one value. At 32 pixels the largest, brightness, is that of CIFAR-10 (15) where the three channels are one.
    """
    frequency = torch.fft.fftfreq(side, dtype=torch.float64) * side
    size = torch.hypot(frequency[:, None], frequency[None, :]).clamp_min(0.7).flatten()
    stds = size**-exponent
    return pixel * 3**0.5 * stds / (stds**2).mean().sqrt()  # brightness: a third of the directions, thrice the variance


def spectrum_error(solver: Solver, stds: Tensor, rho: float, nfe: int) -> float:
    """Return the relative Frechet distance of a solver's output on a spectrum: the error of the stds, by energy."""
    sampled = sampled_stds(solver, stds, rho, nfe, size=3 * len(stds))
    return float((sampled - stds).norm() / stds.norm())


def worst_std_error(solver: Solver, nfe: int) -> float:
    """Return the largest relative error of the sampled std over STDS, in a sample of 3,072 values, and over RHOS."""
    stds = torch.tensor(STDS, dtype=torch.float64)
    return max(float((sampled_stds(solver, stds, rho, nfe, 3072) / stds - 1).abs().max()) for rho in RHOS)


# what the default sampler promises, by number of evaluations
STDS, RHOS = (0.1, 0.5, 2.0, 10.0, 15.0), (0.0, 0.5, 0.75, 1.0)
STD_BARS = {13: 0.05, 26: 0.03, 52: 0.01}
SPECTRUM_BARS = {8: 0.15, 13: 0.03, 26: 0.01}
# RMSE of (half, nine in ten) of the noises; measured over 1,024: .017, .162; .0024, .0086; .0004, .0016
DIGITS_BARS = {8: (0.025, 0.25), 13: (0.004, 0.015), 26: (0.0007, 0.003)}
BRIGHTNESS_BAR = 0.05


def check_defaults() -> Checks:
    for nfe, limit in STD_BARS.items():
        error = worst_std_error(adams(), nfe)
        yield Check(f"default sampler on Gaussians of std 0.1 to 15, worst std error over rho, nfe {nfe}", error, limit)
    for nfe, limit in SPECTRUM_BARS.items():
        cases = [(image_stds(side, exponent), rho) for side in (32, 128) for exponent in (1.0, 1.6) for rho in RHOS]
        error = max(spectrum_error(adams(), stds, rho, nfe) for stds, rho in cases)
        yield Check(f"default sampler on image spectra, relative Frechet distance, nfe {nfe}", error, limit)


def digits_oracle() -> oracle.Mixture:
    """Return the 1,797 digits, centred and scaled to std 0.5, each widened to std 0.05."""
    points = digits().images.flatten(1).double()
    points = points - points.mean()
    return oracle.finite_data(points * (0.5 / points.std()), std=0.05)


def rmse(a: Tensor, b: Tensor) -> float:
    return float(((a - b) ** 2).mean().sqrt())


def check_digits(reference_nfe: int = 300) -> Checks:
    """Quantiles over noises, seeds 0 to 255: some begin so near the border of two digits that they end at the other.

    Of 1,024 noises 141, 56 and 11 do at 8, 13 and 26 evaluations (RMSE above 0.1): a mean would tell of those alone.
    """
    field, x = digits_oracle().field(MEAN_VELOCITY), noise.initial(torch.arange(256), (64,), torch.float64)
    reference = sample(field, x, nfe=reference_nfe)
    for nfe, limits in DIGITS_BARS.items():
        errors = (sample(field, x, nfe=nfe) - reference).square().mean(1).sqrt()
        for share, limit in zip((0.5, 0.9), limits, strict=True):
            what = f"RMSE to {reference_nfe} evaluations of {share:.0%} of noises, nfe {nfe}"
            yield Check(f"default sampler on 1,797 digits, {what}", float(errors.quantile(share)), limit)


def check_brightness(count: int = 64) -> Checks:
    """A trained network: the spread of the images' brightness, which too few times near pure noise would shrink."""
    model = load("digits")
    x, labels = noise.initial(torch.arange(count), model.sample_shape), torch.arange(count) % model.num_classes
    few, many = (sample(model, x, condition=labels, nfe=nfe).flatten(1).mean(1).std() for nfe in (8, 100))
    gap = abs(float(few / many) - 1)
    yield Check("default sampler on the digits model, brightness spread, nfe 8 to 100", gap, BRIGHTNESS_BAR)


def check_adaptive() -> Checks:
    if importlib.util.find_spec("torchdiffeq") is None:  # an optional extra
        return
    field, x = lopsided().field(MEAN_VELOCITY), noise.initial(torch.arange(16), (1,), torch.float64)
    error = rmse(sample(field, x, solver=Adaptive(1e-8, 1e-8)), sample(field, x, nfe=400))
    yield Check("adaptive solver against 400 steps of the default", error, 1e-4)


def check_schedules() -> Checks:
    """One oracle on three paths gives one answer, through the equal-SNR map."""
    law = lopsided()
    x = noise.initial(torch.arange(64), (1,), torch.float64)
    wanted = sample(law.field(MEAN_VELOCITY), x, nfe=40)
    # VP never reaches pure noise (alpha = 0.0066 at its end): the same noise starts a slightly other path
    for schedule, limit in ((MeanVelocity(2.5), 1e-10), (LinearFlow(), 1e-10), (VariancePreserving(), 0.02)):
        error = rmse(sample(law.field(schedule), x, schedule=schedule, nfe=40), wanted)
        yield Check(f"equal-SNR map: {schedule} gives the mean-velocity answer", error, limit)


def check_likelihood() -> Checks:
    law = oracle.mixture(torch.tensor([[0.5, -0.3], [-0.6, 0.4]]), torch.tensor([0.2, 0.3]))
    seeds = torch.arange(64)
    x, field = law.sample(seeds), law.field(MEAN_VELOCITY)
    truth = law.log_density(x, full_time(x, likelihood.T_MIN), MEAN_VELOCITY)
    exact = likelihood.log_likelihood(field, x, method="exact", steps=50)
    yield Check("likelihood by the ODE, exact divergence (nats)", peak(exact - truth), 1e-5)
    estimate = likelihood.log_likelihood(field, x, steps=50, probes=64, seeds=seeds)
    yield Check("likelihood by the ODE, Hutchinson, mean of 64 (nats)", abs(float((estimate - truth).mean())), 0.03)
    back = likelihood.decode(field, likelihood.encode(field, x, nfe=100), nfe=100)
    yield Check("inversion: image -> noise -> image", peak(back - x), 1e-4)
