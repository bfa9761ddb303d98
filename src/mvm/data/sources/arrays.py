"""Images as numpy arrays: .npz and .npy, read row by row so that memory stays bounded by a part."""

import zipfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from math import isqrt, prod
from pathlib import Path
from typing import IO

import numpy as np

from mvm.data.sources.records import (
    ConditionKeys,
    DataSource,
    SourcePart,
    SourceRecord,
    listed_names,
    numbered,
    of_labels,
    spans,
    stamp_of,
)
from mvm.untrusted import MOST_PICTURE, MOST_ROWS, cut, open_npy, plain_name, refusal

IMAGE_KEYS = ("images", "arr_0", "data")
LABEL_KEYS = ("labels", "arr_1", "label")
CHUNK = 1 << 26  # bytes, or labels, in memory at a time
Arrays = Sequence[tuple[Path, str]]  # by file and key


@contextmanager
def _npy(path: Path, key: str) -> Generator[tuple[IO[bytes], tuple[int, ...], np.dtype]]:
    """Open the array `key` of an .npz, or an .npy (key ""): the stream behind its header, its shape and type."""
    what, remedy = f"'{path}' is no whole, plain numpy file", "save or copy it again"
    with refusal(what, remedy), open_npy(path, key) as (file, shape, dtype):
        if not shape or dtype.itemsize < 1 or shape[0] > MOST_ROWS:
            raise ValueError(f"{cut(shape)}: arrays of no axis, or of more than {MOST_ROWS:,} rows, are not read")
        if _row(shape, dtype) > MOST_PICTURE:
            raise ValueError(f"a row takes more than {MOST_PICTURE:,} bytes")
        yield file, shape, dtype


