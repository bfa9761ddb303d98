"""Predictor-corrector multistep solvers: `adams` (ours, the default) and `sa` (the paper's SA-Solver)."""

from dataclasses import dataclass

from torch import Tensor

from mvm.options import at_least, choose
from mvm.path import MEAN_VELOCITY, Schedule, equal_snr_time
from mvm.solver.base import Evaluate, NoiseSource, Plan, Solver, State
from mvm.solver.grid import DEFAULT_T_MIN, Grid, LamGrid, PowerGrid, power_times
from mvm.solver.table import TAUS, TO_DATA, LamVariable, PowerVariable, Row, Variable, build_row


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
    """PEC: predict, evaluate once, correct from the previous corrected state with the same noise."""

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
        return max(len(self.rows[index].correct), len(following), 2) - 1


@dataclass(frozen=True)
class PredictorCorrector(Solver):
    """Adams-Bashforth predictor of order `predictor`, Adams-Moulton corrector of order `corrector` (0: none).

    grid: the times. variable: where x0_hat is a polynomial. tau: "exact", or held at a step's "start" or
    "end". Times are those of MeanVelocity(T=1); fields of other schedules come through the equal-SNR map.
    """

    grid: Grid
    variable: Variable
    tau: str = "exact"
    predictor: int = 3
    corrector: int = 4

    def __post_init__(self) -> None:
        at_least("predictor", self.predictor, 1)
        at_least("corrector", self.corrector, 0)
        choose("tau", self.tau, dict.fromkeys(TAUS))

    @property
    def order(self) -> int:
        """PEC gains one order over the predictor; the first step, with one past value, caps it at 3 (2 uncorrected)."""
        return min(self.corrector, self.predictor + 1, 3) if self.corrector else min(self.predictor, 2)

    @property
    def weak_order(self) -> int:
        """x0_hat along a noisy path is no polynomial: past order 2 nothing is gained in the law."""
        return min(self.order, 2)

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        start = float(equal_snr_time(schedule.end, schedule, MEAN_VELOCITY))
        return self.plan_times(schedule, self.grid.times(nfe, start), rho)

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        rows = tuple(
            build_row(times[i::-1], times[i + 1], rho, self.tau, self.variable, self.predictor, self.corrector)
            for i in range(len(times) - 1)
        )
        return TablePlan(times, rows)


# r and p of the grid, q of the variable: benchmarks/grid_search.py (oracles) and grid_on_images.py (a trained model)
GRID_POWER = 4.0
START_POWER = 1.4
VARIABLE_POWER = 0.8


def default_times(steps: int, start: float, end: float) -> tuple[float, ...]:
    """Return steps + 1 times from `start` to `end`, spaced as the default solver's."""
    return tuple(power_times(steps, start, end, GRID_POWER, START_POWER).tolist())


def adams(
    predictor: int = 3,
    corrector: int = 4,
    r: float = GRID_POWER,
    q: float = VARIABLE_POWER,
    p: float = START_POWER,
) -> PredictorCorrector:
    """Return the default solver: exact tau, phi = t^q, t_i = (1 - (i/N)^p)^r from exactly 1 to exactly 0."""
    return PredictorCorrector("adams", PowerGrid(r, p), PowerVariable(q), "exact", predictor, corrector)


def sa(
    predictor: int = 3, corrector: int = 4, t_max: float = 0.999, t_min: float = DEFAULT_T_MIN, tau: str = "end"
) -> PredictorCorrector:
    """Return the paper's SA-Solver: phi = lam, times uniform in lam, tau constant over each step."""
    return PredictorCorrector("sa", LamGrid(t_max, t_min), LamVariable(), tau, predictor, corrector)
