"""mvm edit: image-to-image, inpainting, outpainting, super-resolution, deblurring."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from mvm.cli.app import (
    DEFAULTS,
    EDITING,
    IMAGES,
    INPUT,
    OUTPUT,
    SAMPLE,
    Batch,
    Device,
    Drawing,
    Num,
    SamplerOptions,
    Whole,
    app,
    examples,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mvm.data.sources import SourceRecord
    from mvm.tasks import Shape, Task

DATA = "data:"  # before the name of a set in the package
MOST_READ = 1024  # pictures at once

edit = App(
    name="edit",
    help="Edit and restore images with a model of such images, without training.",
    group=SAMPLE,
    default_parameter=DEFAULTS,
    help_epilogue=examples(
        "mvm edit inpaint cifar10 photo.png --box 8,8,24,24  # fill a box",
        "mvm edit upscale cifar10 small.png  # twice as large",
        "mvm edit inpaint --help  # the options of a task",
    ),
)
app.command(edit)


@Parameter(name="*")
@dataclass(frozen=True)
class Editing:
    """Which images are edited, and where the results go.

    Parameters
    ----------
    num
        Number of results for each image, with different noise.
    index
        Which images of PICTURES to edit, counted from 0, e.g. 3 or 0,2,5-8. Default: all.
    resize
        Images of another size: none refuses them, box squashes the whole image, centre-crop cuts out its centre.
    condition
        Conditions of a model that is not conditioned on class labels: X.npy, or X.npz with one array for each name.
    caption
        Caption of the results, for a text-to-image model.
    encoder
        Folder of the text encoder that embeds captions. Default: where it was in training.
    batch
        Batch size.
    out
        X.png is a grid: the given images on the left, the results on the right. X.npz, X.npy, X.parquet, X.zip and a
        folder of PNG files hold the results alone.
    """

    num: Num = 1
    index: Annotated[str, INPUT] = ""
    resize: Annotated[str, INPUT] = "none"
    condition: Annotated[Path | None, IMAGES] = None
    caption: Annotated[list[str] | None, IMAGES] = None
    encoder: Annotated[str, IMAGES] = ""
    batch: Batch = 64
    device: Device = "auto"
    out: Annotated[Path, OUTPUT] = Path("edited.png")


@Parameter(name="*")
@dataclass(frozen=True)
class EditDrawing(Drawing):
    """What the results are drawn from, and how the network is computed.

    Parameters
    ----------
    seed
        Result k of image i uses seed SEED + NUM i + k.
    labels
        How CLASSES are given to the results: balanced cycles through them, random draws one for each from its seed.
    classes
        Classes of the results, by number or name, e.g. 3,5 or "english springer,tench". Default: the null class.
    """

    seed: Annotated[Whole, IMAGES] = 0
    labels: Annotated[str, IMAGES] = "balanced"
    classes: Annotated[str, IMAGES] = ""


@Parameter(name="*")
@dataclass(frozen=True)
class Restoring:
    """How an image is restored from what is known of it.

    Parameters
    ----------
    particles
        Weighted and resampled particles for each result. More are nearer to the posterior; the cost is proportional.
    method
        moments, or projection: cheaper and less exact, without a gradient of the network.
    iterations
        Iterations of conjugate gradients at every evaluation, each with a backward pass.
    noise
        Standard deviation of the noise in the given pixels, which lie in [-1, 1]. At 0 the results
        agree with these pixels.
    """

    particles: Annotated[Whole, EDITING] = 1
    method: Annotated[str, EDITING] = "moments"
    iterations: Annotated[Whole, EDITING] = 3
    noise: Annotated[float | None, EDITING] = None


def numbers(option: str, text: str, form: str) -> list[int]:
    """Return the whole numbers of "8,8,24,24"; form: what is needed, for an error."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--{option} {text}: {form}")
    return [int(part) for part in parts]


def indices(text: str) -> list[int]:
    """Return the numbers of "0,2,5-8"."""
    form, chosen = "numbers and ranges from 0 are needed, e.g. 3 or 0,2,5-8", list[int]()
    for part in text.split(","):
        try:
            first, *last = map(int, part.split("-", 1))
        except ValueError:
            raise ValueError(f"--index {text}: {form}") from None
        chosen += range(first, (last[0] if last else first) + 1)[:MOST_READ]
    if not 0 < len(chosen) <= MOST_READ:
        raise ValueError(f"--index {text}: {form}, {MOST_READ} at most")
    return chosen


