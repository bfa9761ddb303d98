"""The report of a training run: one offline page, at any time: while it trains, after a crash, after the end."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mvm import checkpoint
from mvm.checkpoint import METRICS, read_metrics
from mvm.data import open_prepared
from mvm.evaluation import report as html
from mvm.evaluation.images import EMBEDDED
from mvm.evaluation.report import Curve, Page, PlotAxes, Style, command, path_word
from mvm.optim.optimizers import FIXED
from mvm.recipes import FOLDER, RECIPE, DecoderRecipe, Recipe, load_recipe, options, parse_recipe, shipped
from mvm.recipes import to_json as recipe_text
from mvm.training.preview import QUALITY
from mvm.training.rundir import CHANGES, INIT, START
from mvm.untrusted import cut, parse_json, read_text

REPORT = "report.html"  # in a run directory
MOST_PREVIEWS, PREVIEW_WIDTH = 6, 290  # CSS pixels
MOST_POINTS, MOST_SMALL = 1_000, 400  # of a curve, of a small one: more only make the page heavy
MOST_PARTS = 12  # of the loss: as many small plots
SMALL = (3.4, 2.2)  # inches of a plot: 326 CSS pixels, a phone's width
ENOUGH = 50  # log lines from which curves are smoothed, and a rise can be distinguished from noise
FEW_IMAGES, MANY_EPOCHS = 10_000, 100
RAW, SMOOTH = Style("#a9cfe8", "", "."), Style("#0072B2", "-", "")

SPEED = "images_per_second"
TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    SPEED: "throughput, images/s",
    "mfu": "MFU",
    "memory_gb": "GPU memory, GB",
}
FROM_ZERO = (SPEED, "mfu", "memory_gb")
NOT_PARTS = ("step", "loss", "skipped", *TITLES)

Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint folder; quality: its preview figure, where it has one."""

    name: str
    step: int
    megabytes: float
    quality: float | None
    damaged: bool


class RunContents:
    """The contents of a run directory, read once; recipe.json alone must be there."""

    def __init__(self, run: Path) -> None:
        stored = run / RECIPE
        if not stored.is_file():
            what = "does not exist" if not run.exists() else f"is no run directory: it has no {RECIPE}"
            raise ValueError(f"'{run}' {what}; give the folder that `mvm train` wrote, by default runs/RECIPE")
        self.run, self.recipe = run, parse_recipe(read_text(stored), ".json", str(stored))
        self.resume = command("train", "--resume", path_word(run))
        # the preview figure that checkpoints are chosen by, and its sign: times it, lower is better
        self.quality = ("psnr", -1.0) if isinstance(self.recipe, DecoderRecipe) else (QUALITY, 1.0)
        lines = [line for line in read_metrics(run / METRICS) if 0 <= line["step"] < 1 << 53]
        self.lines = [line for line in lines if "loss" in line]
        self.previews = [line for line in lines if "loss" not in line]
        self.checkpoints = list(_checkpoints(run))
        self.start, self.init = _json(run / START, dict), _json(run / INIT, dict)
        self.changes = [entry for entry in _json(run / CHANGES, list) if isinstance(entry, dict)]
        self.logged = max((line["step"] for line in lines), default=0)  # the last step in the log
        self.saved = max((one.step for one in self.checkpoints), default=None)  # from which a resumed run continues
        self.step = max(self.logged, self.saved or 0)
        self.finished = self.saved is not None and self.saved >= self.recipe.train.steps
        self.images_seen = self.step * self.recipe.train.batch
        self.skipped = _number(self.lines[-1].get("skipped", 0)) if self.lines else math.nan  # steps
        self.losses, self.qualities = _series(self.lines, "loss"), _series(self.previews, self.quality[0])

    @property
    def state(self) -> str:
        if self.saved is None:
            return "no checkpoint yet"
        if self.finished:
            return "finished"
        return "paused" if self.logged <= self.saved else "training or interrupted"

    @cached_property
    def images(self) -> int:
        """The number of training images: as recorded at the start, else of the data; 0 where they are not here."""
        recorded, recipe = self.start.get("images"), self.recipe
        if type(recorded) is int and recorded > 0:
            return recorded
        if recipe.data.name in EMBEDDED:
            return len(EMBEDDED[recipe.data.name]("train"))
        try:
            held_out = recipe.held_out.count if isinstance(recipe, DecoderRecipe) else 0
            return max(0, open_prepared(recipe.data.folder).count - held_out)
        except (OSError, ValueError):
            return 0

    @property
    def seconds(self) -> float:
        """The time spent in steps, from the logged throughput; 0 where none is logged."""
        total, before = 0.0, 0
        for line in self.lines:
            speed = _number(line.get(SPEED))
            if speed > 0:
                total += max(0, line["step"] - before) * self.recipe.train.batch / speed
            before = line["step"]
        return total


