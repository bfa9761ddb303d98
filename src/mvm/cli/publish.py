"""mvm export, mvm convert, mvm onnx, mvm push, mvm models."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import (
    MODEL,
    OUTPUT,
    SHARE,
    START,
    Download,
    SamplerOptions,
    Weights,
    command,
)

MOST_WORK = 2e12  # multiply-adds of the picture on a CPU, the null class counted in: a minute or so
GPU = 1000  # times as many there: a guess


@command(
    SHARE,
    "mvm export runs/a --out exports/a  # a folder to share",
    "mvm export runs/a --out exports/a --figures a.json  # metrics in the card",
    "mvm push exports/a OWNER/NAME  # send it",
)
def export(
    model: str,
    /,
    *,
    out: Annotated[Path, OUTPUT],
    weights: Annotated[str, MODEL] = "ema",
    which: Annotated[str, Parameter(alias="--checkpoint"), MODEL] = "latest",
    dtype: Annotated[str | None, OUTPUT] = None,
    license: Annotated[str | None, OUTPUT] = None,
    card: Annotated[Path | None, OUTPUT] = None,
    figures: Annotated[Path | None, OUTPUT] = None,
    grid: Annotated[bool, OUTPUT] = True,
    allow_download: Download = False,
) -> int:
    """Write a folder for sampling and for the Hub: model card, config.json and safetensors.

    mvm.load and diffusers (MVMPipeline.from_pretrained) read it.

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
    out
        Folder to write. An earlier export there is replaced once the new one is complete.
    weights
        Weights to export: ema (exponential moving average), model (the raw weights), or another average of the run.
    which
        Checkpoint to export: latest, best (by the previews), or a step number.
    dtype
        Type of the stored weights: float16 (default for a run), bfloat16 or float32. Sampling always uses float32.
    license
        Licence of the weights, by its Hub name: apache-2.0, cc-by-4.0, other, ... Default for a run: unknown.
    card
        Markdown file to put into the model card, under its title.
    figures
        Metrics for the card, of these weights: JSON of `mvm eval RUN --json FILE`, or results.json of a sweep.
    grid
        Sample ten images for the card, unless that would take minutes.
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


@command(
    SHARE,
    "mvm convert SiT.pt --as sit --codec vae --out sit  # with its VAE",
    "mvm convert dec.pt --as rae --stats s.pt --out codec  # RAE: the decoder",
    "mvm convert dit.pt --as rae --codec codec --out rae  # and the model",
)
def convert(
    file: Path,
    /,
    *,
    as_: Annotated[str, Parameter(name="--as"), MODEL],
    out: Annotated[Path, OUTPUT],
    codec: Annotated[Path | None, MODEL] = None,
    stats: Annotated[Path | None, MODEL] = None,
    pixels: Annotated[str, MODEL] = "imagenet",
    encoder: Annotated[str, MODEL] = "unknown",
    heads: Annotated[int, MODEL] = 0,
    classes: Annotated[int, MODEL] = 0,
    inner_block: Annotated[int, MODEL] = 8,
    factor: Annotated[int, MODEL] = 0,
    weights: Annotated[str, MODEL] = "ema",
    dtype: Annotated[str, OUTPUT] = "float32",
    license: Annotated[str, OUTPUT] = "unknown",
) -> int:
    """Convert a published checkpoint of another project into a folder that mvm.load opens.

    No code in the file is executed. Sizes are read from the tensors. A decoder of RAE or RAEv2 (stage 1) becomes an
    autoencoder for --codec.

    Parameters
    ----------
    file
        A .safetensors file, or a .pt, .pth or .ckpt file of torch.
    as_
        Format of the checkpoint: sit, dit, repa, lightningdit, rae or raev2.
    out
        Folder to write.
    codec
        Autoencoder of the latents, copied into the folder: a VAE (AutoencoderKL) in diffusers' format, or a converted
        decoder. Without it the folder samples latents alone.
    stats
        For a decoder: file with mean and var of the latents. Without it they are not normalised.
    pixels
        For a decoder of RAE: how its encoder scales pixels, imagenet (DINOv2, MAE) or half (SigLIP2).
    encoder
        For a decoder: the name of its encoder, as a note for readers.
    heads
        Number of attention heads. 0: as in the file, or as published for this width.
    classes
        Number of classes. 0: all rows of the label table except the null class.
    inner_block
        For RAEv2: block after which the inner head is attached; the file does not record it.
    factor
        Side in pixels of one latent. 0: 8 for SiT, DiT and REPA, 16 for the others.
    weights
        Weights to convert: ema, or model (the raw weights), if the file has both.
    dtype
        Type of the stored weights: float16, bfloat16 or float32.
    license
        Licence of the weights, by its Hub name. Their authors state it.
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


@command(
    SHARE,
    "mvm onnx digits --out digits.onnx  # with its own sampler",
    "mvm onnx runs/a --nfe 13 --rho 1 --out a.onnx  # with an SDE sampler",
)
def onnx(
    model: str,
    /,
    *,
    out: Annotated[Path, OUTPUT] = Path("model.onnx"),
    sampler: SamplerOptions = SamplerOptions(),
    weights: Weights = Weights(),
) -> int:
    """Write a network as ONNX (float32, any batch size), with the coefficients of a sampler as metadata.

    examples/onnx_sampler.py samples from such a file without torch. The solver must evaluate the network once a step:
    adams, sa, euler, euler-maruyama, dpm++2m, dpm++3m, unipc, sde-dpm++2m, sde-dpm++3m, sa-official or er-sde. The
    exported network has no inner head.

    Parameters
    ----------
    model
        A run directory, an exported folder, a shipped model (see `mvm models`), or OWNER/NAME on the Hub.
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


@command(
    SHARE,
    "mvm push exports/a OWNER/NAME --dry-run  # what would be sent",
    "mvm push exports/a OWNER/NAME --private  # send it",
)
def push(
    folder: Path,
    name: str,
    /,
    *,
    private: Annotated[bool, OUTPUT] = False,
    revision: Annotated[str | None, OUTPUT] = None,
    dry_run: Annotated[bool, OUTPUT] = False,
) -> int:
    """Send an exported model to the Hub. Log in first with: hf auth login.

    The snippets of the card are sent with OWNER/NAME in them.

    Parameters
    ----------
    folder
        Folder that `mvm export` wrote.
    name
        OWNER/NAME on the Hub, created if it does not exist.
    private
        Make it visible to you alone. An error if a public model has that name.
    revision
        Branch, created if it does not exist. Default: main.
    dry_run
        Check the folder and print what would be sent, without a connection or a token.
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


@command(START, "mvm models  # their names, for mvm sample NAME")
def models() -> int:
    """List the shipped models: name, size, content, classes and licence."""
    from mvm.published import read_config, shipped_folder, shipped_models

    names = shipped_models()
    width = max(map(len, names), default=0)
    for name in names:
        config = read_config(shipped_folder(name))
        size = f"{_megabytes(shipped_folder(name)):5.1f} MB"
        classes = ", ".join(config.classes[:10]) + (", ..." if len(config.classes) > 10 else "")
        print(f"{name:{width}s} {size}  {config.recipe.description}; classes: {classes}; licence: {config.license}")
    return 0
