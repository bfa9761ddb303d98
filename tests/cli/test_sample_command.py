"""mvm sample: files, options, and what it tells of its cost."""

import numpy as np
import pytest
from PIL import Image

from mvm.cli import run


@pytest.mark.parametrize("name", ["x.png", "x.npz", "x.npy", "x.zip", "folder"])
def test_sample_writes_what_the_suffix_says(trained, tmp_path, name, capsys):
    out = tmp_path / name
    assert run(["sample", str(trained), "--num", "4", "--nfe", "3", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"wrote 4 images to {out}; adams, 3 evaluations, 3 network passes each" in said
    assert out.exists()
    if name == "x.png":
        assert Image.open(out).size == (2 * 66 + 2, 2 * 66 + 2)


def sampled(out, *tokens):
    assert run(["sample", "digits", "--nfe", "4", "--out", str(out), *tokens]) == 0
    found = np.load(out)
    return found["arr_0"].astype(int), found["arr_1"].tolist()


def test_sample_options(tmp_path):
    base, labels = sampled(tmp_path / "a.npz", "--num", "6")
    assert labels == [0, 1, 2, 3, 4, 5]
    assert base.shape == (6, 8, 8, 1)
    for tokens in (["--batch", "4"], ["--batch", "1"]):
        again, _ = sampled(tmp_path / "b.npz", "--num", "6", *tokens)
        assert np.abs(again - base).max() <= 1
    more, _ = sampled(tmp_path / "c.npz", "--num", "8")
    assert np.abs(more[:6] - base).max() <= 1
    later, labels = sampled(tmp_path / "d.npz", "--num", "2", "--seed", "2", "--classes", "2,3")
    assert labels == [2, 3]
    assert np.abs(later - base[2:4]).max() <= 1
    for tokens in (["--rho", "1"], ["--cfg", "3"], ["--solver", "sa"], ["--seed", "9"], ["--classes", "7"]):
        changed, _ = sampled(tmp_path / "e.npz", "--num", "6", *tokens)
        assert np.abs(changed - base).max() > 8, tokens


def test_cost_is_told(tmp_path, capsys):
    out = tmp_path / "x.npy"
    tokens = [
        "sample",
        "digits",
        "--num",
        "1",
        "--nfe",
        "13",
        "--cfg",
        "1.5",
        "--interval",
        "0.6,0.8",
        "--out",
        str(out),
    ]
    assert run(tokens) == 0
    # r = 3.5: t_i = (1 - i/13)^3.5 lies in [0.0563, 0.6090] for i = 2..7
    inside = sum(0.0563 <= (1 - i / 13) ** 3.5 <= 0.6090 for i in range(13))
    assert f"adams, 13 evaluations, {13 + inside} network passes each" in capsys.readouterr().out


def test_recipe_settings_are_the_default(tmp_path, capsys):
    assert run(["sample", "digits", "--num", "1", "--out", str(tmp_path / "x.npy")]) == 0
    assert "adams, 26 evaluations, 26 network passes" in capsys.readouterr().out
