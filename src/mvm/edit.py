"""Editing and inverse problems with any field: starts at an intermediate time, and conditioning on measurements.

    mvm.edit.image_to_image(field, x0, 0.5)    x0 with noise of t = 0.5, made an image again
    mvm.edit.inpaint(field, x0, mask)          what the mask marks is made anew
    mvm.edit.outpaint(field, x0, margin)       so is a margin around x0
    mvm.edit.upscale(field, small, 4)          super-resolution of means over blocks of 4 x 4
    mvm.edit.deblur(field, y, kernel)          y = kernel * x0 + noise
    mvm.edit.restore(field, y, operator)       y = A x0 + noise, for any linear A

Measurements become a field by the covariance of x0 given x_t, C = (sigma^2/alpha) d x0_hat/dx (Tweedie's second order):

    E[x0 | x_t, y] = x0_hat + C A^T (A C A^T + noise^2)^-1 (y - A x0_hat),

exact where p(x0 | x_t) is Gaussian (Boys et al. 2023; conjugate gradients with vector-Jacobian products as Rozet et al.
2024). Any solver samples that field. What it misses of other laws, particles weigh and resample (Wu et al. 2023): as
their number grows the samples follow the posterior of the field.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mvm import likelihood
from mvm import noise as counter_noise
from mvm.options import DEFAULT_NFE, at_least, choose
from mvm.path import (
    MEAN_VELOCITY,
    Condition,
    Field,
    PairedField,
    Schedule,
    SizedField,
    equal_snr_time,
    full_time,
    like,
    require_schedule,
)
from mvm.path.condition import rows
from mvm.path.field import checked_condition
from mvm.solver import Adams, Rules, Solution, Solver, State, adams, check_request, solver_named
from mvm.solver import solve as solve_field
from mvm.solver.base import combine, require_finite
from mvm.solver.guidance import as_rules, guided_at
from mvm.solver.meter import metered
from mvm.solver.sampling import in_solver_time

Operator = Callable[[Tensor], Tensor]  # linear: samples (B, ...) -> measurements (B, ...)
METHODS = dict.fromkeys(("moments", "projection"))
ITERATIONS = 3  # of conjugate gradients at an evaluation, one vector-Jacobian product each
BLUR_NOISE = 0.02  # without some, deblurring multiplies the rounding of grey levels
LEAST_SIGNAL = 0.01  # alpha/sigma; nearer to pure noise d x0_hat/dx, divided by alpha, is rounding alone


def kept(mask: Tensor) -> Operator:
    """Return the operator that keeps what a mask (B or 1, ...) does not mark (0), and is 0 elsewhere."""

    def keep(x: Tensor) -> Tensor:  # a sample's particles stand next to each other
        known = (mask == 0).to(x)
        return x * (known if len(known) in (1, len(x)) else known.repeat_interleave(len(x) // len(known), 0))

    return keep


def pooled(factor: int) -> Operator:
    """Return the operator of means over blocks of `factor` along every axis of space, of samples (B, C, *space)."""

    def pool(x: Tensor) -> Tensor:
        if x.ndim < 3 or any(length % factor for length in x.shape[2:]):
            raise ValueError(
                f"factor={factor} must divide every axis of space of samples (C, *space) {tuple(x.shape[1:])}"
            )
        for axis in range(2, x.ndim):
            x = x.unflatten(axis, (-1, factor)).mean(axis + 1)
        return x

    return pool


def blurred(kernel: Tensor) -> Operator:
    """Return the operator that convolves every channel with a kernel of odd sizes; edges are continued."""
    axes = kernel.ndim
    if axes not in (1, 2, 3) or not all(length % 2 for length in kernel.shape):
        raise ValueError(f"kernel has shape {tuple(kernel.shape)}; it must have 1 to 3 axes of odd lengths")
    convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]

    def blur(x: Tensor) -> Tensor:
        if x.ndim != axes + 2:
            raise ValueError(
                f"kernel has {axes} axes; samples (C, *space) of shape {tuple(x.shape[1:])} have another number"
            )
        margin = [length // 2 for length in reversed(kernel.shape) for _ in range(2)]
        weight = kernel.to(x).expand(x.shape[1], 1, *kernel.shape)
        return convolve(functional.pad(x, margin, mode="replicate"), weight, groups=x.shape[1])

    return blur


def gaussian_kernel(std: float, axes: int = 2) -> Tensor:
    """Return the kernel of a Gaussian blur, float64, cut off at three std."""
    if not 0 < std < math.inf:
        raise ValueError(f"std={std} is out of range; it must be positive and finite")
    at = torch.arange(-math.ceil(3 * std), math.ceil(3 * std) + 1, dtype=torch.float64)
    line = torch.exp(-0.5 * (at / std) ** 2)
    kernel = line
    for _ in range(axes - 1):
        kernel = kernel[..., None] * line
    return kernel / kernel.sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each sample, (B, 1, ...)."""
    return (a * b).flatten(1).sum(1).reshape(-1, *(1,) * (a.ndim - 1))


