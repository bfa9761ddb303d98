"""A recipe's page: its words, its costs, and options that can be typed."""

import re
import shlex

import pytest

from mvm.network import DiTConfig, multiply_adds
from mvm.recipes import DataConfig, Recipe, load_recipe, options, override, shipped
from mvm.recipes.page import H200_FLOPS, H200_MFU, costs, has_estimate, hours_on_h200, page
from mvm.training.optim import TrainConfig


def given(text):
    """The option lines of a page as a shell would hand them on: {"train.lr": "0.001"}."""
    tokens = shlex.split(" ".join(line for line in text.splitlines() if line.startswith("--")))
    names, values = tokens[::2], tokens[1::2]
    assert all(name.startswith("--") for name in names)
    return dict(zip((name.removeprefix("--") for name in names), values, strict=True))


@pytest.mark.parametrize("name", shipped())
def test_a_page_has_words_costs_and_options(name):
    text, recipe = page(name), load_recipe(name)
    lines = text.splitlines()
    assert lines[0] == f"# {name}: {recipe.description}"
    words = [line for line in shipped()[name].splitlines() if line.startswith("#")]
    assert lines[1 : 1 + len(words)] == words
    assert any("Command:" in line for line in words)
    rest = "\n".join(lines[1 + len(words) :])
    head, told = rest.strip("\n").split("\n\n")
    assert head.splitlines() == costs(recipe)
    assert len(told.splitlines()) == len(options(recipe)) - 2  # all but name and description


@pytest.mark.parametrize("name", shipped())
def test_options_of_a_page_make_the_recipe(name):
    """Also those that are empty: an option without a value would swallow the next."""
    recipe = load_recipe(name)
    shown = {**given(page(name)), "name": recipe.name, "description": recipe.description}
    assert shown.keys() == options(recipe).keys()
    assert override(type(recipe)(), shown) == recipe


@pytest.mark.parametrize("name", shipped())
def test_each_line_of_a_page_can_be_given_alone(name):
    recipe = load_recipe(name)
    for option, text in given(page(name)).items():
        assert override(recipe, {option: text}) == recipe


FIELDS = [name for name in shipped() if isinstance(load_recipe(name), Recipe)]


@pytest.mark.parametrize("name", FIELDS)
def test_time_is_estimated_where_the_size_was_measured(name):
    text, measured = page(name), has_estimate(load_recipe(name))
    assert measured == (name not in ("digits", "cifar10-small") and "ddt" not in name)
    assert bool(re.search(r"^estimate  \S+ hours on one NVIDIA H200", text, re.MULTILINE)) == measured
    assert re.search(r"^network   [\d.]+ M parameters, \S+ G multiply-adds per image$", text, re.MULTILINE)
    assert re.search(r"^training  \S+ M images, \d+ steps of \d+$", text, re.MULTILINE)


def test_hours_are_the_work_over_the_speed():
    """6 multiply-adds' worth of FLOPs an image: forward, and twice that backward."""
    recipe = Recipe(data=DataConfig("cifar10"), network=DiTConfig("B"), train=TrainConfig(steps=1000, batch=500))
    work = 6 * multiply_adds(DiTConfig("B"), (3, 32, 32), 10) * 500_000
    assert hours_on_h200(recipe) == pytest.approx(work / (H200_FLOPS * H200_MFU["B"]) / 3600)
    twice = Recipe(data=DataConfig("cifar10"), network=DiTConfig("B"), train=TrainConfig(steps=1000, batch=1000))
    assert hours_on_h200(twice) == pytest.approx(2 * hours_on_h200(recipe))


def test_numbers_of_cifar10():
    """DiT-S/2 on 32x32: 12 blocks of width 384, 256 tokens."""
    network, training, memory, estimate = costs(load_recipe("cifar10"))
    assert re.match(r"network   3\d\.\d M parameters, [56]\.\d+ G multiply-adds", network)
    assert training == "training  5.12 M images, 10000 steps of 512"
    assert re.match(r"memory    about 25\.?\d* GB for 512 images a GPU in bf16, compiled, of which 1\.?\d* GB", memory)
    assert 0.1 <= float(estimate.split()[1]) < 0.4


def test_a_folder_that_was_not_opened_has_no_costs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[data]\nname = "folder"\npath = "my pictures"\n[network]\nsize = "S"\n')
    text = page(str(path))
    assert "parameters" not in text
    assert "estimate" not in text
    assert "training  0.256 M images, 1000 steps of 256" in text
    assert given(text)["data.path"] == "my pictures"


def test_a_folder_that_is_known_has_costs():
    known = Recipe(data=DataConfig("folder", "x", channels=3, size=32, classes=10), network=DiTConfig("S"))
    assert costs(known) == costs(Recipe(data=DataConfig("cifar10"), network=DiTConfig("S")))


def test_unknown_recipe():
    with pytest.raises(ValueError, match=r"recipe='digit' is unknown \(did you mean 'digits'\?\)"):
        page("digit")


def test_no_hours_are_told_of_networks_nobody_timed():
    assert "estimate" not in page("imagenette-ddt-s")
    assert "estimate" in page("cifar10")
