"""Images against a reference: features of both sides gathered once, compared, and told with all that made them."""

import platform
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import mvm
from mvm import noise
from mvm.evaluation.extractors import Extractor, Sources, open_extractor
from mvm.evaluation.images import ImageSet, open_images
from mvm.evaluation.measures import KID_SIZE, MEASURES, Figure, Gathered, Key, figures, keys_of
from mvm.evaluation.metrics import sampling_bias
from mvm.evaluation.moments import SPATIAL, Accumulator, load_moments, save_moments, too_few
from mvm.training.runtime import Processes

BATCH = 250
SUFFIXES = {"pool": "", "spatial": SPATIAL}  # of the moments in files, by part


@dataclass(frozen=True)
class Side:
    """What stands on one side of a comparison: images, a file of moments, or both in one file (ADM's)."""

    name: str
    images: ImageSet | None = None
    file: Path | None = None

    def has(self, part: str) -> bool:
        """Whether the file holds the moments of a part."""
        return self.file is not None and f"mu{SUFFIXES.get(part, ' ')}.npy" in _members(self.file)


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"'{path}' is no whole .npz ({error}); copy it again") from None


def open_side(name: str, **options: Any) -> Side:
    """Return stored images or moments by name; options are those of `open_images`."""
    path = Path(name)
    if path.suffix != ".npz" or not path.is_file():
        return Side(path.name or name, open_images(name, **options))
    members = _members(path)
    moments = "mu.npy" in members
    images = not moments or any(f"{key}.npy" in members for key in ("images", "arr_0", "data"))
    return Side(path.name, open_images(name, **options) if images else None, path if moments else None)


