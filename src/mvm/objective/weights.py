"""Loss weights over timesteps, by the error that they make of any kind's; none moves the optimum."""

from collections.abc import Callable

import torch
from torch import Tensor

from mvm.path import Pair, Schedule, as_time, from_pair
from mvm.path.schedule import Time

# (kind, t, schedule) -> what multiplies the squared error of that kind, float64 (B,)
Weight = Callable[[str, Tensor, Schedule], Tensor]


def per_noise(kind: str, t: Time, schedule: Schedule) -> Tensor:
    """Return d value / d eps of this kind at fixed x, float64 and shaped as t: how a wrong eps shows in it."""
    t = as_time(t)
    ratio = schedule.sigma(t) / schedule.alpha(t)  # at fixed x, x0 moves by -ratio where eps moves by 1
    return from_pair(kind, Pair(-ratio, torch.ones_like(ratio)), t, schedule)


def noise_weight(kind: str, t: Tensor, schedule: Schedule) -> Tensor:
    """Return the weight that makes the error one of eps, whatever the kind: sigma^2 for the score."""
    return per_noise(kind, t, schedule) ** -2


def likelihood_weight(kind: str, t: Tensor, schedule: Schedule) -> Tensor:
    """Return the weight that makes the error g^2 |d score|^2 = g^2/sigma^2 |d eps|^2, whatever the kind.

    g^2 = (sigma^2)' - 2 sigma^2 alpha'/alpha is the squared noise rate of the forward SDE: beta(t) where the path
    preserves variance. g^2/sigma^2 = -2 dlam/dt, so the mean over uniform t is twice the integral over lam.
    """
    variance = schedule.sigma(t) ** 2
    forward = schedule.variance_rate(t) - 2 * variance * schedule.alpha_rate(t) / schedule.alpha(t)
    return forward / variance * noise_weight(kind, t, schedule)


def flow_weight(kind: str, t: Tensor, schedule: Schedule) -> Tensor:
    """Return the weight that makes the error one of eps - x0, flow matching's velocity at the same signal-to-noise.

    At fixed x, x0 moves by -sigma where eps moves by alpha, and eps - x0 by alpha + sigma: (1 - t + sqrt(t))^2 for u.
    """
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    return ((alpha + sigma) / from_pair(kind, Pair(-sigma, alpha), t, schedule)) ** 2


# Weights are not normalised: the constant would depend on the timestep distribution, and Adam divides it out.
WEIGHTS: dict[str, Weight | None] = {
    "none": None,
    "noise": noise_weight,
    "likelihood": likelihood_weight,
    "flow": flow_weight,
}
