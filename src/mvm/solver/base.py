"""What every solver is: a plan of times and a pure step from state to state."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from mvm.options import MOST_SHIFT
from mvm.path import MEAN_VELOCITY, Schedule, equal_snr_time
from mvm.solver.table import TO_DATA, Row

# x0_hat at (x, t); t is a host float, so that plans, tables and guidance are decided off the device.
Evaluate = Callable[[Tensor, float], Tensor]
# standard normal noise of the state's shape for a step index
NoiseSource = Callable[[int], Tensor]


@dataclass(frozen=True)
class State:
    """Everything a solver knows between steps; nothing is stored in the solver itself.

    x is the state at times[index] (of a predictor-corrector, the predicted one); history holds past x0_hat, newest
    first. A corrector starts from anchor, the corrected state one step back, and adds kick, that step's noise, again.
    """

    index: int
    x: Tensor
    history: tuple[Tensor, ...] = ()
    anchor: Tensor | None = None
    kick: Tensor | None = None


def require_finite(state: State) -> None:
    """Raise where a state holds NaN or Inf; waits for the device."""
    if not bool(state.x.isfinite().all()):
        raise FloatingPointError(
            f"after step {state.index} the samples hold NaN or Inf: the network's answer is not finite, or "
            "guidance drove it out of range; check the weights, and try a smaller scale of guidance, or precision fp32"
        )


@dataclass(frozen=True)
class Plan(ABC):
    """A solver bound to its times and rho: `steps` calls of `step`, `nfe` evaluations in all."""

    times: tuple[float, ...]

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @property
    def nfe(self) -> int:
        """Field evaluations of the whole plan; 0 where a tolerance decides."""
        return self.steps

    @property
    def uncounted(self) -> int:
        """Evaluations that are forward passes, but do not count in nfe."""
        return 0

    @abstractmethod
    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        """Return the state at times[state.index + 1]."""


@dataclass(frozen=True)
class Solver(ABC):
    """A rule that makes plans.

    shift: the factor of r = sigma/alpha by which its times move to more noise, its first and last staying. 0: that of
    the field which is sampled, 1 (none) where that names none.
    """

    name: str
    shift: float = field(default=0.0, kw_only=True, repr=False)
    by_tolerance: ClassVar[bool] = False  # it takes a tolerance in place of nfe, and reports the nfe it took
    own_time: ClassVar[bool] = False  # times are of the field's own schedule, not of MeanVelocity(T=1) at equal SNR

    @property
    @abstractmethod
    def order(self) -> int:
        """Order of convergence on a smooth ODE."""

    @property
    def weak_order(self) -> int:
        """Order of convergence of the sampled distribution at rho > 0; 0 where only the ODE is solved."""
        return 0

    @property
    def per_sample(self) -> bool:
        """Whether each sample is solved by itself, with steps of its own."""
        return False

    def check_rho(self, rho: float) -> None:
        """Refuse noise where only the ODE is solved; the message names the solvers that take it."""
        if rho == 0 or self.weak_order:
            return
        from mvm.solver.variants import SOLVERS  # all solvers; it imports this module

        noisy = [name for name, build in SOLVERS.items() if build().weak_order]
        raise ValueError(f"rho={rho}: solver '{self.name}' is an ODE solver; use rho=0, or one of: {', '.join(noisy)}")

    def for_size(self, size: int) -> "Solver":
        """Return the solver for samples of so many values; itself, unless its times depend on that."""
        return self

    def for_field(self, field: object, size: int) -> "Solver":
        """Return the solver for a field's samples of so many values, its times shifted as the field asks (`shift`)."""
        fitted, own = self.for_size(size), getattr(field, "shift", 1.0)
        return fitted if self.shift or own == 1 else replace(fitted, shift=own)

    @abstractmethod
    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        """Return the plan of exactly nfe evaluations from noise to image."""

    @abstractmethod
    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        """Return the plan through given times; an end at t > 0 yields the state there."""


