"""The report of a training run: one offline page, at any time: while it trains, after a crash, after the end."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mvm import checkpoint
from mvm.data import open_prepared
from mvm.evaluation import report as html
from mvm.evaluation.images import EMBEDDED
from mvm.evaluation.report import Axes, Curve, Page, Style
from mvm.optim.optimizers import FIXED
from mvm.recipes import FOLDER, RECIPE, AnyRecipe, DecoderRecipe, Recipe, load_recipe, options, parse_recipe, shipped
from mvm.recipes import to_json as recipe_text
from mvm.training.logs import METRICS, read_metrics
from mvm.training.preview import QUALITY
from mvm.training.rundir import INIT
from mvm.untrusted import cut, parse_json, printable, read_text

REPORT = "report.html"  # in a run directory
START, CHANGES = "start.json", "changes.json"
MOST_PREVIEWS = 6
MOST_POINTS, MOST_SMALL = 1_000, 400  # of a curve, of a small one: more only make the page heavy
MOST_PARTS = 12  # of the loss: as many small plots
SHOWN = 290  # CSS pixels of a preview's width
LARGE, SMALL = (8.6, 3.4), (3.4, 2.2)  # inches of plots: the page's width, and 326 CSS pixels, a phone's
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
class Saved:
    """One checkpoint folder; quality: its preview figure, where it has one."""

    name: str
    step: int
    megabytes: float
    quality: float | None
    damaged: bool


@dataclass(frozen=True)
class Story:
    """The contents of a run directory, read once; images: of the training set, 0 where it is not here."""

    run: Path
    recipe: AnyRecipe
    lines: Lines  # of training: with a loss
    previews: Lines
    saved: list[Saved]
    start: dict[str, Any]
    init: dict[str, Any]
    changes: list[dict[str, Any]]
    images: int

    @property
    def logged(self) -> int:
        """The last step in the log."""
        return max((line["step"] for line in (*self.lines, *self.previews)), default=0)

    @property
    def kept(self) -> int | None:
        """The step from which a resumed run continues; None without a checkpoint."""
        return max((one.step for one in self.saved), default=None)

    @property
    def step(self) -> int:
        return max(self.logged, self.kept or 0)

    @property
    def finished(self) -> bool:
        return self.kept is not None and self.kept >= self.recipe.train.steps

    @property
    def state(self) -> str:
        if self.kept is None:
            return "no checkpoint yet"
        if self.finished:
            return "finished"
        return "paused" if self.logged <= self.kept else "training or interrupted"

    @property
    def judged(self) -> tuple[str, float]:
        """The preview figure that checkpoints are chosen by, and its sign: times it, lower is better."""
        return ("psnr", -1.0) if isinstance(self.recipe, DecoderRecipe) else (QUALITY, 1.0)


def _json(path: Path, kind: type) -> Any:
    """Return an optional file of a run; empty where it is missing, damaged or of another kind."""
    try:
        found = parse_json(read_text(path))
    except (OSError, ValueError):
        return kind()
    return found if isinstance(found, kind) else kind()


def _checkpoints(run: Path) -> Iterator[Saved]:
    """Yield the checkpoints of a run, but those that training removes meanwhile."""
    for folder in checkpoint.folders(run):
        found = re.fullmatch(r"step-(\d{1,12})", folder.name)
        if found is None:
            continue
        quality, damaged = math.nan, False
        try:
            quality = _number(checkpoint.read_manifest(folder).get("quality"))
        except checkpoint.DamagedCheckpoint:
            damaged = True
        try:
            size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        except OSError:
            continue
        yield Saved(folder.name, int(found[1]), size, quality if math.isfinite(quality) else None, damaged)


def _image_count(recipe: AnyRecipe, noted: object) -> int:
    """Return the number of training images: as noted at the start, else of the data; 0 where they are not here."""
    if type(noted) is int and noted > 0:
        return noted
    if recipe.data.name in EMBEDDED:
        return len(EMBEDDED[recipe.data.name]("train"))
    try:
        held_out = recipe.held_out.count if isinstance(recipe, DecoderRecipe) else 0
        return max(0, open_prepared(recipe.data.folder).count - held_out)
    except (OSError, ValueError):
        return 0


def _read(run: Path) -> Story:
    stored = run / RECIPE
    if not stored.is_file():
        what = "does not exist" if not run.exists() else f"is no run directory: it has no {RECIPE}"
        raise ValueError(f"'{run}' {what}; give the folder that `mvm train` wrote, by default runs/RECIPE")
    recipe = parse_recipe(read_text(stored), ".json", str(stored))
    lines = [line for line in read_metrics(run / METRICS) if 0 <= line["step"] < 1 << 53]
    start = _json(run / START, dict)
    return Story(
        run,
        recipe,
        lines=[line for line in lines if "loss" in line],
        previews=[line for line in lines if "loss" not in line],
        saved=list(_checkpoints(run)),
        start=start,
        init=_json(run / INIT, dict),
        changes=[entry for entry in _json(run / CHANGES, list) if isinstance(entry, dict)],
        images=_image_count(recipe, start.get("images")),
    )


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
    index, known = np.arange(len(values)), np.isfinite(values)
    half = np.minimum(len(values) // ENOUGH, index)
    sums, counts = (np.concatenate([[0], np.cumsum(part)]) for part in (np.where(known, values, 0), known))
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


def _seconds(story: Story) -> float:
    """Return the time spent in steps, from the logged throughput; 0 where none is logged."""
    total, before = 0.0, 0
    for line in story.lines:
        rate = _number(line.get(SPEED))
        if rate > 0:
            total += max(0, line["step"] - before) * story.recipe.train.batch / rate
        before = line["step"]
    return total


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds:.3g} seconds"


# Words


def _lead(story: Story) -> str:
    seen, seconds = story.step * story.recipe.train.batch, _seconds(story)
    epochs = f" ({_count(seen / story.images)} epochs of {story.images:,})" if story.images else ""
    parts = [f"{seen:,} images seen{epochs}"]
    if seconds:
        parts.append(f"{_duration(seconds)} in training steps")
    _, losses = _series(story.lines, "loss")
    if len(losses):
        averaged = len(losses) // ENOUGH + 1
        of = f" (mean of the last {averaged} log lines)" if averaged > 1 else ""
        parts.append(f"loss {smoothed(losses)[-1]:.4g}{of}")
    _, speeds = _series(story.lines, SPEED)
    if np.isfinite(speeds).any():
        parts.append(f"median throughput {_count(float(np.nanmedian(speeds)))} images/s")
    description = cut(story.recipe.description.rstrip(". "))
    return f"{description}. {', '.join(parts)}." if description else f"{', '.join(parts)}."


def _findings(story: Story) -> Iterator[str]:
    """Yield how loss and previews have changed, and other facts of no concern."""
    steps, losses = _series(story.lines, "loss")
    if len(losses) > 1:
        first, last = losses[0], smoothed(losses)[-1]
        went = "fell" if last < first else "went"
        yield f"The loss {went} from {first:.4g} (step {steps[0]:,.0f}) to {last:.4g} (step {steps[-1]:,.0f})."
    name, sign = story.judged
    at, figures = _series(story.previews, name)
    if len(figures) > 1 and np.isfinite(figures).any():
        best = int(np.nanargmin(sign * figures))
        rank = "its best so far" if best == len(figures) - 1 else f"best: {figures[best]:.4g} (step {at[best]:,.0f})"
        first, last = (f"{figures[i]:.4g} (step {at[i]:,.0f})" for i in (0, -1))
        yield f"{name} went from {first} to {last}; {rank}."
    if story.lines and not _number(story.lines[-1].get("skipped", 0)):
        yield "No step was skipped."
    if story.init:
        known = (key for key in ("run", "step", "weights") if key in story.init)
        origin = ", ".join(f"{key} {cut(story.init[key], 80)}" for key in known)
        yield f"Started from other weights ({INIT}): {origin}."


def _warnings(story: Story) -> Iterator[html.Html]:
    """Yield what a reader should look at, with what to do about it."""
    steps, losses = _series(story.lines, "loss")
    skipped = _number(story.lines[-1].get("skipped", 0)) if story.lines else 0.0
    if skipped > 0:
        yield html.prose(
            f"{skipped:,.0f} of {story.logged:,} steps were skipped because their gradient was not finite. A few do no "
            "harm; if there are more and more of them, lower `--train.lr` or use `--engine.precision fp32`."
        )
    bad = ~np.isfinite(losses)
    if bad.any():
        yield html.prose(
            f"The loss was not finite in {bad.sum()} of {len(losses)} log lines, first at step {steps[bad][0]:,.0f}."
        )
    if (rise := _rise(losses)) is not None:
        yield html.prose(
            f"The loss rises: its lowest was {rise[0]:.4g}, it is {rise[1]:.4g} now. Try a lower `--train.lr`, or a "
            "longer `--train.warmup`, in a new run."
        )
    name, sign = story.judged
    at, figures = _series(story.previews, name)
    at, figures = at[np.isfinite(figures)], figures[np.isfinite(figures)]
    if len(figures):
        best = int((sign * figures).argmin())
        slack = 0.5 if name == "psnr" else 0.1 * abs(figures[best])  # half a dB, or a tenth of a distance
        if sign * (figures[-1] - figures[best]) > slack:
            change = f"{name} is {figures[-1]:.4g}, and was {figures[best]:.4g} at step {at[best]:,.0f}"
            remedy = "No checkpoint of that step is kept; `--train.keep_best true` keeps the best one."
            if any(one.step == at[best] and not one.damaged for one in story.saved):
                remedy = f"The checkpoint of that step is kept: use it with `--checkpoint {at[best]:.0f}`."
            yield html.prose(f"Previews have become worse: {change}. {remedy}")
    for one in story.saved:
        if one.damaged:
            yield html.prose(f"Checkpoint {one.name} is damaged: its manifest cannot be read.")
    epochs = story.step * story.recipe.train.batch / story.images if story.images else 0
    if isinstance(story.recipe, Recipe) and story.images < FEW_IMAGES and epochs >= MANY_EPOCHS:
        yield html.prose(
            f"Few images, seen often: each of {story.images:,} about {epochs:,.0f} times. Watch for memorization: "
            "compare samples with their nearest training images. `--data.augment 0.12` and `--network.dropout 0.1` "
            "counter it in a new run."
        )
    if not story.finished:
        to_go, kept = f"Not finished, {story.recipe.train.steps - story.step:,} steps to go.", story.kept
        if kept is None:
            text = "No checkpoint is saved yet; a run that was stopped starts again from step 0"
        elif story.logged > kept:
            text = f"{to_go} If no process trains it now, continue from step {kept:,}"
        else:
            text = f"{to_go} Continue from step {kept:,}"
        yield html.Html(f"{text}:{html.block(_resume(story))}")


# Curves


def _axes(x: str, y: str, title: str, values: np.ndarray, from_zero: bool) -> Axes:
    """Return axes with a logarithmic y where a few large values would press the others flat and all are positive."""
    values = values[np.isfinite(values)]
    if from_zero and values.max() > 0:
        return Axes(x, y, markers=True, title=title, range_y=(0, 1.1 * values.max()))
    if len(values) < 3 or values.min() <= 0 or values.max() <= 4 * np.median(values):
        return Axes(x, y, markers=True, title=title)
    decades = range(math.floor(math.log10(values.min())), math.ceil(math.log10(values.max())) + 1)
    marks = (1, 2, 5) if len(decades) <= 3 else (1,)  # matplotlib's own overlap in a small plot
    ticks = [mark * 10.0**decade for decade in decades for mark in marks]
    inside = [tick for tick in ticks if values.min() <= tick <= values.max()]
    return Axes(x, y, markers=True, title=title, log_y=True, ticks_y=inside)


def _thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of at most so many values, the lowest and highest of equal stretches: no spike is lost."""
    if len(values) <= most:
        return np.arange(len(values))
    found = []
    for part in np.array_split(np.arange(len(values)), most // 2):
        part = part[np.isfinite(values[part])]
        found += [part[values[part].argmin()], part[values[part].argmax()]] if len(part) else []
    return np.unique(found)


def _plot(lines: Lines, name: str, small: bool = True) -> str:
    """Return a plot of one name of the log: the logged values, faint, and their smoothed line, if they are many.

    A small plot has a title, a large one a label and a legend.
    """
    steps, values = _series(lines, name)
    many = len(steps) and steps[-1] >= 10_000  # long numbers would overlap
    if len(values) < ENOUGH:
        drawn = [("logged", values, Style(SMOOTH.colour, "-", "."))]
    elif name == "lr":
        drawn = [("logged", values, SMOOTH)]
    else:
        drawn = [("logged", values, RAW), ("smoothed", smoothed(values), SMOOTH)]
    curves = []
    for label, line, style in drawn:
        shown = _thinned(line, MOST_SMALL if small else MOST_POINTS)
        x = steps[shown] / 1000 if many else steps[shown]
        curves.append(Curve("" if small else label, x, line[shown], style=style))
    title = cut(TITLES.get(name, name), 40) if small else ""
    axes = _axes("thousand steps" if many else "step", "" if small else name, title, values, name in FROM_ZERO)
    return html.plot_svg(curves, axes, SMALL if small else LARGE)


def _plots(lines: Lines, names: Sequence[str]) -> list[str]:
    """Return a small plot for every name that the lines have a finite value of."""
    return [_plot(lines, name) for name in names if np.isfinite(_series(lines, name)[1]).any()]


def _loss_section(page: Page, story: Story) -> None:
    if not np.isfinite(_series(story.lines, "loss")[1]).any():
        page.section(
            "Loss", html.paragraph(f"{METRICS} has no loss yet: a line is written every train.log_every steps.")
        )
        return
    every = story.recipe.train.log_every
    note = html.paragraph(f"A point is the mean over the {every} steps since the one before.") if every > 1 else ""
    page.section("Loss", f'<div class="wide curve">{_plot(story.lines, "loss", small=False)}</div>', note)
    names = sorted({name for line in story.lines for name in line if name not in NOT_PARTS})
    if parts := _plots(story.lines, names[:MOST_PARTS]):
        page.section(
            "Further parts of the loss", html.paragraph("As measured, before their weights."), html.panels(parts)
        )
    if plots := _plots(story.lines, list(TITLES)):
        page.section("Learning rate, gradients, throughput", html.panels(plots))


def _previews_section(page: Page, story: Story) -> None:
    found = ((re.fullmatch(r"step-(\d+)", path.stem), path) for path in story.run.glob("samples/*.png"))
    images = sorted((int(match[1]), path) for match, path in found if match)
    chosen = np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST_PREVIEWS)).round().astype(int))
    name, _ = story.judged
    figures = {line["step"]: _number(line[name]) for line in story.previews if name in line}
    shown = []
    for step, path in (images[i] for i in chosen):
        figure = figures.get(step, math.nan)
        caption = f"step {step:,}" + (f", {name} {figure:.4g}" if math.isfinite(figure) else "")
        try:
            shown.append(html.thumbnail(path, caption, SHOWN))
        except Exception:  # of a damaged picture Pillow raises nearly anything; the page is worth more than it
            continue
    names = sorted({key for line in story.previews for key in line if key != "step"})
    curves = _plots(story.previews, names[:MOST_PARTS])
    if not shown and not curves:
        text = "This run draws none. Draw some from now on: add --preview.every 500 when it is resumed."
    elif isinstance(story.recipe, DecoderRecipe):
        text = "Held-out images, a row of originals above the row of what the averaged decoder makes of them."
    else:
        text = (
            "Samples of the averaged weights, from the same seeds and classes each time. fd_pixels is a Frechet "
            "distance of shrunken pixels: lower is better, and it is not FID."
        )
    page.section("Previews", html.paragraph(text), html.panels(shown), html.panels(curves))


