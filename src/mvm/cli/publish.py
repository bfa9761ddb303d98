"""mvm export, mvm convert, mvm onnx, mvm push, mvm models."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import SamplerOptions, Weights, app

MOST_WORK = 2e12  # multiply-adds of the picture on a CPU, the null class counted in: a minute or so
GPU = 1000  # times as many there: a guess


@app.command
def export(
    model: str,
    /,
    *,
    out: Path,
    weights: str = "ema",
    which: Annotated[str, Parameter(alias="--checkpoint")] = "latest",
    dtype: str | None = None,
    license: str | None = None,
    card: Path | None = None,
    figures: Path | None = None,
    grid: bool = True,
    allow_download: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write a folder that only samples, fit for the hub: model card, config.json, safetensors.

    mvm.load and diffusers (MVMPipeline.from_pretrained) both read it.

    Parameters
    ----------
    model
        A run directory, an exported folder, the name of a shipped model (mvm models), or OWNER/NAME on the hub.
    out
        Folder to write; an earlier export there is replaced when the new one is whole.
    weights
        ema, model (the raw weights), or another average that the run keeps.
    which
        The checkpoint: latest, best (by the previews), or a step number.
    dtype
        Of the stored weights: float16 (default for a run), bfloat16 or float32. Sampling is in float32 whichever it is.
    license
        Of the weights, as the hub names licences: apache-2.0, cc-by-4.0, other, ... A run has unknown by default.
    card
        A file of your own words (Markdown) to stand in the card under its title.
    figures
        JSON of `mvm eval RUN --json FILE`, or results.json of a sweep: must be of these weights.
    grid
        Sample ten images for the card, by the model's own settings; left out where that would take minutes.
    allow_download
        Of a run that holds no autoencoder: open the one that it names elsewhere.
    """
    from mvm.published import export as write_export

    try:
        words = "" if card is None else card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--card {card} cannot be read ({error}); give a Markdown file") from None
    options = {"weights": weights, "which": which, "dtype": dtype, "license": license}
    how: dict[str, Any] = {"draw": _draw if grid else None, "allow_download": allow_download}
    config = write_export(model, out, words=words, figures=figures, **how, **options)
    print(f"wrote {out}: {config.source.weights} of step {config.source.step}, {_megabytes(out):.1f} MB; ", end="")
    quoted = shlex.quote(str(out))
    print(f"{config.recipe.usage(quoted, True)}; send: mvm push {quoted} OWNER/NAME")
    return 0


@app.command
def convert(
    file: Path,
    /,
    *,
    as_: Annotated[str, Parameter(name="--as")],
    out: Path,
    codec: Path | None = None,
    stats: Path | None = None,
    pixels: str = "imagenet",
    encoder: str = "unknown",
    heads: int = 0,
    classes: int = 0,
    inner_block: int = 8,
    factor: int = 0,
    weights: str = "ema",
    dtype: str = "float32",
    license: str = "unknown",
) -> int:
    """Write a published checkpoint of another project as a folder that mvm.load opens. Nothing in it is executed.

    Sizes are read from the tensors. A decoder of RAE or RAEv2 (stage 1) becomes an autoencoder for --codec.

    Parameters
    ----------
    file
        A .safetensors, or a .pt, .pth or .ckpt of torch.
    as_
        The format: sit, dit, repa, lightningdit, rae or raev2.
    out
        Folder to write.
    codec
        The autoencoder of the latents, copied into the folder: a VAE (AutoencoderKL) in diffusers' format, or a
        decoder that was converted before. Without one the folder makes latents alone.
    stats
        Of a decoder: the file with mean and var of the latents. Without one they are not normalised.
    pixels
        Of a decoder of RAE: how its encoder scales pixels, imagenet (DINOv2, MAE) or half (SigLIP2).
    encoder
        Of a decoder: the name of its encoder, for people.
    heads
        Attention heads, where the file does not say them and the width is not a published one.
    classes
        Number of classes; 0: all rows of the label table but the null class.
    inner_block
        Of RAEv2: the block after which the inner head stands; a file does not say it.
    factor
        Pixels a side that one latent becomes; 0: 8 for SiT, DiT and REPA, 16 for the others.
    weights
        ema, or model (the raw weights) where the file has both.
    dtype
        Of the stored weights: float16, bfloat16 or float32.
    license
        Of the weights, as the hub names licences; their authors say which.
    """
    from mvm.published import Options, convert_decoder, export, is_decoder, open_foreign, read_tensors

    quoted = shlex.quote(str(out))
    if as_ in ("rae", "raev2") and is_decoder(read_tensors(file, weights)):
        convert_decoder(as_, file, stats=stats, pixels=pixels, encoder=encoder, weights=weights).save(out)
        print(f"wrote {out}: the decoder of {file.name}; use it with: mvm convert FILE --as {as_} --codec {quoted}")
        return 0
    options = Options(heads=heads, classes=classes, inner_block=inner_block, factor=factor)
    opened = open_foreign(as_, file, weights, options=options)
    if codec is not None:
        opened = opened.with_codec(codec)
    config = export(opened, out, dtype=dtype, license=license)
    kind = config.recipe.codec.kind
    print(f"wrote {out}: {config.recipe.network.kind}, {_megabytes(out):.1f} MB; ", end="")
    if kind == "pixels" or codec is not None:
        print(f"sample: mvm sample {quoted} --out grid.png")
    else:
        print(f"it makes latents {config.recipe.sample_shape} alone; give their autoencoder with --codec")
    return 0


