"""Images as rows of numpy arrays, published batches or parquet files, read so that memory stays bounded by a part.

The batches are those of CIFAR (pickles) and of downsampled ImageNet (pickles or .npz): rows of channel planes. Parquet
is as data-set hubs store it; only its readers need pyarrow.
"""

import pickle
import re
import zipfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, repeat
from math import isqrt, prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from mvm.data.sources.records import (
    ConditionKeys,
    DataSource,
    SourcePart,
    SourceRecord,
    choose_split,
    files_of_split,
    listed_names,
    natural,
    numbered,
    of_labels,
    spans,
    stamp_of,
)
from mvm.options import needs
from mvm.untrusted import MOST_PICTURE, MOST_ROWS, cut, open_npy, parse_json, plain_name, refusal

IMAGE_KEYS = ("images", "arr_0", "data")
LABEL_KEYS = ("labels", "arr_1", "label")
CHUNK = 1 << 26  # bytes, or labels, in memory at a time
Arrays = Sequence[tuple[Path, str]]  # by file and key
IMAGENET_CLASSES = 1000
_IMAGENET = re.compile(r"(train_data_batch_\d+|val_data)(\.npz)?")
_CIFAR = re.compile(r"data_batch_\d+|test_batch|train|test")
_NAMES = {"batches.meta": "label_names", "meta": "fine_label_names"}  # CIFAR-10, CIFAR-100


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
    """Yield rows [start, stop) of an array, `count` at a time, in one pass; a compressed one never stays in memory."""
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


def _wrong_labels(where: str, number: int, kind: np.dtype, count: int) -> ValueError:
    return ValueError(f"{where}: {number:,} labels of type {kind}; needed: {count:,} integers, one each")


