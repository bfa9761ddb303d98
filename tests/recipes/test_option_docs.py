"""Every option says what it means, choices are those that are checked, and other projects' names lead to ours."""

import re
from dataclasses import replace

import pytest

from mvm.network import DDTConfig
from mvm.options import meanings
from mvm.recipes import (
    DecoderRecipe,
    Recipe,
    load_recipe,
    options,
    override,
    parse_recipe,
    shipped,
)
from mvm.recipes.docs import _USUAL, OptionDoc, as_typed, meant, option_docs, table_docs
from mvm.recipes.reading import every_option

KINDS = {"dit": Recipe(), "ddt": Recipe(network=DDTConfig()), "decoder": DecoderRecipe()}
ALL = KINDS | {name: load_recipe(name) for name in shipped()}
LONGEST = 240


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_explained(name):
    docs = option_docs(ALL[name])
    assert sorted(docs) == sorted(options(ALL[name]))
    assert [option for option, doc in docs.items() if not doc.meaning] == []
    assert [option for option, doc in docs.items() if len(doc.meaning) > LONGEST] == []
    assert [option for option, doc in docs.items() if not doc.meaning.endswith(".")] == []
    assert all(re.fullmatch(r"[A-Z].*\.", about) for about in table_docs(ALL[name]).values())


@pytest.mark.parametrize("name", KINDS)
def test_defaults_are_those_of_the_classes(name):
    assert {option: doc.default for option, doc in option_docs(KINDS[name]).items()} == options(KINDS[name])


def test_what_is_said_of_an_option():
    docs = option_docs(load_recipe("cifar10"))
    assert docs["train.lr"] == OptionDoc("Learning rate: the peak, after warm-up and before decay.", "float", 1e-4)
    assert docs["objective.weight"].choices == ("none", "noise", "likelihood", "flow")
    assert (docs["train.ema"].type, docs["train.ema"].default) == ("numbers", (0.9999,))
    assert option_docs(KINDS["decoder"])["reconstruction.blocks"].type == "whole numbers"
    assert "task" not in option_docs(KINDS["decoder"])
    ddt = option_docs(KINDS["ddt"])
    assert ddt["network.depth"] == docs["network.depth"]  # inherited
    assert (ddt["network.patch"].default, docs["network.patch"].default) == (1, 2)
    assert ddt["network.patch"].meaning == docs["network.patch"].meaning


def test_a_table_without_docstrings_is_seen():
    from dataclasses import dataclass

    @dataclass
    class Bare:
        """Told of in the class."""

        first: int = 1
        second: int = 2
        """Of the second."""

    assert meanings(Bare) == {"second": "Of the second."}


CHOICES = [
    pytest.param(recipe, option, doc.choices, id=f"{kind}-{option}")
    for kind, recipe in KINDS.items()
    for option, doc in option_docs(recipe).items()
    if doc.choices
]


@pytest.mark.parametrize(("recipe", "option", "choices"), CHOICES)
def test_choices_are_those_that_are_checked(recipe, option, choices):
    with pytest.raises(ValueError, match="is unknown") as caught:
        override(recipe, {option: "no such choice"})
    assert str(caught.value).split("; allowed: ")[1].split(", ") == list(choices)
    found = []
    for choice in choices:
        try:
            found.append(options(override(recipe, {option: choice}))[option])
        except ValueError as error:  # a choice may need another option besides
            found.append(str(error) if "is unknown" in str(error) else choice)
    assert found == list(choices)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_checked_against_a_list_tells_its_choices(kind):
    """The other way round: an option of text without choices takes any text."""
    recipe = KINDS[kind]
    for option, doc in option_docs(recipe).items():
        asking = ("data.path", "condition.encoder")  # for data.name folder, and condition.kind tokens
        if doc.type == "str" and not doc.choices and option not in asking:
            assert options(override(recipe, {option: "anything"}))[option] == "anything"


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), ("", "''"), ((), "''"), ((0.5, 1e-5), "0.5,1e-05"), ("a b", "'a b'"), (3, "3")]
)
def test_values_as_they_are_typed(value, text):
    assert as_typed(value) == text


