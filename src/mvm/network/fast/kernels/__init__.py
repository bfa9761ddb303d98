"""GPU kernels by hand, where the compiler's own make several passes over the tokens: a file each.

layers.py, branches.py, blocks.py and float8.py have the twins that run everywhere else and say what is computed;
tests/network/test_kernel*.py compare them in Triton's interpreter where Triton is installed,
benchmarks/device_parity.py on a GPU. Imported on a GPU alone. Inputs are copied where they are not contiguous.
"""

from mvm.network.fast.kernels.cast import rounded_both_ways
from mvm.network.fast.kernels.gated_product import gated_product, takes_gated_product
from mvm.network.fast.kernels.gelu import biased_gelu
from mvm.network.fast.kernels.local import add_local
from mvm.network.fast.kernels.parts import parted
from mvm.network.fast.kernels.residual import add_modulate, norm_modulate
from mvm.network.fast.kernels.rotary import placed
from mvm.network.fast.kernels.swiglu import gated

__all__ = [
    "add_local",
    "add_modulate",
    "biased_gelu",
    "gated",
    "gated_product",
    "norm_modulate",
    "parted",
    "placed",
    "rounded_both_ways",
    "takes_gated_product",
]
