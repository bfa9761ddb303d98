"""Images stored as files of their own: in folders, in zip archives, in tars."""

import gzip
import os
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

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
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".heic", ".heif", ".hif"),
)
# Pictures that are not read. By suffix: many raw files are TIFF as well, of which Pillow would read the small preview.
UNREAD_SUFFIXES = (
    *(".raw", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".srf", ".sr2", ".dng", ".orf", ".rw2", ".raf", ".pef"),
    *(".srw", ".x3f", ".3fr", ".iiq", ".kdc", ".dcr", ".mrw", ".erf", ".rwl", ".psd", ".psb", ".xcf", ".svg", ".svgz"),
    *(".eps", ".ico", ".icns", ".cur", ".tga", ".dds", ".exr", ".hdr", ".jxl", ".jxr", ".pcx", ".xpm", ".xbm", ".qoi"),
)
MOST_HEADER = 1 << 18  # bytes of a header in a packed tar, which could unpack to a thousand times its own size
LEAST_MEMBER = 16  # bytes of a packed tar for each of its files, else it holds no pictures
DEEPEST = 16  # folders around the class folders
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


@dataclass(frozen=True)
class ZipPart(Part):
    """Some members of a zip archive."""

    path: Path
    entries: tuple[tuple[str, int], ...]

    def read(self) -> Iterator[Record]:
        archive = _opened(self.path, self.path.stat().st_mtime_ns)
        for name, label in self.entries:
            what = f"'{self.path}': member '{cut(name)}' cannot be read"
            with refusal(what, "repair the archive"), open_member(archive, name) as member:
                image = picture_bytes(member, archive.getinfo(name).file_size)
            yield Record(name, image, label)


@dataclass(frozen=True)
class TarImagesPart(Part):
    """Some files of a tar, packed by gzip or not, in the order in which they lie there."""

    path: Path
    entries: tuple[tuple[str, int], ...]
    places: tuple[tuple[int, int], ...]  # where each file begins, and its size

    def read(self) -> Iterator[Record]:
        with _tar_stream(self.path) as file:
            for (name, label), (start, size) in zip(self.entries, self.places, strict=True):
                with refusal(f"'{self.path}': member '{cut(name)}' cannot be read", "repair the archive"):
                    file.seek(start)  # forward: a packed tar is unpacked once for a part
                    image = picture_bytes(file, size)[:size]
                yield Record(name, image, label)


class _Unread(str):
    """Why a picture in an archive is not read."""


@dataclass(frozen=True)
class _Tree:
    """The files and folders below a root; images and folders by their names from `base` on."""

    where: str
    images: dict[str, Any]  # with a fact that changes with the contents
    folders: frozenset[str]
    unread: dict[str, str]  # pictures that cannot be read, with the reason
    others: frozenset[str]  # files that are no pictures, or hidden
    base: str = ""

    def tops(self) -> set[str]:
        """Return the names of the uppermost folders."""
        unread = (name[len(self.base) :] for name in self.unread if name.startswith(self.base))
        files = {name.partition("/")[0] for name in (*self.images, *unread) if "/" in name}
        return files | {folder.partition("/")[0] for folder in self.folders}

    def below(self, top: str) -> "_Tree":
        """Return the images and folders in one of the uppermost folders."""
        cut = len(top) + 1
        images = {name[cut:]: fact for name, fact in self.images.items() if name.startswith(f"{top}/")}
        folders = frozenset(name[cut:] for name in self.folders if name.startswith(f"{top}/"))
        return replace(self, images=images, folders=folders, base=f"{self.base}{top}/")

    def unwrapped(self, split: str = "") -> "_Tree":
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

    def of_split(self, split: str) -> "_Tree":
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

    def ignored(self) -> dict[str, int]:
        """Return the number of files that are no images, by suffix."""
        names = self.others - {f"{self.base}{MANIFEST}"}
        kinds = ("hidden" if _hidden(name) else _suffix(name) or "no suffix" for name in names)
        return most_common(Counter(cut(kind, 20) for kind in kinds))


def _hidden(name: str) -> bool:
    return any(piece.startswith((".", "__MACOSX")) and piece != "." for piece in name.split("/"))


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].strip().casefold()


def _tree(where: Path, files: Iterable[tuple[str, Any]], folders: Iterable[str]) -> _Tree:
    """Return the tree of files, each with a fact that changes with its contents, and of folders."""
    images, unread, others = {}, {}, set()
    for name, fact in files:
        suffix = _suffix(name)
        if _hidden(name) or suffix not in (IMAGE_SUFFIXES + UNREAD_SUFFIXES):
            others.add(name)
        elif suffix in UNREAD_SUFFIXES:
            unread[name] = f"{suffix} files are not supported; convert them to JPEG or PNG"
        elif isinstance(fact, _Unread):
            unread[name] = fact
        else:
            images[name] = fact
    shown = frozenset(folder for folder in folders if not _hidden(folder))
    return _Tree(str(where), images, shown, unread, frozenset(others))


def _folder_tree(root: Path) -> _Tree:
    files, folders, met = [], [], set()

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave out a folder that cannot be listed, and say nothing

    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        _meet(folder, met)
        inside = Path(folder).relative_to(root)
        files += [((inside / name).as_posix(), None) for name in below if _hidden(name)]
        below[:] = [name for name in below if not _hidden(name)]  # os.walk goes down only into what is left here
        folders += [(inside / name).as_posix() for name in below]
        files += [((inside / name).as_posix(), _size(os.path.join(folder, name))) for name in names]
    return _tree(root, files, folders)


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0  # a link to nothing


