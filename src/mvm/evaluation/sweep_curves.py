"""The curves of a sweep: a metric against evaluations, passes or seconds, in panels on common scales."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mvm.evaluation.cells import Result
from mvm.evaluation.report import (
    COLOURS,
    DASHES,
    MARKERS,
    Axes,
    Curve,
    Style,
    figure_of,
    inline_svg,
    legend_rows,
    save_figure,
)
from mvm.evaluation.sweep_findings import (
    grouped,
    guidance_name,
    guidance_of,
    metric_named,
    metrics_of,
    place_of,
    reading,
    rho_name,
)
from mvm.files import put_in_place, temporary_beside

MOST_CURVES = 8  # in one panel; more are hard to tell apart
WIDTH = 4.6  # inches of a panel: two fit a page, one a phone


class Cost(NamedTuple):
    """What a metric is set against."""

    label: str
    of: Callable[[Result], float]


EVALUATIONS = Cost("evaluations of the network per image (NFE)", lambda r: r.evaluations)
PASSES = Cost("passes through the network per image", lambda r: r.passes)


def seconds_per_thousand(images: int) -> Cost:
    """Return the time of sampling as a cost, of cells with so many images each."""
    return Cost("seconds of sampling per 1,000 images", lambda r: 1000 * r.seconds / images)


class Scale(NamedTuple):
    """One axis: its kind, range and ticks."""

    log: bool
    range: tuple[float, float]
    ticks: tuple[float, ...]


def _round_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten within a range; where they are fewer than four also 2 and 5 times them, and so on."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # divided below one: 2 / 10 is the float nearest to 0.2, and prints so
    ticks: tuple[float, ...] = ()
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        made = (s * 10**e if e >= 0 else s / 10**-e for e in exponents for s in steps)
        ticks = tuple(float(tick) for tick in made if low <= tick <= high)
        if len(ticks) >= 4:
            break
    return ticks


def scale_of(values: Sequence[float], decades: float, exact: bool = False) -> Scale:
    """Return an axis that holds values, log where they span more than so many decades; exact: ticks at the values."""
    values = [value for value in values if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    log = low > 0 and math.log10(high / low) > decades
    if log:
        room = (high / low) ** 0.06
        ends = (low / room, high * room)
    else:
        room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        ends = (low - room, high + room)
    if exact:
        return Scale(log, ends, _apart(sorted({float(round(v)) for v in values}), log, ends))
    return Scale(log, ends, _round_ticks(*ends) if log else ())


def _apart(ticks: Sequence[float], log: bool, ends: tuple[float, float]) -> tuple[float, ...]:
    """Return ticks without those whose labels would touch the one before."""
    place = math.log10 if log else float
    least = 0.06 * (place(ends[1]) - place(ends[0]))
    kept: list[float] = []
    for tick in ticks:
        if not kept or place(tick) - place(kept[-1]) >= least:
            kept.append(tick)
    return tuple(kept)


def _scale_y(cells: Iterable[Result], metric: str) -> Scale:
    """Return the metric's axis: log where the values span more than a decade, else wide enough for the error bars."""
    found = [r for r in (reading(cell, metric) for cell in cells) if r and not r.failed]
    plain = scale_of([r.value for r in found], decades=1)
    if plain.log:
        return plain
    errors = [0.0 if math.isnan(r.error) else r.error for r in found]
    return scale_of([r.value + s * e for r, e in zip(found, errors, strict=True) for s in (-1, 1)], decades=math.inf)


def _styles(results: Iterable[Result]) -> Callable[[Result], Style]:
    """Colour and marker tell solver and rho; dash and an open marker tell guidance: all is legible in grey."""
    results = list(results)
    ways = list(grouped(results, lambda r: (r.solver, r.settings.rho)))
    ways.sort()
    guidances = sorted({guidance_of(r) for r in results})

    def look(result: Result) -> Style:
        i, j = ways.index((result.solver, result.settings.rho)), guidances.index(guidance_of(result))
        plain = result.settings.cfg == 1
        return Style(COLOURS[i % len(COLOURS)], DASHES[j % 4], MARKERS[i % len(MARKERS)], filled=plain)

    return look


