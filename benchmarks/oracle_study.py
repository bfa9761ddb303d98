"""The solver study on exact oracles: how far is each sampler from the truth, at how many evaluations?

    python benchmarks/oracle_study.py > benchmarks/results/oracle_study.md     (CPU, about 3 minutes)

1. Digits: 1,797 images as a mixture (std 0.05), ODE, 256 noises, RMSE to a 2,000-step solution.
2. The same over 24 draws of 256 noises: how often a noise near a border ends at another digit.
3. Gaussians of std 0.1, 0.5, 2 (mean 0.3): error of the sampled std, 400,000 draws, rho 0 to 1.
4. Grid, phi, tau and t_min of `sa` varied one at a time: what makes its SDE need many evaluations.
5. Trained digits (a run directory as the argument): Frechet distance, where a network stands for the oracle.
"""

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from tqdm import tqdm

from mvm import noise, oracle
from mvm.path import MeanVelocity
from mvm.solver import LamGrid, LamVariable, PowerGrid, PowerVariable, PredictorCorrector, Solver, adams, sa, sample
from mvm.verify import DIGITS_BARS, RHOS, STDS, Law, digits_noise, digits_oracle, rmse, sampled_law

NFES = tuple(DIGITS_BARS)
DRAWS = 400_000
SOLVERS: dict[str, Callable[[], Solver]] = {
    "adams (default)": adams,
    "sa, t_min 1e-3": sa,
    "sa, t_min 1e-4": lambda: sa(t_min=1e-4),
    "sa, t_min 1e-5": lambda: sa(t_min=1e-5),
}


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def table(title: str, *header: str) -> None:
    print(f"\n### {title}\n")
    row(*header)
    row(*("---" for _ in header))


def digits_rmse() -> None:
    one_draw("torch seed 1", digits_noise())
    one_draw("mvm seeds 0 to 255", noise.initial(torch.arange(256), (64,), torch.float64))


def one_draw(draw: str, x: torch.Tensor) -> None:
    field = digits_oracle().field(MeanVelocity())
    truth = sample(field, x, nfe=2000)
    table(f"Digits, ODE: RMSE to a 2,000-step solution, 256 noises ({draw})", "solver", *(f"nfe {n}" for n in NFES))
    for name, make in SOLVERS.items():
        row(name, *(f"{rmse(sample(field, x, solver=make(), nfe=n), truth):.5f}" for n in NFES))
    row("bar", *DIGITS_BARS.values())


def digits_borders(sets: int = 24) -> None:
    """A noise near the border between two digits flips to the other with any error: RMSE is then a count of flips."""
    field = digits_oracle().field(MeanVelocity())
    x = noise.initial(torch.arange(256 * sets), (64,), torch.float64)
    truth = torch.cat([sample(field, part, nfe=300) for part in tqdm(x.split(1024), desc="borders", leave=False)])
    header = [f"nfe {n}: {what}" for n in NFES for what in ("flips", "median error", "sets within the bar")]
    table(f"Digits, ODE: {len(x)} noises (mvm seeds 0 to {len(x) - 1}) in {sets} sets of 256", "solver", *header)
    for name, make in SOLVERS.items():
        cells = []
        for nfe, bar in DIGITS_BARS.items():
            found = torch.cat([sample(field, part, solver=make(), nfe=nfe) for part in x.split(1024)])
            error = ((found - truth) ** 2).mean(1)
            within = int((error.reshape(sets, 256).mean(1).sqrt() <= bar).sum())
            cells += [int((error > 0.005).sum()), f"{float(error.sqrt().median()):.5f}", f"{within}/{sets}"]
        row(name, *cells)


def gaussian_draws() -> Iterator[tuple[str, int, float, float, float, float]]:
    """Yield (solver, nfe, rho, std, measured error, exact error) of the sampled std."""
    for name, make in SOLVERS.items():
        for nfe in NFES:
            for rho in RHOS:
                for std in STDS:
                    law = oracle.gaussian(0.3, std, (DRAWS,))  # one sample whose elements are independent draws
                    start = noise.initial(torch.tensor([nfe]), (DRAWS,), torch.float64)
                    x = sample(law.field(MeanVelocity()), start, solver=make(), nfe=nfe, rho=rho, seeds=[nfe])
                    exact = sampled_law(make(), Law(0.3, std), rho, nfe=nfe).std
                    yield name, nfe, rho, std, float(x.std()) / std - 1, exact / std - 1


