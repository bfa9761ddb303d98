"""Images stored as files of their own, in folders and in zip archives; `Tree` is their order and their classes."""

import os
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from mvm.data.sources.records import (
    SPLIT_NAMES,
    Part,
    Record,
    Source,
    choose_split,
    most_common,
    numbered,
    of_labels,
    spans,
    stamp_of,
)
from mvm.untrusted import MOST_LISTED, cut, open_member, parse_json, picture_bytes, read_text, refusal

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".heic", ".heif", ".hif"),
)
# Pictures that are not read. By suffix: many raw files are TIFF as well, of which Pillow would read the small preview.
UNREAD_SUFFIXES = (
    *(".raw", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".srf", ".sr2", ".dng", ".orf", ".rw2", ".raf", ".pef"),
    *(".srw", ".x3f", ".3fr", ".iiq", ".kdc", ".dcr", ".mrw", ".erf", ".rwl", ".psd", ".psb", ".xcf", ".svg", ".svgz"),
    *(".eps", ".ico", ".icns", ".cur", ".tga", ".dds", ".exr", ".hdr", ".jxl", ".jxr", ".pcx", ".xpm", ".xbm", ".qoi"),
)
DEEPEST = 16  # folders around the class folders
MANIFEST = "dataset.json"  # {"labels": [[name, label], ...]}
Entries = list[tuple[str, int]]  # (name, label)


class Unread(str):
    """Why a picture in an archive is not read; stands in the place of its fact."""


def _hidden(name: str) -> bool:
    return any(piece.startswith((".", "__MACOSX")) and piece != "." for piece in name.split("/"))


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].strip().casefold()


