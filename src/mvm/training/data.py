"""The images a recipe trains on, placed where they are fastest to reach."""

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mvm import noise
from mvm.data import DATA_SETS, Images, OnHost, Prepared, Resident, Store, open_prepared
from mvm.data.loader import as_received
from mvm.data.shards import CAPTION, StoredCondition
from mvm.data.text import TextEncoder, embed_captions, split
from mvm.distributed.processes import Processes
from mvm.latent import RAE, VAE, Codec, Latents, LoadedLatents, open_latents, write_latents
from mvm.network import ConditionConfig
from mvm.path.condition import Condition
from mvm.recipes import AnyRecipe, DataConfig, Recipe, located
from mvm.recipes.memory import free_memory
from mvm.store import ALONE, INDEX, Share
from mvm.training.logs import warn
from mvm.untrusted import printable

R = TypeVar("R", bound=AnyRecipe)

HELD_OUT_SEEDS = 1 << 41  # apart from training's and previews' seeds
ROOM = 0.5  # share of the free memory that images may take when engine.resident is "auto"


def spread(samples: Sized, count: int) -> Tensor:
    """Return indices of at most `count` samples, spread evenly from the first to the last."""
    return torch.linspace(0, len(samples) - 1, min(len(samples), count), dtype=torch.float64).long()


def held_out_by_class(labels: Tensor, count: int, seed: int) -> Tensor:
    """Return indices of `count` samples, as many of each class as its size allows: a pure function of the arguments.

    They take turns: one of every class, then a second of every class, so the first few are spread over the classes too.
    """
    labels = labels.cpu().unique(return_inverse=True)[1]
    keys = noise.derive(seed, torch.arange(len(labels)) + HELD_OUT_SEEDS)
    shuffled = keys.argsort(stable=True)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = labels.bincount()
    turn = torch.empty_like(labels)  # of each sample within its class
    turn[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[by_class]]
    return shuffled[turn[shuffled].argsort(stable=True)][:count]


@dataclass(frozen=True)
class StoreSubset:
    """The samples of a store at these indices (N,), numbered from 0."""

    store: Store
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, numbers: Tensor) -> Tensor:
        return self.store[self.indices[numbers]]


class Captioned(Store):
    """Samples of a store, conditioned on the embeddings of their captions, all on its device."""

    def __init__(self, store: Store, embeddings: Tensor) -> None:
        self.store, self.labels = store, store.labels
        self.table = split(embeddings)

    def __len__(self) -> int:
        return len(self.store)

    def gather(self, indices: Tensor) -> tuple[Tensor, Condition]:
        samples, caption = self.store.gather(indices)
        return samples, as_received({name: values[caption[CAPTION]] for name, values in self.table.items()})


def _condition_of(recipe: AnyRecipe) -> ConditionConfig:
    """Return what samples are conditioned on; decoders are on nothing, and their batches have labels."""
    return recipe.condition if isinstance(recipe, Recipe) else ConditionConfig()


def _with_folder(config: ConditionConfig, prepared: Prepared) -> ConditionConfig:
    """Return the condition of a recipe with what its folder says of it; what contradicts the folder is an error."""
    stored, where = prepared.condition, f"data.path={prepared.folder}"
    if config.kind == "none" or (stored is None and config.kind == "labels"):
        return config
    if stored is None:
        raise ValueError(
            f"condition.kind='{config.kind}': {where} holds no condition but labels; prepare it again with "
            f"--condition {config.kind}:KEY"
        )
    if stored.kind == CAPTION:
        if not config.encoder:
            raise ValueError(
                f"{where} holds captions, and condition.encoder is empty; embed them with --condition.kind tokens "
                "--condition.encoder FOLDER, or leave them out with --condition.kind none"
            )
        encoder = TextEncoder(config.encoder)
        length = config.length or encoder.longest(prepared.captions()[0])
        stored = StoredCondition("tokens", encoder.width, length)
    elif config.encoder:
        raise ValueError(f"condition.encoder={config.encoder}: {where} holds {stored}, no captions; leave it out")
    for name in ("kind", "width", "length"):
        given, own = getattr(config, name), getattr(stored, name)
        if given not in (own, getattr(ConditionConfig, name)):
            raise ValueError(f"condition.{name}={given}, and {where} holds {stored}; leave it out, or set it to {own}")
    return replace(config, kind=stored.kind, width=stored.width, length=stored.length)


def _open(recipe: AnyRecipe) -> Prepared:
    """Return the prepared folder of a recipe; one of another shape, other classes or another condition is an error."""
    config, prepared = recipe.data, open_prepared(recipe.data.folder)
    expected = (config.shape, len(config.class_names))
    if (prepared.shape, len(prepared.classes)) != expected:
        raise ValueError(
            f"data.path={config.folder} holds images {prepared.shape} of {len(prepared.classes)} classes; "
            f"data.name='{config.name}' needs {expected[0]} of {expected[1]}"
        )
    if prepared.values != config.values:
        raise ValueError(f"data.values={config.values}, and data.path={config.folder} holds {prepared.values} samples")
    condition = _condition_of(recipe)
    if isinstance(recipe, Recipe) and (needed := _with_folder(condition, prepared)) != condition:
        raise ValueError(
            f"condition.kind={condition.kind}, and data.path={config.folder} holds {prepared.condition}; "
            f"set it to {needed.kind}, or to none"
        )
    return replace(prepared, condition=None) if condition.kind in ("labels", "none") else prepared


