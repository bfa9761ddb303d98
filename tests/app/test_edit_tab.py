"""The tab of edits: its results are those of the command shown, and uploads are bounded and checked."""

import base64
import io
import re
import shlex

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from mvm.app import edit
from mvm.app.edit import EDIT_RANGES, TASKS, EditForm, box, check_upload
from mvm.app.service import COMMAND, FIGURES, FILM, PROBLEM, Service, Shelf, Turn
from mvm.cli import run
from mvm.data import digits
from mvm.pictures import png_bytes, to_pillow

PHOTO = png_bytes(to_pillow(digits().images[5]))


@pytest.fixture(scope="module")
def service():
    return Service(Shelf(["digits"], torch.device("cpu")), seats=1)


def last(service, form):
    *_, parts = service.serve(Turn(), 1, form, service.edits)
    return parts


def saved(parts, name):
    """Return what a link on the page saves."""
    return base64.b64decode(re.search(rf'download="{name}" href="data:image/png;base64,([^"]+)"', parts[FILM])[1])


@pytest.mark.parametrize("task", TASKS)
def test_the_command_shown_makes_the_results_again(service, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form = EditForm("digits", task, drawn=3, images=2, seed="4", nfe=3, cfg=1.5, part="middle", std=0.7)
    parts = last(service, form)
    assert "done" in parts[FILM]
    (tmp_path / "given.png").write_bytes(saved(parts, "given.png"))
    assert run(shlex.split(parts[COMMAND])[1:]) == 0
    name = f"digits-{task}-seed-4.png"
    assert (tmp_path / name).read_bytes() == saved(parts, name)


def test_an_uploaded_picture_of_any_size_is_edited_without_a_class(service, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(file, "JPEG")
    parts = last(service, EditForm("digits", upload=file.getvalue(), nfe=2))
    assert "--classes" not in parts[COMMAND]
    (tmp_path / "given.png").write_bytes(saved(parts, "given.png"))
    assert Image.open("given.png").size == (8, 8)
    assert run(shlex.split(parts[COMMAND])[1:]) == 0
    name = "digits-inpaint-seed-0.png"
    assert (tmp_path / name).read_bytes() == saved(parts, name)
    assert "--classes 7 " in last(service, EditForm("digits", upload=PHOTO, wanted=7, nfe=2))[COMMAND]


def test_cost_is_told(service):
    cells = re.findall(r"<td>([^<]*)</td>", last(service, EditForm("digits", nfe=3, cfg=2.0))[FIGURES])
    assert cells[:3] == ["3", "6", "18"]
    cells = re.findall(r"<td>([^<]*)</td>", last(service, EditForm("digits", "image-to-image", nfe=3))[FIGURES])
    assert cells[:3] == ["3", "3", "0"]


def test_numbers_of_other_tasks_do_not_count():
    assert EditForm("digits", "inpaint", strength=None, margin=-1).problems() == {}
    assert list(EditForm("digits", "outpaint", strength=None, margin=-1).problems()) == ["margin"]
    assert list(EditForm("digits", seed="x", nfe=0).problems()) == ["nfe", "seed"]
    for name, bounds in EDIT_RANGES.items():
        for value in (bounds.low, bounds.high, bounds.start):
            assert EditForm("digits", **{name: value}).problems() == {}


def test_parts_of_a_picture_are_boxes():
    assert [box(part, 8) for part in edit.PARTS] == [
        (4, 0, 8, 8), (0, 0, 4, 8), (0, 0, 8, 4), (0, 4, 8, 8), (2, 2, 6, 6),
    ]  # fmt: skip


def bomb(width, height):
    """A PNG of so many black pixels, which is small."""
    return png_bytes(Image.new("1", (width, height)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no picture", "the picture cannot be read (not an image); give a PNG, JPEG or WebP"),
        (PHOTO[:60], "cannot be read (OSError: image file is truncated)"),
        (bytes(edit.MOST_UPLOAD + 1), "the picture&#x27;s file has 8,388,609 bytes; give one of 8,388,608 at most"),
        (bomb(4096, 4097), "the picture has 4096x4097 pixels; give one of 16,777,216 at most"),
    ],
)
def test_an_upload_that_is_no_picture_or_a_large_one_is_told(service, content, words):
    assert words in last(service, EditForm("digits", upload=content, nfe=2))[PROBLEM]


def test_a_large_upload_is_refused_before_it_is_unpacked(monkeypatch):
    content = bomb(5000, 5000)
    monkeypatch.setattr(PngImageFile, "load", lambda self: pytest.fail("unpacked"))
    with pytest.raises(ValueError, match="pixels"):
        check_upload(content)


def test_tasks_that_do_not_fit_are_told(service):
    assert (
        "margin=4 is out of range; of 1x8x8 it must be 1 to 3"
        in last(service, EditForm("digits", "outpaint", margin=4))[PROBLEM]
    )
    assert "factor=3 does not divide" in last(service, EditForm("digits", "upscale", factor=3))[PROBLEM]
    for odd in (EditForm("digits", "paint"), EditForm("digits", part="none"), EditForm("digits", wanted=12)):
        assert last(service, odd)[PROBLEM]


def test_the_server_takes_small_files_alone_and_reads_no_other():
    pytest.importorskip("gradio", reason="the page needs gradio: mean-velocity-matching[web]")
    httpx = pytest.importorskip("httpx")
    from tests.faults.visitors import told_of

    from mvm.app.page import serve

    blocks, address = serve(Shelf(["digits"], torch.device("cpu")), 1, "127.0.0.1", None, wait=False)
    try:
        send = f"{address}picture"
        small = httpx.post(send, content=PHOTO).raise_for_status().text
        assert httpx.post(send, content=bytes(edit.MOST_UPLOAD + 1), timeout=60).status_code == 413
        for name, words in ((small, ""), ("/etc/hostname", "no longer kept"), (__file__, "no longer kept")):
            values = [None, 1, "digits", "inpaint", name, 0, -1, 0.5, "middle", 2, 2, 1, 1, "0", 2, 1, 1]
            told = told_of(address, "mvm-edit", values)
            assert words in told["mvm-edit-problem"]
            assert ("done" in told.get("mvm-edit-film", "")) == (not words)
    finally:
        blocks.close(verbose=False)
