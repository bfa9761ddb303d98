"""tuned.json beside a model: times of the default solver that `mvm tune` fitted to its weights.

They are used where no solver is named and rho is 0, for the number of evaluations and guidance of an entry.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mvm.files import write_text
from mvm.published.format import MOST_JSON, TUNED
from mvm.recipes import SampleConfig
from mvm.solver import Adams, Guidance
from mvm.untrusted import read_json, refusal

FORMAT = 1
MOST_TIMES = 1001
Key = tuple[int, tuple[Guidance, ...]]  # evaluations, guidance


@dataclass(frozen=True)
class Entry:
    """A solver for one number of evaluations under one guidance, and RMSEs to a long run on noises not fitted to."""

    nfe: int
    cfg: float
    low: float
    high: float
    internal: float
    solver: Adams
    default: float
    tuned: float

    @property
    def key(self) -> Key:
        settings = SampleConfig(nfe=self.nfe, cfg=self.cfg, low=self.low, high=self.high, internal=self.internal)
        return self.nfe, settings.guidance()

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as tuned.json has it, of which `read_entry` makes it again."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {"nfe": self.nfe, **numbers, **self.solver_options(), "times": list(self.solver.given)}

    def solver_options(self) -> dict[str, float]:
        """Return what was fitted besides the times, by the names of `mvm.solver.adams`."""
        return {name: getattr(self.solver, name) for name in _SOLVER}


_NUMBERS = ("cfg", "low", "high", "internal", "default", "tuned")
_SOLVER = ("b", "end_b", "spread")


def read_entry(table: Mapping[str, Any]) -> Entry:
    """Return an entry of tuned.json; one that makes no sense is a ValueError, KeyError or TypeError."""
    numbers: dict[str, Any] = {name: float(table[name]) for name in _NUMBERS}
    shape: dict[str, Any] = {name: float(table[name]) for name in _SOLVER}
    times = tuple(float(t) for t in table["times"])
    if not all(map(math.isfinite, (*numbers.values(), *shape.values(), *times))):
        raise ValueError("a number is not finite")
    if not 3 <= len(times) <= MOST_TIMES or table["nfe"] != len(times) - 1:
        raise ValueError(f"{len(times)} times do not go with nfe={table['nfe']}")
    if not (0 < times[0] <= 1 and times[-1] == 0 and all(s > t for s, t in pairwise(times))):
        raise ValueError("times must fall from 1 at most to 0")
    return Entry(nfe=len(times) - 1, solver=Adams(given=times, **shape), **numbers)


def read_tuned(folder: Path, weights: str) -> dict[Key, Entry]:
    """Return the entries by evaluations and guidance; none where there is no file, or it is of other weights."""
    path = folder / TUNED
    if not path.is_file():
        return {}
    with refusal(f"'{path}' holds no tuned times", "remove it, and tune again"):
        table = read_json(path, MOST_JSON)
        if table["format"] != FORMAT:
            raise ValueError(f"format {table['format']!r} is unknown")
        entries = [read_entry(entry) for entry in table["tuned"]]
    return {entry.key: entry for entry in entries} if table["weights"] == weights else {}


def write_tuned(folder: Path, weights: str, entries: dict[Key, Entry]) -> None:
    """Write the entries of these weights (their sha256), in place of what was there."""
    table = {"format": FORMAT, "weights": weights, "tuned": [entry.as_dict() for entry in entries.values()]}
    write_text(folder / TUNED, json.dumps(table, indent=1) + "\n")
