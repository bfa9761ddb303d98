"""Checkpoints: safetensors files with a sha256 manifest, written whole or not at all."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mvm.files import put_in_place, temporary_beside, write_text

MANIFEST = "manifest.json"
Weights = dict[str, Tensor]


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files do not match its manifest."""


def sha256(path: Path) -> str:
    """Return the file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(folder: Path, tensors: dict[str, Weights], info: dict[str, Any]) -> None:
    """Write {name}.safetensors for each entry and a manifest; the folder appears whole or not at all."""
    temporary = temporary_beside(folder)
    temporary.mkdir(parents=True)
    for name, weights in tensors.items():
        path = temporary / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in weights.items()}, path)
        path.chmod(0o644)  # safetensors makes files private; checkpoints are for sharing
    files = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
    write_text(temporary / MANIFEST, json.dumps({**info, "sha256": files}, indent=2) + "\n")
    put_in_place(temporary, folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest; one that is missing, unreadable or of another step is a DamagedCheckpoint that names it."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest["sha256"], dict) or step_name(manifest["step"]) != folder.name:
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is missing or damaged; {_REMEDY}") from error
    return manifest


_REMEDY = "nothing was changed: remove this checkpoint folder to go on from an earlier one, or restore it"


def load(folder: Path, name: str) -> Weights:
    """Return {name}.safetensors after its checksum; a file that fails it is named."""
    expected = read_manifest(folder)["sha256"].get(f"{name}.safetensors")
    path = folder / f"{name}.safetensors"
    if expected is None:
        raise DamagedCheckpoint(f"{folder / MANIFEST} lists no {path.name}; {_REMEDY}")
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing; {_REMEDY}")
    if (found := sha256(path)) != expected:
        raise DamagedCheckpoint(f"{path} is damaged (sha256 {found[:12]}..., expected {expected[:12]}...); {_REMEDY}")
    return load_file(path)


def step_name(step: int) -> str:
    """Return the name of a checkpoint folder."""
    return f"step-{step:08d}"


def step_folder(run: Path, step: int) -> Path:
    """Return checkpoints/step-N of a run."""
    return run / "checkpoints" / step_name(step)


def latest(run: Path) -> Path | None:
    """Return the newest checkpoint folder of a run, or None."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    return folders[-1] if folders else None


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for folder in sorted((run / "checkpoints").glob("step-*"))[:-keep]:
        shutil.rmtree(folder)
