"""Images as numpy arrays: .npz and .npy, read row by row so that memory stays bounded by a part."""

import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import IO

import numpy as np

from mvm.data.sources.records import Part, Record, Source, listed_names, numbered, of_labels, spans, stamp_of

IMAGE_KEYS = ("images", "arr_0", "data")
LABEL_KEYS = ("labels", "arr_1", "label")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@contextmanager
def _npy(path: Path, key: str) -> Generator[IO[bytes]]:
    """Open the array `key` of an .npz, or an .npy (key ""), as a stream in .npy format."""
    try:
        if not key:
            with path.open("rb") as file:
                yield file
        else:
            with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as member:
                yield member
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"'{path}' is no whole, plain numpy file ({error}); save or copy it again") from None


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
    if dtype.hasobject or not shape or (fortran and len(shape) > 1):
        raise ValueError("arrays of Python objects, of no axis, or in Fortran order are not read")
    return shape, dtype


def shape_of(path: Path, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of an array without reading it."""
    with _npy(path, key) as file:
        return _header(file)


def rows(path: Path, key: str, start: int, stop: int) -> np.ndarray:
    """Return rows [start, stop) of an array; a compressed one is unpacked up to there, but never kept."""
    with _npy(path, key) as file:
        shape, dtype = _header(file)
        row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        file.seek(file.tell() + start * row)
        piece = file.read((stop - start) * row)
        if len(piece) < (stop - start) * row:
            raise EOFError(f"it ends before row {stop:,} of {shape[0]:,}")
    return np.frombuffer(piece, dtype).reshape(stop - start, *shape[1:])


def stream_rows(path: Path, key: str, count: int) -> Iterator[np.ndarray]:
    """Yield all rows of an array, `count` at a time, in one pass over the file."""
    with _npy(path, key) as file:
        shape, dtype = _header(file)
        row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        for start, stop in spans(shape[0], count):
            piece = file.read((stop - start) * row)
            if len(piece) < (stop - start) * row:
                raise EOFError(f"it ends before row {stop:,} of {shape[0]:,}")
            yield np.frombuffer(piece, dtype).reshape(stop - start, *shape[1:])


def channels_last(images: np.ndarray, where: str) -> np.ndarray:
    """Return (N, H, W, C) of NHWC, NCHW, grey NHW, or rows of channel planes (N, C*s*s)."""
    if images.dtype != np.uint8:
        raise ValueError(f"{where}: images are {images.dtype}; they must be uint8, 0..255")
    if images.ndim == 2:
        return _planes(images, where)
    if images.ndim == 3:
        return images[..., None]
    if images.ndim == 4 and images.shape[3] in (1, 3, 4):
        return images
    if images.ndim == 4 and images.shape[1] in (1, 3, 4):
        return images.transpose(0, 2, 3, 1)
    raise ValueError(f"{where}: shape {images.shape} is neither NHWC, NCHW, NHW nor rows of channel planes")


def _planes(images: np.ndarray, where: str) -> np.ndarray:
    count, width = images.shape
    for channels in (3, 1):
        side = isqrt(width // channels)
        if width and channels * side * side == width:
            return images.reshape(count, channels, side, side).transpose(0, 2, 3, 1)
    raise ValueError(f"{where}: rows of {width} values are no square planes (3*s*s or s*s)")


def as_labels(labels: Sequence[int] | np.ndarray, count: int, where: str) -> np.ndarray:
    """Return `count` integer labels (N,)."""
    array = np.asarray(labels).reshape(-1)
    if len(array) != count or (count and array.dtype.kind not in "iu"):
        raise ValueError(f"{where}: {len(array):,} labels of type {array.dtype}; needed: {count:,} integers, one each")
    return array.astype(np.int64)


@dataclass(frozen=True)
class ArrayPart(Part):
    """Rows of an array in a file, with their labels."""

    path: Path
    key: str
    start: int
    labels: tuple[int, ...]

    def read(self) -> Iterator[Record]:
        images = rows(self.path, self.key, self.start, self.start + len(self.labels))
        pixels = channels_last(images, f"'{self.path}'")
        for place, (image, label) in enumerate(zip(pixels, self.labels, strict=True), self.start):
            yield Record(f"{self.path.name}[{place}]", image, label)


def array_parts(path: Path, key: str, labels: np.ndarray, part_size: int) -> list[Part]:
    """Return the parts of one array."""
    shape, dtype = shape_of(path, key)
    channels_last(np.empty((0, *shape[1:]), dtype), f"'{path}'")  # refuse a wrong layout now, not in every part
    stamp = stamp_of(path.name, path.stat().st_size, shape)
    return [
        ArrayPart(f"{path.name}[{start}:{stop}]", stamp, path, key, start, tuple(labels[start:stop].tolist()))
        for start, stop in spans(shape[0], part_size)
    ]


def keys_of(path: Path) -> tuple[str, str | None]:
    """Return the names of images and labels in an .npz (None: without labels)."""
    try:
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise ValueError(f"'{path}' is no whole .npz ({error}); copy it again") from None
    images = next((key for key in IMAGE_KEYS if key in there), None)
    if images is None:
        raise ValueError(f"'{path}' has arrays {', '.join(there)}; images must be under {', '.join(IMAGE_KEYS)}")
    return images, next((key for key in LABEL_KEYS if key in there), None)


def open_array(path: Path, split: str, part_size: int) -> Source:
    """Return the images of an .npz, or of an .npy with labels.npy beside it, in the file's order."""
    if split:
        raise ValueError(f"split='{split}' has no meaning for '{path}', which is one set; leave it out")
    file = path / "images.npy" if path.is_dir() else path
    key, label_key = keys_of(file) if file.suffix == ".npz" else ("", "")
    label_file = file if key else file.with_name("labels.npy")
    count = shape_of(file, key)[0][0]
    if label_key is None or not label_file.is_file():
        return Source("numpy", path.name, numbered(1), tuple(array_parts(file, key, np.zeros(count, int), part_size)))
    found = rows(label_file, label_key, 0, shape_of(label_file, label_key)[0][0])
    labels = as_labels(found, count, f"'{label_file}'")
    classes = listed_names(file.parent) or of_labels(labels)
    return Source("numpy", path.name, classes, tuple(array_parts(file, key, labels, part_size)))