def _json(path: Path, kind: type) -> Any:
    """Return an optional file of a run; empty where it is missing, damaged or of another kind."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError):
        return kind()
    return content if isinstance(content, kind) else kind()


def _checkpoints(run: Path) -> Iterator[SavedCheckpoint]:
    """Yield the checkpoints of a run, but those that training removes meanwhile."""
    matches = ((re.fullmatch(r"step-(\d{1,12})", folder.name), folder) for folder in checkpoint.folders(run))
    for match, folder in ((match, folder) for match, folder in matches if match):
        quality, damaged = math.nan, False
        try:
            quality = _number(checkpoint.read_manifest(folder).get("quality"))
        except checkpoint.DamagedCheckpoint:
            damaged = True
        try:
            size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        except OSError:
            continue
        yield SavedCheckpoint(folder.name, int(match[1]), size, quality if math.isfinite(quality) else None, damaged)


# Numbers


def _number(value: object) -> float:
    """Return a number of a log line; NaN for null, which stands for what is not finite, and for what is no number."""
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 1 << 62) else math.nan


def _series(lines: Lines, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of the lines that have this name."""
    having = [line for line in lines if name in line]
    return np.array([line["step"] for line in having], float), np.array([_number(line[name]) for line in having])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return centred means over a twenty-fifth of the values; those not finite are left out.

    Near the start, where a loss falls steeply, over fewer on both sides; near the end over those before.
    """
    index, finite = np.arange(len(values)), np.isfinite(values)
    half = np.minimum(len(values) // ENOUGH, index)
    sums, counts = (np.concatenate([[0], np.cumsum(part)]) for part in (np.where(finite, values, 0), finite))
    low, high = index - half, np.minimum(index + half + 1, len(values))
    count = counts[high] - counts[low]
    return np.divide(sums[high] - sums[low], count, out=np.full(len(values), np.nan), where=count > 0)


def _rise(values: np.ndarray) -> tuple[float, float] | None:
    """Return (lowest, last) where the loss has risen beyond its noise: means of tenths, or lines where they are few."""
    values = values[np.isfinite(values)]
    if len(values) < 3:
        return None
    if len(values) < ENOUGH:
        low, last = values.min(), values[-1]
        return (float(low), float(last)) if last - low > 0.5 * abs(low) else None
    tenths = np.array_split(values, 10)
    means = np.array([part.mean() for part in tenths])
    errors = np.array([part.std(ddof=1) / len(part) ** 0.5 for part in tenths])
    best = int(means.argmin())
    gap = means[-1] - means[best]
    risen = gap > 4 * math.hypot(errors[-1], errors[best]) and gap > 0.02 * abs(means[best])
    return (float(means[best]), float(means[-1])) if risen else None


def _thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of at most so many values, the lowest and highest of equal stretches: no spike is lost."""
    if len(values) <= most:
        return np.arange(len(values))
    indices = []
    for part in np.array_split(np.arange(len(values)), most // 2):
        part = part[np.isfinite(values[part])]
        indices += [part[values[part].argmin()], part[values[part].argmax()]] if len(part) else []
    return np.unique(indices)


# Words


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds:.3g} seconds"


def _lead(run: RunContents) -> str:
    epochs = f" ({_count(run.images_seen / run.images)} epochs of {run.images:,})" if run.images else ""
    parts = [f"{run.images_seen:,} images seen{epochs}"]
    if run.seconds:
        parts.append(f"{_duration(run.seconds)} in training steps")
    _, losses = run.losses
    if len(losses):
        averaged = len(losses) // ENOUGH + 1
        of = f" (mean of the last {averaged} log lines)" if averaged > 1 else ""
        parts.append(f"loss {smoothed(losses)[-1]:.4g}{of}")
    _, speeds = _series(run.lines, SPEED)
    if np.isfinite(speeds).any():
        parts.append(f"median throughput {_count(float(np.nanmedian(speeds)))} images/s")
    description = cut(run.recipe.description.rstrip(". "))
    return (f"{description}. " if description else "") + f"{', '.join(parts)}."


