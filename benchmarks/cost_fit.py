"""How a training step's time grows with width, depth, tokens and batch: measured on one GPU, and fitted.

    python benchmarks/cost_fit.py measure --json benchmarks/results/cost-fit.json     (one GPU)
    python benchmarks/cost_fit.py fit benchmarks/results/cost-fit.json --hold L \\
        --check benchmarks/results/training-speed.json

measure: all cases, or those named; what the file has already is not measured again.
fit: seconds = sum of work x cost over the terms of mvm.recipes.costs; no cost is negative, squared relative errors are
least. Cases of --hold and --check are predicted, not fitted.
"""

import argparse
import gc
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from training_speed import CASES as PUBLISHED
from training_speed import commit

from mvm.files import write_text
from mvm.network import DiTConfig
from mvm.recipes import DataConfig, Recipe, load_recipe
from mvm.recipes.costs import TERMS, UNITS, Work, step_work
from mvm.recipes.page import SHOWN_BATCH, hours_on_h200
from mvm.training.optim import TrainConfig
from mvm.training.runtime import EngineConfig

PREDICTED = ("imagenet32-dit-b", "imagenet32-dit-l")
HEAD = 64  # width of an attention head, as in S, B and L


@dataclass(frozen=True)
class Case:
    """A network and a batch; `side` of the images, of which patches of 2 are tokens."""

    depth: int = 12
    width: int = 384
    side: int = 32
    batch: int = 256

    def recipe(self, compile: str = "auto") -> Recipe:
        """Return the case as a recipe on random images."""
        return Recipe(
            name="cost-fit",
            data=DataConfig(name="folder", path="random", channels=4, size=self.side, classes=1000),
            network=DiTConfig(depth=self.depth, width=self.width, heads=self.width // HEAD, patch=2),
            train=TrainConfig(batch=self.batch),
            engine=EngineConfig(compile=compile),
        )


CASES = {
    "base": Case(),  # S/2
    "width-256": Case(width=256),
    "width-768": Case(width=768),  # B/2
    "depth-6": Case(depth=6),
    "tokens-64": Case(side=16),
    "tokens-1024": Case(side=64),
    "batch-16": Case(batch=16),
    "batch-64": Case(batch=64),
    "batch-512": Case(batch=512),
    "wide-batch-16": Case(width=768, batch=16),
    "wide-tokens-64": Case(width=768, side=16),
    "L": Case(depth=24, width=1024),  # meant to be held out: what the others say of it is a prediction
}
SMOKE = {"smoke": Case(depth=1, width=64, side=8, batch=4)}


class Point(NamedTuple):
    """A measured step."""

    name: str
    work: Work
    seconds: float


class Fit(NamedTuple):
    """Seconds that a unit of each term costs; terms that were left out cost nothing."""

    costs: Mapping[str, float]

    def seconds(self, work: Work) -> float:
        """Return the time of a step with so much work."""
        return sum(cost * getattr(work, term) for term, cost in self.costs.items())

    def error(self, point: Point) -> float:
        """Return how far the fitted time lies above the measured, as a share of that."""
        return self.seconds(point.work) / point.seconds - 1


def fitted(points: Sequence[Point], terms: Sequence[str] = TERMS) -> Fit:
    """Return the non-negative costs of least squared relative error.

    They are the plain least squares of those terms that are not zero, so all choices of terms are tried: few enough.
    """
    if len(points) < len(terms):
        raise ValueError(
            f"{len(points)} measured steps do not determine {len(terms)} terms ({', '.join(terms)}); "
            "measure more cases, or name fewer with --terms"
        )
    table = np.array([[getattr(point.work, term) / point.seconds for term in terms] for point in points])
    scale = np.linalg.norm(table, axis=0)
    found = min(_solutions(table / scale), key=lambda costs: float(np.sum((table / scale @ costs - 1) ** 2)))
    return Fit(dict(zip(terms, (found / scale).tolist(), strict=True)))


def _solutions(table: np.ndarray) -> list[np.ndarray]:
    """Return the least squares of table @ costs = 1 over every set of columns, where no cost is negative."""
    rows, columns = table.shape
    found = [np.zeros(columns)]
    for count in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), count)):
            costs = np.zeros(columns)
            costs[chosen] = np.linalg.lstsq(table[:, chosen], np.ones(rows))[0]
            if costs.min() >= 0:
                found.append(costs)
    return found


def left_out_errors(points: Sequence[Point], terms: Sequence[str] = TERMS) -> list[float] | None:
    """Return each point's error by a fit of the others; None where those would be too few."""
    if len(points) <= len(terms):
        return None
    others = ([other for other in points if other is not point] for point in points)
    return [fitted(rest, terms).error(point) for rest, point in zip(others, points, strict=True)]


def one_gpu_hours(fit: Fit, recipe: Recipe) -> float:
    """Return the hours of a training on one GPU that takes at most SHOWN_BATCH images at once."""
    batch = recipe.train.batch
    parts = replace(recipe, engine=replace(recipe.engine, accumulate=math.ceil(batch / SHOWN_BATCH)))
    return recipe.train.steps * fit.seconds(step_work(parts, batch)) / 3600


