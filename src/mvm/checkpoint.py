"""Checkpoints: safetensors files with a sha256 manifest, written whole or not at all.

A file of several blocks has a sha256 of each, too, so that several processes can check it together.
"""

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from math import isfinite
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mvm.files import atomic, remove, sha256, write_text
from mvm.store import balanced
from mvm.untrusted import MOST_TEXT, plain_name, read_json, refusal, whole_numbers

MANIFEST, METRICS = "manifest.json", "metrics.jsonl"
BLOCK = 1 << 26  # bytes
Weights = dict[str, Tensor]


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files do not match its manifest."""


def save(folder: Path, tensors: dict[str, Weights], info: dict[str, Any]) -> None:
    """Write {name}.safetensors for each entry and a manifest; the folder appears whole or not at all.

    Only the folder above it is made if need be: a run that was moved does not come to be anew.
    """
    folder.parent.mkdir(exist_ok=True)
    with atomic(folder) as temporary:
        temporary.mkdir()
        for name, weights in tensors.items():
            path = temporary / f"{name}.safetensors"
            try:
                save_file({key: value.contiguous() for key, value in weights.items()}, path)
            except SafetensorError as error:  # which it raises on a full disk
                raise OSError(f"{path.name}: {error}") from error
            path.chmod(0o644)  # safetensors makes files private; checkpoints are for sharing
        written = sorted(temporary.iterdir())
        sums: dict[str, Any] = {"sha256": {path.name: sha256(path) for path in written}}
        if large := [path for path in written if path.stat().st_size > BLOCK]:
            sums["blocks"] = {"bytes": BLOCK, "sha256": {path.name: _sums_of_blocks(path) for path in large}}
        write_text(temporary / MANIFEST, json.dumps({**info, **sums}, indent=2) + "\n")


def _sums_of_blocks(path: Path) -> list[str]:
    whole = range(path.stat().st_size)
    return [sha256(path, whole[start : start + BLOCK]) for start in whole[::BLOCK]]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest; one that is missing, unreadable or of another step is a DamagedCheckpoint that names it."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
        whole_numbers(manifest["step"])
        files = {plain_name(name): total for name, total in manifest["sha256"].items()}
        sums = list(files.values())
        if "blocks" in manifest:
            whole_numbers(manifest["blocks"]["bytes"], manifest["blocks"]["bytes"] - 1)
            sums += [total for totals in manifest["blocks"]["sha256"].values() for total in list(totals)]
        if step_name(manifest["step"]) != folder.name or not all(isinstance(total, str) for total in sums):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is missing or damaged; {_REMEDY}") from error
    return manifest


_REMEDY = "nothing was changed: remove this checkpoint folder to go on from an earlier one, or restore it"


def check(folder: Path, names: Iterable[str], rank: int = 0, world: int = 1) -> None:
    """Raise a DamagedCheckpoint that names one of these files that is not what was written.

    Of `world` processes each checks its share of the bytes: of a file of several blocks some, of others all or nothing.
    """
    manifest, pieces = read_manifest(folder), []
    for path in (folder / f"{name}.safetensors" for name in names):
        if path.name not in manifest["sha256"]:
            raise DamagedCheckpoint(f"{folder / MANIFEST} lists no {path.name}; {_REMEDY}")
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing; {_REMEDY}")
        size, block, sums = path.stat().st_size, path.stat().st_size, [manifest["sha256"][path.name]]
        if world > 1 and path.name in (blocks := manifest.get("blocks", {"sha256": {}}))["sha256"]:
            block, sums = blocks["bytes"], blocks["sha256"][path.name]
            if -(-size // block) != len(sums):
                raise DamagedCheckpoint(f"{path} is damaged ({size} bytes, not {len(sums)} blocks); {_REMEDY}")
        starts = range(0, len(sums) * block, block) if len(sums) > 1 else (0,)
        pieces += [(path, range(start, min(start + block, size)), sha) for start, sha in zip(starts, sums, strict=True)]
    owners = balanced([len(part) for _, part, _ in pieces], world)
    for (path, part, expected), owner in zip(pieces, owners, strict=True):
        if owner == rank and (actual := sha256(path, part)) != expected:
            sums = f"sha256 {actual[:12]}..., expected {expected[:12]}..."
            raise DamagedCheckpoint(f"{path} is damaged ({sums}); {_REMEDY}")


def whole_file(path: Path) -> AbstractContextManager[None]:
    """Turn what is raised over a file whose checksum is right into an error that names it."""
    return refusal(f"{path} is no whole safetensors file", _REMEDY)  # a manifest may have the checksum of anything


def load(folder: Path, name: str) -> Weights:
    """Return {name}.safetensors after its checksum; a file that fails it is named."""
    check(folder, [name])
    path = folder / f"{name}.safetensors"
    with whole_file(path):
        return load_file(path)


def sampled_from(manifest: dict[str, Any]) -> list[str]:
    """Return the names of the weights that can be sampled from: the raw ones and their averages."""
    names = [file.removesuffix(".safetensors") for file in manifest["sha256"]]
    return [name for name in names if name not in ("optimizer", "projector")]


def step_name(step: int) -> str:
    """Return the name of a checkpoint folder."""
    return f"step-{step:08d}"


def step_folder(run: Path, step: int) -> Path:
    """Return checkpoints/step-N of a run."""
    return run / "checkpoints" / step_name(step)


def folders(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def latest(run: Path) -> Path | None:
    """Return the newest checkpoint folder of a run, or None."""
    return max(folders(run), default=None)


def best(run: Path) -> Path | None:
    """Return the checkpoint with the lowest quality figure, or None where none has one; a damaged one has none."""
    scored = []
    for folder in folders(run):
        with suppress(DamagedCheckpoint):
            quality = read_manifest(folder).get("quality")
            if isinstance(quality, float) and isfinite(quality):
                scored.append((quality, folder))
    return min(scored)[1] if scored else None


def find(run: Path, which: str) -> Path | None:
    """Return the checkpoint asked for: "latest", "best", or a step number; None where there is none."""
    if which in ("latest", "best"):
        return latest(run) if which == "latest" else best(run)
    if not which.isdigit():
        raise ValueError(f"checkpoint='{which}' is unknown; allowed: latest, best, or a step number")
    folder = step_folder(run, int(which))
    return folder if folder.is_dir() else None


def prune(run: Path, keep: int, keep_best: bool = False) -> None:
    """Remove all but the newest `keep` checkpoints and, if asked for, the best."""
    best_one = best(run) if keep_best else None
    for folder in folders(run)[:-keep]:
        if folder != best_one:
            remove(folder)


def parsed_line(line: str) -> dict[str, Any] | None:
    """Return a log line with its step; None where it is not a whole one: a full disk or a crash cuts lines."""
    try:
        entry = json.loads(line)
        return {**entry, "step": int(entry["step"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log, oldest first; none where there is no log. Lines may still be added to it."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines = file.read(MOST_TEXT).decode(errors="replace").splitlines()
    return [entry for line in lines if (entry := parsed_line(line)) is not None]
