"""The tab of edits: what a visitor asks for, a picture that is uploaded or drawn, and the edit step by step."""

import html
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvm import edit, noise
from mvm.app.form import RANGES, NumberRange, choice_problem, label_problem, seed_problem, shown
from mvm.app.lines import number
from mvm.app.show import download, image_tag
from mvm.app.walk import Compute, sampler_states
from mvm.data.resize import BadImage, open_picture
from mvm.generate import Draw, Sampler
from mvm.model import Model, choose_device
from mvm.options import choose
from mvm.pictures import png_bytes, to_pillow
from mvm.recipes import SampleConfig
from mvm.tasks import (
    Deblur,
    ImageToImage,
    Inpaint,
    Outpaint,
    Task,
    Upscale,
    before_and_after,
    check_task,
    fitted,
    settings_for,
)

MOST_UPLOAD = 1 << 23  # bytes of an uploaded picture
MOST_UPLOADED_PIXELS = 1 << 24  # which unpacked take 48 MiB
UNSAID = -1  # the class of a result, where the visitor says nothing
PARTS = ("right half", "left half", "upper half", "lower half", "middle")
EDIT_RANGES = {
    "strength": NumberRange("Strength", 0.05, 1, 0.5, 0.05, "how much changes; 1: all of it"),
    "margin": NumberRange("Margin", 1, 64, 2, 1, "pixels on each side", whole=True),
    "factor": NumberRange("Factor", 2, 16, 2, 1, "along each axis", whole=True),
    "std": NumberRange("Blur", 0.3, 4, 1.0, 0.1, "std of the blur in pixels"),
    "images": NumberRange("Results", 1, 4, 2, 1, "how many", whole=True),
    "nfe": NumberRange("NFE", 1, 100, 13, 1, "evaluations; restoring takes three backward passes at each", whole=True),
    "rho": replace(RANGES["rho"], meaning="noise on the way; 0: none, 1: the reverse SDE"),
    "cfg": RANGES["cfg"],
}
OPTION = {"image-to-image": "strength", "inpaint": "part", "outpaint": "margin", "upscale": "factor", "deblur": "std"}
TASKS = tuple(OPTION)  # by the names of mvm edit's commands
EDIT = (
    '<section class="mvm-side mvm-edit"><h3>{task}</h3><div class="mvm-pictures"><figure>{before}<figcaption>given'
    '</figcaption></figure>{results}</div><p class="mvm-state">{state}</p></section>'
)


