"""From noise to image: `sample`, and `solve`, which also returns what it cost."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from mvm import noise as counter_noise
from mvm.options import DEFAULT_NFE, MAX_RHO, MOST_NFE, between
from mvm.path import MEAN_VELOCITY, Condition, Field, Schedule, SizedField, full_time, require_schedule
from mvm.path.condition import rows
from mvm.path.field import checked_condition
from mvm.path.schedule import equal_snr_scale, equal_snr_time
from mvm.solver.adams import adams
from mvm.solver.base import Evaluate, NoiseSource, Solver, State, require_finite, run
from mvm.solver.guidance import Rules, as_rules, guided_at
from mvm.solver.meter import Meter, metered
from mvm.solver.variants import solver_named, warn_of_noise


def evaluator(meter: Meter, schedule: Schedule, condition: Tensor | None, guidance: Rules) -> Evaluate:
    """Return (x, t) -> x0_hat on the field's own schedule, guided at the time evaluated; every pass is counted."""
    rules = tuple(rule.on(schedule, meter.also) for rule in as_rules(guidance))

    def evaluate(x: Tensor, t: float) -> Tensor:
        meter.evaluations += 1
        x0 = guided_at(meter, rules, t, schedule)(x, full_time(x, t), condition)
        if x0.shape != x.shape:
            shapes = f"x of shape {tuple(x.shape)} with shape {tuple(x0.shape)}"
            raise ValueError(f"the field answers {shapes}; it must be x's")
        # in no less than the state's dtype: a multistep table would multiply its rounding
        return x0.to(torch.promote_types(x0.dtype, x.dtype))

    return evaluate


def step_noise(seeds: Tensor, like: Tensor, draw: counter_noise.Normal = counter_noise.normal) -> NoiseSource:
    """Return the noise of each solver step: a function of every sample's seed and the step index."""
    return lambda index: draw(seeds, counter_noise.STEP + index, like.shape[1:], like.dtype)


@dataclass(frozen=True)
class Solution:
    """The image, and what it cost: evaluations (nfe), passes through the field, the seeds used."""

    x: Tensor
    nfe: int
    passes: int
    seeds: Tensor


def in_solver_time(solver: Solver, evaluate: Evaluate, x: Tensor, schedule: Schedule) -> tuple[Evaluate, Tensor]:
    """Return the evaluation and the noise in the solver's coordinates: the schedule's own, or MeanVelocity(T=1)'s."""
    if solver.own_time or schedule.whole == MEAN_VELOCITY:
        return evaluate, x

    def mapped(x: Tensor, t: float) -> Tensor:
        scale = float(equal_snr_scale(t, MEAN_VELOCITY, schedule))
        return evaluate(x * scale, float(equal_snr_time(t, MEAN_VELOCITY, schedule)))

    return mapped, x * float(equal_snr_scale(schedule.end, schedule, MEAN_VELOCITY))


def solver_for(solver: Solver | None, field: Field, size: int, nfe: int, rho: float, guidance: Rules) -> Solver:
    """Return the solver for a field's samples of so many values; None: the default, by times tuned for the field.

    Its times are shifted as the field asks, but those that were tuned and those of a solver with a shift of its own.
    """
    if solver is None:
        tuned = getattr(field, "tuned", {}).get((nfe, as_rules(guidance))) if rho == 0 else None
        solver = tuned.solver if tuned else adams()
    return solver.for_field(field, size)


def check_request(field: Field, schedule: Schedule | None, nfe: int, rho: float) -> Schedule:
    """Return the schedule; refuse numbers out of range, and another path than the field's own."""
    if not isinstance(nfe, Integral) or isinstance(nfe, bool):
        raise ValueError(f"nfe={nfe!r} must be a whole number, at least 1")
    between("nfe", int(nfe), 1, MOST_NFE)
    if not isinstance(rho, Real) or not math.isfinite(rho):
        raise ValueError(f"rho={rho!r} must be a finite number, at least 0")
    between("rho", rho, 0, MAX_RHO)
    return require_schedule(field, schedule)


