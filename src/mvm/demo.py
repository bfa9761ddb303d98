"""`mvm demo`: train on the embedded digits, sample with ODE and SDE, write a report a person can judge."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from mvm import likelihood, noise
from mvm.data import Images
from mvm.evaluation import report as html
from mvm.evaluation.report import Curve, Page, PlotAxes
from mvm.files import atomic, claimed, write_text
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


SHIPPED_NFE = 13  # of models that are not trained here: a picture of them in seconds
REPORT = "report.html"
Point = dict[str, Any]  # of a distance-NFE curve: solver, rho, nfe, distance
Section = tuple[str, ...]  # a heading, then HTML blocks


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does."""

    steps: int  # 0: what the recipe says
    samples: int
    nfes: tuple[int, ...]
    likelihood_images: int
    likelihood_steps: int


FULL = DemoSize(steps=0, samples=1000, nfes=(3, 5, 8, 13, 26), likelihood_images=32, likelihood_steps=30)
QUICK = DemoSize(steps=60, samples=100, nfes=(3, 8), likelihood_images=4, likelihood_steps=10)


def grid_of_classes(model: Model, settings: SampleConfig, rows: int = 8, progress: bool = False) -> Tensor:
    """Return rows x classes images, column = class; the same seeds and labels whatever the settings."""
    count = rows * model.num_classes
    labels = cycle_labels([], count, model.num_classes)
    return Sampler(model).images(labels, torch.arange(count), settings, progress=progress).images


def trajectory(model: Model, label: int, seed: int, rho: float, nfe: int = 13) -> tuple[Tensor, Tensor]:
    """Return the states from noise to image, and what the network took each for (x0_hat), as uint8."""
    seeds = torch.tensor([seed])
    x = noise.initial(seeds, model.sample_shape)
    steps: list[State] = []
    solve(model, x, nfe=nfe, rho=rho, condition=torch.tensor([label]), seeds=seeds, on_step=steps.append)
    states, estimates = [x, *(state.x for state in steps)], [state.history[0] for state in steps]
    return model.codec.decode(torch.cat(states)), model.codec.decode(torch.cat(estimates))


def distance_curves(model: Model, size: DemoSize, held_out: Moments) -> list[Point]:
    """Measure the Frechet distance to held-out images for both solvers, ODE and SDE, on common seeds and labels."""
    labels = cycle_labels([], size.samples, model.num_classes)
    seeds, sampler = torch.arange(size.samples), Sampler(model)
    cells = [(solver, rho, nfe) for solver in ("adams", "sa") for rho in (0.0, SDE_RHO) for nfe in size.nfes]
    points = []
    for solver, rho, nfe in tqdm(cells, desc="distance-NFE", unit="cell"):
        images = sampler.images(labels, seeds, SampleConfig(solver, nfe, rho), progress=False).images
        distance = frechet_distance(moments(pixel_features(images)), held_out)
        points.append({"solver": solver, "rho": rho, "nfe": nfe, "distance": distance})
    return points


def _label(solver: str, rho: float) -> str:
    return f"{solver}, {'ODE' if rho == 0 else f'SDE (rho = {rho:g})'}"


def one_of_each(data: Images, rows: int = 1) -> Tensor:
    """Return the first `rows` images of every class, class by class in each row."""
    firsts = [data.images[data.labels == label][:rows] for label in range(len(data.classes))]
    return torch.stack(firsts, dim=1).flatten(0, 1)


def others_shipped() -> dict[str, Model]:
    """Return the models of the package besides the digits'."""
    return {name: load(name) for name in shipped_models() if name != "digits"}


def shipped_section(name: str, model: Model, size: DemoSize) -> Section:
    """Return what shows a model that came with the package: a column per class, ODE and SDE from the same noise."""
    start = time.perf_counter()
    settings = replace(model.recipe.sample, nfe=SHIPPED_NFE)
    ode, sde = (
        grid_of_classes(model, replace(settings, rho=rho), rows=1 if size == QUICK else 2, progress=True)
        for rho in (0.0, SDE_RHO)
    )
    seconds = (time.perf_counter() - start) / 2
    guided = f"guidance {settings.cfg:g} on [{settings.low:g}, {settings.high:g}]" if settings.guided else "no guidance"
    about = f"Not trained here. Columns: {', '.join(model.classes)}. A grid took {seconds:.0f} s on this machine."
    return (
        f"A larger model that ships in the package: {name}",
        html.paragraph(about),
        *_ode_and_sde(ode, sde, model.num_classes, f"{SHIPPED_NFE} evaluations, {guided}", scale=2),
    )


def _ode_and_sde(ode: Tensor, sde: Tensor, classes: int, how: str, scale: int = 5) -> list[str]:
    """Return both grids as pictures."""
    return [
        html.picture(grid(images, classes, scale=scale, gap=3), f"{kind}, {how}, not curated")
        for images, kind in ((ode, "ODE (rho = 0)"), (sde, f"SDE (rho = {SDE_RHO:g})"))
    ]


