"""Latents of a data set in shards on the disk, for both mirrors of every image.

    write_latents(folder, rae, images, stamp=prepared.stamp)         # goes on where an earlier run stopped
    latents = open_latents(folder, codec=rae.fingerprint, data=prepared.stamp)
    z = latents.gather(indices, mirrored)                            # (B, C, h, w), float32

A shard is a float16 .npy of shape (2, n, C, h, w): the images as they are, then mirrored; beside it stands a .json
with its sha256. index.json is written last, so a folder without one is unfinished.
"""

import json
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mvm.data.loader import send
from mvm.files import locked, put_in_place, sha256, temporary_beside, write_text
from mvm.latent.encoder import Pictures
from mvm.options import at_least
from mvm.untrusted import cut, map_npy, read_json, refusal, whole_numbers

FORMAT = 1
INDEX = "index.json"
SHARD = 512  # images per file: about 0.2 GB for 384 x 16 x 16 latents, little to lose when interrupted
ITEM_BYTES = 2  # of float16


class LatentCodec(Protocol):
    """What latents are made with: a codec that can be told from any other."""

    latent_shape: tuple[int, ...]

    @property
    def fingerprint(self) -> str: ...
    def encode(self, images: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class CacheKey:
    """What stored latents depend on. A folder whose key differs in anything is refused."""

    codec: str  # fingerprint
    data: str  # stamp of the data set
    count: int  # images
    shape: tuple[int, ...]  # of one latent
    shard: int  # images per file

    def __post_init__(self) -> None:
        whole_numbers(self.count, self.shard, *self.shape)
        at_least("count", self.count, 1)
        at_least("shard", self.shard, 1)
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON has lists

    @property
    def bytes(self) -> int:
        """Return what all latents take."""
        return 2 * self.count * prod(self.shape) * ITEM_BYTES

    @property
    def starts(self) -> list[int]:
        """Return the first image of every shard, and the count."""
        return [*range(0, self.count, self.shard), self.count]

    def shard_shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of one shard's array."""
        return 2, self.starts[number + 1] - self.starts[number], *self.shape


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"latents-{number:05d}.npy"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged ({cut(error)}); remove this file, and cache the latents again") from None


def _require_same(folder: Path, found: CacheKey, wanted: dict[str, Any]) -> None:
    """Raise where the latents in a folder are of something else than is wanted."""
    pairs = {name: (getattr(found, name), value) for name, value in wanted.items()}
    differ = [f"{name} {there!r} (now {now!r})" for name, (there, now) in pairs.items() if there != now]
    if differ:
        raise ValueError(
            f"'{folder}' holds latents of something else: {', '.join(differ)}; give another folder, or remove this one"
        )


def _require_disk(key: CacheKey, folder: Path) -> None:
    kept = sum(path.stat().st_size for path in folder.glob("latents-*.npy"))
    free = shutil.disk_usage(folder).free + kept
    if key.bytes > free:
        raise ValueError(f"the latents take {_gib(key.bytes)}, and {_gib(free)} are free for '{folder}'; give another")


def _is_whole(folder: Path, key: CacheKey, number: int) -> bool:
    """Return whether an earlier run wrote this shard and it is still what was written."""
    path = folder / shard_name(number)
    told = _read_json(path.with_suffix(".json"))
    if told is None or not path.is_file():
        return False
    with _whole(path.with_suffix(".json")):
        found, total = CacheKey(**told["key"]), told["sha256"]
    _require_same(folder, found, asdict(key))
    return sha256(path) == total


def _encode(codec: LatentCodec, images: Pictures, indices: Tensor) -> np.ndarray:
    """Return latents (2, B, C, h, w) of some images in float16."""
    shown = images[indices]
    both = torch.stack([codec.encode(view) for view in (shown, shown.flip(-1))])
    stored = both.to(torch.float16)
    if not bool(stored.isfinite().all()):
        raise ValueError(f"latents of images {indices[0]}..{indices[-1]} hold numbers beyond float16; normalise them")
    return stored.cpu().numpy()


def _write_shard(
    folder: Path, key: CacheKey, number: int, codec: LatentCodec, images: Pictures, batch: int, bar: tqdm
) -> None:
    path = folder / shard_name(number)
    temporary = temporary_beside(path)
    array = np.lib.format.open_memmap(temporary, "w+", np.float16, key.shard_shape(number))
    first, stop = key.starts[number : number + 2]
    for indices in torch.arange(first, stop).split(batch):
        array[:, indices[0] - first : indices[-1] + 1 - first] = _encode(codec, images, indices)
        bar.update(len(indices))
    array.flush()
    del array
    put_in_place(temporary, path)
    write_text(path.with_suffix(".json"), json.dumps({"key": asdict(key), "sha256": sha256(path)}, indent=2) + "\n")


def _write_index(folder: Path, key: CacheKey) -> None:
    sums = {}
    for number in range(len(key.starts) - 1):
        told = (folder / shard_name(number)).with_suffix(".json").read_text(encoding="utf-8")
        sums[shard_name(number)] = json.loads(told)["sha256"]
    write_text(folder / INDEX, json.dumps({"format": FORMAT, "key": asdict(key), "sha256": sums}, indent=2) + "\n")


def write_latents(
    folder: Path,
    codec: LatentCodec,
    images: Pictures,
    *,
    stamp: str,
    batch: int = 64,
    shard: int = SHARD,
    progress: bool = True,
    rank: int = 0,
    world: int = 1,
    meet: Callable[[], object] = lambda: None,
) -> list[str]:
    """Write the latents of all images, both mirrors; return the names of the shards that had to be made here.

    Shards of an earlier run are checked and kept; those that are missing, cut short or damaged are made anew.
    stamp: tells this data set from any other. Of `world` processes, which must all call, each makes its share; `meet`
    waits for the others.
    """
    key = CacheKey(codec.fingerprint, stamp, len(images), codec.latent_shape, shard)
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"'{folder}': another process writes latents there; wait for it"
    with locked(folder, refusal) if rank == 0 else nullcontext():
        index = _read_json(folder / INDEX)
        if index is not None:
            _require_same(folder, _key_of(folder, index), asdict(key))
        _require_disk(key, folder)
        mine = range(rank, len(key.starts) - 1, world)
        made = _write_shards(folder, key, mine, codec, images, batch, progress and rank == 0)
        meet()  # all shards are whole
        if rank == 0:
            _write_index(folder, key)
        meet()  # and the index tells them
    return made


def _write_shards(
    folder: Path, key: CacheKey, numbers: range, codec: LatentCodec, images: Pictures, batch: int, progress: bool
) -> list[str]:
    """Make those of the shards that are not whole; return their names."""
    made, spans = [], list(pairwise(key.starts))
    total = sum(spans[number][1] - spans[number][0] for number in numbers)
    with tqdm(total=total, desc="latents", unit="image", disable=not progress) as bar:
        for number in numbers:
            if _is_whole(folder, key, number):
                bar.update(spans[number][1] - spans[number][0])
                continue
            (folder / INDEX).unlink(missing_ok=True)  # unfinished again, until the end
            _write_shard(folder, key, number, codec, images, batch, bar)
            made.append(shard_name(number))
    return made


@contextmanager
def _whole(path: Path) -> Generator[None]:
    """Turn what is wrong in a JSON file into an error that names it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"'{path}' is damaged ({cut(error)}); remove this file, and cache again") from None


def _key_of(folder: Path, index: dict[str, Any]) -> CacheKey:
    with _whole(folder / INDEX):
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']}, not {FORMAT}")
        key, sums = CacheKey(**index["key"]), index["sha256"]
        # before all shards are counted out: a count alone could fill the memory
        if len(sums) != -(-key.count // key.shard) or not all(isinstance(text, str) for text in sums.values()):
            raise ValueError(f"{len(sums)} checksums for {key.count} images in shards of {key.shard}")
        if sums.keys() != {shard_name(number) for number in range(len(sums))}:
            raise ValueError("checksums of other files than its shards")
        if not isinstance(key.codec, str) or not isinstance(key.data, str) or prod(key.shape) >= 1 << 31:
            raise ValueError("its key is none")
        return key


_REMEDY = "cache the latents again: the shards that are whole are kept, and only this one is made anew"


class Latents:
    """Latents left on the disk, memory-mapped; gather puts them on the device."""

    def __init__(self, folder: Path, key: CacheKey, sums: dict[str, str], device: torch.device | str) -> None:
        self.folder, self.key, self.sums, self.device = folder, key, sums, torch.device(device)
        self.shape = key.shape
        self._starts = np.array(key.starts)
        self._arrays = [self._array(number) for number in range(len(key.starts) - 1)]

    def _array(self, number: int) -> np.ndarray:
        path, shape = self.folder / shard_name(number), self.key.shard_shape(number)
        if not path.is_file():
            raise ValueError(f"'{path}' is missing; {_REMEDY}")
        with refusal(f"'{path}' is cut short or damaged", _REMEDY):
            array = map_npy(path)
        if array.shape != shape or array.dtype != np.float16:
            raise ValueError(f"'{path}' is {array.dtype} {array.shape}, not float16 {shape}; {_REMEDY}")
        return array

    def __len__(self) -> int:
        return self.key.count

    def verify(self) -> None:
        """Raise a ValueError that names the first shard whose contents are not what was written."""
        for name, expected in self.sums.items():
            if sha256(self.folder / name) != expected:
                raise ValueError(f"'{self.folder / name}' is damaged; {_REMEDY}")

    def gather(self, indices: Tensor, mirrored: Tensor) -> Tensor:
        """Return latents (B, C, h, w) in float32: of images `indices` (B,), mirrored where `mirrored` (B,) is true."""
        wanted, flipped = indices.cpu().numpy(), mirrored.cpu().numpy().astype(np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"indices {wanted.min()}..{wanted.max()} leave 0..{len(self) - 1}")
        found = np.empty((len(wanted), *self.shape), np.float16)
        order = np.argsort(wanted, kind="stable")  # each shard is read once, forwards
        cuts = np.searchsorted(wanted[order], self._starts)
        for number, (start, stop) in enumerate(pairwise(cuts)):
            places = order[start:stop]
            if len(places):
                found[places] = self._arrays[number][flipped[places], wanted[places] - self._starts[number]]
        return send(torch.from_numpy(found), self.device).float()

    def load(self, device: torch.device | str | None = None) -> "LoadedLatents":
        """Return all latents in the memory of a device (by default this one's), in float16."""
        device = self.device if device is None else torch.device(device)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if self.key.bytes > free:
                raise ValueError(
                    f"the latents take {_gib(self.key.bytes)}, and {_gib(free)} of the device are free; "
                    "leave them on the disk"
                )
        values = torch.empty((2, len(self), *self.shape), dtype=torch.float16, device=device)
        for array, (first, stop) in zip(self._arrays, pairwise(self.key.starts), strict=True):
            values[:, first:stop] = torch.from_numpy(np.array(array)).to(device)
        return LoadedLatents(values)


class LoadedLatents:
    """All latents in one tensor (2, N, C, h, w); gather as Latents'."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape = values, tuple(values.shape[2:])

    def __len__(self) -> int:
        return self.values.shape[1]

    def gather(self, indices: Tensor, mirrored: Tensor) -> Tensor:
        """Return latents (B, C, h, w) in float32."""
        device = self.values.device
        return self.values[send(mirrored, device).long(), send(indices, device)].float()


def open_latents(
    folder: Path, *, codec: str = "", data: str = "", shape: Sequence[int] = (), device: torch.device | str = "cpu"
) -> Latents:
    """Return the latents in a folder; those of another codec (fingerprint), data set (stamp) or shape are refused.

    A shard that is missing or cut short is named here; one with wrong contents by verify(), which reads everything.
    """
    index = _read_json(folder / INDEX)
    if index is None:
        state = "are not finished" if any(folder.glob("latents-*.json")) else "are not there"
        raise ValueError(f"the latents in '{folder}' {state} (no {INDEX}); cache them, which goes on where it stopped")
    key = _key_of(folder, index)
    wanted = {"codec": codec, "data": data, "shape": tuple(shape)}
    _require_same(folder, key, {name: value for name, value in wanted.items() if value})
    return Latents(folder, key, dict(index["sha256"]), device)
