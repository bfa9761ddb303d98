"""Judges the runs of benchmarks/equal_terms.sh, and makes tables of what it found; benchmarks/figures.py draws them.

    python benchmarks/equal_terms.py judge WORK METHOD SEED --ref REFERENCE --inception WEIGHTS  WORK/METHOD-SEED.json
    python benchmarks/equal_terms.py table WORK
    python benchmarks/equal_terms.py differences WORK [--less METHOD]      by the common sampler, pairs of equal seeds
    python benchmarks/equal_terms.py store WORK --out X.json               all runs in one file, a line each
    python benchmarks/equal_terms.py continue X.json --out WORK            a folder where these are finished, to go on

WORK: the folder of the runs; to all but judge also a file that store has written.
The common sampler is adams at rho 0. A method's best may also be adams at rho 1, or Heun's method in the path's own
time (an ODE solver: rho 0). All are judged on seed 0; the best there, at each NFE, is what other seeds are judged by
besides the common one. Nothing guides. Brackets reach from the smallest to the largest value over the seeds. Figures
are FID, of grey images the Frechet distance of pixels.
"""

import argparse
import fcntl
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from equal_terms_runs import (  # beside this file
    COMMON,
    METHODS,
    NFES,
    Way,
    best_ways,
    differences,
    go_on,
    read_runs,
    store,
    table,
)

from mvm.checkpoint import METRICS
from mvm.distributed.processes import Processes, processes
from mvm.evaluation.cells import Result
from mvm.evaluation.evaluate import ComparedSet, Judge, open_side, software
from mvm.evaluation.sweep import Sweep
from mvm.files import write_text
from mvm.generate import Draw, Sampler
from mvm.metrics.extractors import Sources
from mvm.metrics.measures import usual_metric
from mvm.metrics.moments import provenance_of
from mvm.model import choose_device, load
from mvm.recipes import SampleConfig, options
from mvm.training.rundir import FREE

OTHERS = (("adams", 1.0), ("heun", 0.0))
FIRST = 0  # the seed on which a method's best sampler is chosen
OF_A_METHOD = ("seed", "path.schedule", "objective.kind", "objective.weight")  # in which runs may differ


class Spread(NamedTuple):
    """Of a logged quantity in the second half of a run: its mean, the std around a straight line, and std / mean."""

    mean: float
    std: float
    relative: float
    largest: float


def spread(values: Sequence[float]) -> Spread:
    """Return how a quantity scatters around its trend."""
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y))
    trend = np.polyval(np.polyfit(x, y, 1), x) if len(y) > 2 else np.full_like(y, y.mean())
    std = float((y - trend).std())
    return Spread(float(y.mean()), std, std / abs(float(y.mean())), float(y.max()))


