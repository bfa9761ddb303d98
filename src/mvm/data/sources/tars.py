"""Images in webdataset tars."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from mvm.data.sources.archives import IMAGE_SUFFIXES, UNREAD_SUFFIXES, is_packed, open_tar, tar_members
from mvm.data.sources.records import Part, Record, Source, files_of_split, listed_names, numbered, stamp_of
from mvm.untrusted import MOST_LABEL, cut, parse_json, picture_bytes, refusal

TAR_IMAGES = ("jpg", "jpeg", "png", "webp")
TAR_LABELS = ("cls", "json")
TAR_TEXTS = (*TAR_LABELS, "txt")  # captions


def _is_webdataset(path: Path) -> bool:
    """Return whether the first picture of a tar has a label or caption beside it; of a tar without, if it may have."""
    key, kinds, image = "", set(), False
    for member in tar_members(path):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if not member.isfile() or not stem:
            continue
        if image and key != f"{folder}/{stem}":
            break
        if key != f"{folder}/{stem}":
            key, kinds = f"{folder}/{stem}", set()
        kinds.add(extension.casefold())
        image = image or base.casefold().endswith(IMAGE_SUFFIXES + UNREAD_SUFFIXES)
    return not kinds.isdisjoint(TAR_TEXTS) if image else not is_packed(path)


def _members(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (key, extension, contents) of a tar's plain files, in order; contents b"" where none are needed.

    The standard library's tarfile will do: what is needed is a plain reader, in order, one tar at a time.
    """
    offset = -1
    with refusal(f"'{path}' is no whole tar"), tarfile.open(path, "r:") as tar:
        for member in tar:
            if member.offset <= offset:  # a negative size would lead back, again and again
                raise ValueError("its members overlap")
            offset = member.offset
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if member.isfile() and stem:
                kind = extension.casefold()
                yield f"{folder}/{stem}".lstrip("/"), kind, _contents(tar, member, kind)


def _contents(tar: tarfile.TarFile, member: tarfile.TarInfo, kind: str) -> bytes:
    file = tar.extractfile(member) if kind in (*TAR_IMAGES, *TAR_LABELS) else None
    if file is None:
        return b""
    if kind in TAR_LABELS and member.size > MOST_LABEL:
        raise ValueError(f"'{cut(member.name)}' is larger than {MOST_LABEL:,} bytes")
    return picture_bytes(file, member.size)


def _samples(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, {extension: contents}): neighbours in the tar that share their name up to its first dot."""
    key, fields = "", {}
    for name, kind, contents in _members(path):
        if name != key and fields:
            yield key, fields
            fields = {}
        key = name
        if kind in (*TAR_IMAGES, *TAR_LABELS):
            fields[kind] = contents
    if fields:
        yield key, fields


def _tar_label(fields: dict[str, bytes]) -> int | None:
    """Return the label in .cls, or under "label" in .json; None without one."""
    if "cls" in fields:
        return int(fields["cls"].decode())
    told = parse_json(fields["json"]) if "json" in fields else None
    label = told.get("label") if isinstance(told, dict) else None
    if label is not None and type(label) is not int:
        raise ValueError(f"{label!r}")
    return label


def _label(path: Path, key: str, fields: dict[str, bytes]) -> int | None:
    try:
        return _tar_label(fields)
    except ValueError as error:
        raise ValueError(f"'{path}': the label of '{cut(key)}' is not an integer ({cut(error)})") from None


@dataclass(frozen=True)
class TarPart(Part):
    """One webdataset tar."""

    path: Path
    labelled: bool

    def read(self) -> Iterator[Record]:
        for key, fields in _samples(self.path):
            image = next((fields[kind] for kind in TAR_IMAGES if kind in fields), b"")
            yield Record(f"{self.path.name}/{key}", image, self._label(key, fields) if self.labelled else 0)

    def _label(self, key: str, fields: dict[str, bytes]) -> int:
        label = _label(self.path, key, fields)
        if label is None:
            raise ValueError(
                f"'{self.path}': sample '{cut(key)}' has no label (.cls, or 'label' in .json), others have"
            )
        return label


def open_tars(path: Path, split: str, part_size: int) -> Source:
    """Return the samples of a webdataset tar, or of a folder of them, in the order file, place in it.

    A tar is one part whatever part_size: its length is unknown before it is read, and writers keep it small.
    A tar that is no webdataset is read like a zip: class folders of images.
    """
    if path.is_file() and not _is_webdataset(path):
        return open_tar(path, split, part_size)
    tars = files_of_split(list(path.glob("*.tar")) if path.is_dir() else [path], split, str(path))
    if is_packed(tars[0]):
        raise ValueError(f"'{tars[0]}' is a packed webdataset; unpack it first: gunzip --keep {quote(str(tars[0]))}")
    first = next(_samples(tars[0]), None)
    if first is None:
        raise ValueError(f"'{tars[0]}' holds no samples: files key.jpg (or .png, .webp) with key.cls or key.json")
    if "/" in first[0] and not _is_webdataset(tars[0]):
        raise ValueError(f"'{path}' holds tars of class folders; prepare one tar, or unpack them into one folder")
    labelled = "cls" in first[1] or _label(tars[0], *first) is not None
    parts = (TarPart(tar.name, stamp_of(tar.name, tar.stat().st_size), tar, labelled) for tar in tars)
    folder = path if path.is_dir() else path.parent
    return Source("webdataset", path.name, listed_names(folder) if labelled else numbered(1), tuple(parts))
