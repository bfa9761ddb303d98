"""Figures of results, drawn from what is stored under benchmarks/results: half a minute, nothing is sampled.

    python benchmarks/figures.py --out docs/assets                    all of them
    python benchmarks/figures.py --out docs/assets --only NAME...     some
    python benchmarks/figures.py --out WORK --only cifar10-fid-nfe --of WORK/grid-adams WORK/grid-sa
                                                                      one, of other results: folders or files of sweeps

NAME is the name of the file without .png. Bars are 95 % intervals of a cell (20 blocks of images), in figures of equal
terms the smallest and the largest of several trainings.
"""

import argparse
import importlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equal_terms_runs import (  # beside this file
    COMMON,
    METHODS,
    NFES,
    Told,
    chosen_ways,
    difference,
    over_seeds,
    read_runs,
)
from method_figures import BLUE, GREEN, GREY, ORANGE, PALE, PINK, STYLE, WIDTH, new_figure, save
from near_reference import SHORT, named
from study_figures import METRIC, read_results

from mvm.evaluation.cells import Result
from mvm.evaluation.sweep_report import grouped, guidance_name, guidance_of, reading, rho_name, scale_of
from mvm.metrics.distances import student_95

RESULTS = Path(__file__).parent / "results"
BLOCKS = 20  # of images, in every sweep here
NFE, FID = "evaluations (NFE)", "FID (lower is better)"
OTHERS = (PINK, GREEN, "#E69F00", "#56B4E9", "#000000", "#8B5A2B", "#7B61A8", "#9AA000")
MARKERS = "sD^vPX*h"


