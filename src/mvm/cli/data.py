"""mvm data prepare, mvm data info."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

from cyclopts import App, Parameter, Token

from mvm.cli.app import DEFAULTS, HARDWARE, INPUT, OUTPUT, TRAIN, Whole, app, examples

data = App(
    name="data",
    help="Prepare images for training, inspect them, and compute reference statistics.",
    group=TRAIN,
    default_parameter=DEFAULTS,
    help_epilogue=examples(
        "mvm data prepare photos --out data/photos --size 32  # to train on",
        "mvm data info data/photos  # what the folder holds",
    ),
)
app.command(data)


def _size(kind: type, tokens: Sequence[Token]) -> int | tuple[int, int]:
    """Return the side of "32", or height and width of "32x64"."""
    text = tokens[0].value
    try:
        sides = tuple(map(int, text.split("x")))
    except ValueError:
        raise ValueError(f"'{text}' is not a size; give a side or HEIGHTxWIDTH, e.g. 32 or 32x64") from None
    if len(sides) > 2:
        raise ValueError(f"'{text}' has {len(sides)} sides; give one, or HEIGHTxWIDTH, e.g. 32x64")
    return sides if len(sides) == 2 else sides[0]


Pixels = Annotated[int | tuple[int, int] | None, Parameter(converter=_size, n_tokens=1, metavar="INT|INTxINT")]


@Parameter(name="*")
@dataclass(frozen=True)
class Preparation:
    """How images are read and stored.

    Parameters
    ----------
    size
        Size in pixels: the side of square images, or HEIGHTxWIDTH. Without it, rows of an .npz or .npy keep theirs.
    resize
        How images are resized. box: the whole image is squashed, as in published ImageNet-32; centre-crop: halved,
        then bicubic, then cropped; none: sizes must match; auto: box up to 64 pixels, centre-crop above.
    channels
        Channels: 3 for colour, 1 for grey. Default for arrays of another kind: as many as they have.
    values
        Type of values in arrays: uint8 (images) or float. Default: the arrays' own.
    condition
        Condition besides the labels: vector:KEY, tokens:KEY, tokens:KEY,MASK, image:KEY or caption:KEY.
        KEY is an array of the .npz (KEY.npy beside an .npy), a parquet column, or the file suffix in a webdataset.
    split
        Which split to read (train, test, ...), if the source has several.
    classes
        Number of classes; a label out of this range is an error.
    workers
        Number of worker processes. Default: one for each core.
    strict
        Raise an error for an unreadable image or a class without images. By default these are reported and skipped.
    """

    size: Annotated[Pixels, INPUT] = None
    resize: Annotated[str, INPUT] = "auto"
    channels: Annotated[Whole | None, INPUT] = None
    values: Annotated[str, INPUT] = ""
    condition: Annotated[str, INPUT] = ""
    split: Annotated[str, INPUT] = ""
    classes: Annotated[Whole | None, INPUT] = None
    workers: Annotated[Whole | None, HARDWARE] = None
    strict: Annotated[bool, INPUT] = False


@data.command(
    help_epilogue=examples(
        "mvm data prepare photos --out data/photos --size 32  # class folders",
        "mvm data prepare signals.npz --out data/signals  # arrays",
        "mvm data prepare a.tar --size 64x32 --out data/a  # a webdataset",
    )
)
def prepare(source: Path, /, *, out: Annotated[Path, OUTPUT], options: Preparation = Preparation()) -> int:
    """Read images in any common format, resize them, and write shards for training.

    The same command continues after an interruption. Arrays (N, C, *space) of other data, such as signals and volumes,
    keep their values and size.

    Parameters
    ----------
    source
        A folder of images, a zip or tar of one, parquet files (Hub layout), webdataset tars, or .npz and .npy arrays.
        Also the published CIFAR and downsampled-ImageNet batches. HEIC images need pillow-heif.
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


@data.command(help_epilogue=examples("mvm data info data/photos  # count, classes, checksums"))
def info(folder: Path, /) -> int:
    """Show what a prepared folder holds, and verify its files.

    Parameters
    ----------
    folder
        Folder that `mvm data prepare` wrote.
    """
    from mvm.data.prepare import describe

    text, whole = describe(folder)
    print(text)
    return 0 if whole else 1
