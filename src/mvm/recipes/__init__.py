"""Recipes: what to train, on what, how long."""

from mvm.recipes.reading import (
    PATHS,
    AnyRecipe,
    changed,
    load_recipe,
    located,
    options,
    override,
    parse_recipe,
    require_field_recipe,
    shipped,
    to_json,
)
from mvm.recipes.schema import (
    FOLDER,
    OWN_DATA,
    RECIPE,
    CodecConfig,
    DataConfig,
    DecoderRecipe,
    PreviewConfig,
    Recipe,
)
from mvm.settings import SampleConfig

__all__ = [
    "FOLDER",
    "OWN_DATA",
    "PATHS",
    "RECIPE",
    "AnyRecipe",
    "CodecConfig",
    "DataConfig",
    "DecoderRecipe",
    "PreviewConfig",
    "Recipe",
    "SampleConfig",
    "changed",
    "load_recipe",
    "located",
    "options",
    "override",
    "parse_recipe",
    "require_field_recipe",
    "shipped",
    "to_json",
]
