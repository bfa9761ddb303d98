"""Images in parquet files, as data-set hubs store them. The only module that needs pyarrow."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mvm.data.sources.records import (
    ConditionKeys,
    DataSource,
    SourcePart,
    SourceRecord,
    files_of_split,
    listed_names,
    numbered,
    of_labels,
    spans,
    stamp_of,
)
from mvm.options import needs
from mvm.untrusted import MOST_PICTURE, MOST_ROWS, cut, parse_json, refusal

LABELS = 1 << 20  # in memory at a time
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
BATCH = 16  # rows in memory at a time; a page that says one long value many times is unpacked that often, no more


@cache
def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(needs("a parquet file", "pyarrow", "data")) from error
    return pyarrow


def _open(path: Path) -> Any:
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


def _read_rows(
    path: Path, keys: Sequence[str], groups: Sequence[int], first: int, start: int, stop: int
) -> Iterator[SourceRecord]:
    """Yield rows [start, stop) of some row groups, whose first row is `first` of the file; keys: of the condition."""
    with _open(path) as file:
        begin = 0  # of a batch, within the row groups
        for batch in _batches(file, path, keys, groups):
            low, high = max(start, begin), min(stop, begin + len(batch))
            if low < high:
                yield from _records(path, keys, batch.slice(low - begin, high - low), first + low)
            begin += len(batch)


def _batches(file: Any, path: Path, keys: Sequence[str], groups: Sequence[int]) -> Iterator[Any]:
    columns = [name for name in _columns(file.schema_arrow, path) if name] + list(keys)
    with refusal(f"'{path}' cannot be read"):
        yield from file.iter_batches(BATCH, row_groups=list(groups), columns=columns)


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


def _parts(path: Path, part_size: int, keys: tuple[str, ...]) -> Iterator[SourcePart]:
    with _open(path) as file:
        there = file.schema_arrow.names
        if lacking := [key for key in keys if key not in there]:
            raise ValueError(f"'{path}' has columns {cut(', '.join(there))}; none is '{cut(lacking[0])}'")
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        if min(rows, default=0) < 0 or sum(rows) != file.metadata.num_rows:
            raise ValueError(f"'{path}' is no whole parquet file (its row groups do not add up); copy it again")
    stamp = stamp_of(path.name, path.stat().st_size)
    for groups, first, start, stop in _runs(rows, part_size):
        name = f"{path.name}[{first + start}:{first + stop}]"
        yield SourcePart(name, stamp, partial(_read_rows, path, keys, groups, first, start, stop))


def _classes(files: list[Path], folder: Path) -> tuple[str, ...]:
    """Return the class names: the hub's in the first file's schema, else those of classes.txt, else numbers."""
    with _open(files[0]) as file:
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
        with refusal(f"'{path}' cannot be read"), _open(path) as file:
            for batch in file.iter_batches(LABELS, columns=[label]):
                known = [number for number in batch.column(label).to_pylist() if number is not None]
                largest = max(largest, max(known, default=-1))
    return of_labels([largest], folder)


def open_parquet(path: Path, split: str, part_size: int, wanted: ConditionKeys | None = None) -> DataSource:
    """Return the rows of a parquet file, or of a folder of them, in the order file, row."""
    keys = () if wanted is None else wanted.keys
    folder = path if path.is_dir() else path.parent
    files = files_of_split(list(path.rglob("*.parquet")) if path.is_dir() else [path], split, str(path))
    parts = (part for file in files for part in _parts(file, part_size, keys))
    return DataSource("parquet", path.name, _classes(files, folder), tuple(parts))
