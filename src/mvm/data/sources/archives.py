"""Images stored as files of their own: in folders, zips and tars; `Tree` is their order and their classes.

A webdataset is a tar in which each picture has its label or its caption next to it.
"""

import gzip
import os
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from shlex import quote
from typing import IO, Any, cast

from mvm.data.sources.records import (
    SPLIT_NAMES,
    ConditionKeys,
    DataSource,
    SourcePart,
    SourceRecord,
    choose_split,
    files_of_split,
    listed_names,
    most_common,
    numbered,
    of_labels,
    spans,
    stamp_of,
)
from mvm.untrusted import MOST_LABEL, MOST_LISTED, cut, open_member, parse_json, picture_bytes, read_text, refusal

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
TAR_IMAGES = ("jpg", "jpeg", "png", "webp")
TAR_LABELS = ("cls", "json")
MOST_HEADER = 1 << 18  # bytes of a header in a packed tar, which could unpack to a thousand times its own size
LEAST_MEMBER = 16  # bytes of a packed tar for each of its files, else it holds no pictures
Entries = Sequence[tuple[str, int]]  # (name, label)
# (path, some of its images, the fact that the tree has of each): a picklable function of this module
FilesReader = Callable[[Path, Entries, Sequence[Any]], Iterator[SourceRecord]]


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
        visible = frozenset(folder for folder in folders if not _hidden(folder))
        return Tree(str(where), images, visible, unread, frozenset(others))

    def tops(self) -> set[str]:
        """Return the names of the uppermost folders."""
        unread = (name[len(self.base) :] for name in self.unread if name.startswith(self.base))
        files = {name.partition("/")[0] for name in (*self.images, *unread) if "/" in name}
        return files | {folder.partition("/")[0] for folder in self.folders}

    def below(self, top: str) -> "Tree":
        """Return the images and folders in one of the uppermost folders."""
        prefix = f"{top}/"
        images = {name.removeprefix(prefix): fact for name, fact in self.images.items() if name.startswith(prefix)}
        folders = frozenset(name.removeprefix(prefix) for name in self.folders if name.startswith(prefix))
        return replace(self, images=images, folders=folders, base=self.base + prefix)

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
            what = "images both in class folders and beside them"
            raise ValueError(f"'{self.where}' has {what} (first: {min(loose)}); move the latter")
        if loose:
            return numbered(1), [(name, 0) for name in sorted(loose)]
        tops: dict[str, str] = {}
        for top in sorted(self.tops()):
            other = tops.setdefault(unicodedata.normalize("NFC", top), top)
            if other != top:
                both = " and ".join(cut(name.encode("unicode_escape").decode()) for name in (other, top))
                raise ValueError(f"'{self.where}': class folders {both} differ only in Unicode form; rename one")
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
                what = f"label {cut(repr(label))} of '{name}' in {MANIFEST}"
                raise ValueError(f"'{self.where}': {what} is not an integer")
        return of_labels(known.values(), self.where), sorted(known.items())


def source_of(
    kind: str, path: Path, tree: Tree, manifest: str | None, part_size: int, reader: FilesReader
) -> DataSource:
    """Return the images of a tree: labelled by its dataset.json, or by folder; those of a tar in their order there."""
    classes, entries = tree.labels_by_folder() if manifest is None else tree.labels_by_manifest(manifest)
    unread = tuple(sorted(tree.unread.items()))
    if not entries:
        known = f"known suffixes: {' '.join(IMAGE_SUFFIXES)}"
        why = f"{len(unread):,} cannot be read (first: '{cut(unread[0][0])}': {unread[0][1]})" if unread else known
        raise ValueError(f"'{tree.where}' holds no images; {why}")
    if kind == "tar":
        entries = sorted(entries, key=lambda entry: tree.images[entry[0]])
    parts = []
    for start, stop in spans(len(entries), part_size):
        piece = tuple((tree.base + name, label) for name, label in entries[start:stop])
        facts = [tree.images[name] for name, _ in entries[start:stop]]
        parts.append(SourcePart(f"{piece[0][0]} ..", stamp_of(piece, facts), partial(reader, path, piece, facts)))
    by_folder = manifest is None and "/" in entries[0][0]
    others = tree.others - {f"{tree.base}{MANIFEST}"}
    suffixes = Counter(cut("hidden" if _hidden(name) else _suffix(name) or "no suffix", 20) for name in others)
    return DataSource(kind, path.name, classes, tuple(parts), by_folder, unread, most_common(suffixes))


