"""mvm train, mvm ema."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mvm.cli.app import INTERRUPTED, Dotted, Whole, app

if TYPE_CHECKING:
    from mvm.recipes import AnyRecipe


@app.command
def train(
    recipe: str,
    /,
    *,
    out: Path | None = None,
    resume: bool = False,
    until: Whole | None = None,
    seed: Whole | None = None,
    init_from: Path | None = None,
    init_weights: str = "ema",
    device: str = "auto",
    overrides: Dotted = None,
) -> int:
    """Train a recipe; any of its options can be changed as --section.option VALUE, e.g. --train.lr 3e-4.

    Find an option by a word: mvm options learning rate. All options of a recipe, explained: mvm recipes show NAME.

    Parameters
    ----------
    recipe
        A shipped recipe (see: mvm recipes) or a .toml file.
    out
        Run directory; default runs/RECIPE.
    resume
        Continue the run in OUT from its newest checkpoint, bit for bit.
    until
        Pause at this step; --resume goes on.
    seed
        Seed of weights, data order and noise, instead of the recipe's.
    init_from
        Start from the weights of another run, with a fresh optimizer, step 0 and warm-up.
    init_weights
        Which of its weights: ema (default), model (the raw ones), or another average it keeps.
    device
        cpu, cuda, or auto: cuda where there is one.
    """
    from mvm.model import choose_device
    from mvm.recipes import RECIPE, load_recipe, override
    from mvm.training import checkpoint
    from mvm.training.interrupt import Terminated
    from mvm.training.loop import train as run_training

    changes = dict(overrides or {}) | ({} if seed is None else {"seed": str(seed)})
    chosen = override(load_recipe(recipe), changes)
    folder = out or Path("runs") / chosen.name
    tell = _teller()
    if resume and not (folder / RECIPE).is_file():
        tell(f"mvm: nothing to resume in {folder}; starting a new run there", sys.stderr)
    if init_from is None and init_weights != "ema":
        raise ValueError(f"--init-weights {init_weights} belongs to --init-from RUN")
    init = None if init_from is None else (init_from, init_weights)
    try:
        run_training(chosen, folder, resume=resume, until=until, device=choose_device(device), init=init)
    except KeyboardInterrupt as stop:
        tell("\nmvm: stopped; go on with the same command and --resume", sys.stderr)
        return 0 if isinstance(stop, Terminated) else INTERRUPTED
    newest = checkpoint.latest(folder)  # --until may lie behind it
    step = checkpoint.read_manifest(newest)["step"] if newest is not None else 0
    tell(f"{folder} is at step {step} of {chosen.train.steps}; {_next(chosen, folder, step)}")
    return 0


def _next(recipe: "AnyRecipe", folder: Path, step: int) -> str:
    """Return what can be done with a run now."""
    from mvm.recipes import DecoderRecipe

    if not isinstance(recipe, DecoderRecipe):
        return f"sample: mvm sample {folder} --out grid.png"
    if step < recipe.train.steps:
        return "go on with the same command and --resume"
    return f"the autoencoder is {folder / 'rae'}: --codec.kind rae --codec.path {folder / 'rae'}"


def _teller() -> Callable[..., None]:
    """Return print for the first of torchrun's processes, silence for the others."""
    if os.environ.get("RANK", "0") != "0":
        return lambda text, file=None: None
    return lambda text, file=None: print(text, file=file)


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
    from mvm.training.snapshots import export_average

    error = export_average(run, out, width, step)
    print(f"wrote {out}: power-function average of width {width:g}, its profile met within {100 * error:.2g} %")
    return 0
