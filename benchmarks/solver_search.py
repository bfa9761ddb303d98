"""Where do the constants of the default solver stand among others? A search on exact fields.

    python benchmarks/solver_search.py > tables.md      # the tables of results/solver-search.md; 3 minutes on one core
    python benchmarks/solver_search.py latents > latents.md    # its last table: times shifted as those of training

Candidates are ranked by J, the mean over power-law Gaussian fields of log(detail + .002)/2 + log(energy + .001)/2, two
errors of the sampled std, exact: "detail" is the root mean square relative error over all directions, "energy" the
relative Frechet distance. Then the default and adams-power on two fields that are not Gaussian.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm import noise, oracle
from mvm.path import MEAN_VELOCITY, Field, TimeLaw
from mvm.solver import Adams, Solver, adams, adams_power, sample, solver_named
from mvm.solver.adams import ODE_REACH, SDE_REACH
from mvm.solver.base import Plan
from mvm.verify.solvers import Law, digits_oracle, image_stds, sampled_moments, sampled_stds

NFES, RHOS = (5, 8, 13, 26), (0.0, 1.0)
ORDERS, ENDINGS, REACHES = ((2, 3), (3, 4), (4, 4)), (1, 2, 3, 4), (0.3, 0.5, 0.8)
CS, BS = (0.0125, 0.025, 0.05), (0.5, 1.0, 3.0)
SIDES, EXPONENTS, PIXELS = (8, 32, 96, 256), (1.0, 1.3, 1.6, 2.0), (0.3, 0.6, 1.5)  # 192 to 196,608 values
GROUPS = 32  # of directions of nearly one std, in which a spectrum is seen
LONG, NOISES = 300, 256

LATENT_NFES, LATENT_RHOS, SHIFTS = (8, 13, 26, 50, 90), (0.0, 0.75), (1.0, 8.0, 64.0)
LATENT_SOLVERS = ("adams", "adams-power", "sa", "dpm++2m", "heun")
XL = TimeLaw("lam-normal", 0.0, 1.0, 1024 * 16 * 16)  # of imagenet256-ddt-xl
XL_LAM = XL.mean - math.log(XL.shift)  # the mean of its lam


def with_reach(solver: Adams, size: int, rho: float, reach: float) -> Adams:
    """Return a solver for samples of so many values, with this d times the spread that the default assumes."""
    fitted = solver.for_size(size)
    return replace(fitted, spread=fitted.spread * (SDE_REACH if rho else ODE_REACH) / reach)


class Candidate(NamedTuple):
    """The default with these in place of its constants; reach: d times the spread that the default assumes."""

    orders: tuple[int, int]
    ending: int
    c: float
    b: float
    reach: float

    def solver(self, size: int, rho: float) -> Adams:
        """Return it for samples of so many values."""
        predictor, corrector = self.orders
        changed = Adams(predictor=predictor, corrector=corrector, ending=self.ending, c=self.c, b=self.b)
        return with_reach(changed, size, rho, self.reach)

    def __str__(self) -> str:
        predictor, corrector = self.orders
        return f"P{predictor}/C{corrector}, ending {self.ending}, c {self.c}, b {self.b:g}, d {self.reach}/spread"


CANDIDATES = [Candidate(*values) for values in itertools.product(ORDERS, ENDINGS, CS, BS, REACHES)]


@cache
def spectra(side: int) -> list[tuple[Tensor, Tensor]]:
    """Return (stds, how many directions each stands for) of every field of this side; the strongest stand alone."""
    edges = np.unique(np.geomspace(1, side**2 + 1, GROUPS + 1).round().astype(int))[1:-1] - 1
    found = []
    for exponent, pixel in itertools.product(EXPONENTS, PIXELS):
        groups = image_stds(side, exponent, pixel).sort(descending=True).values.tensor_split(edges.tolist())
        stds = torch.stack([group.square().mean().sqrt() for group in groups])
        found.append((stds, torch.tensor([float(len(group)) for group in groups], dtype=torch.float64)))
    return found


def score(solver: Callable[[int, float], Solver], rho: float, nfe: int) -> float:
    """Return J of a solver, which is made for samples of so many values and rho."""
    logs: list[float] = []
    for side in SIDES:
        size, fields = 3 * side**2, spectra(side)
        sampled = sampled_stds(solver(size, rho), torch.cat([stds for stds, _ in fields]), rho, nfe, size)
        for (stds, count), got in zip(fields, sampled.split([len(stds) for stds, _ in fields]), strict=True):
            detail = float(((count * (got / stds - 1) ** 2).sum() / count.sum()).sqrt())
            energy = float(((count * (got - stds) ** 2).sum() / (count * stds**2).sum()).sqrt())
            logs.append(math.log(detail + 0.002) / 2 + math.log(energy + 0.001) / 2)
    return sum(logs) / len(logs)


def default(size: int, rho: float) -> Adams:
    """Return the default for samples of so many values."""
    return adams().for_size(size)


def default_near(size: int, rho: float) -> Adams:
    """Return the default with d = 0.3/spread."""
    return with_reach(adams(), size, rho, 0.3)


def search_rows() -> Iterator[str]:
    """Yield a row for every rho and NFE, and for the mean over NFEs, in which one candidate serves all of them."""
    told = f"best of {len(CANDIDATES)} | second | third | default: J, rank | with d 0.3/spread | `adams-power`"
    yield f"| rho | NFE | {told} |"
    yield "|---" * 8 + "|"
    others = (default, default_near, lambda size, rho: adams_power())
    for rho in RHOS:
        made = [*(one.solver for one in CANDIDATES), *others]
        cells = [[score(one, rho, nfe) for one in tqdm(made, desc=f"rho {rho:g}, nfe {nfe}")] for nfe in NFES]
        for nfe, values in (*zip(NFES, cells, strict=True), ("mean", np.mean(cells, axis=0).tolist())):
            *found, usual, near, power = values
            best = " | ".join(f"{value:.2f}: {one}" for value, one in sorted(zip(found, CANDIDATES, strict=True))[:3])
            rank = 1 + sum(value < usual - 1e-9 for value in found)
            yield f"| {rho:g} | {nfe} | {best} | {usual:.2f}, {rank} | {near:.2f} | {power:.2f} |"


def mixture_of_8() -> oracle.Mixture:
    """Return 16 Gaussians of std 0.2 in 8 dimensions, their means standard normal."""
    return oracle.mixture(noise.initial(torch.arange(16), (8,), torch.float64), 0.2)


def curved_rows(nfes: Sequence[int] = NFES) -> Iterator[str]:
    """Yield rows of the ODE's error on fields that are not Gaussian: median over noises and root mean square."""
    yield "| field | solver | " + " | ".join(map(str, nfes)) + " |"
    yield "|---|---" + "|---" * len(nfes) + "|"
    fields = {"1,797 digits, 64-d": digits_oracle(), "16 Gaussians, 8-d": mixture_of_8()}
    for name, law in fields.items():
        field = law.field(MEAN_VELOCITY)
        x = noise.initial(1000 + torch.arange(NOISES), law.shape, torch.float64)
        reference = sample(field, x, nfe=LONG)
        for solver in (adams(), adams_power()):
            squares = [(sample(field, x, solver=solver, nfe=nfe) - reference).square().mean(1) for nfe in nfes]
            row = [f"{float(s.sqrt().median()):.2g} / {float(s.mean().sqrt()):.2g}" for s in squares]
            yield f"| {name} | `{solver.name}` | " + " | ".join(row) + " |"


