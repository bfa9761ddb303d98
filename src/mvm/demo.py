"""`mvm demo`: train on the embedded digits, sample with ODE and SDE, write a report a person can judge."""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from tqdm import tqdm

from mvm import likelihood, noise
from mvm.data import Images
from mvm.evaluation import report as html
from mvm.evaluation.report import Curve, Page
from mvm.evaluation.report import PlotAxes as Axes
from mvm.files import locked, put_in_place, recover, temporary_beside, write_text
from mvm.generate import Sampler, cycle_labels
from mvm.metrics.distances import Moments, frechet_distance, moments, pixel_features
from mvm.model import Model, load
from mvm.pictures import grid
from mvm.published import shipped_models
from mvm.recipes import SampleConfig, load_recipe, require_field_recipe, to_json
from mvm.solver import DEFAULT_NFE, State, solve
from mvm.training.data import training_data
from mvm.training.loop import train

SDE_RHO = 1.0  # the paper's reverse SDE


@dataclass(frozen=True)
class Size:
    """How much the demo does."""

    steps: int  # 0: what the recipe says
    samples: int
    nfes: tuple[int, ...]
    likelihood_images: int
    likelihood_steps: int


FULL = Size(steps=0, samples=1000, nfes=(3, 5, 8, 13, 26), likelihood_images=32, likelihood_steps=30)
QUICK = Size(steps=60, samples=100, nfes=(3, 8), likelihood_images=4, likelihood_steps=10)


@dataclass(frozen=True)
class Measured:
    """One point of the distance-NFE curve."""

    solver: str
    rho: float
    nfe: int
    distance: float


@dataclass(frozen=True)
class Results:
    """The distance of real training images, and every point of the curve; results.json in the run."""

    reference: float
    measured: list[Measured]


def grid_of_classes(model: Model, settings: SampleConfig, rows: int = 8, progress: bool = False) -> Tensor:
    """Return rows x classes images, column = class; the same seeds and labels whatever the settings."""
    count = rows * model.num_classes
    labels = cycle_labels([], count, model.num_classes)
    return Sampler(model).images(labels, torch.arange(count), settings, progress=progress).images


def trajectory(model: Model, label: int, seed: int, rho: float, nfe: int = 13) -> tuple[Tensor, Tensor]:
    """Return the states from noise to image, and what the network took each for (x0_hat), as uint8."""
    seeds = torch.tensor([seed])
    x = noise.initial(seeds, model.sample_shape)
    states, guesses = [x], []

    def keep(state: State) -> None:
        states.append(state.x)
        guesses.append(state.history[0])

    condition = torch.tensor([label])
    solve(model, x, nfe=nfe, rho=rho, condition=condition, seeds=seeds, on_step=keep)
    return model.codec.decode(torch.cat(states)), model.codec.decode(torch.cat(guesses))


def distance_curve(model: Model, size: Size, held_out: Moments) -> list[Measured]:
    """Measure the Frechet distance to held-out images for both solvers, ODE and SDE, on common seeds and labels."""
    labels = cycle_labels([], size.samples, model.num_classes)
    seeds, sampler = torch.arange(size.samples), Sampler(model)
    cells = [(solver, rho, nfe) for solver in ("adams", "sa") for rho in (0.0, SDE_RHO) for nfe in size.nfes]
    found = []
    for solver, rho, nfe in tqdm(cells, desc="distance-NFE", unit="cell"):
        images = sampler.images(labels, seeds, SampleConfig(solver, nfe, rho), progress=False).images
        found.append(Measured(solver, rho, nfe, frechet_distance(moments(pixel_features(images)), held_out)))
    return found


def _label(solver: str, rho: float) -> str:
    return f"{solver}, {'ODE' if rho == 0 else f'SDE (rho = {rho:g})'}"


def _curves(measured: list[Measured]) -> list[Curve]:
    keys = dict.fromkeys((m.solver, m.rho) for m in measured)
    chosen = {key: [m for m in measured if (m.solver, m.rho) == key] for key in keys}
    return [Curve(_label(*key), [m.nfe for m in ms], [m.distance for m in ms]) for key, ms in chosen.items()]


def one_of_each(data: Images, rows: int = 1) -> Tensor:
    """Return the first `rows` images of every class, class by class in each row."""
    firsts = [data.images[data.labels == label][:rows] for label in range(len(data.classes))]
    return torch.stack(firsts, dim=1).flatten(0, 1)


