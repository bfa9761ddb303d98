"""Published samplers of several evaluations a step, SEEDS and EDM's; and all published ones by name (see peers.py)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mvm.options import at_least
from mvm.path import MEAN_VELOCITY, Schedule
from mvm.solver.base import Evaluate, Grid, NoiseSource, Plan, Solver, State, combine, start_time
from mvm.solver.peers import as_grid, deis, dpm, er_sde, ipndm, point, sa_official, sde_dpm, unipc, weights

STAGES: dict[int, tuple[float, ...]] = {1: (1.0,), 2: (1 / 2, 1.0), 3: (1 / 3, 2 / 3, 1.0)}


@dataclass(frozen=True)
class SeedsPlan(Plan):
    """stages: evaluations of every step, the last of which gives x0_hat where the end is 0."""

    stages: tuple[int, ...]
    eta: float

    @property
    def nfe(self) -> int:
        return sum(self.stages)

    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        index, x = state.index, state.x
        first = newest = evaluate(x, self.times[index])
        if self.times[index + 1] == 0:
            return State(index + 1, first, (first,))
        s, t = point(self.times[index]), point(self.times[index + 1])
        h, parts, before, path = t.lam - s.lam, STAGES[self.stages[index]], 0.0, None
        for k, part in enumerate(parts):
            if before:  # through the first evaluation and the newest
                x0s, v = (newest, first), (before / part, 0.0)
            else:
                x0s, v = (first,), (0.0,)
            time = self.times[index + 1] if part == 1 else float(MEAN_VELOCITY.t_from_lam(s.lam + part * h))
            at = point(time)
            if self.eta:  # one Brownian path through all stages
                gap = self.eta * (part - before) * h
                kick = math.sqrt(-math.expm1(-2 * gap)) * noise(len(STAGES) * index + k)
                path = kick if path is None else math.exp(-gap) * path + kick
            slope = "bh2" if len(parts) == 2 else "exact"
            predict = tuple(at.alpha * w for w in weights((1 + self.eta) * part * h, v, slope))
            decay = at.sigma / s.sigma * math.exp(-self.eta * part * h)
            reached = combine(decay, x, predict, x0s, None if path is None else at.sigma * path)
            if part < 1:
                newest, before = evaluate(reached, time), part
        return State(index + 1, reached, (first,))


@dataclass(frozen=True)
class Seeds(Solver):
    """SEEDS of 2 or 3 stages a step; eta = rho^2: rho = 1 is the published noise, rho = 0 the ODE.

    The step into t = 0 has one stage; where evaluations are left over, a first step of fewer stages spends them.
    """

    grid: Grid
    stages: int

    def __post_init__(self) -> None:
        if self.stages not in STAGES:
            raise ValueError(f"stages={self.stages} is out of range; it must be 1 to 3")

    @property
    def order(self) -> int:
        return self.stages

    @property
    def weak_order(self) -> int:
        return min(self.stages, 2)

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        whole, rest = divmod(nfe - 1, self.stages)
        stages = (*[rest] * bool(rest), *[self.stages] * whole, 1)
        return SeedsPlan(self.grid.times(len(stages), start_time(schedule)), stages, rho**2)

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        stages = [self.stages] * (len(times) - 1)
        if times[-1] == 0:
            stages[-1] = 1
        return SeedsPlan(times, tuple(stages), rho**2)


@dataclass(frozen=True)
class ChurnPlan(Plan):
    """gammas: by how much the noise of each step is raised first. euler: steps of one evaluation."""

    gammas: tuple[float, ...]
    s_noise: float
    euler: frozenset[int]

    @property
    def nfe(self) -> int:
        return 2 * self.steps - len(self.euler)

    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        index, time = state.index, self.times[state.index]
        at, gamma = point(time), self.gammas[state.index]
        y = state.x / at.alpha  # as on the path of exploding variance, where r is the clock
        if gamma:
            y = y + self.s_noise * at.r * math.sqrt(gamma * (2 + gamma)) * noise(index)
            time = float(MEAN_VELOCITY.t_from_lam(at.lam - math.log1p(gamma)))
            at = point(time)
        x0 = evaluate(y * at.alpha, time)
        end = self.times[index + 1]
        if end == 0:
            return State(index + 1, x0, (x0,))
        t, rate = point(end), (y - x0) / at.r
        predicted = y + (t.r - at.r) * rate
        if index not in self.euler:
            rate = (rate + (predicted - evaluate(predicted * t.alpha, end)) / t.r) / 2
            predicted = y + (t.r - at.r) * rate
        return State(index + 1, predicted * t.alpha, (x0,))


@dataclass(frozen=True)
class EdmChurn(Solver):
    """EDM's stochastic sampler, Heun over r = sigma/alpha; S_churn is scaled by rho^2, so rho = 0 is its ODE sampler.

    Defaults are its ImageNet-64 settings. Noise is never raised above the first time's. The step into t = 0 is Euler's;
    an even nfe takes one Euler step first.
    """

    grid: Grid
    s_churn: float = 40.0
    s_min: float = 0.05
    s_max: float = 50.0
    s_noise: float = 1.003
    order, weak_order = 2, 2  # the second once s_churn / steps is below its cap

    def __post_init__(self) -> None:
        for option in ("s_churn", "s_min", "s_max", "s_noise"):
            at_least(option, getattr(self, option), 0)

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        times = self.grid.times(nfe // 2 + 1, start_time(schedule))
        return self._plan(times, rho, {0} if nfe % 2 == 0 else set())

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        return self._plan(times, rho, set())

    def _plan(self, times: tuple[float, ...], rho: float, euler: set[int]) -> Plan:
        steps, levels = len(times) - 1, [point(t).r for t in times[:-1]]
        raised = min(self.s_churn * rho**2 / steps, math.sqrt(2) - 1)
        gammas = tuple(min(raised, levels[0] / r - 1) * (self.s_min <= r <= self.s_max) for r in levels)
        return ChurnPlan(times, gammas, self.s_noise, frozenset(euler | ({steps - 1} if times[-1] == 0 else set())))


def seeds(stages: int = 3, grid: str | Grid = "karras") -> Seeds:
    """Return SEEDS-3 or SEEDS-2."""
    return Seeds(f"seeds{stages}", as_grid(grid), stages)


def edm_churn(grid: str | Grid = "karras", **settings: float) -> EdmChurn:
    """Return EDM's stochastic sampler; settings: s_churn, s_min, s_max, s_noise."""
    return EdmChurn("edm-churn", as_grid(grid), **settings)


PEERS: dict[str, Callable[[], Solver]] = {
    "dpm++2m": dpm,
    "dpm++3m": partial(dpm, 3),
    "unipc": unipc,
    "deis": deis,
    "ipndm": ipndm,
    "sde-dpm++2m": sde_dpm,
    "sde-dpm++3m": partial(sde_dpm, 3),
    "sa-official": sa_official,
    "er-sde": er_sde,
    "seeds2": partial(seeds, 2),
    "seeds3": seeds,
    "edm-churn": edm_churn,
}
