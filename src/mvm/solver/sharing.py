"""Encoder sharing: the deep part of a field computed on some evaluations of a run only, its answer used for the rest.

    similar = similarity(field, noise, nfe=90, condition=labels)  # once, on a few samples
    plan = SharingPlan(90, best_steps(similar, 45))
    with shared(field, plan) as run:                              # once for every batch
        images = sample(run, noise, nfe=90, condition=labels)

An evaluation is known by its place in the run, so that every solver of a fixed number of evaluations will do.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mvm.options import between
from mvm.path import Condition, Schedule, TrainedField
from mvm.path.field import checked_condition
from mvm.solver.sampling import solve


class SharedCondition(Protocol):
    """What the deep part says; tokens (B, N, d) are compared between steps, all else is the field's own."""

    @property
    def tokens(self) -> Tensor: ...


class SharedField(TrainedField, Protocol):
    """A trained field in two parts; labels are int64 (B,), or None for the null class, as of any field."""

    def condition(self, x: Tensor, t: Tensor, labels: Tensor | None) -> SharedCondition:
        """Return what the deep part says."""
        ...

    def head(self, x: Tensor, t: Tensor, labels: Tensor | None, condition: Any) -> Tensor:
        """Return x0_hat at x and t by a condition that may be of an earlier time."""
        ...

    def inner(self, x: Tensor, t: Tensor, labels: Tensor | None, condition: Any) -> Tensor:
        """Return the inner head's x0_hat at the very x and t of the condition; a ValueError where there is none."""
        ...


@dataclass(frozen=True)
class SharingPlan:
    """Of the evaluations 0 to nfe - 1, those in `steps` compute the deep part; the others take the last one's."""

    nfe: int
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.steps))
        if not self.steps or self.steps[0] != 0 or not rising or self.steps[-1] >= self.nfe:
            raise ValueError(
                f"sharing steps={self.steps} must rise from 0, the first evaluation, to {self.nfe - 1} at most"
            )

    def source(self, evaluation: int) -> int:
        """Return the step whose deep part serves this evaluation."""
        return self.steps[bisect_right(self.steps, evaluation) - 1]


def best_steps(similarity: Tensor, count: int) -> tuple[int, ...]:
    """Return the `count` steps, the first among them, for which the total similarity is greatest.

    similarity (n, n): entry [i][j] is that of steps i and j; every step counts with the last computed one. Exact, by
    dynamic programming over the stretches that one computed step serves.
    """
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or not bool(similarity.isfinite().all()):
        raise ValueError(f"similarity must be finite and of shape (nfe, nfe); it is of shape {tuple(similarity.shape)}")
    nfe = len(similarity)
    between("sharing count", count, 1, nfe)
    served = similarity.double().triu().cumsum(1).tolist()  # [i][j]: what step i gives to steps i to j
    totals = [0.0, *served[0]]  # [end]: the greatest total of steps 0 to end - 1, by one stretch, then by two, ...
    last_starts: list[dict[int, int]] = []
    for stretches in range(2, count + 1):
        gains = {
            end: max((totals[start] + served[start][end - 1], start) for start in range(stretches - 1, end))
            for end in range(stretches, nfe + 1)
        }
        last_starts.append({end: start for end, (_, start) in gains.items()})
        totals = [gains[end][0] if end in gains else 0.0 for end in range(nfe + 1)]
    steps, end = [], nfe
    for starts in reversed(last_starts):
        end = starts[end]
        steps.append(end)
    return (0, *reversed(steps))


class SharedAnswer(NamedTuple):
    """A condition with where it was computed, and the answer there."""

    evaluation: int
    labels: Any  # of its branch: a tensor, or None
    x: Tensor
    t: Tensor
    condition: SharedCondition
    outer: Tensor


