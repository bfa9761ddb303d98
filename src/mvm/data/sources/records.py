"""What every reader hands out: records, in parts that can be read alone, in parallel, or again."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mvm.options import choose
from mvm.untrusted import MOST_LISTED, cut, read_text

PART_SIZE = 10_000  # images: a minute or so of work, which is what an interrupted run loses
MOST_CLASSES = 1_000_000  # beyond this a "label" is some other number, and naming its classes would eat the memory
SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "test")
MOST_KEYS = {"vector": 1, "tokens": 2, "image": 1, "caption": 1}  # that hold a condition, by kind


@dataclass(frozen=True)
class ConditionKeys:
    """The condition to read with each sample, and the keys that hold it: of arrays, columns, or the suffix of files."""

    kind: str
    keys: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> "ConditionKeys":
        """Return what "vector:KEY", "tokens:KEY,MASK" and so on ask for."""
        kind, _, rest = text.partition(":")
        keys = tuple(rest.split(","))
        most = choose("condition", kind, MOST_KEYS)
        if not all(keys) or len(keys) > most:
            form = "tokens:KEY or tokens:KEY,MASK" if kind == "tokens" else f"{kind}:KEY"
            raise ValueError(f"condition='{text}' must be {form}, with the names of arrays or columns")
        return ConditionKeys(kind, keys)


@dataclass(frozen=True)
class SourceRecord:
    """A sample with its label, counted from 0.

    image: a picture as the bytes of its file, or its pixels (H, W, C) uint8; or an array (C, *space) to be kept as it
    is. condition: what the keys of a condition hold, as it was read.
    """

    name: str
    image: bytes | np.ndarray
    label: int
    condition: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SourcePart:
    """A bounded, ordered piece of a source; small, picklable, and read without the other parts.

    read: a partial of a module's function, which yields the records in their order.
    """

    name: str
    stamp: str  # another one when the names or sizes of what is read have changed
    read: Callable[[], Iterator[SourceRecord]]


@dataclass(frozen=True)
class DataSource:
    """Labelled images of one kind of storage; classes=() when they are not known before every record is read."""

    kind: str
    name: str  # the base name: nothing of where it lay
    classes: tuple[str, ...]
    parts: tuple[SourcePart, ...]
    by_folder: bool = False  # whether classes are folders, which may be without images
    unread: tuple[tuple[str, str], ...] = ()  # (name, reason) of pictures that are in no part
    ignored: dict[str, int] = field(default_factory=dict)  # number of files that are no images, by suffix


def most_common(counts: Mapping[str, int], most: int = 20) -> dict[str, int]:
    """Return the counts, largest first; those beyond `most`, of which a source may hold any number, as "other"."""
    ordered = sorted(counts.items(), key=lambda pair: (pair[0] == "other", -pair[1], pair[0]))
    rest = sum(count for _, count in ordered[most:])
    return dict(ordered[:most]) | ({"other": rest} if rest else {})


def stamp_of(*facts: object) -> str:
    """Return a short digest of the facts."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def spans(count: int, size: int) -> list[tuple[int, int]]:
    """Return [start, stop) pieces of at most `size` that cover range(count)."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def numbered(count: int) -> tuple[str, ...]:
    """Return the names "0", "1", ... of classes that have none."""
    if count > MOST_CLASSES:
        raise ValueError(f"label {cut(count - 1)} is no class number below {MOST_CLASSES:,}; check the labels")
    return tuple(map(str, range(count)))


def of_labels(labels: Iterable[int], where: object) -> tuple[str, ...]:
    """Return class names for bare labels: as many as the largest asks for; where: the file that errors name."""
    try:
        return numbered(max(map(int, labels), default=-1) + 1)
    except ValueError as error:
        raise ValueError(f"'{where}': {error}") from None


def listed_names(folder: Path) -> tuple[str, ...]:
    """Return the names in the folder's classes.txt, or ().

    One name per line (of tab-separated columns the last), or all on one line with spaces between.
    """
    path = folder / "classes.txt"
    lines = read_text(path, MOST_LISTED).splitlines() if path.is_file() else []
    names = [line.rsplit("\t", 1)[-1].strip() for line in lines if line.strip()]
    return tuple(names[0].split() if len(names) == 1 else names)


def natural(path: Path) -> list[str | int]:
    """Return the sort key by which batch_10 follows batch_9: texts and numbers in turn."""
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"([0-9]+)", path.as_posix())]


def split_of(path: Path) -> str:
    """Return the split that a file's name ("train-00000-of-00002"), or its folder's name, says; "" for none."""
    prefix = re.match(r"(.*?[^\d-])-\d+(-of-\d+)?$", path.stem)
    if prefix:
        return prefix[1]
    return next((name for name in (path.stem, path.parent.name) if name in SPLIT_NAMES), "")


def choose_split(names: Iterable[str], split: str, where: str) -> str:
    """Return the split asked for, or the only one there is; otherwise a ValueError lists them."""
    there = sorted({name for name in names if name})
    allowed = f"allowed: {', '.join(there)}" if there else "it has no splits, leave the option out"
    if split and split not in there:
        raise ValueError(f"split='{split}' is not in '{where}'; {allowed}")
    if not split and len(there) > 1:
        raise ValueError(f"'{where}' holds several splits; choose one with split: {', '.join(there)}")
    return split or next(iter(there), "")


def files_of_split(files: list[Path], split: str, where: str) -> list[Path]:
    """Return the files of the chosen split, in natural order; unmarked files belong with the only split."""
    chosen = choose_split(map(split_of, files), split, where)
    return sorted((file for file in files if split_of(file) in ({chosen} if split else {chosen, ""})), key=natural)
