"""`adams`, the default: a predictor-corrector with times and a variable that saturate at both ends."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import numpy as np

from mvm.options import at_least, choose
from mvm.path import Schedule
from mvm.solver.base import Grid, Plan, Solver, TablePlan, require_shift, start_time
from mvm.solver.table import TAUS, SoftLamVariable, Variable, build_row, ending_row


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
    """`soft_lam_times` from exactly `start` to exactly 0; t_min > 0: the last time evaluated, before 0."""

    c: float
    d: float
    t_min: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("c", self.c), ("d", self.d)):
            if not 0 < value < np.inf:
                raise ValueError(f"{name}={value} is out of range; it must be positive and finite")
        if self.c * self.d >= 1:
            raise ValueError(f"c={self.c}, d={self.d}: their product must lie below 1; use a smaller c or shift")

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


@dataclass(frozen=True)
class Multistep(Solver):
    """A solver that evaluates once at each time and can go through any given ones."""

    @abstractmethod
    def times(self, nfe: int, start: float = 1.0, rho: float = 0.0) -> tuple[float, ...]:
        """Return its nfe + 1 times of MeanVelocity(T=1), from `start` to 0."""

    @abstractmethod
    def ending_at(self, t_min: float) -> "Multistep":
        """Return the solver with its last evaluation at t_min, the cleanest level that a field knows."""

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        return self.plan_times(schedule, self.times(nfe, start_time(schedule), rho), rho)


@dataclass(frozen=True)
class PredictorCorrector(Multistep):
    """Adams-Bashforth predictor of order `predictor`, Adams-Moulton corrector of order `corrector` (0: none).

    x0_hat is a polynomial in `variable`. tau: "exact", or held at its value at a step's "start" or "end". The step into
    t = 0 extrapolates x0_hat through `ending` evaluations (1: it is the last), in `end_variable` (None: `variable`).
    """

    grid: Grid
    variable: Variable
    tau: str = "exact"
    predictor: int = 3
    corrector: int = 4
    ending: int = 1
    end_variable: Variable | None = None

    def __post_init__(self) -> None:
        at_least("predictor", self.predictor, 1)
        at_least("corrector", self.corrector, 0)
        at_least("ending", self.ending, 1)
        choose("tau", self.tau, dict.fromkeys(TAUS))

    @property
    def order(self) -> int:
        """PEC gains one order over the predictor; the first step, with one past value, caps it at 3 (2 uncorrected)."""
        return min(self.corrector, self.predictor + 1, 3) if self.corrector else min(self.predictor, 2)

    @property
    def weak_order(self) -> int:
        """Past order 2 nothing is gained: x0_hat along a noisy path is no polynomial."""
        return min(self.order, 2)

    def times(self, nfe: int, start: float = 1.0, rho: float = 0.0) -> tuple[float, ...]:
        return self.grid.shifted(nfe, start, self.shift)

    def ending_at(self, t_min: float) -> "PredictorCorrector":
        return replace(self, grid=self.grid.ending_at(t_min))

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        rows = [
            build_row(times[i::-1], times[i + 1], rho, self.tau, self.variable, self.predictor, self.corrector)
            for i in range(len(times) - 1)
        ]
        if times[-1] == 0 and self.ending > 1:
            rows[-1] = ending_row(times[-2::-1][: self.ending], self.end_variable or self.variable)
        return TablePlan(times, tuple(rows))


# Settled by FID on a trained model (benchmarks/results/solvers.md); how they stand among variants on exact fields:
# benchmarks/results/solver-search.md
ODE_C, SDE_C = 0.16, 0.3  # over the number of evaluations, the ODE's over MANY at least
ODE_B, SDE_B = 0.5, 3.0
ODE_REACH, SDE_REACH = 0.36, 0.5  # d times the largest std of the data along any direction
END_B, END_FLOOR = 1.4, 0.025  # end_b over r at the last evaluation, and its least value
SPREAD = 0.18  # that std over the root of the number of values of a sample, where it is not known
SMALLEST_SPREAD, SAFE_SPREAD = 5.0, 25.0  # its least value by that rule, and where not even the size is known
MANY = 8  # evaluations from which the ODE's last step goes through 4 of them, not 3
FEW = 12  # up to so many evaluations an SDE extrapolates at the end; beyond, the answer is the last x0_hat


def ending_b(last: float) -> float:
    """Return end_b where the last evaluation is at r = `last`."""
    return max(END_B * last, END_FLOOR)


@dataclass(frozen=True)
class Adams(Multistep):
    """The default: a predictor-corrector with times and phi in a log-SNR that saturates at both ends.

    Times are uniform in log((r + c)/(1 + d r)), r = sigma/alpha, from exactly t = 1 to exactly 0. x0_hat is a
    polynomial in log((r + b)/(1 + d r)); the last step extrapolates it to t = 0 through `ending` evaluations, in the
    same with end_b. tau is exact. None: what suits the ODE or the SDE and the number of evaluations. spread: the
    largest std of the data along any direction, which sets d; None: by the number of values of a sample. shift: a
    factor of c, as d follows the dimension of the data already. t_min: the last time evaluated, where the field knows
    none that is cleaner. given: times fitted to one model (`mvm.solver.tune`), for exactly so many evaluations.
    """

    name: str = field(default="adams", kw_only=True)
    predictor: int | None = None
    corrector: int | None = None
    ending: int | None = None
    c: float | None = None
    b: float | None = None
    end_b: float | None = None
    spread: float | None = None
    t_min: float = 0.0
    given: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.spread is not None and not 0 < self.spread < float("inf"):
            raise ValueError(f"spread={self.spread} is out of range; it must be positive and finite")
        object.__setattr__(self, "given", tuple(self.given))
        self._method(0.0, 1)  # refuses what its parts refuse

    def _method(self, rho: float, nfe: int, last: float = 1.0) -> PredictorCorrector:
        """Return the solver for so many evaluations, the last of them at r = `last`."""
        if rho == 0:
            orders, c, b, reach = (4, 4, 4 if nfe >= MANY else 3), ODE_C / max(nfe, MANY), ODE_B, ODE_REACH
        else:
            orders, c, b, reach = (3, 4, 3 if nfe <= FEW else 1), SDE_C / nfe, SDE_B, SDE_REACH
        d = reach / (self.spread or SAFE_SPREAD)  # times and phi saturate towards noise at r = 1/d
        c = (require_shift(self.shift) or 1) * (c if self.c is None else self.c)
        asked = (self.predictor, self.corrector, self.ending)
        predictor, corrector, ending = (usual if one is None else one for one, usual in zip(asked, orders, strict=True))
        return PredictorCorrector(
            self.name,
            FixedGrid(self.given) if self.given else SoftLamGrid(c, d, self.t_min),
            SoftLamVariable(b if self.b is None else self.b, d),
            predictor=predictor,
            corrector=corrector,
            ending=ending,
            end_variable=SoftLamVariable(ending_b(last) if self.end_b is None else self.end_b, d),
        )

    @property
    def order(self) -> int:
        return self._method(0.0, 1).order

    @property
    def weak_order(self) -> int:
        return self._method(1.0, 1).weak_order

    def for_size(self, size: int) -> "Adams":
        if self.spread is not None:
            return self
        return replace(self, spread=max(SPREAD * size**0.5, SMALLEST_SPREAD))

    def times(self, nfe: int, start: float = 1.0, rho: float = 0.0) -> tuple[float, ...]:
        return self._method(rho, nfe).times(nfe, start)

    def ending_at(self, t_min: float) -> "Adams":
        return replace(self, t_min=t_min)

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        last = min(times[-2], 0.5)  # r is infinite at t = 1, where a single evaluation stands
        return self._method(rho, len(times) - 1, last**0.5 / (1 - last)).plan_times(schedule, times, rho)


adams = Adams  # as the other solvers are made: adams(), sa(), dpm()
