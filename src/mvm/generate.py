"""Seeds -> noise -> field -> solver -> decode -> images, as a stream; and the files they go to."""

import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from mvm import noise
from mvm.files import put_in_place, temporary_beside
from mvm.model import Model
from mvm.options import at_least
from mvm.recipes import SampleConfig
from mvm.solver import solve


class Generated(NamedTuple):
    """uint8 images (B, C, H, W), their labels and seeds, and what one of them cost."""

    images: Tensor
    labels: Tensor
    seeds: Tensor
    nfe: int
    passes: int


def cycle_labels(classes: Sequence[int], num: int, num_classes: int) -> Tensor:
    """Return num labels that go round the asked classes (all of them when none is asked)."""
    at_least("num", num, 1)
    chosen = list(classes) or list(range(num_classes))
    bad = [c for c in chosen if not 0 <= c < num_classes]
    if bad:
        raise ValueError(
            f"classes={','.join(map(str, bad))} out of range; this model has classes 0 to {num_classes - 1}"
        )
    return torch.tensor([chosen[i % len(chosen)] for i in range(num)], dtype=torch.int64)


def generate(
    model: Model,
    labels: Tensor,
    seeds: Tensor,
    settings: SampleConfig,
    *,
    batch: int = 256,
    progress: bool = True,
) -> Iterator[Generated]:
    """Yield images batch by batch; an image depends on its own seed and label, not on the batch."""
    at_least("batch", batch, 1)
    with tqdm(total=len(labels), desc="sample", unit="image", disable=not progress) as bar:
        for start in range(0, len(labels), batch):
            part = slice(start, start + batch)
            x = noise.initial(seeds[part].to(model.device), model.sample_shape)
            solution = solve(
                model,
                x,
                schedule=model.schedule,
                solver=settings.build_solver(),
                nfe=settings.nfe,
                rho=settings.rho,
                condition=labels[part].to(model.device),
                seeds=seeds[part],
                guidance=settings.guidance(),
            )
            images = model.codec.decode(solution.x).cpu()
            yield Generated(images, labels[part], seeds[part], solution.nfe, solution.passes)
            bar.update(len(images))


def generate_all(
    model: Model,
    labels: Tensor,
    seeds: Tensor,
    settings: SampleConfig,
    *,
    batch: int = 256,
    progress: bool = True,
) -> Generated:
    """Return all images at once; nfe and passes are the mean over the batches (they differ for `adaptive` alone)."""
    parts = list(generate(model, labels, seeds, settings, batch=batch, progress=progress))
    images = torch.cat([part.images for part in parts])
    nfe, passes = (round(sum(part[i] for part in parts) / len(parts)) for i in (3, 4))
    return Generated(images, labels, seeds, nfe, passes)


def to_pillow(image: Tensor) -> Image.Image:
    """Return a uint8 image (C, H, W) with 1 or 3 channels as a Pillow image."""
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def grid(images: Tensor, columns: int, scale: int = 1, gap: int = 1) -> Image.Image:
    """Return images (N, C, H, W) as one picture, row by row, magnified by whole pixels, on white."""
    images = images.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    count, channels, height, width = images.shape
    rows = -(-count // columns)
    canvas = torch.full((channels, rows * (height + gap) + gap, columns * (width + gap) + gap), 255, dtype=torch.uint8)
    for i, image in enumerate(images):
        y, x = gap + (i // columns) * (height + gap), gap + (i % columns) * (width + gap)
        canvas[:, y : y + height, x : x + width] = image
    return to_pillow(canvas)


def png_bytes(picture: Image.Image) -> bytes:
    """Return the picture as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _magnification(side: int) -> int:
    """Small images are shown at 64 pixels or so, whole-pixel magnified."""
    return max(1, 64 // side)


def _write_png(out: Path, images: Tensor, labels: Tensor) -> None:
    columns = max(1, round(len(images) ** 0.5))
    out.write_bytes(png_bytes(grid(images, columns, _magnification(images.shape[-1]), gap=2)))


def _write_npz(out: Path, images: Tensor, labels: Tensor) -> None:
    """ADM layout: arr_0 uint8 NHWC, arr_1 labels."""
    with out.open("wb") as file:
        np.savez(file, arr_0=images.permute(0, 2, 3, 1).numpy(), arr_1=labels.numpy())


def _write_npy(out: Path, images: Tensor, labels: Tensor) -> None:
    with out.open("wb") as file:
        np.save(file, images.permute(0, 2, 3, 1).numpy())


def _write_zip(out: Path, images: Tensor, labels: Tensor) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for i, image in enumerate(images):
            archive.writestr(f"{i:06d}.png", png_bytes(to_pillow(image)))


def _write_folder(out: Path, images: Tensor, labels: Tensor) -> None:
    out.mkdir(parents=True)
    for i, image in enumerate(images):
        (out / f"{i:06d}.png").write_bytes(png_bytes(to_pillow(image)))


WRITERS = {".png": _write_png, ".npz": _write_npz, ".npy": _write_npy, ".zip": _write_zip, "": _write_folder}


def check_output(out: Path) -> str:
    """Return the kind of file or folder to write; raise if it is unknown or would mix with other files."""
    if out.is_dir():
        if any(out.iterdir()):
            raise ValueError(f"out={out} is a folder that is not empty; give a new name")
        return ""
    if out.exists() and not out.suffix:
        raise ValueError(f"out={out} is a file, and a folder would be written; give another name")
    if out.suffix.lower() not in WRITERS:
        raise ValueError(
            f"out={out}: suffix '{out.suffix}' is unknown; use .png (one grid), .npz, .npy, .zip or a folder"
        )
    return out.suffix.lower()


def write_images(out: Path, images: Tensor, labels: Tensor) -> None:
    """Write images where the suffix says: .png one grid, .npz/.npy uint8 NHWC, .zip or folder of PNGs; whole or not."""
    out = out.resolve()
    write = WRITERS[check_output(out)]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(out)
    write(temporary, images, labels)
    put_in_place(temporary, out)
