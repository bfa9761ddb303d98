"""Recipes as text: TOML and JSON into frozen dataclasses and back; unknown keys are errors."""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from importlib.resources import files
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from mvm.network import DDTConfig, DiTConfig, OwnConfig
from mvm.network.own import is_own
from mvm.options import choose
from mvm.recipes.docs import hint, tables, unknown_option
from mvm.recipes.schema import TASK, DecoderRecipe, Recipe
from mvm.untrusted import MOST_RECIPE, cut, parse_json, read_text

BASE = "base"  # in TOML: the shipped recipe that a recipe changes
KIND = "kind"  # in a table that has variants: which one it is
LONGEST = 2_000  # letters of an error: all options of a table fit
NETWORKS: dict[str, type] = {"dit": DiTConfig, "ddt": DDTConfig}
VARIANTS: dict[Any, dict[str, type]] = {DiTConfig | OwnConfig: NETWORKS}
ARGUMENTS = "network.arguments."  # begins the options of an own network's class

AnyRecipe = Recipe | DecoderRecipe
TASKS: dict[str, type[Recipe] | type[DecoderRecipe]] = {kind.task: kind for kind in (Recipe, DecoderRecipe)}

C = TypeVar("C")
R = TypeVar("R", bound=Recipe | DecoderRecipe)
# lists in TOML, "a,b" on the command line
LISTS: dict[Any, type] = {tuple[float, ...]: float, tuple[int, ...]: int, tuple[str, ...]: str, tuple: float}
# Options that name files of this machine. A run keeps them absolute, so that it can be used from any folder.
PATHS = (
    *("data.path", "codec.path", "codec.encoder", "codec.latents", "condition.encoder", "repa.encoder"),
    *("encoder.name", "reconstruction.lpips_weights"),
)


def _checked(option: str, value: Any, kind: type) -> Any:
    """Return value as `kind`; int counts as float, one number as a list of one, nothing else is bent."""
    if kind in LISTS:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_checked(option, item, LISTS[kind]) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{option}={cut(value)} is beyond all numbers of type float") from None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        named = f", one of the names in: mvm options {option}" if kind is str and isinstance(value, bool) else ""
        raise ValueError(f"{option}={cut(repr(value))} must be of type {kind.__name__}{named}")
    return value


def from_dict(cls: type[C], values: Mapping[str, Any], where: str = "", known: Iterable[str] = ()) -> C:
    """Return a dataclass from nested mappings; an unknown key is an error with the nearest of its table or `known`."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'a recipe'} must be a table of options; got {cut(repr(values))}")
    hints = get_type_hints(cls)
    kinds = {entry.name: hints[entry.name] for entry in fields(cls)}  # ty: ignore[invalid-argument-type]
    built: dict[str, Any] = {}
    for key, value in values.items():
        if key not in kinds:
            likely = hint(f"{where}{key}", [*(f"{where}{kind}" for kind in kinds), *known])
            raise ValueError(f"unknown key '{where}{key}'{likely}; allowed: {', '.join(kinds)}")
        if is_dataclass(kinds[key]) or kinds[key] in VARIANTS:
            table = _checked(f"{where}{key}", value, dict)
            kind = kinds[key]
            if kind in VARIANTS:
                name = table.get(KIND, next(iter(VARIANTS[kind])))
                kind = OwnConfig if is_own(name) else choose(f"{where}{key}.{KIND}", name, VARIANTS[kind])
            built[key] = from_dict(kind, table, f"{where}{key}.", known)
        else:
            built[key] = _checked(f"{where}{key}", value, kinds[key])
    return cls(**built)


def recipe_of(values: Mapping[str, Any]) -> AnyRecipe:
    """Return the recipe of a table: its `task` says of which kind."""
    table = values if isinstance(values, Mapping) else {}
    kind = choose(TASK, _checked(TASK, table.get(TASK, Recipe.task), str), TASKS)
    own = {name: value for name, value in table.items() if name != TASK}
    return from_dict(kind, own if table else values, known=options(kind()))


def to_json(recipe: AnyRecipe) -> str:
    """Return the recipe as JSON, every default written out."""
    return json.dumps(asdict(recipe), indent=2) + "\n"


def options(config: Any) -> dict[str, Any]:
    """Return every leaf option of a (nested) dataclass by its dotted name; a recipe's task is none."""
    leaves = {}
    for where, table in tables(config):
        for entry in fields(table):
            if entry.name != TASK and not is_dataclass(value := getattr(table, entry.name)):
                leaves[f"{where}.{entry.name}".lstrip(".")] = value
    return leaves


def every_option() -> dict[str, Any]:
    """Return the options of recipes of all kinds, with their defaults."""
    return options(DecoderRecipe()) | options(Recipe(network=DDTConfig())) | options(Recipe())


