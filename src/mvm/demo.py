"""`mvm demo`: train on the embedded digits, sample with ODE and SDE, write a report a person can judge."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from tqdm import tqdm

from mvm import likelihood, noise
from mvm.data import Images
from mvm.evaluation import report as html
from mvm.evaluation.cells import Result
from mvm.evaluation.report import Curve, Page, PlotAxes, command
from mvm.evaluation.run_report import RunContents, loss_blocks
from mvm.evaluation.sweep_report import best, caution, comparisons, grouped, rho_name, scale_of
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
TITLES = {"cifar10": "CIFAR-10"}  # of shipped models
REPORT = "report.html"
DISTANCE = "fd-pixels"
Section = tuple[str, ...]  # a heading, then HTML blocks


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does."""

    steps: int  # 0: what the recipe says
    samples: int
    nfes: tuple[int, ...]
    likelihood_images: int
    likelihood_steps: int
    shipped_rows: int = 1  # images of a class by ODE and by SDE, of models that are not trained here

    @property
    def ways(self) -> list[tuple[str, int, float]]:
        """The solvers, numbers of evaluations and rho that are compared."""
        return [(solver, nfe, rho) for solver in ("adams", "sa") for rho in (0.0, SDE_RHO) for nfe in self.nfes]


FULL = DemoSize(0, 1000, (3, 5, 8, 13, 26), likelihood_images=32, likelihood_steps=30, shipped_rows=2)
QUICK = DemoSize(60, 100, (3, 8), likelihood_images=4, likelihood_steps=10)


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


def distances(model: Model, size: DemoSize, held_out: Moments) -> list[Result]:
    """Measure the Frechet distance to held-out images for both solvers, ODE and SDE, on common seeds and labels."""
    labels = cycle_labels([], size.samples, model.num_classes)
    seeds, sampler, results = torch.arange(size.samples), Sampler(model), []
    settings = [SampleConfig(*way, tuned=False) for way in size.ways]
    for one in tqdm(settings, desc="distance-NFE", unit="cell"):
        start = time.perf_counter()
        made = sampler.images(labels, seeds, one, progress=False)
        seconds = time.perf_counter() - start
        distance = frechet_distance(moments(pixel_features(made.images)), held_out)
        results.append(Result(one, made.nfe, made.passes, seconds, {DISTANCE: {"value": distance, "error": None}}))
    return results


def one_of_each(data: Images, rows: int = 1) -> Tensor:
    """Return the first `rows` images of every class, class by class in each row."""
    firsts = [data.images[data.labels == label][:rows] for label in range(len(data.classes))]
    return torch.stack(firsts, dim=1).flatten(0, 1)


def others_shipped() -> dict[str, Model]:
    """Return the models of the package besides the digits'."""
    return {name: load(name) for name in shipped_models() if name != "digits"}


def likeness(ode: Tensor, sde: Tensor) -> str:
    """Return in words how near images by ODE and SDE are that start from the same noise."""
    a, b = (images.flatten(1).float() for images in (ode, sde))
    near, far = (float(norms.mean()) / a.shape[1] ** 0.5 for norms in ((a - b).norm(dim=1), torch.pdist(a)))
    kinds = ((0.25, "nearly the same image"), (0.75, "similar images"), (float("inf"), "different images"))
    kind = next(name for limit, name in kinds if near <= limit * far or limit > 1)
    return (
        f"From the same noise, ODE and SDE give {kind}: on average {near:.0f} of 255 levels apart (RMS), "
        f"and two images of different noise are {far:.0f} apart."
    )


def shipped_section(name: str, model: Model, size: DemoSize) -> Section:
    """Return what shows a model that ships with the package: a card for each class, ODE and SDE side by side."""
    start, classes = time.perf_counter(), model.num_classes
    settings = replace(model.recipe.sample, nfe=SHIPPED_NFE)
    ode, sde = (
        grid_of_classes(model, replace(settings, rho=rho), size.shipped_rows, progress=True) for rho in (0.0, SDE_RHO)
    )
    cards = []
    for label, title in enumerate(model.classes):
        pairs = torch.stack((ode[label::classes], sde[label::classes]), dim=1).flatten(0, 1)
        cards.append(html.picture(grid(pairs, 2, scale=3, gap=3), title))
    guided = f"guidance {settings.cfg:g} on [{settings.low:g}, {settings.high:g}]" if settings.guided else "no guidance"
    return (
        f"{TITLES.get(name, name)}: ODE on the left, SDE on the right",
        html.finding(likeness(ode, sde)),
        html.panels(cards, "cards"),
        html.paragraph(
            f"The model {name} ships with the package and is not trained here. Each row of a card starts from one "
            f"noise; first seeds, not curated. {SHIPPED_NFE} evaluations, {guided}; {2 * len(ode)} images in "
            f"{time.perf_counter() - start:.0f} s on this machine.",
            "note",
        ),
    )