def records(source: str, as_arrays: bool) -> "Iterator[SourceRecord]":
    """Yield what a picture's file, a folder, prepared data, an array or data:NAME holds, one after another."""
    import torch

    from mvm.data import DATA_SETS, open_prepared
    from mvm.data.shards import is_prepared
    from mvm.data.sources import SUFFIXES, SourceRecord, open_source
    from mvm.options import choose
    from mvm.untrusted import MOST_PICTURE

    path = Path(source)
    if source.startswith(DATA):
        embedded = {name: known.load for name, known in DATA_SETS.items() if known.load is not None}
        for i, image in enumerate(choose("data", source.removeprefix(DATA), embedded)("all").images):
            yield SourceRecord(f"{source} {i}", image.permute(1, 2, 0).numpy(), 0)
    elif is_prepared(path):
        mapped = open_prepared(path).mapped()
        for i in range(len(mapped)):
            sample = mapped.gather(torch.tensor([i]))[0][0]
            yield SourceRecord(f"{source} {i}", (sample if as_arrays else sample.permute(1, 2, 0)).numpy(), 0)
    elif path.is_file() and not path.name.lower().endswith(tuple(SUFFIXES)):
        with path.open("rb") as file:
            yield SourceRecord(path.name, file.read(MOST_PICTURE + 1), 0)
    else:
        for part in open_source(path, as_arrays=as_arrays).parts:
            yield from part.read()


def read_pictures(source: str, shape: "Shape", values: str, resize: str, index: str) -> "Tensor":
    """Return pictures (N, C, *space) of this shape, those of an index."""
    import torch

    from mvm.pictures import is_image
    from mvm.tasks import fitted

    as_arrays = not is_image(shape, torch.uint8 if values == "uint8" else torch.float32)
    asked, pictures, count = indices(index) if index else [], dict[int, torch.Tensor](), 0
    for count, record in enumerate(records(source, as_arrays), 1):
        if not asked and count > MOST_READ:
            raise ValueError(f"'{source}' has more than {MOST_READ} pictures; choose some, e.g. --index 0-7")
        if not asked or count - 1 in asked:
            pictures[count - 1] = fitted(record.image, record.name, shape, resize, as_arrays)
        if asked and count > max(asked):
            break
    if missing := [i for i in asked if i not in pictures]:
        raise ValueError(f"--index {index}: '{source}' has {count} pictures from 0 on, no number {missing[0]}")
    return torch.stack([pictures[i] for i in asked] if asked else list(pictures.values()))


def read_mask(path: Path | None, box: str, shape: "Shape") -> "Tensor":
    """Return the part to fill of samples (C, *space): white in a picture, not 0 in X.npy, or a box of pixels."""
    import numpy as np
    import torch

    from mvm.data.resize import BadImage, decode, planes
    from mvm.tasks import size_of
    from mvm.untrusted import MOST_PICTURE, map_npy, refusal

    if (path is None) == (not box):
        raise ValueError("inpaint needs the part to fill: either --box LEFT,TOP,RIGHT,BOTTOM or --mask FILE")
    if path is None:
        height, width = shape[-2:] if len(shape) == 3 else (0, 0)
        middle = f"{width // 4},{height // 4},{3 * width // 4},{3 * height // 4}"
        form = f"LEFT,TOP,RIGHT,BOTTOM in pixels are needed, within 0,0,{width},{height}, e.g. {middle}"
        corners = numbers("box", box, form)
        if len(corners) != 4 or not (corners[0] < corners[2] <= width and corners[1] < corners[3] <= height):
            raise ValueError(f"--box {box}: {form}")
        mask = torch.zeros(height, width)
        mask[corners[1] : corners[3], corners[0] : corners[2]] = 1
        return mask
    if path.suffix.lower() == ".npy":
        with refusal(f"--mask {path} is no whole .npy of numbers"):
            values = map_npy(path)
            undefined, mask = bool(np.isnan(values).any()), torch.from_numpy(values != 0)
        if undefined:
            raise ValueError(f"--mask {path} holds NaN; give 1 in the part to fill, 0 elsewhere")
    else:
        try:
            with path.open("rb") as file:
                mask = torch.from_numpy(planes(decode(file.read(MOST_PICTURE + 1), 1))[0] >= 128)
        except BadImage as error:
            raise ValueError(f"--mask {path} cannot be read ({error}); give a black and white PNG, or .npy") from None
    if tuple(mask.shape) not in (tuple(shape), tuple(shape[1:])):
        raise ValueError(
            f"--mask {path} is {size_of(mask.shape)}, and the pictures are {size_of(shape[1:])}; give one of their size"
        )
    return mask


def require_enough(option: str, text: str, classes: Sequence[int], count: int, what: str, remedy: str = "") -> None:
    """Refuse more classes than there is anything to give them to."""
    if len(classes) > count:
        raise ValueError(f"--{option} {text}: {len(classes)} classes for {count} {what}; give at most {count}{remedy}")


