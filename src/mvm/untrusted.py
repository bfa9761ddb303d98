"""Files that others have written: how much is read of them, and readers that raise a ValueError on anything odd.

Every limit on size is here. A size that a file declares is trusted only where it has as many bytes.
"""

import json
import os
import re
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

MOST_TEXT = 1 << 26  # bytes of a JSON or text file: the index of a million classes takes a tenth of it
MOST_LISTED = 1 << 29  # bytes of a dataset.json or classes.txt: ten million pictures by name
MOST_PIXELS = (1 << 28) // 3  # of a picture: a quarter GiB in RGB; where Pillow begins to warn
MOST_PICTURE = 1 << 28  # bytes of a picture's file, or of a row of an array: as many as the pixels take unpacked
MOST_LABEL = 1 << 20  # bytes of a picture's label in a tar
MOST_CAPTION = 1 << 14  # bytes of a caption: ten times what text encoders read
MOST_ROWS = 1 << 26  # of an array or a table: their labels alone take half a GiB
MOST_DIMENSIONS = 1 << 14  # of features: a covariance of 2 GiB; the largest in use has 3,072
MOST_WORDS = 300  # characters quoted from a file in an error
# letters of TOML without comments: ten times the longest; the time to parse a dotted key grows with its square
MOST_RECIPE = 1 << 14
MOST_WEIGHTS = 1 << 33  # bytes of a .pth: twice the largest that is known, DINOv3 H+
LONGEST_NAME = 255  # bytes of a file's name, on every common system
# what Markdown reads as more than text: elements, emphasis, code, cells, links by brackets or bare, and marks of a line
MARKS = re.compile(r"[<>&`*|~\\]|(?<!\w)_|_(?!\w)|\](?=[(\[:])|://|(?<=www)\.|^[#+=-]")
DEFLATE = 1032  # bytes that one byte of a deflated stream can become at most


def printable(words: object) -> str:
    """Return text for a terminal: control characters, and what hides or turns text, are shown as \\x1b and so on."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(words))


def cut(words: object, most: int = MOST_WORDS) -> str:
    """Return words for an error, printable, cut where a file could make them endless."""
    text = str(words)
    return printable(text) if len(text) <= most else f"{printable(text[:most])}... ({len(text):,} letters)"


def markdown(words: object, code: bool = False) -> str:
    """Return text that is nothing but text in Markdown, and in the HTML that is made of it; code: set as code.

    Character references are text wherever Markdown reads marks, so that no element, link, picture, heading or table
    comes of names from data or models.
    """
    text = printable(" ".join(str(words).split()))
    if code and not set(text) & set("<>&`|"):
        return f"`{text}`"
    plain = MARKS.sub(lambda mark: f"&#{ord(mark[0][0])};{mark[0][1:]}", text)
    return f"<code>{plain}</code>" if code else plain


@contextmanager
def refusal(what: str, remedy: str = "copy it again") -> Generator[None]:
    """Turn whatever is raised over a damaged file into a ValueError: what (why); remedy."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # on damaged files libraries raise nearly anything: KeyError, MemoryError, TokenError...
        why = cut(error) or type(error).__name__
        raise ValueError(f"{what} ({why}); {remedy}") from None


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return a text file; ValueError where it is longer than `most` bytes, no plain file, or no UTF-8."""
    if path.exists() and not path.is_file():
        raise ValueError(f"'{path}' is no plain file")  # a pipe would be waited for, a device has no end
    with path.open("rb") as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)  # as much memory is taken at once
    if len(content) > most:
        raise ValueError(f"'{path}' is larger than {most:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is no UTF-8 text ({error.reason} at byte {error.start:,})") from None


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Return JSON; ValueError where it is none, or nested too deeply to be read; hooks: those of json.loads."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def read_json(path: Path, most: int = MOST_TEXT, **hooks: Any) -> dict[str, Any]:
    """Return the table in a JSON file; ValueError where there is none; hooks: those of json.loads."""
    table = parse_json(read_text(path, most), **hooks)
    if not isinstance(table, dict):
        raise ValueError(f"a table is needed, not {cut(type(table).__name__)}")
    return table


def plain_name(name: object) -> str:
    """Return the name of a file in a folder; ValueError where it leads elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or name != os.path.basename(name):
        raise ValueError(f"{cut(repr(name))} is no name of a file in this folder")
    if not name.isprintable() or len(os.fsencode(name)) > LONGEST_NAME:
        raise ValueError(f"{cut(repr(name))} is no name of a file in this folder")
    return name


