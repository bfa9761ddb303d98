"""The model card: a header that the hub reads, then what a person should know; what is not known is said to be so.

Its figures come from what `mvm eval --json` and `mvm sweep` write; those of other weights are refused.
"""

import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mvm.network import OwnConfig, parameters
from mvm.published.diffusers import misfit
from mvm.published.format import LIBRARY, PICTURE, Config
from mvm.recipes import FOLDER, OWN_DATA
from mvm.solver import solver_named
from mvm.untrusted import cut, read_json

PIPELINE = "unconditional-image-generation"  # the hub's nearest word for images without a text
HUB_DATA = {
    "cifar10": "uoft-cs/cifar10",
    "imagenet32": "ILSVRC/imagenet-1k",
    "imagenet256": "ILSVRC/imagenet-1k",
    "imagenette": "frgfm/imagenette",
}
NAMED = 20  # class names in a card
WHAT, TRAINING, FIGURES, USE, LIMITS = "What it is", "Training", "Figures", "How to use it", "Limits and licence"
SAMPLES = 10  # images of the picture, with the seeds 0, 1, ...
_PICTURED = f"![Samples]({PICTURE})"


class Figures(NamedTuple):
    """Figures, a row of cells each (metric, value, sampler, images, reference), and what a reader of them must know."""

    rows: list[list[str]]
    notes: list[str]


def sampler_words(settings: Mapping[str, Any]) -> str:
    """Return a sampler in words."""
    solver = solver_named(settings["solver"].partition(",")[0])  # a sweep adds what is shared
    if solver.by_tolerance and "tolerance" in settings:
        cost = f"tolerance {settings['tolerance']:g}"
    else:
        cost = f"{settings.get('evaluations', settings['nfe']):g} evaluations"
    words = [settings["solver"], cost, f"rho {settings['rho']:g}"]
    scales = [f"{name} {settings[name]:g}" for name in ("cfg", "internal") if settings.get(name, 1) != 1]
    where = [f"guided in [{settings['low']:g}, {settings['high']:g}]"] if scales else ["no guidance"]
    return ", ".join([*words, *scales, *where])


def read_figures(path: Path, weights: Collection[str]) -> Figures:
    """Return the figures in a file; weights: the sha256 of those that they may be of."""
    try:
        table = read_json(path)
        if "results" in table:  # of a sweep
            facts = table["facts"]
            origin, count = facts["model"], facts["images"]
            cells = [(cell, cell["metrics"]) for cell in table["results"]]
        else:
            images = table["images"]
            facts = {**table, "draw": images["draw"]}
            origin, count = images["origin"], images["count"]
            cells = [(images["sampler"], table["metrics"])]
        digest, against = origin["sha256"], "none"
        if reference := facts["reference"]:
            name, split, size = str(reference.get("name")), reference.get("split"), reference.get("count")
            against = ", ".join(filter(None, [name, split, f"{size:,} images" if size else "count not recorded"]))
        rows = []
        for settings, metrics in cells:
            for metric, figure in metrics.items():
                error = "" if figure["error"] is None else f" ± {figure['error']:.2g}"
                rows.append([metric, f"{figure['value']:.4g}{error}", sampler_words(settings), f"{count:,}", against])
        draw, software = facts["draw"], facts["software"]
        made = f"Seeds from {draw['seed']} on, {draw['labels']} labels; mvm {software['mvm']} on {software['device']}"
        figures = Figures(rows, [made, *facts["warnings"]])
        if not isinstance(digest, str):
            raise TypeError("sha256 is no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"--figures {path} holds no figures of a sampled model ({cut(repr(error))}); make it with: "
            "mvm eval RUN --json FILE, or give the results.json of a sweep"
        ) from None
    if digest not in weights:
        raise ValueError(f"--figures {path} is of other weights (sha256 {digest[:12]}...); measure these")
    return figures