def _meet(folder: str, met: set[tuple[int, int]]) -> None:
    """Note a folder; one that links lead to a second time is refused: it could lead there for ever."""
    found = os.stat(folder)
    if (found.st_dev, found.st_ino) in met:
        raise ValueError(f"'{folder}' is a link to a folder that is here already; remove the link")
    met.add((found.st_dev, found.st_ino))


def _by_folder(tree: _Tree) -> tuple[tuple[str, ...], Entries]:
    """Return classes, sorted, and labelled names: the uppermost folder is the class; without folders there is one."""
    loose = [name for name in tree.images if "/" not in name]
    if loose and len(loose) < len(tree.images):
        raise ValueError(
            f"'{tree.where}' has images both in class folders and beside them (first: {min(loose)}); move the latter"
        )
    if loose:
        return numbered(1), [(name, 0) for name in sorted(loose)]
    tops: dict[str, str] = {}  # by their names as they are written: macOS stores accents apart from their letters
    for top in sorted(tree.tops()):
        other = tops.setdefault(unicodedata.normalize("NFC", top), top)
        if other != top:
            names = " and ".join(cut(name.encode("unicode_escape").decode()) for name in (other, top))
            raise ValueError(f"'{tree.where}': class folders {names} differ only in Unicode form; rename or merge them")
    label = {tops[name]: index for index, name in enumerate(sorted(tops))}
    labelled = [(name, label[name.partition("/")[0]]) for name in tree.images]
    return tuple(sorted(tops)), sorted(labelled, key=lambda entry: (entry[1], entry[0]))


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


MakePart = Callable[[str, str, tuple[tuple[str, int], ...], tuple[Any, ...]], Part]  # name, stamp, entries, facts


def _source(kind: str, path: Path, tree: _Tree, manifest: str | None, part_size: int, part: MakePart) -> Source:
    """Return the images of a tree: labelled by its dataset.json, or by folder; those of a tar in their order there."""
    classes, entries = _by_folder(tree) if manifest is None else _by_manifest(tree, manifest)
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
        parts.append(part(f"{piece[0][0]} ..", stamp_of(piece, facts), piece, tuple(facts)))
    by_folder = manifest is None and "/" in entries[0][0]
    return Source(kind, path.name, classes, tuple(parts), by_folder, unread, tree.ignored())


def open_folder(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a folder, in the order class, name."""
    tree = _folder_tree(path).of_split(split)
    manifest = path / tree.base / MANIFEST
    text = read_text(manifest, MOST_LISTED) if manifest.is_file() else None
    return _source(
        "folder", path, tree, text, part_size, lambda name, stamp, some, _: FolderPart(name, stamp, path, some)
    )


def _manifest_text(file: IO[bytes], size: int) -> str:
    if size > MOST_LISTED:
        raise ValueError(f"larger than {MOST_LISTED:,} bytes")
    return file.read(size).decode()


def open_zip(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a zip archive, in the order class, name."""
    with refusal(f"'{path}' is no whole zip archive"), _zip_file(path) as archive:
        members = archive.infolist()
    files = [(member.filename, member.CRC) for member in members if not member.is_dir()]
    whole = _tree(path, files, [member.filename.rstrip("/") for member in members if member.is_dir()])
    for name in whole.images:
        if "\\" in name and "/" not in name:
            raise ValueError(f"'{path}': '{cut(name)}' has backslashes for folders; pack it again with another program")
    tree, text = whole.of_split(split), None
    manifest = tree.base + MANIFEST
    if manifest in tree.others:
        what = f"'{path}': member '{cut(manifest)}' cannot be read"
        with refusal(what, "repair the archive"), _zip_file(path) as archive, open_member(archive, manifest) as member:
            text = _manifest_text(member, archive.getinfo(manifest).file_size)
    return _source("zip", path, tree, text, part_size, lambda name, stamp, some, _: ZipPart(name, stamp, path, some))


def is_packed(path: Path) -> bool:
    """Return whether a file is packed by gzip, whatever its name."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _tar_stream(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if is_packed(path) else path.open("rb")


class _Headers(gzip.GzipFile):
    """A packed tar of which headers alone are read."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MOST_HEADER:
            raise ValueError(f"a header is larger than {MOST_HEADER:,} bytes")
        return super().read(size)


def tar_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield what a tar, packed by gzip or not, tells of its files."""
    offset, count, most = -1, 0, path.stat().st_size // LEAST_MEMBER + 1000
    packed = is_packed(path)
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
            yield member


def open_tar(path: Path, split: str, part_size: int) -> Source:
    """Return the images of a tar that is no webdataset, labelled by folder, in their order there."""
    files: dict[str, Any] = {}  # a name that comes again replaces the earlier one, as when a tar is unpacked
    folders = []
    for member in tar_members(path):
        if member.isdir():
            folders.append(member.name)
        elif member.isfile() and not member.issparse():
            files[member.name] = (member.offset_data, member.size)
        else:
            link = member.issym() or member.islnk()
            files[member.name] = _Unread("a link in the archive, which is not followed" if link else "no plain file")
    tree, text = _tree(path, files.items(), folders).of_split(split), None
    place = files.get(tree.base + MANIFEST)
    if isinstance(place, tuple):
        with refusal(f"'{path}': member '{MANIFEST}' cannot be read", "repair the archive"), _tar_stream(path) as file:
            file.seek(place[0])
            text = _manifest_text(file, place[1])

    def part(name: str, stamp: str, some: tuple[tuple[str, int], ...], places: tuple[Any, ...]) -> Part:
        return TarImagesPart(name, stamp, path, some, places)

    return _source("tar", path, tree, text, part_size, part)
