"""Weights in a run directory: which checkpoint, and what is told of it."""

from pathlib import Path
from typing import Any, NamedTuple

from mvm.recipes import RECIPE, Recipe, as_field, parse_recipe
from mvm.training import checkpoint
from mvm.untrusted import read_text


class Stored(NamedTuple):
    """A run's recipe, one of its checkpoints, and the manifest of that."""

    recipe: Recipe
    folder: Path
    manifest: dict[str, Any]


def open_stored(run: Path, weights: str, which: str) -> Stored:
    """Return the checkpoint asked for; one that is not there, or has no such weights, is named with what there is."""
    stored = run / RECIPE
    if not stored.is_file():
        raise ValueError(f"{run} is not a run directory (no {RECIPE} in it)")
    recipe = as_field(parse_recipe(read_text(stored), ".json", str(stored)), str(run))
    folder = checkpoint.find(run, which)
    if folder is None:
        raise _no_checkpoint(run, which)
    manifest = checkpoint.read_manifest(folder)
    known = checkpoint.sampled_from(manifest)
    if weights not in known:
        raise ValueError(f"weights='{weights}': {run} has no such weights; it has: {', '.join(known)}")
    return Stored(recipe, folder, manifest)


def _no_checkpoint(run: Path, which: str) -> ValueError:
    """Return the error that says which checkpoints there are instead."""
    asked = "" if which == "latest" else f" '{which}'"
    steps = [folder.name.removeprefix("step-").lstrip("0") or "0" for folder in checkpoint.folders(run)]
    remedy = f"it has those of the steps {', '.join(steps)}" if steps else "train it first"
    return ValueError(f"{run} holds a recipe but no checkpoint{asked} yet; {remedy}")
