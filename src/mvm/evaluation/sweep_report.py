"""The report of a sweep: findings in words, curves, one table and grids at matched seeds."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from mvm.evaluation import report as html
from mvm.evaluation.cells import Result
from mvm.evaluation.report import COLOURS, DASHES, MARKERS, Curve, Html, Page, PlotAxes, Style, command
from mvm.files import atomic, write_text
from mvm.metrics.distances import NORMAL_95, student_95
from mvm.metrics.measures import MEASURES, Key, Measure
from mvm.settings import NEEDS, OPTIONS, SampleConfig

ABSENT = "-"
GRID_WIDTH = 480  # CSS pixels
REAL = "cells/real.png"  # images of the reference, where it has any
MOST_CURVES = 8  # in one panel; more are hard to distinguish
WIDTH, HEIGHT = 4.6, 3.0  # inches of a plot, without its legend: two fit a page, one a phone

# Findings: what the cells say, in words


def metric_named(name: str) -> Measure:
    """Return a metric; one that is unknown goes by its own name, with no direction."""
    return MEASURES.get(name) or Measure(name, Key("", ""), lower=None)


def metrics_of(results: Iterable[Result]) -> list[str]:
    """Return the metrics present, known ones first."""
    present = {name for result in results for name in result.metrics}
    return [name for name in MEASURES if name in present] + sorted(present - MEASURES.keys())


class Reading(NamedTuple):
    """A measured value, NaN where it failed, its standard error, NaN where none is stated, and that error's parts."""

    value: float
    error: float
    parts: tuple[float, ...] = ()

    @property
    def failed(self) -> bool:
        return not math.isfinite(self.value)


def reading(result: Result, metric: str) -> Reading | None:
    """Return a cell's reading of a metric; None where it was not measured there."""
    if (figure := result.metrics.get(metric)) is None:
        return None
    value, error = (math.nan if figure.get(key) is None else float(figure[key]) for key in ("value", "error"))
    parts = tuple(figure.get("parts") or ())
    return Reading(value, error if math.isfinite(error) else math.nan, parts if all(map(math.isfinite, parts)) else ())


def measured(results: Iterable[Result], metric: str) -> list[tuple[Result, Reading]]:
    """Return the cells in which a metric was measured and did not fail, in order, with their readings."""
    pairs = ((result, reading(result, metric)) for result in in_order(results))
    return [(result, value) for result, value in pairs if value and not value.failed]


class Gap(NamedTuple):
    """The difference of two cells, and its 95 % interval; of cells without errors a point.

    paired: what both owe to common seeds and labels has cancelled.
    """

    value: float
    low: float
    high: float
    paired: bool = False

    def __str__(self) -> str:
        """Return "+0.52 (+0.31 to +0.73)": two digits of the interval's half-width."""
        if self.high == self.low:
            return f"{self.value:+.3g}"
        decimals = _decimals((self.high - self.low) / 2, digits=2)
        return "{:+z.{n}f} ({:+z.{n}f} to {:+z.{n}f})".format(*self[:3], n=decimals)

    @property
    def significant(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def gap(a: Reading, b: Reading) -> Gap:
    """Return b - a.

    Cells have their seeds and labels in common: where both have the parts of their errors, what they share cancels.
    Otherwise errors are added in quadrature; one that is not stated counts as 0.
    """
    paired = len(a.parts) == len(b.parts) > 1
    if paired:
        reach = student_95(len(a.parts)) * math.dist(a.parts, b.parts)
    else:
        reach = NORMAL_95 * math.hypot(*(r.error for r in (a, b) if not math.isnan(r.error)))
    value = b.value - a.value
    return Gap(value, value - reach, value + reach, paired)


def number(value: float) -> str:
    """Return a number with four significant digits; "failed" where it is none."""
    if not math.isfinite(value):
        return "failed"
    return f"{value:.3e}" if 0 < abs(value) < 1e-4 else f"{value:.{_decimals(value, digits=4)}f}"


def _decimals(value: float, digits: int) -> int:
    return digits - 1 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))


