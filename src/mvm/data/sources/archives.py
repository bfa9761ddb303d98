"""Images stored as files of their own: in folders, in zip archives, in webdataset tars."""

import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from mvm.data.sources.records import (
    SPLIT_NAMES,
    Part,
    Record,
    Source,
    choose_split,
    files_of_split,
    listed_names,
    numbered,
    of_labels,
    spans,
    stamp_of,
)

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif"),
)
MANIFEST = "dataset.json"  # {"labels": [[name, label], ...]}
Entries = list[tuple[str, int]]  # (name, label)


@dataclass(frozen=True)
class FolderPart(Part):
    """Some files of a folder."""

    root: Path
    entries: tuple[tuple[str, int], ...]

    def read(self) -> Iterator[Record]:
        for name, label in self.entries:
            path = self.root / name
            yield Record(name, path.read_bytes() if path.exists() else b"", label)  # a link to nothing is a bad image


@lru_cache(maxsize=1)
def _opened(path: Path, changed: int) -> zipfile.ZipFile:
    # Kept open per process: the table of contents of a million files takes longer to read than a part.
    return zipfile.ZipFile(path)


@dataclass(frozen=True)
class ZipPart(Part):
    """Some members of a zip archive."""

    path: Path
    entries: tuple[tuple[str, int], ...]

    def read(self) -> Iterator[Record]:
        archive = _opened(self.path, self.path.stat().st_mtime_ns)
        for name, label in self.entries:
            try:
                image = archive.read(name)
            except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
                raise ValueError(f"'{self.path}': member '{name}' cannot be read ({error}); mend the archive") from None
            yield Record(name, image, label)


@dataclass(frozen=True)
class _Tree:
    """Images (with a fact that changes with their contents) and folders below a root, by their names from there."""

    where: str
    images: dict[str, int]
    folders: frozenset[str]
    base: str = ""  # what stands before the names

    def tops(self) -> set[str]:
        """Return the names of the uppermost folders."""
        return {folder.partition("/")[0] for folder in self.folders}

    def below(self, top: str) -> "_Tree":
        """Return what lies in one of the uppermost folders."""
        cut = len(top) + 1
        images = {name[cut:]: fact for name, fact in self.images.items() if name.startswith(f"{top}/")}
        folders = frozenset(name[cut:] for name in self.folders if name.startswith(f"{top}/"))
        return _Tree(self.where, images, folders, f"{self.base}{top}/")

    def of_split(self, split: str) -> "_Tree":
        """Return the chosen split, where the uppermost folders are splits and not classes."""
        tops = self.tops()
        if not split and not (tops and tops <= set(SPLIT_NAMES)):
            return self
        return self.below(choose_split(tops, split, self.where))


def _hidden(name: str) -> bool:
    return any(piece.startswith((".", "__MACOSX")) for piece in name.split("/"))


def _is_image(name: str) -> bool:
    return name.casefold().endswith(IMAGE_SUFFIXES)


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0  # a link to nothing


def _folder_tree(root: Path) -> _Tree:
    images, folders = {}, set()
    for folder, below, names in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not _hidden(name)]  # os.walk goes down only into what is left here
        inside = Path(folder).relative_to(root)
        folders |= {(inside / name).as_posix() for name in below}
        kept = [name for name in names if _is_image(name) and not _hidden(name)]
        images |= {(inside / name).as_posix(): _size(os.path.join(folder, name)) for name in kept}
    return _Tree(str(root), images, frozenset(folders))


def _zip_tree(path: Path, archive: zipfile.ZipFile) -> _Tree:
    members = [member for member in archive.infolist() if not _hidden(member.filename)]
    images = {member.filename: member.CRC for member in members if _is_image(member.filename)}
    names = [*images, *(member.filename + "." for member in members if member.is_dir())]
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents} - {"."}
    tree = _Tree(str(path), images, frozenset(folders))
    # `zip -r cats.zip cats` puts everything below cats/, which is no class
    return tree.below(path.stem) if tree.tops() == {path.stem} and tree.folders > {path.stem} else tree


def _by_folder(tree: _Tree) -> tuple[tuple[str, ...], Entries]:
    """Return classes, sorted, and labelled names: the uppermost folder is the class; without folders there is one."""
    loose = [name for name in tree.images if "/" not in name]
    if loose and len(loose) < len(tree.images):
        raise ValueError(
            f"'{tree.where}' has images both in class folders and beside them (first: {min(loose)}); move the latter"
        )
    if loose:
        return numbered(1), [(name, 0) for name in sorted(loose)]
    classes = sorted(tree.tops())
    label = {name: index for index, name in enumerate(classes)}
    labelled = [(name, label[name.partition("/")[0]]) for name in tree.images]
    return tuple(classes), sorted(labelled, key=lambda entry: (entry[1], entry[0]))


