"""Recipes: strict, helpful about mistakes, and the same after any round trip."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvm.data import DATA_SETS
from mvm.recipes import (
    FOLDER,
    DataConfig,
    Recipe,
    SampleConfig,
    load_recipe,
    options,
    override,
    parse_recipe,
    shipped,
    to_json,
)
from mvm.recipes.reading import from_dict, parse
from mvm.solver import SOLVERS, ClassifierFree, Internal, Interval


def to_toml(values, where=""):
    """A TOML writer small enough to trust."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"[{where}{key}]", to_toml(value, f"{where}{key}.")]
    return "\n".join(lines)


def from_toml(text):
    return parse_recipe(text, ".toml", "test.toml")


OTHER = {
    "name": "other",
    "seed": "7",
    "objective.kind": "flow",
    "path.schedule": "linear-flow",
    "path.law.name": "lam-normal",
    "path.law.mean": "-0.25",
    "network.inner_block": "2",
    "train.lr": "3e-4",
    "train.decay": "constant",
    "train.ema": "0.99,0.9",
    "train.power": "0.05,0.1",
    "data.name": "folder",
    "data.path": "somewhere/prepared images",
    "data.mirror": "true",
    "data.augment": "0.12",
    "network.dropout": "0.1",
    "engine.recompute": "0.5",
    "repa.block": "3",
    "sample.solver": "sa",
    "sample.cfg": "1.5",
    "sample.low": "0.25",
}
RECIPES = [*map(load_recipe, shipped()), override(load_recipe("digits"), OTHER), Recipe()]


