"""Mean Velocity Matching: one learned field drives both a reverse SDE and a deterministic ODE.

    mvm.sample(field, noise, ...)       images from any callable (x, t, condition) -> x0_hat
    mvm.loss(network, x0, condition)    the training loss of any callable (x, t, condition)
    mvm.wrap(network)                   the same as a field, for mvm.sample
    mvm.load(run_or_name)               a trained model: a field, with its recipe
    mvm.generate(run_or_name, num=16)   its images by its own settings: mvm.load(run_or_name).generate(num=16)
    mvm.train(network, dataset)         a trained model: any network, any dataset
    mvm.train(recipe, run)              the same from a recipe, by name or as an object
    mvm.likelihood(field, x)            log p(x); mvm.likelihood.bits_per_dim, encode, decode
    mvm.edit                            image-to-image, inpainting, super-resolution, deblurring, with any field
    mvm.bridge                          other people's models as fields, and fields as other people's models
    mvm.path, mvm.solver, mvm.oracle

Nothing heavy is imported until it is used: `import mvm` takes milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from mvm import bridge, edit, noise, oracle, path, solver
    from mvm.generate import GenerateModule as _Generate
    from mvm.likelihood import LikelihoodModule as _Likelihood
    from mvm.model import Model, load
    from mvm.objective.matching import loss
    from mvm.solver.sampling import sample
    from mvm.training.loop import train
    from mvm.wrapped import wrap

    # modules that may be called, which type checkers would not know
    generate: _Generate  # ty: ignore[invalid-declaration]
    likelihood: _Likelihood  # ty: ignore[invalid-declaration]

_LAZY = {
    "Model": "mvm.model",
    "load": "mvm.model",
    "loss": "mvm.objective.matching",
    "sample": "mvm.solver.sampling",
    "train": "mvm.training.loop",
    "wrap": "mvm.wrapped",
}
_MODULES = ("bridge", "edit", "generate", "likelihood", "noise", "oracle", "path", "solver")

__all__ = [
    "Model",
    "__version__",
    "bridge",
    "edit",
    "generate",
    "likelihood",
    "load",
    "loss",
    "noise",
    "oracle",
    "path",
    "sample",
    "solver",
    "train",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"mvm.{name}")
    raise AttributeError(f"module 'mvm' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
