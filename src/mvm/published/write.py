"""From a run, or another published model, to a folder that only samples: all of it, or nothing. And its model card.

The card has a header that the hub reads, then what a person should know; what is not known is said to be so. Its
figures come from what `mvm eval --json` and `mvm sweep` write; those of other weights are refused.
"""

import hashlib
import json
import os
import re
import shlex
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mvm.checkpoint import METRICS, read_metrics
from mvm.data import open_prepared
from mvm.files import atomic, claimed, require_utf8, sha256, write_text
from mvm.latent import DecoderOnly
from mvm.network import OwnConfig, parameters
from mvm.options import choose
from mvm.published.diffusers import misfit, tables
from mvm.published.format import (
    CARD,
    CONFIG,
    LIBRARY,
    MOST_JSON,
    PICTURE,
    WEIGHTS,
    Config,
    WeightsSource,
    check_all,
    check_license,
    replaceable,
    version,
    write_codec,
)
from mvm.published.source import Opened, open_model
from mvm.published.tuned import write_tuned
from mvm.recipes import FOLDER, OWN_DATA, Recipe, load_recipe, require_field_recipe, shipped
from mvm.solver import solver_named
from mvm.untrusted import cut, markdown, printable, read_json, read_text

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
Draw = Callable[[Path], bytes | None]
PIPELINE = "unconditional-image-generation"  # the hub's nearest word for images without a text
HUB_DATA = {
    "cifar10": "uoft-cs/cifar10",
    "imagenet32": "ILSVRC/imagenet-1k",
    "imagenet256": "ILSVRC/imagenet-1k",
    "imagenet512": "ILSVRC/imagenet-1k",
    "imagenette": "frgfm/imagenette",
}
NAMED = 20  # class names in a card
WHAT, TRAINING, FIGURES, USE, LIMITS = "What it is", "Training", "Figures", "How to use it", "Limits and licence"
SAMPLES = 10  # images of the picture, with the seeds 0, 1, ...
_PICTURED = f"![Samples]({PICTURE})"