@dataclass(frozen=True)
class Line:
    """A curve: errors reach below and above a point; ours is thick, others may be dashed."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[tuple[float, float]] = ()
    colour: str = BLUE
    marker: str = "o"
    dash: str = "-"
    ours: bool = False


@dataclass(frozen=True)
class Plot:
    """Curves on axes; top: what is above lies outside and is named."""

    title: str
    lines: Sequence[Line]
    x: str = NFE
    y: str = FID
    log_x: bool = True
    log_y: bool = True
    top: float = math.inf
    level: tuple[str, float] | None = None
    ticks: Sequence[tuple[float, str]] = ()


def _reach(plot: Plot) -> list[float]:
    """Return what the axis of y must hold: points and the ends of their bars that are not outside."""
    values = [plot.level[1]] if plot.level else []
    for line in plot.lines:
        for y, (below, above) in zip(line.y, line.errors or [(0.0, 0.0)] * len(line.y), strict=True):
            values += [y - below, min(y + above, plot.top)] if y <= plot.top else []
    return values


def draw(panel: Any, plot: Plot, beside: Sequence[Plot]) -> None:
    """Draw one plot, without a legend; beside: the plots that have its scale of y, itself among them."""
    for line in plot.lines:
        look = {"color": line.colour, "marker": line.marker, "linestyle": line.dash, "zorder": 4 if line.ours else 3}
        size = {"linewidth": 2.4 if line.ours else 1.2, "markersize": 5 if line.ours else 4, "markeredgewidth": 1.0}
        panel.plot(line.x, line.y, label=line.label, markerfacecolor="white" if line.dash == "--" else line.colour,
                   **look, **size)  # fmt: skip
        if line.errors:
            bars = {"ecolor": line.colour, "elinewidth": 0.9, "capsize": 2, "zorder": 2}
            panel.errorbar(line.x, line.y, list(zip(*line.errors, strict=True)), fmt="none", **bars)
    if plot.level:
        panel.axhline(plot.level[1], color=GREY, linewidth=0.9, linestyle=":", label=plot.level[0])
    across = scale_of([x for line in plot.lines for x in line.x], 0.0 if plot.log_x else math.inf, plot.x == NFE)
    up = scale_of([y for other in beside for y in _reach(other)], 0.0 if plot.log_y else math.inf)
    panel.set(xscale="log" if across.log else "linear", yscale="log" if up.log else "linear")
    marks = plot.ticks or [(tick, f"{tick:g}") for tick in across.ticks]
    for axis, ticks in ((panel.xaxis, marks), (panel.yaxis, _round(up))):
        if ticks:
            axis.set_ticks(*zip(*ticks, strict=True), minor=False)
            axis.minorticks_off()
    ends = (plot.ticks[0][0] - 0.4, plot.ticks[-1][0] + 0.4) if plot.ticks else across.range
    panel.set(xlim=ends, ylim=up.range, xlabel=plot.x, ylabel=plot.y)
    panel.set_title(plot.title, loc="left")
    panel.grid(axis="y", color=PALE, linewidth=0.6)
    panel.set_axisbelow(True)
    outside = {line.label: [f"{y:.1f}" for y in line.y if y > plot.top] for line in plot.lines}
    if notes := [f"{label}: {', '.join(values)}" for label, values in outside.items() if values]:
        text = "\n".join(["above the axis", *notes])
        panel.text(1, 1, text, transform=panel.transAxes, ha="right", va="top", fontsize=7, zorder=6,
                   bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip


def _round(up: Any) -> list[tuple[float, str]]:
    """Return ticks of a logarithmic axis of less than two decades at round values, six at most."""
    if not up.log:
        return []
    low, high = up.range
    for steps in (
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        (1, 1.2, 1.4, 1.7, 2, 2.5, 3, 3.5, 5, 7),
        (5, 6, 7, 8, 9, 10, 12, 15),
    ):
        ticks = [s * 10.0**e for e in range(-4, 4) for s in steps if low <= s * 10.0**e <= high]
        if len(ticks) >= 4:
            return [(tick, f"{tick:g}") for tick in ticks]
    every = next(s for s in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005) if (high - low) / s >= 4)
    return [(i * every, f"{i * every:g}") for i in range(math.ceil(low / every), math.floor(high / every) + 1)]


def write(plots: Sequence[Plot], out: Path, columns: int = 0, height: float = 2.7, share: bool = False) -> None:
    """Write plots side by side, one legend below all of them; share: they have one scale of y."""
    columns = columns or len(plots)
    rows = -(-len(plots) // columns)
    figure, handles = new_figure(WIDTH, height * rows), dict[str, Any]()
    for i, plot in enumerate(plots):
        panel = figure.add_subplot(rows, columns, i + 1)
        draw(panel, plot, plots if share else [plot])
        if share and i:
            panel.set_ylabel("")
        handles = {name: handle for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)} | handles
    fit = int(13 * WIDTH) // (max(map(len, handles)) + 7)  # letters in a line; a curve's mark takes seven
    few = -(-len(handles) // -(-len(handles) // max(1, fit)))  # as many a line
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", frameon=False, ncols=few)
    save(figure, out)


# ---- sweeps


def fid_line(label: str, cells: Iterable[Result], of: Callable[[Result], float], **look: Any) -> Line:
    """Return FID of cells, in the order of what is below them, with 95 % intervals where errors are stored."""
    found = [(of(cell), reading(cell, METRIC)) for cell in sorted(cells, key=of)]
    reach = [0.0 if math.isnan(r.error) else student_95(BLOCKS) * r.error for _, r in found]
    errors = [(r, r) for r in reach] if any(reach) else ()
    return Line(label, [x for x, _ in found], [r.value for _, r in found], errors, **look)


def evaluations(cell: Result) -> float:
    return cell.evaluations


def by_solver(
    cells: Sequence[Result], title: str, of: Callable[[Result], float] = evaluations, x: str = NFE, names: Any = None
) -> Plot:
    """Return FID against a cost, a curve for each solver; a solver looks alike in plots of the same names."""
    names = names or sorted({cell.solver for cell in cells})
    return Plot(title, [
        fid_line(name, way, of, **solver_look(name, names)) for name in names if (way := _of(cells, name))
    ], x)  # fmt: skip


def _of(cells: Iterable[Result], solver: str) -> list[Result]:
    return [cell for cell in cells if cell.solver == solver]


def solver_look(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return how a solver's curve is drawn: ours thick and filled, others open and dashed."""
    if name == "adams":
        return {"ours": True}
    if name == "adams-power":
        return {"colour": ORANGE, "marker": "o"}
    i = [other for other in names if not other.startswith("adams")].index(name)
    return {"colour": OTHERS[i % 8], "marker": MARKERS[i % 8], "dash": "--"}


def solvers_fid_nfe(files: Sequence[Path], out: Path) -> None:
    sweeps = [read_results([path]) for path in files]
    names = sorted({cell.solver for cells in sweeps for cell in cells})
    titles = ("shipped CIFAR-10 model", "second CIFAR-10 model", "shipped model, guided")
    write([by_solver(c, title, names=names) for c, title in zip(sweeps, titles, strict=True)], out, height=3.0)


def solvers_fid_seconds(files: Sequence[Path], out: Path) -> None:
    title = "shipped CIFAR-10 model, 10,000 images"
    write([by_solver(read_results(files), title, lambda r: r.seconds, "seconds of sampling")], out, height=3.2)


def solvers_fid_sde(files: Sequence[Path], out: Path) -> None:
    """Euler-Maruyama, at 44 to 243, would press all others together: the table has it."""
    cells = [cell for cell in read_results(files) if cell.settings.rho == 1 and cell.solver != "euler-maruyama"]
    write([by_solver(cells, "shipped CIFAR-10 model, SDE (rho 1)")], out, height=3.6)


