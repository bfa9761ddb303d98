"""Folders and archives as people have them: whatever is not in the prepared set is named, and no label is wrong."""

import gzip
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from functools import partial

import numpy as np
import pytest
from PIL import Image

from mvm.data import resize
from mvm.data.prepare import describe, left_out, prepare
from mvm.data.resize import NO_HEIF, BadImage, decode
from mvm.data.shards import open_prepared
from mvm.data.sources import open_source
from mvm.data.sources.archives import MOST_HEADER
from mvm.data.sources.records import most_common
from preparing import flushes_until_done

ORIENTATION = 0x0112


def stored(pixels, kind="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def png(value):
    return stored(np.full((4, 4, 3), value, np.uint8))


def into_folder(path, files):
    for name, contents in files.items():
        (path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (path / "src" / name).mkdir(exist_ok=True)
        else:
            (path / "src" / name).write_bytes(contents)
    return path / "src"


def into_zip(path, files):
    with zipfile.ZipFile(path / "src.zip", "w") as archive:
        for name, contents in files.items():
            archive.mkdir(name) if name.endswith("/") else archive.writestr(name, contents)
    return path / "src.zip"


def into_tar(path, files, name="src.tar", mode="w"):
    with tarfile.open(path / name, mode) as tar:
        for name, contents in files.items():
            member = tarfile.TarInfo(name.rstrip("/"))
            member.type, member.size = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE, len(contents)
            tar.addfile(member, io.BytesIO(contents))
    return path / tar.name


def into_tgz(path, files):
    return into_tar(path, files, "src.tgz", "w:gz")


STORES = (into_folder, into_zip, into_tar, into_tgz)
every_store = pytest.mark.parametrize("store", STORES)


def run(source, out, **options):
    return prepare(source, out, **{"size": 4, "workers": 1, "progress": False, "part_size": 2, **options})


def labelled(prepared):
    """(class, value of the pixels) of all images, sorted: tars keep their own order."""
    data = prepared.load()
    pairs = zip(data.labels.tolist(), data.images[:, 0, 0, 0].tolist(), strict=True)
    return sorted((prepared.classes[label], value) for label, value in pairs)


UGLY = {
    "dog/3.png": png(3),
    "cat/1.png": png(1),
    "cat/IMG.0002.PNG": png(2),
    "cat/raw.CR2": b"II*\0" + bytes(50),
    "cat/drawing.svg": b"<svg/>",
    "dog/damaged.jpg": b"\xff\xd8\xff no more",
    "dog/raw.cr2": b"",
    "dog/notes.txt": b"good dog",
    "labels.TXT": b"cat dog",
    "dog/walk.mp4": b"",
    "dog/README": b"",
    "cat/Thumbs.db": b"",
    "cat/.DS_Store": b"",
    "cat/._1.png": b"rubbish",
    "__MACOSX/1.png": b"rubbish",
}


@every_store
def test_what_is_left_out_is_counted_and_named(store, tmp_path):
    source = store(tmp_path, UGLY)
    prepared = run(source, tmp_path / "out")
    assert labelled(prepared) == [("cat", 1), ("cat", 2), ("dog", 3)]
    assert prepared.skipped["count"] == 4
    raw = ".cr2 files are not supported; convert them to JPEG or PNG"
    svg = ".svg files are not supported; convert them to JPEG or PNG"
    assert [name for name, _ in prepared.skipped["first"]] == [
        "dog/damaged.jpg",
        "cat/drawing.svg",
        "cat/raw.CR2",
        "dog/raw.cr2",
    ]
    damaged = prepared.skipped["first"][0][1]
    assert prepared.reasons == {raw: 2, svg: 1, damaged: 1}
    assert prepared.ignored == {"hidden": 3, ".txt": 2, ".db": 1, ".mp4": 1, "no suffix": 1}
    assert open_prepared(tmp_path / "out") == prepared
    lines = left_out(prepared, named=2)
    assert lines == [
        f"  2 skipped: {raw}",
        *sorted((f"  1 skipped: {svg}", f"  1 skipped: {damaged}")),
        f"  dog/damaged.jpg: {damaged}",
        f"  cat/drawing.svg: {svg}",
        "  ... and 2 more",
        "  ignored 8 files that are no images: hidden 3, .txt 2, .db 1, .mp4 1, no suffix 1",
    ]
    told = describe(tmp_path / "out")[0].splitlines()
    assert "skipped    4" in told
    assert lines[-1] in told
    assert f"  dog/raw.cr2: {raw}" in told


@every_store
def test_strict_names_the_first_that_is_not_read(store, tmp_path):
    with pytest.raises(ValueError, match=r"'cat/drawing.svg': .svg files are not supported; .*without strict"):
        run(store(tmp_path, UGLY), tmp_path / "out", strict=True)
    assert not (tmp_path / "out").exists()


@every_store
def test_only_pictures_that_are_not_read(store, tmp_path):
    with pytest.raises(ValueError, match=r"holds no images; 2 cannot be read \(first: 'a/x.nef': .nef files are not"):
        open_source(store(tmp_path, {"a/x.nef": b"", "b/y.psd": b""}))


def test_numbers_make_no_other_reason(tmp_path):
    whole = stored(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG")
    files = {f"a/{length}.jpg": whole[:-length] for length in (500, 600, 700)}
    prepared = run(into_folder(tmp_path, {**files, "a/good.png": png(1)}), tmp_path / "out")
    assert list(prepared.reasons.values()) == [3]
    assert "truncated (N bytes" in next(iter(prepared.reasons))


def test_kinds_without_end_are_summed():
    counts = {f".{number:03}": 1 + (number == 7) for number in range(100)}
    found = most_common(counts)
    assert list(found.items())[:2] == [(".007", 2), (".000", 1)]
    assert (len(found), found["other"], sum(found.values())) == (21, 80, 101)
    assert most_common({**found, ".txt": 500})["other"] == 81


def test_an_unlistable_folder_is_no_silence(tmp_path, monkeypatch):
    source = into_folder(tmp_path, {"a/1.png": png(1), "b/2.png": png(2)})
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="src/b"):
        open_source(source)


# EXIF


def oriented(kind, orientation, **options):
    """The asymmetric picture, stored as a camera would hold it for this orientation, and itself."""
    upright = np.kron(np.array([[10, 60, 110], [160, 210, 250]], np.uint8), np.ones((8, 8), np.uint8))
    backwards = {
        1: lambda x: x,
        2: np.fliplr,
        3: lambda x: np.rot90(x, 2),
        4: np.flipud,
        5: np.transpose,
        6: lambda x: np.rot90(x, 1),
        7: lambda x: np.rot90(np.transpose(x), 2),
        8: lambda x: np.rot90(x, -1),
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    held = np.ascontiguousarray(backwards(upright))
    return stored(held, kind, exif=exif, **options), upright


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_every_orientation_gives_the_same_pixels(kind, orientation):
    data, upright = oriented(kind, orientation, **{"WEBP": {"lossless": True}, "JPEG": {"quality": 100}}.get(kind, {}))
    found = np.asarray(decode(data, 1)).astype(int)
    assert found.shape == upright.shape
    assert np.abs(found - upright).max() <= (1 if kind == "JPEG" else 0)


@pytest.mark.parametrize("orientation", [3, 6])
def test_orientation_of_sixteen_bits_and_palettes(orientation):
    data, upright = oriented("PNG", orientation)
    held = Image.open(io.BytesIO(data))
    exif = held.getexif()
    deep = stored(np.asarray(held).astype(np.uint16) * 256, exif=exif)
    assert np.array_equal(np.asarray(decode(deep, 1)), upright)
    buffer = io.BytesIO()
    held.convert("P").save(buffer, "PNG", exif=exif)
    assert np.array_equal(np.asarray(decode(buffer.getvalue(), 1)), upright)


def test_orientation_in_the_prepared_set(tmp_path):
    files = {f"a/{n}.png": oriented("PNG", n)[0] for n in range(1, 9)}
    images = run(into_folder(tmp_path, files), tmp_path / "out", size=16).load().images
    assert len(images) == 8
    assert all((image == images[0]).all() for image in images)


# HEIC


def heic(pixels, **options):
    pillow_heif = pytest.importorskip("pillow_heif")
    buffer = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(
        buffer, quality=-1, chroma=444, matrix_coefficients=0, **options
    )
    return buffer.getvalue()


PHOTO = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)


def test_heic_is_read(tmp_path):
    data = heic(PHOTO)
    assert np.array_equal(np.asarray(decode(data, 3)), PHOTO)
    assert np.array_equal(np.asarray(decode(data[:8] + b"mif1" + data[12:], 3)), PHOTO)  # told by the other brands
    prepared = run(into_folder(tmp_path, {"a/x.HEIC": data, "a/really-heic.jpg": data}), tmp_path / "out")
    assert (prepared.count, prepared.skipped["count"]) == (2, 0)
    for length in (8, 12, 30, 200, len(data) // 2):
        with pytest.raises(BadImage):
            decode(data[:length], 3)
    with pytest.raises(BadImage, match="not an image"):
        decode(b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(99), 3)  # a film


def test_heic_is_registered_when_one_is_met(tmp_path):
    (tmp_path / "x.heic").write_bytes(heic(PHOTO))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from PIL import Image\n"
        "from mvm.data.resize import decode\n"
        "import io; b = io.BytesIO(); Image.new('L', (2, 2)).save(b, 'PNG'); decode(b.getvalue(), 1)\n"
        "assert 'pillow_heif' not in sys.modules and 'HEIF' not in Image.OPEN\n"
        "decode(Path(sys.argv[1]).read_bytes(), 3)\n"
        "assert 'HEIF' in Image.OPEN\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "x.heic")], check=True)


def test_heic_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    """Once it is installed, the same call does not pass off the old set as whole."""
    source = into_folder(tmp_path, {"a/1.png": png(1), "a/x.heic": heic(PHOTO), "b/y.heic": heic(PHOTO)})
    monkeypatch.setattr(resize, "has_heif", lambda: False)
    prepared = run(source, tmp_path / "out")
    assert NO_HEIF == ("a HEIC picture needs pillow-heif; install it with: pip install 'mean-velocity-matching[heic]'")
    assert prepared.skipped == {"count": 2, "first": [["a/x.heic", NO_HEIF], ["b/y.heic", NO_HEIF]]}
    assert prepared.reasons == {NO_HEIF: 2}
    assert (prepared.classes, prepared.empty_classes) == (("a",), ("b",))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="was prepared without pillow-heif and lacks 2 HEIC pictures"):
        run(source, tmp_path / "out")


def test_a_shard_without_its_heic_is_made_again(tmp_path, monkeypatch):
    source = into_folder(tmp_path, {"a/1.png": png(1), "a/x.heic": heic(PHOTO)})
    monkeypatch.setattr(resize, "has_heif", lambda: False)
    monkeypatch.setattr("mvm.data.prepare._accept", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / "out/shard-00000.json").is_file()
    assert run(source, tmp_path / "out").count == 2


def test_avif_where_pillow_has_none(monkeypatch):
    data = stored(PHOTO, "AVIF")
    assert decode(data, 3).size == (96, 64)
    monkeypatch.setattr(resize, "_formats", lambda: ("PNG",))
    with pytest.raises(BadImage, match=r"an AVIF picture needs Pillow 11\.3 or newer"):
        decode(data, 3)


# Folders around class folders


TWO = {"cat/1.png": png(1), "cat/2.png": png(2), "dog/3.png": png(3)}
WANTED = [("cat", 1), ("cat", 2), ("dog", 3)]


@every_store
@pytest.mark.parametrize("around", ["", "photos/", "src/", "my photos/photos/", "photos/train/", "./"])
def test_a_folder_around_class_folders_is_no_class(store, around, tmp_path):
    files = {f"{around}{name}": contents for name, contents in TWO.items()}
    prepared = run(store(tmp_path, {**files, "readme.txt": b"", "cover.psd": b""}), tmp_path / "out")
    assert labelled(prepared) == WANTED
    assert (prepared.ignored, prepared.skipped["count"]) == ({".txt": 1}, 1)  # what lies outside is told, too


@every_store
def test_a_single_class_folder_is_a_class(store, tmp_path):
    assert labelled(run(store(tmp_path, {"cat/1.png": png(1)}), tmp_path / "out")) == [("cat", 1)]


@every_store
def test_a_single_class_with_folders_inside(store, tmp_path):
    files = {"cat/1.png": png(1), "cat/more/2.png": png(2)}
    assert labelled(run(store(tmp_path, files), tmp_path / "out")) == [("cat", 1), ("cat", 2)]


@every_store
def test_a_class_beside_an_empty_one_is_a_class(store, tmp_path):
    prepared = run(store(tmp_path, {"cat/old/1.png": png(1), "dog/": b""}), tmp_path / "out")
    assert (labelled(prepared), prepared.empty_classes) == ([("cat", 1)], ("dog",))


@every_store
def test_a_picture_beside_splits_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match=r"has images beside its splits \(first: 9.png\); move them"):
        open_source(store(tmp_path, {"train/cat/1.png": png(1), "9.png": png(9)}))


def test_a_picture_beside_the_classes_of_a_zip_is_refused(tmp_path):
    files = {f"src/{name}": contents for name, contents in TWO.items()}
    with pytest.raises(ValueError, match=r"both in class folders and beside them \(first: cover.png\)"):
        open_source(into_zip(tmp_path, {**files, "src/cover.png": png(9)}))


@every_store
def test_splits_inside_a_folder(store, tmp_path):
    files = {f"set/{split}/{name}": data for split in ("train", "val") for name, data in TWO.items()}
    source = store(tmp_path, {**files, "set/val/dog/x.cr2": b"", "set/train/a.txt": b""})
    with pytest.raises(ValueError, match="several splits; choose one with split: train, val"):
        open_source(source)
    prepared = run(source, tmp_path / "out", split="val")
    assert (labelled(prepared), prepared.skipped["count"], prepared.ignored) == (WANTED, 1, {})


@every_store
def test_a_manifest_ends_the_search_for_classes(store, tmp_path):
    labels = {"labels": [["a/b/1.png", 1], ["a/c/2.png", 0]]}
    files = {"a/b/1.png": png(1), "a/c/2.png": png(2), "dataset.json": json.dumps(labels).encode()}
    prepared = run(store(tmp_path, files), tmp_path / "out")
    assert (labelled(prepared), prepared.ignored) == ([("0", 2), ("1", 1)], {})


def test_folders_without_end(tmp_path):
    """Names as long as a format allows take no more memory than themselves."""
    for store, depth in ((into_zip, 30_000), (into_tar, 100_000)):
        (tmp_path / store.__name__).mkdir()
        source = open_source(store(tmp_path / store.__name__, {"a/" * depth + "1.png": png(1)}))
        assert source.classes == ("a",)


# Tars


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "X.TGZ"])
def test_a_tar_in_any_part_size(name, tmp_path):
    path = into_tar(tmp_path, TWO, name, "w" if name == "x.tar" else "w:gz")
    for size in (1, 2, 10):
        source = open_source(path, part_size=size)
        records = [record for part in source.parts for record in part.read()]
        assert (source.kind, source.classes) == ("tar", ("cat", "dog"))
        assert [(record.name, record.label, record.image) for record in records] == [
            (name, int(name.startswith("dog")), data) for name, data in TWO.items()
        ]
        assert len(source.parts) == -(-3 // size)


def test_tars_with_names_from_the_root(tmp_path):
    assert labelled(run(into_tar(tmp_path, {f"/{name}": x for name, x in TWO.items()}), tmp_path / "out")) == WANTED


def test_links_in_a_tar_are_named(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, kind in (
            ("a/soft.png", tarfile.SYMTYPE),
            ("a/hard.png", tarfile.LNKTYPE),
            ("a/p.png", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        member = tarfile.TarInfo("a/1.png")
        member.size = len(png(1))
        tar.addfile(member, io.BytesIO(png(1)))
    assert dict(open_source(tmp_path / "x.tar").unread) == {
        "a/soft.png": "a link in the archive, which is not followed",
        "a/hard.png": "a link in the archive, which is not followed",
        "a/p.png": "no plain file",
    }


def test_a_webdataset_stays_one(tmp_path):
    """Labels or captions beside the first image: folders in its keys are no classes."""
    for text in ("cls", "json", "txt"):
        files = {"a/1.png": png(1), f"a/1.{text}": b"0", "b/2.png": png(2), f"b/2.{text}": b"0"}
        source = open_source(into_tar(tmp_path, files))
        assert source.kind == "webdataset"
    with pytest.raises(ValueError, match=r"src.tgz'.*gunzip --keep "):
        open_source(into_tgz(tmp_path, files))


def test_a_packed_tar_without_pictures(tmp_path):
    with pytest.raises(ValueError, match="holds no images; known suffixes"):
        open_source(into_tgz(tmp_path, {"a/1.txt": b""}))


def test_raw_files_beside_their_jpegs_make_no_webdataset(tmp_path):
    files = {"a/1.CR2": b"", "a/1.png": png(1), "b/2.MOV": b"", "b/2.png": png(2)}
    assert open_source(into_tar(tmp_path, files)).classes == ("a", "b")


def test_several_tars_of_class_folders_are_refused(tmp_path):
    for name in ("x", "y"):
        into_tar(tmp_path, TWO, f"{name}.tar")
    with pytest.raises(ValueError, match="holds tars of class folders; prepare one tar"):
        open_source(tmp_path)


def test_a_cut_off_tar(tmp_path):
    for store in (into_tar, into_tgz):
        path = store(tmp_path, {f"a/{n}.png": os.urandom(5000) for n in range(9)})
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match="no whole tar"):
            open_source(path)


def test_a_header_that_unpacks_to_much(tmp_path):
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 27
    with gzip.open(tmp_path / "x.tgz", "wb", compresslevel=1) as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        for _ in range(1 << 7):
            file.write(bytes(1 << 20))
    with pytest.raises(ValueError, match=rf"no whole tar \(a header is larger than {MOST_HEADER:,} bytes"):
        open_source(tmp_path / "x.tgz")


def test_files_without_end(tmp_path):
    member = tarfile.TarInfo("a/1.png").tobuf(tarfile.GNU_FORMAT)
    with gzip.open(tmp_path / "x.tgz", "wb", compresslevel=9) as file:
        for _ in range(200):
            file.write(member * 100)
    with pytest.raises(ValueError, match=r"files in so few bytes are no pictures"):
        open_source(tmp_path / "x.tgz")


# Classes without images


@every_store
def test_empty_class_folders_are_named_and_no_classes(store, tmp_path):
    files = {
        "a/": b"",
        "b/1.png": png(1),
        "c/x.cr2": b"",
        "d/2.png": png(2),
        "e/bad.png": b"no image",
        "f/3.png": png(3),
    }
    source = store(tmp_path, files)
    prepared = run(source, tmp_path / "out")
    assert labelled(prepared) == [("b", 1), ("d", 2), ("f", 3)]
    assert sorted(prepared.load().labels.tolist()) == [0, 1, 2]
    assert (prepared.classes, prepared.class_counts) == (("b", "d", "f"), (1, 1, 1))
    assert prepared.empty_classes == ("a", "c", "e")
    prepared.verify()
    told = describe(tmp_path / "out")[0].splitlines()
    assert "classes    3, 0 of them empty" in told
    assert "  no images of class e: it is left out" in told
    assert run(source, tmp_path / "out") == prepared
    counted = run(source, tmp_path / "counted", classes=6)
    assert (counted.classes, counted.empty_classes) == (tuple("abcdef"), ("a", "c", "e"))
    assert labelled(counted) == labelled(prepared)
    assert "classes    6, 3 of them empty" in describe(tmp_path / "counted")[0]


def test_renumbering_killed_at_any_flush_and_run_again(tmp_path):
    files = {"a/bad.png": b"", **{f"b/{n}.png": png(n) for n in range(3)}, "c/4.png": png(4), "d/": b""}
    attempt = partial(run, into_folder(tmp_path, files))
    attempt(tmp_path / "whole")
    # three shards of three files, three files of labels again, and the index, each flushed twice
    assert flushes_until_done(attempt, tmp_path / "whole", tmp_path) == 26


# Names


ODD = ('it\'s a "cat"', "caf\u00e9 au lait", "100% $HOME `x`", "\u732b", "-dash", "new\nline")
NAMED = sorted(name.replace("\n", "\\n") for name in ODD)  # as they are kept, so that a model can be published


@every_store
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_odd_names_of_classes(store, form, tmp_path):
    files = {unicodedata.normalize(form, f"{name}/b\u00fcld 1.png"): png(n) for n, name in enumerate(ODD)}
    prepared = run(store(tmp_path, files), tmp_path / "out")
    assert labelled(prepared) == sorted((name.replace("\n", "\\n"), n) for n, name in enumerate(ODD))
    assert open_prepared(tmp_path / "out").classes == tuple(NAMED)
    assert "new\\nline" in describe(tmp_path / "out")[0]


@every_store
def test_names_that_differ_in_form_alone(store, tmp_path):
    files = {unicodedata.normalize(form, "caf\u00e9/1.png"): png(1) for form in ("NFC", "NFD")}
    with pytest.raises(ValueError, match=r"cafe\\u0301 and caf\\xe9.*Unicode"):
        open_source(store(tmp_path, files))


def test_zip_names_in_utf8_without_the_flag(tmp_path):
    """As macOS packs them; what is no UTF-8 is read as code page 437."""
    for name, raw in (("ca\u0301t", "ca\u0301t".encode()), ("k\u00e4tze", "k\u00e4tze".encode("cp437"))):
        path = into_zip(tmp_path, {f"{'?' * len(raw)}/1.png": png(1), "dog/2.png": png(2)})
        path.write_bytes(path.read_bytes().replace(b"?" * len(raw), raw))
        want = tuple(sorted((unicodedata.normalize("NFC", name), "dog")))
        prepared = run(path, tmp_path / f"out-{name[0]}")
        assert prepared.classes == want
        assert prepared.count == 2


def test_backslashes_in_a_zip_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'cat\\1.png' has backslashes for folders"):
        open_source(into_zip(tmp_path, {"cat\\1.png": png(1), "dog\\2.png": png(2)}))


# Pictures in place of prepared data


@pytest.mark.parametrize(
    ("name", "size", "told"),
    [
        ("my photos", 0, ("'my photos'", "'data/my photos-32'", 32)),
        ("photos", 64, ("photos", "data/photos-64", 64)),
        ("it's", 0, ("'it'\"'\"'s'", "'data/it'\"'\"'s-32'", 32)),
    ],
)
def test_pictures_are_not_prepared_data(name, size, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    into_folder(tmp_path, {"cat/1.png": png(1)}).rename(tmp_path / name)
    source, out, pixels = told
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared whole)
        open_prepared(name, size)
    assert str(error.value) == (
        f"'{name}' holds pictures, not prepared data; prepare them first: "
        f"mvm data prepare {source} --out {out} --size {pixels}, then --data.path {out}"
    )


def test_the_command_in_the_error_works(tmp_path, monkeypatch):
    """Also where data/ are the pictures themselves, and for an archive."""
    monkeypatch.chdir(tmp_path)
    into_folder(tmp_path, {"cat/1.png": png(1)}).rename(tmp_path / "data")
    into_zip(tmp_path, TWO)
    for source in ("data", "src.zip", "."):
        with pytest.raises(ValueError, match="prepare them first: ") as error:
            open_prepared(source, 4)
        command, path = str(error.value).split("prepare them first: ")[1].split(", then --data.path ")
        _, _, _, source, _, out, _, size = shlex.split(command)
        assert shlex.split(path) == [out]
        if source != ".":  # which by now holds prepared data, too
            assert run(source, out, size=int(size)).folder.is_dir()
            open_prepared(out)


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match=r"x y' holds no prepared data .*prepare SOURCE --out '.*x y' --size PIXELS$"):
        open_prepared(tmp_path / "x y")
    with pytest.raises(ValueError, match=r"--size 64$"):
        open_prepared(tmp_path / "x y", 64)
