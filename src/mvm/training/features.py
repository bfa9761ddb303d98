"""Encoder features of a data set, for both mirrors of every image: kept in memory, kept on disk, or made when asked.

bank = open_bank("disk", encoder, images, labels, folder=run / "features", device=device)
target = bank.lookup(indices, mirrored)            # (B, tokens, width), float32
"""

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm.checkpoint import sha256
from mvm.data.loader import mirror, send
from mvm.files import put_in_place, temporary_beside, write_text
from mvm.network.pretrained import Encoder
from mvm.objective.repa import CACHES, match_grid
from mvm.options import choose
from mvm.untrusted import cut, map_npy, read_json, refusal

INDEX = "index.json"
PART = 4096  # images per file: small enough to lose little when interrupted, large enough to read in one go
PROBES = 1024  # images that the fingerprint of a data set reads

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ITEM_BYTES = 2  # of either


class WrongBank(ValueError):
    """A folder of features that are damaged, unfinished, or of something else."""


class Pictures(Protocol):
    """uint8 images by index: pictures[indices (B,) on the CPU] -> (B, C, H, W). A tensor is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Tensor, /) -> Tensor: ...


def bank_bytes(count: int, tokens: int, width: int) -> int:
    """Return the bytes of a bank: both mirrors of `count` images, `tokens` x `width` half-precision numbers each."""
    return 2 * count * tokens * width * ITEM_BYTES


def _hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 of shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def data_fingerprint(images: Pictures, labels: Tensor) -> str:
    """Return a checksum of all labels and of 1024 images, spread evenly over the data set from first to last."""
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels; every image needs one")
    probes = torch.linspace(0, len(images) - 1, min(len(images), PROBES), dtype=torch.float64).long()
    return _hash_tensors((labels, images[probes]))


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

    @property
    def tokens(self) -> int:
        return self.side**2

    @property
    def bytes(self) -> int:
        return bank_bytes(self.count, self.tokens, self.width)

    def shape(self, count: int) -> tuple[int, int, int, int]:
        """Return the shape of the features of `count` images."""
        return 2, count, self.tokens, self.width


def bank_key(
    encoder: Encoder, images: Pictures, labels: Tensor, side: int = 0, dtype: torch.dtype = torch.float16
) -> BankKey:
    """Return the key of these images' features; side: the grid to store them on, 0: the encoder's."""
    name = str(dtype).removeprefix("torch.")
    choose("dtype", name, DTYPES)
    return BankKey(
        encoder=encoder.name,
        weights=_hash_tensors(encoder.state_dict().values()),
        resolution=encoder.resolution,
        side=side or encoder.side,
        width=encoder.width,
        dtype=name,
        count=len(images),
        data=data_fingerprint(images, labels),
    )


class FeatureBank(ABC):
    """bank.lookup(indices (B,), mirrored (B,) bool) -> features (B, tokens, width), float32, on the bank's device.

    shown: the images as the student sees them, mirrored already, for a bank that would else have to read them again.
    """

    width: int

    @abstractmethod
    def lookup(self, indices: Tensor, mirrored: Tensor, shown: Tensor | None = None) -> Tensor: ...


class TensorBank(FeatureBank):
    """All features in one tensor (2, N, tokens, width): first as the images are, then mirrored left to right."""

    def __init__(self, features: Tensor) -> None:
        self.features, self.width = features, features.shape[-1]

    def lookup(self, indices: Tensor, mirrored: Tensor, shown: Tensor | None = None) -> Tensor:
        device = self.features.device
        return self.features[send(mirrored, device).long(), send(indices, device)].float()


class MemoryBank(TensorBank):
    """A tensor of features that knows what they are of."""

    def __init__(self, key: BankKey, features: Tensor) -> None:
        assert features.shape == key.shape(key.count)
        super().__init__(features)
        self.key = key

    def save(self, folder: Path) -> None:
        """Write the features to a folder that load_bank reads."""
        _write(folder, self.key, lambda part: self.features[:, part.start : part.stop], progress=False)


class DiskBank(FeatureBank):
    """All features in files of PART images, mapped into memory: the system keeps what fits."""

    def __init__(self, key: BankKey, folder: Path, device: torch.device | str) -> None:
        self.key, self.device, self.width = key, torch.device(device), key.width
        self.parts = [_map_part(_part_file(folder, part), key.shape(len(part))) for part in _parts(key.count)]

    def lookup(self, indices: Tensor, mirrored: Tensor, shown: Tensor | None = None) -> Tensor:
        places = zip(indices.tolist(), mirrored.tolist(), strict=True)
        rows = np.stack([self.parts[index // PART][int(flip), index % PART] for index, flip in places])
        return torch.from_numpy(rows).view(DTYPES[self.key.dtype]).to(self.device).float()


class LiveBank(FeatureBank):
    """No features kept: the encoder runs on every batch."""

    def __init__(self, encoder: Encoder, images: Pictures, side: int) -> None:
        self.encoder, self.images, self.side, self.width = encoder, images, side, encoder.width

    def lookup(self, indices: Tensor, mirrored: Tensor, shown: Tensor | None = None) -> Tensor:
        if shown is None:
            images = self.images[indices.cpu()].to(_device(self.encoder))
            shown = mirror(images, mirrored.to(images.device))
        return match_grid(self.encoder(shown), self.side)


def _parts(count: int) -> list[range]:
    """Return the runs of images that share a file."""
    return [range(start, min(start + PART, count)) for start in range(0, count, PART)]


def _part_file(folder: Path, part: range) -> Path:
    return folder / f"part-{part.start // PART:05d}.npy"


def _map_part(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return one file, mapped into memory; its checksum may be right and its contents another's."""
    try:
        with refusal(f"{path} is damaged", _REMEDY):
            found = map_npy(path)
    except ValueError as error:
        raise WrongBank(str(error)) from None
    if found.shape != shape or found.dtype != np.int16:
        raise WrongBank(f"{path} holds {cut(found.shape)} of {found.dtype}, not {shape} of int16; {_REMEDY}")
    return found


