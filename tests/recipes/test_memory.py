"""The estimate of a step's memory, against what was measured on an H200.

The figures are in benchmarks/results/training-speed.md, docs/explanation/latents.md and benchmarks/LOG.md.
"""

from dataclasses import replace

import pytest
import torch

from mvm.distributed.processes import EngineConfig
from mvm.network import DiTConfig, parameters
from mvm.optim.optimizers import TrainConfig
from mvm.recipes import DataConfig, Recipe, load_recipe, memory, override
from mvm.recipes.memory import (
    BLOCK_BYTES,
    BLOCK_BYTES_ON_HOST,
    LIBRARIES,
    fit_memory,
    free_memory,
    training_memory,
)


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
    assert again == pytest.approx(BLOCK_BYTES["products"] / BLOCK_BYTES["all"])


# ---------------------------------------------------------------- what is free, and how a step is made to fit

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def per_image(recipe):
    depth, width, _ = recipe.network.dimensions
    return BLOCK_BYTES_ON_HOST * (recipe.sample_shape[-1] // recipe.network.patch) ** 2 * depth * width


@pytest.fixture
def free(monkeypatch):
    """Set what is free."""
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda device: size)


def test_a_cpu_computes_a_step_in_parts_of_three_gigabytes(free):
    free(20e9)
    recipe = load_recipe("cifar10")
    fitted, need, warning = fit_memory(recipe, CPU)
    images = -(-512 // fitted.engine.accumulate)
    assert images * per_image(recipe) <= 3e9 < (images + 1) * per_image(recipe)
    assert need.states == training_memory(recipe, 1).states + LIBRARIES
    assert need.total < 5e9
    assert warning == ""
    assert replace(fitted, engine=recipe.engine) == recipe  # nothing else


def test_a_small_step_stays_whole(free):
    free(4e9)
    recipe = load_recipe("digits")
    assert fit_memory(recipe, CPU)[0] == recipe
    asked = override(recipe, {"engine.accumulate": "3"})
    assert fit_memory(asked, CPU)[0] == asked


def test_less_memory_means_more_parts_until_one_image_does_not_fit(free):
    recipe = load_recipe("cifar10")
    states = training_memory(recipe, 1, "cpu").states
    found = []
    for room in (8e9, 2e9, 1e9):
        free(states + room)
        found.append(fit_memory(recipe, CPU)[0].engine.accumulate)
    assert found == sorted(set(found))
    free(states + per_image(recipe) / 2)
    with pytest.raises(ValueError, match=r"cifar10 .*GB.* GB .*try a sm"):
        fit_memory(recipe, CPU)


def test_a_gpu_is_left_as_it_is_warned_of_or_refused(free):
    recipe = load_recipe("cifar10")
    need = training_memory(recipe, 512).total
    free(1.1 * need)
    assert fit_memory(recipe, GPU)[::2] == (recipe, "")
    free(0.9 * need)
    kept, _, warning = fit_memory(recipe, GPU)
    assert kept == recipe
    assert "if it fails, try --engine.accumulate 2" in warning
    free(0.5 * need)
    with pytest.raises(ValueError, match=r"try --engine\.accumulate 3, or a smaller recipe"):
        fit_memory(recipe, GPU)
    assert fit_memory(override(recipe, {"engine.accumulate": "3"}), GPU)[2] == ""
    assert fit_memory(recipe, GPU, world=4)[2] == ""  # a quarter of the images each


def test_free_memory_is_what_the_container_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = free_memory(CPU)
    assert 2**20 < machine < 2**45
    for name, text in {"memory.max": "3000000", "memory.current": "1000000", "memory.stat": "inactive_file 5"}.items():
        (tmp_path / name).write_text(text + "\n")
    assert free_memory(CPU) == 2_000_005
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) == pytest.approx(machine, rel=0.5)  # others use it too
