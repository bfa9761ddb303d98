"""What is struck: small runs of everything that writes files, and what must be the same afterwards."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from mvm import checkpoint, cli, demo
from mvm.data.prepare import prepare
from mvm.files import is_leftover
from mvm.latent.cache import write_latents

TRAIN = {
    "network.depth": "1",
    "network.heads": "2",
    "network.width": "16",
    "train.batch": "8",
    "train.steps": "12",
    "train.warmup": "2",
    "train.log_every": "1",
    "train.save_every": "4",
    "train.keep": "2",
    "train.power": "0.1",
    "train.snapshot_every": "3",
    "preview.every": "6",
    "preview.count": "4",
    "preview.grid": "4",
    "sample.nfe": "2",
}
STOPPED = 7  # a step after a checkpoint and two snapshots: the second of them is written again
DEMO = demo.DemoSize(steps=4, samples=20, nfes=(3,), likelihood_images=2, likelihood_steps=2)


@dataclass(frozen=True)
class Activity:
    """A command: begin(folder) makes what it starts from, run(folder, again) returns its exit code."""

    name: str
    run: Callable[[Path, bool], int]
    begin: Callable[[Path], object] = lambda folder: None


def train(folder: Path, again: bool, *more: str) -> int:
    """Train the tiny network; again: as the documentation says after a crash."""
    dotted = [word for name, value in TRAIN.items() for word in (f"--{name}", value)]
    flags = ["--auto-resume"] if again else []
    tokens = ["train", "digits", *dotted, "--device", "cpu", "--out", str(folder / "run"), "--no-report"]
    return cli.run([*tokens, *flags, *more])


def _stopped_between_checkpoints(folder: Path) -> None:
    """Leave a run as a kill after step 7 does."""
    train(folder, False, "--until", str(STOPPED))
    shutil.rmtree(checkpoint.step_folder(folder / "run", STOPPED))


def sources(folder: Path) -> None:
    """Write pictures of two classes, folder/source."""
    for number in range(40):
        path = folder / "source" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9), 6 * number, np.uint8)).save(path)


def _told(work: Callable[[], object]) -> int:
    """Return the exit code that the command line would give; these two have options that it has not."""
    try:
        work()
    except (ValueError, OSError) as error:
        print(f"mvm: {error}")
        return 2
    return 0


def _prepare(folder: Path, workers: int) -> int:
    options: dict[str, Any] = {"size": 8, "channels": 1, "part_size": 5, "progress": False}
    return _told(lambda: prepare(folder / "source", folder / "out", workers=workers, **options))


class HalfCodec:
    """A codec without weights."""

    latent_shape = (1, 4, 4)
    fingerprint = "half"

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Return every second pixel."""
        return images[:, :, ::2, ::2].float() / 255


def _latents(folder: Path) -> int:
    images = torch.arange(40 * 64).remainder(251).to(torch.uint8).reshape(40, 1, 8, 8)
    options: dict[str, Any] = {"stamp": "s", "batch": 4, "shard": 8, "progress": False}
    return _told(lambda: write_latents(folder / "out", HalfCodec(), images, **options))


def _demo(folder: Path) -> int:
    demo.QUICK = DEMO
    demo.others_shipped = dict  # the larger ones take seconds each, and write nothing of their own
    return cli.run(["demo", "--quick", "--out", str(folder / "out")])


def activities(model: Path, images: int) -> list[Activity]:
    """Return all of them; model: a finished run; images: to sample."""

    def sample(folder: Path, out: str) -> int:
        batch = str(max(10, images // 8))
        draw = ["-n", str(images), "--batch", batch, "--nfe", "2", "--device", "cpu"]
        return cli.run(["sample", str(model), *draw, "--out", str(folder / out)])

    def sweep(folder: Path) -> int:
        cells = ["--nfe", "2,3", "--rho", "0", "-n", "40", "--batch", "20", "--device", "cpu"]
        return cli.run(["sweep", str(model), *cells, "--out", str(folder / "out")])

    def ema(folder: Path) -> int:
        return cli.run(["ema", str(model), "--width", "0.1", "--out", str(folder / "out")])

    return [
        Activity("train", train),
        Activity("train, resumed", lambda folder, again: train(folder, True), _stopped_between_checkpoints),
        Activity("train, average", lambda folder, again: ema(folder)),
        Activity("data prepare", lambda folder, again: _prepare(folder, 1), sources),
        Activity("data prepare, 2 workers", lambda folder, again: _prepare(folder, 2), sources),
        Activity("latents", lambda folder, again: _latents(folder)),
        Activity("sample, one file", lambda folder, again: sample(folder, "out.npz")),
        Activity("sample, a folder", lambda folder, again: sample(folder, "out")),
        Activity("sweep", lambda folder, again: sweep(folder)),
        Activity("demo", lambda folder, again: _demo(folder)),
    ]


# ---------------------------------------------------------------- what must be the same

TIMED = ("seconds", "images_per_second")
NOT_COMPARED = ("tensorboard", "plots", "report.html", "results.csv", "source")  # they tell or draw times; or are input


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(inner) for key, inner in value.items() if key not in TIMED}
    return [_untimed(inner) for inner in value] if isinstance(value, list) else value


def _contents(path: Path) -> bytes:
    """Return the bytes of a file, without the times in it."""
    if path.suffix in (".json", ".jsonl"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        return json.dumps([_untimed(json.loads(line)) for line in lines]).encode()
    return path.read_bytes()


def _visible(folder: Path) -> list[Path]:
    """Return the files that anyone could take for a result."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the sha256 of every result."""
    names = {path: path.relative_to(folder) for path in _visible(folder)}
    kept = {path: name for path, name in names.items() if not set(name.parts) & set(NOT_COMPARED)}
    return {name.as_posix(): hashlib.sha256(_contents(path)).hexdigest() for path, name in kept.items()}


def leftovers(folder: Path) -> list[str]:
    """Return what a finished command must not leave: temporaries, folders that stand aside, parts."""
    found = (path for path in folder.rglob(".*") if is_leftover(path) or path.name.endswith(".parts"))
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _read_tensors(path: Path) -> object:
    """Read tensors: of a checkpoint with its checksums, of a published model as they are."""
    return checkpoint.load(path.parent, path.stem) if (path.parent / checkpoint.MANIFEST).exists() else load_file(path)


def _damage(path: Path) -> str:
    """Return what is wrong with a file that has its final name, or nothing."""
    readers: dict[str, Callable[[Path], object]] = {
        ".json": lambda p: json.loads(p.read_text()),
        ".npy": np.load,
        ".npz": lambda p: np.load(p)["arr_0"],
        ".png": lambda p: Image.open(p).load(),
        ".safetensors": _read_tensors,
    }
    try:
        readers.get(path.suffix, lambda p: None)(path)
    except Exception as error:  # whatever a reader makes of half a file
        return f"{path.name}: {error}"
    return ""


def half_written(folder: Path) -> list[str]:
    """Return the damage of all files with final names; run right after a kill. A log line may be cut."""
    return [told for path in _visible(folder) if (told := _damage(path))]
