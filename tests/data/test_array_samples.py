"""Arrays of any shape are kept exactly, with what is known of their values; pictures need not be square."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mvm.cli import run as command
from mvm.data.prepare import describe, prepare
from mvm.data.resize import box, centre_crop, unchanged
from mvm.data.shards import open_prepared
from mvm.evaluation.images import of_prepared
from preparing import contents, interrupt

COUNT = 13
DRAW = np.random.default_rng(0)


def run(folder, array, name="set.npz", **options):
    """Prepare an array that lies in a file of its own."""
    path = folder / name
    if path.suffix == ".npz":
        np.savez(path, images=array)
    else:
        np.save(path, array)
    return prepare(path, folder / "out", **{"workers": 1, "progress": False, "part_size": 5, **options})


@pytest.mark.parametrize("name", ["set.npz", "set.npy"])
@pytest.mark.parametrize("shape", [(1, 7), (3, 4, 6), (2, 3, 4, 5), (4, 1, 1), (1, 2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "float16", "uint8"])
def test_arrays_are_kept_exactly(tmp_path, shape, kind, name):
    array = (DRAW.normal(size=(COUNT, *shape)) * 50 + 100).clip(0, 255).astype(kind)
    prepared = run(tmp_path, array, name)
    data, rows = prepared.load(), torch.tensor([12, 0, 4, 12])
    assert prepared.shape == shape
    assert prepared.values == ("uint8" if kind == "uint8" else "float")
    assert data.images.numpy().dtype == ("uint8" if kind == "uint8" else "float32")
    assert np.array_equal(data.images, array)
    assert torch.equal(prepared.mapped().gather(rows)[0], data.images[rows])
    assert data.labels.tolist() == [0] * COUNT
    assert prepared.bytes == array.size * data.images.element_size()
    assert open_prepared(tmp_path / "out") == prepared
    assert describe(tmp_path / "out")[1]


@pytest.mark.parametrize("kind", ["float64", "int16", "bool", ">f4"])
def test_other_numbers_become_float32(tmp_path, kind):
    array = (DRAW.normal(size=(COUNT, 2, 9)) * 1000).astype(kind)
    prepared = run(tmp_path, array, values="float")
    assert np.array_equal(prepared.load().images, array.astype(np.float32))


def test_the_index_tells_how_large_values_are(tmp_path):
    """Also where the mean is a million deviations: there sums of squares in float64 keep no digit of the deviation."""
    array = (1e6 + DRAW.normal(size=(COUNT, 2, 50))).astype(np.float32)
    found, exact = run(tmp_path, array).statistics, array.astype(np.float64)
    assert found["mean"] == pytest.approx(exact.mean(), rel=1e-14)
    assert found["std"] == pytest.approx(exact.std(), rel=1e-9)
    assert found["largest"] == np.abs(exact).max()
    assert f"values     float, standard deviation {exact.std():.4g}" in describe(tmp_path / "out")[0]
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert (index["format"], index["statistics"]) == (2, found)
    for wrong in ({"mean": 0.0}, {**found, "std": float("nan")}, {}):
        (tmp_path / "out/index.json").write_text(json.dumps({**index, "statistics": wrong}))
        with pytest.raises(ValueError, match=r"index\.json' is damaged"):
            open_prepared(tmp_path / "out")


def test_what_was_interrupted_has_the_same_bytes(tmp_path, monkeypatch):
    array = DRAW.normal(size=(COUNT, 2, 9)).astype(np.float32)
    run(tmp_path, array)
    want = contents(tmp_path / "out")
    (tmp_path / "again").mkdir()
    monkeypatch.setattr("mvm.data.prepare._accept", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "again", array)
    monkeypatch.undo()
    (tmp_path / "again/out/images-00001.npy").write_bytes(b"damaged")
    run(tmp_path / "again", array)
    assert contents(tmp_path / "again/out") == want


def wrong(row, value):
    array = np.zeros((COUNT, 2, 9), np.float64)
    array[row, 1, 3] = value
    return array


@pytest.mark.parametrize(
    ("array", "options", "words"),
    [
        (wrong(7, np.nan), {}, r"'set\.npz\[7\]' holds NaN or Inf as float32; repair this row"),
        (wrong(12, -np.inf), {}, r"'set\.npz\[12\]' holds NaN or Inf"),
        (wrong(3, 1e39), {}, r"'set\.npz\[3\]' holds NaN or Inf as float32"),
        (np.zeros((COUNT, 2, 9), np.int32), {}, r"'set\.npz\[0\]' is int32; give values='float'"),
        (np.zeros((COUNT, 2, 9), np.float32), {"values": "uint8"}, r"values='uint8': 'set\.npz\[0\]' is float32"),
        (np.zeros((COUNT, 2, 9), complex), {"values": "float"}, "samples are complex128; numbers are needed"),
        (np.zeros((COUNT, 2, 9), np.float32), {"values": "half"}, "values='half' is unknown"),
        (np.zeros((COUNT, 9), np.float32), {}, r"shape \(13, 9\) is not \(N, C, \*space\); add an axis"),
        (np.zeros((COUNT, 2, 0), np.float32), {}, r"shape \(13, 2, 0\) is not"),
        (np.zeros((COUNT, 8, 9, 3), np.uint8), {}, r"\(13, 8, 9, 3\) is one of pictures.*; give --size 8x9"),
        (np.zeros((COUNT, 2, 9), np.float32), {"resize": "box"}, "resize='box', channels=None: without a size"),
        (np.zeros((COUNT, 2, 9), np.float32), {"channels": 3}, r"channels=3: without a size .*\(2, 9\)"),
        (np.zeros((COUNT, 8, 8, 3), np.float32), {"size": 8}, "are float32; they must be uint8.*leave --size out"),
        (np.zeros((COUNT, 8, 8, 3), np.uint8), {"size": 8, "values": "float"}, "values='float' is for arrays"),
        (np.zeros((COUNT, 8, 8, 3), np.uint8), {"size": (8, 0)}, "size=0 is out of range"),
    ],
    ids=lambda value: None if isinstance(value, str | dict) else "x".join(map(str, value.shape)),
)  # fmt: skip
def test_what_cannot_be_kept_is_named(tmp_path, array, options, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, array, **options)


def test_pictures_need_a_size(tmp_path):
    (tmp_path / "source").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "source/a.png")
    with pytest.raises(ValueError, match=r"holds pictures; give their size: --size 32, or --size HEIGHTxWIDTH"):
        prepare(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_row_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mvm.data.prepare.MOST_PICTURE", 71)
    with pytest.raises(ValueError, match=r"images: a row of float32 \(2, 9\) takes more than 71 bytes"):
        run(tmp_path, np.zeros((COUNT, 2, 9), np.float32))


def test_figures_are_of_images(tmp_path):
    with pytest.raises(
        ValueError, match=r"holds float samples of shape \(2, 9\); images \(C, H, W\) in uint8 are needed"
    ):
        of_prepared(run(tmp_path, np.zeros((COUNT, 2, 9), np.float32)))


def test_the_command_keeps_signals(tmp_path, capsys):
    np.save(tmp_path / "signals.npy", DRAW.normal(size=(COUNT, 1, 64)))
    assert command(["data", "prepare", str(tmp_path / "signals.npy"), "--out", str(tmp_path / "out")]) == 0
    assert command(["data", "info", str(tmp_path / "out")]) == 0
    assert "shape      1x64" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("size", "words"), [("4x", "a side or HEIGHTxWIDTH"), ("4x5x6", "3 sides"), ("4x0", "size=0")])
def test_sizes_that_are_none(tmp_path, capsys, size, words):
    np.save(tmp_path / "images.npy", np.zeros((2, 4, 5, 3), np.uint8))
    assert command(["data", "prepare", str(tmp_path / "images.npy"), "--out", str(tmp_path / "o"), "--size", size])
    assert words in capsys.readouterr().err


# --- pictures that are not square -----------------------------------------------------------------------------------


def old_centre_crop(image, size):
    """ADM's crop as it was for squares alone."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.size[0] // 2, image.size[1] // 2), Image.Resampling.BOX)
    width, height = (round(side * size / min(image.size)) for side in image.size)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 90), st.integers(0, 9))
