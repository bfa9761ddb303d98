"""Sets of images for evaluation, from any source: one stream of uint8 batches, and their provenance."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvm.data import DATA_SETS, Prepared, open_prepared
from mvm.data.resize import MODES, RESIZES, BadImage, decode, open_picture, planes, resolve
from mvm.data.shards import is_prepared
from mvm.data.sources import DataSource, SourceRecord, open_source
from mvm.data.sources.arrays import channels_last, keys_of, layout, shape_of, stream_rows
from mvm.data.sources.records import stamp_of
from mvm.distributed.processes import Processes
from mvm.files import sha256
from mvm.generate import Draw, Sampler, asked_conditions, check_settings, given, takes_tuned_times
from mvm.latent import RAE, VAE
from mvm.model import Model
from mvm.options import at_least, choose
from mvm.path import Condition
from mvm.pictures import is_image
from mvm.precision import full_float32
from mvm.recipes import SampleConfig
from mvm.samples import Parts, checksum
from mvm.training.data import training_store

CPU = torch.device("cpu")
CONDITIONS = 2048  # of the training set that images are made for, at most, spread evenly over it
DECODERS = 8  # threads; Pillow releases Python's lock while it decodes
GREY = {"1", "L", "LA", "I", "I;16", "I;16B", "I;16L"}
DATA = "data:"  # before the name of a set in the package
EMBEDDED = {name: known.load for name, known in DATA_SETS.items() if known.load is not None}  # sets in the package

Shape = tuple[int, ...]
Chunk = tuple[int, Tensor]  # index of the first image, uint8 images (B, C, H, W)
Pair = tuple[int, Tensor, Tensor]  # and the originals (B, C, H, W)
Wanted = Callable[[int], bool]  # whether this process takes batch number n


@dataclass(frozen=True)
class ImageSet:
    """Images of one shape (C, H, W) in a fixed order; facts say where they come from.

    pairs: the same chunks with the images' originals, where they have some.
    """

    shape: Shape
    facts: dict[str, Any]
    chunks: Callable[[int, Wanted], Iterator[Chunk]]
    pairs: Callable[[int, Wanted], Iterator[Pair]] | None = None

    def read(
        self, batch: int, processes: Processes | None = None, *, paired: bool = False
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield indices (B,) and images of this process's batches, every world-th one; paired: and their originals."""
        at_least("batch", batch, 1)
        processes, chunks = processes or Processes(), self.pairs if paired else self.chunks
        if chunks is None:
            name = self.facts["name"]
            raise ValueError(f"'{name}' has no originals to compare with; name them with --ref, or give --reconstruct")
        for start, *images in chunks(batch, lambda number: number % processes.world == processes.rank):
            yield torch.arange(start, start + len(images[0])), *images


def _image_set(
    kind: str, name: str, shape: Shape, chunks: Callable[[int, Wanted], Iterator[Chunk]], **facts: Any
) -> ImageSet:
    return ImageSet(shape, {"kind": kind, "name": name, "shape": list(shape), **facts}, chunks)


def _spans(count: int, batch: int, wanted: Wanted) -> Iterator[tuple[int, int]]:
    for number, start in enumerate(range(0, count, batch)):
        if wanted(number):
            yield start, min(start + batch, count)