def _sections(
    model: Model, others: dict[str, Model], log: list[dict[str, float]], reference: float, points: list[Point],
    size: DemoSize,
) -> Iterator[Section]:  # fmt: skip
    """Yield the sections of the report, each made when it is asked for."""
    recipe, classes, schedule = model.recipe, model.num_classes, model.schedule
    train_images, held_out = training_data(recipe), training_data(recipe, "held-out")
    ode, sde = (grid_of_classes(model, SampleConfig(rho=rho)) for rho in (0.0, SDE_RHO))
    real = grid(one_of_each(train_images, rows=2), classes, scale=5, gap=3)
    yield (
        "Samples",
        html.paragraph(
            "One column per class, 0 to 9. Both grids start from the same noise: left the ODE, right the SDE."
        ),
        '<div class="row">',
        *_ode_and_sde(ode, sde, classes, f"{DEFAULT_NFE} evaluations, no guidance"),
        html.picture(real, "for comparison: real training digits"),
        "</div>",
    )

    for name, other in others.items():
        yield shipped_section(name, other, size)

    strips = []
    for rho in (0.0, SDE_RHO):
        states, estimates = trajectory(model, label=3, seed=7, rho=rho)
        strip = torch.cat((states, torch.full_like(states[:1], 255), estimates))  # one blank under the first state
        caption = f"class 3, {len(estimates)} evaluations, {_label('adams', rho)}"
        strips.append(html.picture(grid(strip, len(states), scale=6, gap=3), caption))
    yield (
        "From noise to image",
        html.paragraph("Upper row: the state x_t from pure noise (left) to image. Lower row: the network's x0_hat."),
        *strips,
    )

    axes = PlotAxes(
        "evaluations of the network (NFE)", "Frechet distance (pixel space)", log_x=True, log_y=True, markers=True,
        level=("real training digits", reference), ticks=size.nfes,
    )  # fmt: skip
    by_sampler: dict[str, list[Point]] = {}
    for point in points:
        by_sampler.setdefault(_label(point["solver"], point["rho"]), []).append(point)
    curves = [Curve(label, [p["nfe"] for p in ps], [p["distance"] for p in ps]) for label, ps in by_sampler.items()]
    rows = [[curve.label, *(f"{d:.3f} ({d / reference:.2f}x)" for d in curve.y)] for curve in curves]
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
    yield "Training loss", html.plot_svg([curve], PlotAxes("step", "mean |u - target|² per pixel"))

    few, seeds = held_out[: size.likelihood_images], torch.arange(size.likelihood_images)
    how = {"schedule": schedule, "steps": size.likelihood_steps}
    bits = likelihood.bits_per_dim(model, few.images, seeds=seeds[: len(few)], condition=few.labels, **how)
    digits, labels = one_of_each(held_out), torch.arange(classes)
    noises = likelihood.encode(model, model.codec.encode(digits), schedule=schedule, condition=labels)
    back = model.codec.decode(likelihood.decode(model, noises, schedule=schedule, condition=labels))
    error = float((digits.float() - back.float()).abs().mean())
    yield (
        "Likelihood and inversion",
        html.paragraph(
            f"{float(bits.mean()):.2f} bits per dimension on {len(few)} held-out digits (probability-flow ODE, "
            "Hutchinson, uniform dequantisation of 8-bit levels; the digits have only 17 grey levels, so the "
            "figure compares models on this set, not with other data)."
        ),
        html.picture(
            grid(torch.cat((digits, model.codec.decode(noises), back)), classes, scale=5, gap=3),
            f"held-out digits; their noise by the ODE; and back. Mean error {error:.2f} of 255 grey levels",
        ),
    )

    command = f"mvm demo --seed {recipe.seed}" + (" --quick" if size == QUICK else "")
    settings = [*html.provenance(), ("recipe", recipe.name), ("command", command)]
    yield "How this was made", html.table(["", ""], settings), html.folded("recipe.json", html.block(to_json(recipe)))


def demo(out: Path, *, quick: bool = False, seed: int = 0) -> Path:
    """Train, sample, measure; return the path of the report. An earlier demo in `out` stays until this one is whole."""
    html.require_plots()
    size = QUICK if quick else FULL
    recipe = require_field_recipe(load_recipe("digits"), "digits")
    steps = size.steps or recipe.train.steps
    recipe = replace(recipe, seed=seed, train=replace(recipe.train, steps=steps, save_every=steps))
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file; give another --out")
    with claimed(out), atomic(out) as work:
        if any(out.iterdir()) and not (out / REPORT).is_file():
            raise ValueError(f"out={out} holds no earlier demo; give another --out")
        log: list[dict[str, float]] = []
        start = time.perf_counter()
        model = cast(Model, train(recipe, work, on_log=log.append))
        seconds = time.perf_counter() - start
        held_out = moments(pixel_features(training_data(recipe, "held-out").images))
        real = moments(pixel_features(training_data(recipe).images[: size.samples]))  # what a perfect model would reach
        reference, points = frechet_distance(real, held_out), distance_curves(model, size, held_out)
        results = {"reference": reference, "measured": points}
        write_text(work / "results.json", json.dumps(results, indent=2) + "\n")
        last = {(point["solver"], point["rho"]): point for point in points}  # of each curve, at the most evaluations
        ode, sde = last["adams", 0.0], last["adams", SDE_RHO]
        page = Page(
            "Mean Velocity Matching on 8x8 digits",
            f"One network, trained {seconds:.0f} s on this machine, sampled as ODE and as SDE. Distance to held-out "
            f"digits at {ode['nfe']} evaluations: {ode['distance']:.3f} (ODE), {sde['distance']:.3f} (SDE); real "
            f"training digits are at {reference:.3f}.",
        )
        others = others_shipped()
        sections = _sections(model, others, log, reference, points, size)
        for heading, *blocks in tqdm(sections, desc="report", total=6 + len(others), unit="section"):
            page.section(heading, *blocks)
        page.write(work / REPORT)
    return out / REPORT
