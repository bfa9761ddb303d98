"""Images stored as files of their own: in folders, in zip archives."""

import os
import zipfile
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
    numbered,
    of_labels,
    spans,
    stamp_of,
)
from mvm.untrusted import (
    MOST_LISTED,
    cut,
    open_member,
    parse_json,
    picture_bytes,
    read_text,
    refusal,
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
            yield Record(name, _file_bytes(self.root / name), label)


def _file_bytes(path: Path) -> bytes:
    """Return a file's bytes; of a link to nothing, a pipe or a device none, which is a bad image."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return picture_bytes(file, path.stat().st_size)


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
            what = f"'{self.path}': member '{cut(name)}' cannot be read"
            with refusal(what, "mend the archive"), open_member(archive, name) as member:
                image = picture_bytes(member, archive.getinfo(name).file_size)
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
    images, folders, met = {}, set(), set()
    for folder, below, names in os.walk(root, followlinks=True):
        _meet(folder, met)
        below[:] = [name for name in below if not _hidden(name)]  # os.walk goes down only into what is left here
        inside = Path(folder).relative_to(root)
        folders |= {(inside / name).as_posix() for name in below}
        kept = [name for name in names if _is_image(name) and not _hidden(name)]
        images |= {(inside / name).as_posix(): _size(os.path.join(folder, name)) for name in kept}
    return _Tree(str(root), images, frozenset(folders))


def _meet(folder: str, met: set[tuple[int, int]]) -> None:
    """Note a folder; one that links lead to a second time is refused: it could lead there for ever."""
    found = os.stat(folder)
    if (found.st_dev, found.st_ino) in met:
        raise ValueError(f"'{folder}' is a link to a folder that is here already; remove the link")
    met.add((found.st_dev, found.st_ino))


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
        pairs = parse_json(text)["labels"]
        known = {str(name): label for name, label in pairs} if pairs is not None else dict.fromkeys(tree.images, 0)
    except (ValueError, KeyError, TypeError) as error:
        why = cut(error)
        raise ValueError(f"'{tree.where}': {MANIFEST} must hold {{'labels': [[name, label], ...]}} ({why})") from None
    for name in sorted(known.keys() ^ tree.images.keys()):
        lacking = "no label in" if name in tree.images else "a label but no image in"
        raise ValueError(f"'{tree.where}': '{cut(name)}' has {lacking} the archive's {MANIFEST}; make them agree")
    for name, label in known.items():
        if type(label) is not int:
            raise ValueError(f"'{tree.where}': label {cut(repr(label))} of '{name}' in {MANIFEST} is not an integer")
    return _named(tree.where, list(known.values())), sorted(known.items())


def _named(where: str, labels: list[int]) -> tuple[str, ...]:
    try:
        return of_labels(labels)
    except ValueError as error:
        raise ValueError(f"'{where}': {error}") from None


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
    classes, entries = _labelled(tree, read_text(manifest, MOST_LISTED) if manifest.is_file() else None)
    parts = (FolderPart(name, stamp, path, some) for name, stamp, some in _pieces(tree, entries, part_size))
    return Source("folder", path.name, classes, tuple(parts))


def _zip_text(path: Path, name: str) -> str | None:
    """Return a member as text, None where there is none of that name."""
    with refusal(f"'{path}': member '{name}' cannot be read", "mend the archive"), zipfile.ZipFile(path) as archive:
        if name not in archive.namelist():
            return None
        with open_member(archive, name) as member:
            found = member.read(MOST_LISTED + 1)
        if len(found) > MOST_LISTED:
            raise ValueError(f"larger than {MOST_LISTED:,} bytes")
        return found.decode()


def open_zip(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a zip archive, in the order class, name."""
    with refusal(f"'{path}' is no whole zip archive"), zipfile.ZipFile(path) as archive:
        whole = _zip_tree(path, archive)
    tree = whole.of_split(split)
    text = _zip_text(path, tree.base + MANIFEST)
    classes, entries = _labelled(tree, text)
    parts = (ZipPart(name, stamp, path, some) for name, stamp, some in _pieces(tree, entries, part_size))
    return Source("zip", path.name, classes, tuple(parts))
