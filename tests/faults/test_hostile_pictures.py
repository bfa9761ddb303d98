"""Pictures that are damaged, enormous or unusual: refused in words, or read as the page on reliability says."""

import io
import struct
import subprocess
import zlib

import numpy as np
import pytest
from fuzz_isolation import in_little_memory
from PIL import Image

from mvm.data.prepare import prepare
from mvm.data.resize import BadImage, centre_crop, decode
from mvm.evaluation.images import open_images
from mvm.untrusted import MOST_PICTURE, MOST_PIXELS


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width, height, rows=b""):
    """A PNG that claims its size, whatever its rows hold."""

    def chunk(kind, contents):
        return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


COLOUR = Image.fromarray(np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3))


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("size", [(50_000, 50_000), (MOST_PIXELS + 1, 1), (1, MOST_PIXELS + 1), (2**31 - 1, 2**31 - 1)])
def test_huge_dimensions_are_refused_before_memory_is_taken(size):
    assert in_little_memory(lambda: decode(png(*size), 3)).startswith("BadImage: ")


def test_a_line_of_pixels_does_not_grow_into_gigabytes():
    line = png(300_000, 1, bytes(300_001))
    assert decode(line, 1).size == (300_000, 1)
    said = in_little_memory(lambda: centre_crop(decode(line, 1), 256))
    assert said == f"BadImage: 76800000x256 is more than {MOST_PIXELS:,} pixels"


def test_such_a_line_is_skipped_and_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/line.png").write_bytes(png(300_000, 1, bytes(300_001)))
    COLOUR.save(tmp_path / "in/good.png")
    made = prepare(tmp_path / "in", tmp_path / "out", size=256, resize="centre-crop", workers=1, progress=False)
    assert made.count == 1
    assert made.skipped["first"] == [["line.png", f"76800000x256 is more than {MOST_PIXELS:,} pixels"]]


def test_a_file_larger_than_any_picture_is_skipped_and_only_begun(tmp_path):
    (tmp_path / "in").mkdir()
    with (tmp_path / "in/huge.png").open("wb") as file:
        file.truncate(MOST_PICTURE * 40)  # a hole on the disk
    COLOUR.save(tmp_path / "in/good.png")
    options = {"size": 4, "workers": 1, "progress": False}
    assert in_little_memory(lambda: prepare(tmp_path / "in", tmp_path / "out", **options)) == "done"
    made = prepare(tmp_path / "in", tmp_path / "out", **options)
    assert made.skipped["first"] == [["huge.png", f"its file is larger than {MOST_PICTURE:,} bytes"]]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_truncated_pictures(kind):
    data = saved(COLOUR.resize((64, 64)), kind)
    for length in (0, 1, 20, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(BadImage):
            decode(data[:length], 3)


def test_contents_decide_and_not_the_name(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/really-a-jpeg.png").write_bytes(saved(COLOUR, "JPEG"))
    (tmp_path / "in/really-a-text.png").write_text("words")
    made = prepare(tmp_path / "in", tmp_path / "out", size=4, workers=1, progress=False)
    assert (made.count, made.skipped["first"]) == (1, [["really-a-text.png", "not an image"]])


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(touch pwned) showpage\n%%EOF\n"


def test_no_format_that_starts_a_program(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(subprocess, "check_call", started)
    with Image.open(io.BytesIO(EPS)) as image:
        assert image.format == "EPS"  # Pillow would hand it to Ghostscript
    with pytest.raises(BadImage, match="not an image"):
        decode(EPS, 3)


def test_sixteen_bit_grey_keeps_its_upper_eight():
    levels = np.array([[0, 255, 256, 65535]], np.uint16)
    assert np.asarray(decode(saved(Image.fromarray(levels), "PNG"), 1)).tolist() == [[0, 0, 1, 255]]


def test_cmyk_becomes_rgb():
    found = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), 3)
    assert found.mode == "RGB"
    assert np.abs(np.asarray(found).astype(int) - [255, 0, 0]).max() <= 3


def test_a_transparent_palette_keeps_its_colours():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putdata([0, 1])
    found = decode(saved(palette, "PNG", transparency=1), 3)
    assert np.asarray(found).tolist() == [[[10, 20, 30], [200, 100, 50]]]


def test_a_damaged_exif_block_does_not_lose_the_picture():
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = exif.tobytes()
    outside = b"Exif\0\0II*\0\xff\xff\xff\xff"
    for damaged in (whole[:9], b"Exif\0\0" + bytes(40), outside, whole.replace(b"\x06", b"\x63")):
        assert decode(saved(COLOUR, "PNG", exif=damaged), 3).tobytes() == COLOUR.tobytes()
        assert decode(saved(COLOUR, "JPEG", exif=damaged), 3).size == COLOUR.size


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame(kind):
    red, blue = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    found = decode(saved(red, kind, save_all=True, append_images=[blue]), 3)
    assert np.abs(np.asarray(found).astype(int) - [255, 0, 0]).max() <= 3


def test_one_pixel_and_none():
    assert centre_crop(decode(saved(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG"), 3), 16).size == (16, 16)
    with pytest.raises(BadImage, match="not an image"):
        decode(b"", 3)


def test_eval_names_what_it_cannot_read(tmp_path):
    (tmp_path / "0.png").write_bytes(EPS)
    with pytest.raises(ValueError, match=r"'0\.png' cannot be read \(not an image\)"):
        open_images(tmp_path, size=4)