def card(
    config: Config,
    name: str,
    *,
    words: str,
    figures: Figures,
    loss: float | None,
    encoder: str,
    pictured: bool,
    earlier: Mapping[str, str],
) -> str:
    """Return README.md.

    words: a person's own, loss: the last that was logged, encoder: of the latents, pictured: whether there is a picture
    of samples, earlier: sections of an earlier card of these weights, by title, that stand in place of new ones.
    """
    sections = {
        WHAT: _what(config, encoder),
        TRAINING: _training(config, loss),
        FIGURES: _figures(figures),
        USE: _use(config, name),
        LIMITS: _limits(config),
        **earlier,
    }
    caption = f"Seeds 0 to {SAMPLES - 1}, not picked: {sampler_words(asdict(config.recipe.sample))}."
    parts = [
        _header(config),
        f"# {name}\n\n{config.recipe.description or 'An image model.'}",
        f"{_PICTURED}\\\n{caption}" if pictured else "",
        words.strip(),
        *(f"## {title}\n\n{text}" for title, text in sections.items()),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def read_card(text: str) -> tuple[str, dict[str, str]]:
    """Return a card's own words, which stand under its title, and its sections by title."""
    head, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\n+", head.partition("\n# ")[2].strip())[2:]  # after title and description
    sections = (part.partition("\n") for part in rest)
    words = "\n\n".join(text for text in paragraphs if not text.startswith(_PICTURED))
    return words, {title.strip(): body.strip() for title, _, body in sections}


def _header(config: Config) -> str:
    recipe = config.recipe
    tags = [LIBRARY, "image-generation", "diffusion", recipe.path.schedule, recipe.network.kind]
    tags += ["class-conditional"] if recipe.objective.conditional else []
    tags += [] if misfit(recipe) else ["diffusers"]
    lines = [f"license: {config.license}", f"library_name: {LIBRARY}", f"pipeline_tag: {PIPELINE}", "tags:"]
    lines += [f"- {tag}" for tag in tags]
    if recipe.data.name in HUB_DATA:
        lines += ["datasets:", f"- {HUB_DATA[recipe.data.name]}"]
    return "\n".join(["---", *lines, "---"])


def _what(config: Config, encoder: str) -> str:
    recipe = config.recipe
    size, space = "x".join(map(str, recipe.data.shape)), "x".join(map(str, recipe.sample_shape))
    samples = f"Images: {size} (channels x height x width)."
    if not recipe.data.pictured:
        samples = f"Samples: {size} (channels first)."
    condition = "No classes."
    if recipe.condition.kind != "labels":
        condition = f"Condition: {recipe.condition.words}."
    elif recipe.objective.conditional:
        names = ", ".join(config.classes[:NAMED]) + (", ..." if len(config.classes) > NAMED else "")
        condition = f"Classes: {len(config.classes)} ({names})."
    if isinstance(recipe.network, OwnConfig):
        network = f"{recipe.network.described}, which is not part of mvm"
    else:
        network = f"{recipe.network.kind}, {parameters(*recipe.blueprint) / 1e6:.2f} M parameters"
    end = f", T = {recipe.path.T:g}" if recipe.path.T != 1 else ""
    lines = f"""\
- {samples} {condition}
- Network: {network}, stored in {config.source.dtype}.
- Path: {recipe.path.schedule}{end}; the network learns {recipe.objective.kind}.
- Sampler by default: {sampler_words(asdict(recipe.sample))}."""
    if not encoder:
        return lines
    return f"""\
{lines}
- Latents: {space}, of the frozen encoder {encoder}. Decoder and statistics are in `codec/`; \
the encoder is not needed to sample and is not included."""


def _training(config: Config, loss: float | None) -> str:
    recipe, source, data = config.recipe, config.source, config.recipe.data
    if not source.step:
        return f"""\
Converted from weights of another project, `{source.run}` (`{source.weights}`, sha256 of the file \
`{source.sha256[:16]}`) by mvm {source.mvm}; how they were trained, their authors say."""
    images = {FOLDER: f"a folder of pictures, `{data.path}`", OWN_DATA: "a dataset given in Python"}
    stamp = f", stamp `{source.data_stamp}`" if source.data_stamp else ""
    mirror = ", mirrored at random" if data.mirror else ""
    augment = "; warped by augmentation, which samples are not" if data.augment else ""
    return f"""\
- Data: {images.get(data.name, f"`{data.name}`")}{stamp}{mirror}{augment}.
- {source.step:,} steps of {recipe.train.batch:,} images: {source.step * recipe.train.batch:,} images shown. \
Last logged loss: {"not logged" if loss is None else f"{loss:.4g}"}.
- Recipe `{recipe.name}`, seed {recipe.seed}; every option is in `config.json`.
- Weights: `{source.weights}` of step {source.step:,}, sha256 `{source.sha256[:16]}` in the run; \
exported by mvm {source.mvm}."""


def _figures(figures: Figures) -> str:
    if not figures.rows:
        return "Not measured."
    table = [["metric", "value", "sampler", "images", "reference"], ["---"] * 5, *figures.rows]
    lines = ["| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in table]
    return "\n".join([*lines, "", *(f"- {note}." for note in figures.notes)])


def _use(config: Config, name: str) -> str:
    """Return the snippets; they run next to the folder as they stand, and a push gives them the hub's id."""
    quoted = json.dumps(name, ensure_ascii=False)
    needs = "It needs the package `mean-velocity-matching`. The name is the path of the folder, or the id on the hub."
    if isinstance(config.recipe.network, OwnConfig):
        return f"""\
{needs} Its network, {config.recipe.network.described}, is not part of that package:
make it, as it was given to `mvm.train`, and give it on loading.

```python
import mvm

model = mvm.load({quoted}, network=network)
samples = model.generate(4)
```"""
    if reason := misfit(config.recipe):
        diffusers = f"diffusers' `MVMPipeline` does not take this model: {reason}."
    else:
        classes = ", ".join(str(label % max(len(config.classes), 1)) for label in range(4))
        diffusers = f"""\
With diffusers, without remote code:

```python
from mvm.integrations.diffusers import MVMPipeline

pipe = MVMPipeline.from_pretrained({quoted})
images = pipe(class_labels=[{classes}], seeds=[0, 1, 2, 3]).images
```"""
    return f"""\
{needs}

```bash
mvm sample {shlex.quote(name)} --num 16 --out grid.png
```

```python
import mvm

samples = mvm.load({quoted}).generate(4)
samples.save("grid.png")  # samples.images: uint8 (B, C, H, W); samples.pil(): Pillow images
```

{diffusers}"""


def _limits(config: Config) -> str:
    known = config.license not in ("unknown", "other")
    licence = f"Weights: {config.license}." if known else "Of the weights: not stated."
    return f"""\
It draws what its training images show, at their size, and nothing else; no filter stands behind it. Biases
of the data and nearness to single training images: not measured.

{licence} The training images have licences of their own."""
