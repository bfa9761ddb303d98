"""Exact models of other libraries' conventions, in closed form and without a line of the bridge or of mvm.path.

Data: every element is drawn from the same mixture of two Gaussians on the line.
"""

import math

import numpy as np
import torch
from torch import Tensor

from mvm import noise

MEANS, STDS, WEIGHTS = (0.2, 1.2), (0.3, 0.2), (0.3, 0.7)
MEAN = sum(w * m for w, m in zip(WEIGHTS, MEANS, strict=True))
STD = math.sqrt(sum(w * (s**2 + (m - MEAN) ** 2) for w, m, s in zip(WEIGHTS, MEANS, STDS, strict=True)))
SHAPE = (8,)
COUNT = 10_000  # 80,000 numbers: chance leaves 0.2 % in the mean and 0.25 % in the std


def denoise(x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """E[x0 | alpha x0 + sigma eps = x], element by element; alpha and sigma are (B, 1)."""
    logs, means = [], []
    for weight, mean, std in zip(WEIGHTS, MEANS, STDS, strict=True):
        variance = alpha**2 * std**2 + sigma**2
        logs.append(math.log(weight) - 0.5 * (x - alpha * mean) ** 2 / variance - 0.5 * torch.log(variance))
        means.append(mean + alpha * std**2 / variance * (x - alpha * mean))
    share = torch.softmax(torch.stack(logs), 0)
    return (share * torch.stack(means)).sum(0)


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """eps - x0 of x = (1 - t) x0 + t eps."""
    t = t[:, None]
    return (x - denoise(x, 1 - t, t)) / t


def denoiser(x: Tensor, sigma: Tensor) -> Tensor:
    """EDM's D(x; sigma)."""
    return denoise(x, torch.ones_like(sigma)[:, None], sigma[:, None])


def betas(name: str, steps: int = 1000) -> Tensor:
    """DDPM's linear betas, Stable Diffusion's scaled ones, the capped cosine ones."""
    if name == "linear":
        return torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
    if name == "scaled_linear":
        return torch.linspace(0.00085**0.5, 0.012**0.5, steps, dtype=torch.float64) ** 2
    bar = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
    return torch.tensor([min(1 - bar[i + 1] / bar[i], 0.999) for i in range(steps)], dtype=torch.float64)


class Ddpm:
    """An exact network of a table of betas, asked at fractional training steps, that remembers what it was told."""

    def __init__(self, name: str, kind: str = "eps") -> None:
        bar = np.cumprod(1 - betas(name).numpy())
        self.half_log_snr = 0.5 * np.log(bar / (1 - bar))
        self.kind = kind
        self.told: list[float] = []

    def __call__(self, x: Tensor, step: Tensor) -> Tensor:
        self.told.append(float(step[0]))
        lam = torch.as_tensor(np.interp(step.numpy(), np.arange(len(self.half_log_snr)), self.half_log_snr))[:, None]
        alpha, sigma = torch.sigmoid(2 * lam) ** 0.5, torch.sigmoid(-2 * lam) ** 0.5
        x0 = denoise(x.double(), alpha, sigma)
        eps = (x.double() - alpha * x0) / sigma
        return {"eps": eps, "x0": x0, "diffusion_v": alpha * eps - sigma * x0}[self.kind].to(x.dtype)


def start(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Seeds, and their noise brought to mean 0 and std 1 exactly: the ODE then has no chance in it to first order."""
    seeds = torch.arange(COUNT)
    x = noise.initial(seeds, SHAPE, torch.float64)
    return seeds, ((x - x.mean()) / x.std()).to(dtype)


def errors(x: Tensor) -> tuple[float, float]:
    """Relative errors of mean and std."""
    return abs(float(x.double().mean()) / MEAN - 1), abs(float(x.double().std()) / STD - 1)
