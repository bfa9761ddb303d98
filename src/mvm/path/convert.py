"""Prediction kinds, through the pair (x0, eps).

Each kind is three small functions: `from_pair` (what a network is trained on), `to_x0` and `to_eps` (what its output
means). At the ends:

- u, x0, eps and diffusion-v are finite given the pair, at every t;
- v, the score and (where sigma' is infinite) the flow velocity diverge at t = 0: they come out as inf;
- x0 or a divergent kind gives no eps at t = 0, and eps or the score gives no x0 where alpha = 0:
  a ValueError that names t.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mvm.options import choose
from mvm.path.schedule import MeanVelocity, Schedule, Time, as_time, like


class Pair(NamedTuple):
    """Clean image and noise: x = alpha x0 + sigma eps."""

    x0: Tensor
    eps: Tensor


@dataclass(frozen=True)
class Moment:
    """The coefficients of one schedule at times t, shaped to multiply x."""

    schedule: Schedule
    t: Tensor
    x: Tensor

    def of(self, coefficient: Tensor) -> Tensor:
        return like(coefficient, self.x)

    @property
    def alpha(self) -> Tensor:
        return self.of(self.schedule.alpha(self.t))

    @property
    def sigma(self) -> Tensor:
        return self.of(self.schedule.sigma(self.t))

    def require_mean_velocity(self) -> MeanVelocity:
        if not isinstance(self.schedule, MeanVelocity):
            raise ValueError(f"kinds 'u' and 'v' belong to MeanVelocity; {self.schedule} has 'flow' instead")
        return self.schedule

    @property
    def T(self) -> float:
        return self.require_mean_velocity().T

    def refuse(self, where: Tensor, what: str) -> None:
        """Raise if any t lies where the result is indeterminate.

        Not while a CUDA graph is captured, when no value can be read: a loop is captured at times it has run at.
        """
        if not (where.is_cuda and torch.cuda.is_current_stream_capturing()) and bool(where.any()):
            raise ValueError(f"t={float(self.t.reshape(-1)[int(where.reshape(-1).nonzero()[0])])}: {what}")

    # both in x's dtype: what is not 0 in float64 may be 0 in float16, and 0/0 is no result
    def need_noise(self, kind: str) -> None:
        self.refuse(self.sigma == 0, f"{kind} -> eps is indeterminate where sigma = 0")

    def need_signal(self, kind: str) -> None:
        self.refuse(self.alpha == 0, f"{kind} -> x0 is indeterminate where alpha = 0; train another kind")


def _u_to_x0(u: Tensor, x: Tensor, at: Moment) -> Tensor:
    """x0 = x + sqrt(t) u, for any T."""
    at.require_mean_velocity()
    return x + at.of(torch.sqrt(at.t)) * u


def _u_to_eps(u: Tensor, x: Tensor, at: Moment) -> Tensor:
    """eps = sqrt(t/T) x - (1 - t/T) sqrt(T) u."""
    return at.sigma * x - at.alpha * at.T**0.5 * u


def _u_from_pair(pair: Pair, at: Moment) -> Tensor:
    """u = sqrt(t)/T x0 - eps/sqrt(T)."""
    return at.of(torch.sqrt(at.t)) / at.T * pair.x0 - pair.eps / at.T**0.5


def _v_to_x0(v: Tensor, x: Tensor, at: Moment) -> Tensor:
    at.need_noise("v")
    return _u_to_x0(at.of(torch.sqrt(at.t)) * v, x, at)


def _v_to_eps(v: Tensor, x: Tensor, at: Moment) -> Tensor:
    at.need_noise("v")
    return _u_to_eps(at.of(torch.sqrt(at.t)) * v, x, at)


def _v_from_pair(pair: Pair, at: Moment) -> Tensor:
    """v = u/sqrt(t) = x0/T - eps/sqrt(t T)."""
    return _u_from_pair(pair, at) / at.of(torch.sqrt(at.t))


def _x0_to_eps(x0: Tensor, x: Tensor, at: Moment) -> Tensor:
    at.need_noise("x0")
    return (x - at.alpha * x0) / at.sigma


def _eps_to_x0(eps: Tensor, x: Tensor, at: Moment) -> Tensor:
    at.need_signal("eps")
    return (x - at.sigma * eps) / at.alpha


def _diffusion_v_to_x0(v: Tensor, x: Tensor, at: Moment) -> Tensor:
    """Inverse of v = alpha eps - sigma x0; the square norm is 1 only on variance-preserving paths."""
    return (at.alpha * x - at.sigma * v) / at.of(at.schedule.norm(at.t) ** 2)


def _diffusion_v_to_eps(v: Tensor, x: Tensor, at: Moment) -> Tensor:
    return (at.sigma * x + at.alpha * v) / at.of(at.schedule.norm(at.t) ** 2)


def _flow_system(at: Moment) -> tuple[Tensor, Tensor, Tensor]:
    """alpha', sigma' and the determinant of x = alpha x0 + sigma eps, flow = alpha' x0 + sigma' eps."""
    rate = at.schedule.sigma_rate(at.t)
    at.refuse(~torch.isfinite(rate), "flow -> (x0, eps) is indeterminate where sigma' is infinite")
    alpha_rate, sigma_rate = at.of(at.schedule.alpha_rate(at.t)), at.of(rate)
    return alpha_rate, sigma_rate, at.alpha * sigma_rate - at.sigma * alpha_rate


def _flow_to_x0(flow: Tensor, x: Tensor, at: Moment) -> Tensor:
    _, sigma_rate, determinant = _flow_system(at)
    return (sigma_rate * x - at.sigma * flow) / determinant


def _flow_to_eps(flow: Tensor, x: Tensor, at: Moment) -> Tensor:
    alpha_rate, _, determinant = _flow_system(at)
    return (at.alpha * flow - alpha_rate * x) / determinant


def _flow_from_pair(pair: Pair, at: Moment) -> Tensor:
    """alpha' x0 + sigma' eps: the probability-flow velocity dx/dt."""
    return at.of(at.schedule.alpha_rate(at.t)) * pair.x0 + at.of(at.schedule.sigma_rate(at.t)) * pair.eps


def _score_to_eps(score: Tensor, x: Tensor, at: Moment) -> Tensor:
    at.need_noise("score")
    return -at.sigma * score


def _score_to_x0(score: Tensor, x: Tensor, at: Moment) -> Tensor:
    return _eps_to_x0(_score_to_eps(score, x, at), x, at)


@dataclass(frozen=True)
class Kind:
    """A prediction kind: what a network's output means, and what it is trained on."""

    to_x0: Callable[[Tensor, Tensor, Moment], Tensor]
    to_eps: Callable[[Tensor, Tensor, Moment], Tensor]
    from_pair: Callable[[Pair, Moment], Tensor]


