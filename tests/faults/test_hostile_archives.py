"""Archives, folders and tables made to harm: nothing is unpacked to the disk, followed, waited for, or believed."""

import io
import os
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from fuzz_isolation import in_little_memory
from PIL import Image

from mvm.data.prepare import prepare
from mvm.data.sources import open_source
from mvm.untrusted import MOST_LABEL, MOST_PICTURE, MOST_ROWS

HUGE = 3 << 30  # bytes


def picture():
    buffer = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def prepared(source, tmp_path):
    """Prepare a source in a folder of its own; nothing may appear beside it."""
    before = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    found = prepare(source, tmp_path / "out", size=4, workers=1, progress=False)
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} == before
    return found


def records(source):
    return [record for part in open_source(source).parts for record in part.read()]


def test_zip_members_that_lead_out_are_names_and_no_paths(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    path = tmp_path / "deep/er/x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a/../../../up.png", "a//etc/absolute.png", "a/C:\\windows.png", "a/good.png"):
            archive.writestr(name, picture())
        link = zipfile.ZipInfo("a/link.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    found = prepared(path, tmp_path)
    assert found.skipped == {"count": 1, "first": [["a/link.png", "not an image"]]}  # the text of the link, no more
    assert found.classes == ("a",)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "index.json",
        "images-00000.npy",
        "labels-00000.npy",
    }


def test_a_zip_member_without_a_name_is_no_image(tmp_path):
    class Nameless(zipfile.ZipInfo):
        def is_dir(self):
            return False

    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/good.png", picture())
        archive.writestr(Nameless(""), picture())
    source = open_source(path)
    assert [record.name for record in records(path)] == ["a/good.png"]
    assert source.ignored == {"no suffix": 1}


def test_a_zip_that_holds_gigabytes_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("bomb.png", "w") as member:
            for _ in range((MOST_PICTURE >> 24) + 2):
                member.write(bytes(1 << 24))
        archive.writestr("good.png", picture())
    assert path.stat().st_size < MOST_PICTURE // 100
    assert in_little_memory(lambda: prepared(path, tmp_path), 1 << 30) == "done"
    assert [first for first, _ in prepared(path, tmp_path).skipped["first"]] == ["bomb.png"]


