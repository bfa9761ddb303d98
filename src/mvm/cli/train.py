"""mvm train, mvm ema."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mvm.cli.app import INTERRUPTED, Dotted, Whole, app

if TYPE_CHECKING:
    from mvm.recipes import AnyRecipe


@app.command
def train(
    recipe: str = "",
    /,
    *,
    out: Path | None = None,
    resume: bool = False,
    auto_resume: bool = False,
    allow_change: bool = False,
    until: Whole | None = None,
    seed: Whole | None = None,
    init_from: str | None = None,
    init_weights: str = "ema",
    track: str = "auto",
    report: bool = True,
    device: str = "auto",
    overrides: Dotted = None,
) -> int:
    """Train a recipe; any of its options can be changed as --section.option VALUE, e.g. --train.lr 3e-4.

    `mvm train --resume RUN` continues a run and needs nothing else: the run knows its recipe.
    Find an option by a word: mvm options learning rate. All options of a recipe, explained: mvm recipes show NAME.

    Parameters
    ----------
    recipe
        A shipped recipe (see: mvm recipes) or a .toml file; with --resume also a run directory.
    out
        Run directory; default runs/RECIPE.
    resume
        Continue a run from its newest checkpoint, bit for bit. --train.steps may be raised to extend it.
    auto_resume
        Continue the run in OUT if there is one, else start it: for jobs that a scheduler starts again.
    allow_change
        With --resume: let the learning rate and its schedule change from here on; RUN/changes.json records it.
    until
        Pause at this step; --resume goes on.
    seed
        Seed of weights, data order and noise, instead of the recipe's.
    init_from
        Fine-tune: start from the weights of a run, an exported folder, a shipped model (mvm models) or OWNER/NAME on
        the hub, with a fresh optimizer, step 0 and warm-up. Other classes, channels and sizes are fitted.
    init_weights
        Which of its weights: ema (default), model (the raw ones), or another average it keeps.
    track
        Also send the log to tensorboard, wandb or mlflow (several with commas); none; auto: tensorboard if installed.
    report
        At the end write RUN/report.html, as `mvm report RUN` does at any time; --no-report leaves it out.
    device
        cpu, cuda, or auto: cuda where there is one.
    """
    from mvm import checkpoint
    from mvm.model import choose_device
    from mvm.published import run_recipe
    from mvm.recipes import RECIPE, override
    from mvm.training.interrupt import Terminated
    from mvm.training.loop import train as run_training

    base, folder = _asked(recipe, out, resume)
    changes = dict(overrides or {}) | ({} if seed is None else {"seed": str(seed)})
    facts = dict.fromkeys(("data.channels", "data.size", "data.classes"), "0") | {"data.names": ""}
    chosen = override(base, facts | changes if "data.path" in changes else changes)  # another folder has its own
    _require_typed(chosen, recipe, changes)
    if allow_change and not (resume or auto_resume):
        raise ValueError("--allow-change belongs to --resume: a new run has nothing to change")
    if resume and not folder.is_dir():
        raise ValueError(f"--resume: there is no run in {folder}; check the path, or leave --resume out to start one")
    if init_from is None and init_weights != "ema":
        raise ValueError(f"--init-weights {init_weights} belongs to --init-from RUN")
    main = os.environ.get("RANK", "0") == "0"  # of torchrun's processes the first alone speaks
    say: Callable[..., None] = print if main else lambda *words, file=None: None
    if resume and not (folder / RECIPE).is_file():
        say(f"mvm: {folder} was stopped before its first step; starting it anew", file=sys.stderr)
    quoted = shlex.quote(str(folder))
    own = " --network.kind " + changes["network.kind"] if changes.get("network.kind", "").startswith("module:") else ""
    go_on = f"continue with: mvm train --resume {quoted}{own}"
    try:
        run_training(
            chosen,
            folder,
            resume=resume or (auto_resume and folder.is_dir()),
            allow_change=allow_change,
            until=until,
            device=choose_device(device),
            init=None if init_from is None else (init_from, init_weights),
            track=track,
        )
    except KeyboardInterrupt as stop:
        begun = (folder / RECIPE).is_file()
        then = go_on if begun else "it had not begun, and nothing was written"
        say(f"\nmvm: stopped; {then}", file=sys.stderr)
        return 0 if isinstance(stop, Terminated) else INTERRUPTED
    newest = checkpoint.latest(folder)  # --until may lie behind it
    step = checkpoint.read_manifest(newest)["step"] if newest is not None else 0
    if report and main:
        from mvm.evaluation.run_report import write_run_report

        try:
            say(f"wrote {write_run_report(folder)}; open it in a browser")
        except (ValueError, OSError) as error:  # the run is done, whatever comes of its report
            say(f"mvm: no report: {error}", file=sys.stderr)
    done = step >= chosen.train.steps
    written = run_recipe(folder) if (folder / RECIPE).is_file() else chosen  # with what its data are
    now = [*([] if done else [go_on]), written.usage(quoted, done)]
    say(f"{folder} is at step {step} of {chosen.train.steps}; {'; '.join(filter(None, now))}")
    return 0


def _asked(name: str, out: Path | None, resume: bool) -> "tuple[AnyRecipe, Path]":
    """Return the recipe and the run directory that a command line means; a run that is resumed knows its recipe."""
    from mvm.published import run_recipe
    from mvm.recipes import RECIPE, load_recipe, shipped

    run = Path(name) if name and out is None else out if not name else None
    if run is not None and (run / RECIPE).is_file():
        if not resume:
            quoted = shlex.quote(str(run))
            raise ValueError(
                f"{run} is a run; continue it with: mvm train --resume {quoted}, or start from its weights: "
                f"mvm train RECIPE --init-from {quoted} --out NEW"
            )
        return run_recipe(run), run
    if not name:
        raise ValueError(f"--resume: {out or 'no run is named'}; give a run directory" if resume else WHICH)
    if resume and name not in shipped() and Path(name).suffix not in (".toml", ".json"):
        state = f"is no run directory (no {RECIPE} in it)" if Path(name).exists() else "does not exist"
        raise ValueError(f"--resume: '{name}' {state}; give the folder that `mvm train` wrote, e.g. runs/digits")
    recipe = load_recipe(name)
    return recipe, out or Path("runs") / recipe.name


def _require_typed(chosen: "AnyRecipe", name: str, changes: Mapping[str, str]) -> None:
    """Refuse to import a class of networks that neither the command line nor a .toml file names."""
    from mvm.recipes import Recipe

    kind = chosen.network.kind if isinstance(chosen, Recipe) else ""
    if kind.startswith("module:") and "network.kind" not in changes and not name.endswith(".toml"):
        raise ValueError(
            f"{name} names network.kind='{kind}', and what a run names is not imported by itself: if you trust it, add "
            f"--network.kind {kind}"
        )


WHICH = "mvm train RECIPE: which recipe? See: mvm recipes"


@app.command
def ema(run: Path, /, *, width: float, out: Path, step: Whole | None = None) -> int:
    """Choose the width of the power-function average after training: writes a model that samples.

    The run must have kept snapshots: mvm train RECIPE --train.power 0.05,0.1 --train.snapshot_every 1000.

    Parameters
    ----------
    run
        Run directory.
    width
        Relative width of the average (sigma_rel), e.g. 0.08 for the last 8 % of the steps or so.
    out
        Folder of the new model.
    step
        As if training had ended there; default: the newest checkpoint.
    """
    from mvm.training.rundir import export_average

    error = export_average(run, out, width, step)
    print(f"wrote {out}: power-function average of width {width:g}, its profile met within {100 * error:.2g} %")
    return 0
