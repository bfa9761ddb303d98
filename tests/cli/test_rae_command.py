"""Stage 1 by the command: recipe, run, resume, and what can be done with it."""

import json
import shutil

import pytest
import torch

from mvm.data import open_prepared
from mvm.data.shards import Mapped
from mvm.latent import load_rae
from mvm.metrics.distances import frechet_distance, moments, shrunken_features
from mvm.pixels import to_uint8
from mvm.recipes import shipped

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a ViT of random weights: 4 x 4 latents at 32 px."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_channels=3, patch_size=8, image_size=32
    )
    folder = tmp_path_factory.mktemp("encoder")
    transformers.Dinov2Model(config).save_pretrained(folder)
    return str(folder)


def _restored_distance(rae, images):
    """The distance by hand: what rFID is, in pixels."""
    restored = to_uint8(rae.reconstruct(images))
    return frechet_distance(*(moments(shrunken_features(side).double()) for side in (restored, images)))


@pytest.fixture(scope="module")
def words(encoder, prepared):
    """Options that make of `imagenette-rae-s` a run of moments, on 32x32 pictures."""
    return [
        "imagenette-rae-s", "--data.name", "folder", "--data.path", str(prepared), "--held_out.count", "6",
        "--encoder.name", encoder, "--encoder.layers", "1,2,4", "--encoder.resolution", "32",
        "--decoder.size", "tiny", "--decoder.patch", "8", "--reconstruction.lpips", "0",
        "--train.batch", "4", "--train.steps", "6", "--train.warmup", "0", "--train.save_every", "3",
        "--train.log_every", "2", "--preview.every", "3", "--preview.grid", "4", "--preview.count", "6",
        "--device", "cpu",
    ]  # fmt: skip


def test_train_and_resume(words, encoder, prepared, done, refused, tmp_path):
    run = tmp_path / "run"
    assert "is at step 3 of 6; continue with: mvm train --resume" in done("train", *words, "--out", run, "--until", "3")
    assert not (run / "rae").exists()
    assert "already holds a run; give --resume" in refused("train", *words, "--out", run)
    said = done("train", *words, "--out", run, "--resume")
    assert said.splitlines()[-1].endswith(f"--codec.kind rae --codec.path {run / 'rae'}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "psnr" in line] == [3, 6]
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6]
    rae = load_rae(run / "rae", encoder)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert rae.decode(rae.encode(images)).shape == images.shape
    assert rae.statistics.count == 2 * (30 - 6)
    judge = ("eval", run / "rae", "--metrics", "fd-pixels", "--device", "cpu")
    report = tmp_path / "restored.json"
    done(*judge, "--ref", prepared, "--json", report)
    told = json.loads(report.read_text())
    assert told["images"]["kind"] == "restored"
    assert told["images"]["count"] == told["reference"]["count"] == 30
    originals, _ = Mapped(open_prepared(prepared)).gather(torch.arange(30))
    assert told["metrics"]["fd-pixels"]["value"] == pytest.approx(_restored_distance(rae, originals), rel=1e-6)
    assert "give images for it to restore: --ref IMAGES" in refused(*judge)
    (run / "rae" / "rae.json").unlink()
    (run / "rae" / "decoder.safetensors").unlink()
    (run / "rae" / "statistics.safetensors").unlink()
    done("train", *words, "--out", run, "--resume")
    assert load_rae(run / "rae", encoder).fingerprint == rae.fingerprint


def test_refusals(words, refused, tmp_path):
    out = ["--out", str(tmp_path / "run")]
    assert "held_out.count=30 leaves nothing" in refused("train", *words, *out, "--held_out.count", "30")
    assert "decoder.patch=4 makes images (3, 16, 16)" in refused("train", *words, *out, "--decoder.patch", "4")
    assert "engine.parallel='fsdp'" in refused("train", *words, *out, "--engine.parallel", "fsdp")
    assert "unknown option '--network.size'" in refused("train", *words, *out, "--network.size", "S")
    assert "'nowhere' is not there" in refused(
        "train", *words, *out, "--reconstruction.lpips", "1", "--reconstruction.lpips_weights", "nowhere"
    )
    assert not (tmp_path / "run").exists()
    assert "is of task 'decoder'" in refused("bench", words[0])


def test_recipes_show(done):
    said = done("recipes", "show", "imagenette-rae-s")
    assert said.startswith("# imagenette-rae-s: Stage 1 on Imagenette-224")
    assert "M parameters" in said
    listed = done("recipes").splitlines()
    assert {"imagenette-rae-s", "imagenet256-rae-stage1"} <= {line.split()[0] for line in listed}
    width = max(map(len, shipped()))
    assert all(line[width] == " " and line[width + 1] != " " for line in listed)


def test_both_stages_to_a_figure(words, prepared, done, refused, tmp_path):
    """Prepared images -> stage 1 with statistics -> cached latents -> stage 2 -> samples -> pictures -> a distance."""
    first, second = tmp_path / "rae-run", tmp_path / "ddt-run"
    done("train", *words, "--out", first)
    latent = [
        "imagenette-ddt-s", "--data.name", "folder", "--data.path", str(prepared), "--codec.path", str(first / "rae"),
        "--codec.channels", "16", "--codec.side", "4", "--codec.latents", str(tmp_path / "latents"),
        "--path.law.shift_dimension", "256", "--network.size", "tiny", "--network.inner_block", "1",
        "--network.head_width", "32", "--network.head_heads", "2", "--train.batch", "4", "--train.steps", "4",
        "--train.warmup", "0", "--train.save_every", "2", "--preview.every", "2", "--preview.grid", "4",
        "--preview.count", "6", "--sample.nfe", "3", "--device", "cpu",
    ]  # fmt: skip
    done("train", *latent, "--out", second)
    assert (tmp_path / "latents" / "index.json").is_file()
    done("sample", second, "--num", "4", "--out", tmp_path / "grid.png", "--device", "cpu")
    assert "fd-pixels" in done("eval", second, "--num", "8", "--metrics", "fd-pixels", "--device", "cpu")
    assert "fd-pixels" in done(
        "eval", second, "-n", "8", "--ref", prepared, "--metrics", "fd-pixels", "--device", "cpu"
    )
    other = [word if word != "1,2,4" else "last" for word in words]
    done("train", *other, "--out", tmp_path / "other-run")
    shutil.rmtree(first / "rae")
    (tmp_path / "other-run" / "rae").rename(first / "rae")
    done("sample", second, "--num", "4", "--out", tmp_path / "x.png", "--device", "cpu")  # the run holds its own
    assert (tmp_path / "x.png").read_bytes() == (tmp_path / "grid.png").read_bytes()
    (second / "codec").rename(tmp_path / "codec")  # as a run of before
    said = refused("sample", second, "--num", "4", "--out", tmp_path / "x.png", "--device", "cpu")
    assert "was trained in latents of fingerprint" in said
    assert "restore the autoencoder" in said
    assert "holds latents with other values of codec" in refused("train", *latent, "--out", second, "--resume")
    elsewhere = ["--codec.latents", str(tmp_path / "others")]
    assert "was trained in latents" in refused("train", *latent, *elsewhere, "--out", second, "--resume")
