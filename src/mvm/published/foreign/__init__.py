"""Checkpoints of other projects: their tensors under our names, and the recipe that says what they are.

    mvm.load("sit:SiT-XL-2-256x256.pt", codec="sd-vae-ft-ema").generate(4)

Nothing of a file is believed but its tensors: shapes give all sizes, and a tensor that is missing, left over or of
another shape is refused by name. What has no place of its own is put into the matrix beside it: the weights of a norm,
the sign of a velocity, the order of a patch's numbers or of rotary pairs, channels for a learned variance (dropped).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mvm.checkpoint import Weights
from mvm.files import sha256
from mvm.objective import ObjectiveConfig
from mvm.options import choose
from mvm.published.foreign.decoder import convert_decoder, is_decoder
from mvm.published.foreign.networks import Converted, Options, convert_dit, convert_rae, convert_raev2
from mvm.published.foreign.tensors import Tensors, read_tensors
from mvm.recipes import FOLDER, CodecConfig, DataConfig, Recipe
from mvm.recipes.schema import PathConfig

__all__ = [
    "FORMATS",
    "Foreign",
    "Format",
    "Options",
    "as_foreign",
    "convert",
    "convert_decoder",
    "is_decoder",
    "read_tensors",
]


class Format(NamedTuple):
    """A project's files. convert: its network. kind, schedule: what it predicts, on which path. codec, factor: of its
    latents, and pixels a side for one of them."""

    convert: Callable[[Tensors, Options], Converted]
    kind: str = "flow"
    schedule: str = "linear-flow"
    codec: str = "vae"
    factor: int = 8


# SiT and LightningDiT run from noise at 0 to data at 1: their velocity is minus ours, at 1 - t.
FORMATS: dict[str, Format] = {
    "sit": Format(lambda t, options: convert_dit(t, options, "1-t", -1)),
    "dit": Format(lambda t, options: convert_dit(t, options, "step", 1), "eps", "variance-preserving"),
    "repa": Format(lambda t, options: convert_dit(t, options, "t", 1)),
    "lightningdit": Format(lambda t, options: convert_dit(t, options, "1-t", -1, "lightning"), factor=16),
    "rae": Format(convert_rae, codec="rae", factor=16),
    "raev2": Format(convert_raev2, "x0", codec="rae", factor=16),
}


def recipe_of(name: str, format: Format, found: Converted, factor: int = 0) -> Recipe:
    """Return the recipe of a converted network; samples of 1 or 3 channels are pixels in [-1, 1]."""
    channels, side, _ = found.shape
    pixels = channels in (1, 3)
    size = side if pixels else side * (factor or format.factor)
    known = (size, found.classes) == (256, 1000) and channels != 1
    folder = DataConfig(FOLDER, name, channels=channels if pixels else 3, size=size, classes=found.classes)
    return Recipe(
        name=name,
        description=f"Converted from {name}.",
        data=DataConfig("imagenet256") if known else folder,
        codec=CodecConfig() if pixels else CodecConfig(format.codec, channels=channels, side=side),
        path=PathConfig(format.schedule),
        network=found.network,
        objective=ObjectiveConfig(format.kind, label_drop=0.1 if found.null else 0.0),
    )


def plain(name: str) -> str:
    """Return a name of letters, digits, dots and dashes for a recipe."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip("-.") or "model"


def as_foreign(name: str) -> tuple[str, Path] | None:
    """Return format and file of "sit:FILE"; None for any other name."""
    format, colon, file = name.partition(":")
    return (format, Path(file)) if colon and format in FORMATS else None


class Foreign(NamedTuple):
    """A converted file: recipe, weights, and the sha256 of the file."""

    recipe: Recipe
    weights: Weights
    sha256: str


def convert(format: str, path: Path, weights: str = "ema", options: Options | None = None) -> Foreign:
    """Return a published checkpoint as our model; weights: "ema", or "model" where the file has both."""
    chosen = choose("format", format, FORMATS)
    tensors = read_tensors(path, weights)
    if is_decoder(tensors):
        raise ValueError(f"'{path}' is a decoder (stage 1), which alone samples nothing; write it: mvm convert")
    options = options or Options()
    found = chosen.convert(Tensors(tensors, f"'{path}'"), options)
    return Foreign(recipe_of(plain(path.stem), chosen, found, options.factor), found.weights, sha256(path))
