"""The published batches of CIFAR (pickles) and of downsampled ImageNet (pickles or .npz): rows of channel planes."""

import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mvm.data.sources.arrays import LABEL_KEYS, array_parts, as_labels, channels_last, keys_of, labels_in, shape_of
from mvm.data.sources.records import (
    DataSource,
    SourcePart,
    SourceRecord,
    choose_split,
    natural,
    numbered,
    of_labels,
    spans,
    stamp_of,
)
from mvm.untrusted import cut

IMAGENET_CLASSES = 1000
_IMAGENET = re.compile(r"(train_data_batch_\d+|val_data)(\.npz)?")
_CIFAR = re.compile(r"data_batch_\d+|test_batch|train|test")
_NAMES = {"batches.meta": "label_names", "meta": "fine_label_names"}  # CIFAR-10, CIFAR-100


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
    made = _Array()
    made.array = np.frombuffer(contents, kind.dtype).reshape(shape, order="F" if order == "F" else "C")
    return made


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


def _parts(path: Path, part_size: int) -> tuple[list[SourcePart], np.ndarray]:
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
    batches = [_parts(file, part_size) for file in files]
    largest = [max(labels, default=-1) for _, labels in batches]
    imagenet = _IMAGENET.fullmatch(files[0].name)
    names = numbered(IMAGENET_CLASSES) if imagenet else _class_names(files[0].parent) or of_labels(largest, path)
    return DataSource("batches", path.name, names, tuple(part for parts, _ in batches for part in parts))
