"""One model, many samplers: every cell on the same seeds and labels, stored when done, resumed where it was stopped.

OUT/sweep.json      what all cells share: model, images, reference, figures
OUT/cells/NAME.json a finished cell; NAME.png its first images
OUT/work/NAME/      images of an unfinished cell, removed when its figures are written
OUT/results.json, results.csv, report.html, plots/
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvm.distributed.processes import Processes
from mvm.evaluation.cells import Result, auto_name, file_name
from mvm.evaluation.evaluate import ComparedSet, Evaluation, Judge, Reference, check_shapes, check_side, evaluate
from mvm.evaluation.images import ImageSet, judged_condition, of_parts, require_judged
from mvm.evaluation.report import provenance, require_plots
from mvm.evaluation.sweep_report import REAL, write_report
from mvm.files import atomic, recover_all, remove
from mvm.generate import Draw, Sampler, asked_conditions, check_settings, given, solver_record, takes_tuned_times
from mvm.metrics.measures import Figure
from mvm.model import Model
from mvm.path import Condition
from mvm.pictures import grid, png_bytes
from mvm.samples import Parts, sample_parts
from mvm.settings import SampleConfig
from mvm.store import ArrayStore, as_json
from mvm.untrusted import read_json

GRID_IMAGES, COLUMNS = 40, 10  # of a cell's grid: with balanced labels of ten classes, four rows
SHARED = "sweep.json"
CELLS, WORK = "cells", "work"  # folders of results, and of images without figures yet


def check_cells(cells: Sequence[SampleConfig], model: Model, auto: Model | None = None) -> None:
    """Refuse combinations that cannot be sampled, before the first hour and not after it."""
    require_judged(model)
    for settings in cells:
        try:
            check_settings(model, settings, auto)
        except ValueError as error:
            raise ValueError(f"cell {file_name(settings)} cannot be sampled: {error}") from None


@dataclass
class Sweep:
    """sweep.run(cells): a model, the images drawn from it, what judges them, and the folder that stores everything."""

    sampler: Sampler
    draw: Draw
    judge: Judge
    reference: ComparedSet
    metrics: tuple[str, ...]
    folder: Path
    repeats: int = 1  # draws of each cell, on seeds of their own; more than one give an error
    keep_images: bool = False
    command: str = ""

    @property
    def model(self) -> Model:
        return self.sampler.model

    @property
    def processes(self) -> Processes:
        return self.judge.processes

    @cached_property
    def target(self) -> Reference:
        """The reference; its features are gathered when the first cell needs them."""
        return Reference(self.judge, self.reference, self.metrics)

    @cached_property
    def condition(self) -> Condition:
        """What images are generated for, where that is no label."""
        return judged_condition(self.model)

    def shared(self) -> dict[str, Any]:
        """Return what a finished cell must share with the others to be compared with them."""
        return as_json(
            {
                "origin": self.model.origin,
                "draw": asdict(self.draw),
                "repeats": self.repeats,
                "sampling": self.sampler.facts(),
                "reference": self.reference.facts(),
                "judge": {"blocks": self.judge.blocks, "kid_size": self.judge.kid_size},
            }
        )

    def run(self, cells: Sequence[SampleConfig]) -> list[Result]:
        """Return the results of the asked cells, computing what is missing; the report has all of the folder."""
        require_plots()
        check_cells(cells, self.model, self.sampler.auto)
        check_side(self.metrics, self.reference, reference=True)
        check_shapes({"shape": self.model.recipe.data.shape}, self.reference.facts())
        with ExitStack() as stack:
            with self.processes.main_first():
                networks = self.judge.facts(self.metrics)  # opens them: weights may be missing
                if self.processes.main:
                    stack.enter_context(_store(self.folder).lock())
                    if not (self.folder / SHARED).is_file():  # a run, perhaps, among whose files a sweep would lie
                        _store(self.folder).require_own(rf"{CELLS}|{WORK}|\..*", "give another --out")
                    (self.folder / CELLS).mkdir(exist_ok=True)
                    for folder in (self.folder, self.folder / CELLS, self.folder / WORK):
                        recover_all(folder)
                    self._check_shared(networks)
            self._prepare([settings for settings in cells if not self._path(settings).is_file()])
            results = []
            for number, settings in enumerate(cells, 1):
                if self.judge.progress and self.processes.main:
                    print(f"cell {number} of {len(cells)}: {self._name(settings)}", flush=True)
                results.append(Result.read(self._cell(settings)["result"]))
            if self.processes.main:
                self._write()
                with suppress(OSError):  # images that are kept lie there
                    (self.folder / WORK).rmdir()
            self.processes.any(False)  # past this, the report is there
        return results

    def _write(self) -> None:
        """Write results.json and the report of all cells in the folder."""
        cells = [cell for path in sorted((self.folder / CELLS).glob("*.json")) if (cell := _read_cell(path))]
        first, results = cells[0]["facts"], [cell["result"] for cell in cells]
        facts = {
            "warnings": list(dict.fromkeys(warning for cell in cells for warning in cell["facts"]["warnings"])),
            "command": self.command,
            "name": self.model.origin.get("run", self.model.recipe.name),
            "images": self.draw.num,
            "model": self.model.origin,
            **{f"autoguidance by {auto_name(cell['auto'])}": cell["auto"] for cell in cells if "auto" in cell},
            "draw": {**asdict(self.draw), "repeats": self.repeats},
            "sampling": self.sampler.facts(),
            "reference": first["reference"],
            "networks": {name: known for cell in cells for name, known in cell["facts"]["networks"].items()},
            "software": {**dict(provenance()), **first["software"]},
        }
        if self.reference.images is not None and not (self.folder / REAL).is_file():
            _write_grid(self.folder / REAL, _spread(self.reference.images))
        _store(self.folder).write_table("results.json", {"facts": facts, "results": results})
        write_report(self.folder, [Result.read(result) for result in results], facts)

    def _prepare(self, cells: Sequence[SampleConfig]) -> None:
        """Compile, and plan encoder sharing, so that no cell's seconds hold what is done once."""
        if cells and self.sampler.compiled:
            size = min(self.draw.batch, self.draw.num)  # let the compiler see one batch
            labels, conditions = asked_conditions(self.model, self.draw, self.condition)
            scale = next((settings.auto_scale for settings in cells if settings.auto_scale != 1), 1.0)
            once, seeds = SampleConfig(nfe=1, auto_scale=scale), self.draw.chosen_seeds()[:size]
            self.sampler.batch(given(self.model, labels[:size], conditions), seeds, once)
        for settings in cells:
            if settings.share:
                self.sampler.sharing_plan(settings)

    def _name(self, settings: SampleConfig) -> str:
        auto = self.sampler.auto_facts(settings).get("auto", {}).get("sha256", "")
        return file_name(settings, takes_tuned_times(self.model, settings), auto)

    def _path(self, settings: SampleConfig) -> Path:
        return self.folder / CELLS / f"{self._name(settings)}.json"

    def _check_shared(self, networks: Mapping[str, Any]) -> None:
        """Write what the cells share, or refuse to mix with those of another kind; networks may be added."""
        store, now = _store(self.folder), self.shared()
        there = _read(self.folder / SHARED, "networks") or {**now, "networks": {}}
        known = there["networks"]
        before = {**there, "networks": {name: facts for name, facts in known.items() if name in networks}}
        asked = {**now, "networks": {name: facts for name, facts in networks.items() if name in known}}
        store.require_same(before, asked)
        store.write_table(SHARED, {**now, "networks": {**known, **networks}})

    def _cell(self, settings: SampleConfig) -> dict[str, Any]:
        """Return a cell: what is stored of it, completed by what is missing."""
        path, solver = self._path(settings), solver_record(self.model, settings)
        stored = self.processes.broadcast(_read_cell(path) if self.processes.main else None)
        if stored and stored.get("solver") != solver:
            raise ValueError(
                f"{path} was made by another solver ({stored.get('solver', 'not recorded')}, now {solver}); "
                "remove it, and it is computed again, or give another --out"
            )
        missing = [name for name in self.metrics if not stored or name not in stored["result"]["metrics"]]
        if stored and not missing:
            return stored
        cell: dict[str, Any] = {**self._compute(settings, missing), "solver": solver}
        if stored:  # the figures it had before, and all that made both
            result, facts, before = cell["result"], cell["facts"], stored["facts"]
            result["metrics"] = {**stored["result"]["metrics"], **result["metrics"]}
            result["seconds"] = stored["result"]["seconds"]
            facts["networks"] = {**before["networks"], **facts["networks"]}
            facts["warnings"] = list(dict.fromkeys([*before["warnings"], *facts["warnings"]]))
        if self.processes.main:
            _store(path.parent).write_table(path.name, cell)
            if not self.keep_images:
                remove(self.folder / WORK / self._name(settings))
        return cell

    def _compute(self, settings: SampleConfig, names: Sequence[str]) -> dict[str, Any]:
        """Return the figures of a cell, the mean over its repeats."""
        rounds = [self._round(settings, names, number) for number in range(self.repeats)]
        (parts, _, evaluation), auto = rounds[0], self.sampler.auto_facts(settings)
        picture = f"{CELLS}/{self._name(settings)}.png"
        if self.processes.main:
            _write_grid(self.folder / picture, (images for images, _ in parts.batches()))
        result = Result(
            settings,
            evaluations=parts.nfe,
            passes=parts.passes,
            seconds=sum(seconds for _, seconds, _ in rounds) / self.repeats,
            metrics={name: _mean([each.metrics[name] for _, _, each in rounds])._asdict() for name in names},
            grid=picture,
            tuned=takes_tuned_times(self.model, settings),
            auto=auto_name(auto.get("auto", {})),
        )
        facts = {**evaluation.as_dict(), "metrics": None}
        return {"settings": asdict(settings), **auto, "result": result.as_dict(), "facts": facts}

    def _round(self, settings: SampleConfig, names: Sequence[str], number: int) -> tuple[Parts, float, Evaluation]:
        """Return the images of one repeat, the seconds they took, and their figures."""
        name = self._name(settings)
        folder = self.folder / WORK / name / str(number)
        draw = replace(self.draw, seed=self.draw.seed + number * self.draw.num)
        there, start = len(list(folder.glob("part-*.npy"))), time.perf_counter()
        how: dict[str, Any] = {
            "processes": self.processes,
            "progress": self.judge.progress,
            "condition": self.condition,
        }
        parts = sample_parts(self.sampler, draw, settings, folder, **how)
        # of all images, from those sampled now: an interrupted call may have left the others
        seconds = (time.perf_counter() - start) * len(draw.spans()) / max(1, len(draw.spans()) - there)
        note = f"{number}.seconds.json"  # the seconds when the images were finished
        if self.processes.main:
            with _store(folder.parent).reading(note):
                seconds = float((_read(folder.parent / note) or {"seconds": seconds})["seconds"])
            _store(folder.parent).write_table(note, {"seconds": seconds}, indent=None)
        seconds = self.processes.broadcast(seconds)
        return parts, seconds, evaluate(self.judge, ComparedSet(name, of_parts(parts)), self.target, names)


