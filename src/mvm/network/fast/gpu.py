"""Whether kernels by hand can be had here: a GPU and Triton, which comes with torch's GPU builds."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

TRITON = find_spec("triton") is not None  # found out at import: a compiler cannot look into a search for modules


@cache
def gpu_kernels() -> ModuleType | None:
    """Return mvm.network.fast.kernels, or None where there is no GPU or no Triton."""
    if not torch.cuda.is_available() or not TRITON:
        return None
    from mvm.network.fast import kernels

    return kernels
