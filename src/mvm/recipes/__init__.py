"""Recipes: what to train, on what, how long."""

from mvm.recipes.reading import load_recipe, options, override, parse_recipe, shipped, to_json
from mvm.recipes.schema import FOLDER, RECIPE, CodecConfig, DataConfig, PreviewConfig, Recipe, SampleConfig

__all__ = [
    "FOLDER",
    "RECIPE",
    "CodecConfig",
    "DataConfig",
    "PreviewConfig",
    "Recipe",
    "SampleConfig",
    "load_recipe",
    "options",
    "override",
    "parse_recipe",
    "shipped",
    "to_json",
]
