"""Recipes: what to train, on what, how long."""

from mvm.recipes.schema import (
    FOLDER,
    RECIPE,
    DataConfig,
    PreviewConfig,
    Recipe,
    SampleConfig,
    load_recipe,
    options,
    override,
    parse_recipe,
    shipped,
    to_json,
)

__all__ = [
    "FOLDER",
    "RECIPE",
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
