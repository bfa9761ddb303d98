"""Sets of images for evaluation, from any source: one stream of uint8 batches, and their provenance."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvm.data import DATA_SETS, Prepared, open_prepared
from mvm.data.resize import MODES, RESIZES, BadImage, decode, open_picture, planes, resolve
from mvm.data.shards import is_prepared
from mvm.data.sources import DataSource as Source
from mvm.data.sources import SourceRecord as Record
from mvm.data.sources import open_source
from mvm.data.sources.arrays import channels_last, keys_of, layout, shape_of, stream_rows
from mvm.data.sources.records import stamp_of
from mvm.distributed.processes import Processes
from mvm.files import sha256
from mvm.generate import Draw, Sampler, asked_conditions, check_settings, given, takes_tuned_times
from mvm.latent import RAE
from mvm.model import Model
from mvm.options import at_least, choose
from mvm.path import Condition
from mvm.pictures import is_image
from mvm.pixels import to_uint8
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
Wanted = Callable[[int], bool]  # whether this process takes batch number n


@dataclass(frozen=True)
class ImageSet:
    """Images of one shape (C, H, W) in a fixed order; facts say where they come from."""

    shape: Shape
    facts: dict[str, Any]
    chunks: Callable[[int, Wanted], Iterator[Chunk]]

    def read(self, batch: int, place: Processes | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield indices (B,) and images of this process's batches: every world-th one."""
        at_least("batch", batch, 1)
        place = place or Processes()
        for start, images in self.chunks(batch, lambda number: number % place.world == place.rank):
            yield torch.arange(start, start + len(images)), images


def _facts(kind: str, name: str, shape: Shape, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "shape": list(shape), **more}


def _spans(count: int, batch: int, wanted: Wanted) -> Iterator[tuple[int, int]]:
    for number, start in enumerate(range(0, count, batch)):
        if wanted(number):
            yield start, min(start + batch, count)


