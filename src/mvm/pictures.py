"""uint8 images as pictures and files: a grid, PNGs in a folder or zip, arrays, parquet; streamed, whole or not at all.

A stream yields (images (B, C, H, W), labels (B,)) in order, so that a file of any size is written from one batch.
"""

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mvm.files import put_in_place, temporary_beside
from mvm.options import needs

Stream = Iterable[tuple[Tensor, Tensor]]
Shape = tuple[int, int, int, int]  # N, C, H, W of a whole stream
MOST_IN_GRID = 1024


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


def channels_last(images: Tensor) -> np.ndarray:
    """Return images (B, C, H, W) as a contiguous array (B, H, W, C)."""
    return np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())


def _magnification(side: int) -> int:
    """Small images are shown at 64 pixels or so, whole-pixel magnified."""
    return max(1, 64 // side)


def _write_png(out: Path, stream: Stream, shape: Shape) -> None:
    images = torch.cat([images for images, _ in stream])
    columns = max(1, round(len(images) ** 0.5))
    out.write_bytes(png_bytes(grid(images, columns, _magnification(images.shape[-1]), gap=2)))


def _write_array(file: IO[bytes], stream: Stream, shape: Shape) -> list[Tensor]:
    """Write a stream as one .npy of uint8 NHWC; return its labels."""
    count, channels, height, width = shape
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, height, width, channels)}
    np.lib.format.write_array_header_1_0(file, header)
    labels = []
    for images, batch_labels in stream:
        file.write(channels_last(images).data)
        labels.append(batch_labels)
    return labels


def _write_npz(out: Path, stream: Stream, shape: Shape) -> None:
    """ADM layout: arr_0 uint8 NHWC, arr_1 labels. A ZipInfo carries no clock: equal images, equal files."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo("arr_0.npy"), "w", force_zip64=True) as file:
            labels = _write_array(file, stream, shape)
        with archive.open(zipfile.ZipInfo("arr_1.npy"), "w") as file:
            np.lib.format.write_array(file, torch.cat(labels).numpy())


def _write_npy(out: Path, stream: Stream, shape: Shape) -> None:
    with out.open("wb") as file:
        _write_array(file, stream, shape)


def picture_name(place: int) -> str:
    """Return the name of an image's file in a folder or zip."""
    return f"{place:06d}.png"


def _pngs(stream: Stream) -> Iterator[list[tuple[str, bytes, int]]]:
    """Yield name, PNG and label of every image, batch by batch; compressed in threads, as zlib lets go of the lock."""
    place = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for images, labels in stream:
            names = [picture_name(i) for i in range(place, place + len(images))]
            found = pool.map(lambda image: png_bytes(to_pillow(image)), images)
            yield list(zip(names, found, labels.tolist(), strict=True))
            place += len(images)


def _write_zip(out: Path, stream: Stream, shape: Shape) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for batch in _pngs(stream):
            for name, png, _ in batch:
                archive.writestr(zipfile.ZipInfo(name), png)


def _write_folder(out: Path, stream: Stream, shape: Shape) -> None:
    out.mkdir(parents=True)
    for batch in _pngs(stream):
        for name, png, _ in batch:
            (out / name).write_bytes(png)


def _parquet() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(needs("a parquet file", "pyarrow", "data")) from error
    return pyarrow


def _write_parquet(out: Path, stream: Stream, shape: Shape) -> None:
    """The data-set hubs' layout: image {bytes, path}, label; a row group per batch."""
    arrow = _parquet()
    features = {"image": {"_type": "Image"}, "label": {"_type": "Value", "dtype": "int64"}}
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    schema = arrow.schema([("image", image), ("label", arrow.int64())])
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    with arrow.parquet.ParquetWriter(out, schema, compression="none") as writer:  # PNGs do not shrink further
        for batch in _pngs(stream):
            rows = [{"image": {"bytes": png, "path": name}, "label": label} for name, png, label in batch]
            writer.write_table(arrow.Table.from_pylist(rows, schema))


WRITERS: dict[str, Callable[[Path, Stream, Shape], None]] = {
    ".png": _write_png,
    ".npz": _write_npz,
    ".npy": _write_npy,
    ".zip": _write_zip,
    ".parquet": _write_parquet,
    "": _write_folder,
}


def check_output(out: Path, count: int = 0) -> str:
    """Return the kind of file or folder to write; raise if it is unknown or would mix with other files.

    count: images, where more of them than a grid shows are to be refused.
    """
    if out.is_dir():
        if any(out.iterdir()):
            raise ValueError(f"out={out} is a folder that is not empty; give a new name")
        return ""
    if out.exists() and not out.suffix:
        raise ValueError(f"out={out} is a file, and a folder would be written; give another name")
    kind = out.suffix.lower()
    if kind not in WRITERS:
        raise ValueError(
            f"out={out}: suffix '{out.suffix}' is unknown; use .png (one grid), .npz, .npy, .parquet, .zip or a folder"
        )
    if kind == ".png" and count > MOST_IN_GRID:
        raise ValueError(
            f"out={out} is one grid, of {MOST_IN_GRID} images at most, not {count}; use .npz, .zip or a folder"
        )
    if kind == ".parquet":
        _parquet()
    return kind


def write_stream(out: Path, stream: Stream, shape: Shape) -> None:
    """Write a stream where the suffix says, whole or not: the memory of one batch, but for the grid."""
    out = out.resolve()
    write = WRITERS[check_output(out)]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(out)
    try:
        write(temporary, stream, shape)
    except BaseException:  # Ctrl-C too: half of a large file is no use to anyone
        temporary_beside(out)
        raise
    put_in_place(temporary, out)


def write_images(out: Path, images: Tensor, labels: Tensor) -> None:
    """Write images where the suffix says: .png one grid; .npz, .npy uint8 NHWC; .parquet, .zip, folder of PNGs."""
    count, channels, height, width = images.shape
    write_stream(out, [(images, labels)], (count, channels, height, width))