def _row(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of a row."""
    return dtype.itemsize * prod(shape[1:])


def shape_of(path: Path, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of an array without reading it."""
    with _npy(path, key) as (_, shape, dtype):
        return shape, dtype


def stream_rows(path: Path, key: str, count: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """Yield rows [start, stop) of an array, `count` at a time, in one pass; a compressed one is never kept."""
    with _npy(path, key) as (file, shape, dtype):
        row = _row(shape, dtype)
        file.seek(file.tell() + start * row)
        for low, high in spans((shape[0] if stop is None else stop) - start, count):
            piece = file.read((high - low) * row)
            if len(piece) < (high - low) * row:
                raise EOFError(f"it ends before row {start + high:,} of {shape[0]:,}")
            yield np.frombuffer(piece, dtype).reshape(high - low, *shape[1:])


def labels_in(path: Path, key: str, count: int) -> np.ndarray:
    """Return the labels (N,) of `count` pictures; anything but integers, one each, is refused unread."""
    shape, dtype = shape_of(path, key)
    if prod(shape) != count:
        raise _wrong_labels(f"'{path}'", prod(shape), dtype, count)
    rows = [np.empty((0, *shape[1:]), dtype), *stream_rows(path, key, CHUNK)]
    return as_labels(np.concatenate(rows), count, f"'{path}'")


def channels_last(images: np.ndarray, where: str) -> np.ndarray:
    """Return (N, H, W, C) of NHWC, NCHW, grey NHW, or rows of channel planes (N, C*s*s)."""
    if images.dtype != np.uint8:
        raise ValueError(f"{where}: images are {images.dtype}; they must be uint8, 0..255")
    if images.ndim == 2:
        count, width = images.shape
        for channels in (3, 1):
            side = isqrt(width // channels)
            if width and channels * side * side == width:
                return images.reshape(count, channels, side, side).transpose(0, 2, 3, 1)
        raise ValueError(f"{where}: rows of {width} values are no square planes (3*s*s or s*s)")
    if images.ndim == 3:
        return images[..., None]
    if images.ndim == 4 and images.shape[3] in (1, 3, 4):
        return images
    if images.ndim == 4 and images.shape[1] in (1, 3, 4):
        return images.transpose(0, 2, 3, 1)
    raise ValueError(f"{where}: shape {images.shape} is neither NHWC, NCHW, NHW nor rows of channel planes")


def as_labels(labels: Sequence[int] | np.ndarray, count: int, where: str) -> np.ndarray:
    """Return `count` integer labels (N,)."""
    with refusal(f"{where}: labels are no list of numbers", "repair the file"):
        array = np.asarray(labels).reshape(-1)
    if len(array) != count or (count and array.dtype.kind not in "iu"):
        raise _wrong_labels(where, len(array), array.dtype, count)
    return array.astype(np.int64)


def _wrong_labels(where: str, found: int, kind: np.dtype, count: int) -> ValueError:
    return ValueError(f"{where}: {found:,} labels of type {kind}; needed: {count:,} integers, one each")


def _read_array(
    path: Path, key: str, kept: bool, condition: Arrays, start: int, labels: Sequence[int]
) -> Iterator[SourceRecord]:
    """Yield rows from `start` on, with their labels; kept: as they are, else they are pictures."""

    def rows_of(path: Path, key: str) -> Iterator[np.ndarray]:
        count = max(1, CHUNK // max(1, _row(*shape_of(path, key))))
        return stream_rows(path, key, count, start, start + len(labels))

    pieces = rows_of(path, key)
    if not kept:
        pieces = (channels_last(piece, f"'{path}'") for piece in pieces)
    columns = [chain.from_iterable(rows_of(*array)) for array in condition]
    conditions = zip(*columns, strict=True) if columns else repeat((), len(labels))
    rows = zip(chain.from_iterable(pieces), labels, conditions, strict=True)
    for row, (image, label, values) in enumerate(rows, start):
        yield SourceRecord(f"{path.name}[{row}]", image, label, values)


def layout(shape: tuple[int, ...], dtype: np.dtype, where: str) -> tuple[int, ...]:
    """Return (H, W, C) of pictures in an array of this shape; one that holds none is refused, and nothing is read."""
    return channels_last(np.empty((0, *shape[1:]), dtype), where).shape[1:]


def _check_kept(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Refuse what cannot be kept as samples (N, C, *space)."""
    if dtype.kind not in "fiub":
        raise ValueError(f"{where}: samples are {dtype}; numbers are needed")
    if len(shape) < 3 or not all(shape[1:]):
        raise ValueError(f"{where}: shape {shape} is not (N, C, *space); add an axis for channels, or for space")
    if dtype == np.uint8 and len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4):
        size = f"{shape[1]}x{shape[2]}"
        raise ValueError(f"{where}: shape {shape} is one of pictures, channels last; give --size {size} for these")


def array_parts(
    path: Path, key: str, labels: np.ndarray, part_size: int, kept: bool = False, condition: Arrays = ()
) -> list[SourcePart]:
    """Return the parts of one array; condition: the arrays with that of each row."""
    shape, dtype = shape_of(path, key)
    (_check_kept if kept else layout)(shape, dtype, f"'{path}'")  # refuse a wrong layout now, not in every part
    stamp = stamp_of(
        path.name, path.stat().st_size, shape, *((file.name, file.stat().st_size) for file, _ in condition)
    )
    read = partial(_read_array, path, key, kept, condition)
    return [
        SourcePart(f"{path.name}[{start}:{stop}]", stamp, partial(read, start, labels[start:stop].tolist()))
        for start, stop in spans(shape[0], part_size)
    ]


def _names_in(path: Path) -> list[str]:
    with refusal(f"'{path}' is no whole .npz"), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def _conditions(file: Path, key: str, count: int, wanted: ConditionKeys) -> Arrays:
    """Return the arrays that hold a condition: of an .npz under their keys, else KEY.npy beside the file."""
    if key:
        there = _names_in(file)
        found = [(file, name) for name in wanted.keys if name in there]
    else:
        paths = [file.with_name(plain_name(f"{name}.npy")) for name in wanted.keys]
        there, found = sorted(path.stem for path in file.parent.glob("*.npy")), [(p, "") for p in paths if p.is_file()]
    if len(found) < len(wanted.keys):
        names = ", ".join(wanted.keys)
        raise ValueError(f"'{file}' has arrays {cut(', '.join(there))}; condition {wanted.kind} needs {cut(names)}")
    for array, name in zip(found, wanted.keys, strict=True):
        rows = shape_of(*array)[0][0]
        if rows != count:
            sizes = f"condition '{name}' has {rows:,} rows, '{key or file.stem}' {count:,}"
            raise ValueError(f"'{file}': {sizes}; give one for each")
    return found


def keys_of(path: Path) -> tuple[str, str | None]:
    """Return the names of images and labels in an .npz (None: without labels)."""
    there = _names_in(path)
    images = next((key for key in IMAGE_KEYS if key in there), None)
    if images is None:
        raise ValueError(f"'{path}' has arrays {cut(', '.join(there))}; images must be under {', '.join(IMAGE_KEYS)}")
    return images, next((key for key in LABEL_KEYS if key in there), None)


def open_array(
    path: Path, split: str, part_size: int, wanted: ConditionKeys | None = None, kept: bool = False
) -> DataSource:
    """Return the images of an .npz, or of an .npy with labels.npy beside it, in the file's order.

    kept: they are samples (N, C, *space) of any numbers, kept as they are.
    """
    if split:
        raise ValueError(f"split='{split}' has no meaning for '{path}', which is one set; leave it out")
    file = path / "images.npy" if path.is_dir() else path
    key, label_key = keys_of(file) if file.suffix == ".npz" else ("", "")
    label_file = file if key else file.with_name("labels.npy")
    shape, dtype = shape_of(file, key)
    if not kept and dtype.kind == "f":
        why = "they must be uint8, 0..255, to be resized; leave --size out to keep them"
        raise ValueError(f"'{file}': images are {dtype}; {why}")
    count = shape[0]
    condition = () if wanted is None else _conditions(file, key, count, wanted)
    labels, classes = np.zeros(count, int), numbered(1)
    if label_key is not None and label_file.is_file():
        labels = labels_in(label_file, label_key, count)
        classes = listed_names(file.parent) or of_labels([labels.max(initial=-1)], label_file)
    parts = array_parts(file, key, labels, part_size, kept, condition)
    return DataSource("numpy", path.name, classes, tuple(parts))
