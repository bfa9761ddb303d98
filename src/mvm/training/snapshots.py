"""Power-function averages kept along the way, from which any other width can be put together after training."""

from pathlib import Path

from mvm import checkpoint
from mvm.files import write_text
from mvm.optim import power_ema
from mvm.optim.ema import MAIN, power_name
from mvm.optim.power_ema import Snapshot
from mvm.recipes import RECIPE, AnyRecipe, parse_recipe, to_json


def rebuild(run: Path, recipe: AnyRecipe, width: float, step: int) -> tuple[checkpoint.Weights, float]:
    """Return the power-function average of relative width `width` at step `step`, and its relative profile error."""
    stored: dict[tuple[Path, str], Snapshot] = {}  # the averages up to `step`, by their files
    for folder in sorted((run / "snapshots").glob("step-*")):
        at = checkpoint.read_manifest(folder)["step"]
        for stored_width in recipe.train.power if at <= step else ():
            stored[folder, power_name(stored_width)] = Snapshot(at, power_ema.exponent(stored_width))
    if not stored:
        raise ValueError(
            f"{run} has no snapshots up to step {step}; train with --train.power 0.05,0.1 --train.snapshot_every N"
        )
    weights, error = power_ema.fit([*stored.values()], Snapshot(step, power_ema.exponent(width)))
    parts = ((weight, checkpoint.load(*file)) for weight, file in zip(weights, stored, strict=True))
    return power_ema.combine(parts), error


WORST_FIT = 0.1  # relative error of the profile beyond which an average is not what was asked for


def export_average(run: Path, folder: Path, width: float, step: int | None = None) -> float:
    """Write a run directory that samples from the average of that width; return its relative profile error."""
    stored = run / RECIPE
    if not stored.is_file():
        raise ValueError(f"{run} is not a run directory (no {RECIPE} in it)")
    if (folder / RECIPE).exists():  # the run itself, perhaps: its checkpoint would be replaced by the average alone
        raise ValueError(f"--out {folder} already holds a run; give another folder")
    recipe = parse_recipe(stored.read_text(encoding="utf-8"), ".json", str(stored))
    newest = checkpoint.latest(run)
    if newest is None:
        raise ValueError(f"{run} holds no checkpoint; train it first")
    last = checkpoint.read_manifest(newest)["step"]
    if step is not None and not 1 <= step <= last:
        raise ValueError(f"--step {step}: {run} has steps 1 to {last}")
    at = step or last
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
