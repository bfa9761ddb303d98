"""One-step solvers on the field's own schedule: Euler, Heun, Euler-Maruyama.

They integrate in the clock c = t^p, p = sigma_power (1 + rho^2): near t = 0 the state leaves x0_hat as
c, so a plain Euler step in c is exact to leading order where one in t would leave half the noise behind.
On the mean-velocity path that is c = sqrt(t) for the ODE and c = t for the paper's SDE; on the linear
flow's ODE it is t itself, the usual Euler.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mvm.path import Schedule
from mvm.solver.base import Evaluate, NoiseSource, Plan, Solver, State, TablePlan, combine, shifted_times
from mvm.solver.table import TO_DATA, Row


def smooth_times(schedule: Schedule, steps: int) -> tuple[float, ...]:
    """Return steps + 1 times of the schedule's own, uniform in the variable in which its sigma is smooth."""
    share = 1 - np.arange(steps + 1) / steps
    return tuple((schedule.end * share ** (1 / schedule.sigma_power)).tolist())


def drift(schedule: Schedule, t: float, rho: float) -> tuple[float, float]:
    """Return (a, b) with dx/dt = a x + b x0_hat: the probability flow plus (rho^2 diffusion / 2) eps/sigma."""
    alpha, sigma = float(schedule.alpha(t)), float(schedule.sigma(t))
    per_eps = float(schedule.sigma_rate(t)) + rho**2 * float(schedule.diffusion(t)) / (2 * sigma)
    return per_eps / sigma, float(schedule.alpha_rate(t)) - per_eps * alpha / sigma


def clock_increment(schedule: Schedule, s: float, t: float, at: float, rho: float) -> float:
    """Return dt/dc at time `at`, times c(t) - c(s): what multiplies a drift evaluated there."""
    p = schedule.sigma_power * (1 + rho**2)
    return at ** (1 - p) / p * (t**p - s**p)


def euler_row(schedule: Schedule, s: float, t: float, rho: float) -> Row:
    """Return the Euler(-Maruyama) step."""
    if t == 0:
        return TO_DATA
    h = clock_increment(schedule, s, t, s, rho)
    a, b = drift(schedule, s, rho)
    std = rho * (float(schedule.diffusion(s)) * abs(s - t)) ** 0.5
    return Row(1 + h * a, std, (h * b,))


@dataclass(frozen=True)
class EulerMaruyama(Solver):
    """First order, any rho >= 0; rho = 0 is Euler's method."""

    name: str = "euler-maruyama"
    order, weak_order, own_time = 1, 1, True

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        return self.plan_times(schedule, shifted_times(smooth_times(schedule, nfe), self.shift, schedule), rho)

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        self.check_rho(rho)
        return TablePlan(times, tuple(euler_row(schedule, s, t, rho) for s, t in pairwise(times)))


@dataclass(frozen=True)
class Euler(EulerMaruyama):
    """First order, ODE only."""

    name: str = "euler"
    weak_order = 0


@dataclass(frozen=True)
class HeunPlan(Plan):
    """Two evaluations a step, except the steps listed in `euler` (one)."""

    schedule: Schedule
    euler: frozenset[int]

    @property
    def nfe(self) -> int:
        return 2 * self.steps - len(self.euler)

    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        s, t = self.times[state.index], self.times[state.index + 1]
        row = euler_row(self.schedule, s, t, 0.0)
        x0 = evaluate(state.x, s)
        predicted = combine(row.decay, state.x, row.predict, (x0,), None)
        if state.index in self.euler:
            return State(state.index + 1, predicted, (x0,))
        # x_t = x_s + (h_s F(x_s, s) + h_t F(predicted, t))/2: half of the Euler step, half of the one seen from t
        h = clock_increment(self.schedule, s, t, t, 0.0)
        a, b = drift(self.schedule, t, 0.0)
        end = h * (a * predicted + b * evaluate(predicted, t))
        return State(state.index + 1, (state.x + predicted + end) / 2, (x0,))


@dataclass(frozen=True)
class Heun(Solver):
    """Second order, ODE only. The step into t = 0 is Euler's; an even nfe takes one Euler step first."""

    name: str = "heun"
    order, own_time = 2, True

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        self.check_rho(rho)
        first = {0} if nfe % 2 == 0 else set()
        steps = nfe // 2 + 1  # odd: (nfe-1)/2 Heun + 1 Euler; even: 1 Euler + (nfe-2)/2 Heun + 1 Euler
        times = shifted_times(smooth_times(schedule, steps), self.shift, schedule)
        return HeunPlan(times, schedule, frozenset(first | {steps - 1}))

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        self.check_rho(rho)
        last = len(times) - 2
        return HeunPlan(times, schedule, frozenset({last} if times[-1] == 0 else set()))
