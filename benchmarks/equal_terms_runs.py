"""What finished runs of benchmarks/equal_terms.sh say: tables, differences, all of them in one file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mvm.evaluation.sweep_report import Gap, metric_named
from mvm.files import write_text
from mvm.metrics.distances import student_95
from mvm.recipes import Recipe, options

NFES = (13, 26, 52)
COMMON = ("adams", 0.0)
METHODS = {
    "mvm-u": "MVM, u",
    "mvm-v": "MVM, unscaled v",
    "mvm-x0": "MVM path, x0",
    "flow": "flow matching, linear",
    "vp-eps": "VP, eps",
    "vp-v": "VP, v",
    "mvm-u-as-flow": "MVM, u, weighted as flow",
    "mvm-v-as-flow": "MVM, unscaled v, weighted as flow",
    "mvm-x0-as-flow": "MVM path, x0, weighted as flow",
    "mvm-u-unit": "MVM, u, pixels doubled",
    "mvm-u-unit-as-flow": "MVM, u, pixels doubled, weighted as flow",
    "flow-unit": "flow matching, pixels doubled",
}

Way = tuple[str, float]  # a solver and its rho
Told = Mapping[str, Any]  # of a METHOD-SEED.json


def best_ways(cells: Sequence[Told]) -> dict[int, Way]:
    """Return the solver and rho of the lowest distance at each NFE."""
    found = {}
    for nfe in sorted({cell["nfe"] for cell in cells}):
        top = min((cell for cell in cells if cell["nfe"] == nfe), key=lambda cell: cell["value"])
        found[nfe] = (top["solver"], top["rho"])
    return found


@dataclass(frozen=True)
class Range:
    """A figure over seeds."""

    values: tuple[float, ...]
    decimals: int = 2

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def __str__(self) -> str:
        ends = [f"{end:.{self.decimals}f}" for end in (min(self.values), max(self.values))]
        return f"{self.mean:.{self.decimals}f}" + (f" [{', '.join(ends)}]" if len(self.values) > 1 else "")


def read_runs(work: Path) -> dict[str, list[Told]]:
    """Return the finished runs of a folder, or of one file, by method, seed by seed, in the order of METHODS."""
    paths = [work] if work.is_file() else sorted(work.glob("*-[0-9]*.json"))
    found: list[Told] = []
    for path in paths:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found += stored if isinstance(stored, list) else [stored]
    if not found:
        raise SystemExit(f"work={work}: no run is finished there; see the logs")
    for told in found:
        if other := _differing(found[0], told):
            names = [f"{run['method']}-{run['seed']}" for run in (found[0], told)]
            raise ValueError(
                f"work={work}: {' and '.join(names)} differ in {', '.join(other)}; equal ones are compared"
            )
    runs = {method: sorted((r for r in found if r["method"] == method), key=lambda r: r["seed"]) for method in METHODS}
    return {method: told for method, told in runs.items() if told}


def _differing(a: Told, b: Told) -> list[str]:
    """Return in what two runs differ that they must have in common; options added since one was made were off in it."""
    first, second = (
        {**options(Recipe()), **told.get("terms", {}), **{name: told[name] for name in ("steps", "images", "metric")}}
        for told in (a, b)
    )
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def figures_by_seed(runs: Sequence[Told], nfe: int, way: Way) -> dict[int, float]:
    """Return the figure at one setting by seed, of those that have it."""
    cells = ((told["seed"], cell) for told in runs for cell in told["cells"])
    return {seed: c["value"] for seed, c in cells if (c["nfe"], c["solver"], c["rho"]) == (nfe, *way)}


def over_seeds(runs: Sequence[Told], nfe: int, way: Way) -> Range:
    """Return the figure at one setting over the seeds that have it."""
    values = tuple(figures_by_seed(runs, nfe, way).values())
    return Range(values, decimals=2 if runs[0]["metric"] == "fid" else 3)


def chosen_ways(runs: Sequence[Told]) -> dict[int, Way]:
    """Return a method's best sampler at each NFE, chosen on the first seed there is (seed 0, which has all)."""
    return best_ways(runs[0]["cells"])


