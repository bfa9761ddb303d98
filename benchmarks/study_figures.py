"""Choices and tables of benchmarks/sde_ode_study.sh from the results of its sweeps; benchmarks/figures.py draws them.

    python benchmarks/study_figures.py tmin RESULTS           the t_min at which sa is best
    python benchmarks/study_figures.py best RESULTS...        the best cell, as options of mvm sweep
    python benchmarks/study_figures.py table RESULTS...       every cell as Markdown
    python benchmarks/study_figures.py differences RESULTS... SDE less ODE, adams less sa, other solvers less adams,
                                                              each less itself at 26

RESULTS: a sweep's folder, its results.json or results.csv; what blocks of images tell of a difference is not in CSV.
"""

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mvm.evaluation.cells import Result
from mvm.evaluation.sweep_report import (
    CellKey,
    Gap,
    cell_key,
    gaps_to,
    grouped,
    guidance_of,
    guidance_text,
    in_order,
    in_words,
    ode_of,
    reading,
    rho_name,
)
from mvm.settings import SampleConfig
from mvm.solver import DEFAULT_NFE

METRIC = "fid"
DRAWN = ("num", "seed", "labels", "classes", "repeats")  # that cells must share to be compared
TEXT = ("solver", "grid")  # columns of a CSV; the others are numbers


# ---- results of sweeps


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Return the cells of some sweeps that hold the metric."""
    return [cell for path in paths for cell in _read(_file(path))]


def _file(path: Path) -> Path:
    return next((path / name for name in ("results.json", "results.csv") if (path / name).is_file()), path)


def _read(path: Path) -> list[Result]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return [Result.read(told) for told in json.loads(text)["results"] if METRIC in told["metrics"]]
    return [_result(row) for row in csv.DictReader(text.splitlines()) if row.get(f"{METRIC} value")]


def check_alike(paths: Iterable[Path]) -> None:
    """Refuse sweeps of other weights, images or references than the first's: they differ by more than samplers."""
    told = {
        path: json.loads(path.read_text(encoding="utf-8"))["facts"]
        for path in map(_file, paths)
        if path.suffix == ".json"
    }
    facts = {
        path: [t["model"]["sha256"], *(t["draw"][name] for name in DRAWN), t["reference"]] for path, t in told.items()
    }
    for path, found in facts.items():
        if found != next(iter(facts.values())):
            raise ValueError(f"results: {path} is of another model, draw or reference than {next(iter(facts))}")


def _result(row: Mapping[str, str]) -> Result:
    told = {**row, "seconds": row["seconds"] or "nan"}  # of a table that did not note them
    columns = list(row)[: list(row).index("grid") + 1]
    flat = {name: told[name] if name in TEXT else float(told[name]) for name in columns}
    error = row[f"{METRIC} error"]
    metrics = {METRIC: {"value": float(row[f"{METRIC} value"]), "error": float(error or "nan")}}
    return Result.read({**flat, "nfe": int(row["nfe"]), "metrics": metrics})


def value(result: Result) -> float:
    """Return a cell's FID; inf where it failed, so that it is never the best."""
    found = reading(result, METRIC)
    return math.inf if found is None or found.failed else found.value


def best_t_min(results: Iterable[Result]) -> float:
    """Return the t_min of the smallest mean log FID over cells; each must have been tried in all of them."""
    by_t_min = grouped((r for r in results if r.settings.solver == "sa"), lambda r: r.settings.t_min)
    tried = {t_min: sorted(cell_key(r)[1:] for r in cells) for t_min, cells in by_t_min.items()}
    if len(set(map(tuple, tried.values()))) != 1:
        raise ValueError(
            f"results: {len(tried)} values of t_min, not all tried in the same cells; finish the sweep first"
        )
    return min(by_t_min, key=lambda t_min: sum(math.log(value(r)) for r in by_t_min[t_min]))


def best_options(results: Sequence[Result]) -> str:
    """Return the options of mvm sweep that make the cell with the lowest FID again."""
    cell = min(results, key=value)
    how = cell.settings
    options = f"--solvers {how.solver} --nfe {how.nfe} --rho {how.rho:g} --cfg {how.cfg:g}"
    options += f" --interval {how.low:g},{how.high:g}" if how.cfg != 1 else ""
    return options + (f" --t-min {how.t_min:g}" if how.t_min != SampleConfig.t_min else "")


