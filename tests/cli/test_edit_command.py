"""mvm edit: pictures in and out, options, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import mvm
from mvm import edit, noise
from mvm.cli import run
from mvm.data import digits, open_prepared
from mvm.pictures import to_pillow

FAST = ["--nfe", "2"]


@pytest.fixture
def picture(tmp_path):
    """A digit as a PNG."""
    path = tmp_path / "photo.png"
    to_pillow(digits().images[0]).save(path)
    return str(path)


def edited(tmp_path, task, source, *tokens):
    """Return the results as uint8 (N, H, W)."""
    out = tmp_path / "out.npy"
    fast = [] if "--nfe" in tokens else FAST
    assert run(["edit", task, "digits", str(source), *fast, "--out", str(out), *tokens]) == 0
    return np.load(out)[..., 0]


def test_the_first_try_of_the_guide(picture, tmp_path, capsys):
    out = tmp_path / "out.png"
    assert run(["edit", "inpaint", "digits", picture, "--box", "2,2,6,6", *FAST, "--out", str(out)]) == 0
    assert f"wrote 1 results of 1 pictures to {out}; adams, 2 evaluations, 2 network passes" in capsys.readouterr().out
    assert Image.open(out).size == (2 * 66 + 2, 66 + 2)  # before, and after


def test_inpainting_is_that_of_the_library_and_keeps_the_rest(picture, tmp_path):
    model, images = mvm.load("digits"), digits().images[:1]
    found = edited(tmp_path, "inpaint", picture, "--box", "4,0,8,8", "--classes", "3", "--seed", "5")
    mask = torch.zeros(8, 8)
    mask[:, 4:] = 1
    x = edit.inpaint(model, model.codec.encode(images), mask, nfe=2, condition=torch.tensor([3]), seeds=[5])
    assert np.array_equal(found, model.codec.decode(x)[:, 0].numpy())
    assert np.array_equal(found[0, :, :4], images[0, 0, :, :4].numpy())
    assert not np.array_equal(found[0, :, 4:], images[0, 0, :, 4:].numpy())


def test_a_mask_in_a_file_is_the_box_it_draws(picture, tmp_path):
    drawn = np.zeros((8, 8), np.uint8)
    drawn[1:3, 4:8] = 255
    Image.fromarray(drawn).save(tmp_path / "mask.png")
    np.save(tmp_path / "mask.npy", drawn)
    wanted = edited(tmp_path, "inpaint", picture, "--box", "4,1,8,3")
    for name in ("mask.png", "mask.npy"):
        assert np.array_equal(edited(tmp_path, "inpaint", picture, "--mask", str(tmp_path / name)), wanted)


def test_every_result_has_its_own_seed_and_class(tmp_path):
    model, images = mvm.load("digits"), digits().images[[4, 2]]
    tokens = ["--index", "4,2", "-n", "2", "--classes", "1,2", "--seed", "7", "--strength", "0.6", "--rho", "0.5"]
    found = edited(tmp_path, "image-to-image", "data:digits", *tokens)
    x0 = model.codec.encode(images.repeat_interleave(2, 0))
    labels = torch.tensor([1, 2, 1, 2])
    x = edit.image_to_image(model, x0, 0.6, nfe=2, rho=0.5, condition=labels, seeds=range(7, 11))
    assert np.array_equal(found, model.codec.decode(x)[:, 0].numpy())
    assert np.array_equal(edited(tmp_path, "image-to-image", "data:digits", *tokens, "--batch", "1"), found)
    note = json.loads((tmp_path / "out.npy.json").read_text())
    assert (note["settings"]["rho"], note["draw"]["seed"]) == (0.5, 7)


def test_inversion_and_back_gives_the_picture(tmp_path):
    images = digits().images[:2, 0].numpy().astype(int)
    tokens = ["--index", "0-1", "--inversion", "--source", "3", "--classes", "3", "--strength", "0.3", "--nfe", "30"]
    assert np.abs(edited(tmp_path, "image-to-image", "data:digits", *tokens) - images).max() <= 4


def test_upscaled_pictures_have_the_given_means(picture, tmp_path):
    found = edited(tmp_path, "upscale", picture, "--resize", "box", "--nfe", "8").astype(float)
    small = np.asarray(Image.open(picture).resize((4, 4), Image.Resampling.BOX)).astype(float)
    inside = (found[0] > 0) & (found[0] < 255)  # what rounding cut has other means
    whole = inside.reshape(4, 2, 4, 2).all((1, 3))
    means = found[0].reshape(4, 2, 4, 2).mean((1, 3))
    assert whole.sum() >= 3
    assert np.abs(means - small)[whole].max() < 1


def test_outpainting_keeps_the_middle(tmp_path):
    small = digits().images[3, 0, 2:6, 2:6].numpy()
    Image.fromarray(small).save(tmp_path / "small.png")
    assert np.array_equal(edited(tmp_path, "outpaint", tmp_path / "small.png", "--margin", "2")[0, 2:6, 2:6], small)


def test_deblurring_is_that_of_the_library(picture, tmp_path):
    model = mvm.load("digits")
    found = edited(tmp_path, "deblur", picture, "--std", "0.8", "--noise", "0.1", "--particles", "3", "--classes", "0")
    y = model.codec.encode(digits().images[:1])
    options = {"noise": 0.1, "particles": 3, "nfe": 2, "condition": torch.tensor([0]), "seeds": [0]}
    x = edit.deblur(model, y, edit.gaussian_kernel(0.8), **options)
    assert np.array_equal(found, model.codec.decode(x)[:, 0].numpy())


@pytest.fixture
def photos(prepared, tiny, tmp_path):
    """A run on prepared pictures."""
    folder = tmp_path / "run"
    data = ["--data.name", "folder", "--data.path", str(prepared)]
    assert run(["train", "cifar10", *tiny, *data, "--out", str(folder)]) == 0
    return str(folder)


def test_prepared_pictures_and_folders_are_read(photos, prepared, pictures, tmp_path):
    for source, more in ((prepared, ["--index", "0,2-3"]), (pictures, ["--index", "0-2", "--resize", "centre-crop"])):
        out = tmp_path / f"{source.name}.npz"
        words = ["edit", "inpaint", photos, str(source), "--box", "0,0,32,16", *more, *FAST, "--out", str(out)]
        assert run(words) == 0
        found = np.load(out)["arr_0"]
        assert found.shape == (3, 32, 32, 3)
    kept = open_prepared(prepared).mapped().gather(torch.tensor([0, 2, 3]))[0]
    found = np.load(tmp_path / f"{prepared.name}.npz")["arr_0"]
    assert np.array_equal(found[:, 16:], kept.permute(0, 2, 3, 1).numpy()[:, 16:])


def test_signals_are_edited_as_floats(tmp_path, monkeypatch):
    """By the commands of docs/tutorials/own-network.md."""
    monkeypatch.chdir(tmp_path)
    signals = noise.normal(torch.arange(16), noise.DATA, (1, 64)).numpy()
    np.save("signals.npy", signals)
    np.save("mask.npy", np.arange(64) >= 32)
    data = ["--data.name", "folder", "--data.path", "signals", "--network.depth", "1", "--train.batch", "4"]
    assert run(["data", "prepare", "signals.npy", "--out", "signals"]) == 0
    assert run(["train", "digits", *data, "--train.steps", "2", "--preview.every", "0", "--out", "run"]) == 0
    for source in ("signals.npy", "signals"):
        words = ["edit", "inpaint", "run", source, "--mask", "mask.npy", "--index", "1,3", *FAST, "--out", "out.npy"]
        assert run(words) == 0
        found = np.load("out.npy")
        assert np.allclose(found[..., :32], signals[[1, 3], ..., :32], atol=1e-6)
        assert not np.allclose(found[..., 32:], signals[[1, 3], ..., 32:], atol=1e-2)


BOX = ("--box", "2,2,6,6")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("inpaint", "PHOTO"), "needs the part to fill: either --box LEFT,TOP,RIGHT,BOTTOM or --mask FILE"),
        (("inpaint", "PHOTO", "--box", "2,2,9,6"), "--box 2,2,9,6: LEFT,TOP,RIGHT,BOTTOM in pixels are needed, within"),
        (("inpaint", "PHOTO", "--box", "2,2"), "--box 2,2: LEFT"),
        (("inpaint", "PHOTO", "--mask", "WIDE"), "is 8x10, and the pictures are 8x8; give one of their size"),
        (("inpaint", "PHOTO", "--mask", "BLACK"), "mask marks nothing to make anew"),
        (("inpaint", "PHOTO", "--mask", "NAN"), "nan.npy holds NaN; give 1 in the part to fill, 0 elsewhere"),
        (("inpaint", "PHOTO", "--mask", "TEXT"), "cannot be read (not an image); give a black and white PNG"),
        (
            ("inpaint", "WIDE", *BOX),
            "'wide.png' is 8x10; this task takes 8x8 of this model: give such a picture, or add",
        ),
        (("inpaint", "TEXT", *BOX), "'text.png' cannot be read (not an image); give a PNG"),
        (("inpaint", "nowhere.png", *BOX), "nowhere.png"),
        (("inpaint", "data:digits", *BOX), "more than 1024 pictures; choose some, e.g. --index 0-7"),
        (("inpaint", "data:digits", *BOX, "--index", "3,x"), "--index 3,x: numbers and ranges from 0 are needed"),
        (("inpaint", "PHOTO", *BOX, "--index", "1"), "has 1 pictures from 0 on, no number 1"),
        (("inpaint", "PHOTO", *BOX, "--classes", "12"), "classes=12 out of range"),
        (
            ("inpaint", "PHOTO", *BOX, "--classes", "1,2,3", "-n", "2"),
            "--classes 1,2,3: 3 classes for 2 results; give at most 2, or a larger --num",
        ),
        (
            ("image-to-image", "PHOTO", "--inversion", "--source", "1,2", "-n", "2"),
            "--source 1,2: 2 classes for 1 pictures; give at most 1",
        ),
        (("inpaint", "PHOTO", *BOX, "--particles", "2", "--rho", "0"), "they need solver adams and a rho"),
        (("inpaint", "PHOTO", *BOX, "--share", "0.5"), "share=0.5 has no effect on edits"),
        (("inpaint", "PHOTO", *BOX, "--resize", "bend"), "resize='bend' is unknown"),
        (("inpaint", "PHOTO", *BOX, "--out", "x.gif"), "suffix '.gif' is unknown"),
        (("inpaint", "PHOTO", *BOX, "-n", "0"), "num=0 is out of range"),
        (("upscale", "PHOTO"), "is 8x8; this task takes 4x4 of this model"),
        (
            ("upscale", "PHOTO", "--factor", "3"),
            "factor=3 does not divide the 1x8x8 that this model makes; use one of: 2",
        ),
        (("outpaint", "PHOTO", "--margin", "4"), "margin=4 is out of range; of 1x8x8 it must be 1 to 3"),
        (("deblur", "PHOTO", "--std", "0"), "std=0.0 is out of range"),
        (("image-to-image", "PHOTO", "--strength", "0"), "strength=0.0 is out of range"),
        (("image-to-image", "PHOTO", "--source", "3"), "--source 3 belongs to --inversion"),
    ],
)
def test_refusals_name_option_value_and_remedy(picture, tmp_path, monkeypatch, refused, tokens, words):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (10, 8)).save("wide.png")
    Image.new("L", (8, 8)).save("black.png")
    (tmp_path / "text.png").write_text("no picture")
    np.save("nan.npy", np.full((8, 8), np.nan))
    names = {"PHOTO": picture, "WIDE": "wide.png", "BLACK": "black.png", "TEXT": "text.png", "NAN": "nan.npy"}
    task, *rest = (names.get(token, token) for token in tokens)
    assert words in refused("edit", task, "digits", *rest, *FAST)
    assert not (tmp_path / "edited.png").exists()


def test_help_says_what_seed_and_classes_are_here(capsys):
    """Not what they are in `mvm sample`, of which Drawing speaks."""
    assert run(["edit", "inpaint", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Result k of image i uses seed SEED + NUM i + k." in words
    assert "Default: the null class." in words
    assert "Default: all classes." not in words
    assert "depend on the batch size" not in words


def test_a_model_of_latents_takes_image_to_image_alone():
    from mvm.latent import Undecoded
    from mvm.tasks import ImageToImage, Upscale, check_task

    model = mvm.load("digits")
    model.codec = Undecoded((4, 4, 4), "vae")
    with pytest.raises(ValueError, match=r"works in latents.*use image-to-image"):
        check_task(Upscale(2), model)
    assert check_task(ImageToImage(), model) == (1, 8, 8)
