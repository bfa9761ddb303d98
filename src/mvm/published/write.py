"""From a run, or another published model, to a folder that only samples: all of it, or nothing."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mvm.checkpoint import Weights
from mvm.data import open_prepared
from mvm.files import flush, private_beside, put_in_place, sha256, write_text
from mvm.latent import VAE, DecoderOnly, load_decoder_only, load_vae
from mvm.options import choose
from mvm.published.card import FIGURES, LIMITS, USE, WHAT, Figures, card, read_card, read_figures
from mvm.published.diffusers import tables
from mvm.published.format import (
    CARD,
    CODEC,
    CONFIG,
    MOST_JSON,
    PICTURE,
    WEIGHTS,
    Config,
    WeightsSource,
    check_all,
    check_license,
    read_codec,
    replaceable,
    version,
)
from mvm.published.source import Opened, open_model
from mvm.published.tuned import write_tuned
from mvm.recipes import FOLDER, Recipe, load_recipe, require_field_recipe, shipped
from mvm.untrusted import read_text

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
METRICS = "metrics.jsonl"  # as mvm.training.logs writes it, which stands above this
Draw = Callable[[Path], bytes | None]


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
) -> Config:
    """Write a published model of a run's checkpoint, or of another published model; return its config.

    model: a name, or opened weights. dtype, license: None is float16 and "unknown" for a run, and what a published
    model has. words: Markdown for the card, under its title. figures: JSON of `mvm eval` or `mvm sweep`, of these very
    weights. draw: makes the card's picture, a PNG, of the folder that is written, or None.
    Of a published model the card's words, figures and other sections are kept as far as they still hold.
    """
    choose("dtype", dtype or "float16", DTYPES)
    check_license(license or "unknown")
    if words.lstrip().startswith("---"):
        raise ValueError("the card's own words begin with '---'; its header is made from the run, leave it out")
    if not folder.name:
        raise ValueError(f"--out {folder} is no name of a folder; give one, as in --out ../photos")
    if not replaceable(folder):
        raise ValueError(f"--out {folder} exists and is not an exported model alone; give another folder")
    opened = model if isinstance(model, Opened) else open_model(model, weights, which)
    recipe, given = require_field_recipe(opened.recipe, opened.origin["run"]), opened.config
    source = _source(opened, dtype)
    values = _rounded(opened.weights, choose("dtype", source.dtype, DTYPES), source.dtype)
    folder.resolve().parent.mkdir(parents=True, exist_ok=True)
    with private_beside(folder) as temporary:
        before = _identity(folder)
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
        encoder = _write_codec(temporary, opened, recipe)
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
        text = card(
            config, folder.resolve().name, words=words, figures=measured, loss=loss, encoder=encoder,
            pictured=bool(picture), earlier=earlier,
        )  # fmt: skip
        write_text(temporary / CARD, text)
        _, codec = check_all(temporary)
        now = "" if codec is None else codec.identity.get("codec", "")
        if source.codec and source.codec != now:
            raise ValueError(
                f"the run was trained in latents of fingerprint {source.codec[:12]}, codec.path holds "
                f"{now[:12]} now; restore the autoencoder it was trained with"
            )
        if _identity(folder) != before:
            raise ValueError(f"--out {folder} was written by another process meanwhile and is left so; export again")
        put_in_place(temporary, folder)
    return config


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what changes when another process replaces a folder; None where there is none."""
    return (folder.stat().st_ino, folder.stat().st_mtime_ns) if folder.exists() else None


def _rounded(values: Weights, kind: torch.dtype, name: str) -> Weights:
    """Return the weights in that dtype; what it cannot hold is refused."""
    found = {key: value.to(kind) if value.is_floating_point() else value for key, value in values.items()}
    if bad := [key for key, value in found.items() if not bool(value.isfinite().all())]:
        raise ValueError(f"--dtype {name} cannot hold {bad[0]} (not finite there); try bfloat16 or float32")
    return found


def _source(opened: Opened, dtype: str | None) -> WeightsSource:
    """Return where the weights came from; of a published model, where they came from in the first place."""
    if opened.config is not None:
        return replace(opened.config.source, dtype=dtype or opened.config.source.dtype)
    facts = {name: opened.origin[name] for name in ("run", "step", "weights", "sha256")}
    stamp = opened.origin["data_stamp"] or ""
    return WeightsSource(**facts, dtype=dtype or "float16", mvm=version(), data_stamp=stamp, codec=opened.codec)


def _base(name: str) -> str:
    """Return a path's last part; a hub id stays as it is."""
    path = Path(name)
    return path.name if path.is_absolute() or path.exists() or name.count("/") > 1 else name


def _public(recipe: Recipe) -> Recipe:
    """Return the recipe without the paths of this machine: they would mean nothing on others, and give it away."""
    data = replace(recipe.data, path=_base(recipe.data.path) if recipe.data.name == FOLDER else "")
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
    if data.name == FOLDER and (data.folder / "index.json").is_file():
        prepared = open_prepared(data.folder)
        if prepared.stamp == opened.origin["data_stamp"]:
            return prepared.classes
    return data.class_names


def _write_codec(folder: Path, opened: Opened, recipe: Recipe) -> str:
    """Write the decoder and the statistics of a latent model, or its VAE; return their encoder's name, or ""."""
    if opened.config is not None:
        codec = read_codec(opened.folder, opened.config)
    elif not recipe.codec.path:  # pixels, or converted weights alone
        return ""
    elif recipe.codec.kind == "vae":
        codec = load_vae(recipe.codec.path, recipe.data.shape[-1], recipe.codec.posterior)
    else:
        codec = load_decoder_only(Path(recipe.codec.path))
    encoder = ""
    if isinstance(codec, VAE):
        (folder / CODEC).mkdir()
        codec.save(folder / CODEC)
    elif isinstance(codec, DecoderOnly):
        encoder = codec.encoder_config.name
        codec.renamed(_base(encoder)).save(folder / CODEC)
    else:
        return ""
    flush(folder / CODEC)
    return encoder


def _last_loss(run: Path, step: int) -> float | None:
    """Return the loss logged last up to a step; None where there is no log. A crash may have torn its last line."""
    path = run / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    points: list[Mapping[str, float]] = [json.loads(line) for line in lines if line.endswith("}")]
    losses = [point["loss"] for point in points if "loss" in point and point["step"] <= step]
    return losses[-1] if losses else None
