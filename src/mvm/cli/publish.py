"""mvm export, mvm push, mvm models."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mvm.cli.app import app


@app.command
def export(
    run: Path,
    /,
    *,
    out: Path,
    weights: str = "ema",
    which: Annotated[str, Parameter(alias="--checkpoint")] = "latest",
    dtype: str = "float16",
    license: str = "unknown",
    card: Path | None = None,
    figures: Path | None = None,
) -> int:
    """Write a folder that only samples, fit for the hub: model card, config.json, safetensors.

    Parameters
    ----------
    run
        Run directory.
    out
        Folder to write; an earlier export there is replaced when the new one is whole.
    weights
        ema, model (the raw weights), or another average that the run keeps.
    which
        The checkpoint: latest, best (by the previews), or a step number.
    dtype
        Of the stored weights: float16, bfloat16 or float32. Sampling is in float32 whichever it is.
    license
        Of the weights, as the hub names licences: apache-2.0, cc-by-4.0, other, ...
    card
        A file of your own words (Markdown) to stand in the card under its title.
    figures
        JSON of `mvm eval RUN --json FILE`, or results.json of a sweep: must be of these weights.
    """
    from mvm.published import export as write_export

    words = _read(card) if card is not None else ""
    config = write_export(
        run, out, weights=weights, which=which, dtype=dtype, license=license, words=words, figures=figures
    )
    print(f"wrote {out}: {config.source.weights} of step {config.source.step}, {_megabytes(out):.1f} MB; ", end="")
    print(f"sample: mvm sample {out} --out grid.png; send: mvm push {out} OWNER/NAME")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--card {path} cannot be read ({error}); give a Markdown file") from None


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


@app.command
def push(folder: Path, name: str, /, *, private: bool = False, revision: str | None = None) -> int:
    """Send an exported model to the hub; log in before with: hf auth login.

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
    """
    from mvm.published.hub import push as send

    address = send(folder, name, private=private, revision=revision)
    print(f"sent {folder} to {address}; anyone who may see it: mvm sample {name}{f'@{revision}' if revision else ''}")
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
        shown = ", ".join(config.classes[:10]) + (", ..." if len(config.classes) > 10 else "")
        print(f"{name:{width}s} {size}  {config.recipe.description}; classes: {shown}; licence: {config.license}")
    return 0
