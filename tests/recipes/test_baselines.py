"""Baselines on equal terms: each differs from cifar10 in its path and objective alone; and recipes that have a base."""

import json

import pytest
import torch

from mvm.objective.weights import WEIGHTS
from mvm.recipes import SampleConfig, load_recipe, options, override, parse_recipe, reading, shipped, to_json
from mvm.solver import Adaptive

VP = {"path.schedule": "variance-preserving"}
SCORE = {**VP, "objective.kind": "score", "objective.weight": "noise"}
PLAIN = {"objective.weight": "none"}  # their loss as it is known; cifar10's own is weighted
DIFFERENCES = {
    "cifar10-ddpm": {**VP, **PLAIN, "objective.kind": "eps"},
    "cifar10-score": SCORE,
    "cifar10-scoreflow": {**SCORE, "path.law.name": "lam-uniform", "path.law.t_min": 1e-5},
    "cifar10-fm-vp": {**VP, **PLAIN, "objective.kind": "flow"},
    "cifar10-fm-ot": {**PLAIN, "path.schedule": "linear-flow", "objective.kind": "flow"},
    "cifar10-x0": {**VP, **PLAIN, "objective.kind": "x0"},
    "cifar10-v": {**VP, **PLAIN, "objective.kind": "diffusion_v"},
}


def test_every_recipe_on_cifar10_is_compared_here():
    others = {name for name in shipped() if name.startswith("cifar10-")} - {"cifar10-small"}  # ours, at another size
    assert set(DIFFERENCES) == others


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_baseline_differs_in_its_path_and_objective_alone(name):
    ours, theirs = options(load_recipe("cifar10")), options(load_recipe(name))
    changed = {option: value for option, value in theirs.items() if value != ours[option]}
    assert changed.pop("name") == name
    assert changed.pop("description").startswith("baseline of cifar10: ")
    assert changed == DIFFERENCES[name]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_a_run_keeps_is_written_out(name):
    written = json.loads(to_json(load_recipe(name)))
    assert "base" not in written
    assert written["train"] == json.loads(to_json(load_recipe("cifar10")))["train"]
    assert parse_recipe(to_json(load_recipe(name)), ".json", "run") == load_recipe(name)


@pytest.mark.parametrize("name", ["cifar10", *DIFFERENCES])
def test_one_option_makes_it_unconditional(name):
    recipe = load_recipe(name)
    changed = override(recipe, {"objective.label_drop": "1"})
    assert recipe.objective.conditional
    assert not changed.objective.conditional
    assert {k for k, v in options(changed).items() if v != options(recipe)[k]} == {"objective.label_drop"}


@pytest.mark.parametrize(("name", "weight"), [("cifar10-ddpm", "none"), ("cifar10-fm-vp", "none")])
def test_the_law_of_the_literature_can_be_asked_for(name, weight):
    recipe = override(load_recipe(name), {"path.law.name": "uniform", "path.law.t_min": "1e-5"})
    assert (recipe.path.law.name, recipe.path.law.t_min, recipe.objective.weight) == ("uniform", 1e-5, weight)