def box(part: str, side: int) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of a part of a square picture."""
    half, quarter = side // 2, side // 4
    corners = {
        "right half": (half, 0, side, side),
        "left half": (0, 0, half, side),
        "upper half": (0, 0, side, half),
        "lower half": (0, half, side, side),
        "middle": (quarter, quarter, side - quarter, side - quarter),
    }
    return choose("part", part, corners)


@dataclass(frozen=True)
class EditForm:
    """The fields of the tab as they are; `problems` must be empty before anything else is asked of it."""

    model: str
    task: str = "inpaint"
    upload: Any = None  # a picture's file as bytes, or the name that it was given when it was sent
    drawn: int = 0
    wanted: int = UNSAID
    strength: Any = EDIT_RANGES["strength"].start
    part: str = PARTS[0]
    margin: Any = EDIT_RANGES["margin"].start
    factor: Any = EDIT_RANGES["factor"].start
    std: Any = EDIT_RANGES["std"].start
    images: Any = EDIT_RANGES["images"].start
    seed: Any = "0"
    nfe: Any = EDIT_RANGES["nfe"].start
    rho: Any = EDIT_RANGES["rho"].start
    cfg: Any = EDIT_RANGES["cfg"].start

    def problems(self) -> dict[str, str]:
        """Return what is wrong, by field; numbers of other tasks do not count."""
        unused = set(OPTION.values()) - {OPTION.get(str(self.task))}
        ranges = {name: bounds for name, bounds in EDIT_RANGES.items() if name not in unused}
        problems = {name: bounds.problem(getattr(self, name)) for name, bounds in ranges.items()}
        problems["task"] = choice_problem("Task", self.task, TASKS)
        problems["part"] = choice_problem("Part", self.part, PARTS)
        problems["drawn"] = label_problem("Class drawn", self.drawn)
        problems["wanted"] = label_problem("Class of the results", self.wanted)
        if self.upload is not None and not isinstance(self.upload, bytes | str):
            problems["upload"] = f"Your picture is {shown(self.upload)}; it must be the name that it was given"
        problems["seed"] = seed_problem(self.seed, 1 if problems["images"] else int(self.images))
        return {name: words for name, words in problems.items() if words}

    def task_for(self, model: Model) -> Task:
        """Return the task of the library."""
        height, width = model.recipe.data.shape[-2:]
        left, top, right, bottom = box(self.part, min(height, width))
        mask = torch.zeros(height, width)
        mask[top:bottom, left:right] = 1
        tasks: dict[str, Any] = {
            "image-to-image": lambda: ImageToImage(float(self.strength)),
            "inpaint": lambda: Inpaint(mask),
            "outpaint": lambda: Outpaint(int(self.margin)),
            "upscale": lambda: Upscale(int(self.factor)),
            "deblur": lambda: Deblur(float(self.std)),
        }
        return choose("task", self.task, tasks)()

    def labels(self, model: Model) -> Tensor | None:
        """Return the classes of the results; None where neither the visitor nor the picture says one."""
        label = self.wanted if self.wanted != UNSAID or self.upload is not None else self.drawn
        return None if label == UNSAID else Draw(int(self.images), classes=(label,)).chosen_labels(model.num_classes)

    def settings(self, model: Model, task: Task) -> SampleConfig:
        """Return the sampler settings; the interval of guidance is the model's own."""
        own, cfg = model.recipe.sample, 1.0 if self.labels(model) is None else float(self.cfg)
        how = SampleConfig(nfe=int(self.nfe), rho=float(self.rho), cfg=cfg, tuned=False)
        how = replace(how, low=own.low, high=own.high) if how.guided else how
        return settings_for(task, model, how, how.rho)


def check_upload(content: bytes) -> None:
    """Refuse an uploaded file that is no picture, or a large one, before it is unpacked."""
    if len(content) > MOST_UPLOAD:
        raise ValueError(f"the picture's file has {len(content):,} bytes; give one of {MOST_UPLOAD:,} at most")
    try:
        width, height = open_picture(content).size
    except BadImage as error:
        raise ValueError(f"the picture cannot be read ({error}); give a PNG, JPEG or WebP") from None
    if width * height > MOST_UPLOADED_PIXELS:
        raise ValueError(f"the picture has {width}x{height} pixels; give one of {MOST_UPLOADED_PIXELS:,} at most")


def drawn_picture(model: Model, label: int) -> Tensor:
    """Return the picture (C, H, W) that a model draws of a class by its own settings, from seed 0."""
    return Sampler(model).batch(torch.tensor([label]), torch.tensor([0]), model.recipe.sample).images[0]


def given_picture(form: EditForm, model: Model, task: Task, drawn: Tensor | None) -> Tensor:
    """Return the picture that is edited, uint8 (C, H, W): as the task takes it, and one that was drawn blurred."""
    shape = check_task(task, model)
    if form.upload is not None:
        return fitted(form.upload, "the picture", shape, "auto")
    assert drawn is not None
    if isinstance(task, Deblur):
        x = model.codec.encode(drawn[None])
        return model.codec.decode(task.measured(x)[1](x))[0]
    return fitted(drawn.permute(1, 2, 0).numpy(), "the picture", shape, "auto")


@dataclass(frozen=True)
class EditRun:
    """An edit as far as it has come: pictures uint8 (B, C, H, W), what was given, and the cost of a result."""

    before: Tensor
    images: Tensor
    index: int
    steps: int
    nfe: int
    passes: int
    products: int
    seconds: float

    @property
    def done(self) -> bool:
        return self.index == self.steps


