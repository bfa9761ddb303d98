"""The model card: a header that the hub reads, then what a person should know; what is not known is said to be so."""

from dataclasses import asdict, dataclass

from mvm.network import parameters
from mvm.published.figures import Figures, sampler_words
from mvm.published.format import LIBRARY, Config
from mvm.recipes import FOLDER

PIPELINE = "unconditional-image-generation"  # the hub's nearest word for images without a text
HUB_DATA = {
    "cifar10": "uoft-cs/cifar10",
    "imagenet32": "ILSVRC/imagenet-1k",
    "imagenet256": "ILSVRC/imagenet-1k",
    "imagenette": "frgfm/imagenette",
}
SHOWN = 20  # class names in a card


@dataclass(frozen=True)
class Told:
    """What a card tells beside the config: a person's words, figures, the last logged loss, the encoder of a codec."""

    name: str
    words: str
    figures: Figures
    loss: float | None
    encoder: str


def card(config: Config, told: Told) -> str:
    """Return README.md."""
    parts = [
        _header(config),
        f"# {told.name}\n\n{config.recipe.description or 'An image model.'}",
        *([told.words.strip()] if told.words.strip() else []),
        _what(config, told),
        _training(config, told),
        _figures(told.figures),
        _USE,
        _limits(config),
    ]
    return "\n\n".join(parts) + "\n"


def _header(config: Config) -> str:
    recipe = config.recipe
    tags = [LIBRARY, "image-generation", "diffusion", recipe.path.schedule, recipe.network.kind]
    tags += ["class-conditional"] if recipe.objective.conditional else []
    lines = ["---", f"license: {config.license}", f"library_name: {LIBRARY}", f"pipeline_tag: {PIPELINE}", "tags:"]
    lines += [f"- {tag}" for tag in tags]
    if recipe.data.name in HUB_DATA:
        lines += ["datasets:", f"- {HUB_DATA[recipe.data.name]}"]
    return "\n".join([*lines, "---"])


def _what(config: Config, told: Told) -> str:
    recipe = config.recipe
    count = parameters(*recipe.blueprint)
    size, space = "x".join(map(str, recipe.data.shape)), "x".join(map(str, recipe.sample_shape))
    names = ", ".join(config.classes[:SHOWN]) + (", ..." if len(config.classes) > SHOWN else "")
    end = f", T = {recipe.path.T:g}" if recipe.path.T != 1 else ""
    lines = [
        f"- Images: {size} (channels x height x width). "
        + (f"Classes: {len(config.classes)} ({names})." if recipe.objective.conditional else "No classes."),
        f"- Network: {recipe.network.kind}, {count / 1e6:.2f} M parameters, stored in {config.source.dtype}.",
        f"- Path: {recipe.path.schedule}{end}; the network learns {recipe.objective.kind}.",
        f"- Sampler, unless told otherwise: {sampler_words(asdict(recipe.sample))}.",
    ]
    if told.encoder:
        lines.append(
            f"- Latents: {space}, of the frozen encoder {told.encoder}. Decoder and statistics are in `codec/`; "
            "the encoder is not needed to sample and is not included."
        )
    return "\n".join(["## What it is", "", *lines])


def _data_words(config: Config) -> str:
    data = config.recipe.data
    return f"a folder of pictures, `{data.path}`" if data.name == FOLDER else f"`{data.name}`"


def _training(config: Config, told: Told) -> str:
    recipe, source = config.recipe, config.source
    stamp = f", stamp `{source.data_stamp}`" if source.data_stamp else ""
    loss = "not logged" if told.loss is None else f"{told.loss:.4g}"
    lines = [
        f"- Data: {_data_words(config)}{stamp}"
        + (", mirrored at random" if recipe.data.mirror else "")
        + ("; warped by augmentation, which samples are not" if recipe.data.augment else "")
        + ".",
        f"- {source.step:,} steps of {recipe.train.batch:,} images: {source.step * recipe.train.batch:,} images shown. "
        f"Last logged loss: {loss}.",
        f"- Recipe `{recipe.name}`, seed {recipe.seed}; every option is in `config.json`.",
        f"- Weights: `{source.weights}` of step {source.step:,}, sha256 `{source.sha256[:16]}` in the run; "
        f"exported by mvm {source.mvm}.",
    ]
    return "\n".join(["## Training", "", *lines])


def _figures(figures: Figures) -> str:
    if not figures.rows:
        return "## Figures\n\nNot measured."
    table = [["metric", "value", "sampler", "images", "reference"], ["---"] * 5, *(row.cells for row in figures.rows)]
    lines = ["| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in table]
    notes = ["", *(f"- {note}." for note in figures.notes)] if figures.notes else []
    return "\n".join(["## Figures", "", *lines, *notes])


_USE = """## How to use it

MODEL is this folder, or the id it has on the hub (OWNER/NAME).

```bash
mvm sample MODEL --num 16 --out grid.png
```

```python
import mvm
import torch
from mvm.generate import generate_all

model = mvm.load("MODEL")
seeds = torch.arange(16)
images = generate_all(model, seeds % model.num_classes, seeds, model.recipe.sample).images  # uint8 (B, C, H, W)
```"""


def _limits(config: Config) -> str:
    known = config.license not in ("unknown", "other")
    licence = f"Weights: {config.license}." if known else "Of the weights: not stated."
    return f"""## Limits and licence

It draws what its training images show, at their size, and nothing else; no filter stands behind it. Biases of the
data and nearness to single training images: not measured.

{licence} The training images have licences of their own."""
