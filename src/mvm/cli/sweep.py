"""mvm sweep, mvm compare."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter

from mvm.cli.app import (
    INTERRUPTED,
    KINDS,
    Device,
    Drawing,
    JsonFile,
    SamplerOptions,
    Whole,
    app,
    parse_interval,
    require_used,
    say_from_first,
    with_sampler_options,
)
from mvm.cli.judge import Judging, jackknife_blocks
from mvm.settings import OPTIONS, SampleConfig

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


_KINDS = dict.fromkeys(OPTIONS, str) | {
    "solver": Annotated[str, Parameter(name=("--solvers", "--solver"))],
    "interval": Annotated[tuple[str, ...], Parameter(negative="")],
}


@Parameter(name="*", group="Sampler")
@with_sampler_options(_KINDS)
class Axes:
    """The axes of a sweep: of each sampler option the values that are tried, None where the sweep's own are."""

    def cells(self) -> list[SampleConfig]:
        """Return the settings of every cell; an option that would have no effect on any of them is an error."""
        from mvm.evaluation.cells import combinations

        given = {name: value for name, value in vars(self).items() if value is not None}
        named = {"solver": "solvers", "t_min": "t-min"}
        axes = {
            name: tuple(map(parse_interval, value))
            if name == "interval"
            else _values(named.get(name, name), value, KINDS[name])
            for name, value in given.items()
        }
        cells = combinations(**axes)
        require_used({**given, "interval": " ".join(given["interval"])} if "interval" in given else given, cells)
        return cells


@app.command
def sweep(
    model: str,
    /,
    *,
    axes: Axes = Axes(),
    drawing: Drawing = Drawing(),
    judging: Judging = Judging(),
    num: Annotated[Whole, Parameter(alias="-n")] = 1000,
    repeats: Whole = 1,
    jackknife: Whole = 0,
    batch: Whole = 250,
    keep_images: bool = False,
    device: Device = "auto",
    out: Path | None = None,
) -> int:
    """Sample a model by many samplers on common seeds and labels, judge every cell, write one report.

    Sampler options are lists of values, e.g. --nfe 13,26 --rho 0,0.75,1; --interval can be given several times. A cell
    is a combination; not given: adams at --nfe 8,13,26 --rho 0,1 without guidance, with the times of mvm tune where the
    model has some. Where --rho has 0, solvers of the ODE alone have cells of 0 alone.

    Made again after an interruption it goes on where it was; cells already computed are not computed again, so that
    axes and metrics can be added to an old sweep. Under torchrun the processes share the work.

    Parameters
    ----------
    model
        A run directory, or the name of a shipped model.
    num
        Images in each cell.
    repeats
        Sample every cell so many times on seeds of their own: the mean, and its error.
    jackknife
        Blocks to estimate the error of Frechet distances with, and of differences between cells, e.g. 20; 0: no error.
    batch
        Images at a time: what an interruption loses.
    keep_images
        Keep the images of every cell in OUT/work; else they go once they are judged.
    out
        Folder of the sweep; default runs/sweep-MODEL.
    """
    from mvm.distributed.processes import processes
    from mvm.evaluation.sweep import Sweep
    from mvm.model import choose_device
    from mvm.options import at_least

    at_least("repeats", repeats, 1)
    at_least("num", num, 2)  # a covariance needs two
    cells = axes.cells()
    drawing.draw(num, batch)  # refuses what it can before the model is read
    folder = out or Path("runs") / f"sweep-{Path(model).name}"
    with processes(choose_device(device)) as place:
        sampler = drawing.open(model, place)
        loaded = sampler.model
        work = Sweep(
            sampler,
            drawing.draw(num, batch, loaded.classes),
            judging.judge(place, batch, blocks=jackknife_blocks(jackknife)),
            judging.reference(loaded),
            judging.names(loaded.recipe.data.shape[0]),
            folder,
            repeats,
            keep_images,
            " ".join(["mvm", *sys.argv[1:]]),  # without where the program lies
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
    sampler: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    judging: Judging = Judging(),
    num: Annotated[Whole, Parameter(alias="-n")] = 1000,
    blocks: Whole = 20,
    batch: Whole = 250,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> int:
    """Compare two models on the same seeds and labels: figures of both, differences with 95 % intervals.

    Sampler options are of both models; not given: each recipe's own.

    Parameters
    ----------
    model_a
        A run directory, or the name of a shipped model. By default both are compared with the images it was trained on.
    model_b
        Another, of the same image shape and classes.
    num
        Images of each.
    blocks
        Into which pairs are dealt for the intervals.
    batch
        Images at a time.
    """
    from mvm.distributed.processes import processes
    from mvm.evaluation.evaluate import compare
    from mvm.evaluation.evaluate import comparison_table as as_table
    from mvm.evaluation.evaluate import write_comparison as write
    from mvm.evaluation.images import of_model
    from mvm.model import choose_device
    from mvm.options import at_least

    at_least("blocks", blocks, 2)
    if json_file is not None:
        json_file.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    with processes(choose_device(device)) as place:
        samplers = {name: drawing.open(name, place) for name in dict.fromkeys((model_a, model_b))}
        models = {name: opened.model for name, opened in samplers.items()}
        sets = [
            of_model(
                samplers[name],
                drawing.draw(num, batch, models[name].classes),
                sampler.settings(models[name].recipe.sample),
                name=Path(name).name,
            )
            for name in (model_a, model_b)
        ]
        judge, names = judging.judge(place, batch, blocks=blocks), judging.names(sets[0].shape[0])
        found = compare(judge, sets[0], sets[1], judging.reference(models[model_a]), names)
        for warning in found.facts["warnings"]:
            say_from_first(f"mvm: {warning}", error=True)
        say_from_first(as_table(found.differences))
        if json_file is not None and place.main:
            write(json_file, found)
    return 0
