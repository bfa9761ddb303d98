"""Likelihood and inversion by the probability-flow ODE; `mvm.likelihood(field, x)` is `log_likelihood`.

Both go between t = 1e-5 of MeanVelocity(T=1), where data count as a state (at 0 the flow is singular), and the end of
the field's schedule, as `mvm.sample` does: a path that stops short of pure noise is followed as far as it goes. The
state there is N(0, (alpha^2 + sigma^2) I): N(0, I) on every path but `mvm.bridge.VarianceExploding`.
"""

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mvm import noise
from mvm.latent.codec import Pixels
from mvm.options import at_least, choose
from mvm.path import MEAN_VELOCITY, Condition, Field, Schedule, equal_snr, full_time, require_schedule
from mvm.path.field import checked_condition
from mvm.path.schedule import equal_snr_scale, equal_snr_time
from mvm.pixels import GREY_SCALE
from mvm.solver import PredictorCorrector, adams_power, no_noise, run
from mvm.solver.variants import GRID_POWER, START_POWER, power_times
from mvm.wrapped import NetworkField

T_MIN = 1e-5
SOLVER: PredictorCorrector = adams_power()


def _times(schedule: Schedule, steps: int) -> tuple[float, ...]:
    """Return times of MeanVelocity(T=1) from data to the schedule's end."""
    end = float(equal_snr_time(schedule.end, schedule, MEAN_VELOCITY))
    if end <= T_MIN:
        raise ValueError(f"schedule={schedule} ends with less noise than t={T_MIN} of MeanVelocity; use one with more")
    # dense at both ends, as adams_power's
    return tuple(power_times(steps, end, T_MIN, GRID_POWER, START_POWER)[::-1].tolist())


@torch.no_grad()
def _transport(
    field: Field, x: Tensor, schedule: Schedule | None, nfe: int, condition: Condition, to_noise: bool
) -> Tensor:
    """Return x at the other end of the ODE, from data to noise or back, through the same times."""
    at_least("nfe", nfe, 1)
    schedule, condition = require_schedule(field, schedule), checked_condition(field, condition, x)
    mapped, times = equal_snr(field, schedule, MEAN_VELOCITY), _times(schedule, nfe)
    scale = float(equal_snr_scale(schedule.end, schedule, MEAN_VELOCITY))  # from the schedule's noise to MeanVelocity's
    plan = SOLVER.plan_times(MEAN_VELOCITY, times if to_noise else times[::-1], rho=0.0)
    start = x if to_noise else x * scale
    end = run(plan, lambda state, t: mapped(state, full_time(state, t), condition), start, no_noise).x
    return end / scale if to_noise else end


def encode(
    field: Field, x0: Tensor, *, schedule: Schedule | None = None, nfe: int = 100, condition: Condition = None
) -> Tensor:
    """Return the noise that the ODE connects with x0: from it `decode` and `mvm.sample` make x0 again."""
    return _transport(field, x0, schedule, nfe, condition, to_noise=True)


def decode(
    field: Field, noise: Tensor, *, schedule: Schedule | None = None, nfe: int = 100, condition: Condition = None
) -> Tensor:
    """Return the image the ODE connects with noise: `encode` undone, over the same times."""
    return _transport(field, noise, schedule, nfe, condition, to_noise=False)


def divergence(
    function: Callable[[Tensor], Tensor], x: Tensor, probes: Iterable[Tensor], count: int
) -> tuple[Tensor, Tensor]:
    """Return (f(x), sum of probe . df/dx probe over `count`), one backward pass for each probe (B, ...).

    Of random signs and count their number it is Hutchinson's unbiased estimate; of unit vectors and count 1 exact.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = function(x)
        total = x.new_zeros(x.shape[0])
        for probe in probes:
            (pulled,) = torch.autograd.grad(value, x, probe, retain_graph=True)
            total = total + (pulled * probe).flatten(1).sum(1)
    return value.detach(), total / count


def unit_vectors(x: Tensor) -> Iterator[Tensor]:
    """Yield the unit vectors of x's space (B, ...), one at a time: all of them may be much memory."""
    for i in range(x[0].numel()):
        unit = torch.zeros_like(x)
        unit.flatten(1)[:, i] = 1
        yield unit


