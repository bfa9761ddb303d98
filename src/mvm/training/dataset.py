"""The user's own data as a Store: tensors, a torch Dataset, or a stream (IterableDataset, DataLoader, generator).

A sample is x0, a pair (x0, condition), or a mapping with "x0" whose other entries are the condition. x0 is a float
tensor, taken as it is, or a uint8 image; a condition is any structure of tensors (mvm.path.condition).
"""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mvm.data import Images, OnHost, Order, Store, send
from mvm.path import Condition
from mvm.path.condition import map_tensors, rows
from mvm.recipes.memory import free_memory
from mvm.training.data import ROOM
from mvm.training.logs import warn

X0, CONDITION = "x0", "condition"
FORMS = "give x0, (x0, condition), or a mapping with 'x0'"


class SampleRows(NamedTuple):
    """Samples x0 (B, ...) and their condition, batched; None: there is none."""

    x0: Tensor
    condition: Condition

    def cut(self, part: slice) -> "SampleRows":
        """Return some of the rows."""
        return SampleRows(self.x0[part], rows(self.condition, part))

    @property
    def batched(self) -> "SampleRows":
        """One sample as a batch of one row."""
        return _each(lambda _, tensor: tensor[None], self)


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return torch.as_tensor(value)
    remedy = "embed it first" if isinstance(value, str) else "turn it into a tensor in the dataset"
    raise ValueError(f"dataset: {name} is of type {type(value).__name__}; {remedy}")