def of_tensor(images: Tensor, name: str = "images", **more: Any) -> ImageSet:
    """Return uint8 images (N, C, H, W) in memory as a set."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images are {images.dtype} of shape {tuple(images.shape)}; uint8 (N, C, H, W) is needed")

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        for start, stop in _spans(len(images), batch, wanted):
            yield start, images[start:stop]

    shape = (images.shape[1], images.shape[2], images.shape[3])
    return ImageSet(shape, _facts("tensor", name, shape, **more), chunks)


def of_prepared(prepared: Prepared) -> ImageSet:
    """Return what `mvm data prepare` wrote as a set."""
    if prepared.values != "uint8" or len(prepared.shape) != 3:
        raise ValueError(
            f"'{prepared.folder}' holds {prepared.values} samples of shape {prepared.shape}; images (C, H, W) in uint8 "
            "are needed"
        )
    channels, height, width = prepared.shape
    shape = (channels, height, width)

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        mapped = prepared.mapped()
        for start, stop in _spans(len(mapped), batch, wanted):
            yield start, mapped.gather(torch.arange(start, stop))[0]

    source = {"resize": prepared.resize, "source": prepared.source["name"], "stamp": prepared.stamp}
    facts = _facts("prepared", prepared.folder.name, shape, count=prepared.count, **source)
    return ImageSet(shape, facts, chunks)


def of_array(path: Path) -> ImageSet:
    """Return an .npz or .npy of uint8 images (NHWC, or what `mvm data prepare` reads) as a set."""
    key = keys_of(path)[0] if path.suffix == ".npz" else ""
    stored, dtype = shape_of(path, key)
    height, width, channels = layout(stored, dtype, f"'{path}'")
    shape = (channels, height, width)

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        for number, rows in enumerate(stream_rows(path, key, batch)):
            if wanted(number):
                pixels = channels_last(rows, f"'{path}'").transpose(0, 3, 1, 2)
                yield number * batch, torch.from_numpy(pixels.copy())  # torch takes no read-only memory

    return ImageSet(shape, _facts("numpy", path.name, shape, count=stored[0], stamp=sha256(path)[:16]), chunks)


@dataclass(frozen=True)
class Fit:
    """What every picture is made: its channels, its side and how it is resized (size 0: left as it is).

    greying: whether colours may become grey; unless asked for, a colour picture among grey ones is an error.
    """

    channels: int
    size: int = 0
    resize: str = "none"
    greying: bool = False

    def __call__(self, record: Record) -> np.ndarray:
        """Return uint8 pixels (C, H, W)."""
        with _naming(record):
            if not self.greying and self.channels < _channels(record):
                raise ValueError("is in colour, and the first picture is grey; give --channels 3 or sort them out")
            image = decode(record.image, self.channels)
            return planes(RESIZES[self.resize](image, self.size) if self.size else image)


@contextmanager
def _naming(record: Record) -> Generator[None]:
    """Let a ValueError about a picture name it."""
    try:
        yield
    except BadImage as error:
        raise ValueError(f"'{record.name}' cannot be read ({error}); repair or remove it") from None
    except ValueError as error:
        raise ValueError(f"'{record.name}' {error}") from None


def _channels(record: Record) -> int:
    """Return 1 for a grey picture, else 3; without unpacking it."""
    if not isinstance(record.image, bytes):
        return record.image.shape[-1]
    with open_picture(record.image) as image:
        return 1 if image.mode in GREY else 3


def _records(source: Source) -> Iterator[Record]:
    for part in source.parts:
        yield from part.read()


def _stacked(records: list[Record], pixels: list[np.ndarray], shape: Shape) -> Tensor:
    """Return pictures as one tensor; one of another size is named."""
    for record, picture in zip(records, pixels, strict=True):
        if picture.shape != shape:
            found, first = ("x".join(map(str, s)) for s in (picture.shape, shape))
            raise ValueError(
                f"'{record.name}' is {found} (channels x height x width), the first picture {first}; "
                "images of one size are needed: mvm data prepare makes them, or --size PIXELS of eval and data stats"
            )
    return torch.from_numpy(np.stack(pixels))


def of_source(source: Source, *, size: int = 0, resize: str = "auto", channels: int = 0) -> ImageSet:
    """Return pictures in a folder, zip, parquet, tar... as a set; without `size` all must have one size."""
    first = next(_records(source))
    with _naming(first):
        count = channels or _channels(first)
    fit = Fit(count, size, resolve(resize, size) if size else "none", greying=channels == 1)
    height, width = fit(first).shape[1:]
    shape = (fit.channels, height, width)

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        records, start, number = _records(source), 0, 0
        with ThreadPoolExecutor(DECODERS) as pool:
            while some := list(islice(records, batch)):
                if wanted(number):
                    yield start, _stacked(some, list(pool.map(fit, some)), shape)
                start, number = start + len(some), number + 1

    stamp = stamp_of([(part.name, part.stamp) for part in source.parts])
    return ImageSet(shape, _facts(source.kind, source.name, shape, resize=fit.resize, stamp=stamp), chunks)


def of_parts(parts: Parts, **more: Any) -> ImageSet:
    """Return what `sample_parts` wrote as a set; its batches are the parts."""

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        start = 0
        for number, (images, _) in enumerate(parts.batches()):
            if wanted(number):
                yield start, images
            start += len(images)

    return ImageSet(parts.shape, _facts("samples", parts.folder.name, parts.shape, count=parts.count, **more), chunks)


def require_judged(model: Model) -> None:
    """Refuse to judge samples that are no images."""
    data = model.recipe.data
    if not is_image(data.shape, torch.uint8) or data.values != "uint8":
        raise ValueError(f"samples are judged as images, and this model makes {data.values} of shape {data.shape}")


def judged_condition(model: Model) -> Condition:
    """Return the conditions of images that are judged, where they are no labels: of samples it was trained on."""
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
    """Return images that are sampled as they are read; nothing is kept."""
    model = sampler.model
    settings = settings or model.recipe.sample
    require_judged(model)
    check_settings(model, settings)
    (labels, conditions), seeds = asked_conditions(model, draw, judged_condition(model)), draw.chosen_seeds()

    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        spans = list(_spans(draw.num, draw.batch, wanted))
        parts = ((given(model, labels[start:stop], conditions), seeds[start:stop]) for start, stop in spans)
        for (start, _), made in zip(spans, sampler.batches(parts, settings), strict=True):
            yield start, made.images

    how = {**asdict(settings), "tuned": takes_tuned_times(model, settings)}
    more: dict[str, Any] = {
        "draw": asdict(draw),
        "sampler": how,
        "precision": sampler.precision,
        "origin": model.origin,
    }
    if conditions is not None:
        more["conditions"] = checksum(conditions)
    shape = model.recipe.data.shape
    return ImageSet(shape, _facts("run", name, shape, count=draw.num, **more), chunks)


def of_restored(rae: RAE, images: ImageSet, name: str = "autoencoder") -> ImageSet:
    """Return what an autoencoder makes of images, decode(encode(x)), as they are read: the r of rFID."""
    if images.shape != rae.image_shape:
        shapes = f"{rae.image_shape}, the images to restore are {images.shape}"
        raise ValueError(f"'{name}' makes images {shapes}; prepare them at its size: mvm data prepare --size N")
    device = rae.decoder.head.weight.device

    @torch.no_grad()
    def chunks(batch: int, wanted: Wanted) -> Iterator[Chunk]:
        for start, part in images.chunks(batch, wanted):
            yield start, to_uint8(rae.reconstruct(part.to(device))).cpu()

    more = {"of": images.facts, "decoder": rae.decoder.fingerprint, "encoder": rae.encoder.fingerprint}
    return ImageSet(images.shape, _facts("restored", name, images.shape, **more), chunks)


def of_known(name: str) -> ImageSet:
    """Return a set that ships in the package: NAME or NAME:SPLIT."""
    name, _, split = name.partition(":")
    found = choose("data", name, EMBEDDED)(split or "train")
    return of_tensor(found.images, name, split=split or "train", count=len(found))


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
    found = stored or of_source(open_source(path, split), size=size, resize=resize, channels=channels)
    if found.shape[0] not in MODES:
        raise ValueError(f"'{name}' has {found.shape[0]} channels; 3 (RGB) or 1 (grey) are needed")
    return found