def whole_numbers(*values: object) -> None:
    """Raise unless all values are integers from 0 on that 64 bits hold."""
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{cut(repr(value))} is no count")


def open_member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Open a member of a zip; LZMA is refused, as its header decides how much memory is taken."""
    member = archive.getinfo(name)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
        raise ValueError(f"packed by method {member.compress_type}; stored, deflate and bzip2 are read")
    return archive.open(member)


def check_pth(path: Path) -> None:
    """Raise a ValueError where a .pth would take more memory than its bytes: torch itself packs nothing."""
    if not path.is_file():
        raise ValueError(f"'{path}' is no plain file")
    if path.stat().st_size > MOST_WEIGHTS:
        raise ValueError(f"'{path}' is larger than {MOST_WEIGHTS:,} bytes")
    with refusal(f"'{path}' is no whole .pth", "get it again"):
        if not zipfile.is_zipfile(path):
            return  # torch's format before 2020, which is not compressed
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        declared = sum(max(member.file_size, member.compress_size) for member in members)
        if any(member.compress_type != zipfile.ZIP_STORED for member in members) or declared > path.stat().st_size:
            raise ValueError("its members are packed")


def is_named_tensor(item: tuple[object, object]) -> bool:
    """Return whether all numbers of a tensor are in its file: one of stride 0 declares terabytes in a few bytes."""
    import torch

    name, value = item
    if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    plain = value.device.type == "cpu" and not value.is_complex() and not value.is_quantized
    return plain and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


@contextmanager
def open_npy(
    path: Path, key: str = "", fortran: bool = False
) -> Generator[tuple[IO[bytes], tuple[int, ...], np.dtype]]:
    """Open the array `key` of an .npz, or an .npy (key ""); yields the stream behind the header, shape and type.

    fortran: whether an array in Fortran order is read, too; its shape is then reversed.
    """
    with path.open("rb") as file:
        if not key:
            yield file, *npy_header(file, os.fstat(file.fileno()).st_size, fortran)
            return
        with zipfile.ZipFile(file) as archive, open_member(archive, f"{key}.npy") as stream:
            member = archive.getinfo(f"{key}.npy")
            if member.compress_type == zipfile.ZIP_BZIP2:
                raise ValueError("packed with bzip2, which numpy does not write")
            yield stream, *npy_header(stream, min(member.file_size, DEFLATE * member.compress_size), fortran)


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def npy_header(file: IO[bytes], size: int, fortran: bool = False) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of an .npy of `size` bytes; ValueError where its header declares more than it can hold."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format is not read")
    shape, backwards, dtype = _HEADERS[version](file)
    backwards = backwards and len(shape) > 1
    if dtype.hasobject or (backwards and not fortran):
        raise ValueError("arrays of Python objects, or in Fortran order, are not read")
    declared = prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or declared > size - file.tell() or prod(side or 1 for side in shape) >= 1 << 62:
        raise ValueError(f"its header declares {cut(shape)} of {dtype}, which is more than the file holds")
    return shape[::-1] if backwards else shape, dtype


def map_npy(path: Path) -> np.ndarray:
    """Return an .npy, memory-mapped; anything else, an .npz or a pickle, is a ValueError."""
    with open_npy(path) as (file, shape, dtype):
        return np.memmap(path, dtype, "r", file.tell(), shape)


def picture_bytes(file: IO[bytes], declared: int) -> bytes:
    """Return a picture's file of a declared size; of one too large a byte more than allowed, for the decoder."""
    return file.read(min(declared, MOST_PICTURE) + 1)
