"""Published samplers, in time and coordinates of MeanVelocity(T=1), most as rows of coefficients.

They are here to be compared with in one sweep.

With h = lam(t) - lam(s), v = (lam - lam(s))/h and H = (1 + eta) h, the samplers that predict data take

    x_t = sigma_t/sigma_s e^(-eta h) x_s + alpha_t INT_0^1 H e^(-H (1-v)) x0_hat dv + sigma_t sqrt(1 - e^(-2 eta h)) xi

and those that predict noise x_t = alpha_t/alpha_s x_s + sigma_t INT (the same, of eps_hat, with H = -h). They differ in
the evaluations that the polynomial goes through and in what they put for its moments. Each is the published one: its
orders at both ends, its simplifications, its noise. The last step is x0_hat at the last evaluation.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from mvm.options import at_least, choose
from mvm.path import MEAN_VELOCITY, Schedule
from mvm.solver.base import Evaluate, Grid, NoiseSource, Plan, Solver, State, TablePlan, combine, start_time
from mvm.solver.table import LEGENDRE, TO_DATA, Array, Row

# ends of r = sigma/alpha: EDM's; and where DPM-Solver's authors end with few steps, t = 1e-3 of a VP path
GRIDS = {"karras": (0.002, 80.0), "log-snr": (0.01, 80.0)}
KARRAS_RHO = 7.0


@dataclass(frozen=True)
class SigmaGrid(Grid):
    """N times from sigma_max to sigma_min of r = sigma/alpha, then 0: uniform in r^(1/7) ("karras") or lam ("log-snr").

    A field whose schedule begins below sigma_max is sampled from exactly its own start; of any other, the noise is
    taken as the state at sigma_max. evaluate_last: whether sigma_min is the last of the N, or the one after them, which
    stands for 0.
    """

    spacing: str = "karras"
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    evaluate_last: bool = True

    def __post_init__(self) -> None:
        choose("grid", self.spacing, GRIDS)
        if not 0 < self.sigma_min < self.sigma_max < np.inf:
            raise ValueError(
                f"sigma_min={self.sigma_min}, sigma_max={self.sigma_max}: they must satisfy 0 < sigma_min < sigma_max"
            )

    @property
    def last(self) -> float:
        return float(MEAN_VELOCITY.t_from_lam(-math.log(self.sigma_min)))

    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        highest = math.exp(-float(MEAN_VELOCITY.lam(start)))
        first = min(highest, self.sigma_max)
        if first <= self.sigma_min:
            raise ValueError(
                f"sigma_min={self.sigma_min}: the field's schedule begins at sigma/alpha = {first:g} already; use a "
                "smaller sigma_min, or solver 'adams'"
            )
        count = nfe if self.evaluate_last else nfe + 1
        if self.spacing == "karras":
            r = np.linspace(first ** (1 / KARRAS_RHO), self.sigma_min ** (1 / KARRAS_RHO), count) ** KARRAS_RHO
        else:
            r = np.geomspace(first, self.sigma_min, count)
        times = MEAN_VELOCITY.t_from_lam(-np.log(r[:nfe])).tolist()
        return (start if first == highest else times[0], *times[1:], 0.0)


def as_grid(grid: str | Grid, evaluate_last: bool = True) -> Grid:
    """Return the grid of a name, with its usual ends, or the grid itself."""
    return grid if isinstance(grid, Grid) else SigmaGrid(grid, *choose("grid", grid, GRIDS), evaluate_last)


class Point(NamedTuple):
    """A time as samplers see it."""

    alpha: float
    sigma: float
    lam: float

    @property
    def r(self) -> float:
        return self.sigma / self.alpha


def point(t: float) -> Point:
    """Return the point of a time in (0, 1)."""
    if not 0 < t < 1:
        raise ValueError(f"t={t}: lam is infinite there; this solver needs times above 0 and below 1, then perhaps 0")
    return Point(float(MEAN_VELOCITY.alpha(t)), float(MEAN_VELOCITY.sigma(t)), float(MEAN_VELOCITY.lam(t)))


def rows_through(
    times: tuple[float, ...], lower_final: float, row: Callable[[list[Point], Point, int], Row]
) -> tuple[Row, ...]:
    """Return the steps of a multistep plan: row(points so far, newest first; the next; the highest order allowed).

    With fewer steps than lower_final that end at t = 0, the order falls to 1 there, by one a step.
    """
    points = [point(t) for t in times[:-1]] + ([point(times[-1])] if times[-1] else [])
    steps, rows = len(times) - 1, []
    for i in range(len(points) - 1):
        highest = steps - i if times[-1] == 0 and steps < lower_final else steps
        rows.append(row(points[i::-1], points[i + 1], min(highest, i + 1)))
    return (*rows, TO_DATA) if times[-1] == 0 else tuple(rows)


def moments(H: float, count: int) -> Array:
    """Return INT_0^1 H e^(-H (1-v)) v^k dv, k < count, each recursion where it is stable."""
    moment = np.zeros(max(count, 50) + 1)
    if abs(H) < 4:
        for k in range(len(moment) - 1, 0, -1):
            moment[k - 1] = H * (1 - moment[k]) / k
    else:
        moment[0] = -np.expm1(-H)
        for k in range(1, count):
            moment[k] = 1 - k * moment[k - 1] / H
    return moment[:count]


SLOPES = ("exact", "bh1", "bh2")


def weights(H: float, v: Sequence[float], slope: str = "exact", curvature: float = 1.0) -> tuple[float, ...]:
    """Return the weights of evaluations at v (0: the step's start, 1: its end), the moments of their polynomial taken.

    slope: of two evaluations alone, the first moment as H/2 ("bh1"), as half of the zeroth ("bh2"), or "exact".
    curvature: factor of the second moment of three.
    """
    taken = moments(H, len(v))
    if len(v) == 2 and slope != "exact":
        taken[1] = (H if slope == "bh1" else taken[0]) / 2
    if len(v) == 3:
        taken[2] *= curvature
    return tuple(np.linalg.solve(np.vander(v, increasing=True).T, taken).tolist())


@dataclass(frozen=True)
class Peer(Solver):
    """A published sampler of one evaluation a step.

    lower_final: with fewer evaluations than this, orders fall to 1 at t = 0, one a step.
    """

    grid: Grid
    lower_final = 0.0
    plan_class: ClassVar[Callable[[tuple[float, ...], tuple[Row, ...]], Plan]] = TablePlan

    def plan(self, schedule: Schedule, nfe: int, rho: float) -> Plan:
        return self.plan_times(schedule, self.grid.shifted(nfe, start_time(schedule), self.shift), rho)

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        self.check_rho(rho)
        return self.plan_class(times, rows_through(times, self.lower_final, partial(self.row, rho)))

    @abstractmethod
    def row(self, rho: float, past: list[Point], t: Point, highest: int) -> Row:
        """Return the step from past[0] to t; see rows_through."""


@dataclass(frozen=True)
class DataMultistep(Peer):
    """A multistep sampler in x0_hat: DPM-Solver++, its SDE, UniPC, the published SA-Solver.

    predictor, corrector: evaluations they go through (0: no corrector). slope, curvature: see `weights`.
    noise: where r = sigma/alpha
    lies in this interval at the step's `tau_at`, eta = rho^2, so rho = 1 is the published noise and 0 the ODE; None: no
    noise at all.
    """

    predictor: int
    corrector: int = 0
    slope: str = "exact"
    curvature: float = 1.0
    lower_final: float = 0.0
    noise: tuple[float, float] | None = None
    tau_at: str = "end"

    def __post_init__(self) -> None:
        at_least("predictor", self.predictor, 1)
        at_least("corrector", self.corrector, 0)
        choose("slope", self.slope, dict.fromkeys(SLOPES))
        choose("tau_at", self.tau_at, dict.fromkeys(("start", "end")))

    @property
    def order(self) -> int:
        """The first step, with one past value, caps it at 3, and at 2 without a corrector."""
        return min(self.corrector, self.predictor + 1, 3) if self.corrector else min(self.predictor, 2)

    @property
    def weak_order(self) -> int:
        return 0 if self.noise is None else min(self.order, 2)

    def row(self, rho: float, past: list[Point], t: Point, highest: int) -> Row:
        s = past[0]
        h, at = t.lam - s.lam, s if self.tau_at == "start" else t
        eta = rho**2 if self.noise and self.noise[0] <= at.r <= self.noise[1] else 0.0

        def scaled(nodes: list[Point]) -> tuple[float, ...]:
            v = [(node.lam - s.lam) / h for node in nodes]
            return tuple(t.alpha * w for w in weights((1 + eta) * h, v, self.slope, self.curvature))

        predict = scaled(past[: min(self.predictor, highest)])
        correct = scaled([t, *past[: min(self.corrector - 1, highest)]]) if self.corrector else ()
        std = t.sigma * math.sqrt(max(0.0, -math.expm1(-2 * eta * h)))
        return Row(t.sigma / s.sigma * math.exp(-eta * h), std, predict, correct)


@dataclass(frozen=True)
class NoisePlan(Plan):
    """A multistep plan in eps_hat: x_t = decay x_s + sum(predict * eps_hats). History is x0_hat, then past eps_hat."""

    rows: tuple[Row, ...]

    def step(self, state: State, evaluate: Evaluate, noise: NoiseSource) -> State:
        t, row = self.times[state.index], self.rows[state.index]
        x0 = evaluate(state.x, t)
        if row == TO_DATA:
            return State(state.index + 1, x0, (x0,))
        here = point(t)
        history = ((state.x - here.alpha * x0) / here.sigma, *state.history[1:])
        x = combine(row.decay, state.x, row.predict, history, None)
        needed = len(self.rows[state.index + 1].predict) - 1 if state.index + 1 < self.steps else 0
        return State(state.index + 1, x, (x0, *history[:needed]))


BASHFORTH = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


@dataclass(frozen=True)
class NoiseMultistep(Peer):
    """A multistep sampler in eps_hat, ODE only: DEIS (a polynomial in log r) or iPNDM.

    equal_steps: Adams-Bashforth coefficients of equal steps in r = sigma/alpha, whatever the steps are.
    """

    plan_class = NoisePlan
    steps: int
    equal_steps: bool = False
    lower_final: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= len(BASHFORTH):
            raise ValueError(f"order={self.steps} is out of range; it must be 1 to {len(BASHFORTH)}")

    @property
    def order(self) -> int:
        """The first step, with one past value, caps it at 2."""
        return min(self.steps, 2)

    def row(self, rho: float, past: list[Point], t: Point, highest: int) -> Row:
        s, used = past[0], min(self.steps, highest)
        if self.equal_steps:
            scale, taken = t.alpha * (t.r - s.r), BASHFORTH[used - 1]
        else:
            h = t.lam - s.lam
            scale, taken = t.sigma, weights(-h, [(node.lam - s.lam) / h for node in past[:used]])
        return Row(t.alpha / s.alpha, 0.0, tuple(scale * w for w in taken))


@dataclass(frozen=True)
class ErSde(Peer):
    """ER-SDE-Solver of `stages` 1 to 3, with the noise scale function r (exp(r^0.3) + 10)^(rho^2), r = sigma/alpha.

    rho = 1 is the published noise, rho = 0 the ODE. The integrals of its Taylor terms are exact here, sums there.
    """

    stages: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= 3:
            raise ValueError(f"stages={self.stages} is out of range; it must be 1 to 3")

    @property
    def order(self) -> int:
        """The slope is a difference, right half a step before: the third stage does not raise the order."""
        return min(self.stages, 2)

    @property
    def weak_order(self) -> int:
        return self.order

    def row(self, rho: float, past: list[Point], t: Point, highest: int) -> Row:
        s, used = past[0], min(self.stages, highest)

        def raised(r: Array) -> Array:  # the noise scale function over r
            return (np.exp(r**0.3) + 10) ** (rho**2)

        points, shares = LEGENDRE  # in log r
        r = np.exp((points * (t.lam - s.lam) - t.lam - s.lam) / 2)
        ends = raised(np.array([t.r, s.r]))
        share = float(ends[0] / ends[1])  # of the noise in x that stays
        ratio = t.r / s.r * share
        inverse = t.r * ends[0] * shares * (t.lam - s.lam) / 2 / raised(r)  # scale(t) INT dr/scale(r) from t to s
        step = t.r - s.r
        taken = np.zeros(3)
        taken[0] = 1 - ratio
        if used > 1:
            slope = np.array([1, -1, 0]) / (s.r - past[1].r)
            taken += (step + inverse.sum()) * slope
        if used > 2:
            before = np.array([0, 1, -1]) / (past[1].r - past[2].r)
            taken += (step**2 / 2 + (inverse * (r - s.r)).sum()) * 2 * (slope - before) / (s.r - past[2].r)
        predict = tuple((t.alpha * taken[:used]).tolist())
        return Row(t.alpha / s.alpha * ratio, t.sigma * math.sqrt(max(0.0, 1 - share**2)), predict)


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
        return SeedsPlan(self.grid.shifted(len(stages), start_time(schedule), self.shift), stages, rho**2)

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
        times = self.grid.shifted(nfe // 2 + 1, start_time(schedule), self.shift)
        return self._plan(times, rho, {0} if nfe % 2 == 0 else set())

    def plan_times(self, schedule: Schedule, times: tuple[float, ...], rho: float) -> Plan:
        return self._plan(times, rho, set())

    def _plan(self, times: tuple[float, ...], rho: float, euler: set[int]) -> Plan:
        steps, levels = len(times) - 1, [point(t).r for t in times[:-1]]
        raised = min(self.s_churn * rho**2 / steps, math.sqrt(2) - 1)
        gammas = tuple(min(raised, levels[0] / r - 1) * (self.s_min <= r <= self.s_max) for r in levels)
        return ChurnPlan(times, gammas, self.s_noise, frozenset(euler | ({steps - 1} if times[-1] == 0 else set())))


ALWAYS = float("inf")
FEW = 15  # evaluations below which diffusers lowers orders at the end of DPM-Solver++ and DEIS


def dpm(order: int = 2, grid: str | Grid = "karras") -> DataMultistep:
    """Return DPM-Solver++(2M or 3M): the midpoint form of two evaluations, half of the curvature of three."""
    return DataMultistep(f"dpm++{order}m", as_grid(grid), order, slope="bh2", curvature=0.5, lower_final=FEW)


def unipc(order: int = 3, variant: str = "bh2", grid: str | Grid = "log-snr") -> DataMultistep:
    """Return UniPC: UniP of that order, UniC one evaluation more; B(h) "bh1" or "bh2" for two evaluations."""
    return DataMultistep("unipc", as_grid(grid), order, order + 1, slope=variant, lower_final=ALWAYS)


def deis(order: int = 3, grid: str | Grid = "karras") -> NoiseMultistep:
    """Return log-rho DEIS: eps_hat a polynomial in log r."""
    return NoiseMultistep("deis", as_grid(grid), order, lower_final=FEW)


def ipndm(order: int = 4, grid: str | Grid = "karras") -> NoiseMultistep:
    """Return iPNDM: Adams-Bashforth in eps_hat over r, without a warm-up by Runge-Kutta."""
    return NoiseMultistep("ipndm", as_grid(grid), order, equal_steps=True)


def sde_dpm(order: int = 2, grid: str | Grid | None = None) -> DataMultistep:
    """Return the SDE of DPM-Solver++(2M or 3M) as k-diffusion has it: 2M in midpoint form, 3M never lowered."""
    name, two = f"sde-dpm++{order}m", order == 2
    times = as_grid(grid or ("karras" if two else "log-snr"))
    return DataMultistep(name, times, order, slope="bh2" if two else "exact", curvature=0.5, noise=(0.0, math.inf))


# t in [0.2, 0.8] of the variance-preserving path with beta from 0.1 to 20, as its authors have it, as sigma/alpha
SA_NOISE = (0.7203614887001109, 25.108527491432742)


def sa_official(
    predictor: int = 3,
    corrector: int = 4,
    grid: str | Grid = "karras",
    tau_at: str = "end",
    noise: tuple[float, float] = SA_NOISE,
) -> DataMultistep:
    """Return SA-Solver as its authors' code has it: tau = rho within `noise` and 0 outside, orders lowered at the end.

    The last step, of first order, leads to sigma_min, which is not evaluated. tau is judged at a step's `tau_at`: "end"
    is theirs, "start" diffusers'.
    """
    times = as_grid(grid, evaluate_last=False)
    return DataMultistep(
        "sa-official", times, predictor, corrector, "bh1", lower_final=ALWAYS, noise=noise, tau_at=tau_at
    )


def er_sde(stages: int = 3, grid: str | Grid = "karras") -> ErSde:
    """Return ER-SDE-Solver-3, or of fewer stages."""
    return ErSde("er-sde", as_grid(grid), stages)


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