def table(results: Iterable[Result]) -> str:
    """Return the cells as a Markdown table, passes beside NFE."""
    lines = ["| solver | process | guidance | NFE | passes | FID | seconds |", "|---|---|---|---|---|---|---|"]
    for r in in_order(results):
        way = [r.solver, rho_name(r.settings.rho), guidance_text(r.settings)]
        cost = [f"{r.settings.nfe}", f"{r.passes:g}"]
        seconds = "-" if math.isnan(r.seconds) else f"{r.seconds:.1f}"
        lines.append(f"| {' | '.join([*way, *cost, in_words(reading(r, METRIC)), seconds])} |")
    return "\n".join(lines)


Bases = Callable[[CellKey, Sequence[str]], list[CellKey]]  # what a cell is compared with, given the names sa goes by


def _beside_sa(cell: CellKey, sa: Sequence[str], times: int) -> list[CellKey]:
    return [cell._replace(solver=name, nfe=times * cell.nfe) for name in sa] if cell.solver == "adams" else []


COMPARED: dict[str, Bases] = {
    "SDE less ODE": lambda cell, _: ode_of(cell),
    "adams less sa at as many evaluations": lambda cell, sa: _beside_sa(cell, sa, 1),
    "adams less sa at twice as many": lambda cell, sa: _beside_sa(cell, sa, 2),
    "less adams at as many evaluations": lambda cell, _: (
        [] if cell.solver.split(",")[0] in ("adams", "sa") else [cell._replace(solver="adams")]
    ),
    f"less the same at {DEFAULT_NFE} evaluations": lambda cell, _: (
        [cell._replace(nfe=DEFAULT_NFE)] if cell.nfe != DEFAULT_NFE else []
    ),
}


def gaps_between(results: Sequence[Result], bases: Bases) -> dict[tuple[str, ...], dict[int, Gap]]:
    """Return (solver, process, guidance) -> NFE -> difference, for cells whose base is there and neither failed."""
    sa = sorted({r.solver for r in results if r.settings.solver == "sa"})
    guidances = {guidance_of(r): guidance_text(r.settings) for r in results}
    rows: dict[tuple[str, ...], dict[int, Gap]] = {}
    for (cell, base), found in gaps_to(results, METRIC, lambda place: bases(place, sa)).items():
        name = cell.solver if base.solver == cell.solver else f"{cell.solver} less {base.solver}"
        rows.setdefault((name, rho_name(cell.rho), guidances[cell.guidance]), {})[cell.nfe] = found
    return rows


def gap_text(found: Gap) -> str:
    """Return a difference with its 95 % interval, bold where that leaves out zero, † where it is not paired."""
    words = f"{found}" + ("" if found.paired else "†")
    return f"**{words}**" if found.significant else words


def differences(results: Sequence[Result]) -> dict[str, str]:
    """Return Markdown tables of what cells differ by, a column for each NFE of the cell, by title."""
    tables = {}
    for title, bases in COMPARED.items():
        rows = gaps_between(results, bases)
        nfes = sorted({nfe for row in rows.values() for nfe in row})
        lines = [f"| solver | process | guidance | {' | '.join(map(str, nfes))} |", "|---" * (3 + len(nfes)) + "|"]
        for names, row in rows.items():
            cells = [gap_text(row[nfe]) if nfe in row else "-" for nfe in nfes]
            lines.append(f"| {' | '.join([*names, *cells])} |")
        if rows:
            tables[title] = "\n".join(lines)
    return tables


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tmin", "best", "table", "differences"):
        commands.add_parser(name).add_argument("results", type=Path, nargs="+")
    return parser


def results_asked_for(arguments: argparse.Namespace) -> list[Result]:
    """Return the cells of the files that were named; sweeps that do not compare are refused."""
    if arguments.command == "differences":
        check_alike(arguments.results)
    found = read_results(arguments.results)
    if not found:
        raise ValueError(f"results: no cell of {', '.join(map(str, arguments.results))} holds {METRIC}")
    return found


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    try:
        results = results_asked_for(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    match arguments.command:
        case "tmin":
            print(f"{best_t_min(results):g}")
        case "best":
            print(best_options(results))
        case "table":
            print(table(results))
        case "differences":
            print("\n\n".join(f"{title}\n\n{rows}" for title, rows in differences(results).items()))


if __name__ == "__main__":
    main()