def _store(folder: Path) -> ArrayStore:
    return ArrayStore(folder, "a sweep", "remove it, and it is computed again", "give another --out")


def _require_tables(stored: Mapping[str, Any], *names: str) -> None:
    if missing := [name for name in names if not isinstance(stored.get(name), dict)]:
        raise ValueError(f"{missing[0]} is no table")


def _read(path: Path, *tables: str) -> dict[str, Any] | None:
    """Return a JSON file that holds these tables; None where there is none."""
    if not path.is_file():
        return None
    with _store(path.parent).reading(path.name):
        stored = read_json(path)
        _require_tables(stored, *tables)
        return stored


def _read_cell(path: Path) -> dict[str, Any] | None:
    """Return a finished cell with all that a report asks of it; None where there is none."""
    stored = _read(path, "result", "facts")
    if stored is not None:
        with _store(path.parent).reading(path.name):
            _require_tables(stored["facts"], "networks", "reference", "software")
            list(stored["facts"]["warnings"])
            _require_tables(Result.read(stored["result"]).metrics, *stored["result"]["metrics"])
    return stored


def _mean(figures: Sequence[Figure]) -> Figure:
    """Return the mean over repeats, its error from their spread; of one repeat, the figure as it is.

    A repeat has its seeds in common with the other cells: what it adds to the error is stored, as a block's is.
    """
    if len(figures) == 1:
        return figures[0]
    values = np.array([figure.value for figure in figures])
    note = f"mean of {len(values)} repeats on other seeds, std {values.std(ddof=1):.3g}; {figures[0].note}".rstrip("; ")
    parts = (values - values.mean()) / (len(values) * (len(values) - 1)) ** 0.5
    return Figure(float(values.mean()), float(np.linalg.norm(parts)), note, tuple(parts.tolist()))


def _write_grid(path: Path, batches: Iterable[Tensor]) -> None:
    """Write the first GRID_IMAGES of images that come in batches, small ones enlarged by whole pixels."""
    images: list[Tensor] = []
    for batch in batches:
        images.append(batch)
        if sum(map(len, images)) >= GRID_IMAGES:
            break
    picture = grid(torch.cat(images)[:GRID_IMAGES], COLUMNS, scale=max(1, 64 // images[0].shape[-1]), gap=2)
    with atomic(path) as temporary:
        temporary.write_bytes(png_bytes(picture))


def _spread(images: ImageSet) -> Iterator[Tensor]:
    """Yield GRID_IMAGES images spread evenly over a set of known size, else its first: sets are sorted by class."""
    apart = max(1, images.facts.get("count", 0) // GRID_IMAGES)
    for _, batch in images.chunks(1, lambda number: number % apart == 0):
        yield batch.cpu()
