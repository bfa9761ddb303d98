"""Data sets by name, what a network must know of them before any image is read; the 8x8 digits ship in the package."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from mvm.path.condition import Condition, map_tensors


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
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} does not fit images of shape {tuple(self.images.shape)}; "
                    "give one row for each"
                )
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


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_IMAGENETTE = (
    "tench", "English springer", "cassette player", "chain saw", "church",
    "French horn", "garbage truck", "gas pump", "golf ball", "parachute",
)  # fmt: skip

# Sets without `load` are read from a folder that `mvm data prepare` has written.
DATA_SETS: dict[str, DataSet] = {
    "digits": DataSet((1, 8, 8), DIGITS, digits),
    "cifar10": DataSet((3, 32, 32), _CIFAR10),
    "imagenet32": DataSet((3, 32, 32), tuple(map(str, range(1000)))),
    "imagenet256": DataSet((3, 256, 256), tuple(map(str, range(1000)))),
    "imagenette": DataSet((3, 224, 224), _IMAGENETTE),
}