# --- other projects' names ----------------------------------------------------------------------------------------


def test_usual_names_lead_to_options():
    known = every_option()
    assert [ours for _, ours, _ in _USUAL if ours not in known and not ours.startswith("--")] == []
    leaves = {option.rpartition(".")[2] for option in known if option not in ("repa.resolution", "encoder.resolution")}
    names = [name for theirs, _, _ in _USUAL for name in theirs.split()]
    assert all(name == name.replace("-", "_").lower() for name in names)
    assert set(names) & leaves == {"resolution"}  # that of the images is meant more often than that of encoders


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.learning_rate", "did you mean --train.lr? See: mvm options lr"),
        ("train.learning-rate", "did you mean --train.lr? See: mvm options lr"),
        ("optim.lr", "did you mean --train.lr? See: mvm options lr"),
        ("train.epochs", "did you mean --train.steps (steps = epochs * images / train.batch)? See: mvm options steps"),
        ("train.batch_size", "did you mean --train.batch? See: mvm options batch"),
        ("train.precision", "did you mean --engine.precision? See: mvm options precision"),
        ("trainer.max_grad_norm", "did you mean --train.clip? See: mvm options clip"),
        ("train.betas", "did you mean --train.beta1 or --train.beta2? See: mvm options beta1"),
        ("sample.num_steps", "did you mean --sample.nfe? See: mvm options nfe"),
        ("train.num_steps", "did you mean --train.steps? See: mvm options steps"),
        ("data.resolution", "did you mean --data.size (read from the folder, as mvm data prepare --size made it)? "),
        ("repa.resolutio", "did you mean --repa.resolution? See: mvm options resolution"),
        ("network.hidden_size", "did you mean --network.width? See: mvm options width"),
        ("train.output_dir", "did you mean --out? See: mvm train --help"),
    ],
)
def test_options_by_other_names(name, words):
    with pytest.raises(ValueError, match=re.escape(f"unknown option '--{name}'; {words}")):
        override(load_recipe("cifar10"), {name: "1"})


def test_nothing_is_suggested_at_random():
    with pytest.raises(ValueError, match=r"^unknown option '--train\.zzzz'; see: mvm options$"):
        override(load_recipe("cifar10"), {"train.zzzz": "1"})
    assert meant("guidance_scale", options(DecoderRecipe())) == []  # it has no sampling


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nlearning_rate = 1", "unknown key 'train.learning_rate' (did you mean 'train.lr'?); allowed: steps,"),
        ("lr = 1", "unknown key 'lr' (did you mean 'train.lr'?); allowed: name,"),
        ("[train]\nepochs = 1", "(did you mean 'train.steps'? steps = epochs * images / train.batch); allowed: "),
        ("[train]\nprecision = 1", "(did you mean 'engine.precision'?)"),
        ("[sample]\nguidance_scale = 1", "(did you mean 'sample.cfg'?)"),
        ("[model]\nsize = 'S'", "unknown key 'model' (did you mean 'network.size'?)"),
        ('task = "decoder"\n[train]\nbatch_size = 1', "unknown key 'train.batch_size' (did you mean 'train.batch'?)"),
    ],
)
def test_keys_by_other_names(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_recipe(text, ".toml", "mine.toml")


def test_a_long_page_is_still_read():
    """Comments do not count towards the length that a recipe may have, and hide nothing that does."""
    recipe = replace(Recipe(), name="mine")
    assert parse_recipe('name = "mine"\n' + "# a comment\n" * 5000, ".toml", "x") == recipe
    for text in ("a." * 9000 + "b = 1", '"\u2028#".' + "a." * 9000 + "b = 1"):
        with pytest.raises(ValueError, match=r"larger than 16,384 letters"):
            parse_recipe(text, ".toml", "x")
