"""Which grid and which variable phi? The search behind the default sampler, on exact oracles.

    python benchmarks/grid_search.py > benchmarks/results/grid_search.md     (CPU, about 7 minutes)

For every candidate: the worst error of the sampled std over Gaussians of std 0.1, 0.5, 2 and rho 0, 0.5, 0.75, 1
(exact recursion), and on 2,048 noises of the digits oracle (ODE, float32) the median error and the number of noises
that end at another digit ("flips"), and how many of the 8 sets of 256 stay within the RMSE bars of `mvm verify`.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from mvm import noise
from mvm.path import MeanVelocity
from mvm.solver import Grid, LamGrid, LamVariable, PowerGrid, PowerVariable, PredictorCorrector, Variable, adams, sample
from mvm.solver.table import Array
from mvm.verify import DIGITS_BARS, digits_oracle, worst_std_error

NFES = tuple(DIGITS_BARS)


@dataclass(frozen=True)
class ShiftedPower(Variable):
    """phi = (t + c)^q: linear below c, a power above."""

    c: float
    q: float

    def __call__(self, t: Array) -> Array:
        return (t + self.c) ** self.q


@dataclass(frozen=True)
class ShiftedLog(Variable):
    """phi = log(t + c)."""

    c: float

    def __call__(self, t: Array) -> Array:
        return np.log(t + self.c)


@dataclass(frozen=True)
class LamPowerGrid(Grid):
    """lam_i = p log x - (r/2) log(1 - x) + m, x = i/N: start and end of the grid shaped apart."""

    r: float
    m: float
    p: float = 1.0

    def times(self, nfe: int, start: float = 1.0) -> tuple[float, ...]:
        x = np.arange(1, nfe) / nfe
        lam = self.p * np.log(x) - self.r / 2 * np.log1p(-x) + self.m
        return (1.0, *MeanVelocity().t_from_lam(lam).tolist(), 0.0)


def candidates() -> Iterator[tuple[str, PredictorCorrector]]:
    for r in (2.5, 3.0, 3.5, 4.0):
        for q in (0.5, 0.7, 0.8, 0.9, 1.0):
            yield f"power grid r = {r}, phi = t^{q}", adams(r=r, q=q, p=1.0)
    for p, r in ((1.25, 3.5), (1.25, 4.0), (1.4, 3.5), (1.4, 4.0), (1.4, 4.5), (1.5, 4.0), (1.5, 4.5), (2.0, 4.5)):
        yield f"power grid r = {r}, p = {p}, phi = t^0.8", adams(r=r, p=p)
    for c in (0.003, 0.01, 0.03):
        for r in (3.0, 3.5):
            grid = PowerGrid(r)
            yield f"power grid r = {r}, phi = (t + {c})^0.5", PredictorCorrector("", grid, ShiftedPower(c, 0.5))
            yield f"power grid r = {r}, phi = log(t + {c})", PredictorCorrector("", grid, ShiftedLog(c))
    for p, r, m in (
        (1, 2.5, 0.8),
        (1, 3, 0.8),
        (1, 3.5, 0.8),
        (1, 2.5, 1.25),
        (1, 2, 0.4),
        (1.5, 2.5, 1.25),
        (2, 2.5, 1.7),
    ):
        shape = LamPowerGrid(r, m, p)
        yield f"lam grid p = {p}, r = {r}, m = {m}, phi = t^0.8", PredictorCorrector("", shape, PowerVariable(0.8))
    for orders in ((2, 0), (3, 0), (2, 2), (2, 3), (3, 3), (4, 5), (5, 6)):
        yield f"power grid r = 3.5, phi = t^0.8, P{orders[0]}/C{orders[1]}", adams(*orders, r=3.5, p=1.0)
    for p, c in ((4, 5), (5, 6)):
        high = PredictorCorrector("", PowerGrid(3.0), ShiftedPower(0.01, 0.5), "exact", p, c)
        yield f"power grid r = 3.0, phi = (t + 0.01)^0.5, P{p}/C{c}", high
    yield "uniform lam on [1e-3, 0.999], phi = lam (sa, tau exact)", PredictorCorrector("", LamGrid(), LamVariable())


def main() -> None:
    field = digits_oracle().field(MeanVelocity())
    x = noise.initial(torch.arange(2048), (64,))
    truth = sample(field, x, nfe=300)
    print("# Grid and variable\n\nCommand: `python benchmarks/grid_search.py`. ", end="")
    print(f"torch {torch.__version__}, {platform.machine()} CPU. NFE 13 / 26 / 52 in every cell.\n")
    print("| candidate | worst std error, % | flips of 2,048 | sets of 8 within the bars | median digit error |")
    print("| --- | --- | --- | --- | --- |")
    for name, solver in tqdm(list(candidates()), desc="candidates"):
        stds = [100 * worst_std_error(solver, nfe) for nfe in NFES]
        errors = [((sample(field, x, solver=solver, nfe=nfe) - truth) ** 2).mean(1) for nfe in NFES]
        flips = [int((error > 0.005).sum()) for error in errors]
        means = [error.reshape(8, 256).mean(1).sqrt() for error in errors]
        within = [int((mean <= DIGITS_BARS[nfe]).sum()) for mean, nfe in zip(means, NFES, strict=True)]
        medians = [float(error.sqrt().median()) for error in errors]
        counts = [" / ".join(map(str, values)) for values in (flips, within)]
        cells = [" / ".join(f"{v:.1f}" for v in stds), *counts, " / ".join(f"{v:.5f}" for v in medians)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
