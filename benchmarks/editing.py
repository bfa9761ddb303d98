"""Inpainting and super-resolution where the posterior is known exactly: errors of its mean and covariance.

    python benchmarks/editing.py

The data are ten Gaussians of std 0.25 about the mean image of each digit (8 x 8), the field is exact, and OBSERVATIONS
images of them are measured: the left half without error, or means over blocks with errors of std 0.1. Every method
draws SAMPLES samples for each. Errors are of the mean over the posterior's std, and of the covariance over its norm
(Frobenius), averaged over the images. Cost is forward passes, and vector-Jacobian products where a method takes some:
each is one backward pass through the network with respect to its input. Seeds are fixed.

RePaint: the scheduler of diffusers in the loop of its pipeline, with 10 jumps of length 10, or without (replacement
alone); clipping to [-1, 1] is off, as these data go beyond. eta 0 is the pipeline's own. diffusers has no DPS: the
published formula (Chung et al. 2023, algorithm 1, as in its code), at the best of SCALES by the error of the mean.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mvm import edit, noise
from mvm.path import MEAN_VELOCITY, Condition, full_time, like
from mvm.verify.editing import STD, Posterior, class_means, dense, measured, moment_errors, posterior, tasks

OBSERVATIONS, SAMPLES, SEED = 4, 512, 1000
ROWS = OBSERVATIONS * SAMPLES
NFES, PARTICLES = (26, 52, 104), (1, 4, 16)
BUDGETS = (104, 208, 416)  # passes and products of mvm at these NFE with one particle
SCALES = (0.1, 0.3, 1.0, 3.0)
JUMP_STEPS = (14, 28, 50)  # inference steps of RePaint with jumps: 104, 208 and 410 passes
INPAINTING = "inpainting"
LAW = class_means()
SHAPE = LAW.shape


class Cost(NamedTuple):
    """Of one sample."""

    passes: int
    products: int = 0


Found = tuple[Tensor, Cost]
Method = Callable[[edit.Operator, Tensor, float], Found]  # rows y (ROWS, ...), by observation, std of their errors


def field(x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
    """Return E[x0 | x_t = x] of the mixture, as `LAW.field` does, by products of matrices: its Gaussians are alike."""
    alpha, sigma = (like(value, x.flatten(1)) for value in (MEAN_VELOCITY.alpha(t), MEAN_VELOCITY.sigma(t)))
    means, variance, flat = LAW.means.flatten(1), LAW.stds[0] ** 2, x.flatten(1)
    spread = alpha**2 * variance + sigma**2
    near = (alpha * flat @ means.T - alpha**2 * means.square().sum(1) / 2) / spread
    mean = torch.softmax(LAW.weights.log() + near, 1) @ means
    return (mean + alpha * variance / spread * (flat - alpha * mean)).reshape(x.shape)


def x0_hat(x: Tensor, alphas_product: Tensor) -> Tensor:
    """Return E[x0 | x] of x = sqrt(a) x0 + sqrt(1 - a) eps, by the exact field at equal SNR."""
    t = MEAN_VELOCITY.t_from_lam(0.5 * torch.log(alphas_product / (1 - alphas_product))).double()
    return field(x * (MEAN_VELOCITY.alpha(t) / alphas_product.sqrt()), full_time(x, float(t)))


def ours(nfe: int, particles: int, operator: edit.Operator, y: Tensor, std: float) -> Found:
    """Return samples of `mvm.edit`, by its defaults."""
    options = {"shape": SHAPE, "noise": std, "particles": particles, "nfe": nfe, "seeds": range(ROWS)}
    found = edit.solve(field, y, operator, schedule=MEAN_VELOCITY, **options)
    return found.x, Cost(found.passes, found.products)


def repaint(steps: int, jumps: int, eta: float, operator: edit.Operator, y: Tensor, std: float) -> Found:
    """Return samples by the scheduler of diffusers, in the loop of its RePaintPipeline."""
    from diffusers import RePaintScheduler

    scheduler = RePaintScheduler(clip_sample=False, eta=eta)
    scheduler.set_timesteps(steps, jump_length=10, jump_n_sample=jumps)
    generator = torch.Generator().manual_seed(0)
    mask = operator(torch.ones(1, *SHAPE, dtype=torch.float64))
    x = torch.randn((ROWS, *SHAPE), generator=generator, dtype=torch.float64)
    last, passes = int(scheduler.timesteps[0]) + 1, 0
    for t in scheduler.timesteps.tolist():
        if t < last:
            a = scheduler.alphas_cumprod[t].double()
            eps = (x - a.sqrt() * x0_hat(x, a)) / (1 - a).sqrt()
            x = scheduler.step(eps, t, x, y, mask, generator).prev_sample
            passes += 1
        else:
            x = scheduler.undo_step(x, last, generator)
        last = t
    return x, Cost(passes)


def dps(steps: int, scale: float, operator: edit.Operator, y: Tensor, std: float) -> Found:
    """Return samples of diffusion posterior sampling: steps of DDPM, then a gradient step of the residual's norm."""
    products = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    times = torch.linspace(999, 0, steps).round().long()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((ROWS, *SHAPE), generator=generator, dtype=torch.float64)
    for i, t in enumerate(times.tolist()):
        a = products[t]
        before = products[times[i + 1]] if i + 1 < steps else torch.ones((), dtype=torch.float64)
        x = x.requires_grad_()
        with torch.enable_grad():
            x0 = x0_hat(x, a)
            residual = (y - operator(x0)).flatten(1).norm(dim=1).sum()
            gradient = torch.autograd.grad(residual, x)[0]
        x, x0, beta = x.detach(), x0.detach(), 1 - a / before
        mean = (before.sqrt() * beta * x0 + (1 - beta).sqrt() * (1 - before) * x) / (1 - a)
        kick = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = mean + ((1 - before) / (1 - a) * beta).sqrt() * kick - scale * gradient
    return x, Cost(steps, steps)


