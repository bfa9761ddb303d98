"""mvm sample: files, options, going on after a stop, and what it tells of its cost."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mvm.cli import run
from mvm.generate import Sampler
from mvm.network import DiT
from mvm.solver import adams


@pytest.mark.parametrize("name", ["x.png", "x.npz", "x.npy", "x.zip", "x.parquet", "folder"])
def test_sample_writes_what_the_suffix_says(trained, tmp_path, name, capsys):
    out = tmp_path / name
    assert run(["sample", str(trained), "--num", "4", "--nfe", "3", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"wrote 4 images to {out}; adams, 3 evaluations, 3 network passes each" in said
    note = [] if name == "x.png" else [f"{name}.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, *note]
    if name == "x.png":
        assert Image.open(out).size == (2 * 66 + 2, 2 * 84)  # two columns, a line of text below each image


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
    times = adams().for_size(64).times(13)  # of samples of 64 values
    inside = sum(0.0563 <= t <= 0.6090 for t in times)
    assert inside == 4
    assert f"adams, 13 evaluations, {13 + inside} network passes each" in capsys.readouterr().out


def test_recipe_settings_are_the_default(tmp_path, capsys):
    assert run(["sample", "digits", "--num", "1", "--out", str(tmp_path / "x.npy")]) == 0
    assert "adams, 26 evaluations, 26 network passes" in capsys.readouterr().out


def test_random_labels_and_precision(tmp_path):
    base, labels = sampled(tmp_path / "a.npz", "-n", "20", "--labels", "random", "--classes", "4,7")
    assert set(labels) == {4, 7}
    assert labels != [4, 7] * 10
    half, again = sampled(
        tmp_path / "b.npz", "-n", "20", "--labels", "random", "--classes", "4,7", "--precision", "bf16"
    )
    assert again == labels
    assert 0 < np.abs(half - base).max() < 128
    assert json.loads((tmp_path / "b.npz.json").read_text())["precision"] == "bf16"


def test_the_network_is_compiled(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda module, **how: asked.append(isinstance(module, DiT)))
    sampled(tmp_path / "a.npz", "--num", "2", "--compile")
    assert asked == [True]
    assert json.loads((tmp_path / "a.npz.json").read_text())["compiled"] is True


@pytest.mark.parametrize(("tokens", "kernels"), [([], True), (["--no-kernels"], False)])
def test_kernels_by_hand_can_be_left_out(tmp_path, monkeypatch, tokens, kernels):
    asked = []
    monkeypatch.setattr("mvm.generate.compile_network", lambda model, kernels: asked.append(kernels))
    sampled(tmp_path / "a.npz", "--num", "2", "--compile", *tokens)
    assert asked == [kernels]


def test_the_same_command_goes_on_after_a_stop(tmp_path, monkeypatch, capsys):
    tokens = ["--num", "10", "--batch", "4"]
    sampled(tmp_path / "whole" / "x.npz", *tokens)
    calls, real = [], Sampler.launch

    def stop(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Sampler, "launch", stop)
    out = tmp_path / "stopped" / "x.npz"
    assert run(["sample", "digits", "--nfe", "4", "--out", str(out), *tokens]) == 130
    assert "mvm: stopped; the same command continues" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == [".x.npz.parts"]
    assert run(["sample", "digits", "--nfe", "5", "--out", str(out), *tokens]) == 2
    assert "other values of settings.nfe (4, now 5)" in capsys.readouterr().err
    sampled(out, *tokens)
    assert "mvm: 4 of 10 images are there already" in capsys.readouterr().err
    assert len(calls) == 4
    assert out.read_bytes() == (tmp_path / "whole" / "x.npz").read_bytes()
    assert sorted(path.name for path in out.parent.iterdir()) == ["x.npz", "x.npz.json"]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--out", "x.png", "--num", "1025"], "out=x.png is one grid, of 1024 images at most, not 1025; use .npz"),
        (["--labels", "all"], "labels='all' is unknown; allowed: balanced, random"),
        (["--precision", "fp64"], "precision='fp64' is unknown"),
        (["--checkpoint", "7"], "has that of step 1500 alone"),
    ],
)
def test_misuse_is_told_before_the_work(refused, tmp_path, monkeypatch, tokens, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused("sample", "digits", *tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_list_goes_on_after_a_comma(tmp_path, done):
    done("sample", "digits", "--classes", "3,", "5", "--num", "4", "--nfe", "1", "--out", tmp_path / "x.npz")
    assert np.load(tmp_path / "x.npz")["arr_1"].tolist() == [3, 5, 3, 5]


def test_an_apple_gpu_is_refused_in_one_sentence(refused):
    said = refused("sample", "digits", "--device", "mps")
    assert said == "mvm: device='mps': times and noise are computed in float64, which Apple's GPUs lack; use cpu"


def test_too_much_noise_is_warned_of_in_one_line(tmp_path):
    words = ["sample", "digits", "--rho", "3", "--nfe", "5", "--num", "1", "--out", str(tmp_path / "x.npz")]
    done = subprocess.run([sys.executable, "-m", "mvm", *words], capture_output=True, text=True, check=True)
    warned = [line for line in done.stderr.replace("\r", "\n").splitlines() if "rho=3" in line]
    assert [line.partition("; use nfe 90")[0] for line in warned] == [
        "mvm: warning: rho=3 with nfe=5: so much noise in so few evaluations inflates the spread of samples"
    ]
    assert "warn_of_noise" not in done.stderr


def test_classes_of_imagenet_are_asked_for_by_name(small, done, refused, tmp_path):
    for number, folder in enumerate(("n02099601", "n01440764")):
        (tmp_path / "pictures" / folder).mkdir(parents=True)
        for one in range(4):
            Image.new("RGB", (8, 8), (50 * number, 40 * one, 9)).save(tmp_path / "pictures" / folder / f"{one}.png")
    done("data", "prepare", tmp_path / "pictures", "--out", tmp_path / "data", "--size", "8", "--workers", "1")
    data = ["--data.name", "folder", "--data.path", str(tmp_path / "data")]
    done("train", "digits", *data, *small, "--train.steps", "1", "--preview.every", "0", "--out", tmp_path / "run")
    for name, asked in {"word": "golden retriever", "number": "1"}.items():
        done("sample", tmp_path / "run", "-n", "2", "--nfe", "2", "--classes", asked, "--out", tmp_path / f"{name}.npz")
    one, other = (np.load(tmp_path / f"{name}.npz") for name in ("word", "number"))
    assert one["arr_1"].tolist() == [1, 1]
    assert np.array_equal(one["arr_0"], other["arr_0"])
    said = refused("sample", tmp_path / "run", "--labels", "golden retriever", "--out", tmp_path / "x.png")
    assert "labels='golden retriever' is unknown; allowed: balanced, random; names of classes go to classes" in said
