"""Data sets by name, images in memory, and their order, a pure function of (seed, step).

Resuming needs one integer, whatever the process count. What a network must know of a data set is known before any image
is read. The 8x8 digits ship in the package.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from mvm import noise
from mvm.path.condition import Condition, map_tensors, require_finite
from mvm.pixels import to_unit


@dataclass(frozen=True)
class Images:
    """Samples (N, C, *space), uint8 images or float arrays, and int64 labels (N,).

    condition: what the samples are conditioned on: a tensor of N rows, or a structure of such; None: the labels;
    an empty tuple: nothing.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    condition: Condition = None

    def __post_init__(self) -> None:
        def check(name: str, tensor: Tensor) -> Tensor:
            if not tensor.ndim or len(tensor) != len(self.images):
                shapes = f"{tuple(tensor.shape)} does not fit images of shape {tuple(self.images.shape)}"
                raise ValueError(f"{name} of shape {shapes}; give one row for each")
            return tensor

        map_tensors(check, self.condition)

    @property
    def given(self) -> Condition:
        """What each sample is conditioned on; None where it is on nothing."""
        if self.condition is None:
            return self.labels
        return None if isinstance(self.condition, tuple) and not self.condition else self.condition

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Images":
        condition = map_tensors(lambda _, tensor: function(tensor), self.condition)
        return Images(function(self.images), function(self.labels), self.classes, condition)

    def to(self, device: torch.device | str) -> "Images":
        """Return the images on a device."""
        return self._map(lambda tensor: tensor.to(device))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Tensor | slice) -> "Images":
        return self._map(lambda tensor: tensor[index])


DIGITS = tuple("0123456789")
HELD_OUT = 397  # of 1,797; the rest, 1,400, is for training


