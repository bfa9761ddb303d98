"""What every row of a prepared folder is: a sample of one shape, and its condition; made from what a source holds."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from mvm.data.resize import RESIZES, Size, decode, planes, resolve, sides
from mvm.data.shards import CAPTION, DTYPES, StoredCondition
from mvm.data.sources import Record, Source, Wanted
from mvm.data.sources.arrays import channels_last
from mvm.options import choose
from mvm.untrusted import MOST_CAPTION, MOST_PICTURE

Row = tuple[Any, ...]  # a sample, and its condition: an array, with a mask of tokens; or a text

MASK = np.dtype(np.bool_)


def _numbers(value: Any, shape: tuple[int, ...], dtype: np.dtype, what: str) -> np.ndarray:
    """Return finite numbers of this shape and type; what: begins the error."""
    found = np.asarray(value)
    if found.shape != shape or found.dtype.kind not in "fiub" or (dtype == np.uint8 and found.dtype != dtype):
        raise ValueError(f"{what} is {found.dtype} of shape {found.shape}, not {dtype} of {shape} as the first one is")
    with np.errstate(over="ignore"):
        row = found.astype(dtype)
    if not np.isfinite(row).all():
        raise ValueError(f"{what} holds NaN or Inf as {dtype}; repair this row, or leave it out")
    return row


def _mask(value: Any, length: int, what: str) -> np.ndarray:
    mask = _numbers(value, (length,), np.dtype(np.float32), f"{what} mask")
    if not np.isin(mask, (0, 1)).all() or not mask.any():
        raise ValueError(f"{what} mask must hold 0 and 1 alone, and 1 for at least one token")
    return mask.astype(MASK)


def _text(value: Any, what: str) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise ValueError(f"{what} is no UTF-8 text") from None
    if not isinstance(text, str) or len(text.encode(errors="replace")) > MOST_CAPTION:
        raise ValueError(f"{what} must be text of at most {MOST_CAPTION:,} bytes")
    return str(text)  # numpy has a type of its own


def _is_picture(value: Any) -> bool:
    return isinstance(value, bytes) or value.dtype == np.uint8


@dataclass(frozen=True)
class Form:
    """Shape and values of samples, (C, *space), how a condition is stored, and how pictures are made to fit."""

    shape: tuple[int, ...]
    values: str = "uint8"
    condition: StoredCondition | None = None
    size: Size | None = None  # None: arrays, kept as they are
    resize: str = "none"

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and type of a row of each array, by the names of their files."""
        held, arrays = self.condition, {"images": (self.shape, DTYPES[self.values])}
        if held is not None and held.kind != CAPTION:
            arrays["condition"] = (held.row(self.shape[1:]), np.dtype(held.dtype))
        if held is not None and held.length:
            arrays["mask"] = ((held.length,), MASK)
        return arrays

    def row(self, record: Record) -> Row:
        """Return what is stored of a record; BadImage where it is a picture that cannot be read."""
        if self.size is None:
            sample = _numbers(record.image, self.shape, DTYPES[self.values], f"'{record.name}'")
        else:
            sample = self._picture(record.image, self.size)
        return (sample, *self._condition(record))

    def _picture(self, image: bytes | np.ndarray, size: Size) -> np.ndarray:
        return planes(RESIZES[self.resize](decode(image, self.shape[0]), size))

    def _condition(self, record: Record) -> Row:
        held = self.condition
        if held is None:
            return ()
        (value, *more), what = record.condition, f"'{record.name}' {held.kind}"
        if held.kind == CAPTION:
            return (_text(value, what),)
        if held.kind == "image" and self.size is not None and held.dtype == "uint8" and _is_picture(value):
            image = value if isinstance(value, bytes) else channels_last(value[None], what)[0]
            return (self._picture(image, self.size),)
        value = np.atleast_1d(value) if held.kind == "vector" else value
        row = _numbers(value, held.row(self.shape[1:]), np.dtype(held.dtype), what)
        if held.kind != "tokens":
            return (row,)
        return row, _mask(more[0] if more else np.ones(held.length), held.length, what)


def _stored(wanted: Wanted, first: Record, form: Form) -> StoredCondition:
    """Return how a condition is stored, as the first sample has it."""
    value, what = first.condition[0], f"'{first.name}' {wanted.kind} '{wanted.keys[0]}'"
    if wanted.kind == CAPTION:
        _text(value, what)
        return StoredCondition(CAPTION)
    if wanted.kind == "image" and form.size is not None and _is_picture(value):
        return StoredCondition("image", form.shape[0], dtype="uint8")
    found = np.asarray(value)
    there = f"{what} is {found.dtype} of shape {found.shape}"

    def dtype(other: str) -> str:
        return other if found.dtype == other else "float32"

    if not found.size:
        raise ValueError(f"{there}, which holds nothing; leave the condition out")
    if wanted.kind == "vector" and found.ndim < 2:
        return StoredCondition("vector", found.size, dtype="float32")
    if wanted.kind == "tokens" and found.ndim == 2:
        return StoredCondition("tokens", found.shape[1], found.shape[0], dtype("float16"))
    if wanted.kind == "image" and found.shape[1:] == form.shape[1:]:
        return StoredCondition("image", found.shape[0], dtype=dtype("uint8"))
    needed = {"vector": "(width,)", "tokens": "(length, width)", "image": f"(C, *{form.shape[1:]})"}[wanted.kind]
    raise ValueError(f"{there}; {needed} is needed for each sample")


def _first(source: Source) -> Record:
    for part in source.parts:
        for record in part.read():
            return record
    raise ValueError(f"'{source.name}' has no sample")


def _kept(first: Record, values: str) -> Form:
    """Return the form of arrays that are kept as they are, as the first one has it."""
    image = np.asarray(first.image)
    inferred = {"f": "float", "u": "uint8" if image.dtype == np.uint8 else ""}.get(image.dtype.kind, "")
    if not (values or inferred):
        raise ValueError(f"'{first.name}' is {image.dtype}; give values='float' to keep it as float32")
    form = Form(image.shape, choose("values", values or inferred, {name: name for name in DTYPES}))
    if form.values == "uint8" and image.dtype != np.uint8:
        raise ValueError(f"values='uint8': '{first.name}' is {image.dtype}; leave values out, or give float")
    return form


def form_of(
    source: Source, size: Size | None, resize: str, channels: int | None, values: str, wanted: Wanted | None
) -> Form:
    """Return the form of a source's rows: by the options where pictures are resized, else as the first row has it."""
    if size is not None:
        if values:
            raise ValueError(f"values='{values}' is for arrays that are kept as they are; leave size={size} out")
        form = Form((channels or 3, *sides(size)), size=size, resize=resolve(resize, size))
        first = None if wanted is None else _first(source)
    else:
        first = _first(source)
        form = _kept(first, values)
        if resize not in ("auto", "none") or channels not in (None, form.shape[0]):
            raise ValueError(
                f"resize='{resize}', channels={channels}: without a size arrays are kept as they are, {form.shape} "
                "each; leave both out, or give a size"
            )
    if wanted is not None and first is not None:
        form = replace(form, condition=_stored(wanted, first, form))
    for name, (shape, dtype) in form.arrays.items():
        if prod(shape) * dtype.itemsize > MOST_PICTURE:
            raise ValueError(
                f"{name}: a row of {dtype} {shape} takes more than {MOST_PICTURE:,} bytes; make it smaller"
            )
    return form
