"""The format of a published model, read strictly; a folder with anything else in it is refused before it is read.

README.md           the model card
samples.png         its picture
config.json         recipe, class names, licence, where the weights came from
model.safetensors   the network's tensors, no others
tuned.json          times of the solver fitted to it by `mvm tune`
codec/              of a latent model: decoder and statistics of its autoencoder, or its VAE; of a converted one perhaps
model_index.json, scheduler/, transformer/   what config.json says, in diffusers' words
"""

import json
import math
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from mvm.checkpoint import Weights
from mvm.files import sha256
from mvm.latent import Codec, Decoder, Undecoded, load_vae, rae, vae
from mvm.latent.codec import Origin
from mvm.network import OwnConfig, build_network
from mvm.published.diffusers import INDEX, SCHEDULER, TRANSFORMER, disagreement, tables
from mvm.recipes import FOLDER, Recipe, options, require_field_recipe
from mvm.recipes.reading import LONGEST, from_dict, recipe_of
from mvm.untrusted import cut, read_json

LIBRARY, FORMAT = "mvm", 1
SHIPPED = "models"  # folder inside the package
MOST_TOKENS = 1 << 18  # 512 x 512: a larger grid is a mistake or an attack on the memory
STORED = ("F16", "BF16", "F32")
COUNTS = ("I64", "BOOL")  # buffers of a network of the user's
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
CARD, PICTURE, CONFIG, WEIGHTS, CODEC = "README.md", "samples.png", "config.json", "model.safetensors", "codec"
TUNED = "tuned.json"
FILES = (
    *(CARD, PICTURE, CONFIG, WEIGHTS, TUNED, INDEX, SCHEDULER, TRANSFORMER),
    *(f"{CODEC}/{name}" for name in (rae.INDEX, rae.DECODER, rae.STATISTICS, vae.CONFIG, vae.WEIGHTS)),
)
ACCOMPANYING = ("LICENSE", ".png")  # ends of names that may lie next to them; never read
MOST_JSON = 1 << 20  # bytes of a JSON file
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
CODE = (".py", ".pyc", ".so", ".sh", ".ipynb")


@dataclass(frozen=True)
class WeightsSource:
    """Where the weights came from; sha256: of the file in the run, codec: the fingerprint of its latents."""

    run: str
    step: int
    weights: str
    dtype: str
    sha256: str
    mvm: str
    data_stamp: str = ""
    codec: str = ""


