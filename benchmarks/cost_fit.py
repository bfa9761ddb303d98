"""How a training step's time grows with width, depth, tokens and batch: measured on one GPU, and fitted.

    python benchmarks/cost_fit.py measure --json benchmarks/results/cost-fit.json     (one GPU)
    python benchmarks/cost_fit.py fit benchmarks/results/cost-fit.json --hold L \\
        --host batch-16 batch-64 wide-batch-16 tokens-64 --check benchmarks/results/training-speed.json

measure: all cases, or those named; what the file has already is not measured again.
fit: seconds = max(host's floor x blocks, sum of work x cost over the GPU's terms of step_work.py). No cost is
below what the machine allows, squared relative errors are least. The cases of --host give the floor, the others the
costs; those of --hold and --check are predicted, not fitted.
"""

import argparse
import gc
import json
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from step_work import GPU_TERMS, UNITS, Work, step_work
from training_speed import CASES as PUBLISHED
from training_speed import commit

from mvm.distributed.processes import EngineConfig
from mvm.files import write_text
from mvm.network import DiTConfig
from mvm.optim.optimizers import TrainConfig
from mvm.recipes import DataConfig, Recipe, load_recipe, require_field_recipe
from mvm.recipes.page import H200_FLOPS, SHOWN_BATCH, hours_on_h200

PREDICTED = ("imagenet32-dit-b", "imagenet32-dit-l")
HEAD = 64  # width of an attention head, as in S, B and L

H200_MEMORY = 4.8e12  # bytes a second, the maker's figure
# Units a second at most: FLOP at the measured matrix ceiling (751 to 802e12 beside the cases), bytes each moved once.
FASTEST = {"products": H200_FLOPS, "attention": H200_FLOPS, "elementwise": H200_MEMORY, "states": H200_MEMORY}


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
SHOWN = {"S/2": CASES["base"], "B/2": CASES["width-768"], "L/2": CASES["L"]}
SMOKE = {"smoke": Case(depth=1, width=64, side=8, batch=4)}


class Point(NamedTuple):
    """A measured step."""

    name: str
    work: Work
    seconds: float


class Fit(NamedTuple):
    """Seconds that a unit of each of the GPU's terms costs, those left out nothing; and that the host needs a block."""

    costs: Mapping[str, float]
    host: float = 0.0

    def gpu_seconds(self, work: Work) -> float:
        """Return the GPU's time for so much work."""
        return sum(cost * getattr(work, term) for term, cost in self.costs.items())

    def seconds(self, work: Work) -> float:
        """Return the time of a step with so much work."""
        return max(self.host * work.blocks, self.gpu_seconds(work))

    def is_host_bound(self, work: Work) -> bool:
        """Whether the GPU's work is hidden behind the host's."""
        return self.gpu_seconds(work) <= self.host * work.blocks

    def error(self, point: Point) -> float:
        """Return how far the fitted time lies above the measured, as a share of that."""
        return self.seconds(point.work) / point.seconds - 1


def fitted(points: Sequence[Point], host: Collection[str] = (), terms: Sequence[str] = GPU_TERMS) -> Fit:
    """Return the mean floor of the points named in `host`, and the others' bounded costs of least relative errors."""
    floors = [point.seconds / point.work.blocks for point in points if point.name in host]
    costs = _gpu_costs([point for point in points if point.name not in host], terms)
    return Fit(costs, host=sum(floors) / len(floors) if floors else 0.0)


def _gpu_costs(points: Sequence[Point], terms: Sequence[str]) -> dict[str, float]:
    """Return each term's cost: its bound, and what is not negative beside it."""
    if len(points) < len(terms):
        raise ValueError(
            f"{len(points)} measured steps do not determine {len(terms)} terms ({', '.join(terms)}); "
            "measure more cases, or name fewer with --terms"
        )
    least = np.array([1 / FASTEST[term] for term in terms])
    table = np.array([[getattr(point.work, term) / point.seconds for term in terms] for point in points])
    scale = np.linalg.norm(table, axis=0)
    beside = _non_negative(table / scale, 1 - table @ least) / scale
    return dict(zip(terms, (least + beside).tolist(), strict=True))


def _non_negative(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return what is not negative and nearest to table @ x = wanted.

    It is the plain least squares of those columns whose x is not zero, so all choices of columns are tried: few enough.
    """
    found = []
    for chosen in map(list, product((False, True), repeat=table.shape[1])):
        tried = np.zeros(table.shape[1])
        tried[chosen] = np.linalg.lstsq(table[:, chosen], wanted)[0]
        if tried.min() >= 0:
            found.append(tried)
    return min(found, key=lambda x: float(np.sum((table @ x - wanted) ** 2)))


def left_out_error(point: Point, points: Sequence[Point], host: Collection[str], terms: Sequence[str]) -> float | None:
    """Return the point's error by a fit of the others; None where too few of its kind, host's or GPU's, are left."""
    others = [other for other in points if other is not point]
    alike = sum((other.name in host) == (point.name in host) for other in others)
    if alike < (1 if point.name in host else len(terms)):
        return None
    return fitted(others, host, terms).error(point)


def most_host_bound(fit: Fit, case: Case) -> int:
    """Return the most images a GPU with which the case is host-bound; 0: not even with one."""
    recipe = case.recipe()
    return bisect_left(range(1, 2**16), True, key=lambda images: not fit.is_host_bound(step_work(recipe, images)))


def one_gpu_hours(fit: Fit, recipe: Recipe) -> float:
    """Return the hours of a training on one GPU that takes at most SHOWN_BATCH images at once."""
    batch = recipe.train.batch
    parts = replace(recipe, engine=replace(recipe.engine, accumulate=math.ceil(batch / SHOWN_BATCH)))
    return recipe.train.steps * fit.seconds(step_work(parts, batch)) / 3600


def read_points(path: Path) -> list[Point]:
    """Return the steps of a file, of this program or of training_speed.py, whose cases with a teacher are left out."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    known = [(row, recipe) for row in rows if (recipe := _recipe(row)) is not None]
    return [Point(row["case"], step_work(made, made.train.batch), row["step_ms"] / 1000) for row, made in known]


def _recipe(row: Mapping[str, Any]) -> Recipe | None:
    if "depth" in row:
        return Case(**{field.name: row[field.name] for field in fields(Case)}).recipe()
    recipe, teacher = PUBLISHED[row["case"]]
    return recipe if teacher is None else None


def report(points: Sequence[Point], held: Sequence[Point], host: Collection[str], terms: Sequence[str]) -> str:
    """Return the fit as Markdown: every step measured and fitted, costs, the floor and where it ends, and hours."""
    fit = fitted(points, host, terms)
    lines = ["| case | measured, ms | fitted, ms | error | error if left out | bound by |", "|" + "---|" * 6]
    lines += [_row(point, fit, _percent(left_out_error(point, points, host, terms))) for point in points]
    lines += [_row(point, fit, "not in the fit") for point in held]
    lines += ["", f"| term | unit | seconds a unit | units a second | {' | '.join(SHOWN)} |", "|" + "---|" * 7]
    lines += [_cost_row(term, fit) for term in fit.costs]
    if host:
        lines += ["", f"Host: {1000 * fit.host:.3f} ms a block, the mean of {', '.join(host)}."]
        lines += ["", "| network, 256 tokens | host's floor, ms | host-bound up to images a GPU |", "|---|---|---|"]
        for name, case in SHOWN.items():
            lines.append(f"| {name} | {1000 * fit.host * case.depth:.1f} | {most_host_bound(fit, case)} |")
    lines += ["", "| recipe | hours on one GPU by this fit | by `mvm recipes show` |", "|---|---|---|"]
    for name in PREDICTED:
        recipe = require_field_recipe(load_recipe(name), name)
        lines.append(f"| `{name}` | {one_gpu_hours(fit, recipe):.3g} | {hours_on_h200(recipe):.2g} |")
    return "\n".join(lines)


def _row(point: Point, fit: Fit, left_out: str) -> str:
    times = f"{1000 * point.seconds:.1f} | {1000 * fit.seconds(point.work):.1f}"
    bound_by = "host" if fit.is_host_bound(point.work) else "GPU"
    return f"| {point.name} | {times} | {_percent(fit.error(point))} | {left_out} | {bound_by} |"


def _cost_row(term: str, fit: Fit) -> str:
    cost, works = fit.costs[term], [step_work(case.recipe(), case.batch) for case in SHOWN.values()]
    shares = " | ".join(f"{cost * getattr(work, term) / fit.gpu_seconds(work):.0%}" for work in works)
    bound = ", its bound" if cost == 1 / FASTEST[term] else ""
    return f"| {term} | {UNITS[term]} | {cost:.3g} | {1 / cost:.3g}{bound} | {shares} |"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:+z.1f} %"


def measured(case: Case, steps: int, compile: str) -> dict[str, Any]:
    """Return the figures of one case on this machine."""
    import torch

    from mvm.bench import bench_training, machine
    from mvm.distributed.processes import Processes

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
    asked.add_argument("--host", nargs="*", default=[], metavar="CASE", help="as long whatever the GPU has to do")
    asked.add_argument("--terms", nargs="+", choices=GPU_TERMS, default=GPU_TERMS)
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
    for option, names in (("--hold", options.hold), ("--host", options.host)):
        if unknown := sorted({*names} - {point.name for point in points}):
            raise ValueError(f"{option} {' '.join(unknown)}: no such case was measured")
    if both := sorted({*options.hold} & {*options.host}):
        raise ValueError(f"--host {' '.join(both)}: held out too; name it for --hold or for --host alone")
    held = [point for point in points if point.name in options.hold]
    checked = [point for path in options.check for point in read_points(path)]
    print(report([point for point in points if point not in held], held + checked, options.host, options.terms))


if __name__ == "__main__":
    main()
