"""Editing as `mvm edit` and the page offer it: a task, a model and pictures in, pictures out.

    task = Inpaint(mask)                                     # or ImageToImage, Outpaint, Upscale, Deblur
    edited(Sampler(mvm.load("cifar10")), task, pictures, labels, seeds, settings).images

The formulas are in mvm.edit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from mvm import edit
from mvm.data.resize import RESIZES, BadImage, decode, planes
from mvm.generate import Generated, Sampler, check_settings, mean_cost, steps_of
from mvm.latent import Arrays, Pixels
from mvm.model import Model
from mvm.options import at_least, choose
from mvm.path import Condition
from mvm.path.condition import rows
from mvm.pictures import grid
from mvm.recipes import SampleConfig

Shape = tuple[int, ...]


class Task(ABC):
    """What is done with pictures. Samples x (B, C, *space) are what the model's codec makes of them."""

    restores = True  # what is measured; else another picture is made of the given one
    noise = 0.0  # std of the errors of what is measured, unless one is asked for

    def given_shape(self, shape: Shape) -> Shape:
        """Return the shape of pictures that it takes, where the model makes samples of this shape."""
        return shape

    @abstractmethod
    def measured(self, x: Tensor) -> tuple[Tensor, edit.Operator]:
        """Return measurements y (B, ...) of a picture that is to be made, and the operator A of y = A x0 + noise."""

    def shown(self, x: Tensor) -> Tensor:
        """Return what is known, as large as the model's samples."""
        return self.measured(x)[0]


@dataclass(frozen=True)
class ImageToImage(Task):
    """Another version of the picture: carried to t = strength by noise, or by the ODE, and sampled from there."""

    strength: float = 0.5
    inversion: bool = False
    restores = False

    def measured(self, x: Tensor) -> tuple[Tensor, edit.Operator]:
        """Return the picture itself."""
        return x, lambda x: x


@dataclass(frozen=True)
class Inpaint(Task):
    """What the mask marks (1) is made anew; mask: of the samples' last axes."""

    mask: Tensor

    def measured(self, x: Tensor) -> tuple[Tensor, edit.Operator]:
        operator = edit.kept(edit.mask_for(self.mask, x))
        return operator(x), operator


@dataclass(frozen=True)
class Outpaint(Task):
    """A margin around the picture is made."""

    margin: int = 4

    def given_shape(self, shape: Shape) -> Shape:
        if self.margin < 1 or min(shape[1:]) <= 2 * self.margin:
            most = (min(shape[1:]) - 1) // 2
            raise ValueError(f"margin={self.margin} is out of range; of {size_of(shape)} it must be 1 to {most}")
        return (shape[0], *(length - 2 * self.margin for length in shape[1:]))

    def measured(self, x: Tensor) -> tuple[Tensor, edit.Operator]:
        x, mask = edit.padded(x, self.margin)
        return Inpaint(mask).measured(x)


