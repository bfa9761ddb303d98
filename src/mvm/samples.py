"""Large sets of samples: made in parts by any number of processes, resumed bit for bit, streamed into one file."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm import __version__
from mvm.data.loader import as_received
from mvm.distributed.processes import Processes
from mvm.files import locked, recover, write_text
from mvm.generate import Draw, Sampler, asked_conditions, check_settings, given, mean_cost, solver_record, steps_of
from mvm.model import Model
from mvm.path import Condition
from mvm.path.condition import map_tensors
from mvm.pictures import (
    ARRAYS,
    as_array,
    check_output,
    from_array,
    picture_name,
    require_pictures,
    stored_shape,
    write_stream,
)
from mvm.recipes import SampleConfig
from mvm.store import ArrayStore, as_json
from mvm.untrusted import read_json, refusal, whole_numbers

SAMPLES = "samples.json"


class PartCost(NamedTuple):
    """What is stored with a part: the labels of its images, and what one of them cost."""

    labels: list[int]
    nfe: int
    passes: int


@dataclass(frozen=True)
class Parts:
    """A folder of parts: part-000000.npy ..., of images uint8 NHWC, one file per batch, and samples.json.

    count: images; shape: (C, *space) of one; nfe, passes: what one cost, the mean; values: uint8 or float, see
    mvm.pictures.as_array.
    """

    folder: Path
    count: int
    shape: tuple[int, ...]
    nfe: int = 0
    passes: int = 0
    values: str = "uint8"

    @property
    def store(self) -> ArrayStore:
        other = "ask for the same to go on, remove that folder to begin again, or name another"
        return ArrayStore(self.folder, "samples", "remove this file, and sample again: the other parts are kept", other)

    def cost(self, number: int) -> PartCost:
        """Return labels and cost of a part."""
        table = self.store.table(f"{_stem(number)}.json")
        with self.store.reading(f"{_stem(number)}.json"):
            cost = PartCost(**table)
            whole_numbers(cost.nfe, cost.passes, *cost.labels)
            if not isinstance(cost.labels, list) or not cost.labels:
                raise TypeError("labels must be a list")
        return cost

    def array(self, number: int, count: int) -> np.ndarray:
        """Return the samples of a part as they are stored."""
        dtype, kind = (torch.uint8, np.uint8) if self.values == "uint8" else (torch.float32, np.float32)
        return self.store.array(f"{_stem(number)}.npy", (count, *stored_shape(self.shape, dtype)), kind)

    def has(self, number: int, labels: Tensor) -> bool:
        """Return whether a part is there with all its bytes; one that is damaged is made again."""
        try:
            self.array(number, len(labels))
            return self.cost(number).labels == labels.tolist()
        except (OSError, ValueError):
            return False

    def with_cost(self, parts: int) -> "Parts":
        """Return the same with the mean cost of so many parts."""
        costs = (self.cost(number) for number in range(parts))
        nfe, passes = mean_cost((len(cost.labels), cost.nfe, cost.passes) for cost in costs)
        return replace(self, nfe=nfe, passes=passes)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (B, C, *space) and labels (B,) in order, one part in memory at a time."""
        number = seen = 0
        while seen < self.count:
            labels = self.cost(number).labels
            yield from_array(self.array(number, len(labels))), torch.tensor(labels)
            number, seen = number + 1, seen + len(labels)

    def stored_provenance(self) -> dict[str, Any]:
        """Return all that decided the images."""
        path = self.folder / SAMPLES
        try:
            return read_json(path)
        except (OSError, ValueError):
            raise ValueError(f"{path} is missing or damaged; remove {self.folder}, or name another folder") from None

    def provenance(self) -> dict[str, Any]:
        """Return all that decided the images, and what they cost."""
        return {**self.stored_provenance(), "images": self.count, "nfe": self.nfe, "passes": self.passes}

    def open(self, provenance: Mapping[str, Any]) -> None:
        """Make the folder ready for parts with this provenance; parts of another one are refused."""
        if any(self.folder.glob("part-*.npy")):
            there = self.stored_provenance()
            if isinstance(settings := there.get("settings"), dict):  # an option newer than the parts had its default
                there = {**there, "settings": {**as_json(asdict(SampleConfig())), **settings}}
            if there.get("settings") != provenance["settings"]:  # by which the solver's numbers change, too
                there = {**there, "solver": provenance["solver"]}
            self.store.require_same(there, provenance)
        else:
            self.store.require_own(rf"{re.escape(SAMPLES)}|part-\d+\.(npy|json)")
            self.store.write_table(SAMPLES, provenance)

    def remove_if_empty(self) -> None:
        """Remove a folder in which no part was made: what was asked for was impossible, or stopped at once."""
        if any(self.folder.glob("part-*.npy")):
            return
        for pattern in (SAMPLES, "part-*", ".part-*", f".{SAMPLES}*"):
            for path in self.folder.glob(pattern):
                path.unlink()
        with suppress(OSError):  # someone else's files stay, and so does the folder
            self.folder.rmdir()


