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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from mvm.latent import VAE, Codec, Decoder, LatentDecoder, load_vae, rae, vae
from mvm.latent.codec import Origin
from mvm.network import OwnConfig, build_network
from mvm.published.diffusers import INDEX, SCHEDULER, TRANSFORMER, disagreement, tables
from mvm.recipes import FOLDER, AnyRecipe, Recipe, options, require_field_recipe
from mvm.recipes.reading import LONGEST, from_dict, recipe_of
from mvm.untrusted import cut, read_json

LIBRARY, FORMAT = "mvm", 1
SHIPPED = "models"  # folder inside the package
MOST_TOKENS = 1 << 18  # 512 x 512: a larger grid is a mistake or an attack on the memory
MOST_BLOCKS = 512  # of a network, or of its head: published ones have 48; each takes time to build, even of no size
MOST_TABLES = 1 << 30  # bytes that a network computes for itself: positions and null conditions
STORED = ("F16", "BF16", "F32")
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
ARRAYS = (".npy", ".npz")  # which a run keeps, and which are read without unpickling
TRACKERS = ("tensorboard", "wandb")  # folders in a run that are never read: their programs keep code and links there
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
        _require_printable({"source.run": self.source.run, "source.weights": self.source.weights}, self.classes)
        check_license(self.license)
        for option in ("data.path", "repa.encoder"):
            text = attrgetter(option)(self.recipe)
            if Path(text).is_absolute() or ".." in Path(text).parts:
                raise ValueError(f"{option}={cut(repr(text))} must be a name: a published model names no other folder")
        for option in ("codec.path", "codec.encoder", "codec.latents", "condition.encoder"):
            if value := attrgetter(option)(self.recipe):  # a stranger's folder reads nothing but itself
                raise ValueError(f"{option}={value!r} must be empty: a published model names no other folder")
        check_recipe(self.recipe)

    def to_json(self) -> str:
        """Return it as JSON, every default written out."""
        table = {"library_name": LIBRARY, "format": FORMAT, **asdict(self)}
        return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def _require_printable(texts: Mapping[str, str], classes: Iterable[object]) -> None:
    """Refuse what would steer a terminal."""
    if not all(isinstance(name, str) and name.isprintable() for name in classes):
        raise ValueError("classes must be printable names")
    for option, text in texts.items():
        if not text.replace("\n", "").isprintable():
            raise ValueError(f"{option}={text!r} must be printable text, without tabs and control characters")


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe from a folder, of a run as of a published model, that names sizes which no model has."""
    _require_printable({"recipe.name": recipe.name, "recipe.description": recipe.description}, recipe.data.names)
    if isinstance(recipe.network, OwnConfig):
        return
    for option, value in options(recipe.network).items():
        if "depth" in option and value > MOST_BLOCKS:
            raise ValueError(f"network.{option}={value} is out of range; it must be at most {MOST_BLOCKS}")
    space, patch = recipe.sample_shape[1:], recipe.network.patch
    if math.prod(extent // patch for extent in space) + recipe.condition.length > MOST_TOKENS:
        raise ValueError(f"samples of space {space} in patches of {patch} are more than {MOST_TOKENS} tokens")


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
def naming(path: Path) -> Generator[None]:
    """Turn what a table may raise into a ValueError that begins with its file."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: {cut(error, LONGEST)}") from None


def _files_below(folder: Path, of_run: bool) -> Iterator[Path]:
    """Yield all files and links, without following links; top names with a dot (.git, .cache) are never read.

    of_run: nor are such names below, of what another process is writing, nor folders of trackers.
    """
    for directory, folders, names in os.walk(folder):
        if of_run and Path(directory) == folder:
            folders[:] = [name for name in folders if name not in TRACKERS]
        if of_run or Path(directory) == folder:
            folders[:] = [name for name in folders if not name.startswith(".")]
            names = [name for name in names if not name.startswith(".")]
        yield from (Path(directory) / name for name in names)
        yield from (Path(directory) / name for name in folders if (Path(directory) / name).is_symlink())


