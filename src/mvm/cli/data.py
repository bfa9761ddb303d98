"""mvm data prepare, mvm data info."""

from pathlib import Path
from shlex import quote

from cyclopts import App

from mvm.cli.app import Whole, app

data = App(name="data", help="Prepare images for training, and look at what was prepared.", help_format="plaintext")
app.command(data)


@data.command
def prepare(
    source: Path,
    /,
    *,
    out: Path,
    size: Whole,
    resize: str = "auto",
    channels: Whole = 3,
    split: str = "",
    classes: Whole | None = None,
    workers: Whole | None = None,
    strict: bool = False,
) -> int:
    """Read images of any common kind, resize them, write shards that training reads; restarts where it was stopped.

    Parameters
    ----------
    source
        A folder of images, a zip or a tar of it, parquet files (hub layout), webdataset tars, .npz or .npy arrays, or
        the published CIFAR and downsampled-ImageNet batches. HEIC pictures need pillow-heif.
    out
        Folder to write.
    size
        Side of the square images in pixels.
    resize
        box: the whole picture squashed, as published ImageNet-32; centre-crop: halved, then bicubic, then cut;
        none: sizes must match; auto: box up to 64 pixels, centre-crop above.
    channels
        3, or 1 for grey.
    split
        Which split, where the source has several (train, test, ...).
    classes
        How many classes there must be: a label outside is an error.
    workers
        Processes; default: as many as there are cores.
    strict
        A picture that cannot be read, or a class without images, is an error; else it is named and left out.
    """
    from mvm.data.prepare import left_out
    from mvm.data.prepare import prepare as run_prepare

    made = run_prepare(
        source,
        out,
        size=size,
        resize=resize,
        channels=channels,
        split=split,
        workers=workers,
        strict=strict,
        classes=classes,
    )
    skipped = made.skipped["count"]
    see = f"see: mvm data info {quote(str(out))}"
    print(f"{out}: {made.count} images of {len(made.classes)} classes, {skipped} skipped; {see}")
    for line in left_out(made, named=5):
        print(line)
    return 0


@data.command
def info(folder: Path, /) -> int:
    """Show what a prepared folder holds, and check its files.

    Parameters
    ----------
    folder
        What `mvm data prepare` wrote.
    """
    from mvm.data.prepare import describe

    text, good = describe(folder)
    print(text)
    return 0 if good else 1
