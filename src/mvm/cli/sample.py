"""mvm sample."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mvm.cli.app import INTERRUPTED, Whole, app, parse_interval, say_from_first

if TYPE_CHECKING:
    from mvm.recipes import SampleConfig

# Options as other projects call them.
USUAL = {
    **dict.fromkeys(("steps", "num_steps", "num_inference_steps", "num_sampling_steps", "sampling_steps"), "--nfe"),
    **dict.fromkeys(("guidance_scale", "cfg_scale", "scale", "guidance"), "--cfg"),
    **dict.fromkeys(("n", "count", "num_images", "num_samples", "num_images_per_prompt"), "--num"),
    **dict.fromkeys(("batch_size", "bs"), "--batch"),
    **dict.fromkeys(("sampler", "scheduler"), "--solver"),
    **dict.fromkeys(("output", "output_dir", "out_dir"), "--out"),
}


def _settings(base: "SampleConfig", asked: Mapping[str, object], interval: str | None) -> "SampleConfig":
    """Return the recipe's settings with what was asked for; an option that would have no effect is an error."""
    given = {key: value for key, value in asked.items() if value is not None}
    if interval is not None:
        given["low"], given["high"] = parse_interval(interval)
    settings = base.asked(**given)
    if interval is not None and not settings.guided:
        raise ValueError(f"--interval {interval} acts on guidance; give its scale too, e.g. --cfg 1.5")
    if settings.takes_tolerance and "nfe" in given:
        raise ValueError(
            f"--nfe {given['nfe']}: the {settings.solver} solver takes --tolerance and reports what it used"
        )
    if "tolerance" in given and not settings.takes_tolerance:
        raise ValueError(f"--tolerance {given['tolerance']} belongs to --solver adaptive or dopri5")
    if "t_min" in given and not settings.takes_t_min:
        raise ValueError(f"--t-min {given['t_min']} belongs to --solver sa")
    return settings


MANY = 5000  # evaluations whose plan takes a second and more


@app.command
def sample(
    model: str,
    /,
    *,
    num: Annotated[Whole, Parameter(alias="-n")] = 16,
    nfe: Whole | None = None,
    solver: str | None = None,
    rho: float | None = None,
    cfg: float | None = None,
    internal: float | None = None,
    share: float | None = None,
    interval: str | None = None,
    tolerance: float | None = None,
    t_min: float | None = None,
    labels: str = "balanced",
    classes: str = "",
    seed: Whole = 0,
    batch: Whole = 256,
    precision: str = "fp32",
    compile: bool = False,
    kernels: bool = True,
    weights: str = "ema",
    checkpoint: str = "latest",
    device: str = "auto",
    out: Path = Path("samples.png"),
) -> int:
    """Sample images from a run or a shipped model. Settings not given are those of its recipe.

    Under torchrun the processes share the images. Until OUT is written, parts are kept in a hidden folder beside it:
    after Ctrl-C or a crash the same command goes on from there. Beside all but a .png, OUT.json tells what made it.

    Parameters
    ----------
    model
        A run directory, an exported folder, the name of a shipped model (mvm models), or OWNER/NAME on the hub.
    num
        How many images. Under torchrun write -n, since torchrun takes --num for an option of its own.
    nfe
        Evaluations of the network per image.
    solver
        adams, sa, heun, euler, euler-maruyama, adaptive or dopri5; to compare with: dpm++2m, dpm++3m, unipc,
        deis, ipndm, and with noise too sde-dpm++2m, sde-dpm++3m, sa-official, er-sde, seeds2, seeds3, edm-churn.
        It is used as given; default: the recipe's, which is adams unless it says otherwise, with the times of mvm tune
        where the model has some.
    rho
        Noise of the reverse process: 0 is the ODE, 1 the paper's SDE, 0.75 its best.
    cfg
        Classifier-free guidance scale; 1 is none.
    internal
        Scale of internal guidance, by the network's inner head, in one pass; 1 is none.
    share
        Part of the evaluations that take a DDT's backbone from an earlier one, e.g. 0.5; steps chosen by similarity.
    interval
        Where guidance acts, LOW,HIGH in log-SNR progress (0 noise, 1 image), e.g. 0.6,0.8.
    tolerance
        Of each step of adaptive and dopri5, in place of nfe; default 1e-5.
    t_min
        The last time that sa evaluates; default 1e-3.
    labels
        balanced goes round the classes; random draws one for each image, from its seed.
    classes
        Classes to go round or to draw from, by number or name, e.g. 3,5 or "english springer,tench"; all when empty.
    seed
        Image i has seed SEED + i: the same picture whatever NUM and BATCH.
    batch
        Images at a time, in each process.
    precision
        fp32 (default), or on a GPU tf32 or bf16, on a CPU int8: faster, but bf16 and int8 move figures such as FID.
    compile
        Compile the network first: on a GPU, for many images.
    kernels
        With --compile on a GPU in bf16: kernels written by hand.
    weights
        ema, model (the raw weights), or another average that the run keeps, e.g. ema-0.999 or power-0.1.
    checkpoint
        latest, best (by the previews), or a step number.
    device
        cpu, cuda, or auto: cuda where there is one.
    out
        X.png is one grid, a class a row; X.npz and X.npy are uint8 NHWC; X.parquet, X.zip or a folder holds PNG files.
    """
    from mvm.distributed.processes import processes
    from mvm.files import remove
    from mvm.generate import Draw, Sampler, class_numbers, takes_tuned_times
    from mvm.model import choose_device, load
    from mvm.samples import check_set, parts_beside, sample_parts, write_set

    check_set(out, num)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    draw = Draw(num, seed, labels, batch=batch)  # refuses what it can before the model is read
    parts_folder = parts_beside(out)
    asked = {
        "nfe": nfe,
        "solver": solver,
        "rho": rho,
        "cfg": cfg,
        "internal": internal,
        "share": share,
        "tolerance": tolerance,
        "t_min": t_min,
    }
    try:
        with processes(choose_device(device)) as place:
            loaded = load(model, weights, checkpoint).to(place.device)
            draw = replace(draw, classes=class_numbers(classes, loaded.classes))
            settings = _settings(loaded.recipe.sample, asked, interval)
            if settings.nfe >= MANY and not settings.takes_tolerance:
                say_from_first(f"mvm: {settings.nfe:,} evaluations an image; planning them takes a while", error=True)
            sampler = Sampler(loaded, precision, compile=compile, kernels=kernels)
            tuned = takes_tuned_times(loaded, settings)
            parts = sample_parts(sampler, draw, settings, parts_folder, place=place)
        if place.main:  # the others need not wait
            write_set(parts, out, names=loaded.classes)
            remove(parts_folder)
    except KeyboardInterrupt:
        say_from_first("\nmvm: stopped; the same command goes on", error=True)
        return INTERRUPTED
    cost = f"{parts.nfe} evaluations, {parts.passes} network passes each"
    say_from_first(f"wrote {num} images to {out}; {settings.solver}{', tuned' * tuned}, {cost}")
    return 0
