"""Any network as a field: `wrap`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mvm.network.own import Own
from mvm.options import choose
from mvm.path import KINDS, MEAN_VELOCITY, Condition, MeanVelocity, Null, Schedule, to_x0
from mvm.path.condition import batched, null_of, require_finite, require_fit
from mvm.path.convert import MEAN_VELOCITY_KINDS, NOISE_KINDS
from mvm.path.field import network_time
from mvm.path.schedule import SCHEDULES

Time = str | Callable[[Tensor], Tensor]


class PredictedField(nn.Module):
    """x0_hat by a network that predicts a kind of mvm.path.KINDS on a schedule; no condition is the null condition.

    shift: the factor of sigma/alpha by which solvers move their times to more noise, 1: none.
    """

    network: Any
    kind: str
    schedule: Schedule
    shift = 1.0
    _no_inner = "internal guidance: the network returns no inner prediction; have it return a pair"

    def _null(self, x: Tensor, condition: Condition) -> Condition:
        """Return the null condition for the rows of x; a null that is a function takes the condition."""
        return null_of(self.network.null, condition, x)

    def _given(self, x: Tensor, condition: Condition) -> Condition:
        """Return the condition, or the null condition for all where there is none."""
        return self._null(x, None) if condition is None else condition

    def _inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the network receives for x and t."""
        return x, network_time(self.network.time, t, self.schedule)

    def _x0(self, prediction: Tensor | None, x: Tensor, t: Tensor) -> Tensor:
        """Return x0_hat of a prediction of the network, or of its inner head, if it has one."""
        if prediction is None:
            raise ValueError(self._no_inner)
        return to_x0(self.kind, prediction.to(x.dtype), x, t, self.schedule)

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        """Return x0_hat; condition None is the null condition."""
        return self._x0(self.network(*self._inputs(x, t), self._given(x, condition)).prediction, x, t)

    def pair(self, x: Tensor, t: Tensor, condition: Condition = None) -> tuple[Tensor, Tensor]:
        """Return (outer, inner) x0_hat from one pass."""
        output = self.network(*self._inputs(x, t), self._given(x, condition))
        return self._x0(output.prediction, x, t), self._x0(output.inner, x, t)


class NetworkField(PredictedField):
    """A field by a network on a path of its own; see `wrap`."""

    def __init__(self, network: Own, kind: str, schedule: Schedule) -> None:
        super().__init__()
        self.network, self.kind, self.schedule = network, kind, schedule

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the network's weights, which it is given x in; None: a function, given x as it is."""
        return next((value.dtype for value in self.parameters() if value.is_floating_point()), None)

    def check_condition(self, condition: Condition, x: Tensor) -> Condition:
        """Return the condition with one row per sample of x; one that does not fit is refused."""
        given = require_finite(batched(condition, x))
        if self.network.null is not None:
            require_fit(given, require_finite(null_of(self.network.null, given, x), "null"))
        return given

    def _inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the network receives for x and t: x in the type of the weights."""
        x, time = super()._inputs(x, t)
        return x.to(self.dtype or x.dtype), time

    def joins(self, x: Tensor) -> bool:
        """Return whether `both` is to be asked: a null that is a function needs the condition."""
        return callable(self.network.null)

    def both(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Return x0_hat of the null condition and of the condition."""
        return self(x, t, self._null(x, condition)), self(x, t, condition)


def wrap(
    network: Callable[..., Any],
    *,
    kind: str = "u",
    path: Schedule | str = MEAN_VELOCITY,
    null: Null = None,
    time: Time = "t",
) -> NetworkField:
    """Return any network as a field, which mvm.loss trains and mvm.sample, solve, likelihood and edit take.

        field = mvm.wrap(network, null=torch.zeros(1, 16))
        mvm.loss(field, x0, condition, drop=0.1).backward()
        mvm.sample(field, noise, condition=condition, guidance=ClassifierFree(2.0))

    network: (x, t, condition) -> its prediction of `kind` (a name in mvm.path.KINDS), for x of any shape (B, ...) and
    t (B,) of x's dtype; one of (x, t) takes no condition. See mvm.network.own.Own for what else it may return. path: a
    schedule of mvm.path, or its name. null: what stands for no condition, in training and in guidance: a condition of
    one row for all, a whole number for labels, or a function condition -> null condition; None: the network gets
    None. time: what the network receives for t: "t", "level" (the noise level in [0, 1], sqrt(t) on mean velocity),
    or a function of t, float64 (B,).
    """
    schedule = choose("path", path, SCHEDULES)() if isinstance(path, str) else path
    if not isinstance(schedule, Schedule):
        raise ValueError(f"path={path!r} must be a schedule of mvm.path, e.g. mvm.path.LinearFlow(), or its name")
    choose("kind", kind, KINDS)
    if kind in MEAN_VELOCITY_KINDS and not isinstance(schedule, MeanVelocity):
        raise ValueError(f"kind='{kind}' belongs to MeanVelocity; on path={schedule} use kind='flow'")
    if kind in NOISE_KINDS and float(schedule.alpha(schedule.end)) == 0:
        raise ValueError(
            f"kind='{kind}' gives no x0 where sampling starts on path={schedule}, as alpha = 0 there; use another "
            "kind, or path='variance-preserving'"
        )
    if not callable(time):
        choose("time", time, dict.fromkeys(("t", "level")))
    if isinstance(network, NetworkField):
        raise ValueError("network is wrapped already; use it as it is")
    return NetworkField(Own(network, null, time), kind, schedule)