def _structure(value: Any, dtype: torch.dtype, name: str) -> Condition:
    """Return a condition with tensors alone as its leaves, floating ones in dtype."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _structure(each, dtype, f"{name}['{key}']") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_structure(each, dtype, f"{name}[{i}]") for i, each in enumerate(value))
    tensor = _tensor(value, name)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _parts(item: Any, dtype: torch.dtype, name: str) -> SampleRows:
    """Return x0 and condition of a sample, or of a batch of samples."""
    if isinstance(item, Mapping):
        if X0 not in item:
            raise ValueError(f"{name} has the keys {', '.join(map(str, item))}, and no 'x0': {FORMS}")
        condition: Any = {key: value for key, value in item.items() if key != X0} or None
        if condition is not None and condition.keys() == {CONDITION}:
            condition = condition[CONDITION]
        item = item[X0], condition
    elif not isinstance(item, list | tuple):
        item = item, None
    elif len(item) == 1:
        item = item[0], None
    if len(item) != 2:
        raise ValueError(f"{name} has {len(item)} parts; {FORMS}")
    x0 = _tensor(item[0], X0)
    if x0.is_floating_point():
        x0 = x0.to(dtype)
    elif x0.dtype != torch.uint8:
        raise ValueError(f"{name}: x0 is of type {x0.dtype}; give floats, or images as uint8")
    return SampleRows(x0, _structure(item[1], dtype, CONDITION))


def _joined(parts: Sequence[SampleRows], where: Sequence[str]) -> SampleRows:
    """Return rows one below the other; where: what each part is called in errors."""

    def join(position: str, *tensors: Tensor) -> Tensor:
        for name, tensor in zip(where, tensors, strict=True):
            if tensor.shape[1:] != tensors[0].shape[1:] or tensor.dtype != tensors[0].dtype:
                raise ValueError(
                    f"{name} has {position} of shape {tuple(tensor.shape[1:])} ({tensor.dtype}), {where[0]} "
                    f"{tuple(tensors[0].shape[1:])} ({tensors[0].dtype}); crop, pad or resize samples to one shape"
                )
        return torch.cat(tensors)

    x0 = join(X0, *(part.x0 for part in parts))
    try:
        return SampleRows(x0, map_tensors(join, *(part.condition for part in parts)))
    except ValueError as error:
        prefix = "" if str(error).startswith("dataset") else "dataset: "
        raise ValueError(f"{prefix}{error}") from None


def _each(function: Callable[[str, Tensor], Tensor], samples: SampleRows) -> SampleRows:
    """Return the rows with function(name, tensor) of each of their tensors."""
    return SampleRows(function(X0, samples.x0), map_tensors(function, samples.condition))


def _finite(samples: SampleRows, where: Callable[[int], str]) -> SampleRows:
    """Return the rows; one with NaN or Inf is refused by name."""

    def check(position: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).int().argmax())
            shape = tuple(tensor.shape[1:])
            raise ValueError(f"{where(bad)}: {position} of shape {shape} holds NaN or Inf; give finite values")
        return tensor

    return _each(check, samples)


class Samples(ABC):
    """What was given as the dataset, before any device is known. first: one sample, as a batch of one row."""

    classes: tuple[str, ...] = ()
    size: int = 0  # number of samples; 0: a stream

    def __init__(self, first: SampleRows) -> None:
        self.first, shape = first, tuple(first.x0.shape)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"dataset: x0 of one sample has shape {shape[1:]}; give one axis and one value at least")

    @abstractmethod
    def read(self, indices: Tensor) -> SampleRows:
        """Return the samples at these indices, or positions of a stream."""

    def store(self, device: torch.device, resident: str) -> Store:
        """Return the samples for training on a device; resident: engine.resident."""
        return ReadStore(self, device)

    @property
    def stamp(self) -> str:
        """What tells these samples from others, without reading them."""
        parts: list[str] = []

        def note(position: str, tensor: Tensor) -> Tensor:
            parts.append(f"{position} {'x'.join(map(str, tensor.shape[1:]))} {tensor.dtype}".replace("torch.", ""))
            return tensor

        _each(note, self.first)
        return f"{self.size or 'a stream of'} samples: {', '.join(parts)}"


class TensorSamples(Samples):
    """Samples that lie in tensors, all of them in memory."""

    def __init__(self, samples: SampleRows, classes: tuple[str, ...] = ()) -> None:
        self.all, self.classes, self.size = samples, classes, len(samples.x0) if samples.x0.ndim else 0
        if not self.size:
            raise ValueError(f"dataset is empty: x0 has shape {tuple(samples.x0.shape)}; give one sample at least")

        def check(position: str, tensor: Tensor) -> Tensor:
            if not tensor.ndim or len(tensor) != self.size:
                shape = tuple(tensor.shape)
                raise ValueError(f"dataset: {position} of shape {shape} must have {self.size} rows, one for each x0")
            return tensor

        super().__init__(_finite(_each(check, samples), lambda row: f"dataset[{row}]").cut(slice(1)))

    def read(self, indices: Tensor) -> SampleRows:
        return SampleRows(self.all.x0[indices], rows(self.all.condition, indices))

    def store(self, device: torch.device, resident: str) -> Store:
        size = self.all.x0.nbytes  # what conditions take besides is less, or the room left for it
        fits = self.all.x0.device.type == device.type or size < ROOM * free_memory(device)
        on_device = resident == "device" or (resident == "auto" and fits)
        return RowStore(self, device) if on_device else ReadStore(self, device)


class IndexedSamples(Samples):
    """Samples of a map-style dataset, read by index."""

    def __init__(self, dataset: Any, dtype: torch.dtype) -> None:
        self.dataset, self.dtype, self.size = dataset, dtype, len(dataset)
        if not self.size:
            raise ValueError("dataset is empty (its length is 0); give one sample at least")
        super().__init__(self.read(torch.zeros(1, dtype=torch.int64)))

    def read(self, indices: Tensor) -> SampleRows:
        if len(self.dataset) != self.size:
            raise ValueError(
                f"dataset had {self.size} samples when training began and has {len(self.dataset)} now; the order of "
                "training is that of a dataset of one length"
            )
        numbers = indices.tolist()
        where = [f"dataset[{index}]" for index in numbers]
        many = getattr(self.dataset, "__getitems__", None)
        items = [self.dataset[index] for index in numbers] if many is None else many(numbers)
        single = [_parts(item, self.dtype, name).batched for item, name in zip(items, where, strict=True)]
        before = [self.first] if hasattr(self, "first") else []  # whose shape counts
        joined = _joined([*before, *single], ["dataset[0]"] * len(before) + where).cut(slice(len(before), None))
        return _finite(joined, lambda row: where[row])


class Stream(Samples):
    """Samples of an iterable, in its order. One that ends begins again.

    Every process reads the whole stream and keeps its part of each batch. batches: whether it yields batches; None: a
    DataLoader does, unless it has no batch size, and nothing else.
    """

    def __init__(self, dataset: Any, dtype: torch.dtype, batches: bool | None = None) -> None:
        self.dataset, self.dtype = dataset, dtype
        loads = isinstance(dataset, DataLoader) and dataset.batch_sampler is not None
        self.batches = loads if batches is None else batches
        self.items = self._items()
        self.at = 0  # position of the next row
        self.number = 0  # rows read
        self.marks: dict[int, Any] = {}  # what `position` returns, by the positions that were asked for last
        self.before: Any = None  # the iterable's state before it gave what is left of
        self.left = self._pull()  # rows that were read last
        self.used = 0  # those of them which are behind
        super().__init__(self.left.cut(slice(1)))

    def _items(self, restored: bool = False) -> Iterator[Any]:
        """Yield what the iterable gives, again and again; restored: it may be at its end."""
        total = 0
        while True:
            begun, before = iter(self.dataset() if callable(self.dataset) else self.dataset), total
            for item in begun:
                total += 1
                yield item
            if restored and not total:
                restored = False
            elif not total:
                raise ValueError("dataset is empty: the iterable gave no sample")
            elif total == before or begun is self.dataset:
                raise ValueError(
                    f"dataset ended after {total} items and cannot begin again; give the function that makes the "
                    "generator, an IterableDataset, or more samples"
                )

    def _pull(self) -> SampleRows:
        """Return what the iterable gives next."""
        state = getattr(self.dataset, "state_dict", None)
        self.before = None if state is None else copy.deepcopy(state())
        name = f"dataset: sample {self.number}"
        given = _parts(next(self.items), self.dtype, name)
        if not self.batches:
            given = given.batched
        if hasattr(self, "first"):
            given = _joined([self.first, given], ["dataset: sample 0", name]).cut(slice(1, None))
        self.number += len(given.x0)
        return _finite(given, lambda row: name)

    def _take(self, count: int) -> list[SampleRows]:
        """Return the next rows, in pieces."""
        pieces = []
        while count:
            if self.used == len(self.left.x0):
                self.left, self.used = self._pull(), 0
            piece = self.left.cut(slice(self.used, self.used + count))
            self.used, count = self.used + len(piece.x0), count - len(piece.x0)
            pieces.append(piece)
        return pieces

    def read(self, indices: Tensor) -> SampleRows:
        """Return the samples at these positions in the stream, which follow one another; those before are left out."""
        first, count = int(indices[0]), len(indices)
        self.marks = {position: mark for position, mark in self.marks.items() if position >= self.at - count}
        self._take(first - self.at)
        self.marks[first] = (self.before, self.used)
        pieces = self._take(count)
        self.at = first + count
        return _joined(pieces, ["dataset"] * len(pieces))

    def position(self, at: int) -> Any:
        """Return where the stream was before the sample at a position, as JSON; None where it cannot say."""
        state, used = self.marks.get(at, (None, 0))
        try:
            return None if state is None else json.loads(json.dumps({"state": state, "used": used}))
        except (TypeError, ValueError):
            return None

    def go_on(self, at: int, position: Any, say: bool) -> None:
        """Have the stream's next sample be the one at position `at` of a run that is resumed."""
        self.at = at
        if position is None or not hasattr(self.dataset, "load_state_dict"):
            if say:
                warn("the dataset is a stream: it begins anew, and its place in the run before is not restored")
            return
        self.dataset.load_state_dict(position["state"])
        self.items = self._items(restored=True)
        self.left, self.used = self._pull(), position["used"]


