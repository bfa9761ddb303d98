"""Predictor-corrector multistep solvers: `adams` (ours, the default) and `sa` (the paper's SA-Solver)."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mvm.options import at_least, choose
from mvm.path import MEAN_VELOCITY, Schedule, equal_snr_time
from mvm.solver.base import Evaluate, NoiseSource, Plan, Solver, State
from mvm.solver.grid import DEFAULT_T_MIN, FixedGrid, Grid, LamGrid, PowerGrid, SoftLamGrid
from mvm.solver.table import (
    TAUS,
    TO_DATA,
    LamVariable,
    PowerVariable,
    Row,
    SoftLamVariable,
    Variable,
    build_row,
    ending_row,
)


def combine(
    decay: float, x: Tensor, weights: tuple[float, ...], x0s: tuple[Tensor, ...], kick: Tensor | None
) -> Tensor:
    """Return decay x + sum(weights * x0s) + kick."""
    out = decay * x
    for weight, x0 in zip(weights, x0s, strict=False):
        out = out + weight * x0
    return out if kick is None else out + kick


@dataclass(frozen=True)
class TablePlan(Plan):
    """PEC, one evaluation a step: evaluate at the predicted state, correct the step before with it, predict the next.

    The correction starts from the previous corrected state (`State.anchor`) and adds that step's noise (`kick`) again.
    """

    rows: tuple[Row, ...]

    @property
    def nfe(self) -> int:
        return self.steps

    def _corrected(self, state: State, history: tuple[Tensor, ...]) -> Tensor:
        before = self.rows[state.index - 1] if state.index else None
        if before is None or state.anchor is None or not before.correct:
            return state.x
        return combine(before.decay, state.anchor, before.correct, history, state.kick)

    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        row = self.rows[state.index]
        history = (evaluate(state.x, self.times[state.index]), *state.history)
        if row == TO_DATA:
            return State(state.index + 1, history[0], history[:1])
        x = self._corrected(state, history)
        kick = row.std * noise(state.index) if row.std else None
        predicted = combine(row.decay, x, row.predict, history, kick)
        return State(state.index + 1, predicted, history[: self._kept(state.index)], x, kick)

    def _kept(self, index: int) -> int:
        """How many x0_hat the next step needs besides the one it evaluates (at least the newest, for viewers)."""
        following = self.rows[index + 1].predict if index + 1 < self.steps else ()
        ending = len(self.rows[-1].predict) - (self.steps - 2 - index)  # which may reach back past the steps before it
        return max(len(self.rows[index].correct), len(following), ending, 2) - 1


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
        start = float(equal_snr_time(schedule.end, schedule, MEAN_VELOCITY))
        return self.plan_times(schedule, self.times(nfe, start, rho), rho)


@dataclass(frozen=True)
class PredictorCorrector(Multistep):
    """Adams-Bashforth predictor of order `predictor`, Adams-Moulton corrector of order `corrector` (0: none).

    grid: the times. variable: where x0_hat is a polynomial. tau: "exact", or held at a step's "start" or
    "end". Times are those of MeanVelocity(T=1); fields of other schedules come through the equal-SNR map.
    """

    grid: Grid
    variable: Variable
    tau: str = "exact"
    predictor: int = 3
    corrector: int = 4
    ending: int = 1  # evaluations through which the step into t = 0 extrapolates x0_hat; 1: the last x0_hat
    end_variable: Variable | None = None  # in which it does; None: `variable`

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
        """x0_hat along a noisy path is no polynomial: past order 2 nothing is gained in the law."""
        return min(self.order, 2)

    def times(self, nfe: int, start: float = 1.0, rho: float = 0.0) -> tuple[float, ...]:
        return self.grid.times(nfe, start)

    def ending_at(self, t_min: float) -> "PredictorCorrector":
        if not isinstance(self.grid, LamGrid):
            raise ValueError(f"solver: the times of {self.grid} cannot be made to end at a level; use 'adams' or 'sa'")
        return replace(self, grid=replace(self.grid, t_min=t_min))

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
    largest std of the data along any direction, which sets d; None: by the number of values of a sample. t_min: the
    last time evaluated, where the field knows none that is cleaner. given: times fitted to one model
    (`mvm.solver.tune`), for exactly so many evaluations.
    """

    name: str = "adams"
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
        self._method(0.0, 1)  # refuses what its parts refuse

    def _method(self, rho: float, nfe: int, last: float = 1.0) -> PredictorCorrector:
        """Return the solver for so many evaluations, the last of them at r = `last`."""
        if rho == 0:
            orders, c, b, reach = (4, 4, 4 if nfe >= MANY else 3), ODE_C / max(nfe, MANY), ODE_B, ODE_REACH
        else:
            orders, c, b, reach = (3, 4, 3 if nfe <= FEW else 1), SDE_C / nfe, SDE_B, SDE_REACH
        d = reach / (self.spread or SAFE_SPREAD)  # times and phi saturate towards noise at r = 1/d
        asked = (self.predictor, self.corrector, self.ending)
        predictor, corrector, ending = (usual if one is None else one for one, usual in zip(asked, orders, strict=True))
        return PredictorCorrector(
            self.name,
            FixedGrid(self.given) if self.given else SoftLamGrid(c if self.c is None else self.c, d, self.t_min),
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


def adams(
    predictor: int | None = None,
    corrector: int | None = None,
    ending: int | None = None,
    c: float | None = None,
    b: float | None = None,
    end_b: float | None = None,
    spread: float | None = None,
    t_min: float = 0.0,
    given: Sequence[float] = (),
) -> Adams:
    """Return the default solver, `Adams`."""
    return Adams("adams", predictor, corrector, ending, c, b, end_b, spread, t_min, tuple(given))


GRID_POWER, START_POWER = 4.0, 1.4  # r and p of adams_power


def adams_power(
    predictor: int = 3, corrector: int = 4, r: float = GRID_POWER, q: float = 0.8, p: float = START_POWER
) -> PredictorCorrector:
    """Return adams with a power law of t: phi = t^q, t_i = (1 - (i/N)^p)^r from exactly 1 to exactly 0."""
    return PredictorCorrector("adams-power", PowerGrid(r, p), PowerVariable(q), "exact", predictor, corrector)


def sa(
    predictor: int = 3, corrector: int = 4, t_max: float = 0.999, t_min: float = DEFAULT_T_MIN, tau: str = "end"
) -> PredictorCorrector:
    """Return the paper's SA-Solver: phi = lam, times uniform in lam, tau constant over each step."""
    return PredictorCorrector("sa", LamGrid(t_max, t_min), LamVariable(), tau, predictor, corrector)
