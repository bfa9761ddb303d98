"""Timestep distributions, and noising: from clean images to what the network sees and learns."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mvm import noise
from mvm.options import at_least, choose
from mvm.path.convert import Pair, from_pair
from mvm.path.schedule import Schedule, like

LAWS = ("uniform", "lam-uniform", "logit-normal", "lam-normal")
BOUNDED_LAWS = ("uniform", "lam-uniform")  # those that begin at t_min
REFERENCE_DIMENSION = 4096  # the dimension at which the dimension shift is nothing
INSIDE = (
    2.0**-60,
    1 - 2.0**-53,
)  # of t/end: some targets are infinite at 0 or 1, and draws may round to them


@dataclass(frozen=True)
class TimeLaw:
    """Timestep distribution of training.

    uniform: t/T ~ U(t_min, 1). lam-uniform: lam ~ U(lam(T), lam(t_min T)). logit-normal: logit(t/T) ~ N(mean, std^2).
    lam-normal: lam ~ N(mean, std^2). T is the schedule's end, so the signal-to-noise ratio does not depend on it.
    """

    name: str = "uniform"
    """Timestep distribution: of t, of its logit, or of lam = log(alpha/sigma), half the log-SNR.
    One of: uniform, lam-uniform, logit-normal, lam-normal."""
    mean: float = 0.0
    """Mean of logit-normal (of logit t) and lam-normal (of lam; higher means less noise)."""
    std: float = 1.0
    """Standard deviation of logit-normal and lam-normal."""
    shift_dimension: int = 0
    """C*H*W of the data: shifts timesteps to more noise for large data, lam lower by log sqrt(C*H*W / 4096).
    0: no shift."""
    t_min: float = 0.0
    """Smallest t that uniform and lam-uniform draw, as a share of T; lam-uniform needs one above 0, e.g. 1e-5."""

    def __post_init__(self) -> None:
        choose("path.law.name", self.name, dict.fromkeys(LAWS))
        if not self.std > 0:
            raise ValueError(f"path.law.std={self.std} is out of range; it must be positive")
        if self.shift_dimension < 0:
            raise ValueError(f"path.law.shift_dimension={self.shift_dimension} must be 0 (off) or the data's C*H*W")
        at_least("path.law.t_min", self.t_min, 0)
        if self.t_min >= 1:
            raise ValueError(f"path.law.t_min={self.t_min} must lie below 1: it is a share of T, the end of the path")
        if self.t_min and self.name not in BOUNDED_LAWS:
            raise ValueError(f"path.law.t_min={self.t_min} belongs to {', '.join(BOUNDED_LAWS)}; '{self.name}' takes 0")
        if self.name == "lam-uniform" and not self.t_min:
            raise ValueError("path.law.t_min=0: lam is infinite there; lam-uniform must begin above, e.g. at 1e-5")

    @property
    def shift(self) -> float:
        """The factor of sigma/alpha by which the dimension shift moves draws to more noise; 1: none."""
        return math.sqrt(self.shift_dimension / REFERENCE_DIMENSION) if self.shift_dimension else 1.0

    def require(self, schedule: Schedule) -> None:
        """Raise if the distribution has no draws on this path."""
        if self.name == "lam-uniform" and float(schedule.alpha(schedule.end)) == 0:
            raise ValueError(
                f"path.law.name='lam-uniform': lam has no lower end on {schedule}, as alpha = 0 there; use "
                "variance-preserving, or another law"
            )

    def quantile(self, p: Tensor, schedule: Schedule) -> Tensor:
        """Return the t below (for lam-normal: above) which a share p of the draws lies."""
        end = schedule.end
        if self.name == "uniform":
            t = end * (self.t_min + p * (1 - self.t_min))
        elif self.name == "lam-uniform":
            first, last = (schedule.lam(torch.full_like(p, t)) for t in (self.t_min * end, end))  # on p's device
            t = schedule.t_from_lam(first + p * (last - first))
        else:
            normal = self.mean + self.std * torch.special.ndtri(p)
            t = end * torch.sigmoid(normal) if self.name == "logit-normal" else schedule.t_from_lam(normal)
        if self.shift_dimension:
            t = schedule.t_from_lam(schedule.lam(t) - 0.5 * math.log(self.shift_dimension / REFERENCE_DIMENSION))
        return t.clamp(*(end * share for share in INSIDE))

    def draw(self, seeds: Tensor, schedule: Schedule) -> Tensor:
        """Return one t per seed: float64 (B,)."""
        return self.quantile(noise.uniform(seeds, noise.TIME, (1,))[:, 0], schedule)


class Noised(NamedTuple):
    """A training example: state, time, regression target."""

    x: Tensor
    t: Tensor
    target: Tensor


def perturb(x0: Tensor, seeds: Tensor, schedule: Schedule, law: TimeLaw, kind: str) -> Noised:
    """Return x_t = alpha x0 + sigma eps with t and eps drawn from each sample's seed, and the target."""
    eps = noise.normal(seeds, noise.TRAIN, x0.shape[1:], x0.dtype)
    return noised(x0, eps, law.draw(seeds, schedule), schedule, kind)


def noised(x0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule, kind: str) -> Noised:
    """Return x_t = alpha x0 + sigma eps with its time, and the target of that kind."""
    x = like(schedule.alpha(t), x0) * x0 + like(schedule.sigma(t), x0) * eps
    return Noised(x, t, from_pair(kind, Pair(x0, eps), t, schedule))