def _stem(number: int) -> str:
    return f"part-{number:06d}"


def checksum(condition: Condition) -> str:
    """Return the sha256 of all tensors of a condition, with their names and shapes."""
    digest = hashlib.sha256()

    def add(name: str, tensor: Tensor) -> Tensor:
        array = tensor.cpu().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
        return tensor

    map_tensors(add, condition)
    return digest.hexdigest()


def sample_parts(
    sampler: Sampler,
    draw: Draw,
    settings: SampleConfig,
    folder: Path,
    *,
    processes: Processes | None = None,
    progress: bool = True,
    condition: Condition = None,
    captions: Sequence[str] = (),
    encoder: str | Path = "",
) -> Parts:
    """Return the folder with all parts of a draw; those already there are kept, the others shared by the processes.

    A call that was interrupted, made again, ends with the same bytes, whatever the number of processes; at most the
    batches in flight are lost. Every process must call, and all see the same folder. condition, captions, encoder: of
    a model that has another condition than class labels; a draw goes round their rows.
    """
    model, processes, spans = sampler.model, processes or Processes(), draw.spans()
    parts = Parts(folder, draw.num, model.recipe.data.shape, values=model.recipe.data.values)
    check_settings(model, settings, sampler.auto)
    (labels, conditions), seeds = asked_conditions(model, draw, condition, captions, encoder), draw.chosen_seeds()
    how = {**sampler.facts(), "device": model.device.type, "solver": solver_record(model, settings)}
    how |= sampler.auto_facts(settings)
    drawn = {"origin": model.origin, "draw": asdict(draw), "settings": asdict(settings)}
    given_condition = {} if conditions is None else {"condition": checksum(conditions)}
    provenance = as_json({"mvm": __version__, **drawn, **how, "shape": parts.shape, **given_condition})
    store, missing = parts.store, list[int]()
    with ExitStack() as stack:
        with processes.main_first():
            if processes.main:
                stack.enter_context(store.lock())
                parts.open(provenance)
                stack.callback(parts.remove_if_empty)
                missing = [number for number, span in enumerate(spans) if not parts.has(number, labels[span])]
        missing = processes.broadcast(missing)
        mine = missing[processes.rank :: processes.world]
        there = draw.num - sum(spans[number].stop - spans[number].start for number in missing)
        progress = progress and processes.main
        if progress and there:
            print(f"mvm: {there} of {draw.num} images are there already, in {folder}", file=sys.stderr)
        # the main process's bar takes the others to be as quick
        with tqdm(total=draw.num, initial=there, desc="sample", unit="image", disable=not progress) as bar:
            filled = (draw.filled(spans[number], settings) for number in mine)
            asked = ((given(model, labels[i], conditions), seeds[i]) for i in filled)
            made = sampler.batches(asked, settings, steps_of(bar))
            for number, batch in zip(mine, made, strict=True):
                cost = PartCost(labels[spans[number]].tolist(), batch.nfe, batch.passes)
                # the array comes last: a part with an array is whole
                store.write_table(f"{_stem(number)}.json", cost._asdict(), indent=None)
                store.write(f"{_stem(number)}.npy", as_array(batch.images[: len(cost.labels)]))
                bar.update(min(len(batch.labels) * processes.world, draw.num - bar.n))
        processes.any(False)  # past this, all processes have written theirs
        return processes.broadcast(parts.with_cost(len(spans)) if processes.main else parts)