@dataclass
class SharedRun:
    """A field for one run over one batch: it counts its evaluations and keeps conditions, of labels and null apart.

    All calls with the same tensors x and t are one evaluation: guidance makes several. A branch (labels, or null) that
    was not called when its condition was due, guidance being off then, computes it when first called.
    """

    field: SharedField
    plan: SharingPlan
    evaluations: int = 0
    computed: int = 0  # conditions
    _at: tuple[Tensor, Tensor] | None = None
    _answers: dict[bool, SharedAnswer] = dataclasses.field(default_factory=dict)  # by whether it is the null branch

    @property
    def schedule(self) -> Schedule:
        return self.field.schedule

    def check_condition(self, condition: Condition, x: Tensor) -> Condition:
        return checked_condition(self.field, condition, x)

    def _count(self, x: Tensor, t: Tensor) -> None:
        if self._at is not None and self._at[0] is x and self._at[1] is t:
            return
        if self.evaluations == self.plan.nfe:
            raise ValueError(
                f"sharing was planned for nfe={self.plan.nfe}, and this run makes more evaluations; "
                "use a solver of fixed steps with that nfe, and a new run for every batch"
            )
        self._at, self.evaluations = (x, t), self.evaluations + 1

    def _usable(self, x: Tensor, labels: Tensor | None) -> SharedAnswer | None:
        """Return the branch's condition, or None where a newer one is due."""
        answer = self._answers.get(labels is None)
        if answer is None:
            return None
        # the same tensor, as a solver hands it on, is not read from the device
        same = labels is None or labels is answer.labels or torch.equal(labels, answer.labels)
        if x.shape != answer.x.shape or not same:
            raise ValueError("sharing: batch or labels changed inside a run; begin a new run for every batch")
        return answer if answer.evaluation >= self.plan.source(self.evaluations - 1) else None

    def _compute(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        condition = self.field.condition(x, t, labels)
        outer = self.field.head(x, t, labels, condition)
        self._answers[labels is None] = SharedAnswer(self.evaluations - 1, labels, x, t, condition, outer)
        self.computed += 1
        return outer

    def __call__(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return x0_hat; condition None is the null class."""
        self._count(x, t)
        answer = self._usable(x, condition)
        if answer is None:
            return self._compute(x, t, condition)
        return self.field.head(x, t, condition, answer.condition)

    def pair(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (outer, inner) x0_hat. Where the condition is an old one, the gap between the two is as well.

        An old inner answer itself would not do: guidance would push along all that the outer one has learned since.
        """
        outer = self(x, t, condition)
        answer = self._answers[condition is None]
        inner = self.field.inner(answer.x, answer.t, condition, answer.condition)
        if answer.evaluation == self.evaluations - 1:
            return outer, inner
        return outer, outer - (answer.outer - inner)

    def finish(self) -> None:
        """Raise where a run made fewer evaluations than planned."""
        if self.evaluations != self.plan.nfe:
            raise ValueError(
                f"sharing was planned for nfe={self.plan.nfe}, and this run made {self.evaluations} evaluations; "
                "plan for that"
            )


@contextmanager
def shared(field: SharedField, plan: SharingPlan) -> Generator[SharedRun]:
    """Give a field for one run over one batch; a run of fewer evaluations than planned is an error at the end."""
    run = SharedRun(field, plan)
    yield run
    run.finish()


@dataclass
class RecordedRun(SharedRun):
    """A run that computes at every evaluation and keeps its tokens' directions: of the null branch, or the labels'."""

    null: bool = False
    directions: list[Tensor] = dataclasses.field(default_factory=list)

    def _compute(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        outer = super()._compute(x, t, labels)
        if (labels is None) == self.null:
            tokens = self._answers[self.null].condition.tokens
            self.directions.append(normalize(tokens.float(), dim=-1))
        return outer


def similarity(
    field: SharedField, noise: Tensor, *, nfe: int, condition: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the mean cosine between the tokens of every two evaluations: float64 (nfe, nfe), on the CPU.

    One run without sharing over the noise, a few samples: it keeps the tokens of all evaluations. condition: labels,
    whose branch alone is compared. options: those of `solve` (solver, rho, seeds, guidance), best as used later.
    """
    run = RecordedRun(field, SharingPlan(nfe, tuple(range(nfe))), null=condition is None)
    solve(run, noise, nfe=nfe, condition=condition, **options)
    run.finish()
    batch, tokens, _ = run.directions[0].shape
    rows = torch.stack(run.directions).flatten(1)
    sums = torch.stack([rows @ row for row in rows])  # of products of unit vectors: cosines
    return (sums.double() / (batch * tokens)).cpu()