def _conjugate_gradients(
    w: Operator, operator: Operator, std: float, residual: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Return W z and residual . z (B,), where (A W + std^2) z = residual; one application of w a step.

    A sample stops where A W is not positive, as a network's may be.
    """
    r = p = residual
    squared = first = _dot(r, r)
    wz: Any = 0
    quadratic, active = torch.zeros_like(squared), torch.ones_like(squared, dtype=torch.bool)
    smallest = torch.finfo(residual.dtype).eps ** 2
    for _ in range(steps):
        wp = w(p)
        q = operator(wp) + std**2 * p
        curvature = _dot(p, q)
        active = active & (curvature > 0) & (squared > smallest * first)
        step = torch.where(active, squared / curvature, 0)
        wz = wz + step.reshape(-1, *(1,) * (wp.ndim - 1)) * wp
        quadratic = quadratic + step * squared
        r = r - step * q
        before, squared = squared, _dot(r, r)
        p = r + torch.where(active, squared / before, 0) * p
    return wz, quadratic.flatten()


def _adjoint(operator: Operator, x: Tensor) -> Operator:
    """Return A^T for samples of x's shape."""
    with torch.enable_grad():
        at = torch.zeros_like(x).requires_grad_()
        y = operator(at)
    return lambda z: torch.autograd.grad(y, at, z, retain_graph=True)[0]


class Conditioned:
    """A field of the posterior given measurements, from any field: what `restore` samples, for any solver of mvm.

    Rows of y belong to those of x; one row serves all. Guidance acts between posteriors: those of the null condition
    and of the condition, say. passes: through the field; products: vector-Jacobian products.
    """

    def __init__(
        self,
        field: Field,
        y: Tensor,
        operator: Operator,
        *,
        noise: float = 0.0,
        method: str = "moments",
        iterations: int = ITERATIONS,
        schedule: Schedule | None = None,
        guidance: Rules = None,
    ) -> None:
        choose("method", method, METHODS)
        at_least("iterations", iterations, 1)
        if not isinstance(noise, Real) or not 0 <= noise < math.inf:
            raise ValueError(f"noise={noise} must be a finite number, at least 0: the std of each measurement's error")
        self.schedule, self.shift = require_schedule(field, schedule), getattr(field, "shift", 1.0)
        self.y, self.operator, self.noise, self.method, self.iterations = y, operator, float(noise), method, iterations
        self.field, self.meter, self.products = field, metered(field), 0
        self.base = (_PairedPosterior if isinstance(field, PairedField) else _Posterior)(self, self.meter)
        self.rules = tuple(
            rule.on(self.schedule, lambda weak: _Posterior(self, self.meter.also(weak))) for rule in as_rules(guidance)
        )

    def check_condition(self, condition: Condition, x: Tensor) -> Condition:
        """Return the condition with one row per sample of x, checked by the field where it can."""
        return checked_condition(self.field, condition, x)

    @property
    def passes(self) -> int:
        return self.meter.passes

    def __call__(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        """Return E[x0 | x_t = x, y]; t is one time for all rows."""
        return self.posterior(x, t, condition)[1]

    def posterior(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor, Tensor]:
        """Return x0_hat without and with the measurements, and -(y - A x0_hat) . (A C A^T + noise^2)^-1 (same)/2 (B,).

        The last is log p(y | x_t) without its determinant, which the weights of particles may leave out.
        """
        last = self.schedule.t_from_lam(math.log(LEAST_SIGNAL)).to(t)
        now = torch.minimum(t, last)
        x = x * like(self.schedule.norm(now) / self.schedule.norm(t), x)
        packed = guided_at(self.base, self.rules, float(now[0]), self.schedule)(x, now, condition)
        x0, moved = packed[:, :-1].chunk(2, 1)
        return x0.reshape(x.shape), moved.reshape(x.shape), packed[:, -1]

    def packed(self, x: Tensor, t: Tensor, *answers: Tensor) -> tuple[Tensor, ...]:
        """Return `posterior`'s three parts, flat and in one tensor (B, 2 D + 1), for each answer x0_hat to x."""
        return tuple(self._packed(x, t, answer) for answer in answers)

    def _packed(self, x: Tensor, t: Tensor, answer: Tensor) -> Tensor:
        alpha, sigma = (like(value, x) for value in (self.schedule.alpha(t), self.schedule.sigma(t)))
        x0 = answer.detach()
        if self.method == "projection":
            adjoint = _adjoint(self.operator, x0)
            factor = sigma**2 / (alpha**2 + sigma**2)  # variance of x0 given x_t, had each value mean 0 and std 1

            def covariance(z: Tensor) -> Tensor:  # C A^T z
                return factor * adjoint(z)

        else:
            if not answer.requires_grad:
                raise ValueError(
                    "method='moments' needs the field's gradient, and this one's answer has none (no_grad, or not of "
                    "torch); use method='projection'"
                )
            with torch.enable_grad():
                measured = self.operator(answer)
            self.products += self.iterations

            def covariance(z: Tensor) -> Tensor:  # C A^T z, as C = C^T
                return sigma**2 / alpha * torch.autograd.grad(measured, x, z, retain_graph=True)[0]

        change, quadratic = self._correction(covariance, x0, self.noise)
        return torch.cat((x0.flatten(1), (x0 + change).flatten(1), -quadratic[:, None] / 2), 1)

    def _correction(self, covariance: Operator, x0: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        residual = self.y.to(x0) - self.operator(x0)
        return _conjugate_gradients(covariance, self.operator, noise, residual, self.iterations)

    def consistent(self, x: Tensor) -> Tensor:
        """Return the nearest samples that agree with measurements free of noise; x itself where they have some."""
        if self.noise:
            return x
        return x + self._correction(_adjoint(self.operator, x), x, 0.0)[0]


@dataclass
class _Posterior:
    """A field's posterior, packed: guidance extrapolates x0_hat, its correction and log p(y | x_t) alike."""

    conditioned: Conditioned
    field: Any

    def differentiable(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return x to be differentiated by, and the context for it."""
        moments = self.conditioned.method == "moments"
        return x.detach().requires_grad_(moments), torch.set_grad_enabled(moments)

    def __call__(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        x, grad = self.differentiable(x)
        with grad:
            answer = self.field(x, t, condition)
        return self.conditioned.packed(x, t, answer)[0]


class _PairedPosterior(_Posterior):
    """The same of a field with an inner head."""

    def pair(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, ...]:
        x, grad = self.differentiable(x)
        with grad:
            answers = self.field.pair(x, t, condition)
        return self.conditioned.packed(x, t, *answers)


@dataclass(frozen=True)
class Restored:
    """Samples, and what one cost: evaluations (of each particle), passes, vector-Jacobian products; their seeds."""

    x: Tensor
    nfe: int
    passes: int
    products: int
    seeds: Tensor


def _twisted_diffusion(
    field: Conditioned,
    x: Tensor,
    seeds: Tensor,
    nfe: int,
    rho: float,
    condition: Condition,
    base: Adams,
    on_step: Callable[[State], None] | None,
) -> Tensor:
    """Return one of the particles x (B, K, ...) of each sample, drawn by weight: the twisted diffusion sampler.

    A particle takes the posterior's step; its weight makes up for the field's own, and for log p(y | x_t) on the way.
    adams of order 2 without corrector: a step then is a Gaussian given the past, by either field.
    """
    count, particles = x.shape[:2]
    solver = replace(base, predictor=2, corrector=0, ending=1).for_field(field, x[0, 0].numel())
    plan: Any = solver.plan(field.schedule, nfe, rho)
    each = torch.arange(particles, device=x.device)
    first = particles * torch.arange(count, device=x.device)[:, None]  # of the particles of a sample

    def drawn(cumulative: Tensor, at: Tensor) -> Tensor:
        return torch.searchsorted(cumulative, at).clamp_max(particles - 1)

    def uniform(index: int) -> Tensor:
        return counter_noise.uniform(seeds, counter_noise.RESAMPLE + index, (1,))

    evaluate: Any = lambda x, t: field.posterior(x, full_time(x, t), condition)  # noqa: E731 (of three parts)
    evaluate, x = in_solver_time(solver, evaluate, x.flatten(0, 1), field.schedule)
    log_weights, last_twist = x.new_zeros(count, particles), x.new_zeros(())
    prior: tuple[Tensor, ...] = ()  # x0_hat of the last two steps, newest first: by the field
    posterior: tuple[Tensor, ...] = ()  # and given y
    for i, (t, row) in enumerate(zip(plan.times, plan.rows, strict=False)):
        by_field, given_y, twist = evaluate(x, t)
        log_weights = log_weights + twist.reshape(count, particles) - last_twist
        weights = torch.softmax(log_weights.double(), 1)
        resample = 1 / weights.square().sum(1, keepdim=True) < particles / 2  # the effective sample size
        systematic = drawn(weights.cumsum(1), (each + uniform(i)) / particles)
        parents = (torch.where(resample, systematic, each) + first).flatten()
        log_weights = torch.where(resample, 0, log_weights)
        last_twist = twist[parents].reshape(count, particles)
        x = x[parents]
        prior = tuple(x0[parents] for x0 in (by_field, *prior[:1]))
        posterior = tuple(x0[parents] for x0 in (given_y, *posterior[:1]))
        if i == plan.steps - 1:
            break
        kick = counter_noise.normal(seeds, counter_noise.STEP + i, (particles, *x.shape[1:]), x.dtype).flatten(0, 1)
        kick = row.std * kick
        start, x = x, combine(row.decay, x, row.predict, posterior, kick)
        prior_kick = x - combine(row.decay, start, row.predict, prior, None)  # of the same step by the field
        ratio = (_dot(kick, kick) - _dot(prior_kick, prior_kick)) / (2 * row.std**2)
        log_weights = log_weights + ratio.reshape(count, particles)
        if on_step is not None:
            on_step(State(i + 1, x, posterior))
    chosen = drawn(torch.softmax(log_weights.double(), 1).cumsum(1), uniform(nfe))
    return posterior[0][(chosen + first).flatten()]


def solve(
    field: Field,
    y: Tensor,
    operator: Operator,
    *,
    shape: Sequence[int] | None = None,
    noise: float = 0.0,
    particles: int = 1,
    method: str = "moments",
    iterations: int = ITERATIONS,
    schedule: Schedule | None = None,
    solver: str | Solver | None = None,
    nfe: int = DEFAULT_NFE,
    rho: float = 1.0,
    condition: Condition = None,
    seeds: Sequence[int] | Tensor | None = None,
    guidance: Rules = None,
    on_step: Callable[[State], None] | None = None,
) -> Restored:
    """Return `restore`'s samples with their cost. on_step sees the state after every step."""
    _require_samples("y", y)
    if shape is None and not isinstance(field, SizedField):
        raise ValueError("shape is needed: that of one sample, e.g. shape=(3, 32, 32); only a model knows its own")
    shape = tuple(field.sample_shape if shape is None else shape)  # ty: ignore[missing-attribute]
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    nothing = operator(y.new_zeros(len(y), *shape))
    if nothing.shape[1:] != y.shape[1:]:
        raise ValueError(
            f"y has shape {tuple(y.shape)}; of samples {shape} the operator makes (B, "
            f"{', '.join(map(str, nothing.shape[1:]))}); give y or shape to suit"
        )
    if bool(nothing.any()):
        raise ValueError("operator must be linear, and this one does not map 0 to 0; take its constant off, and off y")
    if not isinstance(particles, Integral) or particles < 1:
        raise ValueError(f"particles={particles!r} must be a whole number, at least 1")
    chosen = adams() if solver is None else solver_named(solver)
    if chosen.by_tolerance:
        raise ValueError(f"solver='{chosen.name}' goes by tolerance, which measurements do not suit; use adams")
    posterior = Conditioned(
        field, y, operator, noise=noise, method=method, iterations=iterations, schedule=schedule, guidance=guidance
    )
    seeds = counter_noise.as_seeds(seeds, len(y), y.device)
    if particles == 1:
        x = counter_noise.initial(seeds, shape, y.dtype)
        samples = solve_field(
            posterior, x, solver=chosen, nfe=nfe, rho=rho, condition=condition, seeds=seeds, on_step=on_step
        ).x
    else:
        check_request(posterior, None, nfe, rho)
        if not isinstance(chosen, Adams) or not rho:
            raise ValueError(
                f"particles={particles} with solver='{chosen.name}', rho={rho:g}: they need solver adams and a rho "
                "above 0, e.g. 1; or use particles=1"
            )
        x = counter_noise.normal(seeds, counter_noise.INITIAL, (particles, *shape), y.dtype)
        given = checked_condition(field, condition, x[:, 0])
        each = torch.arange(len(y), device=y.device).repeat_interleave(particles)
        posterior.y = y[each]
        with torch.no_grad():
            samples = _twisted_diffusion(
                posterior, x, seeds, nfe, rho, rows(given, each) if given is not None else None, chosen, on_step
            )
        require_finite(State(int(nfe), samples))
        posterior.y = y
    return Restored(
        posterior.consistent(samples), int(nfe), posterior.passes * particles, posterior.products * particles, seeds
    )


def restore(field: Field, y: Tensor, operator: Operator, **options: Any) -> Tensor:
    """Return samples of the posterior of x0 given y = A x0 + noise xi, a row for every row of y (B, ...).

    operator: A, a linear function of samples (B, *shape), e.g. `kept`, `pooled`, `blurred` or your own.
    shape: of one sample; a model knows its own. noise: std of the measurements' errors; 0: the samples agree with y.
    particles: of each sample, weighed and resampled: cost times as many, and the posterior of data that are no
    Gaussian; 1: none. method: "moments", or "projection", the nearest x0 that agrees with y (Wang et al. 2022; with
    noise Song et al. 2023): no gradient, less exact. iterations: of conjugate gradients at an evaluation.
    Other options are those of `mvm.sample`; rho is 1 unless given, which is nearer to the posterior than the ODE.
    """
    return solve(field, y, operator, **options).x


def inpaint(field: Field, x0: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Return x0 (B, ...) with what a mask marks made anew; options: of `restore`.

    mask: 1 or True where to make anew, of x0's shape or of its last axes, as (H, W).
    """
    _require_samples("x0", x0)
    operator = kept(mask_for(mask, x0))
    return restore(field, operator(x0), operator, **{"shape": x0.shape[1:], **options})


def outpaint(field: Field, x0: Tensor, margin: int | Sequence[int], **options: Any) -> Tensor:
    """Return x0 (B, C, *space) in the middle of larger samples, what is around it made anew.

    margin: on each side of every axis of space, one for all axes or for each. The field makes samples of the larger
    shape; options: of `restore`.
    """
    _require_samples("x0", x0)
    canvas, mask = padded(x0, margin)
    return inpaint(field, canvas, mask, **options)


def upscale(field: Field, small: Tensor, factor: int, **options: Any) -> Tensor:
    """Return samples whose means over blocks of factor x factor are `small` (B, C, *space); options: of `restore`."""
    _require_samples("small", small)
    if not isinstance(factor, Integral) or factor < 2:
        raise ValueError(f"factor={factor!r} must be a whole number, at least 2")
    shape = (small.shape[1], *(int(factor) * length for length in small.shape[2:]))
    return restore(field, small, pooled(int(factor)), **{"shape": shape, **options})


def deblur(field: Field, y: Tensor, kernel: Tensor, *, noise: float = BLUR_NOISE, **options: Any) -> Tensor:
    """Return samples of which y (B, C, *space) is the convolution with a kernel, and noise; options: of `restore`."""
    _require_samples("y", y)
    return restore(field, y, blurred(kernel), noise=noise, **{"shape": y.shape[1:], **options})


def image_to_image(field: Field, x0: Tensor, strength: float, **options: Any) -> Tensor:
    """Return images made of x0 (B, ...): carried to t = strength, and sampled from there with `nfe` evaluations.

    strength: t of MeanVelocity(T=1), at equal SNR on other paths; 1 keeps nothing. inversion=True: carried by the ODE,
    in `nfe` evaluations more (`mvm.likelihood.encode`), under the condition `source`; else by noise of the seeds. With
    inversion and rho 0 an unchanged condition gives x0 again. Other options are those of `mvm.sample`.
    """
    return solve_image_to_image(field, x0, strength, **options).x


def solve_image_to_image(
    field: Field,
    x0: Tensor,
    strength: float,
    *,
    inversion: bool = False,
    source: Condition = None,
    schedule: Schedule | None = None,
    nfe: int = DEFAULT_NFE,
    condition: Condition = None,
    seeds: Sequence[int] | Tensor | None = None,
    **options: Any,
) -> Solution:
    """Return `image_to_image`'s answer with what the sampling cost, to which an inversion adds `nfe` evaluations."""
    _require_samples("x0", x0)
    seeds = counter_noise.as_seeds(seeds, len(x0), x0.device)
    x, part = intermediate(field, x0, strength, seeds, inversion, source, schedule, nfe)
    return solve_field(field, x, schedule=part, nfe=nfe, condition=condition, seeds=seeds, **options)


def intermediate(
    field: Field,
    x0: Tensor,
    strength: float,
    seeds: Tensor,
    inversion: bool = False,
    source: Condition = None,
    schedule: Schedule | None = None,
    nfe: int = DEFAULT_NFE,
) -> tuple[Tensor, Schedule]:
    """Return x0 carried to t = strength of MeanVelocity(T=1), and the part of the field's schedule that ends there."""
    whole = require_schedule(field, schedule).whole
    if not isinstance(strength, Real) or not 0 < strength <= 1:
        raise ValueError(f"strength={strength} is out of range; it must lie in (0, 1]: 1 keeps nothing of the image")
    if source is not None and not inversion:
        raise ValueError("source is the condition of an inversion; add inversion=True, or leave it out")
    t = float(equal_snr_time(float(strength), MEAN_VELOCITY, whole))
    part = whole if t >= whole.end else whole.until(t)
    if inversion:
        return likelihood.encode(field, x0, schedule=part, nfe=nfe, condition=source), part
    alpha, sigma = (like(value(part.end), x0) for value in (part.alpha, part.sigma))
    return alpha * x0 + sigma * counter_noise.initial(seeds, x0.shape[1:], x0.dtype), part


def _require_samples(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or not x.numel():
        raise ValueError(f"{name} must be a floating-point tensor (B, ...), as the model's codec encodes images")
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} of shape {tuple(x.shape)} must be finite; it holds NaN or Inf")


def mask_for(mask: Tensor, x0: Tensor) -> Tensor:
    """Return a mask of x0's shape or of its last axes as bool (B or 1, ...)."""
    mask = torch.as_tensor(mask).to(x0.device)
    if bool(mask.isnan().any()):
        raise ValueError("mask holds NaN; give 1 or True where to make anew, 0 elsewhere")
    mask = mask != 0
    wide = mask.reshape(*(1,) * (x0.ndim - mask.ndim), *mask.shape)
    if wide.ndim > x0.ndim or any(m not in (1, n) for m, n in zip(wide.shape, x0.shape, strict=True)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and x0 {tuple(x0.shape)}; give one of x0's shape, or of its last axes"
        )
    if not bool(wide.any()):
        raise ValueError("mask marks nothing to make anew; set it to 1 there")
    return wide


def padded(x0: Tensor, margin: int | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return x0 (B, C, *space) with a margin of zeros, and the mask (*space) that marks it."""
    axes = x0.ndim - 2
    margins = [margin] * axes if isinstance(margin, Integral) else list(margin)  # ty: ignore[invalid-argument-type]
    if axes < 1 or len(margins) != axes or any(not isinstance(m, Integral) or m < 0 for m in margins):
        raise ValueError(f"margin={margin} must be a whole number, or one for each axis of space of {tuple(x0.shape)}")
    widths = [int(m) for m in reversed(margins) for _ in range(2)]
    inside = functional.pad(torch.ones(x0.shape[2:]), widths)
    return functional.pad(x0, widths), inside == 0