def _draw(folder: Path) -> bytes | None:
    """Return the picture of a card as PNG; None, and a line that says so, where the model is too large for it here."""
    import torch

    from mvm.generate import Sampler
    from mvm.model import choose_device, load
    from mvm.network.own import is_own
    from mvm.pictures import png_bytes, sample_grid
    from mvm.published import read_config
    from mvm.published.write import SAMPLES

    config, device = read_config(folder), choose_device("auto")
    recipe, count = config.recipe, len(config.classes)
    passes = recipe.sample.nfe * (1 if recipe.sample.cfg == 1 else 2)
    reason = ""
    if is_own(recipe.network.kind):
        reason = "its network is not part of mvm"
    elif (work := SAMPLES * passes * recipe.multiply_adds) > MOST_WORK * (GPU if device.type == "cuda" else 1):
        where = "this GPU" if device.type == "cuda" else "a CPU"
        reason = f"{SAMPLES} images take {work / 1e12:,.0f} T multiply-adds, too many for {where}"
    elif not recipe.data.pictured or not (recipe.condition.kind in ("labels", "none") or recipe.objective.has_null):
        reason = "they are no pictures, or need a condition"
    if reason:
        print(f"mvm: the card has no samples: {reason}", file=sys.stderr)
        return None
    seeds = torch.arange(SAMPLES)
    model = load(folder).to(device)
    labels = seeds * count // SAMPLES if model.labelled else None  # all over the classes
    settings = recipe.sample if model.labelled else replace(recipe.sample, cfg=1.0)
    samples = Sampler(model).images(labels, seeds, settings)
    names = config.classes if recipe.objective.conditional else ()
    return png_bytes(sample_grid(samples.images, samples.labels, names, SAMPLES // 2))


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


@app.command
def onnx(
    model: str,
    /,
    *,
    out: Path = Path("model.onnx"),
    sampler: SamplerOptions = SamplerOptions(),
    weights: Weights = Weights(),
) -> int:
    """Write a network as ONNX, any batch, float32, with the numbers of a sampler in its metadata.

    examples/onnx_sampler.py makes images from such a file without torch. Settings not given are those of the recipe.
    The solver must evaluate once a step: adams, sa, euler, euler-maruyama, dpm++2m, dpm++3m, unipc, sde-dpm++2m,
    sde-dpm++3m, sa-official or er-sde. The exported network has no inner head.

    Parameters
    ----------
    model
        A run directory, an exported model, the name of a shipped one, or OWNER/NAME on the hub.
    out
        The file to write.
    """
    from mvm.integrations.onnx import write_onnx

    loaded = weights.load(model)
    settings = sampler.settings(loaded.recipe.sample)
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    tables = write_onnx(loaded, out, settings)
    print(
        f"wrote {out}: {tables['recipe']}, {tables['solver']} with {tables['nfe']} evaluations, rho {tables['rho']:g}"
    )
    return 0


@app.command
def push(
    folder: Path, name: str, /, *, private: bool = False, revision: str | None = None, dry_run: bool = False
) -> int:
    """Send an exported model to the hub; log in before with: hf auth login.

    The card is sent with OWNER/NAME in its snippets.

    Parameters
    ----------
    folder
        What `mvm export` wrote.
    name
        OWNER/NAME; made if it is not there.
    private
        Only you can see it; a public model of that name is refused.
    revision
        The branch; made if it is not there. Default: main.
    dry_run
        Check the folder and print what would be sent; no connection, no token.
    """
    from mvm.published.hub import prepare
    from mvm.published.hub import push as send

    if dry_run:
        upload = prepare(folder, name, revision=revision)
        whose = "private" if private else "public, unless it is there already and private"
        print(f"would send {folder} to {upload.repo}, branch {revision or 'main'} ({whose}):")
        for file, size in upload.files.items():
            print(f"{size:>15,}  {file}")
        total = f"{sum(upload.files.values()):>15,}  bytes in {len(upload.files)} files"
        print(f"{total}; nothing was sent, and name and rights were not checked with the hub")
        return 0
    address = send(folder, name, private=private, revision=revision)
    sent = shlex.quote(f"{name}@{revision}" if revision else name)
    print(f"sent {folder} to {address}; anyone who may see it: mvm sample {sent}")
    return 0


@app.command
def models() -> int:
    """List the models in the package: name, size, what it draws, classes, licence."""
    from mvm.published import read_config, shipped_folder, shipped_models

    names = shipped_models()
    width = max(map(len, names), default=0)
    for name in names:
        config = read_config(shipped_folder(name))
        size = f"{_megabytes(shipped_folder(name)):5.1f} MB"
        classes = ", ".join(config.classes[:10]) + (", ..." if len(config.classes) > 10 else "")
        print(f"{name:{width}s} {size}  {config.recipe.description}; classes: {classes}; licence: {config.license}")
    return 0
