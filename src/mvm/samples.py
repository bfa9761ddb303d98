"""Large sets of samples: made in parts by any number of processes, resumed bit for bit, streamed into one file."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm import __version__, noise
from mvm.distributed.processes import Processes
from mvm.files import locked, put_in_place, temporary_beside, write_text
from mvm.generate import (
    Generated,
    asked_classes,
    check_settings,
    computed_by,
    cycle_labels,
    generate_batches,
    mean_cost,
    solver_told,
    steps_of,
)
from mvm.model import Model
from mvm.options import at_least, choose
from mvm.pictures import channels_last, check_output, picture_name, write_stream
from mvm.precision import PRECISIONS
from mvm.recipes import SampleConfig
from mvm.untrusted import cut, map_npy, read_json, refusal, whole_numbers

SAMPLES = "samples.json"
LABELS = dict.fromkeys(("balanced", "random"))


@dataclass(frozen=True)
class Draw:
    """Which images: how many, their seeds and labels.

    seed: image i has seed `seed + i`. labels: balanced goes round the classes, random draws each from the image's own
    seed. classes: to go round or draw from; all when empty. batch: images made together, and in one part.
    """

    num: int
    seed: int = 0
    labels: str = "balanced"
    classes: tuple[int, ...] = ()
    batch: int = 256

    def __post_init__(self) -> None:
        at_least("num", self.num, 1)
        at_least("seed", self.seed, 0)
        at_least("batch", self.batch, 1)
        choose("labels", self.labels, LABELS)

    def chosen_seeds(self) -> Tensor:
        """Return the seeds (num,)."""
        return noise.as_seeds(range(self.seed, self.seed + self.num), self.num)

    def chosen_labels(self, num_classes: int) -> Tensor:
        """Return the labels (num,), int64."""
        if self.labels == "balanced":
            return cycle_labels(self.classes, self.num, num_classes)
        chosen = torch.tensor(asked_classes(self.classes, num_classes))
        drawn = noise.uniform(self.chosen_seeds(), noise.LABEL, (1,))[:, 0] * len(chosen)
        return chosen[drawn.long()]

    def spans(self) -> list[slice]:
        """Return the images of each part."""
        return [slice(start, min(start + self.batch, self.num)) for start in range(0, self.num, self.batch)]


class Cost(NamedTuple):
    """What is kept beside a part: the labels of its images, and what one of them cost."""

    labels: list[int]
    nfe: int
    passes: int


@dataclass(frozen=True)
class Parts:
    """A folder of finished parts: part-000000.npy ..., uint8 NHWC, one file per batch, and samples.json.

    count: images; shape: (C, H, W) of one; nfe, passes: what one cost, the mean.
    """

    folder: Path
    count: int
    shape: tuple[int, int, int]
    nfe: int
    passes: int

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 images (B, C, H, W) and labels (B,) in order, one part in memory at a time."""
        number = seen = 0
        while seen < self.count:
            images = self._images(number)
            labels = torch.tensor(_read_cost(self.folder, number).labels)
            if len(images) != len(labels) or not len(images):
                raise _damaged(_part(self.folder, number), f"{len(images)} images, {len(labels)} labels")
            yield images, labels
            number, seen = number + 1, seen + len(images)

    def _images(self, number: int) -> Tensor:
        """Return the uint8 images (B, C, H, W) of a part."""
        path, (channels, height, width) = _part(self.folder, number), self.shape
        with refusal(f"{path} is damaged", _REMEDY):
            found = map_npy(path)
        if found.dtype != np.uint8 or found.shape[1:] != (height, width, channels):
            raise _damaged(path, f"{found.dtype} {found.shape}")
        return torch.from_numpy(np.array(found)).permute(0, 3, 1, 2).contiguous()

    def provenance(self) -> dict[str, Any]:
        """Return all that decided the images, and what they cost."""
        return {**_read_provenance(self.folder), "images": self.count, "nfe": self.nfe, "passes": self.passes}


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.npy"


_REMEDY = "remove this file, and sample again: the other parts are kept"


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged ({why}); {_REMEDY}")


def _read_cost(folder: Path, number: int) -> Cost:
    path = _part(folder, number).with_suffix(".json")
    try:
        found = Cost(**read_json(path))
        whole_numbers(found.nfe, found.passes, *found.labels)
        if not isinstance(found.labels, list):
            raise TypeError("labels must be a list")
    except (ValueError, TypeError) as error:
        raise _damaged(path, cut(error)) from None
    return found


