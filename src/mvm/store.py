"""Folders of array parts: made with one key, locked, files whole or absent, continued where an earlier call stopped.

    latents = PartedArray(folder, "latents", name="latents", key=key, shape=(2, 50_000, 4, 8, 8), dtype=..., size=512)
    latents.write_missing(lambda part: encoded(images[part.start : part.stop]))
    latents.rows().gather(indices, mirrored)

Encoded latents and features are a PartedArray; prepared images and samples have files of their own in an ArrayStore.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor
from tqdm import tqdm

from mvm.files import Held, atomic, claimed, is_leftover, recover_all, sha256, write_text
from mvm.untrusted import cut, map_npy, read_json, refusal

INDEX = "index.json"
MakePart = Callable[[range], Iterable[np.ndarray]]


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what has another value now, by dotted names."""
    before, after = _flat(there), _flat(now)
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    return [f"{cut(name)} ({cut(before.get(name))}, now {cut(after.get(name))})" for name in names]


def _flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{where}{name}.") if isinstance(value, Mapping) else {f"{where}{name}": value}
    return flat


def as_json(values: Any) -> Any:
    """Return values as they are after writing and reading: tuples are lists, keys are text."""
    return json.loads(json.dumps(values))


def require_space(what: str, size: int, free: int, where: str, remedy: str) -> None:
    """Raise where something is larger than the space that is free for it."""
    if size > free:
        raise ValueError(f"{what} take {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free {where}; {remedy}")