def log_likelihood(
    field: Field,
    x: Tensor,
    *,
    schedule: Schedule | None = None,
    steps: int = 100,
    method: str = "hutchinson",
    probes: int = 1,
    seeds: Sequence[int] | Tensor | None = None,
    condition: Condition = None,
) -> Tensor:
    """Return log p(x) in nats, float64 (B,): classical Runge-Kutta of order 4 on (x, log p), 4 passes a step.

    p is the law of `mvm.sample`'s images by the ODE. method: "hutchinson" (Rademacher probes from each sample's seed,
    new ones at every pass, so that errors average out over the steps) or "exact" (a backward pass per dimension).
    """
    choose("method", method, dict.fromkeys(("hutchinson", "exact")))
    at_least("steps", steps, 1)
    at_least("probes", probes, 1)
    seeds = noise.as_seeds(seeds, x.shape[0], x.device)
    # weights hidden in a function are of x's dtype, for all that is known
    seen_in = x.dtype if isinstance(field, NetworkField) and field.dtype is None else torch.float64
    x = x.double()
    schedule, condition = require_schedule(field, schedule), checked_condition(field, condition, x)
    mapped, times, evaluation = equal_snr(field, schedule, MEAN_VELOCITY), _times(schedule, steps), count()

    def rates(state: Tensor, c: float) -> tuple[Tensor, Tensor]:
        """Return dx/dc and its divergence at c = sqrt(t): eps_hat - 2 c x0_hat, eps_hat = (x - alpha x0_hat)/c."""
        t = full_time(state, c * c)
        if method == "exact":
            vectors, number = unit_vectors(state), 1
        else:  # Rademacher probes from each sample's seed and the number of the evaluation
            drawn = noise.uniform(seeds, noise.HUTCHINSON + next(evaluation), (probes, *state.shape[1:]))
            vectors, number = drawn.sub(0.5).sign().transpose(0, 1), probes

        def seen(state: Tensor) -> Tensor:
            return mapped(state.to(seen_in), t, condition).double()

        x0, x0_divergence = divergence(seen, state, vectors, number)
        per_x0 = -(1 + c * c) / c  # -2c - (1 - c^2)/c
        return state / c + per_x0 * x0, state[0].numel() / c + per_x0 * x0_divergence

    gained = x.new_zeros(x.shape[0])
    for c, d in pairwise(t**0.5 for t in times):
        h = d - c
        k1, g1 = rates(x, c)
        k2, g2 = rates(x + h / 2 * k1, c + h / 2)
        k3, g3 = rates(x + h / 2 * k2, c + h / 2)
        k4, g4 = rates(x + h * k3, d)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        gained = gained + h / 6 * (g1 + 2 * g2 + 2 * g3 + g4)
    std = float(MEAN_VELOCITY.norm(times[-1]))
    prior = -0.5 * ((x / std) ** 2).flatten(1).sum(1) - x[0].numel() * math.log(std * math.sqrt(2 * math.pi))
    return prior + gained


def dequantise(images: Tensor, seeds: Tensor) -> Tensor:
    """Return uint8 images in [-1, 1], each spread uniformly over the cell of its grey level."""
    offset = noise.uniform(seeds, noise.DEQUANTISE, images.shape[1:]) - 0.5
    return (images.double() + offset) / GREY_SCALE - 1


def bits_per_dim(
    field: Field,
    images: Tensor,
    *,
    schedule: Schedule | None = None,
    steps: int = 100,
    method: str = "hutchinson",
    probes: int = 1,
    seeds: Sequence[int] | Tensor | None = None,
    condition: Condition = None,
) -> Tensor:
    """Return bits per dimension of uint8 images, float64 (B,); an upper bound by uniform dequantisation."""
    if images.dtype != torch.uint8:
        raise ValueError(f"images must be uint8; got {images.dtype}")
    seeds = noise.as_seeds(seeds, images.shape[0], images.device)
    codec = getattr(field, "codec", None)
    scale = codec.scale if isinstance(codec, Pixels) else 1.0  # of the pixels that a field works on: [-scale, scale]
    x = dequantise(images, seeds) * scale
    nats = log_likelihood(
        field, x, schedule=schedule, steps=steps, method=method, probes=probes, seeds=seeds, condition=condition
    )
    # the cell of a grey level is scale/GREY_SCALE wide
    return -(nats / images[0].numel() - math.log(GREY_SCALE / scale)) / math.log(2)


class LikelihoodModule(ModuleType):
    """This module, which may be called: mvm.likelihood(field, x) is `log_likelihood`."""

    def __call__(self, field: Field, x: Tensor, **options: Any) -> Tensor:
        return log_likelihood(field, x, **options)

    def __reduce__(self) -> tuple[Any, ...]:  # a subclass of modules is not pickled by name otherwise
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = LikelihoodModule
