"""Where do the constants of the default solver stand among others? A search on exact fields.

    python benchmarks/solver_search.py > tables.md      # the tables of results/solver-search.md; 3 minutes on one core

Candidates are ranked by J, the mean over power-law Gaussian fields of log(detail + .002)/2 + log(energy + .001)/2, two
errors of the sampled std, exact: "detail" is the root mean square relative error over all directions, "energy" the
relative Frechet distance. Then the default and adams-power on two fields that are not Gaussian.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm import noise, oracle
from mvm.path import MEAN_VELOCITY
from mvm.solver import Adams, Solver, adams, adams_power, sample
from mvm.solver.adams import ODE_REACH, SDE_REACH
from mvm.verify.solvers import digits_oracle, image_stds, sampled_stds

NFES, RHOS = (5, 8, 13, 26), (0.0, 1.0)
ORDERS, ENDINGS, REACHES = ((2, 3), (3, 4), (4, 4)), (1, 2, 3, 4), (0.3, 0.5, 0.8)
CS, BS = (0.0125, 0.025, 0.05), (0.5, 1.0, 3.0)
SIDES, EXPONENTS, PIXELS = (8, 32, 96, 256), (1.0, 1.3, 1.6, 2.0), (0.3, 0.6, 1.5)  # 192 to 196,608 values
GROUPS = 32  # of directions of nearly one std, in which a spectrum is seen
LONG, NOISES = 300, 256


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


def main() -> None:
    print(*search_rows(), "", *curved_rows(), sep="\n")


if __name__ == "__main__":
    main()
