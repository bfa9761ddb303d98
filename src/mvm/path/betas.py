"""The path of DDPM's table of betas, which diffusers' models and DiT are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from mvm.path.schedule import Schedule, Time, as_time

NO_SIGNAL = 1e-20  # stands for an alpha^2 of 0 (zero terminal SNR), so that lam stays finite


@dataclass(frozen=True, repr=False)
class BetaTable(Schedule):
    """alpha^2 from a table of N training steps; between two of them lam is linear.

    Training step i = 0 ... N-1 stands at t = (i + 1)/N. Below the first, sigma^2/alpha^2 falls linearly to 0 at t = 0.
    """

    alphas_cumprod: tuple[float, ...]
    sigma_power: ClassVar[float] = 0.5

    def __post_init__(self) -> None:
        falling = all(high > low for high, low in zip(self.alphas_cumprod, self.alphas_cumprod[1:], strict=False))
        if len(self.alphas_cumprod) < 2 or not falling or not self.alphas_cumprod[0] < 1:
            raise ValueError("alphas_cumprod must be at least 2 numbers that fall, all below 1")
        if not self.alphas_cumprod[-1] >= 0:
            raise ValueError(f"alphas_cumprod ends at {self.alphas_cumprod[-1]}; it must be at least 0")

    def __repr__(self) -> str:
        first, last = self.alphas_cumprod[0], self.alphas_cumprod[-1]
        return f"BetaTable({self.steps} steps, alpha^2 {first:.6g} to {last:.6g})"

    @classmethod
    def from_betas(cls, betas: Sequence[float] | Tensor) -> "BetaTable":
        """Return the table of betas: alpha^2 is the running product of 1 - beta."""
        return cls(tuple(torch.cumprod(1 - as_time(torch.as_tensor(betas)), 0).tolist()))

    @property
    def steps(self) -> int:
        return len(self.alphas_cumprod)

    @property
    def first(self) -> float:
        """The time of training step 0, the cleanest level that a network of this table knows."""
        return 1 / self.steps

    def timestep(self, t: Time) -> Tensor:
        """Return the (fractional) training step at t; 0 below the first."""
        return (as_time(t) * self.steps - 1).clamp_min(0)

    def time(self, timestep: Time) -> Tensor:
        """Return the t of a (fractional) training step."""
        return (as_time(timestep) + 1) / self.steps

    @cached_property
    def _table(self) -> Tensor:
        square = torch.tensor(self.alphas_cumprod, dtype=torch.float64).clamp_min(NO_SIGNAL)
        return 0.5 * (torch.log(square) - torch.log1p(-square))

    def _cell(self, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """Return s = N t, lam at the knot below it and the rise of lam to the next (of the second cell where s < 1)."""
        s = as_time(t) * self.steps
        table = self._table.to(s.device)
        below = s.floor().clamp(1, self.steps - 1).long()
        return s, table[below - 1] + (s - below) * (table[below] - table[below - 1]), table[below] - table[below - 1]

    def lam(self, t: Time) -> Tensor:
        s, inside, _ = self._cell(t)
        return torch.where(s < 1, self._table[0].to(s.device) - 0.5 * torch.log(s), inside)

    def t_from_lam(self, lam: Time) -> Tensor:
        lam = as_time(lam)
        table = self._table.to(lam.device)
        below = torch.searchsorted(-table, -lam.contiguous()).clamp(1, self.steps - 1)
        s = below + (table[below - 1] - lam) / (table[below - 1] - table[below])
        return torch.where(lam > table[0], torch.exp(2 * (table[0] - lam)), s.clamp_max(self.steps)) / self.steps

    def alpha(self, t: Time) -> Tensor:
        return torch.sqrt(torch.sigmoid(2 * self.lam(t)))

    def sigma(self, t: Time) -> Tensor:
        return torch.sqrt(torch.sigmoid(-2 * self.lam(t)))

    def _log_alpha_rate(self, t: Time) -> Tensor:
        """d log alpha / dt = sigma^2 dlam/dt, finite at t = 0."""
        s, _, rise = self._cell(t)
        inside = self.sigma(t) ** 2 * rise * self.steps
        ratio = torch.exp(-2 * self._table[0].to(s.device))  # sigma^2/alpha^2 of training step 0
        return torch.where(s < 1, -0.5 * self.steps * ratio / (1 + ratio * s), inside)

    def alpha_rate(self, t: Time) -> Tensor:
        return self.alpha(t) * self._log_alpha_rate(t)

    def variance_rate(self, t: Time) -> Tensor:
        return -2 * self.alpha(t) ** 2 * self._log_alpha_rate(t)


@cache
def ddpm() -> BetaTable:
    """Return DDPM's table: 1000 training steps, betas from 1e-4 to 0.02 in equal steps."""
    return BetaTable.from_betas(torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64))
