"""One model, many samplers: every cell on the same seeds and labels, kept when done, resumed where it was stopped.

OUT/sweep.json      what all cells share: model, images, reference, figures
OUT/cells/NAME.json a finished cell; NAME.png its first images
OUT/work/NAME/      images of a cell in the making, removed when its figures are written
OUT/results.json, results.csv, report.html, plots/
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvm.distributed.processes import Processes
from mvm.evaluation.cells import Result, file_name
from mvm.evaluation.evaluate import Evaluation, Reference, Side, check_shapes, check_side, evaluate
from mvm.evaluation.gather import Judge
from mvm.evaluation.images import ImageSet, judged_labels, of_parts, require_judged
from mvm.evaluation.report import provenance, require_plots
from mvm.evaluation.sweep_report import REAL, write_report
from mvm.files import atomic, recover_all, remove, write_text
from mvm.generate import Draw, Sampler, check_settings, solver_record, takes_tuned_times
from mvm.metrics.measures import Figure
from mvm.model import Model
from mvm.path.condition import rows
from mvm.pictures import grid, png_bytes
from mvm.samples import Parts, sample_parts
from mvm.settings import SampleConfig
from mvm.store import ArrayStore
from mvm.untrusted import read_json

SHOWN = 40  # images in a cell's grid: with balanced labels of ten classes, four rows
COLUMNS = 10
SHARED = "sweep.json"
CELLS, WORK = "cells", "work"  # folders of results, and of images that are not judged yet


def check_cells(cells: Sequence[SampleConfig], model: Model) -> None:
    """Refuse combinations that cannot be sampled, before the first hour and not after it."""
    require_judged(model)
    for settings in cells:
        try:
            check_settings(model, settings)
        except ValueError as error:
            raise ValueError(f"cell {file_name(settings)} cannot be sampled: {error}") from None


@dataclass
class Sweep:
    """sweep.run(cells): a model, the images drawn from it, what judges them, and the folder that keeps everything."""

    sampler: Sampler
    draw: Draw
    judge: Judge
    reference: Side
    metrics: tuple[str, ...]
    folder: Path
    repeats: int = 1  # draws of each cell, on seeds of their own; more than one give an error
    keep_images: bool = False
    command: str = ""

    @property
    def model(self) -> Model:
        return self.sampler.model

    @property
    def place(self) -> Processes:
        return self.judge.place

    @cached_property
    def target(self) -> Reference:
        """The reference; its features are gathered when the first cell needs them."""
        return Reference(self.judge, self.reference, self.metrics)

    def shared(self) -> dict[str, Any]:
        """Return what a finished cell must share with the others to stand beside them."""
        found = {
            "origin": self.model.origin,
            "draw": asdict(self.draw),
            "repeats": self.repeats,
            "sampling": self.sampler.facts(),
            "reference": self.reference.facts(),
            "judge": {"blocks": self.judge.blocks, "kid_size": self.judge.kid_size},
        }
        return json.loads(json.dumps(found))

    def run(self, cells: Sequence[SampleConfig]) -> list[Result]:
        """Return the results of the asked cells, computing what is missing; the report shows all of the folder."""
        require_plots()
        check_cells(cells, self.model)
        if self.folder.is_dir() and not (self.folder / SHARED).is_file():  # a run, among whose files a sweep would lie
            _store(self.folder).require_own(rf"{CELLS}|{WORK}|\..*", "give another --out")
        check_side(self.metrics, self.reference, reference=True)
        check_shapes({"shape": self.model.recipe.data.shape}, self.reference.facts())
        with ExitStack() as stack:
            with self.place.main_first():
                networks = self.judge.facts(self.metrics)  # opens them: weights may be missing
                if self.place.main:
                    (self.folder / CELLS).mkdir(parents=True, exist_ok=True)
                    stack.enter_context(_store(self.folder).lock())
                    for folder in (self.folder, self.folder / CELLS, self.folder / WORK):
                        recover_all(folder)
                    self._check_shared(networks)
            self._prepare([settings for settings in cells if not self._path(settings).is_file()])
            found = []
            for number, settings in enumerate(cells, 1):
                if self.judge.progress and self.place.main:
                    print(f"cell {number} of {len(cells)}: {self._name(settings)}", flush=True)
                found.append(self._cell(settings))
            if self.place.main:
                self._write()
                with suppress(OSError):  # images that are kept lie there
                    (self.folder / WORK).rmdir()
            self.place.any(False)  # past this, the report is there
        return [Result.read(cell["result"]) for cell in found]

    def _write(self) -> None:
        """Write results.json and the report of all cells in the folder."""
        found = [cell for path in sorted((self.folder / CELLS).glob("*.json")) if (cell := _read_cell(path))]
        facts, results = self._facts(found), [cell["result"] for cell in found]
        if self.reference.images is not None and not (self.folder / REAL).is_file():
            _write_grid(self.folder / REAL, _spread(self.reference.images))
        write_text(self.folder / "results.json", json.dumps({"facts": facts, "results": results}, indent=2) + "\n")
        write_report(self.folder, [Result.read(result) for result in results], facts)

    def _prepare(self, cells: Sequence[SampleConfig]) -> None:
        """Compile, and plan encoder sharing, so that no cell's seconds hold what is done once."""
        if cells and self.sampler.compiled:
            size = min(self.draw.batch, self.draw.num)  # let the compiler see one batch
            labels, seeds = judged_labels(self.model, self.draw), self.draw.chosen_seeds()[:size]
            self.sampler.batch(rows(labels, slice(size)), seeds, SampleConfig(nfe=1))
        for settings in cells:
            if settings.share:
                self.sampler.sharing_plan(settings)

    def _name(self, settings: SampleConfig) -> str:
        return file_name(settings, takes_tuned_times(self.model, settings))

    def _path(self, settings: SampleConfig) -> Path:
        return self.folder / CELLS / f"{self._name(settings)}.json"

    def _check_shared(self, networks: Mapping[str, Any]) -> None:
        """Write what the cells share, or refuse to mix with those of another kind; networks may be added."""
        path, now = self.folder / SHARED, self.shared()
        there = _read(path, "networks") or {**now, "networks": {}}
        known = there["networks"]
        before = {**there, "networks": {name: facts for name, facts in known.items() if name in networks}}
        asked = {**now, "networks": {name: facts for name, facts in networks.items() if name in known}}
        _store(self.folder).require_same(before, asked)
        write_text(path, json.dumps({**now, "networks": {**known, **networks}}, indent=2) + "\n")

    def _cell(self, settings: SampleConfig) -> dict[str, Any]:
        """Return a cell: what is kept of it, completed by what is missing."""
        path = self._path(settings)
        kept = self.place.broadcast(_read_cell(path) if self.place.main else None)
        solver = solver_record(self.model, settings)
        if kept and kept.get("solver") != solver:
            raise ValueError(
                f"{path} was made by another solver ({kept.get('solver', 'not recorded')}, now {solver}); "
                "remove it, and it is computed again, or give another --out"
            )
        there = kept["result"]["metrics"] if kept else {}
        missing = tuple(name for name in self.metrics if name not in there)
        if kept and not missing:
            return kept
        cell = _completed({**self._compute(settings, missing), "solver": solver}, kept)
        if self.place.main:
            write_text(path, json.dumps(cell, indent=2) + "\n")
            if not self.keep_images:
                remove(self.folder / WORK / self._name(settings))
        return cell

    def _compute(self, settings: SampleConfig, names: Sequence[str]) -> dict[str, Any]:
        """Return the figures of a cell, the mean over its repeats."""
        rounds = [self._round(settings, names, number) for number in range(self.repeats)]
        parts, _, judged = rounds[0]
        picture = f"cells/{self._name(settings)}.png"
        if self.place.main:
            _write_grid(self.folder / picture, (images for images, _ in parts.batches()))
        result = Result(
            settings,
            evaluations=parts.nfe,
            passes=parts.passes,
            seconds=sum(seconds for _, seconds, _ in rounds) / self.repeats,
            metrics={name: _mean([r.metrics[name] for _, _, r in rounds])._asdict() for name in names},
            grid=picture,
            tuned=takes_tuned_times(self.model, settings),
        )
        facts = {**judged.as_dict(), "metrics": None}
        return {"settings": asdict(settings), "result": result.as_dict(), "facts": facts}

    def _round(self, settings: SampleConfig, names: Sequence[str], number: int) -> tuple[Parts, float, Evaluation]:
        """Return the images of one repeat, the seconds they took, and their figures."""
        folder = self.folder / WORK / self._name(settings) / str(number)
        draw = replace(self.draw, seed=self.draw.seed + number * self.draw.num)
        there, start = len(list(folder.glob("part-*.npy"))), time.perf_counter()
        parts = sample_parts(self.sampler, draw, settings, folder, place=self.place, progress=self.judge.progress)
        # of all images, from those made now: an interrupted call may have left the others
        now = (time.perf_counter() - start) * len(draw.spans()) / max(1, len(draw.spans()) - there)
        seconds = self._kept_seconds(folder, now)
        return parts, seconds, evaluate(self.judge, Side(self._name(settings), of_parts(parts)), self.target, names)

    def _kept_seconds(self, folder: Path, now: float) -> float:
        """Return the seconds noted beside a folder when its images were finished; note them if this was now."""
        note = folder.with_name(f"{folder.name}.seconds.json")
        if self.place.main:
            with _damaged(note):
                now = float((_read(note) or {"seconds": now})["seconds"])
            write_text(note, json.dumps({"seconds": now}) + "\n")
        return self.place.broadcast(now)

    def _facts(self, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the provenance of the report."""
        first = found[0]["facts"]
        networks = {name: facts for cell in found for name, facts in cell["facts"]["networks"].items()}
        warnings = dict.fromkeys(warning for cell in found for warning in cell["facts"]["warnings"])
        return {
            "warnings": list(warnings),
            "command": self.command,
            "name": self.model.origin.get("run", self.model.recipe.name),
            "images": self.draw.num,
            "model": self.model.origin,
            "draw": {**asdict(self.draw), "repeats": self.repeats},
            "sampling": self.sampler.facts(),
            "reference": first["reference"],
            "networks": networks,
            "software": {**dict(provenance()), **first["software"]},
        }


def _store(folder: Path) -> ArrayStore:
    return ArrayStore(folder, "a sweep", "remove it, and it is computed again", "give another --out")


def _damaged(path: Path) -> AbstractContextManager[None]:
    return _store(path.parent).reading(path.name)


def _require_tables(stored: Mapping[str, Any], *names: str) -> None:
    if missing := [name for name in names if not isinstance(stored.get(name), dict)]:
        raise ValueError(f"{missing[0]} is no table")


def _read(path: Path, *tables: str) -> dict[str, Any] | None:
    """Return a JSON file that holds these tables; None where there is none."""
    if not path.is_file():
        return None
    with _damaged(path):
        stored = read_json(path)
        _require_tables(stored, *tables)
        return stored


def _read_cell(path: Path) -> dict[str, Any] | None:
    """Return a finished cell with all that a report asks of it; None where there is none."""
    stored = _read(path, "result", "facts")
    if stored is not None:
        with _damaged(path):
            _require_tables(stored["facts"], "networks", "reference", "software")
            list(stored["facts"]["warnings"])
            _require_tables(Result.read(stored["result"]).metrics, *stored["result"]["metrics"])
    return stored


def _completed(made: dict[str, Any], kept: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a cell with the figures it had before, and all that made both."""
    if kept is None:
        return made
    before, now = kept["facts"], made["facts"]
    networks = {**before["networks"], **now["networks"]}
    warnings = list(dict.fromkeys([*before["warnings"], *now["warnings"]]))
    metrics = {**kept["result"]["metrics"], **made["result"]["metrics"]}
    result = {**made["result"], "metrics": metrics, "seconds": kept["result"]["seconds"]}
    return {**made, "result": result, "facts": {**now, "networks": networks, "warnings": warnings}}


def _mean(figures: Sequence[Figure]) -> Figure:
    """Return the mean over repeats, its error from their spread; of one repeat, the figure as it is.

    A repeat has its seeds in common with the other cells: what it adds to the error is kept, as a block's is.
    """
    if len(figures) == 1:
        return figures[0]
    values = np.array([figure.value for figure in figures])
    note = f"mean of {len(values)} repeats on other seeds, std {values.std(ddof=1):.3g}; {figures[0].note}".rstrip("; ")
    parts = (values - values.mean()) / (len(values) * (len(values) - 1)) ** 0.5
    return Figure(float(values.mean()), float(np.linalg.norm(parts)), note, tuple(parts.tolist()))


def _write_grid(path: Path, batches: Iterable[Tensor]) -> None:
    """Write the first SHOWN of images that come in batches, small ones enlarged by whole pixels."""
    images: list[Tensor] = []
    for batch in batches:
        images.append(batch)
        if sum(map(len, images)) >= SHOWN:
            break
    picture = grid(torch.cat(images)[:SHOWN], COLUMNS, scale=max(1, 64 // images[0].shape[-1]), gap=2)
    with atomic(path) as temporary:
        temporary.write_bytes(png_bytes(picture))


def _spread(images: ImageSet) -> Iterator[Tensor]:
    """Yield SHOWN images spread evenly over a set whose size is known, else its first: sets are sorted by class."""
    apart = max(1, images.facts.get("count", 0) // SHOWN)
    for _, batch in images.chunks(1, lambda number: number % apart == 0):
        yield batch.cpu()