def test_scoreflow_can_be_weighted_instead_of_drawn():
    changes = {"path.law.name": "uniform", "objective.weight": "likelihood"}
    recipe = override(load_recipe("cifar10-scoreflow"), changes)
    assert (recipe.path.law.t_min, recipe.objective.weight) == (1e-5, "likelihood")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective.weight": "likelihood"}, r"not for path\.law\.name='lam-normal'"),
        ({"objective.weight": "likelihood", "path.law.name": "uniform"}, r"path\.law\.t_min=0\.0"),
        ({"objective.weight": "likely"}, r"did you mean 'likelihood'"),
        ({"path.law.name": "lam-uniform"}, r"path\.law\.t_min=0"),
        ({"path.law.name": "lam-uniform", "path.law.t_min": "1e-5"}, "alpha = 0"),
        ({"path.law.name": "uniform", "path.law.t_min": "1"}, r"path\.law\.t_min=1\.0 must lie below 1:"),
        ({"path.law.t_min": "1e-5"}, "'lam-normal' takes 0"),
        ({"objective.label_drop": "1", "sample.cfg": "1.5"}, r"sample\.cfg=1\.5: .* trains no classes to guide to"),
        ({"objective.label_drop": "0", "sample.cfg": "1.5"}, r"sample\.cfg=1\.5: .* no null class to guide from"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        override(load_recipe("cifar10"), changes)


# --- base -----------------------------------------------------------------------------------------------------------


def mine(text):
    return parse_recipe(text, ".toml", "mine.toml")


def test_what_a_recipe_does_not_say_is_its_bases():
    found = mine('base = "cifar10"\nname = "mine"\n[train]\nlr = 1\n[path.law]\nmean = 2\n')
    changes = {"name": "mine", "train.lr": "1", "path.law.mean": "2"}
    assert found == override(load_recipe("cifar10"), changes)


def test_a_base_may_have_a_base():
    found = mine('base = "cifar10-scoreflow"\n[objective]\nkind = "eps"\n')
    assert found == override(load_recipe("cifar10-scoreflow"), {"objective.kind": "eps"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "cifar"', r"mine\.toml: base='cifar' is unknown \(did you mean 'cifar10'\?\)"),
        ("base = 3", r"mine\.toml: base=3 must be of type str"),
        ('base = "cifar10"\n[train]\nlrr = 1', r"unknown key 'train\.lrr' \(did you mean 'train\.lr'\?\)"),
        ('base = "cifar10"\ntrain = 3', "train"),
    ],
)
def test_bad_bases_and_what_stands_on_them(text, words):
    with pytest.raises(ValueError, match=words):
        mine(text)


def test_recipes_that_stand_on_each_other_are_refused(monkeypatch):
    monkeypatch.setattr(reading, "shipped", lambda: {"a": 'base = "b"', "b": 'base = "a"', "c": 'base = "c"'})
    for name in "abc":
        with pytest.raises(ValueError, match=rf"^{name}: base='.': these recipes stand on each other"):
            load_recipe(name)


def test_json_has_no_base():
    with pytest.raises(ValueError, match="unknown key 'base'"):
        parse_recipe('{"base": "cifar10"}', ".json", "x")


# --- solvers that take a tolerance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "joint"), [("adaptive", False), ("dopri5", True)])
def test_a_tolerance_reaches_its_solver(name, joint):
    settings = SampleConfig(solver=name, tolerance=1e-3)
    assert settings.takes_tolerance
    assert settings.build_solver() == Adaptive(1e-3, 1e-3, name=name, joint=joint)
    with pytest.raises(ValueError, match="rtol=0"):
        SampleConfig(solver=name, tolerance=0.0)


def test_other_solvers_take_none():
    assert not any(SampleConfig(solver=name).takes_tolerance for name in ("adams", "sa", "heun", "euler"))


def test_the_tuned_imagenet_recipe_differs_in_what_it_says_alone():
    tuned, paper = (options(load_recipe(name)) for name in ("imagenet32-dit-b-tuned", "imagenet32-dit-b"))
    assert {name: value for name, value in tuned.items() if value != paper[name]} == {
        "name": "imagenet32-dit-b-tuned",
        "description": load_recipe("imagenet32-dit-b-tuned").description,
        "network.skip": True,
        "network.local": True,
        "objective.weight": "flow",
        "repa.resolution": 224,
        "train.optimizer": "muon",
        "train.lr": 1e-3,
    }


def test_the_control_of_the_latent_recipe_is_flow_matchings_error():
    """(x - x0) / s is flow matching's velocity at its time s, so x0's error counts by s^-2, whatever the path."""
    name = "imagenet256-ddt-xl"
    (line,) = [line for line in shipped()[name].splitlines() if line.startswith("# Control:")]
    words = line.partition("# Control:")[2].partition(": ")[0].split()
    told = {option.removeprefix("--"): value for option, value in zip(words[::2], words[1::2], strict=True)}
    recipe = override(load_recipe(name), told)
    assert (recipe.objective.kind, recipe.objective.weight) == ("x0", "flow")
    schedule, t = recipe.path.build(), torch.tensor([0.01, 0.3, 0.9], dtype=torch.float64)
    s = schedule.sigma(t) / (schedule.alpha(t) + schedule.sigma(t))
    torch.testing.assert_close(WEIGHTS["flow"]("x0", t, schedule), s**-2)
