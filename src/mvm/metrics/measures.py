"""Which figures there are, what each needs, and their computation from gathered features."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from mvm.metrics import distances
from mvm.metrics.moments import Accumulator, Moments, merged
from mvm.options import choose

KID_SUBSETS, KID_SIZE = 100, 1000
SPLITS = 10  # of the Inception Score


class Key(NamedTuple):
    """One kind of features: the network, and the part of what it gives."""

    network: str
    part: str


@dataclass(frozen=True)
class Measure:
    """A figure's name in print, and what it is computed from.

    features: the features themselves, not their moments alone. alone: no reference. paired: a value of each image and
    its original. lower: whether lower is better, None where that is not known.
    """

    label: str
    key: Key
    features: bool = False
    alone: bool = False
    paired: bool = False
    lower: bool | None = True

    @property
    def title(self) -> str:
        return self.label if self.lower is None else f"{self.label} ({'lower' if self.lower else 'higher'} is better)"


_POOL, _PROBABILITIES = Key("inception", "pool"), Key("inception", "probabilities")
MEASURES: dict[str, Measure] = {
    "fid": Measure("FID", _POOL),
    "sfid": Measure("sFID", Key("inception", "spatial")),
    "kid": Measure("KID", _POOL, features=True),
    "is": Measure("Inception score", _PROBABILITIES, features=True, alone=True, lower=False),
}
for _name in ("Precision", "Recall", "Density", "Coverage"):
    MEASURES[_name.lower()] = Measure(_name, _POOL, features=True, lower=False)
for _network, _name in (("dino", "DINO"), ("clip", "CLIP"), ("effnet", "EfficientNet"), ("pixels", "pixels")):
    MEASURES[f"fd-{_network}"] = Measure(f"FD-{_name}", Key(_network, "pool"))
    MEASURES[f"kd-{_network}"] = Measure(f"KD-{_name}", Key(_network, "pool"), features=True)
_PAIRED = {"psnr": ("PSNR", False), "ssim": ("SSIM", False), "lpips": ("LPIPS", True), "lpips-vgg": ("LPIPS-VGG", True)}
for _name, (_label, _lower) in _PAIRED.items():
    MEASURES[_name] = Measure(_label, Key(_name, "pairs"), features=True, alone=True, paired=True, lower=_lower)


def usual_metric(channels: int) -> str:
    """Return the figure usual for images: Inception knows photographs, not small grey ones."""
    return "fid" if channels == 3 else "fd-pixels"


def parse_metrics(text: str) -> tuple[str, ...]:
    """Return the names in "fid,kid", each once, each known."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        choose("metrics", name, MEASURES)
    if not names:
        raise ValueError(f"--metrics '{text}' names none; allowed: {', '.join(MEASURES)}")
    return names


class Figure(NamedTuple):
    """A figure, its standard error (None: not estimated), how it was made, and a jackknife's parts of the error."""

    value: float
    error: float | None = None
    note: str = ""
    parts: tuple[float, ...] = ()  # by which two figures on the same seeds are compared


@dataclass
class Gathered:
    """Features of one set: moments per key, in blocks dealt at random, and the features where a figure needs them."""

    count: int = 0
    blocks: dict[Key, list[Accumulator]] = field(default_factory=dict)
    known: dict[Key, Moments] = field(default_factory=dict)  # read from a file, in place of blocks
    features: dict[Key, Tensor] = field(default_factory=dict)
    biases: dict[Key, float] = field(default_factory=dict)  # of a distance to one sample

    def moments(self, key: Key) -> Moments:
        """Return the moments of all features of a key; computed once."""
        if key not in self.known:
            self.known[key] = merged(self.blocks[key]).result()
        return self.known[key]

    def sampling_bias(self, key: Key, count: int) -> float:
        """Return by how much `count` samples of these features are too far from them; eigenvalues are computed once."""
        if key not in self.biases:
            self.biases[key] = distances.sampling_bias(self.moments(key).covariance, 1)
        return self.biases[key] / count


PAIRS = {  # figures that one computation gives together
    ("precision", "recall"): (distances.precision_recall, "3 neighbours"),
    ("density", "coverage"): (distances.density_coverage, "5 neighbours"),
}


def is_kernel(name: str) -> bool:
    """Whether a figure is a kernel distance."""
    return name == "kid" or name.startswith("kd-")


def _figure(name: str, images: Gathered, reference: Gathered, kid_size: int) -> Figure:
    """Return a figure that is computed alone: a score, a kernel distance, or a Frechet distance, with its error."""
    key = MEASURES[name].key
    if MEASURES[name].paired:
        values = images.features[key][:, 0].double()
        note, exact = "mean over the images", int(values.isinf().sum())
        if exact:
            return Figure(float(values.mean()), None, f"{note}, {exact:,} of them equal to their originals")
        error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else None
        return Figure(float(values.mean()), error, f"{note}; error: its standard error")
    if MEASURES[name].alone:
        mean, std = distances.inception_score(images.features[key], SPLITS)
        return Figure(mean, std, f"error: std over {SPLITS} splits")
    if is_kernel(name):
        a, b = images.features[key], reference.features[key]
        count = min(len(a), len(b))
        size = min(kid_size, count)
        mean, std = distances.kernel_distance(a, b.to(a.device), KID_SUBSETS, size)
        error = std / max(1.0, count / size) ** 0.5  # subsets overlap: only about count / size are independent
        return Figure(mean, error, f"{KID_SUBSETS} subsets of {size}; error: their std / sqrt(images / {size})")
    target, blocks = reference.moments(key), images.blocks.get(key, [])
    if len(blocks) < 2:
        return Figure(distances.frechet_distance(images.moments(key), target))
    value, _, error, parts = distances.jackknife_frechet(blocks, target.to(blocks[0].mean.device))
    return Figure(value, error, f"error: jackknife over {len(blocks)} blocks of the images", parts)


def figures(names: Sequence[str], images: Gathered, reference: Gathered, kid_size: int = KID_SIZE) -> dict[str, Figure]:
    """Return the asked figures, in the asked order."""
    pairs: dict[str, Figure] = {}
    for pair, (compute, note) in PAIRS.items():
        if set(pair) & set(names):
            values = compute(reference.features[_POOL], images.features[_POOL])
            pairs |= {name: Figure(value, None, note) for name, value in zip(pair, values, strict=True)}
    return {name: pairs.get(name) or _figure(name, images, reference, kid_size) for name in names}


def feature_keys(names: Sequence[str]) -> dict[Key, bool]:
    """Return the features that the figures need: key -> whether all of them, not moments alone."""
    measures = [MEASURES[name] for name in names]
    return {measure.key: any(m.features for m in measures if m.key == measure.key) for measure in measures}
