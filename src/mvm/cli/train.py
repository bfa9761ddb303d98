"""mvm train, mvm tune, mvm ema."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import (
    IMAGES,
    INTERRUPTED,
    OUTPUT,
    SAMPLING,
    TRAIN,
    TRAINING,
    Device,
    Dotted,
    Download,
    GuidanceOptions,
    Whole,
    command,
    is_first,
    say_from_first,
    warn_from_first,
)
from mvm.options import at_least

if TYPE_CHECKING:
    from mvm.recipes import AnyRecipe


@command(
    TRAIN,
    "mvm train digits  # to runs/digits",
    "mvm train cifar10 --train.lr 3e-4 --out runs/a  # change an option",
    "mvm train --resume runs/a --train.steps 300000  # continue for longer",
    "mvm train digits --init-from digits --out runs/b  # fine-tune",
)
def train(
    recipe: str = "",
    /,
    *,
    out: Annotated[Path | None, OUTPUT] = None,
    resume: Annotated[bool, TRAINING] = False,
    auto_resume: Annotated[bool, TRAINING] = False,
    allow_change: Annotated[bool, TRAINING] = False,
    until: Annotated[Whole | None, TRAINING] = None,
    seed: Annotated[Whole | None, TRAINING] = None,
    init_from: Annotated[str | None, TRAINING] = None,
    init_weights: Annotated[str, TRAINING] = "ema",
    track: Annotated[str, OUTPUT] = "auto",
    report: Annotated[bool, OUTPUT] = True,
    device: Device = "auto",
    overrides: Dotted = None,
) -> int:
    """Train a model from a recipe, or continue a run.

    Every option of the recipe can be changed by --section.option VALUE, e.g. --train.lr 3e-4. Find options by words
    with `mvm options learning rate`; `mvm recipes show NAME` explains all options of a recipe.

    `mvm train --resume RUN` continues a run and needs nothing else, because the run holds its recipe.

    Parameters
    ----------
    recipe
        A shipped recipe (see `mvm recipes`) or a .toml file; with --resume also a run directory.
    out
        Run directory. Default: runs/RECIPE.
    resume
        Continue a run from its newest checkpoint, bit for bit. --train.steps may be raised to train for longer.
    auto_resume
        Continue the run in OUT if there is one, else start it. For jobs that a scheduler restarts.
    allow_change
        With --resume: allow another learning rate or schedule from here on. RUN/changes.json records the change.
    until
        Pause after this step; --resume continues.
    seed
        Seed of weights, data order and noise. Default: the recipe's.
    init_from
        Fine-tune: start from the weights of a run, an exported folder, a shipped model or OWNER/NAME on the Hub.
        Optimizer, step count and warm-up start anew. Layers are fitted to other classes, channels and sizes.
    init_weights
        Weights to start from: ema, model (the raw weights), or another average that the model keeps.
    track
        Also log to tensorboard, wandb or mlflow, several separated by commas; or none. auto: tensorboard if installed.
    report
        Write RUN/report.html at the end, as `mvm report RUN` does.
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
        raise ValueError("--allow-change belongs to --resume; a new run takes any options without it")
    if resume and not folder.is_dir():
        raise ValueError(f"--resume: there is no run in {folder}; check the path, or leave --resume out to start one")
    if init_from is None and init_weights != "ema":
        raise ValueError(f"--init-weights {init_weights} belongs to --init-from; add --init-from RUN, or leave it out")
    quoted = shlex.quote(str(folder))
    own = " --network.kind " + changes["network.kind"] if changes.get("network.kind", "").startswith("module:") else ""
    go_on = f"continue with: mvm train --resume {quoted}{own}"
    try:
        begun = resume or (auto_resume and folder.is_dir())
        init = None if init_from is None else (init_from, init_weights)
        how: dict[str, Any] = {"resume": begun, "allow_change": allow_change, "until": until, "init": init}
        run_training(chosen, folder, device=choose_device(device), track=track, **how)
    except KeyboardInterrupt as stop:
        then = go_on if (folder / RECIPE).is_file() else "training had not begun, and nothing was written"
        say_from_first(f"\nmvm: stopped; {then}", error=True)
        return 0 if isinstance(stop, Terminated) else INTERRUPTED
    newest = checkpoint.latest(folder)  # --until may lie behind it
    step = checkpoint.read_manifest(newest)["step"] if newest is not None else 0
    if report and is_first():
        from mvm.evaluation.run_report import write_run_report

        try:
            print(f"wrote {write_run_report(folder)}; open it in a browser")
        except (ValueError, OSError) as error:  # the run is done, whatever comes of its report
            warn_from_first(f"no report: {error}")
    done = step >= chosen.train.steps
    written = run_recipe(folder) if (folder / RECIPE).is_file() else chosen  # with what its data are
    advice = "; ".join(filter(None, ["" if done else go_on, written.usage(quoted, done)]))
    say_from_first(f"{folder} is at step {step} of {chosen.train.steps}; {advice}")
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
            f"{name} has network.kind='{kind}', a class that is imported only if the command names it; if you trust "
            f"it, add --network.kind {kind}"
        )


WHICH = "mvm train needs a RECIPE; for the names see: mvm recipes"