Group = list[list[Result]]  # the curves of a panel, each a list of cells


def _split(curves: Group, keys: Sequence[Callable[[Result], Any]]) -> list[Group]:
    """Return panels of at most MOST_CURVES: divided by the first key, then the next, at last cut off."""
    if len(curves) <= MOST_CURVES:
        return [curves]
    if not keys:
        return [curves[i : i + MOST_CURVES] for i in range(0, len(curves), MOST_CURVES)]
    parts: dict[Any, Group] = {}
    for curve in curves:
        parts.setdefault(keys[0](curve[0]), []).append(curve)
    return [panel for _, part in sorted(parts.items()) for panel in _split(part, keys[1:])]


def _panels(groups: Iterable[Group], results: Sequence[Result], metric: str, cost: Cost) -> list[tuple]:
    """Return what figure_of draws: panels on common scales, so that they can be compared."""
    cells = [r for r in results if metric in r.metrics]
    look, name = _styles(results), metric_named(metric)
    x = scale_of([cost.of(r) for r in cells], math.log10(3), exact=cost is EVALUATIONS)
    y = _scale_y(cells, metric)
    found = any(r and not r.failed for r in (reading(cell, metric) for cell in cells))
    made = []
    for group in groups:
        guidances = {guidance_name(curve[0]) for curve in group}
        title = next(iter(guidances)) if len(guidances) == 1 else ""
        axes = Axes(
            cost.label,
            name.title,
            x.log,
            y.log,
            markers=True,
            ticks=x.ticks,
            ticks_y=y.ticks,
            range_x=x.range,
            range_y=y.range,
            title=title if found else f"{title} (failed in every cell)",
        )
        made.append(([_curve(curve, metric, cost, look, bool(title)) for curve in group], axes))
    return made


def _curve(cells: Sequence[Result], metric: str, cost: Cost, look: Callable[[Result], Style], brief: bool) -> Curve:
    cells = sorted(cells, key=cost.of)
    first, found = cells[0], [reading(r, metric) for r in cells]
    label = f"{first.solver}, {rho_name(first.settings.rho)}" + ("" if brief else f", {guidance_name(first)}")
    values = [math.nan if r is None or r.failed else r.value for r in found]
    errors = [math.nan if r is None else r.error for r in found]
    stated = any(not math.isnan(e) for e in errors)
    return Curve(label, [cost.of(r) for r in cells], values, errors if stated else (), look(first))


def _curves_of(results: Sequence[Result], metric: str) -> Group:
    return list(grouped((r for r in results if metric in r.metrics), lambda r: place_of(r)[:3]).values())


def _height(panels: Sequence[tuple]) -> float:
    """Return inches: the plot, and the legend's lines below it."""
    return 3.0 + 0.2 * max(legend_rows(curves, WIDTH) for curves, _ in panels)


def plots_svg(results: Sequence[Result], metric: str, cost: Cost) -> list[str]:
    """Return one inline SVG per panel."""
    groups = _split(_curves_of(results, metric), (guidance_of, lambda r: r.solver))
    panels = _panels(groups, results, metric, cost)
    height = _height(panels)
    return [inline_svg(figure_of([panel], WIDTH, height)) for panel in panels]


def curves_figure(results: Sequence[Result], metric: str, path: Path) -> None:
    """Write a figure of a metric by NFE, .svg, .png or .pdf: without guidance on the left, with it on the right."""
    curves = _curves_of(results, metric)
    if not curves:
        raise ValueError(f"metric='{metric}' is in no cell; there are {', '.join(metrics_of(results)) or 'none'}")
    sides = [[curve for curve in curves if (curve[0].settings.cfg == 1) == plain] for plain in (True, False)]
    groups = [panel for side in sides if side for panel in _split(side, (guidance_of, lambda r: r.solver))]
    panels = _panels(groups, results, metric, EVALUATIONS)
    temporary = temporary_beside(path)
    save_figure(figure_of(panels, WIDTH, _height(panels)), temporary, path.suffix[1:])
    put_in_place(temporary, path)