def others_shipped() -> dict[str, Model]:
    """Return the models of the package besides the digits'."""
    return {name: load(name) for name in shipped_models() if name != "digits"}


SHIPPED_NFE = 13  # of models that are not trained here: a picture of them in seconds
Section = tuple[str, ...]  # a heading, then HTML blocks


def shipped_section(name: str, model: Model, size: Size) -> Section:
    """Return what shows a model that came with the package: a column per class, ODE and SDE from the same noise."""
    rows = 1 if size == QUICK else 2
    start = time.perf_counter()
    settings = replace(model.recipe.sample, nfe=SHIPPED_NFE)
    grids = [grid_of_classes(model, replace(settings, rho=rho), rows, progress=True) for rho in (0.0, SDE_RHO)]
    seconds = (time.perf_counter() - start) / 2
    guided = f"guidance {settings.cfg:g} on [{settings.low:g}, {settings.high:g}]" if settings.guided else "no guidance"
    cost = f"{SHIPPED_NFE} evaluations, {guided}, not curated"
    ode, sde = (grid(images, model.num_classes, scale=2, gap=3) for images in grids)
    return (
        f"A larger model that ships in the package: {name}",
        html.paragraph(
            f"Not trained here. Columns: {', '.join(model.classes)}. A grid took {seconds:.0f} s on this machine."
        ),
        html.picture(ode, f"ODE (rho = 0), {cost}"),
        html.picture(sde, f"SDE (rho = {SDE_RHO:g}), {cost}"),
    )


def _sections(
    model: Model, others: dict[str, Model], log: list[dict[str, float]], results: Results, size: Size
) -> Iterator[Section]:
    """Yield the sections of the report, each made when it is asked for."""
    recipe, classes = model.recipe, model.num_classes
    train_images, held_out = training_data(recipe), training_data(recipe, "held-out")
    ode, sde, real = (
        grid(images, classes, scale=5, gap=3)
        for images in (
            grid_of_classes(model, SampleConfig()),
            grid_of_classes(model, SampleConfig(rho=SDE_RHO)),
            one_of_each(train_images, rows=2),
        )
    )
    cost = f"{DEFAULT_NFE} evaluations, no guidance, not curated"
    yield (
        "Samples",
        html.paragraph(
            "One column per class, 0 to 9. Both grids start from the same noise: left the ODE, right the SDE."
        ),
        '<div class="row">',
        html.picture(ode, f"ODE (rho = 0), {cost}"),
        html.picture(sde, f"SDE (rho = {SDE_RHO:g}), {cost}"),
        html.picture(real, "for comparison: real training digits"),
        "</div>",
    )

    for name, other in others.items():
        yield shipped_section(name, other, size)

    strips = []
    for rho in (0.0, SDE_RHO):
        states, guesses = trajectory(model, label=3, seed=7, rho=rho)
        strip = torch.cat((states, torch.full_like(states[:1], 255), guesses))  # one blank under the first state
        caption = f"class 3, {len(guesses)} evaluations, {_label('adams', rho)}"
        strips.append(html.picture(grid(strip, len(states), scale=6, gap=3), caption))
    yield (
        "From noise to image",
        html.paragraph("Upper row: the state x_t from pure noise (left) to image. Lower row: the network's x0_hat."),
        *strips,
    )

    axes = Axes(
        "evaluations of the network (NFE)",
        "Frechet distance (pixel space)",
        log_x=True,
        log_y=True,
        markers=True,
        level=("real training digits", results.reference),
        ticks=size.nfes,
    )
    curves = _curves(results.measured)
    rows = [[curve.label, *(f"{d:.3f} ({d / results.reference:.2f}x)" for d in curve.y)] for curve in curves]
    yield (
        "Distance against number of evaluations",
        html.paragraph(
            f"Frechet distance in the 64-dimensional pixel space between {size.samples} samples and the "
            f"{len(held_out)} held-out digits, on common seeds and labels. The dotted line is the distance of "
            f"{size.samples} real training digits to the same {len(held_out)}; in brackets, multiples of it."
        ),
        html.plot_svg(curves, axes),
        html.table(["solver", *(f"NFE {nfe}" for nfe in size.nfes)], rows),
    )

    curve = Curve("loss", [line["step"] for line in log], [line["loss"] for line in log])
    yield "Training loss", html.plot_svg([curve], Axes("step", "mean |u - target|² per pixel"))

    schedule = model.schedule
    few, steps = held_out[: size.likelihood_images], size.likelihood_steps
    bits = likelihood.bits_per_dim(
        model, few.images, schedule=schedule, steps=steps, seeds=torch.arange(len(few)), condition=few.labels
    )
    shown, labels = one_of_each(held_out), torch.arange(classes)
    there = likelihood.encode(model, model.codec.encode(shown), schedule=schedule, condition=labels)
    back = model.codec.decode(likelihood.decode(model, there, schedule=schedule, condition=labels))
    error = float((shown.float() - back.float()).abs().mean())
    yield (
        "Likelihood and inversion",
        html.paragraph(
            f"{float(bits.mean()):.2f} bits per dimension on {len(few)} held-out digits (probability-flow ODE, "
            "Hutchinson, uniform dequantisation of 8-bit levels; the digits have only 17 grey levels, so the "
            "figure compares models on this set, not with other data)."
        ),
        html.picture(
            grid(torch.cat((shown, model.codec.decode(there), back)), classes, scale=5, gap=3),
            f"held-out digits; their noise by the ODE; and back. Mean error {error:.2f} of 255 grey levels",
        ),
    )

    command = f"mvm demo --seed {recipe.seed}" + (" --quick" if size == QUICK else "")
    settings = [*html.provenance(), ("recipe", recipe.name), ("command", command)]
    yield "How this was made", html.table(["", ""], settings), html.folded("recipe.json", html.block(to_json(recipe)))


