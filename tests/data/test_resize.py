"""Resizing against means by hand, decoding of every colour mode, and what is refused."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mvm.data.resize import RESIZES, BadImage, box, centre_crop, decode, planes, resolve


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def stored(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def mean(pixels, axis, step):
    """Means of `step` neighbours along an axis, rounded half up."""
    shape = (*pixels.shape[:axis], -1, step, *pixels.shape[axis + 1 :])
    return np.floor(pixels.reshape(shape).mean(axis + 1) + 0.5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_box_is_the_mean_over_boxes(size, across, down, seed):
    """Exactly, squashed where the picture is not square; Pillow rounds after each direction, and chooses the first."""
    pixels = noise(size * down, size * across, 3, seed=seed)
    got = np.asarray(box(Image.fromarray(pixels), size))
    rows_first, columns_first = mean(mean(pixels, 1, across), 0, down), mean(mean(pixels, 0, down), 1, across)
    assert np.array_equal(got, rows_first) or np.array_equal(got, columns_first)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_box_stays_within_its_roundings(size, across, down, seed):
    pixels = noise(size * down, size * across, 3, seed=seed)
    want = pixels.reshape(size, down, size, across, 3).mean((1, 3))
    assert np.abs(np.asarray(box(Image.fromarray(pixels), size)) - want).max() <= 1 + 1e-9


def test_box_by_hand():
    pixels = np.array([[0, 10, 100, 90], [20, 30, 100, 210]], np.uint8)
    assert np.asarray(box(Image.fromarray(pixels), 1)).tolist() == [[70]]
    assert np.asarray(box(Image.fromarray(pixels), 2)).tolist() == [[5, 95], [25, 155]]


@pytest.mark.parametrize("name", list(RESIZES))
@pytest.mark.parametrize("size", [1, 7, 64, 65])
def test_the_right_size_is_left_alone(name, size):
    pixels = noise(size, size, 3)
    assert np.array_equal(np.asarray(RESIZES[name](Image.fromarray(pixels), size)), pixels)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["box", "centre-crop", "auto"]), st.integers(1, 70), st.integers(1, 150), st.integers(1, 150))
def test_every_picture_gets_the_size(name, size, width, height):
    assert RESIZES[name](Image.new("RGB", (width, height), (9, 8, 7)), size).size == (size, size)
    grey = planes(RESIZES[name](Image.new("L", (width, height), 9), size))
    assert grey.shape == (1, size, size)
    assert (grey == 9).all()  # a constant stays constant under every filter


def test_crop_takes_the_middle():
    """Height is right already: only columns are cut, the same number on both sides (the odd one on the right)."""
    pixels = np.tile(np.arange(11, dtype=np.uint8), (4, 1))
    assert np.asarray(centre_crop(Image.fromarray(pixels), 4)).tolist() == [[3, 4, 5, 6]] * 4
    assert np.asarray(centre_crop(Image.fromarray(pixels.T.copy()), 4)).T.tolist() == [[3, 4, 5, 6]] * 4


def test_crop_halves_by_boxes_while_it_can():
    """16x40 at size 4: two halvings by exact 2x2 means, and no bicubic, which would ring at this checkerboard."""
    pixels = np.kron(noise(4, 10) // 4 * 4, np.ones((4, 4), np.uint8))
    want = pixels[::4, ::4][:, 3:7]
    assert np.array_equal(np.asarray(centre_crop(Image.fromarray(pixels), 4)), want)


def test_crop_halves_first_and_then_takes_bicubic():
    """25x33 at 8: one halving, to 12x16 (not a reduction straight to 8), then bicubic to 8x11, then the crop."""
    image = Image.fromarray(noise(25, 33, 3))
    halved = image.resize((16, 12), Image.Resampling.BOX)
    want = np.asarray(halved.resize((11, 8), Image.Resampling.BICUBIC))[:, 1:9]
    assert np.array_equal(np.asarray(centre_crop(image, 8)), want)
    straight = np.asarray(image.resize((11, 8), Image.Resampling.BICUBIC))[:, 1:9]
    assert not np.array_equal(want, straight)


def test_what_auto_stands_for():
    assert [resolve("auto", size) for size in (32, 64, 65, 256)] == ["box", "box", "centre-crop", "centre-crop"]
    assert resolve("none", 8) == "none"
    with pytest.raises(ValueError, match=r"resize='boxx'.*'box'.*auto, box"):
        resolve("boxx", 8)


def test_none_demands_the_size():
    with pytest.raises(ValueError, match="is 9x8, not 8x8, and resize='none'"):
        RESIZES["none"](Image.new("L", (8, 9)), 8)


def test_lossless_pixels_survive():
    pixels = noise(5, 7, 3)
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {})):
        assert np.array_equal(np.asarray(decode(stored(Image.fromarray(pixels), kind, **options), 3)), pixels)
    assert np.array_equal(planes(decode(pixels, 3)), pixels.transpose(2, 0, 1))


def test_colour_modes():
    """Grey is repeated; transparency is dropped, not blended; palettes are looked up; CMYK is converted."""
    grey, rgba = noise(4, 4), noise(4, 4, 4)
    assert np.array_equal(np.asarray(decode(stored(Image.fromarray(grey)), 3)), np.stack([grey] * 3, -1))
    assert np.array_equal(np.asarray(decode(stored(Image.fromarray(rgba)), 3)), rgba[..., :3])
    assert np.array_equal(np.asarray(decode(grey[..., None], 1)), grey)
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
    palette.putpalette([255, 0, 0, 0, 0, 255])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode(stored(palette, transparency=b"\x00\x80"), 3)
    assert np.asarray(found).tolist() == [[[255, 0, 0], [0, 0, 255]], [[0, 0, 255], [255, 0, 0]]]
    cmyk = decode(stored(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"), 3)
    assert cmyk.getpixel((0, 0)) == (255, 0, 0)
    assert decode(stored(Image.new("RGB", (2, 2), (255, 0, 0))), 1).getpixel((0, 0)) == 76  # .299 * 255


def test_sixteen_bits_keep_their_upper_eight():
    levels = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert np.asarray(decode(stored(Image.fromarray(levels)), 1)).tolist() == [[0, 0, 1, 128, 255]]


def huge_png(side):
    """A PNG whose header promises side x side pixels."""

    def chunk(kind, contents):
        return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("side", [10_000, 100_000])  # where Pillow warns, where it raises
def test_decompression_bombs_are_bad_images(side):
    with pytest.raises(BadImage, match=r"DecompressionBomb|10000x10000 is more than"):
        decode(huge_png(side), 3)


def test_not_an_image():
    for contents in (b"", b"no image at all", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(BadImage, match="not an image"):
            decode(contents, 3)
    with pytest.raises(BadImage, match="floating-point"):
        decode(stored(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_truncated_anywhere_is_bad_or_whole_but_never_a_crash(kind):
    whole = stored(Image.fromarray(noise(16, 16, 3)), kind)
    for length in range(0, len(whole), 7):
        try:
            assert decode(whole[:length], 3).size == (16, 16)
        except BadImage:
            continue
    with pytest.raises(BadImage):
        decode(whole[: len(whole) // 2], 3)


def test_channels():
    with pytest.raises(ValueError, match=r"channels='2' is unknown.*allowed: 1, 3"):
        decode(noise(2, 2, 3), 2)
