"""What a sweep's cells say, in words: the best per metric, and where SDE and ODE differ significantly."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mvm.evaluation.cells import Result
from mvm.metrics.distances import NORMAL_95, student_95
from mvm.metrics.measures import MEASURES, Key, Measure
from mvm.settings import SampleConfig


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


def guidance_of(result: Result) -> tuple[float, float, float, float]:
    """Return the scales, classifier-free and internal, and the interval; without guidance it has no meaning."""
    how = result.settings
    return (how.cfg, how.internal, how.low, how.high) if how.guided else (1.0, 1.0, 0.0, 1.0)


def guidance_text(how: SampleConfig) -> str:
    """Return "none", or the scales and where they act."""
    scales = [f"{how.cfg:g}"] * (how.cfg != 1) + [f"internal {how.internal:g}"] * (how.internal != 1)
    interval = "everywhere" if (how.low, how.high) == (0, 1) else f"on [{how.low:g}, {how.high:g}]"
    return f"{' and '.join(scales)} {interval}" if scales else "none"


def guidance_name(result: Result) -> str:
    return f"guidance {guidance_text(result.settings)}" if result.settings.guided else "no guidance"


def rho_name(rho: float) -> str:
    return f"{'SDE' if rho else 'ODE'} (rho {rho:g})"


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
    results: Iterable[Result], metric: str, bases: Callable[[Place], Iterable[Place]]
) -> dict[tuple[Place, Place], Gap]:
    """Return (cell, base) -> cell less base, for each base of a cell that is there; cells that failed have none."""
    readings = {place_of(r): value for r, value in measured(results, metric)}
    return {
        (place, base): gap(readings[base], value)
        for place, value in readings.items()
        for base in bases(place)
        if base in readings
    }


def ode_of(place: Place) -> list[Place]:
    """Return the ODE of an SDE's cell."""
    return [place._replace(rho=0.0)] if place.rho else []


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
    return f"Cells are level where the 95 % interval of their difference holds zero.{some}"


def best_in_words(results: Sequence[Result], metric: str) -> str:
    """Return the best cell of a metric as a sentence."""
    top, label = best(results, metric), metric_named(metric).label
    if top is None and not measured(results, metric):
        return f"{label} failed in every cell."
    if top is None:
        return f"Whether lower or higher is better is not known for {label}, so no cell is called best."
    cell, value, rivals, count = top
    name = f"{cell.solver}, {rho_name(cell.settings.rho)}, NFE {cell.settings.nfe}, {guidance_name(cell)}"
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
