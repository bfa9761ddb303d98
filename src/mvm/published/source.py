"""Where weights come from: a run directory, an exported folder, a model in the package, or one on the hub."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from mvm import checkpoint
from mvm.latent import Codec, Undecoded, is_rae
from mvm.latent.rae import read_index
from mvm.options import nearest
from mvm.published.foreign import FORMATS, Options, as_foreign, convert
from mvm.published.format import (
    CODEC,
    Config,
    check_files,
    check_recipe,
    check_tables,
    codec_folder,
    is_published,
    naming,
    read_codec,
    read_config,
    read_weights,
    require_network,
    require_the_one,
    shipped_folder,
    shipped_models,
)
from mvm.published.hub import as_hub_id, fetch
from mvm.published.tuned import Entry, Key, read_tuned
from mvm.recipes import RECIPE, AnyRecipe, Recipe, parse_recipe, require_field_recipe
from mvm.untrusted import cut, read_text


class StoredCheckpoint(NamedTuple):
    """A run's recipe, one of its checkpoints, and the manifest of that."""

    recipe: AnyRecipe
    folder: Path
    manifest: dict[str, Any]


def run_recipe(run: Path) -> AnyRecipe:
    """Return the recipe that a run directory holds."""
    stored = run / RECIPE
    if not stored.is_file():
        raise ValueError(f"{run} is not a run directory (no {RECIPE} in it)")
    return parse_recipe(read_text(stored), ".json", str(stored))


def open_stored(run: Path, weights: str, which: str) -> StoredCheckpoint:
    """Return the checkpoint asked for; one that is not there, or has no such weights, is named with what there is."""
    recipe = run_recipe(run)
    folder = checkpoint.find(run, which)
    if folder is None:
        asked = "" if which == "latest" else f" '{which}'"
        steps = [folder.name.removeprefix("step-").lstrip("0") or "0" for folder in checkpoint.folders(run)]
        remedy = f"it has those of the steps {', '.join(steps)}" if steps else "train it first"
        raise ValueError(f"{run} holds a recipe but no checkpoint{asked} yet; {remedy}")
    manifest = checkpoint.read_manifest(folder)
    known = checkpoint.sampled_from(manifest)
    if weights not in known:
        raise ValueError(f"weights='{weights}': {run} has no such weights; it has: {', '.join(known)}")
    return StoredCheckpoint(recipe, folder, manifest)


class Opened(NamedTuple):
    """A stored model that is not built yet.

    codec: the fingerprint of the latents it was trained in, "" for pixels. origin: what records say of the weights.
    config: of a published model, None for a run. tuned: times fitted to it. stored: the folder of its autoencoder; None
    of converted weights that came without. run: the run directory. outside: whether what its files name elsewhere may
    be opened.
    """

    recipe: AnyRecipe
    classes: tuple[str, ...]
    weights: checkpoint.Weights
    codec: str
    origin: dict[str, Any]
    folder: Path
    config: Config | None
    tuned: dict[Key, Entry]
    stored: Path | None = None
    run: Path | None = None
    outside: bool = False

    def with_codec(self, folder: str | Path) -> "Opened":
        """Return the same with another folder of its autoencoder, which the caller names."""
        recipe = require_field_recipe(self.recipe, self.origin["run"])
        if recipe.codec.kind == "pixels":
            raise ValueError(f"codec={folder}: {self.origin['run']} makes pixels, with no autoencoder; leave it out")
        recipe = replace(recipe, codec=replace(recipe.codec, path=str(folder)))
        return self._replace(recipe=recipe, config=None, stored=Path(folder))

    def open_codec(self) -> Codec | None:
        """Return the decoder of a latent model; None of pixels. Its encoder is opened later, if it may be at all."""
        recipe = require_field_recipe(self.recipe, self.origin["run"])
        codec, stored = recipe.codec, self.stored
        if codec.kind == "pixels":
            return None
        if stored is None:
            return Undecoded(recipe.sample_shape, codec.kind)
        if self.run is not None and stored == self.run / CODEC and not stored.exists():  # of a run of before
            if not (path := self.reached(codec.path)):
                elsewhere = f"names one that lies elsewhere, codec.path={cut(repr(codec.path))}"
                raise ValueError(
                    f"{self.run} holds no {CODEC}/, and {elsewhere}; if you trust that, copy it to "
                    f"{self.run / CODEC}, or give --allow-download (allow_download=True, or codec=FOLDER, in Python)"
                )
            stored = Path(path)
        named = codec.encoder or (read_index(stored).encoder.name if is_rae(stored) else "")
        return read_codec(stored, recipe, self.reached(named) or None)

    def reached(self, name: str) -> str:
        """Return what a name in its files stands for, to be opened; "" where that must not be, unasked.

        A run may name what lies in it or beside it, by an absolute path, which nobody gives who does not know this
        machine. With consent a name is what it is: a path, or one on the hub.
        """
        path = Path(name)
        if self.outside or not name:
            return name
        if self.run is None or not path.is_absolute() or ".." in path.parts or "\0" in name:
            return ""
        beside, found = self.run.resolve().parent, path.resolve()
        return str(found) if beside != beside.parent and found.is_relative_to(beside) else ""


