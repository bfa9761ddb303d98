"""From noise to pictures step by step, so that the way there can be shown: ODE and SDE in turns, from one noise."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvm import noise
from mvm.app.form import ODE, SampleForm
from mvm.generate import Draw
from mvm.model import Model
from mvm.path import MEAN_VELOCITY, Field, Schedule
from mvm.recipes import SampleConfig
from mvm.solver import State, run
from mvm.solver.base import require_finite
from mvm.solver.sampling import evaluator, in_solver_time, metered, solver_for, step_noise

REFERENCE_NFE = 104  # of the long run: four times the default
Compute = AbstractContextManager[object]  # a lock during a step, so that visitors' steps do not slow each other down


class SamplerState(NamedTuple):
    """The sampler after a step: t falls to 0; state (B, ...) at t, its x0_hat, and the cost so far."""

    index: int
    steps: int
    t: float
    state: Tensor
    guess: Tensor
    nfe: int
    passes: int
    seconds: float


def sampler_states(
    base: Field,
    x: Tensor,
    settings: SampleConfig,
    seeds: Tensor,
    *,
    schedule: Schedule = MEAN_VELOCITY,
    condition: Tensor | None = None,
    compute: Compute | None = None,
    auto: Field | None = None,
) -> Iterator[SamplerState]:
    """Yield the noise, then every step of `mvm.solver.solve`, which ends with the very same numbers.

    auto: the weaker field of autoguidance, where settings have a scale of it.
    """
    solver, meter = None if settings.unnamed else settings.build_solver(), metered(base)
    rules = settings.guidance(auto)
    chosen = solver_for(solver, base, x[0].numel(), settings.nfe, settings.rho, rules)
    assert not chosen.by_tolerance, "solvers that go by tolerance have no steps to show"
    plan = chosen.plan(schedule, settings.nfe, settings.rho)
    evaluate, x = in_solver_time(chosen, evaluator(meter, schedule, condition, rules), x, schedule)
    state, seconds = State(0, x), 0.0
    yield SamplerState(0, plan.steps, plan.times[0], x, x, 0, 0, 0.0)
    while state.index < plan.steps:
        with compute or nullcontext(), torch.no_grad():
            start = time.perf_counter()
            state = run(plan, evaluate, state, step_noise(seeds, x), until=state.index + 1)
            require_finite(state)
            seconds += time.perf_counter() - start
        guess = state.x if state.index == plan.steps else state.history[0]
        t = plan.times[state.index]
        yield SamplerState(state.index, plan.steps, t, state.x, guess, meter.evaluations, meter.passes, seconds)


class Still(NamedTuple):
    """The first picture on its way: uint8 (C, H, W) of the state at t, and of its x0_hat."""

    t: float
    state: Tensor
    guess: Tensor


@dataclass
class SideRun:
    """One side as far as it has come: images uint8 (B, C, H, W), at first the noise, at the end the pictures."""

    settings: SampleConfig
    labels: Tensor
    images: Tensor
    steps: int
    index: int = 0
    nfe: int = 0
    passes: int = 0
    seconds: float = 0.0
    path: list[Still] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.index == self.steps


def side_by_steps(
    model: Model, draw: Draw, settings: SampleConfig, compute: Compute | None = None, auto: Model | None = None
) -> Iterator[SideRun]:
    """Yield one side after every step; the last has the pictures of `mvm.generate.Sampler.batch`, bit for bit."""
    labels, seeds = draw.chosen_labels(model.num_classes), draw.chosen_seeds()
    x = noise.initial(seeds.to(model.device), model.sample_shape)
    how: dict[str, Any] = {
        "schedule": model.schedule,
        "condition": labels.to(model.device),
        "compute": compute,
        "auto": auto,
    }
    side: SideRun | None = None
    for now in sampler_states(model, x, settings, seeds.to(model.device), **how):
        images = model.codec.decode(now.guess).cpu()
        side = side or SideRun(settings, labels, images, now.steps)
        side.images, side.index, side.nfe = images, now.index, now.nfe
        side.passes, side.seconds = now.passes, now.seconds
        side.path.append(Still(now.t, model.codec.decode(now.state[:1])[0].cpu(), images[0]))
        yield side


@dataclass
class Look:
    """What a page shows of a form: its sides, and the long run if asked for."""

    sides: dict[str, SideRun] = field(default_factory=dict)
    reference: SideRun | None = None

    def finished(self, form: SampleForm) -> bool:
        """Return whether all that was asked for is there."""
        parts = [self.sides.get(name) for name in form.sides] + ([self.reference] if form.reference else [])
        return all(part is not None and part.done for part in parts)


def look(model: Model, form: SampleForm, compute: Compute | None = None, auto: Model | None = None) -> Iterator[Look]:
    """Yield what there is to see after every step: both sides by turns, then the long ODE of the default solver.

    auto: the weaker model that the form names.
    """
    draw, view = form.draw(), Look()
    running = {side: side_by_steps(model, draw, form.settings(side), compute, auto) for side in form.sides}
    while running:
        for name, steps in list(running.items()):
            side = next(steps, None)
            if side is None:
                del running[name]
                continue
            view.sides[name] = side
            yield view
    if form.reference:
        settings = replace(form.settings(ODE), solver=SampleConfig().solver, nfe=REFERENCE_NFE)
        for view.reference in side_by_steps(model, draw, settings, compute, auto):
            yield view


def rms(a: Tensor, b: Tensor) -> float:
    """Return the root mean square difference of two sets of pictures, in grey levels of 255."""
    return float((a.float() - b.float()).square().mean().sqrt())
