"""The run directory: opened for a new run, a resumed one, or one that starts from another's weights."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mvm.files import alone, is_leftover, mend, write_text
from mvm.published import is_published, read_config, read_weights, require_the_one
from mvm.recipes import RECIPE, AnyRecipe, options, parse_recipe
from mvm.training import checkpoint
from mvm.training.checkpoint import sampled_from
from mvm.untrusted import read_text

INIT = "init.json"

# May differ when a run goes on: how it is executed, watched and kept.
_KEPT = ("train.log_every", "train.save_every", "train.snapshot_every", "train.keep", "train.keep_best")
OWN = ("features",)  # what a run that was stopped before its first step may leave
# Where frozen weights lie: they are told by their fingerprints.
_PLACES = (
    "data.path",
    "encoder.name",
    "reconstruction.lpips_weights",
    "codec.path",
    "codec.encoder",
    "codec.latents",
    "codec.cache",
)
FREE = ("description", "engine.", "preview.", "sample.", *_PLACES, *_KEPT)


def _changed(old: AnyRecipe, new: AnyRecipe) -> list[str]:
    """Return the options that differ and may not: those that decide the weights."""
    if type(old) is not type(new):
        return ["task"]
    free = (*FREE, "train.steps") if new.train.decay == "constant" else FREE
    before, after = options(old), options(new)
    return [name for name in after if before.get(name) != after[name] and not name.startswith(free)]


def open_run(recipe: AnyRecipe, run: Path, resume: bool) -> Path | None:
    """Prepare the run directory; return the checkpoint to resume from, if any."""
    stored = run / RECIPE
    if stored.is_file():
        if not resume:
            raise ValueError(f"{run} already holds a run; give --resume to continue it, or another --out")
        changed = _changed(parse_recipe(read_text(stored), ".json", str(stored)), recipe)
        if changed:
            raise ValueError(f"{run} was started with other values of {', '.join(changed)}; use another --out")
    elif checkpoint.latest(run) is not None:
        raise ValueError(f"{run} holds checkpoints but no {RECIPE}; restore that file, or give another --out")
    elif run.is_dir() and any(entry.name not in OWN and not is_leftover(entry) for entry in run.iterdir()):
        raise ValueError(f"--out {run} is a folder with other files in it; give a new one")
    for folder in (run, run / "checkpoints", run / "snapshots", run / "samples"):
        mend(folder)
    return checkpoint.latest(run)


def held(run: Path) -> AbstractContextManager[None]:
    """Make the run directory if need be, and hold it: two trainings in one would ruin each other's files."""
    run.mkdir(parents=True, exist_ok=True)
    return alone(run, f"{run} is in use by another process that trains; wait for it, or give another --out")


def initial_weights(source: Path, weights: str) -> tuple[checkpoint.Weights, dict[str, Any]]:
    """Return the weights of another run, or of an exported model, to start from, and where they came from."""
    if is_published(source):
        config = read_config(source)
        require_the_one(source, config, weights, "latest")
        told = config.source
        origin = {"run": source.name, "step": told.step, "weights": told.weights, "sha256": config.sha256}
        return read_weights(source, config), origin
    folder = checkpoint.latest(source)
    if folder is None:
        raise ValueError(f"--init-from {source}: no checkpoint there; give a run directory that has one")
    manifest = checkpoint.read_manifest(folder)
    name = f"{weights}.safetensors"
    if weights not in sampled_from(manifest):
        known = ", ".join(sampled_from(manifest))
        raise ValueError(f"--init-weights {weights}: {source} has no such weights; it has: {known}")
    origin = {"run": source.name, "step": manifest["step"], "weights": weights, "sha256": manifest["sha256"][name]}
    return checkpoint.load(folder, weights), origin


def note_origin(run: Path, origin: dict[str, Any]) -> None:
    """Write down what a run started from."""
    write_text(run / INIT, json.dumps(origin, indent=2) + "\n")
