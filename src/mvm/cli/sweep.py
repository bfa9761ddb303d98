"""mvm sweep, mvm compare."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from mvm.cli.app import INTERRUPTED, Whole, app, parse_interval, say_from_first
from mvm.cli.judge import jackknife_blocks, sources

if TYPE_CHECKING:
    from mvm.evaluation.evaluate import Side
    from mvm.model import Model

V = TypeVar("V")


def _values(option: str, text: str, kind: Callable[[str], V]) -> tuple[V, ...]:
    """Return the values in "a,b,c"."""
    try:
        found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found:
        raise ValueError(f"--{option} {text}: values separated by commas are needed, e.g. 13,26")
    return found


def _reference(ref: str, model: "Model") -> "Side":
    """Return the asked reference, or the images the run was trained on."""
    from mvm.evaluation.evaluate import Side, open_side
    from mvm.evaluation.images import of_training

    return open_side(ref) if ref else Side(model.recipe.data.name, of_training(model))


def _command() -> str:
    """Return the command line, without where the program lies."""
    return " ".join(["mvm", *sys.argv[1:]])


@app.command
def sweep(
    model: str,
    /,
    *,
    ref: str = "",
    metrics: str = "",
    solvers: str | None = None,
    nfe: str = "8,13,26",
    rho: str = "0,1",
    cfg: str = "1",
    internal: str = "1",
    share: str = "0",
    t_min: str = "",
    interval: tuple[str, ...] = ("0,1",),
    num: Annotated[Whole, Parameter(alias="-n")] = 1000,
    seed: Whole = 0,
    repeats: Whole = 1,
    labels: str = "balanced",
    classes: str = "",
    weights: str = "ema",
    checkpoint: str = "latest",
    inception: str = "",
    encoder: str = "",
    jackknife: Whole = 0,
    batch: Whole = 250,
    precision: str = "fp32",
    compile: bool = False,
    kernels: bool = True,
    keep_images: bool = False,
    device: str = "auto",
    out: Path | None = None,
) -> int:
    """Sample a model by many samplers on common seeds and labels, judge every cell, write one report.

    Made again after an interruption it goes on where it was; cells already computed are not computed again, so that
    axes and metrics can be added to an old sweep. Under torchrun the processes share the work.

    Parameters
    ----------
    model
        A run directory, or the name of a shipped model.
    ref
        What images are compared with (see: mvm eval); default: the images the run was trained on.
    metrics
        See: mvm eval. Default: fid for colour images, fd-pixels for grey ones.
    solvers
        Names separated by commas, as of mvm sample, each with its own times; default: adams, with those of mvm tune
        where the model has some. Where --rho has 0, solvers of the ODE alone have cells of 0 alone.
    nfe
        Evaluations of the network, e.g. 13,26,39.
    rho
        Noise of the reverse process, e.g. 0,0.75,1: 0 is the ODE.
    cfg
        Guidance scales, e.g. 1,1.2: 1 is none.
    internal
        Scales of internal guidance, by the network's inner head: 1 is none.
    share
        Parts of the evaluations that take a DDT's backbone from an earlier one, e.g. 0,0.5.
    t_min
        Last times that sa evaluates, e.g. 1e-3,1e-4; default 1e-3.
    interval
        Where guidance acts, LOW,HIGH in log-SNR progress (0 noise, 1 image); can be given several times.
    num
        Images in each cell.
    seed
        Image i has seed SEED + i, in every cell.
    repeats
        Sample every cell so many times on seeds of their own: the mean, and its error.
    labels
        balanced: classes in turn; random: drawn from each image's seed.
    classes
        Classes to take, by number or name, e.g. 3,5 or cat,dog; all when empty.
    weights
        ema, model (the raw weights), or another average that the run keeps.
    checkpoint
        latest, best, or a step number.
    inception
        Weights of the FID network: a file or a folder; default: the cache, or a download.
    encoder
        For fd-dino: a hub name or folder; default facebook/dinov2-large.
    jackknife
        Blocks to estimate the error of Frechet distances with, and of differences between cells, e.g. 20; 0: no error.
    batch
        Images at a time: what an interruption loses.
    precision
        Of sampling: fp32, tf32 or bf16; int8 on a CPU. Features are always float32.
    compile
        Compile the network first; pays on a GPU.
    kernels
        With --compile on a GPU in bf16: kernels written by hand.
    keep_images
        Keep the images of every cell in OUT/work; else they go once they are judged.
    device
        cpu, cuda, or auto: cuda where there is one.
    out
        Folder of the sweep; default runs/sweep-MODEL.
    """
    from mvm.distributed.processes import processes
    from mvm.evaluation.gather import Judge
    from mvm.evaluation.sweep import Axes, Sweep, default_metrics
    from mvm.generate import Draw, Sampler, class_numbers
    from mvm.metrics.measures import parse_metrics
    from mvm.model import choose_device, load
    from mvm.options import at_least

    axes = Axes(
        _values("solvers", "adams" if solvers is None else solvers, str),
        _values("nfe", nfe, int),
        _values("rho", rho, float),
        _values("cfg", cfg, float),
        tuple(map(parse_interval, interval)),
        _values("internal", internal, float),
        _values("share", share, float),
        *((_values("t-min", t_min, float),) if t_min else ()),
        tuned=solvers is None,
    )
    at_least("repeats", repeats, 1)
    at_least("num", num, 2)  # a covariance needs two
    cells = axes.cells()
    if interval != ("0,1",) and not any(settings.guided for settings in cells):
        raise ValueError(f"--interval {' '.join(interval)} acts on guidance; give its scale too, e.g. --cfg 1,1.5")
    if t_min and not any(settings.takes_t_min for settings in cells):
        raise ValueError(f"--t-min {t_min} belongs to the solver sa; give it too: --solvers {solvers or 'adams'},sa")
    draw = Draw(num, seed, labels, batch=batch)
    folder = out or Path("runs") / f"sweep-{Path(model).name}"
    with processes(choose_device(device)) as place:
        loaded = load(model, weights, checkpoint).to(place.device)
        draw = replace(draw, classes=class_numbers(classes, loaded.classes))
        judge = Judge(sources(inception, encoder), place, batch, blocks=jackknife_blocks(jackknife))
        work = Sweep(
            Sampler(loaded, precision, compile=compile, kernels=kernels),
            draw,
            judge,
            _reference(ref, loaded),
            parse_metrics(metrics or default_metrics(loaded)),
            folder,
            repeats,
            keep_images,
            _command(),
        )
        try:
            work.run(cells)
        except KeyboardInterrupt:
            say_from_first("\nmvm: stopped; the same command goes on where it was", error=True)
            return INTERRUPTED
    say_from_first(f"wrote {folder / 'report.html'}: {len(cells)} cells of {num:,} images")
    return 0


@app.command
def compare(
    model_a: str,
    model_b: str,
    /,
    *,
    ref: str = "",
    metrics: str = "",
    num: Annotated[Whole, Parameter(alias="-n")] = 1000,
    seed: Whole = 0,
    labels: str = "balanced",
    nfe: Whole | None = None,
    solver: str | None = None,
    rho: float | None = None,
    cfg: float | None = None,
    inception: str = "",
    encoder: str = "",
    blocks: Whole = 20,
    weights: str = "ema",
    checkpoint: str = "latest",
    batch: Whole = 250,
    precision: str = "fp32",
    device: str = "auto",
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Compare two models on the same seeds and labels: figures of both, differences with 95 % intervals.

    Parameters
    ----------
    model_a
        A run directory, or the name of a shipped model.
    model_b
        Another, of the same image shape and classes.
    ref
        What both are compared with (see: mvm eval); default: the images A was trained on.
    metrics
        See: mvm eval. Default: fid for colour images, fd-pixels for grey ones.
    num
        Images of each.
    seed
        Image i has seed SEED + i, of both.
    labels
        balanced or random.
    nfe
        Evaluations of the network; default: each recipe's own.
    solver
        Used as given; default: each recipe's own, adams with the times of mvm tune where a model has some.
    rho
        Default: each recipe's own.
    cfg
        Guidance scale; default: each recipe's own.
    inception
        Weights of the FID network: a file or a folder; default: the cache, or a download.
    encoder
        For fd-dino: a hub name or folder; default facebook/dinov2-large.
    blocks
        Into which pairs are dealt for the intervals.
    weights
        ema, model (the raw weights), or another average that both runs keep.
    checkpoint
        latest, best, or a step number.
    batch
        Images at a time.
    precision
        Of sampling: fp32, tf32 or bf16; int8 on a CPU.
    device
        cpu, cuda, or auto: cuda where there is one.
    json_file
        Write the figures there as well.
    """

    from mvm.distributed.processes import processes
    from mvm.evaluation.compare import as_table, compare, write
    from mvm.evaluation.gather import Judge
    from mvm.evaluation.images import of_model
    from mvm.evaluation.sweep import default_metrics
    from mvm.generate import Draw
    from mvm.metrics.measures import parse_metrics
    from mvm.model import choose_device, load
    from mvm.options import at_least

    at_least("blocks", blocks, 2)
    if json_file is not None:
        json_file.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    asked = {"nfe": nfe, "solver": solver, "rho": rho, "cfg": cfg}
    with processes(choose_device(device)) as place:
        models = [load(name, weights, checkpoint).to(place.device) for name in (model_a, model_b)]
        draw = Draw(num, seed, labels, batch=batch)
        sets = [
            of_model(model, draw, model.recipe.sample.asked(**asked), precision=precision, name=Path(name).name)
            for model, name in zip(models, (model_a, model_b), strict=True)
        ]
        judge = Judge(sources(inception, encoder), place, batch, blocks=blocks)
        names = parse_metrics(metrics or default_metrics(models[0]))
        found = compare(judge, sets[0], sets[1], _reference(ref, models[0]), names)
        for warning in found.facts["warnings"]:
            say_from_first(f"mvm: {warning}", error=True)
        say_from_first(as_table(found.differences))
        if json_file is not None and place.main:
            write(json_file, found)
    return 0
