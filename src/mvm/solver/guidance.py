"""Guidance: rules that turn a field into a field, judged at the time evaluated.

Solvers know nothing of it. A rule of scale 1, or outside its interval, returns the field it was given, so that no
extra pass is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mvm.options import MOST_SCALE, between, choose
from mvm.path import MEAN_VELOCITY, Condition, Field, PairedField, Schedule, as_time, joined_for
from mvm.path.condition import batched, rows
from mvm.path.field import on_schedule

# Log-SNR progress runs from 0 at t = 0.999 to 1 at t = 0.001 of MeanVelocity(T=1), for every solver and schedule.
_PROGRESS = tuple(float(MEAN_VELOCITY.lam(t)) for t in (0.999, 0.001))
_TOLERANCE = 1e-9  # ends included, whatever the rounding of lam


def progress(t: Tensor | float, schedule: Schedule) -> Tensor:
    """Return p = (lam(t) - lam_0)/(lam_1 - lam_0), clipped to [0, 1]."""
    first, last = _PROGRESS
    return ((schedule.lam(t) - first) / (last - first)).clamp(0, 1)


MEASURES = {"progress": progress, "t": lambda t, schedule: as_time(t) / schedule.whole.end}


@dataclass(frozen=True)
class Interval:
    """Where guidance acts: [low, high], ends included, in log-SNR progress from 0 (noise) to 1 (image), or in t."""

    low: float = 0.0
    high: float = 1.0
    measure: str = "progress"

    def __post_init__(self) -> None:
        choose("interval measure", self.measure, MEASURES)
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"interval=[{self.low}, {self.high}] must satisfy 0 <= low <= high <= 1")

    def contains(self, t: Tensor | float, schedule: Schedule) -> Tensor:
        """Return whether each t lies inside."""
        p = MEASURES[self.measure](t, schedule)
        return (p >= self.low - _TOLERANCE) & (p <= self.high + _TOLERANCE)


ALWAYS = Interval()


def extrapolate(weak: Tensor, strong: Tensor, scale: float) -> Tensor:
    """Return weak + scale (strong - weak)."""
    return weak + scale * (strong - weak)


@dataclass(frozen=True)
class Guidance(ABC):
    """A rule with a scale and an interval; scale 1 is the identity."""

    scale: float
    interval: Interval = field(default=ALWAYS, kw_only=True)

    def __post_init__(self) -> None:
        between("guidance scale", self.scale, -MOST_SCALE, MOST_SCALE)
        if not isinstance(self.interval, Interval):
            raise ValueError(f"interval={self.interval!r} must be an Interval of mvm.solver, e.g. Interval(0.6, 0.8)")

    @abstractmethod
    def guide(self, base: Field) -> Field:
        """Return the guided field."""

    def on(self, schedule: Schedule, wrap: Callable[[Field], Field] = lambda own: own) -> "Guidance":
        """Return the rule with any field of its own brought to this schedule, then wrapped."""
        return self

    def at(self, base: Field, t: float, schedule: Schedule) -> Field:
        """Return the field to evaluate at time t: guided inside the interval, `base` itself outside."""
        if self.scale == 1 or not bool(self.interval.contains(t, schedule)):
            return base
        return self.guide(base)


@dataclass(frozen=True)
class ClassifierFree(Guidance):
    """null + scale (conditional - null): two passes, in one call of a field where that pays (a JoinedField)."""

    def guide(self, base: Field) -> Field:
        def guided(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            if condition is None:
                raise ValueError("condition=None: classifier-free guidance needs class labels or text to guide towards")
            if joined_for(base, x):
                null, conditional = base.both(x, t, condition)
            else:
                null, conditional = base(x, t, None), base(x, t, condition)
            return extrapolate(null, conditional, self.scale)

        return guided


@dataclass(frozen=True)
class Internal(Guidance):
    """inner + scale (outer - inner), both from one pass of a field with an inner head."""

    def guide(self, base: Field) -> Field:
        if not isinstance(base, PairedField):
            raise ValueError("internal guidance needs a field with an inner head (a `pair` method); put it first")

        def guided(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            outer, inner = base.pair(x, t, condition)
            return extrapolate(inner, outer, self.scale)

        return guided


@dataclass(frozen=True)
class Auto(Guidance):
    """weak + scale (field - weak): autoguidance by a weaker field (smaller, or trained less; arXiv 2406.02507).

    A weaker field that names a schedule of its own is asked at equal SNR; one that names none is of the sampled path.
    """

    weak: Field = field(kw_only=True)

    def on(self, schedule: Schedule, wrap: Callable[[Field], Field] = lambda own: own) -> Guidance:
        return replace(self, weak=wrap(on_schedule(self.weak, schedule)))

    def guide(self, base: Field) -> Field:
        def guided(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            return extrapolate(self.weak(x, t, condition), base(x, t, condition), self.scale)

        return guided


Rules = Guidance | Sequence[Guidance] | None


def as_rules(guidance: Rules) -> tuple[Guidance, ...]:
    """Return the rules as a tuple, innermost first."""
    if guidance is None:
        return ()
    if not isinstance(guidance, Guidance | Sequence) or isinstance(guidance, str):
        raise ValueError(f"guidance={guidance!r} must be a rule of mvm.solver, e.g. ClassifierFree(1.5), or several")
    rules = (guidance,) if isinstance(guidance, Guidance) else tuple(guidance)
    if not all(isinstance(rule, Guidance) for rule in rules):
        raise ValueError("guidance holds something that is not a rule of mvm.solver")
    if any(isinstance(rule, Internal) for rule in rules[1:]):
        raise ValueError("guidance: Internal must stand first; after another rule the inner head is out of reach")
    return rules


def guided_at(base: Field, guidance: Rules, t: float, schedule: Schedule) -> Field:
    """Return the field to evaluate at time t under all rules, the first applied innermost."""
    for rule in as_rules(guidance):
        base = rule.at(base, t, schedule)
    return base


def guided(base: Field, guidance: Rules, schedule: Schedule) -> Field:
    """Return a field that is guided wherever t lies inside; rows of a batch may differ in t."""

    rules = [rule.on(schedule) for rule in as_rules(guidance)]

    def call(x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        out, given = torch.empty_like(x), None if condition is None else batched(condition, x)
        for value in t.unique().tolist():
            here = t == value
            out[here] = guided_at(base, rules, value, schedule)(x[here], t[here], rows(given, here))
        return out

    return call


def guided_evaluations(guidance: Rules, times: Sequence[float], schedule: Schedule) -> int:
    """Return at how many of these times at least one rule acts; at t = 0 nothing is ever evaluated."""
    rules = [rule for rule in as_rules(guidance) if rule.scale != 1]
    return sum(any(bool(rule.interval.contains(t, schedule)) for rule in rules) for t in times if t > 0)