def export(
    model: str | Path | Opened,
    folder: Path,
    *,
    weights: str = "ema",
    which: str = "latest",
    dtype: str | None = None,
    license: str | None = None,
    words: str = "",
    figures: Path | None = None,
    draw: Draw | None = None,
    allow_download: bool = False,
) -> Config:
    """Write a published model of a run's checkpoint, or of another published model; return its config.

    model: a name, or opened weights. dtype, license: None is float16 and "unknown" for a run, and what a published
    model has. words: Markdown for the card, under its title. figures: JSON of `mvm eval` or `mvm sweep`, of these very
    weights. draw: makes the card's picture, a PNG, of the folder that is written, or None. allow_download: as of
    `mvm.load`, of a run that holds no decoder.
    Of a published model the card's words, figures and other sections are kept as far as they still hold.
    """
    choose("dtype", dtype or "float16", DTYPES)
    check_license(license or "unknown")
    if words.lstrip().startswith("---"):
        raise ValueError("the card's own words begin with '---'; its header is made from the run, leave it out")
    if not folder.name:
        raise ValueError(f"--out {folder} is no name of a folder; give one, as in --out ../photos")
    require_utf8(folder)
    _require_replaceable(folder)
    asked = bool(words or figures or license not in (None, "unknown"))
    opened = model if isinstance(model, Opened) else open_model(model, weights, which)
    opened = opened._replace(outside=opened.outside or allow_download)
    recipe, given = require_field_recipe(opened.recipe, opened.origin["run"]), opened.config
    source = _source(opened, dtype)
    kind = choose("dtype", source.dtype, DTYPES)
    values = {key: value.to(kind) if value.is_floating_point() else value for key, value in opened.weights.items()}
    if bad := [key for key, value in values.items() if not bool(value.isfinite().all())]:
        raise ValueError(f"--dtype {source.dtype} cannot hold {bad[0]} (not finite there); try bfloat16 or float32")
    with claimed(folder), atomic(folder) as temporary:
        _require_replaceable(folder)  # another process may have written it meanwhile
        _edited_card(folder, asked)
        temporary.mkdir()
        path = temporary / WEIGHTS
        try:
            save_file({name: value.contiguous() for name, value in values.items()}, path, {"format": "pt"})
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{WEIGHTS}: {error}") from error
        path.chmod(0o644)  # safetensors makes files private
        digest = sha256(path)
        if given is None:
            config = Config(_public(recipe), _class_names(opened), license or "unknown", source, digest)
        else:
            config = replace(given, license=license or given.license, source=source, sha256=digest)
        encoder = _write_codec(temporary, opened)
        if opened.tuned:
            write_tuned(temporary, digest, opened.tuned)
        write_text(temporary / CONFIG, config.to_json())
        for name, table in tables(config.recipe, config.classes).items():
            (temporary / name).parent.mkdir(exist_ok=True)
            write_text(temporary / name, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
        measured = read_figures(figures, (source.sha256, digest)) if figures else Figures([], [])
        loss, earlier = None, {}
        if given is not None:
            same = all(torch.equal(values[name].float(), value.float()) for name, value in opened.weights.items())
            anew = {WHAT, USE} | (set() if same and figures is None else {FIGURES})
            anew |= set() if config.license == given.license else {LIMITS}
            if (opened.folder / CARD).is_file():
                own, sections = read_card(read_text(opened.folder / CARD, MOST_JSON))
                words, earlier = words.strip() or own, {key: text for key, text in sections.items() if key not in anew}
        elif isinstance(model, str | Path):
            loss = _last_loss(Path(model), source.step)
        if picture := draw(temporary) if draw else None:
            (temporary / PICTURE).write_bytes(picture)
        title = folder.resolve().name
        sections = {
            WHAT: _what(config, encoder),
            TRAINING: _training(config, loss),
            FIGURES: _figures(measured),
            USE: _use(config, title),
            LIMITS: _limits(config),
            **earlier,  # of a card of these weights
        }
        write_text(temporary / CARD, _card(config, title, words, bool(picture), sections))
        _, codec = check_all(temporary)
        now = "" if codec is None else codec.identity.get("codec", "")
        if source.codec and source.codec != now:
            raise ValueError(
                f"the run was trained in latents of fingerprint {source.codec[:12]}, codec.path holds "
                f"{now[:12]} now; restore the autoencoder it was trained with"
            )
        if (kept := _edited_card(folder, asked)) is not None:
            (temporary / CARD).write_bytes(kept)
            warnings.warn(
                f"{folder / CARD} was edited by hand, or written by an earlier version, and is kept: it may tell of "
                "other weights. Remove it and export again for a new one",
                stacklevel=2,
            )
    return config


def _require_replaceable(folder: Path) -> None:
    if not replaceable(folder):
        raise ValueError(f"--out {folder} exists and is not an exported model alone; give another folder")


def _source(opened: Opened, dtype: str | None) -> WeightsSource:
    """Return where the weights came from; of a published model, where they came from in the first place."""
    if opened.config is not None:
        return replace(opened.config.source, dtype=dtype or opened.config.source.dtype)
    facts = {name: opened.origin[name] for name in ("step", "weights", "sha256")}
    facts["run"] = printable(opened.origin["run"])
    stamp = opened.origin["data_stamp"] or ""
    return WeightsSource(**facts, dtype=dtype or "float16", mvm=version(), data_stamp=stamp, codec=opened.codec)


def _base(name: str) -> str:
    """Return a path's last part; a hub id stays as it is."""
    path = Path(name)
    local = path.is_absolute() or ".." in path.parts or os.path.exists(name) or name.count("/") > 1
    return path.name if local else name


def _public(recipe: Recipe) -> Recipe:
    """Return the recipe without the paths of this machine: they would mean nothing on others, and give it away."""
    path = _base(recipe.data.path) if recipe.data.name == FOLDER else ""
    data = replace(recipe.data, path=path, names=tuple(map(printable, recipe.data.names)))
    codec = replace(recipe.codec, path="", encoder="", latents="")
    if recipe.name in shipped() and load_recipe(recipe.name).data.name != recipe.data.name:
        kinds = ", ".join(data.class_names[:5]) + (", ..." if len(data.class_names) > 5 else "")
        text = f"Images of {data.size}x{data.size} pixels ({kinds}), trained by the recipe {recipe.name}"
        recipe = replace(recipe, description=text if data.size else "Trained on other images than its recipe's")
    condition, repa = replace(recipe.condition, encoder=""), replace(recipe.repa, encoder=_base(recipe.repa.encoder))
    return replace(recipe, data=data, codec=codec, condition=condition, repa=repa)


def _class_names(opened: Opened) -> tuple[str, ...]:
    """Return the names of the classes; of a folder, whose recipe has but numbers, those of its index if it is there."""
    data = opened.recipe.data
    if data.name == FOLDER and opened.reached(data.path) and (data.folder / "index.json").is_file():
        prepared = open_prepared(data.folder)
        if prepared.stamp == opened.origin["data_stamp"]:
            return tuple(map(printable, prepared.classes))  # as `mvm data prepare` has long kept them
    return tuple(map(printable, data.class_names))


def _write_codec(folder: Path, opened: Opened) -> str:
    """Write the decoder and the statistics of a latent model, or its VAE; return their encoder's name, or ""."""
    codec, encoder = opened.open_codec(), ""
    if isinstance(codec, DecoderOnly):
        encoder = _base(codec.encoder_config.name)
        codec = codec.renamed(encoder)
    write_codec(folder, codec)
    return encoder


def _last_loss(run: Path, step: int) -> float | None:
    """Return the loss logged last up to a step; None where there is none."""
    losses = ((point["step"], point.get("loss")) for point in reversed(read_metrics(run / METRICS)))
    return next((loss for at, loss in losses if isinstance(loss, float) and at <= step), None)


# --- the card -----------------------------------------------------------------------------------------------------


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
    if settings.get("auto_scale", 1) != 1:
        scales.append(f"autoguidance {settings['auto_scale']:g} by {settings['auto']}")
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
            cells = [({**images["sampler"], "auto": images.get("auto", {}).get("run")}, table["metrics"])]
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
        provenance = (
            f"Seeds from {draw['seed']} on, {draw['labels']} labels; mvm {software['mvm']} on {software['device']}"
        )
        figures = Figures(rows, [provenance, *facts["warnings"]])
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


def _card(config: Config, name: str, words: str, pictured: bool, sections: Mapping[str, str]) -> str:
    """Return README.md; words: a person's own, pictured: whether there is a picture of samples."""
    caption = f"Seeds 0 to {SAMPLES - 1}, not picked: {sampler_words(asdict(config.recipe.sample))}."
    parts = [
        _header(config),
        f"# {markdown(name)}\n\n{markdown(config.recipe.description or 'An image model.')}",
        f"{_PICTURED}\\\n{caption}" if pictured else "",
        words.strip(),
        *(f"## {title}\n\n{text}" for title, text in sections.items()),
    ]
    return _sealed("\n\n".join(filter(None, parts)) + "\n\n")


SEAL = "<!-- mvm export "


def _sealed(text: str) -> str:
    """Return a card with a last line, which no reader shows, by which it is known whether a person has edited it."""
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def _edited_card(folder: Path, replaced: bool) -> bytes | None:
    """Return a card that a person has edited, None where there is none; replaced: raise, as it would be lost."""
    if not (folder / CARD).is_file():
        return None
    card = (folder / CARD).read_bytes()
    text, sealed, _ = card.decode(errors="replace").rpartition(SEAL)
    if sealed and _sealed(text).encode() == card:
        return None
    if replaced:
        raise ValueError(
            f"--out {folder}: its {CARD} was edited by hand, or written by an earlier version, and would be lost; move "
            "it away, or leave out --card, --figures and --license to keep it as it is"
        )
    return card


def read_card(text: str) -> tuple[str, dict[str, str]]:
    """Return a card's own words, which stand under its title, and its sections by title."""
    head, *rest = re.split(r"^## ", text.partition(SEAL)[0], flags=re.MULTILINE)
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
        names = ", ".join(map(markdown, config.classes[:NAMED])) + (", ..." if len(config.classes) > NAMED else "")
        condition = f"Classes: {len(config.classes)} ({names})."
    if isinstance(recipe.network, OwnConfig):
        network = f"{markdown(recipe.network.described)}, which is not part of mvm"
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
- Latents: {space}, of the frozen encoder {markdown(encoder)}. Decoder and statistics are in `codec/`; \
the encoder is not needed to sample and is not included."""


def _training(config: Config, loss: float | None) -> str:
    recipe, source, data = config.recipe, config.source, config.recipe.data
    run, weights, digest = (markdown(text, code=True) for text in (source.run, source.weights, source.sha256[:16]))
    version = markdown(source.mvm)
    if not source.step:
        return f"""\
Converted from weights of another project, {run} ({weights}, sha256 of the file \
{digest}) by mvm {version}; how they were trained, their authors say."""
    images = {FOLDER: f"a folder of pictures, {markdown(data.path, code=True)}", OWN_DATA: "a dataset given in Python"}
    stamp = f", stamp {markdown(source.data_stamp, code=True)}" if source.data_stamp else ""
    mirror = ", mirrored at random" if data.mirror else ""
    augment = "; warped by augmentation, which samples are not" if data.augment else ""
    return f"""\
- Data: {images.get(data.name, f"`{data.name}`")}{stamp}{mirror}{augment}.
- {source.step:,} steps of {recipe.train.batch:,} images: {source.step * recipe.train.batch:,} images shown. \
Last logged loss: {"not logged" if loss is None else f"{loss:.4g}"}.
- Recipe {markdown(recipe.name, code=True)}, seed {recipe.seed}; every option is in `config.json`.
- Weights: {weights} of step {source.step:,}, sha256 {digest} in the run; \
exported by mvm {version}."""


def _figures(figures: Figures) -> str:
    if not figures.rows:
        return "Not measured."
    header = "| metric | value | sampler | images | reference |\n| --- | --- | --- | --- | --- |"
    lines = ["| " + " | ".join(map(markdown, cells)) + " |" for cells in figures.rows]
    return "\n".join([header, *lines, "", *(f"- {markdown(note)}." for note in figures.notes)])


def _use(config: Config, name: str) -> str:
    """Return the snippets; they run next to the folder as they stand, and a push gives them the hub's id."""
    quoted = json.dumps(name, ensure_ascii=False)
    needs = "It needs the package `mean-velocity-matching`. The name is the path of the folder, or the id on the hub."
    if isinstance(config.recipe.network, OwnConfig):
        return f"""\
{needs} Its network, {markdown(config.recipe.network.described)}, is not part of that package:
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