def write_report(
    path: Path, model: Model, log: list[dict[str, float]], results: Results, size: Size, seconds: float
) -> None:
    """Write report.html."""
    last = {(m.solver, m.rho): m for m in results.measured}  # of each curve, at the most evaluations
    ode, sde = last["adams", 0.0], last["adams", SDE_RHO]
    page = Page(
        "Mean Velocity Matching on 8x8 digits",
        f"One network, trained {seconds:.0f} s on this machine, sampled as ODE and as SDE. Distance to held-out digits "
        f"at {ode.nfe} evaluations: {ode.distance:.3f} (ODE), {sde.distance:.3f} (SDE); real training digits are at "
        f"{results.reference:.3f}.",
    )
    others = others_shipped()
    sections = _sections(model, others, log, results, size)
    for heading, *blocks in tqdm(sections, desc="report", total=6 + len(others), unit="section"):
        page.section(heading, *blocks)
    page.write(path)


REPORT = "report.html"


@contextmanager
def _claimed(out: Path) -> Generator[None]:
    """Lock `out`, made if need be, against a second demo; it is removed again if it stays empty."""
    recover(out)  # before a new folder takes the name of one that stands aside
    if out.exists() and not (out.is_dir() and ((out / REPORT).is_file() or not any(out.iterdir()))):
        raise ValueError(f"out={out} exists and holds no earlier demo; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, f"out={out} is in use by another demo; wait for it, or give another --out"):
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty: a demo
                out.rmdir()


def demo(out: Path, *, quick: bool = False, seed: int = 0) -> Path:
    """Train, sample, measure; return the path of the report. An earlier demo in `out` stays until this one is whole."""
    html.require_plots()
    size = QUICK if quick else FULL
    recipe = require_field_recipe(load_recipe("digits"), "digits")
    steps = size.steps or recipe.train.steps
    recipe = replace(recipe, seed=seed, train=replace(recipe.train, steps=steps, save_every=steps))
    with _claimed(out):
        work = temporary_beside(out)
        log: list[dict[str, float]] = []
        start = time.perf_counter()
        model = cast(Model, train(recipe, work, on_log=log.append))
        seconds = time.perf_counter() - start
        held_out = moments(pixel_features(training_data(recipe, "held-out").images))
        real = moments(pixel_features(training_data(recipe).images[: size.samples]))  # what a perfect model would reach
        results = Results(frechet_distance(real, held_out), distance_curve(model, size, held_out))
        write_text(work / "results.json", json.dumps(asdict(results), indent=2) + "\n")
        write_report(work / REPORT, model, log, results, size, seconds)
        put_in_place(work, out)
    return out / REPORT