def table(runs: Mapping[str, Sequence[Told]]) -> str:
    """Return the figure by method, and how loss and gradient scatter, as Markdown."""
    ends, any_run = [f"NFE {nfe}" for nfe in NFES], next(iter(runs.values()))[0]
    lines = [f"{any_run['steps']:,} steps; {metric_named(any_run['metric']).label} of {any_run['images']:,} images", ""]
    lines.append(f"| method | seeds | {' | '.join(ends)} | {' | '.join(f'best, {end}' for end in ends)} |")
    lines.append("|---" * (2 + 2 * len(NFES)) + "|")
    for method, told in runs.items():
        best = chosen_ways(told)
        common = [str(over_seeds(told, nfe, COMMON)) for nfe in NFES]
        own = [f"{over_seeds(told, nfe, best[nfe])}, {best[nfe][0]}, rho {best[nfe][1]:g}" for nfe in NFES]
        lines.append(f"| {' | '.join([METHODS[method], str(len(told)), *common, *own])} |")
    header = ["method", "loss", "its std / mean", "gradient norm", "its std / mean", "largest", "images/s", "seconds"]
    lines += ["", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for method, told in runs.items():
        shown = [_over([r["loss"]["mean"] for r in told], 4), _over([r["loss"]["relative"] for r in told], 4)]
        shown += [_over([r["grad_norm"][part] for r in told], 3) for part in ("mean", "relative", "largest")]
        shown += [_over([r["images_per_second"] for r in told], 0), _over([r["seconds"] for r in told], 0)]
        lines.append(f"| {' | '.join([METHODS[method], *shown])} |")
    return "\n".join(lines)


def difference(runs: Sequence[Told], base: Sequence[Told], nfe: int) -> Gap | None:
    """Return by how much a method's figure is above another's by the common sampler; None of fewer than two pairs.

    Runs of one seed have their initial weights, images and noise in common. The 95 % interval is Student's, of the
    differences of pairs: it knows trainings, not other images than those judged.
    """
    ours, theirs = (figures_by_seed(told, nfe, COMMON) for told in (runs, base))
    pairs = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if len(pairs) < 2:
        return None
    middle, reach = float(np.mean(pairs)), student_95(len(pairs)) * float(np.std(pairs, ddof=1)) / len(pairs) ** 0.5
    return Gap(middle, middle - reach, middle + reach, paired=True)


def differences(runs: Mapping[str, Sequence[Told]], less: str) -> str:
    """Return every method less one of them as Markdown, bold where the interval leaves out zero."""
    lines = [f"| less {METHODS[less]} | pairs | {' | '.join(f'NFE {nfe}' for nfe in NFES)} |", "|---" * 5 + "|"]
    for method, told in runs.items():
        gaps = [difference(told, runs[less], nfe) for nfe in NFES]
        if method != less and None not in gaps:
            pairs = {run["seed"] for run in told} & {run["seed"] for run in runs[less]}
            cells = [f"**{gap}**" if gap.significant else f"{gap}" for gap in gaps]
            lines.append(f"| {' | '.join([METHODS[method], str(len(pairs)), *cells])} |")
    return "\n".join(lines)


def _over(values: Sequence[float], decimals: int) -> str:
    return f"{sum(values) / len(values):,.{decimals}f}"


def rounded(value: Any) -> Any:
    """Return what was read from JSON with seven digits of every fraction: no figure here is better known."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def store(runs: Mapping[str, Sequence[Told]], out: Path) -> None:
    """Write runs that compare into one file."""
    lines = [json.dumps(rounded(run)) for told in runs.values() for run in told]
    write_text(out, "[\n" + ",\n".join(lines) + "\n]\n")


def go_on(runs: Mapping[str, Sequence[Told]], work: Path) -> None:
    """Write stored runs where benchmarks/equal_terms.sh finds them finished; those already there stay as they are."""
    work.mkdir(parents=True, exist_ok=True)
    for run in (run for told in runs.values() for run in told):
        path = work / f"{run['method']}-{run['seed']}.json"
        if not path.exists():
            write_text(path, json.dumps(run, indent=2) + "\n")
