"""Gaussian paths x_t = alpha(t) x0 + sigma(t) eps; t = 0 is data, t = end is noise, everywhere.

Coefficients are computed in float64 from t of any shape; `like` alone broadcasts them over a batch and casts them to
the state's dtype.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from mvm.options import choose

Time = Tensor | float | NDArray[np.float64]


def as_time(t: Time) -> Tensor:
    """Return t as a float64 tensor."""
    return torch.as_tensor(t, dtype=torch.float64)


def like(coefficient: Tensor, x: Tensor) -> Tensor:
    """Return a coefficient (B,) or () shaped and typed to multiply x (B, ...)."""
    coefficient = coefficient.to(device=x.device, dtype=x.dtype)
    return coefficient.reshape(-1, *(1,) * (x.ndim - 1)) if coefficient.ndim else coefficient


class Schedule(ABC):
    """A Gaussian path: alpha falls from 1, sigma rises from 0."""

    # sigma leaves 0 as t^sigma_power: alpha and sigma are smooth functions of t^sigma_power.
    sigma_power: ClassVar[float]

    @property
    def end(self) -> float:
        """The time of pure (or nearly pure) noise."""
        return 1.0

    @property
    def whole(self) -> "Schedule":
        """The schedule to its very end: itself, but for a part of one."""
        return self

    def until(self, t: float) -> "Until":
        """Return the part from data to time t: what is sampled on it starts from a state at t."""
        return Until(self.whole, t)

    @abstractmethod
    def alpha(self, t: Time) -> Tensor: ...
    @abstractmethod
    def sigma(self, t: Time) -> Tensor: ...
    @abstractmethod
    def alpha_rate(self, t: Time) -> Tensor:
        """d alpha / dt."""

    @abstractmethod
    def variance_rate(self, t: Time) -> Tensor:
        """d sigma^2 / dt: finite where sigma' is not."""

    def sigma_rate(self, t: Time) -> Tensor:
        """d sigma / dt."""
        return self.variance_rate(t) / (2 * self.sigma(t))

    @abstractmethod
    def lam(self, t: Time) -> Tensor:
        """Half log-SNR, log(alpha / sigma)."""

    @abstractmethod
    def t_from_lam(self, lam: Time) -> Tensor:
        """The time of a half log-SNR, clipped to [0, end]."""

    def level(self, t: Time) -> Tensor:
        """Noise level in [0, 1]: sqrt(t) of the mean-velocity path (T = 1) at equal SNR.

        sqrt(t) = (-q + sqrt(q^2 + 4))/2 with q = alpha/sigma, rewritten so that both ends are finite.
        """
        alpha, sigma = self.alpha(t), self.sigma(t)
        return 2 * sigma / (alpha + torch.sqrt(alpha**2 + 4 * sigma**2))

    def norm(self, t: Time) -> Tensor:
        """sqrt(alpha^2 + sigma^2): states of two paths at equal SNR differ by the ratio of their norms."""
        return torch.hypot(self.alpha(t), self.sigma(t))

    def diffusion(self, t: Time) -> Tensor:
        """Squared noise rate of the reverse SDE at rho = 1 (it is 1/T on the mean-velocity path).

        tau^2 g^2 with tau^2 = (1-m)/(1+m), m = level^2, g^2 = -2 sigma^2 dlam/dt; written with
        (1-m)/alpha = level/sigma so that alpha = 0 is no singularity.
        """
        level = self.level(t)
        m = level**2
        return ((1 - m) * self.variance_rate(t) - 2 * self.sigma(t) * level * self.alpha_rate(t)) / (1 + m)


@dataclass(frozen=True)
class MeanVelocity(Schedule):
    """x_t = (1 - t/T) x0 + sqrt(t/T) eps (paper eq. 3)."""

    T: float = 1.0
    sigma_power: ClassVar[float] = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.T < float("inf"):
            raise ValueError(f"T={self.T} is out of range; it must be positive and finite")

    @property
    def end(self) -> float:
        return self.T

    def alpha(self, t: Time) -> Tensor:
        return 1 - as_time(t) / self.T

    def sigma(self, t: Time) -> Tensor:
        return torch.sqrt(as_time(t) / self.T)

    def alpha_rate(self, t: Time) -> Tensor:
        return torch.full_like(as_time(t), -1 / self.T)

    def variance_rate(self, t: Time) -> Tensor:
        return torch.full_like(as_time(t), 1 / self.T)

    def lam(self, t: Time) -> Tensor:
        s = as_time(t) / self.T
        return torch.log1p(-s) - 0.5 * torch.log(s)

    def t_from_lam(self, lam: Time) -> Tensor:
        # e^lam = 2 sinh(y) with y = -log(t/T)/2
        return self.T * torch.exp(-2 * torch.asinh(torch.exp(as_time(lam)) / 2))


MEAN_VELOCITY = MeanVelocity()


