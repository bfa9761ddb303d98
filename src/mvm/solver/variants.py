"""Solvers besides the default: `sa`, the paper's SA-Solver, `adams_power`, by a power law of t, and all by name."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mvm.options import DEFAULT_T_MIN, at_least, choose
from mvm.path import MEAN_VELOCITY
from mvm.solver.adams import PredictorCorrector, adams, soft_lam_times
from mvm.solver.adaptive import Adaptive, dopri5
from mvm.solver.base import Grid, Solver, require_shift
from mvm.solver.onestep import Euler, EulerMaruyama, Heun
from mvm.solver.peers import PEERS
from mvm.solver.table import Array, LamVariable, PowerVariable

SMALLEST = 1e-100  # a time above 0 whose powers in a table are numbers
GRID_POWER, START_POWER = 4.0, 1.4  # r and p of adams_power


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

    def shifted(self, nfe: int, start: float, shift: float) -> tuple[float, ...]:
        """Return N times uniform in log(r + (shift - 1) r_min), r = sigma/alpha: only the clean end moves.

        t_max is so near to pure noise already that a factor of all r would crowd times where nothing is decided.
        """
        times = self.times(nfe, start)
        if nfe == 1 or require_shift(shift) in (0, 1):
            return times
        least = math.exp(-float(MEAN_VELOCITY.lam(self.t_min)))
        return (*soft_lam_times(nfe - 1, times[0], self.t_min, (shift - 1) * least, 0.0), 0.0)

    def ending_at(self, t_min: float) -> "LamGrid":
        return replace(self, t_min=t_min)


def sa(
    predictor: int = 3, corrector: int = 4, t_max: float = 0.999, t_min: float = DEFAULT_T_MIN, tau: str = "end"
) -> PredictorCorrector:
    """Return the paper's SA-Solver: phi = lam, times uniform in lam, tau constant over each step."""
    return PredictorCorrector("sa", LamGrid(t_max, t_min), LamVariable(), tau, predictor, corrector)


def power_times(steps: int, start: float, end: float, r: float, p: float) -> Array:
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


def adams_power(
    predictor: int = 3, corrector: int = 4, r: float = GRID_POWER, q: float = 0.8, p: float = START_POWER
) -> PredictorCorrector:
    """Return adams with a power law of t: phi = t^q, t_i = (1 - (i/N)^p)^r from exactly 1 to exactly 0."""
    return PredictorCorrector("adams-power", PowerGrid(r, p), PowerVariable(q), "exact", predictor, corrector)


SOLVERS: dict[str, Callable[[], Solver]] = {
    "adams": adams,
    "adams-power": adams_power,
    "sa": sa,
    "heun": Heun,
    "euler": Euler,
    "euler-maruyama": EulerMaruyama,
    "adaptive": Adaptive,
    "dopri5": dopri5,
    **PEERS,
}

NOISE_NFE = 10  # evaluations that a rho of 1 and more needs, over rho^2: tests/solver/test_sampling.py


def solver_named(solver: str | Solver) -> Solver:
    """Return a solver from its name, or the solver itself."""
    if isinstance(solver, str):
        return choose("solver", solver, SOLVERS)()
    if not isinstance(solver, Solver):
        raise ValueError(f"solver={solver!r} must be a name ({', '.join(SOLVERS)}) or a solver of mvm.solver")
    return solver


def once_a_step(solver: Solver) -> bool:
    """Return whether a solver evaluates the field once a step, which is what a scheduler can do."""
    plan = solver.plan(MEAN_VELOCITY, 4, 0.0)  # enough evaluations to see it
    return plan.nfe == plan.steps


def warn_of_noise(solver: Solver, nfe: int, rho: float) -> None:
    """Warn where rho > 1 and nfe < 10 rho^2: noise then inflates the spread of samples by 5 % and more.

    Computed exactly for Gaussian data of std 0.5 and 2 in samples of 3,072 values: for adams and adams-power, and for
    sa from rho = 2 on. Euler-maruyama needs more still. Published samplers mean other noise by rho and are not judged.
    """
    if rho <= 1 or nfe >= NOISE_NFE * rho**2 or solver.name in PEERS:
        return
    enough, highest = math.ceil(NOISE_NFE * rho**2), max(1.0, math.floor(10 * math.sqrt(nfe / NOISE_NFE)) / 10)
    warnings.warn(
        f"rho={rho:g} with nfe={nfe}: so much noise in so few evaluations inflates the spread of samples; "
        f"use nfe {enough} or more, or rho up to {highest:g}",
        stacklevel=3,
    )