# Settings, checkpoints, commands


def _shown(value: object) -> str:
    """Return an option's value, as it is typed."""
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return "(empty)" if value == "" else cut(str(value).lower() if isinstance(value, bool) else value)


def _settings_section(page: Page, story: Story) -> None:
    recipe = story.recipe
    base, called = type(recipe)(), "default"
    if recipe.name in shipped() and isinstance(known := load_recipe(recipe.name), type(recipe)):
        base, called = known, f"recipe {recipe.name}"
    here, there = options(recipe), options(base)
    names = [name for name in here if name not in ("name", "description") and here[name] != there.get(name)]
    rows = [[f"--{name}", _shown(here[name]), _shown(there.get(name, "-"))] for name in names]
    blocks = [html.subheading(f"What differs from the {called}")]
    blocks.append(html.table(["option", "this run", called], rows, "text") if rows else html.paragraph("Nothing."))
    if story.changes:
        changed = [[_shown(entry.get(key, "-")) for key in ("step", "option", "old", "new")] for entry in story.changes]
        blocks += [
            html.subheading("Changed on resume"),
            html.table(["from step", "option", "old", "new"], changed, "text"),
        ]
    if story.start:
        facts = [[cut(key), _shown(value)] for key, value in story.start.items()]
        blocks += [html.subheading("Recorded at the start"), html.table(["", ""], facts, "text")]
    page.section("Settings", *blocks, html.folded(f"All options ({RECIPE})", html.block(recipe_text(recipe))))