def digits_section(model: Model, real: Images, results: Sequence[Result], reference: float, seconds: float) -> Section:
    """Return samples of the model that is trained here, beside real digits."""
    ode, sde = (grid_of_classes(model, SampleConfig(rho=rho)) for rho in (0.0, SDE_RHO))
    named = (ode, "ODE (rho 0)"), (sde, f"SDE (rho {SDE_RHO:g})"), (one_of_each(real, rows=8), "real training digits")
    pictures = [html.picture(grid(images, model.num_classes, scale=5, gap=3), text) for images, text in named]
    steps, full = model.recipe.train.steps, load_recipe("digits").train.steps
    more = f" The full demo trains {full:,} steps." if steps < full else ""
    nfe, figures = max(r.settings.nfe for r in results), dict[float, float]()
    for one in results:
        if (one.settings.solver, one.settings.nfe) == ("adams", nfe):
            figures[one.settings.rho] = one.metrics[DISTANCE]["value"] / reference
    return (
        f"Digits: trained here in {seconds:.0f} s",
        html.finding(
            f"After {steps:,} steps samples of {nfe} evaluations are {figures[0.0]:.2f} (ODE) and "
            f"{figures[SDE_RHO]:.2f} (SDE) times as far from held-out digits as real training digits are."
        ),
        html.panels(pictures),
        html.paragraph(
            f"A column is a class, 0 to 9. ODE and SDE start from the same noise. {DEFAULT_NFE} evaluations, no "
            f"guidance, not curated. {likeness(ode, sde)}" + more,
            "note",
        ),
    )


def path_section(model: Model) -> Section:
    """Return the way from noise to an image, by ODE and by SDE."""
    strips = []
    for rho in (0.0, SDE_RHO):
        states, estimates = trajectory(model, label=3, seed=7, rho=rho)
        strip = torch.cat((states, torch.full_like(states[:1], 255), estimates))  # one blank under the first state
        caption = f"class 3, {len(estimates)} evaluations, {rho_name(rho)}"
        strips.append(html.picture(grid(strip, len(states), scale=6, gap=3), caption))
    return (
        "From noise to image",
        *strips,
        html.paragraph(
            "Upper row: the state x_t, from pure noise to image. Lower row: the clean image x0_hat that the network "
            "predicts from the state at its left.",
            "note",
        ),
    )


def distance_section(results: Sequence[Result], reference: float, samples: int, held_out: int) -> Section:
    """Return the curves of distance by number of evaluations."""
    nfes = sorted({r.settings.nfe for r in results})
    y = scale_of([reference, *(r.metrics[DISTANCE]["value"] for r in results)], decades=0)
    axes = PlotAxes(
        "evaluations of the network (NFE)", "Frechet distance (pixel space)", log_x=True, log_y=y.log, markers=True,
        level=("real training digits", reference), ticks=nfes, ticks_y=y.ticks, range_y=y.range,
    )  # fmt: skip
    curves = []
    for (solver, rho), cells in grouped(results, lambda r: (r.solver, r.settings.rho)).items():
        name = f"{solver}, {rho_name(rho)}"
        curves.append(Curve(name, [r.settings.nfe for r in cells], [r.metrics[DISTANCE]["value"] for r in cells]))
    rows = [[curve.label, *(f"{d:.3f} ({d / reference:.2f}x)" for d in curve.y)] for curve in curves]
    top = best(results, DISTANCE)
    assert top is not None
    how, times = top.cell.settings, top.reading.value / reference
    sides = [f"With {solver}, {text}" for (solver, _, _), text in comparisons(results, DISTANCE).items()]
    return (
        "Distance by number of evaluations",
        html.finding(
            f"Nearest to held-out digits is {how.solver}, {rho_name(how.rho)}, at {how.nfe} evaluations: {times:.2f} "
            "times the distance of real training digits."
        ),
        f'<div class="plot">{html.plot_svg(curves, axes)}</div>',
        html.bullets(sides),
        html.table(["solver", *(f"NFE {nfe}" for nfe in nfes)], rows),
        html.paragraph(
            f"Frechet distance in the 64-dimensional pixel space between {samples} samples and the {held_out} held-out "
            f"digits, on common seeds and labels. In brackets and as the dotted line: the distance of {samples} real "
            f"training digits to the same {held_out}. {caution(results, DISTANCE)}",
            "note",
        ),
    )