def test_squares_are_cropped_as_before(size, width, height, seed):
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
    want = np.asarray(old_centre_crop(image, size))
    assert np.array_equal(np.asarray(centre_crop(image, size)), want)
    assert np.array_equal(np.asarray(centre_crop(image, (size, size))), want)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 90), st.integers(1, 90))
def test_every_picture_gets_its_height_and_width(rows, columns, width, height):
    image = Image.new("L", (width, height), 7)
    for resize in (box, centre_crop):
        assert (np.asarray(resize(image, (rows, columns))) == 7).all()
        assert resize(image, (rows, columns)).size == (columns, rows)


def test_a_crop_of_a_wide_picture_keeps_what_fits():
    """4x8 of a 4x12 and of an 8x8: columns, or rows, are cut on both sides, and nothing is resized."""
    wide, tall = np.tile(np.arange(12, dtype=np.uint8), (4, 1)), np.tile(np.arange(8, dtype=np.uint8)[:, None], (1, 8))
    assert np.array_equal(centre_crop(Image.fromarray(wide), (4, 8)), wide[:, 2:10])
    assert np.array_equal(centre_crop(Image.fromarray(tall), (4, 8)), tall[2:6])
    with pytest.raises(ValueError, match="is 8x8, not 4x8, and resize='none'"):
        unchanged(Image.fromarray(tall), (4, 8))


def test_wide_pictures_are_prepared(tmp_path):
    pixels = DRAW.integers(0, 256, (COUNT, 4, 8, 3), dtype=np.uint8)
    prepared = run(tmp_path, pixels, size=(2, 4))
    want = pixels.reshape(COUNT, 2, 2, 4, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    assert prepared.shape == (3, 2, 4)
    assert np.abs(prepared.load().images.numpy() - want).max() <= 1  # Pillow rounds after each direction
    assert json.loads((tmp_path / "out/index.json").read_text())["format"] == 1  # as it could be read before
    assert run(tmp_path, pixels, size=(2, 4)) == prepared
    with pytest.raises(ValueError, match=r"size \(\[2, 4\], now \[4, 8\]\)"):
        run(tmp_path, pixels, size=(4, 8))
