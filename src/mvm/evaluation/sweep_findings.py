"""What a sweep's cells say, in words: the best per metric, and where the SDE passes the ODE, beyond chance."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mvm.evaluation.cells import Result
from mvm.metrics.distances import NORMAL_95, student_95
from mvm.settings import SampleConfig


class Metric(NamedTuple):
    """A metric's name in print; lower: whether lower is better, None where that is not known."""

    label: str
    lower: bool | None

    @property
    def title(self) -> str:
        return self.label if self.lower is None else f"{self.label} ({'lower' if self.lower else 'higher'} is better)"


METRICS = {
    "fid": Metric("FID", True),
    "sfid": Metric("sFID", True),
    "kid": Metric("KID", True),
    "is": Metric("Inception score", False),
    "precision": Metric("Precision", False),
    "recall": Metric("Recall", False),
    "density": Metric("Density", False),
    "coverage": Metric("Coverage", False),
    "fd-dino": Metric("FD-DINO", True),
    "kd-dino": Metric("KD-DINO", True),
    "fd-effnet": Metric("FD-EfficientNet", True),
    "kd-effnet": Metric("KD-EfficientNet", True),
    "fd-pixels": Metric("FD-pixels", True),
    "kd-pixels": Metric("KD-pixels", True),
}


def metric_named(name: str) -> Metric:
    """Return a metric; one not in the table goes by its own name, with no direction."""
    return METRICS.get(name, Metric(name, None))


def metrics_of(results: Iterable[Result]) -> list[str]:
    """Return the metrics present, those of the table first and in its order."""
    found = {name for result in results for name in result.metrics}
    return [name for name in METRICS if name in found] + sorted(found - METRICS.keys())


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
    found = result.metrics.get(metric)
    if found is None:
        return None
    value, error = (math.nan if found.get(key) is None else float(found[key]) for key in ("value", "error"))
    parts = tuple(found.get("parts") or ())
    return Reading(value, error if math.isfinite(error) else math.nan, parts if all(map(math.isfinite, parts)) else ())


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

    Cells have their seeds and labels in common: where both tell the parts of their errors, what they share cancels.
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


def in_words(found: Reading) -> str:
    """Return "2.314 ± 0.042": two digits of the error, and no more than four of the value."""
    value, error, _ = found
    if found.failed or math.isnan(error):
        return number(value)
    if max(abs(value), error) < 1e-4:
        return f"{value:.1e} ± {error:.1e}"
    decimals = min(_decimals(error, digits=2), _decimals(max(abs(value), error), digits=4))
    short = f"{error:.{decimals}f}"
    return f"{value:z.{decimals}f} ± {short if float(short) or not error else f'{error:.1g}'}"


def guidance_of(result: Result) -> tuple[float, float, float, float]:
    """Return the scales, classifier-free and internal, and the interval; without guidance that says nothing."""
    how = result.settings
    return (how.cfg, how.internal, how.low, how.high) if how.guided else (1.0, 1.0, 0.0, 1.0)


def guidance_text(how: SampleConfig) -> str:
    """Return "none", or the scales and where they act."""
    scales = [f"{how.cfg:g}"] * (how.cfg != 1) + [f"internal {how.internal:g}"] * (how.internal != 1)
    if not scales:
        return "none"
    return " and ".join(scales) + (
        " everywhere" if (how.low, how.high) == (0, 1) else f" on [{how.low:g}, {how.high:g}]"
    )


def guidance_name(result: Result) -> str:
    return f"guidance {guidance_text(result.settings)}" if result.settings.guided else "no guidance"


def rho_name(rho: float) -> str:
    return f"{'SDE' if rho else 'ODE'} (rho {rho:g})"


def cell_name(result: Result) -> str:
    how = result.settings
    return f"{result.solver}, {rho_name(how.rho)}, NFE {how.nfe}, {guidance_name(result)}"


class Place(NamedTuple):
    """Where a cell stands among the others."""

    solver: str
    guidance: tuple[float, float, float, float]
    rho: float
    nfe: int


def place_of(result: Result) -> Place:
    return Place(result.solver, guidance_of(result), result.settings.rho, result.settings.nfe)


def in_order(results: Iterable[Result]) -> list[Result]:
    """Return cells by solver, guidance, rho and NFE."""
    return sorted(results, key=lambda r: (*place_of(r), r.evaluations))