def of_tensor(images: Tensor, name: str = "images", **facts: Any) -> ImageSet:
    """Return uint8 images (N, C, H, W) in memory as a set."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images are {images.dtype} of shape {tuple(images.shape)}; uint8 (N, C, H, W) is needed")

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        return ((start, images[start:stop]) for start, stop in _spans(len(images), batch, wanted))

    return _image_set("tensor", name, tuple(images.shape[1:]), chunks, **facts)


def of_prepared(prepared: Prepared) -> ImageSet:
    """Return what `mvm data prepare` wrote as a set."""
    if prepared.values != "uint8" or len(prepared.shape) != 3:
        raise ValueError(
            f"'{prepared.folder}' holds {prepared.values} samples of shape {prepared.shape}; images (C, H, W) in uint8 "
            "are needed"
        )

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        mapped = prepared.mapped()
        for start, stop in _spans(len(mapped), batch, wanted):
            yield start, mapped.gather(torch.arange(start, stop))[0]

    source = {"resize": prepared.resize, "source": prepared.source["name"], "stamp": prepared.stamp}
    shape = tuple(prepared.shape)
    return _image_set("prepared", prepared.folder.name, shape, chunks, count=prepared.count, **source)


def of_array(path: Path) -> ImageSet:
    """Return an .npz or .npy of uint8 images (NHWC, or what `mvm data prepare` reads) as a set."""
    key = keys_of(path)[0] if path.suffix == ".npz" else ""
    stored, dtype = shape_of(path, key)
    height, width, channels = layout(stored, dtype, f"'{path}'")

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        for number, rows in enumerate(stream_rows(path, key, batch)):
            if wanted(number):
                pixels = channels_last(rows, f"'{path}'").transpose(0, 3, 1, 2)
                yield number * batch, torch.from_numpy(pixels.copy())  # torch takes no read-only memory

    facts = {"count": stored[0], "stamp": sha256(path)[:16]}
    return _image_set("numpy", path.name, (channels, height, width), chunks, **facts)


@contextmanager
def _naming(record: SourceRecord) -> Generator[None]:
    """Let a ValueError about a picture name it."""
    try:
        yield
    except ValueError as error:
        problem = f"cannot be read ({error}); repair or remove it" if isinstance(error, BadImage) else error
        raise ValueError(f"'{record.name}' {problem}") from None


def _channels(record: SourceRecord) -> int:
    """Return 1 for a grey picture, else 3; without unpacking it."""
    if not isinstance(record.image, bytes):
        return record.image.shape[-1]
    with open_picture(record.image) as image:
        return 1 if image.mode in GREY else 3


def of_source(source: DataSource, *, size: int = 0, resize: str = "auto", channels: int = 0) -> ImageSet:
    """Return pictures in a folder, zip, parquet, tar... as a set; without `size` all must have one size.

    A colour picture among grey ones is an error, unless channels=1 asks for grey ones.
    """
    first = next(record for part in source.parts for record in part.read())
    with _naming(first):
        count = channels or _channels(first)
    resize = resolve(resize, size) if size else "none"

    def fitted(record: SourceRecord) -> np.ndarray:
        """Return uint8 pixels (C, H, W)."""
        with _naming(record):
            if channels != 1 and count < _channels(record):
                raise ValueError("is in colour, and the first picture is grey; give --channels 3 or sort them out")
            image = decode(record.image, count)
            return planes(RESIZES[resize](image, size) if size else image)

    shape = (count, *fitted(first).shape[1:])

    def of_one_size(record: SourceRecord) -> np.ndarray:
        pixels = fitted(record)
        if pixels.shape != shape:
            other, one = ("x".join(map(str, sides)) for sides in (pixels.shape, shape))
            raise ValueError(
                f"'{record.name}' is {other} (channels x height x width), the first picture {one}; "
                "images of one size are needed: mvm data prepare makes them, or --size PIXELS of eval and data stats"
            )
        return pixels

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        records, start = (record for part in source.parts for record in part.read()), 0
        with ThreadPoolExecutor(DECODERS) as pool:
            while some := list(islice(records, batch)):
                if wanted(start // batch):
                    yield start, torch.from_numpy(np.stack(list(pool.map(of_one_size, some))))
                start += len(some)

    stamp = stamp_of([(part.name, part.stamp) for part in source.parts])
    return _image_set(source.kind, source.name, shape, chunks, resize=resize, stamp=stamp)


def of_parts(parts: Parts) -> ImageSet:
    """Return what `sample_parts` wrote as a set; its batches are the parts."""

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        start = 0
        for number, (images, _) in enumerate(parts.batches()):
            if wanted(number):
                yield start, images
            start += len(images)

    return _image_set("samples", parts.folder.name, parts.shape, chunks, count=parts.count)


def require_judged(model: Model) -> None:
    """Refuse to judge samples that are no images."""
    data = model.recipe.data
    if not is_image(data.shape, torch.uint8) or data.values != "uint8":
        raise ValueError(f"samples are judged as images, and this model makes {data.values} of shape {data.shape}")


def judged_condition(model: Model) -> Condition:
    """Return the conditions of images that are judged, where they are no labels: of training samples."""
    if model.recipe.condition.kind in ("labels", "none"):
        return None
    try:
        store = training_store(replace(model.recipe, engine=replace(model.recipe.engine, resident="host")), CPU)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"images of condition.kind='{model.recipe.condition.kind}' are judged by conditions of the training set "
            f"({error}); or write them with mvm sample --condition, and judge that file"
        ) from None
    count = min(len(store), CONDITIONS)
    return store.gather(torch.linspace(0, len(store) - 1, count, dtype=torch.float64).long())[1]


def of_model(sampler: Sampler, draw: Draw, settings: SampleConfig | None = None, *, name: str = "model") -> ImageSet:
    """Return images that are sampled as they are read, and not stored."""
    model = sampler.model
    settings = settings or model.recipe.sample
    require_judged(model)
    check_settings(model, settings, sampler.auto)
    (labels, conditions), seeds = asked_conditions(model, draw, judged_condition(model)), draw.chosen_seeds()

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        spans = list(_spans(draw.num, draw.batch, wanted))
        parts = ((given(model, labels[start:stop], conditions), seeds[start:stop]) for start, stop in spans)
        for (start, _), generated in zip(spans, sampler.batches(parts, settings), strict=True):
            yield start, generated.images

    how = {**asdict(settings), "tuned": takes_tuned_times(model, settings)}
    facts = {"draw": asdict(draw), "sampler": how, "precision": sampler.precision, "origin": model.origin}
    facts |= sampler.auto_facts(settings)
    facts |= {} if conditions is None else {"conditions": checksum(conditions)}
    return _image_set("run", name, model.recipe.data.shape, chunks, count=draw.num, **facts)


def of_restored(codec: RAE | VAE, images: ImageSet, name: str = "autoencoder") -> ImageSet:
    """Return what an autoencoder makes of images, as they are read, in full float32: the r of rFID."""
    if images.shape != codec.image_shape:
        shapes = f"{codec.image_shape}, the images to restore are {images.shape}"
        raise ValueError(f"'{name}' makes images {shapes}; prepare them at its size: mvm data prepare --size N")
    device = next(codec.parameters()).device

    def restored(part: Tensor) -> Tensor:
        with full_float32(device):
            return codec.restore(part.to(device)).cpu()

    def pairs(batch: int, wanted: Wanted) -> Iterator[Pair]:
        return ((start, restored(part), part) for start, part in images.chunks(batch, wanted))

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        return ((start, after) for start, after, _ in pairs(batch, wanted))

    if isinstance(codec, RAE):
        made_by = {"decoder": codec.decoder.fingerprint, "encoder": codec.encoder.fingerprint}
    else:
        made_by = codec.identity
    return replace(_image_set("restored", name, images.shape, chunks, of=images.facts, **made_by), pairs=pairs)


def with_originals(images: ImageSet, originals: ImageSet) -> ImageSet:
    """Return images that stand for those of another set, in its order."""

    def pairs(batch: int, wanted: Wanted) -> Iterator[Pair]:
        for one, other in zip_longest(images.chunks(batch, wanted), originals.chunks(batch, wanted)):
            if one is None or other is None or one[0] != other[0] or len(one[1]) != len(other[1]):
                names = f"'{images.facts['name']}' and '{originals.facts['name']}'"
                raise ValueError(f"{names} hold different numbers of images; pairs need as many, in one order")
            yield one[0], one[1], other[1]

    return replace(images, pairs=pairs)


def of_known(name: str) -> ImageSet:
    """Return a set that ships in the package: NAME or NAME:SPLIT."""
    name, _, split = name.partition(":")
    data = choose("data", name, EMBEDDED)(split or "train")
    return of_tensor(data.images, name, split=split or "train", count=len(data))


def of_training(model: Model) -> ImageSet:
    """Return the images that a model was trained on; a folder with other images now is an error."""
    data = model.recipe.data
    if data.name in EMBEDDED:
        return of_known(data.name)
    try:
        prepared = open_prepared(data.folder)
    except ValueError as error:
        raise ValueError(f"{error}; or name another reference with --ref") from None
    trained = model.origin.get("data_stamp")
    if trained and trained != prepared.stamp:
        raise ValueError(
            f"'{data.folder}' holds other images now than the model was trained on (stamp {prepared.stamp}, "
            f"then {trained}); name the reference with --ref"
        )
    return of_prepared(prepared)


def open_images(
    name: str | Path, *, size: int = 0, resize: str = "auto", channels: int = 0, split: str = ""
) -> ImageSet:
    """Return stored images as a set: a prepared folder, pictures, parquet, tars, arrays, or "data:NAME".

    size, resize and channels change pictures in files alone; what was prepared or is an array stays as it is.
    """
    if channels not in (0, *MODES):
        raise ValueError(f"--channels {channels} is not supported; allowed: {', '.join(map(str, MODES))}")
    if resize != "auto" and not size:
        choose("resize", resize, RESIZES)
        raise ValueError(f"--resize {resize} needs --size PIXELS")
    path, stored = Path(name), None
    if str(name).startswith(DATA):
        if split:
            raise ValueError(f"--split {split} is for files; of '{name}' write {DATA}NAME:{split}")
        stored = of_known(str(name).removeprefix(DATA))
    elif is_prepared(path):
        stored = of_prepared(open_prepared(path))
    elif path.suffix in (".npz", ".npy") and path.is_file() and not size:
        stored = of_array(path)
    if stored is not None:
        asked = {"size": (size, stored.shape[1]), "channels": (channels, stored.shape[0]), "split": (split, None)}
        for option, (value, has) in asked.items():
            if value and value != has:
                shape = "x".join(map(str, stored.shape))
                raise ValueError(f"--{option} {value} has no effect on '{name}', which is one set of {shape} images")
    images = stored or of_source(open_source(path, split), size=size, resize=resize, channels=channels)
    if images.shape[0] not in MODES:
        raise ValueError(f"'{name}' has {images.shape[0]} channels; 3 (RGB) or 1 (grey) are needed")
    return images