def known_posterior(operator: edit.Operator, y: Tensor, std: float) -> Posterior:
    """Return the exact posterior given y (1, ...); what an operator does not measure (0) is left out."""
    a = dense(operator, SHAPE)
    measures = a.abs().sum(1) > 0
    return posterior(LAW, a[measures], y.flatten()[measures], std)


def exact(operator: edit.Operator, y: Tensor, std: float) -> Found:
    """Return exact draws of the posterior: the error that so many samples have from chance alone."""
    generator, found = torch.Generator().manual_seed(0), []
    for one in y[::SAMPLES]:
        known = known_posterior(operator, one, std)
        component = torch.multinomial(known.weights, SAMPLES, replacement=True, generator=generator)
        values, vectors = torch.linalg.eigh(known.covariances)
        roots = vectors * values.clamp_min(0).sqrt()[:, None]
        eps = torch.randn(SAMPLES, roots.shape[-1], 1, generator=generator, dtype=torch.float64)
        found.append(known.means[component] + (roots[component] @ eps)[..., 0])
    return torch.cat(found), Cost(0)


def errors(method: Method, task: str) -> tuple[float, float, Cost]:
    """Return the mean errors of mean and covariance over all observations, and the cost of a sample."""
    operator, std = tasks()[task], 0.0 if task == INPAINTING else STD
    seeds = range(SEED, SEED + OBSERVATIONS)
    each = [measured(LAW, operator, seed) if std else operator(LAW.sample(torch.tensor([seed]))) for seed in seeds]
    x, cost = method(operator, torch.cat(each).repeat_interleave(SAMPLES, 0), std)
    posteriors = [known_posterior(operator, y, std) for y in each]
    found = [moment_errors(part, p.mean, p.covariance) for part, p in zip(x.split(SAMPLES), posteriors, strict=True)]
    mean, covariance = torch.tensor(found).mean(0).tolist()
    return mean, covariance, cost


def rows(task: str) -> Iterator[tuple[str, tuple[float, float, Cost]]]:
    """Yield the methods of a task, and what they reach."""
    yield f"{SAMPLES} exact draws", errors(exact, task)
    for particles in PARTICLES:
        for nfe in NFES:
            words = f"mvm, {particles} particle{'s' * (particles > 1)}, NFE {nfe}"
            yield words, errors(partial(ours, nfe, particles), task)
    if task == INPAINTING:
        for eta in (0.0, 1.0):
            for steps in (*BUDGETS, 1000):
                yield f"replacement, eta {eta:g}, {steps} steps", errors(partial(repaint, steps, 1, eta), task)
            for steps in (*JUMP_STEPS, 250):
                yield f"RePaint, eta {eta:g}, {steps} steps", errors(partial(repaint, steps, 10, eta), task)
    for steps in (*(budget // 2 for budget in BUDGETS), 1000):
        found = {scale: errors(partial(dps, steps, scale), task) for scale in SCALES}
        best = min(found, key=lambda scale: found[scale][0] if math.isfinite(found[scale][0]) else math.inf)
        yield f"DPS, scale {best:g}, {steps} steps", found[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tasks(), default=list(tasks()))
    chosen = parser.parse_args().tasks
    x, t = noise.initial(torch.arange(8), SHAPE, torch.float64), torch.full((8,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(field(x, t), LAW.field(MEAN_VELOCITY)(x, t))
    for task in chosen:
        print(f"\n**{task}**\n\n| method | mean | covariance | passes | products |\n|---|---|---|---|---|", flush=True)
        for name, (mean, covariance, cost) in rows(task):
            print(f"| {name} | {mean:.3f} | {covariance:.2f} | {cost.passes} | {cost.products} |", flush=True)


if __name__ == "__main__":
    main()
