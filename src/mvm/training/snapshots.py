"""Power-function averages kept along the way, from which any other width can be put together after training."""

from collections.abc import Iterator
from pathlib import Path

from mvm import checkpoint
from mvm.files import write_text
from mvm.optim import power_ema
from mvm.optim.ema import MAIN, power_name
from mvm.optim.power_ema import Snapshot
from mvm.recipes import RECIPE, AnyRecipe, parse_recipe, to_json


def _kept(run: Path, recipe: AnyRecipe, last: int) -> Iterator[tuple[Snapshot, Path, str]]:
    """Yield the stored averages of steps up to `last`: what they are, and where."""
    for folder in sorted((run / "snapshots").glob("step-*")):
        step = checkpoint.read_manifest(folder)["step"]
        for width in recipe.train.power if step <= last else ():
            yield Snapshot(step, power_ema.exponent(width)), folder, power_name(width)


def rebuild(run: Path, recipe: AnyRecipe, width: float, step: int) -> tuple[checkpoint.Weights, float]:
    """Return the power-function average of relative width `width` at step `step`, and its relative profile error."""
    kept = list(_kept(run, recipe, step))
    if not kept:
        raise ValueError(
            f"{run} has no snapshots up to step {step}; train with --train.power 0.05,0.1 --train.snapshot_every N"
        )
    snapshots, target = [item[0] for item in kept], Snapshot(step, power_ema.exponent(width))
    weights = power_ema.coefficients(snapshots, target)
    error = power_ema.fit_error(snapshots, target)
    parts = ((float(w), checkpoint.load(folder, name)) for w, (_, folder, name) in zip(weights, kept, strict=True))
    return power_ema.combine(parts), error


WORST_FIT = 0.1  # relative error of the profile beyond which an average is not what was asked for


def _step_of(run: Path, asked: int | None) -> int:
    """Return the step to rebuild an average at: the newest checkpoint's, or an earlier one that was asked for."""
    newest = checkpoint.latest(run)
    if newest is None:
        raise ValueError(f"{run} holds no checkpoint; train it first")
    last = checkpoint.read_manifest(newest)["step"]
    if asked is not None and not 1 <= asked <= last:
        raise ValueError(f"--step {asked}: {run} has steps 1 to {last}")
    return asked or last


def export_average(run: Path, folder: Path, width: float, step: int | None = None) -> float:
    """Write a run directory that samples from the average of that width; return its relative profile error."""
    stored = run / RECIPE
    if not stored.is_file():
        raise ValueError(f"{run} is not a run directory (no {RECIPE} in it)")
    if (folder / RECIPE).exists():  # the run itself, perhaps: its checkpoint would be replaced by the average alone
        raise ValueError(f"--out {folder} already holds a run; give another folder")
    recipe = parse_recipe(stored.read_text(encoding="utf-8"), ".json", str(stored))
    at = _step_of(run, step)
    weights, error = rebuild(run, recipe, width, at)
    if error > WORST_FIT:
        raise ValueError(
            f"--width {width:g} at step {at}: the stored averages miss its profile by {100 * error:.0f} % (at most "
            f"{100 * WORST_FIT:.0f} % is written); take a width nearer to train.power, or a step with a snapshot"
        )
    info = {"step": at, "recipe": recipe.name, "width": width, "profile_error": error}
    checkpoint.save(checkpoint.step_folder(folder, at), {MAIN: {k: v.half() for k, v in weights.items()}}, info)
    write_text(folder / RECIPE, to_json(recipe))
    return error
