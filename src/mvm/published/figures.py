"""Figures for a model card, from what `mvm eval --json` and `mvm sweep` write; those of other weights are refused."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mvm.solver import solver_named
from mvm.untrusted import cut, read_json


class Row(NamedTuple):
    """One figure: by which sampler, how many images, against what."""

    metric: str
    value: float
    error: float | None
    sampler: str
    count: int
    reference: str

    @property
    def cells(self) -> list[str]:
        """Return the row of a table."""
        value = f"{self.value:.4g}" + ("" if self.error is None else f" ± {self.error:.2g}")
        return [self.metric, value, self.sampler, f"{self.count:,}", self.reference]


class Figures(NamedTuple):
    """Figures, and what a reader of them must know."""

    rows: list[Row]
    notes: list[str]


def _cost(settings: Mapping[str, Any]) -> str:
    solver = solver_named(settings["solver"].partition(",")[0])  # a sweep adds what is shared
    if solver.by_tolerance and "tolerance" in settings:
        return f"tolerance {settings['tolerance']:g}"
    return f"{settings.get('evaluations', settings['nfe']):g} evaluations"


def sampler_words(settings: Mapping[str, Any]) -> str:
    """Return a sampler in words."""
    words = [settings["solver"], _cost(settings), f"rho {settings['rho']:g}"]
    scales = [f"{name} {settings[name]:g}" for name in ("cfg", "internal") if settings.get(name, 1) != 1]
    where = [f"guided in [{settings['low']:g}, {settings['high']:g}]"] if scales else ["no guidance"]
    return ", ".join([*words, *scales, *where])


def _against(reference: Mapping[str, Any]) -> str:
    if not reference:
        return "none"
    parts = [str(reference.get("name")), *([str(reference["split"])] if reference.get("split") else [])]
    return ", ".join([*parts, f"{reference['count']:,} images" if reference.get("count") else "count not told"])


def _rows(settings: Mapping[str, Any], metrics: Mapping[str, Any], count: int, against: str) -> list[Row]:
    words = sampler_words(settings)
    return [Row(name, told["value"], told["error"], words, count, against) for name, told in metrics.items()]


def _made(draw: Mapping[str, Any], software: Mapping[str, str]) -> str:
    return f"Seeds from {draw['seed']} on, {draw['labels']} labels; mvm {software['mvm']} on {software['device']}"


def _of_eval(told: Mapping[str, Any]) -> tuple[str, Figures]:
    images = told["images"]
    rows = _rows(images["sampler"], told["metrics"], images["count"], _against(told["reference"]))
    return images["origin"]["sha256"], Figures(rows, [_made(images["draw"], told["software"]), *told["warnings"]])


def _of_sweep(told: Mapping[str, Any]) -> tuple[str, Figures]:
    facts = told["facts"]
    against = _against(facts["reference"])
    cells = [_rows(cell, cell["metrics"], facts["images"], against) for cell in told["results"]]
    notes = [_made(facts["draw"], facts["software"]), *facts["warnings"]]
    return facts["model"]["sha256"], Figures([row for rows in cells for row in rows], notes)


def read_figures(path: Path, weights: Collection[str]) -> Figures:
    """Return the figures in a file; weights: the sha256 of those that they may be of."""
    try:
        told = read_json(path)
        found, figures = _of_sweep(told) if "results" in told else _of_eval(told)
        _ = [row.cells for row in figures.rows]  # a value that is no number shows here
        if not isinstance(found, str):
            raise TypeError("sha256 is no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"--figures {path} tells nothing of a sampled model ({cut(repr(error))}); make it with: "
            "mvm eval RUN --json FILE, "
            "or give the results.json of a sweep"
        ) from None
    if found not in weights:
        raise ValueError(f"--figures {path} is of other weights (sha256 {found[:12]}...); measure these")
    return figures
