"""A text-conditioned run through the normal loop: captions of digits, padded embeddings of their words."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvm.cli import run as main
from mvm.data import digits
from mvm.data.prepare import prepare
from mvm.evaluation import images
from mvm.evaluation.images import of_model
from mvm.generate import Draw, Sampler
from mvm.model import load
from mvm.recipes import load_recipe, override
from mvm.samples import checksum, read_condition
from mvm.training.loop import train

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ("the", "digit", *NAMES)
LENGTH, WIDTH = 4, 16
OPTIONS = {
    "data.name": "folder",
    "objective.label_drop": "0.2",
    "network.depth": "2",
    "network.width": "48",
    "network.heads": "3",
    "network.patch": "4",
    "train.steps": "200",
    "train.batch": "96",
    "train.lr": "8e-3",
    "train.warmup": "20",
    "train.ema": "0.98",
    "preview.every": "100",
    "preview.grid": "10",
    "preview.count": "10",
    "sample.nfe": "8",
}


def embedded(texts):
    """Return a fixed random vector for each word, and zeros as padding."""
    vectors = torch.randn(len(WORDS), WIDTH, generator=torch.Generator().manual_seed(0))
    tokens, mask = torch.zeros(len(texts), LENGTH, WIDTH), torch.zeros(len(texts), LENGTH, dtype=torch.bool)
    for row, text in enumerate(texts):
        for place, word in enumerate(text.split()):
            tokens[row, place], mask[row, place] = vectors[WORDS.index(word)], True
    return {"tokens": tokens, "mask": mask}


def captions(labels):
    """Return captions of two lengths, by turns."""
    return [f"the digit {NAMES[n]}" if i % 2 else NAMES[n] for i, n in enumerate(labels.tolist())]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained as a user does it: from a prepared folder, whose condition the recipe takes."""
    folder, data = tmp_path_factory.mktemp("text"), digits("train")
    text = {name: value.numpy() for name, value in embedded(captions(data.labels)).items()}
    np.savez(folder / "set.npz", images=data.images.permute(0, 2, 3, 1).numpy(), **text)
    how = {"size": 8, "channels": 1, "workers": 1, "progress": False}
    prepare(folder / "set.npz", folder / "data", condition="tokens:tokens,mask", **how)
    recipe = override(load_recipe("digits"), {**OPTIONS, "data.path": str(folder / "data")})
    train(recipe, folder / "run", progress=False)
    return folder / "run"


def score(images, labels):
    """Return the share of images that are nearest to the mean of the held-out digits they are asked to be."""
    real = digits("held-out")
    means = torch.stack([real.images[real.labels == n].float().mean(0) for n in range(10)])
    distances = (images.float()[:, None] - means).square().flatten(2).sum(2)
    return float((distances.argmin(1) == labels).float().mean())


def test_samples_show_what_their_captions_say(run):
    """Well above one in ten, more so guided, and by chance without a caption."""
    model, labels = load(run), torch.arange(100) % 10
    text = embedded(captions(labels))
    plain = model.generate(100, condition=text, progress=False)
    guided = model.generate(100, condition=text, cfg=2.0, progress=False)
    null = model.generate(100, progress=False)
    assert score(plain.images, labels) > 0.6
    assert score(guided.images, labels) > max(0.9, score(plain.images, labels) + 0.05)
    assert score(null.images, labels) < 0.25
    assert torch.equal(plain.condition["mask"], text["mask"])
    assert (guided.passes, plain.passes, null.condition) == (16, 8, None)


def test_samples_do_not_depend_on_what_is_sampled_beside_them(run):
    model, labels = load(run), torch.arange(12) % 10
    text = embedded(captions(labels))
    together = model.generate(12, condition=text, cfg=1.5, progress=False)
    apart = model.generate(12, condition=text, cfg=1.5, batch=5, progress=False)
    assert int((together.images.int() - apart.images.int()).abs().max()) <= 1
    first = {name: value[:1] for name, value in text.items()}  # one row, for all
    one = model.generate(2, condition=first, cfg=1.5, progress=False)
    assert int((one.images[0].int() - together.images[0].int()).abs().max()) <= 1
    assert torch.equal(one.condition["tokens"][1], text["tokens"][0])
    assert torch.equal(one.labels, torch.zeros(2, dtype=torch.int64))


def test_previews_show_captions_of_the_data(run):
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step-00000100.png", "step-00000200.png"]


def test_captions_go_through_the_text_encoder(run, monkeypatch):
    asked = []

    class TextEncoder:
        def __init__(self, folder):
            asked.append(folder)

        def embed(self, texts, length):
            asked.append((texts, length))
            return embedded(texts)

    model = load(run)
    with pytest.raises(ValueError, match=r"captions need a text encoder, and condition\.encoder is empty"):
        model.generate(2, captions=["three"], progress=False)
    monkeypatch.setitem(sys.modules, "mvm.data.text", SimpleNamespace(TextEncoder=TextEncoder))
    config = replace(model.recipe.condition, encoder="some/folder")
    model.recipe = replace(model.recipe, condition=config)
    with pytest.raises(ValueError, match=r"condition\.encoder='some/folder', which lies outside"):
        model.generate(1, captions=["three"], progress=False)
    model.text_encoder = "some/folder"  # as mvm.load(run, allow_download=True) sets it
    made = model.generate(5, captions=["three", "the digit one"], cfg=2.0, progress=False)
    assert asked == ["some/folder", (["three", "the digit one"], LENGTH)]
    assert made.labels.tolist() == [0, 1, 0, 1, 0]
    assert made.names == ("three", "the digit one")
    wanted = embedded(["three", "the digit one", "three", "the digit one", "three"])
    assert torch.equal(made.images, model.generate(5, condition=wanted, cfg=2.0, progress=False).images)
    model.generate(1, captions=["three"], encoder="elsewhere", progress=False)
    assert asked[2] == "elsewhere"
    made.save(run / "captions.png")