def open_model(name: str | Path, weights: str = "ema", which: str = "latest") -> Opened:
    """Return the weights that a name stands for. Lookup order: local folder, bundled model, hub.

    A hub id is OWNER/NAME or OWNER/NAME@REVISION. FORMAT:FILE is a checkpoint of another project. Nothing is executed
    or unpickled.
    """
    if (foreign := as_foreign(str(name))) is not None:
        return open_foreign(*foreign, weights, which)
    if (Path(name) / RECIPE).is_file():
        return open_run(Path(name), weights, which)
    return open_published(*locate(name), weights, which)


def open_run(run: Path, weights: str = "ema", which: str = "latest") -> Opened:
    """Return the weights in a run directory; it is checked as a published folder is, before memory is taken."""
    check_files(run, of_run=True)
    recipe, folder, manifest = open_stored(run, weights, which)
    if isinstance(recipe, Recipe):
        with naming(run / RECIPE):
            check_recipe(recipe)
    checkpoint.check(folder, [weights])
    path = folder / f"{weights}.safetensors"
    require_network(path, recipe, RECIPE)
    with checkpoint.whole_file(path):
        values = load_file(path)
    digest, stamp = manifest["sha256"][path.name], manifest.get("data")
    origin = _origin(recipe, run.resolve().name, manifest["step"], weights, digest, stamp)
    codec, tuned = manifest.get("codec", ""), read_tuned(run, digest)
    return Opened(recipe, recipe.data.class_names, values, codec, origin, folder, None, tuned, run / CODEC, run)


def open_foreign(
    format: str, path: Path, weights: str = "ema", which: str = "latest", options: Options | None = None
) -> Opened:
    """Return the weights of a published checkpoint, converted; options: what the file does not say."""
    if which != "latest":
        raise ValueError(f"checkpoint='{which}': '{path}' is one checkpoint; leave it out")
    recipe, values, digest = convert(format, path, weights, options)
    origin = {**_origin(recipe, recipe.name, 0, weights, digest, ""), "format": format}
    return Opened(recipe, recipe.data.class_names, values, "", origin, path.parent, None, {})


def open_published(folder: Path, root: Path | None = None, weights: str = "ema", which: str = "latest") -> Opened:
    """Return the weights in a published folder, all of it checked; root: where links may lead to."""
    config = read_config(folder, root)
    require_the_one(folder, config, weights, which)
    values, source = read_weights(folder, config), config.source
    check_tables(folder, config)
    origin = _origin(config.recipe, source.run, source.step, source.weights, config.sha256, source.data_stamp)
    tuned = read_tuned(folder, config.sha256)
    codec = codec_folder(folder, config)
    return Opened(config.recipe, config.classes, values, source.codec, origin, folder, config, tuned, codec)


def _origin(
    recipe: AnyRecipe, run: str, step: int, weights: str, digest: str, data_stamp: str | None
) -> dict[str, Any]:
    return {
        "run": run,
        "recipe": recipe.name,
        "step": step,
        "weights": weights,
        "sha256": digest,
        "data": recipe.data.name,
        "data_stamp": data_stamp,
    }


def locate(name: str | Path, **hub_options: Any) -> tuple[Path, Path]:
    """Return the folder of a published model and where its links may lead to, the folder itself but for the hub's.

    hub_options: of the hub's library, e.g. token, cache_dir.
    """
    name, shipped = str(name), shipped_models()
    if is_published(Path(name)):
        return Path(name), Path(name)
    if name in shipped:
        return shipped_folder(name), shipped_folder(name)
    on_hub = "a model on the hub is OWNER/NAME or OWNER/NAME@REVISION"
    if (asked := as_hub_id(name)) is not None:
        try:
            return fetch(asked, **hub_options)
        except ValueError as error:
            on_hub = f"from the hub: {error}"
    raise ValueError(
        f"'{name}' is neither a run directory (no {RECIPE} in it) nor an exported model (no config.json) nor a shipped "
        f"one{nearest(name, shipped)}; shipped: {', '.join(shipped) or 'none'}; {on_hub}; a checkpoint of another "
        f"project is FORMAT:FILE ({', '.join(FORMATS)})"
    )