@dataclass(frozen=True)
class Tree:
    """The files and folders below a root; images and folders by their names from `base` on."""

    where: str
    images: dict[str, Any]  # with a fact that changes with the contents: size, checksum, or position in the archive
    folders: frozenset[str]
    unread: dict[str, str]  # pictures that cannot be read, with the reason
    others: frozenset[str]  # files that are no pictures, or hidden
    base: str = ""

    @staticmethod
    def of(where: Path, files: Iterable[tuple[str, Any]], folders: Iterable[str]) -> "Tree":
        """Return the tree of files, each with its fact, and of folders."""
        images, unread, others = {}, {}, set()
        for name, fact in files:
            suffix = _suffix(name)
            if _hidden(name) or suffix not in (IMAGE_SUFFIXES + UNREAD_SUFFIXES):
                others.add(name)
            elif suffix in UNREAD_SUFFIXES:
                unread[name] = f"{suffix} files are not supported; convert them to JPEG or PNG"
            elif isinstance(fact, Unread):
                unread[name] = fact
            else:
                images[name] = fact
        shown = frozenset(folder for folder in folders if not _hidden(folder))
        return Tree(str(where), images, shown, unread, frozenset(others))

    def tops(self) -> set[str]:
        """Return the names of the uppermost folders."""
        unread = (name[len(self.base) :] for name in self.unread if name.startswith(self.base))
        files = {name.partition("/")[0] for name in (*self.images, *unread) if "/" in name}
        return files | {folder.partition("/")[0] for folder in self.folders}

    def below(self, top: str) -> "Tree":
        """Return the images and folders in one of the uppermost folders."""
        cut = len(top) + 1
        images = {name[cut:]: fact for name, fact in self.images.items() if name.startswith(f"{top}/")}
        folders = frozenset(name[cut:] for name in self.folders if name.startswith(f"{top}/"))
        return replace(self, images=images, folders=folders, base=f"{self.base}{top}/")

    def unwrapped(self, split: str = "") -> "Tree":
        """Return what lies in the only folder, again and again, where that is no class: its images lie in folders.

        `zip -r cats.zip cats` puts everything below cats/, which is no class even with an image beside its folders.
        """
        tree = self
        for _ in range(DEEPEST):
            tops = tree.tops()
            if len(tops) != 1 or f"{tree.base}{MANIFEST}" in tree.others:
                break
            (top,) = tops
            if top in SPLIT_NAMES or (split and top == split):
                break
            inside = tree.below(top)
            deep = sum("/" in name for name in inside.images)
            wraps = top in ("", ".") or 0 < deep == len(inside.images)
            named = deep and Path(self.where).name == f"{top}.zip"
            if len(inside.images) < len(tree.images) or not (wraps or named):
                break
            tree = inside
        return tree

    def of_split(self, split: str) -> "Tree":
        """Return the chosen split, where the uppermost folders are splits and not classes."""
        tree = self.unwrapped(split)
        tops = tree.tops()
        if not split and not (tops and tops <= set(SPLIT_NAMES)):
            return tree
        for name in tree.images:
            if "/" not in name:
                raise ValueError(f"'{self.where}' has images beside its splits (first: {cut(name)}); move them")
        chosen = choose_split(tops, split, self.where)
        elsewhere = tuple(f"{tree.base}{top}/" for top in tops - {chosen})
        unread = {name: reason for name, reason in tree.unread.items() if not name.startswith(elsewhere)}
        others = frozenset(name for name in tree.others if not name.startswith(elsewhere))
        return replace(tree.below(chosen), unread=unread, others=others).unwrapped()

    def labels_by_folder(self) -> tuple[tuple[str, ...], Entries]:
        """Return classes, sorted, and labelled names; the uppermost folder is the class, without folders there is one.

        Class folders have their names as they are written: macOS stores accents apart from their letters.
        """
        loose = [name for name in self.images if "/" not in name]
        if loose and len(loose) < len(self.images):
            first = min(loose)
            raise ValueError(
                f"'{self.where}' has images both in class folders and beside them (first: {first}); move the latter"
            )
        if loose:
            return numbered(1), [(name, 0) for name in sorted(loose)]
        tops: dict[str, str] = {}
        for top in sorted(self.tops()):
            other = tops.setdefault(unicodedata.normalize("NFC", top), top)
            if other != top:
                both = " and ".join(cut(name.encode("unicode_escape").decode()) for name in (other, top))
                raise ValueError(
                    f"'{self.where}': class folders {both} differ only in Unicode form; rename or merge them"
                )
        label = {tops[name]: index for index, name in enumerate(sorted(tops))}
        labelled = [(name, label[name.partition("/")[0]]) for name in self.images]
        return tuple(sorted(tops)), sorted(labelled, key=lambda entry: (entry[1], entry[0]))

    def labels_by_manifest(self, text: str) -> tuple[tuple[str, ...], Entries]:
        """Return classes and labelled names as dataset.json has them; its labels may be null, for one class."""
        try:
            pairs = parse_json(text)["labels"]
            known = {str(name): label for name, label in pairs} if pairs is not None else dict.fromkeys(self.images, 0)
        except (ValueError, KeyError, TypeError) as error:
            shape = f"{MANIFEST} must hold {{'labels': [[name, label], ...]}}"
            raise ValueError(f"'{self.where}': {shape} ({cut(error)})") from None
        for name in sorted(known.keys() ^ self.images.keys()):
            lacking = "no label in" if name in self.images else "a label but no image in"
            raise ValueError(f"'{self.where}': '{cut(name)}' has {lacking} the archive's {MANIFEST}; make them agree")
        for name, label in known.items():
            if type(label) is not int:
                raise ValueError(
                    f"'{self.where}': label {cut(repr(label))} of '{name}' in {MANIFEST} is not an integer"
                )
        return of_labels(known.values(), self.where), sorted(known.items())


@dataclass(frozen=True)
class FilesPart(Part):
    """Some files of a folder or an archive, labelled, with their facts in the tree."""

    path: Path
    entries: tuple[tuple[str, int], ...]
    facts: tuple[Any, ...]


def source_of(kind: str, path: Path, tree: Tree, manifest: str | None, part_size: int, part: type[FilesPart]) -> Source:
    """Return the images of a tree: labelled by its dataset.json, or by folder; those of a tar in their order there."""
    classes, entries = tree.labels_by_folder() if manifest is None else tree.labels_by_manifest(manifest)
    unread = tuple(sorted(tree.unread.items()))
    if not entries:
        known = f"known suffixes: {' '.join(IMAGE_SUFFIXES)}"
        why = f"{len(unread):,} cannot be read (first: '{cut(unread[0][0])}': {unread[0][1]})" if unread else known
        raise ValueError(f"'{tree.where}' holds no images; {why}")
    if kind == "tar":
        entries.sort(key=lambda entry: tree.images[entry[0]])
    parts = []
    for start, stop in spans(len(entries), part_size):
        piece = tuple((tree.base + name, label) for name, label in entries[start:stop])
        facts = [tree.images[name] for name, _ in entries[start:stop]]
        parts.append(part(f"{piece[0][0]} ..", stamp_of(piece, facts), path, piece, tuple(facts)))
    by_folder = manifest is None and "/" in entries[0][0]
    others = tree.others - {f"{tree.base}{MANIFEST}"}
    suffixes = Counter(cut("hidden" if _hidden(name) else _suffix(name) or "no suffix", 20) for name in others)
    return Source(kind, path.name, classes, tuple(parts), by_folder, unread, most_common(suffixes))


