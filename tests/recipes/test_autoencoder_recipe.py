"""Recipes of task "decoder": read, written, changed and shown as those of a field are."""

import json
from dataclasses import asdict

import pytest
import torch

from mvm.latent import Decoder
from mvm.latent.codec import Origin
from mvm.latent.rae import DecoderConfig, decoder_cost
from mvm.recipes import (
    DecoderRecipe,
    Recipe,
    load_recipe,
    options,
    override,
    parse_recipe,
    require_field_recipe,
    to_json,
)
from mvm.recipes.page import costs, page, training_flops

NAMES = ("imagenet256-rae-stage1", "imagenet512-rae-stage1", "imagenette-rae-s")


def from_toml(text):
    return parse_recipe(text, ".toml", "test.toml")


@pytest.mark.parametrize("recipe", [DecoderRecipe(), *map(load_recipe, NAMES)], ids=lambda recipe: recipe.name)
def test_json_round_trip(recipe):
    text = to_json(recipe)
    assert json.loads(text)["task"] == "decoder"
    found = parse_recipe(text, ".json", "x")
    assert found == recipe
    assert type(found) is DecoderRecipe
    assert hash(found) == hash(recipe)


def test_a_task_says_what_a_table_is():
    assert type(from_toml('name = "x"')) is Recipe
    assert from_toml('task = "field"\nname = "x"') == Recipe(name="x")
    assert from_toml('task = "decoder"\nname = "x"') == DecoderRecipe(name="x")
    with pytest.raises(ValueError, match=r"task='decode'.*'decoder'"):
        from_toml('task = "decode"')
    with pytest.raises(ValueError, match=r"task=3 must be of type str"):
        from_toml("task = 3")
    with pytest.raises(ValueError, match=r"unknown key 'encoder'"):
        from_toml('[encoder]\nname = "x"')
    with pytest.raises(ValueError, match=r"unknown key 'network'"):
        from_toml('task = "decoder"\n[network]\nsize = "S"')
    with pytest.raises(ValueError, match=r"'decoder\.sise'.*'decoder\.size'"):
        from_toml('task = "decoder"\n[decoder]\nsise = "S"')


def test_a_task_is_no_option():
    assert "task" not in options(DecoderRecipe())
    with pytest.raises(ValueError, match=r"unknown option '--task'"):
        override(DecoderRecipe(), {"task": "field"})
    with pytest.raises(ValueError, match=r"task='field': this is a recipe of task 'decoder'"):
        DecoderRecipe(task="field")


def test_a_recipe_may_stand_on_another():
    found = from_toml('base = "imagenette-rae-s"\nname = "mine"\n[decoder]\nsize = "B"')
    assert found == override(load_recipe("imagenette-rae-s"), {"name": "mine", "decoder.size": "B"})


@pytest.mark.parametrize("name", NAMES)
def test_every_option_can_be_given_as_it_is_shown(name):
    recipe = load_recipe(name)
    shown = {key: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for key, v in options(recipe).items()}
    assert override(DecoderRecipe(), shown) == recipe
    assert all(override(recipe, {key: text}) == recipe for key, text in shown.items())


def test_whole_numbers_in_a_list():
    assert override(DecoderRecipe(), {"reconstruction.blocks": "1, 3"}).reconstruction.blocks == (1, 3)
    assert override(DecoderRecipe(), {"reconstruction.blocks": ""}).reconstruction.blocks == ()
    found = from_toml('task = "decoder"\n[reconstruction]\nblocks = [1, 3]').reconstruction.blocks
    assert found == (1, 3)
    assert type(found) is tuple
    with pytest.raises(ValueError, match=r"--reconstruction\.blocks 1\.5.*int"):
        override(DecoderRecipe(), {"reconstruction.blocks": "1.5"})
    with pytest.raises(ValueError, match=r"reconstruction\.blocks=1\.5 must be of type int"):
        from_toml('task = "decoder"\n[reconstruction]\nblocks = [1.5]')