def test_a_zip_that_claims_gigabytes(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.png", picture())
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02")
    data[place + 24 : place + 28] = struct.pack("<I", HUGE)
    path.write_bytes(data)
    said = in_little_memory(lambda: records(path))
    assert said == "done" or said.startswith("ValueError: ")


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA])
def test_packing_whose_header_asks_for_memory_is_refused(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as archive:
        archive.writestr("x.png", picture())
    with pytest.raises(ValueError, match=r"'x\.png' cannot be read \(packed by method 14; .*repair the archive"):
        records(tmp_path / "x.zip")


def test_an_encrypted_manifest(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.png", picture())
        archive.writestr("dataset.json", '{"labels": [["x.png", 0]]}')
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        data[data.rindex(mark) + offset] |= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"member 'dataset\.json' cannot be read \(.*encrypted"):
        open_source(path)


def add(tar, name, data=b"", kind=tarfile.REGTYPE, **more):
    member = tarfile.TarInfo(name)
    member.size, member.type = len(data), kind
    for key, value in more.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


def test_tar_members_that_lead_out_or_are_no_files(tmp_path):
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep/x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("../../up", "/etc/absolute", "good"):
            add(tar, f"{name}.png", picture())
            add(tar, f"{name}.cls", b"0")
        add(tar, "symlink.png", kind=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "hardlink.png", kind=tarfile.LNKTYPE, linkname="../../../etc/passwd")
        add(tar, "device.png", kind=tarfile.CHRTYPE, devmajor=1, devminor=5)
        add(tar, "pipe.png", kind=tarfile.FIFOTYPE)
        add(tar, "folder.png", kind=tarfile.DIRTYPE)
    found = prepared(path, tmp_path)
    assert (found.count, found.skipped["count"]) == (3, 0)
    assert [record.name for record in records(path)] == ["x.tar/../../up", "x.tar/etc/absolute", "x.tar/good"]


def test_a_sparse_member_that_claims_terabytes(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        told = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.map": "0,4",
            "GNU.sparse.size": "1" + "0" * 13,
        }
        add(tar, "x.png", b"\x89PNG", pax_headers=told)
        add(tar, "x.cls", b"0")
    said = in_little_memory(lambda: records(tmp_path / "x.tar"), 1 << 30)
    assert said == "done" or said.startswith("ValueError: ")


def test_a_label_is_small(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        add(tar, "x.cls", b"1" * (MOST_LABEL + 1))
    with pytest.raises(ValueError, match=rf"x\.tar' is no whole tar .*larger than {MOST_LABEL:,} bytes"):
        open_source(tmp_path / "x.tar")


def test_a_tar_that_leads_back_to_itself_ends(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "x.png", picture(), pax_headers={"size": "-2048"})
        add(tar, "x.cls", b"0")
    said = in_little_memory(lambda: records(tmp_path / "x.tar"))
    assert said == "done" or said.startswith("ValueError: ")


def test_a_label_that_no_integer_holds(tmp_path):
    for label in (10**30, 10**4000, -1):
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            add(tar, "x.png", picture())
            add(tar, "x.cls", str(label).encode() if label < 10**100 else b"1" + b"0" * 4000)
        with pytest.raises(ValueError, match=r"x\.tar/x' has label .{1,400}; allowed: 0 or more"):
            prepare(tmp_path / "x.tar", tmp_path / "out", size=4, workers=1, progress=False)


def test_links_that_go_round(tmp_path):
    (tmp_path / "in/a").mkdir(parents=True)
    (tmp_path / "in/a/0.png").write_bytes(picture())
    (tmp_path / "in/a/up").symlink_to(tmp_path / "in")
    with pytest.raises(ValueError, match=r"a/up' .*remove the link"):
        open_source(tmp_path / "in")


def test_links_to_folders_elsewhere_are_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/0.png").write_bytes(picture())
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").symlink_to(tmp_path / "elsewhere")
    assert [record.name for record in records(tmp_path / "in")] == ["a/0.png"]


def test_pipes_and_devices_are_not_waited_for(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/good.png").write_bytes(picture())
    os.mkfifo(tmp_path / "in/pipe.png")
    (tmp_path / "in/zero.png").symlink_to("/dev/zero")
    found = prepared(tmp_path / "in", tmp_path)
    assert found.skipped["first"] == [["pipe.png", "not an image"], ["zero.png", "not an image"]]


def npy(shape, kind="|u1", data=b"", text=None):
    header = text or repr({"descr": kind, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + data


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "shape", [(10**12, 2, 2, 3), (-1, 2, 2, 3), (10**30,), (0, 10**30, 4, 3), (2**62, 4), (1, 2**40, 1)]
)
def test_arrays_that_claim_more_than_they_hold(tmp_path, shape, packed):
    path = tmp_path / ("x.npz" if packed else "x.npy")
    path.write_bytes(npy(shape))
    if packed:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("images.npy", npy(shape))
    assert in_little_memory(lambda: open_source(path)).startswith(f"ValueError: '{path}'")


@pytest.mark.parametrize(
    "text", ["{" * 5000, "-" * 9000 + "1", "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "{}"]
)
def test_headers_that_are_none(tmp_path, text):
    (tmp_path / "x.npy").write_bytes(npy((), text=text))
    with pytest.raises(ValueError, match=r"x\.npy' is no whole, plain numpy file"):
        open_source(tmp_path / "x.npy")


def test_arrays_of_too_many_rows(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(npy((MOST_ROWS + 1, 1)))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + MOST_ROWS + 1)
    with pytest.raises(ValueError, match=f"more than {MOST_ROWS:,} rows"):
        open_source(path)


def test_a_large_array_is_read_piece_by_piece(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(npy((2000, 512, 1024, 3)))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2000 * 512 * 1024 * 3)
    assert in_little_memory(lambda: next(iter(open_source(path).parts[0].read())), 1 << 29) == "done"


def test_a_huge_value_in_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = [picture(), bytes(MOST_PICTURE + 5)]
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(arrow.table({"image": values, "label": [0, 1]}), tmp_path / "x.parquet", **options)
    assert (tmp_path / "x.parquet").stat().st_size < 1 << 20
    found = prepared(tmp_path / "x.parquet", tmp_path)
    assert found.skipped["first"] == [["x.parquet[1]", f"its file is larger than {MOST_PICTURE:,} bytes"]]


@pytest.mark.parametrize(
    "told", [b"[" * 100_000, b"[]", b'{"info": 5}', b'{"info": {"features": {"label": {"names": [5]}}}}', b"\xff"]
)
def test_class_names_in_parquet_that_are_none(tmp_path, told):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [picture()], "label": [0]}).replace_schema_metadata({b"huggingface": told})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet' names its classes wrongly"):
        open_source(tmp_path / "x.parquet")