def _course(steps: np.ndarray, values: np.ndarray) -> str:
    """Return from where to where values went, smoothed where they are many; the ends alone where one is not finite."""
    ends = values[0], smoothed(values)[-1]
    went = "went" if not ends[1] < ends[0] else "fell"
    return f"{went} from {ends[0]:.4g} (step {steps[0]:,.0f}) to {ends[1]:.4g} (step {steps[-1]:,.0f})"


def _figure_course(name: str, sign: float, at: np.ndarray, figures: np.ndarray) -> str:
    """Return how a figure of the previews has changed, and its best; sign: times it, lower is better."""
    if len(figures) == 1:
        return f"{name} is {figures[0]:.4g} at step {at[0]:,.0f}."
    best = int(np.nanargmin(sign * figures))
    rank = "its best so far" if best == len(figures) - 1 else f"best: {figures[best]:.4g} (step {at[best]:,.0f})"
    first, last = (f"{figures[i]:.4g} (step {at[i]:,.0f})" for i in (0, -1))
    return f"{name} went from {first} to {last}; {rank}."


def _findings(run: RunContents) -> Iterator[str]:
    """Yield facts of no concern that no section has."""
    if run.init:
        origin = ", ".join(f"{key} {cut(run.init[key], 80)}" for key in ("run", "step", "weights") if key in run.init)
        yield f"Started from other weights ({INIT}): {origin}."


def _warnings(run: RunContents) -> Iterator[str]:
    """Yield what a reader should look at, with what to do about it."""
    steps, losses = run.losses
    if run.skipped > 0:
        yield (
            f"{run.skipped:,.0f} of {run.logged:,} steps were skipped because their gradient was not finite. A few do "
            "no harm; if there are more and more of them, lower `--train.lr` or use `--engine.precision fp32`."
        )
    bad = ~np.isfinite(losses)
    if bad.any():
        yield f"The loss was not finite in {bad.sum()} of {len(losses)} log lines, first at step {steps[bad][0]:,.0f}."
    if (rise := _rise(losses)) is not None:
        yield (
            f"The loss rises: its lowest was {rise[0]:.4g}, it is {rise[1]:.4g} now. Try a lower `--train.lr`, or a "
            "longer `--train.warmup`, in a new run."
        )
    (name, sign), (at, figures) = run.quality, run.qualities
    at, figures = at[np.isfinite(figures)], figures[np.isfinite(figures)]
    best = int((sign * figures).argmin()) if len(figures) else 0
    # half a dB, or a tenth of a distance
    if len(figures) and sign * (figures[-1] - figures[best]) > (0.5 if name == "psnr" else 0.1 * abs(figures[best])):
        remedy = "No checkpoint of that step is kept; `--train.keep_best true` keeps the best one."
        if any(one.step == at[best] and not one.damaged for one in run.checkpoints):
            remedy = f"The checkpoint of that step is kept: use it with `--checkpoint {at[best]:.0f}`."
        change = f"{name} is {figures[-1]:.4g}, and was {figures[best]:.4g} at step {at[best]:,.0f}"
        yield f"Previews have become worse: {change}. {remedy}"
    for one in run.checkpoints:
        if one.damaged:
            yield f"Checkpoint {one.name} is damaged: its manifest cannot be read."
    epochs = run.images_seen / run.images if run.images else 0
    if isinstance(run.recipe, Recipe) and run.images < FEW_IMAGES and epochs >= MANY_EPOCHS:
        yield (
            f"Few images, seen often: each of {run.images:,} about {epochs:,.0f} times. Watch for memorization: "
            "compare samples with their nearest training images. `--data.augment 0.12` and `--network.dropout 0.1` "
            "counter it in a new run."
        )


def _unfinished(run: RunContents) -> html.Html:
    """Return how to continue a run that is not finished."""
    to_go = f"Not finished, {run.recipe.train.steps - run.step:,} steps to go."
    if run.saved is None:
        text = "No checkpoint is saved yet; a run that was stopped starts again from step 0"
    elif run.logged > run.saved:
        text = f"{to_go} If no process trains it now, continue from step {run.saved:,}"
    else:
        text = f"{to_go} Continue from step {run.saved:,}"
    return html.Html(f"{text}:{html.block(run.resume)}")


