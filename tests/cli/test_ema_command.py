"""mvm ema: an average of another width, chosen after training."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

import mvm
from mvm import checkpoint
from mvm.optim import power_ema


def head(run, name="ema"):
    return checkpoint.load(checkpoint.latest(run), name)["head.linear.weight"].float()


def test_snapshots_are_kept(averaged):
    folders = sorted((averaged / "snapshots").iterdir())
    assert [checkpoint.read_manifest(folder)["step"] for folder in folders] == [2, 4, 6, 8, 10]
    for folder in folders:
        assert sorted(path.stem for path in folder.glob("*.safetensors")) == ["power-0.05", "power-0.1"]
    last = checkpoint.load(folders[-1], "power-0.1")["head.linear.weight"]
    assert last.dtype == torch.float16
    assert torch.equal(last, head(averaged, "power-0.1").half())


@pytest.mark.parametrize("width", ["0.05", "0.1"])
def test_a_width_that_was_kept_comes_back(width, averaged, tmp_path, done):
    said = done("ema", averaged, "--width", width, "--out", tmp_path / "model")
    assert f"wrote {tmp_path / 'model'}: power-function average of width {width}" in said
    assert torch.allclose(head(tmp_path / "model"), head(averaged, f"power-{width}"), atol=1e-4)


def test_another_width_is_put_together(averaged, tmp_path, done):
    """The same sum by hand: coefficients of the snapshots times the snapshots."""
    out = tmp_path / "model"
    said = done("ema", averaged, "--width", "0.07", "--out", out)
    kept = [
        (power_ema.Snapshot(step, power_ema.exponent(width)), averaged / "snapshots" / f"step-{step:08d}", width)
        for step in (2, 4, 6, 8, 10)
        for width in (0.05, 0.1)
    ]
    target = power_ema.Snapshot(10, power_ema.exponent(0.07))
    shares, error = power_ema.fit([snapshot for snapshot, _, _ in kept], target)
    parts = [checkpoint.load(folder, f"power-{width:g}")["head.linear.weight"].double() for _, folder, width in kept]
    want = sum(share * part for share, part in zip(shares.tolist(), parts, strict=True))
    assert torch.allclose(head(out).double(), want, atol=2e-4)
    assert min(float((head(out) - head(averaged, f"power-{w}")).abs().max()) for w in ("0.05", "0.1")) > 4e-4
    assert f"its profile met within {100 * error:.2g} %" in said
    assert checkpoint.read_manifest(checkpoint.latest(out))["profile_error"] == pytest.approx(error)


def test_what_it_writes_is_a_model_that_samples(averaged, tmp_path, done):
    out = tmp_path / "model"
    done("ema", averaged, "--width", "0.07", "--out", out)
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == [
        "ema.safetensors",
        "manifest.json",
        "recipe.json",
    ]
    made = {}
    for run in (out, averaged):
        done("sample", run, "--num", "2", "--nfe", "3", "--out", tmp_path / "x.npy")
        made[run] = np.load(tmp_path / "x.npy")
    assert made[out].shape == (2, 8, 8, 1)
    assert not np.array_equal(made[out], made[averaged])  # these weights, not the run's
    assert mvm.load(out).recipe == mvm.load(averaged).recipe


def test_as_if_training_had_ended_earlier(averaged, tmp_path, done):
    done("ema", averaged, "--width", "0.1", "--step", "6", "--out", tmp_path / "model")
    assert checkpoint.latest(tmp_path / "model").name == "step-00000006"
    then = checkpoint.load(averaged / "snapshots" / "step-00000006", "power-0.1")["head.linear.weight"].float()
    assert torch.allclose(head(tmp_path / "model"), then, atol=1e-4)
    assert not torch.allclose(then, head(averaged, "power-0.1"), atol=1e-3)


def test_a_run_without_snapshots_says_how_to_keep_them(trained, tmp_path, refused):
    said = refused("ema", trained, "--width", "0.1", "--out", tmp_path / "model")
    assert "no snapshots up to step 10" in said
    assert "--train.power 0.05,0.1 --train.snapshot_every N" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--width", "0.5"], "0.5 is out of range"),
        (["--width", "0"], "0.0 is out of range"),
        (["--width", "wide"], "--width"),
        (["--width", "0.1", "--step", "1"], "no snapshots up to step 1"),
        (["--width", "0.1", "--step", "1.5"], "'1.5' is not a whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(tokens, words, averaged, tmp_path, refused):
    assert words in refused("ema", averaged, *tokens, "--out", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_replaced_by_its_average(averaged, trained, tmp_path, refused):
    """Neither the run itself, whose checkpoint would lose optimizer and weights, nor another."""
    for run in (averaged, trained):
        copy = tmp_path / run.name
        shutil.copytree(run, copy)
        before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        source = copy if run == averaged else averaged
        assert f"--out {copy} already holds a run" in refused("ema", source, "--width", "0.07", "--out", copy)
        assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_damaged_snapshot_is_named(averaged, tmp_path, refused):
    copy = tmp_path / "copy"
    shutil.copytree(averaged, copy)
    path = copy / "snapshots" / "step-00000004" / "power-0.1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in refused("ema", copy, "--width", "0.07", "--out", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_recipe_of_the_model_is_the_runs(averaged, tmp_path, done):
    done("ema", averaged, "--width", "0.07", "--out", tmp_path / "model")
    ours, theirs = (json.loads((run / "recipe.json").read_text()) for run in (tmp_path / "model", averaged))
    assert ours == theirs
    assert re.fullmatch(
        r"[0-9a-f]{64}", checkpoint.read_manifest(checkpoint.latest(tmp_path / "model"))["sha256"]["ema.safetensors"]
    )


def test_a_width_that_the_snapshots_cannot_give_is_refused(averaged, tmp_path, refused):
    said = refused("ema", averaged, "--width", "0.01", "--out", tmp_path / "model")
    assert re.search(r"--width 0\.01 at step 10: the stored averages miss its profile by \d+ %", said)
    assert not (tmp_path / "model").exists()