@dataclass
class Judge:
    """Feature networks, opened when first needed, and how to run them."""

    sources: Sources = field(default_factory=Sources)
    place: Processes = field(default_factory=Processes)
    batch: int = BATCH
    blocks: int = 1  # into which images are dealt for a jackknife error; 1: none
    kid_size: int = KID_SIZE
    progress: bool = True
    opened: dict[str, Extractor] = field(default_factory=dict)

    def extractor(self, name: str) -> Extractor:
        """Return the network of that name."""
        if name not in self.opened:
            self.opened[name] = open_extractor(name, self.sources, self.place.device)
        return self.opened[name]

    def gather(self, images: ImageSet, wanted: Mapping[Key, bool], blocks: int = 1) -> Gathered:
        """Return moments of the wanted features, dealt into blocks, and the features of keys marked True.

        Every process reads its batches; all processes return the same.
        """
        networks = {key.network: self.extractor(key.network) for key in wanted}  # first: weights may be missing
        streams = {key: _Stream(blocks, keep) for key, keep in wanted.items()}
        count = images.facts.get("count")
        bar = tqdm(total=count, desc="features", unit="image", disable=not (self.progress and self.place.main))
        with bar:
            for indices, pictures in images.read(self.batch, self.place):
                named = {name: extractor(pictures) for name, extractor in networks.items()}
                for key, stream in streams.items():
                    stream.add(indices, _part(named[key.network], key))
                bar.update(len(pictures) * (1 if count is None else self.place.world))
        return _reduced(streams, self.place)

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what tells the feature networks of these figures apart."""
        return {name: self.extractor(name).facts for name in dict.fromkeys(MEASURES[n].key.network for n in names)}


def _part(named: Mapping[str, Tensor], key: Key) -> Tensor:
    if key.part not in named:
        raise ValueError(
            f"these weights of '{key.network}' have no classifier, so no Inception Score can be made; "
            "leave 'is' out of --metrics, or give --inception the published .pth, which has it"
        )
    return named[key.part]


class _Stream:
    """Features of one key as they come: accumulators of blocks, and the features with their indices if kept."""

    def __init__(self, blocks: int, keep: bool) -> None:
        self.blocks, self.keep = blocks, keep
        self.accumulators: list[Accumulator] = []
        self.kept: list[tuple[Tensor, Tensor]] = []

    def add(self, indices: Tensor, features: Tensor) -> None:
        if not self.accumulators:
            self.accumulators = [Accumulator(features.shape[1], features.device) for _ in range(self.blocks)]
        if self.blocks == 1:
            self.accumulators[0].add(features)
        else:
            dealt = block_of(indices, self.blocks).to(features.device)
            for number, accumulator in enumerate(self.accumulators):
                accumulator.add(features[dealt == number])
        if self.keep:
            self.kept.append((indices, features.float()))


def block_of(indices: Tensor, blocks: int) -> Tensor:
    """Return the block (B,) of images by their index alone: the same in any batch and process, two sets alike."""
    return (noise.uniform(indices, noise.BLOCK, (1,))[:, 0] * blocks).long()


def _reduced(streams: Mapping[Key, _Stream], place: Processes) -> Gathered:
    """Return what all processes have gathered, joined."""
    found = Gathered()
    for key, stream in streams.items():
        width = place.largest(stream.accumulators[0].mean.numel() if stream.accumulators else 0)
        if width == 0:
            raise ValueError("there are no images to look at")
        device = stream.accumulators[0].mean.device if stream.accumulators else place.device
        mine = stream.accumulators or [Accumulator(width, device) for _ in range(stream.blocks)]
        found.blocks[key] = [_joined(accumulator, place) for accumulator in mine]
        found.count = sum(block.count for block in found.blocks[key])
        if stream.keep:
            found.features[key] = _in_order(stream.kept, found.count, width, device, place)
    return found


def _joined(mine: Accumulator, place: Processes) -> Accumulator:
    if place.world == 1:
        return mine
    return Accumulator.from_state({name: place.join(part) for name, part in mine.state().items()}, mine.mean.device)


def _in_order(
    kept: Sequence[tuple[Tensor, Tensor]], count: int, width: int, device: torch.device, place: Processes
) -> Tensor:
    """Return all features (count, width) in the order of the images."""
    features = torch.zeros(count, width, device=device)
    for indices, some in kept:
        features[indices.to(device)] = some
    return place.sum(features)


def _wanted(names: Sequence[str], side: Side, reference: bool) -> tuple[dict[Key, bool], list[Key]]:
    """Return what must be gathered of a side, and what its file of moments gives."""
    gathered, read = {}, []
    for key, keep in keys_of([name for name in names if not (reference and MEASURES[name].alone)]).items():
        if side.has(key.part):
            read.append(key)
        if not side.has(key.part) or keep:
            gathered[key] = keep
    if gathered and side.images is None:
        needy = [name for name in names if MEASURES[name].key in gathered]
        raise ValueError(
            f"'{side.name}' holds moments alone, and {', '.join(needy)} needs the images themselves; "
            "name the images, or leave it out of --metrics"
        )
    return gathered, read


def look(judge: Judge, side: Side, names: Sequence[str], *, reference: bool = False) -> tuple[Gathered, dict[str, Any]]:
    """Return the features of a side that the figures need, and its facts."""
    wanted, read = _wanted(names, side, reference)
    found = Gathered()
    facts: dict[str, Any] = {"name": side.name}
    if wanted and side.images is not None:
        found = judge.gather(side.images, wanted, 1 if reference else judge.blocks)
        facts = {**side.images.facts, "count": found.count}
    for key in read:
        assert side.file is not None
        width = judge.extractor(key.network).facts.get("width")
        stored = load_moments(side.file, width, SUFFIXES[key.part])
        _check_network(side.name, stored.provenance, judge.extractor(key.network).facts)
        found.known[key], found.count = stored.moments, stored.moments.count
        found.blocks.pop(key, None)
        facts = {**facts, **stored.provenance.get("images", {}), "moments": side.name, "count": stored.moments.count}
        facts["provenance"] = bool(stored.provenance)
    return found, facts


def _check_network(name: str, provenance: Mapping[str, Any], network: Mapping[str, Any]) -> None:
    theirs = provenance.get("network", {})
    other = [key for key in theirs if theirs[key] != network.get(key)]
    if other:
        told = ", ".join(f"{key}: {theirs[key]} there, {network.get(key)} here" for key in other)
        raise ValueError(f"'{name}' was made with another feature network ({told}); make it again: mvm data stats")


def _check_shapes(images: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    a, b = images.get("shape"), reference.get("shape")
    if a and b and list(a) != list(b):
        told = " and ".join("x".join(map(str, shape)) for shape in (a, b))
        raise ValueError(
            f"images and reference are {told} (channels x height x width); a distance between sizes says nothing. "
            "Make the reference at the images' size: mvm data prepare ... --size, or --size here"
        )


def _sampling_warnings(key: Key, sides: Mapping[str, Gathered]) -> list[str]:
    """Return what few samples do to a Frechet distance, side by side, with the size of the bias."""
    told = []
    for role, found in sides.items():
        count, width = found.count, len(found.moments(key).mean)
        if count and (warning := too_few(count, width)):
            bias = sampling_bias(list(sides.values())[-1].moments(key).covariance, count)
            told.append(
                f"{role}, {key.network} {key.part}: {warning}. Bias, if features were Gaussian: about {bias:.3g}"
            )
    return told


def _warnings(names: Sequence[str], sides: Mapping[str, tuple[Gathered, dict[str, Any]]]) -> list[str]:
    """Return what a reader of the figures must know."""
    told = []
    for key in keys_of([name for name in names if not MEASURES[name].features]):
        told += _sampling_warnings(key, {role: found for role, (found, _) in sides.items()})
    for role, (_, facts) in sides.items():
        if facts.get("provenance") is False:
            told.append(f"{role}: '{facts['name']}' does not say how it was made; resolution and network are unchecked")
    return told


def software(device: torch.device) -> dict[str, str]:
    """Return what computed the figures."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "mvm": mvm.__version__,
        "torch": torch.__version__,
        "device": name,
        "features": "float32, TF32 off",
        "statistics": "float64",
    }


