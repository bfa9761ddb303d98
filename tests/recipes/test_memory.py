"""The estimate of a step's memory, against what was measured on an H200.

The figures are in benchmarks/results/training-speed.md, docs/latents.md and docs/log.md.
"""

from dataclasses import replace

import pytest

from mvm.network import DiTConfig, parameters
from mvm.recipes import DataConfig, Recipe, load_recipe, override
from mvm.recipes.memory import KEPT, training_memory
from mvm.training.optim import TrainConfig
from mvm.training.runtime import EngineConfig


def sit(size: str, **engine) -> Recipe:
    """SiT's published shape: 256 tokens, batch 256."""
    data = DataConfig(name="folder", path="random", channels=4, size=32, classes=1000)
    heads = 16 if size == "XL" else 0  # of 72; ours has 18 of 64
    return Recipe(data=data, network=DiTConfig(size=size, patch=2, heads=heads), engine=EngineConfig(**engine))


MEASURED = {  # GB
    "S": (sit("S"), 13.0),
    "B": (sit("B"), 27.1),
    "XL": (sit("XL", recompute=0.25), 89.6),
    "XL-half": (sit("XL", recompute=0.5), 81.1),
    "XL-nothing": (sit("XL", recompute=1.0, keep="nothing"), 36.6),
}


@pytest.mark.parametrize("case", MEASURED)
def test_fitted_cases(case):
    recipe, measured = MEASURED[case]
    assert training_memory(recipe, 256).total / 1e9 == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("name", "batch", "measured", "within"), [
    ("imagenet256-ddt-xl", 256, 113.5, 0.01), ("imagenette-ddt-s", 256, 19.48, 0.19),
])  # fmt: skip
def test_cases_that_were_not_fitted(name, batch, measured, within):
    assert training_memory(load_recipe(name), batch).total / 1e9 == pytest.approx(measured, rel=within)


def test_the_cifar10_of_before_muon():
    plain = {"network.skip": "false", "network.local": "false", "train.optimizer": "adamw"}
    assert training_memory(override(load_recipe("cifar10"), plain), 512).total / 1e9 == pytest.approx(25.9, rel=0.03)


def test_what_grows_with_what():
    recipe = sit("S")
    one, two = training_memory(recipe, 64), training_memory(recipe, 128)
    assert one.states == two.states
    assert two.activations == 2 * one.activations
    count = parameters(recipe.network, recipe.sample_shape, 1000)
    averages = replace(recipe, train=TrainConfig(ema=(0.99, 0.999), power=(0.1,)))
    assert training_memory(averages, 64).states - one.states == 8 * count
    muon = replace(recipe, train=TrainConfig(optimizer="muon"))
    assert one.states - training_memory(muon, 64).states == 4 * count
    again = training_memory(sit("S", recompute=1.0), 64).activations / one.activations
    assert again == pytest.approx(KEPT["products"] / KEPT["all"])