def run(
    task: "Callable[[Shape], Task]",
    model: str,
    pictures: str,
    editing: Editing,
    options: SamplerOptions,
    drawing: Drawing,
    restoring: Restoring = Restoring(),
    source: str = "",
) -> int:
    """Edit pictures, and write the results; task: made for samples of a shape; source: classes that they show."""

    from mvm import __version__
    from mvm.distributed.processes import Processes
    from mvm.files import atomic, claimed, write_text
    from mvm.generate import asked_conditions, class_numbers, cycle_labels, given, solver_record
    from mvm.model import choose_device
    from mvm.options import at_least
    from mvm.pictures import png_bytes, write_images
    from mvm.samples import check_set, note_beside, parts_beside, read_condition, require_written
    from mvm.tasks import Restoration, before_and_after, check_task, edited, settings_for

    out = editing.out
    at_least("num", editing.num, 1)
    check_set(out, 0)
    condition = None if editing.condition is None else read_condition(editing.condition)
    sampler = drawing.open(model, Processes(device=choose_device(editing.device)), encoder=True)
    loaded = sampler.model
    require_written(out, loaded)
    what = task(loaded.recipe.data.shape)
    shape = check_task(what, loaded)
    images = read_pictures(pictures, shape, loaded.recipe.data.values, editing.resize, editing.index)
    count = editing.num * len(images)
    check_set(out, len(images) + count)
    settings = options.settings(replace(loaded.recipe.sample, share=0.0), drawing.auto)
    draw = drawing.draw(count, editing.batch, loaded.classes)
    if loaded.labelled and not drawing.classes:  # what the pictures show is not known
        if not loaded.recipe.objective.has_null:
            raise ValueError(f"--classes is needed, because '{model}' has no null class; give the class of the results")
        labels, conditions = None, None
        if vars(options)["cfg"] is None:
            settings = replace(settings, cfg=1.0)  # which has nothing to guide towards
    else:
        if draw.labels == "balanced":
            require_enough("classes", drawing.classes, draw.classes, count, "results", ", or a larger --num")
        labels, conditions = asked_conditions(loaded, draw, condition, editing.caption or (), editing.encoder)
    shown = None
    if source:
        classes = class_numbers(source, loaded.classes)
        require_enough("source", source, classes, len(images), "pictures")
        shown = cycle_labels(classes, len(images), loaded.num_classes)
        shown = shown.repeat_interleave(editing.num)
    settings = settings_for(what, loaded, settings, vars(options)["rho"], sampler.auto)
    result = edited(
        sampler,
        what,
        images.repeat_interleave(editing.num, 0),
        None if labels is None else given(loaded, labels, conditions),
        draw.chosen_seeds(),
        settings,
        Restoration(**vars(restoring)),
        source=shown,
        batch=editing.batch,
    )
    made = result.made
    with claimed(parts_beside(out)):  # as mvm sample has it: the results, and what made them, are of one command
        if out.suffix.lower() == ".png":
            with atomic(out) as temporary:
                temporary.write_bytes(png_bytes(before_and_after(result.before, made.images, editing.num)))
        else:
            write_images(out, made.images, made.labels)
            how = {
                "settings": asdict(settings),
                "solver": solver_record(loaded, settings),
                "restoration": vars(restoring),
            }
            how |= sampler.auto_facts(settings)
            facts = {"mvm": __version__, "origin": loaded.origin, "task": repr(what), "pictures": pictures, **how}
            write_text(note_beside(out), json.dumps({**facts, "draw": asdict(draw)}, indent=2, default=str) + "\n")
    products = f" and {result.products} backward passes" * bool(result.products)
    cost = f"{made.nfe} evaluations, {made.passes} network passes{products} each"
    print(f"wrote {count} results of {len(images)} pictures to {out}; {settings.solver}, {cost}")
    return 0


@edit.command(
    name="image-to-image",
    help_epilogue=examples(
        "mvm edit image-to-image cifar10 photo.png -n 4  # variations",
        "mvm edit image-to-image cifar10 photo.png --classes dog  # a dog",
    ),
)
def image_to_image(
    model: str,
    pictures: str,
    /,
    *,
    strength: Annotated[float, EDITING] = 0.5,
    inversion: Annotated[bool, EDITING] = False,
    source: Annotated[str, EDITING] = "",
    editing: Editing = Editing(),
    options: SamplerOptions = SamplerOptions(),
    drawing: EditDrawing = EditDrawing(),
) -> int:
    """Make variations of images: add noise up to t = STRENGTH, then sample from there.

    --classes sets the class of the results. Without it the model uses its null class.

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
    pictures
        An image, a folder or zip of images, prepared data, an .npz or .npy, or data:digits.
    strength
        Time t from which sampling starts, in (0, 1]. At 1 nothing of the image remains.
    inversion
        Reach t by the ODE instead of by noise, which keeps more of the image under another class. Doubles the cost.
    source
        With --inversion: the classes of the given images.
    """
    from mvm.tasks import ImageToImage

    if source and not inversion:
        raise ValueError(f"--source {source} belongs to --inversion; add it, or give --classes alone")
    return run(lambda _: ImageToImage(strength, inversion), model, pictures, editing, options, drawing, source=source)


