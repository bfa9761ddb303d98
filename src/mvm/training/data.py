"""The images a recipe trains on, placed where they are fastest to reach."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mvm.data import DATA_SETS, Images, OnHost, Prepared, Resident, Store, open_prepared
from mvm.distributed.processes import Processes
from mvm.latent import RAE, VAE, Codec, Latents, LoadedLatents, open_latents, write_latents
from mvm.recipes import AnyRecipe, DataConfig, Recipe, located
from mvm.recipes.memory import free_memory
from mvm.store import Share

R = TypeVar("R", bound=AnyRecipe)

ROOM = 0.5  # share of the free memory that images may take when engine.resident is "auto"


@dataclass(frozen=True)
class Part:
    """Images first, ..., last - 1 of a store, numbered from 0."""

    store: Store
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, indices: Tensor) -> Tensor:
        return self.store[indices + self.first]


def _open(config: DataConfig) -> Prepared:
    """Return the prepared folder of a recipe; one of another shape or other classes is an error."""
    prepared = open_prepared(config.folder)
    expected = (config.shape, len(config.class_names))
    if (prepared.shape, len(prepared.classes)) != expected:
        raise ValueError(
            f"data.path={config.folder} holds images {prepared.shape} of {len(prepared.classes)} classes; "
            f"data.name='{config.name}' needs {expected[0]} of {expected[1]}"
        )
    return prepared


def training_data(recipe: AnyRecipe, split: str = "train") -> Images:
    """Return the images a recipe trains on (or its "held-out" ones, where a set has them)."""
    known = DATA_SETS.get(recipe.data.name)
    if known is not None and known.load is not None:
        return known.load(split)
    if split != "train":
        raise ValueError(f"split='{split}': a prepared folder is all for training; prepare the other split apart")
    return _open(recipe.data).load()


def training_store(recipe: AnyRecipe, device: torch.device) -> Store:
    """Return the images on the device where they fit (engine.resident), else read from disk a step ahead."""
    known = DATA_SETS.get(recipe.data.name)
    if known is not None and known.load is not None:
        return Resident(known.load("train"), device)
    prepared = _open(recipe.data)
    where = recipe.engine.resident
    if where == "auto":
        where = "device" if prepared.bytes < ROOM * free_memory(device) else "host"
    if where == "device":
        store: Store = Resident(prepared.load(), device)
    else:
        mapped = prepared.mapped()
        store = OnHost(mapped.gather, mapped.labels, device)
    store.stamp = prepared.stamp
    return store


def completed(recipe: R) -> R:
    """Return the recipe as a run keeps it: with absolute paths, and the facts of its folder (data.name "folder")."""
    config = recipe.data
    known = DATA_SETS.get(config.name)
    if known is None and not (config.size and config.names):
        prepared = open_prepared(config.folder)
        if not config.size:
            channels, size, _ = prepared.shape
            config = replace(config, channels=channels, size=size, classes=len(prepared.classes), names=())
        if config.classes == len(prepared.classes):  # else it is refused when it is opened
            config = replace(config, names=prepared.classes)
    elif known is not None and known.load is None and config.folder.exists():
        config = replace(config, path=str(config.folder))
    return located(replace(recipe, data=config))


def training_latents(
    recipe: Recipe, codec: Codec, store: Store, processes: Processes
) -> Latents | LoadedLatents | None:
    """Return the latents of all images, made once and kept as codec.cache says; None: encode every batch.

    Every process writes its share; shards of an earlier run are checked and kept.
    """
    if not isinstance(codec, RAE | VAE) or recipe.codec.cache == "none":
        return None
    folder = Path(recipe.codec.latents or f"{recipe.data.folder}-latents-{codec.fingerprint[:8]}")
    stamp = store.stamp or recipe.data.name
    share = Share(processes.rank, processes.world, lambda: processes.any(False))
    write_latents(folder, codec, store, stamp=stamp, share=share)
    latents = open_latents(folder, codec=codec.fingerprint, data=stamp, device=processes.device)
    return latents.load() if recipe.codec.cache == "device" else latents