@dataclass(frozen=True)
class Evaluation:
    """The figures and everything that made them."""

    metrics: dict[str, Figure]
    images: dict[str, Any]
    reference: dict[str, Any]
    networks: dict[str, Any]
    warnings: list[str]
    software: dict[str, str]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON keeps it."""
        return {**vars(self), "metrics": {name: figure._asdict() for name, figure in self.metrics.items()}}


class Reference:
    """A reference whose features are gathered once and kept, for many comparisons with the same figures."""

    def __init__(self, judge: Judge, side: Side, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.gathered, self.facts = look(judge, side, names, reference=True)


def evaluate(judge: Judge, images: Side, reference: Side | Reference | None, names: Sequence[str]) -> Evaluation:
    """Return the figures of images against a reference (None: figures that need none)."""
    start = time.perf_counter()
    target = Reference(judge, reference, names) if isinstance(reference, Side) else reference
    if target is None and (needy := [name for name in names if not MEASURES[name].alone]):
        raise ValueError(f"{', '.join(needy)} compares with a reference; name it with --ref")
    if images.images is not None and target is not None:
        _check_shapes(images.images.facts, target.facts)  # before the work
    gathered, facts = look(judge, images, names)
    other = target.gathered if target else Gathered()
    if target is not None:
        _check_shapes(facts, target.facts)
    sides = {"images": (gathered, facts)} | ({} if target is None else {"reference": (target.gathered, target.facts)})
    told = _warnings(names, sides)
    found = figures(names, gathered, other, judge.kid_size)
    seconds = time.perf_counter() - start
    known = target.facts if target else {}
    return Evaluation(found, facts, known, judge.facts(names), told, software(judge.place.device), seconds)


def write_statistics(judge: Judge, side: Side, features: str, out: Path) -> dict[str, Any]:
    """Write moments of a set's features with their provenance, and return that."""
    if side.images is None:
        raise ValueError(f"'{side.name}' holds moments already; name images")
    start = time.perf_counter()
    keys = {Key(features, "pool"): False} | ({Key(features, "spatial"): False} if features == "inception" else {})
    found = judge.gather(side.images, keys)
    warning = too_few(found.count, len(found.moments(Key(features, "pool")).mean))
    provenance = {
        "images": {**side.images.facts, "count": found.count},
        "network": judge.extractor(features).facts,
        "software": software(judge.place.device),
        "warning": warning,
        "seconds": time.perf_counter() - start,
    }
    spatial = Key(features, "spatial")
    if judge.place.main:
        extra = found.moments(spatial) if spatial in keys else None
        save_moments(out, found.moments(Key(features, "pool")), provenance, spatial=extra)
    return provenance
