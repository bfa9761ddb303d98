"""mvm sample."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import (
    IMAGES,
    OUTPUT,
    SAMPLE,
    Batch,
    Device,
    Drawing,
    Num,
    SamplerOptions,
    command,
    on_device,
    say_from_first,
)
from mvm.files import remove
from mvm.process import INTERRUPTED

MANY = 5000  # evaluations whose plan takes a second and more


@command(
    SAMPLE,
    "mvm sample digits  # a grid: samples.png",
    "mvm sample cifar10 --classes cat,ship --cfg 1.5  # guided",
    "mvm sample runs/a -n 50000 --rho 0.75 --out a.npz  # by the SDE",
    "mvm sample runs/a --solver heun --nfe 40  # another solver",
)
def sample(
    model: str,
    /,
    *,
    num: Num = 16,
    options: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    batch: Batch = 256,
    device: Device = "auto",
    condition: Annotated[Path | None, IMAGES] = None,
    caption: Annotated[list[str] | None, IMAGES] = None,
    encoder: Annotated[str, IMAGES] = "",
    out: Annotated[Path, OUTPUT] = Path("samples.png"),
    yes: Annotated[bool, Parameter(negative=""), OUTPUT] = False,
) -> int:
    """Sample images from a run, an exported model or a shipped model.

    Under torchrun the processes share the images. After an interruption the same command continues: until OUT is
    complete, finished parts are kept in a hidden folder beside it. OUT.json records the settings (not for a .png).

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
    num
        Number of images. Under torchrun write -n, because torchrun takes --num for itself.
    batch
        Batch size of each process.
    condition
        Conditions of a model that is not conditioned on class labels: X.npy, X.npz:KEY, or X.npz:KEY,MASK for text.
        X.npz alone has one array for each name, e.g. tokens and mask. The rows are used in turn.
    caption
        Caption, for a text-to-image model. Repeat the option for several captions, which are used in turn.
    encoder
        Folder of the text encoder that embeds captions. Default: where it was in training.
    out
        X.png is one grid, with a row for each class. X.npz and X.npy hold uint8 arrays (N, H, W, C).
        X.parquet, X.zip and a folder hold PNG files. Samples that are float arrays go to X.npz or X.npy.
    yes
        Start even if the command is estimated to take more than an hour.
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
        say_from_first("\nmvm: stopped; the same command continues", error=True)
        return INTERRUPTED
    cost = f"{parts.nfe} evaluations, {parts.passes} network passes each"
    say_from_first(f"wrote {num} images to {out}; {settings.solver}{', tuned' * tuned}, {cost}")
    return 0
