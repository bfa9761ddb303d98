"""A field of MVM in the language of other samplers: eps, v, flow velocity or denoiser, on their path and clock."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mvm.bridge.diffusers import beta_table
from mvm.bridge.incoming import Clock, FlowConvention, VarianceExploding
from mvm.path import MEAN_VELOCITY, Condition, Field, LinearFlow, Schedule, TrainedField, as_time, convert, equal_snr
from mvm.path.betas import BetaTable
from mvm.path.condition import batched

ROUNDING = 1e-6  # of the end: what float32 may do to a caller's time


@dataclass(frozen=True)
class Outgoing:
    """(x, time, condition) -> a prediction of `kind` on `path`; `clock` maps the caller's time to that in [0, end]."""

    field: Field
    path: Schedule
    kind: str
    clock: Clock
    end: float
    sign: int = 1

    def __call__(self, x: Tensor, time: Tensor | float, condition: Condition = None) -> Tensor:
        given = as_time(time).to(x.device)
        if given.numel() not in (1, x.shape[0]):
            raise ValueError(
                f"time has {given.numel()} entries for a batch of {x.shape[0]}; give one, or one per sample"
            )
        t, beyond = self.clock(given), ROUNDING * min(self.end, 1.0)
        if not bool(((t >= -beyond) & (t <= self.end + beyond)).all()):
            raise ValueError(
                f"time={given.tolist()} lies outside of the path; give a training step of a table, t of a path, or a "
                "sigma of at least 0; a flow in 0 to 1000 says time_scale=1000"
            )
        t = t.clamp(0, self.end).reshape(-1).expand(x.shape[0])
        condition = None if condition is None else batched(condition, x)
        return self.sign * convert(self.field(x, t, condition), "x0", self.kind, x, t, self.path)


def _outgoing(
    field: Field, source: Schedule | None, path: Schedule, kind: str, clock: Clock, sign: int = 1
) -> Outgoing:
    known = field.schedule if isinstance(field, TrainedField) else MEAN_VELOCITY
    end = math.inf if isinstance(path, VarianceExploding) else path.end  # x0 + sigma eps has any sigma
    return Outgoing(equal_snr(field, source or known, path), path, kind, clock, end, sign)


def _of_scheduler(field: Field, scheduler: Any, kind: str, schedule: Schedule | None) -> Outgoing:
    path = scheduler if isinstance(scheduler, Schedule) else beta_table(scheduler)
    return _outgoing(field, schedule, path, kind, path.time if isinstance(path, BetaTable) else torch.clone)


def as_eps(field: Field, scheduler: Any, *, schedule: Schedule | None = None) -> Outgoing:
    """Return (x, timestep, condition=None) -> eps_hat, for a diffusers scheduler of a beta table.

    scheduler: such a scheduler, or the Schedule itself: of a BetaTable times are training steps, of another its own t.
    x is what the scheduler's scale_model_input gives. schedule: the field's path; default: the model's own, or MVM's.
    """
    return _of_scheduler(field, scheduler, "eps", schedule)


def as_v(field: Field, scheduler: Any, *, schedule: Schedule | None = None) -> Outgoing:
    """Return (x, timestep, condition=None) -> alpha eps - sigma x0, v-prediction; arguments as of `as_eps`."""
    return _of_scheduler(field, scheduler, "diffusion_v", schedule)


def as_flow(
    field: Field,
    *,
    data_at: int = 0,
    velocity_to: str | None = None,
    time_scale: float = 1.0,
    schedule: Schedule | None = None,
) -> Outgoing:
    """Return (x, time, condition=None) -> the velocity of the straight path; options as of `from_flow`.

    time_scale=1000 suits the timesteps of diffusers' FlowMatchEulerDiscreteScheduler.
    """
    convention = FlowConvention(data_at, velocity_to, time_scale)
    return _outgoing(field, schedule, LinearFlow(), "flow", convention.time, convention.sign)


def as_denoiser(field: Field, *, schedule: Schedule | None = None) -> Outgoing:
    """Return (x, sigma, condition=None) -> D(x; sigma) for x = x0 + sigma eps, as k-diffusion's samplers call it."""
    return _outgoing(field, schedule, VarianceExploding(), "x0", torch.clone)
