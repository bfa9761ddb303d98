"""Any model of a Gaussian path x' = alpha' x0 + sigma' eps as a Field, without training.

From the state x at time t of MVM's path: the level t' of equal log-SNR on the model's own path, the state
x' = x norm'/norm there, the model's answer, and the x0_hat it means at (x', t').

A model knows its levels between two ends only. Beyond them t' stays at the nearest one and x' keeps the norm that the
model has seen there; the answer is read with alpha' and sigma' of that very level, as read with those of x it would
diverge where alpha -> 0. So:

- noisier than the model knows (t near 1): it sees noise of its last level and gives its best guess there, as in its
  own sampler; but the state itself starts at alpha = 0, so no signal that the noise lacks is taken for granted;
- an eps or score model of a path that ends in pure noise is asked up to alpha/sigma = 1/256 only: beyond, its answer
  says ever less of x0;
- cleaner than it knows (t near 0): x0_hat is its denoised image at its first level, where its own sampler ends. Asked
  there again and again it smooths what is smooth already; `BridgedField.solver` asks once and is done. Its answer read
  as a score instead would smooth nothing, but leave up to 0.8 of that level's noise in sharp data.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mvm.options import at_least, choose
from mvm.path import (
    KINDS,
    MEAN_VELOCITY,
    MEAN_VELOCITY_KINDS,
    NOISE_KINDS,
    Condition,
    LinearFlow,
    MeanVelocity,
    Schedule,
    as_time,
    equal_snr_time,
    like,
    to_x0,
)
from mvm.path.betas import BetaTable
from mvm.path.condition import batched, cat, check_labels, require_finite
from mvm.path.schedule import Time
from mvm.solver import Multistep, adams

# (x, timestep (B,)) and the condition -> a prediction of x's shape. Labels (B,), None where there are classes but no
# label, and a tensor (B, ...) are the third argument; a mapping is keyword arguments.
Network = Callable[..., Tensor]
Clock = Callable[[Tensor], Tensor]

PATHS = {"mvm": "MVM's path, by equal log-SNR", "own": "the model's own path"}
WEAKEST_SIGNAL = 2.0**-8  # alpha/sigma below which eps is not asked: in x0_hat its error grows by the inverse


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


@dataclass(frozen=True)
class BridgedField:
    """A Field on `schedule` by a network of the path `own`; it knows its own times from `first` to `last`."""

    network: Network
    own: Schedule
    kind: str
    schedule: Schedule
    clock: Clock
    first: float
    last: float
    num_classes: int
    null_label: int | None
    null_arguments: Condition = field(default=None, compare=False, repr=False)
    joined: bool = False

    @property
    def solver(self) -> Multistep:
        """The default solver, with its last evaluation at the cleanest level that the model knows."""
        if self.first == 0:
            return adams()
        return adams().ending_at(float(equal_snr_time(self.first, self.own, MEAN_VELOCITY)))

    def check_condition(self, condition: Condition, x: Tensor) -> Condition:
        """Return the condition with one row per sample of x: labels of the model's classes, or any structure."""
        if self.num_classes and not isinstance(condition, Mapping):
            return check_labels(condition, x, self.num_classes)
        return require_finite(batched(condition, x))

    def _null(self, x: Tensor) -> Condition:
        """Return the condition of the unconditional branch; None where nothing is known of it."""
        if self.null_arguments is not None:
            return batched(self.null_arguments, x, "null_arguments")
        if self.null_label is None:
            return None
        return torch.full((x.shape[0],), self.null_label, dtype=torch.int64, device=x.device)

    def __call__(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        own_time = t if self.schedule is self.own else equal_snr_time(t, self.schedule, self.own)
        level = own_time.clamp(self.first, self.last)
        seen = x * like(self.own.norm(level) / self.schedule.norm(t), x)
        condition = self._null(x) if condition is None else batched(condition, x)
        if isinstance(condition, Mapping):
            value = self.network(seen, self.clock(level), **condition)
        else:
            third = (condition,) if self.num_classes or condition is not None else ()
            value = self.network(seen, self.clock(level), *third)
        if value.shape != x.shape:
            raise ValueError(f"the model answers with shape {tuple(value.shape)} to a state of {tuple(x.shape)}")
        return to_x0(self.kind, value.to(x.dtype), seen, level, self.own)

    def joins(self, x: Tensor) -> bool:
        """Return whether guidance is to ask for both of its answers in one call."""
        return self.joined

    def both(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Return x0_hat without and with the condition from one call of the network with twice the rows."""
        null = self._null(x)
        if null is None:
            raise ValueError("null_arguments=None: joined=True needs it, or null_label, for the unconditional branch")
        pair = cat(null, batched(condition, x))
        without, conditional = self(torch.cat((x, x)), torch.cat((t, t)), pair).chunk(2)
        return without, conditional


def fits(network: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Raise if the network cannot be called so: what it does not know, or needs and was not given, is named."""
    try:
        signature = inspect.signature(network.forward if isinstance(network, nn.Module) else network)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        name = getattr(network, "__name__", type(network).__name__)
        raise ValueError(
            f"condition: {error}; {name} takes {', '.join(signature.parameters)}; name its arguments in "
            "condition={...} of mvm.sample and, for the unconditional branch of guidance, in null_arguments={...}"
        ) from error


def _fitted(network: Network) -> Network:
    """Return the network with every call held against its signature."""

    def call(x: Tensor, time: Tensor, /, *condition: Condition, **named: Any) -> Tensor:
        fits(network, x, time, *condition, **named)
        return network(x, time, *condition, **named)

    return call


def from_model(
    network: Network,
    schedule: Schedule,
    kind: str,
    *,
    timestep: Clock | None = None,
    first: float | None = None,
    num_classes: int = 0,
    null_label: int | None = None,
    null_arguments: Condition = None,
    joined: bool = False,
    path: str = "mvm",
) -> BridgedField:
    """Return a Field by a network that was trained on `schedule` to predict `kind` (a name of mvm.path.KINDS).

    network: (x, timestep), or (x, timestep, labels) where num_classes > 0; labels are None for the null class,
    or null_label where that is given. A condition that is a mapping becomes keyword arguments, any other the third
    argument. null_arguments: the condition of guidance's unconditional branch; rows of one sample are for all.
    joined: ask for both branches in one call, with twice the rows. timestep: what the network receives at own times t,
    float64 (B,); default: t itself, of a BetaTable the fractional training step. first: the cleanest time that the
    network knows; default: 0, of a BetaTable its training step 0. path: "mvm", or "own", where the solver runs on the
    model's own path.
    """
    choose("path", path, PATHS)
    choose("kind", kind, KINDS)
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule={schedule!r} must be a Schedule of mvm.path or mvm.bridge")
    if kind in MEAN_VELOCITY_KINDS and not isinstance(schedule, MeanVelocity):
        raise ValueError(f"kind='{kind}' is MVM's mean velocity; on {schedule} say 'diffusion_v' or 'flow'")
    clock: Clock = schedule.timestep if isinstance(schedule, BetaTable) else torch.clone
    first = (schedule.first if isinstance(schedule, BetaTable) else 0.0) if first is None else first
    at_least("first", first, 0)
    if first >= schedule.end:
        raise ValueError(f"first={first} must lie below {schedule.end}, the end of {schedule}")
    at_least("num_classes", num_classes, 0)
    if null_label is not None and not num_classes:
        raise ValueError(f"null_label={null_label}: a model without classes takes no label; set num_classes")
    if null_label is not None and null_arguments is not None:
        raise ValueError(f"null_label={null_label} and null_arguments are two unconditional branches; give one")
    last = float(schedule.t_from_lam(math.log(WEAKEST_SIGNAL))) if kind in NOISE_KINDS else schedule.end
    field_path = MEAN_VELOCITY if path == "mvm" else schedule
    return BridgedField(
        _fitted(network), schedule, kind, field_path, timestep or clock, first, last,
        num_classes, null_label, null_arguments, joined,
    )  # fmt: skip


def from_flow(
    network: Network, *, data_at: int = 0, velocity_to: str | None = None, time_scale: float = 1.0, **options: Any
) -> BridgedField:
    """Return a Field by a velocity model of the straight path between data and noise (rectified flow).

    data_at, velocity_to, time_scale: its `FlowConvention`. options: those of `from_model`.
    """
    convention, fitted = FlowConvention(data_at, velocity_to, time_scale), _fitted(network)

    def flow(x: Tensor, time: Tensor, /, *condition: Condition, **named: Any) -> Tensor:
        return convention.sign * fitted(x, time, *condition, **named)

    return from_model(flow, LinearFlow(), "flow", timestep=convention.timestep, **options)


def from_edm(network: Network, *, sigma_min: float = 0.002, sigma_max: float = 80.0, **options: Any) -> BridgedField:
    """Return a Field by a denoiser D(x0 + sigma eps; sigma) that knows sigma_min to sigma_max.

    options: those of `from_model`.
    """
    if not 0 <= sigma_min < sigma_max:
        raise ValueError(f"sigma_min={sigma_min}, sigma_max={sigma_max}: they must satisfy 0 <= sigma_min < sigma_max")
    return from_model(network, VarianceExploding(sigma_max), "x0", first=sigma_min, **options)