@dataclass(frozen=True)
class ArrayStore:
    """A folder of arrays (.npy) and tables (.json). Errors name the file, and what to do about it."""

    folder: Path
    what: str  # is kept here, in errors
    remedy: str  # for a file that is damaged
    other: str = "give another folder, or remove this one"  # remedy for a folder of something else

    def lock(self) -> AbstractContextManager[Held]:
        """Make the folder if need be, and lock it against a second process."""
        return claimed(self.folder)

    def require_same(self, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raise where the folder's key differs in anything from that of now."""
        with refusal(f"the key of '{self.folder}' is damaged", self.other):
            changes = ", ".join(differences(there, as_json(now)))
        if changes:
            raise ValueError(f"'{self.folder}' holds {self.what} with other values of {changes}; {self.other}")

    def require_own(self, pattern: str, remedy: str = "name a new one") -> None:
        """Raise where the folder holds a file whose name does not match: it is someone else's."""
        for entry in sorted(self.folder.iterdir()):
            if not is_leftover(entry) and not re.fullmatch(pattern, entry.name):
                raise ValueError(f"'{self.folder}' is a folder with other files in it ({cut(entry.name)}); {remedy}")

    def reading(self, name: str) -> AbstractContextManager[None]:
        """Turn whatever is raised over a file into a ValueError that names it."""
        return refusal(f"'{self.folder / name}' is damaged", self.remedy)

    def table(self, name: str) -> dict[str, Any]:
        """Return the table in a JSON file."""
        with self.reading(name):
            return read_json(self.folder / name)

    def array(self, name: str, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Return an array, memory-mapped."""
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"'{path}' is missing; {self.remedy}")
        with self.reading(name):
            array = map_npy(path)
            if array.shape != tuple(shape) or array.dtype != dtype:
                raise ValueError(f"{array.dtype} {array.shape}, not {np.dtype(dtype)} {tuple(shape)}")
        return array

    def write(self, name: str, array: np.ndarray) -> None:
        """Write an array."""
        with atomic(self.folder / name) as temporary:
            np.save(temporary, array)

    def write_table(self, name: str, table: Mapping[str, Any], indent: int | None = 2) -> None:
        """Write a table as JSON."""
        write_text(self.folder / name, json.dumps(table, indent=indent) + "\n")

    def is_whole(self, sums: Mapping[str, str]) -> bool:
        """Return whether files are there with these checksums."""
        return all((self.folder / name).is_file() and sha256(self.folder / name) == sums[name] for name in sums)

    def verify(self, sums: Mapping[str, str]) -> None:
        """Raise a ValueError that names the first file whose contents are not what was written."""
        for name in sums:
            if not self.is_whole({name: sums[name]}):
                raise ValueError(f"'{self.folder / name}' is damaged or missing; {self.remedy}")


class Rows:
    """Rows of arrays (views, n, ...) that follow one another along their second axis."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays, self.starts = arrays, np.cumsum([0, *(array.shape[1] for array in arrays)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def load(self) -> Tensor:
        """Return all rows of the first view, in memory of their own."""
        return torch.from_numpy(np.concatenate([array[0] for array in self.arrays]))

    def gather(self, indices: Tensor, views: Tensor | None = None) -> np.ndarray:
        """Return the rows at the indices (B,), of the views (B,) or the first; each array is read once, forwards."""
        wanted = indices.cpu().numpy()
        view = np.zeros_like(wanted) if views is None else views.cpu().numpy().astype(np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"indices {wanted.min()}..{wanted.max()} leave 0..{len(self) - 1}")
        rows = np.empty((len(wanted), *self.arrays[0].shape[2:]), self.arrays[0].dtype)
        order = np.argsort(wanted, kind="stable")
        cuts = np.searchsorted(wanted[order], self.starts)
        for array, first, (start, stop) in zip(self.arrays, self.starts, pairwise(cuts), strict=False):
            some = order[start:stop]
            if len(some):
                rows[some] = array[view[some], wanted[some] - first]
        return rows


class Share(NamedTuple):
    """The share of parts that a process makes: of `world` processes, which must all call, every world-th part."""

    rank: int = 0
    world: int = 1
    meet: Callable[[], object] = lambda: None  # waits for the others


ALONE = Share()


def _note(name: str) -> str:
    return name.removesuffix("npy") + "json"


@dataclass(frozen=True, kw_only=True)
class PartedArray(ArrayStore):
    """An array (views, images, ...) in parts along its second axis, which any number of processes write.

    NAME-00000.npy is a part, NAME-00000.json its key and checksum. index.json, written last, has all checksums, and a
    part that only the index knows counts, too.
    """

    name: str
    key: Mapping[str, Any]  # what decides the contents; a folder whose key differs is refused
    shape: tuple[int, ...]  # of the whole array
    dtype: DTypeLike
    size: int  # images in a part
    head: Mapping[str, Any] = field(default_factory=dict)  # of the index
    notes: bool = True  # whether NAME-00000.json stays when the index is written
    remedy: str = "remove it, if it is there, and start again: the other parts are kept"

    @property
    def bytes(self) -> int:
        """Return what the whole array takes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def parts(self) -> dict[str, range]:
        """Return the images in each part."""
        images = range(self.shape[1])
        starts = enumerate(images[:: self.size])
        return {f"{self.name}-{number:05d}.npy": images[start : start + self.size] for number, start in starts}

    def part_shape(self, part: range) -> tuple[int, ...]:
        """Return the shape of a part's array."""
        return self.shape[0], len(part), *self.shape[2:]

    def listed(self) -> dict[str, str]:
        """Return the checksums in the index, by part; none where there is no index."""
        if not (self.folder / INDEX).is_file():
            return {}
        index = self.table(INDEX)
        with self.reading(INDEX):
            key, sums = dict(index["key"]), dict(index["sha256"])
            head = {name: index.get(name) for name in self.head}
            if head != self.head or not all(isinstance(total, str) for total in sums.values()):
                raise ValueError(f"no index with {self.head} and checksums")
        self.require_same(key, self.key)
        return sums

    def _sum(self, name: str, listed: Mapping[str, str]) -> str:
        """Return the checksum that was noted of a part, "" for none."""
        note = _note(name)
        if not (self.folder / note).is_file():
            return listed.get(name, "")
        table = self.table(note)
        with self.reading(note):
            key, total = dict(table["key"]), table["sha256"]
        self.require_same(key, self.key)
        return total

    def write_missing(
        self, make: MakePart, *, share: Share = ALONE, smaller: str = "", progress: bool = True
    ) -> list[str]:
        """Write the parts that are missing or damaged; return the names of those that were made here.

        make: the images of a part -> arrays (views, n, ...), one after another. smaller: what to do where the disk
        has no room.
        """
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        present = sum(path.stat().st_size for path in self.folder.glob(f"{self.name}-*.npy"))
        free = shutil.disk_usage(there).free + present
        require_space(f"the {self.what}", self.bytes, free, f"for '{self.folder}'", smaller or self.other)
        with self.lock() if share.rank == 0 else nullcontext():
            if share.rank == 0:
                recover_all(self.folder)  # a note that was being written again, beside the old one of equal contents
            listed, written = self.listed(), []
            share.meet()  # nobody writes before the folder is locked
            mine = list(self.parts.items())[share.rank :: share.world]
            total = sum(len(part) for _, part in mine)
            with tqdm(total=total, desc=self.what, unit="image", disable=not progress or share.rank > 0) as bar:
                for name, part in mine:
                    noted = self._sum(name, listed)
                    if not noted or not self.is_whole({name: noted}):
                        self._write_part(name, part, make)
                        written.append(name)
                    bar.update(len(part))
            share.meet()  # all parts are whole
            sums = {name: self._sum(name, listed) for name in self.parts} if share.rank == 0 else listed
            if lost := [name for name, total in sums.items() if not total]:
                path = self.folder / lost[0]
                raise ValueError(f"'{path}' was not written by the process whose share it is; start again")
            if sums != listed:
                self.write_table(INDEX, {**self.head, "key": self.key, "sha256": sums})
            for name in self.parts if share.rank == 0 and not self.notes else ():
                (self.folder / _note(name)).unlink(missing_ok=True)
            share.meet()  # and listed
        return written

    def _write_part(self, name: str, part: range, make: MakePart) -> None:
        path, stop = self.folder / name, 0
        path.unlink(missing_ok=True)  # nobody is to read a damaged one meanwhile
        with atomic(path) as temporary:
            mapped = np.lib.format.open_memmap(temporary, "w+", np.dtype(self.dtype), self.part_shape(part))
            for array in make(part):
                start, stop = stop, stop + array.shape[1]
                mapped[:, start:stop] = array
            if stop != len(part):
                raise ValueError(f"{stop} of the {len(part)} images of {name} were made")
            mapped.flush()
            del mapped
        self.write_table(_note(name), {"key": self.key, "sha256": sha256(path)})

    def rows(self) -> Rows:
        """Return all rows, memory-mapped; a part of another size is refused, one with other contents by verify()."""
        listed, parts = self.listed(), self.parts
        if unlisted := [name for name in parts if name not in listed]:
            state = f"are not finished ({unlisted[0]} is not in {INDEX})"
            raise ValueError(f"the {self.what} in '{self.folder}' {state}; start again, which goes on where it stopped")
        return Rows([self.array(name, self.part_shape(part), self.dtype) for name, part in parts.items()])


def balanced(work: Sequence[float], count: int) -> list[int]:
    """Return which of `count` processes does each piece of work: the largest first, to the one with least so far."""
    loads, owners = [(0.0, place) for place in range(count)], [0] * len(work)
    heapify(loads)
    for number in sorted(range(len(work)), key=lambda number: -work[number]):
        load, owners[number] = loads[0]
        heapreplace(loads, (load + work[number], owners[number]))
    return owners