def gaussians() -> None:
    results = list(tqdm(gaussian_draws(), total=len(SOLVERS) * 36, desc="gaussians", leave=False))
    header = [f"rho {rho:g}" for rho in RHOS]
    table(
        f"Gaussians: error of the sampled std in %, std 0.1 / 0.5 / 2, {DRAWS:,} draws",
        "solver",
        "nfe",
        *header,
        "worst",
    )
    for name in SOLVERS:
        for nfe in NFES:
            here = [r for r in results if r[0] == name and r[1] == nfe]
            cells = [" / ".join(f"{100 * r[4]:+.2f}" for r in here if r[2] == rho) for rho in RHOS]
            row(name, nfe, *cells, f"{100 * max(abs(r[4]) for r in here):.2f}")
    row("bar", "13 / 26 / 52", *("" for _ in RHOS), "4 / 2.5 / 1")
    gap = max(abs(r[4] - r[5]) for r in results)
    print(f"\nLargest gap between {DRAWS:,} draws and the exact recursion: {100 * gap:.2f} points.")


def other_widths() -> None:
    """Stds that no score was searched by; but p was chosen for images, which are as wide as 4 in the mean; exact."""
    stds = (0.05, 0.2, 1.0, 4.0)
    header = [f"nfe {n}, {kind}" for n in NFES for kind in ("ODE", "SDE")]
    table(
        "Gaussians of other widths: error of the std in %, std 0.05 / 0.2 / 1 / 4 (SDE: rho = 1)",
        "solver",
        *header,
    )
    for name, make in SOLVERS.items():
        cells = []
        for nfe in NFES:
            for rho in (0.0, 1.0):
                errors = [sampled_law(make(), Law(0.3, std), rho, nfe=nfe).std / std - 1 for std in stds]
                cells.append(" / ".join(f"{100 * error:+.1f}" for error in errors))
        row(name, *cells)


def ingredients() -> None:
    """From `sa` to `adams`, one ingredient at a time; exact recursion."""
    steps: dict[str, PredictorCorrector] = {
        "sa: lam grid, phi = lam, tau at step end": sa(),
        "... tau at step start": sa(tau="start"),
        "... tau exact": sa(tau="exact"),
        "... t_min 1e-4": sa(t_min=1e-4, tau="exact"),
        "lam grid, phi = t^0.8": PredictorCorrector("", LamGrid(), PowerVariable(0.8)),
        "power grid r = 3.5 from 0.999, phi = lam": PredictorCorrector("", PowerGrid(3.5, t_max=0.999), LamVariable()),
        "power grid r = 3.5, phi = t^0.8": adams(r=3.5, p=1.0),
        "... p = 1.4": adams(r=3.5),
        "adams: power grid r = 4, p = 1.4, phi = t^0.8": adams(),
        "... phi = t^0.5": adams(q=0.5),
        "... phi = t^0.9": adams(q=0.9),
    }
    header = [f"nfe {n}, {kind}" for n in NFES for kind in ("ODE", "SDE")]
    table("From `sa` to `adams`: worst error of the std in % over std 0.1, 0.5, 2 (SDE: rho = 1)", "sampler", *header)
    for name, solver in steps.items():
        cells = []
        for nfe in NFES:
            for rho in (0.0, 1.0):
                errors = [sampled_law(solver, Law(0.3, s), rho, nfe=nfe).std / s - 1 for s in STDS]
                cells.append(f"{100 * max(errors, key=abs):+.2f}")
        row(name, *cells)


def trained(run: str) -> None:
    from mvm.evaluation.metrics import frechet_distance, moments, pixel_features
    from mvm.model import load
    from mvm.training.data import training_data

    model = load(run)
    held_out = moments(pixel_features(training_data(model.recipe, "held-out").images))
    count, nfes = 1000, (5, 8, 13, 26)
    labels, seeds = torch.arange(count) % model.num_classes, torch.arange(count)
    x = noise.initial(seeds, model.sample_shape)
    real = frechet_distance(moments(pixel_features(training_data(model.recipe).images[:count])), held_out)
    title = (
        f"Trained digits: Frechet distance (pixel space) of {count} samples to held-out; real digits are at {real:.3f}"
    )
    table(title, "solver", "rho", *(f"nfe {n}" for n in nfes))
    for name, make in SOLVERS.items():
        for rho in (0.0, 0.75, 1.0):
            cells = []
            for nfe in nfes:
                out = sample(model, x, solver=make(), nfe=nfe, rho=rho, condition=labels, seeds=seeds)
                distance = frechet_distance(moments(pixel_features(model.codec.decode(out))), held_out)
                cells.append(f"{distance:.3f}")
            row(name, f"{rho:g}", *cells)


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print("# Solver study on exact oracles\n")
    print(f"Command: `python benchmarks/oracle_study.py {' '.join(sys.argv[1:])}`. Commit {commit.strip()}, ", end="")
    print(
        f"torch {torch.__version__}, {platform.machine()} CPU, float64. What follows from it: docs/choose-a-sampler.md."
    )
    digits_rmse()
    digits_borders()
    gaussians()
    other_widths()
    ingredients()
    if len(sys.argv) > 1:
        trained(sys.argv[1])


if __name__ == "__main__":
    main()