def _device(encoder: Encoder) -> torch.device:
    return next(encoder.parameters()).device


def _encode(encoder: Encoder, images: Tensor, key: BankKey) -> Tensor:
    """Return features (2, B, tokens, width) of a batch on the encoder's device, in the bank's dtype."""
    images = images.to(_device(encoder))
    both = torch.stack([match_grid(encoder(view), key.side) for view in (images, images.flip(-1))])
    features = both.to(DTYPES[key.dtype])
    if not torch.isfinite(features).all():
        raise ValueError(f"'{key.encoder}' gives features that {key.dtype} cannot hold; use dtype=torch.bfloat16")
    return features


Source = Callable[[range], Tensor]


def _encode_part(encoder: Encoder, images: Pictures, key: BankKey, batch: int) -> Source:
    """Return the function from a run of images to its features on the CPU."""

    def source(part: range) -> Tensor:
        chunks = torch.arange(part.start, part.stop).split(batch)
        return torch.cat([_encode(encoder, images[chunk], key).cpu() for chunk in chunks], dim=1)

    return source


def _read_index(folder: Path, key: BankKey) -> dict[str, str]:
    """Return the finished files and their sha256; a folder of other features is refused."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        index = read_json(path)
        found, files = dict(index["key"]), dict(index["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise WrongBank(f"{path} is damaged ({cut(error)}); {_REMEDY}") from error
    wanted = asdict(key)
    differ = [name for name in wanted if found.get(name) != wanted[name]]
    if differ:
        pairs = ", ".join(f"{name} {cut(repr(found.get(name)))} (now {wanted[name]!r})" for name in differ)
        raise WrongBank(f"{folder} holds features of something else: {pairs}; {_REMEDY}")
    return files


_REMEDY = "remove the folder to make the features anew, or give another one"


def _write_part(path: Path, features: Tensor) -> None:
    temporary = temporary_beside(path)
    # numpy has no bfloat16: files hold the bits as int16, and the index says what they mean
    np.save(temporary, features.cpu().contiguous().view(torch.int16).numpy())
    put_in_place(temporary, path)


def _write(folder: Path, key: BankKey, source: Source, progress: bool) -> None:
    """Write the parts that the index does not list yet: an interrupted run goes on where it stopped."""
    files = _read_index(folder, key)
    _require_disk(key, folder)
    folder.mkdir(parents=True, exist_ok=True)
    for part in tqdm(_parts(key.count), desc="features", unit="part", disable=not progress):
        path = _part_file(folder, part)
        if path.name not in files:
            _write_part(path, source(part))
            files[path.name] = sha256(path)
            write_text(folder / INDEX, json.dumps({"key": asdict(key), "sha256": files}, indent=2) + "\n")


def load_bank(folder: Path, expected: BankKey, device: torch.device | str = "cpu") -> DiskBank:
    """Return the features in a folder, every file checked; those of other images or another encoder are refused."""
    files = _read_index(folder, expected)
    for part in _parts(expected.count):
        path = _part_file(folder, part)
        if path.name not in files or not path.is_file():
            raise WrongBank(f"{path} is not there: the features are unfinished; make them with repa.cache='disk'")
        if sha256(path) != files[path.name]:
            raise WrongBank(f"{path} is damaged; {_REMEDY}")
    return DiskBank(expected, folder, device)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _require_memory(key: BankKey, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if key.bytes > free:
        raise ValueError(
            f"repa.cache='device': the features take {_gib(key.bytes)}, and {_gib(free)} of the device are free; "
            "set repa.cache='disk' or 'none', or a smaller repa.resolution"
        )


def _require_disk(key: BankKey, folder: Path) -> None:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    kept = sum(path.stat().st_size for path in folder.glob("part-*.npy"))
    free = shutil.disk_usage(there).free + kept
    if key.bytes > free:
        raise ValueError(
            f"repa.cache='disk': the features take {_gib(key.bytes)}, and {_gib(free)} are free for {folder}; "
            "set repa.cache='none', a smaller repa.resolution, or a run folder on another disk"
        )


def build_bank(
    encoder: Encoder,
    images: Pictures,
    key: BankKey,
    *,
    batch: int = 256,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> MemoryBank:
    """Return the features of uint8 images, in the memory of the device."""
    device = torch.device(device)
    _require_memory(key, device)
    features = torch.empty(key.shape(key.count), dtype=DTYPES[key.dtype], device=device)
    chunks = torch.arange(key.count).split(batch)
    for chunk in tqdm(chunks, desc="features", unit="batch", disable=not progress):
        features[:, chunk[0] : chunk[-1] + 1] = _encode(encoder, images[chunk], key)
    return MemoryBank(key, features)


def build_on_disk(
    encoder: Encoder,
    images: Pictures,
    key: BankKey,
    folder: Path,
    *,
    batch: int = 256,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> DiskBank:
    """Return the features of uint8 images, in files: those that an earlier run wrote are used."""
    _write(folder, key, _encode_part(encoder, images, key, batch), progress)
    return load_bank(folder, key, device)


def open_bank(
    cache: str,
    encoder: Encoder,
    images: Pictures,
    labels: Tensor,
    *,
    folder: Path,
    side: int = 0,
    dtype: torch.dtype = torch.float16,
    **options: Any,
) -> FeatureBank:
    """Return the bank that repa.cache names; side: the student's grid, 0: the encoder's; options: as build_bank's.

    Features are stored on the student's grid: an 8 x 8 one of a 16 x 16 encoder takes a quarter of the memory.
    """
    choose("repa.cache", cache, CACHES)
    if cache == "none":
        return LiveBank(encoder, images, side or encoder.side)
    key = bank_key(encoder, images, labels, side, dtype)
    if cache == "disk":
        return build_on_disk(encoder, images, key, folder, **options)
    return build_bank(encoder, images, key, **options)
