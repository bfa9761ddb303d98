"""mvm data prepare, mvm data info."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

from cyclopts import App, Parameter, Token

from mvm.cli.app import Whole, app

data = App(name="data", help="Prepare images for training, and look at what was prepared.", help_format="plaintext")
app.command(data)


def _size(kind: type, tokens: Sequence[Token]) -> int | tuple[int, int]:
    """Return the side of "32", or height and width of "32x64"."""
    text = tokens[0].value
    try:
        sides = tuple(map(int, text.split("x")))
    except ValueError:
        raise ValueError(f"'{text}' is not a whole number, or two as HEIGHTxWIDTH") from None
    if len(sides) > 2:
        raise ValueError(f"'{text}' has {len(sides)} sides; pictures have HEIGHTxWIDTH")
    return sides if len(sides) == 2 else sides[0]


Pixels = Annotated[int | tuple[int, int] | None, Parameter(converter=_size, n_tokens=1)]


@Parameter(name="*")
@dataclass(frozen=True)
class Preparation:
    """How images are read and stored.

    Parameters
    ----------
    size
        Pixels: the side of square images, or HEIGHTxWIDTH. Without it the rows of an .npz or .npy are kept.
    resize
        box: the whole picture squashed, as published ImageNet-32; centre-crop: halved, then bicubic, then cut;
        none: sizes must match; auto: box up to 64 pixels, centre-crop above.
    channels
        3, or 1 for grey; of arrays that are kept: as many as they have.
    values
        Of arrays that are kept: uint8 (images) or float; by default as their type says.
    condition
        What samples are conditioned on beside their labels: vector:KEY, tokens:KEY or tokens:KEY,MASK, image:KEY or
        caption:KEY. KEY is an array of the .npz (KEY.npy beside an .npy), a parquet column, or the suffix of captions
        in a webdataset.
    split
        Which split, where the source has several (train, test, ...).
    classes
        How many classes there must be: a label outside is an error.
    workers
        Processes; default: as many as there are cores.
    strict
        A picture that cannot be read, or a class without images, is an error; else it is named and left out.
    """

    size: Pixels = None
    resize: str = "auto"
    channels: Whole | None = None
    values: str = ""
    condition: str = ""
    split: str = ""
    classes: Whole | None = None
    workers: Whole | None = None
    strict: bool = False


@data.command
def prepare(source: Path, /, *, out: Path, options: Preparation = Preparation()) -> int:
    """Read images of any common kind, resize them, write shards that training reads; restarts where it was stopped.

    Arrays (N, C, *space) of other things, such as signals and volumes, are kept as they are.

    Parameters
    ----------
    source
        A folder of images, a zip or a tar of it, parquet files (hub layout), webdataset tars, .npz or .npy arrays, or
        the published CIFAR and downsampled-ImageNet batches. HEIC pictures need pillow-heif.
    out
        Folder to write.
    """
    from mvm.data.prepare import left_out
    from mvm.data.prepare import prepare as run_prepare

    prepared = run_prepare(source, out, **vars(options))
    skipped = prepared.skipped["count"]
    see = f"see: mvm data info {quote(str(out))}"
    print(f"{out}: {prepared.count} images of {len(prepared.classes)} classes, {skipped} skipped; {see}")
    for line in left_out(prepared, named=5):
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

    text, whole = describe(folder)
    print(text)
    return 0 if whole else 1
