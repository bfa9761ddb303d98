"""The report of a sweep: what the cells say, in words, curves, one table and grids at matched seeds."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mvm.evaluation.cells import Result
from mvm.evaluation.report import Html, Page, bullets, paragraph, subheading, table, thumbnail
from mvm.evaluation.sweep_curves import EVALUATIONS, PASSES, Cost, curves_figure, plots_svg, seconds_per_thousand
from mvm.evaluation.sweep_findings import (
    Gap,
    best,
    best_in_words,
    caution,
    comparisons,
    gaps_to_ode,
    grouped,
    guidance_name,
    guidance_of,
    guidance_text,
    in_order,
    in_words,
    main_finding,
    metric_named,
    metrics_of,
    names_of,
    number,
    reading,
    rho_name,
)
from mvm.files import write_text

ABSENT = "-"
SHOWN = 480  # CSS pixels of a grid's width
REAL = "cells/real.png"  # images of the reference, where it has any


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
    metrics = metrics_of(results)
    parts = ("value", "error", "note")
    rows = [{name: value for name, value in r.as_dict().items() if name != "metrics"} for r in in_order(results)]
    buffer = io.StringIO()
    lines = csv.writer(buffer, lineterminator="\n")
    lines.writerow([*rows[0], *(f"{m} {part}" for m in metrics for part in parts)])
    for row, r in zip(rows, in_order(results), strict=True):
        cells = [r.metrics.get(m, {}).get(part) for m in metrics for part in parts]
        lines.writerow([*row.values(), *("" if cell is None else cell for cell in cells)])
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


def _warnings(facts: Mapping[str, Any]) -> list[str]:
    found = facts.get("warnings") or []
    return [found] if isinstance(found, str) else [str(warning) for warning in found]


def _metric_section(page: Page, results: Sequence[Result], metric: str, costs: Sequence[Cost]) -> None:
    names = names_of(results)
    compared = comparisons(results, metric).items()
    said = [f"{solver}, {names[guidance]}: {text}" for (solver, guidance, _), text in compared]
    notes = sorted({str(r.metrics[metric].get("note") or "") for r in results if metric in r.metrics} - {""})
    failed = sum(1 for r in results if (found := reading(r, metric)) and found.failed)
    remarks = [
        caution(results, metric),
        f"{failed} of {len(results)} cells failed and are not drawn." if failed else "",
        f"Note: {'; '.join(notes)}." if notes else "",
    ]
    page.section(
        metric_named(metric).title,
        paragraph(" ".join(filter(None, (best_in_words(results, metric), *remarks)))),
        bullets(said),
        *_gap_table(results, metric),
        *_rows([plots_svg(results, metric, cost) for cost in costs]),
    )


def _gap_table(results: Sequence[Result], metric: str) -> list[str]:
    """Return every SDE less its ODE by NFE, significant ones in bold; nothing where no error is stated."""
    names, gaps = names_of(results), gaps_to_ode(results, metric)
    every = [found for by_nfe in gaps.values() for found in by_nfe.values()]
    if not any(found.high > found.low for found in every):
        return []
    nfes = sorted({nfe for by_nfe in gaps.values() for nfe in by_nfe})
    rows = []
    for (solver, guidance, rho), by_nfe in gaps.items():
        gaps_of = [by_nfe.get(nfe) for nfe in nfes]
        cells = [Html(f"<b>{g}</b>") if g and g.significant else str(g or ABSENT) for g in gaps_of]
        rows.append([solver, names[guidance], rho_name(rho), *cells])
    header = ["solver", "guidance", "SDE less ODE", *(f"NFE {nfe}" for nfe in nfes)]
    text = f"With 95 % intervals; those that leave zero out in bold. {_pairing(every)}"
    return [subheading(f"{metric_named(metric).label}: SDE less ODE"), paragraph(text), table(header, rows, "cells")]


def _pairing(gaps: Sequence[Gap]) -> str:
    """Return whether intervals know what two cells share."""
    count = sum(not found.paired for found in gaps)
    if not count:
        return "What the cells share by their common seeds has cancelled."
    which = "Errors" if count == len(gaps) else f"Errors of {count} of {len(gaps)}"
    return f"{which} are added in quadrature, as if the cells shared nothing."


def _rows(plots: Sequence[Sequence[str]]) -> list[str]:
    """Return plots by cost: a row for each where there are several panels, one row of all where there is one each."""
    rows = plots if len(plots[0]) > 1 else [[panel for panels in plots for panel in panels]]
    return ['<div class="row">' + "".join(f"<figure>{svg}</figure>" for svg in row) + "</div>" for row in rows]


def _best_section(page: Page, results: Sequence[Result], metrics: Sequence[str]) -> None:
    rows = []
    for metric in metrics:
        top = best(results, metric)
        if top is not None and top.among > 1:
            cell = top.cell
            how = [cell.solver, guidance_text(cell.settings), rho_name(cell.settings.rho), cell.settings.nfe]
            rows.append([metric_named(metric).title, in_words(top.found), *how, f"{cell.passes:.4g}", len(top.rivals)])
    header = ["metric", "best", "solver", "guidance", "rho", "NFE", "passes", "others level with it"]
    if rows:
        page.section("Best cell per metric", table(header, rows, "plain"))


def _marked(result: Result, metric: str, tops: Mapping[str, Any]) -> str:
    found, top = reading(result, metric), tops[metric]
    if found is None:
        return ABSENT
    if top is not None and result is top.cell and top.among > 1:
        return Html(f"<b>{in_words(found)} ★</b>")
    return in_words(found) + (" ☆" if top is not None and any(result is r for r in top.rivals) else "")


def _table_section(page: Page, results: Sequence[Result], metrics: Sequence[str], images: int) -> None:
    tops = {metric: best(results, metric) for metric in metrics}
    rows = []
    for r in in_order(results):
        speed = [number(images / r.seconds) if r.seconds > 0 else ABSENT] if images else []
        measured = "" if r.evaluations == r.settings.nfe else f" ({r.evaluations:g} made)"
        cost = [f"{r.settings.nfe}{measured}", f"{r.passes:.4g}", number(r.seconds), *speed]
        way = [r.solver, guidance_text(r.settings), f"{r.settings.rho:g}"]
        rows.append([*way, *cost, *(_marked(r, metric, tops) for metric in metrics)])
    header = ["solver", "guidance", "rho", "NFE", "passes", "seconds", *(["images/s"] if images else [])]
    page.section(
        "All cells",
        paragraph(
            "★ best of its column; ☆ level with the best. NFE and passes are per image; a guided evaluation "
            "takes two passes."
        ),
        table([*header, *(metric_named(metric).label for metric in metrics)], rows, "cells"),
    )


def _grid_figure(folder: Path, result: Result, metric: str) -> str:
    """Return a cell's grid with its figure below."""
    found = reading(result, metric)
    caption = f"{metric_named(metric).label} {in_words(found)}" if found else ""
    path = folder / result.grid
    return Html(thumbnail(path, caption, SHOWN)) if result.grid and path.is_file() else ABSENT


