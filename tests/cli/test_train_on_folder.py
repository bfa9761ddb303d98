"""mvm train on prepared images: a known set by its folder, and any folder with what it holds."""

import json
import shutil

import numpy as np
import pytest

import mvm
from mvm import checkpoint
from mvm.cli import run


@pytest.fixture(scope="module")
def cifar(prepared, tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("cifar") / "run"
    assert run(["train", "cifar10", "--data.path", str(prepared), "--out", str(out), *tiny]) == 0
    return out


def weights(run, name="ema"):
    return checkpoint.load(checkpoint.latest(run), name)


def test_a_known_set_from_its_folder(cifar):
    model = mvm.load(cifar)
    assert checkpoint.read_manifest(checkpoint.latest(cifar))["step"] == 2
    assert model.sample_shape == (3, 32, 32)
    assert model.classes[:2] == ("airplane", "automobile")
    assert model.recipe.data.mirror


def test_default_folder_is_that_of_the_name(cifar, prepared, tiny, tmp_path, monkeypatch, done):
    """data/cifar10, as the recipe's page says; where images lie changes nothing of a run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(prepared, tmp_path / "data" / "cifar10")
    done("train", "cifar10", "--out", "run", *tiny)
    ours, theirs = weights(tmp_path / "run"), weights(cifar)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.parametrize("resident", ["device", "host"])
def test_where_images_live_changes_nothing(resident, cifar, prepared, tiny, tmp_path, done):
    out = tmp_path / "run"
    done("train", "cifar10", "--data.path", prepared, "--out", out, *tiny, "--engine.resident", resident)
    ours, theirs = weights(out), weights(cifar)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_sampling_needs_no_data(cifar, prepared, tmp_path, done, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(cifar, copy)
    stored = json.loads((copy / "recipe.json").read_text())
    stored["data"]["path"] = "gone"
    (copy / "recipe.json").write_text(json.dumps(stored))
    done("sample", copy, "--num", "3", "--nfe", "2", "--classes", "9,1", "--out", "x.npz")
    found = np.load(tmp_path / "x.npz")
    assert found["arr_0"].shape == (3, 32, 32, 3)
    assert found["arr_1"].tolist() == [9, 1, 9]


def test_a_known_set_that_is_not_prepared(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    said = refused("train", "cifar10")
    assert "'data/cifar10' holds no prepared data" in said
    assert "mvm data prepare SOURCE --out data/cifar10" in said
    assert not list(tmp_path.iterdir())  # nothing is left: the same command works once the data are there


def test_a_folder_of_another_shape_is_named(pictures, tmp_path, tiny, done, refused):
    other = tmp_path / "other"
    done("data", "prepare", pictures, "--out", other, "--size", "16", "--workers", "1")
    said = refused("train", "cifar10", "--data.path", other, "--out", tmp_path / "run", *tiny)
    assert f"data.path={other} holds images (3, 16, 16) of 10 classes" in said
    assert "data.name='cifar10' needs (3, 32, 32) of 10" in said


def test_a_folder_of_other_classes_is_named(prepared, tmp_path, tiny, refused):
    said = refused("train", "imagenet32-dit-b", "--data.path", prepared, "--out", tmp_path / "run", *tiny)
    assert "of 10 classes; data.name='imagenet32' needs (3, 32, 32) of 1000" in said


def test_any_folder_fills_in_what_it_holds(pictures, tmp_path, tiny, done):
    data, out = tmp_path / "grey", tmp_path / "run"
    done("data", "prepare", pictures, "--out", data, "--size", "16", "--channels", "1", "--workers", "1")
    tokens = ["train", "digits", "--data.name", "folder", "--data.path", data, "--out", out, *tiny]
    done(*tokens)
    stored = json.loads((out / "recipe.json").read_text())["data"]
    assert stored == {
        "name": "folder",
        "path": str(data),
        "mirror": False,
        "augment": 0.0,
        "channels": 1,
        "size": 16,
        "space": [],
        "values": "uint8",
        "classes": 10,
        "names": [f"kind-{number}" for number in range(10)],
    }
    model = mvm.load(out)
    assert (model.sample_shape, model.num_classes) == ((1, 16, 16), 10)
    assert model.classes[3] == "kind-3"
    done("sample", out, "--num", "2", "--nfe", "2", "--out", tmp_path / "x.npy")
    assert np.load(tmp_path / "x.npy").shape == (2, 16, 16, 1)
    done(*tokens, "--resume")  # what was filled in is no change


def test_a_folder_that_is_not_prepared(tmp_path, refused, tiny):
    said = refused("train", "digits", "--data.name", "folder", "--data.path", tmp_path, *tiny)
    assert f"'{tmp_path}' holds no prepared data" in said
    assert list(tmp_path.iterdir()) == []


def test_previews_look_at_the_run(prepared, tiny, tmp_path, done):
    """keep_best, as the recipe has it: a grid and a figure after each step, and the best checkpoint is loaded."""
    out = tmp_path / "run"
    looks = ["--preview.every", "1", "--preview.grid", "4", "--preview.count", "6", "--sample.nfe", "2"]
    kept = ["--train.save_every", "1", "--train.keep_best", "true"]
    done("train", "cifar10", "--data.path", prepared, "--out", out, *tiny, *looks, *kept)
    assert sorted(path.name for path in (out / "samples").iterdir()) == ["step-00000001.png", "step-00000002.png"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figures = {line["step"]: line["fd_pixels"] for line in lines if "fd_pixels" in line}
    assert figures.keys() == {1, 2}
    best = min(figures, key=figures.__getitem__)
    found = mvm.model.load(out, which="best").network.head.linear.weight
    assert (found == checkpoint.load(checkpoint.step_folder(out, best), "ema")["head.linear.weight"]).all()
