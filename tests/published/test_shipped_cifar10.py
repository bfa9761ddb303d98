"""The CIFAR-10 model in the package: its size, its card, its settings, and that it still draws what it drew."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mvm.generate import Sampler
from mvm.model import load
from mvm.published import shipped_folder
from mvm.recipes import SampleConfig, load_recipe, override

GOLDEN = Path(__file__).parent / "cifar10-golden.npz"  # seeds 0 and 4, an airplane and a ship, float32
ASKED = torch.tensor([0, 8]), torch.tensor([0, 4]), SampleConfig("adams-power", nfe=13, cfg=2.0, low=0.3, high=0.9)


def test_it_is_small_and_has_a_card():
    folder = shipped_folder("cifar10")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20e6
    card = (folder / "README.md").read_text()
    for word in ("FID", "4.785", "50,000", "H200", "license: apache-2.0", "not measured", "saliency"):
        assert word in card


def test_it_is_the_recipe_with_alignment():
    ours, recipe = load("cifar10").recipe, load_recipe("cifar10-small")
    recipe = override(recipe, {"train.lr": "1e-3", "objective.weight": "none"})  # as the recipe was when it was trained
    assert replace(ours, repa=recipe.repa) == recipe
    assert ours.repa.encoder
    told = json.loads((shipped_folder("cifar10") / "config.json").read_text())
    assert told["source"]["step"] == recipe.train.steps


def test_it_draws_what_it_drew():
    model = load("cifar10")
    images = Sampler(model).images(*ASKED, progress=False).images
    away = np.abs(images.numpy().astype(int) - np.load(GOLDEN)["images"].astype(int))
    assert away.mean() < 0.5
    assert away.max() <= 16


def test_the_class_decides():
    model = load("cifar10")
    labels, seeds = torch.tensor([0, 8, 9]), torch.tensor([4, 4, 4])
    images = Sampler(model).images(labels, seeds, replace(model.recipe.sample, nfe=4), progress=False).images.float()
    for one, other in ((0, 1), (1, 2)):
        assert (images[one] - images[other]).abs().mean() > 5  # levels of 255, from the same noise
