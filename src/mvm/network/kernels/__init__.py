"""GPU kernels by hand, where the compiler's own make several passes over the tokens: a file each.

layers.py has the twins that run everywhere else and say what is computed; tests/network/test_kernels.py compares them
in Triton's interpreter where Triton is installed, benchmarks/device_parity.py on a GPU. Imported on a GPU alone.
"""

from mvm.network.kernels.rotary import norm_rotate
from mvm.network.kernels.swiglu import gated

__all__ = ["gated", "norm_rotate"]
