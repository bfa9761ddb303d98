"""Build the API reference of the public modules as HTML: `make docs`, or `python docs/build_api.py FOLDER`."""

import importlib
import sys
import warnings
from pathlib import Path

import mvm

MODULES = (
    "mvm",
    "mvm.path",
    "mvm.oracle",
    "mvm.noise",
    "mvm.solver",
    "mvm.edit",
    "mvm.likelihood",
    "mvm.bridge",
    "mvm.model",
    "mvm.generate",
    "mvm.published",
    "mvm.integrations.diffusers",
    "mvm.integrations.comfyui",
    "mvm.integrations.onnx",
    "mvm.metrics.distances",
    "mvm.latent",
    "mvm.recipes",
    "mvm.recipes.estimate",
)


def build(folder: Path) -> None:
    """Write the reference into a folder; anything that pdoc warns of is an error."""
    pdoc = importlib.import_module("pdoc")
    for name in mvm.__all__:
        setattr(mvm, name, getattr(mvm, name))  # names that are imported when they are used: pdoc looks for them there
    pdoc.render.configure(docformat="markdown", footer_text=f"mvm {mvm.__version__}", show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # each module without those under it, parents first
        pdoc.pdoc(*(spec for name in MODULES for spec in (name, rf"!{name}\..+")), output_directory=folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    build(target)
    print(f"wrote {target / 'index.html'}: {len(MODULES)} modules")
