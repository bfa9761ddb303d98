"""The prepared format: a folder of shards (.npy) with an index, read whole or memory-mapped.

Format 1 holds uint8 images (C, H, W) with labels; format 2 float arrays, samples of other axes, or conditions as well.
"""

import hashlib
import os
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import isfinite, prod
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from mvm.data.loader import Images
from mvm.path.condition import Condition
from mvm.store import INDEX, ArrayStore, Rows
from mvm.untrusted import MOST_LISTED, cut, plain_name, read_json, whole_numbers

FORMATS = (1, 2)
DTYPES = {"uint8": np.dtype(np.uint8), "float": np.dtype(np.float32)}  # of samples, by values
CAPTION = "caption"
# of a condition's numbers, by its kind
TYPES = {"vector": ("float32",), "tokens": ("float16", "float32"), "image": ("uint8", "float32"), CAPTION: ("",)}


@dataclass(frozen=True)
class StoredCondition:
    """What prepared samples are conditioned on, beside their labels."""

    kind: str  # vector, tokens, image or caption
    width: int = 0  # of a vector or a token; channels of an image
    length: int = 0  # number of tokens
    dtype: str = ""  # of the stored numbers

    def row(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that one sample's has; space: that of the sample."""
        shapes = {"vector": (self.width,), "tokens": (self.length, self.width), "image": (self.width, *space)}
        return shapes.get(self.kind, ())

    def require_valid(self) -> None:
        """Raise unless it is one of the conditions that can be stored."""
        whole_numbers(self.width, self.length)
        sizes = (self.width > 0, self.length > 0) == (self.kind != CAPTION, self.kind == "tokens")
        if self.dtype not in TYPES[self.kind] or not sizes:
            raise ValueError(f"{cut(self)} is no condition")

    def __str__(self) -> str:
        many = f"{self.length} " if self.length else ""
        return f"{many}{self.kind}" + (f" of width {self.width}" if self.width else "")


@dataclass(frozen=True)
class Shard:
    """Files of equal length: images (n, C, *space), labels (n,) int64, and the condition of each where there is one.

    A condition is an array (n, ...), of tokens with a mask (n, length) bool; or a list of captions.
    """

    images: str
    labels: str
    count: int
    sha256: dict[str, str]  # by file name
    condition: str = ""
    mask: str = ""

    @property
    def files(self) -> list[str]:
        """Return the names of its files."""
        return [name for name in (self.images, self.labels, self.condition, self.mask) if name]

    def facts(self) -> dict[str, Any]:
        """Return what is written of it."""
        return {name: value for name, value in asdict(self).items() if value != ""}


@dataclass(frozen=True)
class Prepared:
    """A prepared data set: what its index says, and ways to read it."""

    folder: Path
    shape: tuple[int, ...]  # (C, *space) of a sample
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
    values: str = "uint8"  # or float
    condition: StoredCondition | None = None
    statistics: dict[str, float] = field(default_factory=dict)  # of floats: mean, std, largest absolute value

    @property
    def format(self) -> int:
        """Return the version that its index has: the first that can say all of it."""
        return 1 if self.values == "uint8" and len(self.shape) == 3 and self.condition is None else 2

    @property
    def count(self) -> int:
        """Return the number of images."""
        return sum(shard.count for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Return what the samples and their condition take in memory."""
        row, stored = prod(self.shape) * DTYPES[self.values].itemsize, self.condition
        if stored is not None and stored.dtype:
            row += prod(stored.row(self.shape[1:])) * np.dtype(stored.dtype).itemsize
        return self.count * row

    @property
    def stamp(self) -> str:
        """Return a checksum of all shards' checksums, different for other images."""
        sums = [shard.sha256[name] for shard in self.shards for name in shard.files]
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
        rows, labels = self.arrays()  # before memory is taken for what the index says
        parts = {name: part.load() if isinstance(part, Rows) else part for name, part in self.conditions().items()}
        return Images(rows.load(), labels, self.classes, parts.get("", parts or None))

    def mapped(self) -> "Mapped":
        """Return the images left on the disk, for sets larger than the memory."""
        return Mapped(self)

    def _rows(self, kind: str, row: tuple[int, ...], dtype: DTypeLike) -> Rows:
        """Return the rows in the files of one kind of every shard, memory-mapped."""
        return Rows([self.store.array(getattr(shard, kind), (shard.count, *row), dtype)[None] for shard in self.shards])

    def conditions(self) -> dict[str, Rows | Tensor]:
        """Return the parts of a condition by their key in it ("" for the whole), memory-mapped.

        Of captions: which of the distinct ones each sample has, in memory.
        """
        stored = self.condition
        if stored is None:
            return {}
        if stored.kind == CAPTION:
            return {CAPTION: self.captions()[1]}
        rows = self._rows("condition", stored.row(self.shape[1:]), stored.dtype)
        if stored.kind != "tokens":
            return {"": rows}
        return {"tokens": rows, "mask": self._rows("mask", (stored.length,), np.bool_)}

    def captions(self) -> tuple[list[str], Tensor]:
        """Return the distinct captions, sorted, and which of them each sample has, int64 (N,)."""
        texts: list[str] = []
        for shard in self.shards:
            with self.store.reading(shard.condition):
                some = read_json(self.folder / shard.condition, MOST_LISTED)["captions"]
                if len(some) != shard.count or not all(isinstance(text, str) for text in some):
                    raise ValueError(f"no list of {shard.count} texts")
            texts += some
        distinct = {text: number for number, text in enumerate(sorted(set(texts)))}
        return list(distinct), torch.tensor([distinct[text] for text in texts])

    def arrays(self) -> tuple[Rows, Tensor]:
        """Return the images, memory-mapped, and all labels."""
        images = self._rows("images", self.shape, DTYPES[self.values])
        labels = self._rows("labels", (), np.int64)
        for shard, some in zip(self.shards, labels.arrays, strict=True):
            if not 0 <= some.min() <= some.max() < len(self.classes):
                path, last = self.folder / shard.labels, len(self.classes) - 1
                raise ValueError(f"'{path}' holds labels outside 0..{last}; {self.store.remedy}")
        return images, labels.load()


class Mapped:
    """Random access to a prepared set without loading it; labels and captions are in memory."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.shape, self.classes = prepared.shape, prepared.classes
        self._rows, self.labels = prepared.arrays()
        self._condition = prepared.conditions()

    def __reduce__(self) -> tuple:
        return Mapped, (self.prepared,)  # to another process go the names, not the pixels

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> tuple[Tensor, Condition]:
        """Return samples (B, C, *space) and their condition at the indices, on the CPU; labels where there is none."""
        indices = indices.cpu()
        parts = {
            name: torch.from_numpy(part.gather(indices)) if isinstance(part, Rows) else part[indices]
            for name, part in self._condition.items()
        }
        return torch.from_numpy(self._rows.gather(indices)), parts.get("", parts or self.labels[indices])


def _store(folder: Path) -> ArrayStore:
    return ArrayStore(folder, "images", f"delete '{folder}' and prepare it again")


def _of_index(folder: Path, index: dict[str, Any]) -> Prepared:
    """Return the set that an index describes; an error of some kind where it is none."""
    facts: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in index.items()}
    form, condition = facts.pop("format"), facts.pop("condition", None)
    count, shards = facts.pop("count"), tuple(Shard(**shard) for shard in facts.pop("shards"))
    stored = None if condition is None else StoredCondition(**condition)
    prepared = Prepared(folder=folder, shards=shards, condition=stored, **facts)
    if stored is not None:
        stored.require_valid()
    finite = all(map(isfinite, prepared.statistics.values()))
    known = set(prepared.statistics) == ({"mean", "std", "largest"} if prepared.values == "float" else set())
    if prepared.values not in DTYPES or prepared.format > form or not (finite and known):
        raise ValueError(f"{cut(prepared.values)} of shape {cut(prepared.shape)} is nothing of format {form}")
    whole_numbers(*prepared.shape, *prepared.class_counts, *(shard.count for shard in shards))
    whole_numbers(prepared.skipped["count"], *prepared.reasons.values(), *prepared.ignored.values())
    for shard in shards:
        names = [plain_name(name) for name in shard.sha256]
        parts = (stored is not None, stored is not None and stored.length > 0)
        fit = sorted(names) == sorted(shard.files) and (bool(shard.condition), bool(shard.mask)) == parts
        if not fit or not shard.count:
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
    if len(prepared.shape) < 2 or len(prepared.classes) != len(prepared.class_counts) or not pairs:
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
    what = f"'{folder}' holds pictures, not prepared data"
    return f"{what}; prepare them first: {command}, then --data.path {quote(str(out))}"


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
        if index["format"] not in FORMATS:
            formats = " and ".join(map(str, FORMATS))
            raise ValueError(f"format {cut(index['format'])}; this version of mvm reads {formats}")
        return _of_index(folder, index)