def latent_spectra() -> list[tuple[Tensor, Tensor]]:
    """Return (stds, how many directions each stands for) of fields of 1024 x 16 x 16 values of mean variance 1.

    Variances fall as the channel to the power 0, 1 or 2 and the spatial frequency to the power 0, 2 or 4; then 1 % or
    10 % of directions with a std of 0.1 in all others.
    """
    size, channel = XL.shift_dimension, torch.arange(1, 1025, dtype=torch.float64)
    frequency = torch.fft.fftfreq(16, dtype=torch.float64) * 16
    frequency = torch.hypot(frequency[:, None], frequency).clamp_min(0.7).flatten()
    edges = np.unique(np.geomspace(1, size + 1, GROUPS + 1).round().astype(int))[1:-1] - 1
    found = []
    for falls, smooth in itertools.product((0, 1, 2), (0, 2, 4)):
        variances = torch.outer(channel**-falls, frequency**-smooth).flatten().sort(descending=True).values
        groups = (variances / variances.mean()).tensor_split(edges.tolist())
        found.append((torch.stack([group.mean().sqrt() for group in groups]), [float(len(group)) for group in groups]))
    for wide in (0.01, 0.1):
        found.append((torch.tensor([((1 - (1 - wide) * 0.01) / wide) ** 0.5, 0.1]), [wide * size, (1 - wide) * size]))
    return [(stds.double(), torch.tensor(count, dtype=torch.float64)) for stds, count in found]