@dataclass(frozen=True)
class Config:
    """What config.json says; license: an identifier as the hub has them, sha256: of model.safetensors."""

    recipe: Recipe
    classes: tuple[str, ...]
    license: str
    source: WeightsSource
    sha256: str

    def __post_init__(self) -> None:
        data = self.recipe.data
        count = data.classes if data.name == FOLDER else len(data.class_names)
        if count != len(self.classes):
            raise ValueError(f"classes has {len(self.classes)} names, the recipe's data have {count} classes")
        if not all(isinstance(name, str) and name.isprintable() for name in self.classes):
            raise ValueError("classes must be printable names")
        for option in ("recipe.name", "recipe.description", "source.run", "source.weights"):
            text = attrgetter(option)(self)
            if not text.replace("\n", "").isprintable():  # it goes to terminals, which obey escape sequences
                raise ValueError(f"{option}={text!r} must be printable text")
        check_license(self.license)
        for option in ("data.path", "repa.encoder"):
            text = attrgetter(option)(self.recipe)
            if Path(text).is_absolute() or ".." in Path(text).parts:
                raise ValueError(f"{option}={cut(repr(text))} must be a name: a published model names no other folder")
        for option in ("codec.path", "codec.encoder", "codec.latents", "condition.encoder"):
            if value := attrgetter(option)(self.recipe):  # a stranger's folder reads nothing but itself
                raise ValueError(f"{option}={value!r} must be empty: a published model names no other folder")
        if isinstance(self.recipe.network, OwnConfig):
            return
        space, patch = self.recipe.sample_shape[1:], self.recipe.network.patch
        if math.prod(extent // patch for extent in space) + self.recipe.condition.length > MOST_TOKENS:
            raise ValueError(f"samples of space {space} in patches of {patch} are more than {MOST_TOKENS} tokens")

    def to_json(self) -> str:
        """Return it as JSON, every default written out."""
        table = {"library_name": LIBRARY, "format": FORMAT, **asdict(self)}
        return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def version() -> str:
    """Return the version of the package; asked for by name, as its front door stands above this module."""
    return import_module(LIBRARY).__version__


def check_license(name: str) -> None:
    """Refuse what could not be the hub's name of a licence."""
    if not LICENSE.fullmatch(name):
        raise ValueError(f"license={name!r} is no identifier of a licence; give one as apache-2.0, cc-by-4.0, other")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _read_table(path: Path) -> dict[str, Any]:
    """Return a JSON table in which no key is twice and every number is one."""
    return read_json(path, MOST_JSON, object_pairs_hook=_each_once, parse_constant=_no_constant)


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Turn what a table may raise into a ValueError that begins with its file."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: {cut(error, LONGEST)}") from None


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files and links, without following links; top names with a dot (.git, .cache) are never read."""
    for directory, folders, names in os.walk(folder):
        if Path(directory) == folder:
            folders[:] = [name for name in folders if not name.startswith(".")]
            names = [name for name in names if not name.startswith(".")]
        yield from (Path(directory) / name for name in names)
        yield from (Path(directory) / name for name in folders if (Path(directory) / name).is_symlink())


def _misplaced(path: Path, name: str, root: Path) -> str:
    """Return why a file may not be there, or ""."""
    try:
        inside = not path.is_symlink() or path.resolve().is_relative_to(root.resolve())
    except RuntimeError:  # a link to itself leads nowhere
        inside = False
    reasons = {
        "is a link that leads out of the folder, or nowhere": not inside,
        "may hold pickled code; weights are safetensors alone": path.suffix.lower() in PICKLED,
        "is code; nothing is executed on load": path.suffix.lower() in CODE,
        "is not part of the format": name not in FILES and ("/" in name or not name.endswith(ACCOMPANYING)),
        "is not a plain file": not path.is_file(),
        f"is larger than {MOST_JSON} bytes": path.suffix == ".json"
        and path.is_file()
        and path.stat().st_size > MOST_JSON,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_files(folder: Path, root: Path | None = None) -> None:
    """Refuse a folder with anything in it that does not belong to the format; root: where links may lead to."""
    for path in sorted(_files_below(folder)):
        name = path.relative_to(folder).as_posix()
        if reason := _misplaced(path, name, root or folder):
            raise ValueError(f"{folder} is not read: '{name}' {reason}; remove it if you trust the rest")


def replaceable(folder: Path) -> bool:
    """Return whether a folder may be replaced by an export: there is none, it is empty, or it is one, nothing else."""
    if not folder.exists():
        return True
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return not any(folder.iterdir()) or ({CONFIG, WEIGHTS} <= names <= set(FILES))


def is_published(folder: Path) -> bool:
    """Return whether a folder is to be read as a published model."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path, root: Path | None = None) -> Config:
    """Return the config of a folder in which nothing lies but the format's files; root: where links may lead to."""
    check_files(folder, root)
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no published model (no {CONFIG} in it)")
    wanted = {"library_name", "format", "recipe", "classes", "license", "source", "sha256"}
    with _naming(path):
        table = _read_table(path)
        name, version = table.get("library_name"), table.get("format")
        if name != LIBRARY:
            raise ValueError(f"library_name is {name!r}, not '{LIBRARY}': a model of something else")
        if version != FORMAT:
            raise ValueError(f"format is {version!r}; this version of mvm reads {FORMAT}")
        if set(table) != wanted:
            raise ValueError(f"the keys must be {', '.join(sorted(wanted))}; there are: {', '.join(sorted(table))}")
        classes, license, digest = table["classes"], table["license"], table["sha256"]
        if not isinstance(classes, list) or not isinstance(license, str) or not isinstance(digest, str):
            raise ValueError("classes must be a list; license and sha256 must be text")
        recipe = require_field_recipe(recipe_of(table["recipe"]), str(folder))
        return Config(recipe, tuple(classes), license, from_dict(WeightsSource, table["source"], "source."), digest)


def check_tables(folder: Path, config: Config) -> None:
    """Refuse a folder whose tables for diffusers disagree with config.json, e.g. name other classes to import."""
    wanted = tables(config.recipe, config.classes)
    for path in (folder / name for name in (INDEX, SCHEDULER, TRANSFORMER) if (folder / name).is_file()):
        with _naming(path):
            if bad := disagreement(_read_table(path), wanted.get(path.relative_to(folder).as_posix(), {})):
                raise ValueError(f"'{bad}' is not what {CONFIG} says; export the model again, or remove this file")