def _misplaced(path: Path, name: str, root: Path, of_run: bool) -> str:
    """Return why a file may not be there, or ""."""
    suffix = path.suffix.lower()
    try:
        inside = not path.is_symlink() or path.resolve().is_relative_to(root.resolve())
    except RuntimeError:  # a link to itself leads nowhere
        inside = False
    reasons = {
        "is a link that leads out of the folder, or nowhere": not inside,
        "may hold pickled code; weights are safetensors alone": suffix in PICKLED and not (of_run and suffix in ARRAYS),
        "is code; nothing is executed on load": suffix in CODE,
        "is not part of the format": not of_run
        and name not in FILES
        and ("/" in name or not name.endswith(ACCOMPANYING)),
        "is not a plain file": path.exists() and not path.is_file() and not (of_run and path.is_dir()),
        f"is larger than {MOST_JSON} bytes": not of_run
        and suffix == ".json"
        and path.is_file()
        and path.stat().st_size > MOST_JSON,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_files(folder: Path, root: Path | None = None, of_run: bool = False) -> None:
    """Refuse a folder with anything in it that does not belong to the format; root: where links may lead to.

    of_run: of a run, in which there is more, and no pickles, code, or links that lead out either.
    """
    for path in sorted(_files_below(folder, of_run)):
        name = path.relative_to(folder).as_posix()
        if reason := _misplaced(path, name, root or folder, of_run):
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
    with naming(path):
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
        with naming(path):
            if bad := disagreement(_read_table(path), wanted.get(path.relative_to(folder).as_posix(), {})):
                raise ValueError(f"'{bad}' is not what {CONFIG} says; export the model again, or remove this file")


def _require_tensors(path: Path, build: Callable[[], nn.Module] | None, says: str) -> None:
    """Refuse tensors that are not those of the module, by the file's header, before any memory is taken for it.

    build: None of a network that the folder does not hold: what is given on loading is compared with the tensors.
    says: the file that tells of the module.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {part.get_dtype() for part in slices.values()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is missing or no whole safetensors file ({cut(error)}); get it again") from None
    if build is None:
        return
    if not dtypes <= set(STORED):
        raise ValueError(f"{path} holds {', '.join(sorted(dtypes))}; weights are one of {', '.join(STORED)}")
    try:
        with torch.device("meta"):
            module = build()
        wanted = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        computed = sum(value.nbytes for name, value in module.named_buffers() if name not in wanted)
        if computed > MOST_TABLES:
            raise ValueError(f"its tables of positions take {computed:,} bytes; at most {MOST_TABLES:,} are computed")
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} does not fit its {says} ({cut(error)})") from None
    if other := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        raise ValueError(f"{path} does not fit its {says}: {', '.join(map(cut, other[:3]))} ...; get both again")


def require_network(path: Path, recipe: AnyRecipe, says: str) -> None:
    """Refuse weights that are not those of a recipe's network before memory is taken; says: the recipe's file."""
    if not isinstance(recipe, Recipe) or isinstance(recipe.network, OwnConfig):
        _require_tensors(path, None, says)
        return
    _require_tensors(path, lambda: build_network(*recipe.blueprint), says)


def read_weights(folder: Path, config: Config) -> Weights:
    """Return the network's weights as they are stored; they fit the recipe, and have the checksum in config.json."""
    path = folder / WEIGHTS
    require_network(path, config.recipe, CONFIG)
    if (digest := sha256(path)) != config.sha256:
        raise ValueError(f"{path} is damaged (sha256 {digest[:12]}..., expected {config.sha256[:12]}...); get it again")
    return load_file(path)


def read_codec(stored: Path, recipe: Recipe, encoder: str | None = None) -> Codec:
    """Return the decoder of a latent model, in a folder; shapes must be the recipe's.

    encoder: as in `load_decoder_only`.
    """
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
    _require_tensors(stored / rae.DECODER, decoder, rae.INDEX)
    return rae.load_decoder_only(stored, encoder).requires_grad_(False)


def codec_folder(folder: Path, config: Config) -> Path | None:
    """Return where the autoencoder of a published model lies; None of pixels, and of latents that came without.

    So may converted weights: what latents they are of is not recorded, and their user gives the autoencoder.
    """
    stored = folder / CODEC
    held = config.recipe.codec.kind != "pixels" and (stored.exists() or config.source.codec)
    return stored if held else None


def check_all(folder: Path) -> tuple[Config, Codec | None]:
    """Return config and codec of a folder; raise unless all of it can be read, and belongs together."""
    config = read_config(folder)
    read_weights(folder, config)
    check_tables(folder, config)
    stored = codec_folder(folder, config)
    return config, None if stored is None else read_codec(stored, config.recipe)


def write_codec(folder: Path, codec: Codec | None) -> None:
    """Write FOLDER/codec, from which samples are decoded: decoder and statistics, or a VAE; nothing for pixels."""
    if isinstance(codec, LatentDecoder | VAE):
        codec.save(folder / CODEC)


def keep_codec(run: Path, recipe: Recipe, codec: Codec) -> None:
    """Write RUN/codec; one that is the same already stays, as others may be reading it."""
    with suppress(ValueError):  # nothing there, or damaged
        if (run / CODEC).is_dir() and read_codec(run / CODEC, recipe).identity == codec.identity:
            return
    write_codec(run, codec)


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
