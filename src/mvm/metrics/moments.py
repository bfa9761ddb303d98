"""Mean and covariance of features: gathered batch by batch, over processes, and stored in files."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvm.files import atomic
from mvm.untrusted import MOST_DIMENSIONS, MOST_TEXT, cut, open_npy, parse_json, refusal, whole_numbers

ENOUGH = 10_000  # samples from which the Frechet distance's bias is small enough to rank models
PUBLISHED = 50_000  # samples behind nearly every published figure


class Moments(NamedTuple):
    """Mean (d,) and unbiased covariance (d, d) of a set of features, and how many there were (0: not known)."""

    mean: Tensor
    covariance: Tensor
    count: int

    def to(self, device: torch.device) -> "Moments":
        """Return them on a device."""
        return Moments(self.mean.to(device), self.covariance.to(device), self.count)


def moments(features: Tensor) -> Moments:
    """Return mean and unbiased covariance of features (N, d)."""
    if features.ndim != 2 or features.shape[0] < 2:
        raise ValueError(f"features have shape {tuple(features.shape)}; (N, d) with N >= 2 is needed")
    accumulator = Accumulator(features.shape[1], features.device)
    accumulator.add(features)
    return accumulator.result()


class Accumulator:
    """Count, mean and scatter sum (x - mean)(x - mean)^T of a stream of features, in float64.

    Sets are joined by Chan's rule, so nothing of the size of the mean is ever squared: features far from zero lose no
    digits, as they do in sums of x x^T. Memory is one (d, d) matrix, 34 MB at d = 2048, however long the stream.
    """

    def __init__(self, dimension: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.mean = torch.zeros(dimension, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dimension, dimension, dtype=torch.float64, device=device)

    def add(self, features: Tensor) -> None:
        """Add a batch (B, d) of any float type; an empty one changes nothing."""
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise ValueError(f"features have shape {tuple(features.shape)}; (B, {len(self.mean)}) is needed")
        if len(features) == 0:
            return
        features = features.detach().to(self.mean)
        mean = features.mean(0)
        centred = features - mean
        self.scatter.addmm_(centred.T, centred)
        self._move(mean, len(features))

    def merge(self, other: "Accumulator") -> None:
        """Add all features of another."""
        self._check(other)
        if other.count:
            self.scatter += other.scatter.to(self.scatter)
            self._move(other.mean.to(self.mean), other.count)

    def without(self, other: "Accumulator") -> "Accumulator":
        """Return what is left after a part that was merged before is taken out: merge, backwards."""
        self._check(other)
        left = Accumulator(len(self.mean), self.mean.device)
        left.count = self.count - other.count
        if left.count < 1:
            raise ValueError(f"{other.count} of {self.count} features cannot be taken out; at least one must stay")
        gap = self.mean - other.mean.to(self.mean)
        left.mean = self.mean + gap * (other.count / left.count)
        left.scatter = self.scatter - other.scatter.to(self.scatter)
        # the two means are gap * self.count / left.count apart
        left.scatter.addr_(gap, gap, alpha=-self.count * other.count / left.count)
        return left

    def result(self) -> Moments:
        """Return the moments of all features so far."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 features; there are {self.count}")
        if not bool(self.scatter.isfinite().all()):  # a mean that is not finite spoils it too
            raise ValueError("features hold NaN or infinity; look at the images they were made from")
        return Moments(self.mean.clone(), self.scatter / (self.count - 1), self.count)

    def state(self) -> dict[str, Tensor]:
        """Return copies as CPU tensors with a leading axis of length 1, along which processes join theirs."""
        state = {"count": torch.tensor(self.count), "mean": self.mean, "scatter": self.scatter}
        return {name: value.to("cpu", copy=True)[None] for name, value in state.items()}

    @staticmethod
    def from_state(state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> "Accumulator":
        """Return the accumulator of a state, or of several joined along the first axis, merged in that order."""
        total = Accumulator(state["mean"].shape[1], device)
        for count, mean, scatter in zip(state["count"].tolist(), state["mean"], state["scatter"], strict=True):
            part = Accumulator(0)
            part.count, part.mean, part.scatter = count, mean, scatter
            total.merge(part)
        return total

    def _check(self, other: "Accumulator") -> None:
        if len(self.mean) != len(other.mean):
            raise ValueError(f"features of {len(self.mean)} and {len(other.mean)} dimensions do not mix")

    def _move(self, mean: Tensor, count: int) -> None:
        """Move the mean to that of both sets; the scatter already holds both, each about its own mean."""
        total = self.count + count
        gap = mean - self.mean
        self.scatter.addr_(gap, gap, alpha=self.count * count / total)  # without a second (d, d) matrix
        self.mean += gap * (count / total)
        self.count = total


def random_blocks(count: int, blocks: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Return 0..count-1 dealt at random into blocks, equal within one: neighbours often share a class."""
    if not 2 <= blocks <= count:
        raise ValueError(f"blocks={blocks}; from 2 to the number of features, {count}, are possible")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tensor_split(blocks)


def merged(parts: Sequence[Accumulator]) -> Accumulator:
    """Return the accumulator of all parts together, which stay as they are."""
    total = Accumulator(len(parts[0].mean), parts[0].mean.device)
    for part in parts:
        total.merge(part)
    return total


def too_few(count: int, dimension: int) -> str:
    """Return a warning where a Frechet distance of `count` samples misleads, else ""; refuse where there is none."""
    if count < 2:
        raise ValueError(f"a Frechet distance needs at least 2 samples; there are {count}")
    advice = f"compare only with figures of {count:,} samples, or take {PUBLISHED:,} as published figures do"
    if count <= dimension:
        rank = f"a covariance in {dimension:,} dimensions of {count:,} samples has rank {count - 1:,} at most"
        return f"{rank}, so the Frechet distance comes out far too high; {advice}"
    if count < ENOUGH:
        return f"the Frechet distance of {count:,} samples comes out too high (bias falls as 1/samples); {advice}"
    return ""


class StoredMoments(NamedTuple):
    """Moments read from a file, and their provenance ({}: none)."""

    moments: Moments
    provenance: dict[str, Any]


SPATIAL = "_s"  # after mu and sigma: ADM's spatial pair, of which sFID is made


def save_moments(path: Path, pool: Moments, provenance: Mapping[str, Any], *, spatial: Moments | None = None) -> None:
    """Write an .npz with mu, sigma, count and provenance (JSON); EDM's and pytorch-fid's tools read it too."""
    if path.suffix != ".npz":
        raise ValueError(f"'{path}': moments are kept in .npz files")
    text = json.dumps(dict(provenance), sort_keys=True)
    arrays: dict[str, Any] = {"count": np.int64(pool.count), "provenance": np.str_(text)}
    for suffix, pair in (("", pool), (SPATIAL, spatial)):
        if pair is not None:
            arrays |= {f"mu{suffix}": pair.mean.cpu().numpy(), f"sigma{suffix}": pair.covariance.cpu().numpy()}
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def load_moments(path: Path, suffix: str = "") -> StoredMoments:
    """Return moments of an .npz with mu and sigma, as written here, by ADM, EDM or pytorch-fid.

    `suffix=SPATIAL` reads ADM's spatial pair.
    """
    names = (f"mu{suffix}", f"sigma{suffix}")
    arrays = _read_arrays(path, names)
    with refusal(f"'{path}' holds no numbers for mean and covariance"):
        for name in names:
            if arrays[name].dtype.kind not in "fiu":
                raise ValueError(f"they are {cut(arrays[name].dtype)}")
        mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)) for name in names)
    shapes = f"mu {tuple(mean.shape)} and sigma {tuple(covariance.shape)}"
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise ValueError(f"'{path}' holds {shapes}; (d,) and (d, d) are needed")
    if not bool(mean.isfinite().all() & covariance.isfinite().all()):
        raise ValueError(f"'{path}' holds NaN or infinity")
    slack = 1e-4 * float(covariance.abs().max())  # float32 files are symmetric to 1e-7 or so
    if not torch.allclose(covariance, covariance.T, rtol=0, atol=slack):
        raise ValueError(f"'{path}' holds a sigma that is not symmetric, so it is no covariance")
    with refusal(f"'{path}' tells no count of its features"):
        count = int(arrays["count"]) if "count" in arrays else 0
        whole_numbers(count)
    return StoredMoments(Moments(mean, covariance, count), _provenance(path, arrays))


def provenance_of(path: Path) -> dict[str, Any]:
    """Return the provenance of a file of moments ({}: none), without reading them."""
    return _provenance(path, _read_arrays(path, ()))


def _provenance(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    with refusal(f"'{path}' holds a provenance that is no JSON table"):
        return dict(parse_json(str(arrays["provenance"])).items()) if "provenance" in arrays else {}


def _read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the named arrays of an .npz and, where there, count and provenance; ADM's images are left unread."""
    with refusal(f"'{path}' is no whole .npz"), zipfile.ZipFile(path) as archive:
        there = [name.removesuffix(".npy") for name in archive.namelist()]
    if missing := set(names) - set(there):
        raise ValueError(f"'{path}' holds {cut(', '.join(there))}, but not {', '.join(sorted(missing))}")
    arrays = {}
    with refusal(f"'{path}' is no whole .npz"):
        for name in (name for name in (*names, "count", "provenance") if name in there):
            # one in Fortran order comes transposed, which a mean and a symmetric sigma do not mind
            with open_npy(path, name, fortran=True) as (file, shape, dtype):
                if max(shape, default=0) > MOST_DIMENSIONS or dtype.itemsize > MOST_TEXT:
                    limit = f"at most {MOST_DIMENSIONS:,} dimensions are read"
                    raise ValueError(f"{name} is {cut(shape)} of {cut(dtype)}; {limit}")
                arrays[name] = np.frombuffer(file.read(dtype.itemsize * prod(shape)), dtype).reshape(shape)
    return arrays
