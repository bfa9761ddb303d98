"""The run directory: opened for a new run or a resumed one, what may change in between; averages rebuilt from it."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from mvm import checkpoint
from mvm.files import Held, atomic, claimed, is_leftover, recover, recover_all, remove, require_utf8, write_text
from mvm.optim import power_ema
from mvm.optim.ema import MAIN, power_name
from mvm.optim.optimizers import FIXED
from mvm.optim.power_ema import Snapshot
from mvm.published import CODEC, check_files, run_recipe
from mvm.recipes import PATHS, RECIPE, AnyRecipe, located, options, to_json
from mvm.training.logs import METRICS, SESSIONS
from mvm.untrusted import cut, parse_json, read_text

INIT, CHANGES = "init.json", "changes.json"
START = "start.json"  # what was said at the start
WORST_FIT = 0.1  # relative error of a profile beyond which an average is not what was asked for

# May differ when a run goes on: how it is executed, watched and kept, and where frozen weights lie, which are known by
# their fingerprints. (REPA's encoder has none, so it may not change.)
FREE = (
    *("description", "engine.", "preview.", "sample.", "data.names", "codec.cache"),
    *(name for name in PATHS if name != "repa.encoder"),
    *("train.log_every", "train.save_every", "train.snapshot_every", "train.keep", "train.keep_best"),
)
# May differ if the user says so: the learning rate and its schedule.
SCHEDULE = (
    *("train.steps", "train.lr", "train.warmup", "train.decay", "train.final", "train.cooldown"),
    *("train.decay_start", "train.decay_end"),
)
MADE = (
    *(RECIPE, INIT, CHANGES, START, METRICS, SESSIONS, "checkpoints", "snapshots", "samples"),
    *(CODEC, "tensorboard", "wandb"),
)
OWN = ("features",)  # what a run that was stopped before its first step may leave


class Change(NamedTuple):
    """An option that has another value from a step on."""

    step: int
    option: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.option} {cut(self.old)} there, {cut(self.new)} now"


def changes(old: AnyRecipe, new: AnyRecipe, step: int) -> list[Change]:
    """Return the options that differ and decide the weights."""
    if type(old) is not type(new):
        return [Change(step, "task", type(old).__name__, type(new).__name__)]
    before, after = options(located(old)), options(located(new))
    pairs = ((name, before.get(name), now) for name, now in after.items() if not name.startswith(FREE))
    return [Change(step, name, there, now) for name, there, now in pairs if there != now]


def _refuse(run: Path, changed: list[Change], allowed: bool, constant: bool) -> None:
    """Raise where something changed that may not: more steps always may, the schedule if `allowed`."""
    start = f"--init-from {shlex.quote(str(run))}"
    remedy = f"They decide its weights: use another --out, with {start} to start from its weights"
    refused = [change for change in changed if change.option not in SCHEDULE]
    if not refused and not allowed:
        remedy = "--allow-change changes them from here on"
        refused = [c for c in changed if c.option != "train.steps" or (c.new < c.old and not constant)]
    if refused:
        raise ValueError(f"{run} was started with other values: {'; '.join(map(str, refused))}. {remedy}")


def open_run(
    recipe: AnyRecipe, run: Path, resume: bool, allow_change: bool = False
) -> tuple[Path | None, list[Change]]:
    """Prepare the run directory; return the checkpoint to resume from, if any, and what changes there."""
    changed: list[Change] = []
    if (run / RECIPE).is_file():
        if not resume:
            raise ValueError(f"{run} already holds a run; give --resume to continue it, or another --out")
        newest = checkpoint.latest(run)
        step = 0 if newest is None else checkpoint.read_manifest(newest)["step"]
        if recipe.train.steps < step:
            raise ValueError(f"train.steps={recipe.train.steps}: {run} is already at step {step}; give more steps")
        changed = changes(run_recipe(run), recipe, step)
        _refuse(run, changed, allow_change, recipe.train.decay in FIXED)
    elif checkpoint.latest(run) is not None:
        raise ValueError(f"{run} holds checkpoints but no {RECIPE}; restore that file, or give another --out")
    elif run.is_dir() and any(entry.name not in OWN and not is_leftover(entry) for entry in run.iterdir()):
        raise ValueError(f"--out {run} is a folder with other files in it; give a new one")
    for folder in (run, run / "checkpoints", run / "snapshots", run / "samples"):
        recover_all(folder)
    return checkpoint.latest(run), changed


def require_in_place(held: Held | None) -> None:
    """Raise where the run directory was moved or removed while it trains; held: the main process has it locked."""
    if held is None or held.in_place:
        return
    now = held.where()
    there = f"moved to {now}; continue with: mvm train --resume {shlex.quote(now)}" if now else "moved away or removed"
    raise ValueError(f"{held.folder} was, while it trained, {there}. Nothing was written since")


def clear(run: Path) -> None:
    """Remove what a run has written that failed in its first step, so that it can be started again."""
    for entry in run.iterdir():
        if entry.name in MADE:
            remove(entry) if entry.is_dir() else entry.unlink()


def note_changes(run: Path, changed: list[Change]) -> None:
    """Append to the list of what was changed when the run was resumed."""
    if changed:
        path = run / CHANGES
        before = parse_json(read_text(path)) if path.is_file() else []
        write_text(path, json.dumps([*before, *(change._asdict() for change in changed)], indent=2) + "\n")


def rebuild(run: Path, recipe: AnyRecipe, width: float, step: int) -> tuple[checkpoint.Weights, float]:
    """Return the power-function average of relative width `width` at step `step`, and its relative profile error."""
    stored: dict[tuple[Path, str], Snapshot] = {}  # the averages up to `step`, by their files
    for folder in sorted((run / "snapshots").glob("step-*")):
        at = checkpoint.read_manifest(folder)["step"]
        for stored_width in recipe.train.power if at <= step else ():
            stored[folder, power_name(stored_width)] = Snapshot(at, power_ema.exponent(stored_width))
    if not stored:
        remedy = "train with --train.power 0.05,0.1 --train.snapshot_every N"
        raise ValueError(f"{run} has no snapshots up to step {step}; {remedy}")
    weights, error = power_ema.fit([*stored.values()], Snapshot(step, power_ema.exponent(width)))
    parts = ((weight, checkpoint.load(*file)) for weight, file in zip(weights, stored, strict=True))
    return power_ema.combine(parts), error


def export_average(run: Path, folder: Path, width: float, step: int | None = None) -> float:
    """Write a run directory that samples from the average of that width; return its relative profile error."""
    check_files(run, of_run=True)
    recipe = run_recipe(run)
    require_utf8(folder)
    recover(folder)  # a crash may have left the tidying up alone to be done
    if (folder / RECIPE).exists():  # the run itself, perhaps: its checkpoint would be replaced by the average alone
        raise ValueError(f"--out {folder} already holds a run; give another folder")
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
    with claimed(folder), atomic(folder) as temporary:
        if any(folder.iterdir()):
            raise ValueError(f"--out {folder} already holds files; give another folder")
        temporary.mkdir()
        checkpoint.save(checkpoint.step_folder(temporary, at), {MAIN: {k: v.half() for k, v in weights.items()}}, info)
        if (run / CODEC).is_dir():
            shutil.copytree(run / CODEC, temporary / CODEC)
        write_text(temporary / RECIPE, to_json(recipe))
    return error