def as_named_now(cells: Iterable[Result]) -> list[Result]:
    """Return cells of the study of SDE and ODE, whose `adams` is the solver that is called adams-power."""
    return [replace(cell, settings=replace(cell.settings, solver="adams-power")) if cell.solver == "adams" else cell
            for cell in cells]  # fmt: skip


def cifar10_fid_nfe(files: Sequence[Path], out: Path) -> None:
    cells = as_named_now(read_results(files))
    looks = {0.0: (BLUE, "o"), 0.75: (GREEN, "s"), 1.0: (ORANGE, "^")}
    plots = []
    for _, part in sorted(grouped(cells, guidance_of).items()):
        ways = sorted(grouped(part, lambda r: (r.solver, r.settings.rho)).items())
        lines = [
            fid_line(f"{name.split(',')[0]}, {rho_name(rho)}", way, evaluations, colour=looks[rho][0],
                     marker=looks[rho][1], dash="-" if name == "adams-power" else "--")
            for (name, rho), way in ways
        ]  # fmt: skip
        plots.append(Plot(guidance_name(part[0]), lines, log_y=False, top=14.6))
    write(plots, out, height=3.2, share=True)


def cifar10_guidance(files: Sequence[Path], out: Path) -> None:
    cells = as_named_now(read_results(files))
    plain = [cell for cell in cells if cell.settings.cfg == 1]
    parts = sorted(
        grouped((c for c in cells if c.settings.cfg != 1), lambda r: (r.settings.low, r.settings.high)).items()
    )
    several = [(ends, [*plain, *part]) for ends, part in parts if len(part) > 1]
    lines = [
        fid_line(f"on [{a:g}, {b:g}]", part, lambda r: r.settings.cfg, colour=colour, marker=marker)
        for ((a, b), part), colour, marker in zip(several, (GREY, ORANGE, BLUE), "s^o", strict=True)
    ]
    single = [cell for _, part in parts if len(part) == 1 for cell in part]
    if single:
        points = fid_line(f"{len(single)} other intervals", single, lambda r: r.settings.cfg, colour=GREEN, marker="D")
        lines.append(replace(points, dash="", errors=()))
    title = f"shipped model, {cells[0].solver}, {rho_name(0.0)}, NFE {cells[0].settings.nfe}"
    write([Plot(title, lines, "guidance scale", log_x=False, log_y=False)], out, height=3.0)


# ---- RMSE to a long run


def solvers_rmse(files: Sequence[Path], out: Path) -> None:
    plots = []
    for told in (json.loads(path.read_text(encoding="utf-8")) for path in files):
        lines = []
        for name in SHORT:
            cells = sorted((c["nfe"], c["rmse"]) for c in told["cells"] if c["solver"] == name)
            lines.append(Line(name, *zip(*cells, strict=True), **solver_look(name, SHORT)))
        floor = ("floor", told["facts"]["floor"])
        plots.append(Plot(named(told["facts"]), lines, y="RMSE (lower is better)", level=floor))
    write(plots, out, columns=2, height=2.8)


# ---- equal terms

NAMES = {"mvm-u": "MVM, u", "flow": "flow matching", "mvm-u-as-flow": "MVM, u, flow's weight", "vp-v": "VP, v"}
LOOKS = {
    "mvm-u": (BLUE, "o"), "flow": (ORANGE, "s"), "mvm-u-as-flow": (GREEN, "^"), "vp-v": (PINK, "D"),
    "mvm-x0": ("#E69F00", "v"), "vp-eps": ("#56B4E9", "P"), "mvm-v": ("#000000", "X"),
}  # fmt: skip


def training_lines(runs: dict[str, list[Told]], best: bool = False) -> list[Line]:
    """Return the mean over trainings against NFE by method, by the common sampler or the best of each."""
    lines = []
    for method, told in runs.items():
        ways = chosen_ways(told) if best else dict.fromkeys(NFES, COMMON)
        found = [over_seeds(told, nfe, ways[nfe]) for nfe in NFES]
        errors = [(r.mean - min(r.values), max(r.values) - r.mean) for r in found] if len(told) > 1 else ()
        colour, marker = LOOKS[method]
        lines.append(Line(NAMES.get(method, METHODS[method]), NFES, [r.mean for r in found], errors, colour, marker))
    return lines


SIDES = {"adams-power, ODE, for all": False, "the best sampler of each": True}


def equal_terms_digits(files: Sequence[Path], out: Path) -> None:
    runs = read_runs(*files)
    plots = [
        Plot(title, training_lines(runs, best), y="Frechet distance of pixels (lower is better)", top=2.0)
        for title, best in SIDES.items()
    ]
    write(plots, out, height=3.2, share=True)