def integrate(
    field: Field,
    noise: Tensor,
    solver: Solver | None,
    seeds: Tensor,
    *,
    schedule: Schedule,
    nfe: int,
    rho: float,
    condition: Tensor | None,
    guidance: Rules,
    draw: counter_noise.Normal = counter_noise.normal,
    on_step: Callable[[State], None] | None = None,
    grad: bool = False,
) -> Solution:
    """Return `solve`'s answer, unchecked; by a solver of fixed steps a stream of launches that waits for no device.

    Evaluations and passes of a solver that takes samples apart are their mean over samples, rounded up.
    """
    # half-precision states lose the image in rounding: the loop runs in float32 at least
    with torch.set_grad_enabled(grad):
        wide = noise if noise.dtype == torch.float64 else noise.float()
        if solver is None and schedule != schedule.whole:
            solver = adams()  # times tuned for a field begin at its end
        chosen = solver_for(solver, field, noise[0].numel(), nfe, rho, guidance)
        plan = chosen.plan(schedule, int(nfe), rho)
        size = 1 if chosen.per_sample else len(noise)
        images, evaluations, passes = [], 0, 0
        for part in (slice(start, start + size) for start in range(0, len(noise), size)):
            meter = metered(field)
            evaluate = evaluator(meter, schedule, rows(condition, part) if chosen.per_sample else condition, guidance)
            evaluate, x = in_solver_time(chosen, evaluate, wide[part], schedule)
            images.append(run(plan, evaluate, x, step_noise(seeds[part], x, draw), on_step=on_step).x)
            evaluations, passes = evaluations + meter.evaluations - plan.uncounted, passes + meter.passes
        x = torch.cat(images) if chosen.per_sample else images[0]
        return Solution(x.to(noise.dtype), -(-evaluations // len(images)), -(-passes // len(images)), seeds)


def say_where(again: Callable[[Callable[[State], None]], object]) -> NoReturn:
    """Raise the error of samples that ended as NaN or Inf: made again, they tell after which step they began to.

    So samples are looked at once a batch, and no device is waited for at every step.
    """
    again(require_finite)
    raise FloatingPointError(
        "the last step's samples are finite, and what is made of them is not: a decoder's weights hold NaN or Inf, or "
        "a type is too narrow for the numbers; check the decoder, and try precision fp32"
    )


def solve(
    field: Field,
    noise: Tensor,
    *,
    schedule: Schedule | None = None,
    solver: str | Solver | None = None,
    nfe: int = DEFAULT_NFE,
    rho: float = 0.0,
    condition: Condition = None,
    seeds: Sequence[int] | Tensor | None = None,
    guidance: Rules = None,
    on_step: Callable[[State], None] | None = None,
    grad: bool = False,
) -> Solution:
    """Return `sample`'s image with its cost.

    on_step sees the state after every step; a multistep solver's is in the coordinates of MeanVelocity(T=1).
    """
    if not isinstance(noise, Tensor) or not noise.is_floating_point() or noise.ndim < 2:
        raise ValueError("noise must be a floating-point tensor of shape (B, ...)")
    if not noise.numel():
        raise ValueError(f"noise of shape {tuple(noise.shape)} is empty; give one sample of one value at least")
    if not bool(torch.isfinite(noise).all()):
        raise ValueError("noise must be finite; it holds NaN or Inf")
    condition = checked_condition(field, condition, noise)
    if isinstance(field, SizedField) and tuple(noise.shape[1:]) != tuple(field.sample_shape):
        raise ValueError(
            f"noise of shape {tuple(noise.shape)}: this model takes samples {tuple(field.sample_shape)}; make it with "
            "mvm.noise.initial(seeds, model.sample_shape)"
        )
    schedule = check_request(field, schedule, nfe, rho)
    chosen = None if solver is None else solver_named(solver)
    seeds = counter_noise.as_seeds(seeds, noise.shape[0], noise.device)
    if chosen is not None and chosen.by_tolerance and (on_step is not None or grad):
        option = "on_step" if on_step is not None else f"grad={grad}"
        raise ValueError(
            f"{option}: solver '{chosen.name}' goes by tolerance, with no steps to show and no gradient; use adams"
        )
    warn_of_noise(chosen or adams(), nfe, rho)
    how: dict[str, Any] = {"schedule": schedule, "nfe": nfe, "rho": rho, "condition": condition, "guidance": guidance}
    solution = integrate(field, noise, chosen, seeds, on_step=on_step, grad=grad, **how)
    if not bool(solution.x.isfinite().all()):
        say_where(lambda look: integrate(field, noise, chosen, seeds, on_step=look, **how))
    return solution


def sample(
    field: Field,
    noise: Tensor,
    *,
    schedule: Schedule | None = None,
    solver: str | Solver | None = None,
    nfe: int = DEFAULT_NFE,
    rho: float = 0.0,
    condition: Condition = None,
    seeds: Sequence[int] | Tensor | None = None,
    guidance: Rules = None,
    grad: bool = False,
) -> Tensor:
    """Return images x_0 from noise x_1 (B, ...), with exactly `nfe` evaluations of the field.

    field: (x, t, condition) -> x0_hat, t float64 (B,). schedule: the path the field belongs to; None: the field's
    own `schedule`, as trained models have one, else MeanVelocity; a part of it, `schedule.until(t)`, where `noise` is
    a state at t.
    solver: a name in `mvm.solver.SOLVERS` or a solver object, used as given; None: "adams", for a model with the times
    that `mvm tune` fitted to it. Times are shifted by the factor that a field names as `shift`, as models trained with
    a dimension shift do; a solver's own `shift` goes before it, 1 is none. "adaptive" and "dopri5" take tolerances and
    ignore nfe, and with "dopri5" an image depends on the others of its batch.
    rho: 0 is the probability-flow ODE, 1 the paper's reverse SDE, 0.75 its best result.
    condition: a tensor (B, ...), as labels are, or mappings, lists and tuples of them, in which one row serves all
    samples; None: the null condition. seeds: one per sample, for the SDE's noise; drawn once when None.
    guidance: a rule of `mvm.solver` or several, the first applied innermost.
    grad: keep the graph, for gradients of the images with respect to the noise and to the field's parameters, through
    every step; memory then grows with nfe. The SDE's own noise counts as constant. Not for adaptive solvers.
    """
    return solve(
        field,
        noise,
        schedule=schedule,
        solver=solver,
        nfe=nfe,
        rho=rho,
        condition=condition,
        seeds=seeds,
        guidance=guidance,
        grad=grad,
    ).x