@edit.command(
    help_epilogue=examples(
        "mvm edit inpaint cifar10 photo.png --box 8,8,24,24  # fill a box",
        "mvm edit inpaint cifar10 photo.png --mask m.png -n 4  # four results",
    )
)
def inpaint(
    model: str,
    pictures: str,
    /,
    *,
    box: Annotated[str, EDITING] = "",
    mask: Annotated[Path | None, EDITING] = None,
    editing: Editing = Editing(),
    options: SamplerOptions = SamplerOptions(),
    drawing: EditDrawing = EditDrawing(),
    restoring: Restoring = Restoring(),
) -> int:
    """Fill a part of images, given by a box or a mask, and keep the rest.

    --classes sets the class of the results. Without it the model uses its null class.

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
    pictures
        An image, a folder or zip of images, prepared data, an .npz or .npy, or data:digits.
    box
        Box to fill: LEFT,TOP,RIGHT,BOTTOM in pixels from the upper left corner, e.g. 8,8,24,24.
    mask
        Mask of the part to fill: an image of the same size, white there; or X.npy, nonzero there.
    """
    from mvm.tasks import Inpaint

    return run(
        lambda shape: Inpaint(read_mask(mask, box, shape)), model, pictures, editing, options, drawing, restoring
    )


@edit.command(help_epilogue=examples("mvm edit outpaint cifar10 photo.png --resize box --margin 4  # extend"))
def outpaint(
    model: str,
    pictures: str,
    /,
    *,
    margin: Annotated[Whole, EDITING] = 4,
    editing: Editing = Editing(),
    options: SamplerOptions = SamplerOptions(),
    drawing: EditDrawing = EditDrawing(),
    restoring: Restoring = Restoring(),
) -> int:
    """Extend images by a margin on every side; with it they have the size of the model's images.

    --classes sets the class of the results. Without it the model uses its null class.

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
    pictures
        An image, a folder or zip of images, prepared data, an .npz or .npy. With --resize box, of any size.
    margin
        Width of the margin in pixels, on each side.
    """
    from mvm.tasks import Outpaint

    return run(lambda _: Outpaint(margin), model, pictures, editing, options, drawing, restoring)


@edit.command(help_epilogue=examples("mvm edit upscale cifar10 small.png --factor 2  # 16 to 32 pixels"))
def upscale(
    model: str,
    pictures: str,
    /,
    *,
    factor: Annotated[Whole, EDITING] = 2,
    editing: Editing = Editing(),
    options: SamplerOptions = SamplerOptions(),
    drawing: EditDrawing = EditDrawing(),
    restoring: Restoring = Restoring(),
) -> int:
    """Enlarge images by FACTOR (super-resolution); block means of the results are the given pixels.

    --classes sets the class of the results. Without it the model uses its null class.

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
    pictures
        An image, a folder or zip of images, prepared data, an .npz or .npy. With --resize box, of any size.
    factor
        Scale factor along each axis. It must divide the size of the model's images.
    """
    from mvm.tasks import Upscale

    return run(lambda _: Upscale(factor), model, pictures, editing, options, drawing, restoring)


@edit.command(help_epilogue=examples("mvm edit deblur cifar10 blurred.png --std 1.5  # a blur of 1.5 pixels"))
def deblur(
    model: str,
    pictures: str,
    /,
    *,
    std: Annotated[float, EDITING] = 1.0,
    editing: Editing = Editing(),
    options: SamplerOptions = SamplerOptions(),
    drawing: EditDrawing = EditDrawing(),
    restoring: Restoring = Restoring(),
) -> int:
    """Remove a Gaussian blur from images.

    --classes sets the class of the results. Without it the model uses its null class.

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
    pictures
        An image, a folder or zip of images, prepared data, an .npz or .npy.
    std
        Standard deviation of the blur, in pixels.
    """
    from mvm.tasks import Deblur

    return run(lambda _: Deblur(std), model, pictures, editing, options, drawing, restoring)