def manifest_text(file: IO[bytes], size: int) -> str:
    """Return the dataset.json in an archive, of the size that the archive says."""
    if size > MOST_LISTED:
        raise ValueError(f"larger than {MOST_LISTED:,} bytes")
    return file.read(size).decode()


class FolderPart(FilesPart):
    """Some files of a folder."""

    def read(self) -> Iterator[Record]:
        for name, label in self.entries:
            path, image = self.path / name, b""
            if path.is_file():  # a link to nothing, a pipe or a device has no bytes, which is a bad image
                with path.open("rb") as file:
                    image = picture_bytes(file, path.stat().st_size)
            yield Record(name, image, label)


def open_folder(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a folder, in the order class, name."""
    files: list[tuple[str, int | None]] = []
    folders, visited = [], set()

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave out a folder that cannot be listed, and say nothing

    for folder, below, names in os.walk(path, onerror=refuse, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:  # it could lead there for ever
            raise ValueError(f"'{folder}' is a link to a folder that is here already; remove the link")
        visited.add((status.st_dev, status.st_ino))
        inside = Path(folder).relative_to(path)
        files += [((inside / name).as_posix(), None) for name in below if _hidden(name)]
        below[:] = [name for name in below if not _hidden(name)]  # os.walk goes down only into what is left here
        folders += [(inside / name).as_posix() for name in below]
        for name in names:
            whole = os.path.join(folder, name)
            size = os.path.getsize(whole) if os.path.exists(whole) else 0  # of a link to nothing
            files.append(((inside / name).as_posix(), size))
    tree = Tree.of(path, files, folders).of_split(split)
    manifest = path / tree.base / MANIFEST
    text = read_text(manifest, MOST_LISTED) if manifest.is_file() else None
    return source_of("folder", path, tree, text, part_size, FolderPart)


def _zip_file(path: Path) -> zipfile.ZipFile:
    """Open a zip; macOS writes names in UTF-8 without the flag that says so: they would be taken for code page 437."""
    try:
        return zipfile.ZipFile(path, metadata_encoding="utf-8")
    except UnicodeDecodeError:
        return zipfile.ZipFile(path)


@lru_cache(maxsize=1)
def _opened(path: Path, changed: int) -> zipfile.ZipFile:
    # Kept open per process: the table of contents of a million files takes longer to read than a part.
    return _zip_file(path)


class ZipPart(FilesPart):
    """Some members of a zip archive."""

    def read(self) -> Iterator[Record]:
        archive = _opened(self.path, self.path.stat().st_mtime_ns)
        for name, label in self.entries:
            what = f"'{self.path}': member '{cut(name)}' cannot be read"
            with refusal(what, "repair the archive"), open_member(archive, name) as member:
                image = picture_bytes(member, archive.getinfo(name).file_size)
            yield Record(name, image, label)


def open_zip(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a zip archive, in the order class, name."""
    with refusal(f"'{path}' is no whole zip archive"), _zip_file(path) as archive:
        members = archive.infolist()
    # by their names: ZipInfo.is_dir() raises an IndexError where one is empty
    files = [(member.filename, member.CRC) for member in members if not member.filename.endswith("/")]
    folders = [member.filename.rstrip("/") for member in members if member.filename.endswith("/")]
    whole = Tree.of(path, files, folders)
    for name in whole.images:
        if "\\" in name and "/" not in name:
            raise ValueError(f"'{path}': '{cut(name)}' has backslashes for folders; pack it again with another program")
    tree, text = whole.of_split(split), None
    manifest = tree.base + MANIFEST
    if manifest in tree.others:
        what = f"'{path}': member '{cut(manifest)}' cannot be read"
        with refusal(what, "repair the archive"), _zip_file(path) as archive, open_member(archive, manifest) as member:
            text = manifest_text(member, archive.getinfo(manifest).file_size)
    return source_of("zip", path, tree, text, part_size, ZipPart)