def equal_terms_cifar10(files: Sequence[Path], out: Path) -> None:
    """The four methods near each other: against NFE, and less flow matching in the three settings that were run."""
    names = ("2,000 steps", "2,000 steps,\nlearning rate x4", "6,000 steps")
    settings = [read_runs(path) for path in files]
    lines = []
    for method in [name for name in NAMES if name != "flow"]:
        there = [(i, runs[method], runs["flow"]) for i, runs in enumerate(settings) if method in runs]
        gaps = [over_seeds(ours, 26, COMMON).mean - over_seeds(flow, 26, COMMON).mean for _, ours, flow in there]
        known = [difference(ours, flow, 26) for _, ours, flow in there]  # None of one training
        errors = [(g - k.low, k.high - g) if k else (math.nan, math.nan) for g, k in zip(gaps, known, strict=True)]
        shift = 0.12 * (list(NAMES).index(method) - 1.5)
        colour, marker = LOOKS[method]
        lines.append(Line(NAMES[method], [i + shift for i, _, _ in there], gaps, errors, colour, marker, ""))
    near = {method: told for method, told in settings[0].items() if method in NAMES}
    gap = Plot("26 evaluations", lines, "", "FID above flow matching", log_x=False, log_y=False,
               level=("_", 0.0), ticks=list(enumerate(names)))  # fmt: skip
    write([Plot("2,000 steps, three trainings each", training_lines(near), log_y=False), gap], out, height=3.0)


# ---- speed


def results_speed(files: Sequence[Path], out: Path) -> None:
    found = {told["key"]: told["value"] for told in json.loads(files[0].read_text(encoding="utf-8"))["figures"]}
    rows = (("S/2", "s", "s"), ("B/2", "b", "b"), ("XL/2, 16 heads", "xl", "xl.16-heads"))
    figure = new_figure(WIDTH, 1.9)
    panel = figure.subplots()
    for i, (_, theirs, ours) in enumerate(rows):
        base = found[f"train.sit.{theirs}"]
        bars = (("SiT's code, compiled", base, GREY), ("mvm", found[f"train.{ours}"], BLUE))
        for side, (label, value, colour) in enumerate(bars):
            place = i + 0.36 * side - 0.18
            panel.barh(place, value / base, 0.32, color=colour)
            panel.text(value / base + 0.015, place, f"{value:,} images/s", va="center", fontsize=7.5)
            panel.text(0.015, place, label, va="center", fontsize=7.5, color="white")
    panel.set(xlim=(0, 1.5), xlabel="training speed, multiples of SiT's published code (higher is better)")
    panel.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    save(figure, out)


def _in(folder: str, *names: str) -> tuple[Path, ...]:
    return tuple(RESULTS / folder / name for name in names)


FIGURES: dict[str, tuple[Callable[[Sequence[Path], Path], None], tuple[Path, ...]]] = {
    "solvers-fid-nfe": (
        solvers_fid_nfe, _in("solvers", "fid-cifar10.json", "fid-second.json", "fid-cifar10-guided.json")
    ),
    "solvers-fid-seconds": (solvers_fid_seconds, _in("solvers", "fid-cifar10.json")),
    "solvers-fid-sde": (solvers_fid_sde, _in("solvers", "fid-cifar10-sde.json")),
    "solvers-rmse": (
        solvers_rmse, _in("solvers", *(f"near-{n}.json" for n in ("cifar10", "cifar10-guided", "second", "latent")))
    ),
    "cifar10-fid-nfe": (cifar10_fid_nfe, _in("sde-ode", "adams.csv", "grid-adams.json", "grid-sa.json")),
    "cifar10-guidance": (cifar10_guidance, _in("sde-ode", "guidance.json", "guidance-more.json")),
    "digits-equal-terms": (equal_terms_digits, _in("equal-terms", "digits.json")),
    "digits-weights": (equal_terms_digits, _in("equal-terms", "digits-weights.json")),
    "cifar10-equal-terms": (
        equal_terms_cifar10, _in("equal-terms", "cifar10.json", "cifar10-4e-3.json", "cifar10-6000.json")
    ),
    "results-speed": (results_speed, _in("", "headline.json")),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="NAME")
    parser.add_argument("--of", nargs="+", type=Path, help="other results for the one figure that --only names")
    arguments = parser.parse_args()
    if arguments.of and len(arguments.only) != 1:
        parser.error("--of draws one figure: name it by --only")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with importlib.import_module("matplotlib").rc_context(STYLE):
        for name in arguments.only:
            drawn, files = FIGURES[name]
            drawn(arguments.of or files, arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()