@dataclass(frozen=True)
class Upscale(Task):
    """A picture whose means over blocks of factor x factor are the given one."""

    factor: int = 2

    def given_shape(self, shape: Shape) -> Shape:
        if self.factor < 2 or any(length % self.factor for length in shape[1:]):
            fitting = [str(n) for n in range(2, min(shape[1:]) + 1) if not any(length % n for length in shape[1:])]
            raise ValueError(
                f"factor={self.factor} does not divide the {size_of(shape)} that this model makes; use one of: "
                f"{', '.join(fitting)}"
            )
        return (shape[0], *(length // self.factor for length in shape[1:]))

    def measured(self, x: Tensor) -> tuple[Tensor, edit.Operator]:
        return x, edit.pooled(self.factor)

    def shown(self, x: Tensor) -> Tensor:
        for axis in range(2, x.ndim):
            x = x.repeat_interleave(self.factor, axis)
        return x


@dataclass(frozen=True)
class Deblur(Task):
    """A picture that a Gaussian blur of this std, in pixels, and noise make the given one."""

    std: float = 1.0
    noise = edit.BLUR_NOISE

    def measured(self, x: Tensor) -> tuple[Tensor, edit.Operator]:
        return x, edit.blurred(edit.gaussian_kernel(self.std, x.ndim - 2))


@dataclass(frozen=True)
class Restoration:
    """How measurements are restored, see `mvm.edit.restore`; noise None: the task's own."""

    particles: int = 1
    method: str = "moments"
    iterations: int = edit.ITERATIONS
    noise: float | None = None


@dataclass(frozen=True, eq=False)
class Edited:
    """The result of each picture, what was known of it, and vector-Jacobian products of one result."""

    made: Generated
    before: Tensor
    products: int


def size_of(shape: Sequence[int]) -> str:
    """Return "3x32x32" of a shape (C, *space)."""
    return "x".join(map(str, shape))


def fitted(image: bytes | np.ndarray, name: str, shape: Shape, resize: str = "none", kept: bool = False) -> Tensor:
    """Return a picture of this shape (C, H, W), uint8; or an array of it, where samples are kept as they are.

    image: a file's bytes, or pixels (H, W, C); decoded within the limits of mvm.untrusted.
    """
    if kept:
        assert isinstance(image, np.ndarray)
        if tuple(image.shape) != tuple(shape):
            raise ValueError(f"'{name}' is {size_of(image.shape)}; this task takes {size_of(shape)} of this model")
        sample = torch.from_numpy(np.array(image))
        return sample if sample.dtype == torch.uint8 else sample.float()
    resized = choose("resize", resize, RESIZES)
    try:
        picture = decode(image, shape[0])
    except BadImage as error:
        raise ValueError(f"'{name}' cannot be read ({error}); give a PNG, JPEG or WebP") from None
    try:
        return torch.from_numpy(planes(resized(picture, (shape[1], shape[2]))).copy())
    except ValueError:
        width, height = picture.size
        raise ValueError(
            f"'{name}' is {height}x{width}; this task takes {shape[1]}x{shape[2]} of this model: give such a picture, "
            "or add --resize box (the whole, squashed) or --resize centre-crop"
        ) from None


def before_and_after(before: Tensor, after: Tensor, each: int) -> Image.Image:
    """Return a grid: of every picture what was given, and right of it its `each` results, small ones magnified."""
    given = before[::each, None]
    cells = torch.cat((given, after.unflatten(0, (-1, each))), 1).flatten(0, 1)
    groups = max(1, round(len(cells) ** 0.5 / (each + 1)))
    return grid(cells, min(groups, len(given)) * (each + 1), max(1, 64 // after.shape[-1]), gap=2)


def check_task(task: Task, model: Model) -> Shape:
    """Return the shape of pictures that a task takes; refuse what the model cannot do."""
    if not isinstance(task, ImageToImage) and not isinstance(model.codec, Pixels | Arrays):
        raise ValueError(
            f"this model works in latents (codec.kind='{model.recipe.codec.kind}'), and a part or a mean of pixels is "
            "none of latents; use image-to-image, or a model of pixels"
        )
    return task.given_shape(model.recipe.data.shape)


def settings_for(
    task: Task, model: Model, given: SampleConfig, rho: float | None = None, auto: Model | None = None
) -> SampleConfig:
    """Return sampler settings; a restoration has rho = 1 where none is asked for, which is nearer to the posterior."""
    if given.share:
        raise ValueError(f"share={given.share} has no effect on edits, which evaluate the whole network; leave it out")
    if rho is None and task.restores and given.takes_noise:
        given = replace(given, rho=1.0)
    check_settings(model, given, auto)
    return given


def edited(
    sampler: Sampler,
    task: Task,
    pictures: Tensor,
    condition: Condition,
    seeds: Tensor,
    settings: SampleConfig,
    restoration: Restoration = Restoration(),
    *,
    source: Condition = None,
    batch: int = 64,
    progress: bool = True,
) -> Edited:
    """Return a result of every picture (B, C, *space), under its row of the condition (None: the null condition).

    source: the condition of what a picture shows, for an inversion.
    """
    model, wanted = sampler.model, check_task(task, sampler.model)
    at_least("batch", batch, 1)
    if tuple(pictures.shape[1:]) != tuple(wanted):
        raise ValueError(f"pictures are {size_of(pictures.shape[1:])}; this task takes {size_of(wanted)} of this model")
    options: dict[str, Any] = {
        "solver": None if settings.unnamed else settings.build_solver(),
        "nfe": settings.nfe,
        "rho": settings.rho,
        "guidance": settings.guidance(sampler.auto),
    }
    if task.restores:
        asked = task.noise if restoration.noise is None else restoration.noise
        options |= vars(replace(restoration, noise=asked))
    if settings.takes_nfe:
        options["on_step"] = lambda state: show(state.index, settings.nfe)
    images, before, solutions = list[Tensor](), list[Tensor](), list[Any]()
    with tqdm(total=len(pictures), desc="edit", unit="image", disable=not progress, leave=None) as bar:
        show = steps_of(bar)
        for part in (slice(start, start + batch) for start in range(0, len(pictures), batch)):
            with sampler.computing():
                x = model.codec.encode(pictures[part].to(model.device))
                options |= {"condition": rows(condition, part), "seeds": seeds[part].to(model.device)}
                if isinstance(task, ImageToImage):
                    options |= {"inversion": task.inversion, "source": rows(source, part)}
                    solutions.append(edit.solve_image_to_image(model, x, task.strength, **options))
                else:
                    solutions.append(edit.solve(model, *task.measured(x), **options))
                images.append(model.codec.decode(solutions[-1].x).cpu())
                before.append(model.codec.decode(task.shown(x)).cpu())
            bar.update(len(x))
    labels = condition if model.labelled and condition is not None else torch.zeros(len(pictures), dtype=torch.int64)
    nfe, passes = mean_cost((len(one.x), one.nfe, one.passes) for one in solutions)
    made = Generated(torch.cat(images), labels, seeds, nfe, passes, model.classes)
    return Edited(made, torch.cat(before), getattr(solutions[0], "products", 0))