@dataclass(frozen=True)
class LinearFlow(Schedule):
    """x_t = (1 - t) x0 + t eps: rectified flow, flow matching with the OT path."""

    sigma_power: ClassVar[float] = 1.0

    def alpha(self, t: Time) -> Tensor:
        return 1 - as_time(t)

    def sigma(self, t: Time) -> Tensor:
        return as_time(t)

    def alpha_rate(self, t: Time) -> Tensor:
        return torch.full_like(as_time(t), -1.0)

    def variance_rate(self, t: Time) -> Tensor:
        return 2 * as_time(t)

    def sigma_rate(self, t: Time) -> Tensor:
        return torch.full_like(as_time(t), 1.0)  # at t = 0 too

    def lam(self, t: Time) -> Tensor:
        t = as_time(t)
        return torch.log1p(-t) - torch.log(t)

    def t_from_lam(self, lam: Time) -> Tensor:
        return torch.sigmoid(-as_time(lam))


@dataclass(frozen=True)
class VariancePreserving(Schedule):
    """alpha = exp(-B/2), sigma = sqrt(1 - exp(-B)), B(t) = beta_min t + (beta_max - beta_min) t^2/2."""

    beta_min: float = 0.1
    beta_max: float = 20.0
    sigma_power: ClassVar[float] = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max:
            raise ValueError(
                f"beta_min={self.beta_min}, beta_max={self.beta_max}: they must satisfy 0 < beta_min <= beta_max"
            )

    def _integral(self, t: Time) -> Tensor:
        t = as_time(t)
        return self.beta_min * t + 0.5 * (self.beta_max - self.beta_min) * t**2

    def _beta(self, t: Time) -> Tensor:
        return self.beta_min + (self.beta_max - self.beta_min) * as_time(t)

    def alpha(self, t: Time) -> Tensor:
        return torch.exp(-0.5 * self._integral(t))

    def sigma(self, t: Time) -> Tensor:
        return torch.sqrt(-torch.expm1(-self._integral(t)))

    def alpha_rate(self, t: Time) -> Tensor:
        return -0.5 * self._beta(t) * self.alpha(t)

    def variance_rate(self, t: Time) -> Tensor:
        return self._beta(t) * self.alpha(t) ** 2

    def lam(self, t: Time) -> Tensor:
        return torch.log(self.alpha(t)) - torch.log(self.sigma(t))

    def t_from_lam(self, lam: Time) -> Tensor:
        # alpha^2 = sigmoid(2 lam), so B = softplus(-2 lam); the root of B(t) without cancellation
        b = softplus(-2 * as_time(lam), threshold=1e9).clamp(max=(self.beta_min + self.beta_max) / 2)  # B(1)
        root = torch.sqrt(self.beta_min**2 + 2 * (self.beta_max - self.beta_min) * b)
        return 2 * b / (self.beta_min + root)


@dataclass(frozen=True)
class Until(Schedule):
    """The part of a schedule from data to time `last`, where there is still some data; fields of the whole fit it."""

    schedule: Schedule
    last: float

    def __post_init__(self) -> None:
        if not 0 < self.last <= self.schedule.end:
            raise ValueError(f"t={self.last} is out of range; it must lie in (0, {self.schedule.end:g}]")
        object.__setattr__(self, "sigma_power", self.schedule.sigma_power)

    @property
    def end(self) -> float:
        return self.last

    @property
    def whole(self) -> Schedule:
        return self.schedule

    def alpha(self, t: Time) -> Tensor:
        return self.schedule.alpha(t)

    def sigma(self, t: Time) -> Tensor:
        return self.schedule.sigma(t)

    def alpha_rate(self, t: Time) -> Tensor:
        return self.schedule.alpha_rate(t)

    def variance_rate(self, t: Time) -> Tensor:
        return self.schedule.variance_rate(t)

    def sigma_rate(self, t: Time) -> Tensor:
        return self.schedule.sigma_rate(t)

    def lam(self, t: Time) -> Tensor:
        return self.schedule.lam(t)

    def t_from_lam(self, lam: Time) -> Tensor:
        return self.schedule.t_from_lam(lam)


SCHEDULES: dict[str, type[Schedule]] = {
    "mean-velocity": MeanVelocity,
    "linear-flow": LinearFlow,
    "variance-preserving": VariancePreserving,
}


def schedule_named(name: str, T: float = 1.0) -> Schedule:
    """Return the schedule of that name; T is for mean-velocity alone."""
    kind = choose("schedule", name, SCHEDULES)
    if kind is MeanVelocity:
        return MeanVelocity(T)
    if T != 1:
        raise ValueError(f"T={T} belongs to schedule='mean-velocity'; '{name}' ends at 1, leave T at 1")
    return kind()


def equal_snr_time(t: Time, source: Schedule, target: Schedule) -> Tensor:
    """Return the target's time with the signal-to-noise ratio the source has at t."""
    return target.t_from_lam(source.lam(t))


def equal_snr_scale(t: Time, source: Schedule, target: Schedule) -> Tensor:
    """Return c such that c * (state of source at t) is a state of target at equal SNR."""
    return target.norm(equal_snr_time(t, source, target)) / source.norm(t)
