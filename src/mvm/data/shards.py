"""The prepared format: a folder of uint8 shards (.npy) with an index, read whole or memory-mapped."""

import hashlib
import os
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvm.data.catalogue import Images
from mvm.store import INDEX, ArrayStore, Rows
from mvm.untrusted import cut, plain_name, read_json, whole_numbers

FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """Two files of equal length: images (n, C, H, W) uint8 and labels (n,) int64."""

    images: str
    labels: str
    count: int
    sha256: dict[str, str]  # by file name


@dataclass(frozen=True)
class Prepared:
    """A prepared data set: what its index says, and ways to read it."""

    folder: Path
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    class_counts: tuple[int, ...]
    empty_classes: tuple[str, ...]  # without images; class folders among them are not in `classes`
    resize: str
    source: dict[str, str]  # name and kind
    settings: dict[str, Any]  # what a second preparation must share to be the same
    skipped: dict[str, Any]  # count, and first: [name, reason] of up to 100
    shards: tuple[Shard, ...]
    reasons: dict[str, int] = field(default_factory=dict)  # how many were skipped for each
    ignored: dict[str, int] = field(default_factory=dict)  # files of the source that are no images, by suffix

    @property
    def count(self) -> int:
        """Return the number of images."""
        return sum(shard.count for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Return what the pixels take in memory."""
        return self.count * prod(self.shape)

    @property
    def stamp(self) -> str:
        """Return a checksum of all shards' checksums, different for other images."""
        sums = [shard.sha256[name] for shard in self.shards for name in (shard.images, shard.labels)]
        return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.count

    @property
    def store(self) -> ArrayStore:
        """Return its files."""
        return _store(self.folder)

    def verify(self) -> None:
        """Raise a ValueError that names the first file whose contents are not what was written."""
        for shard in self.shards:
            self.store.verify(shard.sha256)

    def load(self) -> Images:
        """Return all images in memory, one copy."""
        stored, labels = self.arrays()  # before memory is taken for what the index says
        images = torch.empty((self.count, *self.shape), dtype=torch.uint8)
        np.concatenate(stored, out=images.numpy())
        return Images(images, labels, self.classes)

    def mapped(self) -> "Mapped":
        """Return the images left on the disk, for sets larger than the memory."""
        return Mapped(self)

    def arrays(self) -> tuple[list[np.ndarray], Tensor]:
        """Return the images of every shard, memory-mapped, and all labels."""
        images = [self.store.array(shard.images, (shard.count, *self.shape), np.uint8) for shard in self.shards]
        labels = [self.store.array(shard.labels, (shard.count,), np.int64) for shard in self.shards]
        for shard, some in zip(self.shards, labels, strict=True):
            if not 0 <= some.min() <= some.max() < len(self.classes):
                path, last = self.folder / shard.labels, len(self.classes) - 1
                raise ValueError(f"'{path}' holds labels outside 0..{last}; {self.store.remedy}")
        return images, torch.from_numpy(np.concatenate(labels))


class Mapped:
    """Random access to a prepared set without loading it; labels are in memory."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.shape, self.classes = prepared.shape, prepared.classes
        images, self.labels = prepared.arrays()
        self._rows = Rows([array[None] for array in images])

    def __reduce__(self) -> tuple:
        return Mapped, (self.prepared,)  # to another process go the names, not the pixels

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) uint8 and labels (B,) at the indices, on the CPU."""
        return torch.from_numpy(self._rows.gather(indices)), self.labels[indices.cpu()]


def _store(folder: Path) -> ArrayStore:
    return ArrayStore(folder, "images", f"delete '{folder}' and prepare it again")


def _of_index(folder: Path, index: dict[str, Any]) -> Prepared:
    """Return the set that an index describes; an error of some kind where it is none."""
    facts: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in index.items()}
    del facts["format"]
    count, shards = facts.pop("count"), tuple(Shard(**shard) for shard in facts.pop("shards"))
    prepared = Prepared(folder=folder, shards=shards, **facts)
    whole_numbers(*prepared.shape, *prepared.class_counts, *(shard.count for shard in shards))
    whole_numbers(prepared.skipped["count"], *prepared.reasons.values(), *prepared.ignored.values())
    for shard in shards:
        names = [plain_name(name) for name in shard.sha256]
        if sorted(names) != sorted((shard.images, shard.labels)) or not shard.count:
            raise ValueError(f"{cut(shard)} is no shard")
        for name, total in shard.sha256.items():
            if not isinstance(total, str) or not total.isascii():
                raise ValueError("checksums must be hexadecimal")
            if not (folder / name).is_file():
                raise ValueError(f"{name} is missing")
    texts = (*prepared.classes, *prepared.empty_classes, prepared.resize, *prepared.source.values())
    if not all(isinstance(text, str) for text in texts) or not {"name", "kind"} <= prepared.source.keys():
        raise ValueError("names must be text")
    pairs = all(len(pair) == 2 for pair in prepared.skipped["first"])
    if len(prepared.shape) != 3 or len(prepared.classes) != len(prepared.class_counts) or not pairs:
        raise ValueError("its parts do not fit each other")
    if not 0 < count == prepared.count == sum(prepared.class_counts):
        raise ValueError("its counts contradict each other")
    return prepared


