"""uint8 images as pictures and files: a grid, PNGs in a folder or zip, arrays, parquet; streamed, whole or not at all.

A stream yields (images (B, C, H, W), labels (B,)) in order, so that a file of any size is written from one batch. Other
samples, float arrays or of other axes than height and width, are written as arrays alone.
"""

import importlib.util
import io
import json
import os
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mvm.files import atomic, claimed
from mvm.options import needs

Stream = Iterable[tuple[Tensor, Tensor]]
MOST_IN_GRID = 1024
LONGEST_NAME = 160  # pixels of a grid's margin


def to_pillow(image: Tensor) -> Image.Image:
    """Return a uint8 image (C, H, W) with 1 or 3 channels as a Pillow image."""
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _pasted(images: Tensor, spots: dict[int, tuple[int, int]], size: tuple[int, int], scale: int) -> Image.Image:
    """Return images, by number, pasted at their spots (x, y) on white, magnified by whole pixels."""
    canvas = Image.new("L" if images.shape[1] == 1 else "RGB", size, "white")
    side = images.shape[3] * scale, images.shape[2] * scale
    for i, spot in spots.items():
        canvas.paste(to_pillow(images[i]).resize(side, Image.Resampling.NEAREST), spot)
    return canvas


def grid(images: Tensor, columns: int, scale: int = 1, gap: int = 1) -> Image.Image:
    """Return images (N, C, H, W) as one picture, row by row, magnified by whole pixels, on white."""
    down, across = (images.shape[axis] * scale + gap for axis in (2, 3))  # from one image to the next
    spots = {i: (gap + i % columns * across, gap + i // columns * down) for i in range(len(images))}
    return _pasted(images, spots, (gap + columns * across, gap + -(-len(images) // columns) * down), scale)


@cache
def _font(size: int = 12) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return matplotlib's font where it is installed, which has most alphabets; else Pillow's own, of ASCII."""
    spec = importlib.util.find_spec("matplotlib")
    path = Path(spec.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf" if spec and spec.origin else Path()
    return ImageFont.truetype(path, size) if path.is_file() else ImageFont.load_default(size)


@cache
def _can_write(letter: str) -> bool:
    """Whether the font has a sign of its own for a letter; else it draws the same box for all."""
    box, sign = (bytes(_font().getmask(text)) for text in ("\u0378", letter))  # ty: ignore[invalid-argument-type]
    return sign != box


def _written(name: str, number: int, width: int) -> str:
    """Return a class's name as it fits in so many pixels; its number where the font cannot write it."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    name = next((text for text in (name, plain) if text and all(map(_can_write, text))), "")
    if not name:
        return f"class {number}"
    while len(name) > 4 and _font().getlength(name) > width:
        name = name.removesuffix("...")[:-1] + "..."
    return name


def sample_grid(images: Tensor, labels: Tensor, names: Sequence[str] = (), across: int = 0) -> Image.Image:
    """Return samples (N, C, H, W) as one picture on white, small ones magnified to 64 pixels or so.

    Of several classes that have names: a row for each with its name in the margin, or, where no class has two images,
    row by row, each above its class's name. Else row by row. across: images in a row; 0: as many as there are rows.
    """
    numbers, scale, gap = labels.tolist(), max(1, 64 // images.shape[-1]), 2
    rows = {number: [i for i, each in enumerate(numbers) if each == number] for number in dict.fromkeys(numbers)}
    across = across or max(1, round(len(images) ** 0.5))
    if len(names) < 2 or len(rows) < 2:
        return grid(images, across, scale, gap)
    height, width, line = images.shape[2] * scale, images.shape[3] * scale, 18  # pixels of an image, of a line of text
    columns = max(map(len, rows.values()))
    titles = {number: _written(names[number], number, LONGEST_NAME if columns > 1 else width) for number in rows}
    if columns > 1:
        left = 8 + max(int(_font().getlength(text)) + 1 for text in titles.values())
        right, down = width + gap, height + gap
        size = left + columns * right, gap + len(rows) * down
        places = [(i, column, row) for row, some in enumerate(rows.values()) for column, i in enumerate(some)]
        spots = {i: (left + column * right, gap + row * down) for i, column, row in places}
        words = [(text, 4, gap + row * down + (height - line) // 2) for row, text in enumerate(titles.values())]
    else:
        right, down = width + gap, height + line + gap
        size = gap + across * right, -(-len(numbers) // across) * down
        spots = {i: (gap + i % across * right, gap + i // across * down) for i in range(len(numbers))}
        words = [(titles[numbers[i]], x, y + height + 1) for i, (x, y) in spots.items()]
    canvas = _pasted(images, spots, size, scale)
    for text, x, y in words:
        ImageDraw.Draw(canvas).text((x, y), text, fill="black", font=_font())
    return canvas


def png_bytes(picture: Image.Image) -> bytes:
    """Return the picture as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def is_image(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether samples of this shape (C, *space) are stored as images are, channels last."""
    return dtype == torch.uint8 and len(shape) == 3


def require_pictures(shape: Sequence[int], dtype: torch.dtype, what: str) -> None:
    """Refuse to show samples that are no pictures."""
    if not is_image(shape, dtype) or shape[0] not in (1, 3):
        form = f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
        raise ValueError(f"{what} is of grey or colour images, and the samples are {form}; write .npy or .npz")


def as_array(samples: Tensor) -> np.ndarray:
    """Return samples as they are stored: images (B, C, H, W) channels last, all others (B, C, *space) as they are."""
    image = is_image(samples.shape[1:], samples.dtype)
    return np.ascontiguousarray((samples.permute(0, 2, 3, 1) if image else samples).numpy())


def from_array(stored: np.ndarray) -> Tensor:
    """Return what `as_array` was given."""
    samples = torch.from_numpy(np.array(stored))
    image = samples.dtype == torch.uint8 and samples.ndim == 4
    return samples.permute(0, 3, 1, 2).contiguous() if image else samples


def stored_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of one sample (C, *space) in an array."""
    return (*shape[1:], shape[0]) if is_image(shape, dtype) else tuple(shape)


def _write_png(out: Path, stream: Stream, count: int, names: Sequence[str] = ()) -> None:
    images, labels = map(torch.cat, zip(*stream, strict=True))
    out.write_bytes(png_bytes(sample_grid(images, labels, names)))


def _write_array(file: IO[bytes], stream: Stream, count: int) -> list[Tensor]:
    """Write a stream as one .npy, of images uint8 NHWC; return its labels."""
    labels = []
    for images, batch_labels in stream:
        array = as_array(images)
        if not labels:
            header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, {**header, "shape": (count, *array.shape[1:])})
        file.write(array.data)
        labels.append(batch_labels)
    return labels


def _write_npz(out: Path, stream: Stream, count: int) -> None:
    """ADM layout: arr_0 uint8 NHWC, arr_1 labels. A ZipInfo carries no clock: equal images, equal files."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo("arr_0.npy"), "w", force_zip64=True) as file:
            labels = _write_array(file, stream, count)
        with archive.open(zipfile.ZipInfo("arr_1.npy"), "w") as file:
            np.lib.format.write_array(file, torch.cat(labels).numpy())


def _write_npy(out: Path, stream: Stream, count: int) -> None:
    with out.open("wb") as file:
        _write_array(file, stream, count)


def picture_name(index: int) -> str:
    """Return the name of an image's file in a folder or zip."""
    return f"{index:06d}.png"


def _pngs(stream: Stream) -> Iterator[list[tuple[str, bytes, int]]]:
    """Yield name, PNG and label of every image, batch by batch; compressed in threads, as zlib lets go of the lock."""
    start = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for images, labels in stream:
            names = [picture_name(i) for i in range(start, start + len(images))]
            pngs = pool.map(lambda image: png_bytes(to_pillow(image)), images)
            yield list(zip(names, pngs, labels.tolist(), strict=True))
            start += len(images)


def _write_zip(out: Path, stream: Stream, count: int) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for batch in _pngs(stream):
            for name, png, _ in batch:
                archive.writestr(zipfile.ZipInfo(name), png)


def _write_folder(out: Path, stream: Stream, count: int) -> None:
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


def _write_parquet(out: Path, stream: Stream, count: int) -> None:
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


WRITERS: dict[str, Callable[..., None]] = {  # (out, stream, number of samples); the grid also takes names
    ".png": _write_png,
    ".npz": _write_npz,
    ".npy": _write_npy,
    ".zip": _write_zip,
    ".parquet": _write_parquet,
    "": _write_folder,
}
ARRAYS = (".npz", ".npy")  # which take any samples


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


def write_stream(out: Path, stream: Stream, count: int, names: Sequence[str] = ()) -> None:
    """Write a stream of `count` samples where the suffix says, whole or not: in a batch's memory, but for the grid.

    names: of the classes, for the grid's margin; without them it has none, and the images stand in their order.
    """
    out = out.resolve()
    kind = check_output(out)
    write = partial(WRITERS[kind], names=names) if kind == ".png" else WRITERS[kind]
    out.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if kind else claimed(out), atomic(out) as temporary:
        check_output(out)  # another process may have written it meanwhile
        write(temporary, stream, count)


def write_images(out: Path, images: Tensor, labels: Tensor, names: Sequence[str] = ()) -> None:
    """Write images where the suffix says: .png one grid; .npz, .npy uint8 NHWC; .parquet, .zip, folder of PNGs.

    Other samples as arrays alone, in the layout they have.
    """
    if check_output(out) not in ARRAYS:
        require_pictures(images.shape[1:], images.dtype, f"out={out}")
    write_stream(out, [(images, labels)], len(images), names)