def in_words(measurement: Reading) -> str:
    """Return "2.314 ± 0.042": two digits of the error, and no more than four of the value."""
    value, error, _ = measurement
    if measurement.failed or math.isnan(error):
        return number(value)
    if max(abs(value), error) < 1e-4:
        return f"{value:.1e} ± {error:.1e}"
    decimals = min(_decimals(error, digits=2), _decimals(max(abs(value), error), digits=4))
    short = f"{error:.{decimals}f}"
    return f"{value:z.{decimals}f} ± {short if float(short) or not error else f'{error:.1g}'}"


class GuidanceKey(NamedTuple):
    """The scales of guidance, where it acts, and the weights that guide by autoguidance."""

    cfg: float = 1.0
    internal: float = 1.0
    auto_scale: float = 1.0
    auto: str = ""
    low: float = 0.0
    high: float = 1.0


def guidance_of(result: Result) -> GuidanceKey:
    """Return what guides; without guidance an interval has no meaning."""
    how = result.settings
    if not how.guided:
        return GuidanceKey()
    return GuidanceKey(how.cfg, how.internal, how.auto_scale, result.auto, how.low, how.high)


def guidance_text(how: SampleConfig, auto: str = "") -> str:
    """Return "none", or the scales and where they act; auto: the weights that guide by autoguidance."""
    by = f" by {auto}" * bool(auto)
    scales = [f"{how.cfg:g}"] * (how.cfg != 1) + [f"internal {how.internal:g}"] * (how.internal != 1)
    scales += [f"auto {how.auto_scale:g}{by}"] * (how.auto_scale != 1)
    interval = "everywhere" if (how.low, how.high) == (0, 1) else f"on [{how.low:g}, {how.high:g}]"
    return f"{' and '.join(scales)} {interval}" if scales else "none"


def guidance_name(result: Result) -> str:
    return f"guidance {guidance_text(result.settings, result.auto)}" if result.settings.guided else "no guidance"


def rho_name(rho: float) -> str:
    return f"{'SDE' if rho else 'ODE'} (rho {rho:g})"


def cell_name(result: Result) -> str:
    return f"{result.solver}, {rho_name(result.settings.rho)}, NFE {result.settings.nfe}, {guidance_name(result)}"


class CellKey(NamedTuple):
    """Where a cell stands among the others."""

    solver: str
    guidance: GuidanceKey
    rho: float
    nfe: int


def cell_key(result: Result) -> CellKey:
    return CellKey(result.solver, guidance_of(result), result.settings.rho, result.settings.nfe)


def in_order(results: Iterable[Result]) -> list[Result]:
    """Return cells by solver, guidance, rho and NFE."""
    return sorted(results, key=lambda r: (*cell_key(r), r.evaluations))


