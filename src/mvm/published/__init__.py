"""Models that only sample, in a folder or on the hub: written by `export`, read by `mvm.load`, sent by `push`."""

from mvm.published.format import (
    Config,
    check_tables,
    is_published,
    read_codec,
    read_config,
    read_weights,
    require_the_one,
    shipped_folder,
    shipped_models,
)
from mvm.published.source import Opened, Stored, locate, open_model, open_published, open_stored, run_recipe
from mvm.published.write import export

__all__ = [
    "Config",
    "Opened",
    "Stored",
    "check_tables",
    "export",
    "is_published",
    "locate",
    "open_model",
    "open_published",
    "open_stored",
    "read_codec",
    "read_config",
    "read_weights",
    "require_the_one",
    "run_recipe",
    "shipped_folder",
    "shipped_models",
]
