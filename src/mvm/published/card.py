"""The model card: a header that the hub reads, then what a person should know; what is not known is said to be so.

Its figures come from what `mvm eval --json` and `mvm sweep` write; those of other weights are refused.
"""

import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mvm.network import OwnConfig, parameters
from mvm.published.diffusers import misfit
from mvm.published.format import LIBRARY, PICTURE, Config
from mvm.recipes import FOLDER, OWN_DATA, Recipe
from mvm.solver import solver_named
from mvm.untrusted import cut, read_json

PIPELINE = "unconditional-image-generation"  # the hub's nearest word for images without a text
HUB_DATA = {
    "cifar10": "uoft-cs/cifar10",
    "imagenet32": "ILSVRC/imagenet-1k",
    "imagenet256": "ILSVRC/imagenet-1k",
    "imagenette": "frgfm/imagenette",
}
SHOWN = 20  # class names in a card
WHAT, TRAINING, FIGURES, USE, LIMITS = "What it is", "Training", "Figures", "How to use it", "Limits and licence"
SAMPLES = 10  # images of the picture, with the seeds 0, 1, ...
_SHOWN = f"![Samples]({PICTURE})"


class Row(NamedTuple):
    """One figure: by which sampler, how many images, against what."""

    metric: str
    value: float
    error: float | None
    sampler: str
    count: int
    reference: str

    @property
    def cells(self) -> list[str]:
        """Return the row of a table."""
        value = f"{self.value:.4g}" + ("" if self.error is None else f" ± {self.error:.2g}")
        return [self.metric, value, self.sampler, f"{self.count:,}", self.reference]


class Figures(NamedTuple):
    """Figures, and what a reader of them must know."""

    rows: list[Row]
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


def _against(reference: Mapping[str, Any]) -> str:
    if not reference:
        return "none"
    parts = [str(reference.get("name")), *([str(reference["split"])] if reference.get("split") else [])]
    return ", ".join([*parts, f"{reference['count']:,} images" if reference.get("count") else "count not recorded"])


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
        digest, against = origin["sha256"], _against(facts["reference"])
        rows = [
            Row(name, found["value"], found["error"], sampler_words(settings), count, against)
            for settings, metrics in cells
            for name, found in metrics.items()
        ]
        draw, software = facts["draw"], facts["software"]
        made = f"Seeds from {draw['seed']} on, {draw['labels']} labels; mvm {software['mvm']} on {software['device']}"
        figures = Figures(rows, [made, *facts["warnings"]])
        _ = [row.cells for row in rows]  # a value that is no number shows here
        if not isinstance(digest, str):
            raise TypeError("sha256 is no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"--figures {path} tells nothing of a sampled model ({cut(repr(error))}); make it with: "
            "mvm eval RUN --json FILE, or give the results.json of a sweep"
        ) from None
    if digest not in weights:
        raise ValueError(f"--figures {path} is of other weights (sha256 {digest[:12]}...); measure these")
    return figures


@dataclass(frozen=True)
class CardFacts:
    """What a card says beside the config: a person's words, figures, the last logged loss, the encoder of a codec.

    pictured: whether there is a picture of samples. kept: sections of an earlier card of these weights, by title, that
    stand in place of new ones.
    """

    name: str
    words: str
    figures: Figures
    loss: float | None
    encoder: str
    pictured: bool = False
    kept: Mapping[str, str] = field(default_factory=dict)


def card(config: Config, facts: CardFacts) -> str:
    """Return README.md."""
    sections = {
        WHAT: _what(config, facts),
        TRAINING: _training(config, facts),
        FIGURES: _figures(facts.figures),
        USE: _use(config, facts.name),
        LIMITS: _limits(config),
        **facts.kept,
    }
    caption = f"Seeds 0 to {SAMPLES - 1}, not picked: {sampler_words(asdict(config.recipe.sample))}."
    parts = [
        _header(config),
        f"# {facts.name}\n\n{config.recipe.description or 'An image model.'}",
        *([f"{_SHOWN}\\\n{caption}"] if facts.pictured else []),
        *([facts.words.strip()] if facts.words.strip() else []),
        *(f"## {title}\n\n{text}" for title, text in sections.items()),
    ]
    return "\n\n".join(parts) + "\n"


def read_card(text: str) -> tuple[str, dict[str, str]]:
    """Return a card's own words, which stand under its title, and its sections by title."""
    head, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\n+", head.partition("\n# ")[2].strip())[2:]  # after title and description
    sections = (part.partition("\n") for part in rest)
    words = "\n\n".join(text for text in paragraphs if not text.startswith(_SHOWN))
    return words, {title.strip(): body.strip() for title, _, body in sections}


def renamed(text: str, name: str) -> str:
    """Return a card whose snippets load the model by another name."""
    text = re.sub(r'(mvm\.load|MVMPipeline\.from_pretrained)\("(?:[^"\\\n]|\\.)*"([,)])', rf'\1("{name}"\2', text)
    return re.sub(r"^mvm sample .*? --num", f"mvm sample {name} --num", text, flags=re.MULTILINE)


def _header(config: Config) -> str:
    recipe = config.recipe
    tags = [LIBRARY, "image-generation", "diffusion", recipe.path.schedule, recipe.network.kind]
    tags += ["class-conditional"] if recipe.objective.conditional else []
    tags += [] if misfit(recipe) else ["diffusers"]
    lines = ["---", f"license: {config.license}", f"library_name: {LIBRARY}", f"pipeline_tag: {PIPELINE}", "tags:"]
    lines += [f"- {tag}" for tag in tags]
    if recipe.data.name in HUB_DATA:
        lines += ["datasets:", f"- {HUB_DATA[recipe.data.name]}"]
    return "\n".join([*lines, "---"])