def test_the_command_goes_round_the_rows_of_a_file(run, tmp_path):
    text = embedded(["three", "the digit one"])
    np.savez(tmp_path / "text.npz", **{name: value.numpy() for name, value in text.items()})
    options = ["-n", "5", "--cfg", "2", "--batch", "2", "--device", "cpu"]
    out = ["--out", str(tmp_path / "x.npz")]
    assert main(["sample", str(run), "--condition", str(tmp_path / "text.npz"), *options, *out]) == 0
    with np.load(tmp_path / "x.npz") as found:
        images, labels = found["arr_0"], found["arr_1"]
    # by the names that prepared them, among others
    np.savez(tmp_path / "all.npz", c=text["tokens"], m=text["mask"], images=np.zeros((9, 2)), names=["a"])
    named = ["sample", str(run), "--condition", f"{tmp_path / 'all.npz'}:c,m", *options]
    assert main([*named, "--out", str(tmp_path / "y.npz")]) == 0
    with np.load(tmp_path / "y.npz") as found:
        assert np.array_equal(found["arr_0"], images)
    with pytest.raises(ValueError, match=r"it has the arrays c, m, images, names, no nope"):
        read_condition(Path(f"{tmp_path / 'all.npz'}:nope"))
    assert labels.tolist() == [0, 1, 0, 1, 0]
    wanted = {name: value[[0, 1, 0, 1, 0]] for name, value in text.items()}
    made = load(run).generate(5, condition=wanted, cfg=2.0, batch=2, progress=False)
    assert np.array_equal(images, made.images.permute(0, 2, 3, 1).numpy())
    note = json.loads((tmp_path / "x.npz.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", note["condition"])
    assert main(["sample", str(run), *options, "--classes", "3", *out]) == 2


def test_images_are_judged_for_captions_of_the_training_set(run, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "CONDITIONS", 3)
    made = of_model(Sampler(load(run)), Draw(5, batch=2))
    found = torch.cat([part for _, part in made.read(2)])
    texts = captions(digits("train").labels)
    data = embedded([texts[0], texts[699], texts[1399]])  # as far apart as may be
    wanted = load(run).generate(5, condition={n: v[[0, 1, 2, 0, 1]] for n, v in data.items()}, batch=2, progress=False)
    assert made.facts["conditions"] == checksum(data)
    assert torch.equal(found, wanted.images)


def test_an_exported_model_is_sampled_with_the_same_conditions(run, tmp_path):
    model, text = load(run), embedded(["three", "the digit one"])
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--license", "mit", "--dtype", "float32"]) == 0
    again = load(tmp_path / "out")
    made = [each.generate(2, condition=text, cfg=2.0, progress=False).images for each in (model, again)]
    assert torch.equal(*made)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Images: 1x8x8 (channels x height x width). Condition: tokens of width 16, 4 at most." in card
    assert "MVMPipeline` does not take this model: it takes class labels" in card


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": [3]}, "classes.*class labels.*'tokens'"),
        ({"condition": torch.zeros(1, 3)}, r"condition: the structures differ here \(the keys 'tokens', 'mask' and"),
        ({"condition": {"tokens": torch.zeros(1, 4, 16)}}, "keys 'tokens', 'mask' and the keys 'tokens'"),
        (
            {"condition": {"tokens": torch.zeros(1, 3, 16), "mask": torch.ones(1, 3, dtype=torch.bool)}},
            r"condition\['tokens'\] is of shape \(1, 3, 16\), and this model takes \(B, 4, 16\)",
        ),
        (
            {"condition": {"tokens": torch.zeros(1, 4, 16), "mask": torch.ones(1, 4)}},
            r"condition\['mask'\] is of torch.float32, and this model takes bool",
        ),
        (
            {"condition": {"tokens": torch.full((1, 4, 16), torch.nan), "mask": torch.ones(1, 4, dtype=torch.bool)}},
            r"condition\['tokens'\] of shape \(1, 4, 16\) holds NaN",
        ),
        (
            {"condition": {"tokens": torch.zeros(3, 4, 16), "mask": torch.ones(3, 4, dtype=torch.bool)}},
            "condition has 3 rows for num=2",
        ),
        (
            {"num": 3, "condition": {"tokens": torch.zeros(2, 4, 16), "mask": torch.ones(3, 4, dtype=torch.bool)}},
            r"condition\['tokens'\] of shape \(2, 4, 16\) has 2 rows for a batch of 3",
        ),
        ({"cfg": 2.0}, "condition=None: classifier-free guidance needs"),
        ({"captions": "three"}, "must be a list of texts"),
    ],
)
def test_what_does_not_fit_is_refused(run, options, words):
    with pytest.raises(ValueError, match=words):
        load(run).generate(**{"num": 2, "progress": False, **options})
