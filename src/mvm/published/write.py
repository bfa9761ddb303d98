"""From a run to a folder that only samples: card, config, weights; all of it, or nothing."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mvm.data import open_prepared
from mvm.files import flush, put_in_place, sha256, temporary_beside, write_text
from mvm.latent import load_decoder_only
from mvm.options import choose
from mvm.published.card import Told, card
from mvm.published.figures import Figures, read_figures
from mvm.published.files import CARD, CODEC, CONFIG, WEIGHTS, replaceable
from mvm.published.format import Config, Source, check_license, read_codec, read_config, read_weights, version
from mvm.published.source import Stored, open_stored
from mvm.recipes import FOLDER, Recipe, as_field, load_recipe, shipped
from mvm.training import checkpoint
from mvm.training.checkpoint import Weights

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
METRICS = "metrics.jsonl"  # as mvm.training.logs writes it, which stands above this


def export(
    run: Path,
    folder: Path,
    *,
    weights: str = "ema",
    which: str = "latest",
    dtype: str = "float16",
    license: str = "unknown",
    words: str = "",
    figures: Path | None = None,
) -> Config:
    """Write a published model of one checkpoint's weights; return its config.

    words: Markdown for the card, under its title. figures: JSON of `mvm eval` or `mvm sweep`, of these very weights.
    """
    kind = choose("dtype", dtype, DTYPES)
    check_license(license)
    if words.lstrip().startswith("---"):
        raise ValueError("the card's own words begin with '---'; its header is made from the run, leave it out")
    if not folder.name:
        raise ValueError(f"--out {folder} is no name of a folder; give one, as in --out ../photos")
    if not replaceable(folder):
        raise ValueError(f"--out {folder} exists and is not an exported model alone; give another folder")
    stored = open_stored(run, weights, which)
    recipe = as_field(stored.recipe, str(run))
    values = _rounded(checkpoint.load(stored.folder, weights), kind, dtype)
    folder.resolve().parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(folder)
    try:
        temporary.mkdir()
        digest = _write_weights(temporary / WEIGHTS, values)
        source = _source(run, stored, weights, dtype)
        config = Config(_public(recipe), _class_names(stored), license, source, digest)
        encoder = _write_codec(temporary, recipe)
        write_text(temporary / CONFIG, config.to_json())
        measured = read_figures(figures, (source.sha256, digest)) if figures else Figures([], [])
        told = Told(folder.resolve().name, words, measured, _last_loss(run, source.step), encoder)
        write_text(temporary / CARD, card(config, told))
        _read_back(temporary)
        put_in_place(temporary, folder)
    except BaseException:  # Ctrl-C, too, leaves nothing
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return config


def _rounded(values: Weights, kind: torch.dtype, name: str) -> Weights:
    """Return the weights in that dtype; what it cannot hold is refused."""
    found = {key: value.to(kind) for key, value in values.items()}
    if bad := [key for key, value in found.items() if not bool(value.isfinite().all())]:
        raise ValueError(f"--dtype {name} cannot hold {bad[0]} (not finite there); try bfloat16 or float32")
    return found


def _write_weights(path: Path, values: Weights) -> str:
    """Return the sha256 of the file."""
    try:
        save_file({name: value.contiguous() for name, value in values.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(0o644)  # safetensors makes files private
    return sha256(path)


def _source(run: Path, stored: Stored, weights: str, dtype: str) -> Source:
    manifest = stored.manifest
    return Source(
        run.resolve().name,
        manifest["step"],
        weights,
        dtype,
        manifest["sha256"][f"{weights}.safetensors"],
        version(),
        manifest.get("data") or "",
        manifest.get("codec") or "",
    )


def _base(name: str) -> str:
    """Return a path's last part; a hub id stays as it is."""
    path = Path(name)
    return path.name if path.is_absolute() or path.exists() or name.count("/") > 1 else name


def _public(recipe: Recipe) -> Recipe:
    """Return the recipe without the places of this machine: they would mean nothing on others, and tell of this one."""
    data = replace(recipe.data, path=_base(recipe.data.path) if recipe.data.name == FOLDER else "")
    codec = replace(recipe.codec, path="", encoder="", latents="")
    if recipe.name in shipped() and load_recipe(recipe.name).data.name != recipe.data.name:  # it tells of other images
        kinds = ", ".join(data.class_names[:5]) + (", ..." if len(data.class_names) > 5 else "")
        told = f"Images of {data.size}x{data.size} pixels ({kinds}), trained by the recipe {recipe.name}"
        recipe = replace(recipe, description=told if data.size else "Trained on other images than its recipe's")
    return replace(recipe, data=data, codec=codec, repa=replace(recipe.repa, encoder=_base(recipe.repa.encoder)))


def _class_names(stored: Stored) -> tuple[str, ...]:
    """Return the names of the classes; of a folder, whose recipe has but numbers, those of its index if it is there."""
    data = stored.recipe.data
    if data.name == FOLDER and (data.folder / "index.json").is_file():
        prepared = open_prepared(data.folder)
        if prepared.stamp == stored.manifest.get("data"):
            return prepared.classes
    return data.class_names


def _write_codec(folder: Path, recipe: Recipe) -> str:
    """Write the decoder and the statistics of a latent model; return the name of their encoder, "" for pixels."""
    if recipe.codec.kind == "pixels":
        return ""
    codec = load_decoder_only(Path(recipe.codec.path))
    codec.renamed(_base(codec.encoder_config.name)).save(folder / CODEC)
    flush(folder / CODEC)
    return codec.encoder_config.name


def _last_loss(run: Path, step: int) -> float | None:
    """Return the loss logged last up to a step; None where there is no log. A crash may have torn its last line."""
    path = run / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    told: list[Mapping[str, float]] = [json.loads(line) for line in lines if line.endswith("}")]
    losses = [line["loss"] for line in told if "loss" in line and line["step"] <= step]
    return losses[-1] if losses else None


def _read_back(folder: Path) -> None:
    """Raise unless what was written can be read, and belongs together."""
    config = read_config(folder)
    read_weights(folder, config)
    codec = read_codec(folder, config.recipe)
    if codec is not None and config.source.codec not in ("", codec.fingerprint):
        raise ValueError(
            f"the run was trained in latents of fingerprint {config.source.codec[:12]}, codec.path holds "
            f"{codec.fingerprint[:12]} now; restore the autoencoder it was trained with"
        )