def read_condition(path: Path) -> Condition:
    """Return the condition in X.npy, or in X.npz: a mapping of its arrays, or the one that it has alone.

    X.npz:KEY is one array of several; X.npz:KEY,MASK embedded text and its mask, as `mvm data prepare` takes them.
    uint8 images become numbers in [-1, 1], other real numbers float32. Nothing is unpickled.
    """
    file, _, asked = str(path).rpartition(":") if not path.exists() and ":" in path.name else (str(path), "", "")
    wanted = dict(zip(("tokens", "mask"), asked.split(","), strict=False)) if asked else {}
    with refusal(f"condition={file} is no whole .npy or .npz of plain arrays"):
        loaded = np.load(file, allow_pickle=False)
        held = loaded.files if isinstance(loaded, np.lib.npyio.NpzFile) else []
        if missing := [key for key in wanted.values() if key not in held]:
            raise ValueError(f"it has the arrays {', '.join(held) or 'without names'}, no {missing[0]}")
        wanted = wanted or {name: name for name in held}
        arrays = {name: loaded[key] for name, key in wanted.items()} or {"": loaded}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return as_received(tensors if len(tensors) > 1 else next(iter(tensors.values())))


def require_written(out: Path, model: Model) -> None:
    """Refuse a file that holds pictures for samples that are none."""
    data = model.recipe.data
    if out.suffix.lower() not in ARRAYS:
        require_pictures(data.shape, torch.uint8 if data.values == "uint8" else torch.float32, f"out={out}")


def parts_beside(out: Path) -> Path:
    """Return where the parts of an output are kept until it is written."""
    out = out.resolve()
    return out.with_name(f".{out.name}.parts")


def note_beside(out: Path) -> Path:
    """Return where the provenance of an output goes: OUT.json, beside a folder too."""
    return out.with_name(f"{out.name}.json")


def check_set(out: Path, count: int) -> None:
    """Refuse an output that cannot be written, or whose provenance would replace a file that is not one."""
    if _is_written(out, count):
        return
    if out.is_dir():  # it may be finished but for the removal of its parts
        with suppress(ValueError):  # another process removes them
            recover(parts_beside(out))
    kind, note = check_output(out, count), note_beside(out)
    if kind == ".png" or not note.exists():
        return
    with suppress(OSError, ValueError):
        if {"mvm", "draw"} <= read_json(note).keys():
            return
    raise ValueError(f"out={out}: its provenance goes to {note}, which is another file; give another name")


def _is_written(out: Path, count: int) -> bool:
    """Whether out is the folder that a call wrote before it was killed: its parts are there still.

    Files are written again, but a folder that is not empty is refused, so that this one must be known.
    """
    if not out.is_dir() or not any(parts_beside(out).glob("part-*.npy")):
        return False
    return sorted(path.name for path in out.iterdir()) == [picture_name(index) for index in range(count)]


def write_set(parts: Parts, out: Path, *, names: Sequence[str] = (), progress: bool = True) -> None:
    """Write finished parts where the suffix says, whole or not, one part in memory; and OUT.json, but for a grid.

    X.png one grid, with `names` of the classes in its margin where they are given; X.npz, X.npy uint8 NHWC (.npz as
    ADM: arr_0, arr_1 labels); X.parquet as on data-set hubs; X.zip or a folder of PNGs.
    """
    check_set(out, parts.count)
    note, provenance, grid = note_beside(out), parts.provenance(), out.suffix.lower() == ".png"
    with locked(parts.folder):
        if not _is_written(out, parts.count):
            write_stream(out, _counted(parts, progress), parts.count, names)
        if not grid:
            write_text(note, json.dumps(provenance, indent=2) + "\n")


def _counted(parts: Parts, progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
    with tqdm(total=parts.count, desc="write", unit="image", disable=not progress) as bar:
        for images, labels in parts.batches():
            yield images, labels
            bar.update(len(images))
