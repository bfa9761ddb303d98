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
from mvm.path import MEAN_VELOCITY, LinearFlow, MeanVelocity, Schedule, VariancePreserving, full_time
from mvm.solver import Adaptive, Euler, EulerMaruyama, Heun, Solver, adams, adams_power, no_noise, run, sa, sample
from mvm.verify.check import Check, Checks, lopsided, peak


@dataclass(frozen=True)
class Law:
    """Mean and std of a 1-D normal law."""

    mean: float
    std: float


def sampled_law(solver: Solver, data: Law, rho: float, *, nfe: int = 0, times: tuple[float, ...] = ()) -> Law:
    """Return the exact law of a solver's output on Gaussian data: no Monte Carlo.

    On a Gaussian oracle the solver is linear in its starting state and its noises. It is run on the origin
    and on every unit vector of that space; the coefficients' norm is the standard deviation.
    """
    solver = solver.for_size(1)
    plan = solver.plan_times(MEAN_VELOCITY, times, rho) if times else solver.plan(MEAN_VELOCITY, nfe, rho)
    start = marginal(data, times[0]) if times else Law(0.0, 1.0)
    field = oracle.gaussian(data.mean, data.std).field(MEAN_VELOCITY)
    x = torch.full((plan.steps + 2, 1), start.mean, dtype=torch.float64)  # row 0: no noise at all
    x[1] += start.std

    def unit_noise(index: int) -> Tensor:
        kick = torch.zeros_like(x)
        kick[2 + index] = 1
        return kick

    out = run(plan, lambda state, t: field(state, full_time(state, t), None), x, unit_noise).x[:, 0]
    return Law(float(out[0]), float((out[1:] - out[0]).norm()))


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
    field, x = lopsided().field(MEAN_VELOCITY), torch.linspace(-2, 2, 41, dtype=torch.float64)[:, None]
    plan = solver.plan_times(MEAN_VELOCITY, _uniform_times(0.9, 0.1, count), 0.0)
    return run(plan, lambda state, t: field(state, full_time(state, t), None), x, no_noise).x


def _orders() -> list[tuple[str, Solver]]:
    named: list[tuple[str, Solver]] = [("euler", Euler()), ("heun", Heun()), ("euler-maruyama", EulerMaruyama())]
    multistep: dict[str, Callable[..., Solver]] = {"adams": adams, "adams-power": adams_power, "sa": sa}
    for name, make in multistep.items():
        named += [(f"{name} P{p}/C{c}", make(p, c)) for p, c in ((1, 0), (2, 0), (1, 2), (2, 3), (3, 4))]
    return named


SLACK = 0.2  # an order is measured at finite step sizes


def check_orders() -> Checks:
    for name, solver in _orders():
        order = measured_order(solver, 0.0)
        yield Check(f"order of {name} on the ODE (declared {solver.order})", order, solver.order - SLACK, at_least=True)
        order = nonlinear_order(solver)
        yield Check(f"order of {name} on a nonlinear ODE", order, solver.order - SLACK, at_least=True)
        if solver.weak_order:
            order = measured_order(solver, 1.0)
            limit = solver.weak_order - SLACK
            yield Check(f"weak order of {name} on the SDE (declared {solver.weak_order})", order, limit, at_least=True)


def check_shared_marginals() -> Checks:
    data = Law(0.3, 0.5)
    for end in (0.6, 0.2):
        wanted = marginal(data, end)
        times = tuple(reversed([end + (1 - end) * (i / 60) ** 2 for i in range(61)]))
        for rho in (0.0, 0.5, 0.75, 1.0):
            found = sampled_law(adams(), data, rho, times=times)
            gap = max(abs(found.std / wanted.std - 1), abs(found.mean - wanted.mean))
            yield Check(f"ODE and SDE share the marginal at t = {end}: rho = {rho}", gap, 1e-5)


def sampled_stds(solver: Solver, stds: Tensor, rho: float, nfe: int, size: int = 0) -> Tensor:
    """Return the exact stds of a solver's output on Gaussians of mean 0 and these stds: no Monte Carlo.

    size: the number of values of a sample, where these are some of them. As in `sampled_law`, a row for the starting
    state and one for each noise; a solver of several stages draws at most three noises a step.
    """
    plan = solver.for_size(size or len(stds)).plan(MEAN_VELOCITY, nfe, rho)
    field = oracle.spectrum(stds).field(MEAN_VELOCITY)
    x = torch.zeros(1 + 3 * plan.steps, len(stds), dtype=torch.float64)
    x[0] = 1
    rows: dict[int, int] = {}

    def unit_noise(index: int) -> Tensor:
        kick = torch.zeros_like(x)
        kick[rows.setdefault(index, len(rows) + 1)] = 1
        return kick

    return run(plan, lambda state, t: field(state, full_time(state, t), None), x, unit_noise).x.norm(dim=0)


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
    found = sampled_stds(solver, stds, rho, nfe, size=3 * len(stds))
    return float(((found - stds) ** 2).sum().sqrt() / (stds**2).sum().sqrt())


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
    yield Check(
        "default sampler on the digits model, brightness spread, nfe 8 to 100",
        abs(float(few / many) - 1),
        BRIGHTNESS_BAR,
    )


def check_adaptive() -> Checks:
    if importlib.util.find_spec("torchdiffeq") is None:  # an optional extra
        return
    field, x = lopsided().field(MEAN_VELOCITY), noise.initial(torch.arange(16), (1,), torch.float64)
    found = sample(field, x, solver=Adaptive(1e-8, 1e-8))
    yield Check("adaptive solver against 400 steps of the default", rmse(found, sample(field, x, nfe=400)), 1e-4)


def check_schedules() -> Checks:
    """One oracle on three paths gives one answer, through the equal-SNR map."""
    law = lopsided()
    x = noise.initial(torch.arange(64), (1,), torch.float64)
    wanted = sample(law.field(MEAN_VELOCITY), x, nfe=40)
    others: list[tuple[Schedule, float]] = [
        (MeanVelocity(2.5), 1e-10),
        (LinearFlow(), 1e-10),
        (VariancePreserving(), 0.02),
    ]
    for schedule, limit in others:
        found = sample(law.field(schedule), x, schedule=schedule, nfe=40)
        # VP never reaches pure noise (alpha = 0.0066 at its end): the same noise starts a slightly other path
        yield Check(f"equal-SNR map: {schedule} gives the mean-velocity answer", rmse(found, wanted), limit)


def check_likelihood() -> Checks:
    law = oracle.mixture(torch.tensor([[0.5, -0.3], [-0.6, 0.4]]), torch.tensor([0.2, 0.3]))
    seeds = torch.arange(64)
    x, field = law.sample(seeds), law.field(MEAN_VELOCITY)
    truth = law.log_density(x, full_time(x, likelihood.T_MIN), MEAN_VELOCITY)
    found = likelihood.log_likelihood(field, x, method="exact", steps=50)
    yield Check("likelihood by the ODE, exact divergence (nats)", peak(found - truth), 1e-5)
    estimate = likelihood.log_likelihood(field, x, steps=50, probes=64, seeds=seeds)
    yield Check("likelihood by the ODE, Hutchinson, mean of 64 (nats)", abs(float((estimate - truth).mean())), 0.03)
    there = likelihood.encode(field, x, nfe=100)
    yield Check("inversion: image -> noise -> image", peak(likelihood.decode(field, there, nfe=100) - x), 1e-4)