def _checkpoints_section(page: Page, story: Story) -> None:
    if not story.saved:
        text = f"None yet; one is saved every {story.recipe.train.save_every:,} steps (train.save_every) and on Ctrl-C."
        page.section("Checkpoints", html.paragraph(text))
        return
    name, sign = story.judged
    best = min((one.quality for one in story.saved if one.quality is not None), default=None)
    rows = []
    for one in story.saved:
        notes = ["damaged"] * one.damaged + ["newest"] * (one.step == story.kept)
        notes += ["best preview"] * (one.quality is not None and one.quality == best)
        quality = "-" if one.quality is None else f"{sign * one.quality:.4g}"
        rows.append([f"{one.step:,}", f"{one.megabytes:,.1f} MB", quality, ", ".join(notes)])
    page.section("Checkpoints kept", html.table(["step", "size", name, ""], rows, "plain"))


def _typed(*words: object) -> str:
    return printable(shlex.join(["mvm", *map(str, words)]))  # what is pasted must not steer a terminal


def _folder(path: Path) -> str:
    """Return a path as a command takes it: one that begins with a dash would be an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _resume(story: Story) -> str:
    return _typed("train", "--resume", _folder(story.run))


def _next_commands(story: Story) -> Iterator[tuple[str, str]]:
    """Yield sentences and the commands they are about."""
    run, recipe, name = _folder(story.run), story.recipe, story.run.resolve().name
    if not story.finished:
        yield "Continue this run; a checkpoint continues bit for bit.", _resume(story)
    if story.kept is None:
        return
    if isinstance(recipe, Recipe):
        classes = [str(i) if "," in one else one for i, one in enumerate(recipe.data.class_names)]
        some = ["--classes", ",".join(classes[:2])] if len(classes) > 1 else []
        yield (
            "Sample by class, with the sampler of the recipe.",
            _typed("sample", run, *some, "--out", f"{name}.png"),
        )
        yield (
            "Sample by the reverse SDE instead of the ODE.",
            _typed("sample", run, "--solver", "adams", "--rho", "0.75", "--nfe", "65", "--out", f"{name}-sde.png"),
        )
        yield (
            "Measure 10,000 samples against the training images: FID for colour images, fd-pixels for grey ones.",
            _typed("eval", run, "-n", "10000", "--json", _folder(story.run / "eval.json")),
        )
        yield (
            "Export a folder that only samples: model card, config.json, safetensors.",
            _typed("export", run, "--out", f"exports/{name}"),
        )
    elif story.finished:
        data, rae = recipe.data, _folder(story.run / "rae")
        images = f"data:{data.name}" if data.name in EMBEDDED else _folder(data.folder)
        yield "Judge the autoencoder by images that it restores (rFID).", _typed("eval", rae, "--ref", images)
        fields = (
            known
            for known in shipped()
            if isinstance(found := load_recipe(known), Recipe)
            and (found.codec.kind, found.data.name) == ("rae", data.name)
        )
        yield (
            "Train a field on its latents (stage 2).",
            _typed("train", next(fields, "RECIPE"), "--codec.kind", "rae", "--codec.path", rae),
        )
    train = recipe.train
    stretched = "" if train.decay in FIXED else f" Its schedule ({train.decay}) is stretched to them."
    yield (
        f"Train longer: the same run, with more steps.{stretched}",
        f"{_resume(story)} --train.steps {2 * train.steps}",
    )
    own = ["--data.name", FOLDER, "--data.path", "data/mine"]
    rate = ["--train.lr", f"{train.lr / 10:g}", "--out", f"runs/{name}-tuned"]
    yield (
        "Fine-tune on other images (mvm data prepare PHOTOS --out data/mine), at a tenth of the learning rate.",
        _typed("train", _folder(story.run / RECIPE), "--init-from", run, *own, *rate),
    )


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write one offline HTML page about a training run, whole or not at all; return its path (RUN/report.html).

    It needs recipe.json alone: a run that trains now, has crashed, or has no checkpoint yet has a report too.
    """
    html.require_plots()
    story = _read(run)
    name = cut(run.resolve().name)
    page = Page(f"{name}: step {story.step:,} of {story.recipe.train.steps:,}, {story.state}", _lead(story))
    page.parts.append(html.bullets(list(_warnings(story)), "warnings"))
    page.parts.append(html.bullets(list(_findings(story))))
    _loss_section(page, story)
    _previews_section(page, story)
    _settings_section(page, story)
    _checkpoints_section(page, story)
    commands = (
        text for sentence, typed in _next_commands(story) for text in (html.paragraph(sentence), html.block(typed))
    )
    page.section("What to do next", *commands)
    out = run / REPORT if out is None else out
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    page.write(out)
    return out
