"""Encoder features of a data set, for both mirrors of every image: kept in memory, kept on disk, or made when asked.

bank = open_bank("disk", encoder, images, labels, folder=run / "features", device=device)
target = bank.lookup(indices, mirrored)            # (B, tokens, width), float32
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm.data.loader import mirror, send
from mvm.latent.cache import both_mirrors
from mvm.latent.encoder import ImagesByIndex
from mvm.network.pretrained import Encoder
from mvm.objective.repa import CACHES, match_grid
from mvm.options import choose
from mvm.store import ALONE, PartedArray, Share, require_space
from mvm.training.data import spread

PART = 4096  # images per file: small enough to lose little when interrupted, large enough to read in one go
PROBES = 1024  # images that the fingerprint of a data set reads


def _hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 of shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def data_fingerprint(images: ImagesByIndex, labels: Tensor) -> str:
    """Return a checksum of all labels and of 1024 images, spread evenly over the data set from first to last."""
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels; every image needs one")
    return _hash_tensors((labels, images[spread(images, PROBES)]))


@dataclass(frozen=True)
class BankKey:
    """What features depend on. A folder whose key differs in anything is refused."""

    encoder: str
    weights: str  # sha256 of the encoder's weights: a name may come to mean others
    resolution: int
    side: int  # tokens per side as stored
    width: int
    dtype: str
    count: int
    data: str

    def parts(self, folder: Path) -> PartedArray:
        """Return the files of the features in a folder, which hold the bits of float16 as int16."""
        key, shape = asdict(self), (2, self.count, self.side**2, self.width)
        return PartedArray(
            folder, "features", name="part", key=key, shape=shape, dtype=np.int16, size=PART, notes=False
        )


def bank_key(encoder: Encoder, images: ImagesByIndex, labels: Tensor, side: int = 0) -> BankKey:
    """Return the key of these images' features; side: the grid to store them on, 0: the encoder's."""
    weights, data = _hash_tensors(encoder.state_dict().values()), data_fingerprint(images, labels)
    side, count = side or encoder.side, len(images)
    return BankKey(encoder.name, weights, encoder.resolution, side, encoder.width, "float16", count, data)


class FeatureBank(ABC):
    """bank.lookup(indices (B,), mirrored (B,) bool) -> features (B, tokens, width), float32, on the bank's device.

    seen: the images as the student sees them, mirrored already, for a bank that would else have to read them again.
    """

    width: int

    @abstractmethod
    def lookup(self, indices: Tensor, mirrored: Tensor, seen: Tensor | None = None) -> Tensor: ...


class TensorBank(FeatureBank):
    """All features in one tensor (2, N, tokens, width): first as the images are, then mirrored left to right."""

    def __init__(self, features: Tensor) -> None:
        self.features, self.width = features, features.shape[-1]

    def lookup(self, indices: Tensor, mirrored: Tensor, seen: Tensor | None = None) -> Tensor:
        device = self.features.device
        return self.features[send(mirrored, device).long(), send(indices, device)].float()


class DiskBank(FeatureBank):
    """All features in files of PART images, mapped into memory: the system keeps what fits."""

    def __init__(self, key: BankKey, folder: Path, device: torch.device | str) -> None:
        self.rows, self.width = key.parts(folder).rows(), key.width
        self.device = torch.device(device)

    def lookup(self, indices: Tensor, mirrored: Tensor, seen: Tensor | None = None) -> Tensor:
        return torch.from_numpy(self.rows.gather(indices, mirrored)).view(torch.float16).to(self.device).float()


class LiveBank(FeatureBank):
    """No features kept: the encoder runs on every batch."""

    def __init__(self, encoder: Encoder, images: ImagesByIndex, side: int) -> None:
        self.encoder, self.images, self.side, self.width = encoder, images, side, encoder.width

    def lookup(self, indices: Tensor, mirrored: Tensor, seen: Tensor | None = None) -> Tensor:
        if seen is None:
            images = self.images[indices.cpu()].to(_device(self.encoder))
            seen = mirror(images, mirrored.to(images.device))
        return match_grid(self.encoder(seen), self.side)


def _device(encoder: Encoder) -> torch.device:
    return next(encoder.parameters()).device


def open_bank(
    cache: str, encoder: Encoder, images: ImagesByIndex, labels: Tensor, *, folder: Path, side: int = 0,
    batch: int = 256, device: torch.device | str = "cpu", share: Share = ALONE, progress: bool = True,
) -> FeatureBank:  # fmt: skip
    """Return the bank of uint8 images that repa.cache names; side: the student's grid, 0: the encoder's.

    Features are stored on the student's grid: an 8 x 8 one of a 16 x 16 encoder takes a quarter of the memory. On disk,
    those that an earlier run wrote are checked and kept, and of several processes each makes its share.
    """
    choose("repa.cache", cache, CACHES)
    if cache == "none":
        return LiveBank(encoder, images, side or encoder.side)
    key, device = bank_key(encoder, images, labels, side), torch.device(device)
    parts = key.parts(folder)

    def encoded(chunk: Tensor) -> Tensor:
        """Return features (2, B, tokens, width) of some images, on the encoder's device."""
        there, remedy = images[chunk].to(_device(encoder)), "set repa.cache='none'"
        return both_mirrors(lambda view: match_grid(encoder(view), key.side), there, torch.float16, remedy)

    if cache == "disk":

        def source(part: range) -> Iterator[np.ndarray]:
            for chunk in torch.arange(part.start, part.stop).split(batch):
                yield encoded(chunk).cpu().view(torch.int16).numpy()

        smaller = "set repa.cache='none' in place of 'disk', a smaller repa.resolution, or a run folder on another disk"
        parts.write_missing(source, share=share, smaller=smaller, progress=progress)
        return DiskBank(key, folder, device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        smaller = "set repa.cache='disk' or 'none' in place of 'device', or a smaller repa.resolution"
        require_space("the features", parts.bytes, free, "on the device", smaller)
    features = torch.empty(parts.shape, dtype=torch.float16, device=device)
    for chunk in tqdm(torch.arange(key.count).split(batch), desc="features", unit="batch", disable=not progress):
        features[:, chunk[0] : chunk[-1] + 1] = encoded(chunk)
    return TensorBank(features)
