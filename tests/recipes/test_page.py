"""A recipe's page: its words, its costs, and every option explained, as a TOML file that makes the recipe."""

import re
import tomllib
from dataclasses import asdict

import pytest

from mvm.network import DDTConfig, DiTConfig, multiply_adds
from mvm.optim.optimizers import TrainConfig
from mvm.recipes import (
    CodecConfig,
    DataConfig,
    DecoderRecipe,
    Recipe,
    load_recipe,
    override,
    parse_recipe,
    shipped,
    to_json,
)
from mvm.recipes.docs import option_docs
from mvm.recipes.page import (
    H200_FLOPS,
    H200_MFU,
    costs,
    has_estimate,
    hours_on_h200,
    muon_matrices,
    newton_schulz_shares,
    page,
)


def from_toml(text):
    return parse_recipe(text, ".toml", "page")


@pytest.mark.parametrize("name", shipped())
def test_a_page_is_a_file_that_makes_the_recipe(name):
    text, recipe = page(name), load_recipe(name)
    assert from_toml(text) == recipe
    said = tomllib.loads(text)
    assert said.pop("task", None) == ("decoder" if isinstance(recipe, DecoderRecipe) else None)
    wanted = asdict(recipe)
    wanted.pop("task", None)
    assert {name: list(table) for name, table in said.items() if isinstance(table, dict)} == {
        name: list(table) for name, table in wanted.items() if isinstance(table, dict)
    }  # every option is written, whether it has its default or not


@pytest.mark.parametrize("name", shipped())
def test_a_page_has_words_and_costs(name):
    lines, recipe = page(name).splitlines(), load_recipe(name)
    words = [line for line in shipped()[name].splitlines() if line.startswith("#")]
    assert any("Command:" in line for line in words)
    head = [f"# {name}: {recipe.description}", *words, "#", *(f"# {line}" for line in costs(recipe)), "#"]
    assert lines[: len(head)] == head
    assert lines[len(head)] == "# Save as FILE.toml, then: mvm train FILE.toml"
    assert max(map(len, lines[len(head) :])) <= 106  # one description has 97 letters; comments end at 100
    assert all(len(line) <= 100 for line in lines[len(head) :] if line.startswith("#"))


@pytest.mark.parametrize("name", ["cifar10", "imagenet256-ddt-xl", "imagenet256-rae-stage1"])
def test_every_option_is_explained_right_above_it(name):
    found, table, above = {}, "", []
    for line in page(name).splitlines():
        if line.startswith("#"):
            above.append(line.removeprefix("# "))
            continue
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line:
            found[table + line.split(" = ")[0]] = " ".join(above)
        above = []
    found.pop("task", None)
    docs = option_docs(load_recipe(name))
    assert found.keys() == docs.keys()
    assert all(words.startswith(docs[option].meaning) for option, words in found.items())


def test_lines_of_cifar10():
    lines = page("cifar10").splitlines()
    at = lines.index("lr = 0.003")
    assert lines[at - 1] == "# Learning rate: the peak, after warm-up and before decay. Default: 0.0001."
    at = lines.index("ema = [0.9995, 0.999]")
    assert lines[at - 1].endswith(" Default: [0.9999].")
    at = lines.index("beta1 = 0.9")  # the default itself
    assert lines[at - 1] == "# AdamW's decay of the mean gradient (first moment)."
    at = lines.index("[path.law]")
    assert lines[at - 2 : at] == ["", "# Timestep distribution of training."]
    for line in ("mirror = true", "kernels = false", 'path = ""', "tolerance = 1e-05", "augment = 0.0", "seed = 0"):
        assert line in lines


AWKWARD = [
    DecoderRecipe(),
    Recipe(network=DDTConfig(head_depth=1)),
    Recipe(
        name='a "b"\\c\n\x1b[2J\x7f\u202e', description="[x]\n# y\nseed = 3", codec=CodecConfig(path="C:\\x \U0001f600")
    ),
    override(Recipe(), {"train.power": "", "train.lr": "1e22", "sample.rho": "0.3"}),
]


@pytest.mark.parametrize("recipe", AWKWARD, ids=["decoder", "ddt", "text", "numbers"])
def test_a_run_s_recipe_is_shown_too(recipe, tmp_path):
    """Also names with quotes, line breaks and what a terminal would obey, since anybody may have written them."""
    (tmp_path / "recipe.json").write_text(to_json(recipe))
    text = page(str(tmp_path / "recipe.json"))
    assert from_toml(text) == recipe
    assert all(line.isprintable() for line in text.split("\n"))


