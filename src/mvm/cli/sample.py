"""mvm sample."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import Device, Drawing, Num, SamplerOptions, Whole, app, on_device, say_from_first
from mvm.files import remove
from mvm.process import INTERRUPTED

MANY = 5000  # evaluations whose plan takes a second and more


@app.command
def sample(
    model: str,
    /,
    *,
    num: Num = 16,
    options: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    batch: Whole = 256,
    device: Device = "auto",
    condition: Path | None = None,
    caption: list[str] | None = None,
    encoder: str = "",
    out: Path = Path("samples.png"),
    yes: Annotated[bool, Parameter(negative="")] = False,
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
    batch
        Images at a time, in each process.
    condition
        Of a model with another condition than class labels: X.npy, X.npz:KEY (of text X.npz:KEY,MASK), as it was given
        to mvm data prepare, or X.npz with an array of each name, e.g. tokens and mask. Its rows are gone round.
    caption
        Of a model of text: what to show. Given several times, the images go round them.
    encoder
        Folder of the text encoder that embeds captions, where it is not where it was in training.
    out
        X.png is one grid, a class a row; X.npz and X.npy are uint8 NHWC; X.parquet, X.zip or a folder holds PNG files.
        Float arrays go to X.npz or X.npy, as the data had them.
    yes
        Begin also what is estimated to take more than an hour.
    """
    from mvm.generate import require_patience, takes_tuned_times
    from mvm.samples import check_set, parts_beside, read_condition, require_written, sample_parts, write_set

    check_set(out, num)
    rows = None if condition is None else read_condition(condition)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    drawing.draw(num, batch)  # refuses what it can before the model is read
    parts_folder = parts_beside(out)
    try:
        with on_device(device) as processes:
            sampler = drawing.open(model, processes)
            loaded = sampler.model
            require_written(out, loaded)
            draw = drawing.draw(num, batch, loaded.classes)
            settings = options.settings(loaded.recipe.sample, drawing.auto)
            if settings.nfe >= MANY and settings.takes_nfe:
                say_from_first(f"mvm: {settings.nfe:,} evaluations an image; planning them takes a while", error=True)
            require_patience(sampler, num, settings, yes, processes)
            tuned = takes_tuned_times(loaded, settings)
            text: dict[str, Any] = {"captions": caption or (), "encoder": encoder}
            parts = sample_parts(sampler, draw, settings, parts_folder, processes=processes, condition=rows, **text)
        if processes.main:  # the others need not wait
            write_set(parts, out, names=loaded.classes if loaded.labelled else caption or ())
            with suppress(ValueError):  # another process took them up meanwhile
                remove(parts_folder)
    except KeyboardInterrupt:
        say_from_first("\nmvm: stopped; the same command goes on", error=True)
        return INTERRUPTED
    cost = f"{parts.nfe} evaluations, {parts.passes} network passes each"
    say_from_first(f"wrote {num} images to {out}; {settings.solver}{', tuned' * tuned}, {cost}")
    return 0