def _write_part(folder: Path, number: int, made: Generated) -> None:
    """Write a part; the array comes last, so that a part with an array is whole."""
    path = _part(folder, number)
    cost = Cost(made.labels.tolist(), made.nfe, made.passes)
    write_text(path.with_suffix(".json"), json.dumps(cost._asdict()) + "\n")
    temporary = temporary_beside(path)
    np.save(temporary, channels_last(made.images))
    put_in_place(temporary, path)


def _is_whole(folder: Path, number: int, labels: Tensor, shape: Sequence[int]) -> bool:
    """Whether a part is there with all its bytes; one that is damaged is made again."""
    channels, height, width = shape
    try:
        with refusal("damaged"):
            found = map_npy(_part(folder, number))
        told = _read_cost(folder, number).labels
    except (OSError, ValueError):
        return False
    whole = found.dtype == np.uint8 and found.shape == (len(labels), height, width, channels)
    return whole and told == labels.tolist()


def _read_provenance(folder: Path) -> dict[str, Any]:
    path = folder / SAMPLES
    try:
        found = read_json(path)
    except (OSError, ValueError):
        raise ValueError(f"{path} is missing or damaged; remove {folder}, or name another folder") from None
    return found


def _provenance(
    model: Model, draw: Draw, settings: SampleConfig, origin: Mapping[str, Any], precision: str
) -> dict[str, Any]:
    """Return what decides every bit of the images, as JSON has it."""
    how = {**computed_by(model, precision), "device": model.device.type}
    weights = {**model.origin, **origin}
    found = {"mvm": __version__, "origin": weights, "draw": asdict(draw), "settings": asdict(settings), **how}
    return json.loads(json.dumps({**found, "solver": solver_told(model, settings), "shape": model.recipe.data.shape}))


def _flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what has another value now, by dotted names."""
    before, now = _flat(old), _flat(new)
    names = [*now, *(name for name in before if name not in now)]
    told = [(name, before.get(name), now.get(name)) for name in names]
    return [f"{name} ({was}, now {is_now})" for name, was, is_now in told if was != is_now]


def _open(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Make the folder ready for parts with this provenance; parts of another one are refused."""
    if any(folder.glob("part-*.npy")):
        if changed := differences(_read_provenance(folder), provenance):
            asked = any(name.startswith("settings.") for name in changed)  # by which the solver's numbers change, too
            changed = [name for name in changed if not (asked and name.startswith("solver "))]
            raise ValueError(
                f"{folder} holds parts made with other values of {', '.join(changed)}; ask for the same to go on, "
                "remove that folder to begin again, or name another"
            )
        return
    foreign = [entry for entry in folder.iterdir() if not entry.name.startswith((SAMPLES, "part-", "."))]
    if foreign:
        raise ValueError(f"{folder} is a folder with other files in it ({foreign[0].name}); name a new one")
    write_text(folder / SAMPLES, json.dumps(provenance, indent=2) + "\n")


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder in which no part was made: what was asked for was impossible, or stopped at once."""
    if any(folder.glob("part-*.npy")):
        return
    for path in [folder / SAMPLES, *folder.glob("part-*"), *folder.glob(".part-*"), *folder.glob(f".{SAMPLES}*")]:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # someone else's files stay, and so does the folder
        folder.rmdir()


def _held(folder: Path) -> AbstractContextManager[None]:
    return locked(folder, f"{folder} is in use by another process that samples into it; wait for it, or name another")


def sample_parts(
    model: Model,
    draw: Draw,
    settings: SampleConfig,
    folder: Path,
    *,
    place: Processes | None = None,
    origin: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    progress: bool = True,
) -> Parts:
    """Return the folder with all parts of a draw; those already there are kept, the others shared by the processes.

    A call that was interrupted, made again, ends with the same bytes, whatever the number of processes; at most the
    batches in flight are lost. origin: where the weights came from, beside what `mvm.load` noted. Every process must
    call, and all see the same folder.
    """
    place, shape, spans = place or Processes(), model.recipe.data.shape, draw.spans()
    choose("precision", precision, PRECISIONS)
    check_settings(model, settings)
    labels, seeds = draw.chosen_labels(model.num_classes), draw.chosen_seeds()
    provenance = _provenance(model, draw, settings, origin or {}, precision)
    missing: list[int] = []
    with ExitStack() as stack:
        with place.main_first():
            if place.main:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_held(folder))
                temporary_beside(folder)  # a crash may have left half of an earlier set, on its way out
                _open(folder, provenance)
                stack.callback(_remove_if_empty, folder)
                missing = [n for n, span in enumerate(spans) if not _is_whole(folder, n, labels[span], shape)]
        missing = place.broadcast(missing)
        with _bar(draw, [spans[n] for n in missing], place, folder, progress) as bar:
            mine = missing[place.rank :: place.world]
            filled = (_filled(spans[number], draw, settings) for number in mine)
            batches = ((labels[i], seeds[i]) for i in filled)
            made = generate_batches(model, batches, settings, precision, steps_of(bar))
            for number, batch in zip(mine, made, strict=True):
                _write_part(folder, number, _first(batch, spans[number].stop - spans[number].start))
                bar.update(min(len(batch.labels) * place.world, draw.num - bar.n))
        place.any(False)  # past this, all processes have written theirs
        return place.broadcast(_read(folder, draw.num, len(spans), shape) if place.main else None)


def _filled(span: slice, draw: Draw, settings: SampleConfig) -> Tensor:
    """Return the places of a part's images, filled up from the first image on to the size of the first part.

    Then all batches have one shape, for the compiler's sake; a solver that takes images one by one needs none.
    """
    size = span.stop - span.start if settings.build_solver().per_sample else min(draw.batch, draw.num)
    return torch.arange(span.start, span.start + size) % draw.num


def _first(made: Generated, count: int) -> Generated:
    return made._replace(images=made.images[:count], labels=made.labels[:count], seeds=made.seeds[:count])


def _bar(draw: Draw, missing: Sequence[slice], place: Processes, folder: Path, progress: bool) -> tqdm:
    """Return the main process's bar, which says what was there; it takes the others to be as quick."""
    there = draw.num - sum(span.stop - span.start for span in missing)
    shown = progress and place.main
    if shown and there:
        print(f"mvm: {there} of {draw.num} images are there already, in {folder}", file=sys.stderr)
    return tqdm(total=draw.num, initial=there, desc="sample", unit="image", disable=not shown)