# Curves


def _axes(x: str, y: str, values: np.ndarray, from_zero: bool) -> PlotAxes:
    """Return axes with a logarithmic y where a few large values would press the others flat and all are positive."""
    values = values[np.isfinite(values)]
    if from_zero and values.max() > 0:
        return PlotAxes(x, y, markers=True, range_y=(0, 1.1 * values.max()))
    if len(values) < 3 or values.min() <= 0 or values.max() <= 4 * np.median(values):
        return PlotAxes(x, y, markers=True)
    decades = range(math.floor(math.log10(values.min())), math.ceil(math.log10(values.max())) + 1)
    marks = (1, 2, 5) if len(decades) <= 3 else (1,)  # matplotlib's own overlap in a small plot
    ticks = [mark * 10.0**decade for decade in decades for mark in marks]
    inside = [tick for tick in ticks if values.min() <= tick <= values.max()]
    return PlotAxes(x, y, markers=True, log_y=True, ticks_y=inside)


def _plot(lines: Lines, name: str, small: bool = True) -> str:
    """Return a plot of one name of the log: the logged values, faint, and their smoothed line, if they are many.

    A small plot has its name above it, a large one at its axis, and a legend.
    """
    steps, values = _series(lines, name)
    many = len(steps) and steps[-1] >= 10_000  # long numbers would overlap
    if len(values) < ENOUGH or name == "lr":
        drawn = [("logged", values, SMOOTH if len(values) >= ENOUGH else Style(SMOOTH.colour, "-", "."))]
    else:
        drawn = [("logged", values, RAW), ("smoothed", smoothed(values), SMOOTH)]
    curves = []
    for label, line, style in drawn:
        points = _thinned(line, MOST_SMALL if small else MOST_POINTS)
        x = steps[points] / 1000 if many else steps[points]
        curves.append(Curve("" if small else label, x, line[points], style=style))
    axes = _axes("thousand steps" if many else "step", "" if small else name, values, name in FROM_ZERO)
    return html.plot_svg(curves, axes, SMALL) if small else html.plot_svg(curves, axes)


def _conclusion(steps: np.ndarray, values: np.ndarray) -> str:
    """Return in a sentence what a small curve shows: its course, or that it is constant, and its highest value."""
    finite = np.isfinite(values)
    at, known = steps[finite], values[finite]
    if known.min() == known.max():
        return f"Constant at {known[0]:.4g}."
    top = int(known.argmax())
    return f"It {_course(at, known)}; highest {known[top]:.4g} (step {at[top]:,.0f})."


def _plots(lines: Lines, names: Sequence[str], sentences: Mapping[str, str] | None = None) -> list[str]:
    """Return a small plot, with what it shows, for every name that the lines have a finite value of."""
    found = {name: _series(lines, name) for name in names}
    return [
        html.exhibit(
            cut(TITLES.get(name, name), 40), (sentences or {}).get(name) or _conclusion(*series), _plot(lines, name)
        )
        for name, series in found.items()
        if np.isfinite(series[1]).any()
    ]


def loss_blocks(run: RunContents) -> list[str]:
    """Return the loss: what to conclude from it, its plot, and what a point is."""
    if not np.isfinite(run.losses[1]).any():
        return [html.paragraph(f"{METRICS} has no loss yet: a line is written every train.log_every steps.")]
    every, rise = run.recipe.train.log_every, _rise(run.losses[1])
    text = f"The loss {_course(*run.losses)}" + (f", after a lowest of {rise[0]:.4g}: it rises." if rise else ".")
    notes = [f"Each point is a mean over {every} steps."] * (every > 1) + ["No step was skipped."] * (not run.skipped)
    plot = f'<div class="plot">{_plot(run.lines, "loss", small=False)}</div>'
    return [html.finding(text), plot, html.paragraph(" ".join(notes), "note")]


def _loss_section(page: Page, run: RunContents) -> None:
    page.section("Loss", *loss_blocks(run))
    names = sorted({name for line in run.lines for name in line if name not in NOT_PARTS})
    if parts := _plots(run.lines, names[:MOST_PARTS]):
        text = html.paragraph("Each as measured, before it is weighted in the loss.", "note")
        page.section("Further parts of the loss", text, html.panels(parts))
    if plots := _plots(run.lines, list(TITLES)):
        page.section("Learning rate, gradients, throughput", html.panels(plots))


