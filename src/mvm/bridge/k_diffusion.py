"""MVM's sampler in k-diffusion's calling convention, which ComfyUI's samplers share.

    sigmas = mvm_sigmas(26, sigma_max=80, size=math.prod(shape[1:]))
    x = sample_mvm(model, torch.randn(shape) * sigmas[0], sigmas, rho=0.75)

model(x, sigma (B,), **extra_args) is the denoised x0. path="ve": x = x0 + sigma eps; path="flow": x = (1 - sigma) x0
+ sigma eps, the CONST models of ComfyUI. Each sigma is a time of MVM's path by equal signal-to-noise ratio.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mvm.bridge.incoming import VarianceExploding
from mvm.noise import as_seeds
from mvm.options import at_least, between, choose
from mvm.path import MEAN_VELOCITY, LinearFlow, Schedule, equal_snr_scale, equal_snr_time
from mvm.solver import MAX_RHO, SOLVERS, Multistep, run
from mvm.solver.sampling import step_noise
from mvm.solver.variants import solver_named

SAME = 1e-5  # relative: sigmas this close are one level, written twice or rounded
NOISIEST = 1e9  # of x0 + sigma eps: beyond it two levels may be one time in float64
COORDINATES: dict[str, Schedule] = {"ve": VarianceExploding(), "flow": LinearFlow()}


def multistep_solvers() -> list[str]:
    """Return the names of the solvers that go through given levels with one evaluation at each."""
    return [name for name, make in SOLVERS.items() if isinstance(make(), Multistep)]


def _multistep(solver: str | Multistep) -> Multistep:
    chosen = solver_named(solver)
    if not isinstance(chosen, Multistep):
        raise ValueError(
            f"solver='{chosen.name}' is none of the multistep solvers; use {' or '.join(multistep_solvers())}"
        )
    return chosen


def mvm_sigmas(
    n: int,
    sigma_min: float = 0.0,
    sigma_max: float | None = None,
    *,
    path: str = "ve",
    solver: str | Multistep = "adams",
    rho: float = 0.0,
    size: int = 0,
) -> Tensor:
    """Return the sigmas of the solver's own grid, n evaluations from sigma_max down and then 0: float64 (n + 1,).

    sigma_min: the cleanest level that the model knows, evaluated last; with 0 the grid goes as near to 0 as it likes.
    sigma_max: None is 80 on "ve" and 1 on "flow". size: values of a sample, on which the grid of "adams" depends; 0:
    not known, and the grid is that of large images.
    """
    at_least("n", n, 1)
    at_least("size", size, 0)
    top = choose("path", path, COORDINATES).end if sigma_max is None else float(sigma_max)
    top = min(top, 1.0) if path == "flow" and top <= 1 + SAME else top  # rounded, by others
    if not 0 <= sigma_min < top or (path == "flow" and top > 1):
        raise ValueError(
            f"sigma_min={sigma_min}, sigma_max={sigma_max}: they must satisfy 0 <= sigma_min < sigma_max"
            f"{', and sigma_max <= 1 on the flow path' if path == 'flow' else ''}"
        )
    own = LinearFlow() if path == "flow" else VarianceExploding(top)
    chosen = _multistep(solver)
    if sigma_min:
        chosen = chosen.ending_at(float(equal_snr_time(sigma_min, own, MEAN_VELOCITY)))
    begins = own if top == own.end else VarianceExploding(top / (1 - top))  # at this level, whatever the coordinates
    fitted = chosen.for_size(size) if size else chosen
    times = torch.tensor(fitted.plan(begins, int(n), rho).times, dtype=torch.float64)
    return equal_snr_time(times, MEAN_VELOCITY, own)


def _levels(sigmas: Sequence[float], end: float) -> list[int]:
    """Return the indices of the levels among sigmas that fall; one that repeats the level before it is left out."""
    levels: list[int] = []
    for i, sigma in enumerate(sigmas):
        before, whose = (sigmas[levels[-1]], "below the one before") if levels else (end, "the path")
        if not 0 <= sigma <= before * (1 + SAME):
            raise ValueError(f"sigmas[{i}]={sigma:g} must lie in [0, {before:g}], {whose}; give sigmas that fall")
        if not levels or sigma < before * (1 - SAME):
            levels.append(i)
    return levels


@torch.no_grad()
def sample_mvm(
    model: Callable[..., Tensor],
    x: Tensor,
    sigmas: Tensor | Sequence[float],
    extra_args: Mapping[str, Any] | None = None,
    callback: Callable[[dict[str, Any]], Any] | None = None,
    disable: bool | None = None,
    *,
    rho: float = 0.0,
    solver: str | Multistep = "adams",
    noise_sampler: Callable[[Tensor, Tensor], Tensor] | None = None,
    seeds: Sequence[int] | Tensor | None = None,
    path: str = "ve",
) -> Tensor:
    """Return the state at the last sigma, which is the image where that is 0, from the state x at the first.

    One evaluation at each sigma but the last; a repeated sigma is none. rho: 0 is the ODE, 1 the paper's SDE.
    noise_sampler: (sigma, next sigma) -> the SDE's standard normal noise, as k-diffusion's; else seeds, one per sample:
    a sample's noise is then the same in any batch; else torch's own. callback: is called once an evaluation. disable:
    no progress bar; None: none where there is no terminal.
    """
    own, chosen = choose("path", path, COORDINATES), _multistep(solver)
    end = own.end if path == "flow" else NOISIEST
    between("rho", rho, 0, MAX_RHO)
    if noise_sampler is not None and seeds is not None:
        raise ValueError("noise_sampler and seeds both say the noise of the SDE; give one of the two")
    sigmas = torch.as_tensor(sigmas)
    used = _levels(sigmas.tolist(), end)
    if len(used) < 2:
        return x
    levels = sigmas[used].cpu().double().clamp_max(end)
    times = equal_snr_time(levels, own, MEAN_VELOCITY)
    scales = (1 / equal_snr_scale(levels, own, MEAN_VELOCITY)).tolist()  # of the path's states, against the solver's
    index = {t: k for k, t in enumerate(times.tolist())}
    try:
        plan = chosen.for_size(x[0].numel()).plan_times(own, tuple(index), rho)
    except ValueError as error:
        raise ValueError(
            f"sigmas from {float(levels[0]):g}: {error}; or take mvm_sigmas(n, path='{path}', solver='{chosen.name}')"
        ) from error

    def evaluate(state: Tensor, t: float) -> Tensor:
        k = index[t]
        seen, sigma = (state * scales[k]).to(x.dtype), sigmas[used[k]]
        denoised = model(seen, state.new_full((len(x),), float(levels[k])), **(extra_args or {}))
        if denoised.shape != x.shape:
            raise ValueError(f"model answers x of shape {tuple(x.shape)} with {tuple(denoised.shape)}; it must be x's")
        if callback is not None:
            callback({"x": seen, "i": used[k], "sigma": sigma, "sigma_hat": sigma, "denoised": denoised})
        bar.update()
        return denoised.to(torch.promote_types(denoised.dtype, state.dtype))

    def drawn(step: int) -> Tensor:
        if noise_sampler is None:
            return torch.randn_like(start)
        return noise_sampler(sigmas[used[step]], sigmas[used[step + 1]]).to(start)

    start = (x if x.dtype == torch.float64 else x.float()) / scales[0]
    noise = drawn if seeds is None else step_noise(as_seeds(seeds, len(x), x.device), start)
    with tqdm(total=plan.nfe, disable=disable) as bar:
        return (run(plan, evaluate, start, noise).x * scales[-1]).to(x.dtype)
