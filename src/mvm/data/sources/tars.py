"""Images in tars: labelled by folder like a zip, or in webdatasets, each with its label beside it."""

import gzip
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from shlex import quote
from typing import IO, Any, cast

from mvm.data.sources.archives import (
    IMAGE_SUFFIXES,
    MANIFEST,
    UNREAD_SUFFIXES,
    FilesPart,
    Tree,
    Unread,
    manifest_text,
    source_of,
)
from mvm.data.sources.records import Part, Record, Source, Wanted, files_of_split, listed_names, numbered, stamp_of
from mvm.untrusted import MOST_LABEL, cut, parse_json, picture_bytes, refusal

TAR_IMAGES = ("jpg", "jpeg", "png", "webp")
TAR_LABELS = ("cls", "json")
TAR_TEXTS = (*TAR_LABELS, "txt")  # captions
MOST_HEADER = 1 << 18  # bytes of a header in a packed tar, which could unpack to a thousand times its own size
LEAST_MEMBER = 16  # bytes of a packed tar for each of its files, else it holds no pictures


def _is_packed(path: Path) -> bool:
    """Return whether a file is packed by gzip, whatever its name."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


class _Headers(gzip.GzipFile):
    """A packed tar of which headers alone are read."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MOST_HEADER:
            raise ValueError(f"a header is larger than {MOST_HEADER:,} bytes")
        return super().read(size)


def _members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the tar and the header of each of its members; of a packed one headers alone can be read."""
    offset, count, most = -1, 0, path.stat().st_size // LEAST_MEMBER + 1000
    packed = _is_packed(path)
    with (
        refusal(f"'{path}' is no whole tar"),
        cast(IO[bytes], _Headers(path)) if packed else path.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        while (member := tar.next()) is not None:
            cast(Any, tar).members.clear()  # it would keep all of them
            count += 1
            if member.offset <= offset or member.size < 0:  # a negative size would lead back, again and again
                raise ValueError("its members overlap")
            if packed and count > most:
                raise ValueError(f"{count:,} files in so few bytes are no pictures")
            offset = member.offset
            yield tar, member


def _tar_stream(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if _is_packed(path) else path.open("rb")


class TarImagesPart(FilesPart):
    """Some files of a tar, packed by gzip or not, in the order in which they lie there; facts: offset and size."""

    def read(self) -> Iterator[Record]:
        with _tar_stream(self.path) as file:
            for (name, label), (start, size) in zip(self.entries, self.facts, strict=True):
                with refusal(f"'{self.path}': member '{cut(name)}' cannot be read", "repair the archive"):
                    file.seek(start)  # forward: a packed tar is unpacked once for a part
                    image = picture_bytes(file, size)[:size]
                yield Record(name, image, label)


def open_tar(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a tar that is no webdataset, labelled by folder, in their order there."""
    files: dict[str, Any] = {}  # a name that comes again replaces the earlier one, as when a tar is unpacked
    folders = []
    for _, member in _members(path):
        if member.isdir():
            folders.append(member.name)
        elif member.isfile() and not member.issparse():
            files[member.name] = (member.offset_data, member.size)
        else:
            link = member.issym() or member.islnk()
            files[member.name] = Unread("a link in the archive, which is not followed" if link else "no plain file")
    tree, text = Tree.of(path, files.items(), folders).of_split(split), None
    found = files.get(tree.base + MANIFEST)
    if isinstance(found, tuple):
        with refusal(f"'{path}': member '{MANIFEST}' cannot be read", "repair the archive"), _tar_stream(path) as file:
            file.seek(found[0])
            text = manifest_text(file, found[1])
    return source_of("tar", path, tree, text, part_size, TarImagesPart)


def _plain_files(path: Path) -> Iterator[tuple[str, str, tarfile.TarFile, tarfile.TarInfo]]:
    """Yield (key, extension, tar, member) of a tar's plain files: their names up to and from the first dot."""
    for tar, member in _members(path):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if member.isfile() and stem:
            yield f"{folder}/{stem}".lstrip("/"), extension.casefold(), tar, member


