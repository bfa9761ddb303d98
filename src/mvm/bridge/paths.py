"""Paths and conventions of other libraries: EDM's x0 + sigma eps, timesteps of flow models."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mvm.options import choose
from mvm.path import Schedule, as_time
from mvm.path.schedule import Time


@dataclass(frozen=True)
class VarianceExploding(Schedule):
    """x = x0 + t eps: EDM and k-diffusion, whose sigma is the time; it ends at sigma_max."""

    sigma_max: float = 80.0
    sigma_power: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_max < float("inf"):
            raise ValueError(f"sigma_max={self.sigma_max} is out of range; it must be positive and finite")

    @property
    def end(self) -> float:
        return self.sigma_max

    def alpha(self, t: Time) -> Tensor:
        return torch.ones_like(as_time(t))

    def sigma(self, t: Time) -> Tensor:
        return as_time(t)

    def alpha_rate(self, t: Time) -> Tensor:
        return torch.zeros_like(as_time(t))

    def variance_rate(self, t: Time) -> Tensor:
        return 2 * as_time(t)

    def sigma_rate(self, t: Time) -> Tensor:
        return torch.ones_like(as_time(t))  # at t = 0 too

    def lam(self, t: Time) -> Tensor:
        return -torch.log(as_time(t))

    def t_from_lam(self, lam: Time) -> Tensor:
        return torch.exp(-as_time(lam)).clamp_max(self.sigma_max)


VELOCITIES = {"noise": 1, "data": -1}


@dataclass(frozen=True)
class FlowConvention:
    """The convention of a flow model for time and velocity.

    data_at: the end of its time at which data stands, 0 or 1. velocity_to: "noise" (eps - x0) or "data" (x0 - eps);
    None: dx/dt in its own time, so "noise" with data at 0 and "data" with data at 1. time_scale: its time at the far
    end, 1000 for most of diffusers.
    """

    data_at: int = 0
    velocity_to: str | None = None
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.data_at not in (0, 1):
            raise ValueError(f"data_at={self.data_at!r} is unknown; allowed: 0, 1")
        if self.velocity_to is not None:
            choose("velocity_to", self.velocity_to, VELOCITIES)
        if not 0 < self.time_scale < float("inf"):
            raise ValueError(f"time_scale={self.time_scale} is out of range; it must be positive and finite")

    @property
    def sign(self) -> int:
        """Return +1 where its velocity is eps - x0, -1 where x0 - eps."""
        return 1 - 2 * self.data_at if self.velocity_to is None else VELOCITIES[self.velocity_to]

    def timestep(self, t: Tensor) -> Tensor:
        """Return its time at t of LinearFlow."""
        return self.time_scale * (1 - t if self.data_at else t)

    def time(self, timestep: Tensor) -> Tensor:
        """Return t of LinearFlow at its time."""
        t = timestep / self.time_scale
        return 1 - t if self.data_at else t
