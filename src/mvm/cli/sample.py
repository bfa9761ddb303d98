"""mvm sample."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mvm.cli.app import Whole, app

if TYPE_CHECKING:
    from mvm.recipes import SampleConfig


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--{option} {text}: whole numbers separated by commas are needed, e.g. 3,5") from None


def _interval(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--interval {text}: two numbers in [0, 1] are needed, e.g. 0.6,0.8") from None
    return low, high


def _settings(base: "SampleConfig", asked: Mapping[str, object], interval: str | None) -> "SampleConfig":
    """Return the recipe's settings with what was asked for; an option that would have no effect is an error."""
    given = {key: value for key, value in asked.items() if value is not None}
    if interval is not None:
        given["low"], given["high"] = _interval(interval)
    settings = replace(base, **given)
    adaptive = settings.solver == "adaptive"
    if interval is not None and settings.cfg == 1:
        raise ValueError(f"--interval {interval} acts on guidance; give its scale too, e.g. --cfg 1.5")
    if adaptive and "nfe" in given:
        raise ValueError(f"--nfe {given['nfe']}: the adaptive solver takes --tolerance and reports what it used")
    if "tolerance" in given and not adaptive:
        raise ValueError(f"--tolerance {given['tolerance']} belongs to --solver adaptive")
    return settings


@app.command
def sample(
    model: str,
    /,
    *,
    num: Whole = 16,
    nfe: Whole | None = None,
    solver: str | None = None,
    rho: float | None = None,
    cfg: float | None = None,
    interval: str | None = None,
    tolerance: float | None = None,
    classes: str = "",
    seed: Whole = 0,
    batch: Whole = 256,
    weights: str = "ema",
    checkpoint: str = "latest",
    device: str = "auto",
    out: Path = Path("samples.png"),
) -> int:
    """Sample images from a run or a shipped model. Settings not given are those of its recipe.

    Parameters
    ----------
    model
        A run directory, or the name of a shipped model.
    num
        How many images.
    nfe
        Evaluations of the network per image.
    solver
        adams (default), sa, heun, euler, euler-maruyama or adaptive.
    rho
        Noise of the reverse process: 0 is the ODE, 1 the paper's SDE, 0.75 its best.
    cfg
        Classifier-free guidance scale; 1 is none.
    interval
        Where guidance acts, LOW,HIGH in log-SNR progress, e.g. 0.6,0.8.
    tolerance
        Of each step of the adaptive solver, in place of nfe; default 1e-5.
    classes
        Class numbers to go round, e.g. 3,5; all when empty.
    seed
        Image i has seed SEED + i: the same picture whatever NUM and BATCH.
    batch
        Images at a time.
    weights
        ema, model (the raw weights), or another average that the run keeps, e.g. ema-0.999 or power-0.1.
    checkpoint
        latest, best (by the previews), or a step number.
    device
        cpu, cuda, or auto: cuda where there is one.
    out
        X.png is one grid; X.npz and X.npy are uint8 NHWC; X.zip or a folder holds PNG files.
    """
    from mvm.generate import check_output, cycle_labels, generate_all, write_images
    from mvm.model import choose_device, load
    from mvm.noise import as_seeds

    check_output(out)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    loaded = load(model, weights, checkpoint).to(choose_device(device))
    asked = {"nfe": nfe, "solver": solver, "rho": rho, "cfg": cfg, "tolerance": tolerance}
    settings = _settings(loaded.recipe.sample, asked, interval)
    labels = cycle_labels(_numbers("classes", classes), num, loaded.num_classes)
    made = generate_all(loaded, labels, as_seeds(range(seed, seed + num), num), settings, batch=batch)
    write_images(out, made.images, labels)
    print(f"wrote {num} images to {out}; {settings.solver}, {made.nfe} evaluations, {made.passes} network passes each")
    return 0
