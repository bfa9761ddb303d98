"""mvm data prepare, mvm data info: from a folder of pictures to one that trains."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from mvm.cli import run
from mvm.data import open_prepared
from mvm.data.resize import box

NAMES = tuple(f"kind-{number}" for number in range(10))


@pytest.fixture
def damaged(pictures, tmp_path):
    """The pictures, one of them cut off in the middle."""
    folder = tmp_path / "damaged"
    shutil.copytree(pictures, folder)
    path = folder / "kind-4" / "14.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder


def test_prepare_writes_what_training_reads(pictures, tmp_path, done):
    out = tmp_path / "out"
    said = done("data", "prepare", pictures, "--out", out, "--size", "16", "--workers", "1")
    assert said == f"{out}: 30 images of 10 classes, 0 skipped; see: mvm data info {out}\n"
    found = open_prepared(out)
    found.verify()
    assert (found.shape, found.classes, found.class_counts) == ((3, 16, 16), NAMES, (3,) * 10)
    first = Image.open(pictures / "kind-0" / "00.png")
    assert np.array_equal(found.load().images[0].numpy(), np.asarray(box(first, 16)).transpose(2, 0, 1))


def test_a_second_call_changes_nothing(prepared, pictures, done):
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in prepared.iterdir()}
    assert "30 images" in done("data", "prepare", pictures, "--out", prepared, "--size", "32", "--workers", "1")
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in prepared.iterdir()} == before


@pytest.mark.parametrize(
    ("tokens", "shape", "resize"),
    [
        (["--size", "8", "--channels", "1"], (1, 8, 8), "box"),
        (["--size", "8", "--resize", "centre-crop"], (3, 8, 8), "centre-crop"),
        (["--size", "72"], (3, 72, 72), "centre-crop"),
    ],
    ids=str,
)
def test_options_of_prepare(tokens, shape, resize, pictures, tmp_path, done):
    done("data", "prepare", pictures, "--out", tmp_path / "out", *tokens, "--workers", "1")
    found = open_prepared(tmp_path / "out")
    assert (found.shape, found.resize) == (shape, resize)


def test_a_truncated_file_is_counted_named_and_left_out(damaged, tmp_path, done):
    out = tmp_path / "out"
    assert "29 images of 10 classes, 1 skipped" in done("data", "prepare", damaged, "--out", out, "--size", "8")
    said = done("data", "info", out)
    assert re.search(r"^skipped +1$", said, re.MULTILINE)
    assert re.search(r"^  kind-4/14\.png: \S", said, re.MULTILINE)
    assert re.search(r"^ +2  kind-4$", said, re.MULTILINE)
    assert re.search(r"^images per class: min 2, median 3, max 3$", said, re.MULTILINE)


def test_the_closing_lines_tell_what_is_left_out(pictures, tmp_path, done, refused):
    """Skipped by reason, the first few names, what is no image, and class folders without images."""
    folder, out = tmp_path / "my photos", tmp_path / "my out"
    shutil.copytree(pictures, folder)
    for number in range(7):
        (folder / "kind-0" / f"{number}.nef").touch()
    (folder / "kind-1" / "text.png").write_text("no image")
    (folder / "notes.txt").touch()
    (folder / "\x1b[31mempty").mkdir()
    tokens = ["data", "prepare", folder, "--out", out, "--size", "8", "--workers", "1"]
    raw = ".nef files are not supported; convert them to JPEG or PNG"
    assert done(*tokens).splitlines() == [
        f"{out}: 30 images of 10 classes, 8 skipped; see: mvm data info '{out}'",
        f"  7 skipped: {raw}",
        "  1 skipped: not an image",
        "  kind-1/text.png: not an image",
        *(f"  kind-0/{number}.nef: {raw}" for number in range(4)),
        "  ... and 3 more",
        "  ignored 1 file that is no image: .txt 1",
        "  no images of class \\x1b[31mempty: it is left out",
    ]
    assert "  7 skipped: " + raw in done("data", "info", out).splitlines()
    assert f"'kind-0/0.nef': {raw}" in refused(*tokens, "--strict")


def test_training_on_pictures_names_the_command(pictures, refused):
    said = refused("train", "cifar10", "--data.path", pictures)
    assert f"'{pictures}' holds pictures, not prepared data; prepare them first: mvm data prepare {pictures} " in said
    assert "--out data/photos-32 --size 32, then --data.path data/photos-32" in said


def test_strict_refuses_a_truncated_file(damaged, tmp_path, refused, done):
    tokens = ["data", "prepare", damaged, "--out", tmp_path / "out", "--size", "8", "--workers", "1"]
    said = refused(*tokens, "--strict")
    assert "kind-4/14.png" in said
    assert "no index.json" in refused("data", "info", tmp_path / "out")  # so that nobody trains on it
    assert "1 skipped" in done(*tokens)  # what was begun is no obstacle
    assert "kind-4/14.png" in refused(*tokens, "--strict")


def test_info(prepared, done):
    lines = done("data", "info", prepared).splitlines()
    told = dict(line.split(None, 1) for line in lines if line[0].isalpha() and not line.startswith("images per"))
    size = sum(path.stat().st_size for path in prepared.glob("*.npy"))
    assert told == {
        "shape": "3x32x32",
        "images": "30 in 1 shards",
        "bytes": f"{size:,}",
        "resize": "box",
        "source": "photos (folder)",
        "skipped": "0",
        "checksums": "good",
        "classes": "10, 0 of them empty",
    }
    assert [line.split() for line in lines if line.startswith(" ")] == [["3", name] for name in NAMES]


def test_info_names_a_damaged_file(prepared, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    path = copy / "images-00000.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run(["data", "info", str(copy)]) == 1
    assert re.search(r"^checksums .*images-00000\.npy' is damaged", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "--size"),
        (["--size", "1.5"], "'1.5' is not a size; give a side or HEIGHTxWIDTH"),
        (["--size", "0"], "size=0"),
        (["--size", "8", "--classes", "7"], "classes=7, but 'photos' names 10"),
        (["--size", "8", "--classes", "ten"], "'ten' is not a whole number"),
        (["--size", "8", "--channels", "2"], "channels=2 is not supported; allowed: 1, 3"),
        (["--size", "8", "--resize", "crop"], "resize='crop' is unknown"),
        (["--size", "8", "--workers", "0"], "workers=0"),
        (["--size", "8", "--strct"], "--strict"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(tokens, words, pictures, tmp_path, refused):
    assert words in refused("data", "prepare", pictures, "--out", tmp_path / "out", *tokens)
    assert list(tmp_path.iterdir()) == []


def test_the_right_number_of_classes_is_accepted(pictures, tmp_path, done):
    assert "of 10 classes" in done(
        "data", "prepare", pictures, "--out", tmp_path / "out", "--size", "8", "--classes", "10", "--workers", "1"
    )


def test_a_label_beyond_the_classes_is_refused(tmp_path, refused):
    """Bare numbers may be extended, never cut."""
    images = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.array([0, 1, 2, 5]))
    tokens = ["data", "prepare", tmp_path / "set.npz", "--out", tmp_path / "out", "--size", "8", "--workers", "1"]
    assert "label 5" in refused(*tokens, "--classes", "5")


def test_a_source_that_does_not_exist(tmp_path, refused):
    said = refused("data", "prepare", tmp_path / "nothing", "--out", tmp_path / "out", "--size", "8")
    assert f"source='{tmp_path / 'nothing'}' does not exist" in said
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_a_usable_image(tmp_path, refused):
    (tmp_path / "source" / "ant").mkdir(parents=True)
    (tmp_path / "source" / "ant" / "0.png").write_bytes(b"no image")
    tokens = ["data", "prepare", tmp_path / "source", "--out", tmp_path / "out", "--size", "8", "--workers", "1"]
    assert "has no usable image; 1 were skipped (first: 'ant/0.png'" in refused(*tokens)


def test_a_folder_prepared_otherwise_is_left_alone(prepared, pictures, refused):
    before = json.loads((prepared / "index.json").read_text())
    said = refused("data", "prepare", pictures, "--out", prepared, "--size", "16")
    assert "holds images with other values of size (32, now 16)" in said
    assert json.loads((prepared / "index.json").read_text()) == before


def test_what_is_prepared_is_no_source(prepared, tmp_path, refused):
    said = refused("data", "prepare", prepared, "--out", tmp_path / "out", "--size", "16")
    assert "is prepared already" in said