def _previews_section(page: Page, run: RunContents) -> None:
    matches = ((re.fullmatch(r"step-(\d+)", path.stem), path) for path in run.run.glob("samples/*.png"))
    images = sorted((int(match[1]), path) for match, path in matches if match)
    chosen = np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST_PREVIEWS)).round().astype(int))
    name, figures, thumbnails = run.quality[0], dict(zip(*run.qualities, strict=True)), []
    for step, path in (images[i] for i in chosen):
        figure = figures.get(step, math.nan)
        caption = f"step {step:,}" + (f", {name} {figure:.4g}" if math.isfinite(figure) else "")
        try:
            thumbnails.append(html.thumbnail(path, caption, PREVIEW_WIDTH))
        except Exception:  # of a damaged picture Pillow raises nearly anything; the page is worth more than it
            continue
    names = sorted({key for line in run.previews for key in line if key != "step"})
    at, values = (part[np.isfinite(run.qualities[1])] for part in run.qualities)
    course = _figure_course(*run.quality, at, values) if len(at) else ""
    curves = _plots(run.previews, names[:MOST_PARTS], {name: course})
    if not thumbnails and not curves:
        text = "This run draws none. To draw some, add --preview.every 500 when it is resumed."
    elif isinstance(run.recipe, DecoderRecipe):
        text = "Held-out images: each row of originals stands above its reconstructions by the averaged weights."
    else:
        text = (
            "Samples of the averaged weights, from the same seeds and classes each time. fd_pixels is a Frechet "
            "distance of reduced images in pixel space: lower is better, and it is not FID."
        )
    page.section("Previews", html.panels([*thumbnails, *curves]), html.paragraph(text, "note"))


# Settings, checkpoints, commands


def _option(value: object) -> str:
    """Return an option's value, as it is typed."""
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return "(empty)" if value == "" else cut(str(value).lower() if isinstance(value, bool) else value)


def _settings_section(page: Page, run: RunContents) -> None:
    recipe = run.recipe
    base, base_name = type(recipe)(), "default"
    if recipe.name in shipped() and isinstance(known := load_recipe(recipe.name), type(recipe)):
        base, base_name = known, f"recipe {recipe.name}"
    here, there = options(recipe), options(base)
    names = [name for name in here if name not in ("name", "description") and here[name] != there.get(name)]
    rows = [[f"--{name}", _option(here[name]), _option(there.get(name, "-"))] for name in names]
    blocks = [html.subheading(f"What differs from the {base_name}")]
    blocks.append(html.finding(f"{len(rows)} of {len(here)} options differ." if rows else "Nothing."))
    blocks += [html.table(["option", "this run", base_name], rows, "text")] if rows else []
    if run.changes:
        changed = [[_option(entry.get(key, "-")) for key in ("step", "option", "old", "new")] for entry in run.changes]
        text = f"Options changed on resume: {len({row[1] for row in changed})}; last from step {changed[-1][0]}."
        blocks += [html.subheading("Changed on resume"), html.finding(text)]
        blocks.append(html.table(["from step", "option", "old", "new"], changed, "text"))
    if run.start:
        facts = [[cut(key), _option(value)] for key, value in run.start.items()]
        text = f"The run started on {_option(run.start.get('device', 'a device that is not recorded'))}."
        blocks += [html.subheading("Recorded at the start"), html.finding(text), html.table(["", ""], facts, "text")]
    page.section("Settings", *blocks, html.folded(f"All options ({RECIPE})", html.block(recipe_text(recipe))))