def trained(field: Field) -> Field:
    """Return a field that takes every level cleaner than +3 sigma of the law of training for that level.

    A model of a network that predicts u and was trained on nothing cleaner: its u is that of the level it knows.
    """
    known = float(MEAN_VELOCITY.t_from_lam(XL_LAM + 3 * XL.std))

    def denoise(x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        if (at := float(t.max())) >= known:
            return field(x, t, condition)
        return x + (at / known) ** 0.5 * (field(x, torch.full_like(t, known), condition) - x)

    return denoise


def energy(plan: Plan, fields: list[tuple[Tensor, Tensor]], limit: Callable[[Field], Field]) -> float:
    """Return the geometric mean over fields of the relative Frechet distance; by the ODE that is the relative RMSE."""
    stds = torch.cat([part for part, _ in fields])
    sampled = sampled_moments(plan, limit(oracle.spectrum(stds).field(MEAN_VELOCITY)), Law(0.0, 1.0), len(stds))[1]
    logs = [
        0.5 * math.log(float((count * (got - part) ** 2).sum() / (count * part**2).sum()))
        for (part, count), got in zip(fields, sampled.split([len(part) for part, _ in fields]), strict=True)
    ]
    return math.exp(sum(logs) / len(logs))


def outside(plan: Plan) -> str:
    """Return the shares of evaluations beyond 3 sigma of the law of training, cleaner and noisier."""
    z = (MEAN_VELOCITY.lam(torch.tensor(plan.times[:-1], dtype=torch.float64)) - XL_LAM) / XL.std
    return " | ".join(f"{float((sign * z > 3).double().mean()):.0%}" for sign in (1, -1))


def latent_rows() -> Iterator[str]:
    """Yield rows of solvers by shift: errors on the exact field and on the one known to +3 sigma, and the shares."""
    ends = f"cleaner than +3 sigma at {LATENT_NFES[-1]} | noisier than -3 sigma"
    yield "| rho | solver | shift | " + " | ".join(map(str, LATENT_NFES)) + f" | {ends} |"
    yield "|---" * (5 + len(LATENT_NFES)) + "|"
    fields = latent_spectra()
    for rho, name, shift in itertools.product(LATENT_RHOS, LATENT_SOLVERS, SHIFTS):
        solver = replace(solver_named(name).for_size(XL.shift_dimension), shift=shift)
        if rho and not solver.weak_order:
            continue
        plans = [solver.plan(MEAN_VELOCITY, nfe, rho) for nfe in LATENT_NFES]
        cells = [" / ".join(f"{energy(plan, fields, limit):.2g}" for limit in (lambda f: f, trained)) for plan in plans]
        yield f"| {rho:g} | `{name}` | {shift:g} | " + " | ".join(cells) + f" | {outside(plans[-1])} |"


def main() -> None:
    if sys.argv[1:] == ["latents"]:
        print(*latent_rows(), sep="\n")
    else:
        print(*search_rows(), "", *curved_rows(), sep="\n")


if __name__ == "__main__":
    main()