def text_of(value):
    """A value as it is typed: a list of numbers is a,b."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def with_lists(values):
    """The same values as JSON has them: it knows no tuples."""
    if isinstance(values, dict):
        return {key: with_lists(value) for key, value in values.items()}
    return list(values) if isinstance(values, tuple) else values


def test_every_shipped_recipe_loads():
    baselines = [f"cifar10-{name}" for name in ("ddpm", "fm-ot", "fm-vp", "score", "scoreflow", "v", "x0")]
    imagenet = [f"imagenet32-dit-{name}" for name in ("b", "b-tuned", "l")]
    pixels = ["cifar10", *baselines, "cifar10-small", "digits", *imagenet]
    latents = [f"imagenet{side}-{stage}" for side in (256, 512) for stage in ("ddt-xl", "rae-stage1")]
    latents += ["imagenette-ddt-clip", "imagenette-ddt-s", "imagenette-rae-clip", "imagenette-rae-s"]
    assert list(shipped()) == sorted(pixels + latents)
    for name in shipped():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description
        assert recipe.data.name in DATA_SETS


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_json_round_trip(recipe):
    text = to_json(recipe)
    assert parse_recipe(text, ".json", "x") == recipe
    assert from_dict(type(recipe), json.loads(text)) == recipe
    assert json.loads(text) == with_lists(dataclasses.asdict(recipe))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_a_recipe_of_before_these_options_is_without_them(recipe):
    values = json.loads(to_json(recipe))
    wanted = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, augment=0.0))
    if isinstance(recipe, Recipe):
        wanted = dataclasses.replace(wanted, network=dataclasses.replace(recipe.network, dropout=0.0))
        del values["network"]["dropout"]
    del values["data"]["augment"]
    assert parse_recipe(json.dumps(values), ".json", "recipe.json") == wanted


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_toml_round_trip(recipe):
    assert from_toml(to_toml(dataclasses.asdict(recipe))) == recipe


def test_round_trips_keep_types():
    """A tuple comes back as a tuple, and numbers in it as floats: else equal recipes would not be the same."""
    recipe = parse_recipe(to_json(from_toml("[train]\nema = 0\npower = [0.1, 0.05]")), ".json", "x")
    assert (recipe.train.ema, recipe.train.power) == ((0.0,), (0.1, 0.05))
    assert type(recipe.train.ema) is tuple
    assert type(recipe.train.ema[0]) is float
    assert hash(recipe) == hash(from_toml("[train]\nema = [0.0]\npower = [0.1, 0.05]"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_option_can_be_given_as_it_is_shown(recipe):
    """What `mvm options` prints is what the command line takes."""
    shown = {name: text_of(value) for name, value in options(recipe).items()}
    assert override(recipe, shown) == recipe
    assert override(type(recipe)(), shown) == recipe
    for name, text in shown.items():
        assert override(recipe, {name: text}) == recipe


def test_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[train]\nsteps = 3\nlr = 1\n')
    recipe = load_recipe(str(path))
    assert (recipe.name, recipe.train.steps, recipe.train.lr) == ("mine", 3, 1.0)
    assert isinstance(recipe.train.lr, float)
    (tmp_path / "mine.json").write_text(to_json(recipe))
    assert load_recipe(str(tmp_path / "mine.json")) == recipe
    with pytest.raises(ValueError, match=r"nothere\.toml does not exist"):
        load_recipe(str(tmp_path / "nothere.toml"))


def test_unknown_recipe_suggests_one():
    with pytest.raises(ValueError, match=r"recipe='digit'.*'digits'.*cifar10, cifar10-ddpm, "):
        load_recipe("digit")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sede = 1", r"test\.toml: unknown key 'sede' \(did you mean 'seed'\?\); allowed: name, .*train"),
        ("[trainn]\nsteps = 1", r"unknown key 'trainn' \(did you mean 'train'\?\)"),
        ("[train]\nbach = 1", r"unknown key 'train\.bach' \(did you mean 'train\.batch'\?\)"),
        ("[path.law]\nmaen = 1.0", r"unknown key 'path\.law\.maen' \(did you mean 'path\.law\.mean'\?\)"),
        ("[train]\nzzzz = 1", r"unknown key 'train\.zzzz'; allowed: steps, batch"),
        ("[train]\nsteps = 1.5", r"train\.steps=1\.5 must be of type int"),
        ('[train]\nsteps = "10"', r"train\.steps='10' must be of type int"),
        ("[train]\nsteps = true", r"train\.steps=True must be of type int"),
        ("[train]\nlr = true", r"train\.lr=True must be of type float"),
        ('[train]\nlr = "2e-4"', r"train\.lr='2e-4' must be of type float"),
        ("name = 3", r"name=3 must be of type str"),
        ("train = 3", r"train=3 must be of type dict"),
        ("[train]\nlr = nan", r"train\.lr=nan"),
        ("seed = -1", r"seed=-1"),
        ('[data]\nname = "digts"', r"data\.name='digts' is unknown \(did you mean 'digits'\?\)"),
        ('[path]\nschedule = "linear-flw"', r"path\.schedule='linear-flw'.*'linear-flow'"),
        (
            '[path]\nschedule = "linear-flow"\nT = 2',
            r"path\.T=2\.0 belongs to schedule='mean-velocity'.*leave T",
        ),
        ("[path]\nT = 0", r"path\.T=0\.0 is out of range; it must be positive"),
        ("[path]\nT = inf", r"path\.T=inf is out of range"),
        ('[path.law]\nname = "uniforn"', r"law\.name='uniforn'.*'uniform'"),
        ('[sample]\nsolver = "adam"', r"solver='adam'.*'adams'"),
        ("[sample]\nnfe = 0", r"nfe=0"),
        ("[sample]\nrho = -0.5", r"rho=-0\.5"),
        ("[sample]\nlow = 0.8\nhigh = 0.6", r"interval=\[0\.8, 0\.6\]"),
        ("[sample]\ncfg = inf", r"cfg=inf is out of range"),
        ('[train]\nema = "0.9"', r"train\.ema='0\.9' must be of type float"),
        ("[train]\nema = true", r"train\.ema=True must be of type float"),
        ("[train]\nema = [0.9, [0.8]]", r"train\.ema=\[0\.8\] must be of type float"),
        ("[train]\nema = []", r"train\.ema is empty"),
        ("[train]\npower = [0.5]", r"0\.5 is out of range"),
        ("[train]\nkeep_best = true", r"train\.keep_best .*preview\.every=0 must divide train\.save_every=1000"),
        (
            "[train]\nkeep_best = true\nsave_every = 100\n[preview]\nevery = 30",
            r"preview\.every=30 must divide train\.save_every=100",
        ),
        ("[preview]\nevery = -1", r"preview\.every=-1"),
        ("[preview]\ngrid = 0", r"preview\.grid=0"),
        ("[preview]\ngrid = 64\ncount = 63", r"preview\.count=63 .* at least 64"),
        ('[engine]\nparallel = "dpd"', r"engine\.parallel='dpd' is unknown \(did you mean 'ddp'\?\)"),
        ('[engine]\nprecision = "fp16"', r"engine\.precision='fp16'.*allowed: auto, fp32, bf16"),
        ('[engine]\ncompile = "on"', r"engine\.compile='on'"),
        ('[engine]\nresident = "disk"', r"engine\.resident='disk'.*allowed: auto, device, host"),
        ("[engine]\nrecompute = 1.5", r"engine\.recompute=1\.5"),
        ("[engine]\naccumulate = 0", r"engine\.accumulate=0"),
        ('[network]\nsize = "tiny"\n[repa]\nblock = 5', r"repa\.block=5 must lie in \[0, 4\]"),
        ("[data]\nsize = 32", r"data\.size belongs to data\.name='folder'; 'digits' is known"),
        ("[data]\nclasses = 10", r"data\.classes belongs to data\.name='folder'"),
        ('[data]\nname = "folder"', r"data\.name='folder' needs data\.path, .*mvm data prepare"),
        ('[data]\nname = "folder"\npath = "x"\nchannels = -1', r"data\.channels=-1"),
        ("[data]\naugment = 1.5", r"data\.augment=1\.5 is out of range; it must lie in \[0, 1\]"),
        ("[data]\naugment = -0.1", r"data\.augment=-0\.1"),
        ("[data]\naugment = nan", r"data\.augment=nan"),
        (
            '[data]\naugment = 0.1\n[codec]\nkind = "rae"\nchannels = 4\nside = 4',
            r"data\.augment=0\.1 warps pixels, and codec\.kind='rae' has latents; set it to 0",
        ),
        ('[data]\naugment = 0.1\n[repa]\nencoder = "x"', r"data\.augment=0\.1: repa\.encoder's .*leave one of the two"),
        (
            '[data]\naugment = 0.1\n[network]\nkind = "ddt"',
            r"data\.augment=0\.1 is for network\.kind='dit'; a ddt has no input",
        ),
        ("[network]\ndropout = 1.0", r"network\.dropout=1\.0 is out of range; it must be at least 0 and less than 1"),
        ('[network]\nkind = "ddt"\ndropout = 0.1', r"network\.dropout=0\.1 is for network\.kind='dit'"),
        ('task = "decoder"\n[data]\naugment = 0.1', r"data\.augment=0\.1 is not for decoders.*set it to 0"),
        ("[train\n", r"test\.toml: "),
        ("seed = 1\nseed = 2\n", r"test\.toml: "),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(ValueError, match=words):
        from_toml(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_a_damaged_json_names_its_source(text):
    with pytest.raises(ValueError, match=r"^run/recipe\.json: "):
        parse_recipe(text, ".json", "run/recipe.json")


@pytest.mark.parametrize(
    ("text", "kind", "want"),
    [
        ("3e-4", float, 3e-4),
        ("1", float, 1.0),
        ("-2.5", float, -2.5),
        ("1e3", int, 1000),
        ("2.5E2", int, 250),
        ("7", int, 7),
        ("-7", int, -7),
        ("true", bool, True),
        ("True", bool, True),
        ("yes", bool, True),
        ("1", bool, True),
        ("false", bool, False),
        ("NO", bool, False),
        ("0", bool, False),
        ("sa", str, "sa"),
        ("3", str, "3"),
        ("", str, ""),
        ("0.5", tuple, (0.5,)),
        ("1,0.25", tuple, (1.0, 0.25)),
        (" 1, 2 ,", tuple, (1.0, 2.0)),
        ("", tuple, ()),
    ],
)
def test_parse(text, kind, want):
    got = parse("x", text, kind)
    assert got == want
    assert type(got) is kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1.5", int), ("1.5e0", int), ("1e-3", int), ("1e999", int), ("three", int), ("", int), ("fast", float),
     ("", float), ("maybe", bool), ("", bool)],
)  # fmt: skip
def test_parse_refuses(text, kind):
    with pytest.raises(ValueError, match=rf"^--train\.x {text}: a value of type {kind.__name__} is needed$"):
        parse("train.x", text, kind)


def test_parse_names_the_number_of_a_list_that_is_none():
    with pytest.raises(ValueError, match=r"^--train\.ema fast: a value of type float is needed$"):
        parse("train.ema", "0.5,fast,0.4", tuple)


@settings(max_examples=60, deadline=None)
@given(st.integers(-(10**9), 10**9), st.floats(allow_nan=False))
def test_parse_returns_what_was_printed(whole, real):
    assert parse("x", str(whole), int) == whole
    assert parse("x", repr(real), float) == real


def test_override_changes_one_option():
    recipe = load_recipe("digits")
    changed = override(recipe, {"train.lr": "3e-4", "train.steps": "1e3", "path.law.std": "2", "seed": "5"})
    before, after = options(recipe), options(changed)
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        "train.lr": 3e-4,
        "train.steps": 1000,
        "path.law.std": 2.0,
        "seed": 5,
    }
    assert options(recipe) == before
    assert override(recipe, {}) == recipe


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("train.lrr", "train.lr"),
        ("trainn.steps", "train.steps"),
        ("sample.nfee", "sample.nfe"),
        ("path.law.namee", "path.law.name"),
        ("network.widthh", "network.width"),
    ],
)
def test_unknown_override_suggests_the_nearest(name, hint):
    with pytest.raises(ValueError, match=rf"unknown option '--{name}'; did you mean --{hint}\?"):
        override(load_recipe("digits"), {name: "1"})


@pytest.mark.parametrize("name", ["train", "path.law", "train.lr.x", "qqqqqq", ""])
def test_sections_and_nonsense_are_no_options(name):
    with pytest.raises(ValueError, match=f"unknown option '--{name}'"):
        override(load_recipe("digits"), {name: "1"})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.lr", "-1", r"train\.lr=-1"),
        ("train.lr", "nan", r"train\.lr=nan"),
        ("train.steps", "0", r"train\.steps=0"),
        ("sample.solver", "sb", r"solver='sb'"),
        ("network.width", "97", "width"),
        ("seed", "-1", "seed=-1"),
    ],
)
def test_overrides_are_checked(name, text, words):
    with pytest.raises(ValueError, match=words):
        override(load_recipe("digits"), {name: text})


@pytest.mark.parametrize(
    "changes",
    [
        {"network.width": "40", "network.heads": "5"},  # 40 is no multiple of 4 * 4, the heads it had before
        {"network.inner_block": "5", "network.depth": "6"},
        {"network.depth": "6", "network.inner_block": "5"},
        {"path.schedule": "linear-flow", "objective.kind": "flow"},  # kind u belongs to the mean-velocity path
        {"objective.kind": "flow", "path.schedule": "linear-flow"},
    ],
    ids=str,
)
def test_overrides_are_judged_together(changes):
    """A valid recipe may be reached through an invalid one: the order on the command line must not matter."""
    recipe = override(load_recipe("digits"), changes)
    found = options(recipe)
    assert all(str(found[name]) == text for name, text in changes.items())


def test_a_known_set_has_its_own_shape_and_classes():
    data = DataConfig("cifar10")
    assert (data.shape, data.class_names[0], len(data.class_names)) == ((3, 32, 32), "airplane", 10)
    assert data.folder == Path("data/cifar10")
    assert DataConfig("cifar10", path="elsewhere").folder == Path("elsewhere")


def test_a_folder_has_the_shape_and_classes_it_is_given():
    data = DataConfig(FOLDER, "elsewhere", channels=1, size=16, classes=3)
    assert (data.shape, data.class_names) == ((1, 16, 16), ("0", "1", "2"))
    assert data.folder == Path("elsewhere")


def test_options_name_every_leaf():
    def leaves(values, where=""):
        for key, value in values.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{where}{key}.")
            else:
                yield f"{where}{key}"

    recipe = load_recipe("digits")
    assert list(options(recipe)) == list(leaves(dataclasses.asdict(recipe)))
    assert options(recipe)["train.steps"] == 1500


def test_guidance_of_a_sample_config():
    assert SampleConfig().guidance() == ()
    (rule,) = SampleConfig(cfg=1.5, low=0.6, high=0.8).guidance()
    assert isinstance(rule, ClassifierFree)
    assert SampleConfig(internal=1.45).guidance() == (Internal(1.45),)
    assert SampleConfig(cfg=2.0, internal=1.45, low=0.5).guidance() == (
        Internal(1.45, interval=Interval(0.5, 1.0)),
        ClassifierFree(2.0, interval=Interval(0.5, 1.0)),
    )
    assert (rule.scale, rule.interval.low, rule.interval.high) == (1.5, 0.6, 0.8)
    assert all(SampleConfig(solver=name).solver == name for name in SOLVERS)
    with pytest.raises(ValueError, match="rho=nan"):
        SampleConfig(rho=math.nan)


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().seed = 3