def _checkpoints_section(page: Page, run: RunContents) -> None:
    if not run.checkpoints:
        text = f"None yet; one is saved every {run.recipe.train.save_every:,} steps (train.save_every) and on Ctrl-C."
        page.section("Checkpoints", html.paragraph(text))
        return
    name, sign = run.quality
    best = min((one.quality for one in run.checkpoints if one.quality is not None), default=None)
    rows = []
    for one in run.checkpoints:
        notes = ["damaged"] * one.damaged + ["newest"] * (one.step == run.saved)
        notes += ["best preview"] * (one.quality is not None and one.quality == best)
        quality = "-" if one.quality is None else f"{sign * one.quality:.4g}"
        rows.append([f"{one.step:,}", f"{one.megabytes:,.1f} MB", quality, ", ".join(notes)])
    whole = [one for one in run.checkpoints if not one.damaged]
    at = [one.step for one in whole if one.quality is not None and one.quality == best]
    text = f"{len(whole)} of {len(rows)} can be read" + (f"; best preview at step {at[0]:,}." if at else ".")
    page.section("Checkpoints kept", html.finding(text), html.table(["step", "size", name, ""], rows, "plain"))


def _next_commands(contents: RunContents) -> Iterator[tuple[str, str]]:
    """Yield sentences and the commands they are about."""
    run, recipe, name = path_word(contents.run), contents.recipe, contents.run.resolve().name
    train, data = recipe.train, recipe.data
    if not contents.finished:
        yield "Continue this run; a checkpoint continues bit for bit.", contents.resume
    if contents.saved is None:
        return
    if isinstance(recipe, Recipe):
        classes = [str(i) if "," in one else one for i, one in enumerate(data.class_names)]
        some = ["--classes", ",".join(classes[:2])] if len(classes) > 1 else []
        sde = ["--solver", "adams", "--rho", "0.75", "--nfe", "65", "--out", f"{name}-sde.png"]
        measure = "Measure 10,000 samples against the training images: FID for colour images, fd-pixels for grey ones."
        export = "Export a folder that only samples: model card, config.json, safetensors."
        yield "Sample by class, with the sampler of the recipe.", command("sample", run, *some, "--out", f"{name}.png")
        yield "Sample by the reverse SDE instead of the ODE.", command("sample", run, *sde)
        yield measure, command("eval", run, "-n", "10000", "--json", path_word(contents.run / "eval.json"))
        yield export, command("export", run, "--out", f"exports/{name}")
    elif contents.finished:
        rae = path_word(contents.run / "rae")
        images = f"data:{data.name}" if data.name in EMBEDDED else path_word(data.folder)
        yield "Judge the autoencoder by images that it restores (rFID).", command("eval", rae, "--ref", images)
        recipes = {known: load_recipe(known) for known in shipped()}
        second = [
            known
            for known, other in recipes.items()
            if isinstance(other, Recipe) and (other.codec.kind, other.data.name) == ("rae", data.name)
        ]
        named = recipe.name.replace("-rae-", "-ddt-")  # of several, that of the same encoder
        stage2 = min(second, key=lambda known: known != named, default="RECIPE")
        codec = ["--codec.kind", "rae", "--codec.path", rae]
        yield "Train a field on its latents (stage 2).", command("train", stage2, *codec)
    if contents.finished:
        stretched = "" if train.decay in FIXED else f" Its schedule ({train.decay}) is stretched to them."
        longer = f"{contents.resume} --train.steps {2 * train.steps}"
        yield f"Train longer: the same run, with more steps.{stretched}", longer
    own = ["--data.name", FOLDER, "--data.path", "data/mine", "--train.lr", f"{train.lr / 10:g}"]
    start = [path_word(contents.run / RECIPE), "--init-from", run]
    yield (
        "Fine-tune on other images (mvm data prepare PHOTOS --out data/mine), at a tenth of the learning rate.",
        command("train", *start, *own, "--out", f"runs/{name}-tuned"),
    )


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write one offline HTML page about a training run, whole or not at all; return its path (RUN/report.html).

    It needs recipe.json alone: a run that trains now, has crashed, or has no checkpoint yet has a report too.
    """
    html.require_plots()
    contents, name = RunContents(run), cut(run.resolve().name)
    title = f"{name}: step {contents.step:,} of {contents.recipe.train.steps:,}, {contents.state}"
    page = Page(title, _lead(contents))
    warnings = [*map(html.prose, _warnings(contents)), *([] if contents.finished else [_unfinished(contents)])]
    page.parts += [html.bullets(warnings, "warnings"), html.bullets(list(_findings(contents)))]
    for add_section in (_previews_section, _loss_section):
        add_section(page, contents)
    page.next_steps(list(_next_commands(contents)))
    for add_section in (_settings_section, _checkpoints_section):
        add_section(page, contents)
    out = run / REPORT if out is None else out
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    page.write(out)
    return out