def grouped(results: Iterable[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    """Return cells in order, by key."""
    groups: dict[Any, list[Result]] = {}
    for result in in_order(results):
        groups.setdefault(key(result), []).append(result)
    return groups


class Best(NamedTuple):
    """The best cell of a metric, and those whose difference to it is not significant."""

    cell: Result
    found: Reading
    rivals: list[Result]
    among: int


def best(results: Iterable[Result], metric: str) -> Best | None:
    """Return the best cell; None where all failed or the metric has no known direction."""
    lower = metric_named(metric).lower
    known = [(r, found) for r in in_order(results) if (found := reading(r, metric)) and not found.failed]
    if not known or lower is None:
        return None
    cell, top = min(known, key=lambda pair: pair[1].value if lower else -pair[1].value)
    rivals = [r for r, found in known if r is not cell and not gap(found, top).significant]
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
    results: Iterable[Result], metric: str, bases: Callable[[Place], Iterable[Place]]
) -> dict[tuple[Place, Place], Gap]:
    """Return (cell, base) -> cell less base, for each base of a cell that is there; cells that failed have none."""
    found = {place_of(r): value for r in in_order(results) if (value := reading(r, metric)) and not value.failed}
    return {
        (place, base): gap(found[base], value)
        for place, value in found.items()
        for base in bases(place)
        if base in found
    }


def ode_of(place: Place) -> list[Place]:
    """Return the ODE beside an SDE."""
    return [place._replace(rho=0.0)] if place.rho else []


def gaps_to_ode(results: Iterable[Result], metric: str) -> dict[tuple, dict[int, Gap]]:
    """Return every SDE less its ODE at common NFEs: (solver, guidance, rho) -> NFE -> difference."""
    rows: dict[tuple, dict[int, Gap]] = {}
    for (sde, _), found in gaps_to(results, metric, ode_of).items():
        rows.setdefault((sde.solver, sde.guidance, sde.rho), {})[sde.nfe] = found
    return rows


def _compared(gaps: Mapping[int, Gap], rho: float, lower: bool | None) -> str:
    """Return in words at which NFEs an SDE is below, above, or level with the ODE."""
    sides = {
        "below": [nfe for nfe, found in gaps.items() if found.significant and found.value < 0],
        "above": [nfe for nfe, found in gaps.items() if found.significant and found.value > 0],
        "level with": [nfe for nfe, found in gaps.items() if not found.significant],
    }
    order = ("above", "below") if lower is False else ("below", "above")
    said = [f"{side} it {_where(sides[side], list(gaps))}" for side in (*order, "level with") if sides[side]]
    said[0] = said[0].replace(" it ", " the ODE ", 1)
    listed = " and ".join(filter(None, (", ".join(said[:-1]), said[-1])))
    return f"the {rho_name(rho)} is {listed}."


def comparisons(results: Iterable[Result], metric: str) -> dict[tuple, str]:
    """Return what is to be said of each SDE against its ODE: (solver, guidance, rho) -> sentence."""
    lower = metric_named(metric).lower
    return {key: _compared(gaps, key[2], lower) for key, gaps in gaps_to_ode(results, metric).items()}


def names_of(results: Iterable[Result]) -> dict[tuple, str]:
    """Return each guidance in words."""
    return {guidance_of(r): guidance_name(r) for r in results}


def caution(results: Iterable[Result], metric: str) -> str:
    """Return what the errors allow to be said of a metric."""
    found = [r for r in (reading(result, metric) for result in results) if r and not r.failed]
    stated = [r for r in found if not math.isnan(r.error)]
    label = metric_named(metric).label
    if len(found) < 2:
        return ""
    if not stated:
        return f"No error is stated for {label}: differences are as measured and may be noise."
    some = "" if len(stated) == len(found) else f" Of {len(found)} cells {len(found) - len(stated)} have no error."
    return f"Cells are level where the 95 % interval of their difference holds zero.{some}"


def best_in_words(results: Sequence[Result], metric: str) -> str:
    """Return the best cell of a metric as a sentence."""
    top, label = best(results, metric), metric_named(metric).label
    if top is None:
        tried = [r for r in (reading(result, metric) for result in results) if r]
        if all(r.failed for r in tried):
            return f"{label} failed in every cell."
        return f"Whether lower or higher is better is not known for {label}, so no cell is called best."
    if top.among == 1:
        return f"{label} is {in_words(top.found)} ({cell_name(top.cell)})."
    others = f" {_count(top.rivals)} level with it." if top.rivals else ""
    return f"{label} is best, {in_words(top.found)}, with {cell_name(top.cell)}.{others}"


def _count(cells: Sequence[Result]) -> str:
    return "1 other cell is" if len(cells) == 1 else f"{len(cells)} other cells are"


def main_finding(results: Sequence[Result]) -> str:
    """Return the lead: best cell of the first metric, and its solver's best SDE against its ODE."""
    metric = metrics_of(results)[0]
    said, top = comparisons(results, metric), best(results, metric)
    text = ""
    if top is not None:
        solver, guidance = top.cell.solver, guidance_of(top.cell)
        near = [r for r in results if r.settings.rho and (r.solver, guidance_of(r)) == (solver, guidance)]
        rival = best(near, metric)
        text = said.get((solver, guidance, rival.cell.settings.rho), "") if rival else ""
        text = f"With {solver} and {guidance_name(top.cell)}, {text}" if text else ""
    return " ".join(filter(None, (best_in_words(results, metric), text, caution(results, metric))))