def _grids_section(page: Page, folder: Path, results: Sequence[Result], metric: str) -> None:
    blocks = []
    for (solver, _), cells in grouped((r for r in results if r.grid), lambda r: (r.solver, guidance_of(r))).items():
        by_place = {(r.settings.nfe, r.settings.rho): r for r in cells}
        rhos = sorted({rho for _, rho in by_place})
        rows = []
        for nfe in sorted({nfe for nfe, _ in by_place}):
            row = [by_place.get((nfe, rho)) for rho in rhos]
            rows.append([nfe, *(ABSENT if r is None else _grid_figure(folder, r, metric) for r in row)])
        blocks.append(subheading(f"{solver}, {guidance_name(cells[0])}"))
        blocks.append(table(["NFE", *map(rho_name, rhos)], rows, "grids"))
    if blocks:
        text = "The first images of every cell: the same place has the same seed and label in all, none chosen by hand."
        if (folder / REAL).is_file():
            blocks.insert(0, thumbnail(folder / REAL, "real images, spread over the reference", SHOWN))
        page.section("Samples at matched seeds", paragraph(text), *blocks)


def _image_count(facts: Mapping[str, Any]) -> int:
    """Return facts["images"], the number of images of every cell; 0 where it is not recorded."""
    images = facts.get("images", 0)
    return images if isinstance(images, int) and images > 0 else 0


def write_report(folder: Path, results: Sequence[Result], facts: Mapping[str, Any]) -> None:
    """Write report.html, results.csv, and plots/METRIC.svg and .png into a sweep's folder.

    facts: provenance, nested as it comes. Three names are known: "warnings" (a list, shown on top), "images" (of every
    cell, for the speed) and "name" (for the title).
    """
    metrics = metrics_of(results)
    if not metrics:
        raise ValueError(f"results has {len(results)} cells and no metric; a report needs one cell with one metric")
    images = _image_count(facts)
    costs = [EVALUATIONS, PASSES, *([seconds_per_thousand(images)] if images else [])]
    title = f"Sampler sweep: {facts['name']}" if facts.get("name") else "Sampler sweep"
    page = Page(title, main_finding(results))
    if warnings := _warnings(facts):
        page.parts.append(bullets([f"Warning: {text}" for text in warnings], "warnings"))
    _best_section(page, results, metrics)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for metric, name in tqdm(file_names(metrics).items(), desc="report", unit="metric"):
        _metric_section(page, results, metric, costs)
        for suffix in ("svg", "png"):
            curves_figure(results, metric, folder / "plots" / f"{name}.{suffix}")
    _table_section(page, results, metrics, images)
    _grids_section(page, folder, results, metrics[0])
    if facts:
        page.section("How this was made", table(["", ""], flatten(facts), "text"))
    write_text(folder / "results.csv", csv_text(results))
    page.write(folder / "report.html")