def digits(split: str = "all") -> Images:
    """Return the 1,797 handwritten digits, 8x8, grey levels 0..16 stretched to 0..255.

    split: "all", "train" (1,400) or "held-out" (397). The file is in an order shuffled once, because the
    original goes writer by writer: any prefix is then a fair split.
    """
    with (files("mvm.data") / "digits.npz").open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        levels, labels = archive["levels"], archive["labels"]
    images = torch.from_numpy(np.round(levels * (255 / 16)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    data = Images(images, torch.from_numpy(labels.astype(np.int64)), DIGITS)
    parts = {"all": slice(None), "train": slice(HELD_OUT, None), "held-out": slice(HELD_OUT)}
    if split not in parts:
        raise ValueError(f"split='{split}' is unknown; allowed: {', '.join(parts)}")
    return data[parts[split]]


@dataclass(frozen=True)
class DataSet:
    """Shape of an image and class names; load(split), where the data ship in the package."""

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    load: Callable[[str], Images] | None = None

    @property
    def unnamed(self) -> bool:
        """Whether classes have numbers for names; those of a folder it was prepared in may have others."""
        return self.load is None and all(map(str.isdigit, self.classes))


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_IMAGENETTE = (
    "tench", "English springer", "cassette player", "chain saw", "church",
    "French horn", "garbage truck", "gas pump", "golf ball", "parachute",
)  # fmt: skip


def _imagenet() -> dict[str, str]:
    lines = (files("mvm.data") / "imagenet.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines if not line.startswith("#"))


IMAGENET = _imagenet()  # WordNet id -> name of the 1,000 classes, in the usual order

# Sets without `load` are read from a folder that `mvm data prepare` has written.
DATA_SETS: dict[str, DataSet] = {
    "digits": DataSet((1, 8, 8), DIGITS, digits),
    "cifar10": DataSet((3, 32, 32), _CIFAR10),
    "imagenet32": DataSet((3, 32, 32), tuple(map(str, range(1000)))),  # published batches have an order of their own
    "imagenet256": DataSet((3, 256, 256), tuple(IMAGENET.values())),
    "imagenet512": DataSet((3, 512, 512), tuple(IMAGENET.values())),
    "imagenette": DataSet((3, 224, 224), _IMAGENETTE),
}


# --- order and stores ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)  # an epoch and, read ahead, the next
def _permutation(seed: int, epoch: int, size: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(size))


@dataclass(frozen=True)
class Order:
    """The global stream of sample indices: one fresh permutation of the data per epoch."""

    size: int
    seed: int

    def positions(self, step: int, batch: int) -> Tensor:
        """Return the places in the stream that step `step` consumes."""
        return torch.arange(step * batch, (step + 1) * batch)

    def indices(self, positions: Tensor) -> Tensor:
        """Return the data index at each position."""
        epochs = positions // self.size
        out = torch.empty_like(positions)
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            out[here] = _permutation(self.seed, epoch, self.size)[positions[here] % self.size]
        return out

    def seeds(self, positions: Tensor) -> Tensor:
        """Return one seed per position, for the noise, time and dropout of that sample."""
        return noise.derive(self.seed, positions)


def mirrored(seeds: Tensor) -> Tensor:
    """Return which samples are shown mirrored: bool (B,), half of them, decided by each sample's seed."""
    return noise.uniform(seeds, noise.MIRROR, (1,))[:, 0] < 0.5


def mirror(images: Tensor, which: Tensor) -> Tensor:
    """Return images (B, C, *space) with those in `which` (B,) flipped along the last axis: left to right."""
    return torch.where(which.reshape(-1, *(1,) * (images.ndim - 1)), images.flip(-1), images)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return values on the device without waiting for it: a plain copy to a GPU waits until its queue is empty."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def as_received(condition: Condition) -> Condition:
    """Return a stored condition as networks receive it: uint8 images in [-1, 1], other real numbers as float32."""

    def convert(_: str, tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8:
            return to_unit(tensor)
        return tensor.float() if tensor.is_floating_point() else tensor

    return map_tensors(convert, condition)


class Store(ABC):
    """Samples to draw from: gather(indices) -> (samples, condition) on the training device; store[indices]: samples.

    Samples are uint8 images or float arrays (B, C, *space); the condition is the labels (B,) where there is no other.
    """

    labels: Tensor  # all of them; zeros where there are none
    stamp: str = ""  # of these samples and no others; "": they ship in the package

    def __getitem__(self, indices: Tensor) -> Tensor:
        return self.gather(indices)[0]

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def gather(self, indices: Tensor) -> tuple[Tensor, Condition]: ...

    def expect(self, indices: Callable[[], Tensor]) -> None:
        """Take note of what will be asked for next, to read ahead; by default there is nothing to gain by it."""
        return


class Resident(Store):
    """Everything in the memory of the device: reading costs one indexing kernel."""

    def __init__(self, images: Images, device: torch.device | str) -> None:
        require_finite(images.condition)
        self.data = images.to(device)
        self.labels = self.data.labels

    def __len__(self) -> int:
        return len(self.data)

    def gather(self, indices: Tensor) -> tuple[Tensor, Condition]:
        chosen = self.data[send(indices, self.data.images.device)]
        return chosen.images, as_received(chosen.given)


class OnHost(Store):
    """Samples read from memory-mapped shards by a thread, one step ahead, and copied to the device."""

    def __init__(
        self, read: Callable[[Tensor], tuple[Tensor, Condition]], labels: Tensor, device: torch.device | str
    ) -> None:
        self.read, self.labels, self.device = read, labels, torch.device(device)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self.ahead: Future[tuple[Tensor, tuple[Tensor, Condition]]] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def _fetch(self, indices: Tensor) -> tuple[Tensor, Condition]:
        samples, condition = self.read(indices)
        there = map_tensors(lambda _, tensor: send(tensor, self.device), condition)
        return send(samples, self.device), as_received(there)

    def expect(self, indices: Callable[[], Tensor]) -> None:
        def work() -> tuple[Tensor, tuple[Tensor, Condition]]:
            wanted = indices()
            return wanted, self._fetch(wanted)

        self.ahead = self.thread.submit(work)

    def gather(self, indices: Tensor) -> tuple[Tensor, Condition]:
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            expected, batch = ahead.result()
            if torch.equal(expected, indices):
                return batch
        return self._fetch(indices)