def training_facts(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return steps, speed, and the spread of loss (each line a mean since the last) and gradient norm (of one step)."""
    steps = [line for line in lines if "loss" in line]
    late = [line for line in steps if line["step"] > steps[-1]["step"] / 2]
    return {
        "steps": steps[-1]["step"],
        "loss_is_mean_of": steps[-1]["step"] - steps[-2]["step"] if len(steps) > 1 else 1,
        "images_per_second": float(np.median([line["images_per_second"] for line in steps])),
        "loss": spread([line["loss"] for line in late])._asdict(),
        "grad_norm": spread([line["grad_norm"] for line in late])._asdict(),
    }


def ways_to_judge(work: Path, method: str, seed: int) -> list[tuple[int, Way]]:
    """Return what is sampled: the common sampler, and all others on seed 0, those chosen there on other seeds."""
    common = [(nfe, COMMON) for nfe in NFES]
    if seed == FIRST:
        return [*common, *((nfe, way) for way in OTHERS for nfe in NFES)]
    path = work / f"{method}-{FIRST}.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; run {method}:{FIRST} first, on which the best sampler is chosen")
    chosen = best_ways(json.loads(path.read_text(encoding="utf-8"))["cells"])
    return [*common, *((nfe, way) for nfe, way in chosen.items() if way != COMMON)]


def _cell(result: Result, metric: str) -> dict[str, Any]:
    flat = result.as_dict()
    told = {name: flat[name] for name in ("solver", "nfe", "rho", "passes", "seconds")}
    return {**told, "value": result.metrics[metric]["value"]}


def terms_of(sweep: Sweep) -> dict[str, Any]:
    """Return all that runs must have in common to be compared: options of training, reference, images, arithmetic."""
    free = tuple(name for name in FREE if name != "engine.") + OF_A_METHOD
    trained = {name: value for name, value in options(sweep.model.recipe).items() if not name.startswith(free)}
    # of images, whatever the scale of their pixels: twice the pixels are half the noise
    trained["path.law.mean"] = round(trained["path.law.mean"] + math.log(trained.pop("codec.scale")), 9)
    judged = {name: value for name, value in sweep.shared().items() if name in ("draw", "sampling", "judge")}
    data = sweep.model.origin.get("data_stamp", "")
    return json.loads(json.dumps({**trained, **judged, "data": data, "reference": reference_told(sweep.reference)}))


def reference_told(side: ComparedSet) -> dict[str, Any]:
    """Return of what, and by which network, a reference is made: made again elsewhere, its last digits are others."""
    if side.file is None:
        return side.facts()
    made = provenance_of(side.file)
    return {name: made.get(name) for name in ("images", "network")}


@contextmanager
def in_turn(work: Path) -> Iterator[None]:
    """Wait until no other run of this folder is judged: two feature networks beside trainings may fill a GPU."""
    with (work / ".judging").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sweep_of(arguments: argparse.Namespace, place: Processes) -> Sweep:
    """Return the sweep of a trained run."""
    run = arguments.work / f"{arguments.method}-{arguments.seed}"
    model = load(str(run)).to(place.device)
    sampler = Sampler(model, arguments.precision, compile=arguments.compile)
    judging = Judge(Sources(inception=arguments.inception), place, arguments.batch)
    draw = Draw(arguments.num, 0, "balanced", batch=arguments.batch)
    folder, metrics = run.with_name(f"{run.name}-sweep"), (usual_metric(model.recipe.data.shape[0]),)
    return Sweep(sampler, draw, judging, open_side(arguments.ref), metrics, folder)


def judge(arguments: argparse.Namespace) -> None:
    """Sample and judge a trained run, and write all that is told of it."""
    work, name = arguments.work, f"{arguments.method}-{arguments.seed}"
    ways = ways_to_judge(work, arguments.method, arguments.seed)
    lines = [json.loads(line) for line in (work / name / METRICS).read_text(encoding="utf-8").splitlines()]
    with in_turn(work), processes(choose_device("auto")) as place:
        sweep = sweep_of(arguments, place)
        results = sweep.run([SampleConfig(solver, nfe, rho) for nfe, (solver, rho) in ways])
        made_by = software(place.device)
    (metric,) = sweep.metrics
    told = {"method": arguments.method, "seed": arguments.seed, "images": arguments.num, "seconds": arguments.trained}
    told |= {**training_facts(lines), "metric": metric, "cells": [_cell(result, metric) for result in results]}
    told |= {"terms": terms_of(sweep), "software": made_by}
    write_text(work / f"{name}.json", json.dumps(told, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    judging, comparing, storing, going_on, tabling = (
        commands.add_parser(name) for name in ("judge", "differences", "store", "continue", "table")
    )
    for command in (judging, comparing, storing, going_on, tabling):
        command.add_argument("work", type=Path)
    comparing.add_argument("--less", choices=METHODS, default="mvm-u")
    for command in (storing, going_on):
        command.add_argument("--out", type=Path, required=True)
    judging.add_argument("method", choices=METHODS)
    judging.add_argument("seed", type=int)
    judging.add_argument("--ref", required=True)
    judging.add_argument("--inception", default="", help="weights of FID's network; grey images need none")
    judging.add_argument("--num", type=int, default=10_000)
    judging.add_argument("--batch", type=int, default=1000)
    judging.add_argument("--precision", default="fp32")
    judging.add_argument("--compile", action="store_true")
    judging.add_argument("--trained", type=float, default=float("nan"), help="seconds that training took, to be noted")
    arguments = parser.parse_args()
    if arguments.command == "judge":
        judge(arguments)
    elif arguments.command == "table":
        print(table(read_runs(arguments.work)))
    elif arguments.command == "differences":
        runs = read_runs(arguments.work)
        if arguments.less not in runs:
            parser.error(f"--less {arguments.less}: no run of it is finished in {arguments.work}")
        print(differences(runs, arguments.less))
    elif arguments.command == "store":
        store(read_runs(arguments.work), arguments.out)
    else:
        go_on(read_runs(arguments.work), arguments.out)


if __name__ == "__main__":
    main()