def _require_tensors(path: Path, build: Callable[[], nn.Module] | None, depth: int = 0) -> None:
    """Refuse tensors that are not those of the module, by the file's header, before any memory is taken for it.

    build: None of a network that the folder does not hold: what is given on loading is compared with the tensors.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {part.get_dtype() for part in slices.values()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is missing or no whole safetensors file ({cut(error)}); get it again") from None
    allowed = STORED if build is not None else (*STORED, *COUNTS)
    if not dtypes <= set(allowed):
        raise ValueError(f"{path} holds {', '.join(sorted(dtypes))}; weights are one of {', '.join(allowed)}")
    if build is None:
        return
    try:
        if depth > len(shapes):  # else even a network without memory would take for ever to build
            raise ValueError(f"{len(shapes)} tensors for {depth} blocks")
        with torch.device("meta"):
            wanted = {name: tuple(value.shape) for name, value in build().state_dict().items()}
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} does not fit its {CONFIG} ({error})") from None
    if other := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        raise ValueError(f"{path} does not fit its {CONFIG}: {', '.join(other[:3])} ...; get both again")


def read_weights(folder: Path, config: Config) -> Weights:
    """Return the network's weights as they are stored; they fit the recipe, and have the checksum in config.json."""
    path, recipe = folder / WEIGHTS, config.recipe
    if isinstance(recipe.network, OwnConfig):
        _require_tensors(path, None)
    else:
        depth = max(value for name, value in options(recipe.network).items() if "depth" in name)
        _require_tensors(path, lambda: build_network(*recipe.blueprint), depth)
    if (digest := sha256(path)) != config.sha256:
        raise ValueError(f"{path} is damaged (sha256 {digest[:12]}..., expected {config.sha256[:12]}...); get it again")
    return load_file(path)


def read_codec(folder: Path, config: Config) -> Codec | None:
    """Return the decoder of a latent model; None where pixels need none. Shapes must be the recipe's.

    Converted weights may come without: what latents they are of is not recorded, and their user gives the autoencoder.
    """
    recipe = config.recipe
    if recipe.codec.kind == "pixels":
        return None
    stored = folder / CODEC
    if not stored.exists() and not config.source.codec:
        return Undecoded(recipe.sample_shape, recipe.codec.kind)
    if recipe.codec.kind == "vae":
        codec = load_vae(stored, recipe.data.shape[-1], recipe.codec.posterior).requires_grad_(False)
        shapes = codec.latent_shape, codec.image_shape
    else:
        index = rae.read_index(stored)
        side = index.latent_shape[-1] * index.decoder.patch
        shapes = index.latent_shape, (3, side, side)
    wanted = recipe.sample_shape, recipe.data.shape
    if shapes != wanted:
        raise ValueError(f"{stored} has latents and images {shapes}, the recipe {wanted}")
    if recipe.codec.kind == "vae":
        return codec
    decoder = partial(Decoder, index.decoder, index.latent_shape, Origin("", ""))
    _require_tensors(stored / rae.DECODER, decoder)
    return rae.load_decoder_only(stored)


def check_all(folder: Path) -> tuple[Config, Codec | None]:
    """Return config and codec of a folder; raise unless all of it can be read, and belongs together."""
    config = read_config(folder)
    read_weights(folder, config)
    check_tables(folder, config)
    return config, read_codec(folder, config)


def require_the_one(folder: Path, config: Config, weights: str, which: str) -> None:
    """Refuse other weights than the one set that is there; "ema" and "latest", the defaults, stand for that."""
    source = config.source
    if weights not in ("ema", source.weights):
        raise ValueError(f"weights='{weights}': {folder} has no such weights; it has: {source.weights}")
    if which not in ("latest", str(source.step)):
        raise ValueError(f"checkpoint='{which}': {folder} has that of step {source.step} alone")


def shipped_models() -> list[str]:
    """Return the names of models inside the package."""
    folder = files("mvm") / SHIPPED
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def shipped_folder(name: str) -> Path:
    """Return the folder of a model inside the package."""
    return Path(str(files("mvm") / SHIPPED / name))