def _shipped(recipe: AnyRecipe) -> Callable[[str], Images] | None:
    """Return what loads images that ship in the package, with labels alone; None where they are in a folder."""
    known, kind = DATA_SETS.get(recipe.data.name), _condition_of(recipe).kind
    load = None if known is None else known.load
    if load is not None and kind not in ("labels", "none"):
        raise ValueError(f"condition.kind='{kind}': data.name='{recipe.data.name}' has labels alone; leave it out")
    return load


def training_data(recipe: AnyRecipe, split: str = "train") -> Images:
    """Return the images a recipe trains on (or its "held-out" ones, where a set has them)."""
    load = _shipped(recipe)
    if load is None and split != "train":
        raise ValueError(f"split='{split}': a prepared folder is all for training; prepare the other split apart")
    images = _open(recipe).load() if load is None else load(split)
    return replace(images, condition=()) if _condition_of(recipe).kind == "none" else images


def training_store(recipe: AnyRecipe, device: torch.device, share: Share = ALONE) -> Store:
    """Return the samples on the device where they fit (engine.resident), else read from disk a step ahead.

    Each distinct caption is embedded once; of several processes each makes its share of that.
    """
    if _shipped(recipe) is not None:
        return Resident(training_data(recipe), device)
    prepared, where = _open(recipe), recipe.engine.resident
    std, scale = prepared.statistics.get("std", 0), recipe.codec.scale if isinstance(recipe, Recipe) else 1
    if std and not 0.1 < std / scale < 5 and share.rank == 0:
        warn(
            f"data.path={prepared.folder}: standard deviation {std:.3g}, of images about 0.5; codec.scale={scale:g} "
            f"leaves {std / scale:.3g}, --codec.scale {2 * std:.2g} would leave 0.5"
        )
    condition, embeddings = _condition_of(recipe), None
    if condition.encoder:  # of the distinct captions
        encoder, distinct = TextEncoder(condition.encoder, device), prepared.captions()[0]
        embeddings = embed_captions(encoder, distinct, condition.length, recipe.data.folder, share)
    if where == "auto":
        size = prepared.bytes + (0 if embeddings is None else sum(array.nbytes for array in embeddings.arrays))
        where = "device" if size < ROOM * free_memory(device) else "host"
    if where == "device":
        store: Store = Resident(training_data(recipe), device)
        if embeddings is not None:
            store = Captioned(store, torch.from_numpy(embeddings.gather(torch.arange(len(embeddings)))).to(device))
    else:
        mapped = prepared.mapped()

        def read(indices: Tensor) -> tuple[Tensor, Condition]:
            samples, given = mapped.gather(indices)
            if embeddings is not None:
                given = split(torch.from_numpy(embeddings.gather(given[CAPTION])))
            return samples, None if condition.kind == "none" else given

        store = OnHost(read, mapped.labels, device)
    store.stamp = prepared.stamp
    return store


def _filled(config: DataConfig, prepared: Prepared) -> DataConfig:
    """Return data options with the facts of a folder."""
    if not (config.size or config.space):
        channels, *space = prepared.shape
        square = len(space) == 2 and space[0] == space[1]
        shape = {"size": space[0]} if square else {"space": tuple(space)}
        values = config.values if config.values != DataConfig.values else prepared.values
        config = replace(config, channels=channels, values=values, classes=len(prepared.classes), names=(), **shape)
    if config.classes == len(prepared.classes):  # else it is refused when it is opened
        config = replace(config, names=tuple(map(printable, prepared.classes)))  # older folders hold any
    return config


def completed(recipe: R) -> R:
    """Return the recipe as a run keeps it: with absolute paths, and the facts of its folder (data.name "folder")."""
    config, known = recipe.data, DATA_SETS.get(recipe.data.name)
    incomplete = known is None and not ((config.size or config.space) and config.names)
    condition, prepared = _condition_of(recipe), None
    if known is not None and known.load is None and config.folder.exists():
        config = replace(config, path=str(config.folder))
        prepared = open_prepared(config.folder) if (config.folder / INDEX).is_file() else None
        classes = prepared.classes if prepared is not None and known.unnamed else ()
        if len(classes) == len(known.classes) and not all(map(str.isdigit, classes)):
            config = replace(config, names=tuple(map(printable, classes)))
    elif known is None and (incomplete or condition.missing):
        prepared = open_prepared(config.folder)
    facts: dict[str, Any] = {"data": config}
    if prepared is not None and incomplete:
        facts["data"] = _filled(config, prepared)
    if prepared is not None and isinstance(recipe, Recipe):
        facts["condition"] = _with_folder(condition, prepared)
    return located(replace(recipe, **facts))


def training_latents(recipe: Recipe, codec: Codec, store: Store, group: Processes) -> Latents | LoadedLatents | None:
    """Return the latents of all images, made once and kept as codec.cache says; None: encode every batch.

    Every process writes its share; shards of an earlier run are checked and kept.
    """
    if not isinstance(codec, RAE | VAE) or recipe.codec.cache == "none":
        return None
    folder = Path(recipe.codec.latents or f"{recipe.data.folder}-latents-{codec.fingerprint[:8]}")
    stamp = store.stamp or recipe.data.name
    share = Share(group.rank, group.world, lambda: group.any(False))
    write_latents(folder, codec, store, stamp=stamp, share=share)
    latents = open_latents(folder, codec=codec.fingerprint, data=stamp, device=group.device)
    return latents.load() if recipe.codec.cache == "device" else latents