class RowStore(Store):
    """Tensors on the device: reading costs an indexing kernel for each."""

    def __init__(self, samples: TensorSamples, device: torch.device) -> None:
        self.stamp, self.device, self.labels = samples.stamp, device, torch.zeros(samples.size, dtype=torch.int64)
        self.data = _each(lambda _, tensor: tensor.to(device), samples.all)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> tuple[Tensor, Any]:
        index = send(indices, self.device)
        return self.data.x0[index], rows(self.data.condition, index)


class ReadStore(OnHost):
    """Samples read by a thread, one step ahead, and copied to the device."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        super().__init__(samples.read, torch.zeros(samples.size, dtype=torch.int64), device)
        self.samples, self.stamp = samples, samples.stamp

    def _fetch(self, indices: Tensor) -> tuple[Tensor, Any]:
        return _each(lambda _, tensor: send(tensor, self.device), self.samples.read(indices))


class StreamOrder(Order):
    """The order of a stream: its own."""

    def indices(self, positions: Tensor) -> Tensor:
        return positions


def stream_of(store: Store) -> Stream | None:
    """Return the stream that a store reads; None where samples have an index."""
    return store.samples if isinstance(store, ReadStore) and isinstance(store.samples, Stream) else None


def place_in_stream(store: Store, at: int) -> Any:
    """Return what restores a stream to the sample at a position, as JSON; None where nothing does."""
    if (stream := stream_of(store)) is None:
        return None
    if isinstance(store, OnHost) and store.ahead is not None:
        store.ahead.exception()  # waits for the batch that is being read
    return stream.position(at)


def open_samples(dataset: Any, dtype: torch.dtype = torch.float32, batches: bool | None = None) -> Samples:
    """Return the samples of whatever was given as the dataset; dtype: of float samples and conditions."""
    if isinstance(dataset, Images):
        return TensorSamples(SampleRows(dataset.images, dataset.labels), dataset.classes)
    if isinstance(dataset, Tensor | np.ndarray | Mapping) or (
        isinstance(dataset, tuple) and all(isinstance(part, Tensor | np.ndarray | Mapping) for part in dataset[:1])
    ):
        return TensorSamples(_parts(dataset, dtype, "dataset"))
    streamed = isinstance(dataset, IterableDataset | DataLoader)
    if not streamed and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if batches is not None:
            raise ValueError(f"batches={batches} is for streams; this dataset is read by index, sample by sample")
        return IndexedSamples(dataset, dtype)
    if streamed or callable(dataset) or hasattr(dataset, "__iter__"):
        return Stream(dataset, dtype, batches)
    raise ValueError(
        f"dataset is of type {type(dataset).__name__}; give a torch Dataset, a tensor, a tuple or mapping of tensors, "
        "or an iterable (IterableDataset, DataLoader, generator function)"
    )
