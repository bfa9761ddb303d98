"""What may lie in the folder of a published model; anything else is refused before a byte of it is read.

README.md           the model card
samples.png         its picture
config.json         recipe, class names, licence, where the weights came from
model.safetensors   the network
tuned.json          times of the solver fitted to it by `mvm tune`
codec/              of a latent model: decoder and statistics of its autoencoder
model_index.json, scheduler/, transformer/   what config.json says, in diffusers' words
"""

import os
from collections.abc import Iterator
from pathlib import Path

from mvm.latent import rae

CARD, PICTURE, CONFIG, WEIGHTS, CODEC = "README.md", "samples.png", "config.json", "model.safetensors", "codec"
TUNED = "tuned.json"
INDEX, SCHEDULER, TRANSFORMER = "model_index.json", "scheduler/scheduler_config.json", "transformer/config.json"
FILES = (
    *(CARD, PICTURE, CONFIG, WEIGHTS, TUNED, INDEX, SCHEDULER, TRANSFORMER),
    *(f"{CODEC}/{name}" for name in (rae.INDEX, rae.DECODER, rae.STATISTICS)),
)
BESIDE = ("LICENSE", ".png")  # ends of names that may lie beside them; never read
MOST_JSON = 1 << 20  # bytes of a JSON file
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
CODE = (".py", ".pyc", ".so", ".sh", ".ipynb")


def _entries(folder: Path) -> Iterator[Path]:
    """Yield all files and links below, without following links; top names with a dot (.git, .cache) are never read."""
    for place, folders, names in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [name for name in folders if not name.startswith(".")]
            names = [name for name in names if not name.startswith(".")]
        yield from (Path(place) / name for name in names)
        yield from (Path(place) / name for name in folders if (Path(place) / name).is_symlink())


def _leads_into(link: Path, root: Path) -> bool:
    try:
        return link.resolve().is_relative_to(root.resolve())
    except RuntimeError:  # a link to itself leads nowhere
        return False


def _refusal(path: Path, name: str, root: Path) -> str:
    """Return why a file may not be there, or ""."""
    if path.is_symlink() and not _leads_into(path, root):
        return "is a link that leads out of the folder, or nowhere"
    if path.suffix.lower() in PICKLED:
        return "may hold pickled code; weights are safetensors alone"
    if path.suffix.lower() in CODE:
        return "is code; nothing is executed on load"
    if name not in FILES and not ("/" not in name and name.endswith(BESIDE)):
        return "is not part of the format"
    if not path.is_file():
        return "is not a plain file"
    if path.suffix == ".json" and path.stat().st_size > MOST_JSON:
        return f"is larger than {MOST_JSON} bytes"
    return ""


def check_files(folder: Path, root: Path | None = None) -> None:
    """Refuse a folder with anything in it that does not belong to the format; root: where links may lead to."""
    for path in sorted(_entries(folder)):
        name = path.relative_to(folder).as_posix()
        if reason := _refusal(path, name, root or folder):
            raise ValueError(f"{folder} is not read: '{name}' {reason}; remove it if you trust the rest")


def replaceable(folder: Path) -> bool:
    """Return whether a folder may be replaced by an export: there is none, it is empty, or it is one, nothing else."""
    if not folder.exists():
        return True
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return not any(folder.iterdir()) or ({CONFIG, WEIGHTS} <= names <= set(FILES))
