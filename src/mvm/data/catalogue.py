"""Data sets by name: what a network must know of them before any image is read."""

from collections.abc import Callable
from dataclasses import dataclass

from mvm.data import embedded
from mvm.data.embedded import Images


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
    "digits": DataSet((1, 8, 8), embedded.CLASSES, embedded.digits),
    "cifar10": DataSet((3, 32, 32), _CIFAR10),
    "imagenet32": DataSet((3, 32, 32), tuple(map(str, range(1000)))),
    "imagenet256": DataSet((3, 256, 256), tuple(map(str, range(1000)))),
    "imagenette": DataSet((3, 224, 224), _IMAGENETTE),
}