def test_layers_are_text():
    assert override(DecoderRecipe(), {"encoder.layers": "3,6"}).encoder.layers == "3,6"
    with pytest.raises(ValueError, match=r"encoder\.layers=\[3, 6\] must be of type str"):
        from_toml('task = "decoder"\n[encoder]\nlayers = [3, 6]')


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine.parallel": "fsdp"}, r"engine\.parallel='fsdp' is not for decoders.*use ddp"),
        ({"engine.compile": "graph"}, r"engine\.compile='graph' is not for decoders.*use blocks"),
        ({"engine.recompute": "0.5"}, r"engine\.recompute=0\.5 is not for decoders.*leave it at 0"),
        ({"engine.kernels": "true"}, r"engine\.kernels=True is not for decoders.*leave it at False"),
        ({"held_out.count": "-1"}, r"held_out\.count=-1 is out of range"),
        ({"held_out.count": "0"}, r"preview\.every=1000 restores held-out images, and held_out\.count=0"),
        ({"preview.every": "300"}, r"preview\.every=300 must divide train\.save_every=1000"),
        ({"decoder.size": "M"}, r"decoder\.size='M' is unknown"),
        ({"reconstruction.gan_start": "3", "reconstruction.gan": "1"}, r"gan_start=3 comes before"),
        ({"seed": "-1"}, r"seed=-1 is out of range"),
    ],
)
def test_bad_options_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        override(load_recipe("imagenette-rae-s"), changes)


def test_a_decoder_is_no_field():
    assert require_field_recipe(Recipe(), "x") == Recipe()
    with pytest.raises(ValueError, match=r"^imagenette-rae-s is of task 'decoder'"):
        require_field_recipe(load_recipe("imagenette-rae-s"), "imagenette-rae-s")


def test_cost_of_a_decoder():
    """Against a count by the layers: hooks see every product but attention's, which is 2 (N + 1)^2 width a block."""
    decoder = Decoder(DecoderConfig("tiny", 2), (7, 3, 3), Origin("", ""))
    found = decoder_cost(decoder.config, 3)
    seen = []

    def count(layer, arguments, output):
        seen.append(arguments[0][..., 0].numel() * layer.weight.numel())

    for name, layer in decoder.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "embed":
            layer.register_forward_hook(count)
    decoder(torch.zeros(1, 7, 3, 3))
    assert found.multiply_adds == sum(seen) + 2 * 2 * 10**2 * 64
    assert found.parameters == sum(value.numel() for value in decoder.parameters()) - 64 * (7 + 1)


def test_published_size():
    """RAE's table: XL has 415 M parameters and 106.7 G multiply-adds, B 86 M and 22.2."""
    for size, values, products in (("XL", 415e6, 106.7e9), ("B", 86e6, 22.2e9)):
        found = decoder_cost(DecoderConfig(size, 16), 16)
        assert found.parameters == pytest.approx(values, rel=0.01)
        assert found.multiply_adds == pytest.approx(products, rel=0.05)


def test_page():
    recipe = load_recipe("imagenette-rae-s")
    decoder, training = costs(recipe)
    assert decoder.startswith("decoder   14.4 M parameters, 4.1 G multiply-adds per image, without its first layer")
    assert training == "training  0.32 M images, 5000 steps of 64"
    assert training_flops(recipe) == 6 * decoder_cost(recipe.decoder, 16).multiply_adds
    text = page("imagenette-rae-s")
    assert "[held_out]" in text.splitlines()
    assert "count = 200" in text.splitlines()
    assert 'task = "decoder"' in text.splitlines()
    assert "hours" not in text  # none were measured
    unopened = override(recipe, {"data.name": "folder", "data.path": "x"})
    assert costs(unopened) == [training]


def test_published_settings():
    recipe = load_recipe("imagenet256-rae-stage1")
    assert recipe.side == 16
    train = asdict(recipe.train)
    assert train["steps"] * train["batch"] == pytest.approx(16 * 1_281_167, rel=1e-3)
    told = {"lr": 2e-4, "final": 0.1, "decay": "cosine", "ema": (0.9978,), "clip": 0.0, "beta2": 0.95}
    assert told.items() <= train.items()
    assert recipe.reconstruction.disc_start == 6 * train["warmup"]
    assert recipe.reconstruction.gan_start == 8 * train["warmup"]
    judge = recipe.reconstruction
    assert (judge.norm, judge.last_norm, judge.disc_schedule) == ("image", False, "own")
