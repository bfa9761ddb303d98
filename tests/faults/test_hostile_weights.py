"""Weights, features and notes made to harm; names that a terminal would obey."""

import json
import os
import struct
import zipfile

import numpy as np
import pytest
import torch
from fuzz_isolation import in_little_memory
from PIL import Image

from mvm import untrusted
from mvm.cli import run
from mvm.data.prepare import prepare
from mvm.metrics.weights import read_tensors
from mvm.network import dinov3
from mvm.untrusted import cut, printable

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def by_eval(path):
    return read_tensors([path], ValueError, lambda name: True)


READERS = pytest.mark.parametrize("read", [dinov3.read_weights, by_eval])


@READERS
def test_weights_beyond_the_limit(tmp_path, monkeypatch, read):
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.ones(4)}, path)
    assert read(path)["a"].tolist() == [1, 1, 1, 1]
    monkeypatch.setattr(untrusted, "MOST_WEIGHTS", path.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"weights\.pth' is (larger than|no whole file)"):
        read(path)


@READERS
def test_packed_weights_are_refused_before_memory_is_taken(tmp_path, read):
    """torch packs nothing, but would unpack: a megabyte could become a gigabyte."""
    plain, packed = tmp_path / "plain.pth", tmp_path / "packed.pth"
    torch.save({"a": torch.zeros(1 << 20)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for name in source.namelist():
            to.writestr(name, source.read(name))
    plain.unlink()
    with pytest.raises(ValueError, match=r"packed\.pth' is no whole"):
        read(packed)


@READERS
def test_weights_on_several_disks(tmp_path, read):
    """Found by the fuzzer: asking whether this is a zip raises."""
    path, end = tmp_path / "weights.pth", struct.pack("<4s4H2LH", b"PK\5\6", *[0] * 7)
    path.write_bytes(bytes(100) + struct.pack("<4sLQL", b"PK\6\7", 1, 0, 2) + end)
    with pytest.raises(ValueError, match=r"weights\.pth' is no whole"):
        read(path)


@READERS
def test_weights_that_tell_of_terabytes(tmp_path, read):
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.ones(1).expand(1 << 40)}, path)

    def refused():
        with pytest.raises(ValueError, match=r"weights\.pth' (is no list of|holds something other than) named"):
            read(path)

    in_little_memory(refused)


class Opens:
    """What a pickle does when it is believed."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@READERS
def test_a_pickle_in_the_clothes_of_weights(tmp_path, read):
    path = tmp_path / "weights.pth"
    torch.save({"a": Opens(str(tmp_path / "made"))}, path)
    with pytest.raises(ValueError, match=r"weights\.pth' is no whole"):
        read(path)
    assert not (tmp_path / "made").exists()


def test_a_pipe_is_no_weights(tmp_path):
    os.mkfifo(tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"weights\.pth' is (not there|no plain file)"):
        dinov3.read_weights(tmp_path / "weights.pth")


# ---- terminals


def test_what_a_terminal_would_obey_is_shown():
    assert printable("plain, ä, 数字, 🙂") == "plain, ä, 数字, 🙂"
    assert printable(f"a{ESCAPE}b\nc\rd\x9b") == r"a\x1b]0;owned\x07\x1b[2Jb\nc\rd\x9b"
    assert printable("evil\u202egpj.exe") == r"evil\u202egpj.exe"
    assert printable("\udcff") == r"\udcff"  # a name that is no UTF-8; stdout could not even print it
    assert cut(ESCAPE * 1000, 4) == r"\x1b]0;... (14,000 letters)"


@pytest.fixture
def prepared(tmp_path):
    """Prepared data whose classes were named by an enemy."""
    images = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "source.npz", images=images, labels=np.arange(4) % 2)
    prepare(tmp_path / "source.npz", tmp_path / "out", size=8, workers=1, progress=False)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    index["classes"] = [f"cat{ESCAPE}", "dog\nchecksums  good"]
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    return tmp_path / "out"


def test_data_info_shows_names_harmlessly(prepared, capsys):
    assert run(["data", "info", str(prepared)]) == 0
    said = capsys.readouterr().out
    assert r"cat\x1b]0;owned\x07\x1b[2J" in said
    assert r"dog\nchecksums  good" in said
    assert said.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", [f"{ESCAPE}.png", "a\u202eb.png", os.fsdecode(b"\xff.png")])
def test_names_of_skipped_pictures_are_shown_harmlessly(tmp_path, capsys, name):
    folder = tmp_path / "source" / "kind"
    folder.mkdir(parents=True)
    try:
        (folder / name).write_bytes(b"no picture")
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "good.png")
    out = tmp_path / "out"
    command = ["data", "prepare", str(tmp_path / "source"), "--out", str(out), "--size", "8", "--workers", "1"]
    assert run([*command, "--strict"]) == 2
    assert run(command) == 0
    assert run(["data", "info", str(out)]) == 0
    said = capsys.readouterr()
    assert printable(name) in said.out
    for text in said:
        assert not {"\x1b", "\x07", "\u202e", "\udcff"} & set(text)


def test_errors_show_names_harmlessly(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("dataset.json", json.dumps({"labels": [[f"x{ESCAPE}.png", "one"]]}))
        archive.writestr(f"x{ESCAPE}.png", b"")
    assert run(["data", "prepare", str(tmp_path / "a.zip"), "--out", str(tmp_path / "out"), "--size", "8"]) == 2
    assert run(["data", "info", f"{tmp_path}/none{ESCAPE}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\\x1b") >= 4
    assert said.replace("\n", "").isprintable()
