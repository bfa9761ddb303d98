"""How far is the law of a sampler's output from the data's? Exact weak errors on image spectra: no Monte Carlo.

    python benchmarks/weak_errors.py > tables.md    # the tables of results/weak-errors.md; under a minute on one core

On Gaussian data every sampler here is linear in its starting noise and its kicks, so the std that it draws with in a
principal direction is the norm of its coefficients. Two errors, both in percent: "energy", the relative Frechet
distance (the root of the sum of squared errors of the stds over that of their squares), led by what is coarse and
strong; and "detail", the root mean square of the relative errors of the stds over all directions alike, most of which
are fine and weak.
"""

import math
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from mvm.solver import SOLVERS, Solver, sa, solver_named
from mvm.verify.solvers import image_stds, sampled_stds

NFES = (8, 10, 13, 20, 26, 39, 52, 65)
SIDES, EXPONENTS = (32, 64), (1.0, 1.3, 1.6)
RHOS, STDS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0), (0.1, 0.5, 2.0, 10.0)
PIXEL_VALUES = 3 * 32**2  # of a sample in which STDS are some directions


def both_sa(name: str) -> dict[str, Callable[[], Solver]]:
    return {f"{name}, t_min 1e-3": sa, f"{name}, t_min 1e-4": lambda: sa(t_min=1e-4)}


def named(*names: str) -> dict[str, Callable[[], Solver]]:
    return {name: lambda name=name: solver_named(name) for name in names}


PEERS = ("sa-official", "sde-dpm++2m", "sde-dpm++3m", "er-sde", "seeds2", "seeds3", "edm-churn", "euler-maruyama")
SDES = named("adams", "adams-power") | both_sa("sa") | named(*PEERS)
ODES = (
    named("adams", "adams-power")
    | both_sa("sa")
    | named("dpm++2m", "dpm++3m", "unipc", "deis", "ipndm", "heun", "euler")
)


def weak_errors(solver: Solver, rho: float, nfe: int) -> tuple[float, float]:
    """Return the errors by energy and of detail in percent, geometric means over the spectra."""
    logs = []
    for side in SIDES:
        # directions of one std are sampled alike: each std once, and how many have it
        spectra = [image_stds(side, exponent).unique(return_counts=True) for exponent in EXPONENTS]
        stds = torch.cat([found for found, _ in spectra])
        sampled = sampled_stds(solver, stds, rho, nfe, 3 * side**2).split([len(found) for found, _ in spectra])
        for (wanted, count), got in zip(spectra, sampled, strict=True):
            energy = (count * (got - wanted) ** 2).sum() / (count * wanted**2).sum()
            detail = (count * (got / wanted - 1) ** 2).sum() / count.sum()
            logs.append([math.log(energy) / 2, math.log(detail) / 2])
    energy, detail = (100 * math.exp(sum(column) / len(column)) for column in zip(*logs, strict=True))
    return energy, detail


def told(value: float, best: float) -> str:
    """Return three digits, bold where they are the best's."""
    text = f"{value:#.3g}".rstrip(".")
    return f"**{text}**" if text == f"{best:#.3g}".rstrip(".") else text


def errors_table(solvers: dict[str, Callable[[], Solver]], rho: float, nfes: Sequence[int] = NFES) -> str:
    """Return the table of solvers by NFE, "energy / detail" a cell, the best of a column bold."""
    cells = [(name, nfe) for name in solvers for nfe in nfes]
    found = {(name, nfe): weak_errors(solvers[name](), rho, nfe) for name, nfe in tqdm(cells, desc=f"rho {rho:g}")}
    best = {nfe: [min(found[name, nfe][part] for name in solvers) for part in (0, 1)] for nfe in nfes}
    lines = ["| energy / detail, % | " + " | ".join(map(str, nfes)) + " |", "|---" * (len(nfes) + 1) + "|"]
    for name in solvers:
        row = [" / ".join(told(found[name, nfe][part], best[nfe][part]) for part in (0, 1)) for nfe in nfes]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def noise_table(nfes: Sequence[int] = (13, 26), rhos: Sequence[float] = RHOS) -> str:
    """Return the table of our solvers by NFE and rho: the errors of the std in percent in directions of STDS."""
    wanted = torch.tensor(STDS, dtype=torch.float64)
    lines = ["| solver | NFE | " + " | ".join(f"rho {rho:g}" for rho in rhos) + " |", "|---" * (len(rhos) + 2) + "|"]
    for name in ("adams", "adams-power", "sa"):
        for nfe in nfes:
            errors = [sampled_stds(SOLVERS[name](), wanted, rho, nfe, PIXEL_VALUES) / wanted - 1 for rho in rhos]
            row = [" / ".join(f"{100 * error:+.1f}" for error in found.tolist()) for found in errors]
            lines.append(f"| {name} | {nfe} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    print(errors_table(SDES, 1.0), noise_table(), errors_table(ODES, 0.0), sep="\n\n")


if __name__ == "__main__":
    main()
