"""Times of the default solver fitted to one model at one number of evaluations, on its own trajectories.

The image of a noise is a smooth function of the solver's times, and a long run says where it should end: a problem of
least squares in a few unknowns, solved by Levenberg-Marquardt with finite differences. ODE only: an SDE is no map.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mvm.options import at_least
from mvm.path import MEAN_VELOCITY, Field, Schedule
from mvm.solver.adams import ODE_B, Adams, adams, ending_b
from mvm.solver.base import start_time
from mvm.solver.guidance import Rules
from mvm.solver.sampling import sample

REFERENCE_NFE = 100
STEP = 0.03  # of an unknown, all of which are logarithms: large compared with float32's rounding of an image
ROUNDS = 6


@dataclass(frozen=True)
class Tuned:
    """A solver for exactly `nfe` evaluations, and the RMSE to a long run on the noises it was fitted to."""

    solver: Adams
    nfe: int
    before: float
    after: float


def _built(base: Adams, unknowns: Tensor, start: float) -> Adams:
    """Return the solver of these unknowns: log r of the interior times, then the logarithms of b, end_b and spread."""
    log_r, ends = unknowns[:-3], unknowns[-3:].exp().tolist()
    times = (start, *MEAN_VELOCITY.t_from_lam(-log_r).tolist(), 0.0)
    return replace(base, given=times, b=ends[0], end_b=ends[1], spread=ends[2])


def tune(
    field: Field,
    noise: Tensor,
    nfe: int,
    *,
    schedule: Schedule = MEAN_VELOCITY,
    condition: Tensor | None = None,
    guidance: Rules = None,
    solver: Adams | None = None,
    reference_nfe: int = REFERENCE_NFE,
    rounds: int = ROUNDS,
    on_solve: Callable[[int, float], None] | None = None,
) -> Tuned:
    """Return times, and b, end_b and spread, whose images are nearest to those of `reference_nfe` evaluations.

    noise (B, ...): some 16 samples do; the fit takes about (nfe + 3) nfe evaluations of them a round. solver: what to
    start from; its orders stay. on_solve(runs, rmse) is called after every run, for a progress bar.
    """
    at_least("nfe", nfe, 2)
    at_least("reference_nfe", reference_nfe, nfe + 1)
    base: Any = (solver or adams()).for_field(field, noise[0].numel())
    start = start_time(schedule)
    how: dict[str, Any] = {"schedule": schedule, "condition": condition, "guidance": guidance}
    wanted = sample(field, noise, solver=base, nfe=reference_nfe, **how).double()
    runs = 0

    def misses(unknowns: Tensor) -> Tensor:
        nonlocal runs
        difference = sample(field, noise, solver=_built(base, unknowns, start), nfe=nfe, **how).double() - wanted
        runs += 1
        if on_solve is not None:
            on_solve(runs, float(difference.square().mean().sqrt()))
        return difference.flatten(1)

    lams = MEAN_VELOCITY.lam(torch.tensor(base.plan(schedule, nfe, 0.0).times[1:-1], dtype=torch.float64))
    end_b = base.end_b or ending_b(math.exp(-lams[-1]))
    ends = torch.tensor([base.b or ODE_B, end_b, base.spread], dtype=torch.float64).log()
    unknowns, damping = torch.cat((-lams, ends)), 1e-3
    miss = misses(unknowns)
    before = float(miss.square().mean().sqrt())
    for _ in range(rounds):
        # a noise near the border of two images may end at the other one: samples count by no more than the median miss
        each = miss.square().sum(1, keepdim=True).sqrt()
        weight = (each.median() / each.clamp_min(1e-300)).clamp_max(1).sqrt()
        slopes = torch.stack(
            [
                ((misses(unknowns + STEP * row) - miss) * weight).flatten() / STEP
                for row in torch.eye(len(unknowns), dtype=torch.float64)
            ]
        )
        normal, pull = (slopes @ slopes.T).cpu(), (slopes @ (miss * weight).flatten()).cpu()
        improved = False
        while not improved and damping < 1e4:
            # an unknown without effect, as b of an x0_hat that is constant, stays where it is
            move = -torch.linalg.lstsq(normal + damping * normal.diag().diag(), pull[:, None]).solution[:, 0]
            trial = unknowns + move.clamp(-0.5, 0.5)
            if bool((trial[:-3].diff() < 0).all()):  # the times still fall
                tried = misses(trial)
                improved = bool((tried * weight).square().sum() < (miss * weight).square().sum())
            damping = damping / 10 if improved else damping * 10
        if not improved:
            break
        unknowns, miss = trial, tried
    return Tuned(_built(base, unknowns, start), nfe, before, float(miss.square().mean().sqrt()))