def _is_webdataset(path: Path) -> bool:
    """Return whether the first picture of a tar has a label or caption beside it; of a tar without, if it may have."""
    for _, sample in groupby(_plain_files(path), key=itemgetter(0)):
        kinds, image = set(), False
        for _, kind, _, member in sample:
            kinds.add(kind)
            image = image or member.name.casefold().endswith(IMAGE_SUFFIXES + UNREAD_SUFFIXES)
        if image:
            return not kinds.isdisjoint(TAR_TEXTS)
    return not _is_packed(path)


def _samples(path: Path, caption: str = "") -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, {extension: contents}): neighbours in the tar that share their name up to its first dot."""
    texts = {*TAR_LABELS, *filter(None, [caption])}
    for key, sample in groupby(_plain_files(path), key=itemgetter(0)):
        fields = {}
        for _, kind, tar, member in sample:
            if kind in TAR_IMAGES or kind in texts:
                with refusal(f"'{path}' is no whole tar"):
                    if kind in texts and member.size > MOST_LABEL:
                        raise ValueError(f"'{cut(member.name)}' is larger than {MOST_LABEL:,} bytes")
                    fields[kind] = picture_bytes(cast(IO[bytes], tar.extractfile(member)), member.size)
        if fields:
            yield key, fields


def _label(path: Path, key: str, fields: dict[str, bytes]) -> int | None:
    """Return the label in .cls, or under "label" in .json; None without one."""
    try:
        if "cls" in fields:
            return int(fields["cls"].decode())
        table = parse_json(fields["json"]) if "json" in fields else None
        label = table.get("label") if isinstance(table, dict) else None
        if label is not None and type(label) is not int:
            raise ValueError(f"{label!r}")
    except ValueError as error:
        raise ValueError(f"'{path}': the label of '{cut(key)}' is not an integer ({cut(error)})") from None
    return label


@dataclass(frozen=True)
class TarPart(Part):
    """One webdataset tar."""

    path: Path
    labelled: bool
    caption: str = ""  # suffix of the files that hold one

    def read(self) -> Iterator[Record]:
        for key, fields in _samples(self.path, self.caption):
            label = _label(self.path, key, fields) if self.labelled else 0
            if label is None:
                raise ValueError(
                    f"'{self.path}': sample '{cut(key)}' has no label (.cls, or 'label' in .json), others have"
                )
            image = next((fields[kind] for kind in TAR_IMAGES if kind in fields), b"")
            if self.caption and self.caption not in fields:
                raise ValueError(f"'{self.path}': sample '{cut(key)}' has no caption ({cut(key)}.{self.caption})")
            condition = (fields[self.caption],) if self.caption else ()
            yield Record(f"{self.path.name}/{key}", image, label, condition)


def open_tars(path: Path, split: str, part_size: int, wanted: Wanted | None = None) -> Source:
    """Return the samples of a webdataset tar, or of a folder of them, in the order file, place in it.

    A tar is one part whatever part_size: its length is unknown before it is read, and writers keep it small.
    A tar that is no webdataset is read like a zip: class folders of images.
    """
    caption = "" if wanted is None else wanted.keys[0].removeprefix(".").casefold()
    if wanted is not None and wanted.kind != "caption":
        raise ValueError(f"'{path}': a tar holds captions alone, not {wanted.kind}; give condition='caption:txt'")
    if path.is_file() and not caption and not _is_webdataset(path):
        return open_tar(path, split, part_size)
    tars = files_of_split(list(path.glob("*.tar")) if path.is_dir() else [path], split, str(path))
    for tar in tars:
        if _is_packed(tar):
            raise ValueError(f"'{tar}' is a packed webdataset; unpack it first: gunzip --keep {quote(str(tar))}")
    first = next(_samples(tars[0], caption), None)
    if first is None:
        raise ValueError(f"'{tars[0]}' holds no samples: files key.jpg (or .png, .webp) with key.cls or key.json")
    if "/" in first[0] and not _is_webdataset(tars[0]):
        raise ValueError(f"'{path}' holds tars of class folders; prepare one tar, or unpack them into one folder")
    labelled = "cls" in first[1] or _label(tars[0], *first) is not None
    parts = (TarPart(tar.name, stamp_of(tar.name, tar.stat().st_size), tar, labelled, caption) for tar in tars)
    folder = path if path.is_dir() else path.parent
    return Source("webdataset", path.name, listed_names(folder) if labelled else numbered(1), tuple(parts))