def edit_by_steps(
    model: Model, task: Task, picture: Tensor, form: EditForm, compute: Compute | None = None
) -> Iterator[EditRun]:
    """Yield an edit after every step; the last has the pictures of `mvm edit`."""
    seeds = torch.arange(int(form.seed), int(form.seed) + int(form.images))
    labels, settings = form.labels(model), form.settings(model, task)
    if labels is None:
        model.require_null()
    there = seeds.to(model.device)
    x0 = model.codec.encode(picture.expand(len(seeds), *picture.shape).to(model.device))
    before = model.codec.decode(task.shown(x0)).cpu()
    how: dict[str, Any] = {"condition": None if labels is None else labels.to(model.device), "compute": compute}
    posterior: edit.Conditioned | None = None
    field, schedule = model, model.schedule
    if isinstance(task, ImageToImage):
        x, schedule = edit.intermediate(model, x0, task.strength, there)
    else:
        y, operator = task.measured(x0)
        field = posterior = edit.Conditioned(model, y, operator, noise=task.noise, guidance=settings.guidance())
        x, settings = noise.initial(there, model.sample_shape), replace(settings, cfg=1.0)
    for now in sampler_states(field, x, settings, there, schedule=schedule, **how):
        last = now.index == now.steps
        final = posterior.consistent(now.guess) if posterior is not None and last else now.guess
        passes, products = (now.passes, 0) if posterior is None else (posterior.passes, posterior.products)
        images = model.codec.decode(final).cpu()
        yield EditRun(before, images, now.index, now.steps, now.nfe, passes, products, now.seconds)


def edit_html(form: EditForm, run: EditRun, given: Tensor) -> str:
    """Return what was given, and the results as far as they are; at the end links to save both."""
    state = f"step {run.index} of {run.steps}"
    if run.done:
        grid = png_bytes(before_and_after(run.before, run.images, len(run.images)))
        state = "done " + download(grid, "image/png", result_name(form), "Save results")
        state += download(png_bytes(to_pillow(given)), "image/png", "given.png", "Save what was given")
    results = "".join(
        f"<figure>{image_tag(to_pillow(image), f'result {i + 1}')}<figcaption>seed {int(form.seed) + i}</figcaption>"
        "</figure>"
        for i, image in enumerate(run.images)
    )
    before = image_tag(to_pillow(run.before[0]), "what was given")
    return EDIT.format(task=html.escape(form.task), before=before, results=results, state=state)


def result_name(form: EditForm) -> str:
    """Return the name of the results: MODEL-TASK-seed-SEED.png."""
    return f"{Path(form.model).name}-{form.task}-seed-{int(form.seed)}.png"


def edit_command(form: EditForm, model: Model, task: Task) -> str:
    """Return the `mvm edit` that makes these results of given.png."""
    settings, labels = form.settings(model, task), form.labels(model)
    words = ["mvm", "edit", form.task, form.model, "given.png"]
    if form.task == "inpaint":
        words += ["--box", ",".join(map(str, box(form.part, min(model.recipe.data.shape[-2:]))))]
    else:
        words += [f"--{OPTION[form.task]}", number(getattr(form, OPTION[form.task]))]
    if labels is not None:
        words += ["--classes", str(int(labels[0]))]
    words += ["--solver", settings.solver, "--nfe", str(settings.nfe), "--rho", number(settings.rho)]
    words += ["--cfg", number(settings.cfg), *(["--internal", "1"] if model.recipe.network.inner_block else [])]
    if settings.guided:
        words += ["--interval", f"{number(settings.low)},{number(settings.high)}"]
    if choose_device("auto").type != model.device.type:
        words += ["--device", str(model.device)]
    words += ["--num", str(int(form.images)), "--seed", str(int(form.seed)), "--out", result_name(form)]
    return shlex.join(words)