def grouped(results: Iterable[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    """Return cells in order, by key."""
    groups: dict[Any, list[Result]] = {}
    for result in in_order(results):
        groups.setdefault(key(result), []).append(result)
    return groups


class Best(NamedTuple):
    """The best cell of a metric, those whose difference to it is not significant, and how many were compared."""

    cell: Result
    reading: Reading
    rivals: list[Result]
    count: int


def best(results: Iterable[Result], metric: str) -> Best | None:
    """Return the best cell; None where all failed or the metric has no known direction."""
    lower, known = metric_named(metric).lower, measured(results, metric)
    if not known or lower is None:
        return None
    cell, top = min(known, key=lambda pair: pair[1].value if lower else -pair[1].value)
    rivals = [r for r, value in known if r is not cell and not gap(value, top).significant]
    return Best(cell, top, rivals, len(known))


def _where(chosen: Sequence[int], tried: Sequence[int]) -> str:
    """Return a set of NFEs in words; "from ... on" and "up to" only where more than one was tried there."""
    if len(chosen) == 1:
        return f"at NFE {chosen[0]}"
    if len(chosen) == len(tried):
        return f"at every NFE tried ({tried[0]} to {tried[-1]})"
    if chosen == tried[-len(chosen) :]:
        return f"from NFE {chosen[0]} on"
    if chosen == tried[: len(chosen)]:
        return f"up to NFE {chosen[-1]}"
    return f"at NFE {', '.join(map(str, chosen[:-1]))} and {chosen[-1]}"


def gaps_to(
    results: Iterable[Result], metric: str, bases: Callable[[CellKey], Iterable[CellKey]]
) -> dict[tuple[CellKey, CellKey], Gap]:
    """Return (cell, base) -> cell less base, for each base of a cell that is there; cells that failed have none."""
    readings = {cell_key(r): value for r, value in measured(results, metric)}
    return {
        (key, base): gap(readings[base], value)
        for key, value in readings.items()
        for base in bases(key)
        if base in readings
    }


def ode_of(key: CellKey) -> list[CellKey]:
    """Return the ODE of an SDE's cell."""
    return [key._replace(rho=0.0)] if key.rho else []


def gaps_to_ode(results: Sequence[Result], metric: str) -> dict[tuple[str, str, float], dict[int, Gap]]:
    """Return every SDE less its ODE at common NFEs: (solver, guidance in words, rho) -> NFE -> difference."""
    names = {guidance_of(r): guidance_name(r) for r in results}
    rows: dict[tuple[str, str, float], dict[int, Gap]] = {}
    for (sde, _), difference in gaps_to(results, metric, ode_of).items():
        rows.setdefault((sde.solver, names[sde.guidance], sde.rho), {})[sde.nfe] = difference
    return rows


def comparisons(results: Sequence[Result], metric: str) -> dict[tuple[str, str, float], str]:
    """Return at which NFEs each SDE is below, above, or level with its ODE, by the keys of `gaps_to_ode`."""
    sentences = {}
    for key, gaps in gaps_to_ode(results, metric).items():
        sides = {
            "below": [nfe for nfe, difference in gaps.items() if difference.high < 0],
            "above": [nfe for nfe, difference in gaps.items() if difference.low > 0],
            "level with": [nfe for nfe, difference in gaps.items() if not difference.significant],
        }
        order = ("above", "below") if metric_named(metric).lower is False else ("below", "above")
        parts = [f"{side} it {_where(sides[side], list(gaps))}" for side in (*order, "level with") if sides[side]]
        parts[0] = parts[0].replace(" it ", " the ODE ", 1)
        listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
        sentences[key] = f"the {rho_name(key[2])} is {listed}."
    return sentences


def caution(results: Iterable[Result], metric: str) -> str:
    """Return what the errors allow one to say about a metric."""
    errors = [value.error for _, value in measured(results, metric)]
    missing = sum(map(math.isnan, errors))
    if len(errors) < 2:
        return ""
    if missing == len(errors):
        return f"No error is stated for {metric_named(metric).label}: differences are as measured and may be noise."
    some = f" Of {len(errors)} cells {missing} have no error." if missing else ""
    return f"Cells are level where the 95 % interval of their difference contains zero.{some}"


def best_in_words(results: Sequence[Result], metric: str) -> str:
    """Return the best cell of a metric as a sentence."""
    top, label = best(results, metric), metric_named(metric).label
    if top is None and not measured(results, metric):
        return f"{label} failed in every cell."
    if top is None:
        return f"Whether lower or higher is better is not known for {label}, so no cell is called best."
    cell, value, rivals, count = top
    name = cell_name(cell)
    if count == 1:
        return f"{label} is {in_words(value)} ({name})."
    others = "1 other cell is" if len(rivals) == 1 else f"{len(rivals)} other cells are"
    return f"{label} is best, {in_words(value)}, with {name}." + (f" {others} level with it." if rivals else "")


def main_finding(results: Sequence[Result]) -> str:
    """Return the lead: best cell of the first metric, and its solver's best SDE against its ODE."""
    metric, text = metrics_of(results)[0], ""
    if top := best(results, metric):
        solver, guidance = top.cell.solver, guidance_name(top.cell)
        near = [r for r in results if r.settings.rho and (r.solver, guidance_name(r)) == (solver, guidance)]
        if rival := best(near, metric):
            text = comparisons(results, metric).get((solver, guidance, rival.cell.settings.rho), "")
            text = f"With {solver} and {guidance}, {text}" if text else ""
    return " ".join(filter(None, (best_in_words(results, metric), text, caution(results, metric))))


# Curves: a metric against evaluations, passes or seconds, in panels on common scales


class PlotCost(NamedTuple):
    """The x axis of a metric's plot."""

    label: str
    of: Callable[[Result], float]


EVALUATIONS = PlotCost("evaluations of the network per image (NFE)", lambda r: r.evaluations)
PASSES = PlotCost("passes through the network per image", lambda r: r.passes)


class Scale(NamedTuple):
    """One axis: its kind, range and ticks."""

    log: bool
    range: tuple[float, float]
    ticks: tuple[float, ...]


def _round_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten within a range; where they are fewer than four also 2 and 5 times them, and so on."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: tuple[float, ...] = ()
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        # divided below one: 2 / 10 is the float nearest to 0.2, and prints so
        candidates = (s * 10**e if e >= 0 else s / 10**-e for e in exponents for s in steps)
        ticks = tuple(float(tick) for tick in candidates if low <= tick <= high)
        if len(ticks) >= 4:
            break
    return ticks


def scale_of(values: Iterable[float], decades: float, exact: bool = False) -> Scale:
    """Return an axis that holds values, log where they span more than so many decades; exact: ticks at the values.

    Exact ticks whose labels would touch the one before are left out.
    """
    values = [value for value in values if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    log = low > 0 and math.log10(high / low) > decades
    if log:
        room = (high / low) ** 0.06
        ends = (low / room, high * room)
    else:
        room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        ends = (low - room, high + room)
    if not exact:
        return Scale(log, ends, _round_ticks(*ends) if log else ())
    position = math.log10 if log else float
    least, ticks = 0.06 * (position(ends[1]) - position(ends[0])), list[float]()
    for tick in sorted({float(round(value)) for value in values}):
        if not ticks or position(tick) - position(ticks[-1]) >= least:
            ticks.append(tick)
    return Scale(log, ends, tuple(ticks))


def _styles(results: Sequence[Result]) -> Callable[[Result], Style]:
    """Return a cell's style: colour and marker by solver and rho, dash and open marker by guidance, legible in grey."""
    ways = sorted({(r.solver, r.settings.rho) for r in results})
    guidances = sorted({guidance_of(r) for r in results})

    def style(result: Result) -> Style:
        i, j = ways.index((result.solver, result.settings.rho)), guidances.index(guidance_of(result))
        plain = not result.settings.guided
        return Style(COLOURS[i % len(COLOURS)], DASHES[j % 4], MARKERS[i % len(MARKERS)], filled=plain)

    return style


CurveCells = list[list[Result]]  # the curves of a panel, each a list of cells


def _split(curves: CurveCells, *keys: Callable[[Result], Any]) -> list[CurveCells]:
    """Return panels of at most MOST_CURVES: divided by the first key, then the next, at last cut off."""
    if len(curves) <= MOST_CURVES:
        return [curves]
    if not keys:
        return [curves[i : i + MOST_CURVES] for i in range(0, len(curves), MOST_CURVES)]
    parts: dict[Any, CurveCells] = {}
    for curve in curves:
        parts.setdefault(keys[0](curve[0]), []).append(curve)
    return [panel for _, part in sorted(parts.items()) for panel in _split(part, *keys[1:])]


def _panels(
    results: Sequence[Result], metric: str, cost: PlotCost, apart: bool = False
) -> tuple[list[tuple[list[Curve], PlotAxes]], int]:
    """Return what figure_of draws, panels on common scales, and the lines of the longest legend.

    apart: cells without guidance in other panels than those with it.
    """
    cells, known = [r for r in results if metric in r.metrics], [value for _, value in measured(results, metric)]
    style, title_y = _styles(cells), metric_named(metric).title
    x = scale_of([cost.of(r) for r in cells], math.log10(3), exact=cost is EVALUATIONS)
    y = scale_of([value.value for value in known], decades=1)
    if not y.log:  # room for the error bars
        errors = [0.0 if math.isnan(value.error) else value.error for value in known]
        ends = [v.value + sign * error for v, error in zip(known, errors, strict=True) for sign in (-1, 1)]
        y = scale_of(ends, decades=math.inf)
    curves = list(grouped(cells, lambda r: cell_key(r)[:3]).values())
    sides = [[c for c in curves if c[0].settings.guided == guided] for guided in (False, True)] if apart else [curves]
    panels = []
    for group in (panel for side in sides if side for panel in _split(side, guidance_of, lambda r: r.solver)):
        guidances = {guidance_name(curve[0]) for curve in group}
        title = guidances.pop() if len(guidances) == 1 else ""
        drawn = [_curve(sorted(curve, key=cost.of), metric, cost, style(curve[0]), bool(title)) for curve in group]
        title = title if known else f"{title} (failed in every cell)"
        axes = PlotAxes(cost.label, title_y, x.log, y.log, True, None, x.ticks, y.ticks, x.range, y.range, title)
        panels.append((drawn, axes))
    return panels, max(html.legend_of(curves, WIDTH)[2] for curves, _ in panels)


def _curve(cells: Sequence[Result], metric: str, cost: PlotCost, style: Style, brief: bool) -> Curve:
    """Return the curve of cells in order of their cost; brief: whether the panel's title names the guidance."""
    first, readings = cells[0], [reading(r, metric) for r in cells]
    label = f"{first.solver}, {rho_name(first.settings.rho)}" + ("" if brief else f", {guidance_name(first)}")
    values = [math.nan if r is None or r.failed else r.value for r in readings]
    errors = [math.nan if r is None else r.error for r in readings]
    return Curve(label, [cost.of(r) for r in cells], values, () if all(map(math.isnan, errors)) else errors, style)


def curves_figure(results: Sequence[Result], metric: str, path: Path) -> None:
    """Write a figure of a metric by NFE, .svg, .png or .pdf: without guidance on the left, with it on the right."""
    if metric not in metrics_of(results):
        raise ValueError(f"metric='{metric}' is in no cell; there are {', '.join(metrics_of(results)) or 'none'}")
    panels, lines = _panels(results, metric, EVALUATIONS, apart=True)
    with atomic(path) as temporary:
        html.save_figure(html.figure_of(panels, WIDTH, HEIGHT, lines), temporary, path.suffix[1:])


# Tables and sections


def file_names(metrics: Iterable[str]) -> dict[str, str]:
    """Return a name fit for a file for every metric, no two alike."""
    names: dict[str, str] = {}
    for metric in metrics:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", metric).strip("-") or "metric"
        taken = {name.lower() for name in names.values()}
        options = (plain, *(f"{plain}-{i}" for i in range(2, len(taken) + 3)))
        names[metric] = next(name for name in options if name.lower() not in taken)
    return names


def csv_text(results: Sequence[Result]) -> str:
    """Return all cells as CSV; a metric not measured in a cell is blank, one that failed is nan."""
    rows = []
    for row in (r.as_dict() for r in in_order(results)):
        figures = row.pop("metrics")
        columns = ((m, part) for m in metrics_of(results) for part in ("value", "error", "note"))
        rows.append(row | {f"{m} {part}": figures.get(m, {}).get(part) for m, part in columns})
    buffer = io.StringIO()
    lines = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    return buffer.getvalue()


def flatten(facts: Any, name: str = "") -> list[tuple[str, str]]:
    """Return a nested dict as dotted names and texts; a list of plain values stays on one line."""
    if isinstance(facts, Mapping) and facts:
        items = [(f"{name}.{key}" if name else str(key), value) for key, value in facts.items()]
        return [row for key, value in items for row in flatten(value, key)]
    if isinstance(facts, list | tuple):
        if any(isinstance(value, Mapping | list | tuple) for value in facts):
            return [row for i, value in enumerate(facts) for row in flatten(value, f"{name}.{i}")]
        return [(name, ", ".join(map(str, facts)) or "none")]
    return [(name, "none" if facts is None or facts == {} else str(facts))]


def _metric_section(page: Page, results: Sequence[Result], metric: str, costs: Sequence[PlotCost]) -> None:
    cells = [r for r in results if metric in r.metrics]
    failed = len(cells) - len(measured(cells, metric))
    notes = sorted({str(r.metrics[metric].get("note") or "") for r in cells} - {""})
    remarks = [
        caution(results, metric),
        f"{failed} of {len(results)} cells failed and are not drawn." if failed else "",
        f"Note: {'; '.join(notes)}." if notes else "",
    ]
    compared = comparisons(results, metric).items()
    plots = [
        [html.inline_svg(html.figure_of([panel], WIDTH, HEIGHT, lines)) for panel in panels]
        for panels, lines in (_panels(results, metric, cost) for cost in costs)
    ]
    # a row for each cost where there are several panels, one row of all where there is one each
    rows = plots if len(plots[0]) > 1 else [[panel for panels in plots for panel in panels]]
    page.section(
        metric_named(metric).title,
        html.finding(best_in_words(results, metric)),
        html.bullets([f"{solver}, {guidance}: {text}" for (solver, guidance, _), text in compared]),
        *(html.panels([f"<figure>{svg}</figure>" for svg in row], "row") for row in rows),
        html.paragraph(" ".join(filter(None, remarks)), "note"),
        *_gap_table(results, metric),
    )


def _gap_table(results: Sequence[Result], metric: str) -> list[str]:
    """Return every SDE less its ODE by NFE, significant ones in bold; nothing where no error is stated."""
    table = gaps_to_ode(results, metric)
    every = [difference for by_nfe in table.values() for difference in by_nfe.values()]
    if not any(difference.high > difference.low for difference in every):
        return []
    nfes, rows = sorted({nfe for by_nfe in table.values() for nfe in by_nfe}), []
    for (solver, guidance, rho), by_nfe in table.items():
        gaps = [by_nfe.get(nfe) for nfe in nfes]
        cells = [Html(f"<b>{g}</b>") if g and g.significant else str(g or ABSENT) for g in gaps]
        rows.append([solver, guidance, rho_name(rho), *cells])
    header = ["solver", "guidance", "SDE less ODE", *(f"NFE {nfe}" for nfe in nfes)]
    unpaired = sum(not difference.paired for difference in every)
    which = "Errors" if unpaired == len(every) else f"Errors of {unpaired} of {len(every)}"
    pairing = f"{which} are added in quadrature, as if the cells shared nothing."
    if not unpaired:
        pairing = "What the cells share by their common seeds has cancelled."
    below, above = (sum(g.significant and sign * g.value > 0 for g in every) for sign in (-1, 1))
    text = f"The SDE is significantly below its ODE in {below} and above it in {above} of {len(every)} comparisons."
    legend = html.paragraph(f"With 95 % intervals; in bold those that exclude zero. {pairing}", "note")
    title = html.subheading(f"{metric_named(metric).label}: SDE less ODE")
    return [title, html.finding(text), html.table(header, rows, "cells"), legend]


def _best_section(page: Page, results: Sequence[Result], metrics: Sequence[str]) -> None:
    rows, winners = [], list[Result]()
    for metric in metrics:
        top = best(results, metric)
        if top is not None and top.count > 1:
            cell, how = top.cell, top.cell.settings
            way = [cell.solver, guidance_text(how, top.cell.auto), rho_name(how.rho), how.nfe, f"{cell.passes:.4g}"]
            rows.append([metric_named(metric).title, in_words(top.reading), *way, len(top.rivals)])
            winners.append(cell)
    header = ["metric", "best", "solver", "guidance", "rho", "NFE", "passes", "others level with it"]
    if rows:
        same = all(cell is winners[0] for cell in winners)
        text = "The metrics do not agree on a best cell." if not same else f"The best cell is {cell_name(winners[0])}"
        if same:
            text += f", by all {len(rows)} metrics." if len(rows) > 1 else "."
        page.section("Best cell per metric", html.finding(text), html.table(header, rows, "plain"))


def _table_section(page: Page, results: Sequence[Result], metrics: Sequence[str], images: int) -> None:
    tops = {metric: best(results, metric) for metric in metrics}

    def marked(result: Result, metric: str) -> str:
        value, top = reading(result, metric), tops[metric]
        if value is None:
            return ABSENT
        if top is not None and result is top.cell and top.count > 1:
            return Html(f"<b>{in_words(value)} ★</b>")
        return in_words(value) + (" ☆" if top is not None and any(result is r for r in top.rivals) else "")

    rows = []
    for r in in_order(results):
        speed = [number(images / r.seconds) if r.seconds > 0 else ABSENT] if images else []
        evaluations = "" if r.evaluations == r.settings.nfe else f" ({r.evaluations:g} made)"
        cost = [f"{r.settings.nfe}{evaluations}", f"{r.passes:.4g}", number(r.seconds), *speed]
        way = [r.solver, guidance_text(r.settings, r.auto), f"{r.settings.rho:g}"]
        rows.append([*way, *cost, *(marked(r, metric) for metric in metrics)])
    header = ["solver", "guidance", "rho", "NFE", "passes", "seconds", *(["images/s"] if images else [])]
    header += [metric_named(metric).label for metric in metrics]
    text = (
        "★ best of its column; ☆ level with the best. NFE and passes are per image; a guided evaluation takes two "
        "passes, by internal guidance one, by classifier-free and autoguidance together three."
    )
    table = html.table(header, rows, "cells")
    page.section("All cells", html.finding(_cheapest(results, metrics[0])), table, html.paragraph(text, "note"))


def _cheapest(results: Sequence[Result], metric: str) -> str:
    """Return which cell of those level with the best takes the fewest passes."""
    top, label = best(results, metric), metric_named(metric).label
    if top is None:
        return best_in_words(results, metric)
    cell = min((top.cell, *top.rivals), key=lambda r: r.passes)
    return (
        f"Of the cells whose {label} is the best or level with it, {cell_name(cell)}, takes the fewest passes: "
        f"{cell.passes:.4g}."
    )


def _grids_section(page: Page, folder: Path, results: Sequence[Result], metric: str) -> None:
    label = metric_named(metric).label

    def grid(result: Result | None) -> str:
        """Return a cell's grid with its figure below."""
        if result is None or not (folder / result.grid).is_file():
            return ABSENT
        value = reading(result, metric)
        caption = f"{label} {in_words(value)}" if value else ""
        return Html(html.thumbnail(folder / result.grid, caption, GRID_WIDTH))

    blocks = []
    for cells in grouped((r for r in results if r.grid), lambda r: (r.solver, guidance_of(r))).values():
        by_place = {(r.settings.nfe, r.settings.rho): r for r in cells}
        rhos, nfes = (sorted(set(values)) for values in ([rho for _, rho in by_place], [nfe for nfe, _ in by_place]))
        rows = [[nfe, *(grid(by_place.get((nfe, rho))) for rho in rhos)] for nfe in nfes]
        blocks += [html.subheading(f"{cells[0].solver}, {guidance_name(cells[0])}")]
        blocks += [html.finding(f"Of these grids: {best_in_words(cells, metric)}")]
        blocks += [html.table(["NFE", *map(rho_name, rhos)], rows, "grids")]
    if blocks:
        text = "The first images of every cell: the same place has the same seed and label in all; not curated."
        if (folder / REAL).is_file():
            blocks.append(html.thumbnail(folder / REAL, "real images, spread over the reference", GRID_WIDTH))
        page.section("Samples at matched seeds", html.paragraph(text, "note"), *blocks)


def _sampler_words(result: Result) -> list[str]:
    """Return a cell's sampler as options of a command; times fitted to the model serve where no solver is named."""
    how, words = result.settings.canonical(), []
    stated = {"nfe", "rho", "cfg", "tolerance", *([] if result.tuned else ["solver"])}
    for option, parts in OPTIONS.items():
        values = [(getattr(how, part), getattr(SampleConfig, part)) for part in parts]
        if getattr(how, NEEDS.get(option, "solver")) and (option in stated or any(a != b for a, b in values)):
            text = ",".join(f"{a:g}" if isinstance(a, float) else str(a) for a, _ in values)
            words += [f"--{option.replace('_', '-')}", text]
    return words + ["--auto", "WEAKER"] * (how.auto_scale != 1)


def next_steps(results: Sequence[Result], facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return sentences and the commands that they are about."""
    typed = re.match(r"mvm sweep ([^-\s]\S*)", str(facts.get("command", "")))
    model = typed[1] if typed and Path(typed[1]).name == facts.get("name") else "MODEL"
    top = best(results, metrics_of(results)[0])
    cell = top.cell if top else in_order(results)[0]
    words, what = _sampler_words(cell), "by the best cell" if top else "by the first cell"
    errors = ["--num", "5000", "--jackknife", "20", "--out", "runs/sweep-errors"]
    return [
        (f"Sample {what}: {cell_name(cell)}.", command("sample", model, *words, "--num", "64", "--out", "best.png")),
        (f"Measure 10,000 images {what}.", command("eval", model, *words, "-n", "10000", "--json", "best.json")),
        ("Compare ODE and SDE with errors, on more images.", command("sweep", model, "--rho", "0,0.75,1", *errors)),
        ("Sample in the browser, ODE and SDE side by side.", command("app", *([model] if "/" in model else []))),
    ]


def write_report(folder: Path, results: Sequence[Result], facts: Mapping[str, Any]) -> None:
    """Write report.html, results.csv, and plots/METRIC.svg and .png into a sweep's folder.

    facts: provenance, nested as it comes. Three names are known: "warnings" (a list, on top of the page), "images" (of
    every cell, for the speed) and "name" (for the title).
    """
    metrics, images = metrics_of(results), facts.get("images", 0)
    if not metrics:
        raise ValueError(f"results has {len(results)} cells and no metric; a report needs one cell with one metric")
    costs = [EVALUATIONS, PASSES]
    if images:
        costs.append(PlotCost("seconds of sampling per 1,000 images", lambda r: 1000 * r.seconds / images))
    page = Page(f"Sampler sweep: {facts['name']}" if facts.get("name") else "Sampler sweep", main_finding(results))
    page.parts.append(html.bullets([f"Warning: {text}" for text in facts.get("warnings", ())], "warnings"))
    _grids_section(page, folder, results, metrics[0])
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for metric, name in tqdm(file_names(metrics).items(), desc="report", unit="metric"):
        _metric_section(page, results, metric, costs)
        for suffix in ("svg", "png"):
            curves_figure(results, metric, folder / "plots" / f"{name}.{suffix}")
    _best_section(page, results, metrics)
    _table_section(page, results, metrics, images)
    page.next_steps(next_steps(results, facts))
    if facts:
        again = f"Repeat it with: {facts['command']}" if facts.get("command") else f"{len(results)} cells of one model."
        page.section("How this was made", html.finding(again), html.table(["", ""], flatten(facts), "text"))
    write_text(folder / "results.csv", csv_text(results))
    page.write(folder / "report.html")