def _network(recipe: Recipe) -> str:
    if isinstance(recipe.network, OwnConfig):
        return f"{recipe.network.described}, which is not part of mvm"
    return f"{recipe.network.kind}, {parameters(*recipe.blueprint) / 1e6:.2f} M parameters"


def _what(config: Config, facts: CardFacts) -> str:
    recipe = config.recipe
    size, space = "x".join(map(str, recipe.data.shape)), "x".join(map(str, recipe.sample_shape))
    names = ", ".join(config.classes[:SHOWN]) + (", ..." if len(config.classes) > SHOWN else "")
    what = (
        f"Images: {size} (channels x height x width)" if recipe.data.pictured else f"Samples: {size} (channels first)"
    )
    end = f", T = {recipe.path.T:g}" if recipe.path.T != 1 else ""
    lines = [
        f"- {what}. "
        + (f"Classes: {len(config.classes)} ({names})." if recipe.objective.conditional else "No classes.")
        if recipe.condition.kind == "labels"
        else f"- {what}. Condition: {recipe.condition.words}.",
        f"- Network: {_network(recipe)}, stored in {config.source.dtype}.",
        f"- Path: {recipe.path.schedule}{end}; the network learns {recipe.objective.kind}.",
        f"- Sampler by default: {sampler_words(asdict(recipe.sample))}.",
    ]
    if facts.encoder:
        lines.append(
            f"- Latents: {space}, of the frozen encoder {facts.encoder}. Decoder and statistics are in `codec/`; "
            "the encoder is not needed to sample and is not included."
        )
    return "\n".join(lines)


def _training(config: Config, facts: CardFacts) -> str:
    recipe, source, data = config.recipe, config.source, config.recipe.data
    shown = f"a folder of pictures, `{data.path}`" if data.name == FOLDER else f"`{data.name}`"
    shown = "a dataset given in Python" if data.name == OWN_DATA else shown
    stamp = f", stamp `{source.data_stamp}`" if source.data_stamp else ""
    loss = "not logged" if facts.loss is None else f"{facts.loss:.4g}"
    if not source.step:
        return (
            f"Converted from weights of another project, `{source.run}` (`{source.weights}`, sha256 of the file "
            f"`{source.sha256[:16]}`) by mvm {source.mvm}; how they were trained, their authors say."
        )
    lines = [
        f"- Data: {shown}{stamp}"
        + (", mirrored at random" if data.mirror else "")
        + ("; warped by augmentation, which samples are not" if data.augment else "")
        + ".",
        f"- {source.step:,} steps of {recipe.train.batch:,} images: {source.step * recipe.train.batch:,} images shown. "
        f"Last logged loss: {loss}.",
        f"- Recipe `{recipe.name}`, seed {recipe.seed}; every option is in `config.json`.",
        f"- Weights: `{source.weights}` of step {source.step:,}, sha256 `{source.sha256[:16]}` in the run; "
        f"exported by mvm {source.mvm}.",
    ]
    return "\n".join(lines)


def _figures(figures: Figures) -> str:
    if not figures.rows:
        return "Not measured."
    table = [["metric", "value", "sampler", "images", "reference"], ["---"] * 5, *(row.cells for row in figures.rows)]
    lines = ["| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in table]
    notes = ["", *(f"- {note}." for note in figures.notes)] if figures.notes else []
    return "\n".join([*lines, *notes])


def _use(config: Config, name: str) -> str:
    """Return the snippets; they run beside the folder as they stand, and `renamed` gives them the hub's id."""
    quoted = json.dumps(name, ensure_ascii=False)
    needs = "It needs the package `mean-velocity-matching`. The name is the path of the folder, or the id on the hub."
    if isinstance(config.recipe.network, OwnConfig):
        return "\n".join(
            [
                f"{needs} Its network, {config.recipe.network.described}, is not part of that package:",
                "make it, as it was given to `mvm.train`, and give it on loading.",
                "",
                "```python",
                "import mvm",
                "",
                f"model = mvm.load({quoted}, network=network)",
                "samples = model.generate(4)",
                "```",
            ]
        )
    lines = [
        needs,
        "",
        "```bash",
        f"mvm sample {shlex.quote(name)} --num 16 --out grid.png",
        "```",
        "",
        "```python",
        "import mvm",
        "",
        f"samples = mvm.load({quoted}).generate(4)",
        'samples.save("grid.png")  # samples.images: uint8 (B, C, H, W); samples.pil(): Pillow images',
        "```",
        "",
    ]
    if reason := misfit(config.recipe):
        return "\n".join([*lines, f"diffusers' `MVMPipeline` does not take this model: {reason}."])
    classes = ", ".join(str(label % max(len(config.classes), 1)) for label in range(4))
    lines += [
        "With diffusers, without remote code:",
        "",
        "```python",
        "from mvm.integrations.diffusers import MVMPipeline",
        "",
        f"pipe = MVMPipeline.from_pretrained({quoted})",
        f"images = pipe(class_labels=[{classes}], seeds=[0, 1, 2, 3]).images",
        "```",
    ]
    return "\n".join(lines)


def _limits(config: Config) -> str:
    known = config.license not in ("unknown", "other")
    licence = f"Weights: {config.license}." if known else "Of the weights: not stated."
    return f"""\
It draws what its training images show, at their size, and nothing else; no filter stands behind it. Biases
of the data and nearness to single training images: not measured.

{licence} The training images have licences of their own."""
