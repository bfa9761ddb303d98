"""Latents of a data set in parts on the disk, for both mirrors of every image.

    write_latents(folder, rae, images, stamp=prepared.stamp)         # goes on where an earlier run stopped
    latents = open_latents(folder, codec=rae.fingerprint, data=prepared.stamp)
    z = latents.gather(indices, mirrored)                            # (B, C, h, w), float32

A part (`mvm.store.PartedArray`) is a float16 .npy of shape (2, n, C, h, w): the images as they are, then mirrored.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mvm.data.loader import send
from mvm.latent.encoder import ImagesByIndex
from mvm.latent.rae import RAE
from mvm.latent.vae import VAE
from mvm.options import at_least
from mvm.store import ALONE, INDEX, ArrayStore, PartedArray, Share, require_space
from mvm.untrusted import whole_numbers

FORMAT = 1
SHARD = 512  # images per file: about 0.2 GB for 384 x 16 x 16 latents, little to lose when interrupted


def _parts(folder: Path, codec: str, data: str, count: int, shape: Sequence[int], shard: int) -> PartedArray:
    """Return the files of latents in a folder, which depend on these.

    codec: its fingerprint. data: stamp of the data set. count: images. shape: of one latent. shard: images per file.
    """
    whole_numbers(count, shard, *shape)
    at_least("count", count, 1)
    at_least("shard", shard, 1)
    key = {"codec": codec, "data": data, "count": count, "shape": list(shape), "shard": shard}
    whole, head = (2, count, *shape), {"format": FORMAT}
    return PartedArray(folder, "latents", name="latents", key=key, shape=whole, dtype=np.float16, size=shard, head=head)


def both_mirrors(encode: Callable[[Tensor], Tensor], images: Tensor, dtype: torch.dtype, remedy: str) -> Tensor:
    """Return what images and their mirror images are encoded to, (2, B, ...), in half precision."""
    both = torch.stack([encode(view) for view in (images, images.flip(-1))]).to(dtype)
    if not bool(both.isfinite().all()):
        raise ValueError(f"some numbers are beyond {str(dtype).removeprefix('torch.')}; {remedy}")
    return both


def write_latents(
    folder: Path,
    codec: RAE | VAE,
    images: ImagesByIndex,
    *,
    stamp: str,
    batch: int = 64,
    shard: int = SHARD,
    progress: bool = True,
    share: Share = ALONE,
) -> list[str]:
    """Write the latents of all images, both mirrors; return the names of the parts that had to be made here.

    Parts of an earlier run are checked and kept; those that are missing, cut short or damaged are made anew.
    stamp: another one for other images. Of several processes each makes its share.
    """
    parts = _parts(folder, codec.fingerprint, stamp, len(images), codec.latent_shape, shard)

    def encode(part: range) -> Iterator[np.ndarray]:
        for indices in torch.arange(part.start, part.stop).split(batch):
            remedy = f"normalise the latents of images {indices[0]}..{indices[-1]}"
            yield both_mirrors(codec.encode, images[indices], torch.float16, remedy).cpu().numpy()

    return parts.write_missing(encode, share=share, progress=progress)


class Latents:
    """Latents left on the disk, memory-mapped; gather puts them on the device."""

    def __init__(self, parts: PartedArray, device: torch.device | str) -> None:
        self.parts, self.shape, self.device = parts, parts.shape[2:], torch.device(device)
        self.rows = parts.rows()

    def __len__(self) -> int:
        return len(self.rows)

    def verify(self) -> None:
        """Raise a ValueError that names the first part whose contents are not what was written."""
        self.parts.verify(self.parts.listed())

    def gather(self, indices: Tensor, mirrored: Tensor) -> Tensor:
        """Return latents (B, C, h, w) in float32: of images `indices` (B,), mirrored where `mirrored` (B,) is true."""
        return send(torch.from_numpy(self.rows.gather(indices, mirrored)), self.device).float()

    def load(self, device: torch.device | str | None = None) -> "LoadedLatents":
        """Return all latents in the memory of a device (by default this one's), in float16."""
        device = self.device if device is None else torch.device(device)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            require_space("the latents", self.parts.bytes, free, "on the device", "leave them on the disk")
        values = torch.empty((2, len(self), *self.shape), dtype=torch.float16, device=device)
        for array, (first, stop) in zip(self.rows.arrays, pairwise(self.rows.starts), strict=True):
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

    A part that is missing or cut short is named here; one with wrong contents by verify(), which reads everything.
    """
    store = ArrayStore(folder, "latents", "remove it, and cache the latents again")
    if not (folder / INDEX).is_file():
        raise ValueError(f"the latents in '{folder}' are not there, or not finished (no {INDEX}); cache them")
    index = store.table(INDEX)
    with store.reading(INDEX):
        key, total = index["key"], len(index["sha256"])
        parts = _parts(folder, **key)
        # before all parts are counted out: a count alone could fill the memory
        if total != -(-key["count"] // parts.size):
            raise ValueError(f"{total} checksums for {key['count']} images in parts of {parts.size}")
        if not isinstance(key["codec"], str) or not isinstance(key["data"], str) or prod(key["shape"]) >= 1 << 31:
            raise ValueError("its key is none")
    asked = {name: value for name, value in (("codec", codec), ("data", data), ("shape", tuple(shape))) if value}
    store.require_same({name: key[name] for name in asked}, asked)
    return Latents(parts, device)
