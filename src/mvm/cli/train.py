"""mvm train, mvm tune, mvm ema."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import INTERRUPTED, Dotted, GuidanceOptions, Whole, app, is_first, say_from_first, warn_from_first
from mvm.options import at_least

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
    quoted = shlex.quote(str(folder))
    own = " --network.kind " + changes["network.kind"] if changes.get("network.kind", "").startswith("module:") else ""
    go_on = f"continue with: mvm train --resume {quoted}{own}"
    try:
        begun = resume or (auto_resume and folder.is_dir())
        init = None if init_from is None else (init_from, init_weights)
        how: dict[str, Any] = {"resume": begun, "allow_change": allow_change, "until": until, "init": init}
        run_training(chosen, folder, device=choose_device(device), track=track, **how)
    except KeyboardInterrupt as stop:
        then = go_on if (folder / RECIPE).is_file() else "it had not begun, and nothing was written"
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


@app.command
def tune(
    model: str,
    /,
    *,
    nfe: str = "8",
    guidance: GuidanceOptions = GuidanceOptions(),
    num: Whole = 16,
    rounds: Whole = 6,
    long: Annotated[Whole, Parameter(name="--reference-nfe")] = 100,
    seed: int = 0,
    device: str = "auto",
    allow_download: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Fit the default solver's times to a model, on its own trajectories, and store them with it.

    From then on they are used wherever the model is sampled as an ODE with that number of evaluations and guidance,
    and no solver is named. The command takes (nfe + 4) nfe evaluations of NUM images a round: minutes on a CPU for a
    small model.

    Parameters
    ----------
    model
        A run directory or an exported model. One that ships in the package is exported first.
    nfe
        Numbers of evaluations to fit times for, separated by commas.
    num
        Images that the times are fitted to; as many others judge them.
    rounds
        Steps of the fit at most.
    long
        Evaluations of the run that counts as exact.
    seed
        Seed of the images.
    device
        cpu, cuda, or auto: cuda where there is one.
    allow_download
        Of a run that holds no autoencoder: open the one that it names elsewhere.
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
        raise ValueError(f"'{model}' is no folder to store times in; first: mvm export {quoted} --out DIR")
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
                print(f"nfe {count}: the default is as good; nothing is stored for it")
                continue
            entry = Entry(
                count, settings.cfg, settings.low, settings.high, settings.internal, fitted.solver, default, tuned
            )
            entries[entry.key] = entry
            write_tuned(folder, weights, entries)
            print(f"stored in {folder / 'tuned.json'}; mvm sample {quoted} --nfe {count} uses it")
    return 0