FIELDS = [name for name in shipped() if isinstance(load_recipe(name), Recipe)]


@pytest.mark.parametrize("name", FIELDS)
def test_time_is_estimated_where_the_size_was_measured(name):
    text, measured = page(name), has_estimate(load_recipe(name))
    assert measured == (name not in ("digits", "cifar10-small") and "ddt" not in name)
    assert bool(re.search(r"^# estimate  \S+ hours on one NVIDIA H200", text, re.MULTILINE)) == measured
    assert re.search(r"^# network   [\d.]+ M parameters, \S+ G multiply-adds per image$", text, re.MULTILINE)
    assert re.search(r"^# training  \S+ M images, \d+ steps of \d+$", text, re.MULTILINE)


def test_hours_are_the_work_over_the_speed():
    """6 multiply-adds' worth of FLOPs an image: forward, and twice that backward."""
    recipe = Recipe(data=DataConfig("cifar10"), network=DiTConfig("B"), train=TrainConfig(steps=1000, batch=500))
    work = 6 * multiply_adds(DiTConfig("B"), (3, 32, 32), 10) * 500_000
    assert hours_on_h200(recipe) == pytest.approx(work / (H200_FLOPS * H200_MFU["B"]) / 3600)
    twice = Recipe(data=DataConfig("cifar10"), network=DiTConfig("B"), train=TrainConfig(steps=1000, batch=1000))
    assert hours_on_h200(twice) == pytest.approx(2 * hours_on_h200(recipe))


def test_numbers_of_cifar10():
    """DiT-S/2 on 32x32: 12 blocks of width 384, 256 tokens."""
    network, training, memory, muon, estimate = costs(load_recipe("cifar10"))
    assert re.match(r"network   3\d\.\d M parameters, [56]\.\d+ G multiply-adds", network)
    assert training == "training  5.12 M images, 10000 steps of 512"
    assert re.match(r"memory    about 25\.?\d* GB for 512 images a GPU in bf16, compiled, of which 1\.?\d* GB", memory)
    assert re.fullmatch(r"Muon      0\.289 TFLOP of Newton-Schulz a step; of 8 GPUs each does at most 0\.0372", muon)
    assert 0.1 <= float(estimate.split()[1]) < 0.4


def test_newton_schulz_of_the_xl_by_hand():
    """28 blocks of width 1440 and MLP 3840, two of 2048 and 5472 with modulations; 5 steps of 4 m m n + 2 m m m."""
    recipe = load_recipe("imagenet256-ddt-xl")
    narrow = [(4320, 1440), (1440, 1440), (7680, 1440), (1440, 3840)]
    wide = [(6144, 2048), (2048, 2048), (10944, 2048), (2048, 5472), (12288, 2048)]
    assert sorted(muon_matrices(recipe)) == sorted([(shape, 1) for shape in 28 * narrow + 2 * wide])
    work = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in 28 * narrow + 2 * wide)
    assert newton_schulz_shares(recipe, 1) == [work]
    eight = newton_schulz_shares(recipe, 8)
    assert sum(eight) == work
    assert max(eight) < 1.02 * work / 8
    assert "Muon      30.5 TFLOP of Newton-Schulz a step; of 8 GPUs each does at most 3.85" in costs(recipe)
    assert newton_schulz_shares(override(recipe, {"train.optimizer": "adamw"}), 8) == [0] * 8


def test_a_folder_that_was_not_opened_has_no_costs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[data]\nname = "folder"\npath = "my pictures"\n[network]\nsize = "S"\n')
    text = page(str(path))
    assert "parameters" not in text
    assert "estimate" not in text
    assert "training  0.256 M images, 1000 steps of 256" in text
    assert from_toml(text) == load_recipe(str(path))


def test_a_folder_that_is_known_has_costs():
    known = Recipe(data=DataConfig("folder", "x", channels=3, size=32, classes=10), network=DiTConfig("S"))
    assert costs(known) == costs(Recipe(data=DataConfig("cifar10"), network=DiTConfig("S")))


def test_unknown_recipe():
    with pytest.raises(ValueError, match=r"recipe='digit'.*'digits'"):
        page("digit")


def test_no_hours_are_told_of_networks_nobody_timed():
    assert "estimate" not in page("imagenette-ddt-s")
    assert "estimate" in page("cifar10")