@command(
    TRAIN,
    "mvm ema runs/a --width 0.08 --out runs/b  # another average",
    "mvm ema runs/a --width 0.1 --step 50000 --out runs/c  # as of a step",
)
def ema(
    run: Path,
    /,
    *,
    width: Annotated[float, TRAINING],
    out: Annotated[Path, OUTPUT],
    step: Annotated[Whole | None, TRAINING] = None,
) -> int:
    """Choose the width of the power-function average of the weights after training, and write it as a model.

    The run must have stored snapshots: mvm train RECIPE --train.power 0.05,0.1 --train.snapshot_every 1000.

    Parameters
    ----------
    run
        Run directory.
    width
        Relative width of the average (sigma_rel, as in EDM2). 0.08 averages roughly the last 8 % of the steps.
    out
        Folder of the new model.
    step
        Compute the average as if training had ended at this step. Default: the newest checkpoint.
    """
    from mvm.training.rundir import export_average

    error = export_average(run, out, width, step)
    print(f"wrote {out}: power-function average of width {width:g}, its profile met within {100 * error:.2g} %")
    return 0


@command(
    TRAIN,
    "mvm tune runs/a  # for 8 evaluations",
    "mvm tune runs/a --nfe 5,8,13 --cfg 1.5  # for several NFE, guided",
)
def tune(
    model: str,
    /,
    *,
    nfe: Annotated[str, SAMPLING] = "8",
    guidance: GuidanceOptions = GuidanceOptions(),
    num: Annotated[Whole, IMAGES] = 16,
    rounds: Annotated[Whole, TRAINING] = 6,
    long: Annotated[Whole, Parameter(name="--reference-nfe"), TRAINING] = 100,
    seed: Annotated[int, IMAGES] = 0,
    device: Device = "auto",
    allow_download: Download = False,
) -> int:
    """Fit the time steps of the default solver to a model, and store them with it.

    They are then used whenever the model is sampled as an ODE with that number of evaluations and that guidance, and
    no solver is named. A round takes (nfe + 4) nfe evaluations of NUM images: minutes on a CPU for a small model.

    Parameters
    ----------
    model
        A run directory or an exported folder. Export a shipped model first.
    nfe
        Numbers of function evaluations to fit time steps for, separated by commas.
    num
        Number of images for the fit. As many others test it.
    rounds
        Largest number of iterations of the fit.
    long
        Number of evaluations of the reference solution.
    seed
        Seed of the images.
    """
    import torch
    from tqdm import tqdm

    from mvm import noise
    from mvm.files import claimed
    from mvm.generate import cycle_labels
    from mvm.model import choose_device, load
    from mvm.published import is_published
    from mvm.published.tuned import Entry, read_tuned, write_tuned
    from mvm.recipes import RECIPE
    from mvm.solver import adams, sample
    from mvm.solver.tune import tune as fit

    folder, quoted = Path(model), shlex.quote(model)
    if not (folder / RECIPE).is_file() and not is_published(folder):
        raise ValueError(
            f"'{model}' is no folder to store time steps in; export it first: mvm export {quoted} --out DIR"
        )
    counts = [int(part) for part in nfe.split(",") if part.strip().isdigit()]
    if not counts:
        raise ValueError(f"--nfe {nfe}: whole numbers separated by commas are needed, e.g. 5,8,13")
    at_least("num", num, 1)
    with claimed(folder):
        loaded = load(model, allow_download=allow_download).to(choose_device(device))
        settings = loaded.recipe.sample
        if not settings.unnamed:
            raise ValueError(
                f"'{model}' is sampled by '{settings.solver}' with sample.tuned={settings.tuned}, as its recipe says, "
                "and fitted times are for adams alone; sample it with --solver adams instead"
            )
        settings = guidance.settings(settings).canonical()
        loaded.recipe.require_guidance("cfg", settings.cfg)
        loaded.require_labels("mvm tune")
        labels = cycle_labels((), 2 * num, loaded.num_classes).to(loaded.device)
        x = noise.initial(noise.derive(seed, torch.arange(2 * num)).to(loaded.device), loaded.sample_shape)
        entries, weights = read_tuned(folder, loaded.origin["sha256"]), loaded.origin["sha256"]
        for count in counts:
            how: dict[str, Any] = {"schedule": loaded.schedule, "guidance": settings.guidance()}
            with tqdm(total=2 + rounds * (count + 4), desc=f"tune, {count} evaluations", unit="run") as bar:

                def on_solve(_: int, rmse: float, bar: tqdm = bar) -> None:
                    bar.update()
                    bar.set_postfix_str(f"RMSE {rmse:.4f}")

                limits: dict[str, Any] = {"reference_nfe": long, "rounds": rounds}
                fitted = fit(loaded, x[:num], count, condition=labels[:num], on_solve=on_solve, **limits, **how)
            cells = ((long, adams()), (count, adams()), (count, fitted.solver))
            exact, *approximate = (
                sample(loaded, x[num:], nfe=nfe, solver=solver, condition=labels[num:], **how) for nfe, solver in cells
            )
            default, tuned = (float((images - exact).square().mean().sqrt()) for images in approximate)
            print(f"nfe {count}: RMSE to {long} evaluations, {num} images not fitted to: {default:.4f} -> {tuned:.4f}")
            if tuned >= default:
                print(f"nfe {count}: the default time steps are as good; nothing is stored")
                continue
            entry = Entry(
                count, settings.cfg, settings.low, settings.high, settings.internal, fitted.solver, default, tuned
            )
            entries[entry.key] = entry
            write_tuned(folder, weights, entries)
            print(f"stored in {folder / 'tuned.json'}; mvm sample {quoted} --nfe {count} uses it")
    return 0
