"""Where weights come from: a run directory, an exported folder, a model in the package, or one on the hub."""

from pathlib import Path
from typing import Any, NamedTuple

from mvm.options import nearest
from mvm.published.format import (
    is_published,
    read_config,
    read_weights,
    require_the_one,
    shipped_folder,
    shipped_models,
)
from mvm.published.hub import as_hub_id, fetch
from mvm.recipes import RECIPE, AnyRecipe, parse_recipe
from mvm.training import checkpoint
from mvm.untrusted import read_text


class Stored(NamedTuple):
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


def open_stored(run: Path, weights: str, which: str) -> Stored:
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
    return Stored(recipe, folder, manifest)


class Opened(NamedTuple):
    """A stored model that is not built yet.

    codec: the fingerprint of the latents it was trained in, "" for pixels. origin: what is told of the weights in
    records. exported: whether `folder` is a published model, which brings its own decoder.
    """

    recipe: AnyRecipe
    classes: tuple[str, ...]
    weights: checkpoint.Weights
    codec: str
    origin: dict[str, Any]
    folder: Path
    exported: bool


def open_model(name: str | Path, weights: str = "ema", which: str = "latest") -> Opened:
    """Return the weights that a name stands for. Lookup order: local folder, bundled model, hub.

    A hub id is OWNER/NAME or OWNER/NAME@REVISION. Nothing is executed or unpickled.
    """
    place, root = Path(name), None
    if (place / RECIPE).is_file():
        return _of_run(place, weights, which)
    if not is_published(place) and str(name) in shipped_models():
        place = shipped_folder(str(name))
    elif not is_published(place):
        asked = as_hub_id(str(name))
        if asked is None:
            raise _unknown(str(name), "a model on the hub is OWNER/NAME or OWNER/NAME@REVISION")
        try:
            place, root = fetch(asked)
        except ValueError as error:
            raise _unknown(str(name), f"from the hub: {error}") from None
    config = read_config(place, root)
    require_the_one(place, config, weights, which)
    source = config.source
    origin = {
        "run": source.run,
        "recipe": config.recipe.name,
        "step": source.step,
        "weights": source.weights,
        "sha256": config.sha256,
        "data": config.recipe.data.name,
        "data_stamp": source.data_stamp,
    }
    return Opened(config.recipe, config.classes, read_weights(place, config), source.codec, origin, place, True)


def _of_run(run: Path, weights: str, which: str) -> Opened:
    recipe, folder, manifest = open_stored(run, weights, which)
    origin = {
        "run": run.resolve().name,
        "recipe": recipe.name,
        "step": manifest["step"],
        "weights": weights,
        "sha256": manifest["sha256"][f"{weights}.safetensors"],
        "data": recipe.data.name,
        "data_stamp": manifest.get("data"),
    }
    values, codec = checkpoint.load(folder, weights), manifest.get("codec", "")
    return Opened(recipe, recipe.data.class_names, values, codec, origin, folder, False)


def _unknown(name: str, hub: str) -> ValueError:
    """Return the error that names the ways to a model; hub: what is to be said of that one."""
    names = shipped_models()
    return ValueError(
        f"'{name}' is neither a run directory (no {RECIPE} in it) nor an exported model (no config.json) nor a shipped "
        f"one{nearest(name, names)}; shipped: {', '.join(names) or 'none'}; {hub}"
    )
