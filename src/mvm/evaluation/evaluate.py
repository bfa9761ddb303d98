"""Images against a reference, and two models against each other: figures, with everything that made them.

Features are gathered over batches and processes: their moments in blocks, and all of them where a figure needs them.
"""

import json
import platform
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import mvm
from mvm import noise
from mvm.data.sources.arrays import IMAGE_KEYS
from mvm.distributed.processes import Processes
from mvm.evaluation.images import ImageSet, open_images, with_originals
from mvm.files import sha256, write_text
from mvm.metrics.distances import LeaveOneOut, kernel_leave_one_out, paired_difference, student_95
from mvm.metrics.extractors import EXTRACTORS, PAIRED, Extractor, Sources, open_extractor
from mvm.metrics.lpips import BACKBONES
from mvm.metrics.measures import (
    KID_SIZE,
    MEASURES,
    Figure,
    Gathered,
    Key,
    feature_keys,
    figures,
    is_kernel,
    usual_metric,
)
from mvm.metrics.moments import SPATIAL, Accumulator, load_moments, merged, provenance_of, save_moments, too_few
from mvm.metrics.restoration import WINDOW
from mvm.model import Model
from mvm.options import at_least, choose

BATCH = 250
MOST = 1000  # images through a network at a time: Inception's first layers take 15 GB for these, and more are no faster
SUFFIXES = {"pool": "", "spatial": SPATIAL}  # of the moments in files, by part


