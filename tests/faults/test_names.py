"""Names of folders and classes that a terminal, a locale or a published model has no letters for."""

import os
import shlex
import subprocess
import sys

import pytest
from PIL import Image

import mvm
from mvm import cli
from mvm.data import open_prepared
from mvm.data.prepare import prepare

ODD = {os.fsdecode(b"a\xff"): "a\\xff", "b\x1b[2J": "b\\x1b[2J", "c\u202ed": "c\\u202ed", "\u00e9": "\u00e9"}
TINY = {"network_depth": 1, "network_heads": 2, "network_width": 16, "batch": 4, "steps": 1}


@pytest.fixture
def pictures(tmp_path):
    for name in ODD:
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for level in range(2):
            Image.new("L", (8, 8), 99 * level).save(tmp_path / "pictures" / name / f"{level}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize("escaped", [True, False])
def test_classes_of_any_folder_names_can_be_exported(pictures, tmp_path, monkeypatch, escaped):
    """`mvm export` refused them, after the training. escaped: or the folder was prepared before names were."""
    if not escaped:
        monkeypatch.setattr("mvm.data.prepare._printable", lambda name: name)
    prepare(pictures, tmp_path / "data", size=8, channels=1, workers=1, progress=False)
    assert sorted(open_prepared(tmp_path / "data").classes) == sorted(ODD.values() if escaped else ODD)
    recipe = {"data_name": "folder", "data_path": str(tmp_path / "data"), "preview_every": 0, **TINY}
    mvm.train("digits", str(tmp_path / "run"), progress=False, **recipe)
    assert cli.run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model"), "--no-grid"]) == 0
    assert all(name.isprintable() for name in mvm.load(tmp_path / "model").classes)


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}],
)
def test_a_locale_without_a_names_letters(tmp_path, locale):
    """The command ended with "'ascii' codec can't encode character" and exit code 2, its work undone."""
    out = "\u00e9 \u2713.png"
    words = [sys.executable, "-m", "mvm", "sample", "digits", "-n", "1", "--nfe", "1", "--out", out]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    done = subprocess.run(words, cwd=tmp_path, env=environment | locale, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"wrote 1 images to ")
    assert (tmp_path / out).is_file()


def test_weights_are_not_written_where_they_could_not_be_read(tmp_path, monkeypatch, capsys):
    """safetensors writes them there, and does not read them."""
    monkeypatch.chdir(tmp_path)
    out = os.fsdecode(b"r\xff")
    for words in (["train", "digits", "--train.steps", "1"], ["export", "digits"]):
        assert cli.run([*words, "--out", out]) == 2
        assert "--out r\\udcff has bytes that are no UTF-8; give another name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_to_be_typed_next_can_be_typed(tmp_path, monkeypatch, capsys):
    """Hints did not quote the names in them."""
    monkeypatch.chdir(tmp_path)
    assert cli.run(["export", "digits", "--out", "my model; $(rm x)", "--no-grid"]) == 0
    hints = capsys.readouterr().out.split("; ", 1)[1].partition("sample: ")[2]
    first, _, send = hints.partition("; send: ")
    assert shlex.split(first)[:3] == ["mvm", "sample", "my model; $(rm x)"]
    assert shlex.split(send)[:3] == ["mvm", "push", "my model; $(rm x)"]
    assert cli.run(["tune", "a b"]) == 2
    assert "mvm export 'a b' --out DIR" in capsys.readouterr().err