_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(option: str, text: str, kind: type) -> Any:
    """Return text as the option's type; 1e3 is a whole number, 'true' a bool, 'a,b' a list of numbers."""
    if kind in LISTS:
        return tuple(parse(option, part, LISTS[kind]) for part in text.split(",") if part.strip())
    try:
        if kind is bool:
            return _TRUTH[text.lower()]
        if kind is int and "e" in text.lower() and float(text).is_integer():
            return int(float(text))
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"--{option} {text}: a value of type {kind.__name__} is needed") from None


def _kind(config: Any, name: str) -> Any:
    """Return the type of an option: its value's; of a list, which may be empty, the declared one."""
    *sections, last = name.split(".")
    table = reduce(getattr, sections, config)
    kind = type(getattr(table, last))
    return get_type_hints(type(table))[last] if kind is tuple else kind


def override(recipe: R, changes: Mapping[str, str]) -> R:
    """Return the recipe with dotted options changed, e.g. {"train.lr": "3e-4"}; they are judged together."""
    kind = f"network.{KIND}"
    if kind in changes and kind in options(recipe):  # first, so that the options of that kind are known
        tables = asdict(recipe)
        if is_own(changes[kind]) != is_own(tables["network"][KIND]):
            tables["network"] = {}
        tables["network"] |= {KIND: changes[kind]}
        recipe = from_dict(type(recipe), tables)
    known, parsed = options(recipe), dict[str, Any]()
    for name, text in changes.items():
        if name.startswith(ARGUMENTS) and ARGUMENTS.rstrip(".") in known:
            parsed[name] = _argument(text)
        elif name not in known:
            raise ValueError(unknown_option(name, known))
        else:
            parsed[name] = parse(name, text, _kind(recipe, name))
    return changed(recipe, parsed)


def changed(recipe: R, changes: Mapping[str, Any]) -> R:
    """Return the recipe with dotted options changed to values of their types; they are judged together."""
    values = asdict(recipe)
    for name, value in changes.items():
        *sections, last = name.split(".")
        reduce(getitem, sections, values)[last] = value
    return from_dict(type(recipe), values)


def _argument(text: str) -> int | float | bool | str:
    """Return an argument of an own network's class as TOML has it: 64, 0.5, true; anything else is text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool | str) else text


def located(recipe: R) -> R:
    """Return the recipe with absolute paths where the files are there; hub ids and names stay as they are."""
    given = {name: value for name, value in options(recipe).items() if name in PATHS and value}
    return override(recipe, {name: str(Path(v).resolve()) for name, v in given.items() if os.path.exists(v)})


def require_field_recipe(recipe: AnyRecipe, source: str) -> Recipe:
    """Return the recipe of a field, which can be sampled; one of another task is refused."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{source} is of task '{recipe.task}': only a field can be sampled or timed")
    return recipe


def shipped() -> dict[str, str]:
    """Return the recipes in the package: name -> TOML text."""
    recipes = (entry for entry in files("mvm.recipes").iterdir() if entry.name.endswith(".toml"))
    return dict(sorted((entry.name.removesuffix(".toml"), entry.read_text(encoding="utf-8")) for entry in recipes))


def load_recipe(name_or_file: str) -> AnyRecipe:
    """Return a shipped recipe by name, or one read from a .toml or .json file."""
    path = Path(name_or_file)
    if path.suffix in (".toml", ".json"):
        if not path.is_file():
            raise ValueError(f"recipe file {path} does not exist")
        return parse_recipe(read_text(path), path.suffix, str(path))
    return parse_recipe(choose("recipe", name_or_file, shipped()), ".toml", name_or_file)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of both, option by option; `above` wins."""
    both = {key for key in above if isinstance(above[key], dict) and isinstance(below.get(key), dict)}
    return {**below, **above, **{key: _merged(below[key], above[key]) for key in both}}


def _with_base(values: dict[str, Any], seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a recipe's tables on top of those of the shipped recipe it names as `base`, and so on."""
    base = values.pop(BASE, None)
    if base is None:
        return values
    if base in seen:
        raise ValueError(f"{BASE}='{base}': these recipes stand on each other: {', '.join(seen)}")
    below = tomllib.loads(choose(BASE, _checked(BASE, base, str), shipped()))
    if isinstance(network := values.get("network"), dict) and is_own(network.get(KIND)):
        below.pop("network", None)  # the options of another kind
    return _merged(_with_base(below, (*seen, base)), values)


def parse_recipe(text: str, suffix: str, source: str) -> AnyRecipe:
    """Return the recipe in TOML or JSON text; errors name the source. TOML may name a shipped recipe as its base."""
    try:
        return recipe_of(_with_base(_parse_toml(text)) if suffix == ".toml" else parse_json(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: no whole JSON ({error}); restore that file from a copy") from None
    except (ValueError, TypeError, OverflowError) as error:  # TOML and JSON errors are ValueErrors
        raise ValueError(f"{source}: {cut(error, LONGEST)}") from None


def _parse_toml(text: str) -> dict[str, Any]:
    if sum(len(line) for line in text.split("\n") if not line.startswith("#")) > MOST_RECIPE:
        raise ValueError(f"larger than {MOST_RECIPE:,} letters, which no recipe is")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested") from None
