"""Models that only sample, in a folder or on the hub: written by `export`, read by `mvm.load`, sent by `push`."""

from mvm.published.foreign import FORMATS, Options, as_foreign, convert_decoder, is_decoder, read_tensors
from mvm.published.format import (
    CODEC,
    Config,
    check_files,
    check_recipe,
    check_tables,
    is_published,
    keep_codec,
    read_codec,
    read_config,
    read_weights,
    require_the_one,
    shipped_folder,
    shipped_models,
)
from mvm.published.source import (
    Opened,
    StoredCheckpoint,
    locate,
    open_foreign,
    open_model,
    open_published,
    open_stored,
    run_recipe,
)
from mvm.published.write import export

__all__ = [
    "CODEC", "FORMATS", "Config", "Opened", "Options", "StoredCheckpoint", "as_foreign", "check_files",
    "check_recipe", "check_tables", "convert_decoder", "export", "is_decoder", "is_published", "keep_codec",
    "locate", "open_foreign", "open_model", "open_published", "open_stored", "read_codec", "read_config",
    "read_tensors", "read_weights", "require_the_one", "run_recipe", "shipped_folder", "shipped_models",
]  # fmt: skip