@dataclass
class Judge:
    """Feature networks, opened when first needed, and how to run them."""

    sources: Sources = field(default_factory=Sources)
    processes: Processes = field(default_factory=Processes)
    batch: int = BATCH
    blocks: int = 1  # into which images are dealt for a jackknife error; 1: none
    kid_size: int = KID_SIZE
    progress: bool = True
    opened: dict[str, Extractor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("kid_size", self.kid_size, 2)

    def extractor(self, name: str) -> Extractor:
        """Return the network of that name."""
        if name not in self.opened:
            self.opened[name] = open_extractor(name, self.sources, self.processes.device)
        return self.opened[name]

    def gather(self, images: ImageSet, wanted: Mapping[Key, bool], blocks: int = 1) -> Gathered:
        """Return moments of the wanted features, dealt into blocks, and the features of keys marked True.

        Every process reads its batches; all processes return the same.
        """
        at_least("blocks", blocks, 1)
        count = images.facts.get("count")
        _check_blocks(blocks, count)  # before the work, where it is known
        networks = {key.network: self.extractor(key.network) for key in wanted}  # first: weights may be missing
        paired = any(name in PAIRED for name in networks)
        streams = {
            key: _FeatureStream(blocks, store, torch.float64 if key.network in PAIRED else torch.float32)
            for key, store in wanted.items()
        }
        with tqdm(
            total=count, desc="features", unit="image", disable=not (self.progress and self.processes.main)
        ) as bar:
            for batch in images.read(self.batch, self.processes, paired=paired):
                for indices, pictures, *originals in zip(*(part.split(MOST) for part in batch), strict=True):
                    features = {
                        name: extractor(pictures, *(originals if name in PAIRED else ()))
                        for name, extractor in networks.items()
                    }
                    for key, stream in streams.items():
                        if key.part not in features[key.network]:
                            raise ValueError(
                                f"these weights of '{key.network}' have no classifier, so no Inception Score can be "
                                "made; leave 'is' out of --metrics, or give --inception the published .pth, with one"
                            )
                        stream.add(indices, features[key.network][key.part])
                    bar.update(len(pictures) * (1 if count is None else self.processes.world))
        gathered = Gathered()
        for key, stream in streams.items():
            gathered.blocks[key], features_of_all = stream.reduced(self.processes)
            gathered.count = sum(block.count for block in gathered.blocks[key])
            if features_of_all is not None:
                gathered.features[key] = features_of_all
        _check_blocks(blocks, gathered.count)
        return gathered

    def usual_of_restored(self, shape: Sequence[int]) -> tuple[tuple[str, ...], list[str]]:
        """Return the usual figures of restored images (C, H, W), and why some are left out: LPIPS needs weights."""
        names, notes = [usual_metric(shape[0]), "psnr"], []
        for name, smallest in (("ssim", WINDOW), ("lpips", BACKBONES["alex"].smallest)):
            if min(shape[1:]) < smallest:
                notes.append(f"{name} is left out: it needs images of {smallest} pixels a side or more")
                continue
            try:
                self.extractor(name)
                names.append(name)
            except ValueError as error:
                if name == "lpips" and self.sources.lpips:
                    raise
                notes.append(f"{name} is left out: {error}")
        return tuple(names), notes

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what identifies the feature networks of these figures."""
        return {name: self.extractor(name).facts for name in dict.fromkeys(MEASURES[n].key.network for n in names)}


def _check_blocks(blocks: int, count: int | None) -> None:
    if count is not None and blocks > max(1, count):
        raise ValueError(f"{blocks} blocks of {count} images leave some empty; ask for fewer blocks, or more images")


def block_of(indices: Tensor, blocks: int) -> Tensor:
    """Return the block (B,) of images by their index alone: the same in any batch and process, two sets alike.

    Every `blocks` neighbours are dealt to all blocks in an order of their own, so that sizes differ by one at most and
    labels that go round do not fall into step with the blocks.
    """
    orders = noise.uniform(indices // blocks, noise.BLOCK, (blocks,)).argsort(dim=1)
    return orders.gather(1, (indices % blocks)[:, None])[:, 0]


class _FeatureStream:
    """Features of one key batch by batch: accumulators of blocks, and, if stored, the features with their indices."""

    def __init__(self, blocks: int, store: bool, dtype: torch.dtype) -> None:
        self.blocks, self.store, self.dtype = blocks, store, dtype
        self.accumulators: list[Accumulator] = []
        self.stored: list[tuple[Tensor, Tensor]] = []

    def add(self, indices: Tensor, features: Tensor) -> None:
        if not self.accumulators:
            self.accumulators = [Accumulator(features.shape[1], features.device) for _ in range(self.blocks)]
        if self.blocks == 1:
            self.accumulators[0].add(features)
        else:
            dealt = block_of(indices, self.blocks).to(features.device)
            for number, accumulator in enumerate(self.accumulators):
                accumulator.add(features[dealt == number])
        if self.store:
            self.stored.append((indices, features.to(self.dtype)))

    def reduced(self, processes: Processes) -> tuple[list[Accumulator], Tensor | None]:
        """Return the blocks over all processes, and the features (count, width) in the order of images if stored."""
        width = processes.max(self.accumulators[0].mean.numel() if self.accumulators else 0)
        if width == 0:
            raise ValueError("there are no images to look at")
        device = self.accumulators[0].mean.device if self.accumulators else processes.device
        blocks = self.accumulators or [Accumulator(width, device) for _ in range(self.blocks)]
        if processes.world > 1:
            states = ({name: processes.gather(part) for name, part in block.state().items()} for block in blocks)
            blocks = [Accumulator.from_state(state, device) for state in states]
        if not self.store:
            return blocks, None
        features = torch.zeros(sum(block.count for block in blocks), width, dtype=self.dtype, device=device)
        for indices, some in self.stored:
            features[indices.to(device)] = some
        return blocks, processes.sum(features)


@dataclass(frozen=True)
class ComparedSet:
    """What is compared: images, a file of moments, or both in one file (ADM's).

    model: what the images are sampled from, if they are.
    """

    name: str
    images: ImageSet | None = None
    file: Path | None = None
    model: Model | None = None

    def has(self, key: Key) -> bool:
        """Whether the file holds the moments of a key; files that do not say so (ADM, EDM) are Inception's."""
        if self.file is None or key.part not in SUFFIXES or f"mu{SUFFIXES[key.part]}.npy" not in _members(self.file):
            return False
        return key.network == provenance_of(self.file).get("network", {}).get("name", "inception")

    def facts(self) -> dict[str, Any]:
        """Return what distinguishes this set from another of the same name, without its path."""
        file = {} if self.file is None else {"moments": self.file.name, "sha256": sha256(self.file)}
        return {"name": self.name, **(self.images.facts if self.images else {}), **file}


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"'{path}' is no whole .npz ({error}); copy it again") from None


def open_side(name: str, **options: Any) -> ComparedSet:
    """Return stored images or moments by name; options are those of `open_images`."""
    path = Path(name)
    if path.suffix != ".npz" or not path.is_file():
        return ComparedSet(path.name or name, open_images(name, **options))
    members = _members(path)
    moments = "mu.npy" in members
    images = not moments or any(f"{key}.npy" in members for key in IMAGE_KEYS)
    return ComparedSet(path.name, open_images(name, **options) if images else None, path if moments else None)


def check_side(names: Sequence[str], side: ComparedSet, *, reference: bool) -> tuple[dict[Key, bool], list[Key]]:
    """Return what must be gathered of a set, and what its file of moments gives; refuse what it cannot give."""
    needed = feature_keys([name for name in names if not (reference and MEASURES[name].alone)])
    read = [key for key in needed if side.has(key)]
    gathered = {key: store for key, store in needed.items() if store or key not in read}
    if gathered and side.images is None:
        if side.file is not None:
            for key in gathered:
                _check_network(side.name, provenance_of(side.file), {"name": key.network})
        asked = [name for name in names if MEASURES[name].key in gathered]
        needy = [name for name in asked if MEASURES[name].features or MEASURES[name].key not in read]
        raise ValueError(
            f"'{side.name}' holds moments alone, and {', '.join(needy)} needs the images themselves; "
            "name the images, or leave it out of --metrics"
        )
    return gathered, read


def gather_features(
    judge: Judge, side: ComparedSet, names: Sequence[str], *, reference: bool = False
) -> tuple[Gathered, dict[str, Any]]:
    """Return the features of a set that the figures need, and its facts."""
    wanted, read = check_side(names, side, reference=reference)
    gathered, facts = Gathered(), dict[str, Any](name=side.name)
    if wanted and side.images is not None:
        gathered = judge.gather(side.images, wanted, 1 if reference else judge.blocks)
        facts = {**side.images.facts, "count": gathered.count}
    for key in read:
        assert side.file is not None
        moments, provenance = load_moments(side.file, suffix=SUFFIXES[key.part])
        _check_network(side.name, provenance, judge.extractor(key.network).facts)
        # on the features' device: eigenvalues of 2048-d ones are slow on a CPU that has other work
        gathered.known[key] = moments.to(judge.processes.device)
        gathered.blocks.pop(key, None)
        gathered.count = gathered.count or moments.count
        facts |= {**provenance.get("images", {}), "moments": side.name, "count": gathered.count or None}
        facts["provenance"] = bool(provenance)
    return gathered, facts


def _check_network(name: str, provenance: Mapping[str, Any], network: Mapping[str, Any]) -> None:
    theirs = provenance.get("network", {})
    decisive = [key for key in ("name", "fingerprint", "resize") if key in theirs and key in network]
    other = [key for key in decisive if theirs[key] != network[key]]  # not what the folder of an encoder is called
    if other:
        differ = ", ".join(f"{key}: {theirs[key]} there, {network[key]} here" for key in other)
        raise ValueError(f"'{name}' was made with another feature network ({differ}); make it again: mvm data stats")


def check_shapes(images: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    a, b = images.get("shape"), reference.get("shape")
    if a and b and list(a) != list(b):
        sizes = " and ".join("x".join(map(str, shape)) for shape in (a, b))
        raise ValueError(
            f"images and reference are {sizes} (channels x height x width); a distance between sizes says nothing. "
            "Make the reference at the images' size: mvm data prepare ... --size (or, of pictures, eval's --size)"
        )


def sampling_notes(names: Sequence[str], sides: Mapping[str, tuple[Gathered, dict[str, Any]]]) -> list[str]:
    """Return what a reader of the figures must know: the bias of few samples, and sets without provenance."""
    notes = []
    *_, (last, _) = sides.values()
    for key in feature_keys([name for name in names if not MEASURES[name].features]):
        for role, (gathered, _) in sides.items():
            count, width = gathered.moments(key).count, len(gathered.moments(key).mean)
            if count and (warning := too_few(count, width)):
                bias = f"Bias, if features were Gaussian: about {last.sampling_bias(key, count):.3g}"
                notes.append(f"{role}, {key.network} {key.part}: {warning}. {bias}")
    unknown = {role: facts["name"] for role, (_, facts) in sides.items() if facts.get("provenance") is False}
    unchecked = "does not say how it was made; resolution and network are unchecked"
    return notes + [f"{role}: '{name}' {unchecked}" for role, name in unknown.items()]


def software(device: torch.device) -> dict[str, str]:
    """Return what computed the figures."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"mvm": mvm.__version__, "torch": torch.__version__, "device": name}
    return {**versions, "features": "float32, TF32 off", "statistics": "float64"}


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
        """Return it as JSON has it, which knows no infinity: None, and the note says why."""
        metrics = {name: figure._asdict() for name, figure in self.metrics.items()}
        for figure in metrics.values():
            figure["value"] = figure["value"] if isfinite(figure["value"]) else None
        return {**vars(self), "metrics": metrics}


class Reference:
    """A reference whose features are gathered once, for many comparisons with the same figures."""

    def __init__(self, judge: Judge, side: ComparedSet, names: Sequence[str]) -> None:
        self.gathered, self.facts = gather_features(judge, side, names, reference=True)


def evaluate(
    judge: Judge, images: ComparedSet, reference: ComparedSet | Reference | None, names: Sequence[str]
) -> Evaluation:
    """Return the figures of images against a reference (None: figures that need none)."""
    start = time.perf_counter()
    check_side(names, images, reference=False)
    unpaired = images.images is not None and images.images.pairs is None and any(MEASURES[n].paired for n in names)
    if unpaired and isinstance(reference, ComparedSet) and reference.images is not None:
        check_shapes(images.images.facts, reference.images.facts)
        images = replace(images, images=with_originals(images.images, reference.images))
    if isinstance(reference, ComparedSet):
        reference = Reference(judge, reference, names)
    if reference is None and (needy := [name for name in names if not MEASURES[name].alone]):
        raise ValueError(f"{', '.join(needy)} compares with a reference; name it with --ref")
    if images.images is None and judge.blocks > 1:
        raise ValueError(f"--jackknife {judge.blocks} leaves images out; '{images.name}' holds moments alone")
    target, known = (reference.gathered, reference.facts) if reference else (Gathered(), {})
    check_shapes(images.images.facts if images.images else {}, known)  # before the work
    gathered, facts = gather_features(judge, images, names)
    check_shapes(facts, known)
    sides = {"images": (gathered, facts)} | ({"reference": (target, known)} if reference else {})
    notes = sampling_notes(names, sides)
    metrics = figures(names, gathered, target, judge.kid_size)
    seconds = time.perf_counter() - start
    return Evaluation(metrics, facts, known, judge.facts(names), notes, software(judge.processes.device), seconds)


def write_statistics(judge: Judge, side: ComparedSet, features: str, out: Path) -> dict[str, Any]:
    """Write moments of a set's features with their provenance, and return that."""
    if side.images is None:
        raise ValueError(f"'{side.name}' holds moments already; name images")
    start = time.perf_counter()
    choose("features", features, EXTRACTORS)  # which those of pairs are not
    parts = ("pool", "spatial") if features == "inception" else ("pool",)
    gathered = judge.gather(side.images, {Key(features, part): False for part in parts})
    pool, *spatial = (gathered.moments(Key(features, part)) for part in parts)
    provenance = {
        "images": {**side.images.facts, "count": gathered.count},
        "network": judge.extractor(features).facts,
        "software": software(judge.processes.device),
        "warning": too_few(gathered.count, len(pool.mean)),
        "seconds": time.perf_counter() - start,
    }
    if judge.processes.main:
        save_moments(out, pool, provenance, spatial=next(iter(spatial), None))
    return provenance


# Two models on the same seeds and labels


class Difference(NamedTuple):
    """A figure of A, of B, and B - A with its standard error and 95 % interval, images left out pair by pair."""

    name: str
    a: float
    b: float
    difference: float
    error: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def _without(gathered: Gathered, block: int, dealt: Tensor) -> Gathered:
    """Return the features without one block, or, of block -1, all of them."""
    blocks = {
        key: [merged([part for number, part in enumerate(parts) if number != block])]
        for key, parts in gathered.blocks.items()
    }
    rest = dealt != block
    features = {key: values[rest.to(values.device)] for key, values in gathered.features.items()}
    return Gathered(int(rest.sum()), blocks, features=features)


class Comparison(NamedTuple):
    """The differences, and everything that made them."""

    differences: list[Difference]
    facts: dict[str, Any]


def compare(judge: Judge, a: ImageSet, b: ImageSet, reference: ComparedSet, names: Sequence[str]) -> Comparison:
    """Return the figures of two sets of images whose i-th images belong together, and their differences.

    The error is a jackknife's: block after block of pairs is left out of both sets, so that what both owe to the same
    seeds and labels cancels. The reference is taken as known. Kernel distances are of all images, not of subsets.
    """
    at_least("blocks", judge.blocks, 2)
    check_shapes(a.facts, b.facts)
    target = Reference(judge, reference, names)
    check_shapes(a.facts, target.facts)
    sides = {role: gather_features(judge, ComparedSet(role, images), names) for role, images in (("A", a), ("B", b))}
    (first, facts_a), (second, facts_b) = sides.values()
    if first.count != second.count:
        raise ValueError(f"there are {first.count} and {second.count} images; pairs are needed")
    facts = {
        "a": facts_a,
        "b": facts_b,
        "reference": target.facts,
        "networks": judge.facts(names),
        "blocks": judge.blocks,
        "warnings": sampling_notes(names, {**sides, "reference": (target.gathered, target.facts)}),
        "software": software(judge.processes.device),
    }
    dealt = block_of(torch.arange(first.count), judge.blocks)
    sizes = dealt.bincount(minlength=judge.blocks).tolist()
    one, other = (_leave_one_out(side, target.gathered, names, dealt, judge.blocks) for side in (first, second))
    differences = []
    for name in names:
        value, _, error, _ = paired_difference(one[name], other[name], sizes)
        reach = student_95(len(sizes)) * error
        both = one[name].value, other[name].value
        differences.append(Difference(name, *both, value, error, value - reach, value + reach))
    return Comparison(differences, facts)


def _leave_one_out(
    side: Gathered, target: Gathered, names: Sequence[str], dealt: Tensor, blocks: int
) -> dict[str, LeaveOneOut]:
    """Return every figure of a set, and without each of its blocks."""
    results = {}
    for name in filter(is_kernel, names):
        key = MEASURES[name].key
        results[name] = kernel_leave_one_out(side.features[key], target.features[key], dealt)
    if rest := [name for name in names if name not in results]:
        whole, *parts = (figures(rest, _without(side, block, dealt), target) for block in range(-1, blocks))
        results |= {name: LeaveOneOut(whole[name].value, [part[name].value for part in parts]) for name in rest}
    return results


def comparison_table(differences: Sequence[Difference]) -> str:
    """Return the differences as a Markdown table; with whether the interval leaves zero out."""
    lines = ["| figure | A | B | B - A | 95 % interval | |", "|---|---|---|---|---|---|"]
    for row in differences:
        verdict = "differs" if row.significant else "no significant difference"
        cells = (f"{row.a:.5g}", f"{row.b:.5g}", f"{row.difference:+.3g}", f"{row.low:+.3g} to {row.high:+.3g}")
        lines.append(f"| {row.name} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write the differences and what made them as JSON."""
    rows = [{**row._asdict(), "differs": row.significant} for row in comparison.differences]
    write_text(path, json.dumps({"differences": rows, **comparison.facts}, indent=2) + "\n")
