"""Exact fields: mixtures of isotropic Gaussians (one Gaussian and a finite data set among them).

An oracle takes the place of a network, with the exact x0_hat under any schedule, so that solvers, guidance and
likelihoods are tested against the truth.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mvm import noise
from mvm.path import Field, Schedule, as_time, convert, like

TINY = 1e-200  # in place of a variance of 0: small beyond doubt, yet squares over it stay finite


@dataclass(frozen=True)
class Mixture:
    """sum_k w_k N(mean_k, std_k^2 I): means (K, d), stds (K,), weights (K,), labels (K,) or None, data shape."""

    means: Tensor
    stds: Tensor
    weights: Tensor
    shape: tuple[int, ...]
    labels: Tensor | None = None

    def to(self, device: torch.device | str) -> "Mixture":
        """Return the mixture on a device."""
        labels = None if self.labels is None else self.labels.to(device)
        return Mixture(self.means.to(device), self.stds.to(device), self.weights.to(device), self.shape, labels)

    def _select(self, condition: Tensor | None) -> Tensor:
        """Log-weights (B or 1, K); components of another label than the condition's get -inf."""
        log_weights = torch.log(self.weights)[None, :]
        if condition is None:
            return log_weights
        if self.labels is None:
            raise ValueError("condition was given, but this oracle has no labels; pass labels= when building it")
        chosen = self.labels[None, :] == condition[:, None]
        if not bool(chosen.any(1).all()):
            allowed = self.labels.unique().tolist()
            missing = min(set(condition.tolist()) - set(allowed))
            raise ValueError(f"condition={missing}: no component has that label; allowed: {allowed}")
        return torch.where(chosen, log_weights, -math.inf)

    def _mix(self, x: Tensor, t: Tensor, schedule: Schedule, condition: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x against every component: log joint density (B, K), pull towards x (B, K), alpha (B, 1)."""
        alpha, sigma = schedule.alpha(t).reshape(-1, 1), schedule.sigma(t).reshape(-1, 1)  # (B or 1, 1)
        variance = (alpha**2 * self.stds**2 + sigma**2).clamp_min(TINY)  # (B or 1, K)
        # |x - alpha m|^2 expanded: one matrix product instead of a (B, K, d) array
        square = (x**2).sum(1, keepdim=True) - 2 * alpha * (x @ self.means.T) + alpha**2 * (self.means**2).sum(1)
        log_normal = -0.5 * square.clamp_min(0) / variance - 0.5 * x.shape[1] * torch.log(2 * math.pi * variance)
        return self._select(condition) + log_normal, alpha * self.stds**2 / variance, alpha

    def _flat(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.shape:
            shape = ", ".join(map(str, self.shape))
            raise ValueError(f"x has shape {tuple(x.shape)}; this oracle's samples are (B, {shape})")
        return x.reshape(x.shape[0], self.means.shape[1]).double()

    def denoise(self, x: Tensor, t: Tensor, schedule: Schedule, condition: Tensor | None = None) -> Tensor:
        """Return E[x0 | x_t = x], exact; the Field of this oracle under a schedule."""
        flat = self._flat(x)
        log_joint, pull, alpha = self._mix(flat, as_time(t), schedule, condition)
        share = torch.softmax(log_joint, dim=1)  # (B, K)
        # component k's posterior mean is m_k + pull_k (x - alpha m_k)
        mean = (share * (1 - pull * alpha)) @ self.means + (share * pull).sum(1, keepdim=True) * flat
        return mean.reshape(x.shape).to(x.dtype)

    def field(self, schedule: Schedule) -> Field:
        """Return the exact field (x, t, condition) -> x0_hat under a schedule."""
        return lambda x, t, condition=None: self.denoise(x, t, schedule, condition)

    def predict(self, kind: str, x: Tensor, t: Tensor, schedule: Schedule, condition: Tensor | None = None) -> Tensor:
        """Return the exact prediction of any kind: u, v, score, flow, ..."""
        return convert(self.denoise(x, t, schedule, condition), "x0", kind, x, t, schedule)

    def log_density(self, x: Tensor, t: Tensor, schedule: Schedule, condition: Tensor | None = None) -> Tensor:
        """Return log p_t(x), float64 (B,)."""
        log_joint, _, _ = self._mix(self._flat(x), as_time(t), schedule, condition)
        total = torch.logsumexp(self._select(condition), dim=1)  # renormalises over the chosen label
        return torch.logsumexp(log_joint, dim=1) - total

    def sample(self, seeds: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return exact draws of x0, one per seed, float64: independent of all else that these seeds draw."""
        weights = torch.softmax(self._select(condition), dim=1).expand(len(seeds), -1)
        u = noise.uniform(seeds, noise.COMPONENT, (1,))
        index = torch.searchsorted(weights.cumsum(1).contiguous(), u).clamp_max(len(self.weights) - 1)[:, 0]
        eps = noise.normal(seeds, noise.DATA, (self.means.shape[1],), torch.float64)
        return (self.means[index] + self.stds[index, None] * eps).reshape(len(seeds), *self.shape)

    def sample_at(self, seeds: Tensor, t: float, schedule: Schedule, condition: Tensor | None = None) -> Tensor:
        """Return exact draws of x_t."""
        x0 = self.sample(seeds, condition)
        eps = noise.normal(seeds, noise.TRAIN, self.shape, torch.float64)
        return like(schedule.alpha(t), x0) * x0 + like(schedule.sigma(t), x0) * eps


@dataclass(frozen=True)
class Spectrum:
    """N(0, diag(stds^2)): independent values of different scale, as images are in their principal directions."""

    stds: Tensor

    def field(self, schedule: Schedule) -> Field:
        """Return the exact field (x, t, condition) -> x0_hat under a schedule."""

        def denoise(x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
            alpha, sigma = (value.reshape(-1, 1) for value in (schedule.alpha(t), schedule.sigma(t)))
            variance = self.stds**2
            return (alpha * variance / (alpha**2 * variance + sigma**2) * x).to(x.dtype)

        return denoise


def spectrum(stds: Tensor) -> Spectrum:
    """Return the Gaussian with these standard deviations (d,); samples are (B, d)."""
    stds = torch.as_tensor(stds, dtype=torch.float64)
    if stds.ndim != 1 or not bool((stds > 0).all()):
        raise ValueError(f"stds must be positive numbers of shape (d,); got shape {tuple(stds.shape)}")
    return Spectrum(stds)


def mixture(
    means: Tensor, stds: Tensor | float, weights: Tensor | None = None, labels: Tensor | None = None
) -> Mixture:
    """Return the mixture of N(means[k], stds[k]^2 I); means (K, *shape), equal weights unless given."""
    means = torch.as_tensor(means, dtype=torch.float64)
    count = means.shape[0]
    stds = torch.as_tensor(stds, dtype=torch.float64).expand(count)
    if not bool((stds >= 0).all()):
        raise ValueError("stds must be at least 0")
    weights = torch.ones(count) if weights is None else torch.as_tensor(weights)
    if weights.shape != (count,) or not bool((weights >= 0).all()) or not bool(weights.sum() > 0):
        raise ValueError(f"weights must be {count} numbers >= 0, one per component, not all 0")
    if labels is not None and labels.shape != (count,):
        raise ValueError(f"labels has shape {tuple(labels.shape)}; it must be ({count},), one per component")
    weights = weights.double() / weights.double().sum()
    return Mixture(means.reshape(count, math.prod(means.shape[1:])), stds, weights, tuple(means.shape[1:]), labels)


def gaussian(mean: Tensor | float, std: float, shape: tuple[int, ...] = (1,)) -> Mixture:
    """Return N(mean, std^2 I) on data of the given shape."""
    return mixture(torch.as_tensor(mean, dtype=torch.float64).expand(shape)[None], std)


def finite_data(points: Tensor, std: float = 0.0, labels: Tensor | None = None) -> Mixture:
    """Return the uniform law on `points` (N, *shape), each widened to N(point, std^2 I)."""
    return mixture(points, std, labels=labels)