def _reading(path: Path, name: str) -> AbstractContextManager[None]:
    return refusal(f"'{path}': member '{cut(name)}' cannot be read", "repair the archive")


def _manifest_text(file: IO[bytes], size: int) -> str:
    """Return the dataset.json in an archive, of the size that the archive says."""
    if size > MOST_LISTED:
        raise ValueError(f"larger than {MOST_LISTED:,} bytes")
    return file.read(size).decode()


# --- folders and zips ---------------------------------------------------------------------------------------------


def _read_folder(folder: Path, entries: Entries, _: Sequence[Any]) -> Iterator[SourceRecord]:
    for name, label in entries:
        path, image = folder / name, b""
        if path.is_file():  # a link to nothing, a pipe or a device has no bytes, which is a bad image
            with path.open("rb") as file:
                image = picture_bytes(file, path.stat().st_size)
        yield SourceRecord(name, image, label)


def open_folder(path: Path, split: str, part_size: int) -> DataSource:
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
    return source_of("folder", path, tree, text, part_size, _read_folder)


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


def _read_zip(path: Path, entries: Entries, _: Sequence[Any]) -> Iterator[SourceRecord]:
    archive = _opened(path, path.stat().st_mtime_ns)
    for name, label in entries:
        with _reading(path, name), open_member(archive, name) as member:
            image = picture_bytes(member, archive.getinfo(name).file_size)
        yield SourceRecord(name, image, label)


def open_zip(path: Path, split: str, part_size: int) -> DataSource:
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
        with _reading(path, manifest), _zip_file(path) as archive, open_member(archive, manifest) as member:
            text = _manifest_text(member, archive.getinfo(manifest).file_size)
    return source_of("zip", path, tree, text, part_size, _read_zip)


# --- tars ---------------------------------------------------------------------------------------------------------


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


def _read_tar(path: Path, entries: Entries, facts: Sequence[Any]) -> Iterator[SourceRecord]:
    """Yield files of a tar in the order in which they lie there; facts: offset and size."""
    with _tar_stream(path) as file:
        for (name, label), (start, size) in zip(entries, facts, strict=True):
            with _reading(path, name):
                file.seek(start)  # forward: a packed tar is unpacked once for a part
                image = picture_bytes(file, size)[:size]
            yield SourceRecord(name, image, label)


def open_tar(path: Path, split: str, part_size: int) -> DataSource:
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
    manifest = files.get(tree.base + MANIFEST)
    if isinstance(manifest, tuple):
        with _reading(path, MANIFEST), _tar_stream(path) as file:
            file.seek(manifest[0])
            text = _manifest_text(file, manifest[1])
    return source_of("tar", path, tree, text, part_size, _read_tar)


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
            return not kinds.isdisjoint((*TAR_LABELS, "txt"))  # txt: captions
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


def _read_webdataset(path: Path, labelled: bool, caption: str) -> Iterator[SourceRecord]:
    """Yield the samples of a tar; caption: the suffix of the files that hold one."""
    for key, fields in _samples(path, caption):
        sample = f"'{path}': sample '{cut(key)}'"
        label = _label(path, key, fields) if labelled else 0
        if label is None:
            raise ValueError(f"{sample} has no label (.cls, or 'label' in .json), others have")
        if caption and caption not in fields:
            raise ValueError(f"{sample} has no caption ({cut(key)}.{caption})")
        image = next((fields[kind] for kind in TAR_IMAGES if kind in fields), b"")
        yield SourceRecord(f"{path.name}/{key}", image, label, (fields[caption],) if caption else ())


def open_tars(path: Path, split: str, part_size: int, wanted: ConditionKeys | None = None) -> DataSource:
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
    parts = (
        SourcePart(tar.name, stamp_of(tar.name, tar.stat().st_size), partial(_read_webdataset, tar, labelled, caption))
        for tar in tars
    )
    folder = path if path.is_dir() else path.parent
    return DataSource("webdataset", path.name, listed_names(folder) if labelled else numbered(1), tuple(parts))
