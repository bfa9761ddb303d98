"""Theorems 1 to 6 of the paper, the score identity, and the conversions among prediction kinds."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mvm import noise, oracle
from mvm.path import KINDS, MEAN_VELOCITY, LinearFlow, MeanVelocity, Pair, Schedule, VariancePreserving, full_time
from mvm.path.convert import MEAN_VELOCITY_KINDS, convert, from_pair, to_pair
from mvm.verify.check import Check, Checks, lopsided, peak


def _characteristic(law: oracle.Mixture, t: float, schedule: Schedule, centre: float, width: float) -> Tensor:
    """Return E[exp(i k x_t)] for the wave numbers K, integrating the oracle's density over centre +- 12 width."""
    x = centre + width * torch.linspace(-12, 12, 4001, dtype=torch.float64)
    p = torch.exp(law.log_density(x[:, None], full_time(x, t), schedule))
    return torch.trapezoid(p * torch.exp(1j * K[:, None] * x), x)


K = torch.linspace(-6, 6, 61, dtype=torch.float64)


def check_characteristic_functions() -> Checks:
    x0, T, t, tiny = 0.7, 2.5, 0.9, 1e-8
    schedule, point = MeanVelocity(T), oracle.finite_data(torch.tensor([[x0]], dtype=torch.float64))
    still = _characteristic(point, tiny * T, schedule, x0, tiny**0.5)
    yield Check("theorem 1: a point mass, at t -> 0", peak(still - torch.exp(1j * K * x0)), 1e-6)
    normal = _characteristic(oracle.gaussian(0.4, 0.6), 0.0, schedule, 0.4, 0.6)
    yield Check("theorem 2: a normal law, at t = 0", peak(normal - torch.exp(1j * K * 0.4 - 0.18 * K**2)), 1e-10)
    standard = _characteristic(lopsided(), T, schedule, 0.0, 1.0)
    yield Check("theorem 3: any data are standard normal at t = T", peak(standard - torch.exp(-(K**2) / 2)), 1e-10)
    evolved = torch.exp(1j * K * x0 - (K**2 / (2 * T) + 1j * K * x0 / T) * t)
    moved = _characteristic(point, t, schedule, float(schedule.alpha(t)) * x0, float(schedule.sigma(t)))
    yield Check("forward process: exp(-lambda(k) t) takes theorem 1 to theorem 3", peak(moved - evolved), 1e-10)


def _gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), of, create_graph=True)[0]


def _evolution_residual(T: float, stochastic: bool) -> tuple[float, float]:
    """Largest |dp/dtau + d(drift p)/dx - diffusion d2p/dx2| and largest |dp/dtau| on a grid of (x, t)."""
    schedule, law = MeanVelocity(T), lopsided()
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)[:, None].requires_grad_()
    worst, size = 0.0, 0.0
    for time in (0.05, 0.3, 0.7, 0.95):
        t = torch.full((101,), time * T, dtype=torch.float64, requires_grad=True)
        p = torch.exp(law.log_density(x, t, schedule))
        v = (law.denoise(x, t, schedule) - x)[:, 0] / t
        drift = v if stochastic else (T + t) / (2 * T) * v + x[:, 0] / (2 * T)
        flux = _gradient(drift * p, x)[:, 0]
        spread = _gradient(_gradient(p, x)[:, 0], x)[:, 0] / (2 * T) if stochastic else 0.0
        against = -_gradient(p, t)
        worst, size = max(worst, peak(against + flux - spread)), max(size, peak(against))
    return worst, size


def check_reverse_dynamics() -> Checks:
    for T in (1.0, 2.5):
        worst, size = _evolution_residual(T, stochastic=True)
        yield Check(f"theorem 4: E[v | x_t] is the reverse SDE's drift (Fokker-Planck, T = {T})", worst / size, 1e-9)
        worst, size = _evolution_residual(T, stochastic=False)
        yield Check(f"theorem 6: the ODE has the same densities (continuity equation, T = {T})", worst / size, 1e-9)


def check_score() -> Checks:
    T = 2.5
    schedule, law = MeanVelocity(T), lopsided()
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)[:, None].requires_grad_()
    t = torch.full((101,), 0.8, dtype=torch.float64)
    score = _gradient(law.log_density(x, t, schedule), x)
    v = law.predict("v", x, t, schedule)
    yield Check("theorem 6: score = (T - t) v - x", peak(score - ((T - 0.8) * v - x)), 1e-10)
    yield Check("score kind equals the gradient of log p_t", peak(score - law.predict("score", x, t, schedule)), 1e-10)


def check_regression() -> Checks:
    """Theorem 5: L(f) - L*(f) does not depend on f; expectations by quadrature over data and noise."""
    points, t = torch.tensor([[-0.8], [0.1], [0.9]], dtype=torch.float64), 0.4
    law = oracle.finite_data(points)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    eps, p = torch.from_numpy(nodes), torch.from_numpy(weights) / math.sqrt(2 * math.pi) / len(points)
    x = (1 - t) * points + math.sqrt(t) * eps  # (3, 80)
    v = (points - x) / t
    best = law.predict("v", x.reshape(-1, 1), full_time(x.reshape(-1, 1), t), MEAN_VELOCITY).reshape(x.shape)

    def gap(f: Callable[[Tensor], Tensor]) -> Tensor:
        return (p * ((f(x) - v) ** 2 - (f(x) - best) ** 2)).sum()

    gaps = torch.stack([gap(torch.sin), gap(torch.zeros_like), gap(lambda y: 3 * y - 1)])
    yield Check("theorem 5: both losses differ by a constant", peak(gaps - gaps[0]) / float(gaps[0]), 1e-9)


def check_conversions() -> Checks:
    seeds = torch.arange(64)
    pair = Pair(noise.normal(seeds, 0, (5,), torch.float64), noise.normal(seeds, 1, (5,), torch.float64))
    t = torch.linspace(0.02, 0.98, 64, dtype=torch.float64)
    for schedule in (MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving()):
        kinds = [kind for kind in KINDS if isinstance(schedule, MeanVelocity) or kind not in MEAN_VELOCITY_KINDS]
        when = t * schedule.end
        x = schedule.alpha(when)[:, None] * pair.x0 + schedule.sigma(when)[:, None] * pair.eps
        worst = 0.0
        for source in kinds:
            value = from_pair(source, pair, when, schedule)
            back = to_pair(source, value, x, when, schedule)
            # eps -> x0 divides by alpha: near t = 1 rounding is magnified by sigma/alpha
            scale = schedule.norm(when)[:, None] / schedule.alpha(when)[:, None]
            worst = max(worst, peak((back.x0 - pair.x0) / scale), peak(back.eps - pair.eps))
            for target in kinds:
                moved = convert(value, source, target, x, when, schedule)
                wanted = from_pair(target, pair, when, schedule)
                worst = max(worst, peak((moved - wanted) / scale / (1 + wanted.abs())))
        yield Check(f"conversions among {len(kinds)} kinds on {schedule}", worst, 1e-11)