def read_points(path: Path) -> list[Point]:
    """Return the steps of a file, of this program or of training_speed.py, whose cases with a teacher are left out."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [_point(row, recipe) for row in rows if (recipe := _recipe(row)) is not None]


def _recipe(row: Mapping[str, Any]) -> Recipe | None:
    if "depth" in row:
        return Case(**{field.name: row[field.name] for field in fields(Case)}).recipe()
    recipe, teacher = PUBLISHED[row["case"]]
    return recipe if teacher is None else None


def _point(row: Mapping[str, Any], recipe: Recipe) -> Point:
    return Point(row["case"], step_work(recipe, recipe.train.batch), row["step_ms"] / 1000)


def report(points: Sequence[Point], held: Sequence[Point], terms: Sequence[str]) -> str:
    """Return the fit as Markdown: every step measured and fitted, costs, and the hours of the paper's recipes."""
    fit = fitted(points, terms)
    errors = left_out_errors(points, terms) or [None] * len(points)
    lines = ["| case | measured, ms | fitted, ms | error | error if left out |", "|---|---|---|---|---|"]
    lines += [_row(point, fit, _percent(error)) for point, error in zip(points, errors, strict=True)]
    lines += [_row(point, fit, "not in the fit") for point in held]
    lines += ["", "| term | unit | seconds a unit | units a second |", "|---|---|---|---|"]
    for term, cost in fit.costs.items():
        lines.append(f"| {term} | {UNITS[term]} | {cost:.4g} | {f'{1 / cost:.4g}' if cost else 'none'} |")
    lines += ["", "| recipe | hours on one GPU by this fit | by `mvm recipes show` |", "|---|---|---|"]
    for name in PREDICTED:
        recipe = load_recipe(name)
        assert isinstance(recipe, Recipe)
        lines.append(f"| `{name}` | {one_gpu_hours(fit, recipe):.3g} | {hours_on_h200(recipe):.2g} |")
    return "\n".join(lines)


def _row(point: Point, fit: Fit, last: str) -> str:
    ms = 1000 * fit.seconds(point.work)
    return f"| {point.name} | {1000 * point.seconds:.1f} | {ms:.1f} | {_percent(fit.error(point))} | {last} |"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:+z.1f} %"


def measured(case: Case, steps: int, compile: str) -> dict[str, Any]:
    """Return the figures of one case on this machine."""
    import torch

    from mvm.bench import bench_training, machine
    from mvm.training.runtime import Processes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.compiler.reset()
    found = bench_training(case.recipe(compile), Processes(device=device), steps=steps, progress=False)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {**asdict(case), "compile": compile, **machine(device), **found}


def measure(cases: Mapping[str, Case], path: Path, steps: int, compile: str, of: str) -> None:
    """Measure the cases that the file does not have; written after each: a run that is cut short keeps what it has."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    for name, case in cases.items():
        if any(row["case"] == name for row in rows):
            print(f"{name}: in {path} already")
            continue
        rows.append({"case": name, "commit": of, **measured(case, steps, compile)})
        _check_one_machine(rows, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"rows": rows}, indent=2) + "\n")
        print(json.dumps(rows[-1]), flush=True)


def _check_one_machine(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    machines = sorted({f"{row['device']}, torch {row['torch']}, compile {row['compile']}" for row in rows})
    if len(machines) > 1:
        raise ValueError(f"{path} would mix measurements of {' and '.join(machines)}; use another file")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("measure")
    asked.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join({**CASES, **SMOKE})}; all but the last")
    asked.add_argument("--json", type=Path, required=True)
    asked.add_argument("--steps", type=int, default=30)
    asked.add_argument("--compile", choices=("auto", "off"), default="auto")
    asked.add_argument("--commit", default=commit())
    asked = commands.add_parser("fit")
    asked.add_argument("files", nargs="+", type=Path)
    asked.add_argument("--hold", nargs="*", default=[], metavar="CASE", help="predicted by the fit, not part of it")
    asked.add_argument("--check", nargs="*", default=[], type=Path, metavar="FILE", help="files held out as a whole")
    asked.add_argument("--terms", nargs="+", choices=TERMS, default=TERMS)
    options = parser.parse_args(arguments)
    try:
        _measure(options) if options.command == "measure" else _fit(options)
    except ValueError as error:
        parser.error(str(error))


def _measure(options: argparse.Namespace) -> None:
    known = {**CASES, **SMOKE}
    if unknown := sorted({*options.cases} - {*known}):
        raise ValueError(f"no case is called {', '.join(unknown)}; choose from {', '.join(known)}")
    cases = {name: known[name] for name in options.cases or CASES}
    measure(cases, options.json, options.steps, options.compile, options.commit)


def _fit(options: argparse.Namespace) -> None:
    points = [point for path in options.files for point in read_points(path)]
    if unknown := sorted({*options.hold} - {point.name for point in points}):
        raise ValueError(f"--hold {' '.join(unknown)}: no such case was measured")
    held = [point for point in points if point.name in options.hold]
    checked = [point for path in options.check for point in read_points(path)]
    print(report([point for point in points if point not in held], held + checked, options.terms))


if __name__ == "__main__":
    main()
