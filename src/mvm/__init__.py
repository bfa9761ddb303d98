"""Mean Velocity Matching: one learned field drives both a reverse SDE and a deterministic ODE.

    mvm.sample(field, noise, ...)   images from any callable (x, t, condition) -> x0_hat
    mvm.load(run_or_name)           a trained model: a field, with its recipe
    mvm.bridge                      other people's models as fields, and fields as other people's models
    mvm.path, mvm.solver, mvm.oracle

Nothing heavy is imported until it is used: `import mvm` takes milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from mvm import bridge, noise, oracle, path, solver
    from mvm.model import Model, load
    from mvm.solver.sampling import sample

_LAZY = {"sample": "mvm.solver.sampling", "load": "mvm.model", "Model": "mvm.model"}
_MODULES = ("bridge", "noise", "oracle", "path", "solver")

__all__ = ["Model", "__version__", "bridge", "load", "noise", "oracle", "path", "sample", "solver"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"mvm.{name}")
    raise AttributeError(f"module 'mvm' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