def likelihood_section(model: Model, held_out: Images, size: DemoSize) -> Section:
    """Return bits per dimension, and digits that the ODE turns into noise and back."""
    schedule, classes = model.schedule, model.num_classes
    few, seeds = held_out[: size.likelihood_images], torch.arange(size.likelihood_images)
    how = {"schedule": schedule, "steps": size.likelihood_steps}
    bits = likelihood.bits_per_dim(model, few.images, seeds=seeds[: len(few)], condition=few.labels, **how)
    digits, labels = one_of_each(held_out), torch.arange(classes)
    noises = likelihood.encode(model, model.codec.encode(digits), schedule=schedule, condition=labels)
    back = model.codec.decode(likelihood.decode(model, noises, schedule=schedule, condition=labels))
    error = float((digits.float() - back.float()).abs().mean())
    verdict = "The ODE is invertible here" if error < 1 else "The ODE is not invertible to a grey level here"
    return (
        "Inversion and likelihood",
        html.finding(f"{verdict}: digits turned into noise and back differ by {error:.2g} of 255 levels on average."),
        html.picture(
            grid(torch.cat((digits, model.codec.decode(noises), back)), classes, scale=5, gap=3),
            "held-out digits; their noise by the ODE; the digits from that noise",
        ),
        html.paragraph(
            f"{float(bits.mean()):.2f} bits per dimension on {len(few)} held-out digits (probability-flow ODE, "
            "Hutchinson, uniform dequantisation of 8-bit levels; the digits have only 17 grey levels, so the "
            "figure compares models on this set, not with other data).",
            "note",
        ),
    )


def next_steps(out: Path) -> list[tuple[str, str]]:
    """Return sentences and the commands that they are about."""
    run, photos = html.path_word(out), ("--data.name", "folder", "--data.path", "data/photos", "--network.patch", "4")
    own = [
        command("data", "prepare", "photos", "--out", "data/photos", "--size", "32"),
        command("train", "digits", *photos, "--out", "runs/photos"),
    ]
    colour = ("--classes", "ship,horse", "--num", "4", "--nfe", "13", "--out", "cifar10.png")
    sweep = command("sweep", run, "--nfe", "5,13,26", "--rho", "0,0.75,1", "--out", f"{run}-sweep")
    return [
        ("Sample the digits of this demo by the SDE.", command("sample", run, "--rho", "1", "--out", "digits.png")),
        ("Sample classes of CIFAR-10 by name.", command("sample", "cifar10", *colour)),
        ("Train on your own images: a folder, zip or tar, with a subfolder per class.", "\n".join(own)),
        ("Compare ODE and SDE at several numbers of evaluations: writes a report like this one.", sweep),
        ("Sample in the browser, without a network connection.", command("app", run)),
        ("Build the documentation in a clone of the repository; open site/index.html.", "make docs"),
    ]


def _sections(
    model: Model, others: dict[str, Model], results: Sequence[Result], reference: float, size: DemoSize, seconds: float,
    run: Path,
) -> Iterator[Section]:  # fmt: skip
    """Yield the sections of the report before the next steps, each made when it is asked for: pictures first."""
    real, held_out = training_data(model.recipe), training_data(model.recipe, "held-out")
    for name, other in others.items():
        yield shipped_section(name, other, size)
    yield digits_section(model, real, results, reference, seconds)
    yield path_section(model)
    yield distance_section(results, reference, size.samples, len(held_out))
    yield "Training loss", *loss_blocks(RunContents(run))
    yield likelihood_section(model, held_out, size)


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
        start = time.perf_counter()
        model = cast(Model, train(recipe, work))
        seconds = time.perf_counter() - start
        held_out = moments(pixel_features(training_data(recipe, "held-out").images))
        real = moments(pixel_features(training_data(recipe).images[: size.samples]))  # an ideal model's samples
        reference, results = frechet_distance(real, held_out), distances(model, size, held_out)
        measured = [
            {"solver": s.solver, "rho": s.rho, "nfe": s.nfe, "distance": r.metrics[DISTANCE]["value"]}
            for r in results
            for s in (r.settings,)
        ]
        write_text(work / "results.json", json.dumps({"reference": reference, "measured": measured}, indent=2) + "\n")
        page = Page(
            "Mean Velocity Matching: one field, ODE and SDE",
            "One network learns the mean velocity; a deterministic ODE and a stochastic SDE both sample from it. First "
            "come images of a model that ships with the package, then a model of digits trained on this machine.",
        )
        others = others_shipped()
        sections = _sections(model, others, results, reference, size, seconds, work)
        for heading, *blocks in tqdm(sections, desc="report", total=5 + len(others), unit="section"):
            page.section(heading, *blocks)
        page.next_steps(next_steps(out))
        again = f"mvm demo --seed {seed}" + " --quick" * quick
        page.section(
            "How this was made",
            html.finding(f"Repeat it with: {again}"),
            html.table(["", ""], [*html.provenance(), ("recipe", recipe.name)], "text"),
            html.folded("All options (recipe.json)", html.block(to_json(recipe))),
        )
        page.write(work / REPORT)
    return out / REPORT
