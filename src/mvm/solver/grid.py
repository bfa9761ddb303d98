"""Time grids: N evaluation times, then the end."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvm.options import at_least
from mvm.path import MEAN_VELOCITY, Schedule

SMALLEST = 1e-100  # a time above 0 whose powers in a table are numbers
DEFAULT_T_MIN = 1e-3  # the last time a LamGrid evaluates


class Grid(ABC):
    """Times t_0 > ... > t_N = 0 of MeanVelocity(T=1): N evaluations, then the clean image."""

    @abstractmethod
    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        """Return nfe + 1 times; `start` < 1 where the field's schedule never reaches pure noise."""


def power_times(steps: int, start: float, end: float, r: float, p: float) -> NDArray[np.float64]:
    """Return steps + 1 times from exactly `start` to exactly `end`: t^(1/r) goes linearly in (i/steps)^p.

    r draws the times to the clean end. p > 1 draws them to pure noise as well, 1 - t ~ (i/steps)^p there: what many
    pixels share, as colour and brightness, is decided where one pixel is still all noise.
    """
    done = (np.arange(steps + 1) / steps) ** p
    high, low = start ** (1 / r), end ** (1 / r)
    times = (high * (1 - done) + low * done) ** r
    times[0], times[-1] = start, end  # not a rounding away from them
    return times


@dataclass(frozen=True)
class PowerGrid(Grid):
    """t_i = start (1 - (i/N)^p)^r, from exactly `start` (at most t_max) to exactly 0."""

    r: float
    p: float = 1.0
    t_max: float = 1.0

    def __post_init__(self) -> None:
        for name, power in (("r", self.r), ("p", self.p)):
            at_least(name, power, 1.0)
            if not np.isfinite(power):
                raise ValueError(f"{name}={power} is out of range; it must be finite")
        if not 0 < self.t_max <= 1:
            raise ValueError(f"t_max={self.t_max} is out of range; it must lie in (0, 1]")

    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        times = power_times(nfe, min(start, self.t_max), 0.0, self.r, self.p)
        if times[-2] < SMALLEST:
            raise ValueError(f"r={self.r}: the last of {nfe} times is {times[-2]}; use a smaller r or a smaller nfe")
        if (np.diff(times) >= 0).any():
            raise ValueError(f"p={self.p}: {nfe} times do not all differ; use a smaller p or a smaller nfe")
        return tuple(times.tolist())


@dataclass(frozen=True)
class LamGrid(Grid):
    """N times uniform in lam from t_max to t_min; x0_hat at the last is the answer (end 0)."""

    t_max: float = 0.999
    t_min: float = DEFAULT_T_MIN

    def __post_init__(self) -> None:
        if not 0 < self.t_min < self.t_max < 1:
            raise ValueError(f"t_min={self.t_min}, t_max={self.t_max}: they must satisfy 0 < t_min < t_max < 1")

    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        if start <= self.t_min:
            raise ValueError(
                f"t_min={self.t_min}: the field's schedule begins at {start:g} already, in time of MeanVelocity(T=1)"
                "; use a smaller t_min, or solver 'adams'"
            )
        first, last = (float(MEAN_VELOCITY.lam(t)) for t in (min(self.t_max, start), self.t_min))
        lams = np.linspace(first, last, nfe)
        return (*MEAN_VELOCITY.t_from_lam(lams).tolist(), 0.0)


def soft_lam_times(steps: int, start: float, end: float, c: float, d: float) -> tuple[float, ...]:
    """Return steps + 1 times from exactly `start` to exactly `end`, uniform in log((r + c)/(1 + d r)), r = sigma/alpha.

    Between r = 1/d and r = c that is uniform in lam; beyond, the steps grow. Data of std s in some direction are
    decided around r = s: 1/d belongs near the largest std of the data along any direction, c below the smallest.
    """
    t = np.array([start, end])
    first, last = np.log((np.sqrt(t) + c * (1 - t)) / (1 - t + d * np.sqrt(t)))
    e = np.exp(first + (last - first) * np.arange(1, steps) / steps)
    r = (e - c) / (1 - d * e)
    inner = (2 * r / (1 + np.sqrt(1 + 4 * r**2))) ** 2  # t of r: sqrt(t) = r (1 - t)
    return (start, *inner.tolist(), end)


@dataclass(frozen=True)
class SoftLamGrid(Grid):
    """Times uniform in log((r + c)/(1 + d r)), r = sigma/alpha, from exactly `start` to exactly 0 (`soft_lam_times`).

    t_min > 0: the last time that is evaluated, where the field knows none that is cleaner.
    """

    c: float
    d: float
    t_min: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("c", self.c), ("d", self.d)):
            if not 0 < value < np.inf:
                raise ValueError(f"{name}={value} is out of range; it must be positive and finite")
        if self.c * self.d >= 1:
            raise ValueError(f"c={self.c}, d={self.d}: their product must lie below 1")

    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        if not self.t_min:
            return soft_lam_times(nfe, start, 0.0, self.c, self.d)
        known = soft_lam_times(nfe - 1, start, self.t_min, self.c, self.d) if nfe > 1 else (start,)
        return (*known, 0.0)


@dataclass(frozen=True)
class FixedGrid(Grid):
    """Given times, for exactly as many evaluations; they fall from the schedule's start to 0."""

    given: tuple[float, ...]

    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        if nfe != len(self.given) - 1:
            raise ValueError(
                f"nfe={nfe}: these times were made for {len(self.given) - 1} evaluations; use that, or adams"
            )
        return self.given


def smooth_times(schedule: Schedule, steps: int) -> tuple[float, ...]:
    """Return steps + 1 times of the schedule's own, uniform in the variable in which its sigma is smooth."""
    share = 1 - np.arange(steps + 1) / steps
    return tuple((schedule.end * share ** (1 / schedule.sigma_power)).tolist())