def is_prepared(folder: Path) -> bool:
    """Return whether a folder was written by `mvm data prepare`: others may have an index.json, too."""
    try:
        index = read_json(folder / INDEX)
    except (OSError, ValueError):
        return False
    return {"format", "shards", "class_counts"} <= index.keys()


LOOKED_AT = 10_000  # files among which a picture is looked for
USUAL_SIZE = 32  # pixels, where nobody says


def _holds_pictures(path: Path) -> bool:
    """Return whether a path is a source for `mvm data prepare` rather than what it writes."""
    from mvm.data.sources import SUFFIXES  # not above: sources import this module
    from mvm.data.sources.archives import IMAGE_SUFFIXES

    if path.is_file():
        return path.name.lower().endswith(tuple(SUFFIXES))
    names = (name.lower() for _, _, names in os.walk(path) for name in names)
    return any(name.endswith((*IMAGE_SUFFIXES, ".parquet", ".tar")) for name in islice(names, LOOKED_AT))


def _not_prepared(folder: Path, size: int) -> str:
    """Return what to do about a folder that holds no prepared data."""
    if any(folder.glob("shard-*.json")) or not _holds_pictures(folder):
        state = "is not finished" if any(folder.glob("shard-*.json")) else "holds no prepared data"
        command = f"mvm data prepare SOURCE --out {quote(str(folder))} --size {size or 'PIXELS'}"
        return f"'{folder}' {state} (no {INDEX}); make it with: {command}"
    size, whole = size or USUAL_SIZE, folder.resolve()
    name = f"{whole.name.partition('.')[0] if whole.is_file() else whole.name}-{size}"
    out = Path("data", name)
    if out.resolve().is_relative_to(whole):
        out = whole.parent / name
    command = f"mvm data prepare {quote(str(folder))} --out {quote(str(out))} --size {size}"
    return (
        f"'{folder}' holds pictures, not prepared data; prepare them first: {command}, then "
        f"--data.path {quote(str(out))}"
    )


def open_prepared(folder: Path | str, size: int = 0) -> Prepared:
    """Return the set that `mvm data prepare` wrote into the folder; contents are not read yet.

    size: pixels that the caller needs, for the command in the error where nothing is prepared (0: unknown).
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise ValueError(_not_prepared(folder, size))
    store = _store(folder)
    index = store.table(INDEX)
    with store.reading(INDEX):
        if index["format"] != FORMAT:
            raise ValueError(f"format {cut(index['format'])}; this version of mvm reads {FORMAT}")
        return _of_index(folder, index)