def _read(folder: Path, count: int, parts: int, shape: tuple[int, int, int]) -> Parts:
    costs = (_read_cost(folder, number) for number in range(parts))
    nfe, passes = mean_cost((len(cost.labels), cost.nfe, cost.passes) for cost in costs)
    return Parts(folder, count, shape, nfe, passes)


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
        temporary_beside(parts_beside(out))
    kind, note = check_output(out, count), note_beside(out)
    if kind == ".png" or not note.exists():
        return
    try:
        ours = {"mvm", "draw"} <= read_json(note).keys()
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise ValueError(f"out={out}: its provenance goes to {note}, which is another file; give another name")


def _is_written(out: Path, count: int) -> bool:
    """Whether out is the folder that a call wrote before it was killed: its parts are there still.

    Files are written again, but a folder that is not empty is refused, so that this one must be known.
    """
    if not out.is_dir() or not any(parts_beside(out).glob("part-*.npy")):
        return False
    return sorted(path.name for path in out.iterdir()) == [picture_name(place) for place in range(count)]


def write_set(parts: Parts, out: Path, *, names: Sequence[str] = (), progress: bool = True) -> None:
    """Write finished parts where the suffix says, whole or not, one part in memory; and OUT.json, but for a grid.

    X.png one grid, with `names` of the classes in its margin where they are given; X.npz, X.npy uint8 NHWC (.npz as
    ADM: arr_0, arr_1 labels); X.parquet as on data-set hubs; X.zip or a folder of PNGs.
    """
    check_set(out, parts.count)
    note, provenance, grid = note_beside(out), parts.provenance(), out.suffix.lower() == ".png"
    with _held(parts.folder):
        if not _is_written(out, parts.count):
            write_stream(out, _counted(parts, progress), (parts.count, *parts.shape), names)
        if not grid:
            write_text(note, json.dumps(provenance, indent=2) + "\n")


def _counted(parts: Parts, progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
    with tqdm(total=parts.count, desc="write", unit="image", disable=not progress) as bar:
        for images, labels in parts.batches():
            yield images, labels
            bar.update(len(images))