def _by_manifest(tree: _Tree, text: str) -> tuple[tuple[str, ...], Entries]:
    """Return classes and labelled names as dataset.json tells; its labels may be null, for one class."""
    try:
        pairs = json.loads(text)["labels"]
        known = {str(name): label for name, label in pairs} if pairs is not None else dict.fromkeys(tree.images, 0)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{tree.where}': {MANIFEST} must hold {{'labels': [[name, label], ...]}} ({error})") from None
    for name in sorted(known.keys() ^ tree.images.keys()):
        lacking = "no label in" if name in tree.images else "a label but no image in"
        raise ValueError(f"'{tree.where}': '{name}' has {lacking} the archive's {MANIFEST}; make them agree")
    for name, label in known.items():
        if type(label) is not int:
            raise ValueError(f"'{tree.where}': label {label!r} of '{name}' in {MANIFEST} is not an integer")
    return of_labels(list(known.values())), sorted(known.items())


def _labelled(tree: _Tree, manifest: str | None) -> tuple[tuple[str, ...], Entries]:
    classes, entries = _by_manifest(tree, manifest) if manifest is not None else _by_folder(tree)
    if not entries:
        raise ValueError(f"'{tree.where}' holds no images; known suffixes: {' '.join(IMAGE_SUFFIXES)}")
    return classes, [(tree.base + name, label) for name, label in entries]


def _pieces(tree: _Tree, entries: Entries, part_size: int) -> Iterator[tuple[str, str, tuple[tuple[str, int], ...]]]:
    """Yield name, stamp and entries of each part."""
    cut = len(tree.base)
    for start, stop in spans(len(entries), part_size):
        piece = tuple(entries[start:stop])
        yield f"{piece[0][0]} ..", stamp_of(piece, [tree.images[name[cut:]] for name, _ in piece]), piece


def open_folder(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a folder, in the order class, name."""
    tree = _folder_tree(path).of_split(split)
    manifest = path / tree.base / MANIFEST
    classes, entries = _labelled(tree, manifest.read_text(encoding="utf-8") if manifest.is_file() else None)
    parts = (FolderPart(name, stamp, path, some) for name, stamp, some in _pieces(tree, entries, part_size))
    return Source("folder", path.name, classes, tuple(parts))


def open_zip(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a zip archive, in the order class, name."""
    try:
        with zipfile.ZipFile(path) as archive:
            tree = _zip_tree(path, archive).of_split(split)
            manifest = tree.base + MANIFEST
            text = archive.read(manifest).decode() if manifest in archive.namelist() else None
    except zipfile.BadZipFile as error:
        raise ValueError(f"'{path}' is no whole zip archive ({error}); copy it again") from None
    classes, entries = _labelled(tree, text)
    parts = (ZipPart(name, stamp, path, some) for name, stamp, some in _pieces(tree, entries, part_size))
    return Source("zip", path.name, classes, tuple(parts))


TAR_IMAGES = ("jpg", "jpeg", "png", "webp")


def _samples(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, {extension: contents}): neighbours in the tar that share their name up to its first dot.

    The standard library's tarfile will do: what is needed is a plain reader, in order, one tar at a time.
    """
    key, fields = "", {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if not member.isfile() or not stem:
                    continue
                name = f"{folder}/{stem}".lstrip("/")
                if name != key and fields:
                    yield key, fields
                    fields = {}
                key = name
                if extension.casefold() in (*TAR_IMAGES, "cls", "json") and (file := tar.extractfile(member)):
                    fields[extension.casefold()] = file.read()
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"'{path}' is no whole tar ({error}); copy it again") from None
    if fields:
        yield key, fields


def _tar_label(fields: dict[str, bytes]) -> int | None:
    """Return the label in .cls, or under "label" in .json; None without one."""
    if "cls" in fields:
        return int(fields["cls"].decode())
    told = json.loads(fields["json"]) if "json" in fields else None
    label = told.get("label") if isinstance(told, dict) else None
    if label is not None and type(label) is not int:
        raise ValueError(f"{label!r}")
    return label


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
        try:
            label = _tar_label(fields)
        except ValueError as error:
            raise ValueError(f"'{self.path}': the label of '{key}' is not an integer ({error})") from None
        if label is None:
            raise ValueError(f"'{self.path}': sample '{key}' has no label (.cls, or 'label' in .json), others have")
        return label


def open_tars(path: Path, split: str, part_size: int) -> Source:
    """Return the samples of a webdataset tar, or of a folder of them, in the order file, place in it.

    A tar is one part whatever part_size: its length is unknown before it is read, and writers keep it small.
    """
    folder = path if path.is_dir() else path.parent
    tars = files_of_split(list(path.glob("*.tar")) if path.is_dir() else [path], split, str(path))
    first = next(_samples(tars[0]), None)
    if first is None:
        raise ValueError(f"'{tars[0]}' holds no samples: files key.jpg (or .png, .webp) with key.cls or key.json")
    labelled = "cls" in first[1] or _tar_label(first[1]) is not None
    parts = (TarPart(tar.name, stamp_of(tar.name, tar.stat().st_size), tar, labelled) for tar in tars)
    return Source("webdataset", path.name, listed_names(folder) if labelled else numbered(1), tuple(parts))
