"""The prepared format: a folder of uint8 shards (.npy) with an index, read whole or memory-mapped."""

import hashlib
import os
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvm.data.catalogue import Images
from mvm.files import sha256
from mvm.untrusted import cut, map_npy, plain_name, read_json, refusal, whole_numbers

FORMAT = 1
INDEX = "index.json"


@dataclass(frozen=True)
class Shard:
    """Two files of equal length: images (n, C, H, W) uint8 and labels (n,) int64."""

    images: str
    labels: str
    count: int
    sha256: dict[str, str]  # by file name


@dataclass(frozen=True)
class Prepared:
    """A prepared data set: what its index tells, and ways to read it."""

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
        """Return a checksum of all shards' checksums, which tells these images from any others."""
        sums = [shard.sha256[name] for shard in self.shards for name in (shard.images, shard.labels)]
        return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.count

    def verify(self) -> None:
        """Raise a ValueError that names the first file whose contents are not what was written."""
        for shard in self.shards:
            for name, expected in shard.sha256.items():
                path = self.folder / name
                if not path.is_file() or sha256(path) != expected:
                    raise ValueError(f"'{path}' is damaged or missing; delete '{self.folder}' and prepare it again")

    def load(self) -> Images:
        """Return all images in memory, one copy."""
        stored = self._arrays()  # before memory is taken for what the index tells
        images = torch.empty((self.count, *self.shape), dtype=torch.uint8)
        labels = torch.empty(self.count, dtype=torch.int64)
        start = 0
        for some_images, some_labels in stored:
            stop = start + len(some_images)
            images[start:stop].numpy()[:] = some_images
            labels[start:stop].numpy()[:] = some_labels
            start = stop
        return Images(images, labels, self.classes)

    def mapped(self) -> "Mapped":
        """Return the images left on the disk, for sets larger than the memory."""
        return Mapped(self)

    def _arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the images and labels of every shard, memory-mapped."""
        return [(self._array(s.images, s.count), self._array(s.labels, s.count)) for s in self.shards]

    def _array(self, name: str, count: int) -> np.ndarray:
        """Return one file, memory-mapped."""
        shape, kind = ((count, *self.shape), np.uint8) if name.startswith("images") else ((count,), np.int64)
        path = self.folder / name
        with refusal(f"'{path}' cannot be read", f"prepare '{self.folder}' again"):
            array = map_npy(path)
        if array.shape != shape or array.dtype != kind:
            raise ValueError(f"'{path}' is {array.dtype} {array.shape}, its index says {shape}; prepare it again")
        if kind is np.int64 and not 0 <= array.min() <= array.max() < len(self.classes):
            raise ValueError(f"'{path}' holds labels outside 0..{len(self.classes) - 1}; prepare '{self.folder}' again")
        return array


class Mapped:
    """Random access to a prepared set without loading it; labels are in memory."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.shape, self.classes = prepared.shape, prepared.classes
        arrays = prepared._arrays()
        self._images = [images for images, _ in arrays]
        self._starts = np.cumsum([0, *map(len, self._images)])
        self.labels = torch.from_numpy(np.concatenate([labels for _, labels in arrays]))

    def __reduce__(self) -> tuple:
        return Mapped, (self.prepared,)  # to another process go the names, not the pixels

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) uint8 and labels (B,) at the indices, on the CPU."""
        wanted = indices.cpu().numpy()
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"indices {wanted.min()}..{wanted.max()} leave 0..{len(self) - 1}")
        images = np.empty((len(wanted), *self.shape), np.uint8)
        order = np.argsort(wanted, kind="stable")  # each shard is read once, forwards
        cuts = np.searchsorted(wanted[order], self._starts)
        for shard, (start, stop) in enumerate(pairwise(cuts)):
            places = order[start:stop]
            if len(places):
                images[places] = self._images[shard][wanted[places] - self._starts[shard]]
        return torch.from_numpy(images), self.labels[indices.cpu()]


def index_of(prepared: Prepared) -> dict[str, Any]:
    """Return the contents of index.json."""
    told = {name: value for name, value in asdict(prepared).items() if name != "folder"}
    return {"format": FORMAT, "count": prepared.count, **told}


def _of_index(folder: Path, index: dict[str, Any]) -> Prepared:
    told: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in index.items()}
    del told["format"]
    count, shards = told.pop("count"), tuple(Shard(**shard) for shard in told.pop("shards"))
    prepared = Prepared(folder=folder, shards=shards, **told)
    _check_types(prepared)
    if not count == prepared.count == sum(prepared.class_counts):
        raise ValueError("its counts contradict each other")
    for name in (name for shard in shards for name in shard.sha256):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
    return prepared


def _check_types(prepared: Prepared) -> None:
    """Raise where the index tells something else than the names and counts that it should."""
    whole_numbers(*prepared.shape, *prepared.class_counts, *(shard.count for shard in prepared.shards))
    whole_numbers(prepared.skipped["count"], *prepared.reasons.values(), *prepared.ignored.values())
    for shard in prepared.shards:
        names = [plain_name(name) for name in shard.sha256]
        if sorted(names) != sorted((shard.images, shard.labels)) or not shard.count:
            raise ValueError(f"{cut(shard)} is no shard")
    texts = (*prepared.classes, *prepared.empty_classes, prepared.resize, *prepared.source.values())
    sums = [text for shard in prepared.shards for text in shard.sha256.values()]
    if not all(isinstance(text, str) and text.isascii() for text in sums):
        raise ValueError("checksums must be hexadecimal")
    if not all(isinstance(text, str) for text in texts) or not {"name", "kind"} <= prepared.source.keys():
        raise ValueError("names and checksums must be text")
    pairs = all(len(pair) == 2 for pair in prepared.skipped["first"])
    if len(prepared.shape) != 3 or len(prepared.classes) != len(prepared.class_counts) or not pairs:
        raise ValueError("its parts do not fit each other")


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
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(_not_prepared(folder, size))
    try:
        index = read_json(path)
        version = index["format"]
        prepared = _of_index(folder, index) if version == FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{path}' is damaged ({cut(error)}); delete '{folder}' and prepare it again") from None
    if prepared is None:
        raise ValueError(f"'{path}' has format {cut(version)}; this version of mvm reads {FORMAT}: prepare it again")
    return prepared
