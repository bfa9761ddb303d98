"""Images against a reference: features of both sides gathered once, compared, and recorded with all that made them."""

import platform
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mvm
from mvm.data.sources.arrays import IMAGE_KEYS
from mvm.evaluation.gather import Judge
from mvm.evaluation.images import ImageSet, open_images
from mvm.files import sha256
from mvm.metrics.measures import MEASURES, Figure, Gathered, Key, feature_keys, figures
from mvm.metrics.moments import (
    SPATIAL,
    load_moments,
    provenance_of,
    save_moments,
    too_few,
)
from mvm.model import Model

SUFFIXES = {"pool": "", "spatial": SPATIAL}  # of the moments in files, by part


@dataclass(frozen=True)
class Side:
    """What stands on one side of a comparison: images, a file of moments, or both in one file (ADM's).

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
        """Return what tells this side from another of the same name, nothing of where it lies."""
        file = {} if self.file is None else {"moments": self.file.name, "sha256": sha256(self.file)}
        return {"name": self.name, **(self.images.facts if self.images else {}), **file}


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
    images = not moments or any(f"{key}.npy" in members for key in IMAGE_KEYS)
    return Side(path.name, open_images(name, **options) if images else None, path if moments else None)


def check_side(names: Sequence[str], side: Side, *, reference: bool) -> tuple[dict[Key, bool], list[Key]]:
    """Return what must be gathered of a side, and what its file of moments gives; refuse what it cannot give."""
    gathered, read = {}, []
    for key, keep in feature_keys([name for name in names if not (reference and MEASURES[name].alone)]).items():
        if side.has(key):
            read.append(key)
        if not side.has(key) or keep:
            gathered[key] = keep
    if gathered and side.images is None:
        if side.file is not None:
            for key in gathered:
                _check_network(side.name, provenance_of(side.file), {"name": key.network})
        asked = [name for name in names if MEASURES[name].key in gathered]
        needy = [name for name in asked if MEASURES[name].features or not side.has(MEASURES[name].key)]
        raise ValueError(
            f"'{side.name}' holds moments alone, and {', '.join(needy)} needs the images themselves; "
            "name the images, or leave it out of --metrics"
        )
    return gathered, read


def look(judge: Judge, side: Side, names: Sequence[str], *, reference: bool = False) -> tuple[Gathered, dict[str, Any]]:
    """Return the features of a side that the figures need, and its facts."""
    wanted, read = check_side(names, side, reference=reference)
    found = Gathered()
    facts: dict[str, Any] = {"name": side.name}
    if wanted and side.images is not None:
        found = judge.gather(side.images, wanted, 1 if reference else judge.blocks)
        facts = {**side.images.facts, "count": found.count}
    for key in read:
        assert side.file is not None
        stored = load_moments(side.file, suffix=SUFFIXES[key.part])
        _check_network(side.name, stored.provenance, judge.extractor(key.network).facts)
        # beside the features: eigenvalues of 2048-d ones are slow on a CPU that has other work
        found.known[key] = stored.moments.to(judge.place.device)
        found.blocks.pop(key, None)
        found.count = found.count or stored.moments.count
        facts = {**facts, **stored.provenance.get("images", {}), "moments": side.name, "count": found.count or None}
        facts["provenance"] = bool(stored.provenance)
    return found, facts


def _check_network(name: str, provenance: Mapping[str, Any], network: Mapping[str, Any]) -> None:
    theirs = provenance.get("network", {})
    decisive = [key for key in ("name", "fingerprint", "resize") if key in theirs and key in network]
    other = [key for key in decisive if theirs[key] != network[key]]  # not what the folder of an encoder is called
    if other:
        differ = ", ".join(f"{key}: {theirs[key]} there, {network.get(key)} here" for key in other)
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
    """Return what a reader of the figures must know: the bias of few samples, and what is of unknown making."""
    notes = []
    for key in feature_keys([name for name in names if not MEASURES[name].features]):
        *_, (last, _) = sides.values()
        for role, (found, _) in sides.items():
            count, width = found.moments(key).count, len(found.moments(key).mean)
            if count and (warning := too_few(count, width)):
                bias = f"Bias, if features were Gaussian: about {last.sampling_bias(key, count):.3g}"
                notes.append(f"{role}, {key.network} {key.part}: {warning}. {bias}")
    for role, (_, facts) in sides.items():
        if facts.get("provenance") is False:
            notes.append(
                f"{role}: '{facts['name']}' does not say how it was made; resolution and network are unchecked"
            )
    return notes


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
        self.gathered, self.facts = look(judge, side, names, reference=True)


def evaluate(judge: Judge, images: Side, reference: Side | Reference | None, names: Sequence[str]) -> Evaluation:
    """Return the figures of images against a reference (None: figures that need none)."""
    start = time.perf_counter()
    check_side(names, images, reference=False)
    target = Reference(judge, reference, names) if isinstance(reference, Side) else reference
    if target is None and (needy := [name for name in names if not MEASURES[name].alone]):
        raise ValueError(f"{', '.join(needy)} compares with a reference; name it with --ref")
    if images.images is None and judge.blocks > 1:
        raise ValueError(f"--jackknife {judge.blocks} leaves images out; '{images.name}' holds moments alone")
    if images.images is not None and target is not None:
        check_shapes(images.images.facts, target.facts)  # before the work
    gathered, facts = look(judge, images, names)
    other = target.gathered if target else Gathered()
    if target is not None:
        check_shapes(facts, target.facts)
    sides = {"images": (gathered, facts)} | ({} if target is None else {"reference": (target.gathered, target.facts)})
    notes = sampling_notes(names, sides)
    found = figures(names, gathered, other, judge.kid_size)
    seconds = time.perf_counter() - start
    known = target.facts if target else {}
    return Evaluation(found, facts, known, judge.facts(names), notes, software(judge.place.device), seconds)


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