class Grid(ABC):
    """Times t_0 > ... > t_N = 0 of MeanVelocity(T=1): N evaluations, then the clean image."""

    @property
    def last(self) -> float:
        """The least time above 0 where the grid names one, which no shift moves; else 0."""
        return 0.0

    @abstractmethod
    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        """Return nfe + 1 times; `start` < 1 where the field's schedule never reaches pure noise."""

    def shifted(self, nfe: int, start: float, shift: float) -> tuple[float, ...]:
        """Return the times, those between the ends shifted; see `shifted_times`."""
        return shifted_times(self.times(nfe, start), shift, last=self.last)

    def ending_at(self, t_min: float) -> "Grid":
        """Return the grid with its last evaluation at t_min; a ValueError where it has no such choice."""
        raise ValueError(f"solver: the times of {self} cannot be made to end at a level; use 'adams' or 'sa'")


def start_time(schedule: Schedule) -> float:
    """Return the time of MeanVelocity(T=1) at which the schedule begins: 1 where that is pure noise."""
    return float(equal_snr_time(schedule.end, schedule, MEAN_VELOCITY))


def require_shift(shift: float) -> float:
    """Return the shift; one that is out of range is refused."""
    if not 0 <= shift <= MOST_SHIFT:
        most = f"at most {MOST_SHIFT:,.0f}"
        raise ValueError(f"shift={shift} is out of range; it must be positive, {most}, or 0 for the model's own")
    return shift


def shifted_times(
    times: tuple[float, ...], shift: float, schedule: Schedule = MEAN_VELOCITY, last: float = 0.0
) -> tuple[float, ...]:
    """Return times moved to more noise by a factor of r = sigma/alpha, all but the first, `last` and 0.

    (r - r_last)/(1 - r/r_first) becomes `shift` times itself. From pure noise to 0 that is r -> shift r, in flow time
    the t -> shift t/(1 + (shift - 1) t) of SD3 and RAE. 0 and 1 move nothing.
    """
    if require_shift(shift) in (0, 1):
        return times
    r, highest, least = (np.exp(-schedule.lam(np.array(t)).numpy()) for t in (times[1:-1], times[0], last))
    moved = shift * (r - least) / (1 - r / highest)
    inner = schedule.t_from_lam(-np.log((least + moved) / (1 + moved / highest))).tolist()
    return (times[0], *(t if t <= last else new for t, new in zip(times[1:-1], inner, strict=True)), times[-1])


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
    """One evaluation a step (PEC): evaluate at the predicted state, correct it with the result, predict the next."""

    rows: tuple[Row, ...]

    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        index, x = state.index, state.x
        row, before = self.rows[index], self.rows[index - 1]
        history = (evaluate(x, self.times[index]), *state.history)
        if row == TO_DATA:
            return State(index + 1, history[0], history[:1])
        if index and state.anchor is not None and before.correct:
            x = combine(before.decay, state.anchor, before.correct, history, state.kick)
        kick = row.std * noise(index) if row.std else None
        predicted = combine(row.decay, x, row.predict, history, kick)
        # what later steps need of the past x0_hat: the next one, and the last, which may reach back past those before
        # it; at least the newest, for viewers
        following = self.rows[index + 1].predict if index + 1 < self.steps else ()
        ending = len(self.rows[-1].predict) - (self.steps - 2 - index)
        needed = max(len(row.correct), len(following), ending, 2) - 1
        return State(index + 1, predicted, history[:needed], x, kick)


def no_noise(index: int) -> Tensor:
    """The noise source of an ODE: there is none to draw."""
    raise AssertionError("the ODE draws no noise")


def run(
    plan: Plan,
    evaluate: Evaluate,
    start: Tensor | State,
    noise: NoiseSource,
    *,
    until: int | None = None,
    on_step: Callable[[State], None] | None = None,
) -> State:
    """Return the state after step `until` (default: the last); a State as `start` resumes from it."""
    state = start if isinstance(start, State) else State(0, start)
    last = plan.steps if until is None else until
    while state.index < last:
        state = plan.step(state, evaluate, noise)
        if on_step is not None:
            on_step(state)
    return state