def _read_array(
    path: Path, key: str, as_arrays: bool, condition: Arrays, start: int, labels: Sequence[int]
) -> Iterator[SourceRecord]:
    """Yield rows from `start` on, with their labels; as_arrays: as they are, else they are pictures."""

    def rows_of(path: Path, key: str) -> Iterator[np.ndarray]:
        count = max(1, CHUNK // max(1, _row(*shape_of(path, key))))
        return stream_rows(path, key, count, start, start + len(labels))

    pieces = rows_of(path, key)
    if not as_arrays:
        pieces = (channels_last(piece, f"'{path}'") for piece in pieces)
    columns = [chain.from_iterable(rows_of(*array)) for array in condition]
    conditions = zip(*columns, strict=True) if columns else repeat((), len(labels))
    rows = zip(chain.from_iterable(pieces), labels, conditions, strict=True)
    for row, (image, label, values) in enumerate(rows, start):
        yield SourceRecord(f"{path.name}[{row}]", image, label, values)


def layout(shape: tuple[int, ...], dtype: np.dtype, where: str) -> tuple[int, ...]:
    """Return (H, W, C) of pictures in an array of this shape; one that holds none is refused, and nothing is read."""
    return channels_last(np.empty((0, *shape[1:]), dtype), where).shape[1:]


def _check_samples(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Refuse what cannot be stored as samples (N, C, *space)."""
    if dtype.kind not in "fiub":
        raise ValueError(f"{where}: samples are {dtype}; numbers are needed")
    if len(shape) < 3 or not all(shape[1:]):
        raise ValueError(f"{where}: shape {shape} is not (N, C, *space); add an axis for channels, or for space")
    if dtype == np.uint8 and len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4):
        size = f"{shape[1]}x{shape[2]}"
        raise ValueError(f"{where}: shape {shape} is one of pictures, channels last; give --size {size} for these")


def array_parts(
    path: Path, key: str, labels: np.ndarray, part_size: int, as_arrays: bool = False, condition: Arrays = ()
) -> list[SourcePart]:
    """Return the parts of one array; condition: the arrays with that of each row."""
    shape, dtype = shape_of(path, key)
    (_check_samples if as_arrays else layout)(shape, dtype, f"'{path}'")  # refuse a wrong layout now, not in every part
    stamp = stamp_of(
        path.name, path.stat().st_size, shape, *((file.name, file.stat().st_size) for file, _ in condition)
    )
    read = partial(_read_array, path, key, as_arrays, condition)
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
        arrays = [(file, name) for name in wanted.keys if name in there]
    else:
        paths = [file.with_name(plain_name(f"{name}.npy")) for name in wanted.keys]
        there = sorted(path.stem for path in file.parent.glob("*.npy"))
        arrays = [(path, "") for path in paths if path.is_file()]
    if len(arrays) < len(wanted.keys):
        names = ", ".join(wanted.keys)
        raise ValueError(f"'{file}' has arrays {cut(', '.join(there))}; condition {wanted.kind} needs {cut(names)}")
    for array, name in zip(arrays, wanted.keys, strict=True):
        rows = shape_of(*array)[0][0]
        if rows != count:
            sizes = f"condition '{name}' has {rows:,} rows, '{key or file.stem}' {count:,}"
            raise ValueError(f"'{file}': {sizes}; give one for each")
    return arrays


def keys_of(path: Path) -> tuple[str, str | None]:
    """Return the names of images and labels in an .npz (None: without labels)."""
    there = _names_in(path)
    images = next((key for key in IMAGE_KEYS if key in there), None)
    if images is None:
        raise ValueError(f"'{path}' has arrays {cut(', '.join(there))}; images must be under {', '.join(IMAGE_KEYS)}")
    return images, next((key for key in LABEL_KEYS if key in there), None)


def open_array(
    path: Path, split: str, part_size: int, wanted: ConditionKeys | None = None, as_arrays: bool = False
) -> DataSource:
    """Return the images of an .npz, or of an .npy with labels.npy beside it, in the file's order.

    as_arrays: they are samples (N, C, *space) of any numbers, stored as they are.
    """
    if split:
        raise ValueError(f"split='{split}' has no meaning for '{path}', which is one set; leave it out")
    file = path / "images.npy" if path.is_dir() else path
    key, label_key = keys_of(file) if file.suffix == ".npz" else ("", "")
    label_file = file if key else file.with_name("labels.npy")
    shape, dtype = shape_of(file, key)
    if not as_arrays and dtype.kind == "f":
        why = "they must be uint8, 0..255, to be resized; leave --size out to keep them"
        raise ValueError(f"'{file}': images are {dtype}; {why}")
    count = shape[0]
    condition = () if wanted is None else _conditions(file, key, count, wanted)
    labels, classes = np.zeros(count, int), numbered(1)
    if label_key is not None and label_file.is_file():
        labels = labels_in(label_file, label_key, count)
        classes = listed_names(file.parent) or of_labels([labels.max(initial=-1)], label_file)
    parts = array_parts(file, key, labels, part_size, as_arrays, condition)
    return DataSource("numpy", path.name, classes, tuple(parts))


# --- published batches --------------------------------------------------------------------------------------------


def is_batch(path: Path) -> bool:
    """Return whether the file has the name of a published batch."""
    return path.is_file() and bool(_IMAGENET.fullmatch(path.name) or _CIFAR.fullmatch(path.name))


def _split_of(path: Path) -> str:
    return "train" if path.name.startswith("data_") else path.name.partition("_")[0]


class _Type:
    """Stands for numpy.dtype in a pickle; only numbers are let through."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.dtype = np.dtype(code.decode() if isinstance(code, bytes) else code)
        if self.dtype.kind not in "iufb":
            raise pickle.UnpicklingError(f"arrays of {self.dtype} are not read")

    def __setstate__(self, state: tuple) -> None:
        if state[1] in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """Stands for numpy.ndarray in a pickle: numpy's own __setstate__ would trust what the file says of memory."""

    array: np.ndarray = np.empty(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, kind, fortran, contents = state
        self.array = _from_buffer(contents, kind, shape, "F" if fortran else "C").array


def _from_buffer(contents: bytes, kind: _Type, shape: tuple[int, ...], order: str) -> _Array:
    plain = _Array()
    plain.array = np.frombuffer(contents, kind.dtype).reshape(shape, order="F" if order == "F" else "C")
    return plain


def _scalar(kind: _Type, contents: bytes) -> int | float:
    return np.frombuffer(contents, kind.dtype)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":  # how pickle spells bytes in its older protocols; no other codec is needed
        raise pickle.UnpicklingError(f"codec {encoding} is not allowed")
    return text.encode("latin1")


# Everything a batch may call. Modules as written before and after numpy 2.
_ALLOWED: dict[tuple[str, str], Callable] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def load_batch(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle of plain containers and number arrays; anything else is refused unrun."""
    try:
        with path.open("rb") as file:
            # bytes: Python 2 wrote CIFAR, and its str may hold anything
            table = _Unpickler(file, encoding="bytes").load()
        plain = {key: value.array if isinstance(value, _Array) else value for key, value in table.items()}
        return {key.decode() if isinstance(key, bytes) else key: value for key, value in plain.items()}
    except OSError:
        raise
    except Exception as error:  # a broken pickle can raise nearly anything
        why = f"{type(error).__name__}: {cut(error)}"
        raise ValueError(f"'{path}' is refused: no pickle of plain arrays ({why})") from None


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, H, W, C) and labels (N,) of a pickled batch."""
    batch, where = load_batch(path), f"'{path}'"
    labels = next((batch[key] for key in (*LABEL_KEYS, "fine_labels") if key in batch), None)
    if labels is None or not isinstance(batch.get("data"), np.ndarray):
        keys = cut(", ".join(map(str, batch)))
        raise ValueError(f"{where} holds {keys}; a batch holds data and labels (or fine_labels)")
    images = channels_last(batch["data"], where)
    return images, _from_zero(path, as_labels(labels, len(images), where))


def _from_zero(path: Path, labels: np.ndarray) -> np.ndarray:
    """Return labels that start at 0: those of downsampled ImageNet are published as 1..1000."""
    if not _IMAGENET.fullmatch(path.name):
        return labels
    if len(labels) and not 1 <= labels.min() <= labels.max() <= IMAGENET_CLASSES:
        there = f"'{path}': labels {labels.min()}..{labels.max()}"
        raise ValueError(f"{there}; ImageNet batches count 1..{IMAGENET_CLASSES}. Rename the file if it is another set")
    return labels - 1


def _read_pickle(path: Path, start: int, stop: int) -> Iterator[SourceRecord]:
    images, labels = _read(path)
    for row in range(start, stop):
        yield SourceRecord(f"{path.name}[{row}]", images[row], int(labels[row]))


def _batch_parts(path: Path, part_size: int) -> tuple[list[SourcePart], np.ndarray]:
    """Return the parts of a batch and all its labels."""
    if path.suffix == ".npz":
        key, label_key = keys_of(path)
        count = shape_of(path, key)[0][0]
        stored = labels_in(path, label_key, count) if label_key else as_labels((), count, f"'{path}'")
        labels = _from_zero(path, stored)
        return array_parts(path, key, labels, part_size), labels
    labels, stamp = _read(path)[1], stamp_of(path.name, path.stat().st_size)
    parts = [
        SourcePart(f"{path.name}[{start}:{stop}]", stamp, partial(_read_pickle, path, start, stop))
        for start, stop in spans(len(labels), part_size)
    ]
    return parts, labels


def _class_names(folder: Path) -> tuple[str, ...]:
    for file, key in _NAMES.items():
        if (folder / file).is_file():
            names = load_batch(folder / file).get(key, ())
            return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    return ()


def open_batches(path: Path, split: str, part_size: int) -> DataSource:
    """Return the images of published batches, a file or a folder of them, in the order batch, row."""
    files = [file for file in path.iterdir() if is_batch(file)] if path.is_dir() else [path]
    chosen = choose_split(map(_split_of, files), split, str(path))
    files = sorted((file for file in files if _split_of(file) == chosen), key=natural)
    batches = [_batch_parts(file, part_size) for file in files]
    largest = [max(labels, default=-1) for _, labels in batches]
    imagenet = _IMAGENET.fullmatch(files[0].name)
    names = numbered(IMAGENET_CLASSES) if imagenet else _class_names(files[0].parent) or of_labels(largest, path)
    return DataSource("batches", path.name, names, tuple(part for parts, _ in batches for part in parts))


# --- parquet ------------------------------------------------------------------------------------------------------

LABEL_ROWS = 1 << 20  # in memory at a time
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
BATCH_ROWS = 16  # rows in memory at a time; a page that says one long value many times is unpacked that often, no more


@cache
def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(needs("a parquet file", "pyarrow", "data")) from error
    return pyarrow


def _open_parquet(path: Path) -> Any:
    arrow = _pyarrow()
    with refusal(f"'{path}' is no whole parquet file"):
        file = arrow.parquet.ParquetFile(path)
        if not 0 <= file.metadata.num_rows <= MOST_ROWS:
            raise ValueError(f"{file.metadata.num_rows:,} rows; at most {MOST_ROWS:,} are read from one file")
        return file


def _columns(schema: Any, path: Path) -> tuple[str, str | None]:
    """Return the leaf column with the bytes and the label column (None: no labels)."""
    image = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    if image is None:
        needed = f"images must be in {' or '.join(IMAGE_COLUMNS)}"
        raise ValueError(f"'{path}' has columns {cut(', '.join(schema.names))}; {needed}")
    types, kind = _pyarrow().types, schema.field(image).type
    nested = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if not nested and not types.is_binary(kind) and not types.is_large_binary(kind):
        raise ValueError(f"'{path}': column {image} is {kind}; it must be binary, or a struct with bytes")
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    if label and not types.is_integer(schema.field(label).type):
        raise ValueError(f"'{path}': column {label} is {schema.field(label).type}; labels must be integers")
    return f"{image}.bytes" if nested else image, label


def _contents(scalar: Any) -> bytes:
    """Return the bytes of a cell, none where it is null; of one too large a byte more than allowed, for the decoder."""
    buffer = scalar.as_buffer() if scalar.is_valid else None
    return b"" if buffer is None else buffer.slice(0, min(buffer.size, MOST_PICTURE + 1)).to_pybytes()


def _value(scalar: Any, name: str) -> bytes | np.ndarray:
    """Return what a cell of a condition holds: the bytes of a picture or text, or numbers as an array."""
    if not scalar.is_valid:
        raise ValueError(f"'{name}': its condition is null; give one, or leave the row out")
    types = _pyarrow().types
    if types.is_struct(scalar.type) and scalar.type.get_field_index("bytes") >= 0:
        scalar = scalar["bytes"]
    if hasattr(scalar, "as_buffer"):
        return _contents(scalar)
    with refusal(f"'{name}': its condition is no array of numbers", "give numbers, or lists of equal length"):
        if hasattr(scalar, "values") and scalar.values.nbytes > MOST_PICTURE:
            raise ValueError(f"it takes more than {MOST_PICTURE:,} bytes")
        return np.asarray(scalar.as_py())


def _read_parquet(
    path: Path, keys: Sequence[str], groups: Sequence[int], first: int, start: int, stop: int
) -> Iterator[SourceRecord]:
    """Yield rows [start, stop) of some row groups, whose first row is `first` of the file; keys: of the condition."""
    with _open_parquet(path) as file:
        begin = 0  # of a batch, within the row groups
        for batch in _row_batches(file, path, keys, groups):
            low, high = max(start, begin), min(stop, begin + len(batch))
            if low < high:
                yield from _records(path, keys, batch.slice(low - begin, high - low), first + low)
            begin += len(batch)


def _row_batches(file: Any, path: Path, keys: Sequence[str], groups: Sequence[int]) -> Iterator[Any]:
    columns = [name for name in _columns(file.schema_arrow, path) if name] + list(keys)
    with refusal(f"'{path}' cannot be read"):
        yield from file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=columns)


def _records(path: Path, keys: Sequence[str], batch: Any, first: int) -> Iterator[SourceRecord]:
    image, label = _columns(batch.schema, path)
    column, _, leaf = image.partition(".")
    pictures = batch.column(column).field(leaf) if leaf else batch.column(column)
    labels = batch.column(label).to_pylist() if label else [0] * len(batch)
    columns = [batch.column(key) for key in keys]
    for row, (picture, number) in enumerate(zip(pictures, labels, strict=True)):
        name = f"{path.name}[{first + row}]"
        condition = tuple(_value(column[row], name) for column in columns)
        # a null label is as wrong as the hub's -1 of hidden test labels
        yield SourceRecord(name, _contents(picture), -1 if number is None else number, condition)


def _runs(rows: list[int], part_size: int) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """Yield (groups, first, start, stop): runs of whole row groups; a group above part_size is cut by itself."""
    first, group = 0, 0
    while group < len(rows):
        end, total = group + 1, rows[group]
        while end < len(rows) and total + rows[end] <= part_size:
            total, end = total + rows[end], end + 1
        for start, stop in spans(total, part_size):
            yield tuple(range(group, end)), first, start, stop
        first, group = first + total, end


def _parquet_parts(path: Path, part_size: int, keys: tuple[str, ...]) -> Iterator[SourcePart]:
    with _open_parquet(path) as file:
        there = file.schema_arrow.names
        if lacking := [key for key in keys if key not in there]:
            raise ValueError(f"'{path}' has columns {cut(', '.join(there))}; none is '{cut(lacking[0])}'")
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        if min(rows, default=0) < 0 or sum(rows) != file.metadata.num_rows:
            raise ValueError(f"'{path}' is no whole parquet file (its row groups do not add up); copy it again")
    stamp = stamp_of(path.name, path.stat().st_size)
    for groups, first, start, stop in _runs(rows, part_size):
        name = f"{path.name}[{first + start}:{first + stop}]"
        yield SourcePart(name, stamp, partial(_read_parquet, path, keys, groups, first, start, stop))


def _parquet_classes(files: list[Path], folder: Path) -> tuple[str, ...]:
    """Return the class names: the hub's in the first file's schema, else those of classes.txt, else numbers."""
    with _open_parquet(files[0]) as file:
        label = _columns(file.schema_arrow, files[0])[1]
        if label is None:
            return numbered(1)
        with refusal(f"'{files[0]}' names its classes wrongly"):
            features = parse_json((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            names = tuple(features.get("info", {}).get("features", {}).get(label, {}).get("names") or ())
            if not all(isinstance(name, str) for name in names):
                raise ValueError("names of classes must be text")
    if names := names or listed_names(folder):
        return names
    largest = -1
    for path in files:
        with refusal(f"'{path}' cannot be read"), _open_parquet(path) as file:
            for batch in file.iter_batches(LABEL_ROWS, columns=[label]):
                known = [number for number in batch.column(label).to_pylist() if number is not None]
                largest = max(largest, max(known, default=-1))
    return of_labels([largest], folder)


def open_parquet(path: Path, split: str, part_size: int, wanted: ConditionKeys | None = None) -> DataSource:
    """Return the rows of a parquet file, or of a folder of them, in the order file, row."""
    keys = () if wanted is None else wanted.keys
    folder = path if path.is_dir() else path.parent
    files = files_of_split(list(path.rglob("*.parquet")) if path.is_dir() else [path], split, str(path))
    parts = (part for file in files for part in _parquet_parts(file, part_size, keys))
    return DataSource("parquet", path.name, _parquet_classes(files, folder), tuple(parts))