KINDS: dict[str, Kind] = {
    "u": Kind(_u_to_x0, _u_to_eps, _u_from_pair),
    "v": Kind(_v_to_x0, _v_to_eps, _v_from_pair),
    "x0": Kind(lambda x0, x, at: x0, _x0_to_eps, lambda pair, at: pair.x0),
    "eps": Kind(_eps_to_x0, lambda eps, x, at: eps, lambda pair, at: pair.eps),
    "diffusion_v": Kind(
        _diffusion_v_to_x0, _diffusion_v_to_eps, lambda pair, at: at.alpha * pair.eps - at.sigma * pair.x0
    ),
    "flow": Kind(_flow_to_x0, _flow_to_eps, _flow_from_pair),
    "score": Kind(_score_to_x0, _score_to_eps, lambda pair, at: -pair.eps / at.sigma),
}


NOISE_KINDS = ("eps", "score")  # functions of eps alone
MEAN_VELOCITY_KINDS = ("u", "v")  # defined on MeanVelocity alone


def to_x0(kind: str, value: Tensor, x: Tensor, t: Time, schedule: Schedule) -> Tensor:
    """Return x0_hat that a prediction of this kind means at (x, t)."""
    return choose("kind", kind, KINDS).to_x0(value, x, Moment(schedule, as_time(t), x))


def to_pair(kind: str, value: Tensor, x: Tensor, t: Time, schedule: Schedule) -> Pair:
    """Return (x0_hat, eps_hat) that a prediction of this kind means at (x, t)."""
    at = Moment(schedule, as_time(t), x)
    meaning = choose("kind", kind, KINDS)
    return Pair(meaning.to_x0(value, x, at), meaning.to_eps(value, x, at))


def from_pair(kind: str, pair: Pair, t: Time, schedule: Schedule) -> Tensor:
    """Return the value of this kind for a given (x0, eps)."""
    return choose("kind", kind, KINDS).from_pair(pair, Moment(schedule, as_time(t), pair.x0))


def convert(value: Tensor, source: str, target: str, x: Tensor, t: Time, schedule: Schedule) -> Tensor:
    """Return a prediction of one kind as another kind at the same (x, t)."""
    if source == target:
        return value
    if target == "x0":
        return to_x0(source, value, x, t, schedule)
    if target in NOISE_KINDS:  # these need no x0, so they are determinate at t = 1 too
        at = Moment(schedule, as_time(t), x)
        eps = choose("kind", source, KINDS).to_eps(value, x, at)
        return KINDS[target].from_pair(Pair(x, eps), at)
    return from_pair(target, to_pair(source, value, x, t, schedule), t, schedule)
