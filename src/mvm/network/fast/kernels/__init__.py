"""GPU kernels by hand, where the compiler's own make several passes over the tokens: a file each.

network/layers.py, extras.py and fast/float8.py have the plain formulas, which run everywhere else;
tests/network/test_kernel*.py compare them in Triton's interpreter where Triton is installed,
benchmarks/device_parity.py on a GPU. Imported on a GPU alone. Inputs are copied where they are not contiguous.
"""

import torch
from torch import Tensor

from mvm.network.fast.kernels.gated_product import gated_product, takes_gated_product
from mvm.network.fast.kernels.gelu import biased_gelu
from mvm.network.fast.kernels.local import add_local
from mvm.network.fast.kernels.parts import parted
from mvm.network.fast.kernels.residual import add_modulate, norm_modulate
from mvm.network.fast.kernels.rotary import placed
from mvm.network.fast.kernels.swiglu import gated


def takes(x: Tensor) -> bool:
    """Return whether kernels are for x: on a GPU, where products are of 16 bits."""
    return x.is_cuda and (x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cuda"))


class Kernels:
    """Those that modules call, for modules to hold: a class goes by its name into copies and pickles of them."""

    add_local = staticmethod(add_local)
    add_modulate = staticmethod(add_modulate)
    biased_gelu = staticmethod(biased_gelu)
    gated = staticmethod(gated)
    gated_product = staticmethod(gated_product)
    norm_modulate = staticmethod(norm_modulate)
    parted = staticmethod(parted)
    placed = staticmethod(placed)
    takes = staticmethod(takes)
    takes_gated_product = staticmethod(takes_gated_product)
